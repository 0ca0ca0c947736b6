"""What a receipt prints of a row's reduction is what a launcher hands to its kernel, and what bits on a CPU follow."""

from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.assertions import assert_same_bits
from vllm_batch_invariant.ops.attention import AttentionReduction
from vllm_batch_invariant.ops.common.numba_math import exp32
from vllm_batch_invariant.ops.norm import rms_norm
from vllm_batch_invariant.ops.reduce import SumReduction, mean
from vllm_batch_invariant.ops.softmax import SoftmaxReduction, softmax
from vllm_batch_invariant.ops.softmax import cpu as softmax_cpu
from vllm_batch_invariant.ops.softmax.reduction import LONGEST_WHOLE, SHORTEST_CHUNK
from vllm_batch_invariant.ops.top_k_top_p import TopKTopPReduction
from vllm_batch_invariant.ops.top_k_top_p import cpu as top_k_top_p_cpu
from vllm_batch_invariant.provenance import environment_here

EPS = 1e-6


@dataclass
class Spy:
    """Stands in the place of a kernel and notes its launches."""

    launches: list[tuple[tuple, dict[str, object]]] = field(default_factory=list)

    def run(self, *arguments: object, grid: tuple[int], warmup: bool, **options: object) -> None:
        self.launches.append((arguments, options))


@pytest.fixture
def spy(monkeypatch):
    pytest.importorskip("triton")

    def put(module: ModuleType, kernel: str) -> Spy:
        spy = Spy()
        monkeypatch.setattr(module, kernel, spy)
        return spy

    return put


