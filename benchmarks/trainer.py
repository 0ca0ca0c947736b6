"""Benchmark of the trainer: `python -m benchmarks.trainer`. A patched Hugging Face model and the same one as it is take
turns at logprobs of packed sequences, and at their gradients. Bits first, then time and memory.
"""

import argparse
import copy
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import accumulate, pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from benchmarks import trainer_stock
from benchmarks.record import DATA, Bits, Measurement, Setting, case_text, update
from benchmarks.shapes import MODELS, Model
from benchmarks.spread import Spread
from benchmarks.sweep import Findings
from benchmarks.timing import microseconds
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.hf import patch, token_logprobs

_NAMED = {model.name: model for model in MODELS}
_SMALL = Model("small", 256, 4, 2, 64, 512, 4096)
SIZES: dict[str, dict[str, Model]] = {
    "8b": {
        "llama": _NAMED["Llama-3.1-8B"],
        "qwen2": Model("Qwen2.5-7B", 3584, 28, 4, 128, 18944, 152064),
        "qwen3": _NAMED["Qwen3-8B"],
    },
    "small": dict.fromkeys(("llama", "qwen2", "qwen3"), _SMALL),
}
"""The shape of each family's model, by the name that transformers has for it; the small one is for CPUs."""
DEFAULTS = {"cuda": ("8b", 8, [4096, 16384]), "cpu": ("small", 2, [256])}
"""Size, layers and numbers of packed tokens on each device."""
SHARES = (16, 9, 5, 3, 2, 1)
"""How the tokens of a batch are shared among its sequences."""
PASSES = {"forward": (False, False), "both": (True, False), "both-checkpointed": (True, True)}
"""Whether there is a backward pass, and whether layers are computed again in it."""
_WARM_CALLS = 2

