"""A layer of Qwen3 as an engine on a GPU computes it in exact arithmetic, by the kernels in Triton's interpreter: what
stands for vLLM's layers there gets rows as vLLM cuts them, and each gives what the definition's decoder says.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.exact.cases import assert_same
from vllm_batch_invariant.ops import attention
from vllm_batch_invariant.ops.exact import cuda, definition, known_answers
from vllm_batch_invariant.ops.exact.decoder import Decoder

pytest.importorskip("vllm")
from vllm_batch_invariant.integration.layers import exact, linear
from vllm_batch_invariant.integration.layers.attention_cuda import ExactCudaAttention, ExactMetadataBuilder

CONFIG = known_answers.checkpoint()[0] | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 64,
}  # fmt: skip
AT = "model.layers.0"
TOKENS = 70
"""More than a tile of keys."""
HEAD, HEADS, KV_HEADS, PAGE = CONFIG["head_dim"], CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], 16


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU passes for an A100 of 5 multiprocessors, and the GPU's operations for its own."""
    properties = SimpleNamespace(multi_processor_count=5, major=8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for name in ("device", "device_of"):
        monkeypatch.setattr(torch.cuda, name, lambda device: nullcontext())
    monkeypatch.setattr(exact, "operations", lambda device_type="cpu": cuda)
    monkeypatch.setitem(attention._MODULES, "exact", "..exact.cuda")
    monkeypatch.setattr(cuda, "certify", lambda *arguments: 0)  # it has a test of its own


@pytest.fixture(scope="module")
def right() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What each layer makes of a prompt, and the weights."""
    shapes = {
        "model.embed_tokens": (64, 64),
        f"{AT}.self_attn.q_proj": (HEADS * HEAD, 64),
        f"{AT}.self_attn.k_proj": (KV_HEADS * HEAD, 64),
        f"{AT}.self_attn.v_proj": (KV_HEADS * HEAD, 64),
        f"{AT}.self_attn.o_proj": (64, HEADS * HEAD),
        f"{AT}.mlp.gate_proj": (96, 64),
        f"{AT}.mlp.up_proj": (96, 64),
        f"{AT}.mlp.down_proj": (64, 96),
        "lm_head": (64, 64),
    } | {f"{AT}.{norm}": (64,) for norm in ("input_layernorm", "post_attention_layernorm")}
    shapes |= {"model.norm": (64,)} | {f"{AT}.self_attn.{norm}": (HEAD,) for norm in ("q_norm", "k_norm")}
    weights = {
        f"{name}.weight": known_answers.normal(seed, *shape) for seed, (name, shape) in enumerate(shapes.items())
    }
    made: dict[str, np.ndarray] = {}
    decoder = Decoder(CONFIG, {name: definition.to_bits(floats) for name, floats in weights.items()})
    decoder.logits([number * 7 % 64 for number in range(TOKENS)], seen=lambda name, what: made.update({name: what}))
    return made, weights


def bf16(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16()


class Layer(torch.nn.Module):
    """As vLLM's: a weight [N, K]."""

    def __init__(self, *weights: np.ndarray) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.cat([bf16(one) for one in weights]), requires_grad=False)


def multiplied(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """By vLLM's method, as it is replaced on a GPU."""

    class Method:
        def process_weights_after_loading(self, layer: Any) -> None:
            pass

    linear._multiply_exactly(Method)
    Method().process_weights_after_loading(layer)
    return Method().apply(layer, x)


def test_projections_norms_and_rotation_of_heads_are_those_of_the_decoder(right: Any) -> None:
    made, weights = right
    hidden = bf16(made[f"{AT}.input_layernorm"])
    qkv = multiplied(Layer(*(weights[f"{AT}.self_attn.{one}_proj.weight"] for one in "qkv")), hidden)
    assert_same(qkv, made[f"{AT}.self_attn.qkv_proj"])
    query, key, _value = qkv.split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], dim=-1)
    norms = [bf16(weights[f"{AT}.self_attn.{one}_norm.weight"]) for one in "qk"]
    normed = [
        cuda.rms_norm(one.view(TOKENS, -1, HEAD), weight, CONFIG["rms_norm_eps"])
        for one, weight in zip((query, key), norms, strict=True)
    ]
    assert_same(normed[0], made[f"{AT}.self_attn.q_norm"])
    rotary = SimpleNamespace(
        rotary_dim=HEAD, head_size=HEAD, is_neox_style=True, base=CONFIG["rope_theta"], max_position_embeddings=TOKENS
    )
    rotary.cos_sin_cache = exact._rotary_table(rotary)
    turned, _ = exact._rotate(rotary, torch.arange(TOKENS), *(one.view(TOKENS, -1) for one in normed))
    assert_same(turned, made[f"{AT}.self_attn.rotary_emb"].reshape(TOKENS, -1))
    wide, _ = exact._rotate(rotary, torch.arange(TOKENS), query)  # a model without norms of heads turns parts of rows
    alone, _ = exact._rotate(rotary, torch.arange(TOKENS), query.contiguous())
    assert torch.equal(wide, alone)


