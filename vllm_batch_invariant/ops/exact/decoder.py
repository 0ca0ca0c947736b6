"""A whole model by :mod:`.definition`, in numpy: logits of Llama, Mistral, Qwen2 and Qwen3 from their weights.

It needs no engine, no PyTorch and no kernel, and has the bits of every engine that serves the checkpoint in exact
arithmetic.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import NotCovered
from . import MODELS, ROTARY_EMBEDDINGS, WITH_WINDOWS, definition
from .definition import Floats, fp32

_COLUMNS = 8192
"""Rows of a weight that are integers at a time."""
_REMEDY = "verify with an engine that serves it"


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
        return None if bits is None else (bits.astype(np.uint32) << 16).view(fp32)

    def _linear(self, x: Floats, name: str, shared: bool = False) -> Floats:
        """A linear layer; ``shared``: whether tensor-parallel workers share its K."""
        bits, bias = self._weights[f"{name}.weight"], self._floats(f"{name}.bias")
        parts = definition.segments(x.shape[-1], shared)
        out = []
        for start in range(0, len(bits), _COLUMNS):
            rows = slice(start, start + _COLUMNS)
            floats = (bits[rows].astype(np.uint32) << 16).view(fp32)
            weight = definition.two_digits(definition.in_segments(floats, parts))
            if np.isnan(weight.scale).any():
                raise NotCovered(f"weights of {name} that are not finite", "they have no integers", _REMEDY)
            out.append(definition.linear(x, weight, None if bias is None else bias[rows]))
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

    def logits(self, token_ids: Sequence[int], rows: slice = slice(None)) -> Floats:
        """[rows, vocabulary] bf16 values, of what follows each of the ``rows`` of the tokens."""
        hidden, residual = self._floats_of(token_ids), None
        table = definition.rotary_table(len(token_ids), self._turns)
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            hidden, residual = self._norm(hidden, f"{at}.input_layernorm", residual)
            attended = self._attention(hidden, f"{at}.self_attn", table)
            hidden, residual = self._norm(attended, f"{at}.post_attention_layernorm", residual)
            gate_up = [self._linear(hidden, f"{at}.mlp.{name}_proj") for name in ("gate", "up")]
            hidden = definition.silu_and_mul(np.concatenate(gate_up, axis=-1))
            hidden = self._linear(hidden, f"{at}.mlp.down_proj", shared=True)
        hidden, _ = self._norm(hidden[rows], "model.norm", residual[rows])
        return self._linear(hidden, "model.embed_tokens" if self.config.get("tie_word_embeddings") else "lm_head")

    def _floats_of(self, token_ids: Sequence[int]) -> Floats:
        bits = self._weights["model.embed_tokens.weight"][np.asarray(token_ids)]
        return (bits.astype(np.uint32) << 16).view(fp32)

    def _attention(self, x: Floats, name: str, table: Floats) -> Floats:
        query, key, value = (
            self._linear(x, f"{name}.{part}_proj").reshape(len(x), -1, self.head_size) for part in "qkv"
        )
        if f"{name}.q_norm.weight" in self._weights:
            query, _ = self._norm(query, f"{name}.q_norm")
            key, _ = self._norm(key, f"{name}.k_norm")
        query, key = definition.rotate(query, table), definition.rotate(key, table)
        out = definition.attention(query, key, value, self.head_size**-0.5, self._window)
        return self._linear(out.reshape(len(x), -1), f"{name}.o_proj", shared=True)
