"""Which norms, activations and layers of attention of vLLM's models write codes of what they give, and when."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.assertions import assert_same_bits
from tests.integration.test_norm_fusion import (  # noqa: F401 - fixtures
    Norm,
    decoder_of,
    hidden_states,
    moe,
    ours,
    with_experts,
)
from vllm_batch_invariant.integration.layers import code_fusion, norm_fusion
from vllm_batch_invariant.integration.layers.decoders import DECODERS, Decoder
from vllm_batch_invariant.integration.layers.fp8 import Source
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.ops.norm import rms_norm
from vllm_batch_invariant.ops.quantise import E4M3, QuantiseReduction

IN_GROUPS = QuantiseReduction.of_dtype(torch.float32, E4M3, 128)


class Activation(torch.nn.Module):
    """As vLLM builds ours."""

    def __init__(self) -> None:
        super().__init__()
        self._forward_method = torch.nn.functional.silu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward_method(x)


class Attention(torch.nn.Module):
    """As vLLM builds it, with our kernels; notes what they are told to write."""

    def __init__(self, written: list[QuantiseReduction | None], writes_codes: bool) -> None:
        super().__init__()
        self.impl, self.written = SimpleNamespace(writes_codes=writes_codes), written

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.written.append(code_fusion.codes_of(self))
        return q - k + v


class Kernels:
    """The operations on a GPU; what they were told to write."""

    def __init__(self) -> None:
        self.written: list[QuantiseReduction | None] = []

    def rms_norm(self, *operands: Any, codes: QuantiseReduction | None) -> Any:
        self.written.append(codes)
        return rms_norm(*operands)

    def silu_and_mul(self, x: torch.Tensor, codes: QuantiseReduction | None) -> torch.Tensor:
        self.written.append(codes)
        return torch.nn.functional.silu(x)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    found = Kernels()
    monkeypatch.setattr(code_fusion, "module_for", lambda *_: found)
    registry = {"RMSNorm": Norm, "SiluAndMul": Activation}
    monkeypatch.setattr(patch_points.CUSTOM_OP.module(), "op_registry_oot", registry)
    monkeypatch.setattr(code_fusion.fp8, "computes", lambda layer: hasattr(layer, "params_dtype"))
    return found


def quantising(kinds: Decoder, source: Source) -> tuple[Any, int]:
    """A decoder whose layers quantise what they are given, and how many are given it by a norm or an activation."""
    decoder, readers = decoder_of(kinds), 0
    for layer in decoder.layers:
        block = getattr(layer, kinds.name)
        if hasattr(block, "experts"):
            block.experts.routed_experts.quant_method.reduction = SimpleNamespace(quantised=IN_GROUPS)
            found = [layer.self_attn.qkv_proj]
            readers += 1
        else:
            block.act_fn = Activation()
            found = [layer.self_attn.qkv_proj, block.gate_up_proj, block.down_proj]
        for one in (*found, layer.self_attn.o_proj):
            one.params_dtype = torch.float32
            method = getattr(one, "quant_method", SimpleNamespace(apply=None))
            one.quant_method = SimpleNamespace(source=source, apply=method.apply)
        readers += len(found)
    return decoder, readers


@pytest.mark.parametrize("kinds", DECODERS, ids=lambda kinds: kinds.model)
def test_a_model_computes_the_same_and_its_norms_and_activations_write_codes(kinds: Decoder, kernels: Kernels) -> None:
    decoder, readers = quantising(kinds, Source("block"))
    apart = hidden_states(decoder)
    assert code_fusion.fuse(torch.nn.Sequential(decoder)) == readers
    assert_same_bits(hidden_states(decoder), apart)
    assert kernels.written == [IN_GROUPS] * readers
    assert code_fusion.fuse(decoder) == 0, "once is enough"


@pytest.mark.parametrize("writes_codes", [True, False])
def test_attention_writes_codes_where_its_kernels_can(kernels: Kernels, writes_codes: bool) -> None:
    decoder, readers = quantising(DECODERS[0], Source("block"))
    written: list[QuantiseReduction | None] = []
    for layer in decoder.layers:
        del layer.self_attn.attn
        layer.self_attn.attn = Attention(written, writes_codes)
    apart = hidden_states(decoder)
    written.clear()
    assert code_fusion.fuse(decoder) == readers + len(decoder.layers) * writes_codes
    assert_same_bits(hidden_states(decoder), apart)
    assert written == [IN_GROUPS if writes_codes else None] * len(decoder.layers)
    written.clear()
    handle = decoder.layers[0].self_attn.attn.register_forward_hook(lambda *_: None)
    hidden_states(decoder)
    assert written[0] is None
    handle.remove()


def test_while_somebody_looks_at_rows_their_codes_are_not_written(kernels: Kernels) -> None:
    """Or at who hands them on: he may change them."""
    decoder, readers = quantising(DECODERS[0], Source("block"))
    code_fusion.fuse(decoder)
    layer = decoder.layers[0]
    for watched in (layer.input_layernorm, layer.self_attn, layer.self_attn.qkv_proj, layer.mlp.act_fn):
        kernels.written.clear()
        handle = watched.register_forward_pre_hook(lambda *_: None)
        hidden_states(decoder)
        assert kernels.written.count(None) == 1
        handle.remove()
    kernels.written.clear()
    hidden_states(decoder)
    assert kernels.written == [IN_GROUPS] * readers


@pytest.mark.parametrize("source", [Source("channel"), Source("tensor", static=True)])
def test_codes_of_whole_rows_and_with_given_scales_are_written_apart(source: Source, kernels: Kernels) -> None:
    decoder, _ = quantising(DECODERS[0], source)
    assert code_fusion.fuse(decoder) == 0


def test_a_model_without_codes_is_not_looked_at(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_fusion, "is_known", lambda _: pytest.fail("sources were read"))
    assert code_fusion.fuse(decoder_of(DECODERS[0])) == 0


def test_a_norm_that_adds_what_experts_give_writes_codes_of_it(
    kernels: Kernels,
    moe: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder, _ = quantising(DECODERS[4], Source("block"))
    apart, written = hidden_states(decoder), []
    add = moe.add_and_norm
    monkeypatch.setattr(moe, "add_and_norm", lambda *given: written.append(given[4:]) or add(*given[:4]), raising=False)
    code_fusion.fuse(decoder)
    assert norm_fusion.fuse(decoder, None) == len(with_experts(decoder))
    assert_same_bits(hidden_states(decoder), apart)
    assert written == [(IN_GROUPS,), ()], "behind the last norm is no such layer"
