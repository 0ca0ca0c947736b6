"""Tiny models of random weights that see images, with their processors; and what an engine gives requests with some."""

import hashlib
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine import configurations, kept_states, kimi_vl_processor, mla, multimodal
from tests.engine import gemma4 as of_gemma_4
from tests.engine import llama4 as of_llama_4
from tests.engine.pooled import sent_together
from vllm_batch_invariant.integration.engine import whole_images
from vllm_batch_invariant.integration.layers import attention, encoders
from vllm_batch_invariant.ops.attention import AttentionReduction, PackedKeys, PagedAttention, attend
from vllm_batch_invariant.verify.harness.images import _counted

IMAGE, VIDEO, START, END = 4000, 4001, 4002, 4003
KINDS = {"image": IMAGE, "video": VIDEO}
SPECIAL = {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>", START: "<|vision_start|>", END: "<|vision_end|>"}
"""Tokens of the models here."""
OF_GEMMA = {IMAGE: "<image_soft_token>", START: "<start_of_image>", END: "<end_of_image>"}
"""What they are called where vLLM knows no other names."""
OF_INTERNVL = {IMAGE: "<IMG_CONTEXT>", VIDEO: "<video>", START: "<img>", END: "</img>"}
"""The same of InternVL's."""
IN_CHAT_OF = {"image": 4004, "video": 4005}
IN_CHAT = {token: f"<{kind}>" for kind, token in IN_CHAT_OF.items()}
"""What stands for an item in a prompt of InternVL's own form, and is text for its tokenizer."""
OF_GLM = {IMAGE: "<|image|>", VIDEO: "<|video|>", START: "<|begin_of_image|>", END: "<|end_of_image|>"}
OF_GLM |= {4004: "<|begin_of_video|>", 4005: "<|end_of_video|>"}
"""The same of GLM-4.1V's."""
OF_GEMMA_4 = {IMAGE: "<|image|>", VIDEO: "<|video|>", START: "<|image>", END: "<image|>"}
OF_GEMMA_4 |= {4004: "<|audio|>", 4005: "<|audio>", 4006: "<audio|>"}
"""The same of Gemma 4's, with those of audio."""
OF_IDEFICS = {IMAGE: "<image>", START: "<fake_token_around_image>", END: "<global-img>"}
OF_IDEFICS |= {4020 + 2 * row + column: f"<row_{row + 1}_col_{column + 1}>" for row in range(2) for column in range(2)}
"""The same of Idefics 3's."""
PATCH = 4004
OF_LLAMA_4 = {IMAGE: "<|image|>", START: "<|image_start|>", END: "<|image_end|>", PATCH: "<|patch|>"}
OF_LLAMA_4 |= {4005: "<|tile_x_separator|>", 4006: "<|tile_y_separator|>"}
"""The same of Llama 4's."""
OF_KIMI = {IMAGE: "<|media_pad|>", START: "<|media_start|>", END: "<|media_end|>", PATCH: "<|media_content|>"}
"""The same of Kimi-VL's."""
OF_LFM2 = {IMAGE: "<image>", START: "<|image_start|>", END: "<|image_end|>", PATCH: "<|img_thumbnail|>"}
OF_LFM2 |= {
    4020 + 4 * row + column: f"<|img_row_{row + 1}_col_{column + 1}|>" for row in range(4) for column in range(4)
}
"""The same of LFM2-VL's."""
OF_MUSE = {IMAGE: "<|patch|>", VIDEO: "<|video|>", START: "<|image_start|>", END: "<|image_end|>"}
OF_MUSE |= {4004: "<|vid_start|>", 4005: "<|vid_end|>", 4006: "<|vid_frame_separator|>", 4007: "<|image|>"}
"""The same of Muse Glimmer's."""
IDEFICS = ("idefics3", "smolvlm")
"""Types of models."""
TOWERS = ("internvl", "llava", "mistral3")
"""Types of models that call their encoder a vision tower."""
LINES = {4010 + number: "\n" * (1 + number) for number in range(4)}
"""Ends of lines, which stand around an image of Gemma 3's."""
OF_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""What vLLM's processor of InternVL scales colours by: means and deviations."""
NORM = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}


def qwen2_5_vl() -> transformers.PretrainedConfig:
    """A tower with two heads of 80, windows of 4 x 4 merged patches on two layers of three, biases and RMS norms. Time
    in a video goes on no further than its rows do: else Transformers has other positions behind it than vLLM.
    """
    config = multimodal.qwen2_5_vl()
    vision = {"depth": 3, "hidden_size": 160, "intermediate_size": 320, "num_heads": 2, "out_hidden_size": 512}
    config.vision_config = type(config.vision_config)(**vision, fullatt_block_indexes=[1], tokens_per_second=1)
    return config


def qwen3_vl(made: Callable[[], transformers.PretrainedConfig] = multimodal.qwen3_vl) -> transformers.PretrainedConfig:
    """A tower with two heads of 72, interpolated positions, two layers that add to the decoder's, and layer norms."""
    config = made()
    vision = {"depth": 3, "hidden_size": 144, "intermediate_size": 320, "num_heads": 2, "out_hidden_size": 512}
    config.vision_config = type(config.vision_config)(
        **vision, deepstack_visual_indexes=[0, 1], num_position_embeddings=64
    )
    return config


def gemma3() -> transformers.PretrainedConfig:
    """A tower with two heads of 72 for pictures of 16 x 16 patches, of which four are a token; and a decoder with a
    window that an image fits into on one layer of two.
    """
    config = multimodal.gemma3()
    vision = {"num_hidden_layers": 2, "hidden_size": 144, "intermediate_size": 320, "num_attention_heads": 2}
    config.vision_config = type(config.vision_config)(**vision, image_size=224, patch_size=14)
    config.mm_tokens_per_image, config.text_config.sliding_window = 64, 100
    config.text_config.query_pre_attn_scalar = 16  # of random weights, so that keys differ
    return config


def gemma4(name: str) -> transformers.PretrainedConfig:
    """A tower for up to 70 times 3 x 3 patches, whose mean is a token, as the published model has; or none (12B)."""
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "boi_token_id": START, "eoi_token_id": END}
    return of_gemma_4.seeing(name, **tokens, audio_token_id=4004, boa_token_id=4005, eoa_token_index=4006)


