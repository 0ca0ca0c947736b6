"""A small Nemotron Nano VL of random weights, and one like Nemotron 3 Nano Omni. vLLM has a table of the sizes of their
encoder, which a hook changes where vLLM's module is imported: the classes are vLLM's.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers.audio_utils import mel_filter_bank

from tests.engine import configurations, images, kept_states, multimodal, test_mamba

PATCH = 16
SIDE = 64
"""Pixels of a patch, and of a square, of which an image of Nemotron Nano VL has up to twelve and one of all of it."""
_NAME = "vit_small_patch16_224"
_LAYERS, _HEADS, _SIZE, _INNER = 3, 2, 160, 320
_CLASSES, _REGISTERS, _MOST = 3, 5, 128
_HOOK = multimodal.changing(
    "vllm.transformers_utils.configs.radio",
    f"""\
module.VIT_TIMM_DIM_BY_NAME["{_NAME}"] = {_SIZE}, {_LAYERS}, {_HEADS}, {_INNER}
""",
)
_TEXT = kept_states.NEMOTRON_H | test_mamba.SMALL_STATES["Nemotron-H"] | {"vocab_size": multimodal.TEXT["vocab_size"]}
_SOUND = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "projection_hidden_size"), 64),
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_mel_bins": 80,
    "subsampling_factor": 8,
    "subsampling_conv_kernel_size": 3,
    "subsampling_conv_stride": 2,
    "subsampling_conv_channels": 16,
    "projection_bias": False,
    "sampling_rate": 16000,
    "convolution_bias": False,
}
"""Of an encoder of sounds that Nemotron 3 Nano Omni has: 80 ms are a row."""
SOUND, _OF_SOUND = 4004, (4005, 4006)
"""What stands for a sound in a prompt, and for a row of one; and what a processor writes around them."""
_WORDS = {images.IMAGE: "<image>", images.VIDEO: "<video>", images.START: "<img>", images.END: "</img>"}
_WORDS |= {SOUND: "<so_embedding>"} | dict(zip(_OF_SOUND, ("<so_start>", "<so_end>"), strict=True))
SPECIAL = (*_WORDS,)


def python_path(folder: Path) -> list[str]:
    """A folder that has a process make the encoder smaller."""
    (folder / "radio").mkdir(exist_ok=True)
    (folder / "radio" / "sitecustomize.py").write_text(_HOOK)
    return [str(folder / "radio")]


def nano_vl() -> transformers.PretrainedConfig:
    """RADIO with two heads of 80, positions interpolated between those of 8 x 8 patches, and eight rows in front of
    those of a square of 4 x 4 patches, of which four are a token; and a decoder with state spaces.
    """
    return _config("NemotronH_Nano_VL_V2", _TEXT)


def omni() -> transformers.PretrainedConfig:
    """The same encoder, for images of any size and pairs of frames, and a decoder that has experts, too."""
    return _config("NemotronH_Nano_Omni_Reasoning_V3", _TEXT | test_mamba.EXPERTS["Nemotron-H"])


def hearing() -> transformers.PretrainedConfig:
    """The same with weights of its encoder of sounds."""
    config = omni()
    config.audio_config = transformers.ParakeetEncoderConfig(**_SOUND, attention_bias=False, scale_input=False)
    return config


def _config(architecture: str, text: dict[str, Any]) -> transformers.PretrainedConfig:
    vision = {"hidden_size": _SIZE, "num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS, "image_size": SIDE}
    vision |= {"mlp_ratio": _INNER / _SIZE, "max_img_size": _MOST, "num_cls_tokens": _CLASSES, "patch_size": PATCH}
    vision |= {"num_registers": _REGISTERS, "video_temporal_patch_size": 2}
    return transformers.NemotronH_Omni_Reasoning_V3_Config(
        architectures=[architecture],
        vision_config=vision,
        text_config=text,
        force_image_size=SIDE,
        projector_hidden_size=320,
        vision_hidden_size=_SIZE,
        image_token_id=images.IMAGE,
        video_token_id=images.VIDEO,
        tie_word_embeddings=False,
    )


class Reference(transformers.NemotronH_Omni_Reasoning_V3):
    """Transformers' model. What the encoder gives is rounded to bf16, as vLLM does for any dtype."""

    def forward(
        self,
        input_ids: torch.Tensor,
        items: list[torch.Tensor] = [],  # noqa: B006
        sounds: list[torch.Tensor] = [],  # noqa: B006
        **named: Any,
    ) -> Any:
        """Of tokens, and of the pictures that stand in them, of one size each: [pictures, channels, height, width], and
        of clips of sounds: [frames, bins].
        """
        embedded = self.get_input_embeddings()(input_ids)
        made = {images.IMAGE: [self.rows(one) for one in items], SOUND: [self.rows_of_clip(one) for one in sounds]}
        for token, rows in made.items():
            if rows:
                embedded = embedded.masked_scatter((input_ids == token)[..., None], torch.cat(rows).to(embedded.dtype))
        return self.language_model(inputs_embeds=embedded)

    def rows_of_clip(self, clip: torch.Tensor) -> torch.Tensor:
        """[tokens, size] of [frames, bins]."""
        features = self.audio_tower(clip[None]).last_hidden_state[0]
        return self.embed_audio(features.to(torch.bfloat16).to(features.dtype))

    def rows(self, pixels: torch.Tensor) -> torch.Tensor:
        """[tokens, size] of [pictures, channels, height, width]: of a picture, or of as many as a tubelet has."""
        grid = [side // PATCH for side in pixels.shape[2:]]
        features = self.vision_model(pixels).features
        rounded = features.to(torch.bfloat16).to(features.dtype)
        return self.project_vision_features(rounded, *grid).flatten(0, 1)


def in_squares(pictures: list[np.ndarray]) -> dict[str, Any]:
    """Squares of pictures, row by row, and behind those of one that has several a square of all of it; pictures of a
    film have one each.
    """
    found = []
    for one in pictures:
        pixels, squares = images.squares_of(one, SIDE)
        found.append(_scaled(squares))
        if len(squares) > len(pixels):
            least = F.interpolate(pixels.double(), size=(SIDE, SIDE), mode="bicubic", antialias=True)
            found.append(_scaled(least))
    return {"items": found}


def whole(pictures: list[np.ndarray]) -> dict[str, Any]:
    """Pictures as they are; those of a film by two."""
    found = [_scaled(torch.from_numpy(one).permute(0, 3, 1, 2)) for one in pictures]
    return {"items": [one.unflatten(0, (-1, 2)).flatten(1, 2) if len(one) > 1 else one for one in found]}


def _scaled(pixels: torch.Tensor) -> torch.Tensor:
    """In the checkpoint's dtype, as vLLM's processor has them."""
    mean, std = (torch.tensor(one).double()[:, None, None] for one in images.NORM.values())
    return ((pixels.double() / 255 - mean) / std).bfloat16().double()


def clips(wave: np.ndarray, **ignored: Any) -> list[torch.Tensor]:
    """[frames, bins] of the log-mel spectrogram of each half a minute of a sound, in float64; as long as 0.1 s, with
    silence behind it. In the checkpoint's dtype, as vLLM hands it to the encoder.
    """
    rate = _SOUND["sampling_rate"]
    filters = mel_filter_bank(257, _SOUND["num_mel_bins"], 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
    window, found = torch.hann_window(400, periodic=False, dtype=torch.float64), []
    for clip in torch.from_numpy(wave).double().split(30 * rate):
        samples = F.pad(clip, (0, max(0, rate // 10 - len(clip))))
        samples = torch.cat([samples[:1], samples[1:] - 0.97 * samples[:-1]])
        parts = torch.stft(samples, 512, 160, 400, window, pad_mode="constant", return_complex=True).abs() ** 2
        spectrum = (torch.from_numpy(filters).T @ parts + 2**-24).log().T[: len(samples) // 160]
        spectrum = (spectrum - spectrum.mean(0)) / (spectrum.std(0) + 1e-5)
        found.append(spectrum.bfloat16().double())
    return found


def save(config: transformers.PretrainedConfig, dtype: torch.dtype, folder: Path) -> torch.nn.Module:
    """A checkpoint with a tokenizer of words. Returns the model that it is of."""
    torch.manual_seed(0)
    [architecture], made = config.architectures, Reference(config)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith("A_log"):  # gates near 1: a state lasts
                weight.uniform_(0.002, 0.05).log_()
            elif name.endswith("dt_bias"):
                weight.zero_()
            elif name.endswith("bias"):
                weight.normal_(0, 0.1)
            elif name.endswith(("position_embedding", "cls_register_token")):
                weight.normal_(0, 0.3)
            elif weight.dim() > 1:
                of_text = 0.3 if "conv1d" in name else 0.16 if "q_proj" in name or "k_proj" in name else 0.08
                weight.normal_(0, of_text if "language_model" in name else weight[0].numel() ** -0.5)
        for name, bias in made.named_buffers():
            if name.endswith("e_score_correction_bias"):  # which two are chosen: else rounding decides near a tie
                bias.copy_(torch.arange(len(bias)))
            elif name.endswith("running_mean"):
                bias.normal_(0, 0.3)
            elif name.endswith("running_var"):
                bias.uniform_(0.5, 1.5)
    made = made.to(dtype)
    made.save_pretrained(folder)
    file, projector = folder / "model.safetensors", "multi_modal_projector."
    names = {f"{projector}layer_norm": "mlp1.0", f"{projector}linear_1": "mlp1.1", f"{projector}linear_2": "mlp1.3"}
    names |= {"audio_tower.": "sound_encoder.encoder.", "embed_audio.layer_": "sound_projection."}
    names |= {f"embed_audio.linear_{number}": f"sound_projection.linear{number}" for number in (1, 2)}
    tensors = {images.renamed(name, names): tensor for name, tensor in load_file(file).items()}  # as published
    save_file(tensors, file, metadata={"format": "pt"})
    text = config.text_config.to_dict()
    teachers = [{"name": name, "use_summary": True} for name in ("siglip2", "dino", "sam")]
    args = {"model": _NAME, "cpe_max_size": _MOST, "register_multiple": 8, "teachers": teachers}
    args["cls_token_per_teacher"] = True
    vision: dict[str, Any] = {"args": args, "preferred_resolution": [SIDE, SIDE], "patch_size": PATCH}
    if "Omni" in architecture:
        args |= {"min_num_patches": 4, "max_num_patches": 1024}
        vision |= {"video_temporal_patch_size": 2, "separate_video_embedder": True}
    file = configurations.__name__.rpartition(".")[2]
    mean, std = images.NORM.values()
    written = {
        "architectures": [architecture],
        "model_type": configurations.NemotronHNanoVLConfig.model_type,
        "auto_map": {"AutoConfig": f"{file}.NemotronHNanoVLConfig"},
        "dtype": str(dtype).removeprefix("torch."),
        "llm_config": text | {"architectures": ["NemotronHForCausalLM"], "dtype": str(dtype).removeprefix("torch.")},
        "vision_config": vision,
        "force_image_size": SIDE,
        "patch_size": PATCH,
        "downsample_ratio": 0.5,
        "ps_version": "v2",
        "template": "none",
        "image_tag_type": "internal",
        "use_thumbnail": True,
        "norm_mean": mean,
        "norm_std": std,
        "vit_hidden_size": _SIZE,
        "projector_hidden_size": config.projector_hidden_size,
        **{name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    if "Omni" in architecture:
        written["sound_config"] = _SOUND
    (folder / "config.json").write_text(json.dumps(written))
    shutil.copy(configurations.__file__, folder)
    words = {_WORDS.get(number, f"w{number}"): number for number in range(text["vocab_size"])}
    template = images.chat_template(image=_WORDS[images.IMAGE], video=_WORDS[images.VIDEO], audio=_WORDS[SOUND])
    images.save_tokenizer(folder, words, list(_WORDS.values()), {"chat_template": template})
    return made
