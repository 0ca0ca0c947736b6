"""Tiny models of random weights that hear audio, with their processors; and what an engine gives requests with some."""

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.engine import images, multimodal
from vllm_batch_invariant.integration.layers import encoders

AUDIO, START, END = 4000, 4002, 4003
SPECIAL = {AUDIO: "<|audio_pad|>", START: "<|audio_start|>", END: "<|audio_end|>"}
"""Tokens of the models here."""
RATE, HOP = 16000, 160
"""Samples a second, and of a frame."""


def qwen3_asr() -> transformers.PretrainedConfig:
    """A tower with two heads of 64 and three convolutions: a second of sound is 13 tokens, which see eight seconds.
    Positions of the decoder have three rows, which are equal.
    """
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [12, 10, 10], "mrope_interleaved": True}
    text = multimodal.TEXT | {
        "model_type": "qwen3",
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_parameters": rope,
    }
    tower = {"encoder_layers": 2, "d_model": 128, "encoder_attention_heads": 2, "encoder_ffn_dim": 320}
    return transformers.Qwen3ASRConfig(
        architectures=["Qwen3ASRForConditionalGeneration"],
        text_config=text,
        audio_config=tower | {"output_dim": 512, "downsample_hidden_size": 24},
        audio_token_id=AUDIO,
        pad_token_id=0,
        eos_token_id=2,
        tie_word_embeddings=True,
    )


def save(config: transformers.PretrainedConfig, dtype: torch.dtype, folder: Path) -> torch.nn.Module:
    """A checkpoint with a tokenizer of words and a processor."""
    torch.manual_seed(0)
    made = transformers.Qwen3ASRForConditionalGeneration(config)
    with torch.no_grad():  # else audio would hardly change an answer
        for name, weight in made.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(weight, std=0.1)
            elif "language_model" not in name and weight.dim() > 1:
                weight.mul_(4)
    made = made.to(dtype)
    made.save_pretrained(folder)
    words = {SPECIAL.get(number, f"w{number}"): number for number in range(config.text_config.vocab_size)}
    named = {"audio_token": SPECIAL[AUDIO], "audio_bos_token": SPECIAL[START], "audio_eos_token": SPECIAL[END]}
    images.save_tokenizer(folder, words, list(SPECIAL.values()), {"extra_special_tokens": named})
    sound = {"feature_extractor_type": "Qwen3ASRFeatureExtractor", "min_length": 0, "feature_size": 128}
    (folder / "preprocessor_config.json").write_text(json.dumps(sound))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3ASRProcessor"}))
    return made


def sound(samples: int, seed: int) -> np.ndarray:
    """[samples] in fp32: tones that rise and fall, and noise."""
    rng, time = np.random.default_rng(seed), np.arange(samples) / RATE
    tones = sum(np.sin(2 * np.pi * (base + 300 * np.sin(3 * time)) * time) for base in rng.uniform(100, 3000, 3))
    return (0.2 * tones + 0.05 * rng.standard_normal(samples)).astype(np.float32)


def answers(llm: Any, requests: Sequence[dict[str, Any]], reset: str = "", preempted_after: int = 4) -> dict[str, Any]:
    """Send requests together, and wait for all of them; run by the driver.

    Args:
        requests: each with a ``prompt`` of tokens, ``sounds`` as (samples, seed), one for each token of an audio, and
            ``params``.
        reset: of :func:`tests.engine.images.answers_about`.
    """

    def items_of(request: dict[str, Any]) -> dict[str, Any]:
        sounds = [(sound(samples, seed), RATE) for samples, seed in request["sounds"]]
        return {"audio": sounds} if sounds else {}

    return images.answers_about(llm, requests, items_of, reset, preempted_after)


def frames(count: int, bins: int, seed: int) -> torch.Tensor:
    """[bins, count] of a log-mel spectrogram, as a processor hands them on."""
    return torch.randn(bins, count, generator=torch.Generator().manual_seed(seed))


def embeddings(llm: Any, lengths: Sequence[int], calls: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What an encoder gives for items; run by the driver.

    Args:
        lengths: frames of each.
        calls: which items each has.

    Returns:
        ``moved``: items that get other bits in a call with others than in one of their own; ``shapes`` and digests
        (``alone``) of what each gets in its own.
    """
    return llm.apply_model(partial(_embeddings, lengths, calls))[0]


def _embeddings(lengths: Sequence[int], calls: Sequence[Sequence[int]], model: torch.nn.Module) -> dict[str, Any]:
    bins = model.audio_tower.num_mel_bins
    given = [frames(count, bins, seed) for seed, count in enumerate(lengths)]

    def encode(call: Sequence[int]) -> Sequence[torch.Tensor]:
        features = torch.cat([given[item] for item in call], 1)
        counts = torch.tensor([lengths[item] for item in call])
        masks = [torch.ones(count) for count in counts]
        return model.embed_multimodal(
            input_audio_features=features, audio_feature_lengths=counts, feature_attention_mask=masks
        )

    with torch.inference_mode():
        alone = [encode([item])[0] for item in range(len(lengths))]
        moved = [
            f"{item} in {list(call)}"
            for call in calls
            for item, one in zip(call, encode(call), strict=True)
            if not torch.equal(one, alone[item])
        ]
    digests = [hashlib.sha256(one.contiguous().view(torch.uint8).numpy()).hexdigest() for one in alone]
    return {"moved": moved, "shapes": [list(one.shape) for one in alone], "alone": digests}


FAULTS = (
    "attention over the whole call",
    "splits by the longest sequence",
    "chunks filled to the longest of the call",
)


def with_fault(llm: Any, fault: str, method: str, *arguments: Any) -> Any:
    """What another function here gives while an encoder has a fault that lets items see their company."""
    with pytest.MonkeyPatch.context() as patch:
        if fault == FAULTS[2]:
            llm.apply_model(lambda model: patch.setattr(model.audio_tower, "forward", _encode_of(model.audio_tower)))
        elif fault:
            attend = images._attend_over_all if fault == FAULTS[0] else images._attend_by_the_longest
            patch.setattr(encoders, "attend", attend)
        return globals()[method](llm, *arguments)


def _encode_of(tower: Any) -> Any:
    """vLLM's."""
    return tower.forward.__wrapped__
