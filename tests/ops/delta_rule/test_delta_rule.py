from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.assertions import DTYPES, assert_same_bits
from tests.conftest import INTERPRETED
from tests.ops.conftest import Device
from tests.ops.delta_rule.cases import KINDS, Layer, Rows
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.causal_conv import ConvStates, causal_conv
from vllm_batch_invariant.ops.delta_rule import (
    Convolution,
    DeltaRuleReduction,
    DeltaStates,
    cpu,
    delta_rule,
    gdn_inputs,
    kda_inputs,
    mamba2_inputs,
)
from vllm_batch_invariant.ops.delta_rule.reference import delta_rule as definition
from vllm_batch_invariant.ops.delta_rule.reference import gdn_inputs as definition_of_inputs
from vllm_batch_invariant.ops.delta_rule.reference import kda_gates, mamba2_gates

ERROR = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
"""Root mean square of the error against float64, relative to that of the result."""
LENGTH = 50


@pytest.fixture(autouse=True)
def in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's BLAS, with which the interpreter multiplies, gives a column other bits beside other columns."""
    if INTERPRETED:
        from triton.runtime.interpreter import InterpreterBuilder

        from tests import interpreted_dot

        monkeypatch.setattr(InterpreterBuilder, "create_dot", interpreted_dot.in_steps)


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def layer(device: Device, request: pytest.FixtureRequest) -> Layer:
    """fp16 alone is the same in Triton's interpreter, which truncates to bf16, and takes a second a call."""
    if device.is_interpreted:
        return Layer(device.type, torch.float16, 1, 2, 16, 16, **request.param)
    return Layer(device.type, torch.bfloat16, **request.param)


@pytest.fixture
def compiled(device: Device) -> None:
    """Of tests that would take the interpreter seconds, and tell of the kernels nothing that others do not."""
    if device.is_interpreted:
        pytest.skip("takes the interpreter seconds")


@pytest.fixture
def length(device: Device) -> int:
    return 19 if device.is_interpreted else LENGTH


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert not actual.isnan().any(), "NaN in the result"
    difference = actual.double() - expected
    return float(difference.square().mean().sqrt() / expected.square().mean().sqrt())


