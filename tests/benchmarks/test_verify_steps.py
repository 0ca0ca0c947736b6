"""The benchmark of verify steps, with providers and a timer that need no GPU."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks import verify_steps
from benchmarks.attention_cases import Case, Request
from benchmarks.attention_providers import Provider
from tests.benchmarks.attention_fakes import SMALL, SteadyTimer, exact, wrong
from vllm_batch_invariant.ops.attention.plan import DECODE_ROWS, WIDE_DECODE_ROWS


def test_cases_have_rows_on_both_sides_of_both_blocks() -> None:
    found = {group: {tokens * group for tokens in tokens_of} for group, tokens_of in verify_steps.TOKENS.items()}
    for rows in found.values():
        assert {DECODE_ROWS, WIDE_DECODE_ROWS} <= rows
        assert any(DECODE_ROWS < one < WIDE_DECODE_ROWS for one in rows)
    assert len(list(verify_steps.cases((4, 8)))) == 2 * 4 * 3 * 3


@pytest.mark.parametrize(("attend", "same"), [(exact, True), (wrong, False)])
def test_bits_are_compared_and_a_table_is_printed(attend, same: bool) -> None:
    today = Provider(verify_steps.TODAY, exact)
    ways = {verify_steps.TODAY: today, verify_steps.WIDE: replace(today, attend=attend)}
    case = Case(SMALL, "verify", (Request(4, 40),) * 2)
    found = verify_steps.measure(case, ways, SteadyTimer(""), case.cache_bytes, "cpu")
    assert found[0] is same
    written = io.StringIO()
    verify_steps.print_table([(case, *found)], Console(file=written, width=140))
    assert ("equal" in written.getvalue(), "DIFFER" in written.getvalue()) == (same, not same)
