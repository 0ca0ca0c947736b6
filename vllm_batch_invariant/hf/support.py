"""What a patched model covers; the rest refuses in one line."""

from importlib.util import find_spec
from typing import Any

import torch

from .. import envs
from ..errors import NotCovered
from ..installing import how_to_install
from ..integration.parallel.tensor_tree import k_slices
from ..integration.reviews import patch_points
from ..ops.attention.params import DTYPES
from . import adapters, vision
from .families import FAMILIES, Family, decoder_of, family_of
from .refusals import refuse_found

_DEVICES = ("cpu", "cuda")
_HARMLESS = ("num_items_in_batch", "return_dict", "max_length_q", "max_length_k")
"""Options of a call that change nothing in the model: the last two are of what cu_seq_lens say."""
_OF_RULES = ("linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight", "mixer.A_log")
"""Weights of a gated delta net and of a state space that may be in another dtype than the model's, as checkpoints have
them in fp32.
"""


def check_packages() -> None:
    """Whether transformers and a vLLM are installed.

    Raises:
        NotCovered: one of them is not.
    """
    if find_spec("transformers") is None:
        raise NotCovered(
            "Hugging Face models here",
            "the package 'transformers' is not installed",
            how_to_install("hf"),
        )
    if find_spec("vllm") is None:
        raise NotCovered(
            "Hugging Face models without vLLM",
            "the trainer calls its kernels for the rotary embedding and, on a GPU, for logprobs",
            "install the vLLM that serves the rollout",
        )


def check(model: torch.nn.Module) -> Family:
    """Whether the engine's operations can stand for all of a model's, and come from a vLLM that was tested.

    Returns:
        What the model is.

    Raises:
        NotCovered: the first thing for which they cannot; another vLLM.
    """
    _check_is_not_wrapped(model)
    configs = getattr(model, "peft_config", None) or {}
    model = adapters.unwrapped(model)
    family = family_of(model)
    if family is None:
        raise NotCovered(
            f"a trainer's {type(model).__name__}",
            "the order of its operations in vLLM is not known here",
            f"use a {', '.join(family.prefix for family in FAMILIES)} model with its output head",
        )
    _check_config(decoder_of(model).config, family)
    if family.tower:
        _check_whole(model.config)
        vision.check(model.model.visual, model.config, family)
    _check_modules(model, family)
    adapters.check(model, configs)
    weights = [(name, weight) for name, weight in model.named_parameters() if not name.endswith(_OF_RULES)]
    _check_dtypes([weight for name, weight in weights if not adapters.is_adapters_own(name)])
    if family.tower and weights[0][1].dtype == torch.float16:
        raise NotCovered("images in fp16 in a trainer", "the engine refuses them", "load the model in bf16 or fp32")
    _check_devices([weight for _, weight in weights])
    check_environment(family, weights[0][1].device.type)
    patch_points.check_version(weights[0][1].device.type)
    return family


def check_environment(family: Family, device_type: str) -> None:
    """Whether a trainer of a family has what the environment asks for, on a device.

    Raises:
        NotCovered: a tree of tensor-parallel workers, exact arithmetic or a device, where a trainer has none.
    """
    has_tree = device_type == "cpu" and not (family.has_experts or family.keeps_states or family.tower)
    if k_slices() > 1 and not has_tree:
        raise NotCovered(
            f"{envs.TP_TREE.name}={k_slices()} in a trainer's {family.prefix} on device '{device_type}'",
            "a trainer has such a tree on a CPU only, and none of experts, layers with states or encoders",
            "leave it out, and roll out with --tensor-parallel-size 1",
        )
    if family.keeps_states and device_type != "cpu":
        raise NotCovered(
            f"a trainer's {family.prefix} on device '{device_type}'",
            "gradients of its layers with states have been computed on CPUs alone",
            "train on a CPU, or a model whose layers are all of attention",
        )
    if device_type not in family.devices:
        raise NotCovered(
            f"a trainer's {family.prefix} on device '{device_type}'",
            "it was compared with engines on a CPU alone",
            "train on a CPU, or another model",
        )
    if envs.is_exact():
        raise NotCovered(
            f"{envs.ARITHMETIC.name}=exact in a trainer", "its operations have no gradients there", "leave it out"
        )


def _check_is_not_wrapped(model: torch.nn.Module) -> None:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    for name, module in model.named_modules():
        if isinstance(module, (DistributedDataParallel, FSDPModule, FullyShardedDataParallel)):
            raise NotCovered(
                f"a model that is sharded already, at '{name}'", "its layers are not found", "patch it, then shard it"
            )


