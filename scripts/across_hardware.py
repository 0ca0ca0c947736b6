"""Completions in exact arithmetic that every machine must have alike, as receipts: a greedy one and one with a seed, of
a model whose weights are made of integers, and so are the same everywhere.

usage: python -m scripts.across_hardware FOLDER     starts an engine of vLLM on this machine

On another machine `vllm-batch-invariant receipt compare` compares its receipts with these, and on any CPU
`vllm-batch-invariant receipt verify FOLDER/greedy.json --model FOLDER/model --without-engine` computes one again.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from examples.grpo.task import SHAPES
from vllm_batch_invariant.envs import ARITHMETIC, FLAG
from vllm_batch_invariant.verify import receipt
from vllm_batch_invariant.verify.arguments import OneLineParser, at_least
from vllm_batch_invariant.verify.demo_model import config_of, random_weights
from vllm_batch_invariant.verify.receipt import engine
from vllm_batch_invariant.verify.receipt.record import Receipt, Sampling, canonical

SIZES = {
    "small": SHAPES["small"],
    "0.6b": SHAPES["0.6b"],
    "8b": replace(SHAPES["0.6b"], hidden=4096, intermediate=12_288, layers=36, heads=32),
}
"""The larger ones are Qwen3's."""
REQUESTS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "top_k": 100, "top_p": 0.95, "seed": 7},
}
PROMPT_TOKENS, CONCURRENT = 300, 17
_AT_A_TIME = 1 << 22
_CENTER, _DEVIATION = 2 * 65_535, 37_837.2
"""Of a sum of four uniform integers of 16 bits."""


class PortableNormal:
    """About standard normal numbers: sums of four integers of 16 bits of PCG64, whose numbers NumPy does not change."""

    def __init__(self, seed: int) -> None:
        self._seed, self._drawn = seed, 0
        self._threads = ThreadPoolExecutor(os.cpu_count())

    def __call__(self, *size: int) -> torch.Tensor:
        """fp32 of a size: the same in any number of threads."""
        count = int(np.prod(size))
        found = np.empty(count, np.float32)

        def draw(start: int) -> None:
            part = found[start : start + _AT_A_TIME]
            raw = np.random.PCG64(self._seed).advance(self._drawn + start).random_raw(len(part))
            total = sum((raw >> np.uint64(16 * quarter)) & np.uint64(0xFFFF) for quarter in range(4))
            part[:] = (total.astype(np.int64) - _CENTER) / _DEVIATION

        list(self._threads.map(draw, range(0, count, _AT_A_TIME)))
        self._drawn += count
        return torch.from_numpy(found).reshape(size)


def make_model(folder: Path, size: str) -> Path:
    """Write a checkpoint of one of :data:`SIZES` without a tokenizer, if it is not there: a file for what is of no
    layer, and one for each layer, because a large model does not fit into memory twice.
    """
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shape = SIZES[size]
    for number, weights in enumerate(random_weights(shape, shape.vocab, PortableNormal(0))):
        name = f"model-{number + 1:05}-of-{shape.layers + 1:05}.safetensors"
        save_file(weights, folder / name, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(shape, 1, 0)) + "\n")
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 all well, 1 a completion had other bits among concurrent requests."""
    parser = OneLineParser(prog="python -m scripts.across_hardware", description=__doc__.splitlines()[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where receipts and the model are written")
    parser.add_argument("--size", choices=SIZES, default="0.6b", help="of the model that is made")
    parser.add_argument("--model", type=Path, help="a checkpoint, in the place of one that is made")
    parser.add_argument("--tokens", type=at_least(1), default=200, help="tokens of a completion")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of vllm.LLM")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    model = options.model or make_model(options.folder / "model", options.size)
    os.environ |= {FLAG: "1", ARITHMETIC.name: "exact"}
    from vllm import LLM

    llm = LLM(str(model), skip_tokenizer_init=True, max_model_len=PROMPT_TOKENS + options.tokens + 8, **options.engine)
    info = receipt.engine_info(llm)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    prompt = tuple(int(one % vocabulary) for one in np.random.PCG64(1).random_raw(PROMPT_TOKENS))
    status = 0
    for name, request in REQUESTS.items():
        sampling = Sampling(max_tokens=options.tokens, logprobs=20, ignore_eos=True, **request)
        completion, _ = engine.complete(llm, prompt, sampling)
        made = Receipt.of(info, prompt, sampling, completion, private=False)
        made.save(options.folder / f"{name}.json")
        verdict = receipt.verify(made, llm, concurrent=CONCURRENT)
        digest = hashlib.sha256(canonical(asdict(completion))).hexdigest()
        print(f"{name}: tokens and logprobs {digest[:16]}; {verdict.result}", flush=True)
        status = max(status, 0 if verdict else 1)
    return status


if __name__ == "__main__":
    sys.exit(main())
