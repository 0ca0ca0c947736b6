"""An engine whose KV cache is in fp8 gives a request the same bits alone and among others, from chunks of any size and
from the prefix cache: those of an engine whose cache has the numbers of the codes in bf16.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.engines import EAGER_ON_GPU, OF_DEVICE, concurrent_requests, request, run, tokens
from tests.engine.fp8_caches import with_scales
from vllm_batch_invariant.envs import UNTRIED
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.worker import Engine

ON_GPU = torch.cuda.is_available()
COVERED = "0.33." if ON_GPU else reviews.ran().fp8_kv_cache["cpu"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]

CACHES = "tests.engine.fp8_caches"
SHAPE = Shape(intermediate=384, layers=2, vocab=1024, max_length=512)
VOCABULARY = range(3, 900)
TARGETS = [
    request(tokens(150, 1, VOCABULARY), max_tokens=12, logprobs=5),
    request(tokens(300, 2, VOCABULARY), max_tokens=4, temperature=1.0, seed=7, prompt_logprobs=2),
]
LIMITS = {"max_model_len": 512, "max_num_seqs": 24, "max_num_batched_tokens": 96, "skip_tokenizer_init": True}
LIMITS |= OF_DEVICE | EAGER_ON_GPU


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("fp8-kv") / "model", SHAPE)

    def asked(engine: Engine) -> dict[str, Any]:
        def answers(name: str, *beside: dict[str, Any], reset: bool = True) -> list[Any]:
            found = engine.step(name, [*beside, *TARGETS], reset_prefix_cache=reset).requests[-len(TARGETS) :]
            return [[one["completions"], one["prompt_logprobs"]] for one in found]

        made: dict[str, Any] = {
            "alone": [engine.step(f"alone {n}", [one], True).requests[-1] for n, one in enumerate(TARGETS)]
        }
        made["alone"] = [[one["completions"], one["prompt_logprobs"]] for one in made["alone"]]
        made["among others"] = answers("among", *concurrent_requests(17, 3, vocabulary=VOCABULARY))
        made["warm"] = answers("warm", reset=False)
        made["bytes"] = engine.call(f"{CACHES}:bytes_of_caches")
        made["scales"] = engine.call(f"{CACHES}:in_numbers", True)
        made["numbers of the codes"] = answers("numbers of the codes")
        engine.call(f"{CACHES}:in_numbers", False)
        made["exact numbers"] = answers("exact numbers")
        return made

    environment = {UNTRIED.name: "1"} if ON_GPU else {}
    return run({"model": with_scales(folder, 0.5, 0.25), **LIMITS}, [], "1", afterwards=asked, **environment).afterwards


def test_a_cache_in_fp8_moves_no_bit_with_the_batch_the_chunks_or_the_prefix_cache(found: dict[str, Any]) -> None:
    assert {dtype for dtype, _ in found["bytes"]} == {"torch.uint8"}
    assert all(written for _, written in found["bytes"])
    assert found["alone"] == found["among others"] == found["warm"]


def test_a_cache_in_fp8_has_the_bits_of_one_of_its_numbers_in_bf16(found: dict[str, Any]) -> None:
    """With the scales of the checkpoint, which are powers of two."""
    assert found["scales"] == [[0.5, 0.25], [0.25, 0.5]]
    assert found["alone"] == found["numbers of the codes"]
    assert found["alone"] != found["exact numbers"], "so the comparison sees what codes lose"
