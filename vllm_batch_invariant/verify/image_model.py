"""A small model of random weights that sees images, with the processor and the tokenizer of its family.

Its configuration and its processor are those of Transformers, which vLLM has: no hub is asked for either.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

START, IMAGE, VIDEO, END = "<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"
_GEMMA = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
_MISTRAL = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
_GEMMA_4 = {
    "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
    "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
}  # fmt: skip
_GEMMA_4_VIDEO = "<|video|>"
_LINES = tuple("\n" * count for count in range(1, 5))
"""Tokens of Gemma 3's, which has two of them around an image."""
NORM = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_MOST_PATCHES = 1024
"""Of an image, which is made smaller if it has more."""
_MOST_TOKENS = 70
"""Of a picture of Gemma 4's, which has about as many whatever its size."""
_TIED = 0.25
"""The size of tied embeddings, small so that a token does not foretell itself; the last norm makes up for it."""


class Decoder(Protocol):
    """What is asked of a :class:`.demo_model.Shape`."""

    @property
    def hidden(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def max_length(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def embed_gain(self) -> float: ...
    @property
    def head_gain(self) -> float: ...


@dataclass(frozen=True)
class Family:
    """Models of one kind.

    Attributes:
        name: in words.
        special: tokens of its images and videos.
        lines: further tokens, which text may have.
        items: what stands for an image, or a video, in a chat.
        named: what its tokenizer calls special tokens, for its processor.
        configure: its configuration, of a shape, the fields of both parts that name tokens, and ids of tokens.
    """

    name: str
    special: tuple[str, ...]
    items: Mapping[str, str]
    configure: Callable[[Decoder, dict[str, Any], Callable[[str], int]], Any]
    lines: tuple[str, ...] = ()
    named: Mapping[str, str] | None = None


def _text(shape: Decoder, ends: Mapping[str, int]) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.max_length,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        **ends,
    }


def _tower(shape: Decoder, size: int) -> dict[str, Any]:
    """Two heads of a size."""
    return {
        "depth": 3, "hidden_size": 2 * size, "intermediate_size": 4 * size, "num_heads": 2,
        "out_hidden_size": shape.hidden,
    }  # fmt: skip


def _ids_of_qwen(id_of: Callable[[str], int]) -> dict[str, int]:
    names = {"vision_start": START, "image": IMAGE, "video": VIDEO, "vision_end": END}
    return {f"{name}_token_id": id_of(token) for name, token in names.items()}


def _sections(shape: Decoder, *shares: int) -> list[int]:
    """Pairs of a head that time, height and width turn, of sixteenths of all."""
    return [share * shape.head_size // 32 for share in shares]


def _qwen2_5_vl(shape: Decoder, ends: dict[str, Any], id_of: Callable[[str], int]) -> Any:
    """A tower with windows on two layers of three."""
    import transformers

    rope = {"type": "mrope", "mrope_section": _sections(shape, 4, 6, 6)}
    return transformers.Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        text_config=_text(shape, ends) | {"rope_scaling": rope},
        vision_config=_tower(shape, 80) | {"fullatt_block_indexes": [1]},
        tie_word_embeddings=False,
        **_ids_of_qwen(id_of),
    )


def _qwen3_vl(shape: Decoder, ends: dict[str, Any], id_of: Callable[[str], int]) -> Any:
    """A tower with interpolated positions and two layers that add to the decoder's."""
    import transformers

    rope = {"rope_type": "default", "mrope_section": _sections(shape, 6, 5, 5), "mrope_interleaved": True}
    return transformers.Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"],
        text_config=_text(shape, ends) | {"rope_scaling": rope},
        vision_config=_tower(shape, 72) | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
        tie_word_embeddings=False,
        **_ids_of_qwen(id_of),
    )


def _gemma3(shape: Decoder, ends: dict[str, Any], id_of: Callable[[str], int]) -> Any:
    """Pictures of 16 x 16 patches, of which four are a token; and a window on every other layer of the decoder."""
    import transformers

    kinds = [("sliding_attention", "full_attention")[layer % 2] for layer in range(shape.layers)]
    own = {"sliding_window": 128, "layer_types": kinds, "query_pre_attn_scalar": shape.head_size}
    vision = {"num_hidden_layers": 2, "hidden_size": 144, "intermediate_size": 288, "num_attention_heads": 2}
    return transformers.Gemma3Config(
        architectures=["Gemma3ForConditionalGeneration"],
        text_config=_text(shape, ends) | own | {"tie_word_embeddings": True},
        vision_config=vision | {"image_size": 224, "patch_size": 14},
        mm_tokens_per_image=64,
        image_token_index=id_of(_GEMMA["image_token"]),
        boi_token_index=id_of(_GEMMA["boi_token"]),
        eoi_token_index=id_of(_GEMMA["eoi_token"]),
    )


