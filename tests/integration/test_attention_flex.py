"""What the metadata builder of FlexAttention tells its planner."""

from types import SimpleNamespace

import pytest
import torch

from vllm_batch_invariant.integration.layers.attention_flex import FlexMetadataBuilder
from vllm_batch_invariant.ops.attention import AttentionSpec
from vllm_batch_invariant.ops.attention.flex.plan import Planner

PAGES, PAGE_SIZE = 3, 128


def planner(prefix_caching: bool) -> Planner:
    layer = SimpleNamespace(
        kv_cache=torch.zeros(PAGES, 1, PAGE_SIZE, 2 * 64, dtype=torch.bfloat16),
        impl=SimpleNamespace(spec=AttentionSpec(1.0)),
    )
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
        model_config=SimpleNamespace(get_num_attention_heads=lambda parallel: 2, max_model_len=256),
        parallel_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )
    spec = SimpleNamespace(num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    return FlexMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))._planner()


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_step_has_at_most_the_keys_of_the_cache_where_requests_share_no_pages(prefix_caching: bool) -> None:
    assert planner(prefix_caching).max_keys == (None if prefix_caching else PAGES * PAGE_SIZE)
