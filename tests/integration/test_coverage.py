"""Which multimodal models the start-up check lets pass, by what vLLM's configuration says about them."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_batch_invariant.envs import ARITHMETIC, ATTENTION, UNTRIED
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration import coverage, exact, patch_points

ROWS = {feature.name: feature for feature in coverage.REFUSED}


def found(**changes: Any) -> list[str]:
    """What is found in a configuration of Qwen3-VL as text, with changes to its model."""
    limits = changes.pop("limits", {})
    multimodal = SimpleNamespace(enable_mm_embeds=False, get_limit_per_prompt=lambda kind: limits.get(kind, 0))
    model = {
        "is_multimodal_model": True,
        "architecture": "Qwen3VLForConditionalGeneration",
        "multimodal_config": multimodal,
        "enable_prompt_embeds": False,
        "is_mm_prefix_lm": False,
    }
    config = SimpleNamespace(
        model_config=SimpleNamespace(**model | changes), device_config=SimpleNamespace(device_type="cpu")
    )
    names = [name for name in ROWS if "ultimodal" in name or "directions" in name or name.startswith("Images")]
    assert len(names) == 5
    return [what for name in names if (what := ROWS[name].found(config))]


def test_a_known_model_as_text_passes() -> None:
    assert found() == []
    assert found(supports_multimodal_inputs=False) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"limits": {"video": 999}}, "video inputs"),
        ({"supports_multimodal_inputs": True}, "multimodal inputs"),  # of a kind that a later vLLM adds
        ({"architecture": "LlavaForConditionalGeneration"}, "the model LlavaForConditionalGeneration"),
        ({"is_mm_prefix_lm": True}, "attention of an image's tokens in both directions"),
        ({"enable_prompt_embeds": True}, "embeddings as prompts of a multimodal model"),
    ],
)
def test_what_is_not_text_of_a_known_model_is_found(changes: dict[str, Any], said: str) -> None:
    assert found(**changes) == [said]


def test_a_text_model_is_not_asked_for_what_only_multimodal_ones_have() -> None:
    assert found(is_multimodal_model=False, enable_prompt_embeds=True, multimodal_config=None) == []


@pytest.mark.parametrize(
    ("device", "chosen", "is_refused"),
    [
        *(("cpu", "triton", True), ("cuda", "numba", True), ("npu", "triton", True)),
        *((device, chosen, False) for device in ("cpu", "cuda", "npu") for chosen in ("auto", "flex")),
        *(("cpu", "numba", False), ("cuda", "triton", False)),
    ],
)
def test_attention_of_another_device_is_refused_before_an_engine_starts(
    monkeypatch: pytest.MonkeyPatch, device: str, chosen: str, is_refused: bool
) -> None:
    monkeypatch.setenv(ATTENTION.name, chosen)
    config = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
    found = ROWS[f"`{ATTENTION.name}` of another device"].found(config)
    assert found == (f"{ATTENTION.name}={chosen}" if is_refused else None)


def refusals_of_exact_arithmetic(second_runner: bool = True, speculation: object = None) -> list[str]:
    """On a GPU."""
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cuda"),
        use_v2_model_runner=second_runner,
        speculative_config=speculation,
    )
    rows = [feature for name, feature in ROWS.items() if name.startswith("Exact arithmetic on a GPU with vLLM")]
    assert len(rows) == 1
    return [what for feature in rows if (what := feature.found(config))]


def test_exact_arithmetic_on_a_gpu_is_refused_but_in_what_was_run_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    assert refusals_of_exact_arithmetic(second_runner=False, speculation=object()) == []
    monkeypatch.setenv(ARITHMETIC.name, "exact")
    assert refusals_of_exact_arithmetic() == []
    [said] = refusals_of_exact_arithmetic(second_runner=False)
    assert said == "exact arithmetic by vLLM's first model runner"
    [said] = refusals_of_exact_arithmetic(speculation=object())
    assert said == "speculative decoding in exact arithmetic"


@pytest.mark.parametrize(
    ("architecture", "refused"),
    [
        ("Qwen3ForCausalLM", False),
        ("GraniteForCausalLM", False),
        ("Gemma3ForCausalLM", False),
        ("Phi3ForCausalLM", False),
        ("Qwen3MoeForCausalLM", True),
    ],
)
def test_exact_models_that_no_gpu_has_run_start_on_a_cpu_alone(
    architecture: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ARITHMETIC.name, "exact")
    model = SimpleNamespace(architecture=architecture, hf_text_config=SimpleNamespace(), dtype="bfloat16")

    def found(device: str) -> str | None:
        return coverage._inexact(
            SimpleNamespace(
                model_config=model,
                device_config=SimpleNamespace(device_type=device),
                parallel_config=SimpleNamespace(tensor_parallel_size=1),
            )
        )

    said = f"{architecture} on a GPU in exact arithmetic"
    assert found("cuda") == (said if refused else None)
    assert found("cpu") is None
    monkeypatch.setenv(UNTRIED.name, "1")
    assert found("cuda") == (said if refused else None)


@pytest.mark.parametrize(
    ("device", "arithmetic", "unit", "said"),
    [
        ("cuda", "exact", 16, "--prefix-match-unit 16 in exact arithmetic"),
        *(("cuda", "exact", None, None), ("cuda", "float", 16, None), ("cpu", "exact", 16, None)),
    ],
)
def test_parts_of_pages_are_not_found_where_a_page_is_not_all_of_its_keys(
    device: str, arithmetic: str, unit: int | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ARITHMETIC.name, arithmetic)
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device), cache_config=SimpleNamespace(prefix_match_unit=unit)
    )
    assert ROWS["Exact arithmetic on a GPU with `--prefix-match-unit`"].found(config) == said


def test_a_step_that_copies_pages_is_refused_in_exact_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(copy=None)
    monkeypatch.setattr(patch_points, "COPY_PAGES", SimpleNamespace(put=lambda made: setattr(module, "copy", made)))
    exact.refuse_copies_of_pages()
    module.copy([], 4, [])
    with pytest.raises(NotCovered, match=r"a copy of a page .*exponents.*; pass --no-enable-prefix-caching"):
        module.copy([], 4, kv_cache_block_copies=[(1, 2)])
