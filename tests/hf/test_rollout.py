"""An engine whose logprobs are not promised to be the trainer's is refused by the first thing that differs."""

from dataclasses import asdict
from typing import Any

import pytest
import torch

from tests.hf.models import DEVICE, model
from tests.hf.test_refusals import refuses
from vllm_batch_invariant.envs import TP_TREE
from vllm_batch_invariant.hf import check_engine, patch, rollout

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="test_parity_cuda.py asks an engine there")


@pytest.fixture(scope="module")
def trainer() -> torch.nn.Module:
    return patch(model())


@pytest.fixture
def declared(trainer: torch.nn.Module) -> dict[str, Any]:
    """What an engine of the same kind says of itself."""
    found = asdict(rollout._environment(trainer, torch.bfloat16))
    found["engine"] |= {"kv_cache_dtype": "auto", "logprobs_mode": "processed_logprobs"}
    return found


def test_an_engine_of_the_same_kind_is_taken_from_a_server_or_from_its_workers(
    trainer: torch.nn.Module, declared: dict[str, Any]
) -> None:
    check_engine(trainer, declared | {"fingerprint": "vllm-x"})
    check_engine(trainer, [declared, declared])


@pytest.mark.parametrize(
    ("section", "name", "value", "said"),
    [
        ("device", "threads", 7, "an engine with threads 7 beside a trainer with threads unset"),
        ("versions", "vllm", "0.1", "an engine with vllm 0.1 beside a trainer with vllm"),
        ("engine", "dtype", "float16", "dtype float16 beside a trainer with dtype bfloat16"),
        ("engine", "hf_overrides", "{}", "hf_overrides {} beside a trainer with hf_overrides unset"),
        ("engine", "tensor_parallel_size", "2", f"tensor_parallel_size 2 .*unset.* start both with {TP_TREE.name}"),
        ("engine", "tensor_parallel_tree", "4", f"tensor_parallel_tree 4 .*unset.* start both with {TP_TREE.name}"),
        ("reductions", "attention", {"split_size": 9}, "an engine with attention "),
    ],
)
def test_what_decides_bits_is_refused_by_name(
    trainer: torch.nn.Module, declared: dict[str, Any], section: str, name: str, value: object, said: str
) -> None:
    declared[section] = declared[section] | {name: value}
    refuses(lambda: check_engine(trainer, declared), said)


def test_processed_logprobs_of_the_first_model_runner_of_a_gpu_are_refused(
    trainer: torch.nn.Module, declared: dict[str, Any]
) -> None:
    first = declared | {"engine": declared["engine"] | {"model_runner": "first"}}
    refuses(lambda: check_engine(trainer, first), "processed_logprobs by vLLM's first model runner")
    first["engine"]["logprobs_mode"] = "raw_logprobs"
    check_engine(trainer, first)
    check_engine(trainer, declared | {"engine": declared["engine"] | {"model_runner": "second"}})


def test_workers_with_unequal_threads_are_refused(trainer: torch.nn.Module, declared: dict[str, Any]) -> None:
    one, other = (declared | {"device": declared["device"] | {"threads": threads}} for threads in (4, 9))
    refuses(lambda: check_engine(trainer, [one, other]), r"threads 4\|9 beside")


def test_an_engine_without_the_mode_or_in_exact_arithmetic_is_refused(
    trainer: torch.nn.Module, declared: dict[str, Any]
) -> None:
    refuses(lambda: check_engine(trainer, {"mode": False}), "VLLM_BATCH_INVARIANT off beside a trainer with it on")
    exact = declared | {"reductions": {"exact arithmetic": {"format": "X16.1"}}}
    refuses(lambda: check_engine(trainer, exact), "an engine with exact arithmetic")


def test_a_trainer_that_computes_in_another_dtype_than_its_weights_says_so(declared: dict[str, Any]) -> None:
    trainer = patch(model(torch.float32))
    refuses(lambda: check_engine(trainer, declared), "dtype bfloat16 beside a trainer with dtype float32")
    check_engine(trainer, declared, torch.bfloat16)
