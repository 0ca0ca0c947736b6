"""A token gets the same bits from its experts whatever other tokens there are and wherever they go."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.assertions import DTYPES, assert_near, assert_same_bits
from tests.faults.experts import FAULTS, planted
from tests.ops.moe.layers import EXPERTS, HIDDEN, INTERMEDIATE, ROUTINGS, Layer, layer, tied, tokens, uniform
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.linear import linear
from vllm_batch_invariant.ops.moe import Experts, MoeReduction, cpu, moe, reference, route
from vllm_batch_invariant.ops.pointwise import elementwise

COUNTS = (1, 2, 3, 8, 16, 17, 33, 64, 100, 513, 2049, 8192)
"""Tokens beside the one that is looked at."""
SCORINGS = {
    "softmax": {},
    "softmax, not renormalised": {"renormalise": False},
    "sigmoid with a bias": {"scoring": "sigmoid", "biased": True, "scale": 1.5},
    "sigmoid with a bias in groups": {"scoring": "sigmoid", "biased": True, "groups": 4, "top_groups": 2},
    "softmax in groups": {"groups": 2, "top_groups": 1, "scale": 16.0},
}


def differing(
    compute: Callable[..., torch.Tensor], routing: str, of: Layer, counts: Sequence[int] = COUNTS[:-2]
) -> list[int]:
    """Among how many others a token has other bits than alone."""
    x = tokens(max(counts) + 1, of.reduction.dtype)
    logits = ROUTINGS[routing](x, of)
    found = []
    for count in counts:
        place = count * 2 // 3
        alone = compute(x[place : place + 1], logits[place : place + 1], of)
        if not torch.equal(compute(x[: count + 1], logits[: count + 1], of)[place], alone[0]):
            found.append(count)
    return found


def ours(x: torch.Tensor, logits: torch.Tensor, of: Layer) -> torch.Tensor:
    return of(x, logits)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_token_has_the_same_bits_alone_and_among_others(routing: str) -> None:
    assert differing(ours, routing, layer(), COUNTS) == []


@pytest.mark.parametrize(
    ("dtype", "scoring"),
    [*zip(DTYPES, itertools.repeat(next(iter(SCORINGS)))), *zip(itertools.cycle(DTYPES), [*SCORINGS][1:])],
)
def test_every_token_has_the_same_bits_in_any_part_of_the_batch(dtype: torch.dtype, scoring: str) -> None:
    of = layer(dtype, **SCORINGS[scoring])
    x = tokens(41, dtype)
    for make in ROUTINGS.values():
        logits = make(x, of)
        whole = of(x, logits)
        for size in (1, 7, 33):
            parts = [of(*part) for part in zip(x.split(size), logits.split(size), strict=True)]
            assert_same_bits(torch.cat(parts), whole, f"{make.__name__}, {size} tokens at once")


def test_a_token_has_the_same_bits_at_any_place() -> None:
    of, x = layer(), tokens(300)
    for make in ROUTINGS.values():
        logits = make(x, of)
        whole = of(x, logits)
        for seed in range(3):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
            assert_same_bits(of(x[order], logits[order]), whole[order], f"{make.__name__}, permutation {seed}")


@pytest.mark.parametrize("scoring", SCORINGS)
def test_rows_of_nan_do_not_reach_a_token(scoring: str) -> None:
    of, x = layer(**SCORINGS[scoring]), tokens(60)
    logits = uniform(x, of)
    clean = of(x, logits)
    x[1::2], logits[1::2] = torch.nan, torch.nan
    dirty = of(x, logits)
    assert_same_bits(dirty[::2], clean[::2])
    assert dirty[1::2].isnan().all()
    ids = route(logits, of.reduction, of.score_bias)[1]
    assert all(len(set(row)) == 3 and set(row) < set(range(EXPERTS)) for row in ids.tolist())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_routes_are_those_of_the_float64_reference(dtype: torch.dtype, scoring: str) -> None:
    of = layer(dtype, **SCORINGS[scoring])
    logits = uniform(tokens(200, dtype), of)
    weights, ids = route(logits, of.reduction, of.score_bias)
    expected_weights, expected_ids = reference.route(logits, of.reduction, of.score_bias)
    assert_same_bits(ids, expected_ids)
    assert_near(weights, expected_weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swigluoai", "relu2_no_mul"])
def test_results_are_near_the_float64_reference(dtype: torch.dtype, activation: str) -> None:
    for biased in (False, True):
        of, x = layer(dtype, biased, activation=activation), tokens(40, dtype)
        weights, ids = route(uniform(x, of), of.reduction, of.score_bias)
        expected = reference.moe(x, weights, ids, of.experts)
        assert_near(moe(x, weights, ids, of.experts), expected, factor=2)


def test_equal_scores_go_to_the_lowest_expert() -> None:
    ties = torch.tensor(list(itertools.product((0.0, 1.0), repeat=EXPERTS)), dtype=torch.bfloat16)
    ids = route(ties, MoeReduction(EXPERTS, 3, torch.bfloat16))[1]
    expected = [sorted(range(EXPERTS), key=lambda expert: (-row[expert], expert))[:3] for row in ties.tolist()]
    assert ids.tolist() == expected
    grouped = MoeReduction(EXPERTS, 2, torch.bfloat16, groups=4, top_groups=1)
    assert route(torch.zeros(1, EXPERTS), grouped)[1].tolist() == [[0, 1]]


def test_topk_of_pytorch_leaves_open_which_of_equal_scores_comes_first() -> None:
    """What stock routers call: with ties, which experts serve a token may follow the kernel that the size chooses."""
    logits = tied(tokens(64), layer()).float()
    chosen = logits.topk(3).indices.sort(dim=1).values
    assert not torch.equal(chosen, route(logits, MoeReduction(EXPERTS, 3, torch.float32))[1].sort(dim=1).values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_bits_of_dense_layers_added_from_its_best_expert_on(dtype: torch.dtype) -> None:
    of, x = layer(dtype, biased=True, activation="silu"), tokens(30, dtype)
    weights, ids = route(uniform(x, of), of.reduction, of.score_bias)
    made = moe(x, weights, ids, of.experts)
    for token, row in enumerate(made):
        total = torch.zeros(HIDDEN)
        for weight, expert in zip(weights[token], ids[token], strict=True):
            hidden = linear(x[token : token + 1], of.gate_up[expert], of.gate_up_bias[expert])
            hidden = elementwise("silu", hidden[:, :INTERMEDIATE]) * hidden[:, INTERMEDIATE:]
            out = linear(hidden, of.down[expert], of.down_bias[expert])
            total = total + out[0].float() * weight
        assert_same_bits(row, total.to(dtype))


def test_experts_that_are_not_there_are_left_out() -> None:
    of, x = layer(), tokens(77)
    weights, ids = route(uniform(x, of), of.reduction)
    here = torch.tensor([6, 1, 3])
    places = torch.full((EXPERTS,), -1).index_copy_(0, here, torch.arange(3))
    there = Experts(of.gate_up[here], of.down[here], of.reduction, places=places)
    part = moe(x, weights, ids, there)
    absent = ~torch.isin(ids, here)
    assert absent.any()
    assert_same_bits(part, moe(x, weights.masked_fill(absent, 0), ids, of.experts))
    for rows in (slice(0, 1), slice(40, 43)):
        alone = moe(x[rows], weights[rows], ids[rows], there)
        assert_same_bits(alone, part[rows])
    assert (part[absent.all(1)] == 0).all()


def test_workers_that_exchange_rows_have_the_bits_of_one() -> None:
    """Each has some experts; a token's first ones may be at the last worker."""
    of, x = layer(), tokens(2100)
    weights, ids = route(uniform(x, of), of.reduction)
    sent: list[list[torch.Tensor]] = []

    def worker(here: torch.Tensor, exchange: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        places = torch.full((EXPERTS,), -1).index_copy_(0, here, torch.arange(len(here)))
        own = Experts(of.gate_up[here], of.down[here], of.reduction, places=places, exchange=exchange)
        return moe(x, weights, ids, own)

    def send(rows: torch.Tensor) -> torch.Tensor:
        sent[-1].append(rows.clone())
        return rows

    workers = torch.tensor([6, 1, 3]), torch.tensor([0, 7, 2, 5, 4])
    for here in workers:
        sent.append([])
        worker(here, send)
    assert all(not (one.bool() & other.bool()).any() for one, other in zip(*sent, strict=True))
    for here in workers:
        joined = iter([one + other for one, other in zip(*sent, strict=True)])
        assert_same_bits(worker(here, lambda _, joined=joined: next(joined)), moe(x, weights, ids, of.experts))


def test_prepared_experts_give_the_bits_of_the_weights() -> None:
    of, x = layer(), tokens(50)
    weights, ids = route(uniform(x, of), of.reduction)
    found = cpu.prepared_moe(x, weights, ids, of.prepared)
    assert_same_bits(found, moe(x, weights, ids, of.experts))


@pytest.mark.parametrize("count", [1, 2])
def test_the_number_of_threads_is_the_same_for_every_batch_size(count: int, threads: Callable[[int], None]) -> None:
    threads(count)
    of, x = layer(), tokens(300)
    logits = uniform(x, of)
    whole = of(x, logits)
    for rows in (slice(0, 1), slice(2, 19), slice(100, 300)):
        assert_same_bits(of(x[rows], logits[rows]), whole[rows])


def test_no_tokens_give_no_rows() -> None:
    of = layer()
    assert of(tokens(0), torch.zeros(0, EXPERTS, dtype=torch.bfloat16)).shape == (0, HIDDEN)


def stock(x: torch.Tensor, logits: torch.Tensor, of: Layer) -> torch.Tensor:
    """PyTorch's GEMMs on the rows of each expert, as vLLM computes on a CPU without a kernel of its own."""
    weights, ids = route(logits, of.reduction)
    out = torch.zeros(x.shape)
    for expert in ids.unique().tolist():
        row, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = torch.nn.functional.linear(x[row], of.gate_up[expert]).chunk(2, dim=1)
        made = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, of.down[expert])
        out[row] += made.float() * weights[row, slot, None]
    return out.to(x.dtype)


