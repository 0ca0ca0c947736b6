"""RMSNorm: right, and with the same bits for a row whatever other rows there are."""

import pytest
import torch

from tests.assertions import DTYPES, assert_near, assert_same_bits
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops import dispatch
from vllm_batch_invariant.ops.norm import GATES, gated_rms_norm, reference, rms_norm


def inputs(device, rows: int, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return (
        device.draw(rows, length, dtype=dtype),
        device.draw(rows, length, dtype=dtype, seed=1),
        device.draw(length, dtype=dtype, seed=2),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [7, 64, 96, 100, 896, 4096, 9001])
def test_a_row_has_the_same_bits_at_every_batch_size(length, dtype, device):
    most = device.row_counts[-1]
    x, residual, weight = inputs(device, most, length, dtype)
    plain = rms_norm(x, weight, 1e-6)
    fused, summed = rms_norm(x, weight, 1e-6, residual)
    for rows in device.row_counts:
        last = slice(most - rows, None)
        assert_same_bits(rms_norm(x[last], weight, 1e-6), plain[last], f"{rows} rows")
        fused_part, summed_part = rms_norm(x[last], weight, 1e-6, residual[last])
        assert_same_bits(fused_part, fused[last], f"{rows} rows")
        assert_same_bits(summed_part, summed[last], f"{rows} rows")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("length", [7, 64, 96, 320, 777, 9001, 17_000])
def test_values_are_near_the_float64_reference(length, weighted, dtype, device):
    x, residual, weight = inputs(device, 19 if length < 1000 else 2, length, dtype)
    weight = weight if weighted else None
    assert_near(rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), factor=2)
    fused, summed = rms_norm(x, weight, 1e-5, residual)
    assert_near(fused, reference.rms_norm(x.double() + residual.double(), weight, 1e-5), factor=2)
    assert_same_bits(summed, (x.float() + residual.float()).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [7, 96, 777, 17_000])