def verified(layer: Layer, x: Rows, wrong: Rows, first: int, seed: int, after: Callable[[int], None] | None = None):
    """The rows that stay of steps with drafts of which some are wrong, behind so many tokens."""
    generator = torch.Generator().manual_seed(seed)
    out, done, length = layer.step([(2, 0, x.part(0, first))]), first, x.tokens
    while done < length:
        accepted = int(torch.randint(0, layer.drafts + 1, (), generator=generator))
        end, good = min(done + 1 + layer.drafts, length), min(done + 1 + accepted, length)
        [rows] = layer.step([(2, done, Rows.joined([x.part(done, good), wrong.part(good, end)]))])
        out.append(rows[: good - done])
        done = good
        if after:
            after(done)
    return torch.cat(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", [0.05, 0.001, 2.0, 0.0, 100.0], ids="gates of mean -{}".format)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_values_are_near_the_definition(device, dtype, gate, kind):
    if device.is_interpreted and kind and gate not in (0.05, 100.0):
        pytest.skip("takes the interpreter seconds")
    layer = Layer(device.type, dtype, 1, 2, 32, 16, **kind)
    x = layer.tokens(20 if device.is_interpreted else 200, 3, gate)
    found = error(layer.whole(x).cpu(), layer.definition(x).cpu())
    rounds_more = 1.1 if layer.reduction.has_channels else 1  # keys and queries that meet a state
    assert found <= rounds_more * ERROR[dtype] * (40 if dtype == torch.float32 and gate > 1 else 1)


def test_constant_decays_are_near_the_definition_of_linear_attention(device):
    """Token by token, of queries that are scaled: the state decays and takes a key and its value."""
    layer = Layer(device.type, torch.float32, 2, 2, 32, 16, solve=False)
    layer.skip, slopes = None, torch.tensor([0.25, 0.01], device=device.type)
    x = layer.tokens(20 if device.is_interpreted else 100, 3)
    x = x._replace(g=-slopes.expand(x.tokens, 2), beta=torch.ones_like(x.beta))
    state, expected = torch.zeros(2, 32, 16, dtype=torch.float64, device=device.type), []
    for q, k, v, *_ in zip(*(one.double() for one in x), strict=True):
        state = (-slopes.double()).exp()[:, None, None] * state + k[:, :, None] * v[:, None, :]
        expected.append(torch.einsum("hk,hkv->hv", q, state))
    assert error(layer.whole(x), torch.stack(expected)) <= ERROR[torch.float32]
    assert_same_bits(layer.cut(x, 7, *(x.tokens - 7) * [1]), layer.whole(x), "decode")


@pytest.mark.parametrize(("gate", "bound"), [(0.05, 3.31e-3), (0.001, 3.97e-3)])
def test_gates_of_channels_are_as_near_in_heads_of_a_published_size(gate, bound):
    """As the prototype of the arithmetic was, in NumPy."""
    layer = Layer("cpu", torch.bfloat16, 1, 1, 128, 128, gates="channel")
    x = layer.tokens(256, 3, gate)
    assert error(layer.whole(x), layer.definition(x)) <= 1.02 * bound


def test_the_definition_with_gates_of_channels_is_that_of_transformers():
    published = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    x = Layer("cpu", torch.float32, 2, 2, 32, 16, gates="channel").tokens(60, 3)
    out, state = published.recurrent_kimi_delta_attention.__wrapped__(*(one[None] for one in x), None, True)
    for expected, found in zip((out[0], state[0]), definition(*x), strict=True):
        assert error(expected, found) <= ERROR[torch.float32]


def test_gates_of_channels_that_are_alike_are_those_of_a_head():
    """The same function, near float64: one decay for all elements of a key."""
    layer, other = Layer("cpu", torch.float32, gates="channel"), Layer("cpu", torch.float32)
    x = other.tokens(60, 3)
    spread = x._replace(g=x.g[:, :, None].expand(*x.g.shape, layer.key_size))
    assert error(layer.whole(spread), definition(*x)[0]) <= ERROR[torch.float32]
    apart = spread._replace(g=spread.g.clone())
    apart.g[:, :, 0] *= 4
    assert error(layer.whole(apart), definition(*x)[0]) > 1e-3


def test_a_state_space_without_its_parts_is_another_function():
    """The bounds of the test before would show it."""
    layer = Layer("cpu", torch.float32, 1, 2, 32, 16, solve=False)
    x = layer.tokens(60, 3)
    for other in (definition(*x, skip=layer.skip), definition(*x, False), definition(*x, False, -layer.skip)):
        assert error(layer.whole(x), other[0]) > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["alike", "the same token"])
def test_values_of_keys_that_are_alike_are_near_the_definition(dtype, kind):
    layer = Layer("cpu", dtype, 1, 2, 32, 16)
    x = layer.tokens(160, 3, gate=0.001, spread=0.5)
    if kind == "the same token":
        x = Rows(*(one[:1].expand_as(one).contiguous() for one in x))
        x.beta.fill_(0.95)
        x.g.zero_()
    assert error(layer.whole(x), definition(*x)[0]) <= 3 * ERROR[dtype]


def test_a_state_in_bf16_is_not_as_near():
    """The bounds of the tests before would show it."""
    layer = Layer("cpu", torch.float32, 1, 2, 32, 16)
    x = layer.tokens(60, 3, 0.001)
    pages, out = layer.parts, []
    for token in range(0, x.tokens, 16):
        out += layer.step([(1, token, x.part(token, min(token + 16, x.tokens)))])
        pages.low.zero_()
    assert error(torch.cat(out), definition(*x)[0]) > 100 * ERROR[torch.float32]


def test_a_request_has_the_same_bits_at_every_cut(device, layer, length):
    x = layer.tokens(length, 3)
    expected = layer.whole(x)
    for first in (7,) if device.is_interpreted else range(1, 49):
        assert_same_bits(layer.cut(x, first, length - first), expected, f"cut at {first}")
    assert_same_bits(layer.cut(x, 14, *(length - 14) * [1]), expected, "decode")
    for size in () if device.is_interpreted else (1, 2, 3, 15, 16, 17):
        lengths = [min(size, length - start) for start in range(0, length, size)]
        assert_same_bits(layer.cut(x, *lengths), expected, f"steps of {size}")


