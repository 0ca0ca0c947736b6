"""What scripts.fleet counts of broken answers, against local servers whose tokens follow a rule."""

import threading
from collections.abc import Iterator
from typing import Any

from scripts.fleet import broken
from tests.test_resume import LENGTH, Fake, served
from vllm_batch_invariant import resume

TIMES = 10
"""Broken answers of a kind."""
PROMPTS = 4


class Forgetful(Fake):
    """A server that goes on as if the seed were another."""

    def parts(self, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
        is_rest = resume.TOKENS in (asked.get("vllm_xargs") or {})
        yield from super().parts(asked | {"seed": asked["seed"] + 1} if is_rest else asked)


def counted(fake: Fake, ended: threading.Event | None = None) -> broken.Continued:
    with served(fake) as [url]:
        router, asked = url.removesuffix("/v1"), broken.requests(LENGTH, PROMPTS)
        expected = broken.unbroken(router, asked, 4)
        return broken.break_off(router, asked, expected, TIMES, 4, ended or threading.Event(), lambda: 0, 0)


def test_answers_that_are_cut_go_on_and_none_differs() -> None:
    found = counted(Fake())
    assert found.asked == dict.fromkeys(broken.kinds(1), TIMES)
    assert found.cuts == TIMES * len(broken.kinds(1))  # each cut lies before the last part
    assert (found.differing.total(), found.failed.total(), found.lost) == (0, 0, 0)
    assert found.unbroken == dict.fromkeys(broken.kinds(1), PROMPTS)


def test_another_rest_is_counted_for_every_answer() -> None:
    found = counted(Forgetful())
    assert found.differing == found.asked == dict.fromkeys(broken.kinds(1), TIMES)


def test_streams_that_end_early_by_themselves_are_counted_and_go_on() -> None:
    found = counted(Fake(breaks=3))
    assert found.lost > 0
    assert found.asked == dict.fromkeys(broken.kinds(1), TIMES)
    assert found.differing.total() == 0


def test_none_is_begun_after_the_time() -> None:
    ended = threading.Event()
    ended.set()
    assert counted(Fake(), ended).asked.total() == 0
