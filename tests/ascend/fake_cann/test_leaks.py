"""With the real torch_npu and its dispatcher, no matmul or reduction reaches a kernel of CANN while the mode is on.

Under torch_npu lie fakes of CANN that compute nothing and log which operator was launched: this proves where calls
go, and no value. ``make test-npu-fake-cann`` makes the environment; elsewhere these tests are skipped.
"""

import ctypes
import os
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from tests.ascend.fake_cann import implementations
from tests.ascend.fake_cann.implementations import CALLS
from tests.ascend.op_variants import MATMULS, REDUCTIONS, Operands, OpVariant
from vllm_batch_invariant import batch_invariant_mode, disable_batch_invariant_mode, enable_batch_invariant_mode
from vllm_batch_invariant.ascend import aten, refused
from vllm_batch_invariant.ascend.integration import install as ascend
from vllm_batch_invariant.errors import NotCovered

if find_spec("torch_npu") is None or "NPU_FAKE_CANN" not in os.environ:
    pytest.skip("needs torch_npu over fakes of CANN: make test-npu-fake-cann", allow_module_level=True)

import torch_npu  # noqa: F401

DTYPES = (torch.float32, torch.bfloat16)
FUSED: dict[str, OpVariant] = {
    "npu_rms_norm": lambda o: torch.ops.npu.npu_rms_norm(o.x, o.v, 1e-6)[0],
    "npu_gemma_rms_norm": lambda o: torch.ops.npu.npu_gemma_rms_norm(o.x, o.v, 1e-6)[0],
    "npu_add_rms_norm": lambda o: torch.ops.npu.npu_add_rms_norm(o.x, o.x, o.v, 1e-6)[0],
    "npu_linear": lambda o: torch.ops.npu.npu_linear(o.x, o.weight, o.bias),
    "npu_bmmV2": lambda o: torch.ops.npu.npu_bmmV2(o.x3, o.w3, []),
}
VARIANTS = MATMULS | REDUCTIONS | FUSED
ONLY_ELEMENTWISE = {"cumsum", "cumsum, dim 0", "cumsum, out", "cumsum_"}
EXACT = {"nanmean": {"aclnnReduceSum"}}
"""Native reductions of a variant that add integers."""
# fmt: off
ELEMENTWISE = {
    "Abs", "Add", "Adds", "All", "Amax", "Cast", "Cat", "ClampMin", "Div", "Divs", "EqScalar", "Exp", "InplaceAdd",
    "InplaceAdds", "InplaceCopy", "InplaceFillScalar", "InplaceLogicalNot", "InplaceMaskedFillScalar", "InplaceOne",
    "InplaceZero", "IsNegInf", "Log", "Mul", "Muls", "NeTensor", "Neg", "PowTensorScalar", "Reciprocal", "Rsqrt",
    "SWhere", "Sqrt", "Sub", "Tril", "XLogYTensor",
}
# fmt: on
"""Operators of CANN, without "aclnn", that copy, compute element by element, or take a maximum."""

launched = ctypes.CDLL("libascendcl.so")
launched.fake_launched.restype = ctypes.c_char_p


@pytest.fixture(autouse=True, scope="module")
def operations() -> None:
    implementations.install()


def operands(dtype: torch.dtype) -> Operands:
    on_device = Operands(lambda tensor: tensor.to(dtype).to("npu"))
    for name in ("x", "w", "weight", "bias", "added", "v", "x3", "w3", "added3", "heads", "form", "column"):
        getattr(on_device, name)
    return on_device


def launches(call: Callable[[], object]) -> set[str]:
    """The operators of CANN that a call launches."""
    torch.npu.synchronize()
    launched.fake_launched_clear()
    CALLS.clear()
    call()
    torch.npu.synchronize()
    return set(launched.fake_launched().decode().split(",")) - {""}


def leaks(found: set[str]) -> set[str]:
    return {name for name in found if name.removeprefix("aclnn") not in ELEMENTWISE}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_a_variant_leaks_to_cann_without_the_mode_and_not_with_it(variant: str, dtype: torch.dtype) -> None:
    on_device = operands(dtype)
    before = launches(lambda: VARIANTS[variant](on_device))
    with batch_invariant_mode():
        during = launches(lambda: VARIANTS[variant](on_device))
        called = list(CALLS)
    assert leaks(before), "nothing to replace: this variant proves nothing"
    assert leaks(during) - EXACT.get(variant, set()) == set()
    assert called or variant in ONLY_ELEMENTWISE
    assert launches(lambda: VARIANTS[variant](on_device)) == before


@pytest.mark.parametrize("variant", ["@", "matmul, 3-d", "linear, 3-d, bias", "attention", "softmax", "rms_norm"])
def test_a_gradient_leaks_to_cann_without_the_mode_and_not_with_it(variant: str) -> None:
    on_device = operands(torch.float32)

    def gradient() -> None:
        leaf = on_device.heads if variant == "attention" else on_device.x3 if "3-d" in variant else on_device.x
        leaf.grad = None
        VARIANTS[variant](on_device).sum().backward()

    for leaf in (on_device.x, on_device.x3, on_device.heads):
        leaf.requires_grad_()
    assert leaks(launches(gradient))
    with batch_invariant_mode():
        assert leaks(launches(gradient)) == set()
        assert CALLS


