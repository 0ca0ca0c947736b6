"""Writes the table of docs/gpus.md that says which kernel attends to heads of each size, out of the schedules.

usage: python -m scripts.attention_heads

``tests/docs/test_gpus.py`` fails where the page says something else.
"""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch

from scripts import marks
from vllm_batch_invariant.integration.coverage import ENCODER_HEAD_SIZES, LATENT_SIZES
from vllm_batch_invariant.ops.attention import AttentionReduction, sm90
from vllm_batch_invariant.ops.attention.plan import Kernels, decode_schedule, prefill_schedule
from vllm_batch_invariant.ops.attention.shapes import AttentionShape
from vllm_batch_invariant.ops.common.nvidia_gpus import has_tcgen05

PAGE = Path(__file__).parents[1] / "docs" / "gpus.md"
BEGIN, END = "<!-- written by python -m scripts.attention_heads -->", "<!-- end of heads -->"
GPUS = {"9.0": (9, 0), "10.x": (10, 0), "8.x, 12.0": (8, 0)}
"""Kinds of GPUs, and a compute capability of each."""
SIZES = (64, 72, 80, 96, 112, 128, 256, 512)
LATENT = LATENT_SIZES[-1]
"""Of DeepSeek's, whose keys of 192 and values of 128 elements are computed from these."""
STEP = 16
"""Sizes are multiples of it; between them are zeros, which encoders have."""


def kernels_of(size: int, capability: tuple[int, int], tail: int = 0) -> tuple[str, str, str]:
    """What serves decode, prefill and encoders in bf16 there, in words; "" is nothing."""
    whole = -(-size // STEP) * STEP
    shape = AttentionShape(8, 8, whole, torch.bfloat16, AttentionReduction(), tail=tail)
    gpu = torch.device("cuda")
    with patch("torch.cuda.get_device_capability", return_value=capability):
        fastest = next(Kernels.candidates(shape, gpu))
        block_m = prefill_schedule(whole, shape.dtype).block_m
        packed = sm90.covers_packed(shape, block_m, gpu)
    wide = has_tcgen05(capability[0])
    rows = decode_schedule(whole, shape.dtype, wide).block_m
    decode = "Gluon" if fastest.sm90 else f"Triton, {rows} rows"
    prefill = "Gluon" if fastest.sm90 and sm90.prefills(shape.padded_head_size) else f"Triton, {block_m} rows"
    encodes = "Gluon" if packed else f"Triton, {block_m} rows"
    is_decoders = whole == size
    return decode * is_decoders, prefill * is_decoders, encodes * (whole in ENCODER_HEAD_SIZES and not tail)


def _rows() -> Iterator[tuple[str, ...]]:
    every = [(str(size), size, 0) for size in SIZES]
    every.append(("192 and 128 (MLA)", *LATENT))
    for name, size, tail in every:
        hopper, *others = (kernels_of(size, capability, tail) for capability in GPUS.values())
        cells = [*hopper, *(cell for decode, prefill, encodes in others for cell in (decode, prefill or encodes))]
        yield (name, *(cell or "-" for cell in cells))


def table() -> str:
    """A row for each size, with decode, prefill and encoders of each kind of GPU."""
    hopper, *others = GPUS
    header = ["head", *(f"{hopper}: {what}" for what in ("decode", "prefill", "encoders"))]
    header += [f"{gpu}: {what}" for gpu in others for what in ("decode", "prefill and encoders")]
    lines = [header, ["---"] * len(header), *_rows()]
    return "\n".join(f"|{'|'.join(line)}|" if line[0] == "---" else f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(marks.put(PAGE.read_text(), BEGIN, END, f"\n{table()}\n"))