def test_stock_gemms_fail_the_same_sweep() -> None:
    assert differing(stock, "uniform", layer(torch.float32))


ROUTING_OF = {"arrival order": "skewed", "another tie rule": "tied"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails_the_same_sweep(fault: str) -> None:
    routing, of = ROUTING_OF.get(fault, "uniform"), layer(torch.float32)
    assert differing(ours, routing, of) == []
    with planted(fault):
        assert differing(ours, routing, of)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dtype": torch.float64}, "a mixture of experts in float64: it is defined for float32, bfloat16, float16"),
        ({"scoring": "sqrtsoftplus"}, "experts chosen by sqrtsoftplus"),
        ({"activation": "gelu_no_mul"}, "experts with the activation gelu_no_mul"),
    ],
)
def test_what_has_no_definition_is_refused_by_name(fields: dict[str, object], said: str) -> None:
    with pytest.raises(NotCovered, match=said):
        MoeReduction(**{"num_experts": EXPERTS, "top_k": 2, "dtype": torch.bfloat16} | fields)


@pytest.mark.parametrize(
    "fields", [{"top_k": 9}, {"top_k": 0}, {"groups": 3}, {"groups": 4, "top_groups": 5}, {"groups": 4, "top_k": 3}]
)
def test_numbers_that_do_not_fit_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="groups"):
        MoeReduction(**{"num_experts": EXPERTS, "top_k": 2, "dtype": torch.bfloat16} | fields)


def test_tensors_that_do_not_fit_are_refused() -> None:
    of, x = layer(), tokens(4)
    weights, ids = route(uniform(x, of), of.reduction)
    with pytest.raises(ValueError, match=r"takes logits \[tokens, 8\] and a bias of \[8\], got \[4, 7\]"):
        route(torch.zeros(4, 7), of.reduction)
    with pytest.raises(ValueError, match=r"and a bias of \[8\], got \[4, 8\] and \[3\]"):
        route(torch.zeros(4, 8), of.reduction, torch.zeros(3))
    with pytest.raises(ValueError, match=r"moe takes ids \[4, 3\]"):
        moe(x, weights, ids[:, :2], of.experts)
    with pytest.raises(ValueError, match="places for 3 of 8 experts"):
        moe(x, weights, ids, Experts(of.gate_up[:3], of.down[:3], of.reduction))
    with pytest.raises(ValueError, match=r"tokens and experts in torch\.bfloat16 and weights in torch\.float32"):
        moe(x.float(), weights, ids, of.experts)
