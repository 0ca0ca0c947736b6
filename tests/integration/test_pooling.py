"""Poolers: their sums are the mode's, and what they call is looked at."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.assertions import assert_near, assert_same_bits
from tests.integration.test_layers import bare, named
from vllm_batch_invariant import batch_invariant_mode
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.layers import pooling, review
from vllm_batch_invariant.integration.reviews import patch_points

pytest.importorskip("vllm")
if not patch_points.MEAN_POOL.is_there():
    pytest.skip("this vLLM keeps its poolers elsewhere, and they are refused", allow_module_level=True)

POOLER = "vllm.model_executor.layers.pooler"


def of_prompts(lengths: Sequence[int], computed: Sequence[int] | None = None) -> Any:
    """vLLM's metadata of prompts of which so many tokens are there."""
    from vllm import PoolingParams
    from vllm.v1.pool.metadata import PoolingMetadata, PoolingStates

    there = torch.tensor(computed or lengths)
    made = PoolingMetadata(
        torch.tensor(lengths),
        None,
        None,
        [PoolingParams(task="embed") for _ in lengths],
        [PoolingStates() for _ in lengths],
    )
    made.build_pooling_cursor(there.numpy(), there, device=torch.device("cpu"))
    return made


def rows(count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Whose sums show the order of their additions: large ones that cancel, and small ones."""
    generator = torch.Generator().manual_seed(count)
    large = torch.randn(count, 96, generator=generator) * torch.randn(count, 1, generator=generator).mul(4).exp()
    return large.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_mean_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    lengths = (3, 1, 300, 45, 45)
    prompts = [rows(length, dtype).clamp(-1e4, 1e4) for length in lengths]
    with batch_invariant_mode():
        together = pooling.mean(None, torch.cat([*prompts, rows(7, dtype)]), of_prompts(lengths))
        assert together.dtype == torch.float32
        for mean, prompt in zip(together, prompts, strict=True):
            assert_same_bits(mean, pooling.mean(None, prompt, of_prompts([len(prompt)]))[0])
            assert_near(mean, prompt.double().mean(0), factor=10)
        assert pooling.mean(None, prompts[0][:0], of_prompts([])).shape == (0, 96)


def test_a_mean_by_sums_over_the_batch_fails_that_comparison() -> None:
    """As vLLM's earlier one."""
    prompts = [rows(length).float() for length in (300, 45)]
    sums = torch.cat(prompts).cumsum(0)
    assert not torch.equal((sums[-1] - sums[299]) / 45, prompts[1].cumsum(0)[-1] / 45)


def test_a_mean_over_a_part_of_a_prompt_is_no_mean() -> None:
    with pytest.raises(RuntimeError, match="a part of a prompt"):
        pooling.mean(None, rows(5), of_prompts([9], [5]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [7, 512, 5000])
def test_an_embedding_of_length_1_has_the_same_bits_as_a_row_and_as_a_vector(dtype: torch.dtype, size: int) -> None:
    x = rows(40, torch.float64).repeat(1, 53)[:, :size].to(dtype).clamp(-6e4, 6e4)
    with batch_invariant_mode():
        together = pooling.normalise(None, x)
        assert together.dtype == dtype
        for count in (1, 3, 17):
            assert_same_bits(pooling.normalise(None, x[:count]), together[:count])
        assert_same_bits(pooling.normalise(None, x[5]), together[5])
    torch.testing.assert_close(together, torch.nn.functional.normalize(x.double(), dim=-1).to(dtype))
    assert not pooling.normalise(None, torch.zeros(3)).any()


def dispatching(pooler: torch.nn.Module) -> torch.nn.Module:
    """A model that pools for one task."""
    kind = named(f"{POOLER}.special.DispatchPooler")
    model = torch.nn.ModuleDict({"pooler": bare(kind, poolers_by_task={"classify": pooler})})
    assert pooler not in set(model.modules())  # PyTorch does not see it
    return model


def classifying(**changes: Any) -> torch.nn.Module:
    head = {"classifier": torch.nn.Linear(2, 2), "activation": named(f"{POOLER}.activations.PoolerClassify")()}
    return bare(
        named(f"{POOLER}.seqwise.poolers.SequencePooler"),
        pooling=named(f"{POOLER}.seqwise.methods.LastPool")(),
        head=bare(named(f"{POOLER}.seqwise.heads.ClassifierPoolerHead"), **head | changes),
    )


def test_a_pooler_that_puts_known_layers_together_is_known() -> None:
    review.check(dispatching(classifying()))
    review.check(dispatching(classifying(classifier=None)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"classifier": torch.tanh}, r"pooler\.classify\.head .*its classifier is a function"),
        ({"classifier": torch.nn.GRU(2, 2)}, r"pooler\.classify\.head\.classifier .*GRU"),
        (
            {"activation": named(f"{POOLER}.activations.LambdaPoolerActivation")(torch.tanh)},
            r"pooler\.classify\.head\.activation .*LambdaPoolerActivation",
        ),
    ],
)
def test_what_a_pooler_calls_and_nobody_knows_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(NotCovered, match=said) as refused:
        review.check(dispatching(classifying(**changes)))
    assert "\n" not in str(refused.value)


