"""Which operations of the definition a GPU was seen to have the bits of: a record that ``scripts.hopper_bits`` writes.

A receipt of usual arithmetic is computed again only where every operation of its model is among them.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

OPERATIONS = (
    "matmul", "silu_and_mul", "rms_norm", "rotate", "rotary_table", "attention", "log_softmax", "argmax",
)  # fmt: skip
"""Of a dense model, each of which somebody has compared, or not."""
RECORD = Path(__file__).with_name("confirmed.json")
"""What ran on a GPU, if something has."""


@dataclass(frozen=True)
class Confirmed:
    """What was compared on one GPU.

    Attributes:
        machine: the GPU and the versions.
        tables: digest of the special functions that were recorded there, which the definition took.
        values: of each operation, how many were compared.
        different: how many of them differed in a bit.
    """

    machine: Mapping[str, str]
    tables: str
    values: Mapping[str, int]
    different: Mapping[str, int]

    @property
    def open(self) -> tuple[str, ...]:
        """Operations that had the definition's bits in every value."""
        return tuple(name for name in OPERATIONS if self.values.get(name, 0) and not self.different.get(name, 1))

    @property
    def missing(self) -> tuple[str, ...]:
        """The others."""
        return tuple(name for name in OPERATIONS if name not in self.open)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


NOTHING = Confirmed({}, "", {}, {})


@cache
def recorded(path: Path = RECORD) -> Confirmed:
    """The record of a file; nothing where there is none."""
    return Confirmed(**json.loads(path.read_text())) if path.exists() else NOTHING
