"""What others wrote (a receipt, a server, a file's name) as text that a terminal shows and does not obey."""

import unicodedata

_UNSEEN = "\u115f\u1160\u2800\u3164\uffa0"
"""Letters and signs of no ink, which Unicode and Python call printable."""


def printable(text: str) -> str:
    """The text on one line, with everything escaped, as ``repr`` escapes it, that would not show as it is.

    That is control characters and line breaks, what turns the direction of writing or has no width, marks that are
    drawn over another character, and a space behind another: enough of them reach the next line of a terminal.
    Printable text is left alone, a backslash included, so a text that was escaped does not change again.
    """
    if text.isascii() and text.isprintable() and "  " not in text:
        return text
    return "".join(
        character if _shows(character, before) else _escaped(character)
        for before, character in zip("\0" + text, text, strict=False)
    )


def _shows(character: str, before: str) -> bool:
    if character == " ":
        return before != " "
    drawn_over = unicodedata.category(character) in ("Mn", "Me")
    return character.isprintable() and not drawn_over and character not in _UNSEEN


def _escaped(character: str) -> str:
    return r"\x20" if character == " " else character.encode("unicode_escape").decode("ascii")
