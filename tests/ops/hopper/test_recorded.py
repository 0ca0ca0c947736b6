"""The definition has the bits that an H200 had: operands and results that ``scripts.hopper_bits`` kept there on 29
November 2026 (PyTorch 2.11, Triton 3.6), in ``h200.npz``.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ops.hopper.cases import same
from vllm_batch_invariant.ops.exact.definition import Floats, from_bits
from vllm_batch_invariant.ops.hopper import cpu, definition, tables
from vllm_batch_invariant.ops.norm.reduction import NormReduction
from vllm_batch_invariant.ops.softmax.reduction import SoftmaxReduction

H200 = np.load(Path(__file__).with_name("h200.npz"))
KINDS = sorted({name.split("/")[1] for name in H200.files if name.startswith("matmul/")})
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of infinities and NaN


def of(name: str) -> Floats:
    held = H200[name]
    return from_bits(held) if held.dtype == np.uint16 else held


@pytest.mark.parametrize("kind", KINDS)
def test_a_matmul_has_the_gpus_bits(kind: str) -> None:
    a, b, right = (of(f"matmul/{kind}/{name}") for name in ("a", "b", "result"))
    assert same(definition.mma(a, b), right)
    assert same(cpu.mma(a, b), right)
    with np.errstate(all="ignore"):
        assert kind == "signed zeros" or not same((a.astype(np.float64) @ b.T.astype(np.float64)), right)


def test_silu_has_the_gpus_bits() -> None:
    x, right, known = of("silu/x"), of("silu/result"), tables.recorded()
    assert same(definition.silu_and_mul(x, known), right)
    assert same(cpu.silu_and_mul(x, known), right)


@pytest.mark.parametrize("length", [1000, 4096])
def test_log_softmax_has_the_gpus_bits(length: int) -> None:
    x, right = of(f"log_softmax/{length}/x"), of(f"log_softmax/{length}/result")
    reduction = SoftmaxReduction.of_device("cuda", length, torch.float32)
    for exp in (definition.exp, cpu.exp):
        assert same(definition.log_softmax(x, reduction, tables.recorded(), exp), right)
    assert length < 4096 or not same(torch.from_numpy(x).log_softmax(-1).numpy(), right)


def test_rms_norm_has_the_gpus_bits() -> None:
    x, weight, residual, right = (of(f"norm/{name}") for name in ("x", "weight", "residual", "result"))
    reduction = NormReduction.of_device("cuda", 4096, torch.bfloat16)
    assert same(definition.rms_norm(x, weight, 1e-6, residual, reduction)[0], right)


@pytest.mark.parametrize("name", [name for name in H200.files if name.startswith("frequencies/")])
def test_rotary_frequencies_have_the_gpus_bits(name: str) -> None:
    size, base, *scaling = name.removeprefix("frequencies/").split(", ")
    found = definition.inverse_frequencies(int(size), float(base), LLAMA_3 if scaling else {}, tables.recorded())
    assert same(found, of(name))


def test_attention_has_the_gpus_bits() -> None:
    q, k, v, right = (of(f"attention/{name}") for name in ("q", "k", "v", "result"))
    for attend in (definition.attention, cpu.attention):
        assert same(attend(q, k, v, 128**-0.5, tables.recorded()), right)
    assert not same(definition.attention(q, k[::-1], v[::-1], 128**-0.5, tables.recorded()), right)