def llama4() -> transformers.PretrainedConfig:
    """A tower with two heads of 88 for squares of 4 x 4 patches, of which an image has up to five, one of them all of
    it; four patches are a token. Layers of the decoder see chunks of 128 tokens but for one, and every second has
    experts.
    """
    vision = {"hidden_size": 176, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 704}
    vision |= {"image_size": 56, "patch_size": 14, "vision_output_dim": 192, "projector_input_dim": 192}
    text = of_llama_4.CONFIG | {"vocab_size": 4096, "attention_chunk_size": 128}
    return transformers.Llama4Config(
        architectures=["Llama4ForConditionalGeneration"],
        text_config=text,
        vision_config=vision | {"projector_output_dim": 192},
        image_token_index=PATCH,
        boi_token_index=START,
        eoi_token_index=END,
        tie_word_embeddings=False,
    )


def mistral3(text: dict[str, Any] = {"model_type": "mistral"}) -> transformers.PretrainedConfig:  # noqa: B006
    """A tower with two heads of 64, angles by row and column, RMS norms and SwiGLU; four patches are a token, and each
    row of an image ends in a token of text.

    Args:
        text: the type of the decoder, and what it has besides.
    """
    vision = {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 2}
    return transformers.Mistral3Config(
        architectures=["Mistral3ForConditionalGeneration"],
        text_config=multimodal.TEXT | {"head_dim": 64, "sliding_window": None} | text,
        vision_config=vision | {"image_size": 616, "patch_size": 14, "hidden_act": "silu"},
        image_token_index=IMAGE,
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )


def pixtral() -> transformers.PretrainedConfig:
    """The same tower, of which each patch is a token, as Pixtral 12B has it."""
    made = mistral3()
    vision, text = (one.to_dict() for one in (made.vision_config, made.text_config))
    whole = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "tie_word_embeddings": False}
    return transformers.LlavaConfig(
        architectures=["PixtralForConditionalGeneration"],
        text_config=text,
        vision_config=vision,
        image_token_index=IMAGE,
        **whole,
    )