def _gemma4(shape: Decoder, ends: dict[str, Any], id_of: Callable[[str], int]) -> Any:
    """As 31B: pictures of up to 70 tokens, each the mean of 3 x 3 patches, and a window that cuts what they see on
    every other layer of the decoder, whose others have heads of another size.
    """
    import transformers

    kinds = [("sliding_attention", "full_attention")[layer % 2] for layer in range(shape.layers)]
    own = {"sliding_window": 48, "layer_types": kinds, "global_head_dim": 2 * shape.head_size}
    own |= {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0, "final_logit_softcapping": None}
    vision = {"num_hidden_layers": 2, "hidden_size": 144, "intermediate_size": 288, "num_attention_heads": 2}
    vision |= {"num_key_value_heads": 2, "head_dim": 72, "position_embedding_size": 256}
    ids = {f"{name}_id": id_of(token) for name, token in _GEMMA_4.items() if name != "eoa_token"}
    return transformers.Gemma4Config(
        architectures=["Gemma4ForConditionalGeneration"],
        text_config=_text(shape, ends) | own | {"tie_word_embeddings": True},
        vision_config=vision | {"default_output_length": _MOST_TOKENS},
        video_token_id=id_of(_GEMMA_4_VIDEO),
        eoa_token_index=id_of(_GEMMA_4["eoa_token"]),
        **ids,
    )


