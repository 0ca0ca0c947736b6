"""Attention and convolutions of SAM's encoder: a window and an image have the same bits beside any others."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import set_current_vllm_config

from tests.assertions import assert_near, assert_same_bits
from tests.integration.test_layers import named
from vllm_batch_invariant.aten import set_batch_invariant_mode
from vllm_batch_invariant.integration.layers import convolution, encoders, relative_positions, review
from vllm_batch_invariant.integration.reviews import patch_points

WINDOWS = 9


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operations and layers of the mode's, in this test only."""
    if not patch_points.RELATIVE_ATTENTION.is_there():
        pytest.skip("this vLLM has no such layer")
    monkeypatch.setattr(patch_points.CUSTOM_OP.module(), "op_registry_oot", {})
    with set_current_vllm_config(patch_points.CONFIG.get()()):
        yield


def attention(dtype: torch.dtype = torch.float32, side: int = 7) -> torch.nn.Module:
    torch.manual_seed(0)
    made = patch_points.RELATIVE_ATTENTION.get()(128, 2, use_rel_pos=True, input_size=(side, side))
    torch.nn.init.normal_(made.rel_pos_h)
    torch.nn.init.normal_(made.rel_pos_w)
    return made.to(dtype)


@torch.no_grad()
def moved(layer: Any, x: torch.Tensor) -> list[str]:
    """Parts of a call that have other bits than in one of their own."""
    together = layer(x)
    return [
        f"{first} to {last}"
        for first, last in ((0, 1), (3, 4), (8, 9), (2, 7))
        if not torch.equal(layer(x[first:last]), together[first:last])
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_window_has_the_same_bits_beside_others(dtype: torch.dtype) -> None:
    layer, x = attention(dtype), torch.randn(WINDOWS, 7, 7, 128).to(dtype)
    expected = attention(dtype).double()(x.double())
    relative_positions.replace_in(torch.nn.Sequential(layer))
    assert review._problem(layer) is None
    with set_batch_invariant_mode():
        assert moved(layer, x) == []
        assert_near(layer(x), expected, factor=40)


@pytest.mark.parametrize("most", [1, 3 * 7**4])
def test_parts_of_scores_move_no_bit(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = attention(), torch.randn(WINDOWS, 7, 7, 128)
    relative_positions.replace_in(torch.nn.Sequential(layer))
    with set_batch_invariant_mode(), torch.no_grad():
        whole = layer(x)
        monkeypatch.setattr(relative_positions, "_SCORES", most)
        assert_same_bits(layer(x), whole)


def test_attention_that_looks_at_the_number_of_windows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    layer, x, attend = attention(), torch.randn(WINDOWS, 7, 7, 128), relative_positions.attend

    def by_number(query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return attend(query * (1 + 1e-6 * (len(query) > 2)), *others)

    relative_positions.replace_in(torch.nn.Sequential(layer))
    monkeypatch.setattr(relative_positions, "attend", by_number)
    with set_batch_invariant_mode():
        assert moved(layer, x) != []


def convolved(**settings: Any) -> Any:
    encoders.install()
    made = named("vllm.model_executor.layers.conv.Conv2dLayer")(16, 24, 3, padding=1, **settings)
    for weight in made.parameters():
        torch.nn.init.normal_(weight)
    return made


@pytest.mark.parametrize("stride", [1, 2])
def test_an_image_has_the_same_bits_where_windows_of_a_convolution_overlap(stride: int) -> None:
    torch.manual_seed(0)
    layer, x = convolved(stride=stride), torch.randn(WINDOWS, 16, 21, 21)
    assert review._problem(layer) is None
    with set_batch_invariant_mode():
        assert moved(layer, x) == []
    expected = torch.nn.functional.conv2d(x.double(), layer.weight.double(), layer.bias.double(), stride, 1)
    assert_near(layer(x).detach(), expected.detach(), factor=40)


def test_a_convolution_with_gaps_is_refused() -> None:
    assert "with gaps" in str(review._problem(convolved(dilation=2)))
    assert convolution.problem_of(convolved()) is None