def ministral3() -> transformers.PretrainedConfig:
    """The same tower, and a decoder whose frequencies are those of YaRN, and whose queries are scaled from each 64th
    position on. vLLM reads that scale where Mistral's own format has it, and nowhere else.
    """
    scaled = {"original_max_position_embeddings": 64}
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    yarn |= {"beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.1} | scaled
    of_text = {"rope_parameters": yarn, "llama_4_scaling": scaled | {"beta": 0.1}}
    return mistral3({"model_type": "ministral3"} | of_text)


def internvl(text: str = "qwen2", **vision: Any) -> transformers.PretrainedConfig:
    """A tower with two heads of 64 for squares of 4 x 4 patches, of which an image has up to seven, one of them all of
    it; four patches are a token, and a row more for each square is let go of.

    Args:
        text: the type of the decoder.
        vision: what its tower has otherwise.
    """
    of_tower = {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 2}
    return transformers.InternVLConfig(
        architectures=["InternVLForConditionalGeneration"],
        text_config=multimodal.TEXT | {"model_type": text, "head_dim": 64},
        vision_config=of_tower | {"image_size": 56, "patch_size": 14, "attention_bias": True} | vision,
        image_token_id=IMAGE,
        image_seq_length=4,
        tie_word_embeddings=False,
    )


def internvl3_5() -> transformers.PretrainedConfig:
    """A tower like the largest: RMS norms, also of queries and keys, and heads of 128."""
    return internvl("qwen3", norm_type="rms_norm", use_qk_norm=True, hidden_size=256, attention_bias=False)


def save_chat(config: transformers.PretrainedConfig, dtype: torch.dtype, folder: Path) -> torch.nn.Module:
    """A checkpoint of ``InternVLChatModel``, InternVL's own form, of what Transformers has as InternVL; vLLM has its
    processor, and a checkpoint brings the code of its configuration.
    """
    made = drawn(config, dtype)
    vision, text = config.vision_config, config.text_config
    tower = {name: getattr(vision, name) for name in ("num_hidden_layers", "hidden_size", "intermediate_size")}
    tower |= {name: getattr(vision, name) for name in ("num_attention_heads", "norm_type", "layer_norm_eps")}
    tower |= {"image_size": vision.image_size[0], "patch_size": vision.patch_size[0], "hidden_act": vision.hidden_act}
    tower |= {"qkv_bias": vision.attention_bias, "qk_normalization": vision.use_qk_norm, "initializer_factor": 1.0}
    cut = {"min_dynamic_patch": 1, "max_dynamic_patch": 6, "dynamic_image_size": True, "use_thumbnail": True}
    shuffled = {"downsample_ratio": 0.5, "ps_version": "v2", "select_layer": -1}
    shuffled["force_image_size"] = tower["image_size"]
    written = {"model_type": "internvl_chat", "architectures": ["InternVLChatModel"], "vision_config": tower} | cut
    of_class = f"{text.model_type.capitalize()}ForCausalLM"
    of_text = text.to_dict() | {"architectures": [of_class], "tie_word_embeddings": False}
    written |= shuffled | {"llm_config": of_text, "dtype": str(dtype).removeprefix("torch.")}
    file = configurations.__name__.rpartition(".")[2]
    written["auto_map"] = {"AutoConfig": f"{file}.InternVLChatConfig"}
    shutil.copy(configurations.__file__, folder)
    (folder / "config.json").write_text(json.dumps(written))
    special = SPECIAL | OF_INTERNVL | {VIDEO: "<|video_pad|>"}
    words = {(special | IN_CHAT).get(number, f"w{number}"): number for number in range(text.vocab_size)}
    template = chat_template(**{kind: IN_CHAT[token] for kind, token in IN_CHAT_OF.items()})
    save_tokenizer(folder, words, list(special.values()), {"chat_template": template}, list(IN_CHAT.values()))
    save_file(dict(_of_chat(made.state_dict(), vision)), folder / "model.safetensors", metadata={"format": "pt"})
    return made


def _of_chat(tensors: Mapping[str, torch.Tensor], vision: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of InternVL under the names of its own form, where queries, keys and values are one."""
    tower = {"embeddings.cls_token": "embeddings.class_embedding"}
    tower |= {"embeddings.position_embeddings": "embeddings.position_embedding"}
    tower |= {"patch_embeddings.projection": "patch_embedding", "encoder.layer.": "encoder.layers."}
    tower |= {"lambda_1": "ls1", "lambda_2": "ls2", "layernorm_before": "norm1", "layernorm_after": "norm2"}
    tower |= {"attention.projection_layer": "attn.proj", "attention.q_norm": "attn.q_norm"}
    tower |= {"attention.k_norm": "attn.k_norm"}
    ends = {"layer_norm": "0", "linear_1": "1", "linear_2": "3"}
    for name, tensor in tensors.items():
        part, _, rest = name.removeprefix("model.").partition(".")
        if part == "vision_tower":
            if ".q_proj." in rest:
                joined = [tensors[name.replace(".q_proj.", f".{one}_proj.")] for one in "qkv"]
                yield f"vision_model.{renamed(rest.replace('attention.q_proj', 'attn.qkv'), tower)}", torch.cat(joined)
            elif ".k_proj." not in rest and ".v_proj." not in rest:
                yield f"vision_model.{renamed(rest, tower)}", tensor.clone()
        elif part == "multi_modal_projector":
            yield f"mlp1.{renamed(rest, ends)}", tensor.clone()
        else:
            yield f"language_model.{'lm_head.weight' if part == 'lm_head' else f'model.{rest}'}", tensor.clone()


def renamed(name: str, names: Mapping[str, str]) -> str:
    """A name with parts of it replaced."""
    return re.sub("|".join(map(re.escape, names)), lambda found: names[found[0]], name)


def idefics3(kind: Any = transformers.Idefics3Config, size: int = 64) -> transformers.PretrainedConfig:
    """A tower with two heads for squares of 6 x 6 patches, of which an image, whose longest side is of two, has up to
    four and one of all of it; nine patches are a token, and tokens of text stand before each square.

    Args:
        kind: of configuration.
        size: of a head.
    """
    vision = {"num_hidden_layers": 3, "hidden_size": 2 * size, "intermediate_size": 320, "num_attention_heads": 2}
    return kind(
        architectures=[kind.__name__.replace("Config", "ForConditionalGeneration")],
        text_config=multimodal.TEXT | {"model_type": "llama", "head_dim": 64},
        vision_config=vision | {"image_size": 84, "patch_size": 14},
        image_token_id=IMAGE,
        pad_token_id=0,
        scale_factor=3,
        tie_word_embeddings=False,
    )


def smolvlm() -> transformers.PretrainedConfig:
    """The same with heads of 72."""
    return idefics3(transformers.SmolVLMConfig, 72)


def kimi_vl() -> transformers.PretrainedConfig:
    """A tower with two heads of 72, angles by row and column, and positions interpolated between those of 8 x 8
    patches, of which four are a token; and a decoder like Moonlight, with latent attention and experts. Of pictures the
    model that Transformers has as Kimi-K2.5 is the same.
    """
    vision = {"num_hidden_layers": 3, "hidden_size": 144, "intermediate_size": 320, "num_attention_heads": 2}
    rope = {"rope_type": "axial", "rope_theta": 1e4}
    text = mla.config_of("Moonlight")
    text.vocab_size = multimodal.TEXT["vocab_size"]
    return transformers.Kimi_K25Config(
        architectures=["KimiVLForConditionalGeneration"],
        text_config=text,
        vision_config=vision | {"pos_emb_height": 8, "pos_emb_width": 8, "patch_size": 14, "rope_parameters": rope},
        projection_hidden_size=144,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tie_word_embeddings=False,
    )


def paddleocr_vl() -> transformers.PretrainedConfig:
    """A tower with two heads of 72, angles by row and column, and positions interpolated between those of 8 x 8
    patches, of which four are a token; and ERNIE 4.5, whose angles are of two halves here.
    """
    vision = {"num_hidden_layers": 3, "hidden_size": 144, "intermediate_size": 320, "num_attention_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [8, 12, 12]}
    return transformers.PaddleOCRVLConfig(
        architectures=["PaddleOCRVLForConditionalGeneration"],
        text_config=multimodal.TEXT | {"head_dim": 64, "rope_parameters": rope, "tie_word_embeddings": False},
        vision_config=vision | {"image_size": 112, "patch_size": 14},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )


def lfm2_vl() -> transformers.PretrainedConfig:
    """A tower with two heads of 72 for images of any size, or for squares of 8 x 8 patches of a large one and all of it
    in less patches; positions interpolated between those of 8 x 8, four patches are a token; and a decoder like LFM2,
    with short convolutions.
    """
    vision = {"num_hidden_layers": 3, "hidden_size": 144, "intermediate_size": 320, "num_attention_heads": 2}
    vision |= {"model_type": "siglip2_vision_model", "vision_use_head": False}
    text = kept_states.LFM2 | {"model_type": "lfm2", "vocab_size": multimodal.TEXT["vocab_size"]}
    return transformers.Lfm2VlConfig(
        architectures=["Lfm2VlForConditionalGeneration"],
        text_config=text | {"architectures": ["Lfm2ForCausalLM"]},
        vision_config=vision | {"num_patches": 64, "patch_size": 16},
        image_token_id=IMAGE,
        projector_hidden_size=320,
        tie_word_embeddings=True,
    )


def glm4_1v() -> transformers.PretrainedConfig:
    """A tower with two heads of 128, positions interpolated between those of 8 x 8 patches, and a convolution that
    makes a row of four patches; a decoder with norms behind attention and experts, and angles of neighbours of half a
    head. Where its configuration has no word of biases, vLLM leaves them out, and Transformers does not.
    """
    return _glm(transformers.Glm4vConfig, {"attention_bias": True})


def glm4_5v() -> transformers.PretrainedConfig:
    """The same tower, and a decoder without norms behind its parts, whose second layer has experts and one that all
    share, and whose angles are of two halves.
    """
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_shared_experts": 1}
    return _glm(
        transformers.Glm4vMoeConfig, experts | {"first_k_dense_replace": 1, "head_dim": 64, "use_qk_norm": False}
    )


def glm_ocr() -> transformers.PretrainedConfig:
    """A tower of heads of 64 whose queries and keys have norms, without positions that are added; and the decoder of
    GLM-4.1V, whose angles are of the whole head.
    """
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0, "mrope_section": [8, 12, 12]}
    return _glm(transformers.GlmOcrConfig, {"rope_parameters": rope, "head_dim": 64}, {"hidden_size": 128})


def _glm(kind: Any, text: dict[str, Any], tower: dict[str, Any] = {}) -> transformers.PretrainedConfig:  # noqa: B006
    """A kind of configuration, with what its decoder and its tower have besides."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [4, 6, 6]}
    vision = {"depth": 3, "hidden_size": 256, "num_heads": 2, "out_hidden_size": 512, "intermediate_size": 320}
    return kind(
        architectures=[kind.__name__.replace("Config", "ForConditionalGeneration")],
        text_config=multimodal.TEXT | {"rope_parameters": rope} | text,
        vision_config=vision | {"image_size": 112, "patch_size": 14} | tower,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_start_token_id=START,
        image_end_token_id=END,
        video_start_token_id=4004,
        video_end_token_id=4005,
    )


def qwen3_5(text: dict[str, Any] = kept_states.QWEN3_5) -> transformers.PretrainedConfig:
    """The tower of Qwen3-VL, of which nothing is added to the decoder, whose layers have states but one."""
    made = multimodal.qwen3_5(text | {"vocab_size": multimodal.TEXT["vocab_size"]})
    vision = {"depth": 3, "hidden_size": 144, "intermediate_size": 320, "num_heads": 2, "out_hidden_size": 256}
    made.vision_config = type(made.vision_config)(**vision, num_position_embeddings=64)
    made.image_token_id, made.video_token_id = IMAGE, VIDEO
    made.vision_start_token_id, made.vision_end_token_id = START, END
    return made


def intern_s2(text: dict[str, Any] = kept_states.QWEN3_5_MOE) -> transformers.PretrainedConfig:
    """Qwen3.5 with experts, under the name of Intern-S2, whose checkpoint brings the code of its configuration."""
    made = qwen3_5(text)
    made.architectures = ["InternS2PreviewForConditionalGeneration"]
    return made


def chat_template(**written: str) -> str:
    """One that writes the message of a chat, and something in the place of items of each kind."""
    seen = "".join("{% if part.type == '" + kind + "' %} " + text + " {% endif %}" for kind, text in written.items())
    parts = "{% for part in messages[0].content %}" + seen + "{{ part.text }}{% endfor %}"
    text = "{{ messages[0].content }}"
    return "{% if messages[0].content is string %}" + text + "{% else %}" + parts + "{% endif %}"


def drawn(config: transformers.PretrainedConfig, dtype: torch.dtype) -> torch.nn.Module:
    """Random weights, of encoders larger ones: else images would hardly change an answer."""
    made = multimodal.model(config, dtype)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            is_seen = "visual" in name or ("vision_tower" in name and config.model_type in TOWERS)
            is_seen |= "multi_modal_projector" in name and config.model_type == "internvl"
            is_seen |= "projector" in name and config.model_type == "paddleocr_vl"
            is_seen |= "language_model" not in name and config.model_type == "lfm2_vl"
            is_seen |= config.model_type == "muse_glimmer" and "vision" in name
            is_seen |= config.model_type in IDEFICS and ("vision_model" in name or "connector" in name)
            is_seen |= config.model_type == "kimi_k25" and ("vision_tower" in name or "mm_projector" in name)
            if is_seen and weight.dim() > 1:
                weight.mul_(4)
            if name.endswith(
                ("position_embeddings", "position_embedding.weight", "embedding_table.weight", "cls_token")
            ):
                torch.nn.init.normal_(weight)
            if name.endswith("conv.conv.weight"):  # taps that matter as much as what goes around them
                torch.nn.init.normal_(weight, std=0.4)
            if name.endswith("language_model.embedding_norm.weight"):  # of tied embeddings
                weight.fill_(8)
            if config.model_type == "llama4" and "vision_model" in name and weight.dim() > 1:
                torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
            if name.endswith("mm_input_projection_weight"):  # Transformers' is 0, and so would every image be
                torch.nn.init.normal_(weight, std=weight.shape[0] ** -0.5)
            if name.endswith(("lambda_1", "lambda_2")):
                torch.nn.init.uniform_(weight, 0.5, 1.5)
    return made


def save(config: transformers.PretrainedConfig, dtype: torch.dtype, folder: Path) -> torch.nn.Module:
    """A checkpoint with a tokenizer of words and a processor that keeps images of whole patches as they are."""
    made = drawn(config, dtype)
    of_gemma = config.model_type in ("gemma4", "gemma4_unified")
    if of_gemma:
        made = of_gemma_4.draw(made.float()).to(dtype)
    made.save_pretrained(folder)
    named_by = dict.fromkeys(IDEFICS, OF_IDEFICS) | {
        "gemma3": OF_GEMMA,
        "internvl": OF_INTERNVL,
        "glm4v": OF_GLM,
        "glm4v_moe": OF_GLM,
        "glm_ocr": OF_GLM,
        "llama4": OF_LLAMA_4,
        "lfm2_vl": OF_LFM2,
        "kimi_k25": OF_KIMI,
        "muse_glimmer": OF_MUSE,
    }
    special = SPECIAL | named_by.get(config.model_type, OF_GEMMA_4 if of_gemma else {})
    words = {(special | LINES).get(number, f"w{number}"): number for number in range(config.text_config.vocab_size)}
    named = {"image_token": special[IMAGE], "boi_token": special[START], "eoi_token": special[END]}
    if config.model_type == "internvl":
        named = {"context_image_token": special[IMAGE], "video_token": special[VIDEO]}
        named |= {"start_image_token": special[START], "end_image_token": special[END]}
    if config.model_type in IDEFICS:
        named = {"image_token": special[IMAGE], "fake_image_token": special[START], "global_image_token": special[END]}
    if config.model_type == "lfm2_vl":
        named = {"image_token": special[IMAGE], "image_thumbnail_token": special[PATCH]}
        named |= {"image_start_token": special[START], "image_end_token": special[END]}
    if of_gemma:
        named |= {"audio_token": special[4004], "boa_token": special[4005], "eoa_token": special[4006]}
    template = chat_template(**{kind: SPECIAL[START] + SPECIAL[token] + SPECIAL[END] for kind, token in KINDS.items()})
    settings = {"extra_special_tokens": named, "chat_template": template}
    save_tokenizer(folder, words, list(special.values()), settings, list(LINES.values()))
    patch = patch_of(config)
    if config.model_type == "kimi_k25":
        _save_as_kimi_vl(made, folder)
        return made
    if config.model_type in ("gemma3", "lfm2_vl"):
        file, tower = folder / "model.safetensors", "vision_tower."
        tensors = load_file(file)
        names = {name: name.replace(tower, f"{tower}vision_model.") for name in tensors}  # as published ones have them
        save_file({names[name]: one.clone() for name, one in tensors.items()}, file, metadata={"format": "pt"})
    if config.model_type == "gemma3":
        side = config.vision_config.image_size
        image = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": side, "width": side}} | NORM
        (folder / "preprocessor_config.json").write_text(json.dumps(image))
        processor = {"processor_class": "Gemma3Processor", "image_seq_length": config.mm_tokens_per_image}
        (folder / "processor_config.json").write_text(json.dumps(processor))
        return made
    if of_gemma:
        kind, sizes = "Unified" * (config.model_type == "gemma4_unified"), {"max_soft_tokens": 70}
        parts = {
            "image_processor": {"image_processor_type": f"Gemma4{kind}ImageProcessor"} | sizes,
            "video_processor": {"video_processor_type": f"Gemma4{kind}VideoProcessor"} | sizes,
            "feature_extractor": {"feature_extractor_type": f"Gemma4{kind}AudioFeatureExtractor"},
        }
        processor = {"processor_class": f"Gemma4{kind}Processor", "image_seq_length": 70} | parts
        (folder / "processor_config.json").write_text(json.dumps(processor))
        return made
    if config.model_type == "llama4":
        side = config.vision_config.image_size
        image = {"image_processor_type": "Llama4ImageProcessor", "size": {"height": side, "width": side}}
        (folder / "preprocessor_config.json").write_text(json.dumps(image | {"max_patches": 4}))
        processor = {"processor_class": "Llama4Processor", "patch_size": patch}
        (folder / "processor_config.json").write_text(json.dumps(processor))
        (folder / "generation_config.json").write_text(json.dumps({"attn_temperature_tuning": True}))
        return type(made).from_pretrained(folder, dtype=dtype)  # its complex angles were cast to real ones
    if config.model_type in IDEFICS:
        side, name = config.vision_config.image_size, type(config).__name__.replace("Config", "")
        sizes = {"size": {"longest_edge": 2 * side}, "max_image_size": {"longest_edge": side}, "resample": 3}
        image = {"image_processor_type": f"{name}ImageProcessor"} | sizes | NORM
        (folder / "preprocessor_config.json").write_text(json.dumps(image))
        processor = {"processor_class": f"{name}Processor", "image_seq_len": 4}
        (folder / "processor_config.json").write_text(json.dumps(processor))
        if name == "SmolVLM":
            video = {"video_processor_type": "SmolVLMVideoProcessor"} | sizes | NORM
            (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
        return made
    if config.model_type == "internvl":
        image = {"image_processor_type": "GotOcr2ImageProcessor"} | squares(config)
        (folder / "preprocessor_config.json").write_text(json.dumps(image))
        video = {"video_processor_type": "InternVLVideoProcessor", "size": image["size"]} | NORM
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
        processor = {"processor_class": "InternVLProcessor", "image_seq_length": config.image_seq_length}
        (folder / "processor_config.json").write_text(json.dumps(processor))
        return made
    if config.model_type in ("glm4v", "glm4v_moe", "glm_ocr"):
        name = "Glm46V" if config.model_type == "glm_ocr" else "Glm4v"
        sizes = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
        sizes["size"] = {"shortest_edge": 8 * patch * patch, "longest_edge": 2048 * patch * patch}
        image = {"image_processor_type": f"{name}ImageProcessor"} | sizes | NORM
        (folder / "preprocessor_config.json").write_text(json.dumps(image))
        (folder / "video_preprocessor_config.json").write_text(
            json.dumps({"video_processor_type": f"{name}VideoProcessor"} | sizes)
        )
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": f"{name}Processor"}))
        return made
    if config.model_type == "mistral3":
        merged = {"patch_size": patch, "spatial_merge_size": config.spatial_merge_size}
        names = {"image_token": SPECIAL[IMAGE], "image_break_token": SPECIAL[START], "image_end_token": SPECIAL[END]}
        image = {"image_processor_type": "PixtralImageProcessor", "patch_size": patch} | NORM
        image["size"] = {"longest_edge": config.vision_config.image_size}
        (folder / "preprocessor_config.json").write_text(json.dumps(image))
        processor = {"processor_class": "PixtralProcessor"} | merged | names
        (folder / "processor_config.json").write_text(json.dumps(processor))
        return made
    if config.model_type == "qwen3_vl_moe":
        file = folder / "model.safetensors"
        tensors = {  # as published: inputs first
            name: one.mT.contiguous() if ".experts." in name else one for name, one in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    if config.model_type == "muse_glimmer":
        for kind in ("Image", "Video"):
            file = "preprocessor_config.json" if kind == "Image" else "video_preprocessor_config.json"
            of_kind = {f"{kind.lower()}_processor_type": f"MuseGlimmer{kind}Processor"}
            (folder / file).write_text(json.dumps(of_kind))
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": "MuseGlimmerProcessor"}))
        return made
    if config.model_type == "lfm2_vl":
        tiles = {"tile_size": 8 * patch, "encoder_patch_size": patch, "max_tiles": 6}
        tokens = {"min_image_tokens": 1, "max_image_tokens": 36, "max_pixels_tolerance": 1.0}
        image = {"image_processor_type": "Lfm2VlImageProcessor"} | tiles | tokens | NORM
        (folder / "preprocessor_config.json").write_text(json.dumps(image))
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Lfm2VlProcessor"}))
        return made
    if config.model_type == "paddleocr_vl":
        sizes = {"size": {"shortest_edge": 4 * patch * patch, "longest_edge": 1024 * patch * patch}}
        image = {"image_processor_type": "PaddleOCRVLImageProcessor", "patch_size": patch} | sizes | NORM
        (folder / "preprocessor_config.json").write_text(json.dumps(image))
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": "PaddleOCRVLProcessor"}))
        made.model.visual.vision_model.embeddings.interpolation_align_corners = False  # as the code of its checkpoint
        return made
    sizes = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
    sizes["size"] = {"shortest_edge": 4 * patch * patch, "longest_edge": 1024 * patch * patch}
    videos = "Qwen2VLVideoProcessor" if config.model_type == "qwen2_5_vl" else "Qwen3VLVideoProcessor"
    image = {"image_processor_type": "Qwen2VLImageProcessor"} | sizes | NORM
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"video_processor_type": videos} | sizes))
    if config.architectures[0].startswith("InternS2"):
        file = configurations.__name__.rpartition(".")[2]
        named = {"model_type": "intern_s2_preview", "auto_map": {"AutoConfig": f"{file}.InternS2PreviewConfig"}}
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | named | {"architectures": config.architectures}))
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3VLProcessor"}))
        shutil.copy(configurations.__file__, folder)
    return made