@pytest.mark.usefixtures("compiled")
def test_the_state_that_is_left_is_the_same_at_every_cut(layer, length):
    x = layer.tokens(length, 3)
    layer.whole(x, 1)
    for page, lengths in enumerate(((length - 4, 4), (3, 14, length - 17), (17, *(length - 17) * [1])), 2):
        layer.cut(x, *lengths, page=page)
        assert_same_bits(layer.states[page], layer.states[1], f"steps of {lengths}")


@pytest.mark.usefixtures("compiled")
def test_chunks_from_a_calls_start_show(layer, length):
    """Tokens of zeros fill a call up to a chunk, and leave the state as it is: so the next call begins with a chunk."""
    x = layer.tokens(length, 3)
    expected = layer.whole(x)
    first = Rows(*(torch.nn.functional.pad(one[:5], (0, 0) * (one.dim() - 1) + (0, 11)) for one in x))
    [begun] = layer.step([(1, 0, first)])
    [rest] = layer.step([(1, 16, x.part(5, length))])
    assert_same_bits(begun[:5], expected[:5], "before the cut")
    assert not torch.equal(rest, expected[5:])


@pytest.mark.usefixtures("compiled")
def test_a_state_that_a_call_rounds_to_bf16_shows(layer, length):
    x = layer.tokens(length, 3)
    layer.step([(1, 0, x.part(0, 17))])
    layer.parts.low.zero_()
    [rest] = layer.step([(1, 17, x.part(17, length))])
    # In bf16 the plane is read where the next chunk begins, else at once.
    assert not torch.equal(rest[15:] if layer.dtype == torch.bfloat16 else rest, layer.whole(x)[17:][-len(rest) :])


