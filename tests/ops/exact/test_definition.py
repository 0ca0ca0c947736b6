"""The definition of exact arithmetic: right within a tolerance, and its sums have no order."""

import hashlib
import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.exact import FORMAT, definition, known_answers
from vllm_batch_invariant.ops.exact.decoder import Decoder
from vllm_batch_invariant.ops.exact.definition import Floats, fp32
from vllm_batch_invariant.ops.exact.known_answers import normal, with_outliers

BF16 = 2.0**-8
"""Half a unit in the last place of bf16, relative."""


def weight(w: Floats, parts: int = 1) -> definition.Rows:
    return definition.two_digits(definition.in_segments(w, parts))


def distance(got: np.ndarray, right: np.ndarray) -> float:
    """The relative distance, in norms."""
    return float(np.linalg.norm(got - right) / np.linalg.norm(right))


def chain(x: Floats, w: Floats) -> np.ndarray:
    """The mode's other arithmetic on a GPU: steps of 16 products, truncated to fp32 after each."""
    acc = np.zeros((len(x), len(w)))
    for k in range(0, x.shape[1], 16):
        mantissa, exponent = np.frexp(acc + x[:, k : k + 16].astype(float) @ w[:, k : k + 16].T.astype(float))
        acc = np.ldexp(np.trunc(mantissa * 2**24), exponent - 24)
    return acc


def test_a_product_is_that_of_integers_scaled_and_rounded_once_to_fp32_and_once_to_bf16() -> None:
    x, w, bias = with_outliers(1, 7, 96), normal(2, 5, 96), normal(3, 5)
    rows, columns = definition.activations(x), weight(w)
    got = definition.linear(x, columns, bias)
    for m, n in np.ndindex(got.shape):
        t = sum(int(a) * int(b) for a, b in zip(rows.integers[m], columns.integers[n, 0], strict=True))
        scaled = fp32(t) * columns.scale[n, 0] * rows.scale[m]
        assert np.array_equal(got[m, n], definition.bf16(np.array([scaled + bias[n]], fp32))[0], equal_nan=True)


@pytest.mark.parametrize("parts", [1, 8])
def test_no_order_of_k_moves_a_bit_of_a_product_within_a_segment(parts: int) -> None:
    x, w = with_outliers(4, 6, 512), normal(5, 9, 512)
    got = definition.linear(x, weight(w, parts))
    length = 512 // parts
    shuffled = np.random.default_rng(0).permutation(length)
    order = (np.arange(parts)[:, None] * length + shuffled).ravel()
    turned = definition.linear(x[:, order], weight(w[:, order], parts))
    assert np.array_equal(turned, got, equal_nan=True)
    assert not np.array_equal(x @ w.T, x[:, order] @ w[:, order].T)  # sums of floats have one


SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LIMITED_BY_WEIGHTS = "large channels with small weights"
"""A weight far below the largest of its row has few bits on the row's grid: it is the only case that may lose."""
DATA: dict[str, Callable[[Floats, Floats], tuple[Floats, Floats]]] = {
    "normal": lambda x, w: (x, w),
    "a spike a row": lambda x, w: (np.where(np.arange(x.shape[1]) == 77, fp32(1500), x), w),
    "four large channels": lambda x, w: (np.where(np.arange(x.shape[1]) % 256 == 9, x * fp32(100), x), w),
    "lognormal channels": lambda x, w: (definition.bf16(x * np.exp(normal(8, x.shape[1]))), w),
    LIMITED_BY_WEIGHTS: lambda x, w: (
        np.where(np.arange(x.shape[1]) % 256 == 9, x * fp32(64), x),
        np.where(np.arange(x.shape[1]) % 256 == 9, w / fp32(64), w),
    ),
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("parts", [1, 8])
def test_a_product_is_as_near_as_that_of_the_other_arithmetic(data: str, parts: int) -> None:
    x, w = DATA[data](normal(6, 24, 1024), definition.bf16(normal(7, 48, 1024) * fp32(0.02)))
    right = x.astype(float) @ w.T.astype(float)
    theirs = distance(definition.bf16(chain(x, w).astype(fp32)), right)
    most = 1.1 if data == LIMITED_BY_WEIGHTS else 1.01
    assert distance(definition.linear(x, weight(w, parts)), right) <= most * theirs


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_any_row_is_within_half_a_step_of_its_grid_and_its_integers_fit_their_digits(row: list[float]) -> None:
    a = np.array([row], fp32)
    for grid, limit in (
        (definition.two_digits, definition.TWO_DIGITS),
        (definition.three_digits, definition.THREE_DIGITS),
        (definition.activations, definition.THREE_DIGITS),
    ):
        rows = grid(a)
        assert np.abs(rows.integers).max() <= limit
        for value, integer in zip(row, rows.integers[0], strict=True):
            step = Fraction(float(rows.scale[0]))
            assert abs(Fraction(value) - int(integer) * step) <= step / 2


def test_the_sum_of_any_product_stays_an_integer_that_fp64_has() -> None:
    """A row with a few large elements has integers of three digits, but their magnitudes cannot all be large."""
    k = definition.LARGEST_K
    for large in (0, 1, 2, 100, 1000, k):
        x = np.full((1, k), 1 / 64, fp32)
        x[0, :large] = 1000
        total = int(np.abs(definition.activations(x).integers).astype(np.int64).sum())
        assert total * definition.TWO_DIGITS < 2**46 < 2**53


def test_the_functions_are_near_those_of_fp64() -> None:
    x = np.linspace(-126, 126, 400_001).astype(fp32)
    assert np.abs(definition.exp2(x) / np.exp2(x.astype(float)) - 1).max() < 1.1e-7
    edges = definition.exp2(np.array([0, 1, -126, -126.001, -np.inf, 127, 1e30, np.nan], fp32))
    assert np.array_equal(edges, np.array([1, 2, 2.0**-126, 0, 0, 2.0**127, 2.0**127, np.nan], fp32), equal_nan=True)
    y = np.exp(np.linspace(-80, 80, 200_001)).astype(fp32)
    assert np.abs(definition.ln(y) - np.log(y.astype(float))).max() < 1e-5
    near = np.linspace(0.8, 1.25, 100_001).astype(fp32)
    assert np.abs(definition.ln(near) / np.log(near.astype(float)) - 1)[near != 1].max() < 3e-7
    s = np.unique(np.geomspace(1, 2**58, 10_001).astype(np.int64))
    assert np.abs(definition.ln_of_integer(s) - np.log(s.astype(float))).max() < 2e-14


def test_tanh_is_near_that_of_fp64_and_a_soft_cap_reorders_no_bf16_numbers() -> None:
    x = np.concatenate([np.linspace(-12, 12, 400_001), np.geomspace(1e-30, 12, 100_001)]).astype(fp32)
    x.sort()
    got, right = definition.tanh(x), np.tanh(x.astype(float))
    assert np.abs(got - right).max() < 1e-7
    assert (np.abs(got - right) <= 1.7e-7 * np.abs(right)).all()
    edges = definition.tanh(np.array([0, -0.0, 1e-45, 50, -1e30, np.inf, -np.inf, np.nan], fp32))
    assert np.array_equal(edges, np.array([0, -0.0, 1e-45, 1, -1, 1, -1, np.nan], fp32), equal_nan=True)
    assert np.signbit(edges[1])
    numbers = definition.from_bits(np.arange(65_536, dtype=np.uint16))
    numbers = np.sort(numbers[np.isfinite(numbers)])
    for soft_cap in (30.0, 50.0):
        assert (np.diff(definition.capped(numbers, soft_cap)) >= 0).all()
        between = definition.capped(numbers[np.abs(numbers) < 2 * soft_cap], soft_cap)
        assert len(np.unique(between)) > 0.995 * len(between)


def test_soft_caps_of_logits_are_nearer_to_those_of_fp64_than_vllms_of_three_roundings() -> None:
    x = definition.from_bits(np.arange(65_536, dtype=np.uint16))
    x = x[np.isfinite(x) & (np.abs(x) > 1e-30)]
    right = 30 * np.tanh(x.astype(float) / 30)
    tensor = torch.from_numpy(x).bfloat16()
    theirs = (torch.tanh(tensor / 30.0) * 30.0).float().numpy()
    assert np.abs(definition.bf16(definition.capped(x, 30.0)) / right - 1).max() < BF16
    assert np.abs(theirs / right - 1).max() > 2 * BF16


def test_bf16_rounds_as_pytorch_does() -> None:
    bits = np.arange(0, 1 << 32, 65_521, dtype=np.uint64).astype(np.uint32)
    x = bits.view(fp32)
    assert np.array_equal(definition.bf16(x), torch.from_numpy(x).bfloat16().float().numpy(), equal_nan=True)


def test_norm_and_activation_are_near_those_of_fp64() -> None:
    x, g, residual = normal(10, 6, 512), normal(11, 512), normal(12, 6, 512)
    z = x.astype(float) + residual
    got, kept = definition.rms_norm(x, g, 1e-6, residual)
    assert distance(got, z / np.sqrt((z * z).mean(-1, keepdims=True) + 1e-6) * g) < BF16
    assert np.array_equal(kept, definition.bf16((x + residual).astype(fp32)))
    gate, up = np.split((x * 4).astype(float), 2, axis=-1)
    assert distance(definition.silu_and_mul(x * fp32(4)), gate / (1 + np.exp(-gate)) * up) < BF16


def test_gelu_is_nearer_to_that_of_fp64_than_pytorchs() -> None:
    x = definition.from_bits(np.arange(65_536, dtype=np.uint16))
    x = x[np.isfinite(x) & (np.abs(x) < 1e4) & (np.abs(x) > 1e-30)]
    wide = x.astype(float)
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    right = wide * np.exp(np.minimum(2 * inner, 0)) / (1 + np.exp(-2 * np.abs(inner)))
    got = definition.gelu_and_mul(np.stack((x, np.ones_like(x)), -1))[:, 0]
    there = np.abs(right) > 1e-30
    assert np.abs(got / np.where(there, right, 1) - 1)[there].max() < BF16
    theirs = torch.nn.functional.gelu(torch.from_numpy(x).bfloat16(), approximate="tanh").float().numpy()
    assert np.abs(theirs / np.where(there, right, 1) - 1)[there].max() > BF16
    assert np.abs(got - right).max() <= np.abs(right * BF16).max()


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_a_number_times_a_factor_is_rounded_once_as_pytorch_does() -> None:
    x = definition.from_bits(np.arange(65_536, dtype=np.uint16))
    tensor = torch.from_numpy(x).bfloat16()
    for factor in (12.0, 0.22, 1 / 0.7):
        got = definition.scaled(x, factor)
        assert np.array_equal(got, (tensor * factor).float().numpy(), equal_nan=True)
        assert np.array_equal(got, tensor.clone().mul_(factor).float().numpy(), equal_nan=True)
    buffer = torch.tensor(2304**0.5 + 0.1, dtype=torch.bfloat16)
    assert np.array_equal(definition.scaled(x, float(buffer)), (tensor * buffer).float().numpy(), equal_nan=True)


def test_softmax_and_its_logarithm_are_near_those_of_fp64_and_have_no_order() -> None:
    logits = normal(13, 3, 20_000) * fp32(4)
    logits[1, :500] = -np.inf
    right = logits.astype(float) - np.log(np.exp(logits.astype(float)).sum(-1, keepdims=True))
    got = definition.log_softmax(logits)
    there = np.isfinite(right)
    assert np.abs(got[there] - right[there]).max() < 4e-6
    assert np.abs(definition.softmax(logits) - np.exp(right)).max() < 1e-7
    order = np.random.default_rng(0).permutation(logits.shape[1])
    assert np.array_equal(definition.log_softmax(logits[:, order]), got[:, order])


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (100, None), (None, 2.0), (100, 30.0)])
def test_attention_is_near_that_of_fp64_whatever_the_scales_of_its_values(
    window: int | None, soft_cap: float | None
) -> None:
    q, k, v = normal(14, 40, 4, 64), normal(15, 700, 2, 64), normal(16, 700, 2, 64)
    k[0] *= 3  # a sink
    v *= np.exp2(np.arange(700) % 11 - 5).astype(fp32)[:, None, None]
    at = np.arange(700)
    visible = at <= np.arange(660, 700)[:, None]
    if window:
        visible &= at > np.arange(660, 700)[:, None] - window
    s = np.einsum("qhd,khd->hqk", q.astype(float), np.repeat(k, 2, 1)) / 8
    if soft_cap:
        s = soft_cap * np.tanh(s / soft_cap)
    p = np.exp(np.where(visible, s, -np.inf))
    right = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), np.repeat(v, 2, 1).astype(float))
    assert distance(definition.attention(q, k, v, 0.125, window, soft_cap), right) < BF16
    if soft_cap == 2:
        assert distance(definition.attention(q, k, v, 0.125, window), right) > 10 * BF16, "the negative control"


