"""How near a whole model is to itself in float64: in exact arithmetic, in the mode's usual one on a CPU, and as plain
Hugging Face computes it in bf16. Random models, some with outlier channels, and two that are trained first.

usage: python -m benchmarks.accuracy [--only MODEL ...] [--out CSV]     needs vLLM and transformers; starts no engine
"""

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

from benchmarks.record import DATA, Measurement, Setting, case_text, update
from benchmarks.spread import Spread
from examples.grpo.task import questions, warmed_up
from vllm_batch_invariant import __version__
from vllm_batch_invariant.hf import patch
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.ops import softmax
from vllm_batch_invariant.ops.exact import definition
from vllm_batch_invariant.ops.exact.decoder import Decoder
from vllm_batch_invariant.verify.arguments import OneLineParser, at_least
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint, train_tokenizer, training_text

LISTED = 20
"""Candidates of the reference that are looked at apart."""
RECORDED = {"stock": ("stock", ""), "usual": ("ours", ""), "exact": ("ours", " arithmetic=exact")}
"""The provider of each arithmetic in the data, and what the case of its rows says."""
ARITHMETICS = tuple(RECORDED)
_TEXT_BYTES, _VOCABULARY = 2_000_000, 4096
_BATCH, _LEARNING_RATE, _WARM_STEPS = 8, 1e-3, 20
_LARGE, _FACTOR = 4, 64.0
"""Outlier channels, and how much larger they are."""
_TRAINED = "trained-"
"""What the names of trained models begin with."""


@dataclass(frozen=True)
class Subject:
    """A bf16 model of Hugging Face's, and what it is asked.

    Attributes:
        tokens: [sequences, length] int64.
    """

    model: PreTrainedModel
    tokens: torch.Tensor


@dataclass(frozen=True)
class Distance:
    """How far some distributions are from the reference's, over the positions of one sequence.

    Attributes:
        rms: root of the mean square difference of two logprobs, of all tokens of the vocabulary.
        rms_listed: that of the reference's likeliest tokens.
        largest_listed: the largest difference of those.
        kl: KL(reference || these), mean over positions.
        same_first: share of positions with the reference's likeliest token.
    """

    rms: float
    rms_listed: float
    largest_listed: float
    kl: float
    same_first: float

    @classmethod
    def of(cls, logprobs: torch.Tensor, reference: torch.Tensor) -> "Distance":
        """Of [positions, vocabulary] logprobs, the reference's float64."""
        difference = logprobs.double() - reference
        listed = difference.gather(-1, reference.topk(LISTED, -1).indices)
        same = logprobs.argmax(-1) == reference.argmax(-1)
        return cls(
            float(difference.square().mean().sqrt()),
            float(listed.square().mean().sqrt()),
            float(listed.abs().max()),
            float(-(reference.exp() * difference).sum(-1).mean()),
            float(same.double().mean()),
        )


UNITS = {"rms": "nat", "rms_listed": "nat", "largest_listed": "nat", "kl": "nat", "same_first": "fraction"}


@dataclass(frozen=True)
class Found:
    """What was measured of one model.

    Attributes:
        distances: of every sequence, by arithmetic.
        third_digits: share of the elements that enter a product in exact arithmetic with three digits.
        rows_with_third: share of rows with such an element.
        largest_weight: the largest element of a weight's row over the row's mean magnitude, of the worst row.
    """

    distances: dict[str, list[Distance]]
    third_digits: float
    rows_with_third: float
    largest_weight: float

    def median(self, arithmetic: str, metric: str) -> float:
        """Of a metric over the sequences."""
        return Spread.of([getattr(one, metric) for one in self.distances[arithmetic]]).p50

    def pooled(self, arithmetic: str, metric: str) -> float:
        """Root of the mean square of a metric over the sequences."""
        return float(np.sqrt(np.mean([getattr(one, metric) ** 2 for one in self.distances[arithmetic]])))


class _Digits:
    """Counts elements with three digits on their way into products."""

    def __init__(self) -> None:
        self.elements = self.third = self.rows = self.rows_with_third = 0
        self._grid = definition.activations

    def __call__(self, a: definition.Floats) -> definition.Rows:
        rows = self._grid(a)
        third = np.abs(rows.integers) > definition.TWO_DIGITS
        self.elements, self.third = self.elements + third.size, self.third + int(third.sum())
        with_third = third.any(-1)
        self.rows, self.rows_with_third = self.rows + with_third.size, self.rows_with_third + int(with_third.sum())
        return rows


