"""An engine's answers do not depend on --max-num-seqs, which decides what its CUDA graphs are captured with."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import request, run, tokens
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint

HEADS = {"16 heads over 8": (16, 8, 128), "32 heads over 32": (32, 32, 128), "14 heads over 2": (14, 2, 64)}
SLOTS = (1, 2, 5, 100, 300)
ENGINES_AT_ONCE = 3


def steps() -> list[dict[str, Any]]:
    """Prompts of 1 to 40 tokens, then as many requests as any of the engines takes at once, short and long."""
    short = [request(tokens(length, 7), max_tokens=6) for length in range(1, 41)]
    one_by_one = [{"name": f"prompt of {length}", "requests": [short[length - 1]]} for length in range(1, 21)]
    full = [request(tokens(20 + i % 37, 1000 + i), max_tokens=10, logprobs=2) for i in range(300)]
    long = [request(tokens(1300 + i, 2000 + i), max_tokens=4, logprobs=2) for i in range(100)]
    batches = {"short": short, "full": full, "long": long}
    return one_by_one + [{"name": name, "requests": requests} for name, requests in batches.items()]


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
def test_answers_do_not_depend_on_the_most_requests_of_a_step(heads, tmp_path: Path) -> None:
    query, kv, size = heads
    shape = Shape(hidden=512, intermediate=1024, layers=2, heads=query, kv_heads=kv, head_size=size, max_length=4096)
    model = make_checkpoint(tmp_path / "model", shape)
    limits = {"kv_cache_memory_bytes": 8 << 30, "gpu_memory_utilization": 0.2, "enable_prefix_caching": False}

    def answers(slots: int) -> dict[str, list[Any]]:
        result = run({"model": str(model), "max_num_seqs": slots, "max_model_len": 2048} | limits, steps(), "1")
        assert "Batch-invariant mode is on" in result.log
        return {name: [one["completions"] for one in requests] for name, requests in result.steps.items()}

    with ThreadPoolExecutor(ENGINES_AT_ONCE) as pool:
        expected, *found = pool.map(answers, (64, *SLOTS))
    for slots, by_step in zip(SLOTS, found, strict=True):
        for name, answered in by_step.items():
            wrong = [place for place, answer in enumerate(answered) if answer != expected[name][place]]
            assert not wrong, (slots, name, wrong)