def test_a_row_of_attention_is_the_same_in_any_chunk_and_later_tokens_change_nothing() -> None:
    q, k, v = normal(17, 330, 2, 64), normal(18, 330, 1, 64), normal(19, 330, 1, 64)
    whole = definition.attention(q, k, v, 0.125)
    for start, stop in ((0, 1), (0, 64), (63, 66), (200, 300), (329, 330)):
        part = definition.attention(q[start:stop], k[:stop], v[:stop] * fp32(1), 0.125)
        assert np.array_equal(part, whole[start:stop])


@pytest.mark.parametrize("scaling", [None, SCALING, {"factor": 8.0}])
def test_the_rotary_table_is_the_cosine_and_sine_of_each_angle(scaling: dict[str, float] | None) -> None:
    turns = definition.turns(64, 500_000.0, scaling)
    table = definition.rotary_table(3000, turns)
    assert np.array_equal(definition.rotary_table(7, turns, 1234), table[1234:1241])
    for position, pair in ((0, 0), (1, 0), (2999, 0), (2048, 7), (777, 20), (2999, 31)):
        with localcontext() as context:
            context.prec = 40
            turn = Decimal(int(turns[pair])) * position / 2**64 % 1
            angle = float(turn * 2 * definition.PI)
        assert table[position, pair] == pytest.approx(math.cos(angle), rel=BF16, abs=1e-12)
        assert table[position, pair + 32] == pytest.approx(math.sin(angle), rel=BF16, abs=1e-12)
    frequencies = 500_000.0 ** (-2 * np.arange(32) / 64)
    if scaling == {"factor": 8.0}:
        frequencies = frequencies / 8
    elif scaling:  # as vLLM computes them
        waves = 2 * math.pi / frequencies
        smooth = (8192 / waves - 1) / 3
        middle = (1 - smooth) * frequencies / 8 + smooth * frequencies
        frequencies = np.where(waves < 8192 / 4, frequencies, np.where(waves > 8192, frequencies / 8, middle))
    assert turns / 2.0**64 * 2 * math.pi == pytest.approx(frequencies, rel=1e-12)


