"""How GEMMs are tuned: what is verified, which schedule is chosen, and how it is kept and used."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from tests.assertions import assert_same_bits
from tests.fakes.cublaslt import ALGORITHM, sequential_k
from vllm_batch_invariant import kept_file
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.installing import how_to_install
from vllm_batch_invariant.ops.common.cancelling import cancelling_gated
from vllm_batch_invariant.ops.formats import PLAIN
from vllm_batch_invariant.ops.linear import LinearReduction
from vllm_batch_invariant.ops.linear.schedule import GATED_TILES, NARROW_TILES, TILES, NarrowTile

pytest.importorskip("triton")

from vllm_batch_invariant.ops.linear import autotune, autotune_cache, cuda, triton_gemm
from vllm_batch_invariant.ops.linear.autotune import M_BUCKETS, Autotuner, Inconsistent, TunedSchedule, m_bucket
from vllm_batch_invariant.ops.linear.problem import GemmProblem, problem_of
from vllm_batch_invariant.ops.linear.spec import BIAS, BIASED, GATED, PRODUCT, SWIGLU, MatmulSpec
from vllm_batch_invariant.ops.silu import cpu as silu_cpu

PROBLEM = GemmProblem(40, 96, torch.bfloat16, BIASED, device=0)
ENVIRONMENT = {"gpu": "made up", "driver": "1.2", "triton": "3"}
HALVES = (torch.bfloat16, torch.float16)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def test_every_number_of_rows_has_one_range() -> None:
    assert list(M_BUCKETS) == sorted(set(M_BUCKETS))
    assert M_BUCKETS[0] >= 1
    assert M_BUCKETS[-1] == 2**31
    assert all(bucket % 8 == 0 for bucket in M_BUCKETS), "so that operands with rows side by side stay aligned"
    near = {min(bucket + step, M_BUCKETS[-1]) for bucket in M_BUCKETS for step in (-1, 0, 1)}
    for m in near | set(range(1, 5000)):
        bucket = m_bucket(m)
        assert m <= bucket
        assert all(other >= bucket for other in M_BUCKETS if other >= m)


@pytest.mark.parametrize("a_k_major", [True, False])
def test_both_ends_the_middle_and_every_size_of_the_caller_are_verified(a_k_major: bool) -> None:
    autotuner = object.__new__(Autotuner)
    autotuner.problem, autotuner.max_m = GemmProblem(8, 16, torch.bfloat16, PRODUCT, 0, a_k_major), 2**31
    sizes = (1, 2, 4, *range(8, 513, 8), 1000, 5000)
    first = 1
    for bucket in M_BUCKETS:
        ms, plain = autotuner.ms_to_verify(bucket, sizes), autotuner.ms_to_verify(bucket, ())
        assert list(ms) == sorted(set(ms))
        assert all(first <= m <= bucket for m in ms)
        assert bucket in plain
        if a_k_major:
            assert {first, bucket} <= set(plain)
            assert {size for size in sizes if first <= size <= bucket} <= set(ms)
            assert any(m % 2 for m in plain), "an odd one"
        else:
            assert not any(m % 8 for m in ms)
        first = bucket + 1
    autotuner.max_m = 48
    assert max(autotuner.ms_to_verify(48, sizes)) == 48


def test_a_problem_has_a_name_of_its_own() -> None:
    specs = (PRODUCT, BIASED, GATED, MatmulSpec(k_slices=2))
    kinds = product((40, 48), (96, 104), HALVES, specs, (0,), (True, False), (True, False))
    names = [str(GemmProblem(*kind)) for kind in kinds]
    assert len(set(names)) == len(names)
    assert str(PROBLEM) == "N=40 K=96 bfloat16 bias"


@pytest.mark.parametrize("dtype", HALVES)
def test_a_problem_tells_layouts_apart_and_leaves_the_rest_to_triton(dtype: torch.dtype, cublaslt: ModuleType) -> None:
    a, weight, bias = draw(64, 96, dtype=dtype), draw(40, 96, dtype=dtype), draw(40, dtype=dtype)
    m_major, other_weight = a.t().contiguous().t(), weight.t().contiguous().t()

    def kind(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
        found = problem_of(a, b, bias)
        return found and str(found)

    name = f"N=40 K=96 {str(dtype).removeprefix('torch.')}"
    assert kind(a, weight.t()) == name
    assert kind(a[:1], weight.t()) == kind(a[3:4], weight.t()) == kind(a[::2], weight.t()) == name
    assert kind(a, weight.t(), bias) == f"{name} bias"
    assert kind(m_major, weight.t()) == kind(m_major[:16], weight.t()) == f"{name} TT"
    assert kind(a, other_weight.t()) == f"{name} NN"
    assert kind(m_major, other_weight.t()) == f"{name} TN"
    for reason, operands in {
        "no rows": (a[:0], weight.t()),
        "no K": (a[:, :0], weight[:, :0].t()),
        "K below a step": (a[:, :8], weight[:, :8].t()),
        "N not a multiple of 8": (a, weight[:36].t()),
        "one column": (a, weight[:1].t()),
        "rows that are not aligned": (a[:, :90].contiguous(), weight[:, :90].contiguous().t()),
        "a misaligned": (a[:, 4:84], weight[:, :80].t()),
        "b misaligned": (a[:, :80], weight[:, 4:84].t()),
        "every second element": (a[:, ::2], weight[:, ::2].t()),
        "columns that are not aligned": (draw(60, 96, dtype=dtype).t().contiguous().t(), weight.t()),
        "fp32": (a.float(), weight.float().t()),
        "a bias with a stride": (a, weight.t(), torch.stack([bias, bias], 1)[:, 0]),
        "a bias that is misaligned": (a, weight.t(), torch.cat([bias[:1], bias])[1:]),
    }.items():
        assert kind(*operands) is None, reason


def activate(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up by PyTorch."""
    gate, up = x.chunk(2, -1)
    made = torch.nn.functional.silu(gate) * up
    return made if out is None else out.copy_(made)


