"""Every rollout of the trainers' examples goes through the start-up check, and the table says what comes out."""

import re

import pytest

from scripts.trainers.gate import REFUSED, STARTS
from scripts.trainers.table import read
from tests.integration.conftest import CHANGED, VARIABLE, Published
from tests.integration.known_layers import check_layers

pytest.importorskip("vllm")

SAID = {
    "quantization": "quantisation fp8",
    "kv_cache_dtype": "a KV cache in fp8_e5m2",
    "pipeline_parallel_size": "pipeline parallelism 3",
    "use_fp64_gumbel": "model_config.use_fp64_gumbel=True",
    "no_such_argument": "no_such_argument",
}
"""What the check or vLLM says to arguments that no example has."""
OF_ITSELF = re.compile(
    r"LoRA adapters (beside (images and )?tensor parallelism 2|with the multimodal model \w+)"
    r"|image and video inputs of \w+ with (tensor parallelism 2|a prefix cache beside states on GPUs)"
    r"|gated delta rules with tensor parallelism 2"
)
"""Why an example of verl's may be refused, though its model is covered and two GPUs are enough: what it serves is more
than the model, or images by both of them.
"""


def test_the_table_says_what_the_check_says(published: Published) -> None:
    """``python -m scripts.trainer_configurations gate --write`` renews the table."""
    differ = [
        f"{new.trainer} {new.script}: {old.verdict} -> {new.verdict}"
        for old, new in zip(read(), published.trainers, strict=True)
        if (old.verdict, old.alone) != (new.verdict, new.alone)
    ]
    assert not differ, "\n".join(differ)


@pytest.mark.parametrize("architecture", sorted({row.architecture for row in read() if row.alone == STARTS}))
def test_the_layers_of_a_model_that_passes_are_known(architecture: str) -> None:
    """The check of a configuration does not see them; the one when a model is loaded does."""
    check_layers(architecture)


def test_what_is_not_covered_is_refused_in_the_same_way(published: Published) -> None:
    assert SAID.keys() == CHANGED.keys()
    for name, said in SAID.items():
        row = published.worse[name]
        assert row.verdict != STARTS, name
        assert said in row.verdict, row.verdict
    assert published.worse[VARIABLE].verdict == f"{REFUSED}{VARIABLE}=1"


def test_examples_of_verl_start_whose_model_is_covered_and_that_ask_for_at_most_two_gpus(
    published: Published,
) -> None:
    small = [row for row in published.trainers if row.trainer == "verl" and row.alone == STARTS and int(row.gpus) <= 2]
    starting = [row for row in small if row.verdict == STARTS]
    others = [
        row
        for row in small
        if row.verdict != STARTS and not (row.reasons and all(map(OF_ITSELF.fullmatch, row.reasons)))
    ]
    assert not others, "\n".join(f"{row.script}: {row.verdict}" for row in others)
    assert len(starting) >= 28
    assert {row.architecture for row in starting} >= {"Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"}
    assert any(row.engine_arguments.get("enable_sleep_mode") and row.gpus == "2" for row in starting)
