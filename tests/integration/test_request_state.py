"""What vLLM's first model runner keeps of a request follows the request's tokens, whatever its row goes through."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_batch_invariant.integration.engine import request_state
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.integration.sampling import sampler

vllm = pytest.importorskip("vllm")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these are tensors of the CPU")

CPU = torch.device("cpu")
VOCABULARY, LONGEST = 12, 64
STEPS = 22
START, END = 7, 9
STOP, LEAST = 3, 9
MARKS = (([7], [9]), ([7], [9, 10, 11]), ([7, 8], [9, 10]))
"""What begins and what ends a thought."""
BUDGETS = (0, 1, 3, 5, 8)
PROMPTS: tuple[list[int] | None, ...] = ([5, 7, 8, 5, 5], [7, 8, 1, 9, 10, 11, 5], [5, 5], [4, 7, 8], None)
"""In a thought, behind one, without one, at the beginning of one, and embeddings."""


@dataclass(frozen=True)
class Case:
    """A request with a budget, and what the model would like to say."""

    marks: tuple[list[int], list[int]]
    budget: int
    prompt: list[int] | None
    seed: int

    def wish(self, output: Sequence[int]) -> int:
        """The model's next token, which all tokens before decide: marks are frequent, also in pieces."""
        begin, end = self.marks
        half_way = [mark[at] for mark in (begin, end) for at in range(1, len(mark)) if output[-at:] == mark[:at]]
        likely = [*begin, *end, *half_way, *half_way]
        state = hash((self.seed, *(self.prompt or ()), *output)) % 10**6
        return likely[state % len(likely)] if state % 1000 < 400 else state // 1000 % VOCABULARY


CASES = [Case(*one) for one in product(MARKS, BUDGETS, PROMPTS, range(2))]


def mended(stock: type, *mends: Callable[[type], None]) -> type:
    kind = type("Mended", (stock,), {})
    for mend in mends:
        mend(kind)
    return kind


@pytest.fixture(scope="module")
def stock() -> type:
    return patch_points.THINKING_BUDGETS.get()


@pytest.fixture(scope="module")
def budgets(stock: type) -> type:
    return mended(stock, request_state.budgets_follow_tokens)


def update(added: Sequence[Any] = (), moved: Sequence[Any] = (), removed: Sequence[int] = ()) -> Any:
    from vllm.v1.sample.logits_processor.interface import BatchUpdate

    return BatchUpdate(4, removed=removed, added=added, moved=moved)


def holder_of(kind: type, case: Case) -> Any:
    start, end = case.marks
    config = SimpleNamespace(reasoning_start_token_ids=start, reasoning_end_token_ids=end)
    return kind(config, 4, 0, CPU, False)


def entry(row: int, case: Case, output: list[int]) -> tuple[Any, ...]:
    return row, SimpleNamespace(thinking_token_budget=case.budget), case.prompt, output


def answer(kind: type, case: Case, away_before: Collection[int] = (), chunks: int = 1) -> list[int]:
    """The tokens of a request that leaves its row before some steps, to have everything computed again in chunks."""
    output: list[int] = []
    holder = holder_of(kind, case)
    holder.sync_batch(update([entry(0, case, output)]))
    for step in range(STEPS):
        if step in away_before:
            holder.sync_batch(update(removed=[0]))
            output = list(output)
            holder.sync_batch(update([entry(0, case, output)]))
        for _ in range(chunks if step in away_before or not step else 1):
            logits = torch.zeros(1, VOCABULARY)
            logits[0, case.wish(output)] = 1
            holder.update_state([output], [[]])
            logits = holder.apply_to_logits(logits, False, [[]])
        output.append(int(logits.argmax()))
    return output


def test_a_budget_forces_the_same_tokens_whenever_its_request_leaves_and_comes_back(stock: type, budgets: type) -> None:
    for case in CASES:
        alone = answer(stock, case)
        assert answer(budgets, case) == alone
        different = [step for step in range(STEPS) if answer(budgets, case, {step}) != alone]
        assert different == [], case
        assert answer(budgets, case, range(0, STEPS, 2), chunks=3) == alone


@pytest.mark.parametrize("prompt", [[5, 7, 8, 5, 5], [5, 5]])
def test_vllms_own_state_fails_the_same_comparison(stock: type, prompt: list[int]) -> None:
    cases = [case for case in CASES if case.prompt == prompt and len(case.marks[1]) > 1]
    for budget in BUDGETS:
        assert any(
            answer(stock, case, {step}) != answer(stock, case)
            for case in cases
            if case.budget == budget
            for step in range(STEPS)
        )


