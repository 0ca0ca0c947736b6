"""A whole model by :mod:`.definition`, in numpy: logits of Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE.

It needs no engine, no PyTorch and no kernel, and has the bits of every engine that serves the checkpoint in exact
arithmetic.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import NotCovered
from . import MODELS, ROTARY_EMBEDDINGS, WITH_WINDOWS, definition
from .definition import Floats

_COLUMNS = 8192
"""Rows of a weight that are integers at a time."""
_REMEDY = "verify with an engine that serves it"
Seen = Callable[[str, Floats], None]


def _unseen(layer: str, made: Floats) -> None:
    """Of nobody who looks."""


class Decoder:
    """A model of one of :data:`~vllm_batch_invariant.ops.exact.MODELS` in bf16.

    Args:
        config: as in its checkpoint's config.json.
        weights: the bits of each weight, uint16, by its name in the checkpoint.

    Raises:
        NotCovered: a model without a definition.
    """

    def __init__(self, config: dict[str, Any], weights: dict[str, NDArray[np.uint16]]) -> None:
        self.config, self._weights = config, weights
        architecture = (self.config.get("architectures") or ["unknown"])[0]
        if architecture not in MODELS:
            raise NotCovered(f"the model {architecture}", "it has no definition in exact arithmetic", _REMEDY)
        heads = self.config["num_attention_heads"]
        self.head_size = self.config.get("head_dim") or self.config["hidden_size"] // heads

    def _floats(self, name: str) -> Floats | None:
        """A weight as fp32; None if the model has none of that name."""
        bits = self._weights.get(name)
        return None if bits is None else definition.from_bits(bits)

    def _linear(self, x: Floats, name: str, shared: bool = False) -> Floats:
        """A linear layer; ``shared``: whether tensor-parallel workers share its K."""
        total, bias = self._unrounded(x, name, shared), self._floats(f"{name}.bias")
        return definition.bf16(total if bias is None else total + bias)

    def _unrounded(self, x: Floats, name: str, shared: bool = False) -> Floats:
        bits, parts = self._weights[f"{name}.weight"], definition.segments(x.shape[-1], shared)
        out = []
        for start in range(0, len(bits), _COLUMNS):
            held = definition.from_bits(bits[start : start + _COLUMNS])
            weight = definition.two_digits(definition.in_segments(held, parts))
            if np.isnan(weight.scale).any():
                raise NotCovered(f"weights of {name} that are not finite", "they have no integers", _REMEDY)
            out.append(definition.unrounded_linear(x, weight))
        return np.concatenate(out, axis=-1)

    def _norm(self, x: Floats, name: str, residual: Floats | None = None) -> tuple[Floats, Floats]:
        return definition.rms_norm(x, self._floats(f"{name}.weight"), self.config["rms_norm_eps"], residual)

    @cached_property
    def _turns(self) -> np.ndarray:
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in ROTARY_EMBEDDINGS:
            raise NotCovered(f"a rotary embedding of type {kind}", "it has no definition in exact arithmetic", _REMEDY)
        base = rope.get("rope_theta") or self.config.get("rope_theta", 10_000.0)
        return definition.turns(self.head_size, base, rope if kind == "llama3" else None)

    @cached_property
    def _window(self) -> int | None:
        """Keys that a row sees; None for all."""
        if self.config.get("use_sliding_window"):
            raise NotCovered("sliding windows of a Qwen", "in which layers they are follows its server", _REMEDY)
        return self.config.get("sliding_window") if self.config["architectures"][0] in WITH_WINDOWS else None

    def logits(self, token_ids: Sequence[int], rows: slice = slice(None), seen: Seen = _unseen) -> Floats:
        """[rows, vocabulary] bf16 values, of what follows each of the ``rows`` of the tokens.

        Args:
            seen: is given what each layer of vLLM's makes of all tokens, by the layer's path.
        """
        hidden, residual = self._floats_of(token_ids), None
        seen("model.embed_tokens", hidden)
        table = definition.rotary_table(len(token_ids), self._turns)
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            hidden, residual = self._norm(hidden, f"{at}.input_layernorm", residual)
            seen(f"{at}.input_layernorm", hidden)
            attended = self._attention(hidden, f"{at}.self_attn", table, seen)
            hidden, residual = self._norm(attended, f"{at}.post_attention_layernorm", residual)
            seen(f"{at}.post_attention_layernorm", hidden)
            has_experts = f"{at}.mlp.gate.weight" in self._weights
            hidden = (self._experts if has_experts else self._mlp)(hidden, f"{at}.mlp", seen)
        hidden, _ = self._norm(hidden[rows], "model.norm", residual[rows])
        return self._linear(hidden, "model.embed_tokens" if self.config.get("tie_word_embeddings") else "lm_head")

    def _floats_of(self, token_ids: Sequence[int]) -> Floats:
        return definition.from_bits(self._weights["model.embed_tokens.weight"][np.asarray(token_ids)])

    def _mlp(self, x: Floats, name: str, seen: Seen) -> Floats:
        gate_up = self._gate_up(x, name)
        seen(f"{name}.gate_up_proj", gate_up)
        activated = definition.silu_and_mul(gate_up)
        seen(f"{name}.act_fn", activated)
        out = self._linear(activated, f"{name}.down_proj", shared=True)
        seen(f"{name}.down_proj", out)
        return out

    def _gate_up(self, x: Floats, name: str) -> Floats:
        return np.concatenate([self._linear(x, f"{name}.{part}_proj") for part in ("gate", "up")], -1)

    def _experts(self, x: Floats, name: str, seen: Seen) -> Floats:
        logits = self._linear(x, f"{name}.gate")
        seen(f"{name}.gate", logits)
        top_k = self.config["num_experts_per_tok"]
        weights, experts = definition.route(logits, top_k, self.config.get("norm_topk_prob", False))
        made = np.empty((len(x), top_k, x.shape[-1]), np.float32)
        for expert in np.unique(experts):
            tokens, slots = np.nonzero(experts == expert)
            hidden = definition.silu_and_mul(self._gate_up(x[tokens], f"{name}.experts.{expert}"))
            made[tokens, slots] = self._unrounded(hidden, f"{name}.experts.{expert}.down_proj")
        out = definition.expert_sum(made, weights)
        seen(f"{name}.experts", out)
        return out

    def _attention(self, x: Floats, name: str, table: Floats, seen: Seen) -> Floats:
        parts = [self._linear(x, f"{name}.{part}_proj") for part in "qkv"]
        seen(f"{name}.qkv_proj", np.concatenate(parts, -1))
        query, key, value = (part.reshape(len(x), -1, self.head_size) for part in parts)
        if f"{name}.q_norm.weight" in self._weights:
            query, _ = self._norm(query, f"{name}.q_norm")
            key, _ = self._norm(key, f"{name}.k_norm")
            seen(f"{name}.q_norm", query)
            seen(f"{name}.k_norm", key)
        query, key = definition.rotate(query, table), definition.rotate(key, table)
        seen(f"{name}.rotary_emb", query)
        out = definition.attention(query, key, value, self.head_size**-0.5, self._window).reshape(len(x), -1)
        seen(f"{name}.attn", out)
        projected = self._linear(out, f"{name}.o_proj", shared=True)
        seen(f"{name}.o_proj", projected)
        return projected
