"""What is not covered stops the engine before it starts, in one line that says what, why and what to do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.engines import ROOT

pytestmark = pytest.mark.engine

BUILD_CONFIGURATIONS = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
lines = {}
for name, arguments in json.loads(sys.argv[2]).items():
    try:
        EngineArgs(model=sys.argv[1], max_model_len=256, **arguments).create_engine_config()
        lines[name] = "accepted"
    except Exception as error:
        lines[name] = f"{type(error).__name__}: {error}"
print(json.dumps(lines))
"""

REFUSED = {
    "quantisation": ({"quantization": "fp8"}, "quantisation fp8"),
    "an fp8 KV cache": ({"kv_cache_dtype": "fp8"}, "a KV cache in fp8"),
    "tensor parallelism": ({"tensor_parallel_size": 2}, "tensor parallelism 2"),
    "LoRA": ({"enable_lora": True}, "LoRA adapters"),
    "another attention backend": ({"attention_backend": "FLASH_ATTN"}, "attention backend FLASH_ATTN"),
    "speculative decoding": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        "speculative decoding",
    ),
    "pooling": ({"runner": "pooling", "convert": "embed"}, "the pooling runner"),
    "logits processors": ({"logits_processors": ["package.module:Processor"]}, "custom logits processors"),
}


def build(checkpoint: Path, arguments: dict[str, dict], flag: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return subprocess.run(
        [sys.executable, "-c", BUILD_CONFIGURATIONS, str(checkpoint), json.dumps(arguments)],
        cwd=ROOT,
        env=inherited | {"HF_HUB_OFFLINE": "1", "VLLM_BATCH_INVARIANT": flag},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture(scope="module")
def lines(checkpoint: Path) -> dict[str, str]:
    arguments = {name: arguments for name, (arguments, _) in REFUSED.items()} | {"plain": {}}
    return json.loads(build(checkpoint, arguments, "1").stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("feature", REFUSED)
def test_a_feature_that_is_not_covered_is_refused_by_name(lines: dict[str, str], feature: str) -> None:
    found = REFUSED[feature][1]
    assert lines[feature].startswith(f"NotCovered: batch-invariant mode does not cover {found}: "), lines[feature]
    assert "; " in lines[feature]
    assert "\n" not in lines[feature]


def test_a_plain_model_is_accepted(lines: dict[str, str]) -> None:
    assert lines["plain"] == "accepted"


def test_a_wrong_value_of_the_flag_stops_vllm_with_one_line(checkpoint: Path) -> None:
    process = build(checkpoint, {"plain": {}}, "yes")
    assert (
        "BadSetting: VLLM_BATCH_INVARIANT='yes' is not a value it can have; use 0 or 1."
        in process.stdout + process.stderr
    )