class Chosen(Autotuner):
    """On the CPU, with algorithms that are named and give what they are told to."""

    def __post_init__(self) -> None:
        p = self.problem
        self.a, weight = autotune.cancelling_operands(p, self.max_m, torch.device("cpu"))
        self.b, self.bias, self.scales = weight.t(), None, ()
        self.matrix, self.product = self.b, sequential_k(self.a, self.b)
        self.finished = activate(self.product) if p.spec is GATED else self.product

    def runner(
        self, algorithm: SimpleNamespace | NarrowTile, workspace: torch.Tensor | None = None
    ) -> Callable[..., torch.Tensor]:
        if isinstance(algorithm, NarrowTile):
            return super().runner(algorithm)
        return lambda a, b=self.b, out=None: algorithm.multiply(a, b)

    def _copies(self) -> int:
        return 2


def one(about: str, multiply: Callable[..., torch.Tensor] = sequential_k) -> SimpleNamespace:
    """An algorithm; SimpleNamespace has no hash of its own."""

    class Named(SimpleNamespace):
        __hash__ = object.__hash__

    return Named(about=about, multiply=multiply, split=1)


def off_by_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = sequential_k(a, b)
    out.view(torch.int16)[-1, -1] += 1
    return out


def split(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return sequential_k(a, b, splits=2)


def split_for_few_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return sequential_k(a, b, splits=2 if len(a) == 9 else 1)


@pytest.fixture
def autotuner(cublaslt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Chosen]:
    """Builds one whose heuristic names these algorithms."""
    monkeypatch.setattr(triton_gemm, "mm", lambda a, b, bias, out=None: sequential_k(a, b, bias))
    for kind in TILES:
        monkeypatch.setitem(TILES, kind, lambda *_: ())
    monkeypatch.setattr(autotune, "_uncompiled", set())

    def build(*algorithms: SimpleNamespace) -> Chosen:
        return Chosen(PROBLEM, SimpleNamespace(algorithms=lambda m, most: list(algorithms)), 24)

    return build


@pytest.mark.parametrize("wrong", [off_by_one, split, split_for_few_rows])
def test_what_differs_in_one_bit_at_one_number_of_rows_is_refused_and_named(wrong, autotuner, log) -> None:
    tuned = autotuner(one("wrong", wrong), one("right"), one("another")).tune(16, (), None)
    assert tuned.algorithm.about == "right"
    assert tuned.refused == ("wrong",)
    assert tuned.checked == (9, 13, 16)
    assert "wrong is not used for N=40 K=96 bfloat16 bias, up to 16 rows" in log.text
    assert "right" not in log.text
    alone = autotuner(one("wrong", wrong)).tune(16, (), None)
    assert alone.algorithm is None
    assert alone.refused == ("wrong",)


def test_a_difference_at_a_size_of_the_caller_is_seen(autotuner) -> None:
    made = autotuner(one("wrong", lambda a, b: sequential_k(a, b, splits=1 + (len(a) == 11))))
    assert made.tune(16, (), None).refused == ()
    assert made.tune(16, (3, 11, 40), None).refused == ("wrong",)


def test_what_the_library_refuses_to_run_is_not_used(autotuner, cublaslt: ModuleType) -> None:
    def refuse(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if len(a) == 13:
            raise cublaslt.Error
        return sequential_k(a, b)

    tuned = autotuner(one("picky", refuse), one("right")).tune(16, (), None)
    assert tuned.algorithm.about == "right"
    assert tuned.refused == ("picky",)


def test_without_algorithms_or_without_the_library_triton_serves(autotuner) -> None:
    assert autotuner().tune(16, (), None) == TunedSchedule(None, (9, 13, 16), (), {})
    without = autotuner()
    without.matmul = None
    assert without.tune(16, (), None) == TunedSchedule(None, (9, 13, 16), (), {})


def test_a_reference_that_follows_the_number_of_rows_is_an_error(autotuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_gemm, "mm", lambda a, b, bias, out: split_for_few_rows(a, b))
    with pytest.raises(Inconsistent, match=r"N=40 K=96 bfloat16 bias has other bits at one of \(9, 13, 16\) rows"):
        autotuner(one("right")).tune(16, (), None)
    autotuner(one("right")).tune(24, (), None)


def test_a_gpu_that_a_tile_does_not_fit_into_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    def make(*_: object) -> None:
        raise OutOfResources(required=101_384, limit=101_376, name="shared memory")

    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(autotune.Gpu, "of", lambda index: SimpleNamespace(name="A10"))
    monkeypatch.setattr(autotune, "Autotuner", make)
    with pytest.raises(NotCovered, match=r"does not cover the GEMM N=40 K=96 bfloat16 bias on A10: .*101384.*; use"):
        autotune.tune(PROBLEM, None, [16])


def test_the_largest_range_is_timed_first_and_then_the_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no time for all, another program has the GPU."""
    tuned = []

    class Slow:
        def __init__(self, *_: object) -> None:
            pass

        def compile(self, buckets: Sequence[int]) -> None:
            clock.now += 60  # which is no time of the timing

        def tune(self, bucket: int, sizes: Sequence[int], timer: object) -> None:
            tuned.append((bucket, timer is not None))
            clock.now += 2

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(autotune.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(autotune, "Autotuner", Slow)
    monkeypatch.setattr(autotune, "GraphTimer", lambda device: object())
    found = autotune.tune(PROBLEM, None, [8, 64, 16, 4096, 24], tuning_seconds=5)
    assert tuned == [(4096, True), (8, True), (16, True), (24, False), (64, False)]
    assert found.keys() == {8, 16, 24, 64, 4096}


class Clock:
    """Says that ways take the given microseconds: Triton, then the algorithms."""

    def __init__(self, *microseconds: float) -> None:
        self.microseconds = microseconds

    def time(self, ways: Sequence[Sequence[Callable[[], object]]], expected: float, replays: int) -> list[list[float]]:
        for calls in ways:
            for call in calls:
                call()
        assert len(ways) == len(self.microseconds)
        return [[time - 1, time, time + 5] for time in self.microseconds]


@pytest.mark.parametrize(
    ("times", "expected", "known"),
    [
        ((9, 5, 4, 6), "b", {"cublaslt": 4, "triton": 9}),
        ((3, 5, 4, 6), None, {"cublaslt": 4, "triton": 3}),
        ((3.9, 5, 4, 6), "b", {"cublaslt": 4, "triton": 3.9}),
        ((9, 4, 5, 5), "a", {"cublaslt": 4, "triton": 9}),
    ],
)
def test_the_fastest_schedule_is_chosen_and_triton_only_for_a_gain(times, expected, known, autotuner) -> None:
    tuned = autotuner(one("a"), one("b"), one("c")).tune(16, (), Clock(*times))
    assert (tuned.algorithm and tuned.algorithm.about) == expected
    assert tuned.microseconds == known
    assert tuned.refused == ()


def test_the_fastest_schedule_is_not_chosen_for_its_speed_alone(autotuner) -> None:
    algorithms = one("a"), one("wrong", off_by_one), one("c")
    tuned = autotuner(*algorithms).tune(16, (), Clock(9, 8, 1, 7))
    assert tuned.algorithm.about == "c"
    assert tuned.refused == ("wrong",)
    assert tuned.microseconds == {"cublaslt": 7, "triton": 9}
    tuned = autotuner(*algorithms).tune(16, (), Clock(6, 8, 1, 7))
    assert tuned.algorithm is None
    assert tuned.refused == ("wrong",)


def test_of_few_rows_others_that_agree_and_take_little_more_time_are_kept(autotuner) -> None:
    algorithms = one("a"), one("b"), one("wrong", off_by_one), one("slow")
    tuned = autotuner(*algorithms).tune(16, (), Clock(4.5, 4.2, 4, 4.1, 5))
    assert tuned.algorithm.about == "b"
    assert [near and near.about for near in tuned.near] == ["a", None]
    assert autotuner(*algorithms).tune(16, (), None).near == (), "untimed"
    many = Chosen(PROBLEM, SimpleNamespace(algorithms=lambda m, most: list(algorithms[:2])), 96)
    assert many.tune(96, (), Clock(9, 4.2, 4)).near == ()


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., torch.Tensor]], list[NarrowTile]]:
    """Proposes two narrow tiles that multiply as they are told to; returns those that are run."""

    def build(multiply: Callable[..., torch.Tensor]) -> list[NarrowTile]:
        run = []

        def gemm_sm90_swap_ab(a, b, bias, out, reduction, tile, overlaps, spec, scales) -> torch.Tensor:
            assert overlaps, "as a layer's matmul is launched"
            run.append(tile)
            return multiply(a, b)

        monkeypatch.setitem(TILES, (PLAIN, BIAS), lambda *_: NARROW_TILES[:2])
        monkeypatch.setattr(triton_gemm, "gemm_sm90_swap_ab", gemm_sm90_swap_ab)
        return run

    return build


@pytest.mark.parametrize(
    ("times", "served_by"),
    [
        ((9, 5, 6, 4), "Gluon"),
        ((9, 5, 4.9, 6), "cuBLASLt"),
        ((9, 5, 4.8, 6), "Gluon"),
        ((3, 5, 6, 4), "Triton"),
    ],
)
def test_a_narrow_tile_is_chosen_where_it_gains(times, served_by, autotuner, narrow) -> None:
    narrow(sequential_k)
    tuned = autotuner(one("a")).tune(16, (), Clock(*times))
    assert tuned.served_by == served_by
    assert tuned.microseconds == {"triton": times[0], "cublaslt": times[1], "gluon": min(times[2:])}
    fastest = NARROW_TILES[0] if times[2] < times[3] else NARROW_TILES[1]
    assert tuned.tile == (fastest if served_by == "Gluon" else None)
    assert (tuned.algorithm is not None) == (served_by == "cuBLASLt")


@pytest.mark.parametrize("wrong", [off_by_one, split, split_for_few_rows])
def test_a_narrow_tile_with_other_bits_is_refused_and_named(wrong, autotuner, narrow, log) -> None:
    narrow(wrong)
    tuned = autotuner(one("a")).tune(16, (), Clock(9, 8, 1, 2))
    assert (tuned.algorithm.about, tuned.tile) == ("a", None)
    assert tuned.refused == ("narrow tile 16x16", "narrow tile 16x32")
    assert tuned.microseconds == {"triton": 9, "cublaslt": 8}
    assert "Gluon's narrow tile 16x32 is not used for N=40 K=96 bfloat16 bias, up to 16 rows" in log.text


def test_a_narrow_tile_that_cannot_be_compiled_is_left_out_and_named_once(autotuner, narrow, log) -> None:
    def fail(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise ImportError("no such instruction\nand much more")

    run = narrow(fail)
    for _ in range(2):
        tuned = autotuner(one("a")).tune(16, (), Clock(9, 8))
        assert tuned.algorithm.about == "a"
        assert tuned.refused == ()
    assert run == list(NARROW_TILES[:2])
    assert log.text.count("narrow tile 16x32 is left out") == 1
    assert "first for N=40 K=96 bfloat16 bias: ImportError: no such instruction" in log.text
    assert "and much more" not in log.text


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch, autotuner) -> Callable[..., tuple[Chosen, list[str]]]:
    """Builds an autotuner of a gated layer with one algorithm and two tiles, which multiply as they are told to, and
    the list of what is activated behind a matmul.
    """

    def build(multiply: Callable[..., torch.Tensor], algorithm: SimpleNamespace) -> tuple[Chosen, list[str]]:
        behind = []

        def gemm_sm90_swap_ab(a, b, bias, out, reduction, tile, overlaps, spec, scales) -> torch.Tensor:
            assert (bias, overlaps, spec, out.shape) == (None, True, GATED, (len(a), 24))
            return out.copy_(activate(multiply(a, b)))

        def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            behind.append(x.shape)
            return activate(x, out)

        monkeypatch.setitem(TILES, (PLAIN, SWIGLU), lambda *_: GATED_TILES[:2])
        monkeypatch.setattr(triton_gemm, "gemm_sm90_swap_ab", gemm_sm90_swap_ab)
        monkeypatch.setattr(silu_cpu, "silu_and_mul", silu_and_mul)
        return Chosen(
            GemmProblem(48, 96, torch.bfloat16, GATED, 0), SimpleNamespace(algorithms=lambda m, most: [algorithm]), 24
        ), behind

    return build


@pytest.mark.parametrize(
    ("times", "served_by"), [((9, 5, 6, 4), "Gluon"), ((9, 5, 5.5, 6), "cuBLASLt"), ((3, 5, 6, 4), "Triton")]
)
def test_a_gated_layer_is_timed_with_its_activation_wherever_that_is(times, served_by, gated) -> None:
    made, behind = gated(sequential_k, one("a"))
    tuned = made.tune(16, (), Clock(*times))
    assert tuned.served_by == served_by
    assert tuned.tile == (GATED_TILES[1] if served_by == "Gluon" else None)
    assert behind == [(16, 48)] * 4, "of two copies by Triton, and two by cuBLASLt"


def test_every_bit_of_both_halves_of_a_product_shows_behind_the_activation() -> None:
    x, weight = cancelling_gated(64, 400, 512, torch.bfloat16, "cpu")
    product = sequential_k(x, weight.t())
    right = activate(product)
    for half, columns in ((0, slice(0, None, 2)), (200, slice(1, None, 4))):
        wrong = product.clone()
        wrong.view(torch.int16)[:, half : half + 200] += 1
        seen, is_left = activate(wrong) != right, product[:, half : half + 200] != 0
        assert is_left[:, columns].double().mean() > 0.8
        assert seen[:, columns][is_left[:, columns]].all()
    splits = (activate(sequential_k(x, weight.t(), splits=2)) != right).double().mean(0)
    assert min(splits[0::2].mean(), splits[1::4].mean(), splits[3::4].mean()) > 0.5
    assert (right[:, 3::4].abs() > 0).double().mean() > 0.5


@pytest.mark.parametrize("wrong", [off_by_one, split, split_for_few_rows])
def test_of_a_gated_layer_other_bits_are_refused_before_and_behind_the_activation(wrong, gated) -> None:
    made, _ = gated(wrong, one("a"))
    assert made.tune(16, (), Clock(9, 8, 1, 2)).refused == tuple(tile.about for tile in GATED_TILES[:2])
    made, _ = gated(sequential_k, one("a", wrong))
    tuned = made.tune(16, (), Clock(9, 1, 8, 7))
    assert tuned.refused == ("a",)
    assert tuned.tile == GATED_TILES[1]


def test_a_failure_of_the_library_that_is_not_its_own_is_not_hidden(autotuner) -> None:
    def fail(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        autotuner(one("a", fail)).tune(16, (), Clock(9, 8))


@pytest.mark.parametrize(("a_k_major", "b_k_major"), [(False, True), (True, False)])
def test_no_narrow_tile_is_run_untimed_or_without_k_inside(a_k_major, b_k_major, autotuner, narrow) -> None:
    run, made = narrow(sequential_k), autotuner(one("a"))
    made.tune(16, (), None)
    made.problem = GemmProblem(40, 96, torch.bfloat16, BIASED, 0, a_k_major, b_k_major)
    made.tune(16, (), Clock(9, 8))
    assert not run


def opaque(**config: int) -> bytes:
    """An algorithm as the fake library encodes it."""
    array = np.zeros(1, ALGORITHM)
    array["data_"][0, :3] = 1, config.get("split", 1), config.get("reduction", 0)
    return array.tobytes()


def test_a_tuned_schedule_is_the_same_after_json(cublaslt: ModuleType) -> None:
    algorithm = cublaslt.Algorithm(opaque(split=1), 1, "tile 64x64, cluster 1x1x1")
    for tuned in (
        TunedSchedule(algorithm, (1, 5, 8), ("tile 8x8, cluster 2x1x1",), {"cublaslt": 3.25, "triton": 4.5}),
        TunedSchedule(None, (9, 16), (), {}),
        TunedSchedule(None, (9, 16), (), {"gluon": 2.5}, NARROW_TILES[0]),
        TunedSchedule(None, (9, 16), (), {"gluon": 2.5}, GATED_TILES[-1]),
    ):
        assert TunedSchedule.from_json(json.loads(json.dumps(tuned.to_json()))) == tuned


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "vllm-batch-invariant"


def test_what_is_kept_is_read_back_and_added_to(cache: Path) -> None:
    assert autotune_cache.load(ENVIRONMENT) == {}
    autotune_cache.save(ENVIRONMENT, {"one": {"8": {"checked": [1]}}})
    autotune_cache.save(ENVIRONMENT, {"one": {"16": {"checked": [9]}}, "two": {"8": {"checked": [2]}}})
    assert autotune_cache.load(ENVIRONMENT) == {
        "one": {"8": {"checked": [1]}, "16": {"checked": [9]}},
        "two": {"8": {"checked": [2]}},
    }
    [file] = cache.glob("*.json")
    assert json.loads(file.read_text())["content"]["environment"] == ENVIRONMENT


@pytest.mark.parametrize("key", ENVIRONMENT)
def test_another_environment_has_a_file_of_its_own(key: str, cache: Path) -> None:
    other = {**ENVIRONMENT, key: "another"}
    autotune_cache.save(ENVIRONMENT, {"one": {"8": {}}})
    assert autotune_cache.load(other) == {}
    autotune_cache.save(other, {"two": {}})
    assert autotune_cache.load(ENVIRONMENT) == {"one": {"8": {}}}
    assert autotune_cache.load(other) == {"two": {}}


def test_a_file_of_another_environment_under_the_same_name_is_not_read(cache: Path) -> None:
    autotune_cache.save(ENVIRONMENT, {"one": {}})
    path = autotune_cache._path(ENVIRONMENT)
    path.write_text(path.read_text().replace("made up", "another"))
    assert autotune_cache.load(ENVIRONMENT) == {}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{ not JSON",
        b"\xff\xfe",
        b"{}",
        b"[]",
        json.dumps({"environment": ENVIRONMENT, "gemms": {"one": {"8": {}}}}).encode(),
    ],
)
def test_a_broken_file_is_nothing_and_is_written_anew(
    content: bytes, cache: Path, log: pytest.LogCaptureFixture
) -> None:
    cache.mkdir()
    path = autotune_cache._path(ENVIRONMENT)
    path.write_bytes(content)
    assert autotune_cache.load(ENVIRONMENT) == {}
    assert path.with_name(f"{path.name}.broken").read_bytes() == content
    assert [record.levelname for record in log.records] == ["WARNING"]
    autotune_cache.save(ENVIRONMENT, {"one": {"8": {}}})
    assert autotune_cache.load(ENVIRONMENT) == {"one": {"8": {}}}


@pytest.mark.parametrize(
    "content",
    [
        [],
        1,
        {"gemms": {}},
        {"environment": ENVIRONMENT},
        {"environment": ENVIRONMENT, "gemms": []},
        {"environment": ENVIRONMENT, "gemms": {"one": []}},
        {"environment": {}, "gemms": {}},
    ],
)
def test_a_whole_file_of_another_shape_is_set_aside(
    content: object, cache: Path, log: pytest.LogCaptureFixture
) -> None:
    kept_file.update(autotune_cache._path(ENVIRONMENT), lambda _: content)
    assert autotune_cache.load(ENVIRONMENT) == {}
    [record] = log.records
    assert record.levelname == "WARNING"
    autotune_cache.save(ENVIRONMENT, {"one": {"8": {}}})
    assert autotune_cache.load(ENVIRONMENT) == {"one": {"8": {}}}


TUNED = {"algorithm": None, "checked": [1, 8], "refused": [], "microseconds": {"triton": 4.5}, "tile": None}


@pytest.mark.parametrize(
    "schedules",
    [
        {"8": []},
        {"8": None},
        {"8": "text"},
        {"8": {}},
        {"9": TUNED},
        {"eight": TUNED},
        {"8": TUNED | {"checked": 3}},
        {"8": TUNED | {"checked": ["1"]}},
        {"8": TUNED | {"checked": [True]}},
        {"8": TUNED | {"refused": [1]}},
        {"8": TUNED | {"microseconds": None}},
        {"8": TUNED | {"microseconds": {"triton": "fast"}}},
        {"8": TUNED | {"tile": {"block_m": 1}}},
        {"8": TUNED | {"tile": {"block_m": 16, "block_n": 16, "block_k": 256, "num_stages": 50}}},
        {"8": TUNED | {"algorithm": {"opaque": "00" * 63, "about": "tile"}}},
        {"8": TUNED | {"algorithm": {"opaque": "not hexadecimal", "about": "tile"}}},
        {"8": TUNED | {"algorithm": {"opaque": "00" * 64}}},
        {"8": TUNED | {"algorithm": {"opaque": opaque(split=3).hex(), "about": "tile"}}},
        {"8": TUNED | {"algorithm": {"opaque": opaque(reduction=2).hex(), "about": "tile"}}},
        {"8": TUNED | {"algorithm": {"opaque": "ff" * 64, "about": "tile"}}},
        {"8": TUNED | {"algorithm": "tile"}},
        {"8": TUNED | {"algorithm": {}}},
        {"8": TUNED | {"more": 1}},
    ],
)
def test_schedules_that_cannot_be_read_are_set_aside_and_made_anew(
    dispatch: SimpleNamespace, schedules: dict, log: pytest.LogCaptureFixture
) -> None:
    autotune_cache.save(dispatch.environment, {str(PROBLEM): {"16": TUNED} | schedules})
    a, weight = draw(40, 96), draw(40, 96)
    dispatch.cuda.prepare(weight, 40, BIASED)
    assert dispatch.tuned, "as if there were no file"
    assert len([record for record in log.records if "was broken" in record.message]) == 1
    assert_same_bits(dispatch.cuda.mm(a, weight.t(), draw(40)), sequential_k(a, weight.t(), draw(40)))
    _, known = dispatch.cuda.known(0)
    assert set(known) == {str(PROBLEM)}
    assert 8 in known[str(PROBLEM)]


def test_a_folder_that_cannot_be_made_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    autotune_cache.save(ENVIRONMENT, {"one": {}})
    assert autotune_cache.load(ENVIRONMENT) == {}
    assert (tmp_path / "file").read_text() == "mine"


def test_a_user_without_a_home_is_served_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user id that is not in the password file
    autotune_cache.save(ENVIRONMENT, {"one": {}})
    assert autotune_cache.load(ENVIRONMENT) == {}


def test_without_nvmath_gemms_are_tritons_and_the_log_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "cublaslt", None)
    assert not cuda._uses_cublaslt.__wrapped__(torch.device("cuda", 0))
    [record] = log.records
    assert record.levelname == "WARNING"
    extra = "cuda"
    assert f": {how_to_install(extra)}." in record.getMessage()
    root = Path(__file__).parents[3]
    wanted = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    assert any(requirement.startswith("nvmath-python") for requirement in wanted)
    assert f"pip install '.[{extra}]'" in (root / "README.md").read_text()


def test_nothing_is_left_beside_what_is_kept(cache: Path) -> None:
    for name in ("one", "two"):
        autotune_cache.save(ENVIRONMENT, {name: {}})
    assert {path.suffix for path in cache.iterdir()} <= {".json", ".lock"}


def test_a_gemm_is_tuned_at_its_third_use_in_a_range(dispatch: SimpleNamespace) -> None:
    a, weight, bias = draw(48, 96), draw(40, 96), draw(40)
    for m, tuned in ((5, 0), (1, 0), (40, 0), (8, 1), (8, 1), (33, 1), (40, 2), (48, 2), (3, 2)):
        assert_same_bits(dispatch.cuda.mm(a[:m], weight.t(), bias), sequential_k(a[:m], weight.t(), bias), f"{m} rows")
        assert len(dispatch.tuned) == tuned, f"after {m} rows"
    assert dispatch.tuned == [((8,), (), 0.0), ((48,), (), 0.0)]
    assert dispatch.launched == [5, 1, 40, 33]
    assert dispatch.library.launches == [8, 8, 40, 48, 3]


def test_problems_are_counted_one_by_one(dispatch: SimpleNamespace) -> None:
    a, weight, bias = draw(8, 96), draw(40, 96), draw(40)
    kinds = [(a, weight.t(), None), (a, weight.t(), bias), (a.t().contiguous().t(), weight.t(), None)]
    for use in (1, 2, 3):
        for kind in kinds:
            assert_same_bits(dispatch.cuda.mm(*kind), sequential_k(*kind))
        assert len(dispatch.tuned) == (3 if use == 3 else 0)


def test_a_capture_is_no_use_and_tunes_nothing(dispatch: SimpleNamespace, monkeypatch) -> None:
    a, weight = draw(8, 96), draw(40, 96)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(5):
        assert_same_bits(dispatch.cuda.mm(a, weight.t()), sequential_k(a, weight.t()))
    assert (dispatch.tuned, dispatch.library.launches) == ([], [])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(3):
        dispatch.cuda.mm(a, weight.t())
    assert len(dispatch.tuned) == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    dispatch.cuda.mm(a, weight.t())
    assert len(dispatch.library.launches) == 2


def test_preparing_tunes_the_ranges_that_are_missing(dispatch: SimpleNamespace) -> None:
    weight = draw(40, 96)
    dispatch.cuda.prepare(weight, 20, BIASED, sizes=(1, 2, 4))
    dispatch.cuda.prepare(weight, 24, BIASED)
    dispatch.cuda.prepare(weight, 40, BIASED, sizes=(33,))
    seconds = dispatch.cuda._TUNING_SECONDS
    assert dispatch.tuned == [((8, 16, 24), (1, 2, 4), seconds), ((32, 48), (33,), seconds)]
    dispatch.cuda.mm(draw(41, 96), weight.t(), draw(40))
    assert not dispatch.launched


def test_a_size_that_was_not_verified_before_is_verified(dispatch: SimpleNamespace) -> None:
    weight = draw(40, 96)
    dispatch.cuda.prepare(weight, 24)
    dispatch.cuda.prepare(weight, 24, sizes=(10, 12))
    assert [(buckets, sizes) for buckets, sizes, _ in dispatch.tuned[1:]] == [((16,), (10, 12))]


def test_a_new_process_reads_what_the_last_one_measured(dispatch: SimpleNamespace) -> None:
    weight, a, bias = draw(40, 96), draw(16, 96), draw(40)
    dispatch.cuda.prepare(weight, 16, BIASED)
    before = dict(dispatch.cuda.tuned_schedules(problem_of(a, weight.t(), bias)))
    dispatch.cuda.dispatcher._tuned.clear()
    dispatch.cuda.dispatcher._plans.clear()
    dispatch.cuda.prepare(weight, 16, BIASED)
    assert dispatch.cuda.tuned_schedules(problem_of(a, weight.t(), bias)) == before
    assert dispatch.cuda.known(0) == (dispatch.environment, {"N=40 K=96 bfloat16 bias": before})
    assert_same_bits(dispatch.cuda.mm(a, weight.t(), bias), sequential_k(a, weight.t(), bias))
    assert len(dispatch.tuned) == 1
    assert dispatch.library.launches == [16]


def test_a_changed_environment_measures_again(dispatch: SimpleNamespace) -> None:
    weight = draw(40, 96)
    dispatch.cuda.prepare(weight, 16)
    dispatch.cuda.dispatcher._tuned.clear()
    dispatch.environment["driver"] = "another"
    dispatch.cuda.prepare(weight, 16)
    assert len(dispatch.tuned) == 2


def test_without_memory_to_tune_a_gemm_is_left_to_triton(dispatch: SimpleNamespace, monkeypatch, log) -> None:
    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(autotune, "tune", exhausted)
    a, weight = draw(8, 96), draw(40, 96)
    dispatch.cuda.prepare(weight, 16)
    for _ in range(5):
        assert_same_bits(dispatch.cuda.mm(a, weight.t()), sequential_k(a, weight.t()))
    assert log.text.count("left to Triton: no memory") == 2
    assert not dispatch.library.launches


def test_rows_that_an_algorithm_does_not_take_are_left_to_triton(dispatch: SimpleNamespace, monkeypatch) -> None:
    a, weight = draw(8, 96), draw(40, 96)
    dispatch.cuda.prepare(weight, 8)
    matmul = dispatch.library.matmul

    def picky(*arguments: int) -> None:
        if dispatch.library.alive[arguments[6]].columns == 5:
            raise dispatch.library.cuBLASLtError("not supported")
        matmul(*arguments)

    monkeypatch.setattr(dispatch.library, "matmul", picky)
    for m in range(1, 9):
        assert_same_bits(dispatch.cuda.mm(a[:m], weight.t()), sequential_k(a[:m], weight.t()))
    assert dispatch.launched == [5]


def test_a_range_that_triton_won_stays_with_triton(dispatch: SimpleNamespace, monkeypatch) -> None:
    monkeypatch.setattr(autotune, "tune", lambda *_: {8: TunedSchedule(None, (1, 8), ("a",), {})})
    weight = draw(40, 96)
    dispatch.cuda.prepare(weight, 8)
    for m in (1, 8, 8, 8):
        dispatch.cuda.mm(draw(m, 96), weight.t())
    assert dispatch.launched == [1, 8, 8, 8]


def test_a_range_that_a_narrow_tile_won_is_served_by_it(dispatch: SimpleNamespace, monkeypatch) -> None:
    served = []

    def gemm_sm90_swap_ab(a, b, bias, out, reduction, tile, overlaps, spec, scales) -> torch.Tensor:
        served.append((len(a), tile, overlaps))
        return sequential_k(a, b, bias)

    monkeypatch.setattr(triton_gemm, "gemm_sm90_swap_ab", gemm_sm90_swap_ab)
    monkeypatch.setattr(autotune, "tune", lambda *_: {8: TunedSchedule(None, (1, 8), (), {}, NARROW_TILES[1])})
    a, weight, bias = draw(9, 96), draw(40, 96), draw(40)
    dispatch.cuda.prepare(weight, 8, BIASED)
    dispatch.cuda.dispatcher._tuned.clear()  # read from disk again
    for m in (1, 8, 9, 0):
        out = dispatch.cuda.mm(a[:m], weight.t(), bias)
        assert_same_bits(out, sequential_k(a[:m], weight.t(), bias), f"{m} rows")
    assert served == [(1, NARROW_TILES[1], False), (8, NARROW_TILES[1], False)]
    dispatch.cuda.matmul(a[:3], weight.t(), BIASED, bias, b_is_constant=True)
    assert served[2:] == [(3, NARROW_TILES[1], True)]
    assert dispatch.launched == [9, 0]


@pytest.mark.parametrize("tile", [None, GATED_TILES[1]])
def test_a_gated_layer_is_activated_once_by_whoever_serves_it(tile, dispatch: SimpleNamespace, monkeypatch) -> None:
    def gemm_sm90_swap_ab(a, b, bias, out, reduction, tile, overlaps, spec, scales) -> torch.Tensor:
        assert (tile, overlaps, spec) == (GATED_TILES[1], True, GATED)
        return out.copy_(activate(sequential_k(a, b)))

    monkeypatch.setattr(triton_gemm, "gemm_sm90_swap_ab", gemm_sm90_swap_ab)
    monkeypatch.setattr(silu_cpu, "silu_and_mul", activate)
    if tile is not None:
        monkeypatch.setattr(autotune, "tune", lambda *_: {8: TunedSchedule(None, (1, 8), (), {}, tile)})
    a, weight = draw(9, 96), draw(48, 96)
    dispatch.cuda.prepare(weight, 8, GATED)
    for m in (1, 8, 9, 0):
        out = dispatch.cuda.matmul(a[:m], weight.t(), GATED, None, True)
        assert_same_bits(out, activate(sequential_k(a[:m], weight.t())), f"{m} rows")
    assert dispatch.launched == [9, 0], "and the others by cuBLASLt or the tile"
    apart = dispatch.cuda.mm(a[:3], weight.t())
    assert_same_bits(apart, sequential_k(a[:3], weight.t()), "an ungated one has a plan of its own")
    odd = draw(40, 96)
    dispatch.cuda.prepare(odd, 8, GATED)
    out = dispatch.cuda.matmul(a[:3], odd.t(), GATED, None, True) if tile is None else None
    assert out is None or torch.equal(out, activate(sequential_k(a[:3], odd.t()))), "whose half is not aligned"


def test_gluon_is_not_imported_with_the_dispatcher() -> None:
    code = "import sys; from vllm_batch_invariant.ops.linear import autotune, cuda; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "vllm_batch_invariant.ops.linear.cuda" in found
    assert not [name for name in found if name.startswith("triton.experimental") or "sm90_kernel" in name]


def forms(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
    """Operands with the values of packed ones, or of rows of them."""
    wider = torch.nn.functional.pad(a, (8, 8), value=torch.nan)
    return {
        "packed": (a, b, bias),
        "a with M inside": (a.t().contiguous().t(), b, bias),
        "b with N inside": (a, b.contiguous(), bias),
        "a among other columns": (wider[:, 8:-8], b, bias),
        "a misaligned": (torch.nn.functional.pad(a, (4, 4))[:, 4:-4], b, bias),
        "bias misaligned": (a, b, torch.cat([bias[:1], bias])[1:]),
        "bias with a stride": (a, b, torch.stack([bias, bias * torch.nan], 1)[:, 0]),
        "bias of one number": (a, b, bias[:1].expand(len(bias))),
        "one row": (a[:1], b, bias),
        "one row with a stride of its own": (a[:1].as_strided((1, 96), (7, 1)), b, bias),
        "every second row": (a[::2], b, bias),
    }


def test_operands_that_look_alike_do_not_share_how_they_are_served(dispatch: SimpleNamespace) -> None:
    a, b, bias = draw(16, 96), draw(40, 96).t(), draw(40)
    for use in range(5):
        for name, form in forms(a, b, bias).items():
            for m in (16, 8, 1):
                part = form[0][:m]
                assert_same_bits(
                    dispatch.cuda.mm(part, *form[1:]), sequential_k(part, *form[1:]), f"{name}, {m}, {use}"
                )
    assert dispatch.library.launches


@pytest.mark.parametrize("side", ["a", "b"])
def test_one_row_expanded_is_served_as_it_is(side: str, dispatch: SimpleNamespace) -> None:
    a, b = draw(16, 96), draw(40, 96).t()
    a, b = (a[:1].expand(16, -1), b) if side == "a" else (a, b[:, :1].expand(-1, 40))
    for use in range(5):
        assert_same_bits(dispatch.cuda.mm(a, b), sequential_k(a, b), f"use {use}")


def test_rows_that_overlap_are_served_as_they_are(dispatch: SimpleNamespace) -> None:
    a, b = draw(1, 256)[0].unfold(0, 96, 8), draw(40, 96).t()
    for use in range(5):
        assert_same_bits(dispatch.cuda.mm(a, b), sequential_k(a, b), f"use {use}")


def test_the_setting_leaves_everything_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "cublaslt", SimpleNamespace(handle=lambda device: 1))
    for value, expected in (("triton", False), ("auto", True), ("", True)):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT_LINEAR", value)
        cuda._uses_cublaslt.cache_clear()
        assert cuda._uses_cublaslt(torch.device("cpu")) is expected
    monkeypatch.setattr(cuda, "cublaslt", None)
    cuda._uses_cublaslt.cache_clear()
    assert cuda._uses_cublaslt(torch.device("cpu")) is False
    cuda._uses_cublaslt.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype, dispatch: SimpleNamespace) -> None:
    weight = draw(40, 96).to(dtype)
    with pytest.raises(NotCovered, match=f"a matmul in {dtype}"):
        dispatch.cuda.prepare(weight, 8)
    with pytest.raises(NotCovered, match=f"a matmul in {dtype}"):
        triton_gemm.bmm(weight[None], weight.t()[None])
    assert LinearReduction.of_device("cuda", 40, 96, torch.float16).accumulate == torch.float32
