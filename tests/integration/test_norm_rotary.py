"""Which attention layers of vLLM get the norms of their heads and the rotary embedding as one operation."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm_batch_invariant.integration import norm_rotary, patch_points


class _Norm(torch.nn.Module):
    has_weight, variance_size_override, variance_epsilon = True, None, 1e-6

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.ones(128, dtype=dtype)


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
    assert norm_rotary._as_expected(layer({}), torch.bfloat16)
    assert not norm_rotary._as_expected(layer({}), torch.float32)
    assert not norm_rotary._as_expected(layer(CHANGES[change]), torch.bfloat16)


def test_the_forward_method_of_this_vllm_is_the_one_known() -> None:
    assert set(patch_points.QWEN3_ATTENTION.get().forward.__code__.co_names) == norm_rotary._NAMES


def test_a_watched_or_unfit_layer_runs_vllms_method() -> None:
    calls = []
    forward = norm_rotary.fused(lambda *given: calls.append(given))
    parts = {name: torch.nn.Identity() for name in ("q_norm", "k_norm", "rotary_emb")}
    on_the_cpu, fitting = SimpleNamespace(**parts), SimpleNamespace(**parts, _norm_and_rotary_are_one=True)
    hidden, positions = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    forward(on_the_cpu, positions, hidden)
    forward(fitting, positions.expand(3, 2), hidden)
    parts["q_norm"].register_forward_hook(lambda *_: None)
    forward(fitting, positions, hidden)
    assert len(calls) == 3