def _save_as_kimi_vl(made: Any, folder: Path) -> None:
    """A checkpoint of Kimi-VL of what Transformers has as Kimi-K2.5, with a processor."""
    text = transformers.DeepseekV3ForCausalLM(made.config.text_config).to(made.dtype)
    text.model, text.lm_head = made.model.language_model, made.lm_head
    text.save_pretrained(folder / "text")
    projector = "multi_modal_projector."
    renamed = {"mm_projector.proj.0.": f"{projector}linear_1.", "mm_projector.proj.2.": f"{projector}linear_2."}
    renamed |= {"model.mm_projector.": projector, "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed."}
    encoder = {
        re.sub("|".join(renamed), lambda found: renamed[found[0]], name): one.clone()
        for name, one in load_file(folder / "model.safetensors").items()
        if not name.startswith("language_model.")
    }
    vision = made.config.vision_config
    tower = {"init_pos_emb_height": vision.pos_emb_height, "init_pos_emb_width": vision.pos_emb_width}
    shared = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    tower |= {name: getattr(vision, name) for name in shared}
    mla.write_around(folder / "text", folder, tower, encoder, IMAGE)
    shutil.copy(kimi_vl_processor.__file__, folder)
    of_file = kimi_vl_processor.__name__.rpartition(".")[2]
    image = {"image_processor_type": "KimiVLImageProcessor", "patch_size": vision.patch_size} | NORM
    places = {f"Auto{kind}": f"{of_file}.KimiVL{kind}" for kind in ("ImageProcessor", "Processor")}
    (folder / "preprocessor_config.json").write_text(json.dumps(image | {"auto_map": places}))


