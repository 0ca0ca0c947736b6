"""Products of FP8 in blocks on a Hopper: ``python -m benchmarks.fp8_accuracy``. How far they are from float64, whose
activations are not quantised, and whether a row has the same bits among 31 rows and among 32: where vLLM's kernel
changes, if it has FlashInfer and DeepGEMM. CSV to --out.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.packed_tiles import SHAPES
from benchmarks.record import DATA, Measurement, Setting, case_text, update
from vllm_batch_invariant.envs import FLAG
from vllm_batch_invariant.ops.common.kv_cache import LARGEST
from vllm_batch_invariant.ops.quantise import quantise
from vllm_batch_invariant.ops.scaled_linear import E4M3, GROUP, scaled_linear

ROWS = (31, 32, 256)
"""Rows of a step; the first ones are the same in each."""
KINDS = ("normal", "large channels")
_CHANNELS, _FACTOR = 8, 32.0
"""Channels of activations that are larger than others, and how much."""
Multiply = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Weight:
    """Codes [N, K] of e4m3 and their scales in fp32 [N / 128, K / 128], as a checkpoint has them."""

    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def drawn(cls, n: int, k: int, seed: int) -> "Weight":
        """Of random numbers, whose largest of a block becomes the largest code."""
        generator = torch.Generator("cuda").manual_seed(seed)
        blocks = torch.randn(n // GROUP, GROUP, k // GROUP, GROUP, generator=generator, device="cuda") * k**-0.5
        scale = blocks.abs().amax((1, 3)) / LARGEST
        return cls((blocks / scale[:, None, :, None]).reshape(n, k).to(E4M3), scale)

    @property
    def in_float64(self) -> torch.Tensor:
        """[N, K], what codes and scales stand for."""
        n, k = self.codes.shape
        blocks = self.codes.double().view(n // GROUP, GROUP, k // GROUP, GROUP)
        return (blocks * self.scale.double()[:, None, :, None]).view(n, k)


def activations(k: int, kind: str) -> torch.Tensor:
    """[most rows, K] bf16."""
    x = torch.randn(max(ROWS), k, generator=torch.Generator("cuda").manual_seed(k), device="cuda")
    if kind == "large channels":
        x[:, :: k // _CHANNELS] *= _FACTOR
    return x.bfloat16()


def ours(weight: Weight) -> Multiply:
    """As the mode multiplies."""

    def multiply(x: torch.Tensor) -> torch.Tensor:
        codes, scale = quantise(x, codes=E4M3, group=GROUP)
        return scaled_linear(codes, scale, weight.codes, weight.scale, None, torch.bfloat16)

    return multiply


def plain(weight: Weight) -> Multiply:
    """As plain vLLM does where it has FlashInfer and DeepGEMM, after what it makes of the weight when it is loaded."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.kernels.linear.scaled_mm.flashinfer import FlashInferFp8DeepGEMMDynamicBlockScaledKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        GroupShape,
        create_fp8_quant_key,
    )

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.codes.clone(), requires_grad=False)
    layer.weight_scale_inv = torch.nn.Parameter(weight.scale.clone(), requires_grad=False)
    layer.weight_block_size = [GROUP, GROUP]
    with set_current_vllm_config(VllmConfig()):
        kernel = FlashInferFp8DeepGEMMDynamicBlockScaledKernel(
            FP8ScaledMMLinearLayerConfig(
                weight_quant_key=create_fp8_quant_key(static=True, group_shape=GroupShape(GROUP, GROUP)),
                activation_quant_key=create_fp8_quant_key(static=False, group_shape=GroupShape(1, GROUP)),
                input_dtype=torch.bfloat16,
                out_dtype=torch.bfloat16,
                weight_shape=tuple(weight.codes.shape),
            )
        )
        kernel.process_weights_after_loading(layer)
    return lambda x: kernel.apply_weights(layer, x)


PROVIDERS: dict[str, Callable[[Weight], Multiply]] = {"stock": plain, "ours": ours}


def measured(n: int, k: int, kind: str, setting: Setting) -> Iterator[Measurement]:
    """The rows of a layer for the data: errors, and the share of elements that differ from those among 31 rows."""
    weight, x = Weight.drawn(n, k, seed=n), activations(k, kind)
    exact = x.double() @ weight.in_float64.T
    of_stock: dict[int, float] = {}
    for provider, of in PROVIDERS.items():
        multiply = of(weight)
        results = {rows: multiply(x[:rows]) for rows in ROWS}
        for rows, y in results.items():
            error = ((y.double() - exact[:rows]).norm() / exact[:rows].norm()).item()
            same = y[: ROWS[0]] == results[ROWS[0]]
            of_stock.setdefault(rows, error)
            case = case_text(op="fp8-linear", N=n, K=k, M=rows, kind=kind.replace(" ", "-"))
            bits = "equal" if bool(same.all()) else "differ"
            for metric, value, ratio in (
                ("error", error, error / of_stock[rows]),
                ("differing", 1 - same.float().mean().item(), None),
            ):
                yield Measurement(
                    benchmark="accuracy", provider=provider, case=case, metric=metric, unit="relative", p50=value,
                    p20=value, p80=value, ratio=ratio, bits=bits, **asdict(setting),
                )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; the exit status is 1 where the mode's bits differ, or no row of plain vLLM's does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DATA / "accuracy.csv")
    options = parser.parse_args(arguments)
    os.environ.setdefault(FLAG, "0")
    setting = Setting.here()
    rows = [row for n, k in SHAPES.values() for kind in KINDS for row in measured(n, k, kind, setting)]
    update(options.out, rows)
    table = Table("provider", "case", "metric", "value")
    for row in rows:
        table.add_row(row.provider, row.case, row.metric, f"{row.p50:.5f}")
    Console(width=140).print(table)
    differing = {who: any(row.bits == "differ" for row in rows if row.provider == who) for who in PROVIDERS}
    return int(differing["ours"] or not differing["stock"])


if __name__ == "__main__":
    sys.exit(main())