def test_an_mlp_is_that_of_the_decoder(right: Any) -> None:
    made, weights = right
    hidden = bf16(made[f"{AT}.post_attention_layernorm"])
    gate_up = multiplied(Layer(*(weights[f"{AT}.mlp.{one}_proj.weight"] for one in ("gate", "up"))), hidden)
    assert_same(exact._silu_and_mul(None, gate_up), made[f"{AT}.mlp.act_fn"])


@pytest.mark.parametrize("chunks", [[70], [33, 36, 1]], ids=["at once", "in chunks"])
def test_attention_over_pages_by_the_planned_backend_is_that_of_the_definition(chunks: list[int], right: Any) -> None:
    made, _ = right
    value = made[f"{AT}.self_attn.qkv_proj"][:, -KV_HEADS * HEAD :].reshape(TOKENS, KV_HEADS, HEAD)
    key = made[f"{AT}.self_attn.qkv_proj"][:, HEADS * HEAD : -KV_HEADS * HEAD].reshape(TOKENS, KV_HEADS, HEAD)
    query = bf16(made[f"{AT}.self_attn.rotary_emb"])
    exactly = definition.attention(query.float().numpy(), key, value, HEAD**-0.5).reshape(TOKENS, HEADS, HEAD)
    impl = ExactCudaAttention(HEADS, HEAD, HEAD**-0.5, KV_HEADS)
    # As an engine may have it: the heads of a slot lie side by side.
    cache = torch.full((8, PAGE, KV_HEADS, 2 * HEAD), 7.0, dtype=torch.bfloat16).transpose(1, 2)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"attn": SimpleNamespace(impl=impl, kv_cache=cache)}),
        model_config=SimpleNamespace(max_model_len=128),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=128),
        cache_config=SimpleNamespace(num_gpu_blocks=None),
        speculative_config=None,
        num_speculative_tokens=0,
    )
    spec = SimpleNamespace(num_kv_heads=KV_HEADS, head_size=HEAD, dtype=torch.bfloat16, block_size=PAGE)
    builder = ExactMetadataBuilder(spec, ["attn"], config, torch.device("cpu"))
    pages, done = torch.tensor([[5, 2, 7, 0, 3, 1]]), 0
    for count in chunks:
        new = slice(done, done + count)
        places = torch.arange(done, done + count)
        slots = pages[0, places // PAGE] * PAGE + places % PAGE
        padded = torch.cat((slots, torch.full((3,), -1)))
        keys, values = (torch.nn.functional.pad(bf16(one[new]), (0, 0, 0, 0, 0, 3)) for one in (key, value))
        impl.do_kv_cache_update(None, keys, values, cache, padded)
        step = SimpleNamespace(
            causal=True, num_actual_tokens=count, max_query_len=count, block_table_tensor=pages.int(),
            query_start_loc=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([done + count], dtype=torch.int32),
        )  # fmt: skip
        metadata = builder.build(0, step)
        assert isinstance(metadata.plans[HEADS, None, True].planner, cuda.ExactPlanner)
        out = torch.full((count, HEADS, HEAD), torch.nan, dtype=torch.bfloat16)
        impl.forward(None, query[new], None, None, cache, metadata, out)
        assert_same(out, exactly[new], f"rows {new}")
        done += count


def test_a_cache_is_made_anew_where_the_engine_gives_a_layer_another() -> None:
    impl = ExactCudaAttention(HEADS, HEAD, HEAD**-0.5, KV_HEADS)
    memory = torch.zeros(8, KV_HEADS, PAGE, 2 * HEAD, dtype=torch.bfloat16)
    first = impl.cache_in(memory)
    assert impl.cache_in(memory.view(memory.shape)) is first
    assert impl.cache_in(memory[:4]).exponents.shape == (4, KV_HEADS, 2, PAGE)
    assert impl.cache_in(memory.clone()) is not first
    for wrong in (memory[..., :HEAD], memory[:, :, : PAGE - 1]):
        with pytest.raises(ValueError, match="lies in one piece"):
            impl.cache_in(wrong)
