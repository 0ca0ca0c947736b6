"""What is asked of cuBLASLt for products of e4m3, when it serves, and what its certificate sees."""

from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.conftest import HOPPER
from tests.ops.quantise.written_out import E4M3, e4m3_product, fma, fp32, hopper_sum

pytest.importorskip("triton")

from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.linear import autotune
from vllm_batch_invariant.ops.linear.problem import ScaledProblem
from vllm_batch_invariant.ops.linear.spec import PRODUCT
from vllm_batch_invariant.ops.scaled_linear import library, scaled_linear
from vllm_batch_invariant.ops.scaled_linear.deep_gemm import DeepGemm
from vllm_batch_invariant.ops.scaled_linear.library import Library, operand_sets, run_library

PROBLEM = ScaledProblem(160, 512, torch.bfloat16, device=0)
CPU = torch.device("cpu")


def operands(m: int, n: int = 160, k: int = 512) -> list[torch.Tensor]:
    """Behind the codes of x lie NaN up to a multiple of 4 rows."""
    draw = torch.Generator().manual_seed(m)
    codes, weight = ((100 * torch.randn(rows, k, generator=draw)).clamp(-448, 448).to(E4M3) for rows in (m, n))
    scale, weight_scale = (torch.rand(rows, k // 128, generator=draw) for rows in (m, -(-n // 128)))
    filled_up = torch.full((-(-m // 4) * 4, k), torch.nan).to(E4M3)
    filled_up[:m] = codes
    return [filled_up[:m], scale, weight, weight_scale]


@pytest.fixture(autouse=True)
def first_gpu(cublaslt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the fixture that stands for another."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_codes_and_scales_are_where_the_library_looks_for_them(cublaslt: ModuleType) -> None:
    for m in (4, 12):
        given = operands(m)
        matmul = cublaslt.Matmul(PROBLEM)
        [algorithm] = matmul.algorithms(m, 1)
        out = torch.empty(m, PROBLEM.n, dtype=PROBLEM.dtype)
        made = run_library(matmul, algorithm, *given, out)
        assert_same_bits(made, scaled_linear(*given, None, PROBLEM.dtype), f"{m} rows")


@pytest.fixture
def prepared(cublaslt: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path) -> SimpleNamespace:
    """A library that serves up to 384 rows by the heuristic's first algorithm, and how often it was tuned."""
    tuned = []

    def tune(problem, matmul, buckets, sizes, seconds, kind):
        tuned.append(tuple(buckets))
        [algorithm] = matmul.algorithms(256, 1)
        return {bucket: autotune.TunedSchedule(algorithm, (bucket,), (), {"cublaslt": 1.0}) for bucket in buckets}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_environment", lambda device: {"gpu": "made up"})
    monkeypatch.setattr(library, "_matmul_of", cublaslt.Matmul)
    monkeypatch.setattr(autotune, "tune", tune)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    found = Library()
    found.prepare(PROBLEM, 384, (), lambda *_: pytest.fail("timed"))
    return SimpleNamespace(library=found, tuned=tuned, lt=cublaslt.lt)


def test_many_rows_are_multiplied_by_the_library_and_the_rest_is_left(prepared: SimpleNamespace) -> None:
    assert prepared.tuned == [(256, 384)]
    given = operands(260)
    made = prepared.library.product(*given, torch.bfloat16)
    assert_same_bits(made, scaled_linear(*given, None, torch.bfloat16))
    assert prepared.lt.launches == [260]
    odd = operands(261)
    left = {
        "few rows": operands(128),
        "rows without memory behind them": [odd[0].clone(), *odd[1:]],
        "more than were verified": operands(388),
        "another weight": operands(260, n=176),
        "a part of a weight": [*operands(260)[:2], operands(260, k=1024)[2][:, :512], given[3]],
    }
    for what, other in left.items():
        assert prepared.library.product(*other, torch.bfloat16) is None, what
    assert prepared.library.product(*given, torch.float16) is None, "another dtype"
    assert prepared.lt.launches == [260]


@pytest.mark.parametrize(("m", "launched"), [(257, [260]), (263, [264]), (769, [260, 260, 252])])
def test_odd_numbers_of_rows_and_more_than_were_compared_are_multiplied_in_parts(
    m: int, launched: list[int], prepared: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_LARGEST_M", 384)
    monkeypatch.setattr(library, "LEAST_M", 200)
    given = operands(m)
    made = prepared.library.product(*given, torch.bfloat16)
    assert_same_bits(made, scaled_linear(*given, None, torch.bfloat16))
    assert prepared.lt.launches == launched


def test_what_was_found_is_kept_on_disk(prepared: SimpleNamespace) -> None:
    other = Library()
    other.prepare(PROBLEM, 384, (), lambda *_: pytest.fail("timed"))
    assert prepared.tuned == [(256, 384)]
    given = operands(256)
    assert_same_bits(other.product(*given, torch.bfloat16), scaled_linear(*given, None, torch.bfloat16))


def layer(n: int, k: int, source: Any, bias: bool) -> torch.nn.Module:
    """Of vLLM's with the plugin's method."""
    from vllm.model_executor.layers.linear import ReplicatedLinear

    from vllm_batch_invariant.integration.layers import fp8

    found = ReplicatedLinear.__new__(ReplicatedLinear)
    torch.nn.Module.__init__(found)
    _, _, found.weight, scale = operands(8, n, k)
    setattr(found, source.scale, scale if source.shared == "block" else scale[:, :1].repeat_interleave(128, 0)[:n])
    found.input_size, found.output_size = k, n
    found.bias = torch.zeros(n, dtype=torch.bfloat16) if bias else None
    found.params_dtype, found.quant_method = torch.bfloat16, fp8.method_of(SimpleNamespace(), source)
    return found


def test_the_check_says_what_serves_a_product_of_codes_and_was_compared(
    prepared: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    from vllm_batch_invariant.integration.layers.fp8 import Source
    from vllm_batch_invariant.ops.scaled_linear import cuda
    from vllm_batch_invariant.verify.check import operations

    monkeypatch.setattr(library.gemms, "_uses_cublaslt", lambda _: True)
    monkeypatch.setattr(cuda, "library", prepared.library)
    like, blocks, channels = torch.empty(0, dtype=torch.bfloat16), Source("block"), Source("channel")

    def said(source: Source = blocks, n: int = 160, bias: bool = False, slices: int = 1) -> str:
        of_layer = layer(n, 512, source, bias)
        of_layer.quant_method.k_slices = slices
        return operations._gpu_certificate(like, of_layer, of_layer.bias, PRODUCT)

    compared = (
        "compared at 2 values of M up to 384 against Gluon; cuBLASLt serves 2 of 2 buckets of M, "
        "0 of its algorithms refused"
    )
    assert said() == compared
    found = DeepGemm()
    found._serves[PROBLEM] = {64, 32, 512}
    monkeypatch.setattr(library, "deep_gemm", found)
    deep_gemm = "DeepGEMM serves 3 values of M, 32 to 512, compared against Gluon"
    assert said() == f"{compared}; {deep_gemm}"
    for other in ({"source": channels}, {"n": 176}, {"bias": True}, {"slices": 2}):
        assert said(**other) == "no certificate: by Gluon alone", other
    prepared.library._tuned[PROBLEM] = {}
    assert said() == deep_gemm
    monkeypatch.setattr(Gpu, "of", lambda _: replace(HOPPER, has_wgmma=False))
    assert said() == "no certificate: by Triton alone"


@pytest.mark.parametrize(
    ("number", "mistake", "at_least"),
    [
        (0, {"add": lambda sums, s, t, total: fma(fp32(sums * s), t + 0 * s, total)}, 0.1),
        (0, {"add": lambda sums, s, t, total: fma(fp32(sums * t), s + 0 * t, total)}, 0.1),
        (0, {"add": lambda sums, s, t, total: fp32(fp32(fp32(s * t) * sums) + total)}, 0.1),
        (0, {"promote": 32}, 0.5),
        (1, {"shifted": 1}, 0.5),
        (2, {"promote": 1 << 20}, 0.3),
    ],
    ids=["row's scale first", "column's first", "no fma", "promotion at 32", "next group's scales", "no promotion"],
)
def test_a_certificate_sees_other_sums_in_bf16(number: int, mistake: dict, at_least: float) -> None:
    """And so an algorithm that adds otherwise is refused."""
    problem = ScaledProblem(48, 1024, torch.bfloat16, device=0)
    given = list(operand_sets(problem, 8, CPU))[number]
    if "promote" in mistake and number == 2:  # without scales of groups: those cannot be promoted once
        given = [given[0], given[1][:, 0], given[2], given[3][:, 0].repeat_interleave(128)[:48]]
    written = partial(e4m3_product, *given, None, torch.bfloat16, hopper_sum)
    assert (written() != written(**mistake)).double().mean() > at_least


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16], ids=str)
def test_operands_of_the_certificate_have_scales_in_fp32_while_a_model_in_16_bits_is_loaded(default) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = [[one.dtype for one in operands] for operands in operand_sets(PROBLEM, 3, CPU)]
    finally:
        torch.set_default_dtype(before)
    assert found == [[E4M3, torch.float32] * 2] * 3
