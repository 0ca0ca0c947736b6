"""What is not covered on an NPU stops vLLM's start-up check in one line."""

from types import SimpleNamespace

import pytest

from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration import coverage
from vllm_batch_invariant.integration.ascend import library as ascend_library


def config(device: str = "npu", **scheduling: bool) -> SimpleNamespace:
    """A plain model's configuration with the settings that the mode asks for on an NPU."""
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(
            dtype="torch.bfloat16",
            quantization=None,
            is_moe=False,
            is_multimodal_model=False,
            is_attention_free=False,
            is_hybrid=False,
            has_inner_state=False,
            use_mla=False,
            is_encoder_decoder=False,
            runner_type="generate",
            get_head_size=lambda: 128,
        ),
        attention_config=SimpleNamespace(backend=None),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace()),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            distributed_executor_backend="mp",
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
