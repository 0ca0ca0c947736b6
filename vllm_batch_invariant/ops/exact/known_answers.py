"""What every machine must compute: operands made of integers, and a digest of what a small model makes of them.

:func:`digest` says whether numpy is right here, and :func:`comparisons` whether an implementation is.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from . import FORMAT, definition
from .decoder import Decoder
from .definition import Floats, fp32

DIGEST = "2e5b02377d4c666eeb2545060cf559c4fac9f0a025bd04d8e583bd782a12ae99"
"""Of the logprobs of :func:`model`."""
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}
_ROWS = 8192
"""Of a weight, drawn at a time."""
_TOKENS = 300
"""More than a split of attention."""


def normal(seed: int, *shape: int) -> Floats:
    """About standard normal numbers in bf16: sums of four of the definition's uniform numbers."""
    tokens = np.arange(int(np.prod(shape)), dtype=np.uint64)
    a, b, c, d = (definition.uniform(seed, part, tokens) for part in range(4))
    return definition.bf16(((a + b) + (c + d) - fp32(2)) * fp32(1.7320508)).reshape(shape)


def with_outliers(seed: int, rows: int, k: int) -> Floats:
    """Rows [rows, k] of activations as models have them, and such that are hard: a spike, large channels, zeros,
    subnormal and very small and very large numbers, an infinity, NaN, and equal magnitudes.
    """
    x = normal(seed, rows, k)
    x[1 % rows, k // 2] = 1500
    x[2 % rows, :: max(k // 4, 1)] *= 100
    x[3 % rows] = 0
    x[4 % rows] *= fp32(2.0**-130)
    x[5 % rows] *= fp32(2.0**-60)
    x[6 % rows] *= fp32(2.0**100)
    x[7 % rows, 0], x[8 % rows, -1] = np.inf, np.nan
    x[9 % rows] = np.where(x[9 % rows] > 0, fp32(1), fp32(-1))
    return definition.bf16(x)


def configuration(**changes: Any) -> dict[str, Any]:
    """Of the small model, or of one that is changed."""
    return _CONFIG | changes


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of its weights, by name."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    size, kv_heads, vocabulary = config["head_dim"], config["num_key_value_heads"], config["vocab_size"]
    of_all: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        of_all |= {
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.self_attn.q_proj.weight": (heads * size, hidden),
            f"{at}.self_attn.k_proj.weight": (kv_heads * size, hidden),
            f"{at}.self_attn.v_proj.weight": (kv_heads * size, hidden),
            f"{at}.self_attn.q_norm.weight": (size,),
            f"{at}.self_attn.k_norm.weight": (size,),
            f"{at}.self_attn.o_proj.weight": (hidden, heads * size),
            f"{at}.post_attention_layernorm.weight": (hidden,),
            f"{at}.mlp.gate_proj.weight": (inner, hidden),
            f"{at}.mlp.up_proj.weight": (inner, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, inner),
        }
    return of_all | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def parts(seed: int, rows: int) -> Iterator[tuple[int, slice]]:
    """The seed of each part of a matrix's rows."""
    for start in range(0, rows, _ROWS):
        yield seed + 1000 * (start // _ROWS), slice(start, min(start + _ROWS, rows))


def weight(seed: int, *shape: int) -> Floats:
    """A matrix [N, K] of numbers of about 1 / sqrt(K), or a norm's [N] near 1, bf16 values in fp32."""
    if len(shape) == 1:
        return definition.bf16(fp32(1) + normal(seed, *shape) * fp32(0.125))
    drawn = np.empty(shape, fp32)
    for own, part in parts(seed, shape[0]):
        drawn[part] = definition.bf16(normal(own, *drawn[part].shape) / fp32(math.sqrt(shape[1])))
    return drawn


def checkpoint(**changes: Any) -> tuple[dict[str, Any], dict[str, Floats]]:
    """A configuration, and its weights by name, bf16 values in fp32."""
    config = configuration(**changes)
    return config, {name: weight(seed, *shape) for seed, (name, shape) in enumerate(shapes(config).items())}


def model() -> Decoder:
    """The small model's decoder."""
    config, weights = checkpoint()
    return Decoder(config, {name: definition.to_bits(floats) for name, floats in weights.items()})


def digest() -> str:
    """Of the logprobs that the small model gives each token after each of some."""
    tokens = definition.uniform(100, 0, np.arange(_TOKENS, dtype=np.uint64)) * fp32(_CONFIG["vocab_size"])
    logprobs = definition.log_softmax(model().logits(tokens.astype(np.int64).tolist()))
    return hashlib.sha256(FORMAT.encode() + logprobs.astype("<f4").tobytes()).hexdigest()


def comparisons(ops: ModuleType, tensor: Callable[[Floats], Any]) -> Iterator[tuple[str, Floats, Floats]]:
    """(operation, what an implementation has, what the definition has) of known operands.

    Args:
        ops: the implementation, such as :mod:`.cpu`.
        tensor: gives a bf16 tensor on its device of an array.
    """

    def floats(found: Any) -> Floats:
        return found.float().cpu().numpy()

    x, weight, bias = with_outliers(1, 40, 512), normal(2, 72, 512), normal(3, 72)
    for shared in (False, True):
        parts = definition.segments(512, shared)
        rows = definition.two_digits(definition.in_segments(weight, parts))
        right, prepared = definition.linear(x, rows, bias), ops.prepare(tensor(weight), parts)
        for m in (1, 40):
            yield "linear", floats(ops.linear(tensor(x[:m]), prepared, tensor(bias))), right[:m]
    residual, g = normal(4, 40, 512), normal(5, 512)
    with np.errstate(invalid="ignore", over="ignore"):
        right, kept = definition.rms_norm(x, g, 1e-6, residual)
    found = ops.rms_norm(tensor(x), tensor(g), 1e-6, tensor(residual))
    yield "rms_norm", floats(found[0]), right
    yield "rms_norm", floats(found[1]), kept
    gate = definition.bf16(normal(6, 9, 512) * fp32(50))
    yield "silu_and_mul", floats(ops.silu_and_mul(tensor(gate))), definition.silu_and_mul(gate)
    yield "gelu_and_mul", floats(ops.gelu_and_mul(tensor(gate))), definition.gelu_and_mul(gate)
    yield "capped", floats(ops.capped(tensor(gate), 30.0)), definition.bf16(definition.capped(gate, 30.0))
    q, table = normal(7, 64, 4, 64), definition.rotary_table(64, definition.turns(64, 10_000.0))
    yield "rotate", floats(ops.rotate(tensor(q), tensor(table))), definition.rotate(q, table)
    logits = definition.bf16(normal(8, 3, 5000) * fp32(4))
    yield "softmax", floats(ops.softmax(tensor(logits).float())), definition.softmax(logits)
    yield "log_softmax", floats(ops.log_softmax(tensor(logits).float())), definition.log_softmax(logits)
