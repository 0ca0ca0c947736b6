"""Tiny multimodal models of random weights."""

import re
import textwrap
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.engine.gemma4 import config_around
from tests.fakes import num2words, torchvision
from tests.faults.fuzz import PROCESSOR
from vllm_batch_invariant.verify.check.guarantees import AGAIN, ENCODED, KEPT, PROCESSED
from vllm_batch_invariant.verify.check.results import CheckResults
from vllm_batch_invariant.verify.harness.drive import describe, drive, finished
from vllm_batch_invariant.verify.outcome import Outcome

TEXT = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 512}
_SIGLIP = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_QWEN_TOKENS = {"image_token_id": 4000, "video_token_id": 4001, "vision_start_token_id": 4002}


def qwen2_5_vl() -> transformers.PretrainedConfig:
    """With biases of queries, keys and values, and sections of frequencies one after the other."""
    return transformers.Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        text_config=TEXT | {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}},
        vision_config=_QWEN_VISION | {"fullatt_block_indexes": [0]},
        vision_end_token_id=4003,
        **_QWEN_TOKENS,
    )


def qwen3_vl() -> transformers.PretrainedConfig:
    """With norms of heads, interleaved sections, and an encoder that would add to hidden states (deepstack)."""
    rope = {"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True}
    return transformers.Qwen3VLConfig(
        architectures=["Qwen3VLForConditionalGeneration"],
        text_config=TEXT | {"head_dim": 64, "rope_scaling": rope},
        vision_config=_QWEN_VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        vision_end_token_id=4003,
        **_QWEN_TOKENS,
    )


def qwen3_vl_moe() -> transformers.PretrainedConfig:
    """The same with experts on every layer."""
    of_experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1}
    of_experts["norm_topk_prob"] = True  # as published
    made = qwen3_vl()
    text, vision = (one.to_dict() for one in (made.text_config, made.vision_config))
    return transformers.Qwen3VLMoeConfig(
        architectures=["Qwen3VLMoeForConditionalGeneration"],
        text_config={name: value for name, value in text.items() if name != "model_type"} | of_experts,
        vision_config={name: value for name, value in vision.items() if name != "model_type"},
        vision_end_token_id=4003,
        **_QWEN_TOKENS,
    )


def qwen3_5(text: dict[str, Any]) -> transformers.PretrainedConfig:
    """Around a text model, with experts or without, whose rotary embedding turns 16 elements of a head, by interleaved
    sections.
    """
    rope = text["rope_parameters"] | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    of_experts = "num_experts" in text
    config = transformers.Qwen3_5MoeConfig if of_experts else transformers.Qwen3_5Config
    return config(
        architectures=[f"Qwen3_5{'Moe' if of_experts else ''}ForConditionalGeneration"],
        text_config=text | {"rope_parameters": rope},
        vision_config=_QWEN_VISION | {"out_hidden_size": text["hidden_size"], "num_position_embeddings": 16},
        image_token_id=500,
        video_token_id=501,
        vision_start_token_id=502,
        vision_end_token_id=503,
    )


def gemma3() -> transformers.PretrainedConfig:
    """With heads of 256 and a sliding window on every other layer."""
    kinds = {"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"]}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256}
    return transformers.Gemma3Config(
        architectures=["Gemma3ForConditionalGeneration"],
        text_config=TEXT | kinds | heads,
        vision_config=_SIGLIP | {"hidden_size": 32, "intermediate_size": 32},
        mm_tokens_per_image=1,
        image_token_index=4000,
        boi_token_index=4002,
        eoi_token_index=4003,
    )


def gemma4() -> transformers.PretrainedConfig:
    """With heads of two sizes, layers that read the KV cache of others, inputs of each layer, and an audio encoder."""
    config = config_around("E2B")
    config.audio_config = transformers.Gemma4AudioConfig()
    return config


