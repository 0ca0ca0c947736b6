"""The rotary embedding of multimodal models turns text as the plain one does, and pictures by three positions, on the
CPU and on a GPU.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import set_current_vllm_config

from tests.assertions import DTYPES, assert_near, assert_same_bits
from vllm_batch_invariant.integration.layers import mrope, review
from vllm_batch_invariant.integration.reviews import patch_points

HEADS, KV_HEADS, SIZE, LONGEST = 4, 2, 128, 1024
SECTIONS = {"one after the other": ([16, 24, 24], False), "interleaved": ([24, 20, 20], True)}
"""Frequencies of time, height and width: those of Qwen2.5-VL and of Qwen3-VL."""
ROWS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 255)
Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The layer registered, in this test only."""
    patch_points.ROTARY.module()
    monkeypatch.setattr(patch_points.CUSTOM_OP.module(), "op_registry_oot", {})
    mrope.install()
    with set_current_vllm_config(patch_points.CONFIG.get()()):
        yield


def rotary_layer(point: patch_points.PatchPoint, dtype: torch.dtype, device: str, **named: Any) -> torch.nn.Module:
    return point.get()(SIZE, SIZE, LONGEST, 1e6, True, dtype, **named).to(device)


def made(how: str, dtype: torch.dtype, device: str) -> torch.nn.Module:
    sections, interleaved = SECTIONS[how]
    options = {"mrope_section": sections, "mrope_interleaved": interleaved}
    return rotary_layer(patch_points.M_ROPE, dtype, device, **options)


def rotate(layer: torch.nn.Module, device: str) -> Rotate:
    """What an engine calls on the device; it turns queries and keys in place."""
    forward = getattr(layer, f"forward_{device}")
    return lambda positions, q, k: forward(positions, q.clone(), k.clone())


def drawn(rows: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions [3, rows] of text, a part of a longer buffer as vLLM's, with queries and keys."""
    torch.manual_seed(0)
    buffer = torch.zeros(3, LONGEST + 1, dtype=torch.int64)
    buffer[:, :rows] = torch.arange(rows) * 79 % LONGEST
    q, k = torch.randn(rows, HEADS * SIZE, dtype=dtype), torch.randn(rows, KV_HEADS * SIZE, dtype=dtype)
    return buffer.to(device)[:, :rows], q.to(device), k.to(device)


def reference(positions: torch.Tensor, x: torch.Tensor, cache: torch.Tensor, how: str) -> torch.Tensor:
    """M-RoPE in float64 by its definition: each frequency takes its angle from the row that its section belongs to."""
    (_, height, width), interleaved = SECTIONS[how]
    frequency, row = torch.arange(SIZE // 2), torch.zeros(SIZE // 2, dtype=torch.int64)
    if interleaved:
        row[(frequency % 3 == 1) & (frequency < 3 * height)] = 1
        row[(frequency % 3 == 2) & (frequency < 3 * width)] = 2
    else:
        row[SIZE // 2 - height - width :] = 1
        row[SIZE // 2 - width :] = 2
    cos, sin = (part.double()[positions.cpu()[row].T, frequency][:, None] for part in cache.cpu().chunk(2, dim=-1))
    first, second = x.cpu().double().unflatten(1, (-1, SIZE)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", SECTIONS)
def test_text_is_turned_as_the_definition_says_and_as_plain_text_models_are(
    how: str, dtype: torch.dtype, device: str
) -> None:
    layer, plain = made(how, dtype, device), rotary_layer(patch_points.ROTARY_EMBEDDING, dtype, device)
    positions, q, k = drawn(257, dtype, device)
    turned = rotate(layer, device)(positions, q, k)
    for out, x in zip(turned, (q, k), strict=True):
        assert_near(out.cpu(), reference(positions, x, layer.cos_sin_cache, how), factor=2)
    for out, expected in zip(turned, rotate(plain, device)(positions[0], q, k), strict=True):
        assert_same_bits(out, expected)
    for out, expected in zip(rotate(layer, device)(positions[0], q, k), turned, strict=True):
        assert_same_bits(out, expected, "positions of one row")


def test_the_definition_tells_a_picture_from_text() -> None:
    """The negative control: of tokens whose rows differ, the first row alone is not M-RoPE."""
    layer = made("interleaved", torch.float32, "cpu")
    positions, q, k = drawn(33, torch.float32, "cpu")
    picture = positions.clone()
    picture[1] += 1
    [turned, _] = rotate(layer, "cpu")(picture, q, k)
    with pytest.raises(AssertionError, match="relative error"):
        assert_near(turned, reference(picture, q, layer.cos_sin_cache, "interleaved"), factor=2)


def of_pictures(positions: torch.Tensor) -> torch.Tensor:
    """The same with rows that differ, but for every third token."""
    moved = positions.clone()
    moved[1, ::3] += 5
    moved[2, 1::3] = moved[2, 1::3] * 31 % LONGEST
    return moved


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", SECTIONS)
def test_pictures_are_turned_as_the_definition_says_and_text_among_them_as_before(
    how: str, dtype: torch.dtype, device: str
) -> None:
    layer, plain = made(how, dtype, device), rotary_layer(patch_points.ROTARY_EMBEDDING, dtype, device)
    layer.takes_pictures = True
    positions, q, k = drawn(257, dtype, device)
    pictures = of_pictures(positions)
    turned = rotate(layer, device)(pictures, q, k)
    for out, x in zip(turned, (q, k), strict=True):
        assert_near(out.cpu(), reference(pictures, x, layer.cos_sin_cache, how), factor=2)
    words = slice(2, None, 3)
    for out, expected in zip(turned, rotate(plain, device)(positions[0], q, k), strict=True):
        assert_same_bits(out[words], expected[words], "text")
    native = layer.forward_native(pictures, q.clone(), k.clone())
    for out, x in zip(native, (q, k), strict=True):
        assert_near(out.cpu(), reference(pictures, x, layer.cos_sin_cache, how), factor=2)


@pytest.mark.parametrize("takes_pictures", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", SECTIONS)
def test_a_row_has_the_same_bits_in_any_batch(how: str, dtype: torch.dtype, takes_pictures: bool, device: str) -> None:
    layer = made(how, dtype, device)
    layer.takes_pictures = takes_pictures
    turn = rotate(layer, device)
    positions, q, k = drawn(257, dtype, device)
    positions = of_pictures(positions) if takes_pictures else positions
    whole = turn(positions, q, k)
    for rows in ROWS:
        for first in (0, 1, 257 - rows):
            part = slice(first, first + rows)
            for out, expected in zip(turn(positions[:, part], q[part], k[part]), whole, strict=True):
                assert_same_bits(out, expected[part], f"{rows} rows from {first}")


def test_models_build_our_layer_and_vllms_own_is_refused() -> None:
    layer = made("interleaved", torch.float32, "cpu")
    assert mrope.serves(layer)
    review.check(layer)
    patch_points.CUSTOM_OP.module().op_registry_oot.clear()
    theirs = made("interleaved", torch.float32, "cpu")
    assert not mrope.serves(theirs)
    with pytest.raises(review.NotCovered, match="MRotaryEmbedding"):
        review.check(theirs)
