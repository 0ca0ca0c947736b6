"""Puts the engine's operations into a Hugging Face model."""

import torch

from . import support


def patch(model: torch.nn.Module) -> torch.nn.Module:
    """Give a Llama, Qwen2, Qwen3 or Qwen3-MoE the forward pass of vLLM under ``VLLM_BATCH_INVARIANT=1``, bit for bit,
    with gradients.

    The model keeps its parameters and its call: ``model(input_ids, attention_mask=...)`` takes batches that are padded
    on either side, or packed by position_ids, and a token's logits depend on the tokens of its sequence up to itself.
    Of a real token they have the bits that vLLM has on the same device with the same versions (on a CPU: with the same
    ``torch.get_num_threads()``). There is no KV cache: ``use_cache`` is off.

    Returns:
        The same model.

    Raises:
        NotCovered: another architecture, or something of its configuration or its modules that the engine's operations
            do not reproduce.
    """
    support.check_packages()
    family = support.check(model)
    from . import decoder

    decoder.install(model, family)
    return model
