"""What users' own tests assert holds of what is invariant, and fails with the place where bits differ."""

import asyncio

import pytest
import torch

from tests.fakes.batches import FakeLLM, fake_server_of
from vllm_batch_invariant.compare import Mismatch
from vllm_batch_invariant.testing import _sizes, assert_batch_invariant, assert_rows_invariant
from vllm_batch_invariant.verify.harness import engine
from vllm_batch_invariant.verify.outcome import NoTestError
from vllm_batch_invariant.verify.reproduce import online, report

pytest_plugins = "pytester"
__all__ = ["online", "report"]  # imported before a pytest inside this one, which forgets what it imports
FEW = {"samples": 24, "concurrency": 8, "max_tokens": 4}


@pytest.fixture(autouse=True)
def plain_params(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines here take parameters as plain data, without vLLM."""
    monkeypatch.setattr(engine, "sampling_params", dict)


def test_an_engine_whose_answers_are_equal_passes_and_says_what_was_seen() -> None:
    found = assert_batch_invariant(FakeLLM(), **FEW)
    assert found.comparison.samples == 24
    assert found.comparison.identical
    assert {1, 8} <= set(found.batches.running), "an engine without statistics has its batches counted by its steps"


def test_an_engine_whose_bits_follow_the_batch_fails_with_the_place() -> None:
    with pytest.raises(AssertionError) as failure:
        assert_batch_invariant(FakeLLM(varies=True), **FEW)
    lines = str(failure.value).splitlines()
    assert lines[0].startswith("engine: 24 samples of one request gave 1 completion and ")
    assert lines[1] == "first token that differs: none"
    assert lines[2].startswith("first logprob that differs: position 0, sample ")
    assert lines[3].startswith("requests in the batch: 1 to 8, ")


def test_an_engine_that_never_batches_proves_nothing() -> None:
    with pytest.raises(NoTestError, match="never ran more than 1 request at a time"):
        assert_batch_invariant(FakeLLM(room=1), **FEW)


def test_a_server_whose_bits_follow_the_batch_fails() -> None:
    with (
        fake_server_of(varies=True) as url,
        pytest.raises(AssertionError, match="server: 24 samples of one request gave 1 completion and 2 logprob"),
    ):
        assert_batch_invariant(url, **FEW)


def test_a_server_is_judged_by_its_address_also_inside_an_asynchronous_test() -> None:
    async def test_of_a_user() -> None:
        assert assert_batch_invariant(url, **FEW).comparison.identical

    with fake_server_of(varies=False) as url:
        asyncio.run(test_of_a_user())


def test_what_is_neither_an_engine_nor_an_address_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a vllm\.LLM or the address of a server, not a list"):
        assert_batch_invariant([], **FEW)


def test_pytest_shows_the_users_line_and_where_bits_differ(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest
        from tests.fakes.batches import FakeLLM
        from vllm_batch_invariant.testing import assert_batch_invariant

        @pytest.fixture(scope="module", params=[False, True], ids=["equal", "varies"])
        def llm(request):
            return FakeLLM(varies=request.param)

        @pytest.mark.parametrize("temperature", [0, 0.8])
        def test_my_model(llm, temperature):
            assert_batch_invariant(llm, "Call me", temperature=temperature, samples=24, concurrency=8, max_tokens=4)
    """)
    found = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    found.assert_outcomes(passed=2, failed=2)
    said = found.stdout.str()
    assert '>       assert_batch_invariant(llm, "Call me"' in said
    assert "E       AssertionError: engine: 24 samples of one request gave 1 completion and " in said
    assert "E       first logprob that differs: position 0, sample " in said
    assert "raise AssertionError" not in said


def test_rows_of_a_function_of_each_row_pass() -> None:
    rows = torch.randn(40, 3)
    assert_rows_invariant(lambda rows: rows.exp() * 2, rows)
    assert _sizes(40) == [1, 2, 3, 5, 8, 13, 21, 34]


def test_a_function_that_looks_at_the_batch_fails_with_the_rows() -> None:
    rows = torch.ones(40, 3)
    with pytest.raises(Mismatch, match=r"rows 0 to 2 in a batch of 3 and in one of 40: 9 of 9 elements differ"):
        assert_rows_invariant(lambda rows: rows + (len(rows) > 2) * 2.0**-20 * len(rows), rows, [3])


@pytest.mark.parametrize("rows", [torch.ones(1, 3), torch.ones(0, 3)])
def test_one_row_proves_nothing(rows: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="rows make no two batches"):
        assert_rows_invariant(lambda rows: rows, rows)
