"""What is not covered on an NPU stops vLLM's start-up check in one line."""

from types import SimpleNamespace

import pytest

from tests.integration.test_devices import config as graph_config
from vllm_batch_invariant import envs
from vllm_batch_invariant.ascend.integration import library as ascend_library
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration import coverage, devices
from vllm_batch_invariant.ops.dispatch import module_for


def config(device: str = "npu", **scheduling: bool) -> SimpleNamespace:
    """A plain model's configuration with the settings that the mode asks for on an NPU."""
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(
            dtype="torch.bfloat16",
            quantization=None,
            is_moe=False,
            is_multimodal_model=False,
            enable_prompt_embeds=False,
            is_attention_free=False,
            is_hybrid=False,
            has_inner_state=False,
            use_mla=False,
            is_encoder_decoder=False,
            runner_type="generate",
            attn_type="decoder",
            score_type="bi-encoder",
            get_head_size=lambda: 128,
        ),
        attention_config=SimpleNamespace(backend=None),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace()),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            distributed_executor_backend="mp",
            world_size=1,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", enable_prefix_caching=scheduling.get("enable_prefix_caching", False)
        ),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=scheduling.get("enable_chunked_prefill", False)),
        lora_config=None,
        speculative_config=None,
        kv_transfer_config=None,
    )


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend_library, "find_spec", lambda name: name)


def test_a_plain_model_with_a_library_for_attention_is_accepted(library: None) -> None:
    coverage.check(config())


def test_without_a_library_for_attention_one_line_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend_library, "find_spec", lambda name: None)
    with pytest.raises(NotCovered) as refused:
        coverage.check(config())
    assert "batch_invariant_ops" in str(refused.value)
    assert "flash_attn_npu_v3" in str(refused.value)
    assert "\n" not in str(refused.value)
    coverage.check(config("cuda"))


@pytest.mark.parametrize(
    ("setting", "option"),
    [
        ("enable_chunked_prefill", "--no-enable-chunked-prefill"),
        ("enable_prefix_caching", "--no-enable-prefix-caching"),
    ],
)
def test_schedules_that_are_not_proven_there_are_refused_there_only(library: None, setting: str, option: str) -> None:
    with pytest.raises(NotCovered, match=f"on an NPU: .*; pass {option}"):
        coverage.check(config(**{setting: True}))
    coverage.check(config("cpu", **{setting: True}))


def test_the_table_says_that_no_npu_has_run_it() -> None:
    assert "| Ascend NPU | compiled and simulated, never run on hardware |" in coverage.markdown()


@pytest.mark.parametrize(
    ("changes", "variables", "found"),
    [
        ({"parallel_config.tensor_parallel_size": 4}, {envs.UNTRIED.name: "1"}, "tensor parallelism 4"),
        ({"parallel_config.pipeline_parallel_size": 2}, {}, "pipeline parallelism 2"),
        ({"parallel_config.data_parallel_size": 2}, {}, "data parallelism 2"),
        ({}, {envs.TP_TREE.name: "2"}, f"{envs.TP_TREE.name}=2"),
        ({}, {envs.ARITHMETIC.name: "exact"}, f"{envs.ARITHMETIC.name}=exact"),
        ({}, {envs.ATTENTION.name: "triton"}, f"{envs.ATTENTION.name}=triton"),
        ({"speculative_config": SimpleNamespace(method="ngram")}, {}, "speculative decoding"),
        ({"reasoning_config": object()}, {}, "a reasoning configuration"),
        ({"model_config.is_moe": True}, {}, "mixture of experts"),
        ({"model_config.return_sampling_mask": True}, {}, "--return-sampling-mask on an NPU"),
        ({"model_config.runner_type": "pooling"}, {}, "the pooling runner on an NPU"),
    ],
)
def test_what_has_not_been_run_there_is_refused_by_name(
    library: None, changes: dict, variables: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config()
    for name, value in changes.items():
        part, _, field = name.rpartition(".")
        setattr(getattr(made, part) if part else made, field, value)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NotCovered) as refused:
        coverage.check(made)
    assert f"does not cover {found}: " in str(refused.value)


def test_a_multimodal_model_is_refused_as_text_too() -> None:
    [row] = [feature for feature in coverage.REFUSED if feature.name == "Ascend: multimodal models, also as text"]
    made = config()
    assert row.found(made) is None
    made.model_config.is_multimodal_model = True
    assert row.found(made) == "multimodal models on an NPU"
    made.device_config.device_type = "cpu"
    assert row.found(made) is None


@pytest.mark.parametrize("chosen", ["auto", "flex"])
def test_attention_that_is_no_other_device_s_passes_the_table(
    library: None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(envs.ATTENTION.name, chosen)
    coverage.check(config())


def test_heads_may_have_other_sizes_than_those_of_our_kernels() -> None:
    small = {"head_dim": 32, "num_attention_heads": 4}
    coverage.check_folder("npu", small)
    with pytest.raises(NotCovered, match="attention heads of size 32"):
        coverage.check_folder("cuda", small)


def test_an_operation_without_kernels_there_is_refused_by_name() -> None:
    with pytest.raises(NotCovered, match="ranking on device 'npu': this version implements it for cpu, cuda only"):
        module_for("ranking", "npu")


def test_nothing_is_promised_in_either_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.get("npu").guarantees == ()
    monkeypatch.setenv(envs.ARITHMETIC.name, "exact")
    assert devices.get("npu").guarantees == ()
    assert devices.get("npu").is_exact


def test_the_record_has_both_parts_and_tells_of_its_sources() -> None:
    from vllm_batch_invariant.ascend import DEVICE, aten

    assert devices.get("npu").ops is DEVICE
    assert aten.DEVICE.operators
    [(name, digest)] = devices.get("npu").versions().items()
    assert name == "vllm-batch-invariant ascend"
    assert len(digest) == 12


def test_steps_are_no_graphs() -> None:
    made = graph_config("npu", "FULL", False)
    devices.of_config(made).update_config(made)
    assert made.compilation_config.cudagraph_mode.name == made.compilation_config.mode.name == "NONE"
    assert made.attention_config.backend.name == "CUSTOM"