def test_a_request_has_the_same_bits_alone_and_among_others(device, layer):
    if device.is_interpreted and not layer.solve:
        pytest.skip("takes the interpreter seconds")
    most = 3 if device.is_interpreted else 32
    requests = {
        page: layer.tokens(1 + page * 7 % (13 if device.is_interpreted else 40), page) for page in range(1, most + 1)
    }
    alone = {page: layer.whole(x, page) for page, x in requests.items()}
    for count in {2, 3, 9, most} if most > 9 else (most,):
        # In the first step prompts of any lengths, in the second some decode beside the rest of others' prompts.
        order = torch.randperm(most, generator=torch.Generator().manual_seed(count))[:count].add(1).tolist()
        firsts = {page: requests[page].tokens - 1 if page % 3 else requests[page].tokens // 2 for page in order}
        layer.states.fill_(255)
        begun = dict(
            zip(order, layer.step([(page, 0, requests[page].part(0, firsts[page])) for page in order], 3), strict=True)
        )
        order.reverse()
        rest = [(page, firsts[page], requests[page].part(firsts[page], requests[page].tokens)) for page in order]
        for page, ended in zip(order, layer.step(rest, 5), strict=True):
            assert_same_bits(torch.cat([begun[page], ended]), alone[page], f"request {page} of {count}")


@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_drafts_that_are_rejected_leave_no_trace(device, layer, length, drafts):
    if device.is_interpreted and drafts != 3:
        pytest.skip("takes the interpreter seconds")
    layer.drafts = drafts
    layer.__post_init__()
    x, wrong = layer.tokens(length, 3), layer.tokens(length, 4)
    expected = layer.whole(x)
    for first in (14,) if device.is_interpreted else (1, 5, 15, 16, 17):
        for seed in range(1 if device.is_interpreted else 4):
            out = verified(layer, x, wrong, first, seed)
            assert_same_bits(out, expected, f"{drafts} drafts after {first} tokens, {seed}")


class Faults:
    """What goes wrong in steps with 3 drafts, each of which moves some result's bits."""

    @staticmethod
    def a_border_is_stored_for_drafts(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(DeltaRuleReduction, "drafts", lambda self, rows: 0)  # then every call's tokens are sure

    @staticmethod
    def a_ring_has_no_room_for_drafts(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
        layer.rows = layer.chunk
        size = layer.reduction.page_bytes(layer.key_heads, layer.value_heads, layer.rows)
        layer.states = torch.full((layer.pages, size), 255, dtype=torch.uint8)

    @staticmethod
    def a_ring_keeps_the_first_draft(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
        pages = layer.parts
        kept: dict[int, list[torch.Tensor]] = {}

        def put_back(done: int) -> None:
            for position in range(done, done + layer.drafts):
                now = [held[2, position % layer.rows] for held in pages[3:7]]
                for row, first in zip(now, kept.setdefault(position, [row.clone() for row in now]), strict=True):
                    row.copy_(first)
            for position in range(max(0, done - layer.drafts), done):
                for held, first in zip(pages[3:7], kept.get(position, ()), strict=False):
                    held[2, position % layer.rows] = first

        return put_back


@pytest.mark.parametrize("fault", [name for name in vars(Faults) if not name.startswith("_")])
def test_a_planted_fault_of_drafts_shows(fault, monkeypatch):
    layer = Layer("cpu", torch.bfloat16, drafts=3)
    x, wrong = layer.tokens(LENGTH, 3), layer.tokens(LENGTH, 4)
    expected = layer.whole(x)
    after = getattr(Faults, fault)(layer, monkeypatch)
    assert any(not torch.equal(verified(layer, x, wrong, 5, seed, after), expected) for seed in range(3))


@pytest.mark.usefixtures("compiled")
def test_a_page_that_another_has_left_is_not_read_at_the_first_token(layer, length):
    x = layer.tokens(length, 3)
    expected = layer.whole(x, 1)
    layer.whole(layer.tokens(length, 4), 2)
    assert_same_bits(layer.whole(x, 2), expected, "a page of another request")
    layer.parts.borders[3] = 0
    [later] = layer.step([(3, 1, x.part(1, length))])
    assert later.isnan().all(), "a page of NaN is read when tokens are said to be there"


@pytest.mark.usefixtures("compiled")
def test_a_page_moves_with_all_its_bytes(layer):
    layer.drafts = 8
    layer.__post_init__()
    x = layer.tokens(45, 3)
    expected = layer.whole(x)[40:]
    for lost in (False, True):
        layer.step([(1, 0, x.part(0, 40))])
        layer.states[2] = layer.states[1]
        layer.states[1] = 255
        if lost:
            layer.parts.borders[2] = 0
        [moved] = layer.step([(2, 40, x.part(40, 45))])
        assert torch.equal(moved, expected) == (not lost), "the border's position is a part of a page"


@pytest.mark.usefixtures("compiled")
def test_a_page_without_tokens_is_neither_read_nor_written(layer):
    layer.states.fill_(7)
    before = layer.states.clone()
    layer.step([(1, 0, layer.tokens(20, 3)), (2, 9, layer.tokens(0, 3)), (3, 0, layer.tokens(1, 3))], 4)
    same = (layer.states == before).all(1)
    assert (~same).nonzero().flatten().tolist() == [1, 3]


def test_strides_move_no_bit(device, layer, length):
    if device.is_interpreted and not layer.solve:
        pytest.skip("takes the interpreter seconds")
    x = layer.tokens(length, 3)
    expected = layer.whole(x)
    apart = torch.full((length, x.v[0].numel() + 16), torch.nan, dtype=x.v.dtype, device=x.v.device)
    v = apart[:, 8:-8].copy_(x.v.flatten(1)).unflatten(1, x.v.shape[1:])
    wide = torch.full((len(layer.states), layer.states.shape[1] + 32), 255, dtype=torch.uint8, device=x.v.device)
    layer.states = wide[:, 16:-16]
    assert_same_bits(layer.cut(x._replace(v=v), 18, length - 18), expected, "rows and pages apart")


def test_another_chunk_is_another_reduction():
    x = Layer("cpu", torch.bfloat16).tokens(LENGTH, 3)
    layer = Layer("cpu", torch.bfloat16, chunk=32)
    expected = layer.whole(x)
    assert_same_bits(layer.cut(x, 5, 30, *15 * [1]), expected, "chunks of 32")
    assert not torch.equal(expected, Layer("cpu", torch.bfloat16).whole(x))


def test_threads_move_no_bit(threads):
    layer = Layer("cpu", torch.float32, value_heads=8)
    x = layer.tokens(40, 3)
    threads(1)
    expected = layer.whole(x)
    threads(2)
    assert_same_bits(layer.whole(x), expected, "two threads")


@pytest.mark.parametrize(("dtype", "rounded"), [(torch.bfloat16, cpu._to_bf16), (torch.float16, cpu._to_fp16)])
def test_a_cpu_rounds_as_pytorch_does(dtype, rounded):
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,), generator=torch.Generator().manual_seed(0))
    x = torch.cat([bits.to(torch.int32).view(torch.float32), torch.tensor([65519.0, 65520.0, 2**-25, 0.0, torch.inf])])
    out = x.clone()
    rounded(out.numpy())
    torch.testing.assert_close(out, x.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


def near_exp(device) -> float:
    """How near float64 gates are: a GPU's exponential errs by 3.7e-6 near -80."""
    return 5e-6 if device.type == "cuda" and not device.is_interpreted else 2e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_of_a_gated_delta_net_are_near_the_definition(device, dtype):
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device.type, dtype)

    mixed, a, b = drawn(9, 2 * 2 * 32 + 3 * 16), 20 * drawn(9, 3), drawn(9, 3)
    a_log, dt_bias = drawn(3).float(), drawn(3)
    given = gdn_inputs(mixed, a, b, a_log, dt_bias, 2, 32)
    for made, expected, tolerance in zip(
        given,
        definition_of_inputs(mixed, a, b, a_log, dt_bias, 2, 32),
        (*2 * (2 * torch.finfo(dtype).eps,), 0, *2 * (near_exp(device),)),
        strict=True,
    ):
        torch.testing.assert_close(made.double(), expected, rtol=tolerance, atol=1e-30)
    assert [made.dtype for made in given] == [*3 * (dtype,), *2 * (torch.float32,)]
    apart = torch.full((9, mixed.shape[1] + 8), torch.nan, dtype=dtype, device=device.type)[:, :-8].copy_(mixed)
    for row in (0, 8):
        part = slice(row, row + 1)
        for one, all_rows in zip(gdn_inputs(apart[part], a[part], b[part], a_log, dt_bias, 2, 32), given, strict=True):
            assert_same_bits(one, all_rows[part], f"row {row} alone")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("least", [None, -5.0], ids=["gates without a bound", "gates above -5"])
def test_operands_with_gates_of_channels_are_near_the_definition(device, dtype, least):
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device.type, dtype)

    projected, b, a_log, dt_bias = drawn(9, 4 * 2 * 32), drawn(9, 2), drawn(2).float(), drawn(64).float()
    mixed, a = projected[:, :192], 20 * projected[:, 192:]
    q, k, v, *gates = kda_inputs(mixed, a, b, a_log, dt_bias, least)
    expected = definition_of_inputs(mixed, b, b, a_log, a_log, 2, 32)
    for made, near in zip((q, k), expected[:2], strict=True):
        torch.testing.assert_close(made.double(), near, rtol=2 * torch.finfo(dtype).eps, atol=1e-30)
    for made, near in zip(gates, kda_gates(a, b, a_log, dt_bias, least), strict=True):
        torch.testing.assert_close(made.double(), near, rtol=10 * near_exp(device), atol=1e-30)
    assert_same_bits(v.flatten(1), mixed[:, 128:], "values")
    assert [one.dtype for one in (q, k, v, *gates)] == [*3 * (dtype,), *2 * (torch.float32,)]
    for row in (0, 8):
        part = slice(row, row + 1)
        alone = kda_inputs(mixed[part], a[part], b[part], a_log, dt_bias, least)
        for one, all_rows in zip(alone, (q, k, v, *gates), strict=True):
            assert_same_bits(one, all_rows[part], f"row {row} alone")
    for given in ((mixed, a[:, 1:], b, a_log, dt_bias), (mixed, a, b, a_log, dt_bias, 0.5)):
        with pytest.raises(ValueError, match="no Kimi Delta Attention of"):
            kda_inputs(*given)


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_of_a_state_space_are_near_the_definition(device, dtype):
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device.type, dtype)

    mixed, dt, dt_bias = drawn(9, 3 * 16 + 2 * 2 * 32), 20 * drawn(9, 6)[:, 3:], drawn(3)
    a = -torch.rand(3, generator=generator).to(device.type)
    c, b, x, g, steps = mamba2_inputs(mixed, dt, a, dt_bias, 1, 64)
    for made, expected in zip((g, steps), mamba2_gates(dt, a, dt_bias), strict=True):
        torch.testing.assert_close(made.double(), expected, rtol=near_exp(device), atol=1e-30)
    assert_same_bits(torch.cat([x.flatten(1), b.flatten(1), c.flatten(1)], 1), mixed, "x, B and C")
    assert [one.shape[1:] for one in (c, b, x)] == [(1, 64), (1, 64), (3, 16)]
    alone = mamba2_inputs(mixed[8:], dt[8:], a, dt_bias, 1, 64)
    assert_same_bits(torch.cat(alone[3:]), torch.stack([g[8], steps[8]]), "row 8 alone")
    with pytest.raises(ValueError, match="no state space of"):
        mamba2_inputs(mixed, dt, a[:2], dt_bias, 1, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("solve", [True, False], ids=["delta rule", "state space"])
def test_operands_behind_a_convolution_are_those_of_its_rows(device, dtype, solve, monkeypatch):
    """Of a step of decode, of drafts and of a prompt, whose requests have pages that are full of NaN."""
    if device.is_interpreted:
        # NumPy's exp is not PyTorch's.
        monkeypatch.setattr(torch.nn.functional, "silu", silu_of_numpy)
    key_heads, value_heads, key_size, value_size = (2, 3, 32, 16) if solve else (2, 6, 32, 16)
    channels = 2 * key_heads * key_size + value_heads * value_size
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device.type, dtype)

    weight, bias = drawn(channels, 4), None if solve else drawn(channels)
    gates = (drawn(value_heads), drawn(value_heads)) if solve else (-drawn(value_heads, dtype=torch.float32).abs(),)
    dt_bias = () if solve else (drawn(value_heads),)
    held = torch.full((2, 5, 6, channels), torch.nan, dtype=dtype, device=device.type)
    before = [0, 0, 0]
    for lengths in ((2, 9, 1), (1, 1, 1), (3, 4, 0), (1, 20, 2), (1, 1, 1)):
        tokens, integers = sum(lengths), {"dtype": torch.int32, "device": device.type}
        starts = torch.tensor([0, *lengths]).cumsum(0).to(**integers)
        pages, context = torch.tensor([3, 0, 4], **integers), torch.tensor(before, **integers)
        mixed, of_token = drawn(tokens, channels), [drawn(tokens, value_heads) for _ in range(1 + solve)]
        of_heads = key_heads, key_size
        alone, fused = (ConvStates(one, pages, starts, context, max(lengths)) for one in held)
        inputs = gdn_inputs if solve else mamba2_inputs
        rows = torch.nn.functional.silu(causal_conv(mixed, weight, bias, alone))
        expected = inputs(rows, *of_token, *gates, *dt_bias, *of_heads)
        found = inputs(mixed, *of_token, *gates, *dt_bias, *of_heads, Convolution(weight, bias, fused))
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other, f"{lengths} tokens")
        assert_same_bits(held[1], held[0], f"what {lengths} tokens leave")
        before = [sum(pair) for pair in zip(before, lengths, strict=True)]
    with pytest.raises(ValueError, match="no convolution of"):
        inputs(mixed, *of_token, *gates, *dt_bias, *of_heads, Convolution(weight[1:], bias, fused))


