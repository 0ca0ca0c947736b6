"""A small DeepSeek-OCR of random weights. The sizes of its encoder are constants of vLLM's, which a hook makes smaller
where vLLM's module is imported: the classes are vLLM's.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image, ImageOps
from safetensors.torch import save_file
from transformers.models.clip.modeling_clip import CLIPEncoder
from transformers.models.deepseek_ocr2 import modeling_deepseek_ocr2 as modeling
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import (
    DeepseekOcr2SamVisionConfig,
    DeepseekOcr2TextConfig,
)

from tests.engine import images, multimodal

WHOLE, SQUARE = 256, 128
"""Pixels of the sides of all of an image, and of the squares that a larger one has besides."""
PATCH = 16
_SAM = {"encoder_embed_dim": 128, "encoder_depth": 3, "encoder_num_heads": 2, "encoder_global_attn_indexes": [1]}
_CLIP = {"num_hidden_layers": 2, "intermediate_size": 512}
_ROWS_OF_CLIP = 1024
"""Elements of a row of CLIP's, and of what SAM gives for it."""
_HOOK = multimodal.changing(
    "vllm.model_executor.models.deepseek_ocr",
    f"""\
module.BASE_SIZE, module.IMAGE_SIZE = {WHOLE}, {SQUARE}
config = module.CLIPVisionConfig
module.CLIPVisionConfig = lambda **given: config(**(given | {_CLIP}))
from vllm.model_executor.models import deepencoder

module.build_sam_vit_b = lambda: deepencoder._build_sam(**{_SAM})
""",
)


def python_path(folder: Path) -> list[str]:
    """A folder that has a process make the encoder smaller."""
    (folder / "small").mkdir()
    (folder / "small" / "sitecustomize.py").write_text(_HOOK)
    return [str(folder / "small")]


def config() -> Any:
    """Text with heads of 64 and experts on its second layer; SAM with windows of 14 x 14 patches on two layers of
    three, and heads of 64.
    """
    text = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 384}
    text |= {"num_hidden_layers": 2, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    text |= {"vocab_size": multimodal.TEXT["vocab_size"], "max_position_embeddings": 1024, "n_shared_experts": 1}
    sam = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "global_attn_indexes": [1]}
    clip = {"hidden_size": _ROWS_OF_CLIP, "num_attention_heads": 16, "image_size": 224, "patch_size": 14}
    return SimpleNamespace(
        text_config=DeepseekOcr2TextConfig(**text, mlp_layer_types=["dense", "sparse"], pad_token_id=0),
        vision_config=SimpleNamespace(patch_size=PATCH),
        sam=DeepseekOcr2SamVisionConfig(**sam, downsample_channels=[512, _ROWS_OF_CLIP]),
        clip=transformers.CLIPVisionConfig(**clip | _CLIP),
        model_type="deepseek_ocr",
    )


