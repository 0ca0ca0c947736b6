"""Which attention layers of vLLM get the norms of their heads and the rotary embedding as one operation."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm_batch_invariant.integration.layers import mrope, norm_rotary
from vllm_batch_invariant.integration.layers.norm_rotary import HEAD_NORMS, ROTATIONS, ROTATIONS_BEHIND_STATES
from vllm_batch_invariant.integration.reviews import patch_points, sources
from vllm_batch_invariant.integration.side_table import beside
from vllm_batch_invariant.ops.common.kv_cache import CacheSlots
from vllm_batch_invariant.ops.norm_rotary import Sections


class _Norm(torch.nn.Module):
    has_weight, variance_size_override, variance_epsilon = True, None, 1e-6

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.ones(128, dtype=dtype)


class _Rotary(torch.nn.Module):
    cos_sin_cache = None


class _Attention:
    """A layer of attention whose step has some slots; gives back what it is called with."""

    def __init__(self, slots: CacheSlots | None) -> None:
        self.impl = SimpleNamespace(slots_of_step=lambda layer: slots if layer is self else None)

    def __call__(self, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return given


def fitting(rotary: torch.nn.Module, slots: CacheSlots | None) -> SimpleNamespace:
    """A layer that is as expected, of one head of four."""
    norms = {"q_norm": _Norm(torch.bfloat16), "k_norm": _Norm(torch.bfloat16)}
    sizes = {"q_size": 4, "kv_size": 4, "head_dim": 4}
    made = SimpleNamespace(rotary_emb=rotary, attn=_Attention(slots), **norms, **sizes)
    beside(made).heads_fit = True
    made.qkv_proj = made.o_proj = lambda x: (x, None)
    return made


def cache_of(dtype: torch.dtype) -> SimpleNamespace:
    """What is asked of a cache of cosines and sines, as if on a GPU."""
    return SimpleNamespace(shape=torch.Size((8, 128)), is_cuda=True, dtype=dtype)


def layer(changes: dict[str, Any]) -> SimpleNamespace:
    """What is asked of Qwen3's attention, with other values for some attributes."""
    plain = patch_points.ROTARY_EMBEDDING.get()
    rotary = plain.__new__(plain)
    torch.nn.Module.__init__(rotary)
    rotary.head_size = rotary.rotary_dim = 128
    rotary.is_neox_style, rotary.use_flashinfer = True, False
    rotary.cos_sin_cache = cache_of(torch.bfloat16)
    rotary._forward_method = rotary.forward_cuda
    norms = {name: _Norm(torch.bfloat16) for name in ("q_norm", "k_norm")}
    sizes = {"head_dim": 128, "num_heads": 4, "num_kv_heads": 2, "q_size": 512, "kv_size": 256}
    made = SimpleNamespace(rotary_emb=rotary, **norms, **sizes)
    for name, value in changes.items():
        owner, _, attribute = name.rpartition(".")
        setattr(getattr(made, owner) if owner else made, attribute, value)
    return made


def as_expected(made: SimpleNamespace, dtype: torch.dtype, parts: tuple[str, ...] = HEAD_NORMS.parts) -> bool:
    return norm_rotary._as_expected(made, tuple(getattr(made, name) for name in parts), dtype)