def _mistral3(shape: Decoder, ends: dict[str, Any], id_of: Callable[[str], int]) -> Any:
    """A tower whose heads turn by row and column, for images of any size; each row of one ends in a token of text."""
    import transformers

    vision = {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
    return transformers.Mistral3Config(
        architectures=["Mistral3ForConditionalGeneration"],
        text_config=_text(shape, ends) | {"model_type": "mistral", "sliding_window": None},
        vision_config=vision | {"image_size": 14 * int(_MOST_PATCHES**0.5), "patch_size": 14, "hidden_act": "silu"},
        image_token_index=id_of(_MISTRAL["image_token"]),
        tie_word_embeddings=False,
    )


_QWEN = ((START, IMAGE, VIDEO, END), {"image": START + IMAGE + END, "video": START + VIDEO + END})
FAMILIES = {
    "qwen2.5-vl": Family("Qwen2.5-VL", *_QWEN, _qwen2_5_vl),
    "qwen3-vl": Family("Qwen3-VL", *_QWEN, _qwen3_vl),
    "gemma3": Family(
        "Gemma 3", tuple(_GEMMA.values()), {"image": _GEMMA["boi_token"]}, _gemma3, lines=_LINES, named=_GEMMA
    ),
    "gemma4": Family(
        "Gemma 4",
        (*_GEMMA_4.values(), _GEMMA_4_VIDEO),
        {"image": _GEMMA_4["image_token"], "video": _GEMMA_4_VIDEO},
        _gemma4,
        named=_GEMMA_4,
    ),
    "mistral3": Family("Mistral 3", tuple(_MISTRAL.values()), {"image": _MISTRAL["image_token"]}, _mistral3),
}
"""By the name in ``make-checkpoint --images``."""


def chat_template(family: Family, plain: str) -> str:
    """A chat template whose messages may have images."""
    text, others = "{{ part.text }}", ""
    for kind, written in family.items.items():
        others += f"{{% elif part.type == '{kind}' %}}{written}"
    return plain.replace(text, f"{{% if part.type == 'text' %}}{text}{others}{{% endif %}}")


def write_processor(config: Any, folder: Path) -> None:
    """Write the files of a processor that keeps images of whole patches as they are.

    Args:
        config: of a model of :data:`FAMILIES`.
        folder: exists.
    """
    vision = config.vision_config
    if config.model_type == "gemma3":
        size = {"height": vision.image_size, "width": vision.image_size}
        image = {"image_processor_type": "Gemma3ImageProcessor", "size": size} | NORM
        processor = {"processor_class": "Gemma3Processor", "image_seq_length": config.mm_tokens_per_image}
        _write(folder / "preprocessor_config.json", image)
        _write(folder / "processor_config.json", processor)
        return
    if config.model_type == "gemma4":
        parts = ("image_processor", "ImageProcessor"), ("video_processor", "VideoProcessor")
        made: dict[str, Any] = {
            name: {f"{name}_type": f"Gemma4{kind}", "max_soft_tokens": _MOST_TOKENS} for name, kind in parts
        }
        made["feature_extractor"] = {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}
        of_all = {"processor_class": "Gemma4Processor", "image_seq_length": _MOST_TOKENS}
        _write(folder / "processor_config.json", of_all | made)
        return
    patch = vision.patch_size
    if config.model_type == "mistral3":
        image = {"image_processor_type": "PixtralImageProcessor", "patch_size": patch} | NORM
        _write(folder / "preprocessor_config.json", image | {"size": {"longest_edge": vision.image_size}})
        merged = {"patch_size": patch, "spatial_merge_size": config.spatial_merge_size}
        _write(folder / "processor_config.json", {"processor_class": "PixtralProcessor"} | merged | _MISTRAL)
        return
    sizes = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
    sizes["size"] = {"shortest_edge": 4 * patch * patch, "longest_edge": _MOST_PATCHES * patch * patch}
    videos = "Qwen3VLVideoProcessor" if config.model_type == "qwen3_vl" else "Qwen2VLVideoProcessor"
    image = {"image_processor_type": "Qwen2VLImageProcessor"} | sizes | NORM
    _write(folder / "preprocessor_config.json", image)
    _write(folder / "video_preprocessor_config.json", {"video_processor_type": videos} | sizes)


def _write(path: Path, settings: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(settings, indent=1) + "\n")


def save_weights(model: Any, folder: Path) -> None:
    """Write configuration and weights, under the names that published checkpoints have."""
    from safetensors.torch import load_file, save_file
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    if model.config.model_type == "gemma3":
        file, tower = folder / "model.safetensors", "vision_tower."
        named = {name.replace(tower, f"{tower}vision_model."): one.clone() for name, one in load_file(file).items()}
        save_file(named, file, metadata={"format": "pt"})


def write_model(
    folder: Path,
    family: Family,
    shape: Decoder,
    seed: int,
    ends: dict[str, int],
    id_of: Callable[[str], int],
    tokens: int,
) -> None:
    """Write configuration, weights and processor; the same arguments give the same files.

    Args:
        folder: exists.
        shape: of the decoder.
        seed: of the weights.
        ends: ids of the tokens that begin, end and pad a text, by their fields of a configuration.
        id_of: the id of a token.
        tokens: ids from here on get a logit of 0.
    """
    import torch
    import transformers

    config = family.configure(shape, ends, id_of)
    config.dtype = shape.dtype
    drawn = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    silent = [*range(min(map(id_of, family.special))), *map(id_of, family.special), *range(tokens, shape.vocab)]
    with torch.no_grad():
        draw_weights(model, shape, silent, drawn)
    save_weights(model.to(getattr(torch, shape.dtype)), folder)
    write_processor(config, folder)


def draw_weights(model: Any, shape: Decoder, silent: list[int], drawn: "Callable[..., torch.Tensor]") -> None:
    """Draw weights whose products are as large as what they are multiplied with.

    Args:
        model: of Transformers, in fp32; it is changed.
        shape: of its decoder.
        silent: ids of tokens whose logit is 0.
        drawn: standard normal numbers in fp32 of a size.
    """
    import torch

    adds_one = {f"{name}.weight" for name, module in model.named_modules() if type(module).__name__ == "Gemma3RMSNorm"}
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)}
    is_tied = bool(model.config.get_text_config().tie_word_embeddings)
    for name, weight in model.named_parameters():
        noise = drawn(*weight.shape)
        if name.endswith("bias"):
            weight.copy_(0.1 * noise)
        elif weight.dim() == 1:
            is_last = is_tied and name.endswith("language_model.norm.weight")
            center = shape.head_gain / _TIED if is_last else 1
            weight.copy_(center * (1 + 0.1 * noise) - int(name in adds_one))
        elif name.endswith("embed_tokens.weight"):
            weight.copy_(noise * (_TIED * shape.hidden**-0.5 if is_tied else shape.embed_gain))
        elif name in tables or name.endswith("position_embedding_table"):
            weight.copy_(noise)
        else:
            gain = shape.head_gain if name.endswith("lm_head.weight") else 1
            weight.copy_(noise * (gain * weight[0].numel() ** -0.5))
    model.get_output_embeddings().weight[silent] = 0