def test_noise_is_uniform_and_a_draw_has_the_softmax_s_probabilities() -> None:
    u = definition.uniform(7, 3, np.arange(100_000, dtype=np.uint64)).astype(float)
    assert np.abs(np.sort(u) - np.linspace(0, 1, len(u))).max() < 0.006  # Kolmogorov and Smirnov: 0.0043 for 5 %
    logits = np.array([0, 1, 2, -np.inf, 2], fp32)
    drawn = np.bincount([definition.draw(logits, 1.0, 0, 1.0, seed, 5) for seed in range(4000)], minlength=5)
    expected = definition.softmax(logits).astype(float) * 4000
    kept = expected > 0
    assert drawn[3] == 0
    assert (((drawn - expected)[kept] ** 2) / expected[kept]).sum() < 16.3  # chi-squared with 3 degrees, 0.1 %


def test_equal_logits_are_taken_by_the_lowest_token() -> None:
    logits = np.array([1, 3, 3, 2, 3], fp32)
    assert definition.draw(logits, 0, 0, 1.0, 0, 0) == 1
    assert np.isfinite(definition.top_k_top_p(logits, 2, 1.0)).nonzero()[0].tolist() == [1, 2]
    assert np.isfinite(definition.top_k_top_p(logits, 0, 0.5)).nonzero()[0].tolist() == [1, 2]


