"""LoRA adapters of random weights, in the files that PEFT writes (huggingface.co/docs/peft)."""

import json
import re
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""Of models that store these as one, such as Phi-3."""
EMBEDDINGS = ("embed_tokens", "lm_head")
MOST_RANK = 16
"""Of :data:`DRAWN`."""
EXPERTS, STACKED_EXPERTS = "experts", "stacked experts"
"""All products of each expert of a layer that has some, of each by itself or in a tensor of all, which is how PEFT
writes those of stacked parameters.
"""
SHARED_EXPERT = "shared expert"
"""That of a layer, where there is one."""
DRAWN = (
    (8, (*ATTENTION, *MLP, EXPERTS)),
    (MOST_RANK, ("q_proj", "v_proj", "up_proj", "down_proj")),
    (MOST_RANK, ("o_proj", EXPERTS)),
)
"""Rank and layers of the adapters that requests of a fuzzer have: some parts of fused layers have none."""
MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures that have these layers."""
LINEAR = (
    (8, ""),
    (MOST_RANK, r"\.(q_proj|v_proj|up_proj|in_proj\w*|w1|input_linear)$"),
    (MOST_RANK, r"\.(o_proj|out_proj|down_proj)$"),
)
"""Instead of :data:`DRAWN` a rank, and a pattern of the names of linear layers, of other models."""
_ROUTERS = ("gate", "shared_expert_gate")
"""Linear layers of which engines take no adapter."""
_OF_TEXT = re.compile(r"(model\.)?(language_model|text_model|layers)\.")


@dataclass(frozen=True)
class ExpertLayers:
    """Where a model's checkpoint has experts.

    Attributes:
        path: of a layer's, inside the layer.
        names: of gate, down and up of one; none where a tensor has those of all.
        inner: field of the configuration that says how many elements are between gate or up and down.
    """

    path: str = "mlp.experts"
    names: tuple[str, ...] = ("gate_proj", "down_proj", "up_proj")
    inner: str = "intermediate_size"


MIXTURES = {
    "Qwen3MoeForCausalLM": ExpertLayers(inner="moe_intermediate_size"),
    "Qwen2MoeForCausalLM": ExpertLayers(inner="moe_intermediate_size"),
    "MixtralForCausalLM": ExpertLayers("block_sparse_moe.experts", ("w1", "w2", "w3")),
    "OlmoeForCausalLM": ExpertLayers(),
    "GptOssForCausalLM": ExpertLayers(names=()),
}
"""By architecture."""


def write(
    folder: Path,
    config: Mapping[str, Any],
    rank: int,
    seed: int,
    targets: Sequence[str] = (*ATTENTION, *MLP),
    alpha: int = 16,
) -> Path:
    """A random adapter in bf16 for some of a model's linear layers and embeddings, so large that it changes answers.

    Args:
        folder: to be written.
        config: of the model, as in its config.json.
        rank: of every layer.
        seed: of the weights.
        targets: of :data:`ATTENTION`, :data:`MLP`, :data:`FUSED`, :data:`EMBEDDINGS`, :data:`EXPERTS`,
            :data:`STACKED_EXPERTS` and :data:`SHARED_EXPERT`; of a model with experts :data:`MLP` is of layers without,
            of one without these three are of none.
        alpha: over the rank, what B is multiplied with.

    Returns:
        The folder.
    """
    import torch

    hidden, inner, vocabulary = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = (config[f"num_{name}_heads"] * size for name in ("attention", "key_value"))
    of_attention = {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}
    of_attention |= {"o_proj": (queries, hidden), "qkv_proj": (hidden, queries + 2 * keys)}
    of_mlp = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    of_mlp |= {"gate_up_proj": (hidden, 2 * inner)}
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    draw, drawn = partial(_draw, generator), partial(_drawn, generator, rank)

    def of_experts(where: ExpertLayers, path: str) -> dict[str, torch.Tensor]:
        """PEFT stacks ranks of experts' A one after the other, and interleaves those of B."""
        count = config.get("num_experts") or config["num_local_experts"]
        wide, path = config[where.inner], f"{path}.{where.path}"
        if where.names and STACKED_EXPERTS not in targets:
            sides = ((hidden, wide), (wide, hidden), (hidden, wide))
            found = [
                drawn(f"{path}.{expert}.{name}", *side)
                for expert in range(count)
                for name, side in zip(where.names, sides, strict=True)
            ]
            return {name: tensor for one in found for name, tensor in one.items()}
        stacked = {f"{path}.base_layer": (hidden, 2 * wide), path: (wide, hidden)}
        return {
            f"base_model.model.{name}.lora_{side}.weight": tensor
            for name, (k, n) in stacked.items()
            for side, tensor in (("A", draw(count * rank, k)), ("B", draw(n, count * rank) * count**0.5))
        }

    mixture, dense = mixture_of(config), dense_layers(config)
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        if mixture is not None and layer not in dense and {EXPERTS, STACKED_EXPERTS} & {*targets}:
            tensors |= of_experts(mixture, path)
        if SHARED_EXPERT in targets and layer not in dense and (width := config.get("shared_expert_intermediate_size")):
            for name in MLP:
                k, n = (width, hidden) if name == "down_proj" else (hidden, width)
                tensors |= drawn(f"{path}.mlp.shared_expert.{name}", k, n)
        for name in targets:
            if name in MLP and mixture is not None and layer not in dense:
                continue
            for part, sides in (("self_attn", of_attention), ("mlp", of_mlp)):
                if name in sides:
                    tensors |= drawn(f"{path}.{part}.{name}", *sides[name])
    if "lm_head" in targets:
        tensors |= drawn("lm_head", hidden, vocabulary)
    if "embed_tokens" in targets:
        path = "base_model.model.model.embed_tokens"
        tensors |= {f"{path}.lora_embedding_A": draw(rank, vocabulary) * vocabulary**0.5}
        tensors |= {f"{path}.lora_embedding_B": draw(hidden, rank) * 0.02}
    return _save(folder, tensors, rank, alpha, {*targets} - {STACKED_EXPERTS, SHARED_EXPERT})