@torch.inference_mode()
def test_a_small_transformer_leaks_nothing() -> None:
    x = torch.zeros(2, 6, 16, dtype=torch.bfloat16).to("npu")
    weights = [torch.zeros(16, 16, dtype=torch.bfloat16).to("npu") for _ in range(6)]
    scale = torch.zeros(16, dtype=torch.bfloat16).to("npu")

    def block() -> torch.Tensor:
        h = F.layer_norm(F.rms_norm(x, (16,), scale), (16,), scale, scale)
        q, k, v = (F.linear(h, weight, scale).view(2, 6, 2, 8).transpose(1, 2) for weight in weights[:3])
        h = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 6, 16) @ weights[3]
        h = h + F.relu(h @ weights[4]) @ weights[5]
        return torch.log_softmax(h.float(), -1).cumsum(-1)

    assert {"aclnnMatmul", "aclnnLayerNorm", "aclnnCumsum"} <= leaks(launches(block))
    with batch_invariant_mode():
        assert leaks(launches(block)) <= {"aclnnRelu"}


def test_every_composite_that_torch_npu_replaces_is_known() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    replaced = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has_kernel(name, aten.KEY) and has_kernel(name, "CompositeImplicitAutograd")
    }
    # fmt: off
    moves_or_maps_elements = {
        "__ior__.Scalar", "__ior__.Tensor", "_pad_packed_sequence", "argsort", "argsort.stable", "contiguous",
        "fft_fftshift", "fft_ifftshift", "fill_diagonal_", "flatten_dense_tensors", "isclose", "isfinite",
        "log_sigmoid", "log_sigmoid.out", "max.out", "min.out", "mish_backward", "one_hot",
        "repeat_interleave.self_Tensor", "repeat_interleave.self_int", "silu_backward", "where",
    }
    left_to_torch_npu = {
        "affine_grid_generator_backward", "conv_tbc_backward", "inverse", "inverse.out", "linalg_cholesky",
        "linalg_cholesky.out", "multilabel_margin_loss", "multilabel_margin_loss.out", "slogdet", "stft",
    }
    # fmt: on
    handled = {*aten.DECOMPOSED, "linear", "scaled_dot_product_attention"}
    assert replaced - handled == moves_or_maps_elements | left_to_torch_npu


def test_fused_operators_that_reduce_refuse_by_name_and_others_are_left_alone() -> None:
    x = torch.zeros(2, 4, 2, 16, dtype=torch.bfloat16).to("npu")
    with batch_invariant_mode():
        with pytest.raises(NotCovered, match="the operator npu::npu_fusion_attention: "):
            torch.ops.npu.npu_fusion_attention(x, x, x, 2, "BSND")
        with pytest.raises(NotCovered, match="the operator npu::npu_fused_infer_attention_score: "):
            torch.ops.npu.npu_fused_infer_attention_score(x, x, x, num_heads=2, input_layout="BSND")
        with pytest.raises(NotCovered, match="the operator aten::convolution"):
            F.conv1d(x[:, 0], x[:, 0])
        assert launches(lambda: torch.ops.npu.npu_swiglu(x, -1)) == {"aclnnSwiGlu"}
    assert leaks(launches(lambda: torch.ops.npu.npu_fusion_attention(x, x, x, 2, "BSND"))) != set()
    for name in (
        "npu_rotary_mul",
        "npu_scatter_pa_kv_cache",
        "npu_format_cast",
        "npu_dynamic_quant",
        "npu_moe_init_routing",
    ):
        assert not refused.reduces(name), name
    for name in (
        "npu_all_gather_base_mm",
        "npu_rms_norm_backward",
        "npu_linear_backward",
        "npu_prompt_flash_attention",
    ):
        assert refused.reduces(name), name


@torch.inference_mode()
def test_what_vllm_ascend_has_registered_is_found_and_left_to_it_and_its_gaps_do_not_leak() -> None:
    on_device, served = operands(torch.bfloat16), []
    own_mode = torch.library.Library("aten", "IMPL")

    shape_of = {
        "mm": lambda a, b: (a.shape[0], b.shape[1]),
        "bmm": lambda a, b: (*a.shape[:2], b.shape[2]),
        "_softmax": lambda x, dim, _: x.shape,
    }

    def serving(name: str) -> Callable[..., torch.Tensor]:
        return lambda *args: served.append(name) or args[0].new_empty(shape_of[name](*args))

    for name in shape_of:  # as vllm-ascend does it: under the slot's other name
        own_mode.impl(f"aten::{name}", serving(name), "NPU")
    external_ops = ascend.registered(own_mode) & ascend.EXTERNAL_OPS
    assert external_ops == {"mm", "bmm"}
    enable_batch_invariant_mode(external_ops)
    try:
        for variant in VARIANTS:
            served.clear()
            assert leaks(launches(lambda: VARIANTS[variant](on_device))) - EXACT.get(variant, set()) == set()  # noqa: B023
            assert CALLS or served or variant in ONLY_ELEMENTWISE, variant
            assert served == {"@": ["mm"], "mm": ["mm"], "bmm": ["bmm"], "softmax": []}.get(variant, served)
    finally:
        disable_batch_invariant_mode()
        own_mode._destroy()
