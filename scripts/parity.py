"""How far a trainer's logprobs are from the rollout's: Hugging Face as it is, in the mode, patched, and patched with
one of its own operations put back.

usage: python -m scripts.parity [--model MODEL] [--dtype DTYPE]     needs vLLM and transformers; starts one engine
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_batch_invariant import batch_invariant_mode
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.hf import patch, token_logprobs
from vllm_batch_invariant.verify.arguments import OneLineParser, at_least
from vllm_batch_invariant.verify.demo_model import DTYPES, Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.requests import request, tokens
from vllm_batch_invariant.verify.harness.worker import Engine
from vllm_batch_invariant.verify.outcome import NoTestError, Status

PROMPT_LENGTHS = (12, 45, 257, 300)
"""Of the prompts: below, at and above a split of attention's."""

PATCHED = "patched"

Logprobs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Sample:
    """One sequence as the engine answered it.

    Attributes:
        tokens: the prompt's and those sampled.
        prompt: how many are the prompt's.
        logprobs: [len(tokens) - 1] fp32, of every token but the first.
    """

    tokens: list[int]
    prompt: int
    logprobs: torch.Tensor


@dataclass(frozen=True)
class Gap:
    """How far a trainer is from the engine, over all tokens but each sequence's first."""

    tokens: int
    different: int
    """Tokens whose logprob has other bits."""
    largest: float
    """Largest |difference| of two logprobs."""
    kl: float
    """KL(engine || trainer) per sampled token, estimated as the mean of r - 1 - log(r) for r = trainer / engine
    (Schulman, joschu.net/blog/kl-approx.html): exactly 0 where the logprobs are equal.
    """

    @classmethod
    def of(cls, samples: Sequence[Sample], logprobs: Sequence[torch.Tensor]) -> "Gap":
        """Compare a trainer's logprobs with those of the samples."""
        differences = [ours.double() - sample.logprobs.double() for ours, sample in zip(logprobs, samples, strict=True)]
        every = torch.cat(differences)
        sampled = torch.cat([d[sample.prompt - 1 :] for d, sample in zip(differences, samples, strict=True)])
        return cls(
            every.numel(),
            int(every.count_nonzero()),
            float(every.abs().max()),
            float((sampled.exp() - 1 - sampled).mean()),
        )


def rollout(engine: Engine, prompts: Iterable[list[int]], max_tokens: int) -> list[Sample]:
    """Sample a completion of each prompt at temperature 1, together, with the logprobs of all tokens."""
    asked = {"temperature": 1.0, "max_tokens": max_tokens, "logprobs": 0, "prompt_logprobs": 0}
    requests = [request(prompt, seed=seed, **asked) for seed, prompt in enumerate(prompts)]
    samples = []
    for one, answer in zip(requests, engine.step("rollout", requests).requests, strict=True):
        [completion] = answer["completions"]
        every = one["prompt"] + completion["tokens"]
        entries = answer["prompt_logprobs"][1:] + completion["logprobs"]
        listed = [{token: value for token, value, _ in entry} for entry in entries]
        values = [float.fromhex(values[token]) for token, values in zip(every[1:], listed, strict=True)]
        # Another thread may load a model meanwhile, for which transformers sets the default dtype.
        samples.append(Sample(every, len(one["prompt"]), torch.tensor(values, dtype=torch.float32)))
    return samples


def of_trainer(
    model: torch.nn.Module, samples: Sequence[Sample], logprobs: Logprobs = token_logprobs
) -> list[torch.Tensor]:
    """The trainer's logprobs of the samples' tokens, from one batch that is padded on the right."""
    device = next(model.parameters()).device
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(sample.tokens) for sample in samples], batch_first=True)
    lengths = torch.tensor([len(sample.tokens) for sample in samples])
    mask = torch.arange(padded.shape[1]) < lengths[:, None]
    with torch.no_grad():
        logits = model(padded.to(device), attention_mask=mask.long().to(device)).logits
        every = logprobs(logits[:, :-1], padded[:, 1:].to(device)).cpu()
    return [row[: length - 1] for row, length in zip(every, lengths, strict=True)]


