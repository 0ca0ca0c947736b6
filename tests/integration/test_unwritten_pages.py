"""A request that is preempted in the pass that has scheduled it comes back without the pages of that step."""

from typing import Any

import pytest
import torch

from vllm_batch_invariant.envs import FLAG
from vllm_batch_invariant.integration.engine import unwritten_pages
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint

PAGE = 16
LONG, SHORT = 150, 15
"""Tokens of two prompts, of which the second has the higher priority, and comes when the first is half computed."""


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    shape = Shape(hidden=128, intermediate=128, layers=1, heads=2, head_size=64, max_length=512)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FLAG, "0")
        return EngineArgs(
            model=str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), shape)),
            skip_tokenizer_init=True,
            max_model_len=256,
            max_num_batched_tokens=48,
            long_prefill_token_threshold=32,
            block_size=PAGE,
            scheduling_policy="priority",
            async_scheduling=False,
        ).create_engine_config()


def steps(configuration: Any) -> list[tuple[dict[str, int], set[str], dict[str, int]]]:
    """Of each step the tokens of requests, which are preempted, and how many were computed or found before."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.structured_output import StructuredOutputManager

    pages = -(-LONG // PAGE) + 1  # and one that is never given out
    layers = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=64, dtype=torch.float32)
    configuration.cache_config.num_gpu_blocks = pages
    init_none_hash(sha256)
    scheduler = patch_points.SCHEDULER.get()(
        configuration,
        KVCacheConfig(num_blocks=pages, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layers)]),
        StructuredOutputManager(configuration),
        block_size=PAGE,
    )

    def asked(name: str, first: int, length: int, priority: int) -> Any:
        return patch_points.REQUEST.get()(
            request_id=name,
            prompt_token_ids=list(range(first, first + length)),
            sampling_params=SamplingParams(max_tokens=10, ignore_eos=True),
            pooling_params=None,
            priority=priority,
            arrival_time=float(first),
            block_hasher=get_request_block_hasher(PAGE, sha256),
        )

    found = []
    for number in range(30):
        if number == 0:
            scheduler.add_request(asked("long", 0, LONG, 10))
        if number == 1:
            scheduler.add_request(asked("short", LONG, SHORT, 0))
        step = scheduler.schedule()
        cached = step.scheduled_cached_reqs
        before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        found.append((dict(step.num_scheduled_tokens), set(step.preempted_req_ids or ()), before))
        names = list(step.num_scheduled_tokens)
        requests = [scheduler.requests[name] for name in names]
        ends = [one.num_computed_tokens >= one.num_tokens for one in requests]
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=[[7] if end else [] for end in ends],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        scheduler.update_from_output(step, output)
    return found


@pytest.mark.parametrize("mended", [False, True], ids=["plain vLLM", "mended"])
def test_a_request_comes_back_with_no_more_than_was_computed(
    configuration: Any, mended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = patch_points.SCHEDULER.get()
    plain = getattr(scheduler._preempt_request, "__wrapped__", scheduler._preempt_request)
    wanted = unwritten_pages.forgetting_unwritten_pages(plain) if mended else plain
    monkeypatch.setattr(scheduler, "_preempt_request", wanted)
    taken = steps(configuration)
    [at] = [number for number, (_, preempted, _) in enumerate(taken) if "long" in preempted]
    computed = sum(tokens.get("long", 0) for tokens, *_ in taken[:at])
    assert taken[at][0] == {"short": 1}, "it was scheduled, and preempted behind that"
    back = next(before["long"] for tokens, _, before in taken[at + 1 :] if "long" in tokens)
    assert (back <= computed) is mended
    assert back >= computed - PAGE