KNOWN = "aa8b39127a5054a0"


def digest() -> str:
    """Of what the definition makes of numbers that every machine has."""
    x, w = with_outliers(20, 12, 512), normal(21, 40, 512)
    q, k, v = normal(22, 90, 4, 64), normal(23, 300, 2, 64), normal(24, 300, 2, 64)
    logits = definition.linear(x, weight(w, 8))[np.r_[:6, 9:12]]
    with np.errstate(over="ignore", invalid="ignore"):
        made = [
            *(definition.linear(x, weight(w)), *definition.rms_norm(x, None, 1e-6, normal(25, 12, 512))),
            *(definition.silu_and_mul(normal(26, 9, 200) * fp32(20)), definition.attention(q, k, v, 0.125, 77)),
            definition.rotate(q, definition.rotary_table(90, definition.turns(64, 1e6))),
            *(logits, definition.softmax(logits), definition.log_softmax(logits)),
            *(definition.gumbel(27, 28, np.arange(999, dtype=np.uint64)), definition.attention(q, k, v, 0.125)),
        ]
    found = hashlib.sha256(FORMAT.encode())
    for array in made:
        found.update(np.where(np.isnan(array), fp32(-1), array + fp32(0)).astype("<f4").tobytes())
    return found.hexdigest()[:16]


KNOWN_OF_GEMMA = "50f4aeae13b65045"


def digest_of_gemma() -> str:
    """The same of what other families have."""
    x, q, k, v = normal(30, 9, 200) * fp32(3), normal(31, 90, 4, 64), normal(32, 300, 2, 64), normal(33, 300, 2, 64)
    found = hashlib.sha256(FORMAT.encode())
    for array in (
        definition.gelu_and_mul(x),
        definition.capped(x * fp32(20), 30.0),
        definition.scaled(x, 0.22),
        definition.rotary_table(90, definition.turns(64, 1e6, {"factor": 8.0})),
        definition.attention(q, k, v, 0.125, 77, 2.0),
        definition.attention(q, k, v, 0.5, None, 50.0),
    ):
        found.update((array + fp32(0)).astype("<f4").tobytes())
    return found.hexdigest()[:16]


def test_the_format_has_its_bits_on_this_machine_too() -> None:
    """Seen equal on an AMD EPYC (Zen 4) with OpenBLAS for it, for Haswell and for Nehalem."""
    assert digest() == KNOWN
    assert digest_of_gemma() == KNOWN_OF_GEMMA


def test_a_small_model_has_its_known_answers_and_what_has_none_is_refused() -> None:
    assert known_answers.digest() == known_answers.DIGEST
    config, _ = known_answers.checkpoint()
    for changed, said in (
        ({"architectures": ["GPT2LMHeadModel"]}, "the model GPT2LMHeadModel"),
        ({"use_sliding_window": True}, "sliding windows"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "type yarn"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "a part of a head"),
        ({"hidden_act": "gelu"}, "the activation gelu"),
        ({"architectures": ["GemmaForCausalLM"], "hidden_activation": "gelu"}, "the activation gelu"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "both directions"),
        ({"architectures": ["GraniteForCausalLM"], "layer_types": ["full_attention"]}, "of a Granite"),
        ({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope"}}, "type longrope"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "yarn",
        ),
    ):
        with pytest.raises(NotCovered, match=said):
            Decoder(config | changed, known_answers.model()._weights).logits([1, 2])