def _check_modules(model: torch.nn.Module, family: Family) -> None:
    from transformers.activations import ACT2FN

    names = [family.head, "Model", "Attention", "MLP", "RMSNorm"]
    names += ["Block", "Mamba2Mixer"] if family.has_state_spaces else ["DecoderLayer", "RotaryEmbedding"]
    names += ["SparseMoeBlock", "Experts", "TopKRouter"] if family.has_experts else []
    names += ["GatedDeltaNet", "RMSNormGated"] if family.has_delta_nets else []
    names += ["ShortConv"] if family.has_short_convs else []
    known = {family.of_name(name) for name in names}
    known |= {torch.nn.Conv1d} if family.keeps_states else set()
    known |= {family.module.Zamba2RMSNormGated, type(ACT2FN["relu2"])} if family.has_state_spaces else set()
    known |= {family.around} if family.tower else set()
    known |= {type(ACT2FN["silu"]), torch.nn.ModuleList, torch.nn.Embedding, torch.nn.Linear}
    within: tuple[str, ...] = ("model.visual",) if family.tower else ()
    for name, module in model.named_modules():
        if name.startswith(within):
            continue
        if adapters.is_adapted(module):
            _check_adapted(name, module, family)
            within = (*within, f"{name}.")
        elif type(module) not in known:
            raise NotCovered(
                f"a trainer's {type(module).__name__} at {name}",
                f"vLLM's {family.prefix} has no such layer",
                "patch a model without quantised layers, and with adapters of PEFT's for linear layers or experts",
            )
        if getattr(module, "bias", None) is not None and name.rpartition(".")[2] not in family.biased:
            raise NotCovered(
                f"a bias at {name} in a trainer", f"vLLM's {family.prefix} adds none there", "use a model without it"
            )


def _check_adapted(name: str, layer: Any, family: Family) -> None:
    remedy = "give adapters to linear layers of attention and of dense MLPs, and to both products of experts"
    if adapters.is_of_parameter(layer):
        experts = family.of_name("Experts") if family.has_experts else None
        if problem := adapters.problem_of_parameters(layer, experts):
            raise NotCovered(f"{problem} at {name} in a trainer", "no engine has it", remedy)
    elif type(layer.base_layer) is not torch.nn.Linear:
        raise NotCovered(f"an adapter of a {type(layer.base_layer).__name__} at {name}", "it has no patch", remedy)
    if family.keeps_states or family.tower or ".layers." not in name:
        raise NotCovered(f"a trainer's adapter at {name} of a {family.prefix}", "no engine was compared", remedy)


def _check_dtypes(weights: list[torch.nn.Parameter]) -> None:
    dtypes = {weight.dtype for weight in weights}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        raise NotCovered(
            f"weights in {' and '.join(sorted(map(str, dtypes)))}",
            "the engine computes in one dtype",
            "load the model in fp32, bf16 or fp16",
        )


def _check_devices(weights: list[torch.nn.Parameter]) -> None:
    devices = {weight.device for weight in weights}
    if len(devices) > 1 or not {device.type for device in devices} <= set(_DEVICES):
        raise NotCovered(
            f"weights on {' and '.join(sorted(map(str, devices)))}",
            "a trainer's operations run on one CPU or NVIDIA GPU",
            "move the model there",
        )


def _check_config(config: Any, family: Family) -> None:
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "default"}
    activation = getattr(config, "hidden_act", "silu")
    windows = {*(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)}
    windows -= {"linear_attention", "conv", "mlp"} if family.keeps_states else set()
    found = {
        f"the activation {activation}": activation != "silu",
        "dropout of attention": getattr(config, "attention_dropout", 0.0),
        f"experts of a {family.prefix}": "moe" in windows,
        "sliding window layers": windows - {"full_attention", None},
        f"a rotary embedding of type {rope['rope_type']}": rope["rope_type"] not in ("default", "llama3"),
        "a partial rotary embedding": rope.get("partial_rotary_factor", 1.0) != 1.0 and not family.has_delta_nets,
        "quantised weights": getattr(config, "quantization_config", None) is not None,
        "hidden states as a result": config.output_hidden_states,
        "attention weights as a result": getattr(config, "output_attentions", False),
        "logits of the router as a result": getattr(config, "output_router_logits", False),
    }
    found |= {f"{name}={getattr(config, name)}": getattr(config, name) != value for name, value in family.fixed}
    refuse_found(found)


def _check_whole(config: Any) -> None:
    """Whether the configuration around a text model's and an encoder's asks for nothing else."""
    rope = config.text_config.rope_parameters
    found = {
        "a text model without sections of positions": "mrope_section" not in rope or rope["rope_type"] != "default",
        "quantised weights": getattr(config, "quantization_config", None) is not None,
        "hidden states as a result": config.output_hidden_states,
        "attention weights as a result": getattr(config, "output_attentions", False),
    }
    refuse_found(found, "a trainer of images", "use another model")


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
