"""A prompt in words."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """A prompt that the engine or the server tokenizes."""

    text: str
    chat: bool = False
    """Whether it is the message of a chat, to which the model's template is applied."""
