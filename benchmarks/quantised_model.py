"""A checkpoint of a published model's shape, quantised or in bf16, with random weights, a file a layer, made on a GPU
in seconds: ``python -m benchmarks.quantised_model 8b w4a16-g128 FOLDER``.
"""

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm_batch_invariant.verify.demo_model import (
    Shape,
    drawing_of,
    gpt_oss_config_of,
    gpt_oss_weights,
    save_tokenizer,
    train_tokenizer,
)
from vllm_batch_invariant.verify.quantised_model import CHECKPOINT_FORMATS, quantised, quantization_config

_GPT_OSS_20B = Shape(
    hidden=2880,
    experts=32,
    expert_intermediate=2880,
    dense_layers=0,
    layers=24,
    heads=64,
    kv_heads=8,
    vocab=201088,
    max_length=131072,
)
_QWEN3_5_9B = Shape(
    hidden=4096,
    intermediate=12288,
    layers=32,
    heads=16,
    kv_heads=4,
    head_size=256,
    vocab=248320,
    max_length=262144,
    hybrid="delta",
    rule_heads=(16, 32),
    rule_head_size=128,
    attention_every=4,
)
SHAPES = {
    "8b": Shape(4096, 12288, layers=36, heads=32, kv_heads=8, head_size=128, vocab=151936, max_length=40960),
    "30b-a3b": Shape(
        hidden=2048,
        experts=128,
        top_k=8,
        expert_intermediate=768,
        dense_layers=0,
        layers=48,
        heads=32,
        kv_heads=4,
        head_size=128,
        vocab=151936,
        max_length=40960,
    ),
    "gpt-oss-20b": _GPT_OSS_20B,
    "gpt-oss-120b": replace(_GPT_OSS_20B, experts=128, layers=36),
    "qwen3.5-9b": _QWEN3_5_9B,
    "qwen3.5-4b": replace(_QWEN3_5_9B, hidden=2560, intermediate=9216),
    "qwen3.5-35b-a3b": replace(
        _QWEN3_5_9B, hidden=2048, layers=40, kv_heads=2, experts=256, top_k=8, expert_intermediate=512
    ),
    "nemotron-h-8b": Shape(
        hidden=4096,
        intermediate=21504,
        layers=26,
        heads=32,
        kv_heads=8,
        head_size=128,
        vocab=131072,
        max_length=8192,
        hybrid="mamba2",
        rule_heads=(8, 128),
        rule_head_size=64,
        attention_every=6,
    ),
}
"""Of Qwen3-8B, Qwen3-30B-A3B, both gpt-oss, text models of Qwen3.5, of which 4B has an output embedding of its own
here, and Nemotron-H-8B, where each of 22 state spaces and 4 layers of attention has an MLP behind it.
"""
_WORDS = 4096
"""Of the tokenizer, which the load of a server draws its prompts from."""


def write(folder: Path, shape: Shape, name: str, device: str) -> None:
    """Write a checkpoint, whose tokenizer knows some of its tokens.

    Args:
        folder: for its files.
        shape: of a Qwen3 or a hybrid, or of a gpt-oss if the format is one of its experts.
        name: of :data:`CHECKPOINT_FORMATS`; empty: the weights as they are.
        device: that draws and quantises.
    """
    form = CHECKPOINT_FORMATS[name] if name else None
    of_gpt_oss = form is not None and form.of_experts
    folder.mkdir(parents=True, exist_ok=True)
    drawn = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    files: dict[str, str] = {}
    weights_of, configure = (gpt_oss_weights, gpt_oss_config_of) if of_gpt_oss else drawing_of(shape)
    for number, weights in enumerate(weights_of(shape, shape.vocab, drawn)):
        has_layers = form is not None and any(form.layer_of(weight) for weight in weights)
        stored = quantised(weights, form)[0] if form and has_layers else weights
        file = f"model-{number:05}.safetensors"
        save_file({at: tensor.contiguous().cpu() for at, tensor in stored.items()}, folder / file, {"format": "pt"})
        files |= dict.fromkeys(stored, file)
    config = configure(shape, 1, 0)
    if form:
        config["quantization_config"] = quantization_config(form, files)
    save_tokenizer(train_tokenizer(_WORDS), folder, shape.max_length)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantised_model", description=__doc__)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("format", help="of make-checkpoint; bf16: the weights as they are")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="fewer than the size has")
    options = parser.parse_args()
    shape = SHAPES[options.size]
    if options.layers:
        shape = replace(shape, layers=options.layers)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write(options.folder, shape, "" if options.format == "bf16" else options.format, device)


if __name__ == "__main__":
    main()