def decoder_of(model: PreTrainedModel) -> Decoder:
    """The definition of exact arithmetic for a Hugging Face model in bf16."""
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    weights = {name: weight.detach().view(torch.uint16).numpy() for name, weight in model.state_dict().items()}
    return Decoder(config, weights)


def measure(subject: Subject) -> Found:
    """Compute every sequence in each arithmetic and in float64, and compare."""
    model, tokens = subject.model.eval(), subject.tokens
    digits, decoder = _Digits(), decoder_of(model)
    with torch.no_grad(), mock.patch.object(definition, "activations", digits):
        exact = [torch.from_numpy(definition.log_softmax(decoder.logits(row))) for row in tokens.tolist()]
        reference = copy.deepcopy(model).double()(tokens, use_cache=False).logits.log_softmax(-1)
        stock = model(tokens, use_cache=False).logits.float().log_softmax(-1)
        usual = softmax.log_softmax(patch(copy.deepcopy(model))(tokens).logits, dtype=torch.float32)
    found = dict(zip(ARITHMETICS, (stock, usual, exact), strict=True))
    return Found(
        {name: [Distance.of(*pair) for pair in zip(rows, reference, strict=True)] for name, rows in found.items()},
        digits.third / digits.elements,
        digits.rows_with_third / digits.rows,
        max(_largest(layer.weight) for layer in model.modules() if isinstance(layer, torch.nn.Linear)),
    )


def _largest(weight: torch.Tensor) -> float:
    magnitudes = weight.detach().float().abs()
    return float((magnitudes.amax(-1) / magnitudes.mean(-1).clamp_min(torch.finfo(torch.float32).tiny)).max())


def random_model(shape: Shape) -> PreTrainedModel:
    """Of the weights of ``vllm-batch-invariant make-checkpoint``."""
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder) / "model", shape)
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)


def _asked_at_random(model: PreTrainedModel, options: argparse.Namespace) -> Subject:
    generator = torch.Generator().manual_seed(1)
    shape = (options.sequences, options.length)
    return Subject(model, torch.randint(16, model.config.vocab_size, shape, generator=generator))


def with_outliers(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Make some channels larger behind every norm of the hidden state: those of exact arithmetic's tests.

    Args:
        model: is changed.
        kind: "large" for a few channels, "compensated" for a few whose weights are as much smaller, so that in any
            arithmetic of floats no bit of an answer moves, "lognormal" for all by random factors.
    """
    size = model.config.hidden_size
    factors = torch.ones(size)
    if kind == "lognormal":
        factors = torch.randn(size, generator=torch.Generator().manual_seed(2)).exp()
    else:
        factors[9 :: size // _LARGE] = _FACTOR
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            behind = {
                layer.input_layernorm: (attention.q_proj, attention.k_proj, attention.v_proj),
                layer.post_attention_layernorm: (mlp.gate_proj, mlp.up_proj),
            }
            for norm, projections in behind.items():
                norm.weight.mul_(factors)
                for projection in projections if kind == "compensated" else ():
                    projection.weight.div_(factors)
    return model


def _counting(options: argparse.Namespace) -> Subject:
    """The model that the on-policy runs begin with, and demonstrations of its task."""
    with tempfile.TemporaryDirectory() as folder:
        path = warmed_up(Path(folder) / "model", options.steps)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [question["prompt"] + question["expected"] for question in questions()[:: 90 // options.sequences]]
    return Subject(model, torch.tensor(tokenizer(texts[: options.sequences]).input_ids))


def _text(options: argparse.Namespace) -> Subject:
    """A small Llama that was trained on Python's standard library, and a part that it has not seen."""
    tokenizer = train_tokenizer(_VOCABULARY, _TEXT_BYTES)
    tokens = torch.tensor([token for text in training_text(_TEXT_BYTES) for token in tokenizer.encode(text).ids])
    asked = options.sequences * options.length
    seen, unseen = tokens[:-asked], tokens[-asked:].view(options.sequences, options.length)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
    )
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / _WARM_STEPS) * (1 - step / options.steps)
    )
    for _ in range(options.steps):
        starts = torch.randint(len(seen) - options.length - 1, (_BATCH,)).tolist()
        rows = torch.stack([seen[start : start + options.length + 1] for start in starts])
        loss = F.cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
    print(f"text: loss {loss.item():.2f} after {options.steps} steps", flush=True)
    return Subject(model.to(torch.bfloat16), unseen)


