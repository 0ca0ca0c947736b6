"""Adapters (LoRA) by the names in their files, of a mixture of experts above all.

What vLLM would leave out of such an adapter it leaves out without a word, and what it cannot put together ends a
worker, and with it all requests. So an engine looks at the names before a request has the adapter.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from . import schemes

STACKED = ("GptOssForCausalLM",)
"""Models of which vLLM takes adapters of experts in one tensor a layer alone."""
_BLOCKS = {"MixtralForCausalLM": ("block_sparse_moe", ("w1", "w2", "w3"))}
_BLOCK = "mlp", ("gate_proj", "up_proj", "down_proj")
"""By architecture and of all others, vLLM's names of a layer's block of experts and of an expert's products."""
_ROUTERS = ("gate", "router", "shared_expert_gate")
_TENSORS = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?$")
_IGNORED = re.compile(r".*\.(embed_tokens|lm_head)\.base_layer\.weight$|__metadata__$")
"""What vLLM leaves out, as it belongs to the model."""
_CONVOLUTION = re.compile(r".*\.conv(1d)?$")
"""Layers that vLLM takes for linear ones, and whose adapters it does not add."""
LEADS, TRAILS = "in_proj_qkv", "in_proj_z"
"""Parts of a layer of gated delta rules: vLLM knows by the first where the second begins."""
_EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|embeddings|lm_head)$")
_ONE_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)$")
_ALL_EXPERTS = re.compile(r"(.+)\.experts(\.base_layer)?$")


def takes_stacked(lora_config: Any) -> bool:
    """Whether an engine of a mixture of experts takes adapters of experts in one tensor a layer, beside others."""
    return bool(lora_config.enable_mixed_moe_lora_format)


@dataclass(frozen=True)
class Layers:
    """Those of an engine's model that take adapters.

    Attributes:
        names: vLLM's, of parts of fused ones, too.
        mapper: makes them of the names of a checkpoint; None: they are the same.
    """

    names: frozenset[str]
    mapper: Any

    def __contains__(self, name: object) -> bool:
        """Whether there is one of a name of a checkpoint."""
        return (name if self.mapper is None else self.mapper._map_name(name)) in self.names


def problem_of(path: str, is_stacked: bool, config: Any, layers: Layers | None = None) -> str:
    """Why an engine does not serve an adapter; empty if it does.

    Args:
        path: of the adapter's folder.
        is_stacked: whether a request says that its experts are in one tensor a layer.
        config: vLLM's of the engine.
        layers: that take adapters; vLLM looks for the last part of a name, and leaves out what has another path.
    """
    model, lora = config.model_config, config.lora_config
    try:
        found, others = _modules(path)
    except ValueError as error:
        return f"its tensors cannot be read: {error}"
    if others:
        return f"it has {others[0]}, which is no weight of a LoRA adapter"
    is_mixture = schemes.has_experts(model)
    experts = model.get_num_experts() if is_mixture else 1
    for name, sides in found.items():
        if len(sides) != 2:
            return f"it has one of the two matrices of {name}"
        rank = sides["A"][0] // (experts if _ALL_EXPERTS.match(name) else 1)
        if rank > lora.max_lora_rank:
            return f"{name} has rank {rank}, above --max-lora-rank {lora.max_lora_rank}"
        if _CONVOLUTION.match(name):
            return f"it has weights of {name}, which vLLM leaves out: train it without"
        if name.endswith(TRAILS) and f"{name.removesuffix(TRAILS)}{LEADS}" not in found:
            return f"it has weights of {name} and not of {LEADS}, and a worker of vLLM's ends by that: train both"
        if _EMBEDDING.match(name) and (model.is_multimodal_model or model.is_hybrid):
            return f"it has weights of {name}, which have not been run beside states and images: train it without"
    if is_mixture and (problem := _of_experts(found, is_stacked, config, experts)):
        return problem
    of_experts = (_ONE_EXPERT, _ALL_EXPERTS) if is_mixture else ()
    apart = [name for name in found if not any(pattern.match(name) for pattern in of_experts)]
    if layers is not None and (left_out := next((name for name in apart if name not in layers), "")):
        return f"it has weights of {left_out}, which vLLM leaves out: no layer that takes adapters has this name here"
    return ""