def silu_of_numpy(x: torch.Tensor) -> torch.Tensor:
    rows = x.float().numpy()
    return torch.from_numpy(rows / (1 + np.exp(-rows))).to(x.dtype)


def test_what_does_not_fit_is_refused(device, layer):
    for sizes, dtype, named in (((48, 16), torch.float32, "keys of 48"), ((16, 16), torch.float64, "float64")):
        with pytest.raises(NotCovered, match=named):
            DeltaRuleReduction.of(*sizes, dtype)
    x = layer.tokens(3, 3)
    integers = {"dtype": torch.int32, "device": device.type}
    page, starts = torch.zeros(1, **integers), torch.tensor([0, 3], **integers)
    good = DeltaStates(layer.states, page, starts, page, 3)
    for rows, states in (
        (x._replace(q=x.q[:2]), good),
        (x._replace(v=x.v.double()), good),
        (x._replace(g=x.g.double()), good),
        (x, DeltaStates(layer.states, page, starts, page, 3, rows=32)),
        (x, DeltaStates(layer.states[:, 1:], page, starts, page, 3)),
        (x, DeltaStates(layer.states, page, starts[:1], page, 3)),
    ):
        with pytest.raises(ValueError, match="no delta rule of"):
            delta_rule(*rows, states, layer.reduction)
    with pytest.raises(ValueError, match="no gated delta net of"):
        gdn_inputs(x.v.flatten(1), x.beta, x.beta, x.beta[0], x.beta[0, :1], 1, 16)
