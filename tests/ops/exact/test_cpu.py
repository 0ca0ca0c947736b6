"""Exact arithmetic on a CPU has the definition's bits, and a fault in a product is found."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from numba import njit

from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops import dispatch
from vllm_batch_invariant.ops.attention import AttentionReduction, paged_attention
from vllm_batch_invariant.ops.common.numba_exact_math import tanh
from vllm_batch_invariant.ops.common.numba_math import float_of_bits
from vllm_batch_invariant.ops.exact import cpu, cpu_experts, definition
from vllm_batch_invariant.ops.exact.definition import Floats, fp32
from vllm_batch_invariant.ops.exact.known_answers import normal, with_outliers
from vllm_batch_invariant.ops.linear import mm
from vllm_batch_invariant.ops.moe import Experts, MoeReduction
from vllm_batch_invariant.ops.reduce import mean

THREADS = torch.get_num_threads()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(THREADS)


def tensor(array: Floats) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(torch.bfloat16)


def assert_equal(got: torch.Tensor, right: Floats) -> None:
    assert np.array_equal(got.float().numpy(), right, equal_nan=True)


@pytest.mark.parametrize(("m", "n", "k", "shared"), [(1, 130, 512, True), (10, 1100, 96, True), (33, 65, 768, False)])
def test_a_product_has_the_definitions_bits(threads: int, m: int, n: int, k: int, shared: bool) -> None:
    x, w, bias = with_outliers(1, m, k), normal(2, n, k), normal(3, n)
    parts = definition.segments(k, shared)
    weight = definition.two_digits(definition.in_segments(w, parts))
    right = definition.linear(x, weight, bias)
    assert_equal(cpu.linear(tensor(x), cpu.prepare(tensor(w), parts), tensor(bias)), right)


def test_the_loop_and_the_blas_have_the_same_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = tensor(with_outliers(4, 11, 300)), cpu.prepare(tensor(normal(5, 77, 300)))
    monkeypatch.setattr(cpu, "BLAS_FROM", 1)
    by_blas = cpu.linear(x, weight)
    monkeypatch.setattr(cpu, "BLAS_FROM", 1000)
    assert torch.equal(cpu.linear(x, weight).nan_to_num(), by_blas.nan_to_num())


@pytest.mark.parametrize("renormalise", [True, False])
def test_experts_have_the_definitions_bits_and_a_token_alone_those_among_others(
    threads: int, renormalise: bool
) -> None:
    tokens, hidden, intermediate, count, top_k = 45, 64, 96, 6, 3
    x, logits = with_outliers(1, tokens, hidden), normal(2, tokens, count)
    logits[:, 1::2] = logits[:, ::2]  # ties
    gate_up, down = normal(3, count, 2 * intermediate, hidden), normal(4, count, hidden, intermediate)
    reduction = MoeReduction(count, top_k, torch.bfloat16, renormalise=renormalise)

    weights, experts = definition.route(logits, top_k, renormalise)
    made = np.empty((tokens, top_k, hidden), np.float32)
    for token, slot in np.ndindex(tokens, top_k):
        of_gate_up, of_down = (one[experts[token, slot]][:, None] for one in (gate_up, down))
        row = definition.linear(x[token : token + 1], definition.two_digits(of_gate_up))
        with np.errstate(over="ignore"):
            activated = definition.silu_and_mul(row)
        made[token, slot] = definition.unrounded_linear(activated, definition.two_digits(of_down))[0]
    right = definition.expert_sum(made, weights)

    found = cpu_experts.route(tensor(logits), reduction, None)
    assert np.array_equal(found[0].numpy(), weights)
    assert np.array_equal(found[1].numpy(), experts)
    layer = Experts(tensor(gate_up), tensor(down), reduction)
    others = cpu_experts.moe(tensor(x), *found, layer)
    assert_equal(others, right)
    for token in (0, tokens - 1):
        one = slice(token, token + 1)
        alone = cpu_experts.route(tensor(logits[one]), reduction, None)
        got = cpu_experts.moe(tensor(x[one]), *alone, layer)
        assert torch.equal(got, others[one])


@pytest.mark.parametrize("changed", [{"scoring": "sigmoid"}, {"scale": 2.0}, {"groups": 2}, {"activation": "gelu"}])
def test_experts_without_a_definition_are_refused(changed: dict[str, object]) -> None:
    [name] = changed
    with pytest.raises(NotCovered, match=f"a mixture of experts with {name} "):
        cpu_experts.check(MoeReduction(8, 2, torch.bfloat16, **changed))


def in_fp32(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.float() @ w.float().t()).double()


def without_the_low_digits(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x >> 8 << 8).double() @ w.double().t()


def saturated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.clamp(-(2**15), 2**15 - 1).double() @ w.double().t()


@pytest.mark.parametrize("fault", [in_fp32, without_the_low_digits, saturated])
def test_an_engine_with_other_integers_is_not_certified(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    cpu.certify()
    monkeypatch.setattr(cpu, "_products", fault)
    with pytest.raises(ArithmeticError, match="not exact on this machine"):
        cpu.certify()


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_norm_activation_and_rotation_have_the_definitions_bits(threads: int) -> None:
    x, weight, residual = with_outliers(6, 12, 1024), normal(7, 1024), normal(8, 12, 1024)
    for got, right in zip(
        cpu.rms_norm(tensor(x), tensor(weight), 1e-6, tensor(residual)),
        definition.rms_norm(x, weight, 1e-6, residual),
        strict=True,
    ):
        assert_equal(got, right)
    assert_equal(cpu.rms_norm(tensor(x), None, 1e-5), definition.rms_norm(x, None, 1e-5)[0])
    gate = definition.bf16(normal(9, 5, 2000) * fp32(60))
    assert_equal(cpu.silu_and_mul(tensor(gate)), definition.silu_and_mul(gate))
    every = definition.from_bits(np.arange(65_536, dtype=np.uint16)).reshape(32, -1)
    for numbers in (gate, np.concatenate((every, normal(44, 32, 2048)), -1)):
        assert_equal(cpu.gelu_and_mul(tensor(numbers)), definition.gelu_and_mul(numbers))
        assert_equal(cpu.capped(tensor(numbers), 30.0), definition.bf16(definition.capped(numbers, 30.0)))
    table, q = definition.rotary_table(40, definition.turns(64, 10_000.0)), normal(10, 40, 3, 64)
    assert_equal(cpu.rotate(tensor(q), tensor(table)), definition.rotate(q, table))


def test_what_is_done_with_logits_has_the_definitions_bits(threads: int) -> None:
    logits = normal(11, 5, 4000) * fp32(3)
    logits[1, :200], logits[2] = -np.inf, definition.bf16(logits[2])
    broken = logits[:3].copy()
    broken[0, 7], broken[1, 9], broken[2] = np.nan, np.inf, -np.inf
    for mine, theirs in ((cpu.softmax, definition.softmax), (cpu.log_softmax, definition.log_softmax)):
        with np.errstate(invalid="ignore"):
            right = theirs(broken)
        assert np.isnan(right).all()
        assert np.isnan(mine(torch.from_numpy(broken)).numpy()).all()
    assert np.array_equal(cpu.softmax(torch.from_numpy(logits)).numpy(), definition.softmax(logits))
    assert np.array_equal(cpu.log_softmax(torch.from_numpy(logits)).numpy(), definition.log_softmax(logits))
    for k, p in ((0, 0.9), (50, 0.5), (7, 1.0), (0, 1e-9)):
        limits = torch.full((5,), k), torch.full((5,), p)
        kept = cpu.top_k_top_p(torch.from_numpy(logits.copy()), *limits)
        assert np.array_equal(kept.numpy(), definition.top_k_top_p(logits, k, p))
    seeds, positions = torch.tensor([0, 5, -3, 2**63 - 1, 7]), torch.tensor([0, 1, 7, 9, 10**6])
    keys = [definition.key_of(*one) for one in zip(seeds.tolist(), positions.tolist(), strict=True)]
    drawn = cpu.draw(torch.from_numpy(logits), torch.tensor(keys, dtype=torch.uint64).view(torch.int64)).tolist()
    rows = zip(logits, seeds.tolist(), positions.tolist(), strict=True)
    assert drawn == [definition.draw(row, 1.0, 0, 1.0, seed, position) for row, seed, position in rows]


@njit(error_model="numpy")
def largest_fall(first: int, last: int) -> float:
    """Of tanh, from one of the numbers with these bits to any later one."""
    fall, top = 0.0, 0.0
    for bits in range(first, last):
        y = np.float64(tanh(float_of_bits(np.int32(bits))))
        fall, top = max(fall, top - y), max(top, y)
    return fall


def test_tanh_falls_nowhere_by_more_than_a_unit_in_the_last_place() -> None:
    """Of all fp32 numbers from 1e-6 to 20; a soft cap of bf16 numbers does not fall at all."""
    first, last = np.array([1e-6, 20], fp32).view(np.int32).tolist()
    assert largest_fall(first, last) <= 2.0**-25


@pytest.mark.parametrize(
    ("lengths", "news", "window", "soft_cap"),
    [
        ([300, 1, 65, 130], [200, 1, 2, 130], None, None),
        ([300, 90, 600], [30, 1, 2], 100, None),
        ([2700], [2], None, None),
        ([300, 1, 65], [100, 1, 2], None, 2.0),
        ([300, 90, 600], [30, 1, 2], 100, 50.0),
    ],
)
def test_paged_attention_has_the_definitions_bits(
    threads: int, lengths: list[int], news: list[int], window: int | None, soft_cap: float | None
) -> None:
    heads, kv_heads, size, page = 4, 2, 64, 16
    queries = [normal(12 + i, new, heads, size) for i, new in enumerate(news)]
    keys = [normal(20 + i, length, kv_heads, size) for i, length in enumerate(lengths)]
    values = [normal(30 + i, length, kv_heads, size) for i, length in enumerate(lengths)]
    for value in values:
        value *= np.exp2(np.arange(len(value)) * 7 % 13 - 6).astype(fp32)[:, None, None]
    counts = [-(-length // page) for length in lengths]
    pages = np.random.default_rng(0).permutation(sum(counts)) + 1
    cache = torch.full((sum(counts) + 1, kv_heads, page, 2 * size), torch.nan, dtype=torch.bfloat16)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    first = np.cumsum([0, *counts])
    for request, (key, value) in enumerate(zip(keys, values, strict=True)):
        mine = pages[first[request] : first[request + 1]]
        table[request, : len(mine)] = torch.from_numpy(mine)
        for at, (k, v) in enumerate(zip(key, value, strict=True)):
            cache[int(mine[at // page]), :, at % page] = tensor(np.concatenate((k, v), -1))
    right = [definition.attention(*one, 0.125, window, soft_cap) for one in zip(queries, keys, values, strict=True)]
    got = paged_attention(
        tensor(np.concatenate(queries)), *cache.split(size, dim=-1), table, torch.tensor(lengths),
        torch.tensor([0, *np.cumsum(news)]), scale=0.125, sliding_window=window, logits_soft_cap=soft_cap,
        implementation="exact",
        reduction=AttentionReduction.of_device("cpu", "exact"),
    )  # fmt: skip
    assert_equal(got, np.concatenate(right))


@pytest.mark.parametrize(("keys", "soft_cap"), [(10, None), (300, None), (300, 5.0)])
def test_a_value_that_is_not_finite_gives_nan_to_the_rows_that_see_it(keys: int, soft_cap: float | None) -> None:
    q, k, v = normal(41, keys, 1, 64), normal(42, keys, 1, 64), normal(43, keys, 1, 64)
    v[4, 0, 5], v[7, 0, 5] = np.inf, np.nan
    right = definition.attention(q, k, v, 0.125, soft_cap=soft_cap)
    assert np.isnan(right[4:]).all()
    assert not np.isnan(right[:4]).any()
    page = torch.stack((tensor(k), tensor(v)), 1).view(1, keys, 2, 64).transpose(1, 2)
    got = paged_attention(
        tensor(q), page[:, :1], page[:, 1:], torch.zeros(1, 1, dtype=torch.int32), torch.tensor([keys]),
        torch.tensor([0, keys]), scale=0.125, implementation="exact", logits_soft_cap=soft_cap,
        reduction=AttentionReduction.of_device("cpu", "exact"),
    )  # fmt: skip
    assert_equal(got, right)


def test_attention_has_the_splits_and_tiles_of_its_reduction() -> None:
    reduction = AttentionReduction.of_device("cpu", "exact")
    assert [(start, size) for start, size, _ in reduction.split_segments] == list(definition.SPLITS)
    assert reduction.key_tile == definition.KEY_TILE


def test_a_contraction_or_a_second_rounding_would_be_seen() -> None:
    """The operands of these tests tell a fused multiply-add, and a sum that is rounded to fp64 first, from the
    definition's operations.
    """
    x = normal(40, 4000)
    n = np.rint(x * definition.LOG2_E)
    f = (x * definition.LOG2_E - n).astype(fp32)
    fused = np.full(f.shape, float(definition.EXP2[-1]))
    for c in reversed(definition.EXP2[:-1]):
        fused = (fused * f.astype(float) + float(c)).astype(fp32).astype(float)
    assert (fused.astype(fp32) != definition.polynomial(f, definition.EXP2)).any()
    half_way = np.array([2**60 + 2**36 + 1, (1 << 55) + (1 << 31) + 1], np.int64)
    assert (half_way.astype(np.float64).astype(fp32) != half_way.astype(fp32)).all()


def test_operations_without_a_definition_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 2)
    mm(x, x)
    monkeypatch.setattr(dispatch, "_arithmetic", "float")  # and back, whatever is chosen
    dispatch.choose("exact")
    with pytest.raises(NotCovered, match=r"mm of floats in exact arithmetic: the order of its sum is not defined"):
        mm(x, x)
    with pytest.raises(NotCovered, match=r"mean of floats in exact arithmetic: the order of its sum is not defined"):
        mean(x)
    assert dispatch.module_for("norm", "cpu") is cpu
    assert dispatch.module_for("moe", "cpu") is cpu_experts
    with pytest.raises(NotCovered, match="over 65536 elements"):
        cpu.prepare(torch.ones(2, 65_536, dtype=torch.bfloat16))
    with pytest.raises(NotCovered, match="a part of a row"):
        cpu.rms_norm(torch.ones(2, 8, dtype=torch.bfloat16), None, 1e-6, variance_size=4)
