"""Experts of 16 bits that vLLM quantises to int8 while it loads them, with the operation in the place of its kernels.

Codes and the scale of each row stand for a matrix (:data:`...ops.formats.eight.INT8`), and what is computed are the
products with that matrix. vLLM's method makes the codes, of all workers' parts of a row; as no kernel reads them, the
matrix takes the place of what was loaded, and codes and scales are let go.
"""

from typing import Any

import torch

from ...errors import NotCovered
from ...ops.formats.eight import INT8
from ...ops.moe import StoredExperts
from ..reviews import patch_points
from ..reviews.patch_points import PatchPoint
from . import fp8
from .experts import BatchInvariantExperts, CpuExperts, CudaExperts
from .quantised_experts import MOE, ORACLES, PRODUCTS, make_without_kernel, no_kernel, refuse_flaw

METHOD = PatchPoint((f"{MOE}.online.int8",), "Int8OnlineMoEMethod")
TABLE = PatchPoint((f"{MOE}.online.base",), "_ONLINE_MOE_METHODS")
"""Methods of experts by what they are quantised to."""
OLDER_NAME = PatchPoint((f"{MOE}.experts_int8",), METHOD.attribute)
"""Where the configuration of ``experts_int8`` has it."""
_ASLEEP = {"select_int8_moe_backend": no_kernel(PatchPoint((f"{ORACLES}.int8",), "Int8MoeBackend"), "TRITON")}
_DONE = "_already_called_process_weights_after_loading"
"""Attribute of a layer that is quantised; vLLM removes it before it processes weights that come again."""


class OnlineExperts(BatchInvariantExperts):
    """What ours has in the place of vLLM's method for them: its first base."""

    def __init__(self, *, moe: Any) -> None:
        make_without_kernel(self, METHOD, _ASLEEP, moe=moe)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: what vLLM would tell a kernel of its own."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """As that of experts that are not quantised, of the matrices."""
        if layer.w13_weight.is_meta or getattr(layer, _DONE, False):
            return
        _check_whole(layer)
        self._quantise(layer)
        setattr(layer, _DONE, True)
        fp8.quantised_here.add(layer)
        super().process_weights_after_loading(layer)

    def _quantise(self, layer: Any) -> None:
        """Have the matrices of codes and scales in the place of what was loaded."""
        if getattr(self, "requantization_source", None) is not None:
            raise NotCovered(
                f"experts of {layer.layer_name} that are quantised twice",
                "nobody has compared them",
                "serve the checkpoint without --quantization",
            )
        loaded = {product: getattr(layer, f"{product}_weight") for product in PRODUCTS}
        held = {product: weight.data for product, weight in loaded.items()}
        of_vllm: Any = self
        of_vllm._quantize_weights(layer)
        for product, weight in loaded.items():
            codes, scales = (getattr(layer, f"{product}_{name}").data for name in ("weight", "scale"))
            codes.masked_fill_((scales == 0)[..., None], 0)  # of 0 / 0, which devices convert differently
            made = StoredExperts(INT8, (codes, scales[..., None].contiguous()), held[product].dtype)
            refuse_flaw(made, f"{product} of {layer.layer_name}")
            weight.data = made.matrices(held[product])  # a newer vLLM has given the codes to the same parameter
            delattr(layer, f"{product}_scale")
            layer.register_parameter(f"{product}_weight", weight)
            fp8.refuse_unasked(weight, layer.layer_name)


def _check_whole(layer: Any) -> None:
    """Refuse a layer of which vLLM's loaders have seen a part: what they have not written has no value."""
    info = patch_points.RELOAD_STATE.get()(layer)
    if not info.can_load() or info.load_numel >= info.load_numel_total:
        return
    if info.load_numel == 0 and patch_points.CURRENT_CONFIG.get()().load_config.load_format == "dummy":
        return
    raise NotCovered(
        f"{info.load_numel} of {info.load_numel_total} elements of the experts of {layer.layer_name}, quantised while "
        "they are loaded",
        "the others are missing, or their model copies them past vLLM's loaders",
        "serve a checkpoint that is whole, or leave --quantization out",
    )


class OnlineCpuExperts(OnlineExperts, CpuExperts):
    """On a CPU."""


class OnlineCudaExperts(OnlineExperts, CudaExperts):
    """On a GPU."""


def install_cpu() -> None:
    """Have experts that are quantised while they are loaded computed by ours; in exact arithmetic ours refuse."""
    _install(OnlineCpuExperts)


def install_cuda() -> None:
    """Have experts that are quantised while they are loaded computed by ours; in exact arithmetic ours refuse."""
    _install(OnlineCudaExperts)


def _install(kind: type[OnlineExperts]) -> None:
    """Put ours where vLLM's configurations find the method, which they may have done before."""
    points = METHOD, OLDER_NAME, TABLE
    if not all(point.is_there() for point in points) or issubclass(method := METHOD.get(), OnlineExperts):
        return
    ours = type(method.__name__, (kind, method, torch.nn.Module), {"__module__": __name__})
    for point in (METHOD, OLDER_NAME):
        point.put(ours)
    table = TABLE.get()
    TABLE.put({key: ours if found is method else found for key, found in table.items()})
