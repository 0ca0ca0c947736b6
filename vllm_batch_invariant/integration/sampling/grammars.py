"""The grammars of structured outputs, which vLLM's engine advances by a request's tokens."""

from copy import copy
from functools import wraps
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
    prompt counts. No request has drafts beside a parser of thoughts: they are refused.
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
