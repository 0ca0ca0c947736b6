"""A row of the table of what the mode covers (:mod:`.coverage`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Any
"""A VllmConfig, or a part of it; vLLM is not imported to describe it."""


@dataclass(frozen=True)
class Feature:
    """One row of the table.

    Attributes:
        name: what a user calls it.
        note: what is covered, or why it is not.
        remedy: what to do when it is refused; None means that it is covered.
        used: finds the feature in a configuration and names what it found; None if the feature is not in use.
        devices: the device types that it is refused on; None for all.
        arguments: of ``vllm serve``, and variables, that it is about, as far as the fuzzer draws them: it asks the row.
        drawn: settings that the fuzzer draws of what is covered, by name: what each value adds to ``vllm serve``.
    """

    name: str
    note: str
    remedy: str | None = None
    used: Callable[[Config], str | None] | None = None
    devices: tuple[str, ...] | None = None
    arguments: tuple[str, ...] = ()
    drawn: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)

    def found(self, config: Config) -> str | None:
        """What is found of the feature in a configuration, by name; None if it is not in use."""
        concerned = self.devices is None or config.device_config.device_type in self.devices
        return self.used(config) if self.used and concerned else None
