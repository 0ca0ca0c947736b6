"""A whole model in a Hopper's usual arithmetic: the logits that an H100 or H200 computes, from weights of 16 bits or
codes of e4m3 in blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import NotCovered
from ..exact import definition as exact
from ..exact.decoder import Decoder
from ..exact.definition import Floats
from ..exact.families import SLIDING, problem_of, rope_type, rotary_embedding
from ..moe import MoeReduction
from ..norm.reduction import NormReduction
from ..quantise import quantise
from ..scaled_linear import E4M3, GROUP, WGMMA, ScaledLinearReduction, scaled_linear
from ..softmax.reduction import SoftmaxReduction
from . import confirmed, definition, sampling
from .tables import Tables

ARCHITECTURES = (
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
    "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
)  # fmt: skip
HEAD_SIZES = (64, 128, _LARGE_HEAD := 256)
FP8_BLOCKS = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP], "scale_fmt": None,
}  # fmt: skip
"""Of a checkpoint whose linear layers are codes of e4m3 in blocks."""
PRODUCTS = ScaledLinearReduction.of(GROUP, torch.bfloat16, E4M3, True, WGMMA)
"""Of layers whose weights are codes."""
_REMEDY = "verify with an engine"
_LINEAR = "linear"
"""A type of rotary embeddings."""
_OF_EXPERTS = ".mlp.experts."
_SCALE = ".weight_scale_inv"
_COLUMNS = 4096
"""Rows of a weight that are fp32 at a time."""


@dataclass(frozen=True)
class Kernels:
    """What computes the operations that take time: :data:`PLAIN`, or :func:`fast` with the same bits."""

    linear: Callable[[Floats, NDArray[np.uint16], Floats | None, int, Floats, int], None]
    rms_norm: Callable[[Floats, Floats | None, float, Floats | None, NormReduction, bool], tuple[Floats, Floats]]
    attention: Callable[[Floats, Floats, Floats, float, Tables, int | None, float | None], Floats]
    silu_and_mul: Callable[[Floats, Tables], Floats]
    gelu_and_mul: Callable[[Floats, Tables], Floats]
    exp: Callable[[Floats, Tables], Floats]


def linear(
    x: Floats, bits: NDArray[np.uint16], bias: Floats | None, k_slices: int, out: Floats, first_column: int
) -> None:
    """Write :func:`.definition.linear` of a weight's bits [N, K] to N columns of an array, from the first on."""
    for start in range(0, len(bits), _COLUMNS):
        part = slice(start, min(start + _COLUMNS, len(bits)))
        own = None if bias is None else bias[part]
        columns = slice(first_column + part.start, first_column + part.stop)
        out[:, columns] = definition.linear(x, exact.from_bits(bits[part]), own, k_slices)


PLAIN = Kernels(
    linear,
    definition.rms_norm,
    definition.attention,
    definition.silu_and_mul,
    definition.gelu_and_mul,
    definition.exp,
)


def fast() -> Kernels:
    """Those in numba; the definition itself where numba is not installed."""
    try:
        from . import cpu
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("numba", "llvmlite"):
            raise
        return PLAIN
    return Kernels(cpu.linear, cpu.rms_norm, cpu.attention, cpu.silu_and_mul, cpu.gelu_and_mul, cpu.exp)


def of_experts(num_experts: int, top_k: int, renormalise: bool, has_codes: bool) -> MoeReduction:
    """The reduction of experts that has a definition.

    Raises:
        ValueError: the numbers do not fit.
    """
    products = PRODUCTS if has_codes else None
    return MoeReduction(num_experts, top_k, torch.bfloat16, renormalise=renormalise, products=products)


