"""A whole model by :mod:`.definition`, in numpy: the logits of a model of one of :mod:`.families` from its weights.

It needs no engine, no PyTorch and no kernel, and has the bits of every engine that serves the checkpoint in exact
arithmetic.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import NotCovered
from . import definition
from .definition import Floats, fp32
from .families import FULL, MODELS, SLIDING, layer_types, problem_of, rope_type, rotary_embedding

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

    arithmetic = "exact arithmetic"

    def __init__(self, config: dict[str, Any], weights: dict[str, NDArray[np.uint16]]) -> None:
        self.config, self._weights = config, weights
        architecture = (config.get("architectures") or ["unknown"])[0]
        problem = self._problem_of(architecture)
        if problem:
            raise NotCovered(problem, f"it has no definition in {self.arithmetic}", _REMEDY)
        self._family = MODELS[architecture]
        self.heads = config["num_attention_heads"]
        self.kv_heads = self._get("num_key_value_heads") or self.heads
        self.head_size = self._get("head_dim") or config["hidden_size"] // self.heads

    @property
    def vocabulary(self) -> int:
        """Tokens that it knows."""
        return len(self._weights["model.embed_tokens.weight"])

    def _problem_of(self, architecture: str) -> str | None:
        if self.config.get("quantization_config"):
            return "a quantised checkpoint"
        return problem_of(architecture, self.config.get)

    def _get(self, name: str, default: Any = None) -> Any:
        """What the configuration has by a name, or means by leaving it out."""
        return self.config.get(name, self._family.usual.get(name, default))

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
        weight = self._floats(f"{name}.weight")
        weight = weight + fp32(1) if self._family.is_gemma else weight
        return definition.rms_norm(x, weight, self._get("rms_norm_eps", 1e-6), residual)

    def _tables(self, positions: int) -> dict[str, Floats]:
        """Cosines and sines of the positions, for each type of layers."""
        tables = {}
        for layer_type in set(self._layer_types):
            base, rope = rotary_embedding(self._get, layer_type)
            turns = definition.turns(self.head_size, base, None if rope_type(rope) == "default" else dict(rope))
            tables[layer_type] = definition.rotary_table(positions, turns)
        return tables

    @cached_property
    def _layer_types(self) -> list[str]:
        every = SLIDING if self._family.windows and self._get("sliding_window") else FULL
        named = layer_types(self._family, self._get) if self._family.windows else None
        return named or [every] * self.config["num_hidden_layers"]

    @cached_property
    def _scale(self) -> float:
        """Of the scores of attention."""
        if self._family.multiplies:
            return self._get("attention_multiplier", 1.0)
        return (self._own("query_pre_attn_scalar") or self.head_size) ** -0.5

    def _own(self, name: str) -> Any:
        """What the configuration has by a name that means something in this family alone."""
        return self._get(name) if name in self._family.usual else None

    def logits(self, token_ids: Sequence[int], rows: slice = slice(None), seen: Seen = _unseen) -> Floats:
        """[rows, vocabulary] bf16 values, of what follows each of the ``rows`` of the tokens.

        Args:
            seen: is given what each layer of vLLM's makes of all tokens, by the layer's path.
        """
        embedded = self._floats_of(token_ids)
        seen("model.embed_tokens", embedded)
        hidden, residual = definition.scaled(embedded, self._embedding_factor), None
        tables = self._tables(len(token_ids))
        for layer, layer_type in enumerate(self._layer_types):
            hidden, residual = self._layer(layer, hidden, residual, layer_type, tables, seen)
        hidden, _ = self._norm(hidden[rows], "model.norm", None if residual is None else residual[rows])
        tied = self._get("tie_word_embeddings", False)
        logits = self._linear(hidden, "model.embed_tokens" if tied else "lm_head")
        if soft_cap := self._own("final_logit_softcapping"):
            logits = self._capped(logits, soft_cap)
        factor = self._multiplier("logit_scale") / self._multiplier("logits_scaling")
        return logits if factor == 1 else definition.scaled(logits, factor)

    def _capped(self, logits: Floats, soft_cap: float) -> Floats:
        return definition.bf16(definition.capped(logits, soft_cap))

    def _floats_of(self, token_ids: Sequence[int]) -> Floats:
        return definition.from_bits(self._weights["model.embed_tokens.weight"][np.asarray(token_ids)])

    def _multiplier(self, name: str) -> float:
        return self._get(name, 1.0) if self._family.multiplies else 1.0

    @property
    def _embedding_factor(self) -> float:
        if self._family.is_gemma:
            return float(definition.bf16(np.array([self.config["hidden_size"] ** 0.5], fp32))[0])
        return self._multiplier("embedding_multiplier")

    def _layer(
        self, number: int, x: Floats, residual: Floats | None, layer_type: str, tables: dict[str, Floats], seen: Seen
    ) -> tuple[Floats, Floats | None]:
        """What a layer gives, and the residual that is still to be added to it."""
        name, after = f"model.layers.{number}", self._family.norms_after

        def norm(x: Floats, of: str, residual: Floats | None = None) -> tuple[Floats, Floats]:
            made = self._norm(x, f"{name}.{of}", residual)
            seen(f"{name}.{of}", made[0])
            return made

        hidden, residual = norm(x, "input_layernorm", residual)
        hidden = self._attention(hidden, f"{name}.self_attn", layer_type, tables[layer_type], seen)
        if after:
            hidden, _ = norm(hidden, "post_attention_layernorm")
        hidden, residual = self._add(hidden, residual)
        hidden, residual = norm(hidden, "pre_feedforward_layernorm" if after else "post_attention_layernorm", residual)
        hidden = (self._experts if self._has_experts(number) else self._mlp)(hidden, f"{name}.mlp", seen)
        if after:
            hidden, _ = norm(hidden, "post_feedforward_layernorm")
        return self._add(hidden, residual)

    @property
    def _num_experts(self) -> int:
        """Of layers that have some, by the name that later configurations have for it, or the earlier."""
        return self._own("num_experts") and (self._get("num_local_experts") or self._get("num_experts"))

    def _has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in the place of an MLP, as the configuration says."""
        if not self._num_experts or layer in (self._get("mlp_only_layers") or ()):
            return False
        return (layer + 1) % self._get("decoder_sparse_step") == 0

    def _add(self, made: Floats, residual: Floats) -> tuple[Floats, Floats | None]:
        """The result of attention or an MLP, and the residual, which Granite adds at once and others in their norms."""
        if not self._family.multiplies:
            return made, residual
        return definition.bf16(residual + definition.scaled(made, self._multiplier("residual_multiplier"))), None

    def _experts(self, x: Floats, name: str, seen: Seen) -> Floats:
        logits = self._linear(x, f"{name}.gate")
        seen(f"{name}.gate", logits)
        count, top_k = self._num_experts, self.config["num_experts_per_tok"]
        if logits.shape[-1] != count or not 0 < top_k <= count:
            raise ValueError(f"{top_k} of {count} experts, and a router of {logits.shape[-1]}")
        weights, experts = self._routed(logits, top_k, self._get("norm_topk_prob", False))
        made = np.empty((len(x), top_k, x.shape[-1]), fp32)
        for expert in np.unique(experts):
            tokens, slots = np.nonzero(experts == expert)
            hidden = self._activated(self._gate_up(x[tokens], f"{name}.experts.{expert}"))
            made[tokens, slots] = self._of_expert(hidden, f"{name}.experts.{expert}.down_proj")
        out = definition.expert_sum(made, weights)
        seen(f"{name}.experts", out)
        return out

    def _routed(self, logits: Floats, top_k: int, renormalise: bool) -> tuple[Floats, definition.Integers]:
        return definition.route(logits, top_k, renormalise)

    def _of_expert(self, hidden: Floats, name: str) -> Floats:
        """What an expert's last layer gives, of which the weighted sum is made."""
        return self._unrounded(hidden, name)

    def _gate_up(self, x: Floats, name: str) -> Floats:
        return self._stacked(x, name, "gate_up_proj", ("gate_proj", "up_proj"))

    def _mlp(self, x: Floats, name: str, seen: Seen) -> Floats:
        gate_up = self._gate_up(x, name)
        seen(f"{name}.gate_up_proj", gate_up)
        gated = self._activated(gate_up)
        seen(f"{name}.act_fn", gated)
        made = self._linear(gated, f"{name}.down_proj", shared=True)
        seen(f"{name}.down_proj", made)
        return made

    def _activated(self, gate_up: Floats) -> Floats:
        return definition.gelu_and_mul(gate_up) if self._family.is_gemma else definition.silu_and_mul(gate_up)

    def _stacked(self, x: Floats, name: str, together: str, parts: Sequence[str]) -> Floats:
        """Linear layers of one input, which some checkpoints have as one."""
        if f"{name}.{together}.weight" in self._weights:
            return self._linear(x, f"{name}.{together}")
        return np.concatenate([self._linear(x, f"{name}.{part}") for part in parts], -1)

    def _attention(self, x: Floats, name: str, layer_type: str, table: Floats, seen: Seen) -> Floats:
        qkv = self._stacked(x, name, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
        seen(f"{name}.qkv_proj", qkv)
        heads = qkv.reshape(len(x), -1, self.head_size)
        query, key, value = np.split(heads, (self.heads, self.heads + self.kv_heads), axis=1)
        if f"{name}.q_norm.weight" in self._weights:
            query, _ = self._norm(query, f"{name}.q_norm")
            key, _ = self._norm(key, f"{name}.k_norm")
            seen(f"{name}.q_norm", query)
            seen(f"{name}.k_norm", key)
        query, key = definition.rotate(query, table), definition.rotate(key, table)
        seen(f"{name}.rotary_emb", query)
        window = (self._get("sliding_window") or None) if layer_type == SLIDING else None
        out = self._attended(query, key, value, window).reshape(len(x), -1)
        seen(f"{name}.attn", out)
        projected = self._linear(out, f"{name}.o_proj", shared=True)
        seen(f"{name}.o_proj", projected)
        return projected

    def _attended(self, query: Floats, key: Floats, value: Floats, window: int | None) -> Floats:
        return definition.attention(query, key, value, self._scale, window, self._own("attn_logit_softcapping"))
