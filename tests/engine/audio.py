"""Tiny models of random weights that hear audio, with their processors; and what an engine gives requests with some."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from transformers.models.whisper.modeling_whisper import sinusoids

from tests.engine import images, mistral_form, multimodal, nemotron_vl
from vllm_batch_invariant.integration.layers import attention, convolution, encoders
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.ops.attention import AttentionReduction, PagedAttention, attend
from vllm_batch_invariant.verify.harness.drive import describe, drive, finished
from vllm_batch_invariant.verify.harness.worker_main import preemptions

AUDIO, START, END = 4000, 4002, 4003
SPECIAL = {AUDIO: "<|audio_pad|>", START: "<|audio_start|>", END: "<|audio_end|>"}
"""Tokens of the models here."""
OF_QWEN2_AUDIO = {AUDIO: "<|AUDIO|>", START: "<|audio_bos|>", END: "<|audio_eos|>"}
"""What they are called where vLLM knows no other names."""
OF_GLM_ASR = {AUDIO: "<|pad|>", START: "<|begin_of_audio|>", END: "<|end_of_audio|>"}
"""The same of GLM-ASR."""
OF_GEMMA_4 = 4004
"""What stands for a sound in Gemma 4's prompts."""
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


def qwen2_audio() -> transformers.PretrainedConfig:
    """A tower with two heads of 64 and two convolutions: half a minute is 1500 rows, of which those of an item see each
    other; two rows are a token.
    """
    tower = {"encoder_layers": 2, "d_model": 128, "encoder_attention_heads": 2, "encoder_ffn_dim": 320}
    return transformers.Qwen2AudioConfig(
        architectures=["Qwen2AudioForConditionalGeneration"],
        text_config=multimodal.TEXT | {"model_type": "qwen2", "tie_word_embeddings": False},
        audio_config=tower | {"num_mel_bins": 128, "activation_function": "gelu"},
        audio_token_index=AUDIO,
    )


GLM_ASR_CHUNK = 2 * RATE
"""Samples of a chunk of GLM-ASR's, which the last one of a sound is filled to."""
GLM_ASR_LONGEST = 40
"""Seconds of a sound that GLM-ASR hears: what is behind them is cut off."""


def glm_asr() -> transformers.PretrainedConfig:
    """A tower with two heads of 64, of which a half is turned, and two convolutions: a chunk is 100 rows, which see
    each other; four rows are a token.
    """
    tower = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512}
    return transformers.GlmAsrConfig(
        architectures=["GlmAsrForConditionalGeneration"],
        text_config=multimodal.TEXT | {"model_type": "llama", "head_dim": 64, "tie_word_embeddings": False},
        audio_config=tower,
        audio_token_id=AUDIO,
        tie_word_embeddings=False,
    )


def glm_asr_features(folder: str, wave: np.ndarray, **ignored: Any) -> dict[str, torch.Tensor]:
    """Of the chunks of a sound [chunks, bins, frames] of the spectrogram, and [chunks, frames] whether one is heard."""
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    wave = wave[: GLM_ASR_LONGEST * RATE]
    chunks = [wave[start : start + GLM_ASR_CHUNK] for start in range(0, len(wave), GLM_ASR_CHUNK)]
    form = {"padding": "max_length", "return_attention_mask": True, "return_tensors": "pt"}
    return extractor(chunks, sampling_rate=RATE, **form)


def whisper() -> transformers.PretrainedConfig:
    """A tower with two heads of 64, two convolutions and 300 rows for six seconds, and a decoder that sees them."""
    half = {"layers": 2, "attention_heads": 2, "ffn_dim": 320}
    sizes = {f"{of}_{name}": size for of in ("encoder", "decoder") for name, size in half.items()}
    return transformers.WhisperConfig(
        architectures=["WhisperForConditionalGeneration"],
        **sizes,
        vocab_size=4096,
        d_model=128,
        max_source_positions=300,
        max_target_positions=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=START,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )


