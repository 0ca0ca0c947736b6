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
"""Of a dense model and of greedy completions, each of which somebody has compared, or not."""
OF_SEEDS = ("top_k_top_p", "noise")
"""Of completions that are drawn with a seed by vLLM's second model runner, too."""
OF_EXPERTS = ("route", "experts")
"""Of mixtures of experts, too."""
OF_CODES = ("quantise", "scaled_linear")
"""Of models whose weights and activations are codes of e4m3 in blocks, too."""
OF_FAMILIES = (
    "gelu_and_mul", "norm_plus_one", "scaled_embeddings", "heads_of_256", "windows", "capped_scores", "capped_logits",
    "linear_angles",
)  # fmt: skip
"""Of some families of models, too, each that its configuration asks for."""
ALL = (*OPERATIONS, *OF_SEEDS, *OF_EXPERTS, *OF_CODES, *OF_FAMILIES)
RECORD = Path(__file__).with_name("confirmed.json")
"""What ran on a GPU, if something has."""


@dataclass(frozen=True)
class Confirmed:
    """What was compared on one GPU.

    Attributes:
        machine: the GPU and the versions.
        tables: digest of the special functions that were recorded there, which the definition took.
        definition: digests of the known answers of the definition that was compared (:mod:`.known_answers`), of each
            operation that has some.
        values: of each operation, how many were compared.
        different: how many of them differed in a bit.
    """

    machine: Mapping[str, str]
    tables: str
    definition: Mapping[str, str]
    values: Mapping[str, int]
    different: Mapping[str, int]

    def missing(self, operations: tuple[str, ...] = OPERATIONS) -> tuple[str, ...]:
        """Those of some operations that did not have the definition's bits in every value, or were not compared."""
        return tuple(name for name in operations if not self.values.get(name, 0) or self.different.get(name, 1))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


NOTHING = Confirmed({}, "", {}, {}, {})


@cache
def recorded(path: Path = RECORD) -> Confirmed:
    """The record of a file; nothing where there is none."""
    return Confirmed(**json.loads(path.read_text())) if path.exists() else NOTHING
