"""A small block of attention has as many stages as the GPU has shared memory for."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vllm_batch_invariant.ops.attention import AttentionReduction

pytest.importorskip("triton")

from vllm_batch_invariant.ops.attention import plan as planning
from vllm_batch_invariant.ops.attention.shared_memory import fitted, fitted_prefill

REDUCTION = AttentionReduction.of_device("cuda")


def stages(
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    major: int,
    room: int,
    dtype: torch.dtype,
    stored: torch.dtype | None = None,
) -> int:
    gpu = SimpleNamespace(major=major, shared_memory_per_block_optin=room)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    schedule = planning.decode_schedule(size, dtype)
    found = fitted(schedule, planning.AttentionShape(8, 2, size, dtype, REDUCTION, stored), torch.device("cpu"))
    assert found == replace(schedule, num_stages=found.num_stages)
    return found.num_stages


@pytest.mark.parametrize(
    ("major", "room", "expected", "of_codes"),
    [
        (8, 166_912, 2, 2),
        (8, 101_376, 2, 1),
        (9, 232_448, 2, 2),
        (10, 232_448, 2, 2),
        (12, 101_376, 2, 1),
        (9, 1024, 1, 1),
    ],
    ids=["A100", "L4", "H100", "B200", "RTX 5090", "no room"],
)
def test_heads_of_256_have_fewer_stages_where_memory_is_short(major, room, expected, of_codes, monkeypatch) -> None:
    for size in (160, 256):
        assert stages(monkeypatch, size, major, room, torch.bfloat16) == expected
        assert stages(monkeypatch, size, major, room, torch.bfloat16, torch.float8_e4m3fn) == of_codes
        assert stages(monkeypatch, size, major, room, torch.float32) == 1


@pytest.mark.parametrize(
    ("major", "room", "expected", "of_codes"),
    [(8, 166_912, 2, 3), (8, 101_376, 1, 1), (9, 232_448, 3, 3), (10, 232_448, 3, 3), (12, 101_376, 1, 1)],
    ids=["A100", "L4", "H100", "B200", "RTX 5090"],
)
def test_heads_of_512_have_fewer_stages_where_memory_is_short(major, room, expected, of_codes, monkeypatch) -> None:
    assert stages(monkeypatch, 512, major, room, torch.bfloat16) == expected
    assert stages(monkeypatch, 512, major, room, torch.bfloat16, torch.float8_e4m3fn) == of_codes
    assert stages(monkeypatch, 512, major, room, torch.float32) == 1


def test_smaller_heads_have_all_their_stages_everywhere(monkeypatch) -> None:
    """No GPU that can serve has so little that they would not fit, so none is asked."""
    for size in (64, 80, 128):
        for dtype in (torch.bfloat16, torch.float16):
            for stored in (None, torch.float8_e4m3fn):
                found = stages(monkeypatch, size, 12, 0, dtype, stored)
                assert found == planning.decode_schedule(size, dtype).num_stages == 3


@pytest.mark.parametrize(
    ("room", "decode", "prefill"), [(232_448, 3, 32), (166_912, 3, 32), (101_376, 2, 16)], ids=["H100", "A100", "L4"]
)
def test_keys_with_a_tail_take_one_tile_and_half_the_rows_where_memory_is_short(
    room: int, decode: int, prefill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(major=9, shared_memory_per_block_optin=room)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    shape, device = planning.AttentionShape(16, 1, 512, torch.bfloat16, REDUCTION, tail=64), torch.device("cpu")
    assert fitted(planning.decode_schedule(512, torch.bfloat16), shape, device).num_stages == decode
    assert fitted_prefill(planning.prefill_schedule(512, torch.bfloat16), shape, device).block_m == prefill