def squares_of(picture: np.ndarray, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of pictures [pictures, height, width, 3] pixels [pictures, 3, height, width], and their squares [squares, 3,
    side, side], row by row.
    """
    pixels = torch.from_numpy(picture).permute(0, 3, 1, 2)
    rows, columns = (size // side for size in pixels.shape[2:])
    cut = pixels.unflatten(3, (columns, side)).unflatten(2, (rows, side)).permute(0, 2, 4, 1, 3, 5)
    return pixels, cut.flatten(0, 2)


def patch_of(config: transformers.PretrainedConfig) -> int:
    """Pixels of the side of a patch."""
    size = config.vision_config.patch_size
    return size if isinstance(size, int) else size[0]


def squares(config: transformers.PretrainedConfig) -> dict[str, Any]:
    """How InternVL's processor cuts an image."""
    height, width = config.vision_config.image_size
    return {"size": {"height": height, "width": width}, "crop_to_patches": True, "max_patches": 6} | NORM


def save_tokenizer(
    folder: Path, words: dict[str, int], special: list[str], settings: dict[str, Any], added: Sequence[str] = ()
) -> None:
    """A tokenizer of words, some of them special; others may have spaces.

    Args:
        words: with their tokens.
        settings: of ``tokenizer_config.json``.
    """
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(list(added))
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w2", "pad_token": "w0", "unk_token": "w3"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind | settings))


def picture(patch: int, grid: Sequence[int], seed: int) -> np.ndarray:
    """[height, width, 3] bytes of so many patches, with edges and noise."""
    rng = np.random.default_rng(seed)
    height, width = (side * patch for side in grid)
    coarse = rng.integers(0, 256, (grid[0], grid[1], 3)).repeat(patch, 0).repeat(patch, 1)
    return (coarse * 0.7 + rng.integers(0, 77, (height, width, 3))).astype(np.uint8)


def film(patch: int, grid: Sequence[int], seed: int) -> tuple[np.ndarray, dict[str, Any]]:
    """[frames, height, width, 3] bytes of twice as many pictures as the grid has, one a second, and what is known."""
    count = 2 * grid[0]
    frames = np.stack([picture(patch, grid[1:], seed + 1000 * frame) for frame in range(count)])
    known = {"fps": 1.0, "duration": float(count), "total_num_frames": count, "frames_indices": list(range(count))}
    return frames, known | {"video_backend": "opencv", "do_sample_frames": False}


def write_film(file: Path, seed: int) -> str:
    """Write an MPEG-4 of six frames by OpenCV, which every vLLM has; returns the file's name."""
    import cv2

    writer = cv2.VideoWriter(str(file), cv2.VideoWriter_fourcc(*"mp4v"), 4, (224, 112))
    assert writer.isOpened(), "OpenCV has no encoder of MPEG-4"
    for number in range(6):
        writer.write(picture(16, (7, 14), seed + 1000 * number))
    writer.release()
    return str(file)


def answers(
    llm: Any, requests: Sequence[dict[str, Any]], patch: int, reset: str = "", preempted_after: int = 4
) -> dict[str, Any]:
    """Send requests together, and wait for all of them; run by the driver.

    Args:
        requests: each with a ``prompt`` of tokens, ``images`` and ``videos`` as (grid, seed) and ``sounds`` as
            (samples, seed), one for each token of an image, a video or a sound, and ``params``.
        patch: pixels of a patch's side.
        reset: of :func:`answers_about`.
    """
    return answers_about(llm, requests, partial(prompt_of, patch=patch), reset, preempted_after)


def prompt_of(request: Mapping[str, Any], patch: int) -> dict[str, Any]:
    """A request of :func:`answers` as vLLM takes it."""
    from PIL import Image

    from tests.engine import audio

    pictures = [Image.fromarray(picture(patch, grid, seed)) for grid, seed in request.get("images", ())]
    films = [film(patch, grid, seed) for grid, seed in request.get("videos", ())]
    sounds = [(audio.sound(samples, seed), audio.RATE) for samples, seed in request.get("sounds", ())]
    items = {kind: found for kind, found in (("image", pictures), ("video", films), ("audio", sounds)) if found}
    return {"prompt_token_ids": request["prompt"]} | ({"multi_modal_data": items} if items else {})


def answers_about(
    llm: Any,
    requests: Sequence[dict[str, Any]],
    prompt_of: Callable[[dict[str, Any]], dict[str, Any]],
    reset: str = "",
    preempted_after: int = 4,
) -> dict[str, Any]:
    """Send requests together, and wait for all of them.

    Args:
        requests: each with ``params``, and some with name, number and folder of an ``adapter``.
        prompt_of: a request's tokens, images and the like, as vLLM takes them.
        reset: "cache" lets go of the prefix cache and of what was encoded first, "prefix" of the first alone, "encoder"
            of the second; "running" also of what runs after so many steps.

    Returns:
        as ``sent_together``, with what each request got in ``given``, the tokens of its ``prompt`` among it, and
        ``calls``: how often items were encoded, and how many.
    """
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    from vllm_batch_invariant.verify.harness.drive import describe

    if reset in ("cache", "encoder", "running"):
        llm.llm_engine.reset_encoder_cache()
    asked = [
        (number, prompt_of(request), SamplingParams(**request["params"])) for number, request in enumerate(requests)
    ]
    before = dict(encoded(llm))
    adapters = {
        number: LoRARequest(*request["adapter"]) for number, request in enumerate(requests) if request.get("adapter")
    }
    reset = reset if reset in ("cache", "prefix", "running") else ""
    found, counts = sent_together(llm, asked, reset, preempted_after, adapters)
    calls = {name: count - before.get(name, 0) for name, count in encoded(llm).items()}
    given = [describe(output) | {"prompt": output.prompt_token_ids} for output in found]
    return {"given": given, "calls": calls} | counts


Requests = list[dict[str, Any]]


def runs_of(targets: Requests, few: Requests, many: Requests) -> dict[str, tuple[Requests, slice, str]]:
    """The requests of each run, where the targets are, and what is let go of first."""
    count = len(targets)
    alone = {f"alone {number}": ([target], slice(1), "cache") for number, target in enumerate(targets)}
    behind = [*few, *targets], slice(len(few), None)
    return alone | {
        "together": (targets, slice(count), "cache"),
        "from the prefix cache": (targets, slice(count), ""),
        "from the cache of embeddings": (targets, slice(count), "prefix"),
        "behind 3": (*behind, "cache"),
        "before many": ([*targets, *many], slice(count), "cache"),
        "preempted": (*behind, "running"),
    }


def encoded(llm: Any) -> dict[str, int]:
    """How often items were encoded, and how many in all, since this was first asked for."""
    return llm.apply_model(_counted)[0]


def pixels(grid: Sequence[int], size: int, seed: int) -> torch.Tensor:
    """[patches, size] bytes, as a processor hands them on."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (math.prod(grid), size), dtype=torch.uint8, generator=generator)


def moved_in_calls(llm: Any, grids: Sequence[Sequence[int]], calls: Sequence[Sequence[int]]) -> list[str]:
    """Items that get other bits from the tower in a call with others than in one of their own; run by the driver.

    Args:
        grids: of the items: frames, rows and columns of patches.
        calls: which items each has.
    """

    def found(model: torch.nn.Module) -> list[str]:
        tower = model.visual
        given = [pixels(grid, tower.patch_embed.proj.input_size, seed) for seed, grid in enumerate(grids)]
        merged = tower.spatial_merge_size**2

        def encode(call: Sequence[int]) -> Sequence[torch.Tensor]:
            rows = tower(torch.cat([given[item] for item in call]), grid_thw=[list(grids[item]) for item in call])
            return rows.split([len(given[item]) // merged for item in call])

        with torch.inference_mode():
            alone = [encode([item])[0] for item in range(len(grids))]
            return [
                f"{item} in {list(call)}"
                for call in calls
                for item, one in zip(call, encode(call), strict=True)
                if not torch.equal(one, alone[item])
            ]

    return llm.apply_model(found)[0]


def embeddings(llm: Any, grids: Sequence[Sequence[int]], calls: Sequence[Sequence[int]]) -> dict[str, list[Any]]:
    """What workers that share a model give for its images; run by the driver.

    Returns:
        ``moved``: items that get other bits in a call with others than in one of their own, of any worker; ``alone``:
        by item, digests of what each worker gives for it in a call of its own.
    """

    of_workers = llm.apply_model(partial(_embeddings, grids, calls))
    moved = [f"{one} of worker {rank}" for rank, (those, _) in enumerate(of_workers) for one in those]
    return {"moved": moved, "alone": list(zip(*(bits for _, bits in of_workers), strict=True))}


def _embeddings(
    grids: Sequence[Sequence[int]], calls: Sequence[Sequence[int]], model: torch.nn.Module
) -> tuple[list[str], list[str]]:
    """:func:`embeddings` of one worker; all of them run it together."""
    given = [pixels(grid, model.visual.patch_embed.proj.input_size, seed) for seed, grid in enumerate(grids)]

    def encode(call: Sequence[int]) -> Sequence[torch.Tensor]:
        patches = torch.cat([given[item] for item in call]).to(next(model.parameters()).device)
        sizes = torch.tensor([list(grids[item]) for item in call])
        return model.embed_multimodal(pixel_values=patches, image_grid_thw=sizes)

    with torch.inference_mode():
        alone = [encode([item])[0] for item in range(len(grids))]
        moved = [
            f"{item} in {list(call)}"
            for call in calls
            for item, one in zip(call, encode(call), strict=True)
            if not torch.equal(one, alone[item])
        ]
    return moved, [_digest(one) for one in alone]


def with_images_in_parts(llm: Any, method: str, *arguments: Any) -> Any:
    """What another function here gives while steps end in images, and tokens see what there is of them: as in vLLM
    where an image begins with a step.
    """

    def seen(batch: Any, window: int | None) -> torch.Tensor | None:
        starts, lengths = batch.query_start_loc_cpu.tolist(), batch.seq_lens_cpu_upper_bound.tolist()
        there = {
            request: [(low, min(high, lengths[request] - 1)) for low, high in found if low < lengths[request]]
            for request, found in (batch.mm_req_doc_ranges or {}).items()
            if request < len(lengths) and starts[request + 1] > starts[request]
        }
        return ranges_of(SimpleNamespace(**vars(batch) | {"mm_req_doc_ranges": there}), window)

    ranges_of = attention.ranges_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "ranges_of", seen)
        patch.setattr(whole_images, "tokens_of_step", lambda items, computed, new: new)
        llm.llm_engine.vllm_config.scheduler_config.disable_chunked_mm_input = False
        try:
            return globals()[method](llm, *arguments)
        finally:
            llm.llm_engine.vllm_config.scheduler_config.disable_chunked_mm_input = True


FAULTS = ("attention over the whole call", "splits by the longest sequence", "angles by the number of patches")

OF_NUMBER = "splits by the number of sequences"
OF_ITEMS = "rows by the number of items"
UNCUT = "a window does not cut images"
OF_EARLIER = "tokens of a video are kept by how many videos came before"


def with_fault(llm: Any, fault: str, method: str, *arguments: Any) -> Any:
    """What another function here gives while an engine has a fault, or with "" none."""
    with pytest.MonkeyPatch.context() as patch:
        if fault == FAULTS[2]:
            llm.apply_model(lambda model: _share_angles(model.visual, patch))
        elif fault == OF_ITEMS:
            llm.apply_model(partial(_scale_by_items, patch))
        elif fault == OF_EARLIER:
            _keep_by_earlier(patch)
        elif fault == UNCUT:
            ranges_of = attention.ranges_of
            patch.setattr(attention, "ranges_of", lambda batch, window: ranges_of(batch))
        elif fault:
            attending = {FAULTS[0]: _attend_over_all, FAULTS[1]: _attend_by_the_longest, OF_NUMBER: _attend_by_number}
            patch.setattr(encoders, "attend", attending[fault])
        return globals()[method](llm, *arguments)


def _keep_by_earlier(patch: pytest.MonkeyPatch) -> None:
    """Of every second pruned video other tokens are kept."""
    from vllm.model_executor.models import nano_nemotron_vl

    keep, numbers = nano_nemotron_vl.compute_retention_mask, itertools.count()

    def compute_retention_mask(*given: Any, **named: Any) -> torch.Tensor:
        mask = keep(*given, **named)
        return mask.flip(0) if next(numbers) % 2 else mask

    patch.setattr(nano_nemotron_vl, "compute_retention_mask", compute_retention_mask)


def _scale_by_items(patch: pytest.MonkeyPatch, model: torch.nn.Module) -> None:
    """Items that share a call get other rows, of whatever calls an encoder has for each of them."""
    encode = model.embed_multimodal

    def embed_multimodal(**given: Any) -> list[torch.Tensor]:
        made = encode(**given)
        return [rows * (1 + 0.01 * (len(made) > 1)) for rows in made]

    patch.setitem(vars(model), "embed_multimodal", embed_multimodal)


def made_by_workers(llm: Any, requests: Sequence[dict[str, Any]], patch: int) -> list[list[str]]:
    """Digests of what each worker makes of the images of requests that are sent together, in its order; run by the
    driver.
    """
    llm.apply_model(_note_items)
    try:
        answers(llm, requests, patch, "cache")
    finally:
        found = llm.apply_model(_noted_items)
    return found


def _note_items(model: torch.nn.Module) -> None:
    """Have a worker note the digest of each item that it encodes."""
    encode, noted = model.embed_multimodal, []

    def embed_multimodal(**given: Any) -> Any:
        made = encode(**given)
        noted.extend(_digest(rows) for rows in made)
        return made

    model.embed_multimodal, model.noted_items = embed_multimodal, (encode, noted)


def _noted_items(model: torch.nn.Module) -> list[str]:
    """What :func:`_note_items` has noted, which ends here."""
    model.embed_multimodal, noted = model.noted_items
    del model.noted_items
    return noted


def _digest(rows: torch.Tensor) -> str:
    return hashlib.sha256(rows.contiguous().view(torch.uint8).cpu().numpy()).hexdigest()


IN_WORKERS = {"weights": "attention over the whole call", "data": "another tower in the second worker"}
"""Faults, by how the workers share an encoder."""
OTHER_ROWS = "other rows in the second worker"
"""Another one, of what a worker makes of an item."""


def with_fault_in_workers(llm: Any, fault: str, method: str, *arguments: Any) -> Any:
    """What another function here gives while the workers of an engine have a fault."""
    llm.apply_model(partial(_plant, fault))
    try:
        return globals()[method](llm, *arguments)
    finally:
        llm.apply_model(partial(_plant, ""))


def _plant(fault: str, model: torch.nn.Module) -> None:
    """Put a fault into a worker, or none."""
    from vllm.distributed import get_tensor_model_parallel_rank

    encoders.attend = _attend_over_all if fault == IN_WORKERS["weights"] else attend
    tower = next(iter(encoders.towers(model).values()))
    for part, name, of_second in ((tower, "forward", IN_WORKERS["data"]), (model, "embed_multimodal", OTHER_ROWS)):
        if fault == of_second and get_tensor_model_parallel_rank() == 1:
            setattr(part, name, partial(_larger, getattr(part, name)))
        else:
            vars(part).pop(name, None)


def _larger(encode: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Rows of items, as one tensor or several, that are larger."""
    made = encode(*given, **named)
    return made * 1.25 if torch.is_tensor(made) else [rows * 1.25 for rows in made]


def _attend_over_all(call: PagedAttention, implementation: str, plan: Any = None) -> torch.Tensor:
    starts = call.query_start_loc[[0, -1]]
    cache = PackedKeys.of(call.cache.keys[:, :, 0], call.cache.values[:, :, 0], starts)
    return attend(replace(call, cache=cache, seq_lens=starts[1:], query_start_loc=starts), implementation)


def _attend_by_the_longest(call: PagedAttention, implementation: str, plan: Any = None) -> torch.Tensor:
    return _attend_in_splits(call, max(16, 1 << (int(call.seq_lens.max()) - 1).bit_length() - 1), implementation)


def _attend_by_number(call: PagedAttention, implementation: str, plan: Any = None) -> torch.Tensor:
    return _attend_in_splits(call, 16, implementation) if len(call.seq_lens) > 8 else attend(call, implementation)


def _attend_in_splits(call: PagedAttention, size: int, implementation: str) -> torch.Tensor:
    tile = call.reduction.key_tile if call.query.is_cuda else max(32, size)
    return attend(replace(call, reduction=AttentionReduction(size, key_tile=tile)), implementation)


def _share_angles(tower: Any, patch: pytest.MonkeyPatch) -> None:
    """Items of as many patches get the angles of the first of them in its call."""
    name = "get_rope_by_thw" if hasattr(tower, "get_rope_by_thw") else "rot_pos_ids"
    original, prepare, first = getattr(tower, name), tower.prepare_encoder_metadata, {}

    def by_area(*sides: int) -> Any:
        key = (sides[0], sides[1] * sides[2]) if name == "get_rope_by_thw" else sides[0] * sides[1]
        return first.setdefault(key, original(*sides))

    def prepare_anew(*given: Any, **named: Any) -> Any:
        first.clear()
        return prepare(*given, **named)

    patch.setitem(vars(tower), name, by_area)
    patch.setitem(vars(tower), "prepare_encoder_metadata", prepare_anew)
