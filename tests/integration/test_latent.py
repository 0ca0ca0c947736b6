"""vLLM's layers of latent attention, with ours in the place of their two forms."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.assertions import DTYPES, assert_near, assert_same_bits
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.layers import latent, review
from vllm_batch_invariant.integration.layers.attention import Metadata
from vllm_batch_invariant.integration.layers.attention_latent import LatentAttention
from vllm_batch_invariant.integration.reviews import claims, patch_points

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it is of CPUs")
HEADS, LATENT, UNTURNED, TURNED, VALUE = 3, 64, 32, 16, 48
PAGE, TOKENS = 16, 40
SIZES = {
    "num_heads": HEADS,
    "head_size": LATENT + TURNED,
    "scale": 0.1,
    "num_kv_heads": 1,
    "alibi_slopes": None,
    "sliding_window": None,
    "kv_cache_dtype": "auto",
    "logits_soft_cap": None,
    "attn_type": "decoder",
    "kv_sharing_target_layer_name": None,
    "q_lora_rank": None,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": UNTURNED,
    "qk_rope_head_dim": TURNED,
    "qk_head_dim": UNTURNED + TURNED,
    "v_head_dim": VALUE,
    "kv_b_proj": None,
    "indexer": None,
}


def made(**changes: Any) -> LatentAttention:
    impl = object.__new__(LatentAttention)
    LatentAttention.__init__(impl, **SIZES | changes)
    return impl


def numbers(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Layer:
    """What an implementation is asked to compute: one request of all tokens, in pages that lie backwards."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.impl = made()
        weight = numbers(HEADS * (UNTURNED + VALUE), LATENT, seed=1, dtype=dtype) / 8
        self.kv_b_proj = SimpleNamespace(weight=weight)
        self.query = numbers(TOKENS, HEADS, UNTURNED + TURNED, seed=2, dtype=dtype)
        self.vectors = numbers(TOKENS, LATENT, seed=3, dtype=dtype)
        self.turned = numbers(TOKENS, 1, TURNED, seed=4, dtype=dtype)
        self.table = torch.tensor([[2, 1, 0]], dtype=torch.int32)
        self.cache = torch.full((4, PAGE, LATENT + TURNED), float("nan"), dtype=dtype)

    def write(self, start: int, stop: int) -> None:
        """What a step of these tokens writes, with a slot of padding behind."""
        places = torch.arange(start, stop)
        slots = torch.cat([self.table[0, places // PAGE].long() * PAGE + places % PAGE, torch.tensor([-1])])
        vectors, turned = (torch.cat([x[start:stop], x[:1]]) for x in (self.vectors, self.turned))
        self.impl.do_kv_cache_update(vectors, turned, self.cache, slots, "auto", torch.ones(()), False)

    def attend(self, start: int, stop: int) -> torch.Tensor:
        """[stop - start, heads * value size], of a step with a row of padding."""
        starts, lengths = torch.tensor([0, stop - start]).int(), torch.tensor([stop]).int()
        step = Metadata(stop - start, starts, lengths, self.table)
        out = torch.full((stop - start + 1, HEADS * VALUE), 7.0, dtype=self.query.dtype)
        query = torch.cat([self.query[start:stop], self.query[:1]])
        assert latent.forward_impl(self, query, self.vectors, self.turned, self.cache, step, output=out) is out
        assert (out[-1] == 7.0).all()
        return out[:-1]

    def by_heads(self) -> torch.Tensor:
        """In float64, with keys and values of each head."""
        weight = self.kv_b_proj.weight.double().view(HEADS, UNTURNED + VALUE, LATENT)
        w_uk, w_uv = weight.split([UNTURNED, VALUE], dim=1)
        keys = torch.einsum("tl,hpl->htp", self.vectors.double(), w_uk)
        keys = torch.cat([keys, self.turned.double().transpose(0, 1).expand(HEADS, -1, -1)], -1)
        scores = self.query.double().transpose(0, 1) @ keys.transpose(1, 2) * 0.1
        hidden = torch.ones(TOKENS, TOKENS).triu(1).bool()
        values = torch.einsum("tl,hvl->htv", self.vectors.double(), w_uv)
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_near_attention_of_each_head_in_float64(dtype: torch.dtype) -> None:
    layer = Layer(dtype)
    layer.write(0, TOKENS)
    # three roundings to the dtype in the place of one
    assert_near(layer.attend(0, TOKENS), layer.by_heads(), factor=8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_and_chunks_have_the_bits_of_prefill(dtype: torch.dtype) -> None:
    whole = Layer(dtype)
    whole.write(0, TOKENS)
    known = whole.attend(0, TOKENS)
    for size in (1, 7, 16, 39):
        layer = Layer(dtype)
        for start in range(0, TOKENS, size):
            stop = min(start + size, TOKENS)
            layer.write(start, stop)
            assert_same_bits(layer.attend(start, stop), known[start:stop], f"{start} to {stop}")


def test_a_warm_up_gives_zeros() -> None:
    layer = Layer(torch.float32)
    out = torch.full((4, HEADS * VALUE), 7.0)
    latent.forward_impl(layer, layer.query[:4], layer.vectors, layer.turned, layer.cache, None, output=out)
    assert not out.any()


def test_a_weight_that_is_replaced_in_place_is_read() -> None:
    layer = Layer(torch.float32)
    layer.write(0, TOKENS)
    before = layer.attend(0, TOKENS)
    layer.kv_b_proj.weight.mul_(2)
    assert not torch.equal(layer.attend(0, TOKENS), before)
    assert_near(layer.attend(0, TOKENS), layer.by_heads(), factor=8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"indexer": object()}, "an indexer chooses"),
        ({"topk_indices_buffer": torch.zeros(1)}, "an indexer chooses"),
        ({"kv_cache_dtype": "fp8"}, "latent attention with a KV cache in fp8"),
        ({"kv_lora_rank": 256}, "vectors of 256 and 16 turned elements"),
        ({"attn_type": "encoder_only"}, "encoder_only attention"),
    ],
)
def test_what_has_not_been_run_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(NotCovered, match=said):
        made(**changes)


def test_quantised_results_are_refused() -> None:
    layer = Layer(torch.float32)
    with pytest.raises(NotCovered, match="quantised output"):
        latent.forward_impl(
            layer, layer.query, layer.vectors, layer.turned, layer.cache, None, layer.query, torch.ones(1)
        )


def of_vllm(**changes: Any) -> Any:
    """A layer of vLLM's as it is looked at."""
    layer = torch.nn.Module.__new__(patch_points.LATENT_ATTENTION.get())
    torch.nn.Module.__init__(layer)
    method = object.__new__(patch_points.LINEAR_METHOD.get())
    plain = {"impl": made(), "use_sparse": False, "indexer": None, "sliding_window": None}
    plain |= {"non_causal_multi_token_decode": False, "kv_b_proj": SimpleNamespace(quant_method=method)}
    vars(layer).update(plain | changes)
    return layer


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"impl": object()}, "its kernels are not ours"),
        ({"use_sparse": True}, "it attends to keys that an indexer chooses"),
        ({"indexer": object()}, "it attends to keys that an indexer chooses"),
        ({"sliding_window": 100}, "it is more than causal attention"),
        ({"non_causal_multi_token_decode": True}, "it is more than causal attention"),
        ({"kv_b_proj": SimpleNamespace(quant_method=SimpleNamespace(unpacks=True))}, None),
        ({"kv_b_proj": SimpleNamespace(quant_method=object())}, "its matrices are made by object"),
    ],
)
def test_a_layer_of_a_loaded_model_is_looked_at(changes: dict[str, Any], said: str | None) -> None:
    model = torch.nn.ModuleList([of_vllm(**changes)])
    if said is None:
        review.check(model)
        return
    with pytest.raises(NotCovered, match=said):
        review.check(model)


def test_a_kernel_for_few_rows_is_turned_off_and_refused_where_it_is_on() -> None:
    kind = patch_points.PatchPoint(("vllm.model_executor.models.deepseek_v2",), latent.FUSED).get()
    layer = torch.nn.Module.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer._use_min_latency_gemm, layer.quant_method = True, object.__new__(patch_points.LINEAR_METHOD.get())
    model = torch.nn.ModuleList([layer])
    with pytest.raises(NotCovered, match="it has another kernel for few rows"):
        review.check(model)
    latent.prepare(model)
    review.check(model)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_its_backend_claims_nothing_that_is_not_listed(device: str) -> None:
    backend = import_module(f"vllm_batch_invariant.integration.layers.attention_latent_{device}").LatentBackend
    asked = {name for name in dir(backend) if name.startswith("supports_")} - claims().known
    assert {name for name in asked if callable(claim := getattr(backend, name)) and claim()} == set()
    assert backend.is_mla()
    assert backend.supports_head_size(576)
    assert not backend.supports_head_size(512)
    assert backend.supports_block_size(64)
    assert not backend.supports_block_size(24)
    assert not backend.supports_kv_cache_dtype("fp8")
