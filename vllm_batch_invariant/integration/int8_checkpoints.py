"""Which checkpoints of int8 weights and activations start, by what vLLM's configuration says of one."""

from typing import Any


def covers(model: Any, config: Any) -> bool:
    """Whether every quantised layer of a checkpoint is one of int8 that the mode computes (:mod:`.layers.int8`).

    Args:
        model: vLLM's configuration of a model.
        config: vLLM's configuration of its quantisation; None if there is none.
    """
    if model.quantization != "compressed-tensors" or config is None or model.is_moe:
        return False
    beside = [getattr(config, name, None) for name in ("transform_config", "kv_cache_scheme", "sparsity_scheme_map")]
    beside += [getattr(config, "online_quantization_config", None), getattr(model, "quantization_config", None)]
    return not any(beside) and all(map(_is_int8, config.target_scheme_map.values()))


def _is_int8(target: Any) -> bool:
    """Of layers of a checkpoint by compressed-tensors."""
    weights, given = target["weights"], target.get("input_activations")
    if weights is None or given is None or target.get("output_activations") is not None:
        return False
    if any((_word(of.type), of.num_bits, of.symmetric) != ("int", 8, True) for of in (weights, given)):
        return False
    shared = (bool(given.dynamic), _word(given.strategy))
    is_known = _word(weights.strategy) in ("channel", "tensor") and shared in ((True, "token"), (False, "tensor"))
    return is_known and not weights.dynamic and _word(target.get("format")) in ("int-quantized", "None")


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))