DEMO = Shape()
SHAPE_0_6B = Shape(hidden=1024, intermediate=3072, layers=4, heads=16, kv_heads=8, head_size=128, vocab=16_384)
"""Of Qwen3-0.6B, with 4 of its 28 layers and a smaller vocabulary."""
SUBJECTS: dict[str, Callable[[argparse.Namespace], Subject]] = {
    "demo": lambda options: _asked_at_random(random_model(DEMO), options),
    "0.6b-shape": lambda options: _asked_at_random(random_model(SHAPE_0_6B), options),
    "demo-large-channels": lambda options: _asked_at_random(with_outliers(random_model(DEMO), "large"), options),
    "demo-lognormal-channels": lambda options: _asked_at_random(
        with_outliers(random_model(DEMO), "lognormal"), options
    ),
    "demo-large-channels-small-weights": lambda options: _asked_at_random(
        with_outliers(random_model(DEMO), "compensated"), options
    ),
    f"{_TRAINED}counting": _counting,
    f"{_TRAINED}text": _text,
}
"""By name; a trained one is trained when it is asked for."""


def measurements(case: str, found: Found, setting: Setting) -> list[Measurement]:
    """The rows for the data: medians over sequences, the ratio to plain Hugging Face; and the digits."""
    rows: list[Measurement] = []

    def add(arithmetic: str, metric: str, unit: str, spread: Spread, ratio: float | None = None) -> None:
        provider, says = RECORDED[arithmetic]
        values = asdict(spread) | {"ratio": ratio, "bits": "-"} | asdict(setting)
        rows.append(Measurement("accuracy", provider, case + says, metric, unit, **values))

    for metric, unit in UNITS.items():
        spreads = {of: Spread.of([getattr(one, metric) for one in each]) for of, each in found.distances.items()}
        stock = spreads["stock"].p50
        for arithmetic, spread in spreads.items():
            add(arithmetic, metric, unit, spread, spread.p50 / stock if stock else None)
    digits = {"third_digits": "fraction", "rows_with_third": "fraction", "largest_weight": "ratio"}
    for metric, unit in digits.items():
        value = getattr(found, metric)
        add("exact", metric, unit, Spread(value, value, value))
    return rows


def table_of(found: dict[str, Found]) -> Table:
    """What a document shows: a line for each model."""
    table = Table(
        "model",
        *(f"RMS: {name}" for name in ARITHMETICS),
        "exact / usual",
        f"of {LISTED} candidates",
        "KL: usual, exact",
        "same first: stock, usual, exact",
        "three digits",
        "largest weight / mean",
        box=box.MARKDOWN,
    )
    for name, one in found.items():
        rms = {arithmetic: one.pooled(arithmetic, "rms") for arithmetic in ARITHMETICS}
        same = (np.mean([distance.same_first for distance in one.distances[of]]) for of in ARITHMETICS)
        table.add_row(
            name,
            *(f"{value:.3g}" for value in rms.values()),
            f"{rms['exact'] / rms['usual']:.3f}",
            f"{one.pooled('exact', 'rms_listed') / one.pooled('usual', 'rms_listed'):.3f}",
            ", ".join(f"{one.median(of, 'kl'):.2g}" for of in ("usual", "exact")),
            ", ".join(f"{share:.1%}" for share in same),
            f"{one.third_digits:.2g} of elements, {one.rows_with_third:.2g} of rows",
            f"{one.largest_weight:.3g}",
        )
    return table


def _setting() -> Setting:
    found = Setting.here()
    names = {name: version(name) for name in ("torch", "transformers")}
    versions = case_text(vllm=patch_points.installed_version(), **names, **{"vllm-batch-invariant": __version__})
    return replace(found, versions=versions)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit status."""
    parser = OneLineParser(prog="python -m benchmarks.accuracy", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="which models")
    parser.add_argument("--sequences", type=at_least(2), default=8, help="asked of each model (default: 8)")
    parser.add_argument("--length", type=at_least(2), default=128, help="tokens of each (default: 128)")
    parser.add_argument("--steps", type=at_least(1), default=400, help="of training (default: 400)")
    parser.add_argument("--out", type=Path, default=DATA / "accuracy.csv", help="CSV file; rows of other models stay")
    options = parser.parse_args(arguments)
    setting, found = _setting(), {}
    console = Console(width=240)
    for name in options.only:
        begin = time.perf_counter()
        found[name] = measure(SUBJECTS[name](options))
        training = {"steps": options.steps} if name.startswith(_TRAINED) else {}
        update(options.out, measurements(case_text(model=name, **training), found[name], setting))
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    console.print(table_of(found))
    console.print(f"{setting.gpu}, {torch.get_num_threads()} threads, {setting.versions}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
