"""How thorough a check is: ``--quick``, the standard, ``--thorough``."""

from dataclasses import dataclass

from ..harness.requests import SAMPLING


@dataclass(frozen=True)
class Preset:
    """What a check tries.

    Attributes:
        name: on the command line.
        tokens: output tokens of the target request.
        concurrent: numbers of concurrent requests.
        concurrent_lengths: prompt lengths of a single concurrent request.
        sampling: ways to sample, keys of ``SAMPLING``.
        load: number of requests whose latency is measured, and output tokens of each.
        rows: batch sizes in the certificates of operations.
        engines: number of engines with other limits: 1 has small chunks and a small KV cache, 2 adds other chunks and
            pages.
    """

    name: str
    tokens: int
    concurrent: tuple[int, ...]
    concurrent_lengths: tuple[int, ...]
    sampling: tuple[str, ...]
    load: tuple[int, int]
    rows: tuple[int, ...]
    engines: int


QUICK = Preset("quick", 16, (1, 7, 16, 45), (1, 64, 700), ("plain", "top_p"), (16, 16), (2, 7, 16, 45, 128), 1)
STANDARD = Preset(
    "standard",
    32,
    (1, 2, 7, 8, 15, 16, 17, 43, 44, 45, 46, 63, 64, 65, 127, 128),
    (1, 5, 9, 10, 11, 64, 300, 700, 1500, 3000),
    tuple(SAMPLING),
    (32, 64),
    (2, 3, 7, 8, 16, 17, 33, 45, 64, 65, 128, 256, 500),
    1,
)
THOROUGH = Preset(
    "thorough",
    128,
    (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 43, 44, 45, 46, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300),
    (1, 2, 5, 9, 10, 11, 16, 33, 64, 128, 300, 700, 1500, 3000, 8000, 16000),
    tuple(SAMPLING),
    (64, 128),
    (*range(2, 67), 127, 128, 129, 255, 256, 257, 500, 1000),
    2,
)
PRESETS = {preset.name: preset for preset in (QUICK, STANDARD, THOROUGH)}
