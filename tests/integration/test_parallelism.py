"""Which kinds of parallelism start, and which are refused by name."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_batch_invariant.envs import ATTENTION, TP_TREE, UNTRIED
from vllm_batch_invariant.integration.coverage import CORES, REFUSED
from vllm_batch_invariant.integration.reviews import patch_points

PARALLEL = {
    "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1, "data_parallel_size_local": 1,
    "data_parallel_rank_local": None, "data_parallel_backend": "mp", "data_parallel_external_lb": False,
    "data_parallel_hybrid_lb": False, "nnodes": 1, "distributed_executor_backend": "mp", "world_size": 1,
    "enable_expert_parallel": False,
}  # fmt: skip
TWO_GPUS = {"tensor_parallel_size": 2, "device": "cuda"}
FOUR_GPUS = TWO_GPUS | {"tensor_parallel_size": 4}
TWO_ENGINES = {"data_parallel_size": 2, "data_parallel_size_local": 2}
KINDS = (
    "Tensor",
    "Pipeline",
    "Speculative decoding beside pipe",
    "Data",
    "Embeddings as prompts beside pipe",
    "Sequence",
    "Several",
    "Four GPUs",
    "The Ray executor",
    "vLLM's server",
)


def refused(
    device: str = "cpu",
    is_moe: bool = False,
    drafts: bool = False,
    sp: bool = False,
    second_runner: bool = True,
    sleeps: bool = False,
    embeds: bool = False,
    quantization: str | None = None,
    **sizes: Any,
) -> list[str]:
    config = SimpleNamespace(
        use_v2_model_runner=second_runner,
        device_config=SimpleNamespace(device_type=device),
        parallel_config=SimpleNamespace(**PARALLEL | sizes),
        model_config=SimpleNamespace(
            is_moe=is_moe, enable_sleep_mode=sleeps, enable_prompt_embeds=embeds, quantization=quantization
        ),
        speculative_config=object() if drafts else None,
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(enable_sp=sp)),
    )
    found = [feature.found(config) for feature in REFUSED if feature.name.startswith(KINDS)]
    return [what for what in found if what]


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORES, "0|1")


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({}, []),
        ({"pipeline_parallel_size": 2}, []),
        ({"pipeline_parallel_size": 4, "is_moe": True}, []),
        ({"pipeline_parallel_size": 3}, ["pipeline parallelism 3"]),
        ({"pipeline_parallel_size": 2, "device": "cuda"}, []),
        ({"pipeline_parallel_size": 4, "device": "cuda"}, ["pipeline parallelism 4"]),
        ({"tensor_parallel_size": 2, "device": "cuda"}, []),
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "device": "cuda"},
            ["several GPUs with stages of several workers"],
        ),
        (TWO_GPUS | {"second_runner": False}, ["several GPUs with the first model runner"]),
        (FOUR_GPUS, []),
        (FOUR_GPUS | {"is_moe": True}, ["tensor parallelism 4 on GPUs with a mixture of experts"]),
        (FOUR_GPUS | {"quantization": "fp8"}, ["tensor parallelism 4 on GPUs with quantised weights"]),
        (FOUR_GPUS | {"tensor_parallel_size": 8}, ["tensor parallelism 8"]),
        (TWO_GPUS | {"drafts": True}, ["several GPUs with speculative decoding"]),
        (TWO_GPUS | {"sleeps": True}, []),
        ({"pipeline_parallel_size": 2, "device": "cuda", "sleeps": True}, []),
        (TWO_GPUS | {"is_moe": True}, []),
        (
            {"pipeline_parallel_size": 2, "device": "cuda", "is_moe": True},
            ["several GPUs with stages of a mixture of experts"],
        ),
        (TWO_GPUS | {"distributed_executor_backend": "ray"}, []),
        (TWO_GPUS | {"distributed_executor_backend": "external_launcher", "sleeps": True}, []),
        (TWO_GPUS | {"version": "0.32.0"}, ["several GPUs with vLLM 0.32.0"]),
        ({"pipeline_parallel_size": 2, "drafts": True}, ["speculative decoding beside pipeline parallelism 2"]),
        (
            {"pipeline_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
            ["pipeline parallelism 2 by external_launcher"],
        ),
        (
            TWO_ENGINES | {"distributed_executor_backend": "external_launcher"},
            ["data parallelism by the executor external_launcher"],
        ),
        (TWO_ENGINES, []),
        (TWO_ENGINES | {"device": "cuda"}, []),
        (TWO_ENGINES | TWO_GPUS, []),
        (TWO_ENGINES | {"is_moe": True}, ["data parallelism 2 of a mixture of experts"]),
        (TWO_ENGINES | {"is_moe": True, "device": "cuda"}, []),
        (TWO_ENGINES | {"is_moe": True, "device": "cuda", "drafts": True}, ["several GPUs with speculative decoding"]),
        (
            TWO_ENGINES | {"is_moe": True, "device": "cuda", "version": "0.32.0"},
            ["several GPUs with vLLM 0.32.0"],
        ),
        (
            {"data_parallel_size": 4, "data_parallel_size_local": 4, "is_moe": True, "device": "cuda"},
            ["data parallelism 4 of a mixture of experts"],
        ),
        (
            TWO_ENGINES | {"is_moe": True, "device": "cuda", "enable_expert_parallel": True},
            ["data parallelism 2 of a mixture of experts with expert parallelism"],
        ),
        (
            TWO_ENGINES | TWO_GPUS | {"is_moe": True},
            ["data parallelism 2 of a mixture of experts with tensor parallelism 2"],
        ),
        (TWO_ENGINES | {"data_parallel_backend": "ray"}, ["data parallelism by ray"]),
        (TWO_ENGINES | {"data_parallel_rank_local": 0, "data_parallel_size_local": 1}, []),
        (TWO_ENGINES | {"data_parallel_size": 4}, ["data parallelism on several nodes"]),
        (
            TWO_ENGINES | {"data_parallel_external_lb": True},
            ["data parallelism with an external or hybrid load balancer"],
        ),
        (
            {"data_parallel_size_local": 0},
            ["a server whose engine is started elsewhere (--data-parallel-size-local 0)"],
        ),
        ({"decode_context_parallel_size": 2}, ["decode context parallelism 2"]),
        ({"prefill_context_parallel_size": 2}, ["prefill context parallelism 2"]),
        ({"sp": True}, ["sequence parallelism"]),
        ({"nnodes": 2, "tensor_parallel_size": 2, "version": "0.32.0"}, []),
        ({"nnodes": 2, "tensor_parallel_size": 2}, ["2 nodes"]),
        ({"nnodes": 3}, ["3 nodes"]),
        ({"nnodes": 2, "device": "cuda"}, ["2 nodes"]),
        ({"nnodes": 2, "distributed_executor_backend": "uni"}, ["2 nodes"]),
        (TWO_ENGINES | {"nnodes": 2}, ["2 nodes"]),
        ({"distributed_executor_backend": "ray"}, ["the Ray executor"]),
        ({"distributed_executor_backend": "ray", "device": "cuda"}, []),
    ],
)
def test_what_is_refused_is_named(asked: dict[str, Any], named: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"version": "0.33.0"} | asked
    monkeypatch.setattr(patch_points, "installed_version", lambda: asked["version"])
    assert refused(**{name: value for name, value in asked.items() if name != "version"}) == named


@pytest.mark.parametrize(
    ("cores", "workers", "is_refused"),
    [
        ("0|1", 1, False),
        ("0-2,8|3-6", 1, False),
        ("0-1|2|3-4|5", 2, False),
        ("nobind", 1, False),
        ("0-1|2", 1, True),
        ("0|1|2|3-4", 2, True),
        ("auto", 1, True),
        ("", 1, True),
    ],
)
def test_engines_need_as_many_cores_as_each_other_beside_flex_attention(
    monkeypatch: pytest.MonkeyPatch, cores: str, workers: int, is_refused: bool
) -> None:
    monkeypatch.setenv(CORES, cores)
    assert refused(**TWO_ENGINES, world_size=workers) == []
    monkeypatch.setenv(ATTENTION.name, "flex")
    named = [f"data parallelism 2 with {CORES}={cores or 'auto'}"] if is_refused else []
    assert refused(**TWO_ENGINES, world_size=workers) == named
    assert refused(world_size=workers) == []


def test_a_tree_on_one_gpu_is_refused_with_what_it_has_not_been_run_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    monkeypatch.setenv(TP_TREE.name, "2")
    assert refused(device="cuda") == []
    assert refused(device="cuda", second_runner=False) == [f"{TP_TREE.name}=2 with the first model runner"]
    assert refused(**TWO_GPUS) == []
    assert refused(pipeline_parallel_size=2) == []
    assert refused(device="cuda", pipeline_parallel_size=2) == ["several GPUs with a tree in stages"]


def test_a_tree_of_four_gpus_is_refused_but_where_untried_settings_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    monkeypatch.setenv(TP_TREE.name, "4")
    assert refused(**FOUR_GPUS) == [f"tensor parallelism 4 on GPUs with {TP_TREE.name}=4"]
    assert refused(**FOUR_GPUS | {"device": "cpu"}) == []
    monkeypatch.setenv(UNTRIED.name, "1")
    assert refused(**FOUR_GPUS) == refused(**FOUR_GPUS | {"is_moe": True}) == []


@pytest.mark.parametrize("of_model", [{}, {"is_moe": True}, {"is_moe": True, "enable_expert_parallel": True}], ids=str)
@pytest.mark.parametrize("gpus", [TWO_GPUS, FOUR_GPUS], ids=str)
def test_several_gpus_draft_only_where_untried_settings_start(
    monkeypatch: pytest.MonkeyPatch, gpus: dict[str, Any], of_model: dict[str, Any]
) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    assert "several GPUs with speculative decoding" in refused(**gpus, **of_model, drafts=True)
    monkeypatch.setenv(UNTRIED.name, "1")
    for second_runner in (False, True):
        assert refused(**gpus, **of_model, drafts=True, second_runner=second_runner) == []


def test_embeddings_as_prompts_are_refused_in_stages_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    two_stages = {"pipeline_parallel_size": 2, "embeds": True}
    assert refused(**two_stages) == refused(device="cuda", embeds=True) == []
    assert refused(device="cuda", **two_stages) == ["embeddings as prompts beside pipeline parallelism 2"]
    monkeypatch.setenv(UNTRIED.name, "1")
    assert refused(device="cuda", **two_stages) == []


def test_what_no_gpu_has_run_starts_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    monkeypatch.setenv(UNTRIED.name, "1")
    assert refused(tensor_parallel_size=4, device="cuda") == []
    assert refused(tensor_parallel_size=3, device="cuda") == ["tensor parallelism 3"]