def plain_logprobs(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Logprobs as trainers take them of a Hugging Face model."""
    return torch.log_softmax(logits.float(), -1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)


def _separate_matmuls(
    x: torch.Tensor, *weights: torch.Tensor, biases: Sequence[torch.Tensor | None] = (), **_: Any
) -> torch.Tensor:
    pairs = zip_longest(weights, biases)
    return torch.cat([F.linear(x, weight, bias) for weight, bias in pairs], dim=-1)


def _norm_of_the_rounded_sum(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    summed = x if residual is None else residual + x
    wide = summed.float()
    normalised = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normalised if residual is None else (normalised, summed)


def _rotary_rounded_three_times(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    cos, sin = (half.repeat(1, 2) for half in cache[positions].chunk(2, dim=-1))
    return apply_rotary_pos_emb(query, key, cos, sin)


def _attention_in_one_softmax(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Any, scale: float
) -> torch.Tensor:
    out = torch.empty_like(query)
    for rows in batch.sequences:
        q, k, v = (part[rows].transpose(0, 1)[None] for part in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        out[rows] = attended[0].transpose(0, 1)
    return out


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


OPERATIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "PyTorch's matmuls, one a weight": {"linear": _separate_matmuls},
    "a norm of the rounded sum": {"rms_norm": _norm_of_the_rounded_sum},
    "a rotary embedding that rounds three times": {"rotate": _rotary_rounded_three_times},
    "attention without splits": {"attend": _attention_in_one_softmax},
    "PyTorch's SiLU": {"silu_and_mul": _silu_and_mul},
    "PyTorch's log_softmax": {},
}
"""Operations as Hugging Face computes them: functions that replace those of ``hf.decoder``; the last replaces
``token_logprobs`` by :func:`plain_logprobs`.
"""


def gaps(path: str, dtype: torch.dtype, device: str, samples: Sequence[Sample]) -> dict[str, tuple[Gap, Gap]]:
    """Every trainer's distance from the samples, outside ``batch_invariant_mode()`` and inside."""
    from transformers import AutoModelForCausalLM

    from vllm_batch_invariant.hf import decoder

    def load() -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()

    def measure(model: torch.nn.Module, logprobs: Logprobs) -> tuple[Gap, Gap]:
        outside = Gap.of(samples, of_trainer(model, samples, logprobs))
        with batch_invariant_mode():
            return outside, Gap.of(samples, of_trainer(model, samples, logprobs))

    found = {"Hugging Face": measure(load(), plain_logprobs)}
    ours = patch(load())
    found[PATCHED] = measure(ours, token_logprobs)
    for name, functions in OPERATIONS.items():
        with ExitStack() as stack:
            for attribute, function in functions.items():
                stack.enter_context(mock.patch.object(decoder, attribute, function))
            found[f"{PATCHED}, but {name}"] = measure(ours, token_logprobs if functions else plain_logprobs)
    return found


def main() -> int:
    """Roll out, compare, print. The exit status is 1 if the patched trainer is not equal, 2 if nothing was compared."""
    parser = OneLineParser(prog="parity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model's folder or name (default: a small one with random weights)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the engine and the trainer")
    parser.add_argument("--max-tokens", type=at_least(1), default=32, help="tokens to sample for each prompt")
    options = parser.parse_args()
    try:
        return _compare(options)
    except (NoTestError, NotCovered) as error:
        print(f"parity: {error}", file=sys.stderr)
        return Status.NO_TEST


def _compare(options: argparse.Namespace) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() if options.model is None else nullcontext() as folder:
        path = options.model or str(make_checkpoint(Path(folder), Shape(dtype=options.dtype)))
        arguments = ["--dtype", options.dtype, "--max-model-len", str(max(PROMPT_LENGTHS) + options.max_tokens)]
        with Engine(path, arguments, flag="1") as engine:
            samples = rollout(engine, (tokens(length, 1) for length in PROMPT_LENGTHS), options.max_tokens)
            info = engine.info
        found = gaps(path, getattr(torch, options.dtype), device, samples)
    columns = [f"{what}{place}" for place in ("", ", in the mode") for what in ("differ", "largest", "KL")]
    table = Table("trainer", *columns, box=box.MARKDOWN)
    for name, pair in found.items():
        table.add_row(
            name, *chain.from_iterable((str(gap.different), f"{gap.largest:.2g}", f"{gap.kl:.2g}") for gap in pair)
        )
    console = Console(width=160)
    console.print(f"{found[PATCHED][0].tokens} tokens, {options.dtype}, {device}: those that differ, by how much, KL")
    console.print(table)
    details = chain(info["device"].items(), info["versions"].items())
    console.print(", ".join(f"{name} {value}" for name, value in details))
    return int(any(gap.different for gap in found[PATCHED]))


if __name__ == "__main__":
    raise SystemExit(main())