def write_for(folder: Path, config: Any, rank: int, seed: int, layers: str, alpha: int = 16) -> Path:
    """The same for the linear layers of the text model that Transformers builds of a configuration, whatever it is, but
    routers; and for all products of each expert of a layer that has a gate, of which Transformers has stacks.

    Args:
        folder: to be written.
        config: Transformers', with ``architectures``.
        layers: a regular expression, found in names of layers, of which experts are one.

    Returns:
        The folder.

    Raises:
        ValueError: no layer has such a name.
    """
    import torch
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    found: dict[str, Sequence[int]] = {}
    for name, layer in model.named_modules():
        if not (_OF_TEXT.match(name) and re.search(layers, name)):
            continue
        if isinstance(layer, torch.nn.Linear) and name.rpartition(".")[2] not in _ROUTERS:
            found[name] = layer.weight.shape
        elif hasattr(layer, "gate_up_proj") and name.endswith(".experts"):
            count, hidden, inner = layer.down_proj.shape
            sides = dict.fromkeys(("gate_proj", "up_proj"), (inner, hidden)) | {"down_proj": (hidden, inner)}
            found |= {f"{name}.{number}.{product}": side for number in range(count) for product, side in sides.items()}
    if not found:
        raise ValueError(f"no linear layer of {config.architectures[0]} has a name with {layers!r}")
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, (n, k) in found.items():
        tensors |= _drawn(generator, rank, name, k, n)
    return _save(folder, tensors, rank, alpha, {name.rpartition(".")[2] for name in found})


def _draw(generator: "torch.Generator", *shape: int) -> "torch.Tensor":
    import torch

    return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).bfloat16()


def _drawn(generator: "torch.Generator", rank: int, path: str, k: int, n: int) -> "dict[str, torch.Tensor]":
    """Both matrices of a layer, by PEFT's names."""
    path = f"base_model.model.{path}"
    return {f"{path}.lora_A.weight": _draw(generator, rank, k), f"{path}.lora_B.weight": _draw(generator, n, rank)}


def _save(folder: Path, tensors: dict[str, Any], rank: int, alpha: int, layers: Collection[str]) -> Path:
    """PEFT's two files."""
    from safetensors.torch import save_file

    said: Mapping[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "", "r": rank,
        "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "target_modules": sorted(layers),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def mixture_of(config: Mapping[str, Any]) -> ExpertLayers | None:
    """Where a model with a config.json has experts; None if it has none, or nobody knows."""
    return next((MIXTURES[name] for name in config.get("architectures") or () if name in MIXTURES), None)


def dense_layers(config: Mapping[str, Any]) -> set[int]:
    """Numbers of the layers of a mixture of experts that have none."""
    step, layers = config.get("decoder_sparse_step") or 1, range(config["num_hidden_layers"])
    return {*(config.get("mlp_only_layers") or ()), *(layer for layer in layers if (layer + 1) % step)}


def folder_of(config: str, rank: int, seed: int, targets: tuple[str, ...] = (*ATTENTION, *MLP)) -> str:
    """Of an adapter that :func:`write` makes for a model with a config.json; written once, and kept until the process
    ends.
    """
    return _once((config, rank, seed, targets), lambda at: write(at, json.loads(config), rank, seed, targets))


def folder_for(config: Any, number: int) -> str:
    """The same of one of :data:`LINEAR`, counted from 1, for a model with a configuration of Transformers'."""
    named = json.dumps(config.to_dict(), sort_keys=True, default=str)
    rank, layers = LINEAR[number - 1]
    return _once((named, number), lambda at: write_for(at, config, rank, number, layers))


_folders: dict[tuple[Any, ...], Any] = {}
"""Those that were written, which are gone when the process ends."""


def _once(key: tuple[Any, ...], write_to: Callable[[Path], object]) -> str:
    if key not in _folders:
        _folders[key] = tempfile.TemporaryDirectory(prefix="vllm-adapter-")
        write_to(Path(_folders[key].name))
    return _folders[key].name
