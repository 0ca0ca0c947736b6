"""The masks of a request's grammar follow the request, whichever grammars an engine has had before."""

import inspect
import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.integration.sampling import grammars
from vllm_batch_invariant.verify.demo_model import EOS, train_tokenizer

vllm = pytest.importorskip("vllm")

PLAIN = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FEW = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 3}}, "required": ["a"]}
"""What the first backend that vLLM tries takes, and what only the second one does."""
ANSWER = '{"a": 12'
Masks = list[list[int]]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=train_tokenizer(400, 50_000), eos_token=EOS)


class Engine:
    """What holds the grammars of an engine, alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokenizer: Any, is_mended: bool) -> None:
        module = patch_points.STRUCTURED_OUTPUTS.module()
        monkeypatch.setattr(module, "cached_tokenizer_from_config", lambda model_config: tokenizer)
        kind = type("Manager", (patch_points.STRUCTURED_OUTPUTS.get(),), {})
        if is_mended:
            grammars.requests_have_their_own_backend(kind)
        hf_config = SimpleNamespace(model_type="qwen3")
        self._model = SimpleNamespace(
            skip_tokenizer_init=False,
            get_vocab_size=lambda: len(tokenizer),
            is_diffusion=False,
            hf_config=hf_config,
            hf_text_config=hf_config,
        )
        self._config = SimpleNamespace(
            model_config=self._model,
            scheduler_config=SimpleNamespace(max_num_seqs=4),
            parallel_config=SimpleNamespace(distributed_executor_backend="mp"),
            structured_outputs_config=vllm.config.StructuredOutputsConfig(),
            num_speculative_tokens=0,
            speculative_config=None,
        )
        self._tokenizer, self._manager = tokenizer, kind(self._config)

    def masks(self, *schemas: dict[str, Any]) -> list[Masks]:
        """Of requests that come together: at each token of an answer, what may follow."""
        from vllm.v1.structured_output.request import StructuredOutputRequest

        requests = []
        for schema in schemas:
            asked = vllm.sampling_params.StructuredOutputsParams(json=json.dumps(schema))
            params = vllm.SamplingParams(structured_outputs=asked)
            params._validate_structured_outputs(self._model, self._config.structured_outputs_config, self._tokenizer)
            structured = StructuredOutputRequest.from_sampling_params(params)
            request = SimpleNamespace(
                request_id="", sampling_params=params, structured_output_request=structured, use_structured_output=True
            )
            self._manager.grammar_init(request)
            requests.append(structured)
        self._manager.grammar_init(SimpleNamespace(structured_output_request=None))
        return [self._of(structured._grammar.result(60)) for structured in requests]

    def _of(self, grammar: Any) -> Masks:
        mask, found = self._manager.backend.allocate_token_bitmask(1), []
        for token in self._tokenizer.encode(ANSWER):
            grammar.fill_bitmask(mask, 0)
            found.append(mask.flatten().tolist())
            assert grammar.accept_tokens("", [token])
        grammar.fill_bitmask(mask, 0)
        return [*found, mask.flatten().tolist()]


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> Any:
    def of(steps: Sequence[Sequence[dict[str, Any]]], is_mended: bool = True) -> list[Masks]:
        engine = Engine(monkeypatch, tokenizer, is_mended)
        return [found for step in steps for found in engine.masks(*step)]

    return of


def test_a_grammars_masks_do_not_follow_the_grammars_before_it(masks: Any) -> None:
    [plain], [few] = masks([[PLAIN]]), masks([[FEW]])
    assert plain != few
    assert masks([[FEW], [PLAIN], [FEW]]) == [few, plain, few]
    assert masks([[PLAIN], [FEW], [PLAIN]]) == [plain, few, plain]
    assert masks([[FEW, PLAIN, FEW, PLAIN]]) == [few, plain, few, plain]


def test_vllms_own_engine_has_one_backend_that_of_its_first_request(masks: Any) -> None:
    [plain] = masks([[PLAIN]], is_mended=False)
    assert masks([[PLAIN]]) == [plain]
    if "backend_name" in inspect.getsource(patch_points.STRUCTURED_OUTPUTS.get()):  # vLLM 0.33
        with pytest.raises(ValueError, match="one backend"):
            masks([[FEW], [PLAIN]], is_mended=False)
        return
    assert masks([[FEW], [PLAIN]], is_mended=False)[1] != plain


def test_a_backend_that_cannot_be_made_leaves_the_one_of_requests_that_run(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    engine = Engine(monkeypatch, tokenizer, True)
    engine.masks(PLAIN)
    made = engine._manager.backend

    def missing(*_: object, **__: object) -> None:
        raise ImportError("its package is not installed")

    monkeypatch.setattr(patch_points.STRUCTURED_OUTPUTS.module(), "GuidanceBackend", missing)
    with pytest.raises(ImportError):
        engine.masks(FEW)
    assert engine._manager.backend is made


class Keeps:
    """As vLLM's backend of guidance: what it compiles is an attribute while it does."""

    def __init__(self) -> None:
        self.both = Barrier(2)

    def compile_grammar(self, spec: str) -> str:
        self.grammar = spec
        self.both.wait(60)
        return self.grammar


class Compiles:
    """As vLLM's manager, which compiles in threads."""

    def __init__(self) -> None:
        self.backend, self.executor = None, ThreadPoolExecutor(2)

    def grammar_init(self, request: Any) -> None:
        self.backend = self.backend or Keeps()
        request.grammar = self.executor.submit(self._create_grammar, request)

    def _create_grammar(self, request: Any) -> str:
        return self.backend.compile_grammar(request.spec)