def test_the_cases_have_thoughts_that_end_by_themselves_and_forced_ends_and_several_thoughts(stock: type) -> None:
    ends = [count(answer(stock, case), case.marks[1]) for case in CASES]
    free = [count(answer(stock, Case(one.marks, 10 * STEPS, one.prompt, one.seed)), one.marks[1]) for one in CASES]
    assert sum(ends) > sum(free) > len(CASES)
    assert max(ends) > 2


def count(tokens: list[int], mark: list[int]) -> int:
    return sum(tokens[at : at + len(mark)] == mark for at in range(len(tokens)))


def test_an_output_that_has_lost_tokens_is_counted_anew(budgets: type) -> None:
    for case in CASES:
        output = answer(budgets, case)
        holder, again = holder_of(budgets, case), holder_of(budgets, case)
        holder.sync_batch(update([entry(0, case, output)]))
        holder.update_state([output], None)
        del output[STEPS // 2 :]
        holder.update_state([output], None)
        again.sync_batch(update([entry(0, case, output)]))
        again.update_state([output], None)
        assert forces(holder) == forces(again)


def forces(holder: Any) -> list[float]:
    return holder.apply_to_logits(torch.zeros(4, VOCABULARY), False, [[]] * 4).flatten().tolist()


class Batch:
    """vLLM's batch, on which requests come and go.

    Args:
        budgets: the class of budgets.
        mends: of the batch.
    """

    def __init__(self, budgets: type, *mends: Callable[[type], None]) -> None:
        from vllm.v1.sample.logits_processor import LogitsProcessors
        from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

        self.rows = mended(patch_points.INPUT_BATCH.get(), *mends)(
            *(4, LONGEST, LONGEST, CPU, VOCABULARY, [16]),
            max_num_blocks_per_req=[4],
            logitsprocs=LogitsProcessors([MinTokensLogitsProcessor(None, CPU, False)]),
        )
        self.rows.thinking_budget_state_holder = holder_of(budgets, Case(MARKS[1], 0, None, 0))
        self._requests: dict[str, Any] = {}

    def add(self, name: str, prompt: list[int] | None, embeddings: torch.Tensor | None = None, **params: Any) -> None:
        from vllm.v1.worker.gpu_input_batch import CachedRequestState

        asked = vllm.SamplingParams(temperature=0, **params)
        asked.all_stop_token_ids.add(STOP)
        request = CachedRequestState(
            *(name, prompt),
            mm_features=[],
            sampling_params=asked,
            generator=None,
            block_ids=([0],),
            num_computed_tokens=0,
            output_token_ids=[],
            prompt_embeds=embeddings,
        )
        self._requests[name] = request
        self.rows.add_request(request)

    def output(self, name: str) -> list[int]:
        return self._requests[name].output_token_ids

    def come_back(self, name: str) -> None:
        self.rows.add_request(self._requests[name])

    def step(self) -> dict[str, list[float]]:
        """The logits of each request behind vLLM's processors."""
        rows = self.rows
        rows.condense()
        rows.refresh_metadata()
        rows.update_async_output_token_ids()
        metadata, logits = rows.sampling_metadata, torch.zeros(rows.num_reqs, VOCABULARY)
        for processor in rows.logitsprocs.non_argmax_invariant:
            logits = processor.apply(logits)
        rows.thinking_budget_state_holder.update_state(metadata.output_token_ids, metadata.spec_token_ids)
        logits = rows.thinking_budget_state_holder.apply_to_logits(logits, False, metadata.spec_token_ids)
        return dict(zip(rows.req_ids, logits.tolist(), strict=True))

    def greedy_step(self) -> None:
        for name, logits in self.step().items():
            self.output(name).append(max(range(VOCABULARY), key=logits.__getitem__))

    def async_step(self, token: int) -> dict[str, list[float]]:
        """A step whose tokens are known in the next one."""
        logits, rows = self.step(), self.rows
        rows.prev_req_id_to_index = dict(rows.req_id_to_index)
        for name in rows.req_ids:
            self.output(name).append(-1)
        event = SimpleNamespace(synchronize=lambda: None)
        rows.set_async_sampled_token_ids(torch.full((rows.num_reqs, 1), token), event)
        return logits


THINKING = [5, START, 5]


def beside_others(kind: type, how: str) -> dict[str, list[int]]:
    """Outputs of a request with a budget and of one without, of which one leaves or which change places."""
    batch = Batch(kind)
    batch.add("budget", THINKING, thinking_token_budget=6)
    batch.add("none", [1, 2])
    for step in range(16):
        if step == 3:
            if how == "gone":
                batch.rows.remove_request("budget")
            elif how == "swapped":
                batch.rows.swap_states(0, 1)
            elif how == "back behind it":
                batch.rows.remove_request("budget")
                batch.greedy_step()
                batch.come_back("budget")
        batch.greedy_step()
    return {name: batch.output(name) for name in ("budget", "none")}


@pytest.mark.parametrize("how", ["gone", "swapped", "back behind it"])
def test_a_row_that_is_left_keeps_no_budget_for_whoever_moves_there(stock: type, budgets: type, how: str) -> None:
    alone = beside_others(budgets, "")
    assert alone["budget"][5:8] == MARKS[1][1]
    moved = beside_others(budgets, how)
    assert set(moved["none"]) == {0}
    assert moved["budget"] == alone["budget"][: len(moved["budget"])]
    if how != "swapped":  # vLLM 0.26 and 0.27 leave it in both rows
        assert set(beside_others(stock, how)["none"]) != {0}


def masked_steps(neighbour_from: int, *mends: Callable[[type], None]) -> list[int]:
    """Steps in which a request may not stop."""
    batch = Batch(patch_points.THINKING_BUDGETS.get(), *mends)
    batch.add("target", [1], min_tokens=LEAST)
    steps = []
    for step in range(2 * LEAST):
        if step == neighbour_from:
            batch.add("neighbour", [1], presence_penalty=1.0)
        if batch.async_step(step)["target"][STOP] < 0:
            steps.append(step)
    return steps


@pytest.mark.parametrize("neighbour_from", range(0, 2 * LEAST, 3))
def test_minimum_tokens_are_counted_alike_beside_a_neighbour_with_penalties(neighbour_from: int) -> None:
    alone = list(range(LEAST))
    assert masked_steps(2 * LEAST) == alone
    assert masked_steps(neighbour_from, request_state.outputs_keep_their_lengths) == alone


def test_vllms_own_count_fails_the_same_comparison() -> None:
    assert masked_steps(5) != masked_steps(2 * LEAST)


def test_tokens_that_arrive_late_take_the_place_of_the_last_placeholder() -> None:
    batch = Batch(patch_points.THINKING_BUDGETS.get(), request_state.outputs_keep_their_lengths)
    batch.add("target", [1])
    for step in range(8):
        if step == 3:
            batch.add("neighbour", [1], presence_penalty=1.0)
        batch.async_step(step)
    assert batch.output("target") == [-1, -1, -1, 3, 4, 5, 6, -1]
    assert batch.output("neighbour") == [3, 4, 5, 6, -1]


def penalised(before: Sequence[list[int]], *mends: Callable[[type], None]) -> torch.Tensor:
    """What a prompt of embeddings has for its repetition penalty, in a row that other prompts had before it."""
    batch = Batch(patch_points.THINKING_BUDGETS.get(), *mends)
    for number, prompt in enumerate(before):
        batch.add(str(number), prompt)
        batch.step()
        batch.rows.remove_request(str(number))
    batch.add("embeddings", None, torch.zeros(4, 8), repetition_penalty=1.5)
    batch.step()
    return batch.rows.sampling_metadata.prompt_token_ids


def test_a_prompt_of_embeddings_is_not_penalised_for_a_prompt_before_it() -> None:
    mend = request_state.embeddings_have_no_tokens
    fresh = penalised([])
    assert torch.equal(penalised([], mend), fresh)
    assert torch.equal(penalised([[11, 4, 5, 6, 7]], mend), fresh)
    assert not torch.equal(penalised([[11, 4, 5, 6, 7]]), fresh)


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, type]]:
    names = {"THINKING_BUDGETS", "INPUT_BATCH"}
    found = {patch_points.ALL[name].attribute: mended(patch_points.ALL[name].get()) for name in names}
    stock = patch_points.PatchPoint.get
    monkeypatch.setattr(patch_points.PatchPoint, "get", lambda point: found.get(point.attribute, stock(point)))
    yield found


def test_all_of_it_is_installed_with_the_sampler(classes: dict[str, type]) -> None:
    request_state.install()
    sampler.masks_follow_their_rows(classes["InputBatch"])
    for name in ("THINKING_BUDGETS", "INPUT_BATCH"):
        own = vars(classes[patch_points.ALL[name].attribute])
        assert {*patch_points.MEMBERS[name]} <= {*own}
