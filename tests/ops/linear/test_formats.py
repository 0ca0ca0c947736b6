"""A format of weights is a record: tuner, certificates, the check and PyTorch's operator take a toy one unchanged."""

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.fakes.cublaslt import sequential_k
from vllm_batch_invariant.ops.formats.record import Format
from vllm_batch_invariant.ops.linear import MatmulSpec, matmul, torch_op
from vllm_batch_invariant.ops.linear.schedule import NARROW_TILES, TILES
from vllm_batch_invariant.ops.linear.spec import EPILOGUES, NONE

pytest.importorskip("triton")

from vllm_batch_invariant.ops.linear import autotune, triton_gemm
from vllm_batch_invariant.ops.linear.autotune import Autotuner
from vllm_batch_invariant.ops.linear.problem import GemmProblem, problem_of

GROUP = 32
M, N, K = 24, 48, 128


def encode(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Numbers from -8 to 7 as nibbles, the lower first, and scales of groups: powers of two, one of all of a row."""
    scale = 2 ** torch.log2(weight.float().abs().amax(1, keepdim=True).clamp(2**-60) / 7).ceil()
    codes = (weight.float() / scale).round().clamp(-8, 7).to(torch.uint8) + 8
    return codes[:, ::2] | codes[:, 1::2] << 4, scale.expand(-1, weight.shape[1] // GROUP).contiguous()


def decode(stored: Sequence[torch.Tensor], out: torch.Tensor, zero: int = 8) -> torch.Tensor:
    codes, scales = stored
    numbers = torch.stack([codes & 15, codes >> 4], 2).flatten(1).float() - zero
    return out.copy_(numbers * scales.repeat_interleave(GROUP, 1))


TOY = Format("toy4", (torch.uint8, torch.float32), packing=2, group=GROUP, exponents=16, encode=encode, decode=decode)
SPECS = [*(MatmulSpec(epilogue, 1, TOY) for epilogue in EPILOGUES), MatmulSpec(k_slices=2, b_format=TOY)]
PACKED, GATED = SPECS[0], SPECS[2]


def operands(spec: MatmulSpec = PACKED, m: int = M) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], Any]:
    """x, what is stored of a weight, and a bias if the epilogue has one."""
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=draw).bfloat16() for shape in ((m, K), (N, K), (N,)))
    codes, scales = encode(weight)
    return x, codes, [scales], bias if spec.epilogue.has_bias else None


def matrix(codes: torch.Tensor, scales: Sequence[torch.Tensor]) -> torch.Tensor:
    return decode((codes, *scales), torch.empty(N, K, dtype=torch.bfloat16))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_bits_are_those_of_the_matrix_that_it_stands_for(spec: MatmulSpec) -> None:
    x, codes, scales, bias = operands(spec)
    right = matmul(x, matrix(codes, scales), MatmulSpec(spec.epilogue, spec.k_slices), bias)
    assert_same_bits(matmul(x, codes, spec, bias, scales=scales), right)
    given = x.view(4, 6, K), codes, bias, spec.name, scales
    assert_same_bits(torch_op.linear(*given).view(right.shape), right)
    torch.library.opcheck(torch.ops.vllm_batch_invariant.linear.default, given)


def test_what_is_not_stored_in_it_is_refused() -> None:
    x, codes, scales, _ = operands()
    for call, words in {
        lambda: matmul(x, codes, PACKED): r"toy4 is stored as .*, got \(torch.uint8,\)",
        lambda: matmul(x, codes.int(), PACKED, scales=scales): "toy4 is stored as",
        lambda: matmul(x, codes[:, :40], PACKED, scales=scales): r"got \[\[24, 128\], \[48, 40\]\]",
        lambda: matmul(x[:, :80], codes[:, :40], PACKED, scales=scales): "groups of 32 elements of K, got K = 80",
        lambda: matmul(x, codes, MatmulSpec(k_slices=8, b_format=TOY), scales=scales): "groups of 32",
        lambda: matmul(x, codes): r"got \[\[24, 128\], \[48, 64\]\]",
        lambda: MatmulSpec(b_format=Format("toy4", group=2)): "two kinds of matmuls are called 'toy4'",
    }.items():
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize("spec", [one for one in SPECS if one is not GATED], ids=str)
def test_the_dispatcher_prepares_tunes_and_serves_it(spec: MatmulSpec, dispatch: SimpleNamespace, monkeypatch) -> None:
    x, codes, scales, bias = operands(spec)
    plain = MatmulSpec(spec.epilogue, spec.k_slices)
    monkeypatch.setattr("vllm_batch_invariant.ops.all_reduce.cpu.add_ranks", add)
    before = dispatch.cuda.matmul(x, codes.t(), spec, bias, scales=scales)
    assert dispatch.launched, "by Triton"
    dispatch.cuda.prepare(codes, M, spec, (3,), torch.bfloat16)
    after = dispatch.cuda.matmul(x, codes.t(), spec, bias, scales=scales)
    assert dispatch.library.launches == [M] * spec.k_slices
    assert_same_bits(after, before)
    assert_same_bits(after, dispatch.cuda.matmul(x, matrix(codes, scales).t(), plain, bias))
    _, known = dispatch.cuda.known(0)
    assert list(known) == [f"N={N} K={K} bfloat16 {spec.name}"], "a certificate"
    assert problem_of(x, codes.t(), bias, spec) != problem_of(x, matrix(codes, scales).t(), bias, plain)


def add(parts: torch.Tensor, tree: bool, out: torch.Tensor | None = None) -> torch.Tensor:
    assert tree
    [left, right] = parts
    return left + right if out is None else torch.add(left, right, out=out)


class OnCpu(Autotuner):
    def _copies(self) -> int:
        return 2


@pytest.fixture
def tuner(cublaslt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> OnCpu:
    """Of a cuBLASLt that works on the CPU."""

    def mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        total = sequential_k(a, b, bias)
        return total if out is None else out.copy_(total)

    draw = autotune.cancelling_operands
    monkeypatch.setattr(autotune, "cancelling_operands", lambda problem, m, _: draw(problem, m, torch.device("cpu")))
    monkeypatch.setattr(triton_gemm, "mm", mm)
    monkeypatch.setattr(triton_gemm, "mm_ptr", mm)
    problem = GemmProblem(N, K, torch.bfloat16, PACKED, None)
    return OnCpu(problem, cublaslt.Matmul(problem.k_slice), M)


class Clock:
    """The last way is the fastest."""

    def time(self, ways: Sequence[Sequence[Any]], expected: float, replays: int) -> list[list[float]]:
        for calls in ways:
            for call in calls:
                call()
        return [[9.0]] * (len(ways) - 1) + [[1.0]]


def test_operands_of_a_certificate_are_stored_in_it_and_show_the_order_of_a_sum(tuner: OnCpu) -> None:
    assert tuner.b.dtype == torch.uint8
    assert_same_bits(tuner.product, sequential_k(tuner.a, tuner.matrix))
    assert (sequential_k(tuner.a, tuner.matrix, splits=2) != tuner.product).double().mean() > 0.5
    assert tuner.tune(16, (), None).served_by == "cuBLASLt"


@pytest.mark.parametrize(("zero", "served_by"), [(8, "Gluon"), (9, "cuBLASLt")])
def test_a_kernel_that_reads_it_as_stored_is_a_row_and_is_certified(
    zero: int, served_by: str, tuner: OnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def packed(a, b, bias, out, reduction, tile, overlaps, spec, scales) -> torch.Tensor:
        assert (spec, b.dtype, overlaps) == (PACKED, torch.uint8, True)
        whole = decode((b.t(), *scales), torch.empty(N, K, dtype=a.dtype), zero)
        return out.copy_(sequential_k(a, whole.t(), bias))

    monkeypatch.setattr(triton_gemm, "gemm_sm90_swap_ab", packed)
    monkeypatch.setitem(TILES, (TOY, NONE), lambda *_: NARROW_TILES[:1])
    tuned = tuner.tune(16, (), Clock())
    assert tuned.served_by == served_by
    assert tuned.refused == ((NARROW_TILES[0].about,) if zero == 9 else ())


def test_the_check_and_its_certificate_name_what_a_layer_computes(dispatch: SimpleNamespace, monkeypatch) -> None:
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.linear import ReplicatedLinear

    from vllm_batch_invariant.integration.layers import linear
    from vllm_batch_invariant.integration.side_table import beside
    from vllm_batch_invariant.verify.check import operations

    _, codes, scales, _ = operands()
    layer = ReplicatedLinear.__new__(ReplicatedLinear)
    torch.nn.Module.__init__(layer)
    layer.input_size, layer.output_size, layer.bias, layer.weight = K, N, None, codes
    layer.quant_method = SimpleNamespace(
        apply=lambda layer, x, bias: torch_op.linear(x, layer.weight, bias, PACKED.name, scales)
    )
    beside(layer).expected = linear._Expected(M, PACKED, (), None)
    model = torch.nn.Sequential(layer, torch.nn.Embedding(1, 1, dtype=torch.bfloat16))
    [certificate] = operations.certify(model, "linear", (2, 17))
    assert (certificate.shape, certificate.difference) == (f"0: K={K}, N={N}, bfloat16, toy4", "")
    assert certificate.compared > 16 * N
    monkeypatch.setattr(operations, "_is_replaced", lambda _: True)
    like = torch.empty(0, dtype=torch.bfloat16)
    assert operations._gpu_certificate(like, layer, None, PACKED) == "no certificate: by Triton alone"
    dispatch.cuda.prepare(codes, M, PACKED, (), torch.bfloat16)
    assert "cuBLASLt serves 3 of 3 buckets" in operations._gpu_certificate(like, layer, None, PACKED)
