"""Attention of a decoder over what an encoder gave: the cache of a request, and the order in which it is filled."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from tests.assertions import assert_near, assert_same_bits
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.engine import encoder_outputs
from vllm_batch_invariant.integration.layers.attention_cpu import Backend
from vllm_batch_invariant.integration.reviews import patch_points

KIND, HEADS, SIZE, PAGE = "encoder_decoder", 2, 64, 16
ROWS = (300, 40)
"""That an encoder gave each request."""


def backend(ours: Any = Backend) -> Any:
    """vLLM's for cross attention, over ours."""
    from vllm.model_executor.layers.attention import cross_attention

    return cross_attention.create_cross_attention_backend(ours)


def drawn(rows: int, seed: int, parts: int) -> torch.Tensor:
    """[parts, rows, heads, size]."""
    return torch.randn(parts, rows, HEADS, SIZE, generator=torch.Generator().manual_seed(seed))


class Served:
    """A layer with the pages of some requests, whose second column of the table has a page that nobody wrote."""

    def __init__(self, ours: Any = Backend) -> None:
        from vllm.v1.kv_cache_interface import CrossAttentionSpec

        self.layer = backend(ours).get_impl_cls()(HEADS, SIZE, SIZE**-0.5, attn_type=KIND)
        layer = SimpleNamespace(impl=self.layer, kv_cache=None)
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
            model_config=SimpleNamespace(
                max_model_len=20, hf_config=SimpleNamespace(max_source_positions=max(ROWS)), dtype=torch.float32
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=2, max_num_batched_tokens=20),
            cache_config=SimpleNamespace(num_gpu_blocks=None),
            speculative_config=None,
            num_speculative_tokens=0,
        )
        spec = CrossAttentionSpec(block_size=PAGE, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32)
        self.builder = backend(ours).get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
        self.cache = torch.full((64, HEADS, PAGE, 2 * SIZE), torch.nan)
        self.pages = torch.randperm(64, generator=torch.Generator().manual_seed(0)).reshape(2, 32).to(torch.int32)

    def step(self, parts: Sequence[tuple[int, int, torch.Tensor]]) -> torch.Tensor:
        """What rows get.

        Args:
            parts: of each request of the step its number, its tokens before, and [tokens, heads, size] of its queries;
                one without tokens before brings what its encoder gave.
        """
        counts, before = ([part[place] for part in parts] for place in (2, 1))
        lengths = torch.tensor([len(queries) + done for queries, done in zip(counts, before, strict=True)])
        rows = [ROWS[number] for number, _, _ in parts]
        starts = torch.tensor([0, *(len(queries) for queries in counts)]).cumsum(0).to(torch.int32)
        batch = SimpleNamespace(
            num_actual_tokens=int(starts[-1]),
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            max_query_len=max(map(len, counts)),
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            block_table_tensor=self.pages[[number for number, _, _ in parts]],
            encoder_seq_lens=torch.tensor(rows, dtype=torch.int32),
            encoder_seq_lens_cpu=np.array(rows, dtype=np.int32),
            causal=True,
        )
        given = [drawn(ROWS[number], number, 2) for number, done, _ in parts if done == 0]
        key, value = torch.cat(given, 1) if given else (None, None)
        query = torch.cat(counts)
        layer = SimpleNamespace(kv_sharing_target_layer_name=None)
        metadata = self.builder.build(0, batch)
        return self.layer.forward(layer, query, key, value, self.cache, metadata, torch.empty_like(query))


def check_steps(serve: Callable[[], Served]) -> None:
    """Every token sees all rows, with the same bits in any step."""
    first, second = drawn(9, 10, 1)[0], drawn(5, 11, 1)[0]
    served = serve()
    alone = served.step([(0, 0, first)])
    for queries, number, got in ((first, 0, alone), (second, 1, serve().step([(1, 0, second)]))):
        keys, values = drawn(ROWS[number], number, 2).double().transpose(1, 2)
        weights = (queries.double().transpose(0, 1) @ keys.transpose(1, 2) * SIZE**-0.5).softmax(-1)
        assert_near(got, (weights @ values).transpose(0, 1), factor=2)
    assert_same_bits(served.step([(0, 9, first[3:4])]), alone[3:4], "one row, from the cache")
    together = served.step([(0, 9, first[8:]), (1, 0, second)])
    assert_same_bits(together[:1], alone[8:], "beside a request that begins")
    assert_same_bits(together[1:], serve().step([(1, 0, second)]), "beside a request that goes on")
    both = serve().step([(1, 0, second), (0, 0, first)])
    assert_same_bits(both, torch.cat([together[1:], alone]), "two that begin")


def test_every_token_sees_all_rows_with_the_same_bits_in_any_step() -> None:
    check_steps(Served)


def test_cross_attention_in_fp8_and_by_another_implementation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotCovered, match="encoder_decoder attention with a KV cache in fp8"):
        backend().get_impl_cls()(HEADS, SIZE, 1.0, attn_type=KIND, kv_cache_dtype="fp8")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT_ATTENTION", "flex")
    with pytest.raises(NotCovered, match="encoder_decoder attention with VLLM_BATCH_INVARIANT_ATTENTION=flex"):
        backend().get_impl_cls()(HEADS, SIZE, 1.0, attn_type=KIND)


@pytest.mark.parametrize("is_encoder_decoder", [True, False])
def test_the_first_model_runner_encodes_in_the_order_of_its_batch(
    is_encoder_decoder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = patch_points.MODEL_RUNNER.get()

    def encode(self: Any, scheduler_output: Any) -> list[str]:
        return list(scheduler_output.scheduled_encoder_inputs)

    monkeypatch.setattr(runner, "_execute_mm_encoder", encode)
    encoder_outputs.install_in_worker()
    held = SimpleNamespace(
        model_config=SimpleNamespace(is_encoder_decoder=is_encoder_decoder),
        input_batch=SimpleNamespace(req_id_to_index={"back": 2, "new": 0, "other": 1}),
    )
    asked = SimpleNamespace(scheduled_encoder_inputs={"back": [0], "new": [0], "other": [0]})
    found = runner._execute_mm_encoder(held, asked)
    assert found == (["new", "other", "back"] if is_encoder_decoder else ["back", "new", "other"])
