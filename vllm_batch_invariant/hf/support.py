"""What a patched model covers; the rest refuses in one line."""

from importlib.util import find_spec
from typing import Any

import torch

from ..errors import NotCovered
from ..integration import patch_points
from ..ops.attention.params import DTYPES

_DEVICES = ("cpu", "cuda")
_HARMLESS = ("num_items_in_batch", "return_dict")
"""Options of a call that change nothing in the model."""


def check_packages() -> None:
    """Whether transformers and a vLLM are installed.

    Raises:
        NotCovered: one of them is not.
    """
    if find_spec("transformers") is None:
        raise NotCovered(
            "Hugging Face models here",
            "the package 'transformers' is not installed",
            "pip install 'vllm-batch-invariant[hf]'",
        )
    if find_spec("vllm") is None:
        raise NotCovered(
            "Hugging Face models without vLLM",
            "the trainer calls its kernels for the rotary embedding and, on a GPU, for SiLU and logprobs",
            "install the vLLM that serves the rollout",
        )


def check(model: torch.nn.Module) -> None:
    """Whether the engine's operations can stand for all of a model's, and come from a vLLM that was tested.

    Raises:
        NotCovered: the first thing for which they cannot; another vLLM.
    """
    from transformers.models.qwen3 import modeling_qwen3 as hf

    if type(model) is not hf.Qwen3ForCausalLM:
        raise NotCovered(
            f"a trainer's {type(model).__name__}",
            "the order of its operations in vLLM is not known here",
            "use a Qwen3ForCausalLM",
        )
    _check_config(model.config)
    known = {
        hf.Qwen3ForCausalLM, hf.Qwen3Model, hf.Qwen3DecoderLayer, hf.Qwen3Attention, hf.Qwen3MLP, hf.Qwen3RMSNorm,
        hf.Qwen3RotaryEmbedding, hf.ACT2FN["silu"].__class__, torch.nn.ModuleList, torch.nn.Embedding, torch.nn.Linear,
    }  # fmt: skip
    for name, module in model.named_modules():
        if type(module) not in known:
            raise NotCovered(
                f"a trainer's {type(module).__name__} at {name}",
                "vLLM's Qwen3 has no such layer",
                "patch a model without adapters or quantised layers",
            )
    weights = list(model.parameters())
    _check_weights(weights)
    patch_points.check_version(weights[0].device.type)


def _check_weights(weights: list[torch.nn.Parameter]) -> None:
    dtypes, devices = ({getattr(weight, what) for weight in weights} for what in ("dtype", "device"))
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        raise NotCovered(
            f"weights in {' and '.join(sorted(map(str, dtypes)))}",
            "the engine computes in one dtype",
            "load the model in fp32, bf16 or fp16",
        )
    if len(devices) > 1 or not {device.type for device in devices} <= set(_DEVICES):
        raise NotCovered(
            f"weights on {' and '.join(sorted(map(str, devices)))}",
            "a trainer's operations run on one CPU or NVIDIA GPU",
            "move the model there",
        )


def _check_config(config: Any) -> None:
    rope = config.rope_parameters
    found = {
        f"the activation {config.hidden_act}": config.hidden_act != "silu",
        "biases of attention": config.attention_bias,
        "dropout of attention": config.attention_dropout,
        "sliding window layers": set(config.layer_types) != {"full_attention"},
        f"a rotary embedding of type {rope['rope_type']}": rope["rope_type"] != "default",
        "a partial rotary embedding": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "quantised weights": getattr(config, "quantization_config", None) is not None,
        "hidden states as a result": config.output_hidden_states,
        "attention weights as a result": getattr(config, "output_attentions", False),
    }
    for what, is_found in found.items():
        if is_found:
            raise NotCovered(
                f"{what} in a trainer", "the bits have not been compared with vLLM's", "use a configuration without it"
            )


def check_call(device: torch.device, attention_mask: torch.Tensor | None, **options: Any) -> None:
    """Whether a call of the model asks for something that its forward pass has not.

    Raises:
        NotCovered: an option that would have to be ignored, a mask of another kind, or autocast.
    """
    if attention_mask is not None and not (isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2):
        raise NotCovered(
            "an attention mask that is not [rows, columns]",
            "attention is causal within each sequence",
            "pass which tokens are real, or nothing",
        )
    for name, value in options.items():
        if name not in _HARMLESS and value is not None and value is not False:
            raise NotCovered(
                f"{name} in a trainer", "a patched model computes whole sequences and their logits only", "leave it out"
            )
    if torch.is_autocast_enabled(device.type):
        raise NotCovered("autocast", "the engine computes in one dtype", "load the model in the engine's dtype")


def check_length(positions: torch.Tensor, most: int) -> None:
    """Whether every position has an angle.

    Raises:
        NotCovered: one has not.
    """
    longest = int(positions.max()) + 1 if positions.numel() else 0
    if longest > most:
        raise NotCovered(f"a sequence of {longest} tokens", f"the model has {most} positions", "pass shorter sequences")