@pytest.fixture
def printed(monkeypatch):
    """What a receipt says of a device's reductions."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))

    def of_device(device_type: str, hidden: int = 4096, vocabulary: int = 151_936) -> dict[str, dict[str, str | int]]:
        return environment_here(
            device_type,
            versions={},
            device={},
            hidden=hidden,
            vocabulary=vocabulary,
            dtype=torch.bfloat16,
            attention=AttentionReduction(),
            attention_by="none",
            engine={},
        ).reductions

    return of_device


def handed(launch: tuple[tuple, dict[str, object]]) -> dict[str, str | int]:
    """The options of a launch, those of a whole reduction one by one, and the dtype of the row that it is given, as a
    receipt prints them.
    """
    arguments, options = launch
    options |= options.pop("NORM")._asdict() if "NORM" in options else {}
    plain = {name.lower(): str(value) if isinstance(value, bool) else value for name, value in options.items()}
    return plain | {"dtype": str(arguments[0].dtype).removeprefix("torch.")}


@pytest.mark.parametrize("hidden", [64, 100, 896, 4096, 20_000])
def test_a_norm_on_a_gpu_is_launched_as_the_receipt_says(hidden, spy, printed, monkeypatch):
    from vllm_batch_invariant.ops.common.dependent_launch import LaunchSchedule
    from vllm_batch_invariant.ops.norm import cuda

    monkeypatch.setattr(LaunchSchedule, "of", lambda _: LaunchSchedule(overlaps=True))
    kernel = spy(cuda, "_rms_norm_kernel")
    cuda.rms_norm(torch.ones(3, hidden, dtype=torch.bfloat16), None, EPS, None, None)
    [launch] = kernel.launches
    says = printed("cuda", hidden=hidden)["norm"]
    assert says.pop("accumulate") == "float32"
    found = handed(launch)
    assert says.items() <= found.items()
    assert found.keys() - says.keys() == {
        *("variance_size", "has_residual", "has_weight", "adds_one"),
        *("group", "quantise", "overlaps", "launch_pdl"),
    }


@pytest.mark.parametrize("vocabulary", [1000, LONGEST_WHOLE, LONGEST_WHOLE + 1, 151_936, 300_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_on_a_gpu_are_launched_as_the_receipt_says(dtype, vocabulary, spy, printed):
    from vllm_batch_invariant.ops.softmax import cuda

    names = ("_softmax_kernel",) if vocabulary <= LONGEST_WHOLE else ("_chunk_kernel", "_merged_softmax_kernel")
    kernels = [spy(cuda, name) for name in names]
    cuda.log_softmax(torch.ones(2, vocabulary, dtype=dtype), -1, dtype=torch.float32)
    says = printed("cuda", vocabulary=vocabulary)["softmax (logprobs)"]
    for kernel in kernels:
        [launch] = kernel.launches
        found = handed(launch)
        assert (found["block"], found["num_warps"], found["dtype"]) == (says["block"], says["num_warps"], says["dtype"])
        assert found.get("num_chunks", 1) == -(-vocabulary // says.get("chunk", vocabulary))
        assert "chunk" not in says or says["chunk"] == says["block"]


@pytest.mark.parametrize("length", [100, 5120, 65_537, 5_000_000_000])
def test_a_sum_on_a_gpu_is_launched_with_its_reduction_and_so_are_its_chunks(length, spy):
    from vllm_batch_invariant.ops.reduce import cuda

    kernel = spy(cuda, "_sum_kernel")
    reduction = SumReduction.of_device("cuda", length, torch.bfloat16)
    cuda._row_sums(torch.empty(1, 1, dtype=torch.bfloat16).expand(1, length), None, reduction)
    lengths = [length]
    while lengths[-1] > reduction.chunk:
        lengths.append(-(-lengths[-1] // reduction.chunk))
    dtypes = [torch.bfloat16, *[torch.float32] * (len(lengths) - 1)]
    for (_, options), size, dtype in zip(kernel.launches, lengths, dtypes, strict=True):
        expected = SumReduction.of_device("cuda", size, dtype)
        assert (options["CHUNK"], options["BLOCK"]) == (expected.chunk, expected.block)
        assert (options["NUM_CHUNKS"], options["num_warps"]) == (expected.num_chunks, expected.num_warps)


def sum_by_lanes(row: np.ndarray, lanes: int) -> np.float32:
    """Element i is added to lane i % lanes, ascending, and the lanes by halving."""
    sums = np.zeros(lanes, np.float32)
    for start in range(0, row.size, lanes):
        part = row[start : start + lanes]
        sums[: part.size] += part
    while sums.size > 1:
        sums = sums[: sums.size // 2] + sums[sums.size // 2 :]
    return sums[0]


@pytest.mark.parametrize("length", [1, 63, 65, 777])
def test_bits_on_a_cpu_are_those_of_the_lanes_that_the_receipt_prints(length, printed):
    x = torch.randn(length, generator=torch.Generator().manual_seed(length))
    row, says = x.numpy(), printed("cpu", hidden=length, vocabulary=length)
    total = sum_by_lanes(row, SumReduction.of_device("cpu", length, torch.float32).lanes)
    assert_same_bits(mean(x), torch.tensor(total / np.float32(length)))
    squares = sum_by_lanes(row * row, says["norm"]["lanes"]) / np.float32(length)
    rstd = np.float32(1.0) / np.sqrt(squares + np.float32(EPS))
    assert_same_bits(rms_norm(x, None, EPS), torch.from_numpy(row * rstd))
    p = np.array([exp32(value) for value in row - row.max()], np.float32)
    sum_of_p = sum_by_lanes(p, says["softmax (logprobs)"]["lanes"])
    assert_same_bits(softmax(x), torch.from_numpy(p / sum_of_p))
    if length > 64:  # the check can fail
        assert sum_by_lanes(row, 32) != total


def test_the_exp_that_a_receipt_prints_is_the_one_that_is_called(printed):
    assert printed("cpu")["softmax (logprobs)"]["exp"] == printed("cpu")["top-p"]["exp"] == "numba_math.exp32"
    assert softmax_cpu.exp32 is top_k_top_p_cpu.exp32 is exp32
    pytest.importorskip("triton")
    from vllm_batch_invariant.ops.softmax import cuda as softmax_cuda
    from vllm_batch_invariant.ops.top_k_top_p import cuda as top_k_top_p_cuda

    assert printed("cuda")["softmax (logprobs)"]["exp"] == printed("cuda")["top-p"]["exp"] == "triton.language.exp"
    for kernel in (softmax_cuda._softmax_kernel, softmax_cuda._merged_softmax_kernel, top_k_top_p_cuda._weight):
        assert "tl.exp(" in kernel.src
        assert kernel.fn.__globals__["tl"].__name__ == "triton.language"


def test_the_unit_that_a_receipt_prints_is_the_one_of_the_kernels(printed):
    pytest.importorskip("triton")
    from vllm_batch_invariant.ops.top_k_top_p import cuda

    says = printed("cuda")["top-p"]
    assert cuda._ONE.value == top_k_top_p_cpu._ONE == 1 << says["unit_bits"]
    assert cuda._WEIGHTLESS.value == TopKTopPReduction.of_device("cuda").weightless
    assert says["accumulate"] == "int64"


@pytest.mark.parametrize(
    "length", [1, 31, 4096, LONGEST_WHOLE, LONGEST_WHOLE + 1, 151_936, 262_144, 262_145, 10_000_000, 10**9]
)
def test_a_softmax_has_whole_rows_or_chunks_that_a_program_can_hold(length):
    reduction = SoftmaxReduction.of_device("cuda", length, torch.float32)
    if length <= LONGEST_WHOLE:
        assert reduction.chunk is None
        assert length <= reduction.block
    else:
        assert SHORTEST_CHUNK <= reduction.block == reduction.chunk <= LONGEST_WHOLE
        assert (reduction.chunk == SHORTEST_CHUNK) == (length <= 262_144)
    assert 32 * reduction.num_warps <= reduction.block == 1 << (reduction.block.bit_length() - 1)
    assert reduction.num_chunks <= reduction.padded_chunks < 2 * reduction.num_chunks


def test_a_reduction_is_computed_once():
    first = SumReduction.of_device("cuda", 4096, torch.bfloat16)
    assert SumReduction.of_device("cuda", 4096, torch.bfloat16) is first
    assert SumReduction.of_device("cuda", 4096, torch.float32) != first
