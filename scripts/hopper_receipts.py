"""Receipts of a real engine on a Hopper, in its usual arithmetic, computed again on the CPU beside it.

usage: python -m scripts.hopper_receipts FOLDER     with vLLM 0.32 or later
       python -m scripts.hopper_receipts FOLDER --only 8b       those of the shape of Qwen3-8B, or 0.6b, made alone
       python -m scripts.hopper_receipts FOLDER --model-of 8b   its weights alone, to verify them elsewhere

FOLDER gets a small model whose weights are made of integers, in several architectures, also in FP8, and for each the
receipts of a greedy completion and of one with a seed, with what each layer made: where bits differ, the first layer
that differs is named. Where this package has no special functions of a GPU, they are those of FOLDER/tables.xz. Of the
larger shapes 200 or 1000 tokens are made as an engine serves them, in CUDA graphs and among 31 requests, and not
verified; FOLDER then holds their weights (16 GB of 8b). Exit status 0: every bit is equal.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from scripts import large_model
from vllm_batch_invariant.envs import FLAG
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.ops.exact.definition import Floats, bf16, fp32
from vllm_batch_invariant.ops.exact.known_answers import checkpoint, configuration, normal
from vllm_batch_invariant.ops.hopper import confirmed, known_answers, tables
from vllm_batch_invariant.ops.hopper.confirmed import ALL
from vllm_batch_invariant.verify.outcome import NoTestError
from vllm_batch_invariant.verify.quantised_model import quantise
from vllm_batch_invariant.verify.receipt.hopper import Hopper
from vllm_batch_invariant.verify.receipt.recompute import recompute
from vllm_batch_invariant.verify.receipt.record import Receipt, Sampling

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4,
    "moe_intermediate_size": 128, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
_MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 100}
_GEMMA = {
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 200,
    "sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA_2 = _GEMMA | {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 3.0,
}  # fmt: skip
_GEMMA_3 = _GEMMA | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {}, "llama": _LLAMA, "qwen3-fp8": {}, "llama-fp8": _LLAMA, "qwen3-moe": _MIXTURE,
    "qwen3-moe-fp8": _MIXTURE, "mistral": _MISTRAL, "gemma2": _GEMMA_2, "gemma3": _GEMMA_3,
}  # fmt: skip
"""Changes to the configuration of the known model."""
_WITH_NORMS_OF_HEADS = ("qwen3", "qwen3_moe", "gemma3_text")
SHAPES = {
    "0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000,
    },
}  # fmt: skip
"""Sizes of the model of that name."""
PROMPT = tuple(int(one) % 4096 for one in (7919 * number**2 + 13 * number + 5 for number in range(300)))
SAMPLINGS = {"greedy": {}, "seeded": {"temperature": 0.8, "seed": 7, "top_k": 100, "top_p": 0.9}}
TOKENS = 24
SERVED_TOKENS = {"0.6b": 200, "8b": 1000}
CONTEXT = 1024
SERVED_CONTEXT = {"0.6b": CONTEXT, "8b": 2048}


def save_model(folder: Path, name: str) -> Path:
    """Write the checkpoint of one of :data:`MODELS` or :data:`SHAPES`."""
    folder.mkdir(parents=True, exist_ok=True)
    changes = MODELS.get(name, {})
    config = configuration(**SHAPES.get(name, changes))
    written, text = folder / "config.json", json.dumps(config)
    if name in SHAPES:
        if not written.exists() or written.read_text() != text:  # it is written last
            large_model.save(folder, config)
            written.write_text(text)
        return folder
    written.write_text(text)
    _, weights = checkpoint(**changes)
    if config["model_type"] not in _WITH_NORMS_OF_HEADS:
        weights = {key: value for key, value in weights.items() if ".q_norm." not in key and ".k_norm." not in key}
    if changes is _MIXTURE:
        weights = dict(_with_experts(weights, config["hidden_size"]))
    if config["model_type"].startswith("gemma"):
        weights = dict(_of_gemma(weights))
    bf16 = {key: torch.from_numpy(floats).to(torch.bfloat16) for key, floats in weights.items()}
    save_file(bf16, folder / "model.safetensors", metadata={"format": "pt"})
    if name.endswith("-fp8"):
        quantise(folder, "w8a8-fp8-block")
    return folder


def _with_experts(weights: dict[str, Floats], hidden: int) -> Iterator[tuple[str, Floats]]:
    """The weights with a mixture of experts in the place of each MLP."""
    inner, count = _MIXTURE["moe_intermediate_size"], _MIXTURE["num_experts"]
    for number, (name, weight) in enumerate(weights.items(), 1):
        if ".mlp." not in name:
            yield name, weight
            continue
        layer, _, part = name.partition(".mlp.")
        shape = (hidden, inner) if part.startswith("down") else (inner, hidden)
        for expert in range(count):
            drawn = normal(10_000 + 100 * number + expert, *shape)
            yield f"{layer}.mlp.experts.{expert}.{part}", bf16(drawn / fp32(math.sqrt(shape[1])))
        if part.startswith("down"):
            yield f"{layer}.mlp.gate.weight", bf16(normal(5000 + number, count, hidden) / fp32(math.sqrt(hidden)))


def _of_gemma(weights: dict[str, Floats]) -> Iterator[tuple[str, Floats]]:
    """The weights of a Gemma, whose norms are near 0 and of which there are four in a layer."""
    for number, (name, weight) in enumerate(weights.items()):
        if name == "lm_head.weight":
            continue
        yield name, weight - fp32(1) if "norm" in name else weight
        if "post_attention_layernorm" in name:
            for more, part in enumerate(("pre_feedforward", "post_feedforward")):
                drawn = normal(20_000 + 2 * number + more, *weight.shape) * fp32(0.125)
                yield name.replace("post_attention", part), bf16(drawn)


def engine_of(folder: Path, name: str, **settings: Any) -> Any:
    """This process's engine of a model that is written first."""
    os.environ |= {FLAG: "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    started = time.monotonic()
    path = save_model(folder / name, name)
    print(f"{path} after {time.monotonic() - started:.0f} s", flush=True)
    from vllm import LLM

    return LLM(str(path), skip_tokenizer_init=True, **settings)


def make(folder: Path, name: str) -> dict[str, Receipt]:
    """The receipts of completions of this process's engine, by :data:`SAMPLINGS`."""
    from vllm_batch_invariant.verify import receipt
    from vllm_batch_invariant.verify.bisect.engine import WORKER_EXTENSION
    from vllm_batch_invariant.verify.receipt import engine

    llm = engine_of(
        folder,
        name,
        max_model_len=CONTEXT,
        enforce_eager=True,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.2,
        worker_extension_cls=WORKER_EXTENSION,
    )
    info, made = receipt.engine_info(llm), {}
    for how, chosen in SAMPLINGS.items():
        sampling = Sampling(max_tokens=TOKENS, logprobs=5, ignore_eos=True, **chosen)
        completion, trace = engine.traced(llm, PROMPT, sampling)
        made[how] = Receipt.of(info, PROMPT, sampling, completion, False, trace)
    return made


def make_served(folder: Path, name: str) -> dict[str, Receipt]:
    """The receipts of completions of one of :data:`SHAPES`, as an engine serves them: in graphs, among others."""
    from vllm_batch_invariant.verify import receipt
    from vllm_batch_invariant.verify.receipt import engine

    llm = engine_of(
        folder,
        name,
        max_model_len=SERVED_CONTEXT[name],
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=12 << 30,
        gpu_memory_utilization=0.3,
    )
    info, made = receipt.engine_info(llm), {}
    for how, chosen in SAMPLINGS.items():
        sampling = Sampling(max_tokens=SERVED_TOKENS[name], logprobs=5, ignore_eos=True, **chosen)
        alone, _ = engine.complete(llm, PROMPT, sampling)
        one = Receipt.of(info, PROMPT, sampling, alone, False)
        others = engine.ConcurrentRequests(one, PROMPT, SERVED_CONTEXT[name], 31)
        started = time.monotonic()
        completion, beside = engine.complete(llm, PROMPT, sampling, others)
        print(f"{name}, {how}: beside {beside} requests in {time.monotonic() - started:.1f} s", flush=True)
        made[how] = Receipt.of(info, PROMPT, sampling, completion, False)
        if made[how].completion != one.completion:
            raise SystemExit(f"{name}, {how}: other bits alone than beside others")
    return made


def known(path: Path) -> Hopper:
    """What this package knows; until it does, the tables of a file, with every operation taken for confirmed."""
    here = Hopper.here()
    if not here.missing(ALL):
        return here
    recorded = here.tables or tables.recorded(path)
    machine = here.confirmed.machine or {"vllm": patch_points.installed_version()}
    answers = known_answers.digests(recorded, ALL)
    taken = confirmed.Confirmed(machine, recorded.digest, answers, dict.fromkeys(ALL, 1), dict.fromkeys(ALL, 0))
    return Hopper(taken, recorded)


def verify(made: Receipt, folder: Path, name: str) -> Any:
    """The verdict on a receipt of one of :data:`MODELS`."""
    return recompute(made, str(save_model(folder / name, name)), hopper=known(folder / "tables.xz"))


def in_own_process(folder: Path, name: str, unverified: bool) -> int:
    """Make and verify the receipt of one of :data:`MODELS`; the exit status."""
    command = [sys.executable, "-m", "scripts.hopper_receipts", str(folder), "--only", name]
    command += ["--unverified"] * unverified
    return subprocess.run(command, check=False).returncode


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=(*MODELS, *SHAPES), help="one model, in this process")
    parser.add_argument("--unverified", action="store_true", help="make receipts, to verify them elsewhere")
    parser.add_argument("--model-of", choices=(*MODELS, *SHAPES), help="write this model and nothing else")
    options = parser.parse_args(arguments)
    if options.model_of is not None:
        print(save_model(options.folder / options.model_of, options.model_of))
        return 0
    if options.only in SHAPES:
        for how, made in make_served(options.folder, options.only).items():
            made.save(options.folder / f"{options.only}-{how}.json")
        return 0
    if options.only is None:
        return max([in_own_process(options.folder, name, options.unverified) for name in MODELS])
    started = time.monotonic()
    status = 0
    for how, made in make(options.folder, options.only).items():
        path = options.folder / f"{options.only}-{how}.json"
        path.unlink(missing_ok=True)
        made.save(path)
        print(f"{path} after {time.monotonic() - started:.0f} s", flush=True)
        if options.unverified:
            continue
        try:
            verdict = verify(made, options.folder, options.only)
        except NoTestError as error:
            print(f"NOT TESTED {options.only}, {how}: {error}", flush=True)
            status = 1
            continue
        print(f"{options.only}, {how}: {verdict} ({time.monotonic() - started:.0f} s)", flush=True)
        status = status if verdict else 1
    return status


if __name__ == "__main__":
    sys.exit(main())