def test_a_request_that_starts_again_has_collected_nothing() -> None:
    """vLLM's first model runner keeps rows of the chunks before the preemption."""
    from vllm.v1.pool.metadata import PoolingStates

    seen = []

    def update(self: Any, scheduled: Any) -> str:
        seen.append({name: len(request.pooling_states.hidden_states_cache) for name, request in self.requests.items()})
        return "what vLLM returns"

    requests = {name: SimpleNamespace(pooling_states=PoolingStates()) for name in ("resumed", "runs on")}
    for request in requests.values():
        request.pooling_states.hidden_states_cache.append(rows(3))
    runner = SimpleNamespace(requests=requests)
    scheduled = SimpleNamespace(scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={"resumed", "elsewhere"}))
    assert pooling.starts_again(update)(runner, scheduled) == "what vLLM returns"
    assert seen == [{"resumed": 0, "runs on": 1}]
    requests["resumed"].pooling_states = None  # of a request that generates
    pooling.starts_again(update)(SimpleNamespace(requests={}), scheduled)


class Bert:
    """What the second model runner calls, with an embedding as vLLM's BERT has it."""

    def __init__(self, takes_types: bool) -> None:
        self.model = SimpleNamespace(forward=self.forward if takes_types else self.embedded)

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None = None) -> None:
        raise AssertionError("a replayed graph runs none of it")

    def embedded(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Types and ids, as a graph that was captured without types reads them."""
        from vllm.model_executor.models import bert

        ids = input_ids.clone()
        return bert._decode_token_type_ids(ids), ids

    def prepare_inputs(self, input_batch: Any, requests: Any) -> dict[str, Any]:
        return {"token_type_ids": torch.tensor([0, 1, 1, 0], dtype=torch.int32)} if requests else {}


@pytest.mark.parametrize("covered", [True, False], ids=["ours", "vLLM's"])
def test_a_replayed_graph_reads_the_types_of_tokens(covered: bool) -> None:
    state, batch = Bert(takes_types=True), SimpleNamespace(input_ids=torch.arange(5, 10, dtype=torch.int32))
    prepare = pooling.with_token_types(Bert.prepare_inputs) if covered else Bert.prepare_inputs
    assert ("token_type_ids" in prepare(state, batch, "pairs")) != covered
    types, ids = state.embedded(batch.input_ids)
    assert types.tolist() == ([0, 1, 1, 0, 0] if covered else [0] * 5)
    assert ids.tolist() == [5, 6, 7, 8, 9]
    assert prepare(state, batch, "") == {}


def test_ids_of_a_model_without_types_stay_as_they_are() -> None:
    state, batch = Bert(takes_types=False), SimpleNamespace(input_ids=torch.arange(5, 10, dtype=torch.int32))
    assert "token_type_ids" in pooling.with_token_types(Bert.prepare_inputs)(state, batch, "pairs")
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9]
