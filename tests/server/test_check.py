"""A check of a real server with the mode on, over HTTP."""

import asyncio

import pytest

from vllm_batch_invariant.verify.check import forms
from vllm_batch_invariant.verify.check.guarantees import CONCURRENT, FORMS, cases_of_a_server
from vllm_batch_invariant.verify.check.presets import Preset
from vllm_batch_invariant.verify.check.results import CheckResults
from vllm_batch_invariant.verify.check.server import check_server
from vllm_batch_invariant.verify.harness.server import Server
from vllm_batch_invariant.verify.outcome import Outcome, Status

pytestmark = pytest.mark.server

SIZE = Preset("tests", 16, (2, 24), (64,), ("penalties",), (1, 1), (2,), 1)


def test_a_server_holds_on_all_that_a_client_can_provoke_and_the_rest_is_said_to_be_untested(server: Server) -> None:
    found = CheckResults("server", cases_of_a_server())
    asyncio.run(check_server(server.base_url, None, None, SIZE, 300, found, lambda now: None))
    outcomes = {(case.guarantee, case.name): case.outcome for case in found.cases}
    planned = cases_of_a_server()
    assert {case: outcomes[case] for case in planned} == dict.fromkeys(planned, Outcome.HOLDS)
    assert outcomes["schedule", "preemption"] is Outcome.NOT_TESTED
    assert found.status is Status.REPRODUCIBLE
    assert found.largest[CONCURRENT] > 2
    assert "logprobs none/0/1/5/20" in found.proof[CONCURRENT]
    assert "refused" not in found.proof[CONCURRENT], found.proof[CONCURRENT]
    assert "was not compared" not in found.proof[FORMS], found.proof[FORMS]
    compared = {sample.label: sample.expected for sample in found.samples[FORMS]}
    assert len(compared) == len(forms.FORMS) + 1
    assert all(len(answer.tokens) >= 4 and answer.text for answer in compared.values()), compared
    assert compared["a chat with a tool that is named with concurrent requests"].text.startswith(
        ("\nadd(", "<tool_call>")
    )
    assert len(compared["a stream with a stop string with concurrent requests"].tokens) < SIZE.tokens
    assert max(found.traces[0].sizes) > 2
    assert found.info["versions"]["vllm"] != "unknown"
    assert len(found.shown[0].answer.tokens) == 16
