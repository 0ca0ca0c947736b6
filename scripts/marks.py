"""What scripts write into documents: it stands between two marks, which are comments there."""

import re
from collections.abc import Callable


def between(text: str, begin: str, end: str) -> str:
    """What stands between two marks. Errors as of :func:`put`."""
    return _places(re.escape(begin), end, text)[0]["inside"]


def put(text: str, begin: str, end: str, inside: str) -> str:
    """A document with something else between two marks.

    Raises:
        ValueError: it does not have them, and nobody knows where to write.
    """
    return put_each(text, re.escape(begin), end, lambda _: inside)


def put_each(text: str, begin: str, end: str, inside: Callable[[re.Match[str]], str]) -> str:
    """The same wherever an expression finds the first mark.

    Args:
        text: of the document.
        begin: the expression.
        end: the mark behind it.
        inside: what to write, by the match of the mark and what stands there (the group "inside").
    """
    written, last = [], 0
    for found in _places(begin, end, text):
        written += text[last : found.start("inside")], inside(found)
        last = found.end("inside")
    return "".join((*written, text[last:]))


def _places(begin: str, end: str, text: str) -> list[re.Match[str]]:
    found = [*re.finditer(f"{begin}(?P<inside>.*?){re.escape(end)}", text, re.DOTALL)]
    if not found:
        raise ValueError(f"the document has no {begin} ... {end}")
    return found
