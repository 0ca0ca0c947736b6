"""Which kernels of attention serve after they were compared on the GPU, and what is refused; no kernel runs here."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.attention import AttentionReduction, AttentionSpec, PagedAttention

pytest.importorskip("triton")

from vllm_batch_invariant.ops.attention import certificate
from vllm_batch_invariant.ops.attention.certificate import Chunk, certify, ways
from vllm_batch_invariant.ops.attention.plan import DECODE_ROWS, WIDE_DECODE_ROWS, Kernels
from vllm_batch_invariant.ops.attention.shapes import AttentionShape

GLUON, TRITON, ONE = Kernels(sm90=True), Kernels(sm90=False), Kernels(sm90=False, decode_rows=0)
SHAPE = AttentionShape(4, 2, 64, torch.bfloat16, AttentionReduction.of_device("cuda"))
Attend = Callable[[Kernels, AttentionSpec, list[Chunk]], torch.Tensor]


def right(kernels: Kernels, options: AttentionSpec, chunks: list[Chunk]) -> torch.Tensor:
    """Every row is a function of its position."""
    rows = torch.cat([torch.arange(one.kv_len - one.query_len, one.kv_len) for one in chunks])
    return (rows[:, None, None] % 97).expand(-1, 4, 64).to(torch.bfloat16)


@pytest.fixture
def attending(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Attend], None]]:
    """Has attention computed by a function."""

    def put(attend: Attend) -> None:
        monkeypatch.setattr(
            certificate, "_attend", lambda planner, _, chunks, options, *__: attend(planner, options, chunks)
        )

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(Kernels, "candidates", classmethod(lambda cls, *_: iter((GLUON, TRITON, ONE))))

    monkeypatch.setattr(certificate, "_environment", lambda device: {"gpu": "a GPU"})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    class Planner(Kernels):
        shape = SHAPE

    monkeypatch.setattr(certificate, "_planner", lambda kernels, *_: Planner(kernels.sm90, kernels.decode_rows))
    certify.cache_clear()
    yield put
    certify.cache_clear()


def certified(*layers: AttentionSpec) -> certificate.Certificate:
    return certify(SHAPE, torch.device("cpu"), 16, layers or (AttentionSpec(1.0),))


def differs_where(wrong: Callable[[Kernels, AttentionSpec, list[Chunk]], bool]) -> Attend:
    """One bit of one element is another."""

    def attend(kernels: Kernels, options: AttentionSpec, chunks: list[Chunk]) -> torch.Tensor:
        out = right(kernels, options, chunks).clone()
        if wrong(kernels, options, chunks):
            out[-1, 3, 5] = torch.nextafter(out[-1, 3, 5], torch.tensor(1e9, dtype=out.dtype))
        return out

    return attend


def is_decode(chunks: list[Chunk]) -> bool:
    return all(one.query_len == 1 for one in chunks)


def test_kernels_that_agree_serve_the_fastest_first(attending):
    attending(right)
    found = certified()
    assert (found.kernels, found.refused) == (GLUON, ())
    assert found.elements > 100_000


def test_kernels_one_bit_of_whose_decode_differs_do_not_serve(attending, caplog):
    attending(differs_where(lambda kernels, _, chunks: kernels.sm90 and is_decode(chunks)))
    found = certified()
    assert found.kernels == TRITON
    [refused] = found.refused
    assert "the Gluon kernels: plain attention has other bits by decode than by prefill: 1 of " in refused
    assert "Attention is not served by the Gluon kernels" in caplog.text
    assert "take up to twice as long" in caplog.text


def test_one_size_of_blocks_serves_all_where_two_differ(attending, caplog):
    attending(
        differs_where(lambda kernels, _, chunks: kernels.decode_rows > 0 and chunks[0].query_len * 2 <= DECODE_ROWS)
    )
    found = certified()
    assert (found.kernels, len(found.refused)) == (ONE, 2)
    assert "decode computes a whole block of rows for each request" in caplog.text


def test_an_engine_does_not_start_where_no_kernel_agrees_with_itself(attending):
    attending(differs_where(lambda _, options, chunks: is_decode(chunks)))
    with pytest.raises(NotCovered, match="its kernels give a row other bits by prefill than by decode"):
        certified()


def test_a_comparison_is_made_once_for_an_environment(attending, monkeypatch):
    attending(right)
    first = certified()
    certify.cache_clear()
    attending(differs_where(lambda *_: True))  # is not asked again
    assert certified() == first
    certify.cache_clear()
    monkeypatch.setattr(certificate, "_environment", lambda device: {"gpu": "another GPU"})
    attending(right)
    monkeypatch.setattr(Kernels, "candidates", classmethod(lambda cls, *_: iter((TRITON,))))
    assert certified().kernels == TRITON


def test_kernels_that_were_refused_are_compared_at_every_start(attending):
    attending(differs_where(lambda kernels, _, chunks: kernels.sm90 and is_decode(chunks)))
    assert certified().kernels == TRITON
    certify.cache_clear()
    attending(right)
    assert certified().kernels == GLUON


def test_wide_blocks_whose_bits_differ_do_not_serve_and_others_are_compared_for_verify_steps_alone(
    attending, caplog, monkeypatch
):
    wide = Kernels(sm90=True, decode_rows=WIDE_DECODE_ROWS)
    candidates = {1: (GLUON, TRITON), 8: (wide, GLUON, TRITON)}
    monkeypatch.setattr(Kernels, "candidates", classmethod(lambda cls, *given: iter(candidates[given[-1]])))
    attending(right)
    assert certified().kernels == GLUON
    attending(differs_where(lambda kernels, _, chunks: kernels.decode_rows == WIDE_DECODE_ROWS and is_decode(chunks)))
    assert certify(SHAPE, torch.device("cpu"), 16, (AttentionSpec(1.0),), 8).kernels == GLUON
    assert (
        "Attention is not served by the Gluon kernels with wide blocks: plain attention has other bits" in caplog.text
    )
    assert "verify steps of more are prefills" in caplog.text
    certify.cache_clear()
    attending(right)
    assert certify(SHAPE, torch.device("cpu"), 16, (AttentionSpec(1.0),), 8).kernels == wide
    assert certified().kernels == GLUON


@pytest.mark.parametrize("content", ["{", "[]", '{"environment": {"gpu": "a GPU"}, "certificates": 3}'])
def test_a_broken_file_is_set_aside_and_the_comparison_made_again(content, attending):
    path = certificate._path({"gpu": "a GPU"})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    attending(right)
    assert certified().kernels == GLUON
    certify.cache_clear()
    assert certified().kernels == GLUON


def test_every_kind_of_layer_is_compared(attending):
    attending(differs_where(lambda kernels, options, chunks: bool(options.sliding_window) and is_decode(chunks)))
    assert certified(AttentionSpec(1.0)).kernels == GLUON
    with pytest.raises(NotCovered, match="window 100 attention"):
        certified(AttentionSpec(1.0), AttentionSpec(1.0, sliding_window=100))


def test_steps_with_ranges_are_compared_where_there_are_some(attending, monkeypatch):
    """Their rows of decode are Triton's, others the Gluon kernels'."""
    attending(right)

    def attend(kernels: Kernels, _: Any, chunks: list[Chunk], options: AttentionSpec, has_ranges: bool) -> torch.Tensor:
        out = right(kernels, options, chunks)
        return out + 1 if kernels.sm90 and has_ranges and is_decode(chunks) else out

    monkeypatch.setattr(certificate, "_attend", attend)
    layers = (AttentionSpec(1.0),)
    assert certify(SHAPE, torch.device("cpu"), 16, layers).kernels == GLUON
    found = certify(SHAPE, torch.device("cpu"), 16, layers, sees_ranges=True)
    assert found.kernels == TRITON
    assert "by decode beside ranges than by prefill" in found.refused[0]


def test_what_is_compared_is_the_layer_with_all_that_it_adds_and_sinks_of_its_own(monkeypatch):
    layer = AttentionSpec(0.5, 300, 30.0, torch.full((4,), 0.5), torch.zeros(4), causal=False)
    assert {"scale", *layer.added} == {field.name for field in fields(AttentionSpec)}
    asked: list[PagedAttention] = []
    monkeypatch.setattr(certificate, "paged_attention", lambda call, *_: asked.append(call))
    operands = certificate.by_scores(SHAPE, torch.device("cpu"), 16)
    planner = SimpleNamespace(shape=SHAPE, plan=lambda *_: None)
    certificate._attend(planner, operands, [Chunk(20, 1), Chunk(30, 2)], layer, False)
    [call] = asked
    assert replace(call.spec, scale=0.5) == layer != call.spec
    assert call.spec.scale == operands.scale
    assert torch.unique(call.spec.sinks).numel() == 4
    call.check()


@pytest.mark.parametrize("chunk", [name for name, _ in ways(2)])
def test_a_difference_in_any_way_to_compute_a_row_is_found(chunk, attending):
    chunks = dict(ways(2))[chunk]
    attending(differs_where(lambda kernels, _, asked: kernels.sm90 and asked == chunks))
    assert chunk in certified().refused[0]


def test_kernels_that_do_not_run_do_not_serve(attending):
    def attend(kernels: Kernels, options: AttentionSpec, chunks: list[Chunk]) -> torch.Tensor:
        if kernels.sm90:
            raise AttributeError("module has no attribute 'thread_barrier'\nand much more")
        return right(kernels, options, chunks)

    attending(attend)
    found = certified()
    assert found.kernels == TRITON
    assert found.refused == ("the Gluon kernels: AttributeError: module has no attribute 'thread_barrier'",)


def test_too_little_memory_to_compare_is_not_a_difference(attending):
    def attend(kernels: Kernels, options: AttentionSpec, chunks: list[Chunk]) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    attending(attend)
    with pytest.raises(NotCovered, match="does not fit into the GPU's memory beside the KV cache; lower"):
        certified()


@pytest.mark.parametrize("group", [1, 2, 4, 7, 16, 71])
def test_rows_are_computed_in_small_and_in_large_blocks_whatever_the_group(group):
    rows = [one.query_len * group for _, chunks in ways(group) for one in chunks]
    assert max(rows) > DECODE_ROWS
    assert (min(rows) <= DECODE_ROWS) == (group <= DECODE_ROWS)


def test_the_operands_cancel():
    """In float64 scores, and values of whole tiles, add up to 0."""
    scores = certificate.by_scores(SHAPE, torch.device("cpu"), 16)
    values = certificate.by_values(SHAPE, torch.device("cpu"), 16)
    places = torch.arange(2624)
    pages = values.cache.block_table[0, places // 16].long()
    keys = scores.cache.keys[pages, :, places % 16].double()
    products = torch.einsum("qhd,khd->qhk", scores.query[:50, ::2].double(), keys)
    assert float(products.abs().max()) < 1e-12
    tiles = values.cache.values[pages, :, places % 16].double().unflatten(0, (-1, SHAPE.key_tile))
    assert float(tiles.sum(1).abs().max()) == 0
    assert float(tiles.abs().max()) > 1


@pytest.mark.parametrize(
    ("window", "compared"), [(None, {None}), (1, {1}), (1500, {1500}), (4096, {4096, 1500})], ids=str
)
def test_a_window_beyond_what_is_compared_is_compared_beside_one_that_keys_lie_behind(
    window: int | None, compared: set[int | None], attending: Callable[[Attend], None]
) -> None:
    seen = set()

    def attend(kernels: Kernels, options: AttentionSpec, chunks: list[Chunk]) -> torch.Tensor:
        seen.add(options.sliding_window)
        return right(kernels, options, chunks)

    attending(attend)
    assert certified(AttentionSpec(1.0, sliding_window=window)).kernels == GLUON
    assert seen == compared


def test_other_bits_with_a_window_that_keys_lie_behind_are_found(attending: Callable[[Attend], None]) -> None:
    def attend(kernels: Kernels, options: AttentionSpec, chunks: list[Chunk]) -> torch.Tensor:
        rows = right(kernels, options, chunks)
        return rows + (kernels.sm90 and options.sliding_window == 1500 and len(chunks) > 1)

    attending(attend)
    assert certified(AttentionSpec(1.0, sliding_window=4096)).kernels == TRITON