def _of_experts(found: Mapping[str, Mapping[str, Any]], is_stacked: bool, config: Any, experts: int) -> str:
    """The same of a mixture of so many experts."""
    model, lora = config.model_config, config.lora_config
    of_router = next((name for name in found if name.rsplit(".", 1)[-1] in _ROUTERS), "")
    if of_router:
        return f"it has weights of the router {of_router}, which have not been compared: train it without"
    apart, stacked = _experts(found)
    if (apart or stacked) and lora.target_modules is not None and not reaches_experts(lora.target_modules):
        return "it has weights of experts, which --lora-target-modules leaves out"
    block, products = _BLOCKS.get(model.architecture, _BLOCK)
    have_experts = [f"model.layers.{layer}.{block}" for layer in _layers(model.hf_text_config)]
    elsewhere = next((name for name in (*apart, *stacked) if name not in have_experts), "")
    if elsewhere:
        return f"it has weights of experts of {elsewhere}, and those of this model are in {block} of its layers"
    is_of_stacked = model.architecture in STACKED
    if apart and is_of_stacked:
        return "it has weights of one expert each, and those of this model are stacked"
    if stacked and not is_of_stacked and not (takes_stacked(lora) and is_stacked):
        return (
            "its experts are stacked: start the engine with --enable-mixed-moe-lora-format, and say is_3d_lora_weight "
            "where it is named"
        )
    if any(len(both) != 2 for both in stacked.values()):
        return "it has the first or the second product of experts alone"
    every = {f"{number}.{product}" for number in range(experts) for product in products}
    if any(names != every for names in apart.values()):
        return f"it has not all products ({', '.join(products)}) of all {experts} experts of a layer"
    for layer, product in ((layer, product) for layer in apart for product in products):
        ranks = {found[f"{layer}.experts.{number}.{product}"]["A"][0] for number in range(experts)}
        if len(ranks) > 1:
            return f"the experts of {layer} have ranks {', '.join(map(str, sorted(ranks)))}"
    return ""


def reaches_experts(targets: Iterable[str]) -> bool:
    """Whether vLLM has layers for adapters of experts of every layer where ``--lora-target-modules`` has these: it
    compares the last name of a layer.
    """
    return "experts" in targets


def _layers(config: Any) -> list[int]:
    """Numbers of a model's layers with experts."""
    step, dense = getattr(config, "decoder_sparse_step", 1) or 1, getattr(config, "mlp_only_layers", None) or ()
    return [layer for layer in range(config.num_hidden_layers) if layer not in dense and (layer + 1) % step == 0]


def _experts(names: Iterable[str]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """By layer, what there is of one expert each, and of all in one tensor."""
    apart: dict[str, set[str]] = {}
    stacked: dict[str, set[str]] = {}
    for name in names:
        if found := _ONE_EXPERT.match(name):
            apart.setdefault(found[1], set()).add(f"{found[2]}.{found[3]}")
        elif found := _ALL_EXPERTS.match(name):
            stacked.setdefault(found[1], set()).add(found[2] or "")
    return apart, stacked


class _Modules(NamedTuple):
    """What an adapter has weights of: shapes by name and side, and names of tensors that are of none."""

    found: Mapping[str, Mapping[str, tuple[int, ...]]] = {}
    others: tuple[str, ...] = ()


def _modules(path: str) -> _Modules:
    """Of an adapter's files."""
    folder = Path(path)
    files = (folder / f"adapter_model.{kind}" for kind in ("safetensors", "bin", "pt"))
    file = next((one for one in files if one.is_file()), None)
    if file is None:
        return _Modules()
    state = file.stat()
    return _modules_in(file, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


@cache
def _modules_in(file: Path, *_: int) -> _Modules:
    """Of a file of a state."""
    if file.suffix == ".safetensors":
        with file.open("rb") as opened:  # 8 bytes are the length of a header in JSON
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        shapes = {name: tuple(tensor.get("shape", ())) for name, tensor in header.items()}
    else:
        import torch

        tensors = torch.load(file, map_location="meta", weights_only=True)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    others = []
    for name, shape in shapes.items():
        if matched := _TENSORS.match(name):
            found.setdefault(matched[1], {})[matched[2]] = shape
        elif not _IGNORED.match(name):
            others.append(name)
    return _Modules(found, tuple(others))
