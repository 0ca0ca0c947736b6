"""Puts the engine's operations into a Hugging Face model."""

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import NotCovered
from . import adapters, support


def patch(
    model: torch.nn.Module,
    quantization: str | None = None,
    unquantised: Sequence[str] = (),
    image_processor: Any = None,
) -> torch.nn.Module:
    """Give a Llama, Qwen2, Qwen3 or Qwen3-MoE, and on a CPU an OLMoE, Qwen3.5 (as text), Nemotron-H, LFM2 (without
    experts), Qwen2.5-VL or Qwen3-VL, the forward pass of vLLM under ``VLLM_BATCH_INVARIANT=1``, bit for bit, with
    gradients.

    The model keeps its parameters and its call: ``model(input_ids, attention_mask=...)`` takes batches that are padded
    on either side, or packed by position_ids, cu_seq_lens_q or seq_idx, and a token's logits depend on the tokens of
    its sequence up to itself. Of a real token they have the bits that vLLM has on the same device with the same
    versions. There is no KV cache: ``use_cache`` is off.

    With a ``quantization`` linear layers, and by blocks experts, quantise their weights, which stay in the model's
    dtype, and what they are given to FP8 in every forward pass, by the functions of an engine that multiplies FP8 with
    FP8. Gradients are those of the numbers that the codes stand for, handed on as if nothing had been quantised
    (straight through).

    LoRA adapters that PEFT has put around linear layers of attention and of dense MLPs, and around experts, have the
    bits of an engine that serves their files (``--enable-lora``, and of experts ``--enable-mixed-moe-lora-format``).
    Disabled they add nothing, as in a request without an adapter; merged, the weights are what they then are.

    A model of images takes ``pixel_values`` and ``image_grid_thw`` as Transformers has them. Pixels are normalised
    again as the engine does it, for which ``image_processor`` is asked.

    Args:
        model: that is neither sharded nor quantised; or PEFT's around one.
        quantization: None, "fp8_per_block", "fp8_per_channel" or "fp8_per_tensor": what the engine was started with as
            ``--quantization``, or the like of its checkpoint, where activations have no given scale.
        unquantised: names of linear layers that are not in FP8 there (``modules_to_not_convert``, ``ignore``). The
            output head and embeddings never are.
        image_processor: of Transformers', which makes the pixels of a model that sees images.

    Returns:
        The same model.

    Raises:
        NotCovered: another architecture, or something of its configuration or its modules that the engine's operations
            do not reproduce; another quantisation.
    """
    support.check_packages()
    family = support.check(model)
    from . import decoder, fp8, pixels

    decoder_model = adapters.unwrapped(model)
    if quantization is not None and next(adapters.layers_of(decoder_model), None):
        raise NotCovered(
            f"adapters in a trainer with quantization {quantization!r}",
            "no engine has both",
            "train all weights, or without quantization",
        )
    if family.tower:
        if quantization is not None:
            raise NotCovered(
                f"quantization {quantization!r} in a trainer of images", "no engine was compared", "leave it out"
            )
        decoder_model.model.pixel_norm = None if image_processor is None else pixels.PixelNorm(image_processor)
    fp8.install(decoder_model, quantization, unquantised)
    decoder.install(decoder_model, family)
    return model
