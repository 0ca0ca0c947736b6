"""Weight shapes of the linear layers of real models, whole and under tensor parallelism."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

_VOCABULARY_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of this, then cuts it."""
_MOST_ROWS = 8192
_MOST_ROWS_OF_LOGITS = 512
"""An engine computes the logits of one row a request, not of every row of a prefill."""


@dataclass(frozen=True)
class Model:
    """A model's configuration, as far as it decides the shapes of weights."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int | None
    """None: experts are in the place of these layers."""
    vocabulary: int
    parallel: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of tensor-parallel workers to consider."""

    def projections(self, workers: int) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) on one of ``workers``, by projection; KV heads are replicated when too few."""
        heads, kv_heads = self.heads // workers, max(1, self.kv_heads // workers)
        padded = -(-self.vocabulary // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        found = {
            "qkv": ((heads + 2 * kv_heads) * self.head_size, self.hidden),
            "o": (self.hidden, heads * self.head_size),
        }
        if self.intermediate is not None:
            found["gate_up"] = 2 * self.intermediate // workers, self.hidden
            found["down"] = self.hidden, self.intermediate // workers
        return found | {"lm_head": (padded // workers, self.hidden)}


@dataclass(frozen=True)
class Origin:
    """A layer that has a weight shape."""

    model: str
    workers: int
    projection: str

    def __str__(self) -> str:
        return f"{self.model} TP{self.workers} {self.projection}"


@dataclass(frozen=True)
class WeightShape:
    """One weight shape and every layer that has it."""

    out_features: int
    in_features: int
    origins: tuple[Origin, ...]

    @property
    def most_rows(self) -> int:
        """The most rows that an engine multiplies with such a weight in one step."""
        logits_only = all(origin.projection == "lm_head" for origin in self.origins)
        return _MOST_ROWS_OF_LOGITS if logits_only else _MOST_ROWS


MODELS = (
    Model("Qwen3-0.6B", 1024, 16, 8, 128, 3072, 151936),
    Model("Qwen3-1.7B", 2048, 16, 8, 128, 6144, 151936),
    Model("Qwen3-8B", 4096, 32, 8, 128, 12288, 151936),
    Model("Qwen3-32B", 5120, 64, 8, 128, 25600, 151936),
    Model("Llama-3.1-8B", 4096, 32, 8, 128, 14336, 128256),
    Model("Llama-3.1-70B", 8192, 64, 8, 128, 28672, 128256),
    Model("Qwen2.5-0.5B", 896, 14, 2, 64, 4864, 151936, parallel=(1,)),
    Model("Qwen2.5-3B", 2048, 16, 2, 128, 11008, 151936, parallel=(1,)),
)
FP8_MODELS = (
    Model("Qwen3-30B-A3B", 2048, 32, 4, 128, None, 151936, parallel=(1,)),
    *(replace(model, parallel=(1,)) for model in MODELS if model.name in ("Qwen3-8B", "Qwen3-32B")),
)
"""Of checkpoints in FP8 in blocks, whose output heads are not."""


def weight_shapes(models: Sequence[Model] = MODELS, without: Sequence[str] = ()) -> tuple[WeightShape, ...]:
    """Every shape once; those of one worker first, then those of more, each in the order of ``models``.

    Args:
        without: projections that are left out.
    """
    origins: dict[tuple[int, int], list[Origin]] = {}
    for workers in sorted({count for model in models for count in model.parallel}):
        for model in models:
            if workers in model.parallel:
                for projection, features in model.projections(workers).items():
                    if projection in without:
                        continue
                    origins.setdefault(features, []).append(Origin(model.name, workers, projection))
    return tuple(WeightShape(*features, tuple(found)) for features, found in origins.items())


WEIGHT_SHAPES = weight_shapes()
FP8_SHAPES = weight_shapes(FP8_MODELS, without=("lm_head",))


def shapes_of(names: Sequence[str], shapes: Sequence[WeightShape] = WEIGHT_SHAPES) -> tuple[WeightShape, ...]:
    """Those of models whose name contains one of ``names``, in any case of letters."""
    wanted = [name.lower() for name in names]
    return tuple(
        shape for shape in shapes if any(name in origin.model.lower() for name in wanted for origin in shape.origins)
    )
