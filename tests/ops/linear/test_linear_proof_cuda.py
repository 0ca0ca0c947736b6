"""The autotuner on a GPU: a schedule with the expected bits passes, another is refused, named and not used."""

from itertools import product

import pytest
import torch

from tests.assertions import ROW_COUNTS, assert_same_bits
from tests.ops.linear.cases import HALVES, KINDS, operands, sequential_k, turned
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.linear import linear, mm, prepare, settle

pytest.importorskip("triton")

from vllm_batch_invariant.ops.linear import autotune, autotune_cache, cuda, triton_gemm
from vllm_batch_invariant.ops.linear.autotune import M_BUCKETS, Autotuner, Inconsistent
from vllm_batch_invariant.ops.linear.problem import GemmProblem, problem_of
from vllm_batch_invariant.ops.linear.schedule import NARROW_TILES, narrow_tiles
from vllm_batch_invariant.ops.linear.spec import BIASED, PRODUCT, spec_of

NARROW = ((896, 4864), (768, 4096), (1280, 8192))
"""(N, K) for which a library likes to split K."""
LAYOUTS = [
    (torch.bfloat16, True, True),
    (torch.bfloat16, True, False),
    (torch.bfloat16, False, True),
    (torch.bfloat16, False, False),
    (torch.float16, True, True),
]
"""dtype; whether K is the inner side of a and of b."""
WORKSPACE = 64 << 20


@pytest.fixture
def cublaslt():
    pytest.importorskip("nvmath")
    from vllm_batch_invariant.ops.linear import cublaslt

    return cublaslt


def forget() -> None:
    """What a new process does not know."""
    cuda.dispatcher._tuned.clear()
    cuda._stored.cache_clear()
    cuda.dispatcher._plans.clear()


@pytest.fixture
def no_measuring(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    return lambda: monkeypatch.setattr(autotune, "tune", refuse)


def schedules(x, weight, bias=None) -> dict[int, autotune.TunedSchedule]:
    return cuda.tuned_schedules(problem_of(x, weight.t(), bias))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("n", "k"), NARROW)
def test_an_algorithm_that_splits_k_does_not_agree(n, k, dtype, cublaslt):
    problem = GemmProblem(n, k, dtype, PRODUCT, device=0)
    autotuner = Autotuner(problem, cublaslt.Matmul(problem), max_m=64)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")
    splitting = 0
    for m in (1, 8, 16, 33, 64):
        for algorithm in autotuner.matmul.algorithms(m, 8, WORKSPACE):
            if algorithm.split > 1:
                splitting += 1
                assert not autotuner.verify_bitwise(autotuner.runner(algorithm, workspace), (m,)), (
                    f"{m} rows, {algorithm}"
                )
    assert splitting, "the heuristic named none"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "a_k_major", "b_k_major"), LAYOUTS)
def test_every_algorithm_that_does_not_split_agrees(dtype, a_k_major, b_k_major, bias, cublaslt):
    shapes = [*NARROW, (2560, 2048)] if a_k_major and b_k_major else [(768, 2048)]
    for n, k in shapes:
        problem = GemmProblem(n, k, dtype, spec_of(bias), 0, a_k_major, b_k_major)
        autotuner = Autotuner(problem, cublaslt.Matmul(problem), max_m=4096)
        named = 0
        for bucket in (8, 16, 24, 64, 256, 1024, 4096):
            ms = autotuner.ms_to_verify(bucket, ())
            for algorithm in autotuner.matmul.algorithms(bucket, 8):
                assert algorithm.split == 1
                assert autotuner.verify_bitwise(autotuner.runner(algorithm), ms), f"M of {ms}, {problem}, {algorithm}"
                named += 1
        assert named >= 7


def test_one_differing_bit_in_the_last_element_is_seen(cublaslt):
    problem = GemmProblem(768, 1024, torch.bfloat16, BIASED, device=0)
    autotuner = Autotuner(problem, cublaslt.Matmul(problem), max_m=256)

    def off_by_one(a: torch.Tensor) -> torch.Tensor:
        out = autotuner.run_base(a)
        out.view(torch.int16)[-1, -1] += 1
        return out

    ms = autotuner.ms_to_verify(256, ())
    assert autotuner.verify_bitwise(autotuner.run_base, ms)
    assert not autotuner.verify_bitwise(off_by_one, ms)
    assert not autotuner.verify_bitwise(lambda a: off_by_one(a) if len(a) == ms[1] else autotuner.run_base(a), ms)