Logprobs = Callable[["Batch"], torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """Sequences that lie one after the other in one row.

    Attributes:
        tokens: [1, tokens] int64.
        lengths: of the sequences.
    """

    tokens: torch.Tensor
    lengths: tuple[int, ...]

    @classmethod
    def random(cls, tokens: int, vocabulary: int, device: str) -> "Batch":
        """So many tokens in sequences of different lengths."""
        lengths = [max(2, tokens * share // sum(SHARES)) for share in SHARES[1:]]
        lengths.insert(0, tokens - sum(lengths))
        generator = torch.Generator().manual_seed(0)
        return cls(torch.randint(vocabulary, (1, tokens), generator=generator).to(device), tuple(lengths))

    @property
    def positions(self) -> torch.Tensor:
        """[1, tokens] int64, counted from 0 in each sequence."""
        return torch.cat([torch.arange(length, device=self.tokens.device) for length in self.lengths])[None]

    @property
    def bounds(self) -> list[int]:
        """The first token of each sequence, and how many there are."""
        return list(accumulate(self.lengths, initial=0))

    def alone(self) -> Iterator["Batch"]:
        """Each sequence as a batch of its own."""
        return (Batch(self.tokens[:, first:stop], (stop - first,)) for first, stop in pairwise(self.bounds))

    def cut(self, logprobs: torch.Tensor) -> list[torch.Tensor]:
        """The logprobs of each sequence's tokens but the first, of those [tokens - 1] of all but the first."""
        return [logprobs[first : stop - 1] for first, stop in pairwise(self.bounds)]


def stock_logprobs(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """[tokens - 1] fp32, each token's by Hugging Face's model with the attention that is set in it."""
    cu_seqlens = torch.tensor(batch.bounds, dtype=torch.int32, device=batch.tokens.device)
    options = trainer_stock.options(model.config._attn_implementation, cu_seqlens, max(batch.lengths))
    logits = model(batch.tokens, position_ids=batch.positions, use_cache=False, **options).logits
    return -F.cross_entropy(logits[0, :-1].float(), batch.tokens[0, 1:], reduction="none")


def our_logprobs(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """[tokens - 1] fp32, each token's by a patched model."""
    logits = model(batch.tokens, position_ids=batch.positions, use_cache=False).logits
    return token_logprobs(logits[0, :-1], batch.tokens[0, 1:])


def same_alone(logprobs: Logprobs, batch: Batch) -> bool:
    """Whether each sequence has the same bits packed with the others and alone."""
    with torch.no_grad():
        packed = batch.cut(logprobs(batch))
        return all(torch.equal(one, logprobs(alone)) for one, alone in zip(packed, batch.alone(), strict=True))


def step(model: torch.nn.Module, logprobs: Logprobs, batch: Batch, backward: bool) -> None:
    """One pass over a batch; a backward one is that of the mean logprob."""
    if not backward:
        with torch.no_grad():
            logprobs(batch)
        return
    torch.cat(batch.cut(logprobs(batch))).mean().neg().backward()
    model.zero_grad(set_to_none=True)


def model_of(family: str, shape: Model, layers: int, longest: int, device: str) -> torch.nn.Module:
    """A Hugging Face model of random bf16 weights on a device.

    Args:
        family: as transformers calls it.
        shape: of its layers.
        layers: how many.
        longest: tokens of the longest sequence.
        device: cuda or cpu.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        num_hidden_layers=layers,
        max_position_embeddings=longest,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@dataclass
class Run(Findings):
    """A run over models and batches, and what it found."""

    device: str
    samples: int
    passes: Sequence[str]
    deadline: float = float("inf")
    """Of time.monotonic(): nothing new begins behind it."""
    left: int = 0
    """Models and passes for which there was no time."""

    def measure(self, family: str, shape: Model, layers: int, tokens: int) -> Iterator[None]:
        """Check and time one model and batch against each attention; yields after each measurement."""
        if time.monotonic() > self.deadline:
            self.left += 1
            return
        batch = Batch.random(tokens, shape.vocabulary, self.device)
        stock = model_of(family, shape, layers, max(batch.lengths), self.device)
        try:
            ours = patch(copy.deepcopy(stock))
        except NotCovered as refused:
            print(f"{family} is left out: {refused}", file=sys.stderr, flush=True)
            return
        case = {"model": shape.name, "family": family, "layers": layers, "tokens": tokens}
        models = {"stock": stock, "ours": ours}
        logprobs = {"stock": partial(stock_logprobs, stock), "ours": partial(our_logprobs, ours)}
        for attention in trainer_stock.attentions(self.device):
            stock.set_attn_implementation(attention)
            bits: dict[str, Bits] | None = None
            for wanted in self.passes:
                if time.monotonic() > self.deadline:
                    self.left += 1
                    continue
                written = case_text(**case, against=attention, **{"pass": wanted})
                try:
                    bits = bits or self._bits(written, batch, logprobs)
                    self._time(written, batch, models, logprobs, bits, *PASSES[wanted])
                except Exception as error:
                    self.failed(written, error)
                yield

    def _bits(self, case: str, batch: Batch, logprobs: dict[str, Logprobs]) -> dict[str, Bits]:
        found: dict[str, Bits] = {
            way: "equal" if same_alone(call, batch) else "differ" for way, call in logprobs.items()
        }
        if found["ours"] == "differ":
            self.problem(f"BITS DIFFER: ours {case}: a sequence alone has other logprobs than packed with others")
        if found["stock"] == "equal":
            print(f"{case}: stock has the same bits packed and alone here, so it is no control", flush=True)
        return found

    def _time(
        self,
        case: str,
        batch: Batch,
        models: dict[str, torch.nn.Module],
        logprobs: dict[str, Logprobs],
        bits: dict[str, Bits],
        backward: bool,
        checkpointed: bool,
    ) -> None:
        for model in models.values():
            model.train(backward)
            if checkpointed:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            else:
                model.gradient_checkpointing_disable()
        ways = {way: partial(step, model, logprobs[way], batch, backward) for way, model in models.items()}
        for call in ways.values():
            for _ in range(_WARM_CALLS):
                call()
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(self.samples):
            for way, call in ways.items():
                found[way].append(microseconds(call, self.device) / 1e3)
        metrics = {("time", "ms"): {way: Spread.of(times) for way, times in found.items()}}
        if self.device == "cuda":
            sizes = {way: _peak_mib(call) for way, call in ways.items()}
            metrics["memory", "MiB"] = {way: Spread(size, size, size) for way, size in sizes.items()}
        for (metric, unit), spreads in metrics.items():
            for way, spread in spreads.items():
                ratio = spread.p50 / spreads["stock"].p50
                values = asdict(spread) | {"ratio": ratio, "bits": bits[way]} | asdict(self.setting)
                self.measurements.append(Measurement("trainer", way, case, metric, unit, **values))
            told = ", ".join(f"{way} {spread.p50:.4g} {unit}" for way, spread in spreads.items())
            print(f"{case}: {told}, {spreads['ours'].p50 / spreads['stock'].p50:.3f} of stock", flush=True)


def _peak_mib(call: Callable[[], object]) -> float:
    """The most MiB of a GPU that a call takes beside what is there already: activations, logits and gradients."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def print_summary(measurements: Sequence[Measurement], console: Console) -> None:
    """Print a line for each case: both medians, the ratio, and the bits of both."""
    table = Table("case", "stock", "ours", "ratio", "bits: stock, ours", title="Trainer", title_justify="left")
    of = {(row.case, row.metric, row.provider): row for row in measurements}
    for case, metric in dict.fromkeys((row.case, row.metric) for row in measurements):
        stock, ours = (of[case, metric, provider] for provider in ("stock", "ours"))
        medians = (f"{row.p50:.4g} {row.unit}" for row in (stock, ours))
        table.add_row(case, *medians, f"{ours.ratio:.3f}", f"{stock.bits}, {ours.bits}")
    console.print(table)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size, layers, tokens = DEFAULTS[device]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trainer",
        description="Check that a sequence has the same logprobs alone and packed with others, then time logprobs and "
        "gradients of patched models against Hugging Face's. "
        "Exit status: 0 all well, 1 our bits differ or a call failed, 2 nothing was measured.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=DATA / "trainer.csv", help="CSV file; rows of other cases stay")
    parser.add_argument("--size", choices=SIZES, default=size, help="shape of the models")
    parser.add_argument("--families", nargs="+", choices=SIZES["8b"], default=["qwen3", "llama", "qwen2"], help="which")
    parser.add_argument("--layers", type=int, default=layers, help="of each model")
    parser.add_argument("--tokens", type=int, nargs="+", default=tokens, help="of the packed sequences together")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="what is timed")
    parser.add_argument("--samples", type=int, default=7, help="how often each is timed, at least twice")
    parser.add_argument("--limit-seconds", type=float, default=540, help="begin nothing new after this long")
    options = parser.parse_args(arguments)
    options.device = device
    if options.samples < 2 or min(options.tokens) < 2 * sum(SHARES):
        parser.error(f"there must be 2 samples and {2 * sum(SHARES)} tokens at least")
    return options


def _setting(device: str) -> Setting:
    here = Setting.here()
    installed = case_text(transformers=version("transformers"))
    gpu = here.gpu if device == "cuda" else platform.processor() or platform.machine()
    return replace(here, gpu=gpu, versions=f"{here.versions} {installed}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    started = time.monotonic()
    options = _parse(arguments)
    deadline = started + options.limit_seconds
    run = Run(options.device, options.samples, options.passes, deadline, setting=_setting(options.device))
    print(f"{run.setting.gpu}, {run.setting.versions}", flush=True)
    for family in options.families:
        for tokens in options.tokens:
            for _ in run.measure(family, SIZES[options.size][family], options.layers, tokens):
                update(options.out, run.measurements)
            if options.device == "cuda":
                torch.cuda.empty_cache()
    print_summary(run.measurements, Console())
    left = f", {run.left} left out for want of time" if run.left else ""
    print(f"{len(run.measurements)} rows in {time.monotonic() - started:.0f} s{left}, written to {options.out}")
    return run.status("BITS DIFFER and FAILED") or (0 if run.measurements else 2)


if __name__ == "__main__":
    sys.exit(main())
