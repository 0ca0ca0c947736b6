"""A checkpoint's folder without weights, of a published model's shape that sees images, for an engine that draws its
own (``--load-format dummy``): ``python -m benchmarks.image_model qwen2.5-vl-7b FOLDER``.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import transformers

from tests.engine.images import NORM, save_tokenizer

_QWEN_TEXT = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
    "max_position_embeddings": 128_000,
    "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
}
_QWEN_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_QWEN_TOKENS = {
    "vision_start": (151_652, "<|vision_start|>"),
    "vision_end": (151_653, "<|vision_end|>"),
    "image": (151_655, "<|image_pad|>"),
    "video": (151_656, "<|video_pad|>"),
}
_GEMMA_TEXT = {
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}
_GEMMA_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
}
_GEMMA_TOKENS = {
    "boi": (255_999, "<start_of_image>"),
    "eoi": (256_000, "<end_of_image>"),
    "image": (262_144, "<image_soft_token>"),
}
_LINES = {107 + number: "\n" * (1 + number) for number in range(4)}
"""Which stand around an image of Gemma 3's."""


def qwen2_5_vl_7b() -> tuple[transformers.PretrainedConfig, dict[str, dict[str, Any]], dict[str, tuple[int, str]]]:
    """A configuration, what its processors' files say, and tokens with what they are called."""
    tokens = {f"{name}_token_id": token for name, (token, _) in _QWEN_TOKENS.items()}
    config = transformers.Qwen2_5_VLConfig(text_config=_QWEN_TEXT, vision_config=_QWEN_VISION, **tokens)
    sizes = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    sizes["size"] = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16_384}
    files = {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor"} | sizes | NORM,
        "video_preprocessor_config.json": {"video_processor_type": "Qwen2VLVideoProcessor"} | sizes,
    }
    return config, files, _QWEN_TOKENS


def gemma3_4b() -> tuple[transformers.PretrainedConfig, dict[str, dict[str, Any]], dict[str, tuple[int, str]]]:
    """The same of Gemma 3."""
    tokens = {"boi_token_index": 255_999, "eoi_token_index": 256_000, "image_token_index": 262_144}
    config = transformers.Gemma3Config(
        text_config=_GEMMA_TEXT, vision_config=_GEMMA_VISION, mm_tokens_per_image=256, **tokens
    )
    image = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}} | NORM
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": 256}
    files = {"preprocessor_config.json": image, "processor_config.json": processor}
    return config, files, _GEMMA_TOKENS


MODELS = {"qwen2.5-vl-7b": qwen2_5_vl_7b, "gemma-3-4b": gemma3_4b}


def write(folder: Path, name: str) -> None:
    """Write the folder of a model of :data:`MODELS`."""
    config, files, tokens = MODELS[name]()
    config.architectures = [type(config).__name__.replace("Config", "ForConditionalGeneration")]
    config.dtype = "bfloat16"
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    for file, said in files.items():
        (folder / file).write_text(json.dumps(said))
    names = dict(tokens.values()) | (_LINES if tokens is _GEMMA_TOKENS else {})
    words = {names.get(number, f"w{number}"): number for number in range(config.text_config.vocab_size)}
    special = {f"{kind}_token": called for kind, (_, called) in tokens.items()}
    lines = [called for called in names.values() if not called.strip()]
    settings = {"extra_special_tokens": special}
    save_tokenizer(folder, words, [called for _, called in tokens.values()], settings, lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.image_model", description=__doc__)
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    write(options.folder, options.name)


if __name__ == "__main__":
    main()
