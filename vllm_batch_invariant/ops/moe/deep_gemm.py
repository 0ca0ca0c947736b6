"""DeepGEMM for both products of experts in e4m3 by blocks: a schedule that serves the numbers of tokens at which it has
been compiled, compared and timed.

It promotes each 128 of K as the tiles here do. It reads rows that lie side by side, those of an expert in whole blocks
of 128: so the codes of tokens are gathered, and what both products give stays in the slots of its pairs until it is
added. More tokens are computed in parts of as many as it serves; what is left, and few tokens, the tiles here compute.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton

from ..common.launch import launch
from ..scaled_linear.deep_gemm import SizedLibrary
from ..scaled_linear.reduction import GROUP
from .params import Codes, Experts, StoredExperts
from .triton_kernels import gather_kernel

logger = logging.getLogger("vllm.batch_invariant")

BLOCK_M = 128
"""Rows of one expert, of which DeepGEMM computes those it is told to have one."""
SIZES = (16_384, 8192, 4096, 2048, 1024)
"""Tokens that it is tried with."""
_ROWS, _BLOCK = 8, 1024
"""Slots and bytes that a program gathers at once."""
_STEP = GROUP
Library = Callable[
    [tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor], Any
]
"""``(codes, scale), (weight, weight_scale), out, expert_of_slot``, with fp32 scales as they are."""


@dataclass(frozen=True)
class ExpertsProblem:
    """All that tells both products of a layer from those of another, apart from the number of tokens."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    dtype: torch.dtype
    device: int
    """Index of the GPU."""

    @classmethod
    def of(cls, experts: Experts) -> "ExpertsProblem | None":
        """Of a layer, if it is one that is asked for: of whole experts in blocks of e4m3 that add nothing and are all
        here.
        """
        reduction, down = experts.reduction, experts.down
        added = experts.gate_up_bias, experts.down_bias, experts.places, experts.adapters, experts.exchange
        in_blocks = reduction.products is not None and reduction.products.in_blocks
        if not in_blocks or reduction.activation != "silu" or any(one is not None for one in added):
            return None
        hidden, intermediate = down.shape[1:]
        if hidden % _STEP or intermediate % _STEP:
            return None
        return cls(len(down), reduction.top_k, hidden, intermediate, reduction.dtype, down.device.index or 0)


@dataclass(frozen=True)
class Slots:
    """Where pairs lie.

    Attributes:
        of_pair: [pairs] int32; 0 for a pair that is in no group.
        expert: [slots] int32, -1 without a pair.
    """

    of_pair: torch.Tensor
    expert: torch.Tensor


def gather(x: Codes, pairs: int, groups: Any) -> tuple[Codes, Slots]:
    """Rows of codes in the slots of their pairs.

    Args:
        x: [rows, K]; a row has pairs // rows pairs, one after the other.
        pairs: how many there are.
        groups: of :mod:`.cuda`, in blocks of :data:`BLOCK_M`.
    """
    count, (_, k), device = groups.num_blocks * BLOCK_M, x.shape, x.device
    of_groups = x.scales.shape[1]
    gathered = torch.empty(count, k, dtype=torch.uint8, device=device)
    scales = torch.empty(of_groups, count, dtype=torch.float32, device=device)
    of_pair = torch.zeros(pairs, dtype=torch.int32, device=device)
    expert = torch.empty(count, dtype=torch.int32, device=device)
    launch(
        gather_kernel,
        count // _ROWS,
        (
            x.codes.view(torch.uint8),
            x.scales,
            *x.scales.stride(),
            groups.pairs,
            groups.stop,
            groups.expert_of_block,
            gathered,
            scales,
            expert,
            of_pair,
            count,
        ),
        on=x.codes,
        waits=True,
        K=k,
        GROUPS=of_groups,
        PADDED_GROUPS=triton.next_power_of_2(of_groups),
        PAIRS_OF_A_ROW=pairs // len(x),
        BLOCK_M=BLOCK_M,
        ROWS=_ROWS,
        BLOCK=min(_BLOCK, triton.next_power_of_2(k)),
    )
    return Codes(gathered.view(x.codes.dtype), scales.t(), x.dtype), Slots(of_pair, expert)


class Trial(Protocol):
    """A number of tokens of a layer."""

    def runs(self) -> None:
        """Have the library compute them once."""

    def agrees(self) -> bool:
        """Whether it gives them the bits of what serves now."""

    def times(self) -> dict[str, float]:
        """Microseconds "without" and with "DeepGEMM"."""


class GroupedDeepGemm(SizedLibrary):
    """That of experts; a size is a number of tokens."""

    code = ("ops/moe", "ops/scaled_linear", "ops/quantise", "ops/silu", "ops/formats")
    _run: Library | None

    def product(self, x: Codes, weight: StoredExperts, slots: Slots) -> torch.Tensor:
        """Each slot's row times its expert's weight: [slots, N]; of slots without a pair, anything."""
        assert self._run is not None
        out = torch.empty(len(x), weight.shape[1], dtype=x.dtype, device=x.device)
        self._run((x.codes, x.scales), (weight.tensors[0], weight.tensors[1]), out, slots.expert)
        return out

    def parts(self, experts: Experts, tokens: int) -> list[tuple[int, bool]]:
        """Numbers of tokens of which so many consist, and whether each is this one's."""
        problem = ExpertsProblem.of(experts) if self._serves else None
        found, served = [], sorted(self._serves.get(problem, ()), reverse=True)
        for size in served:
            found += [(size, True)] * (tokens // size)
            tokens %= size
        return [*found, (tokens, False)] if tokens else found

    def prepare(self, experts: Experts, max_tokens: int, trial: Callable[[int], Trial]) -> None:
        """Choose the numbers of tokens that it serves, of those up to so many.

        Args:
            experts: a layer.
            max_tokens: of a step.
            trial: of so many tokens.
        """
        problem = ExpertsProblem.of(experts)
        if problem is None or problem.dtype != torch.bfloat16:
            return

        def measured(tokens: int) -> dict[str, Any]:
            of_tokens = trial(tokens)
            if not of_tokens.agrees():
                logger.warning("DeepGEMM is not used for %d tokens of %s: it has other bits.", tokens, problem)
                return {"serves": False, "microseconds": {}}
            times = of_tokens.times()
            return {"serves": times["DeepGEMM"] < times["without"], "microseconds": times}

        def loads(tokens: int) -> bool:
            trial(tokens).runs()
            return True

        self.choose(problem, [size for size in SIZES if size <= max_tokens], measured, loads)


grouped_deep_gemm = GroupedDeepGemm()
