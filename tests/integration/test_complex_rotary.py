"""Rotary embeddings of encoders whose angles are complex numbers: a row has the same bits whatever shares its call."""

import inspect
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import set_current_vllm_config

from tests.assertions import assert_near, assert_same_bits
from vllm_batch_invariant.integration.layers import complex_rotary
from vllm_batch_invariant.integration.reviews import patch_points

HEADS, ROWS = 2, 2000
COUNTS = 1, 4, 999, 1333, 1777
"""Rows of a call."""
Turn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Three threads, whose shares of a call end anywhere in a row."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def drawn(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and angles; the first two as parts of one matrix."""
    torch.manual_seed(0)
    query, key, _ = torch.randn(ROWS, 3, HEADS, size).to(dtype).unbind(1)
    return query, key, torch.polar(torch.ones(ROWS, size // 2), 50 * torch.randn(ROWS, size // 2))


def moved(turn: Turn, size: int, dtype: torch.dtype = torch.float32) -> list[int]:
    """Numbers of rows in a call of which some have other bits than in a longer one."""
    query, key, angles = drawn(size, dtype)
    longest = turn(query, key, angles)
    return [
        rows
        for rows in COUNTS
        if not all(
            torch.equal(one, other[:rows])
            for one, other in zip(turn(query[:rows], key[:rows], angles[:rows]), longest, strict=True)
        )
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [64, 72, 88])
def test_a_row_is_turned_with_the_same_bits_beside_any_others(size: int, dtype: torch.dtype) -> None:
    assert moved(complex_rotary.turn, size, dtype) == []
    query, key, angles = drawn(size, dtype)
    turned = complex_rotary.turn(query, key, angles)
    for x, found in zip((query, key), turned, strict=True):
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        expected = torch.view_as_real(pairs * angles[:, None].to(torch.complex128)).flatten(-2)
        assert found.dtype == dtype
        assert_near(found, expected, factor=2)


def test_complex_products_of_pytorch_follow_the_number_of_rows() -> None:
    """The negative control, and why the function above is there."""
    assert moved(patch_points.MOONVIT_ROTARY.get(), 88) != []


@pytest.mark.parametrize("point", [patch_points.MOONVIT_ROTARY, patch_points.PIXTRAL_ROTARY], ids=str)
def test_an_encoder_of_the_module_calls_ours(point: patch_points.PatchPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    if not point.is_there():
        pytest.skip("its module needs a package that is not here")
    module = point.module()
    given = [list(inspect.signature(one).parameters) for one in (point.get(), complex_rotary.turn)]
    assert given[0][2] == given[1][2] == "freqs_cis"
    monkeypatch.setattr(module, point.attribute, getattr(module, point.attribute))
    complex_rotary.replace_in(torch.nn.Sequential(torch.nn.Linear(1, 1)))
    assert point.get() is not complex_rotary.turn
    complex_rotary.replace_in(type("Tower", (torch.nn.Module,), {"__module__": module.__name__})())
    assert point.get() is complex_rotary.turn


def test_the_layer_of_llama_4_turns_each_image_alike() -> None:
    with set_current_vllm_config(patch_points.CONFIG.get()()):
        layer = patch_points.LLAMA_4_VISION_ROTARY.get()(88, 44, 16 * 16, 1e4, False, torch.complex64)
    tower = torch.nn.Sequential(layer)
    images = torch.randn(9, 16 * 16 + 1, HEADS, 88)
    plain = layer(images, images)
    complex_rotary.replace_in(tower)
    together = tower[0](images, images)
    for found, before in zip(together, plain, strict=True):
        assert_near(found, before.double(), factor=2)
    for number in range(len(images)):
        one = images[number : number + 1]
        for alone, beside in zip(tower[0](one, one), together, strict=True):
            assert_same_bits(alone[0], beside[number])
