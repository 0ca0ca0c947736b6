"""The architectures that have a patch, as data: what Hugging Face calls their classes, and which layers add a bias."""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

_QKV = ("q_proj", "k_proj", "v_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        package: of transformers, below ``transformers.models``.
        prefix: that the names of its classes begin with.
        biased: linear layers that vLLM adds a bias in if the checkpoint has one.
        has_experts: whether layers may be mixtures of experts.
        has_delta_nets: whether layers may be gated delta nets, and what they bring along: norms that add 1 to their
            weight, gates of attention, and a rotary embedding of a part of each head.
        has_state_spaces: whether layers are one mixer behind one norm: a state space of Mamba-2, attention without a
            rotary embedding, or an MLP without a gate.
        has_short_convs: whether layers may be short convolutions with gates.
        of_text: of classes whose names say that they are of text.
        head: what the name of the class with the output head ends with.
        tower: the class of the encoder of images, of which the text model is a part beside it; "" where there is none.
        others: classes with names of their own, each with its name here before it.
        devices: types of those on which it was compared with an engine.
        fixed: fields of the configuration that vLLM's model does not read, with what it computes instead.
    """

    package: str
    prefix: str
    biased: tuple[str, ...] = ()
    has_experts: bool = False
    has_delta_nets: bool = False
    has_state_spaces: bool = False
    has_short_convs: bool = False
    of_text: tuple[str, ...] = ()
    head: str = "ForCausalLM"
    tower: str = ""
    others: tuple[tuple[str, str], ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    fixed: tuple[tuple[str, Any], ...] = ()

    @property
    def keeps_states(self) -> bool:
        """Whether layers keep a state of each sequence."""
        return self.has_delta_nets or self.has_state_spaces or self.has_short_convs

    @property
    def module(self) -> ModuleType:
        """Hugging Face's module of its classes."""
        return import_module(f"transformers.models.{self.package}.modeling_{self.package}")

    def of_name(self, name: str) -> type[torch.nn.Module]:
        """Its class of a name without the prefix, such as "DecoderLayer"; of a part of text where it has others."""
        whole = dict(self.others).get(name, f"{self.prefix}{'Text' if name in self.of_text else ''}{name}")
        return getattr(self.module, whole)

    @property
    def around(self) -> type[torch.nn.Module]:
        """The class of what has the text model, and the encoder of images beside it."""
        return getattr(self.module, f"{self.prefix}Model")


FAMILIES = (
    Family("llama", "Llama", biased=(*_QKV, "o_proj", *_MLP)),
    Family("qwen2", "Qwen2", biased=_QKV),
    Family("qwen3", "Qwen3"),
    Family("qwen3_moe", "Qwen3Moe", has_experts=True),
    Family(
        "olmoe",
        "Olmoe",
        has_experts=True,
        devices=("cpu",),
        fixed=(("norm_topk_prob", False), ("clip_qkv", None), ("rms_norm_eps", 1e-5)),
    ),
    Family("qwen3_5", "Qwen3_5", has_delta_nets=True, of_text=("Model", "RotaryEmbedding")),
    Family(
        "nemotron_h",
        "NemotronH",
        biased=("in_proj", "conv1d", "out_proj", "up_proj", "down_proj"),
        has_state_spaces=True,
        fixed=(("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")),
    ),
    Family(
        "lfm2",
        "Lfm2",
        biased=("in_proj", "conv", "out_proj"),
        has_short_convs=True,
        fixed=(("tie_word_embeddings", True),),
    ),
    Family(
        "qwen2_5_vl",
        "Qwen2_5_VL",
        biased=_QKV,
        of_text=("Model",),
        head="ForConditionalGeneration",
        tower="Qwen2_5_VisionTransformerPretrainedModel",
        others=(("MLP", "Qwen2MLP"),),
        devices=("cpu",),
    ),
    Family(
        "qwen3_vl",
        "Qwen3VL",
        of_text=("Model", "Attention", "MLP", "RMSNorm", "DecoderLayer", "RotaryEmbedding"),
        head="ForConditionalGeneration",
        tower="Qwen3VLVisionModel",
        devices=("cpu",),
    ),
)


def family_of(model: torch.nn.Module) -> Family | None:
    """The family whose model with an output head this is, not one derived from it; None for any other."""
    name = type(model).__name__
    found = next((family for family in FAMILIES if name == f"{family.prefix}{family.head}"), None)
    return found if found is not None and type(model) is found.of_name(found.head) else None


def decoder_of(model: torch.nn.Module) -> Any:
    """The text model of a model of a family."""
    inside: Any = model.model
    return getattr(inside, "language_model", inside)
