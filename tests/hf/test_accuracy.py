"""A whole model in exact arithmetic is as near to itself in float64 as in the mode's usual arithmetic."""

from unittest import mock

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from benchmarks import accuracy
from benchmarks.accuracy import Distance, Found, Subject, measure, with_outliers
from benchmarks.record import read
from tests.hf.models import VOCABULARY, model
from vllm_batch_invariant.hf import decoder
from vllm_batch_invariant.ops.exact import definition

MOST = 1.0
"""Largest distance of exact arithmetic in units of the usual one's; 0.76 to 0.90 was seen."""
TOKENS = torch.randint(VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(3))
KINDS = {"Qwen3": (Qwen3Config, {}), "Llama": (LlamaConfig, {}), "Qwen2": (Qwen2Config, {"hidden_size": 384})}


def ratio(found: Found, metric: str = "rms") -> float:
    return found.pooled("exact", metric) / found.pooled("usual", metric)


@pytest.fixture(scope="module")
def plain() -> Found:
    return measure(Subject(model(), TOKENS))


@pytest.mark.parametrize("kind", KINDS)
def test_exact_arithmetic_is_as_near_to_float64_as_the_usual_one(kind: str, plain: Found) -> None:
    of, changed = KINDS[kind]
    found = plain if of is Qwen3Config else measure(Subject(model(of=of, **changed), TOKENS))
    assert found.pooled("usual", "rms") > 1e-3, "bf16 has to show"
    for metric in ("rms", "rms_listed"):
        assert ratio(found, metric) <= MOST, (metric, ratio(found, metric))


@pytest.mark.parametrize("outliers", ["large", "lognormal"])
def test_it_is_as_near_with_outlier_channels(outliers: str) -> None:
    assert ratio(measure(Subject(with_outliers(model(), outliers), TOKENS))) <= MOST


def test_outliers_that_weights_take_back_move_no_bit_of_the_usual_arithmetic_and_exact_stays_near(plain: Found) -> None:
    found = measure(Subject(with_outliers(model(), "compensated"), TOKENS))
    assert found.distances["usual"] == plain.distances["usual"]
    assert found.distances["exact"] != plain.distances["exact"]
    assert ratio(found) <= MOST


def rms_norm_rounded_once(x, weight, eps, residual=None):
    z = x.float() if residual is None else x.float() + residual.float()
    out = (z / (z.square().mean(-1, keepdim=True) + eps).sqrt() * weight.float()).to(x.dtype)
    return out if residual is None else (out, z.to(x.dtype))


def silu_and_mul_rounded_once(x):
    gate, up = x.float().chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def rotate_rounded_once(query, key, positions, cache):
    cos, sin = (part[:, None] for part in cache[positions].float().chunk(2, -1))  # [tokens, 1, head_size / 2]

    def turned(x):
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

    return turned(query), turned(key)


ROUNDED_ONCE = {
    "rms_norm": rms_norm_rounded_once,
    "silu_and_mul": silu_and_mul_rounded_once,
    "rotate": rotate_rounded_once,
}


@pytest.mark.parametrize(("outliers", "most"), [(None, 1.01), ("compensated", 1.1)], ids=str)
def test_what_it_is_nearer_by_are_norms_silus_and_rotations_that_are_rounded_once(
    outliers: str | None, most: float, plain: Found
) -> None:
    """vLLM rounds norms and SiLUs twice, and so does the mode; on a CPU without AVX-512 rotations, too. Against sums
    of floats that are rounded as often as its own, exact arithmetic has nothing to win, and loses where weights have
    few bits on their row's grid.
    """
    subject = Subject(with_outliers(model(), outliers) if outliers else model(), TOKENS)
    with mock.patch.multiple(decoder, **ROUNDED_ONCE):
        found = measure(subject)
    assert ratio(plain) < 0.9
    assert 0.99 < ratio(found) <= most


def test_a_grid_of_one_digit_is_seen(plain: Found) -> None:
    two_digits = definition.two_digits

    def one_digit(a: definition.Floats) -> definition.Rows:
        rows = two_digits(a)
        return definition.Rows((np.rint(rows.integers / 256) * 256).astype(np.int32), rows.scale)

    with mock.patch.object(definition, "two_digits", one_digit):
        assert ratio(measure(Subject(model(), TOKENS))) > 1.5 * MOST


def test_a_distance_is_that_of_the_distributions() -> None:
    reference = torch.randn(3, 50, dtype=torch.float64).log_softmax(-1)
    assert Distance.of(reference, reference) == Distance(0, 0, 0, 0, 1)
    other = reference.clone()
    first, second = reference[0].topk(2).indices
    other[0, first], other[0, second] = reference[0, second], reference[0, first]
    found, moved = Distance.of(other, reference), float(reference[0, first] - reference[0, second])
    assert found.same_first == pytest.approx(2 / 3)
    assert found.largest_listed == pytest.approx(moved)
    assert found.rms == pytest.approx(moved * (2 / 150) ** 0.5)
    assert found.kl == pytest.approx(moved * float(reference[0, first].exp() - reference[0, second].exp()) / 3)


def test_the_script_writes_a_row_for_each_arithmetic_and_a_line_for_each_model(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accuracy, "SUBJECTS", {"tiny": lambda _: Subject(model(), TOKENS[:2, :24])})
    out = tmp_path / "accuracy.csv"
    assert accuracy.main(["--only", "tiny", "--out", str(out)]) == 0
    rows = [row for row in read(out) if row.metric == "rms"]
    assert [(row.provider, row.keys.get("arithmetic")) for row in rows] == [
        ("stock", None),
        ("ours", None),
        ("ours", "exact"),
    ]
    assert next(row.ratio for row in rows if row.provider == "stock") == 1
    assert "| tiny " in capsys.readouterr().out
