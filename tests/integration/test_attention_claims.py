"""A backend of ours claims nothing of its own accord that this project has not proven."""

import pytest

from vllm_batch_invariant.integration.layers.attention import FixedSplitBackendMixin
from vllm_batch_invariant.integration.layers.attention_cpu import Backend
from vllm_batch_invariant.integration.reviews import claims as reviewed_claims
from vllm_batch_invariant.integration.reviews import patch_points

INHERITED = ("supports_alibi_sqrt", "supports_rswa")


class BackendLikeTheOneForGpus(FixedSplitBackendMixin, patch_points.CUDA_BACKEND.get()):
    """vLLM's Triton backend claims more than its backend for CPUs."""


@pytest.mark.parametrize("backend", [Backend, BackendLikeTheOneForGpus])
def test_every_claim_that_is_not_listed_is_denied(backend: type) -> None:
    claims = {name for name in dir(backend) if name.startswith("supports_")} - reviewed_claims().known
    assert {"supports_alibi_sqrt", "supports_dcp"} <= claims
    assert {name for name in claims if callable(claim := getattr(backend, name)) and claim()} == set()


def test_what_the_parent_claims_is_what_would_have_been_inherited() -> None:
    """The negative control: vLLM's Triton backend does claim them."""
    theirs = patch_points.CUDA_BACKEND.get()
    assert [name for name in INHERITED if getattr(theirs, name, bool)()] == list(INHERITED)


def test_what_is_proven_is_still_claimed() -> None:
    assert Backend.supports_batch_invariance()
    assert Backend.supports_sliding_window()
    assert Backend.supports_sink()
    assert Backend.supports_non_causal()
    assert Backend.supports_head_size(128)
    assert not Backend.supports_head_size(80 + 1)


def test_a_claim_that_a_later_vllm_makes_is_denied_as_a_method_or_as_an_attribute() -> None:
    class Later:
        supports_guessing = True

        @classmethod
        def supports_thinking(cls, how: str) -> bool:
            return True

    class Ours(FixedSplitBackendMixin, Later):
        pass

    assert Ours.supports_guessing is False
    assert Ours.supports_thinking("hard") is False


@pytest.mark.parametrize("backend", [Backend, BackendLikeTheOneForGpus])
def test_every_claim_of_the_installed_vllm_was_reviewed(backend: type) -> None:
    """What a new version asks is denied without that; it may be a feature that could be covered."""
    claims = {name for name in dir(backend) if name.startswith("supports_")}
    assert claims - reviewed_claims().known - reviewed_claims().refused == set()
