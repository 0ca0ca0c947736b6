"""A small Ling 2.5 and a small Ling 3.0 of random weights: linear attention whose decay is constant, or Kimi Delta
Attention, latent attention in every fourth layer, and experts; written as they are published, and computed in float64
around Transformers' DeepSeek-V3, which has the rest of them.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine import mla

_SHARED = {
    "model_type": "bailing_hybrid",
    "auto_map": {"AutoConfig": "configuration_bailing_hybrid.BailingHybridConfig"},
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "layer_group_size": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "use_bias": False,
    "use_qkv_bias": False,
    "rope_theta": 1e4,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "router_dtype": "fp32",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "2.5": {
        "architectures": ["BailingMoeV2_5ForCausalLM"],
        "use_qk_norm": True,
        "linear_silu": False,
        "group_norm_size": 2,
        "partial_rotary_factor": 0.5,
        **_SHARED,
    },
    "3.0": {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "short_conv_kernel_size": 4,
        "no_kda_lora": True,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "moe_shared_expert_intermediate_size": 128,
        **_SHARED,
    },
}
"""By the version."""
_CLASS = """from transformers import PretrainedConfig


class BailingHybridConfig(PretrainedConfig):
    model_type = "bailing_hybrid"
"""
"""Of a checkpoint's own configuration, which vLLM has not, so that users pass --trust-remote-code."""