class HopperDecoder(Decoder):
    """A model of one of :data:`ARCHITECTURES` in bf16.

    Args:
        config: as in its checkpoint's config.json.
        weights: the bits of each weight, uint16, by its name in the checkpoint; of codes uint8, and their scales.
        tables: the special functions of the GPU.
        k_slices: parts of K in layers that tensor-parallel workers may share.
        kernels: what computes.

    Raises:
        NotCovered: a model without a definition.
    """

    arithmetic = "the usual arithmetic of a Hopper"

    def __init__(
        self,
        config: dict[str, Any],
        weights: dict[str, NDArray[Any]],
        tables: Tables,
        k_slices: int = 1,
        kernels: Kernels | None = None,
    ) -> None:
        super().__init__(config, weights)
        self._tables_of_gpu, self._k_slices, self._kernels = tables, k_slices, kernels or fast()
        for name, weight in weights.items():
            if problem := self._problem_of_weight(name, weight):
                raise NotCovered(f"the weight {name} {problem}", "it has no definition here", _REMEDY)
        if self.head_size not in HEAD_SIZES:
            raise NotCovered(f"heads of {self.head_size}", "other kernels serve them, without a definition", _REMEDY)
        norm = NormReduction.of_device("cuda", config["hidden_size"], torch.bfloat16)
        if norm.length > norm.block:
            raise NotCovered(f"rows of {norm.length}", "a program has no whole one, which has no definition", _REMEDY)

    def _problem_of(self, architecture: str) -> str | None:
        if architecture not in ARCHITECTURES:
            return f"the model {architecture}"
        quantised = self.config.get("quantization_config")
        if quantised and not isinstance(quantised, dict):
            return "a quantisation that is no table"
        if quantised and {name: quantised.get(name) for name in FP8_BLOCKS} != FP8_BLOCKS:
            return (
                f"quantised weights of {quantised.get('quant_method')} that are no FP8 in blocks of {GROUP} x {GROUP}"
            )
        return problem_of(architecture, self.config.get)

    def _problem_of_weight(self, name: str, weight: NDArray[Any]) -> str | None:
        """What of a weight's dtype is read as no operation here reads it."""
        if weight.dtype == np.float32:
            return None if name.endswith(_SCALE) else "in fp32, which an engine rounds"
        if weight.dtype == np.uint16:
            return None
        is_of_layer = name.endswith("_proj.weight") and self.config.get("quantization_config")
        return None if is_of_layer else "as codes of e4m3, which no engine here multiplies"

    @property
    def experts(self) -> MoeReduction | None:
        """Of its layers with experts; None of a model without."""
        if not any(map(self._has_experts, range(self.config["num_hidden_layers"]))):
            return None
        has_codes = self._has_codes(lambda name: _OF_EXPERTS in name)
        renormalise = bool(self._get("norm_topk_prob", False))
        return of_experts(self._num_experts, self.config["num_experts_per_tok"], renormalise, has_codes)

    @property
    def has_codes(self) -> bool:
        """Whether layers that are no experts are codes."""
        return self._has_codes(lambda name: _OF_EXPERTS not in name)

    @property
    def operations(self) -> tuple[str, ...]:
        """Of :data:`.confirmed.OF_FAMILIES`, those of its model."""
        ropes = [rope_type(rotary_embedding(self._get, of_type)[1]) for of_type in self._layer_types]
        has = {
            "gelu_and_mul": self._family.is_gemma,
            "norm_plus_one": self._family.is_gemma,
            "scaled_embeddings": self._family.is_gemma,
            "heads_of_256": self.head_size == _LARGE_HEAD,
            "windows": SLIDING in self._layer_types,
            "capped_scores": bool(self._own("attn_logit_softcapping")),
            "capped_logits": bool(self._own("final_logit_softcapping")),
            "linear_angles": _LINEAR in ropes,
        }
        return tuple(name for name in confirmed.OF_FAMILIES if has[name])

    def _has_codes(self, of: Callable[[str], bool]) -> bool:
        return any(weight.dtype == np.uint8 for name, weight in self._weights.items() if of(name))

    def _linear(self, x: Floats, name: str, shared: bool = False) -> Floats:
        return self._side_by_side(x, (name,), self._k_slices if shared else 1)

    def _stacked(self, x: Floats, name: str, together: str, parts: Sequence[str]) -> Floats:
        is_one = f"{name}.{together}.weight" in self._weights
        return self._side_by_side(x, [f"{name}.{part}" for part in ((together,) if is_one else parts)])

    def _side_by_side(self, x: Floats, names: Sequence[str], k_slices: int = 1) -> Floats:
        """Linear layers of one input, each in columns behind those of the one before."""
        sizes = [len(self._weights[f"{name}.weight"]) for name in names]
        out = np.empty((len(x), sum(sizes)), np.float32)
        for name, size, end in zip(names, sizes, accumulate(sizes), strict=True):
            bits, bias = self._weights[f"{name}.weight"], self._floats(f"{name}.bias")
            if bits.dtype == np.uint8:
                out[:, end - size : end] = self._of_codes(x, name, bits, bias, k_slices)
            else:
                self._kernels.linear(x, bits, bias, k_slices, out, end - size)
        return out

    def _of_codes(self, x: Floats, name: str, bits: NDArray[np.uint8], bias: Floats | None, k_slices: int) -> Floats:
        """A layer whose weight is codes: by the integer model of the tensor core."""
        if k_slices > 1:
            raise NotCovered("a tree of products of codes", "it has no definition here", _REMEDY)
        codes, scales = quantise(_bf16(x), codes=E4M3, group=GROUP)
        weight = torch.from_numpy(np.array(bits)).view(E4M3)
        weight_scale = torch.from_numpy(np.array(self._weights[f"{name}{_SCALE}"]))
        of_weight = weight_scale if weight_scale.dtype == torch.float32 else _of_bits(weight_scale)
        own = None if bias is None else _bf16(bias)
        made = scaled_linear(codes, scales, weight, of_weight, own, torch.bfloat16, mma=WGMMA)
        return made.float().numpy()

    def _norm(self, x: Floats, name: str, residual: Floats | None = None) -> tuple[Floats, Floats]:
        reduction = NormReduction.of_device("cuda", x.shape[-1], torch.bfloat16)
        weight, eps = self._floats(f"{name}.weight"), self._get("rms_norm_eps", 1e-6)
        return self._kernels.rms_norm(x, weight, eps, residual, reduction, self._family.is_gemma)

    def _tables(self, positions: int) -> dict[str, Floats]:
        if positions > definition.LARGEST_ANGLE:
            raise NotCovered(f"{positions} tokens", "cosines of larger angles have no definition", _REMEDY)
        tables = {}
        for layer_type in {*self._layer_types}:
            base, rope = rotary_embedding(self._get, layer_type)
            frequencies = definition.inverse_frequencies(self.head_size, base, rope, self._tables_of_gpu)
            factor = rope["factor"] if rope_type(rope) == _LINEAR else 1.0
            tables[layer_type] = definition.rotary_table(positions, frequencies, factor)
        return tables

    def _activated(self, gate_up: Floats) -> Floats:
        activate = self._kernels.gelu_and_mul if self._family.is_gemma else self._kernels.silu_and_mul
        return activate(gate_up, self._tables_of_gpu)

    def _capped(self, logits: Floats, soft_cap: float) -> Floats:
        return definition.capped(logits, soft_cap, self._tables_of_gpu)

    def _routed(self, logits: Floats, top_k: int, renormalise: bool) -> tuple[Floats, exact.Integers]:
        reduction = SoftmaxReduction.of_device("cuda", logits.shape[-1], torch.float32)
        return definition.route(logits, top_k, renormalise, reduction, self._tables_of_gpu)

    def _of_expert(self, hidden: Floats, name: str) -> Floats:
        return self._linear(hidden, name)

    def _attended(self, query: Floats, key: Floats, value: Floats, window: int | None) -> Floats:
        soft_cap = self._own("attn_logit_softcapping")
        return self._kernels.attention(query, key, value, self._scale, self._tables_of_gpu, window, soft_cap)

    def log_softmax(self, logits: Floats) -> Floats:
        """Of rows of logits, in fp32."""
        reduction = SoftmaxReduction.of_device("cuda", logits.shape[-1], torch.float32)
        return definition.log_softmax(logits, reduction, self._tables_of_gpu, self._kernels.exp)

    def draw(self, logits: Floats, request: Any, position: int) -> int:
        """The token that a request with a seed takes of a row of logits.

        Args:
            request: has ``temperature``, ``top_k``, ``top_p`` and ``seed``.
            position: see :func:`.sampling.noise`.
        """
        how = np.float32(request.temperature), request.top_k, request.top_p, request.seed
        return sampling.draw(logits, *how, position, self._tables_of_gpu)


def _bf16(x: Floats) -> torch.Tensor:
    """bf16 values that are held in fp32."""
    return torch.from_numpy(np.ascontiguousarray(x)).to(torch.bfloat16)


def _of_bits(bits: torch.Tensor) -> torch.Tensor:
    """fp32 of the bits of bf16, as vLLM widens the scales of a checkpoint in 16 bits."""
    return bits.view(torch.bfloat16).float()