class Reference(torch.nn.Module):
    """The model of Transformers' parts: SAM and text of DeepSeek-OCR-2, and CLIP's layers."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.config, size = made, made.text_config.hidden_size
        self.sam_model = modeling.DeepseekOcr2SamVisionEncoder._from_config(made.sam, attn_implementation="eager")
        self.clip_norm = torch.nn.LayerNorm(_ROWS_OF_CLIP, eps=1e-5)
        self.class_embedding = torch.nn.Parameter(torch.empty(_ROWS_OF_CLIP))
        self.positions = torch.nn.Parameter(torch.empty(257, _ROWS_OF_CLIP))
        made.clip._attn_implementation = "eager"
        self.clip = CLIPEncoder(made.clip)
        self.projector = torch.nn.Linear(2 * _ROWS_OF_CLIP, size)
        self.image_newline, self.view_seperator = (torch.nn.Parameter(torch.empty(size)) for _ in range(2))
        self.language_model = modeling.DeepseekOcr2TextModel._from_config(made.text_config, attn_implementation="eager")
        self.lm_head = torch.nn.Linear(size, made.text_config.vocab_size, bias=False)

    def set_experts_implementation(self, name: str) -> None:
        self.language_model.set_experts_implementation(name)

    def encoded(self, pixels: torch.Tensor) -> torch.Tensor:
        """[squares, rows, columns, size] of [squares, 3, height, width]."""
        of_sam = self.sam_model(pixels).last_hidden_state.flatten(2).mT
        side = int(of_sam.shape[1] ** 0.5)
        first, grid = self.positions[:1], self.positions[1:].T.view(1, -1, 16, 16)
        least = torch.nn.functional.interpolate(grid, size=(side, side), mode="bicubic", antialias=True)
        rows = torch.cat([self.class_embedding.expand(len(pixels), 1, -1), of_sam], 1)
        rows = self.clip_norm(rows + torch.cat([first, least[0].flatten(1).T]))
        of_clip = self.clip(inputs_embeds=rows).last_hidden_state[:, 1:]
        return self.projector(torch.cat([of_clip, of_sam], -1)).unflatten(1, (side, side))

    def with_ends(self, rows: torch.Tensor) -> torch.Tensor:
        """[tokens, size] of [rows, columns, size]."""
        return torch.cat([rows, self.image_newline.expand(len(rows), 1, -1)], 1).flatten(0, 1)

    def forward(
        self, input_ids: torch.Tensor, seen: list[tuple[torch.Tensor, torch.Tensor, tuple[int, int]]] | None = None
    ) -> Any:
        embedded = self.language_model.embed_tokens(input_ids)
        found = []
        for whole, squares, (columns, rows) in seen or ():
            if len(squares):
                made = self.encoded(squares).unflatten(0, (rows, columns)).permute(0, 2, 1, 3, 4)
                found.append(self.with_ends(made.flatten(2, 3).flatten(0, 1)))
            found += [self.with_ends(self.encoded(whole)[0]), self.view_seperator[None]]
        if found:
            embedded = embedded.masked_scatter((input_ids == images.IMAGE)[..., None], torch.cat(found))
        hidden = self.language_model(inputs_embeds=embedded).last_hidden_state
        return SimpleNamespace(logits=self.lm_head(hidden))


def seen(pictures: list[np.ndarray]) -> dict[str, Any]:
    """All of each picture, its squares, and how many columns and rows of them there are."""
    found = []
    for one in pictures:
        image = Image.fromarray(one[0])
        whole = ImageOps.pad(image, (WHOLE, WHOLE), color=(127, 127, 127))
        columns, rows = (-(-side // SQUARE) for side in image.size)
        cut = _pixels(image).unflatten(2, (columns, -1)).unflatten(1, (rows, -1)) if rows * columns > 1 else None
        squares = [] if cut is None else cut.permute(1, 3, 0, 2, 4).flatten(0, 1)
        found.append((_pixels(whole)[None], squares, (columns, rows)))
    return {"seen": found}


def _pixels(image: Image.Image) -> torch.Tensor:
    return (torch.from_numpy(np.array(image)).permute(2, 0, 1).double() / 255 - 0.5) / 0.5


_NAMES = (
    (r"^sam_model\.(patch_embed)\.projection", r"sam_model.\1.proj"),
    (r"^sam_model\.layers", "sam_model.blocks"),
    (r"^(sam_model\.blocks.*)layer_norm(\d)", r"\1norm\2"),
    (r"^sam_model\.neck\.conv1", "sam_model.neck.0"),
    (r"^sam_model\.neck\.layer_norm1", "sam_model.neck.1"),
    (r"^sam_model\.neck\.conv2", "sam_model.neck.2"),
    (r"^sam_model\.neck\.layer_norm2", "sam_model.neck.3"),
    (r"^sam_model\.proj\.conv1", "sam_model.net_2"),
    (r"^sam_model\.proj\.conv2", "sam_model.net_3"),
    (r"^clip_norm", "vision_model.pre_layrnorm"),
    (r"^class_embedding", "vision_model.embeddings.class_embedding"),
    (r"^positions", "vision_model.embeddings.position_embedding.weight"),
    (r"^clip\.", "vision_model.transformer."),
    (r"^projector", "projector.layers"),
    (r"^language_model\.", ""),
)
"""Patterns of the names above, and what DeepSeek calls them."""


def save(made: Any, dtype: torch.dtype, folder: Path) -> torch.nn.Module:
    """A checkpoint with a tokenizer of words. Returns the model that it is of."""
    torch.manual_seed(0)
    model = Reference(made)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(weight, std=0.1)
            elif weight.dim() > 1 and "embed" not in name and name != "positions":
                torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
            elif "norm" not in name:
                torch.nn.init.normal_(weight)
    model = model.to(dtype)
    weights, tensors = model.state_dict(), {}
    for name, tensor in weights.items():
        written = name
        for pattern, other in _NAMES:
            written = re.sub(pattern, other, written)
        written = written if written.startswith("lm_head") else f"model.{written}"
        if written.endswith("experts.gate_up_proj"):
            for number, one in enumerate(tensor):
                gate, up = one.chunk(2)
                stem = written.replace("experts.gate_up_proj", f"experts.{number}.")
                tensors |= {f"{stem}gate_proj.weight": gate.clone(), f"{stem}up_proj.weight": up.clone()}
        elif written.endswith("experts.down_proj"):
            stem = written.replace(".down_proj", "")
            tensors |= {f"{stem}.{number}.down_proj.weight": one.clone() for number, one in enumerate(tensor)}
        elif found := re.search(r"^model\.vision_model.*([qkv])_proj", written):
            if found[1] == "q":
                parts = [weights[name.replace("q_proj", f"{one}_proj")] for one in "qkv"]
                tensors[written.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        else:
            tensors[written] = tensor.contiguous()
    patches = torch.randn(_ROWS_OF_CLIP, 3, 14, 14).to(dtype)  # which SAM's rows stand for
    tensors["model.vision_model.embeddings.patch_embedding.weight"] = patches
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = made.text_config
    shared = (
        *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
        *("n_routed_experts", "num_experts_per_tok", "n_shared_experts"),
    )
    language = {name: getattr(text, name) for name in shared} | {"first_k_dense_replace": 1, "q_lora_rank": None}
    language |= {"kv_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0, "use_mla": False}
    language |= {"topk_method": "greedy", "norm_topk_prob": False, "scoring_func": "softmax", "n_group": 1}
    language |= {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "topk_group": 1}
    language |= {"torch_dtype": str(dtype).removeprefix("torch."), "bos_token_id": 1, "eos_token_id": 2}
    whole = {"architectures": ["DeepseekOCRForCausalLM"], "model_type": "deepseek_vl_v2", "tile_tag": "2D"}
    projector = {"projector_type": "linear", "input_dim": 2 * _ROWS_OF_CLIP, "n_embed": text.hidden_size}
    whole |= {"language_config": language, "projector_config": projector, "vision_config": {"image_size": 1024}}
    whole |= {"candidate_resolutions": [[1024, 1024]], "torch_dtype": language["torch_dtype"]}
    whole |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(whole))
    words = {"<image>" if number == images.IMAGE else f"w{number}": number for number in range(text.vocab_size)}
    template = images.chat_template(image="<image>")
    settings = {"bos_token": "w1", "chat_template": template}
    images.save_tokenizer(folder, words, ["<image>"], settings)
    return model
