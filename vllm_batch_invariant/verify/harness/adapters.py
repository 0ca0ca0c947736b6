"""LoRA adapters of random weights, in the files that PEFT writes (huggingface.co/docs/peft)."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""Of models that store these as one, such as Phi-3."""
EMBEDDINGS = ("embed_tokens", "lm_head")
MOST_RANK = 16
"""Of :data:`DRAWN`."""
DRAWN = ((8, (*ATTENTION, *MLP)), (MOST_RANK, ("q_proj", "v_proj", "up_proj", "down_proj")), (MOST_RANK, ("o_proj",)))
"""Rank and layers of the adapters that requests of a fuzzer have: some parts of fused layers have none."""
MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures that have these layers."""


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
        targets: of :data:`ATTENTION`, :data:`MLP`, :data:`FUSED` and :data:`EMBEDDINGS`.
        alpha: over the rank, what B is multiplied with.

    Returns:
        The folder.
    """
    import torch
    from safetensors.torch import save_file

    hidden, inner, vocabulary = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = (config[f"num_{name}_heads"] * size for name in ("attention", "key_value"))
    of_attention = {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}
    of_attention |= {"o_proj": (queries, hidden), "qkv_proj": (hidden, queries + 2 * keys)}
    of_mlp = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    of_mlp |= {"gate_up_proj": (hidden, 2 * inner)}
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    for layer in range(config["num_hidden_layers"]):
        for name in targets:
            for part, sides in (("self_attn", of_attention), ("mlp", of_mlp)):
                if name in sides:
                    k, n = sides[name]
                    path = f"base_model.model.model.layers.{layer}.{part}.{name}"
                    tensors |= {f"{path}.lora_A.weight": draw(rank, k), f"{path}.lora_B.weight": draw(n, rank)}
    if "lm_head" in targets:
        path = "base_model.model.lm_head"
        tensors |= {f"{path}.lora_A.weight": draw(rank, hidden), f"{path}.lora_B.weight": draw(vocabulary, rank)}
    if "embed_tokens" in targets:
        path = "base_model.model.model.embed_tokens"
        tensors |= {f"{path}.lora_embedding_A": draw(rank, vocabulary) * vocabulary**0.5}
        tensors |= {f"{path}.lora_embedding_B": draw(hidden, rank) * 0.02}
    said: Mapping[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "", "r": rank,
        "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "target_modules": sorted(targets),
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def folder_of(config: str, rank: int, seed: int, targets: tuple[str, ...] = (*ATTENTION, *MLP)) -> str:
    """Of an adapter that :func:`write` makes for a model with a config.json; written once, and kept until the process
    ends.
    """
    return _kept(config, rank, seed, targets).name


@cache
def _kept(config: str, rank: int, seed: int, targets: tuple[str, ...]) -> Any:
    folder = tempfile.TemporaryDirectory(prefix="vllm-adapter-")
    write(Path(folder.name), json.loads(config), rank, seed, targets)
    return folder