def test_a_split_shows_in_cancelling_operands_and_hides_in_random_ones():
    moved = {}
    for kind in KINDS:
        x, weight, _ = operands(kind, 16, 768, 4096, torch.bfloat16)
        a, b = x.view(16, 2, 2048).transpose(0, 1), weight.view(768, 2, 2048).permute(1, 2, 0)
        halves = [triton_gemm.accumulate(half_a, half_b) for half_a, half_b in zip(a, b, strict=True)]
        split = (halves[0] + halves[1]).bfloat16()
        moved[kind] = (split != sequential_k(x, weight)).double().mean().item()
    assert moved["cancelling"] > 0.9
    assert moved["random"] < 0.05


@pytest.mark.parametrize("k", [16, 17, 100, 4096])
@pytest.mark.parametrize("dtype", HALVES)
def test_cancelling_operands_multiply_to_zero(dtype, k):
    x, weight, _ = operands("cancelling", 33, 40, k, dtype)
    assert (x.double() @ weight.double().t()).abs().max() < 1e-10
    assert sequential_k(x, weight).abs().max() < 1e-2


def test_tuned_schedules_outlive_the_process(untuned, no_measuring, cublaslt):
    x, weight, bias = operands("cancelling", 100, 384, 1024, torch.bfloat16)
    prepare(weight, 100, BIASED, sizes=(3, 100))
    made = dict(schedules(x, weight, bias))
    assert sorted(made) == [bucket for bucket in M_BUCKETS if bucket <= 128]
    assert {3, 100} < {count for tuned in made.values() for count in tuned.checked}
    assert any(tuned.algorithm for tuned in made.values())
    forget()
    no_measuring()
    prepare(weight, 100, BIASED, sizes=(3, 100))
    assert schedules(x, weight, bias) == made
    assert cuda.known(0)[1] == {str(problem_of(x, weight.t(), bias)): made}
    for m in (1, 3, 100):
        assert_same_bits(linear(x[:m], weight, bias), sequential_k(x, weight, bias)[:m], f"{m} rows")


def test_tuned_schedules_of_another_environment_are_not_read(untuned, monkeypatch):
    x, weight, _ = operands("cancelling", 8, 384, 1024, torch.bfloat16)
    prepare(weight, 8)
    assert schedules(x, weight)
    before = cuda._environment(0)
    for key in before:
        forget()
        monkeypatch.setattr(cuda, "_environment", lambda _, key=key: {**before, key: "another"})
        assert not schedules(x, weight), key
    forget()
    monkeypatch.setattr(cuda, "_environment", lambda _: before)
    assert schedules(x, weight)


def test_the_environment_names_what_a_measurement_is_true_for():
    found = autotune_cache.environment(0, "1.2.3")
    assert torch.cuda.get_device_name(0) in found["gpu"]
    assert found["cublaslt"] == "1.2.3"
    assert found["torch"] == torch.__version__
    assert found["driver"]


def test_a_cache_that_cannot_be_written_or_read_is_harmless(untuned, monkeypatch, tmp_path):
    x, weight, bias = operands("cancelling", 40, 384, 1024, torch.bfloat16)
    expected = sequential_k(x, weight, bias)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    prepare(weight, 40, BIASED)
    assert_same_bits(linear(x, weight, bias), expected)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    path = autotune_cache._path(cuda._environment(0))
    path.parent.mkdir()
    path.write_text("{ not JSON")
    prepare(weight, 40, BIASED)
    assert_same_bits(linear(x, weight, bias), expected)
    assert autotune_cache.load(cuda._environment(0)), "it was written anew"


def test_a_wrong_schedule_is_refused_named_and_not_used(untuned, cublaslt, monkeypatch, log):
    x, weight, bias = operands("cancelling", 40, 384, 1024, torch.bfloat16)
    run, uses = cublaslt.Matmul.run, []

    def off_by_one(self, algorithm, a, b, bias, out, *rest, **strides) -> None:
        uses.append(len(a))
        run(self, algorithm, a, b, bias, out, *rest, **strides)
        out.view(torch.int16)[-1, -1] += 1

    monkeypatch.setattr(cublaslt.Matmul, "run", off_by_one)
    prepare(weight, 64, BIASED)
    for bucket, tuned in schedules(x, weight, bias).items():
        assert tuned.algorithm is None
        assert tuned.refused, bucket
        for about in tuned.refused:
            assert f"{about} is not used for N=384 K=1024 bfloat16 bias, up to {bucket} rows" in log.text
    uses.clear()
    for m in range(1, 41):
        assert_same_bits(linear(x[:m], weight, bias), sequential_k(x, weight, bias)[:m], f"{m} rows")
    assert not uses