def voxtral() -> transformers.PretrainedConfig:
    """Whisper's tower with two heads of 64 and 100 rows for two seconds, of which four are a token."""
    tower = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512}
    return transformers.VoxtralConfig(
        text_config=multimodal.TEXT
        | {"model_type": "llama", "head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        audio_config=tower | {"max_source_positions": 100},
        audio_token_id=OF_VOXTRAL["[AUDIO]"],
        tie_word_embeddings=False,
    )


OF_VOXTRAL = {"[AUDIO]": 24, "[BEGIN_AUDIO]": 25}
"""Tokens of Voxtral's, beside those that mistral-common gives numbers to."""
TOKEN = 1280
"""Samples of what a token of Voxtral's stands for."""
_CHUNK = 25
"""Tokens of a chunk, which the last one of a sound is filled to."""


def voxtral_tokens(samples: int) -> list[int]:
    """What stands for a sound in a prompt, as mistral-common writes it."""
    chunks = -(-samples // (_CHUNK * TOKEN))
    return [OF_VOXTRAL["[BEGIN_AUDIO]"], *[OF_VOXTRAL["[AUDIO]"]] * (_CHUNK * chunks)]


_IN_MISTRALS_NAMES = (
    (r"audio_tower\.conv(\d)\.", lambda found: f"whisper_encoder.conv_layers.{int(found[1]) - 1}."),
    (r"audio_tower\.layers\.", "whisper_encoder.transformer.layers."),
    (r"audio_tower\.layer_norm\.", "whisper_encoder.transformer.norm."),
    (r"multi_modal_projector\.linear_(\d)\.", lambda found: f"audio_language_projection.{2 * int(found[1]) - 2}."),
    (r"self_attn_layer_norm", "attention_norm"),
    (r"final_layer_norm", "ffn_norm"),
    (r"self_attn\.out_proj", "attention.wo"),
    (r"fc(\d)\.", r"feed_forward.w\1."),
    *mistral_form.OF_TEXT,
)


def filled(samples: int, seed: int) -> np.ndarray:
    """A sound with silence behind it up to whole chunks, as mistral-common hands it on."""
    return np.pad(sound(samples, seed), (0, -samples % (_CHUNK * TOKEN)))


def voxtral_features(wave: np.ndarray, **ignored: Any) -> dict[str, torch.Tensor]:
    """[chunks, bins, frames] of the log-mel spectrogram of a sound without silence behind it, in float64."""
    from mistral_common.audio import mel_filter_bank

    wave = torch.from_numpy(np.pad(wave, (0, -len(wave) % (_CHUNK * TOKEN)))).double()
    window = torch.hann_window(400, dtype=torch.float64)
    parts = torch.stft(wave, 400, HOP, window=window, return_complex=True)[..., :-1].abs() ** 2
    filters = mel_filter_bank(201, voxtral().audio_config.num_mel_bins, 0.0, 8000.0, RATE)
    spectrum = (torch.from_numpy(filters).double().T @ parts).clamp(min=1e-10).log10()
    spectrum = (torch.maximum(spectrum, spectrum.max() - 8.0) + 4.0) / 4.0
    return {"input_features": torch.stack(spectrum.split(_CHUNK * TOKEN // HOP, -1))}


def _save_voxtral(config: Any, dtype: torch.dtype, folder: Path) -> torch.nn.Module:
    """A checkpoint in Mistral's form, with a tokenizer of mistral-common's. Returns Transformers' model."""
    torch.manual_seed(0)
    made = transformers.VoxtralForConditionalGeneration(config)
    tower, text = config.audio_config, config.text_config
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith("k_proj.bias"):
                weight.zero_()
            elif name.endswith("bias"):
                torch.nn.init.normal_(weight, std=0.1)
            elif ("audio_tower" in name or "projector" in name) and weight.dim() > 1:
                weight.mul_(4)
        places = sinusoids(tower.max_source_positions, tower.hidden_size)
        made.model.audio_tower.embed_positions.weight.copy_(places)
    made = made.to(dtype)
    tensors = {}
    for name, tensor in made.state_dict().items():
        is_text = "language_model" in name
        written = mistral_form.renamed(name, _IN_MISTRALS_NAMES)
        if name.endswith(("embed_positions.weight", "attention.wk.bias", "k_proj.bias")):
            continue
        if is_text:
            tensor = mistral_form.turned(written, tensor, text)
        if (not is_text and "lm_head" not in name) or written.startswith("tok_embeddings"):
            written = f"mm_whisper_embeddings.{written}"
        tensors[written] = tensor.contiguous()
    save_file(tensors, folder / "consolidated.safetensors")
    spectrum = {"num_mel_bins": tower.num_mel_bins, "window_size": 400, "hop_length": HOP}
    encoder = {
        "dim": tower.hidden_size, "n_layers": tower.num_hidden_layers, "n_heads": tower.num_attention_heads,
        "hidden_dim": tower.intermediate_size, "head_dim": 64, "vocab_size": text.vocab_size,
        "max_source_positions": tower.max_source_positions, "audio_encoding_args": spectrum | {"sampling_rate": RATE},
    }  # fmt: skip
    whisper_args = {"encoder_args": encoder, "downsample_args": {"downsample_factor": 4}}
    params = mistral_form.params_of(text) | {"multimodal": {"whisper_model_args": whisper_args}}
    (folder / "params.json").write_text(json.dumps(params))
    heard = {"sampling_rate": RATE, "frame_rate": RATE / TOKEN, "chunk_length_s": _CHUNK * TOKEN / RATE}
    special = {rank: token for token, rank in OF_VOXTRAL.items()} | {34: "[TRANSCRIBE]"}
    mistral_form.save_tekken(folder, text.vocab_size, special, audio=heard | {"audio_encoding_config": spectrum})
    return made


MODELS: dict[str, Any] = {
    "glmasr": transformers.GlmAsrForConditionalGeneration,
    "qwen2_audio": transformers.Qwen2AudioForConditionalGeneration,
    "qwen3_asr": transformers.Qwen3ASRForConditionalGeneration,
    "whisper": transformers.WhisperForConditionalGeneration,
}
"""Classes of Transformers', by the type of a configuration."""
OF_TRANSCRIPTS = (
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|transcribe|>",
    "<|translate|>",
    "<|notimestamps|>",
    "<|prev|>",
)
"""Tokens of Whisper's prompts, the first in the place of :data:`START`."""
FIRST_TIME = 2000
"""The token of the time 0, behind which all are times."""


def save(config: transformers.PretrainedConfig, dtype: torch.dtype, folder: Path) -> torch.nn.Module:
    """A checkpoint with a tokenizer of words and a processor."""
    if config.model_type == "voxtral":
        return _save_voxtral(config, dtype, folder)
    if config.model_type in ("gemma4", "gemma4_unified"):
        return images.save(config, dtype, folder)
    if config.model_type == "nemotron_h_omni":
        return nemotron_vl.save(config, dtype, folder)
    torch.manual_seed(0)
    made = MODELS[config.model_type](config)
    with torch.no_grad():  # else audio would hardly change an answer
        for name, weight in made.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(weight, std=0.1)
            elif not name.startswith(("model.language_model", "model.decoder.embed", "lm_head")) and weight.dim() > 1:
                weight.mul_(4)
    made = made.to(dtype)
    made.save_pretrained(folder)
    if config.model_type in ("qwen2_audio", "glmasr"):  # as published: Transformers writes a name twice
        file = folder / "model.safetensors"
        tensors = {name.replace(".model.model.", ".model."): one.clone() for name, one in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    size, named = config.get_text_config().vocab_size, {}
    if config.model_type == "whisper":
        special = dict(enumerate(OF_TRANSCRIPTS, START)) | {FIRST_TIME: "<|0.00|>"}
        sound = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": config.num_mel_bins}
        sound["chunk_length"] = 2 * config.max_source_positions * HOP // RATE
    else:
        special = {"qwen2_audio": OF_QWEN2_AUDIO, "glmasr": OF_GLM_ASR}.get(config.model_type, SPECIAL)
        named = {"audio_token": special[AUDIO], "audio_bos_token": special[START], "audio_eos_token": special[END]}
        sound = {"feature_extractor_type": "Qwen3ASRFeatureExtractor", "min_length": 0, "feature_size": 128}
        if config.model_type == "qwen2_audio":
            sound = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128}
        elif config.model_type == "glmasr":
            sound = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128}
            sound["chunk_length"] = GLM_ASR_CHUNK // RATE
    words = {special.get(number, f"w{number}"): number for number in range(size)}
    template = images.chat_template(audio="".join(special.get(token, "") for token in (START, AUDIO, END)))
    settings = {"extra_special_tokens": named, "chat_template": template}
    images.save_tokenizer(folder, words, list(special.values()), settings)
    (folder / "preprocessor_config.json").write_text(json.dumps(sound))
    processor = type(made).__name__.replace("ForConditionalGeneration", "Processor")
    of_processor = {"processor_class": processor}
    if config.model_type == "glmasr":
        of_processor["max_audio_len"] = GLM_ASR_LONGEST
    (folder / "processor_config.json").write_text(json.dumps(of_processor))
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

    return images.answers_about(llm, requests, partial(prompt_of, llm), reset, preempted_after)


def prompt_of(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """A request's tokens and sounds, as vLLM takes them."""
    sounds = [(sound(samples, seed), RATE) for samples, seed in request["sounds"]]
    prompt, data = {"prompt_token_ids": request["prompt"]}, {"multi_modal_data": {"audio": sounds}} if sounds else {}
    if not llm.llm_engine.model_config.is_encoder_decoder:
        return prompt | data
    return {"encoder_prompt": {"prompt": ""} | data, "decoder_prompt": prompt}


def frames(count: int, bins: int, seed: int) -> torch.Tensor:
    """[bins, count] of a log-mel spectrogram, as a processor hands them on."""
    return torch.randn(bins, count, generator=torch.Generator().manual_seed(seed))


def embeddings(llm: Any, lengths: Sequence[int], calls: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What an encoder gives for items; run by the driver.

    Args:
        lengths: frames of each, or of Voxtral samples.
        calls: which items each has.

    Returns:
        ``moved``: items that get other bits in a call with others than in one of their own; ``shapes`` and digests
        (``alone``) of what each gets in its own.
    """
    return llm.apply_model(partial(_embeddings, lengths, calls))[0]


def _embeddings(lengths: Sequence[int], calls: Sequence[Sequence[int]], model: torch.nn.Module) -> dict[str, Any]:
    if hasattr(model, "whisper_encoder"):
        device = next(model.parameters()).device
        waves = [torch.from_numpy(filled(count, seed)).to(device) for seed, count in enumerate(lengths)]
        return _compared(
            lambda call: model.embed_multimodal(audio_arrays=[waves[item] for item in call]), lengths, calls
        )
    if hasattr(model, "sound_encoder"):
        return _compared(partial(_encode_filled, model, lengths), lengths, calls)
    tower: Any = model.audio_tower if hasattr(model, "audio_tower") else model.model.encoder
    bins = getattr(tower, "num_mel_bins", 128)
    if tower is None:
        tower = model.embed_audio
        bins = tower.embedding_projection.weight.shape[1]
    device = next(tower.parameters()).device
    given = [frames(count, bins, seed).to(device) for seed, count in enumerate(lengths)]

    def encode(call: Sequence[int]) -> Sequence[torch.Tensor]:
        if hasattr(model, "embed_audio"):  # stacked where all are as long, as vLLM does
            rows = [(2 * given[item].T - 4).contiguous() for item in call]
            masks = [torch.ones(len(one), dtype=torch.bool) for one in rows]
            if len({len(one) for one in rows}) == 1:
                rows, masks = torch.stack(rows), torch.stack(masks)
            return model.embed_multimodal(input_features_padded=rows, input_features_mask=masks)
        if hasattr(tower, "rotary_emb"):  # in chunks, the last one filled
            most = GLM_ASR_CHUNK // HOP
            counts = [-(-lengths[item] // most) for item in call]
            padded = [
                torch.nn.functional.pad(given[item], (0, count * most - lengths[item]), value=-0.5)
                for item, count in zip(call, counts, strict=True)
            ]
            heard = [
                torch.arange(count * most).view(count, most) < lengths[item]
                for item, count in zip(call, counts, strict=True)
            ]
            return model.embed_multimodal(
                input_features=torch.cat([one.unflatten(1, (-1, most)).transpose(0, 1) for one in padded]),
                feature_attention_mask=torch.cat(heard).long().to(device),
                chunk_counts=torch.tensor(counts),
            )
        if hasattr(tower, "avg_pooler"):  # filled to the length that all have
            most = 2 * tower.max_source_positions
            padded = [torch.nn.functional.pad(given[item], (0, most - lengths[item])) for item in call]
            mask = torch.arange(most) < torch.tensor([lengths[item] for item in call])[:, None]
            return model.embed_multimodal(input_features=torch.stack(padded), feature_attention_mask=mask.long())
        if not hasattr(model, "audio_tower"):  # silence behind a sound is encoded, too
            most = 2 * tower.max_source_positions
            padded = [torch.nn.functional.pad(given[item], (0, most - lengths[item]), value=-0.5) for item in call]
            return model.embed_multimodal(input_features=torch.stack(padded))
        counts = torch.tensor([lengths[item] for item in call])
        return model.embed_multimodal(
            input_audio_features=torch.cat([given[item] for item in call], 1),
            audio_feature_lengths=counts,
            feature_attention_mask=[torch.ones(count) for count in counts],
        )

    return _compared(encode, lengths, calls)


def _encode_filled(model: Any, lengths: Sequence[int], call: Sequence[int]) -> Sequence[torch.Tensor]:
    """What Nemotron's encoder gives for items of one clip each, filled to the longest of them."""
    bins, device = model.sound_encoder.config.num_mel_bins, next(model.sound_encoder.parameters()).device
    given = [frames(lengths[item], bins, item).T.to(device) for item in call]
    return model.embed_multimodal(
        input_audio_features=pad_sequence(given, batch_first=True),
        feature_attention_mask=pad_sequence([one.new_ones(len(one), dtype=torch.bool) for one in given], True),
        audio_num_clips=torch.ones(len(call), dtype=torch.int64),
    )


def _compared(
    encode: Callable[[Sequence[int]], Sequence[torch.Tensor]], lengths: Sequence[int], calls: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """:func:`embeddings`, of a function that encodes items in one call."""
    with torch.inference_mode():
        alone = [encode([item])[0] for item in range(len(lengths))]
        moved = [
            f"{item} in {list(call)}"
            for call in calls
            for item, one in zip(call, encode(call), strict=True)
            if not torch.equal(one, alone[item])
        ]
    digests = [hashlib.sha256(one.contiguous().view(torch.uint8).cpu().numpy()).hexdigest() for one in alone]
    return {"moved": moved, "shapes": [list(one.shape) for one in alone], "alone": digests}


def answers_beside_new(llm: Any, first: Sequence[dict[str, Any]], later: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What requests get of which the first are preempted, and come back in the step in which the others begin; run by
    the driver.

    Returns:
        ``given`` in the order of the requests, and ``preemptions``.
    """
    from vllm import SamplingParams

    engine, before, steps = llm.llm_engine, preemptions(llm), list[list[Any]]()

    def add(requests: Sequence[dict[str, Any]], number: int) -> None:
        for place, request in enumerate(requests, number):
            engine.add_request(str(place), prompt_of(llm, request), SamplingParams(**request["params"]))

    add(first, 0)
    for outputs in drive(engine):
        steps.append(outputs)
        if len(steps) == 2:
            engine.reset_prefix_cache(reset_running_requests=True)
            add(later, len(first))
    done = finished(steps)
    given = [describe(done[str(number)]) for number in range(len(first) + len(later))]
    return {"given": given, "preemptions": preemptions(llm) - before}


OF_CALLS = "attention over the whole call"
OF_LENGTHS = "splits by the longest sequence"
OF_CHUNKS = "chunks filled to the longest of the call"
OF_MASKS = "rows behind a sound are not masked"
OF_CONVOLUTIONS = "convolutions are PyTorch's"
OF_ORDER = "outputs of an encoder in the order of the schedule"
OF_REQUESTS = "splits of cross attention by the number of requests"


def with_fault(llm: Any, fault: str, method: str, *arguments: Any) -> Any:
    """What another function here gives while an engine has a fault that lets items or requests see their company."""
    runner = patch_points.MODEL_RUNNER.get()
    with pytest.MonkeyPatch.context() as patch:
        if fault == OF_CALLS:
            patch.setattr(encoders, "attend", images._attend_over_all)
        elif fault == OF_LENGTHS:
            patch.setattr(encoders, "attend", images._attend_by_the_longest)
        elif fault == images.OF_ITEMS:
            llm.apply_model(partial(images._scale_by_items, patch))
        elif fault == images.OF_NUMBER:
            patch.setattr(encoders, "attend", images._attend_by_number)
        elif fault == OF_CHUNKS:
            llm.apply_model(lambda model: patch.setattr(model.audio_tower, "forward", _encode_of(model.audio_tower)))
        elif fault == OF_MASKS:
            llm.apply_model(lambda model: _drop_masks(model.audio_tower.subsample_conv_projection.layer1, patch))
        elif fault == OF_CONVOLUTIONS:
            patch.setattr(convolution._Unfolded, "_conv_forward", _of_pytorch)
        elif fault == OF_ORDER:
            patch.setattr(runner, "_execute_mm_encoder", runner._execute_mm_encoder.__wrapped__)
        elif fault == OF_REQUESTS:
            patch.setattr(attention, "attend", _attend_by_requests)
        return globals()[method](llm, *arguments)


def _encode_of(tower: Any) -> Any:
    """vLLM's."""
    return tower.forward.__wrapped__


def _drop_masks(layer: Any, patch: pytest.MonkeyPatch) -> None:
    """Have a layer of a tower see what stands behind a sound."""
    encode = layer.forward
    patch.setitem(vars(layer), "forward", lambda rows, mask: (encode(rows)[0], mask[:, ::2]))


def _of_pytorch(self: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    of = torch.nn.functional.conv1d if weight.dim() == 3 else torch.nn.functional.conv2d
    return of(x, weight, bias, self.stride, self.padding, groups=self.groups)


def _attend_by_requests(call: PagedAttention, *others: Any) -> torch.Tensor:
    """A plan that was made before has the splits of its own: there queries are rounded."""
    if not call.spec.causal and len(call.seq_lens) > 1:
        is_planned = others[-1] is not None
        rounded = {"query": call.query.to(torch.float8_e5m2).to(call.query.dtype)}
        call = replace(call, **rounded if is_planned else {"reduction": AttentionReduction(32, key_tile=32)})
    return attend(call, *others)
