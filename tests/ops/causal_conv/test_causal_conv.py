import numpy as np
import pytest
import torch

from tests.assertions import DTYPES, assert_near, assert_same_bits
from tests.ops.causal_conv.cases import Layer
from tests.ops.conftest import Device
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.causal_conv import ConvReduction, ConvStates, causal_conv, cpu
from vllm_batch_invariant.ops.causal_conv.reference import causal_conv as definition

KINDS = ({}, {"gated": False, "has_bias": True}, {"width": 4, "has_bias": True}, {"width": 2, "gated": False})
"""LFM2's, that of linear attention, and others."""
LENGTH = 37


@pytest.fixture(params=KINDS, ids=str)
def layer(request: pytest.FixtureRequest, device: Device) -> Layer:
    """fp16 alone is the same in Triton's interpreter, which truncates to bf16."""
    return Layer(device.type, torch.float16 if device.is_interpreted else torch.bfloat16, **request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_values_are_near_the_definition(device, dtype, kind):
    layer = Layer(device.type, dtype, **kind)
    x = layer.tokens(LENGTH, 3)
    expected = definition(x, layer.weight, layer.bias, layer.gated)
    assert_near(layer.whole(x), expected, 2.0 if layer.gated else 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_taps_are_added_from_the_oldest_to_the_newest_each_rounded_once(device, dtype):
    layer = Layer(device.type, dtype, gated=False, has_bias=True, width=4)
    x = layer.tokens(LENGTH, 3)
    x[1::2] = x[:-1:2]
    layer.weight[:, 2] = layer.weight[:, 1].mul_(200)  # then the two in the middle cancel
    layer.weight[:, 1].neg_()
    out = layer.whole(x)
    padded = torch.cat([x.new_zeros(3, layer.channels), x]).double().cpu().numpy()
    weight, bias = layer.weight.double().cpu().numpy(), layer.bias.double().cpu().numpy()

    def chain(order):
        total = np.broadcast_to(bias, x.shape)
        for tap in order:  # fp64 holds a product of two fp32 exactly
            total = np.float32(padded[tap : tap + LENGTH] * weight[:, tap] + total).astype(np.float64)
        return torch.from_numpy(total).to(dtype)

    assert_same_bits(out.cpu(), chain(range(4)), "ascending")
    assert not torch.equal(out.cpu(), chain(reversed(range(4)))), "the operands show no order"


def test_a_request_has_the_same_bits_at_every_cut(device, layer):
    x = layer.tokens(LENGTH, 3)
    expected = layer.whole(x)
    for first in (2, 36) if device.is_interpreted else range(1, LENGTH):
        assert_same_bits(layer.cut(x, first, LENGTH - first), expected, f"cut at {first}")
    for size in (17,) if device.is_interpreted else (1, 2, 3, 15, 16, 17):
        lengths = [min(size, LENGTH - start) for start in range(0, LENGTH, size)]
        assert_same_bits(layer.cut(x, *lengths), expected, f"steps of {size}")


def test_a_state_that_is_lost_shows(layer):
    x = layer.tokens(LENGTH, 3)
    layer.step([(1, 0, x[:20])])
    layer.states[1] = 0
    [rest] = layer.step([(1, 20, x[20:])])
    expected = layer.whole(x)[20:]
    assert not torch.equal(rest[0], expected[0])
    assert_same_bits(rest[layer.width - 1 :], expected[layer.width - 1 :], "tokens that read no state")


def test_a_request_has_the_same_bits_alone_and_among_others(device, layer):
    most = 6 if device.is_interpreted else 64
    requests = {page: layer.tokens(1 + page * 7 % 40, page) for page in range(1, most + 1)}
    alone = {page: layer.whole(x, page) for page, x in requests.items()}
    for count in {2, 3, 9, most} if most > 9 else (most,):
        # In the first step prompts of any lengths, in the second some decode beside the rest of others' prompts.
        order = torch.randperm(most, generator=torch.Generator().manual_seed(count))[:count].add(1).tolist()
        firsts = {page: len(requests[page]) - 1 if page % 3 else len(requests[page]) // 2 for page in order}
        layer.states.fill_(torch.nan)
        begun = dict(
            zip(order, layer.step([(page, 0, requests[page][: firsts[page]]) for page in order], 3), strict=True)
        )
        order.reverse()
        ended = layer.step([(page, firsts[page], requests[page][firsts[page] :]) for page in order], 5)
        for page, rest in zip(order, ended, strict=True):
            assert_same_bits(torch.cat([begun[page], rest]), alone[page], f"request {page} of {count}")


@pytest.mark.parametrize("drafts", [1, 4, 7])
def test_drafts_that_are_rejected_leave_no_trace(device, layer, drafts):
    layer.drafts = drafts
    layer.__post_init__()
    x, wrong = layer.tokens(LENGTH, 3), layer.tokens(LENGTH, 4)
    expected = layer.whole(x)
    generator = torch.Generator().manual_seed(drafts)
    for first in (1, 2, 5):
        out = layer.step([(2, 0, x[:first])])
        done = first
        while done < LENGTH:
            accepted = int(torch.randint(0, drafts + 1, (), generator=generator))
            step = torch.cat([x[done : done + 1 + accepted], wrong[done + 1 + accepted : done + 1 + drafts]])
            [verified] = layer.step([(2, done, step)])
            out.append(verified[: min(1 + accepted, LENGTH - done)])
            done += len(out[-1])
        assert_same_bits(torch.cat(out), expected, f"{drafts} drafts after {first} tokens")


def test_a_ring_without_room_for_drafts_shows(layer):
    """What :class:`ConvStates` asks for is needed."""
    x, wrong = layer.tokens(LENGTH, 3), layer.tokens(LENGTH, 4)
    expected = layer.whole(x)
    layer.step([(1, 0, x[:20])])
    layer.step([(1, 20, torch.cat([x[20:21], wrong[21:25]]))])
    [out] = layer.step([(1, 21, x[21:])])
    assert not torch.equal(out[0], expected[21])


def test_a_page_without_tokens_is_neither_read_nor_written(layer):
    layer.states.fill_(3.0)
    before = layer.states.clone()
    layer.step([(1, 0, layer.tokens(20, 3)), (2, 9, layer.tokens(0, 3)), (3, 5, layer.tokens(1, 3))], 4)
    same = (layer.states == before).flatten(1).all(1)
    assert (~same).nonzero().flatten().tolist() == [1, 3]


@pytest.mark.parametrize("channels", [1, 17, 300])
def test_layouts_and_sizes_move_no_bit(device, layer, channels):
    layer.channels = channels
    layer.__post_init__()
    other = Layer(**{name: getattr(layer, name) for name in ("device", "dtype", "width", "gated", "has_bias")},
                  channels=channels, channels_first=True, drafts=3)  # fmt: skip
    x = layer.tokens(LENGTH, 3)
    apart = torch.full((LENGTH, x.shape[1] + 5), torch.nan, dtype=x.dtype, device=x.device)[:, 2:-3].copy_(x)
    expected = layer.whole(x)
    assert_same_bits(layer.cut(apart, 30, 1, LENGTH - 31), expected, "rows apart")
    assert_same_bits(other.cut(x, 18, 1, LENGTH - 19), expected, "another layout of pages")


def test_threads_move_no_bit(threads):
    layer = Layer("cpu", torch.float32, channels=300)
    x = layer.tokens(200, 3)
    threads(1)
    expected = layer.whole(x)
    threads(2)
    assert_same_bits(layer.whole(x), expected, "two threads")


@pytest.mark.interpreted
def test_the_kernel_has_a_cpus_bits(device):
    """And on a GPU, where this test is not skipped."""
    if device.name == "cpu":
        pytest.skip("compares others with it")
    for dtype in filter(device.supports, DTYPES):
        layer = Layer(device.type, dtype, width=4, has_bias=True)
        x = layer.tokens(50, 3)
        page, zero, ends = (torch.tensor(value, dtype=torch.int32) for value in ([1], [0], [0, 50]))
        states = ConvStates(torch.full(layer.states.shape, torch.nan, dtype=dtype), page, ends, zero, 50)
        expected = cpu.causal_conv(
            x.cpu(), layer.weight.cpu(), layer.bias.cpu(), states, ConvReduction.of(4, dtype, True)
        )
        assert_same_bits(layer.whole(x).cpu(), expected, str(dtype))
        assert_same_bits(layer.states[1].cpu(), states.states[1], "state")


def test_what_does_not_fit_is_refused(device):
    layer = Layer(device.type, torch.float32)
    with pytest.raises(NotCovered, match="5 taps"):
        Layer(device.type, torch.float32, width=5).whole(layer.tokens(3, 3))
    with pytest.raises(NotCovered, match=r"torch\.float64"):
        Layer(device.type, torch.float64).whole(layer.tokens(3, 3).double())
    one, starts = (torch.zeros(count, dtype=torch.int32, device=device.type) for count in (1, 2))
    x, weight, held = layer.tokens(3, 3), layer.weight, layer.states
    for other in (
        (x[:, 1:], weight, held),
        (x, weight.half(), held),
        (x, weight, held[:, :1]),
        (x, weight, held.half()),
    ):
        with pytest.raises(ValueError, match="no convolution with gates"):
            causal_conv(*other[:2], None, ConvStates(other[2], one, starts, one, 0), True)