def test_only_split_schedules_leave_a_gemm_to_triton(untuned, cublaslt, monkeypatch, log):
    x, weight, _ = operands("cancelling", 40, 896, 4864, torch.bfloat16)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")
    algorithms, run = cublaslt.Matmul.algorithms, cublaslt.Matmul.run
    asked = []

    def splitting(self, m, most, workspace=0):
        found = [one for one in algorithms(self, m, 8, WORKSPACE) if one.split > 1]
        asked.extend(one.about for one in found)
        return found

    monkeypatch.setattr(cublaslt.Matmul, "algorithms", splitting)
    monkeypatch.setattr(cublaslt.Matmul, "run", lambda self, *given, **_: run(self, *given[:5], workspace))
    prepare(weight, 64)
    assert asked, "the heuristic named none"
    assert all(tuned.algorithm is None for tuned in schedules(x, weight).values())
    assert [about for tuned in schedules(x, weight).values() for about in tuned.refused] == asked
    assert all(f"{about} is not used" in log.text for about in asked)
    for m in (1, 7, 8, 9, 40):
        assert_same_bits(linear(x[:m], weight), sequential_k(x, weight)[:m], f"{m} rows")


def test_the_fastest_schedule_that_agrees_is_used(untuned, monkeypatch, cublaslt):
    monkeypatch.setattr(cuda, "_TUNING_SECONDS", 30.0)
    x, weight, _ = operands("cancelling", 300, 896, 4864, torch.bfloat16)
    prepare(weight, 256, sizes=(1, 100))
    for bucket, tuned in schedules(x, weight).items():
        if bucket <= 256:
            times = tuned.microseconds
            timed = {"cublaslt", "triton", *(["gluon"] if narrow_tiles(bucket, 896, Gpu.of(0)) else [])}
            assert set(times) == timed, bucket
            assert all(0 < time < 1000 for time in times.values())
            if not tuned.refused:
                costs = {**times, "cublaslt": times["cublaslt"] * autotune._TRITON_GAIN}
                assert costs[tuned.served_by.lower()] == min(costs.values()), bucket
    whole = sequential_k(x, weight)
    for m in (count for count in ROW_COUNTS if count <= 300):
        assert_same_bits(linear(x[:m], weight), whole[:m], f"{m} rows")