def muse_glimmer() -> transformers.PretrainedConfig:
    """With a window and angles on every layer but the last of four, norms around attention and MLP, of queries and keys
    without weights, gates of heads, and logits that have a cap; and an encoder with two heads of 96, angles by row and
    column, positions interpolated between those of 8 x 8 patches, as many of which are a window on two layers of three,
    and of which four are a token.
    """
    vision = {"num_hidden_layers": 3, "hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 2}
    vision |= {"patch_size": 14, "pos_emb_height": 8, "pos_emb_width": 8}
    sizes = {"merge_kernel_size": 2, "output_dim": 768, "adapter_dim": 320}  # as vLLM 0.32 calls them
    text = TEXT | {"num_hidden_layers": 4, "head_dim": 64, "sliding_window": 100, "rms_norm_eps": 1e-5}
    return transformers.MuseGlimmerConfig(
        architectures=["MuseGlimmerForConditionalGeneration"],
        text_config=text | {"output_multiplier": 0.7, "final_logit_softcapping": 4.0},
        vision_config=vision | sizes,
        image_token_id=4000,
        video_token_id=4001,
        out_hidden_size=768,
        projector_hidden_size=320,
        tie_word_embeddings=False,
    )


def model(config: transformers.PretrainedConfig, dtype: torch.dtype) -> torch.nn.Module:
    """Random weights, of the encoder too; Hugging Face's biases would be 0."""
    torch.manual_seed(0)
    made = transformers.AutoModelForImageTextToText.from_config(config)
    for name, weight in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
        if config.model_type == "muse_glimmer" and name.endswith("norm.weight"):  # of which most begin with 0
            weight.data.add_(torch.randn_like(weight) / 4)
    return made.to(dtype)


def text_of(made: torch.nn.Module) -> torch.nn.Module:
    """The text model that has the weights of a Qwen2.5-VL."""
    text, weights = made.config.text_config, made.state_dict()
    rope = {"rope_type": "default", "rope_theta": text.rope_parameters["rope_theta"]}
    twin = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TEXT, rope_parameters=rope)).to(made.dtype)
    twin.load_state_dict(
        {name.replace("language_model.", ""): weights[name] for name in weights if "visual" not in name}
    )
    return twin


def python_path(folder: Path) -> list[str]:
    """Folders that a process needs on its path for vLLM to know these models."""
    return sorted({*torchvision.where_missing(folder), *num2words.where_missing(folder)})


def weights(llm: Any) -> dict[str, Any]:
    """What an engine has built of a multimodal model; run by the driver."""
    return llm.apply_model(_weights)[0]


def _weights(built: torch.nn.Module) -> dict[str, Any]:
    encoders = {name: built.get_submodule(name) for name in built._tower_model_names}
    return {
        "parameters": [name for name, _ in built.named_parameters()],
        "encoders": {name: type(module).__name__ for name, module in encoders.items()},
        "on": sorted({tensor.device.type for module in encoders.values() for tensor in module.module.parameters()}),
    }


def answers(llm: Any, prompts: list[list[int]], with_picture: list[int] | None = None) -> dict[str, Any]:
    """What prompts get, and what vLLM says to a request with a picture that comes among them; run by the driver."""
    from PIL import Image
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True)
    engine, said = llm.llm_engine, ""
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{number}", {"prompt_token_ids": prompt}, params)
    done = finished([engine.step()])
    if with_picture is not None:
        picture = {"image": Image.new("RGB", (28, 28))}
        try:
            engine.add_request("picture", {"prompt_token_ids": with_picture, "multi_modal_data": picture}, params)
        except ValueError as error:
            said = str(error)
    done |= finished(drive(engine))
    return {"said": said, "answers": [describe(done[f"{number}"])["completions"] for number in range(len(prompts))]}


def assert_a_check_finds_the_faulty_tower(checked: dict[str, CheckResults]) -> None:
    """Of results by the fault of an engine, "" for none: items in one call break with the fault "tower" alone, and what
    is made of an item beside others with "processor" alone, of which a tensor is named.
    """
    outcomes = {
        fault: {case.name: case.outcome for case in results.cases if case.outcome is not Outcome.NOT_TESTED}
        for fault, results in checked.items()
    }
    assert outcomes[""] == dict.fromkeys((AGAIN[1], PROCESSED[1], ENCODED[1], KEPT[1]), Outcome.HOLDS), checked[""].gaps
    assert outcomes["tower"][ENCODED[1]] is Outcome.BREAKS
    assert outcomes["tower"][PROCESSED[1]] is Outcome.HOLDS
    if PROCESSOR not in checked:
        return
    assert outcomes[PROCESSOR][PROCESSED[1]] is Outcome.BREAKS
    [case] = [case for case in checked[PROCESSOR].cases if case.name == PROCESSED[1]]
    assert re.match(r"tensor \d+, \w+ of [\dx]+ as \d of \d: \w+ \[", case.difference), case.difference


def changing(module: str, changes: str) -> str:
    """The text of a ``sitecustomize.py`` that changes a module of vLLM's behind its import.

    Args:
        changes: lines of Python, of which ``module`` is the module.
    """
    return f"""
import importlib.util
import sys

NAME = "{module}"


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(Finder)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, Finder)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
{textwrap.indent(changes, " " * 12)}

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder)
"""
