"""The grammars of structured outputs, which vLLM's engine advances by a request's tokens."""

import sys
from collections.abc import Sequence
from copy import copy
from functools import wraps
from types import SimpleNamespace
from typing import Any

from ..reviews import patch_points

_BACKENDS = "backends_by_name"
"""The attribute that has them."""


def install() -> None:
    """Mend the class that holds the grammars of an engine."""
    manager = patch_points.STRUCTURED_OUTPUTS.get()
    requests_have_their_own_backend(manager)
    if hasattr(manager, "should_advance"):
        thoughts_end_with_the_last_token(manager)
    if counts_thoughts_by_token(manager):
        thoughts_end_at_the_same_token(manager)


def counts_thoughts_by_token(manager: type[Any]) -> bool:
    """Whether vLLM says of the tokens of a step where a thought ends among them, as 0.32 and 0.33 do."""
    return hasattr(manager, "_get_constraint_bounds") and hasattr(sys.modules[manager.__module__], "ConstraintBounds")


def requests_have_their_own_backend(manager: type[Any]) -> None:
    """Have each request's grammar compiled by the backend that was chosen for it. With ``auto`` vLLM's front end
    chooses by what the grammar needs, but the engine has one backend, that of the first request since its start: vLLM
    0.26 to 0.32 compile all others with it, and 0.33 refuses those of another.
    """
    init, create = manager.grammar_init, manager._create_grammar

    @wraps(init)
    def grammar_init(self: Any, request: Any) -> None:
        if request.structured_output_request is None:
            return
        made = self.__dict__.setdefault(_BACKENDS, {})
        name, before = _chosen(request), self.backend
        self.backend, self.backend_name = made.get(name), name if name in made else None
        try:
            init(self, request)
            made[name] = self.backend
        finally:
            self.backend = self.backend or before  # one that cannot be made leaves requests that run theirs

    @wraps(create)
    def _create_grammar(self: Any, request: Any) -> Any:
        # A thread's: the engine's one may be at another request, but then this one's backend is among those made.
        of_this, now = copy(self), self.backend
        # A copy, because that of guidance keeps the grammar in an attribute while it compiles it.
        of_this.backend = copy(getattr(self, _BACKENDS).get(_chosen(request), now))
        return create(of_this, request)

    manager.grammar_init, manager._create_grammar = grammar_init, _create_grammar


def _chosen(request: Any) -> str:
    return request.sampling_params.structured_outputs._backend


def thoughts_end_with_the_last_token(manager: type[Any]) -> None:
    """Have the end of a thought looked for in the last token, where vLLM 0.26 to 0.29 look from the last computed one
    on: of a request that was preempted while its token was on the way none is, and the end of an earlier thought in its
    prompt counts. No request with a grammar has drafts beside a parser of thoughts: these are refused.
    """
    original = manager.should_advance

    @wraps(original)
    def should_advance(self: Any, request: Any) -> bool:
        before = request.num_computed_tokens, request.num_output_placeholders
        request.num_computed_tokens, request.num_output_placeholders = len(request.all_token_ids) - 1, 0
        try:
            return original(self, request)
        finally:
            request.num_computed_tokens, request.num_output_placeholders = before

    manager.should_advance = should_advance


def thoughts_end_at_the_same_token(manager: type[Any]) -> None:
    """Have the end of a thought looked for in one token after the other where a step has several, drafts or accepted
    ones, as in plain decoding. vLLM 0.32 and 0.33 ask a parser about all of them first: one that looks at the whole
    answer finds no end where a new thought begins behind it, and then no grammar holds.
    """
    original = manager._get_constraint_bounds

    @wraps(original)
    def _get_constraint_bounds(
        self: Any, request: Any, spec_tokens: Sequence[int], spec_tokens_committed: bool = False
    ) -> Any:
        structured = request.structured_output_request
        if len(spec_tokens) < 2 or self.enable_in_reasoning or structured.reasoning_ended:
            return original(self, request, spec_tokens, spec_tokens_committed)
        known = list(request.all_token_ids)
        if spec_tokens_committed:
            del known[-len(spec_tokens) :]
        for place, token in enumerate(spec_tokens):
            known.append(token)
            so_far = SimpleNamespace(
                all_token_ids=known, prompt_token_ids=request.prompt_token_ids, structured_output_request=structured
            )
            bounds = original(self, so_far, [token], True)
            if bounds.grammar_start <= 1:
                return bounds._replace(
                    grammar_start=place + bounds.grammar_start, constraint_start=place + bounds.constraint_start
                )
        return bounds._replace(grammar_start=len(spec_tokens) + 1, constraint_start=len(spec_tokens) + 1)

    manager._get_constraint_bounds = _get_constraint_bounds