@pytest.mark.usefixtures("sm90")
def test_products_that_are_timed_in_a_row_keep_their_bits(untuned, monkeypatch):
    monkeypatch.setattr(cuda, "_TUNING_SECONDS", 30.0)
    shapes = (896, 4864), (4864, 896), (1280, 896)
    given = [operands("cancelling", 64, n, k, torch.bfloat16)[:2] for n, k in shapes]
    for _, weight in [*given, *given]:
        prepare(weight, 64, sizes=(1, 40), repeats=True)
    assert any(tuned.near for x, weight in given for tuned in schedules(x, weight).values())
    settle(torch.device("cuda"))
    for x, weight in given:
        assert not any(tuned.near for tuned in schedules(x, weight).values())
        whole = sequential_k(x, weight)
        for m in (1, 2, 7, 8, 9, 16, 17, 33, 40, 63, 64):
            assert_same_bits(linear(x[:m], weight), whole[:m], f"{m} rows")


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bias", [False, True])
def test_every_narrow_tile_agrees(bias, dtype):
    for n, k in (*NARROW, (2048, 11008)):
        autotuner = Autotuner(GemmProblem(n, k, dtype, spec_of(bias), device=0), None, max_m=128)
        for bucket, tile in product((8, 16, 24, 64, 128), NARROW_TILES):
            assert autotuner.verify_bitwise(autotuner.runner(tile), autotuner.ms_to_verify(bucket, ())), (
                f"{n} {bucket} {tile}"
            )


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("tile", NARROW_TILES, ids=lambda tile: tile.about)
def test_a_narrow_tile_that_won_serves_also_in_a_graph(tile, untuned, cublaslt, monkeypatch):
    x, weight, bias = operands("cancelling", 40, 384, 1024, torch.bfloat16)
    prepare(weight, 64, BIASED)
    for bucket, tuned in schedules(x, weight, bias).items():
        schedules(x, weight, bias)[bucket] = autotune.TunedSchedule(None, tuned.checked, (), {}, tile)
    run, served = triton_gemm.gemm_sm90_swap_ab, []
    monkeypatch.setattr(triton_gemm, "gemm_sm90_swap_ab", lambda a, *given: served.append(len(a)) or run(a, *given))
    expected = sequential_k(x, weight, bias)
    for m in range(1, 41):
        assert_same_bits(linear(x[:m], weight, bias), expected[:m], f"{m} rows")
    assert served == [*range(1, 41)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(x[:33], weight, bias)
    x.copy_(x.flip(0))
    graph.replay()
    assert_same_bits(out, expected.flip(0)[:33])
    assert served[-1] == 33


def test_a_gemm_is_tuned_at_its_third_use_in_a_range(untuned, cublaslt):
    x, weight, bias = operands("cancelling", 40, 384, 1024, torch.bfloat16)
    whole = sequential_k(x, weight, bias)
    for m, tuned in ((5, []), (1, []), (40, []), (8, [8]), (8, [8]), (33, [8]), (40, [8, 48])):
        assert_same_bits(linear(x[:m], weight, bias), whole[:m], f"{m} rows")
        assert sorted(schedules(x, weight, bias)) == tuned, f"after {m} rows"


@pytest.mark.parametrize("prepared", [False, True])
def test_without_memory_to_tune_a_gemm_is_left_to_triton(prepared, untuned, cublaslt, monkeypatch, log):
    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(autotune, "cancelling_operands", exhausted)
    x, weight, bias = operands("cancelling", 40, 384, 1024, torch.bfloat16)
    if prepared:
        prepare(weight, 64, BIASED)
    for use in range(5):
        assert_same_bits(linear(x, weight, bias), sequential_k(x, weight, bias), f"use {use}")
    assert not schedules(x, weight, bias)
    assert "left to Triton: no memory" in log.text


def test_a_reference_that_follows_the_number_of_rows_is_an_error(untuned, monkeypatch):
    x, weight, _ = operands("cancelling", 8, 384, 1024, torch.bfloat16)
    stock = triton_gemm.mm

    def varying(a: torch.Tensor, b: torch.Tensor, *more: torch.Tensor | None) -> torch.Tensor:
        return stock(a, b, *more) if len(a) != 5 else stock(a.flip(1), b.flip(0), *more)

    monkeypatch.setattr(triton_gemm, "mm", varying)
    with pytest.raises(Inconsistent, match=r"N=384 K=1024 bfloat16 has other bits at one of \(1, 5, 8\) rows"):
        prepare(weight, 8)
    assert not schedules(x, weight)


def test_an_algorithm_refused_for_some_rows_leaves_them_to_triton(untuned, cublaslt, monkeypatch):
    x, weight, bias = operands("cancelling", 40, 384, 1024, torch.bfloat16)
    prepare(weight, 64, BIASED)
    refused = []

    def refuse(self, algorithm, a, *_: object, **__: object) -> None:
        refused.append(len(a))
        raise cublaslt.Error(15)

    monkeypatch.setattr(cublaslt.Matmul, "run", refuse)
    for m in (1, 13, 40):
        assert_same_bits(linear(x[:m], weight, bias), sequential_k(x, weight, bias)[:m], f"{m} rows")
    assert refused == [1, 13, 40]


def test_the_setting_leaves_everything_to_triton(untuned, without_cublaslt, monkeypatch):
    x, weight, bias = operands("cancelling", 40, 384, 1024, torch.bfloat16)
    if cuda.cublaslt:
        for name in ("__init__", "run", "algorithms"):
            monkeypatch.setattr(cuda.cublaslt.Matmul, name, lambda *_, **__: pytest.fail("cuBLASLt was used"))
    prepare(weight, 64, BIASED)
    assert all(tuned.algorithm is None for tuned in schedules(x, weight, bias).values())
    for m in range(1, 41):
        assert_same_bits(linear(x[:m], weight, bias), sequential_k(x, weight, bias)[:m], f"{m} rows")
    assert cuda._environment(0)["cublaslt"] == "not used"


@pytest.mark.parametrize(("dtype", "a_k_major", "b_k_major"), LAYOUTS)
def test_every_layout_is_tuned_and_served(dtype, a_k_major, b_k_major, untuned, cublaslt, monkeypatch):
    run, uses = cublaslt.Matmul.run, []
    x, weight, bias = operands("cancelling", 256, 384, 1024, dtype)
    a, b = turned(x, not a_k_major), turned(weight, not b_k_major).t()
    expected = sequential_k(x, weight, bias)
    triton_gemm.mm(a[:64], b, bias)
    for use in range(4):
        assert_same_bits(mm(a[:64], b, bias), expected[:64], f"use {use}")
    tuned = cuda.tuned_schedules(problem_of(a, b, bias))[64]
    assert tuned.algorithm, f"no algorithm of cuBLASLt passes: {tuned.refused}"
    monkeypatch.setattr(cublaslt.Matmul, "run", lambda *given, **strides: uses.append(1) or run(*given, **strides))
    for m in (49, 50, 56, 60, 63, 64):
        assert_same_bits(mm(a[:m], b, bias), expected[:m], f"{m} rows")
    assert len(uses) == 6


def test_the_heuristic_is_asked_for_no_split(cublaslt):
    for (n, k), m in product(NARROW, (1, 16, 64, 512)):
        matmul = cublaslt.Matmul(GemmProblem(n, k, torch.bfloat16, PRODUCT, device=0))
        found = matmul.algorithms(m, 8)
        assert 1 <= len(found) <= 8
        assert {algorithm.split for algorithm in found} == {1}
        assert len({algorithm.opaque for algorithm in found}) == len(found)
        assert len(found[0].opaque) == 64
