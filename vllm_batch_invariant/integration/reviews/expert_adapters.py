"""Adapters (LoRA) of a mixture of experts, by the names in their files.

What vLLM would leave out of such an adapter it leaves out without a word, and what it cannot put together ends a
worker, and with it all requests. So an engine looks at the names before a request has the adapter.
"""

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

STACKED = ("GptOssForCausalLM",)
"""Models of which vLLM takes adapters of experts in one tensor a layer alone."""
_ROUTERS = ("gate", "router", "shared_expert_gate")
_TENSORS = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?[AB](?:\.weight)?$")
_ONE_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)$")
_ALL_EXPERTS = re.compile(r"(.+)\.experts(\.base_layer)?$")
_PRODUCTS = 3
"""Of an expert: gate, up and down."""


def takes_stacked(lora_config: Any) -> bool:
    """Whether an engine of a mixture of experts takes adapters of experts in one tensor a layer, beside others."""
    return bool(lora_config.enable_mixed_moe_lora_format)


def problem_of(path: str, is_stacked: bool, config: Any) -> str:
    """Why an engine does not serve an adapter; empty if it does, or if its model has no experts.

    Args:
        path: of the adapter's folder.
        is_stacked: whether a request says that its experts are in one tensor a layer.
        config: vLLM's of the engine.
    """
    model = config.model_config
    if not model.is_moe:
        return ""
    names = _modules(path)
    of_router = next((name for name in names if name.rsplit(".", 1)[-1] in _ROUTERS), "")
    if of_router:
        return f"it has weights of the router {of_router}, which have not been compared: train it without"
    apart, stacked = _experts(names)
    targets = config.lora_config.target_modules
    if (apart or stacked) and targets is not None and not reaches_experts(targets):
        return "it has weights of experts, which --lora-target-modules leaves out"
    is_of_stacked = model.architecture in STACKED
    if apart and is_of_stacked:
        return "it has weights of one expert each, and those of this model are stacked"
    if stacked and not is_of_stacked and not (takes_stacked(config.lora_config) and is_stacked):
        return (
            "its experts are stacked: start the engine with --enable-mixed-moe-lora-format, and say is_3d_lora_weight "
            "where it is named"
        )
    if any(len(both) != 2 for both in stacked.values()):
        return "it has the first or the second product of experts alone"
    experts = model.get_num_experts()
    if any(len(products) != _PRODUCTS * experts for products in apart.values()):
        return f"it has not all {_PRODUCTS} products of all {experts} experts of a layer"
    return ""


def reaches_experts(targets: Iterable[str]) -> bool:
    """Whether vLLM has layers for adapters of experts where ``--lora-target-modules`` has these."""
    return any("experts" in one.split(".") for one in targets)


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


def _modules(path: str) -> frozenset[str]:
    """Names of what an adapter has weights of."""
    folder = Path(path)
    files = (folder / f"adapter_model.{kind}" for kind in ("safetensors", "bin", "pt"))
    file = next((one for one in files if one.is_file()), None)
    if file is None:
        return frozenset()
    state = file.stat()
    return _modules_in(file, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


@cache
def _modules_in(file: Path, *_: int) -> frozenset[str]:
    """The same of a file of a state."""
    if file.suffix == ".safetensors":
        with file.open("rb") as opened:  # 8 bytes are the length of a header in JSON
            tensors = [*json.loads(opened.read(int.from_bytes(opened.read(8), "little")))]
    else:
        import torch

        tensors = [*torch.load(file, map_location="meta", weights_only=True)]
    return frozenset(found[1] for name in tensors if (found := _TENSORS.match(name)))
