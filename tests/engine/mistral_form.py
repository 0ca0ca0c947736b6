"""Checkpoints in the form of Mistral's: one file of weights, ``params.json``, and a tokenizer of mistral-common's."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests import fp8_checkpoints
from tests.engine import images

Names = Iterable[tuple[str, str | Callable[[re.Match[str]], str]]]
OF_TEXT: Names = (
    (r"input_layernorm", "attention_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"self_attn\.([qkv])_proj", r"attention.w\1"),
    (r"self_attn\.o_proj", "attention.wo"),
    (r"mlp\.gate_proj", "feed_forward.w1"),
    (r"mlp\.down_proj", "feed_forward.w2"),
    (r"mlp\.up_proj", "feed_forward.w3"),
    (r"embed_tokens", "tok_embeddings"),
    (r"lm_head", "output"),
)
"""Patterns of Transformers' names, and what Mistral calls them."""
_OF_PIXTRAL: Names = (
    (r"vision_tower\.", "vision_encoder."),
    (r"attention\.([qkvo])_proj", r"attention.w\1"),
    (r"gate_proj", "w1"),
    (r"down_proj", "w2"),
    (r"up_proj", "w3"),
    (r"multi_modal_projector\.linear_1", "vision_language_adapter.w_in"),
    (r"multi_modal_projector\.linear_2", "vision_language_adapter.w_out"),
    (r"multi_modal_projector\.norm", "pre_mm_projector_norm"),
    (r"multi_modal_projector\.patch_merger", "patch_merger"),
)
FP8 = "fp8 by tensors, given, in a file of Mistral's"
IMAGE, BREAK, END = 10, 12, 13
"""Tokens of an image's rows, behind a row of them, and behind the last."""


def renamed(name: str, names: Names) -> str:
    """What Mistral calls a weight of Transformers'."""
    written = re.sub(r"^(model\.)?(language_model\.)?(model\.)?", "", name)
    for pattern, other in names:
        written = re.sub(pattern, other, written)
    return written