@pytest.mark.parametrize("is_mended", [False, True])
def test_a_grammar_that_is_compiled_beside_another_is_the_requests_own(is_mended: bool) -> None:
    kind = type("Manager", (Compiles,), {})
    if is_mended:
        grammars.requests_have_their_own_backend(kind)
    params = SimpleNamespace(structured_outputs=SimpleNamespace(_backend="guidance"))
    requests = [SimpleNamespace(structured_output_request=1, sampling_params=params, spec=spec) for spec in "ab"]
    manager = kind()
    for request in requests:
        manager.grammar_init(request)
    compiled = [request.grammar.result(60) for request in requests]
    assert (compiled == ["a", "b"]) is is_mended


def test_the_places_that_grammars_take_hold_of_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Manager", (patch_points.STRUCTURED_OUTPUTS.get(),), {})
    monkeypatch.setattr(patch_points.STRUCTURED_OUTPUTS.module(), "StructuredOutputManager", kind)
    grammars.install()
    assert {"grammar_init", "_create_grammar"} <= set(vars(kind))
    assert ("should_advance" in vars(kind)) is hasattr(kind, "should_advance")


ENDS = 9


class Advances:
    """As vLLM 0.26 to 0.29: a thought ends if what comes behind the computed tokens has the mark."""

    def should_advance(self, request: Any) -> bool:
        return ENDS in request.all_token_ids[request.num_computed_tokens - request.num_output_placeholders :]


@pytest.mark.parametrize("is_mended", [False, True])
def test_a_thought_of_a_request_that_was_preempted_does_not_end_with_its_prompts(is_mended: bool) -> None:
    kind = type("Manager", (Advances,), {})
    if is_mended:
        grammars.thoughts_end_with_the_last_token(kind)
    running = SimpleNamespace(all_token_ids=[1, ENDS, 2, 3], num_computed_tokens=4, num_output_placeholders=1)
    preempted = SimpleNamespace(all_token_ids=[1, ENDS, 2, 3], num_computed_tokens=0, num_output_placeholders=0)
    ended = SimpleNamespace(all_token_ids=[1, 2, ENDS], num_computed_tokens=2, num_output_placeholders=0)
    assert not kind().should_advance(running)
    assert kind().should_advance(preempted) is not is_mended
    assert preempted.num_computed_tokens == 0
    assert kind().should_advance(ended)


BEGINS = 8


class LastMark:
    """As parsers of vLLM's that look at the whole answer: a thought has ended if its last mark is an end."""

    def is_reasoning_end(self, tokens: Sequence[int]) -> bool:
        marks = [token for token in tokens if token in (BEGINS, ENDS)]
        return bool(marks) and marks[-1] == ENDS

    def is_reasoning_end_streaming(self, tokens: Sequence[int], new: Sequence[int]) -> bool:
        return self.is_reasoning_end(tokens)


class AnyEnd(LastMark):
    """As most of them: one among the new tokens is enough."""

    def is_reasoning_end_streaming(self, tokens: Sequence[int], new: Sequence[int]) -> bool:
        return ENDS in new


class TakesAll:
    """A grammar that keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.given += tokens
        return True


def given_to_a_grammar(kind: Any, parser: Any, prompt: list[int], steps: Sequence[Sequence[int]]) -> list[int]:
    """The tokens of an answer that its grammar is given, which comes in these steps; and what is said of each step's
    before it is taken.
    """
    manager = kind.__new__(kind)
    manager.enable_in_reasoning, manager.reasoner_cls = False, object
    grammar = TakesAll()
    structured = SimpleNamespace(reasoning_ended=None, reasoner=parser, grammar=grammar, reasoning_parser_kwargs=None)
    known = list(prompt)
    request = SimpleNamespace(
        request_id="",
        use_structured_output=True,
        prompt_token_ids=prompt,
        all_token_ids=known,
        structured_output_request=structured,
    )
    for step in steps:
        taken = len(grammar.given)
        before = manager._get_constraint_bounds(request, list(step))
        known += step
        manager.accept_tokens(request, list(step))
        assert len(step) - before.grammar_start == len(grammar.given) - taken or len(grammar.given) == taken
    return grammar.given


@pytest.mark.parametrize("is_mended", [False, True])
@pytest.mark.parametrize("parser", [LastMark, AnyEnd])
def test_a_grammar_begins_at_the_same_token_however_many_a_step_has(parser: Any, is_mended: bool) -> None:
    """vLLM's own finds no end of a thought behind which a new one begins in the same step."""
    own = patch_points.STRUCTURED_OUTPUTS.get()
    if not grammars.counts_thoughts_by_token(own):
        pytest.skip("this vLLM has another function for it, and such requests are refused")
    kind = type("Manager", (own,), {"_get_constraint_bounds": inspect.unwrap(own._get_constraint_bounds)})
    if is_mended:
        grammars.thoughts_end_at_the_same_token(kind)
    chance, differing = random.Random(0), 0
    for _ in range(400):
        prompt = chance.choices((1, 2, BEGINS, ENDS), k=chance.randint(1, 4))
        answer = chance.choices((1, 2, 3, BEGINS, ENDS), k=12)
        cuts = sorted(chance.sample(range(1, 12), chance.randint(0, 6)))
        steps = [answer[start:end] for start, end in pairwise([0, *cuts, 12])]
        expected = given_to_a_grammar(kind, parser(), prompt, [[token] for token in answer])
        differing += given_to_a_grammar(kind, parser(), prompt, steps) != expected
    assert (differing > 0) is (parser is LastMark and not is_mended)
