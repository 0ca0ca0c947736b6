"""A check of a server in every form of request: what differs is found in each of them."""

import asyncio
from itertools import count

import pytest

from tests.fakes import batches
from vllm_batch_invariant.verify.check import forms
from vllm_batch_invariant.verify.check.guarantees import FORMS, cases_of_a_server
from vllm_batch_invariant.verify.check.presets import Preset
from vllm_batch_invariant.verify.check.results import CheckResults
from vllm_batch_invariant.verify.check.server import check_server
from vllm_batch_invariant.verify.outcome import Outcome

SIZE = Preset("tests", 16, (2,), (), (), (1, 1), (2,), 1)


@pytest.mark.parametrize("varies", [False, True])
def test_logprobs_that_vary_are_found_in_every_form(varies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = count()
    if varies:  # in every answer, because how many come together follows the machine's load
        monkeypatch.setattr(batches, "logprob", lambda *_: -0.5 - 2**-53 * next(answers))
    found = CheckResults("server", cases_of_a_server())
    with batches.fake_server_of(varies=False) as url:
        asyncio.run(check_server(url, None, None, SIZE, 60, found, lambda now: None))
    [case] = [case for case in found.cases if (case.guarantee, case.name) == FORMS]
    # a busy machine may have no two at once
    assert case.outcome in ((Outcome.BREAKS,) if varies else (Outcome.HOLDS, Outcome.NOT_TESTED))
    labels = {f"{name} with concurrent requests" for name in (*forms.FORMS, "a stream with a stop string")}
    assert {sample.label for sample in found.samples[FORMS]} == labels
    differ = {sample.label for sample in found.samples[FORMS] if sample.answer != sample.expected}
    assert differ == (labels if varies else set())
    assert "was not compared" not in found.proof.get(FORMS, "")
    called = next(sample.expected for sample in found.samples[FORMS] if "named" in sample.label)
    assert called.text == "\nadd({) [length]"
