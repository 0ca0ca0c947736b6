"""Every rollout of the trainers' examples goes through the start-up check, and the table says what comes out."""

import dataclasses
import inspect
import json
import re
import sys

import pytest
import torch

from scripts.trainer_configurations import judged
from scripts.trainers.gate import REFUSED, STARTS
from scripts.trainers.table import Row, read
from vllm_batch_invariant.integration.coverage import RAN
from vllm_batch_invariant.integration.layers import review

pytest.importorskip("vllm")

CHANGED = {
    "quantization": ("fp8", "quantisation fp8"),
    "kv_cache_dtype": ("fp8_e5m2", "a KV cache in fp8_e5m2"),
    "pipeline_parallel_size": (3, "pipeline parallelism 3"),
    "use_fp64_gumbel": (True, "model_config.use_fp64_gumbel=True"),
    "no_such_argument": (1, "no_such_argument"),
}
"""Arguments that no example has -> a value, and what the check or vLLM says to it."""
OF_ITSELF = re.compile(
    r"LoRA adapters (beside (images and )?tensor parallelism 2|with the multimodal model \w+)"
    r"|image and video inputs of \w+ with (tensor parallelism 2|a prefix cache beside states on GPUs)"
    r"|gated delta rules with tensor parallelism 2"
)
"""Why an example of verl's may be refused, though its model is covered and two GPUs are enough: what it serves is more
than the model, or images by both of them.
"""


@pytest.fixture(scope="module")
def found() -> tuple[list[Row], dict[str, Row]]:
    """The rows of the file with what the check says now, and rows that were changed for the worse, by the argument."""
    rows = read()
    good = next(
        row for row in rows if row.script == "examples/on_policy_distillation_trainer/run_qwen3_0.6b_opd_veomni.sh"
    )
    worse = [
        dataclasses.replace(good, arguments=json.dumps(good.engine_arguments | {name: value}))
        for name, (value, _) in CHANGED.items()
    ]
    first = dataclasses.replace(good, variables=json.dumps({"VLLM_CPU_SGL_KERNEL": "1"}))
    after = judged([*rows, *worse, first])
    return after[: len(rows)], dict(zip([*CHANGED, "VLLM_CPU_SGL_KERNEL"], after[len(rows) :], strict=True))


def test_the_table_says_what_the_check_says(found: tuple[list[Row], dict[str, Row]]) -> None:
    """``python -m scripts.trainer_configurations gate --write`` renews the table."""
    differ = [
        f"{new.trainer} {new.script}: {old.verdict} -> {new.verdict}"
        for old, new in zip(read(), found[0], strict=True)
        if (old.verdict, old.alone) != (new.verdict, new.alone)
    ]
    assert not differ, "\n".join(differ)


@pytest.mark.parametrize("architecture", sorted({row.architecture for row in read() if row.alone == STARTS}))
def test_the_layers_of_a_model_that_passes_are_known(architecture: str) -> None:
    """The check of a configuration does not see them; the one when a model is loaded does."""
    registry = pytest.importorskip("vllm.model_executor.models.registry").ModelRegistry
    if architecture in RAN.encoded:
        pytest.importorskip("torchvision", reason="engines of test_images.py know them")
    model = registry.models[architecture].load_model_cls()
    file = sys.modules[model.__module__]
    if ".transformers" in file.__name__:  # that file has the classes of all models that Transformers computes
        assert review.of_model_class(model) is None
        return
    kinds = [kind for kind in vars(file).values() if inspect.isclass(kind) and issubclass(kind, torch.nn.Module)]
    own = [kind for kind in kinds if kind.__module__ == file.__name__ and not review._is_known(kind)]
    own = [kind for kind in own if "Indexer" not in kind.__name__]  # of DeepSeek-V3.2, which is refused
    assert own
    assert {kind.__name__: said for kind in own if (said := review.of_model_class(kind))} == {}


def test_what_is_not_covered_is_refused_in_the_same_way(found: tuple[list[Row], dict[str, Row]]) -> None:
    for name, (_, said) in CHANGED.items():
        row = found[1][name]
        assert row.verdict != STARTS, name
        assert said in row.verdict, row.verdict
    assert found[1]["VLLM_CPU_SGL_KERNEL"].verdict == f"{REFUSED}VLLM_CPU_SGL_KERNEL=1"


def test_examples_of_verl_start_whose_model_is_covered_and_that_ask_for_at_most_two_gpus(
    found: tuple[list[Row], dict[str, Row]],
) -> None:
    small = [row for row in found[0] if row.trainer == "verl" and row.alone == STARTS and int(row.gpus) <= 2]
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