def of_neighbours(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """A weight of queries or keys whose angles turn neighbours, of one of which they turn the halves of a head."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def turned(written: str, tensor: torch.Tensor, text: Any) -> torch.Tensor:
    """The same of a text model's weight, if it is of queries or keys.

    Args:
        written: Mistral's name.
        text: the configuration.
    """
    heads = {"wq": text.num_attention_heads, "wk": text.num_key_value_heads}.get(written[-9:-7])
    return of_neighbours(tensor, heads) if heads else tensor


def params_of(text: Any) -> dict[str, Any]:
    """Of a text model, as ``params.json`` has them."""
    rope = text.rope_parameters
    params = {
        "dim": text.hidden_size, "n_layers": text.num_hidden_layers, "head_dim": text.head_dim,
        "hidden_dim": text.intermediate_size, "n_heads": text.num_attention_heads, "vocab_size": text.vocab_size,
        "n_kv_heads": text.num_key_value_heads, "norm_eps": text.rms_norm_eps, "rope_theta": rope["rope_theta"],
        "max_position_embeddings": text.max_position_embeddings,
    }  # fmt: skip
    if rope["rope_type"] != "yarn":
        return params
    first = {"original_max_position_embeddings": rope["original_max_position_embeddings"]}
    betas = {"beta": rope["beta_fast"], "alpha": rope["beta_slow"], "apply_scale": False}
    scaling = {"llama_4_scaling": first | {"beta": rope["llama_4_scaling_beta"]}}
    return params | scaling | {"yarn": first | betas | {"factor": rope["factor"]}}


def save_tekken(folder: Path, size: int, special: Mapping[int, str], **parts: Any) -> None:
    """A tokenizer of so many tokens, of which 64 are special.

    Args:
        special: beside those that mistral-common gives numbers to.
        parts: ``image`` and ``audio``, what they are made into.
    """
    import mistral_common
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    words = json.loads((Path(mistral_common.__file__).parent / "data" / "tekken_240911.json").read_text())
    words.pop("image")
    named = {one["rank"]: one["token_str"].value for one in Tekkenizer.DEPRECATED_SPECIAL_TOKENS} | special
    words["vocab"] = words["vocab"][: size - 64]
    words["config"] |= {"num_vocab_tokens": len(words["vocab"]), "default_vocab_size": size, "version": "v7"}
    words["config"]["default_num_special_tokens"] = 64
    words["special_tokens"] = [
        {"rank": rank, "token_str": named.get(rank, f"<SPECIAL_{rank}>"), "is_control": True} for rank in range(64)
    ]
    (folder / "tekken.json").write_text(json.dumps(words | parts))


def save(config: Any, dtype: torch.dtype, folder: Path) -> torch.nn.Module:
    """A checkpoint of a model that sees images by Pixtral's encoder. Returns Transformers' model."""
    config.image_token_index = config.image_token_id = IMAGE
    config.text_config.rms_norm_eps = 1e-5  # also of the encoder's last norm, of which vLLM's is this
    made = images.drawn(config, dtype)
    vision, text, tensors = config.vision_config, config.text_config, {}
    for name, tensor in made.state_dict().items():
        is_text = "language_model" in name or name.startswith("lm_head")
        written = renamed(name, OF_TEXT if is_text else _OF_PIXTRAL)
        if is_text:
            tensor = turned(written, tensor, text)
        elif written.endswith(("wq.weight", "wk.weight")):
            tensor = of_neighbours(tensor, vision.num_attention_heads)
        tensors[written] = tensor.contiguous()
    save_file(tensors, folder / "consolidated.safetensors")
    of_tower = ("hidden_size", "num_channels", "image_size", "patch_size", "intermediate_size", "num_hidden_layers")
    tower = {name: getattr(vision, name) for name in (*of_tower, "num_attention_heads")}
    tower |= {"rope_theta": vision.rope_parameters["rope_theta"], "image_token_id": IMAGE}
    tower["adapter_bias"], merged = config.multimodal_projector_bias, merge_of(config)
    if merged > 1:
        tower |= {"spatial_merge_size": merged, "mm_projector_id": "patch_merge"}
        tower["add_pre_mm_projector_layer_norm"] = True
    (folder / "params.json").write_text(json.dumps(params_of(text) | {"vision_encoder": tower}))
    sizes = {"image_patch_size": vision.patch_size, "max_image_size": vision.image_size}
    save_tekken(folder, text.vocab_size, {}, image=sizes | {"spatial_merge_size": merged})
    return made


def quantise(source: Path, packed: Path) -> None:
    """Write such a checkpoint with the linear layers of its decoder in FP8, by tensors, and given scales."""
    form = replace(fp8_checkpoints.FORMS["fp8 by tensors, given"], scale="qscale_weight", given="qscale_act")
    made = {}
    for name, tensor in load_file(source / "consolidated.safetensors").items():
        if not re.fullmatch(r"layers\..*(attention|feed_forward)\.w\w\.weight", name):
            made[name] = tensor
            continue
        layer = name.removesuffix(".weight")
        made |= {f"{layer}.{part}": of_layer for part, of_layer in form.layer(tensor).items()}
    shutil.copytree(source, packed)
    save_file(made, packed / "consolidated.safetensors")
    params = json.loads((packed / "params.json").read_text())
    of_codes = {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}
    (packed / "params.json").write_text(json.dumps(params | of_codes))


def merge_of(config: Any) -> int:
    """Patches of a side of what is a token."""
    return getattr(config, "spatial_merge_size", 1)


def written(merged: int, grid: tuple[int, ...]) -> list[int]:
    """The tokens of an image of so many patches, as mistral-common writes them."""
    rows, columns = (side // merged for side in grid)
    found = [*[IMAGE] * columns, BREAK] * rows
    return [*found[:-1], END]