class _Layer(torch.nn.Module):
    """One, token by token, in the dtype of its weights."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self._config, self._heads, self._size = config, config["num_attention_heads"], config["head_dim"]

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"]).rsqrt() * weight


def _named(weight: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(weight)
    return module


class LinearAttention(_Layer):
    """That of 2.5."""

    def __init__(self, config: dict[str, Any], layer: int) -> None:
        super().__init__(config)
        hidden, inner = config["hidden_size"], self._heads * self._size
        self.query_key_value = torch.nn.Linear(hidden, 3 * inner, bias=False)
        self.g_proj = torch.nn.Linear(hidden, inner, bias=False)
        self.dense = torch.nn.Linear(inner, hidden, bias=False)
        for name, size in (("query_layernorm", self._size), ("key_layernorm", self._size), ("g_norm", inner)):
            setattr(self, name, _named(torch.ones(size)))
        slopes = 2.0 ** (-8.0 * torch.arange(1, self._heads + 1) / self._heads)
        self._slopes = slopes * (1 - layer / (config["num_hidden_layers"] - 1) + 1e-5)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        size = int(self._size * self._config["partial_rotary_factor"])
        angles = self._config["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * angles
        cos, sin = (of(angles).to(x.dtype) for of in (torch.cos, torch.sin))
        a, b, rest = x.split([size // 2, size // 2, self._size - size], dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        [x] = hidden_states
        q, k, v = (one.unflatten(-1, (self._heads, -1)) for one in self.query_key_value(x).chunk(3, -1))
        q = self._turned(self._norm(q, self.query_layernorm.weight)) * self._size**-0.5
        k = self._turned(self._norm(k, self.key_layernorm.weight))
        state, out, decay = x.new_zeros(self._heads, self._size, self._size), [], (-self._slopes.to(x.dtype)).exp()
        for t in range(len(x)):
            state = decay[:, None, None] * state + k[t][:, :, None] * v[t][:, None, :]
            out.append(torch.einsum("hk,hkv->hv", q[t], state).flatten())
        groups = self._config["group_norm_size"], -1
        normed = self._norm(torch.stack(out).unflatten(1, groups), self.g_norm.weight.view(groups))
        return self.dense(normed.flatten(1) * self.g_proj(x).sigmoid())[None], None


class DeltaAttention(_Layer):
    """That of 3.0."""

    def __init__(self, config: dict[str, Any], _: int) -> None:
        super().__init__(config)
        hidden, inner = config["hidden_size"], self._heads * self._size
        for name in ("q_proj", "k_proj", "v_proj", "f_proj", "g_proj"):
            setattr(self, name, torch.nn.Linear(hidden, inner, bias=False))
        self.b_proj = torch.nn.Linear(hidden, self._heads, bias=False)
        self.o_proj = torch.nn.Linear(inner, hidden, bias=False)
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            setattr(self, name, _named(torch.zeros(inner, 1, config["short_conv_kernel_size"])))
        self.A_log = torch.nn.Parameter(torch.zeros(1, 1, self._heads, 1))
        self.dt_bias = torch.nn.Parameter(torch.zeros(inner))
        self.o_norm = _named(torch.ones(self._size))

    def _convolved(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = torch.nn.functional.pad(x.t()[None], (weight.shape[2] - 1, 0))
        made = torch.nn.functional.conv1d(rows, weight, groups=len(weight))[0].t()
        return torch.nn.functional.silu(made).unflatten(1, (self._heads, -1))

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        [x] = hidden_states
        q, k, v = (
            self._convolved(getattr(self, f"{name}_proj")(x), getattr(self, f"{name}_conv1d").weight) for name in "qkv"
        )
        q, k = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (q, k))
        raw = (self.f_proj(x) + self.dt_bias).unflatten(1, (self._heads, -1))
        speed, beta = self.A_log.exp().view(-1, 1), self.b_proj(x).sigmoid()
        g = -speed * torch.nn.functional.softplus(raw)
        if self._config["kda_safe_gate"]:
            g = self._config["kda_lower_bound"] * (speed * raw).sigmoid()
        state, out = x.new_zeros(self._heads, self._size, self._size), []
        for t in range(len(x)):
            state = g[t].exp()[:, :, None] * state
            missing = beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t][:, :, None] * missing[:, None, :]
            out.append(torch.einsum("hk,hkv->hv", q[t], state) * self._size**-0.5)
        gate = self.g_proj(x).sigmoid().unflatten(1, (self._heads, -1))
        return self.o_proj((self._norm(torch.stack(out), self.o_norm.weight) * gate).flatten(1))[None], None


_LAYERS = {"2.5": LinearAttention, "3.0": DeltaAttention}


def model_of(version: str, config: dict[str, Any]) -> transformers.PreTrainedModel:
    """Transformers' DeepSeek-V3 of a configuration, with linear attention in its layers but each group's last."""
    fields = {name: value for name, value in config.items() if name not in ("architectures", "model_type", "auto_map")}
    for name in ("head_dim", "partial_rotary_factor"):
        fields.pop(name, None)
    named = {
        "n_routed_experts": fields.pop("num_experts"),
        "n_shared_experts": fields.pop("num_shared_experts"),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields.pop("rope_theta")},
    }
    model = transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**fields, **named, attn_implementation="eager", experts_implementation="eager")
    )
    for number, layer in enumerate(model.model.layers):
        if (number + 1) % config["layer_group_size"]:
            layer.self_attn = _LAYERS[version](config, number)
    return model


def drawn(version: str, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """Random weights that bf16 has, in fp32, with changes to the configuration. Gates are near 1, so that a token reads
    states of long ago.
    """
    model = model_of(version, CONFIGS[version] | changes)
    mla.draw(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "conv1d" in name:
                weight.normal_(0, 0.3, generator=generator)
            elif name.endswith("A_log"):
                weight.uniform_(0.2, 0.5, generator=generator)
            elif name.endswith("dt_bias"):
                weight.uniform_(-6, -4, generator=generator)
        for weight in model.state_dict().values():
            weight.copy_(weight.bfloat16())
    return model


def written(folder: Path, version: str, seed: int = 0, **changes: Any) -> Path:
    """The checkpoint of :func:`drawn`."""
    config = CONFIGS[version] | changes
    drawn(version, seed, **changes).bfloat16().save_pretrained(folder)
    weights = {published(name, config): one for name, one in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    (folder / "configuration_bailing_hybrid.py").write_text(_CLASS)
    return folder


def published(name: str, config: dict[str, Any]) -> str:
    """The name in a checkpoint of a weight of :func:`model_of`."""
    every = config["layer_group_size"]
    latent = any(
        name.startswith(f"model.layers.{number}.") for number in range(every - 1, config["num_hidden_layers"], every)
    )
    for ours, theirs in (
        ("model.embed_tokens", "model.word_embeddings"),
        *([("self_attn.o_proj", "attention.dense")] if latent else []),
        ("self_attn.", "attention."),
        ("gate.e_score_correction_bias", "gate.expert_bias"),
    ):
        name = name.replace(ours, theirs)
    return name
