"""Reads recipes: the arguments that the site of the recipes shows for an H200, as vLLM's engine takes them.

Order and precedence are those of its ``src/lib/command-synthesis.js`` for tensor parallelism on one node: arguments of
the model, of the variant, of the hardware, of features; the last one of a name wins. The number of GPUs is another:
the fewest whose memory is enough.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from ..trainers.examples import Mirror, put

GPU_MEMORY = 141
"""Of an H200, in 10^9 bytes."""
DRAFTS = "spec_decoding"
"""The feature that is speculative decoding."""
_STRATEGY = "single_node_tp"
_GPU, _GENERATION, _BRAND = "h200", "hopper", "nvidia"
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_OF_THE_SERVER = (
    *("enable_auto_tool_choice", "tool_call_parser", "tool_parser_plugin", "tool_call_parser_plugin", "host", "port"),
    *("chat_template", "chat_template_content_format", "default_chat_template_kwargs", "reasoning_parser_plugin"),
)
"""Flags that the server takes, and no engine, and that of a file that the reader of a recipe has to fetch."""
_LISTS = ("logits_processors",)


@dataclass
class Variant:
    """One of a recipe's.

    Attributes:
        recipe: its path in ``models``, without the ending.
        name: of the variant.
        checkpoint: Hugging Face's name.
        precision: as the recipe calls it.
        gpus: the fewest H200 with the memory that the recipe asks for, a power of two.
        engine: "vllm", or the other one that serves it.
        hardware: that it is for, if that has no H200.
        arguments: of vLLM's ``EngineArgs``, but for the model.
        variables: vLLM's of the environment.
        features: further arguments of the features that are on by default.
        drafts: further arguments of speculative decoding; empty if the recipe has none of this variant.
    """

    recipe: str
    name: str
    checkpoint: str
    precision: str
    gpus: int
    engine: str = "vllm"
    hardware: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    features: dict[str, Any] = field(default_factory=dict)
    drafts: dict[str, Any] = field(default_factory=dict)


def variants(mirror: Mirror) -> Iterator[Variant]:
    """Of each recipe."""
    for path in mirror.paths("models/", ".yaml"):
        tree = yaml.safe_load(mirror.text(path))
        for name, variant in tree["variants"].items():
            yield _variant(path.removeprefix("models/").removesuffix(".yaml"), tree, str(name), variant)


def _variant(recipe: str, tree: dict[str, Any], name: str, variant: dict[str, Any]) -> Variant:
    model = tree["model"]
    gpus = 1
    while gpus * GPU_MEMORY < variant["vram_minimum_gb"]:
        gpus *= 2
    found = Variant(recipe, name, variant.get("model_id", model["model_id"]), variant["precision"], gpus)
    if "omni" in tree["meta"]["tasks"]:
        found.engine = "vllm-omni"
    supported = variant.get("supported_hardware", [_GPU])
    if _GPU not in supported:
        found.hardware = ", ".join(supported)
    of_hardware = list(_of_hardware(tree, variant))
    given = [model.get("base_args"), variant.get("extra_args"), *(one.get("extra_args") for one in of_hardware)]
    found.arguments = {**arguments(_flat(given)), "tensor_parallel_size": gpus}
    for of in (model.get("base_env"), variant.get("extra_env"), *(one.get("extra_env") for one in of_hardware)):
        found.variables |= {key: str(value) for key, value in (of or {}).items() if key.startswith("VLLM_")}
    by_default = [key for key in tree.get("features") or {} if key not in (tree.get("opt_in_features") or [])]
    found.features = arguments(_flat(_feature(tree, key, name, variant) for key in by_default))
    if DRAFTS in (tree.get("features") or {}):
        found.drafts = arguments(_feature(tree, DRAFTS, name, variant))
    return found


def _of_hardware(tree: dict[str, Any], variant: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What recipe and variant have for an H200 alone; a strategy's own replaces them."""
    strategy = (tree.get("strategy_overrides") or {}).get(_STRATEGY) or {}
    yield strategy
    own = _of_generation(strategy.get("hardware_overrides"))
    yield from [own] if own else (_of_generation(one.get("hardware_overrides")) for one in (tree, variant))
    yield from ((one.get("hardware_overrides") or {}).get(_GPU) or {} for one in (variant, strategy))


def _of_generation(overrides: dict[str, Any] | None) -> dict[str, Any]:
    found = overrides or {}
    return found.get(_GENERATION) or found.get(_BRAND) or {}


def _feature(tree: dict[str, Any], key: str, name: str, variant: dict[str, Any]) -> list[str]:
    """Its words: of one that has several ways, those of the way that is chosen for a variant where nobody chooses."""
    feature = tree["features"][key]
    if modes := feature.get("modes"):
        allowed = [way for way, mode in modes.items() if name in mode.get("variants", [name])]
        wanted = (variant.get("default_modes") or {}).get(key), feature.get("default_mode"), *allowed
        feature = next((modes[way] for way in wanted if way in allowed), {})
    own = _of_generation(feature.get("hardware_overrides")).get("args")
    found: list[str] = own or feature.get("args") or []
    return found


def _flat(lists: Iterable[list[str] | None]) -> list[str]:
    return [word for words in lists for word in words or []]


def arguments(words: list[str]) -> dict[str, Any]:
    """Words of a command as arguments of vLLM's engine, without those that say how many GPUs share a model."""
    found: dict[str, Any] = {}
    for flag, text in _flags([part for word in words for part in (word.split() if word[:2] == "--" else [word])]):
        name, value = flag.replace("-", "_"), True if text is None else yaml.safe_load(text)
        if text is None and name.startswith("no_"):
            name, value = name.removeprefix("no_"), False
        if name == "max_model_len" and value == "auto":
            value = -1
        put(found, name, [value] if name in _LISTS else value)
    return {name: value for name, value in found.items() if name not in (*_PARALLEL, *_OF_THE_SERVER)}


def _flags(words: list[str]) -> Iterator[tuple[str, str | None]]:
    """Names and values of flags."""
    for here, word in enumerate(words):
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            following = words[here + 1] if here + 1 < len(words) and not words[here + 1].startswith("--") else None
            yield name, value if sign else following
