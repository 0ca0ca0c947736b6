"""Operators of an NPU that multiply or reduce, for which there is no batch-invariant form: each refuses by its name."""

import re
from collections.abc import Callable, Iterator

import torch

from ..errors import NotCovered
from ..ops.common.native_kernels import exists, keep

ATEN = (
    "_cdist_forward",
    "_conv_depthwise2d",
    "_convolution",
    "_embedding_bag",
    "_embedding_bag_forward_only",
    "_foreach_norm.Scalar",
    "_masked_softmax",
    "_native_batch_norm_legit",
    "_native_multi_head_attention",
    "_pdist_forward",
    "_scaled_grouped_mm",
    "_scaled_mm",
    "_slow_conv2d_forward",
    "_transform_bias_rescale_qkv",
    "batch_norm_gather_stats_with_counts",
    "batch_norm_stats",
    "conv_tbc",
    "convolution",
    "convolution_backward",
    "convolution_overrideable",
    "cumprod",
    "cumprod.out",
    "matmul_backward",
    "native_batch_norm",
    "native_batch_norm_backward",
    "native_group_norm",
    "native_group_norm_backward",
    "native_layer_norm_backward",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "norm.ScalarOpt_dim_dtype",
    "norm.ScalarOpt_dtype",
    "prod",
    "prod.dim_int",
    "prod.int_out",
    "renorm",
    "slow_conv3d_forward",
    "slow_conv_dilated2d",
    "slow_conv_transpose2d",
)
"""Refused for floating-point operands; integers multiply and add exactly in any order."""

LOSSES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "mse_loss",
    "nll_loss2d_forward",
    "nll_loss_forward",
    "smooth_l1_loss",
    "soft_margin_loss",
)
"""Refused where they reduce over the batch; without a reduction they are elementwise."""

OWN_NAMESPACES = ("npu", "atb")
"""Where torch_npu keeps operators that PyTorch has not."""
_REDUCES = re.compile(
    r"attention|matmul|bmm|gmm|(^|_)mm(_|$)|linear|softmax|norm|conv(?!ert)|ffn|lstm|gru|cross_entropy|mla_prolog|nsa_|"
    r"mhc_|lightning_indexer|delta_rule|moe_(distribute_combine|finalize|gating|token_unpermute)|top_k_top_p"
)
_ONLY_PREPARES = re.compile(r"workspace|infer_output|preprocess")


def reduces(name: str) -> bool:
    """Whether an operator of torch_npu, by its name without the namespace, multiplies matrices or reduces."""
    return bool(_REDUCES.search(name)) and not _ONLY_PREPARES.search(name)


def _refuse(name: str, why: str, what_to_do: str) -> NotCovered:
    return NotCovered(f"the operator {name}", why, what_to_do)


def _refusing(name: str, key: str) -> Callable[..., object]:
    native = keep(name, key)

    def refuse(*args: object, **kwargs: object) -> object:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if tensors and not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
            return native(*args, **kwargs)
        raise _refuse(f"aten::{name}", "torch_npu's kernel may add in an order that follows the batch", "leave it out")

    return refuse


def _without_reduction(name: str, key: str) -> Callable[..., object]:
    native = keep(name, key)
    index = [argument.name for argument in getattr(torch.ops.aten, name).default._schema.arguments].index("reduction")

    def loss(*args: object, **kwargs: object) -> object:
        chosen = kwargs.get("reduction", args[index] if index < len(args) else 1)
        if chosen != 0:
            raise _refuse(
                f"aten::{name} with a reduction", "torch_npu's kernel adds the batch", "pass reduction='none' and sum"
            )
        return native(*args, **kwargs)

    return loss


def of_aten(key: str) -> Iterator[tuple[str, Callable[..., object]]]:
    """(operator, function that refuses) for those that have a kernel at a dispatch key."""
    for names, function in ((ATEN, _refusing), (LOSSES, _without_reduction)):
        for name in names:
            if exists(f"aten::{name}", key):
                yield name, function(name, key)


def of_namespace(namespace: str, covered: frozenset[str], key: str) -> Iterator[tuple[str, Callable[..., object]]]:
    """(operator, function that refuses) for every operator of a namespace that reduces and is not ``covered``."""

    def refusing(name: str) -> Callable[..., object]:
        def refuse(*args: object, **kwargs: object) -> object:  # noqa: ARG001 - any operator's
            raise _refuse(f"{namespace}::{name}", "it has no batch-invariant form", "use PyTorch's own operators")

        return refuse

    for qualified in torch._C._dispatch_get_all_op_names():
        owner, _, name = qualified.partition("::")
        base = name.partition(".")[0]
        wanted = owner == namespace and base not in covered and reduces(base)
        if wanted and exists(qualified, key):
            yield name, refusing(name)