CHANGES = {
    "other heads": {"q_size": 500},
    "part of a head turned": {"rotary_emb.rotary_dim": 64},
    "neighbours turned": {"rotary_emb.is_neox_style": False},
    "FlashInfer": {"rotary_emb.use_flashinfer": True},
    "PyTorch's own rotation": {"rotary_emb._forward_method": torch.nn.functional.relu},
    "another rotary layer": {"rotary_emb": torch.nn.Identity()},
    "an fp32 cache": {"rotary_emb.cos_sin_cache": cache_of(torch.float32)},
    "a norm of part of a head": {"k_norm.variance_size_override": 64},
    "two eps": {"q_norm.variance_epsilon": 1e-5},
    "a norm that is not ours": {"q_norm": torch.nn.Identity()},
    "an fp32 norm": {"q_norm": _Norm(torch.float32)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_differs_keeps_vllms_method(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points.CUSTOM_OP.module(), "op_registry_oot", {"RMSNorm": _Norm})
    assert as_expected(layer({}), torch.bfloat16)
    assert not as_expected(layer({}), torch.float32)
    assert not as_expected(layer(CHANGES[change]), torch.bfloat16)


def test_the_rotary_embedding_of_a_multimodal_model_fits_when_it_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points.CUSTOM_OP.module(), "op_registry_oot", {"RMSNorm": _Norm})
    theirs, ours = layer({}), layer({})
    vllms = patch_points.M_ROPE.get()
    mrope.install()
    for made, kind in ((theirs, vllms), (ours, patch_points.CUSTOM_OP.module().op_registry_oot[vllms.__name__])):
        made.rotary_emb.__class__ = kind
        made.rotary_emb._forward_method = made.rotary_emb.forward_cuda
    assert as_expected(ours, torch.bfloat16)
    assert not as_expected(theirs, torch.bfloat16)
    ours.rotary_emb._forward_method = theirs.rotary_emb.forward_cuda
    assert not as_expected(ours, torch.bfloat16)


def test_a_layer_without_norms_is_served_and_one_whose_norms_nobody_calls_is_not() -> None:
    made = layer({})
    assert not as_expected(made, torch.bfloat16, ROTATIONS.parts)
    for name in ("q_norm", "k_norm"):
        delattr(made, name)
    assert as_expected(made, torch.bfloat16, ROTATIONS.parts)
    made.q_norm = None
    assert as_expected(made, torch.bfloat16, ROTATIONS.parts)


def test_text_is_turned_by_the_first_of_three_equal_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    given, apart = [], []
    monkeypatch.setattr(patch_points.CUSTOM_OP.module(), "op_registry_oot", {"MRotaryEmbedding": _Rotary})
    monkeypatch.setattr(
        norm_rotary, "norm_rotary", lambda qkv, positions, *rest: given.append(positions) or (qkv[:, :4], qkv[:, 4:8])
    )
    positions, hidden = torch.arange(2).expand(3, 2), torch.zeros(2, 12)
    for rotary in (_Rotary(), torch.nn.Identity()):
        forward = HEAD_NORMS.fused(lambda *arguments: apart.append(arguments))
        forward(fitting(rotary, None), positions, hidden)
    assert [rows.tolist() for rows in given] == [[0, 1]]
    assert len(apart) == 1


def test_pictures_are_turned_by_angles_that_are_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(patch_points.CUSTOM_OP.module(), "op_registry_oot", {"MRotaryEmbedding": _Rotary})
    monkeypatch.setattr(
        norm_rotary,
        "norm_rotary",
        lambda qkv, rows, *rest: given.append((rows, rest[-1])) or (qkv[:, :4], qkv[:, 4:8]),
    )
    rotary = _Rotary()
    rotary.takes_pictures, rotary.mrope_section, rotary.mrope_interleaved = True, [1, 1, 0], False
    rotary.cos_sin_cache = torch.arange(24.0).view(6, 4)  # of two frequencies
    positions = torch.tensor([[0, 3], [5, 3], [1, 3]])
    HEAD_NORMS.fused(pytest.fail)(fitting(rotary, None), positions, torch.zeros(2, 12))
    [(rows, sections)] = given
    assert rows is positions
    assert sections == Sections(1, 1, 0)
    _, angles = mrope.row_of_angles(rotary, positions)
    assert angles.tolist() == [[0.0, 21.0, 2.0, 23.0], [12.0, 13.0, 14.0, 15.0]]


@pytest.mark.parametrize("interleaved", [False, True])
def test_sections_pick_the_angles_that_are_picked_for_vllms_kernel(interleaved: bool) -> None:
    rotary = _Rotary()
    rotary.takes_pictures, rotary.mrope_section, rotary.mrope_interleaved = True, [3, 3, 2], interleaved
    rotary.cos_sin_cache = torch.arange(160.0).view(10, 16)
    positions = torch.tensor([[0, 3, 9], [5, 3, 2], [1, 3, 4]])
    _, angles = mrope.row_of_angles(rotary, positions)
    _, sections = mrope.sections_of(rotary, positions)
    rows = positions[sections.rows()].T
    assert torch.equal(torch.cat([half.gather(0, rows) for half in rotary.cos_sin_cache.chunk(2, -1)], -1), angles)


class _Turning(torch.nn.Module):
    """Turns 4 elements of a head in fp32, as vLLM's kernel does."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.rand(9, 2, generator=torch.Generator().manual_seed(0)) * 6
        self.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), -1).bfloat16()

    def forward(self, positions: torch.Tensor, *given: torch.Tensor) -> list[torch.Tensor]:
        cos, sin = self.cos_sin_cache[mrope.of_text(positions)].float()[:, None].chunk(2, dim=-1)
        halves = [one.unflatten(1, (-1, 4)).float().chunk(2, dim=-1) for one in given]
        return [torch.cat((x * cos - y * sin, y * cos + x * sin), -1).bfloat16().flatten(1) for x, y in halves]


@pytest.mark.parametrize("fault", ["", "queries", "values", "a compiler's error"])
@pytest.mark.parametrize("dims", [1, 2])
def test_a_kernel_serves_where_it_has_the_bits_of_the_layers_own_modules(
    fault: str, dims: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rotary, calls = _Turning(), []

    def in_one(qkv: torch.Tensor, positions: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, None]:
        calls.append(positions)
        if fault == "a compiler's error":
            raise RuntimeError("no such instruction")
        cache = rest[-2]
        query, key, value = qkv.split([8, 4, 4], dim=-1)
        query, key = rotary(positions, query, key)
        page, place = cache.slots // 16, cache.slots % 16
        cache.keys[page, :, place] = key[:, None]
        cache.values[page, :, place] = value[:, None] * (1 + (fault == "values") * 2**-6)
        query[40, 3] *= 1 + (fault == "queries") * 2**-6
        return query, None

    monkeypatch.setattr(norm_rotary, "norm_rotary", in_one)
    monkeypatch.setattr(norm_rotary, "_AGREED", {})
    made = SimpleNamespace(rotary_emb=rotary, q_size=8, kv_size=4, head_dim=4)
    for _ in range(2):
        assert norm_rotary._agrees(made, (rotary,), dims) == (not fault)
    assert len(calls) == 1
    assert bool(caplog.messages) == bool(fault)
    assert all("stay apart" in message for message in caplog.messages)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16, None], ids=str)
def test_keys_and_values_are_written_at_once_where_the_cache_takes_them_as_they_are_or_as_codes(
    cache_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_points.CUSTOM_OP.module(), "op_registry_oot", {"MRotaryEmbedding": _Rotary})

    def turned(*given: Any) -> tuple[Any, str | None]:
        return ("queries", "keys") if given[-2] is None else (("queries", given[-2]), None)

    monkeypatch.setattr(norm_rotary, "norm_rotary", turned)
    slots = None
    if cache_dtype is not None:
        slots = CacheSlots(*torch.zeros(3, 1, 16, 32, dtype=cache_dtype).split(16, dim=-1), torch.zeros(2))
    given = torch.arange(2), torch.zeros(2, 12, dtype=torch.bfloat16)
    attended = HEAD_NORMS.fused(pytest.fail)(fitting(_Rotary(), slots), *given)
    if cache_dtype in (torch.bfloat16, torch.float8_e4m3fn):
        assert attended == (("queries", slots), None, None)
    else:
        assert attended[:2] == ("queries", "keys")
        assert attended[2].shape == (2, 4)


@pytest.mark.parametrize("layer", [*HEAD_NORMS.kinds, *ROTATIONS.kinds, *ROTATIONS_BEHIND_STATES.kinds], ids=str)
def test_the_forward_method_of_this_vllm_is_the_one_known(layer: patch_points.PatchPoint) -> None:
    assert sources.is_read("forwards", layer.get().forward)


def test_dense_and_mixed_layers_get_the_operation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [patch_points.QWEN3_ATTENTION.get(), patch_points.QWEN3_MOE_ATTENTION.get()]
    for layer in layers:
        monkeypatch.setattr(layer, "forward", layer.forward)
    HEAD_NORMS.install()
    made = [layer.forward for layer in layers]
    HEAD_NORMS.install()
    assert all(map(HEAD_NORMS.serves, layers))
    assert [layer.forward for layer in layers] == made


def test_a_watched_or_unfit_layer_runs_vllms_method() -> None:
    calls = []
    forward = HEAD_NORMS.fused(lambda *given, **named: calls.append(given))
    parts = {name: torch.nn.Identity() for name in ("q_norm", "k_norm", "rotary_emb")}
    on_the_cpu, fitting = SimpleNamespace(**parts), SimpleNamespace(**parts)
    beside(fitting).heads_fit = True
    hidden, positions = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    forward(on_the_cpu, positions=positions, hidden_states=hidden)  # as vLLM calls it
    forward(fitting, positions.expand(3, 2), hidden)
    parts["q_norm"].register_forward_hook(lambda *_: None)
    forward(fitting, positions, hidden)
    assert len(calls) == 3


def test_a_watched_layer_is_compared_when_nobody_watches_it_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison calls its modules, with rows of no request."""
    compared = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(norm_rotary, "_as_expected", lambda *_: True)
    monkeypatch.setattr(norm_rotary, "_agrees", lambda *given: compared.append(given) or True)
    layer, hidden = SimpleNamespace(), SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    rotary, positions = torch.nn.Identity(), torch.zeros(2, dtype=torch.int64)
    handle = rotary.register_forward_hook(lambda *_: None)
    assert not norm_rotary._fits(layer, (rotary,), positions, hidden)
    assert not compared
    handle.remove()
    for _ in range(2):
        assert norm_rotary._fits(layer, (rotary,), positions, hidden)
    assert len(compared) == 1