@pytest.mark.parametrize("size", [1, 5, 40])
def test_the_mean_can_run_over_the_leading_elements_alone(size, length, dtype, device):
    size = min(size, length)
    x, residual, weight = inputs(device, 2, length, dtype)
    plain = rms_norm(x, weight, 1e-6, variance_size=size)
    assert_near(plain, reference.rms_norm(x, weight, 1e-6, size), factor=2)
    fused, _ = rms_norm(x, weight, 1e-6, residual, size)
    assert_near(fused, reference.rms_norm(x.double() + residual.double(), weight, 1e-6, size), factor=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wider_weight_multiplies_in_its_own_dtype(dtype, device):
    x, _, weight = inputs(device, 9, 96, dtype)
    out = rms_norm(x, weight.float(), 1e-6)
    assert out.dtype == dtype
    assert_near(out, reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [64, 777, 17_000])
def test_1_more_than_a_weight_multiplies_in_fp32(length, dtype, device):
    """As in Gemma's and Qwen3.5's norms."""
    x, residual, weight = inputs(device, 3, length, dtype)
    one_more = weight.float() + 1.0
    assert_same_bits(rms_norm(x, weight, 1e-6, adds_one=True), rms_norm(x, one_more, 1e-6))
    for part, whole in zip(
        rms_norm(x, weight, 1e-6, residual, adds_one=True), rms_norm(x, one_more, 1e-6, residual), strict=True
    ):
        assert_same_bits(part, whole)
    assert_same_bits(rms_norm(x, None, 1e-6, adds_one=True), rms_norm(x, None, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [64, 100, 128, 256])
def test_strided_heads_have_the_bits_of_packed_ones(length, dtype, device):
    wide, weight = device.draw(5, 5 * length, dtype=dtype), device.draw(length, seed=1)
    for heads in (wide[:, : 3 * length], wide[:, 3 * length : 4 * length]):
        view = heads.unflatten(1, (-1, length))
        packed = view.contiguous()
        expected = rms_norm(packed, weight, 1e-6)
        assert_same_bits(rms_norm(packed.flatten(0, 1), weight, 1e-6).view_as(expected), expected)
        for strided in (view, view.transpose(0, 1).contiguous().transpose(0, 1), view[:, None]):
            out = rms_norm(strided, weight, 1e-6)
            assert out.is_contiguous()
            assert_same_bits(out.reshape(expected.shape), expected)
        pair = rms_norm(view, weight, 1e-6, view.flip(0))
        for part, whole in zip(pair, rms_norm(packed, weight, 1e-6, packed.flip(0)), strict=True):
            assert_same_bits(part, whole)


def test_per_head_norms_are_norms_of_short_rows(device):
    x, _, weight = inputs(device, 40 * 8, 64, torch.float32)
    whole = rms_norm(x.view(40, 8, 64), weight, 1e-6)
    assert_same_bits(rms_norm(x.view(40, 8, 64)[7:8], weight, 1e-6), whole[7:8])
    assert_same_bits(rms_norm(x.view(40, 8, 64)[:, 2:5], weight, 1e-6), whole[:, 2:5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("length", [7, 64, 128])
def test_a_row_with_a_gate_has_the_same_bits_at_every_batch_size(length, activation, dtype, device):
    x, gate, weight = inputs(device, 45, length, dtype)
    whole = gated_rms_norm(x, weight, 1e-6, gate, activation)
    assert_near(whole, reference.gated_rms_norm(x, weight, 1e-6, gate, activation), factor=2)
    for rows in (1, 2, 17):
        last = slice(45 - rows, None)
        assert_same_bits(gated_rms_norm(x[last], weight, 1e-6, gate[last], activation), whole[last], f"{rows} rows")
    heads = gated_rms_norm(x.view(9, 5, length), weight, 1e-6, gate.view(9, 5, length), activation)
    assert_same_bits(heads.view(45, length), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [96, 128])
def test_a_row_with_a_gate_is_rounded_once(length, dtype, device):
    x, gate, weight = inputs(device, 9, length, dtype)
    wide = gated_rms_norm(x.float(), weight.float(), 1e-6, gate.float())
    assert_same_bits(gated_rms_norm(x, weight, 1e-6, gate), wide.to(dtype))
    assert_same_bits(gated_rms_norm(x, weight.float(), 1e-6, gate), wide.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_beside_what_else_a_layer_projects_have_the_bits_of_packed_ones(dtype, device):
    """As Qwen3.5's are, behind queries, keys and values."""
    x, weight = device.draw(5, 4, 64, dtype=dtype), device.draw(64, seed=1)
    gate = device.draw(5, 13 * 64, dtype=dtype, seed=2)[:, 9 * 64 :].unflatten(1, (4, 64))
    assert_same_bits(gated_rms_norm(x, weight, 1e-6, gate), gated_rms_norm(x, weight, 1e-6, gate.contiguous()))


@pytest.mark.parametrize("activation", GATES)
def test_gates_far_from_zero_have_their_limits(activation, device):
    x, gate = device.draw(1, 8), device.draw(1, 8)
    gate[0, :4] = torch.tensor([-1e4, -200.0, 200.0, 1e4])
    out = gated_rms_norm(x, torch.ones_like(x[0]), 1e-6, gate, activation)
    assert_near(out, reference.gated_rms_norm(x, torch.ones_like(x[0]), 1e-6, gate, activation), factor=2)
    assert not out.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "length"), [(1, 300), (4, 64), (3, 24)])
def test_groups_behind_their_gates_have_the_same_bits_at_every_batch_size(groups, length, dtype, device):
    """As Mamba-2's are: a weight for each element of all groups, and gates beside what else a layer projects."""
    x, weight = device.draw(9, groups, length, dtype=dtype), device.draw(groups, length, dtype=dtype, seed=1)
    projected = device.draw(9, (groups + 2) * length, dtype=dtype, seed=2)
    gate = projected[:, : groups * length].unflatten(1, (groups, length))
    whole = gated_rms_norm(x, weight, 1e-5, gate, norm_before_gate=False)
    assert_near(whole, reference.gated_rms_norm(x, weight, 1e-5, gate, norm_before_gate=False), factor=2)
    assert not torch.equal(whole, gated_rms_norm(x, weight, 1e-5, gate))
    for rows in (1, 2, 7):
        last = slice(9 - rows, None)
        part = gated_rms_norm(x[last], weight, 1e-5, gate[last], norm_before_gate=False)
        assert_same_bits(part, whole[last], f"{rows} rows")
    one = gated_rms_norm(x[:, -1], weight[-1], 1e-5, gate[:, -1], norm_before_gate=False)
    assert_same_bits(one, whole[:, -1], "the last group by itself")
    wide = gated_rms_norm(x.float(), weight.float(), 1e-5, gate.float(), norm_before_gate=False)
    assert_same_bits(whole, wide.to(dtype))


def test_a_gate_of_another_shape_or_function_is_refused() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"got \[2, 4\], \[4\], \[2, 3\]"):
        gated_rms_norm(x, torch.ones(4), 1e-6, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"got \[2, 4\], \[3, 4\], \[2, 4\]"):
        gated_rms_norm(x, torch.ones(3, 4), 1e-6, x)
    with pytest.raises(ValueError, match="one of silu, sigmoid, got 'tanh'"):
        gated_rms_norm(x, torch.ones(4), 1e-6, x, "tanh")


def test_a_gate_in_exact_arithmetic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_arithmetic", "exact")
    x = torch.ones(2, 64)
    with pytest.raises(NotCovered, match="RMSNorm with a gate"):
        gated_rms_norm(x, x[0], 1e-6, x)


def test_bad_shapes_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"got \[2, 4\], \[3\], None and None"):
        rms_norm(torch.ones(2, 4), torch.ones(3), 1e-6)
    with pytest.raises(ValueError, match="None and 5"):
        rms_norm(torch.ones(2, 4), None, 1e-6, variance_size=5)
