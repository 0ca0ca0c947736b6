"""Which multimodal models the start-up check lets pass, by what vLLM's configuration says about them."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_batch_invariant.envs import ARITHMETIC, ATTENTION, TP_TREE, UNTRIED
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration import coverage
from vllm_batch_invariant.integration.coverage import RAN
from vllm_batch_invariant.integration.layers import exact
from vllm_batch_invariant.integration.reviews import encoding, patch_points

ROWS = {feature.name: feature for feature in coverage.REFUSED}


@pytest.fixture
def by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of quantised weights that a model has."""
    kinds: list[str] = []
    monkeypatch.setattr(coverage.schemes, "kinds", lambda *_: tuple(kinds))
    return kinds


def found(**changes: Any) -> list[str]:
    """What is found in a configuration of Qwen3-VL as text, with changes to its model."""
    limits, settings = changes.pop("limits", {}), changes.pop("settings", {})
    items = {"mm_encoder_tp_mode": "weights", "mm_encoder_attn_backend": None, "mm_encoder_attn_dtype": None}
    items |= {"video_pruning_rate": None, "get_mm_processor_device_type": lambda: None}
    multimodal = SimpleNamespace(
        enable_mm_embeds=False, get_limit_per_prompt=lambda kind: limits.get(kind, 0), **items | settings
    )
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    others = {"speculative_config": None, "cache_config": SimpleNamespace(cache_dtype="auto"), "quant_config": None}
    others |= {"ec_manager_config": None, "scheduler_config": SimpleNamespace(long_prefill_token_threshold=0)}
    others["use_v2_model_runner"] = changes.get("device") == "cuda"
    others = {name: changes.pop(name, default) for name, default in others.items()}
    compilation = {"compile_mm_encoder": False, "cudagraph_mm_encoder": False}
    model = {
        "dtype": "torch.bfloat16",
        "quantization": None,
        "is_multimodal_model": True,
        "architecture": "Qwen3VLForConditionalGeneration",
        "multimodal_config": multimodal,
        "enable_prompt_embeds": False,
        "is_moe": False,
        "is_mm_prefix_lm": False,
    }
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=changes.pop("device", "cpu")),
        parallel_config=SimpleNamespace(**{name: changes.pop(name, size) for name, size in parallel.items()}),
        compilation_config=SimpleNamespace(**{name: changes.pop(name, said) for name, said in compilation.items()}),
        model_config=SimpleNamespace(**model | changes),
        **others,
    )
    names = [
        name
        for name in ROWS
        if any(
            part in name for part in ("ultimodal", "mages and videos", "Images whose", "s, videos and", "of an encoder")
        )
    ]
    assert len(names) == 9
    return [what for name in names if (what := ROWS[name].found(config))]


@pytest.mark.parametrize(
    ("device", "changes", "refused"),
    [
        ("cpu", {"head_dtype": "torch.bfloat16"}, None),
        ("cpu", {"head_dtype": "torch.float32"}, None),
        ("cpu", {"head_dtype": "torch.float32", "dtype": "torch.float16"}, None),
        ("cpu", {"head_dtype": "torch.float16"}, "an output head in float16 of a model in bfloat16"),
        ("cpu", {"head_dtype": "torch.bfloat16", "dtype": "torch.float32"}, "a model in float32"),
        ("cpu", {"head_dtype": "torch.float32", "exact": "exact"}, "an output head in float32"),
        ("cuda", {"head_dtype": "torch.float32"}, "an output head in float32 of a model in bfloat16"),
        ("cuda", {"head_dtype": "torch.float32", "untried": "1"}, None),
        ("cuda", {"head_dtype": "torch.float16", "untried": "1"}, "an output head in float16"),
        ("cuda", {"head_dtype": "torch.float32", "runner_type": "pooling"}, None),
        ("cuda", {}, None),
        ("cpu", {"head_dtype": "torch.float32", "version": "0.31.0"}, "an output head in float32"),
        ("cpu", {"head_dtype": "torch.float32", "tensor": "2", "drafts": "ngram"}, None),
        ("cpu", {"head_dtype": "torch.float32", "tensor": "4"}, "beside 4 workers"),
        ("cpu", {"head_dtype": "torch.float32", "pipeline": "2"}, "beside pipeline parallelism"),
        ("cpu", {"head_dtype": "torch.float32", "data": "2"}, "beside data parallelism"),
        ("cpu", {"head_dtype": "torch.float32", "drafts": "mtp"}, "beside drafts by mtp"),
        ("cpu", {"head_dtype": "torch.bfloat16", "of_text": "float32"}, "beside inputs that are encoded"),
        ("cuda", {"head_dtype": "torch.bfloat16", "of_text": "float32"}, "an output head in float32"),
        ("cuda", {"head_dtype": "torch.bfloat16", "of_text": "model"}, None),
    ],
)
def test_an_output_head_in_fp32_passes_where_it_has_run(
    device: str, changes: dict[str, str], refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, name in ((UNTRIED, "untried"), (ARITHMETIC, "exact")):
        monkeypatch.delenv(variable.name, raising=False)
        if name in changes:
            monkeypatch.setenv(variable.name, changes[name])
    monkeypatch.setattr(patch_points, "installed_version", lambda: changes.get("version", "0.32.0"))
    sizes = {f"{kind}_parallel_size": int(changes.get(kind, 1)) for kind in ("tensor", "pipeline", "data")}
    text = SimpleNamespace(head_dtype=changes.get("of_text"))
    model = {"dtype": "torch.bfloat16", "runner_type": "generate", "is_multimodal_model": "of_text" in changes}
    [row] = [row for row in coverage.REFUSED if row.used is coverage._output_head]
    found = row.found(
        SimpleNamespace(
            model_config=SimpleNamespace(**model | changes, hf_text_config=text),
            device_config=SimpleNamespace(device_type=device),
            parallel_config=SimpleNamespace(**sizes),
            speculative_config=SimpleNamespace(method=changes["drafts"]) if "drafts" in changes else None,
        )
    )
    assert found is None if refused is None else refused in found


def test_a_known_model_as_text_passes() -> None:
    assert found() == []
    assert found(supports_multimodal_inputs=False) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"supports_multimodal_inputs": True}, "multimodal inputs"),  # of a kind that a later vLLM adds
        ({"architecture": "LlavaForConditionalGeneration"}, "the model LlavaForConditionalGeneration"),
        (
            {"is_mm_prefix_lm": True},
            "attention of an image's tokens in both directions of Qwen3VLForConditionalGeneration",
        ),
        ({"enable_prompt_embeds": True}, "embeddings as prompts of a multimodal model"),
    ],
)
def test_what_is_not_text_of_a_known_model_is_found(changes: dict[str, Any], said: str) -> None:
    assert found(**changes) == [said]


IMAGES = {"limits": {"image": 8}}


def test_images_of_a_known_model_pass_where_they_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    assert found(**IMAGES) == []
    limits = {"image": 999, "video": 999}
    assert found(limits=limits, device="cuda") == ["image and video inputs with vLLM 0.32.0"]
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    assert found(**IMAGES) == ["image inputs with vLLM 0.33.0"]
    assert found(**IMAGES, device="cuda") == []
    of_first_runner = found(**IMAGES, device="cuda", use_v2_model_runner=False)
    assert of_first_runner == ["image inputs with the first model runner"]


def test_quantised_experts_of_gemma_4_pass_beside_images_in_kinds_that_have_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    by = ["compressed-tensors with int4 weights"]
    monkeypatch.setattr(coverage.schemes, "kinds", lambda *_: tuple(by))
    gemma = {"architecture": "Gemma4ForConditionalGeneration", "quantization": "compressed-tensors"}
    with_experts = gemma | {"hf_text_config": SimpleNamespace()}
    assert found(**IMAGES, **gemma, is_moe=False) == found(**with_experts, is_moe=True) == []
    said = "image inputs with quantised experts of Gemma4ForConditionalGeneration"
    assert found(**IMAGES, **with_experts, is_moe=True) == [said]
    on_cpus = coverage.RAN.encoded_quantised_experts[gemma["architecture"]]["cpu"]
    for by[:] in ([kind] for kind in on_cpus):
        assert found(**IMAGES, **with_experts, is_moe=True) == []
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    kinds = coverage.RAN.encoded_quantised | {gemma["architecture"]: dict.fromkeys(("cpu", "cuda"), on_cpus)}
    monkeypatch.setattr(coverage, "RAN", replace(coverage.RAN, encoded_quantised=kinds))
    by_rows = [kind for kind in on_cpus if "channel" in kind]
    for by[:] in ([kind] for kind in on_cpus):
        by_a_gpu = found(**IMAGES, **with_experts, is_moe=True, device="cuda")
        assert by_a_gpu == ([] if by == by_rows else [said])
    by[:] = by_rows
    in_fp16 = found(**IMAGES, **with_experts, is_moe=True, device="cuda", dtype="torch.float16")
    assert in_fp16 == ["image inputs with quantised weights in float16 on a GPU"]
    monkeypatch.setenv(UNTRIED.name, "1")
    assert found(**IMAGES, **with_experts, is_moe=True, device="cuda") == []


def test_a_cache_in_fp8_passes_beside_images_and_quantised_weights_that_have_run_with_it(
    by: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    named = "Gemma4ForConditionalGeneration"
    cache = {"cache_config": SimpleNamespace(cache_dtype="fp8", enable_prefix_caching=True), "is_moe": False}
    of_gemma = {**IMAGES, **cache, "architecture": named}
    assert found(**of_gemma) == []
    for by[:] in ([kind] for kind in coverage.RAN.encoded_quantised[named]["cpu"]):
        ran = by[0] in coverage.RAN.fp8_kv_cache_quantised[named]["cpu"]
        said = [] if ran else ["image inputs with quantised weights and a KV cache in fp8"]
        assert found(**of_gemma, quantization="a method") == said
    by[:] = [coverage.RAN.fp8_kv_cache_quantised[named]["cpu"][0]]
    assert found(**IMAGES, **cache) == []
    said = "image inputs with quantised weights and a KV cache in fp8"
    assert found(**IMAGES, **cache, quantization="a method") == [said], "of Qwen3-VL"
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    assert found(**of_gemma, device="cuda") == []
    for architecture in ("Gemma3ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"):
        of_another = of_gemma | {"architecture": architecture}
        assert found(**of_another, device="cuda") == ["image inputs with a KV cache in fp8"]
    monkeypatch.setenv(UNTRIED.name, "1")
    assert found(**of_gemma, device="cuda", quantization="a method") == []


@pytest.mark.parametrize("architecture", coverage.RAN.encoded_quantised)
def test_quantised_text_models_pass_beside_images_on_devices_that_have_run_them(
    architecture: str, by: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SimpleNamespace(model_type=coverage.RAN.text_models.get(architecture, ("gemma4_text",))[0])
    beside = partial(found, architecture=architecture, quantization="a method", hf_text_config=text, **IMAGES)
    ran = coverage.RAN.encoded_quantised[architecture]
    for kind in ran["cpu"]:
        by[:] = [kind]
        monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
        assert beside(is_moe=False) == []
        monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
        said = [] if kind in ran.get("cuda", ()) else [f"image inputs with quantisation {kind}"]
        assert beside(is_moe=False, device="cuda") == said


BLOCKS = "fp8 with float8 weights (one scale a block (128, 128)) and float8 dynamic group 128 activations"
AWQ, INT4 = "awq with int4 weights", "compressed-tensors with int4 weights"
OF_ROWS = "compressed-tensors with float8 weights (one scale a channel) and float8 dynamic token activations"
NVFP4 = tuple(
    f"{by} with float4 weights (one scale a tensor_group 16) and float4 dynamic tensor_group activations"
    for by in ("compressed-tensors", "modelopt")
)
OF_MODELOPT = "modelopt with float8 weights (one scale a tensor) and float8 static tensor activations"


@pytest.mark.parametrize(
    ("name", "text", "kinds", "refused"),
    [
        ("Qwen3VL", "qwen3_vl_text", NVFP4, ["gptq with int4 weights"]),
        ("Qwen2_5_VL", "qwen2_5_vl_text", [AWQ, NVFP4[1]], [INT4, NVFP4[0]]),
        ("Gemma3", "gemma3_text", [AWQ, OF_ROWS], [INT4, NVFP4[0]]),
        ("Mistral3", "mistral", [INT4, OF_ROWS, AWQ], ["gptq with int4 weights", NVFP4[1]]),
        ("Gemma4", "gemma4_text", [BLOCKS, AWQ, OF_MODELOPT, NVFP4[1], OF_ROWS, INT4], [NVFP4[0]]),
        ("InternVL", "qwen2", [OF_ROWS, AWQ], [INT4, NVFP4[0]]),
        ("Llama4", "llama4_text", [], [OF_MODELOPT, NVFP4[1]]),
    ],
)
def test_a_gpu_sees_images_beside_quantised_weights_as_it_has_run_them(
    name: str, text: str, kinds: list[str], refused: list[str], by: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone: not in other dtypes, by the first model runner, with drafts or a cache in FP8, or by two."""
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    architecture = f"{name}ForConditionalGeneration"
    of_model = {**IMAGES, "architecture": architecture, "quantization": "a method"}
    on_a_gpu = partial(found, **of_model, hf_text_config=SimpleNamespace(model_type=text), device="cuda")
    for by[:] in ([kind] for kind in refused):
        assert on_a_gpu() == [f"image inputs with quantisation {by[0]}"]
    for by[:] in ([kind] for kind in kinds):
        assert on_a_gpu() == []
        in_fp16 = [] if (name, by[0]) == ("Qwen2_5_VL", AWQ) else ["quantised weights in float16 on a GPU"]
        assert on_a_gpu(dtype="torch.float16") == [f"image inputs with {said}" for said in in_fp16]
        assert on_a_gpu(dtype="torch.float32") == ["image inputs with quantised weights in float32 on a GPU"]
        assert on_a_gpu(use_v2_model_runner=False) == ["image inputs with the first model runner"]
        assert on_a_gpu(tensor_parallel_size=2) != []
        for method in ("ngram", "mtp"):
            drafted = on_a_gpu(speculative_config=SimpleNamespace(method=method))
            assert (drafted == []) is ((name, *by, method) == ("Gemma4", INT4, "mtp"))
        in_fp8 = on_a_gpu(cache_config=SimpleNamespace(cache_dtype="fp8"))
        assert (in_fp8 == []) is (by[0] in RAN.fp8_kv_cache_quantised.get(architecture, {}).get("cuda", ()))
        monkeypatch.setenv(UNTRIED.name, "1")
        assert on_a_gpu(dtype="torch.float16") == []
        monkeypatch.delenv(UNTRIED.name)


def test_a_gpu_sees_images_beside_quantised_weights_around_text_models_that_it_has_run(
    by: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    static = "fp8 with float8 weights (one scale a tensor) and float8 static tensor activations"
    others = {"Mistral3": "ministral3", "InternVL": "qwen3", "Gemma4": "gemma4_text"}
    for name, text in others.items():
        architecture, shares = f"{name}ForConditionalGeneration", name == "Gemma4"
        of_text = SimpleNamespace(model_type=text, num_kv_shared_layers=20 * shares)
        of_model = {**IMAGES, "architecture": architecture, "quantization": "a method", "hf_text_config": of_text}
        caches = " whose layers share KV caches" if shares else ""
        for by[:] in ([kind] for kind in RAN.encoded_quantised[architecture]["cuda"]):
            monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
            said = f"image inputs with quantisation {by[0]} around one of the type {text!r}{caches} on a GPU"
            has_run = by[0] in {"Mistral3": (static,), "InternVL": (), "Gemma4": (OF_ROWS, INT4)}[name]
            assert found(**of_model, device="cuda") == ([] if has_run else [said])
            monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
            assert found(**of_model) == []


def test_a_drafter_of_gemma_4_drafts_beside_images_and_codes_with_a_cache_of_codes_on_a_gpu(
    by: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And beside INT4 with one in 16 bits."""
    gemma = {**IMAGES, "architecture": "Gemma4ForConditionalGeneration", "quantization": "a method"}
    gemma |= {"hf_text_config": SimpleNamespace(model_type="gemma4_text")}
    drafts = {"speculative_config": SimpleNamespace(method="mtp")}
    in_fp8 = {"cache_config": SimpleNamespace(cache_dtype="fp8")}
    said = "speculative decoding beside quantised weights and a KV cache in 16 bits on a GPU"
    for by[:] in ([kind] for kind in RAN.encoded_quantised_drafted[gemma["architecture"]]["cuda"]["mtp"]):
        if by == [NVFP4[0]]:
            continue  # of experts alone
        monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
        in_16_bits = found(**gemma, **drafts, device="cuda")
        assert in_16_bits == ([] if by == [INT4] else [f"image inputs with {said}"])
        assert (found(**gemma, **drafts, **in_fp8, device="cuda") == []) is (by != [INT4])
        monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
        assert found(**gemma, **drafts) == []
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    assert found(**gemma | {"quantization": None}, **drafts, **in_fp8, device="cuda") == []
    by_n_grams = {"speculative_config": SimpleNamespace(method="ngram")}
    assert found(**gemma | {"quantization": None}, **by_n_grams, **in_fp8, device="cuda") != []


def test_audio_passes_on_a_cpu_where_it_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    heard = {"architecture": "Qwen3ASRForConditionalGeneration", "limits": {"audio": 8}}
    assert found(**heard) == []
    said = f"audio inputs of {heard['architecture']} with"
    assert found(**heard, tensor_parallel_size=2) == [f"{said} tensor parallelism 2"]
    assert found(**heard, pipeline_parallel_size=2) == ["audio inputs with pipeline parallelism 2"]
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    assert found(**heard) == ["audio inputs with vLLM 0.33.0"]


def test_videos_of_a_model_are_found_where_its_images_alone_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    glm = "Glm4vForConditionalGeneration"
    assert found(architecture=glm, limits={"image": 1}) == []
    assert found(architecture=glm, limits={"image": 1, "video": 1}) == []
    by_two = {"architecture": glm, "tensor_parallel_size": 2}
    assert found(**by_two, limits={"image": 1}) == []
    said = [f"image and video inputs of {glm} with tensor parallelism 2"]
    assert found(**by_two, limits={"image": 1, "video": 1}) == said
    with monkeypatch.context() as before:
        before.setattr(encoding, "ran", lambda: replace(RAN, encoded={glm: ("image",)}))
        assert found(architecture=glm, limits={"image": 1}) == []
        assert found(architecture=glm, limits={"image": 1, "video": 1}) == ["video inputs"]
    internvl = {"architecture": "InternVLForConditionalGeneration", "limits": {"image": 1, "video": 1}}
    assert found(**internvl, hf_text_config=SimpleNamespace(model_type="qwen3")) == []
    around_experts = found(**internvl, hf_text_config=SimpleNamespace(model_type="qwen3_moe"))
    assert around_experts == [f"the model {internvl['architecture']} around one of the type 'qwen3_moe'"]
    assert found(architecture="NVLM_D", limits={"image": 1}) == ["the model NVLM_D"]


def test_a_nemotron_that_sees_runs_in_bf16_and_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    omni = {
        "architecture": "NemotronH_Nano_Omni_Reasoning_V3",
        "hf_text_config": SimpleNamespace(model_type="nemotron_h"),
    }
    row = ROWS["Nemotron Nano VL and Omni in fp32 and fp16"]

    def config(dtype: str, name: str) -> SimpleNamespace:
        model = SimpleNamespace(is_multimodal_model=True, architecture=name, dtype=dtype)
        return SimpleNamespace(model_config=model)

    for name in ("NemotronH_Nano_VL_V2", omni["architecture"]):
        assert row.used(config("bfloat16", name)) is None
        assert row.used(config("float32", name)) == f"{name} in float32"
    assert row.used(config("float32", "Gemma3ForConditionalGeneration")) is None
    of_model = omni | {"dtype": "bfloat16"}
    for sound, limit in ((None, 8), (object(), 0), (object(), 8)):
        of_model |= {"hf_config": SimpleNamespace(sound_config=sound), "limits": {"image": 8, "audio": limit}}
        assert [one for one in found(**of_model) if "audio" in one] == []
        row, on_a_gpu = coverage._multimodal_not_run_on_gpus, SimpleNamespace(**of_model)
        on_a_gpu.is_multimodal_model = True
        on_a_gpu.multimodal_config = SimpleNamespace(get_limit_per_prompt=of_model["limits"].get)
        assert row(SimpleNamespace(model_config=on_a_gpu)) is None


def test_audio_is_found_of_the_checkpoints_of_a_model_that_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    gemma = {"architecture": "Gemma4UnifiedForConditionalGeneration", "limits": {"image": 9, "video": 9, "audio": 9}}
    without, within = SimpleNamespace(audio_config=None), SimpleNamespace(audio_config=object())
    assert found(**gemma, hf_config=without) == found(**gemma, hf_config=within) == []
    without_sounds = {gemma["architecture"]: ("image", "video")}
    monkeypatch.setattr(coverage.encoding, "ran", lambda: replace(RAN, encoded=RAN.encoded | without_sounds))
    assert found(**gemma, hf_config=within) == ["audio inputs"]
    assert found(**gemma | {"limits": {"image": 9, "audio": 0}}, hf_config=within) == []
    assert found(**gemma | {"architecture": "Gemma4ForConditionalGeneration"}, hf_config=within) == []


def test_a_class_of_vllms_encodes_for_the_models_that_it_serves() -> None:
    served, other = (type(f"Intern{name}ForConditionalGeneration", (), {}) for name in ("S1", "S1Pro"))
    assert encoding.encoded_by(served) == ("image", "video")
    assert encoding.encoded_by(other) == ()


def test_cross_attention_passes_over_as_many_rows_as_there_are_tokens() -> None:
    [row] = [row for name, row in ROWS.items() if name.startswith("Encoder-decoder")]

    def said(device: str = "cpu", **changes: Any) -> str | None:
        items = SimpleNamespace(get_limit_per_prompt=lambda kind: 1)
        whisper = {"is_encoder_decoder": True, "is_multimodal_model": True, "max_model_len": 448}
        whisper |= {"architecture": "WhisperForConditionalGeneration", "multimodal_config": items}
        whisper |= {"dtype": "torch.float16"}
        model = SimpleNamespace(**whisper | changes, hf_config=SimpleNamespace(max_source_positions=1500))
        return row.used(SimpleNamespace(model_config=model, device_config=SimpleNamespace(device_type=device)))

    assert said() is said("cuda") is None
    assert said(architecture="BartForConditionalGeneration") == "cross attention of BartForConditionalGeneration"
    assert said(max_model_len=1501) == "cross attention with --max-model-len 1501"
    assert said(is_encoder_decoder=False) is None


def test_images_whose_tokens_see_each_other_pass_in_steps_that_have_them_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    gemma = {**IMAGES, "architecture": "Gemma3ForConditionalGeneration", "is_mm_prefix_lm": True}
    assert found(**gemma) == []
    said = "attention of an image's tokens in both directions"
    parts = SimpleNamespace(long_prefill_token_threshold=64)
    assert found(**gemma, scheduler_config=parts) == [f"{said} beside --long-prefill-token-threshold 64"]
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    assert found(**gemma, device="cuda") == []


@pytest.mark.parametrize(
    ("device", "version", "architecture"),
    [("cpu", "0.32.0", "DeepseekOCRForCausalLM"), ("cuda", "0.33.0", "Idefics3ForConditionalGeneration")],
)
def test_two_workers_share_an_encoder_or_its_images_of_some_models(
    monkeypatch: pytest.MonkeyPatch, device: str, version: str, architecture: str
) -> None:
    images, said = {**IMAGES, "device": device}, "image inputs of Qwen3VLForConditionalGeneration with"
    data, two = {"settings": {"mm_encoder_tp_mode": "data"}}, {"tensor_parallel_size": 2}
    monkeypatch.setattr(patch_points, "installed_version", lambda: version)
    monkeypatch.setenv(TP_TREE.name, "2")
    assert found(**images, **data, **two) == []
    other = {**images, "architecture": architecture}
    other["hf_text_config"] = SimpleNamespace(model_type=RAN.text_models.get(architecture, ("",))[0])
    assert found(**other) == [f"image inputs of {other['architecture']} with {TP_TREE.name}=2"]
    monkeypatch.delenv(TP_TREE.name)
    assert found(**images, tensor_parallel_size=8)[-1] == f"{said} tensor parallelism 8"
    assert found(**other, **two) == [f"image inputs of {other['architecture']} with tensor parallelism 2"]
    assert found(**other, **data) == [f"image inputs of {other['architecture']} with --mm-encoder-tp-mode data"]


def test_one_worker_encodes_as_several_of_models_that_have_run_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    data = {"settings": {"mm_encoder_tp_mode": "data"}, "limits": {"image": 1, "video": 1}}
    for name in ("Glm4vMoe", "Glm4v"):
        architecture = f"{name}ForConditionalGeneration"
        of_glm = {**IMAGES, "architecture": architecture, **data}
        said = f"image and video inputs of {architecture} with"
        alone = [] if name == "Glm4vMoe" else [f"{said} --mm-encoder-tp-mode data"]
        assert found(**of_glm) == alone
        assert found(**of_glm, tensor_parallel_size=2) == [f"{said} tensor parallelism 2"]


def test_pruned_videos_pass_of_models_whose_positions_follow_from_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    [row] = [row for row in coverage.REFUSED if row.used is coverage._encoder]

    def said(architecture: str, device: str = "cpu", method: str = "evs", hears: bool = False) -> str | None:
        items = {"video_pruning_rate": 0.5, "video_pruning_method": method, "get_limit_per_prompt": lambda kind: 1}
        items |= dict.fromkeys(("mm_encoder_attn_backend", "mm_encoder_attn_dtype"))
        items |= {"get_mm_processor_device_type": lambda: None}
        model = SimpleNamespace(architecture=architecture, is_multimodal_model=True)
        model.hf_config = SimpleNamespace(sound_config=object() if hears else None)
        model.multimodal_config = SimpleNamespace(**items)
        compilation, on = SimpleNamespace(), SimpleNamespace(device_type=device)
        return row.used(SimpleNamespace(model_config=model, compilation_config=compilation, device_config=on))

    nemotron, kinds = "NemotronH_Nano_VL_V2", "image and video inputs with"
    assert said(nemotron) is None
    assert said(nemotron, "cuda") is None
    assert said(nemotron, method="vidcom2") == f"{kinds} --video-pruning-method vidcom2"
    assert said("Qwen3VLForConditionalGeneration") == f"{kinds} --video-pruning-rate"
    assert said("NemotronH_Nano_Omni_Reasoning_V3") is None
    all_kinds = "image and video and audio inputs with"
    assert said("NemotronH_Nano_Omni_Reasoning_V3", hears=True) == f"{all_kinds} --video-pruning-rate"


def test_workers_that_share_the_images_of_a_llama_4_add_by_no_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    llama = {**IMAGES, "architecture": "Llama4ForConditionalGeneration", "tensor_parallel_size": 2}
    data = {"settings": {"mm_encoder_tp_mode": "data"}}
    assert found(**llama, **data) == []
    monkeypatch.setenv(TP_TREE.name, "2")
    assert found(**llama) == []
    said = f"--mm-encoder-tp-mode data and {TP_TREE.name}=2"
    assert found(**llama, **data) == [f"image inputs of {llama['architecture']} with {said}"]


def test_two_workers_share_no_quantised_text_models_and_no_sounds_but_what_has_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    gemma, qwen = "Gemma3ForConditionalGeneration", "Qwen3VLForConditionalGeneration"
    ran = replace(RAN, encoded_workers={"cpu": dict.fromkeys((gemma, qwen), (2,))})
    monkeypatch.setattr(coverage, "RAN", ran)
    [row] = [row for row in coverage.REFUSED if row.used is coverage._encoded_by_several]

    def said(
        architecture: str, workers: int, quantisation: str | None = None, audio: int = 0, keys: str = "auto"
    ) -> str | None:
        limits = {"image": 1, "audio": audio}
        items = SimpleNamespace(get_limit_per_prompt=lambda kind: limits.get(kind, 0), mm_encoder_tp_mode="weights")
        model = SimpleNamespace(architecture=architecture, quantization=quantisation, multimodal_config=items)
        model.is_multimodal_model, model.hf_config = True, SimpleNamespace(audio_config=object())
        parallel = SimpleNamespace(tensor_parallel_size=workers)
        return row.used(
            SimpleNamespace(
                model_config=model,
                parallel_config=parallel,
                device_config=SimpleNamespace(device_type="cpu"),
                cache_config=SimpleNamespace(cache_dtype=keys),
            )
        )

    assert said(qwen, 1, keys="fp8") is None
    assert said(qwen, 2, keys="fp8") == f"image inputs of {qwen} with a KV cache in fp8 by several workers"
    assert [said(qwen, 2, "fp8"), said(gemma, 1, "fp8"), said(gemma, 2)] == [None] * 3
    assert said(gemma, 2, "fp8") == f"image inputs of {gemma} with quantised weights by several workers"
    hears = "Gemma4ForConditionalGeneration"
    monkeypatch.setattr(coverage, "RAN", replace(ran, encoded_workers={"cpu": {hears: (2,)}}))
    assert [said(hears, 2), said(hears, 1, audio=1)] == [None, None]
    assert said(hears, 2, audio=1) == f"image and audio inputs of {hears} with tensor parallelism 2"


def test_four_workers_share_images_of_models_that_four_have_run_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And on GPUs, each layer of an encoder, and by a tree, where untried ones start."""
    cache = SimpleNamespace(cache_dtype="auto", enable_prefix_caching=False)
    four = {**IMAGES, "tensor_parallel_size": 4, "cache_config": cache}
    data = {"settings": {"mm_encoder_tp_mode": "data"}}
    for architecture in RAN.encoded_workers["cpu"]:
        types = RAN.text_models.get(architecture, ("",))
        text = SimpleNamespace(model_type=types[0])
        of_four = partial(found, **four, architecture=architecture, hf_text_config=text)
        said = f"image inputs of {architecture} with tensor parallelism 4"
        monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
        assert said in of_four()
        assert (said in of_four(**data)) is (architecture not in RAN.encoded_data_workers["cpu"])
        with monkeypatch.context() as by_tree:
            by_tree.setenv(TP_TREE.name, "4")
            assert said in of_four(**data)
        monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
        assert said in of_four(device="cuda", **data)
        with monkeypatch.context() as untried:
            untried.setenv(UNTRIED.name, "1")
            assert (said in of_four(device="cuda")) is (architecture not in RAN.encoded_workers["untried"])


@pytest.mark.parametrize("architecture", RAN.encoded_quantised_workers)
def test_workers_share_images_beside_text_models_in_kinds_that_as_many_have_served(
    by: list[str], monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """By four, and on GPUs, where untried ones start."""
    data = {"settings": {"mm_encoder_tp_mode": "data"}}
    cache = SimpleNamespace(cache_dtype="auto", enable_prefix_caching=False)
    of_model = partial(found, **IMAGES, architecture=architecture, quantization="a method", cache_config=cache, **data)
    said = f"image inputs of {architecture} with quantised weights by several workers"
    ran, untried = (RAN.encoded_quantised_workers[architecture].get(on, {}) for on in ("cpu", "untried"))
    for by[:] in ([kind] for kind in RAN.encoded_quantised[architecture]["cpu"]):
        monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
        assert (said in of_model(tensor_parallel_size=2)) is (by[0] not in ran["2"])
        assert any(architecture in one for one in of_model(tensor_parallel_size=4)), "which have not served them"
        monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
        assert any(architecture in one for one in of_model(tensor_parallel_size=2, device="cuda"))
        with monkeypatch.context() as patch:
            patch.setenv(UNTRIED.name, "1")
            for workers, kinds in (("2", ran["2"]), ("4", untried.get("4", ()))):
                by_gpus = of_model(tensor_parallel_size=int(workers), device="cuda")
                assert any(architecture in one for one in by_gpus) is (by[0] not in kinds)


def test_workers_share_images_and_a_cache_in_fp8_beside_text_models_in_kinds_that_have_run_so(
    by: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On GPUs where untried ones start."""
    name = "Qwen3_5MoeForConditionalGeneration"
    cache = SimpleNamespace(cache_dtype="fp8", enable_prefix_caching=True)
    of_model = partial(found, **IMAGES, architecture=name, cache_config=cache, quantization="a method")
    said = f"image inputs of {name} with a KV cache in fp8 by several workers"
    ran = RAN.encoded_quantised_beside_fp8_caches[name]
    for device, version, untried in (("cpu", "0.32.0", "0"), ("cuda", "0.33.0", "0"), ("cuda", "0.33.0", "1")):
        monkeypatch.setattr(patch_points, "installed_version", lambda version=version: version)
        monkeypatch.setenv(UNTRIED.name, untried)
        for workers in (2, 4):
            for by[:] in ([kind] for kind in RAN.encoded_quantised[name]["cpu"]):
                on = ("cpu", "untried") if untried == "1" else (device,)
                kinds = {kind for one in on for kind in ran.get(one, {}).get(str(workers), ())}
                by_several = of_model(device=device, tensor_parallel_size=workers)
                assert any(name in one for one in by_several) is (by[0] not in kinds)
    by[:] = [BLOCKS]
    assert said in of_model(device="cuda", tensor_parallel_size=2)


@pytest.mark.parametrize("architecture", sorted({*RAN.encoded_workers["cpu"]} - {*RAN.encoded_workers["cuda"]}))
def test_two_gpus_share_encoders_that_cpus_have_shared_where_untried_ones_start(
    monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    types = RAN.text_models.get(architecture, ("",))
    images = {**IMAGES, "device": "cuda", "architecture": architecture, "tensor_parallel_size": 2}
    images["hf_text_config"] = SimpleNamespace(model_type=types[0])
    assert found(**images) == [f"image inputs of {architecture} with tensor parallelism 2"]
    monkeypatch.setenv(UNTRIED.name, "1")
    assert found(**images) == []


def test_two_gpus_share_encoders_by_what_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of a step, a tree, and a prefix cache beside states."""
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    qwen, qwen3, gemma = (f"{name}ForConditionalGeneration" for name in ("Qwen2_5_VL", "Qwen3_5", "Gemma3"))
    by_two = {**IMAGES, "device": "cuda", "tensor_parallel_size": 2}
    data = {"settings": {"mm_encoder_tp_mode": "data"}}
    assert found(**by_two, **data) == found(**by_two | {"architecture": qwen}, **data) == []
    [refused] = found(**by_two | {"architecture": gemma}, **data)
    assert refused.endswith("--mm-encoder-tp-mode data on GPUs")
    cached = SimpleNamespace(cache_dtype="auto", enable_prefix_caching=True)
    [refused] = found(**by_two | {"architecture": qwen3}, cache_config=cached)
    assert refused.endswith("a prefix cache beside states on GPUs")
    monkeypatch.setenv(TP_TREE.name, "2")
    assert found(**by_two) == []
    [refused] = found(**by_two | {"architecture": qwen})
    assert refused.endswith(f"{TP_TREE.name}=2 on GPUs")
    monkeypatch.setenv(UNTRIED.name, "1")
    assert found(**by_two | {"architecture": gemma}, **data) == []


def test_two_gpus_share_images_of_a_text_model_in_blocks_alone(by: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's workers have also shared it in FP8 by rows and in INT4."""
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    name = "Qwen3VLForConditionalGeneration"
    of_one = {**IMAGES, "architecture": name, "device": "cuda", "quantization": "fp8", "is_moe": False}
    for by[:] in ([kind] for kind in RAN.encoded_quantised[name]["cuda"]):
        assert found(**of_one) == []
        said = "with quantised weights by several workers"
        assert [one.endswith(said) for one in found(**of_one, tensor_parallel_size=2)] == [True] * (by != [BLOCKS])
    by[:] = [BLOCKS]
    data = of_one | {"settings": {"mm_encoder_tp_mode": "data"}}
    assert found(**data) == [], "one worker shares nothing"
    [refused] = found(**data, tensor_parallel_size=2)
    assert refused.endswith("--mm-encoder-tp-mode data and quantised weights on GPUs")


def test_a_model_that_has_run_with_images_on_a_cpu_alone_is_found_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus, as_text = (
        ROWS["Images of Kimi-VL and Muse Glimmer on a GPU"],
        ROWS[
            "Mistral 3, Pixtral, DeepSeek-OCR, PaddleOCR-VL, GLM-OCR, LFM2-VL, Nemotron Nano VL and Omni, Intern-S2 "
            "Preview, Qwen3-VL with experts, InternVL, GLM-4.1V, GLM-4.5V, GLM-ASR, Idefics 3, SmolVLM, Qwen2-Audio, "
            "Qwen3-ASR, Voxtral and Whisper as text"
        ],
    )
    assert on_gpus.devices == ("cuda",)

    def config(architecture: str, most: int, audio: int | None = None) -> SimpleNamespace:
        of_audio = most if audio is None else audio
        items = SimpleNamespace(get_limit_per_prompt=lambda kind: of_audio if kind == "audio" else most)
        model = SimpleNamespace(is_multimodal_model=True, architecture=architecture, multimodal_config=items)
        return SimpleNamespace(model_config=model)

    mistral, ocr = "Mistral3ForConditionalGeneration", "DeepseekOCRForCausalLM"
    assert on_gpus.used(config(mistral, 1)) is on_gpus.used(config(ocr, 1)) is None
    gemma = "Gemma4ForConditionalGeneration"
    assert on_gpus.used(config(gemma, 1)) is None
    ran = replace(coverage.RAN, encoded_on_cpus_alone={gemma: ("audio",)})
    with monkeypatch.context() as before:
        before.setattr(coverage, "RAN", ran)
        assert [on_gpus.used(config(gemma, most)) for most in (0, 1)] == [None, f"audio inputs of {gemma} on a GPU"]
        assert on_gpus.used(config(gemma, 1, audio=0)) is None
    muse = "MuseGlimmerForConditionalGeneration"
    assert [on_gpus.used(config(muse, most)) for most in (0, 1)] == [None, f"image and video inputs of {muse} on a GPU"]
    assert [as_text.used(config(muse, most)) for most in (0, 1)] == [None, None]
    kimi = "KimiVLForConditionalGeneration"
    assert [on_gpus.used(config(kimi, most)) for most in (0, 1)] == [None, f"image inputs of {kimi} on a GPU"]
    glm_asr = "GlmAsrForConditionalGeneration"
    assert as_text.used(config(glm_asr, 0)) == f"{glm_asr} as text"
    assert as_text.used(config(mistral, 0)) == f"{mistral} as text"
    assert as_text.used(config(mistral, 1)) is None
    assert [row.used(config("Gemma3ForConditionalGeneration", 0)) for row in (on_gpus, as_text)] == [None, None]
    monkeypatch.setenv(UNTRIED.name, "1")
    assert on_gpus.used(config(ocr, 1)) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"settings": {"mm_encoder_attn_backend": object()}}, "--mm-encoder-attn-backend"),
        ({"settings": {"mm_encoder_attn_dtype": "fp8"}}, "--mm-encoder-attn-dtype"),
        ({"settings": {"video_pruning_rate": 0.5}}, "--video-pruning-rate"),
        ({"settings": {"get_mm_processor_device_type": lambda: "cuda"}}, "--mm-processor-device"),
        ({"compile_mm_encoder": True}, "compile_mm_encoder"),
        ({"ec_manager_config": SimpleNamespace(encoder_cache_manager_cls="mine")}, "--ec-manager-config"),
        ({"cudagraph_mm_encoder": True}, "cudagraph_mm_encoder"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism 2"),
        ({"data_parallel_size": 2}, "data parallelism 2"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "speculative decoding with eagle"),
        ({"quantization": "awq"}, "quantisation awq"),
        (
            {"architecture": "Gemma3ForConditionalGeneration", "cache_config": SimpleNamespace(cache_dtype="fp8")},
            "a KV cache in fp8",
        ),
        ({"cache_config": SimpleNamespace(cache_dtype="fp8_per_token_head")}, "a KV cache in fp8_per_token_head"),
    ],
)
def test_what_has_not_run_with_images_is_found(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    assert found(**IMAGES, **changes) == [f"image inputs with {said}"]
    assert found(**changes) == []


@pytest.mark.parametrize("architecture", coverage.RAN.encoded_drafters)
def test_drafts_beside_images_are_those_of_one_worker_that_have_run(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SimpleNamespace(model_type=coverage.RAN.text_models.get(architecture, ("",))[0])
    beside = partial(found, architecture=architecture, hf_text_config=text, **IMAGES)
    for method in ("ngram", "custom_class", "mtp", "eagle3"):
        drafts = {"speculative_config": SimpleNamespace(method=method)}
        said = [f"image inputs with speculative decoding with {method}"]
        ran = coverage.RAN.encoded_drafters[architecture]
        monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
        assert beside(**drafts) == ([] if method in ran["cpu"] else said)
        if method not in ran["cpu"]:
            continue
        by_two = beside(**drafts, tensor_parallel_size=2)
        assert by_two[-1] == "image inputs with speculative decoding by 2 workers"
        in_fp8 = beside(**drafts, cache_config=SimpleNamespace(cache_dtype="fp8"))
        has_run = method in coverage.RAN.encoded_drafters_beside_fp8_caches.get(architecture, {}).get("cpu", ())
        said_of_cache = "image inputs with speculative decoding beside a KV cache in fp8"
        assert in_fp8 == ([] if has_run else [said_of_cache])
        quantised = beside(**drafts, quantization="fp8")
        assert quantised == [f"image inputs with speculative decoding with {method} beside quantised weights"]
        monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
        on_a_gpu = partial(beside, **drafts, device="cuda")
        assert on_a_gpu() == ([] if method in ran.get("cuda", ()) else said)
        monkeypatch.setenv(UNTRIED.name, "1")
        assert on_a_gpu() == []
        monkeypatch.delenv(UNTRIED.name)


def test_a_decoder_of_its_own_serves_text_by_one_worker_unquantised() -> None:
    [row] = [row for name, row in ROWS.items() if name.startswith("Muse Glimmer as text")]

    def as_text(**changes: Any) -> str | None:
        parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
        parallel = {name: changes.pop(name, size) for name, size in parallel.items()}
        cache = SimpleNamespace(cache_dtype=changes.pop("cache_dtype", "auto"))
        items = SimpleNamespace(get_limit_per_prompt=lambda _: changes.get("images", 0))
        model = SimpleNamespace(
            architecture=changes.pop("architecture", "MuseGlimmerForConditionalGeneration"),
            quantization=changes.pop("quantization", None),
            is_multimodal_model=True,
            multimodal_config=items,
        )
        others = {"speculative_config": None, "lora_config": None, "quant_config": None} | changes
        return row.found(
            SimpleNamespace(
                device_config=SimpleNamespace(device_type="cpu"),
                parallel_config=SimpleNamespace(**parallel),
                cache_config=cache,
                model_config=model,
                **others,
            )
        )

    assert as_text() is as_text(quantization="fp8", images=1) is None
    said = "MuseGlimmerForConditionalGeneration as text with"
    assert as_text(tensor_parallel_size=2) == f"{said} tensor parallelism 2"
    assert as_text(quantization="fp8") == f"{said} quantisation fp8"
    assert as_text(cache_dtype="fp8") == f"{said} a KV cache in fp8"
    assert as_text(speculative_config=object()) == f"{said} speculative decoding"
    assert as_text(quantization="fp8", architecture="Qwen3VLForConditionalGeneration") is None


def test_images_in_exact_arithmetic_and_by_flex_attention_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    monkeypatch.setenv(ATTENTION.name, "flex")
    assert found(**IMAGES) == ["image inputs with VLLM_BATCH_INVARIANT_ATTENTION=flex"]
    monkeypatch.delenv(ATTENTION.name)
    monkeypatch.setenv(ARITHMETIC.name, "exact")
    assert found(**IMAGES) == ["image inputs with exact arithmetic"]


def test_a_text_model_is_not_asked_for_what_only_multimodal_ones_have() -> None:
    assert found(is_multimodal_model=False, enable_prompt_embeds=True, multimodal_config=None) == []


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("Other dtypes", {"dtype": "torch.float64"}, "dtype float64"),
        (
            "Mamba, linear attention, hybrids but LFM2, Qwen3.5, Qwen3-Next, Nemotron-H, Granite 4 H, Falcon-H1, Ling",
            {"is_attention_free": True},
            "Mamba or linear attention",
        ),
        (
            "MLA but of DeepSeek-V2 and V3, Moonlight, GLM-4.7-Flash and Ling; sparse attention (DeepSeek-V3.2)",
            {"use_mla": True, "architecture": "DeepseekV32ForCausalLM"},
            "multi-head latent attention of DeepseekV32ForCausalLM",
        ),
        ("Diffusion models", {"diffusion_config": object()}, "diffusion"),
        (
            "Other models, dtypes and rotary embeddings in exact arithmetic",
            {"architecture": "OPTForCausalLM", "hf_text_config": None, "dtype": "bfloat16", "tensor_parallel_size": 1},
            "the model OPTForCausalLM in exact arithmetic",
        ),
    ],
)
def test_a_row_names_what_it_finds(
    name: str, settings: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [device, *_] = ROWS[name].devices or ("cpu",)
    monkeypatch.setenv(ARITHMETIC.name, "exact" if "xact" in name else "float")
    parts = dict.fromkeys(("model_config", "parallel_config"), SimpleNamespace(**settings))
    config = SimpleNamespace(device_config=SimpleNamespace(device_type=device), **parts, **settings)
    assert ROWS[name].found(config) == said


@pytest.mark.parametrize(
    ("device", "chosen", "is_refused"),
    [
        *(("cpu", "triton", True), ("cuda", "numba", True)),
        *((device, chosen, False) for device in ("cpu", "cuda") for chosen in ("auto", "flex")),
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


def output_config(**changes: Any) -> Any:
    """On a GPU, with an option."""
    settings = {"device": "cuda", "experts": True, "mask": False, "second": True, "speculation": None} | changes
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=settings.get("stages", 1)),
        device_config=SimpleNamespace(device_type=settings["device"]),
        aux_output_config=SimpleNamespace(enable_return_routed_experts=settings["experts"]),
        model_config=SimpleNamespace(return_sampling_mask=settings["mask"]),
        use_v2_model_runner=settings["second"],
        speculative_config=settings["speculation"],
    )


@pytest.mark.parametrize(
    ("changes", "version", "said"),
    [
        ({}, "0.33.0", None),
        ({"experts": False}, "0.27.0", None),
        ({"experts": False, "mask": True}, "0.33.1", None),
        ({"mask": True}, "0.33.0", None),
        ({"device": "cpu"}, "0.32.0", "--enable-return-routed-experts on a CPU"),
        ({"stages": 2}, "0.33.0", "--enable-return-routed-experts with pipeline stages"),
        ({"second": False}, "0.33.0", "--enable-return-routed-experts by vLLM's first model runner"),
        ({"speculation": object()}, "0.33.0", "--enable-return-routed-experts beside speculative decoding"),
        ({"experts": False, "mask": True}, "0.32.0", "--return-sampling-mask with vLLM 0.32.0"),
    ],
)
def test_outputs_beside_tokens_are_refused_where_they_have_not_been_compared(
    changes: dict[str, Any], version: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: version)
    [row] = [feature for name, feature in ROWS.items() if name.startswith("Sampling masks")]
    assert row.found(output_config(**changes)) == said
    monkeypatch.setenv(ARITHMETIC.name, "exact")
    if said is None and (changes.get("experts", True) or changes.get("mask")):
        assert row.found(output_config(**changes)).endswith("in exact arithmetic")


def refusals_of_pooling(device: str = "cpu", version: str = "0.32.0", **changes: Any) -> list[str]:
    """Of a decoder-only model that embeds, with changes to it or to how many workers it has."""
    parallel = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "tensor_parallel_size": 1}
    model = {
        "runner_type": "pooling",
        "attn_type": "decoder",
        "architecture": "BertModel",
        "score_type": "bi-encoder",
        "is_moe": False,
        "is_multimodal_model": False,
    }
    chunks = SimpleNamespace(enable_chunked_prefill=changes.get("chunks", False))
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(**model | {name: changes[name] for name in changes if name in model}),
        parallel_config=SimpleNamespace(**parallel | {name: changes[name] for name in changes if name in parallel}),
        scheduler_config=chunks,
        use_v2_model_runner=changes.get("use_v2_model_runner", True),
    )
    rows = [row for name, row in ROWS.items() if "ooling" in name or "runners" in name or "late interaction" in name]
    assert len(rows) == 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UNTRIED.name, "1" if changes.get("untried", True) else "0")
        patch.setattr(patch_points, "installed_version", lambda: version)
        return [what for row in rows if (what := row.found(config))]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"device": "cuda", "version": "0.33.0"}, []),
        ({"tensor_parallel_size": 2}, []),
        ({"runner_type": "generate", "attn_type": "encoder_only", "pipeline_parallel_size": 2}, []),
        ({"runner_type": "render"}, ["the render runner"]),
        ({"version": "0.26.0"}, ["the pooling runner with vLLM 0.26.0"]),
        ({"device": "cuda", "version": "0.32.0"}, ["the pooling runner with vLLM 0.32.0"]),
        ({"attn_type": "encoder_only"}, []),
        (
            {"attn_type": "encoder_only", "architecture": "NomicBertModel"},
            ["attention of the kind encoder_only of NomicBertModel"],
        ),
        ({"attn_type": "encoder_decoder"}, ["attention of the kind encoder_decoder"]),
        ({"attn_type": "encoder_only", "chunks": True}, ["an encoder with prompts in chunks"]),
        ({"attn_type": "encoder_only", "tensor_parallel_size": 2}, ["an encoder with tensor parallelism 2"]),
        (
            {"attn_type": "encoder_only", "device": "cuda", "version": "0.33.0", "use_v2_model_runner": False},
            ["an encoder with vLLM's first model runner"],
        ),
        ({"attn_type": "encoder_only", "device": "cuda", "version": "0.33.0"}, []),
        (
            {
                "attn_type": "encoder_only",
                "device": "cuda",
                "version": "0.33.0",
                "untried": False,
            },
            [],
        ),
        ({"score_type": "late-interaction"}, ["scores of late interaction"]),
        ({"pipeline_parallel_size": 2}, ["a pooling model with pipeline parallelism 2"]),
        ({"data_parallel_size": 2}, ["a pooling model with data parallelism 2"]),
        (
            {"device": "cuda", "version": "0.33.0", "tensor_parallel_size": 2},
            ["a pooling model with several GPUs"],
        ),
        ({"is_multimodal_model": True}, ["a pooling model with a multimodal model as text"]),
    ],
)
def test_which_pooling_models_are_refused(changes: dict[str, Any], said: list[str]) -> None:
    assert refusals_of_pooling(**changes) == said


def refusals_of_adapters(version: str = "0.32.0", device: str = "cpu", **changes: Any) -> list[str]:
    """Of a dense model with LoRA, with changes to any part of its configuration; with ``is_moe`` of Qwen3-MoE."""
    parts = {
        "lora_config": {
            "lora_dtype": "auto",
            "fully_sharded_loras": False,
            "default_mm_loras": None,
            "enable_tower_connector_lora": False,
            "enable_mixed_moe_lora_format": False,
            "enable_moe_shared_loras": False,
            "target_modules": None,
        },
        "model_config": {
            "architecture": "Qwen3MoeForCausalLM",
            "dtype": "torch.bfloat16",
            "head_dtype": "torch.bfloat16",
            "quantization": None,
            "runner_type": "generate",
            **dict.fromkeys(("is_moe", "is_multimodal_model", "is_hybrid", "is_attention_free"), False),
            **dict.fromkeys(("has_inner_state", "enable_prompt_embeds", "enable_sleep_mode"), False),
            "hf_text_config": None,
        },
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "enable_expert_parallel": False,
        },
        "cache_config": {"cache_dtype": "auto"},
    }
    connector, kind = changes.pop("kv_connector", None), changes.pop("kind", "")
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        quant_config=None,
        speculative_config=changes.pop("speculative_config", None),
        kv_transfer_config=connector and SimpleNamespace(kv_connector=connector),
        **{
            name: SimpleNamespace(**{key: changes.pop(key, value) for key, value in part.items()})
            for name, part in parts.items()
        },
    )
    assert not changes
    rows = [row for name, row in ROWS.items() if name.startswith("LoRA adapters")]
    assert len(rows) == 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patch_points, "installed_version", lambda: version)
        patch.setattr(coverage.schemes, "kinds", lambda *_: (kind,) if kind else ())
        return [what for row in rows if (what := row.found(config))]


def test_adapters_pass_where_they_have_run() -> None:
    assert refusals_of_adapters() == refusals_of_adapters(lora_dtype="torch.bfloat16") == []
    ngrams = SimpleNamespace(method="ngram")
    assert refusals_of_adapters(tensor_parallel_size=2) == refusals_of_adapters(speculative_config=ngrams) == []
    for kind in (BLOCKS, "gptq with int4 weights", "compressed-tensors with int8 weights"):
        assert refusals_of_adapters(quantization=kind.split()[0], kind=kind) == []
    assert refusals_of_adapters("0.31.0") == ["LoRA adapters on a CPU with vLLM 0.31.0"]
    assert refusals_of_adapters("0.33.0", "cuda") == []
    assert refusals_of_adapters("0.32.0", "cuda") == ["LoRA adapters on a GPU with vLLM 0.32.0"]
    on_a_gpu = partial(refusals_of_adapters, "0.33.0", "cuda")
    assert on_a_gpu(tensor_parallel_size=2) == on_a_gpu(speculative_config=ngrams) == []
    assert on_a_gpu(quantization="fp8", kind=BLOCKS) == []


SEEING = {"is_multimodal_model": True, "architecture": "Qwen3VLForConditionalGeneration"}
KEEPING = {"is_hybrid": True, "architecture": "Qwen3_5ForCausalLM"}


def test_adapters_beside_states_and_images_pass_where_they_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    without_experts = SimpleNamespace(hybrid_override_pattern="M*-")
    nemotron = {"architecture": "NemotronHForCausalLM", "is_moe": True, "hf_text_config": without_experts}
    for changes in (SEEING, KEEPING, KEEPING | nemotron):
        assert refusals_of_adapters(**changes) == []
        assert refusals_of_adapters("0.33.0", "cuda", **changes) == []
        assert refusals_of_adapters("0.33.0", "cuda", **changes | {"architecture": "FalconH1ForCausalLM"}) != []
        with monkeypatch.context() as untried:
            untried.setenv(UNTRIED.name, "1")
            assert refusals_of_adapters("0.33.0", "cuda", **changes) == []


@pytest.mark.parametrize(
    "more",
    [
        {"tensor_parallel_size": 2},
        {"speculative_config": SimpleNamespace(method="ngram")},
        {"quantization": "fp8", "kind": BLOCKS},
    ],
    ids=["two workers", "drafts", "quantised"],
)
def test_more_beside_adapters_and_states_passes_on_a_cpu(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusals_of_adapters(**KEEPING, **more) == []
    assert (refusals_of_adapters(**SEEING, **more) == []) == ("speculative_config" not in more)
    [refused] = refusals_of_adapters("0.33.0", "cuda", **KEEPING, **more)
    assert refused.startswith("LoRA adapters beside states and ")
    monkeypatch.setenv(UNTRIED.name, "1")
    assert refusals_of_adapters("0.33.0", "cuda", **KEEPING, **more) == []


def test_what_a_cpu_alone_has_run_with_adapters_starts_on_a_gpu_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "online with float8 weights"
    monkeypatch.setattr(coverage, "RAN", replace(coverage.RAN, lora_quantised={"cpu": (kind,)}))
    on_a_gpu = partial(refusals_of_adapters, "0.33.0", "cuda", quantization="online", kind=kind)
    assert on_a_gpu() == [f"LoRA adapters with quantisation {kind}"]
    monkeypatch.setenv(UNTRIED.name, "1")
    assert on_a_gpu() == []


def test_adapters_of_experts_pass_where_they_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for architecture in coverage.RAN.lora_experts["cpu"]:
        assert refusals_of_adapters(is_moe=True, architecture=architecture) == []
        by_two = refusals_of_adapters(is_moe=True, architecture=architecture, tensor_parallel_size=2)
        assert bool(by_two) == bool(coverage.kept_by(architecture))
    assert refusals_of_adapters(is_moe=True, enable_mixed_moe_lora_format=True) == []
    on_a_gpu = partial(refusals_of_adapters, "0.33.0", "cuda", is_moe=True)
    for architecture in coverage.RAN.lora_experts["cuda"]:
        assert on_a_gpu(architecture=architecture) == []
    hybrid = partial(on_a_gpu, **KEEPING | {"architecture": "Qwen3_5MoeForCausalLM"})
    assert hybrid() == []
    for more, said in (
        ({"tensor_parallel_size": 2}, "of a mixture of experts by 2 workers on a GPU"),
        ({"speculative_config": SimpleNamespace(method="ngram")}, "of experts beside states and drafts"),
        ({"quantization": "fp8", "kind": BLOCKS}, "of quantised experts"),
        ({"cache_dtype": "fp8"}, "beside a KV cache in fp8"),
        ({"enable_mixed_moe_lora_format": True}, "of Qwen3_5MoeForCausalLM with --enable-mixed-moe-lora-format"),
        ({"enable_expert_parallel": True}, "of experts beside expert parallelism"),
    ):
        assert f"LoRA adapters {said}" in hybrid(**more)
    seeing = hybrid(is_multimodal_model=True, architecture="Qwen3_5MoeForConditionalGeneration")
    assert "LoRA adapters with the multimodal model Qwen3_5MoeForConditionalGeneration" in seeing
    of_next = hybrid(architecture="Qwen3NextForCausalLM")
    assert "LoRA adapters of the mixture of experts Qwen3NextForCausalLM" in of_next
    two = partial(on_a_gpu, tensor_parallel_size=2)
    assert two() == ["LoRA adapters of a mixture of experts by 2 workers on a GPU"]
    monkeypatch.setenv(UNTRIED.name, "1")
    assert two() == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensor_parallel_size": 4}, "beside tensor parallelism 4"),
        ({"pipeline_parallel_size": 2}, "beside pipeline parallelism 2"),
        ({"data_parallel_size": 2}, "beside data parallelism 2"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "beside speculative decoding with eagle"),
        ({"cache_dtype": "fp8"}, "beside a KV cache in fp8"),
        ({"quantization": "gptq"}, "with quantisation gptq"),  # of which nothing is known
        (
            {"quantization": "modelopt", "kind": "modelopt with float4 weights"},
            "with quantisation modelopt with float4 weights",
        ),
        (
            {"is_moe": True, "architecture": "Glm4MoeForCausalLM"},
            "of the mixture of experts Glm4MoeForCausalLM",
        ),
        ({"is_moe": True, "quantization": "gptq", "kind": "gptq with int4 weights"}, "of quantised experts"),
        ({"is_moe": True, "enable_expert_parallel": True}, "of experts beside expert parallelism"),
        (
            {"is_moe": True, "architecture": "GptOssForCausalLM", "enable_mixed_moe_lora_format": True},
            "of GptOssForCausalLM with --enable-mixed-moe-lora-format",
        ),
        ({"runner_type": "pooling"}, "with pooling"),
        (
            SEEING | {"architecture": "Gemma4ForConditionalGeneration"},
            "with the multimodal model Gemma4ForConditionalGeneration",
        ),
        ({"is_hybrid": True, "architecture": "BambaForCausalLM"}, "with layers that keep states"),
        (KEEPING | {"architecture": "BailingMoeV3ForCausalLM"}, "with layers that keep states, Kimi Delta Attention"),
        (
            SEEING | {"architecture": "SmolVLMForConditionalGeneration", "tensor_parallel_size": 2},
            "beside images and tensor parallelism 2",
        ),
        (SEEING | {"speculative_config": SimpleNamespace(method="ngram")}, "beside images and speculative decoding"),
        (
            SEEING | {"tensor_parallel_size": 2, "quantization": "fp8", "kind": BLOCKS},
            "beside images and quantised weights",
        ),
        (
            SEEING | {"architecture": "SmolVLMForConditionalGeneration", "quantization": "fp8", "kind": BLOCKS},
            "beside images and quantised weights",
        ),
        (
            KEEPING | {"is_moe": True, "architecture": "Qwen3_5MoeForCausalLM", "tensor_parallel_size": 2},
            "of experts beside states by 2 workers",
        ),
        (
            KEEPING | {"is_moe": True, "architecture": "Qwen3_5MoeForCausalLM", "enable_mixed_moe_lora_format": True},
            "of Qwen3_5MoeForCausalLM with --enable-mixed-moe-lora-format",
        ),
        (
            KEEPING
            | {
                "is_moe": True,
                "architecture": "Qwen3_5MoeForCausalLM",
                "speculative_config": SimpleNamespace(method="ngram"),
            },
            "of experts beside states and drafts",
        ),
        (
            KEEPING | {"tensor_parallel_size": 2, "speculative_config": SimpleNamespace(method="ngram")},
            "beside states and speculative decoding",
        ),
        (
            KEEPING | {"tensor_parallel_size": 2, "quantization": "fp8", "kind": BLOCKS},
            "beside states and quantised weights",
        ),
        ({"enable_prompt_embeds": True}, "beside embeddings as prompts"),
        ({"kv_connector": "ExampleConnector"}, "beside a KV connector"),
        ({"fully_sharded_loras": True}, "with --fully-sharded-loras"),
        ({"default_mm_loras": {"image": "path"}}, "with --default-mm-loras"),
        ({"enable_tower_connector_lora": True}, "with --enable-tower-connector-lora"),
        ({"enable_moe_shared_loras": True}, "with --enable-moe-shared-loras"),
        ({"lora_dtype": "float16"}, "with --lora-dtype float16 of a model in bfloat16"),
        ({"head_dtype": "torch.float32"}, "with logits in float32 of a model in bfloat16"),
    ],
)
def test_what_has_not_run_with_adapters_is_refused(changes: dict[str, Any], said: str) -> None:
    assert refusals_of_adapters(**changes) == [f"LoRA adapters {said}"]


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        (TP_TREE, "2", f"beside {TP_TREE.name}=2"),
        (ARITHMETIC, "exact", "beside exact arithmetic"),
        (ATTENTION, "flex", "beside FlexAttention"),
        (SimpleNamespace(name=coverage.DUAL_STREAM), "1", f"with {coverage.DUAL_STREAM}=1"),
    ],
)
def test_variables_that_have_not_run_with_adapters_are_refused(
    variable: Any, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable.name, value)
    assert refusals_of_adapters() == [f"LoRA adapters {said}"]


def test_experts_that_no_gpu_has_run_start_there_only_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one of vLLM's classes serves models of other names."""

    [row] = [row for name, row in ROWS.items() if name.startswith("Step-3.5 on a GPU")]
    assert row.devices == ("cuda",)

    def found(architecture: str, of_class: str = "", workers: int = 1, engines: int = 1) -> str | None:
        info = SimpleNamespace(architecture=of_class or architecture)
        model = SimpleNamespace(is_moe=True, architecture=architecture, _model_info=info)
        of_gpus = {"device_config": SimpleNamespace(device_type="cuda"), "model_config": model}
        parallel = SimpleNamespace(world_size=workers, data_parallel_size=engines)
        return row.found(SimpleNamespace(**of_gpus, parallel_config=parallel))

    assert found("AfmoeForCausalLM") is found("AfmoeForCausalLM", workers=2) is None
    assert found("Step3p5ForCausalLM") == found("Step3p5ForCausalLM", workers=2) == "Step3p5ForCausalLM on a GPU"
    for name in ("MiniMaxM2ForCausalLM", "TransformersMoEForCausalLM"):
        assert found(name) is found("MellumForCausalLM", name) is None
        said = "MellumForCausalLM on several GPUs"
        assert found("MellumForCausalLM", name, workers=2) == found("MellumForCausalLM", name, engines=2) == said
        with monkeypatch.context() as by_a_tree:
            by_a_tree.setenv(TP_TREE.name, "2")
            assert found("MellumForCausalLM", name) == said
    monkeypatch.setenv(UNTRIED.name, "1")
    assert found("Step3p5ForCausalLM") is found("MiniMaxM2ForCausalLM", workers=2) is None


def test_experts_pool_on_a_gpu_only_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    [row] = [feature for name, feature in ROWS.items() if name.startswith("Pooling with another")]

    def found(device: str = "cuda", is_moe: bool = True) -> str | None:
        model = SimpleNamespace(runner_type="pooling", is_moe=is_moe)
        return row.found(SimpleNamespace(device_config=SimpleNamespace(device_type=device), model_config=model))

    assert found() == "a mixture of experts that pools on a GPU"
    assert found(is_moe=False) is None
    monkeypatch.setenv(UNTRIED.name, "1")
    assert found() is None


def test_pooling_in_exact_arithmetic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ARITHMETIC.name, "exact")
    assert refusals_of_pooling() == ["a pooling model with exact arithmetic"]


def found_of_states(row_of: str, of: str, /, device: str = "cpu", **changes: Any) -> str | None:
    """What a row of the start-up check says of a model with changes to any part of its configuration."""
    parts = {
        "model_config": {
            "architecture": of,
            "dtype": "torch.bfloat16",
            "quantization": None,
            "enable_prompt_embeds": False,
            "enable_sleep_mode": False,
            "is_moe": False,
            "hf_text_config": None,
        },
        "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1},
        "cache_config": {
            "cache_dtype": "auto",
            "mamba_cache_dtype": "auto",
            "mamba_ssm_cache_dtype": "auto",
            "prefix_match_unit": None,
            "prefix_cache_retention_interval": 0,
            "use_replayssm": False,
            "enable_prefix_caching": True,
        },
        "mamba_config": {"enable_stochastic_rounding": False},
    }
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        speculative_config=changes.pop("speculative_config", None),
        use_v2_model_runner=changes.pop("use_v2_model_runner", device == "cuda"),
        quant_config=changes.pop("quant_config", None),
        **{
            name: SimpleNamespace(**{key: changes.pop(key, value) for key, value in part.items()})
            for name, part in parts.items()
        },
    )
    assert not changes
    [row] = [feature for name, feature in ROWS.items() if name.startswith(row_of)]
    return row.found(config)


found_of_convolutions = partial(found_of_states, "Short convolutions (LFM2)", "Lfm2ForCausalLM")
found_of_rules = partial(found_of_states, "Gated delta rules elsewhere", "Qwen3_5ForCausalLM")
found_of_spaces = partial(found_of_states, "State spaces of Mamba-2", "NemotronHForCausalLM")
found_of_decays, found_of_channels = (
    partial(found_of_states, "Linear attention of Ling", f"BailingMoe{version}ForCausalLM")
    for version in ("V2_5", "V3")
)
OF_STATES = [
    ({"tensor_parallel_size": 8}, "tensor parallelism 8"),
    ({"pipeline_parallel_size": 2}, "pipeline parallelism 2"),
    ({"data_parallel_size": 2}, "data parallelism 2"),
    ({"mamba_cache_dtype": "float32"}, "states in float32"),
    ({"quantization": "fp8"}, "quantisation fp8"),
    ({"enable_prompt_embeds": True}, "embeddings as prompts"),
    ({"enable_sleep_mode": True}, "sleep"),
    ({"prefix_match_unit": 16}, "prefix_match_unit"),
    ({"use_replayssm": True}, "use_replayssm"),
    ({"enable_stochastic_rounding": True}, "stochastic rounding"),
]
"""What has not been run with any layers that keep a state."""


@pytest.mark.parametrize(("changes", "said"), OF_STATES)
def test_layers_with_states_are_served_as_they_were_run(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    assert found_of_convolutions(**changes) == f"short convolutions with {said}"
    assert found_of_rules(**changes) == f"gated delta rules with {said}"
    assert found_of_spaces(**changes) == f"state spaces of Mamba-2 with {said}"
    assert found_of_decays(**changes) == f"linear attention with {said}"
    assert found_of_channels(**changes) == f"Kimi Delta Attention with {said}"


def test_a_model_that_has_run_with_states_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    for found_of in (found_of_convolutions, found_of_rules, found_of_spaces):
        assert found_of() is found_of(mamba_cache_dtype="bfloat16") is None
        assert found_of(architecture="Qwen3ForCausalLM", tensor_parallel_size=2) is None


def test_linear_attention_is_served_where_it_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    by_n_grams = {"speculative_config": SimpleNamespace(method="ngram")}
    named = ((found_of_decays, "linear attention"), (found_of_channels, "Kimi Delta Attention"))
    for found_of, kind in named:
        assert found_of() is found_of(architecture="Qwen3ForCausalLM", tensor_parallel_size=2) is None
        assert found_of(tensor_parallel_size=2) is found_of(tensor_parallel_size=4) is None
        assert found_of(tensor_parallel_size=8) == f"{kind} with tensor parallelism 8"
        assert found_of(mamba_ssm_cache_dtype="bfloat16") == f"{kind} with states of {kind} in bfloat16"
        assert found_of(device="cuda") == f"{kind} with vLLM 0.32.0"
    assert found_of_decays(**by_n_grams) == "linear attention with speculative decoding"
    assert found_of_channels(**by_n_grams) is None
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    for found_of, kind in named:
        assert found_of() == f"{kind} with vLLM 0.33.0"
        on_gpus = partial(found_of, device="cuda")
        assert on_gpus() is None
        assert on_gpus(tensor_parallel_size=2) == f"{kind} with tensor parallelism 2"
        assert on_gpus(dtype="torch.float16") == f"{kind} with float16 on a GPU"
        cached = on_gpus(**by_n_grams, enable_prefix_caching=True)
        if found_of is found_of_channels:
            assert on_gpus(**by_n_grams) is cached is None
        else:
            assert on_gpus(**by_n_grams) == cached == f"{kind} with speculative decoding"
    monkeypatch.setenv(UNTRIED.name, "1")
    assert found_of_channels(device="cuda", **by_n_grams) is None


def test_two_and_four_workers_share_layers_with_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs two, and by a tree gated delta rules alone."""
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    for found_of in (found_of_convolutions, found_of_rules, found_of_spaces):
        assert found_of(tensor_parallel_size=2) is found_of(tensor_parallel_size=4) is None
    for slices in ("2", "4"):
        monkeypatch.setenv(TP_TREE.name, slices)
        assert found_of_convolutions() is found_of_rules() is found_of_spaces() is None
    monkeypatch.setenv(TP_TREE.name, "8")
    assert found_of_rules() == f"gated delta rules with {TP_TREE.name}=8"
    monkeypatch.delenv(TP_TREE.name)
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    four = {"device": "cuda", "tensor_parallel_size": 4}
    for found_of in (found_of_convolutions, found_of_rules, found_of_spaces):
        assert found_of(**four | {"tensor_parallel_size": 2}) is None
    assert found_of_rules(**four) == "gated delta rules with tensor parallelism 4"
    assert found_of_convolutions(**four) == "short convolutions with tensor parallelism 4"
    assert found_of_spaces(**four) == "state spaces of Mamba-2 with tensor parallelism 4"
    monkeypatch.setenv(UNTRIED.name, "1")
    assert found_of_convolutions(**four) is found_of_rules(**four) is found_of_spaces(**four) is None


def test_several_workers_share_nothing_else_with_states(monkeypatch: pytest.MonkeyPatch) -> None:
    convolutions, spaces, rules = (
        partial(found_of_states, "Short convolutions and state spaces by several workers", of)
        for of in ("Lfm2ForCausalLM", "NemotronHForCausalLM", "Qwen3_5ForCausalLM")
    )
    two, groups = {"tensor_parallel_size": 2}, SimpleNamespace(mamba_n_groups=1)
    assert convolutions(**two) is spaces(**two) is spaces(hf_text_config=groups) is None
    assert spaces(**two, hf_text_config=groups) == "state spaces of Mamba-2 with 1 groups by 2 workers"
    groups, four = SimpleNamespace(mamba_n_groups=2), {"tensor_parallel_size": 4}
    assert spaces(**two, hf_text_config=groups) is spaces(**four) is None
    assert spaces(**four, hf_text_config=groups) == "state spaces of Mamba-2 with 2 groups by 4 workers"
    monkeypatch.setenv(TP_TREE.name, "4")
    assert spaces(hf_text_config=groups) == "state spaces of Mamba-2 with 2 groups by 4 workers"
    monkeypatch.delenv(TP_TREE.name)
    dense = SimpleNamespace(n_groups=2, hybrid_override_pattern="M-*M-")  # of which vLLM finds a number of experts
    assert spaces(**two, is_moe=True, hf_text_config=dense) is None
    for changes, said in (
        ({"is_moe": True}, "experts"),
        ({"quantization": "fp8"}, "quantised weights"),
        ({"speculative_config": SimpleNamespace(method="ngram")}, "drafts"),
        ({"cache_dtype": "fp8"}, "an FP8 cache"),
    ):
        assert convolutions(**changes) is rules(**two, **changes) is None
        assert convolutions(**two, **changes) == f"short convolutions with {said} by 2 workers"
        assert convolutions(**four, **changes) == f"short convolutions with {said} by 4 workers"
    assert spaces(**two, is_moe=True) is None
    assert spaces(**four, is_moe=True) == "state spaces of Mamba-2 with experts by 4 workers"
    assert spaces(**two, is_moe=True, device="cuda") is None
    assert (
        spaces(**two, is_moe=True, quantization="fp8") == "state spaces of Mamba-2 with quantised weights by 2 workers"
    )
    monkeypatch.setenv(TP_TREE.name, "2")
    assert convolutions(is_moe=True) == "short convolutions with experts by 2 workers"


def test_drafts_beside_states_are_those_that_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    by_n_grams, by_a_model = ({"speculative_config": SimpleNamespace(method=name)} for name in ("ngram", "draft_model"))
    kinds = {
        "short convolutions": found_of_convolutions,
        "gated delta rules": found_of_rules,
        "state spaces of Mamba-2": found_of_spaces,
    }
    for kind, found_of in kinds.items():
        assert found_of(**by_n_grams) is found_of(**by_n_grams, enable_prefix_caching=False) is None
        assert found_of(**by_a_model) == f"{kind} with speculative decoding with draft_model"
    for workers in (2, 4):
        several = by_n_grams | {"tensor_parallel_size": workers}
        said = f"with speculative decoding and a prefix cache by {workers} workers"
        assert found_of_rules(**several, enable_prefix_caching=False) is None
        assert found_of_rules(**several) == (f"gated delta rules {said}" if workers == 4 else None)
        assert found_of_spaces(**several) == f"state spaces of Mamba-2 {said}"
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    uncached, cached = ({**by_n_grams, "device": "cuda", "enable_prefix_caching": keeps} for keeps in (False, True))
    for kind, found_of in kinds.items():
        assert found_of(**uncached) is None
        with_mtp = found_of(**cached | {"speculative_config": SimpleNamespace(method="mtp")})
        said = f"{kind} with speculative decoding with mtp"
        assert with_mtp == (said if found_of is found_of_convolutions else None)
    assert found_of_convolutions(**cached) is found_of_spaces(**cached) is found_of_rules(**cached) is None
    said = "state spaces of Mamba-2 with speculative decoding and experts on a GPU"
    assert found_of_spaces(**cached, is_moe=True) == found_of_spaces(**uncached, is_moe=True) == said
    assert found_of_spaces(device="cuda", is_moe=True) is found_of_convolutions(**cached, is_moe=True) is None
    by_mtp = cached | {"speculative_config": SimpleNamespace(method="mtp")}
    assert found_of_spaces(**by_mtp, is_moe=True) is None
    monkeypatch.setenv(UNTRIED.name, "1")
    assert found_of_spaces(**cached, is_moe=True) is None
    assert {found_of_rules(**cached, tensor_parallel_size=workers) for workers in (2, 4)} == {None}
    for kind, found_of in kinds.items():
        assert found_of(**uncached) is None
        assert found_of(**uncached | {"enable_prefix_caching": True}) is None
        by_first_runner = uncached | {"use_v2_model_runner": False}
        assert found_of(**by_first_runner) == f"{kind} with the first model runner"


def test_how_far_apart_states_are_kept_is_what_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    apart = {"prefix_cache_retention_interval": 1024}
    assert found_of_convolutions(**apart) is found_of_rules(**apart) is found_of_spaces(**apart) is None
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    assert found_of_rules(device="cuda", **apart) == "gated delta rules with prefix_cache_retention_interval"


def test_quantised_weights_beside_states_are_those_that_have_run(
    by: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    rules, convolutions, spaces = (
        partial(of, quantization="fp8") for of in (found_of_rules, found_of_convolutions, found_of_spaces)
    )
    assert rules() == "gated delta rules with quantisation fp8"  # of which nothing is known
    by.append(BLOCKS)
    assert rules() is rules(tensor_parallel_size=2) is None
    by_four = "gated delta rules with quantised weights by 4 workers"
    assert rules(tensor_parallel_size=4) == by_four
    assert convolutions() is None
    assert convolutions(tensor_parallel_size=4) == "short convolutions with quantised weights by 4 workers"
    with monkeypatch.context() as untried:
        untried.setenv(UNTRIED.name, "1")
        assert rules(tensor_parallel_size=4) is None
        by[0] = "awq with int4 weights"
        assert rules(tensor_parallel_size=2) is None
        assert rules(tensor_parallel_size=4) == by_four
        by[0] = BLOCKS
    assert spaces() == f"state spaces of Mamba-2 with quantisation {BLOCKS}"
    by.append("modelopt with float4 weights")
    assert rules() == f"gated delta rules with quantisation {by[1]}"
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    del by[1]
    on_a_gpu = partial(rules, device="cuda")
    assert on_a_gpu() is on_a_gpu(tensor_parallel_size=2) is on_a_gpu(is_moe=True) is None
    assert on_a_gpu(is_moe=True, tensor_parallel_size=2) == f"gated delta rules with quantisation {BLOCKS}"
    drafting = partial(on_a_gpu, speculative_config=SimpleNamespace(method="mtp"))
    assert drafting(enable_prefix_caching=False) is None
    assert drafting() == ("gated delta rules with speculative decoding, quantised weights and a prefix cache on a GPU")
    by[0] = "awq with int4 weights"
    assert on_a_gpu() is None
    assert on_a_gpu(is_moe=True) == on_a_gpu(tensor_parallel_size=2) == f"gated delta rules with quantisation {by[0]}"
    by[0] = BLOCKS
    assert spaces(device="cuda") == f"state spaces of Mamba-2 with quantisation {BLOCKS}"
    assert convolutions(device="cuda") is None
    of_modelopt = [kind for kind in coverage.RAN.delta_rule_quantised["cpu"] if kind.startswith("modelopt")]
    for by[0] in of_modelopt:
        assert on_a_gpu() is on_a_gpu(is_moe=True) is on_a_gpu(tensor_parallel_size=2) is spaces(device="cuda") is None
        said = "gated delta rules with speculative decoding and quantised weights on a GPU"
        assert drafting(enable_prefix_caching=False) == (None if "float4" in by[0] else said)
        of_next = on_a_gpu(architecture="Qwen3NextForCausalLM", is_moe=True)
        assert of_next == (None if "float4" in by[0] else f"gated delta rules with quantisation {by[0]}")
    assert len(of_modelopt) == 2
    by[0] = next(kind for kind in of_modelopt if "float4" in kind).replace("modelopt", "compressed-tensors")
    assert on_a_gpu() is on_a_gpu(is_moe=True) is None
    of_next = on_a_gpu(architecture="Qwen3NextForCausalLM", is_moe=True)
    assert of_next == f"gated delta rules with quantisation {by[0]}"
    assert drafting(enable_prefix_caching=False) == said
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    by[0] = "compressed-tensors with int4 weights"
    assert rules(is_moe=True) is convolutions() is spaces() is None
    assert convolutions(is_moe=True) == "short convolutions with quantised experts"
    assert spaces(is_moe=True) == f"state spaces of Mamba-2 with quantisation {by[0]}"
    of_granite = partial(spaces, architecture="GraniteMoeHybridForCausalLM")
    assert of_granite() is None
    assert of_granite(is_moe=True) == "state spaces of Mamba-2 with quantised experts"


@pytest.mark.parametrize(
    "kind",
    [
        "modelopt with float8 weights (one scale a tensor) and float8 static tensor activations",
        "modelopt with float4 weights (one scale a tensor_group 16) and float4 dynamic tensor_group activations",
    ],
)
def test_quantised_experts_of_nemotron_h_are_served_where_they_have_run(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one worker."""
    by = [kind]
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    monkeypatch.setattr(coverage.schemes, "kinds", lambda *_: tuple(by))
    nano = partial(found_of_spaces, quantization="modelopt", is_moe=True, cache_dtype="fp8")
    assert nano() is nano(speculative_config=SimpleNamespace(method="ngram")) is None
    of_granite = nano(architecture="GraniteMoeHybridForCausalLM")
    assert of_granite == "state spaces of Mamba-2 with quantised experts"
    shared = partial(found_of_states, "Short convolutions and state spaces by several workers", "NemotronHForCausalLM")
    assert shared(quantization="modelopt", is_moe=True, tensor_parallel_size=2) is not None
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    assert nano(device="cuda") is None
    by[0] = kind.replace("modelopt", "compressed-tensors")
    of_kind = f"quantisation {by[0]}" if "float8" in kind else "a KV cache in fp8"
    assert nano(device="cuda") == f"state spaces of Mamba-2 with {of_kind}"


def test_latent_experts_are_served_where_they_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    latent = SimpleNamespace(moe_latent_size=128, hybrid_override_pattern="ME*E")
    none = SimpleNamespace(moe_latent_size=128, hybrid_override_pattern="M-*-")
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    assert found_of_spaces(is_moe=True, hf_text_config=latent) is None
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    on_a_gpu = partial(found_of_spaces, device="cuda", is_moe=True)
    by_two = partial(on_a_gpu, tensor_parallel_size=2)
    assert by_two(hf_text_config=latent) == "state spaces of Mamba-2 with latent experts by 2 GPUs"
    assert on_a_gpu(hf_text_config=latent) is on_a_gpu() is on_a_gpu(hf_text_config=none) is None
    assert by_two() is by_two(hf_text_config=none) is None
    monkeypatch.setenv(UNTRIED.name, "1")
    assert by_two(hf_text_config=latent) is None


@pytest.mark.parametrize("asked", [{"cache_dtype": "fp8"}, {"quant_config": SimpleNamespace(kv_cache_scheme={1: 1})}])
def test_a_cache_in_fp8_is_served_beside_states_where_it_has_run(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that a checkpoint asks for."""
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    named = {
        "short convolutions": found_of_convolutions,
        "gated delta rules": found_of_rules,
        "state spaces of Mamba-2": found_of_spaces,
    }
    for kind, found_of in named.items():
        assert found_of(**asked) is None
        assert found_of(**asked, tensor_parallel_size=2) == f"{kind} with a KV cache in fp8 by 2 workers"
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    on_cpus_alone = {"cpu": tuple(named)}
    for kind, found_of in named.items():
        assert found_of(device="cuda", **asked) is None
        with monkeypatch.context() as earlier:
            earlier.setattr(coverage, "RAN", replace(coverage.RAN, fp8_kv_cache_beside=on_cpus_alone))
            assert found_of(device="cuda", **asked) == f"{kind} with a KV cache in fp8"
            earlier.setenv(UNTRIED.name, "1")
            assert found_of(device="cuda", **asked) is None


def test_a_cache_in_fp8_beside_states_on_a_gpu_has_run_with_its_model_drafts_weights_and_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    cache = {"device": "cuda", "cache_dtype": "fp8"}
    n_grams = {"speculative_config": SimpleNamespace(method="ngram")}
    assert found_of_spaces(**cache, **n_grams) is found_of_rules(**cache, architecture="Qwen3_5MoeForCausalLM") is None
    for refused in (
        found_of_spaces(**cache, architecture="FalconH1ForCausalLM"),
        found_of_rules(**cache, architecture="Qwen3NextForCausalLM", is_moe=True),
        found_of_rules(**cache, **n_grams, architecture="Qwen3_5MoeForCausalLM", enable_prefix_caching=False),
        found_of_convolutions(**cache, **n_grams),
        found_of_convolutions(**cache, dtype="torch.float16"),
        found_of_spaces(**cache, is_moe=True),
    ):
        assert str(refused).endswith("with a KV cache in fp8")
    by: list[str] = ["modelopt with float8 weights (one scale a tensor) and float8 static tensor activations"]
    monkeypatch.setattr(coverage.schemes, "kinds", lambda *_: tuple(by))
    assert found_of_spaces(**cache, quantization="modelopt") is None
    assert found_of_spaces(**cache, quantization="modelopt", is_moe=True) is None
    latent = SimpleNamespace(moe_latent_size=128, hybrid_override_pattern="ME*E")
    of_latent = partial(found_of_spaces, **cache, quantization="modelopt", is_moe=True, hf_text_config=latent)
    assert str(of_latent()).endswith("with a KV cache in fp8")
    assert str(found_of_rules(**cache, quantization="modelopt")).endswith("with a KV cache in fp8")
    by[0] = "modelopt with float4 weights (one scale a tensor_group 16) and float4 dynamic tensor_group activations"
    assert of_latent() is found_of_spaces(**cache, quantization="modelopt_fp4") is None
    for name in ("Qwen3_5ForCausalLM", "Qwen3NextForCausalLM"):
        assert found_of_rules(**cache, quantization="modelopt_fp4", architecture=name) is None
    by[:] = [by[0], "modelopt with float8 weights (one scale a tensor) and float8 static tensor activations"]
    assert of_latent(quantization="modelopt_mixed") is None
    assert found_of_rules(**cache, quantization="modelopt_mixed") is None
    assert str(of_latent()).endswith("with a KV cache in fp8"), "not of layers in FP8 alone"
    del by[1]
    by[0] = "compressed-tensors with int4 weights"
    assert found_of_spaces(device="cuda", quantization="compressed-tensors") is None
    assert str(found_of_spaces(**cache, quantization="compressed-tensors")).endswith("with a KV cache in fp8")


def test_a_cache_in_fp8_with_a_scale_a_head_is_served_where_it_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    [row] = [row for name, row in ROWS.items() if name.startswith("A KV cache in fp8 in exact arithmetic")]

    def found_of_cache(
        device: str,
        strategy: str,
        cache_dtype: str = "auto",
        dtype: str = "bfloat16",
        workers: int = 1,
        **beside: Any,
    ) -> str | None:
        version = {"cpu": "0.32.0", "cuda": "0.33.0"}[device]
        monkeypatch.setattr(patch_points, "installed_version", lambda: version)
        config = SimpleNamespace(
            device_config=SimpleNamespace(device_type=device),
            cache_config=SimpleNamespace(cache_dtype=cache_dtype),
            quant_config=SimpleNamespace(kv_cache_scheme={"strategy": strategy}),
            model_config=SimpleNamespace(dtype=f"torch.{dtype}"),
            speculative_config=beside.pop("speculative_config", None),
            parallel_config=SimpleNamespace(
                **{"tensor_parallel_size": workers, "pipeline_parallel_size": 1, "data_parallel_size": 1} | beside
            ),
        )
        return row.found(config)

    assert found_of_cache("cpu", "attn_head", workers=2) is found_of_cache("cuda", "tensor", workers=2) is None
    by_two = found_of_cache("cuda", "attn_head", workers=2)
    assert by_two == "a KV cache in fp8 with one scale a head by 2 workers on a GPU"
    assert found_of_cache("cpu", "tensor") is found_of_cache("cpu", "attn_head") is None
    assert found_of_cache("cuda", "tensor") is found_of_cache("cuda", "attn_head") is None
    of_heads = SimpleNamespace(kv_cache_scheme={"strategy": "attn_head"})
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    assert found_of_convolutions(quant_config=of_heads) == "short convolutions with a KV cache in fp8"
    tokens, scales = "fp8_per_token_head", "one scale a token and head"
    assert found_of_cache("cpu", "tensor", tokens) is None
    assert found_of_cache("cpu", "attn_head", tokens, "float16") == f"a KV cache in {tokens} of a model in float16"
    assert found_of_cache("cpu", "attn_head", dtype="float16") is None
    assert found_of_cache("cuda", "tensor", tokens) is None
    by_two = found_of_cache("cuda", "tensor", tokens, workers=2)
    assert by_two == f"a KV cache in {tokens} with {scales} by 2 workers on a GPU"
    for beside, words in (
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"data_parallel_size": 2}, "data parallelism"),
        ({"speculative_config": object()}, "speculative decoding"),
    ):
        found = found_of_cache("cuda", "tensor", tokens, **beside)
        assert found == f"a KV cache in {tokens} with {scales} beside {words} on a GPU"
        assert found_of_cache("cuda", "tensor", **beside) is None
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    assert found_of_convolutions(cache_dtype=tokens) == f"short convolutions with a KV cache in {tokens}"
    monkeypatch.setenv(UNTRIED.name, "1")
    assert found_of_cache("cuda", "attn_head", workers=2) is found_of_cache("cuda", "tensor", tokens) is None


def test_states_of_gated_delta_rules_are_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    assert found_of_rules(mamba_ssm_cache_dtype="float32") is None
    assert found_of_rules(mamba_ssm_cache_dtype="bfloat16") == "gated delta rules with states of rules in bfloat16"
    assert found_of_convolutions(mamba_ssm_cache_dtype="bfloat16") is None
    in_bf16 = found_of_spaces(mamba_ssm_cache_dtype="bfloat16")
    assert in_bf16 == "state spaces of Mamba-2 with states of state spaces in bfloat16"


def test_gated_delta_rules_pass_where_they_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    assert found_of_rules() == "gated delta rules with vLLM 0.33.0"
    assert found_of_rules(device="cuda") is None
    first_runner = found_of_rules(device="cuda", use_v2_model_runner=False)
    assert first_runner == "gated delta rules with the first model runner"
    assert found_of_rules(device="cuda", dtype="torch.float16") == "gated delta rules with float16 on a GPU"
    monkeypatch.setenv(UNTRIED.name, "1")
    assert found_of_rules(device="cuda", dtype="torch.float16") is None
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    assert found_of_rules(device="cuda") == "gated delta rules with vLLM 0.32.0"


def test_state_spaces_pass_where_they_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    on_gpus, said = partial(found_of_spaces, device="cuda"), "state spaces of Mamba-2 with"
    assert found_of_spaces() == f"{said} vLLM 0.33.0"
    assert on_gpus() is None
    assert on_gpus(use_v2_model_runner=False) == f"{said} the first model runner"
    assert on_gpus(architecture="FalconH1ForCausalLM") is on_gpus(is_moe=True) is None
    assert on_gpus(dtype="torch.float16") == f"{said} float16 on a GPU"
    monkeypatch.setenv(UNTRIED.name, "1")
    assert on_gpus(dtype="torch.float16") is None
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    assert on_gpus() == f"{said} vLLM 0.32.0"


def test_short_convolutions_pass_where_they_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    assert found_of_convolutions() == "short convolutions with vLLM 0.33.0"
    assert found_of_convolutions(device="cuda") is None
    assert found_of_convolutions(device="cuda", tensor_parallel_size=2) is None
    drafts = {"speculative_config": SimpleNamespace(method="ngram"), "device": "cuda"}
    assert found_of_convolutions(device="cuda", dtype="torch.float16") is found_of_convolutions(**drafts) is None
    in_fp16 = found_of_convolutions(**drafts, dtype="torch.float16")
    assert in_fp16 == "short convolutions with float16 on a GPU"
    first_runner = found_of_convolutions(device="cuda", use_v2_model_runner=False)
    assert first_runner == "short convolutions with the first model runner"
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    assert found_of_convolutions(device="cuda") == "short convolutions with vLLM 0.32.0"


def test_two_gpus_and_drafts_beside_heads_of_two_sizes_are_those_that_have_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpus = partial(two_head_sizes, device="cuda", version="0.33.0")
    drafts = {"speculative_config": SimpleNamespace(method="ngram", draft_model_config=None)}
    unified = {"architecture": "Gemma4UnifiedForConditionalGeneration"}
    of_unified, said = "of Gemma4UnifiedForConditionalGeneration", "heads of two sizes with"
    for asked, what in ((drafts, "speculative decoding"), ({"tensor_parallel_size": 2}, "tensor parallelism 2")):
        assert on_gpus(**asked) is on_gpus(**unified) is None
        assert on_gpus(**asked, **unified) == f"{said} {what} {of_unified} on a GPU"
        assert on_gpus(**asked, dtype="torch.float16") == f"{said} {what} in float16 on a GPU"
    assert on_gpus(dtype="torch.float16") is None
    monkeypatch.setattr(coverage.schemes, "kinds", lambda *_: (BLOCKS,))
    for asked, what in ((drafts, "speculative decoding"), ({"tensor_parallel_size": 2}, "tensor parallelism 2")):
        assert on_gpus(quantization="fp8") is None
        assert on_gpus(**asked, quantization="fp8") == f"{said} quantised weights and {what} on a GPU"
    monkeypatch.setenv(UNTRIED.name, "1")
    assert on_gpus(**drafts, **unified) is on_gpus(**drafts, quantization="fp8") is None


def test_a_drafter_that_reads_caches_of_two_head_sizes_has_run_with_images_some_weights_and_caches_in_fp8(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, by = "Gemma4ForConditionalGeneration", [BLOCKS]
    monkeypatch.setattr(coverage.schemes, "kinds", lambda *_: tuple(by))
    drafts = {"architecture": model, "speculative_config": SimpleNamespace(method="mtp", draft_model_config=None)}
    said = "heads of two sizes with"
    for device, version in (("cpu", "0.32.0"), ("cuda", "0.33.0")):
        ran = RAN.encoded_quantised_drafted[model][device]["mtp"]
        drafting = partial(two_head_sizes, device, version, **drafts)
        assert drafting() is drafting(cache_dtype="fp8") is None
        assert drafting(tensor_parallel_size=2) == f"{said} speculative decoding by 2 workers"
        for by[0] in ran:
            if device == "cuda" and by[0].startswith("compressed-tensors with float4"):
                continue  # 26B-A4B alone, beside its cache
            assert drafting(quantization="a method") is None
            has_cache = by[0] in RAN.fp8_kv_cache_quantised[coverage.TWO_SIZES][device]
            assert (drafting(quantization="a method", cache_dtype="fp8") is None) == has_cache
    by[0] = BLOCKS
    assert drafting(quantization="fp8") == f"{said} quantised weights and speculative decoding on a GPU"
    by_n_grams = drafts | {"speculative_config": SimpleNamespace(method="ngram", draft_model_config=None)}
    assert two_head_sizes(**by_n_grams, cache_dtype="fp8") == (
        f"{said} a KV cache in fp8 by several workers or beside drafts"
    )


def test_a_cache_in_fp8_beside_heads_of_two_sizes_has_run_with_some_quantised_weights(
    by: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran, said = RAN.fp8_kv_cache_quantised[coverage.TWO_SIZES]["cpu"], "heads of two sizes with a KV cache in fp8"
    for by[:] in ([kind] for kind in RAN.large_head_quantised["cpu"]):
        found = two_head_sizes(quantization="a method", cache_dtype="fp8")
        assert found == (None if by[0] in ran else f"{said} beside quantisation {by[0]}")
    by[:] = [ran[0]]
    on_gpus = partial(two_head_sizes, "cuda", "0.33.0", quantization="a method", cache_dtype="fp8")
    assert on_gpus() is two_head_sizes("cuda", "0.33.0", cache_dtype="fp8") is None
    shared = SimpleNamespace(num_kv_shared_layers=2)
    scheme = SimpleNamespace(kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False})
    unquantised = partial(two_head_sizes, "cuda", "0.33.0", cache_dtype="fp8")
    assert unquantised(is_moe=True) is unquantised(text=shared) is None
    assert on_gpus(text=shared) is on_gpus(quant_config=scheme) is None
    assert "channel" in by[0]
    given = partial(on_gpus, text=shared, quant_config=scheme)
    assert given() is None, "E2B has run so"
    of_scales = f"{said} that layers share, with scales of the checkpoint on a GPU"
    seeing = "Gemma4ForConditionalGeneration"
    assert given(architecture=seeing) == of_scales
    assert given(dtype="torch.float16") == "heads of two sizes with quantised weights in float16 on a GPU"
    assert given(use_v2_model_runner=False) == "heads of two sizes with the first model runner"
    assert given(lora_config=object()) == "heads of two sizes with LoRA adapters"
    by_several = f"{said} by several workers or beside drafts"
    drafts = {"speculative_config": SimpleNamespace(method="mtp", draft_model_config=None)}
    assert given(tensor_parallel_size=2) == given(**drafts) == by_several
    by[:] = [kind for kind in ran if kind.startswith("modelopt")]
    assert given() == on_gpus(text=shared) == f"{said} that layers share, beside quantisation {by[0]} on a GPU"
    assert on_gpus() is None, "31B has run so"
    by[:] = [ran[0]]
    by[:] = [kind for kind in ran if kind.startswith("compressed-tensors with float4")]
    assert on_gpus(is_moe=True) is None, "26B-A4B has run so"
    assert on_gpus() == f"{said} beside quantisation {by[0]}"
    by[:] = [ran[0]]
    sees = {"is_multimodal_model": True, "hf_config": None}
    sees |= {"multimodal_config": SimpleNamespace(get_limit_per_prompt=lambda kind: int(kind == "image"))}
    with_images = partial(unquantised, architecture=seeing, **sees)
    assert with_images() is with_images(**drafts) is None, "31B has run so"
    assert with_images(text=shared) == f"{said} that layers share, with images, of weights in 16 bits on a GPU"
    assert with_images(is_moe=True) == f"{said} with images, of experts in 16 bits on a GPU"
    assert with_images(dtype="torch.float16") == f"{said} in float16 on a GPU"
    assert with_images(tensor_parallel_size=2) == by_several
    assert (
        on_gpus(architecture=seeing, **sees, is_moe=True) is on_gpus(architecture=seeing, **sees, text=shared) is None
    )
    unified = "Gemma4UnifiedForConditionalGeneration"
    of_unified = two_head_sizes("cuda", "0.33.0", cache_dtype="fp8", architecture=unified)
    assert of_unified == f"{said} of {unified} on a GPU"
    by[:] = ["compressed-tensors with float4 weights"]
    assert on_gpus() == f"heads of two sizes with quantisation {by[0]}"
    with monkeypatch.context() as earlier:
        beside = RAN.fp8_kv_cache_beside | {"cuda": ()}
        earlier.setattr(coverage, "RAN", replace(RAN, fp8_kv_cache_beside=beside))
        assert two_head_sizes("cuda", "0.33.0", cache_dtype="fp8") == said
    by[:] = [ran[0]]
    monkeypatch.setenv(UNTRIED.name, "1")
    assert on_gpus() is None


def test_a_model_with_another_state_stays_refused() -> None:
    [row] = [feature for name, feature in ROWS.items() if name.startswith("Mamba")]
    for architecture, said in (
        ("Lfm2ForCausalLM", None),
        ("Qwen3_5ForCausalLM", None),
        ("Qwen3NextForCausalLM", None),
        ("NemotronHForCausalLM", None),
        ("GraniteMoeHybridForCausalLM", None),
        ("FalconH1ForCausalLM", None),
        ("BailingMoeV2_5ForCausalLM", None),
        ("BailingMoeV3ForCausalLM", None),
        ("BambaForCausalLM", "Mamba or linear attention"),
    ):
        model = SimpleNamespace(is_attention_free=False, is_hybrid=True, architecture=architecture)
        assert row.found(SimpleNamespace(model_config=model)) == said


def two_head_sizes(
    device: str = "cpu", version: str = "0.32.0", of: str = "Heads of two sizes", **changes: Any
) -> str | None:
    """What a row finds of a Gemma 4 with heads of two sizes, with changes to its configuration."""
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    sizes |= {"enable_expert_parallel": False}
    model = {"architecture": "Gemma4ForCausalLM", "quantization": None, "runner_type": "generate"}
    model |= {
        "dtype": "torch.bfloat16",
        "enable_prompt_embeds": False,
        "is_moe": False,
        "use_mla": False,
        "enable_sleep_mode": False,
        "enforce_eager": True,
        "is_multimodal_model": False,
        "multimodal_config": None,
        "hf_config": None,
    }
    chunk = changes.pop("attention_chunk_size", None)
    text = changes.pop("text", SimpleNamespace(attention_chunk_size=chunk))
    pages = {"cache_dtype": "auto", "block_size": None}
    one_group = changes.pop("disable_hybrid_kv_cache_manager", None)
    others = {"speculative_config": None, "lora_config": None, "use_v2_model_runner": True}
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        parallel_config=SimpleNamespace(**{name: changes.pop(name, size) for name, size in sizes.items()}),
        model_config=SimpleNamespace(
            hf_text_config=text, **{name: changes.pop(name, value) for name, value in model.items()}
        ),
        cache_config=SimpleNamespace(**{name: changes.pop(name, value) for name, value in pages.items()}),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=one_group),
        **others | changes,
    )
    [row] = [row for name, row in ROWS.items() if name.startswith(of)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patch_points, "installed_version", lambda: version)
        return row.found(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"architecture": "LlamaForCausalLM", "speculative_config": object()}, None),
        ({"version": "0.31.0"}, "heads of two sizes with vLLM 0.31.0"),
        ({"device": "cuda", "version": "0.33.0"}, None),
        ({"device": "cuda", "version": "0.32.0"}, "heads of two sizes with vLLM 0.32.0"),
        (
            {"device": "cuda", "version": "0.33.0", "tensor_parallel_size": 2},
            None,
        ),
        ({"tensor_parallel_size": 2}, None),
        ({"tensor_parallel_size": 4}, None),
        (
            {"device": "cuda", "version": "0.33.0", "tensor_parallel_size": 4},
            "heads of two sizes with tensor parallelism 4",
        ),
        ({"tensor_parallel_size": 8}, "heads of two sizes with tensor parallelism 8"),
        ({"pipeline_parallel_size": 2}, "heads of two sizes with pipeline parallelism 2"),
        (
            {"speculative_config": SimpleNamespace(method="eagle3")},
            "heads of two sizes with speculative decoding with eagle3",
        ),
        (
            {
                "architecture": "LlamaForCausalLM",
                "speculative_config": SimpleNamespace(
                    draft_model_config=SimpleNamespace(architecture="Gemma4ForCausalLM")
                ),
            },
            "a draft model with heads of two sizes",
        ),
        ({"quantization": "awq"}, "heads of two sizes with quantisation awq"),
        ({"cache_dtype": "fp8"}, None),
        (
            {"cache_dtype": "fp8", "tensor_parallel_size": 2},
            "heads of two sizes with a KV cache in fp8 by several workers or beside drafts",
        ),
        (
            {"cache_dtype": "fp8", "speculative_config": SimpleNamespace(method="ngram", draft_model_config=None)},
            "heads of two sizes with a KV cache in fp8 by several workers or beside drafts",
        ),
        ({"cache_dtype": "fp8_per_token_head"}, "heads of two sizes with a KV cache in fp8_per_token_head"),
        (
            {"cache_dtype": "fp8", "device": "cuda", "version": "0.33.0", "dtype": "torch.float16"},
            "heads of two sizes with a KV cache in fp8 in float16 on a GPU",
        ),
        ({"lora_config": object()}, "heads of two sizes with LoRA adapters"),
        ({"runner_type": "pooling"}, "heads of two sizes with pooling"),
        ({"enable_prompt_embeds": True}, "heads of two sizes with embeddings as prompts"),
        ({"is_moe": True}, None),
        ({"is_moe": True, "enable_expert_parallel": True}, "heads of two sizes with expert parallelism"),
        ({"disable_hybrid_kv_cache_manager": True}, "heads of two sizes with --disable-hybrid-kv-cache-manager"),
    ],
)
def test_what_has_not_run_with_heads_of_two_sizes_is_found(changes: dict[str, Any], said: str | None) -> None:
    assert two_head_sizes(**changes) == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"is_moe": True}, None),
        ({"version": "0.31.0"}, "attention in chunks with vLLM 0.31.0"),
        ({"device": "cuda", "version": "0.33.0"}, None),
        ({"device": "cuda", "version": "0.33.0", "untried": "0"}, None),
        ({"device": "cuda", "version": "0.32.0", "untried": "0"}, "attention in chunks with vLLM 0.32.0"),
        ({"tensor_parallel_size": 2}, None),
        ({"tensor_parallel_size": 4}, "attention in chunks with tensor parallelism 4"),
        ({"is_moe": True, "enable_expert_parallel": True}, "attention in chunks with expert parallelism"),
        ({"quantization": "fp8"}, "attention in chunks with quantisation fp8"),
        ({"disable_hybrid_kv_cache_manager": True}, "attention in chunks with --disable-hybrid-kv-cache-manager"),
        ({"attention_chunk_size": 8192, "block_size": 128}, None),
        ({"attention_chunk_size": 64, "block_size": 128}, "attention in chunks of 64 tokens with --block-size 128"),
    ],
)
def test_what_has_not_run_with_attention_in_chunks_is_found(
    changes: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(UNTRIED.name, changes.get("untried", "1"))
    llama = {"of": "Attention in chunks", "architecture": "Llama4ForConditionalGeneration"}
    asked = {name: value for name, value in changes.items() if name != "untried"}
    assert two_head_sizes(**llama | asked) == said


def test_a_gpu_serves_attention_in_chunks_as_it_has_run_it(by: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By one worker in the second model runner: text in any dtype, in codes in bf16 alone, and images in fp32."""
    named, seeing = "attention in chunks with", "Llama4ForConditionalGeneration"
    of_chunks = partial(two_head_sizes, of="Attention in chunks", is_moe=True)
    on_a_gpu = partial(of_chunks, "cuda", "0.33.0", architecture="Llama4ForCausalLM")
    for dtype in ("float32", "bfloat16", "float16"):
        assert on_a_gpu(dtype=f"torch.{dtype}") is None
    drafts = {"speculative_config": SimpleNamespace(method="ngram", draft_model_config=None)}
    elsewhere: list[tuple[dict[str, Any], str]] = [
        ({"tensor_parallel_size": 2}, "tensor parallelism 2"),
        ({"use_v2_model_runner": False}, "the first model runner"),
        ({"lora_config": object()}, "LoRA adapters"),
        (drafts, "speculative decoding with ngram"),
        ({"enable_expert_parallel": True}, "expert parallelism"),
        ({"cache_dtype": "fp8"}, "a KV cache in fp8"),
        ({"enable_sleep_mode": True}, "sleep on a GPU"),
    ]
    for more, said in elsewhere:
        assert on_a_gpu(**more) == f"{named} {said}"
    as_text = {"is_multimodal_model": True, "architecture": seeing, "quantization": "a method"}
    as_text |= {"multimodal_config": SimpleNamespace(get_limit_per_prompt=lambda kind: 0)}
    for by[:] in ([OF_MODELOPT], [NVFP4[1]]):
        for cache in ("auto", "fp8"):
            in_codes = partial(on_a_gpu, **as_text, cache_dtype=cache)
            assert in_codes() is None
            for dtype in ("float32", "float16"):
                assert in_codes(dtype=f"torch.{dtype}") == f"{named} quantised weights in {dtype} on a GPU"
            assert in_codes(tensor_parallel_size=2) == f"{named} tensor parallelism 2"
            assert in_codes(use_v2_model_runner=False) == f"{named} the first model runner"
        assert on_a_gpu(quantization="a method") == f"{named} quantised weights of Llama4ForCausalLM"
    for by[:] in ([BLOCKS], [INT4], [NVFP4[0]]):
        assert on_a_gpu(**as_text) == f"{named} quantisation {by[0]}"
    sees = {"is_multimodal_model": True, "architecture": seeing}
    sees |= {"multimodal_config": SimpleNamespace(get_limit_per_prompt=lambda kind: int(kind == "image"))}
    assert on_a_gpu(**sees, dtype="torch.float32") is None
    for dtype in ("bfloat16", "float16"):
        assert on_a_gpu(**sees, dtype=f"torch.{dtype}") == f"{named} image inputs in {dtype} on a GPU"
        assert of_chunks(**sees, dtype=f"torch.{dtype}") is None, "a CPU is not asked"
    assert on_a_gpu(**sees, dtype="torch.float32", cache_dtype="fp8") == f"{named} a KV cache in fp8"
    monkeypatch.setenv(UNTRIED.name, "1")
    assert on_a_gpu(**sees) is on_a_gpu(tensor_parallel_size=2) is None


def latent(untried: bool = False, tree: str = "1", of: str = "MLA elsewhere", **changes: Any) -> str | None:
    """What a row finds of a DeepSeek, with changes to its configuration and to its text model's."""
    text = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": None, "llama_4_scaling": None}
    text |= {"tie_word_embeddings": False, "attention_bias": False}
    of_text = SimpleNamespace(**{name: changes.pop(name, value) for name, value in text.items()})
    named = {"of": of, "architecture": "DeepseekV3ForCausalLM"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UNTRIED.name, "1" if untried else "0")
        patch.setenv(TP_TREE.name, tree)
        return two_head_sizes(**named | {"text": of_text, "is_moe": True, "use_mla": True} | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"use_mla": False, "architecture": "LlamaForCausalLM", "kv_lora_rank": None}, None),
        ({"version": "0.31.0"}, "latent attention with vLLM 0.31.0"),
        ({"device": "cuda", "version": "0.33.0"}, None),
        ({"device": "cuda", "version": "0.32.0"}, "latent attention with vLLM 0.32.0"),
        ({"device": "cuda", "version": "0.33.0", "dtype": "torch.float16"}, "latent attention with float16 on a GPU"),
        ({"device": "cuda", "version": "0.33.0", "dtype": "torch.float16", "untried": True}, None),
        (
            {"device": "cuda", "version": "0.33.0", "dtype": "torch.float32", "untried": True},
            "latent attention with float32 on a GPU",
        ),
        ({"device": "cuda", "version": "0.33.0", "tensor_parallel_size": 2}, None),
        (
            {"device": "cuda", "version": "0.33.0", "architecture": "KimiVLForConditionalGeneration"},
            "latent attention with KimiVLForConditionalGeneration on a GPU",
        ),
        ({"device": "cuda", "version": "0.33.0", "architecture": "Glm4MoeLiteForCausalLM"}, None),
        ({"device": "cuda", "version": "0.33.0", "enforce_eager": False}, None),
        (
            {"device": "cuda", "version": "0.33.0", "use_v2_model_runner": False},
            "latent attention with the first model runner",
        ),
        ({"enforce_eager": False}, None),
        ({"tensor_parallel_size": 2}, None),
        ({"tensor_parallel_size": 4}, None),
        (
            {"device": "cuda", "version": "0.33.0", "tensor_parallel_size": 4},
            "latent attention with tensor parallelism 4",
        ),
        ({"device": "cuda", "version": "0.33.0", "tensor_parallel_size": 4, "untried": True}, None),
        ({"tensor_parallel_size": 8}, "latent attention with tensor parallelism 8"),
        ({"tree": "2"}, None),
        ({"tree": "4", "tensor_parallel_size": 4, "enable_expert_parallel": True}, None),
        ({"tree": "8", "tensor_parallel_size": 8}, "latent attention with tensor parallelism 8"),
        ({"tree": "8"}, f"latent attention with {TP_TREE.name}=8"),
        (
            {"tree": "2", "device": "cuda", "version": "0.33.0"},
            f"latent attention with {TP_TREE.name}=2",
        ),
        ({"pipeline_parallel_size": 2}, "latent attention with pipeline parallelism 2"),
        ({"enable_expert_parallel": True}, "latent attention with expert parallelism"),
        ({"quantization": "fp8"}, "latent attention with quantisation fp8"),
        ({"cache_dtype": "fp8"}, "latent attention with a KV cache in fp8"),
        ({"lora_config": object()}, "latent attention with LoRA adapters"),
        ({"speculative_config": SimpleNamespace(method="mtp")}, None),
        (
            {"speculative_config": SimpleNamespace(method="suffix")},
            "latent attention with speculative decoding with suffix",
        ),
        *(
            ({"speculative_config": SimpleNamespace(method=method), "tensor_parallel_size": workers} | beside, said)
            for method in ("ngram", "mtp")
            for workers in (2, 4)
            for beside, said in (
                ({}, None if workers == 2 else "latent attention with speculative decoding by 4 workers"),
                (
                    {"tree": "4", "enable_expert_parallel": True},
                    "latent attention with speculative decoding "
                    + (f"and {TP_TREE.name}=4" if workers == 2 else "by 4 workers"),
                ),
                ({"device": "cuda", "version": "0.33.0", "untried": True}, None),
            )
        ),
        (
            {
                "speculative_config": SimpleNamespace(method="mtp"),
                "tensor_parallel_size": 2,
                "device": "cuda",
                "version": "0.33.0",
            },
            "latent attention with speculative decoding by 2 workers",
        ),
        ({"speculative_config": SimpleNamespace(method="ngram")}, None),
        ({"speculative_config": SimpleNamespace(method="ngram"), "device": "cuda", "version": "0.33.0"}, None),
        (
            {"speculative_config": SimpleNamespace(method="custom_class"), "device": "cuda", "version": "0.33.0"},
            "latent attention with speculative decoding with custom_class",
        ),
        ({"index_topk": 2048}, "latent attention with keys that an indexer chooses"),
        ({"kv_lora_rank": 256}, "latent attention with vectors of 256 and 64 elements"),
        ({"llama_4_scaling": {}}, "latent attention with queries that are scaled by their position"),
        ({"enable_sleep_mode": True}, "latent attention with sleep"),
    ],
)
def test_what_has_not_run_with_latent_attention_is_found(changes: dict[str, Any], said: str | None) -> None:
    assert latent(**changes) == said


def test_quantised_weights_with_latent_attention_are_those_that_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    by = [BLOCKS]
    monkeypatch.setattr(coverage.schemes, "kinds", lambda *_: tuple(by))
    of_fp8 = partial(latent, quantization="fp8")
    assert of_fp8() is of_fp8(tensor_parallel_size=2) is None
    four = {"tensor_parallel_size": 4}
    assert of_fp8(**four) == "latent attention with quantised weights by 4 workers"
    assert of_fp8(**four, tree="4", enable_expert_parallel=True) is None
    on_gpus = partial(of_fp8, device="cuda", version="0.33.0")
    assert on_gpus() is None
    assert on_gpus(tensor_parallel_size=2) is None
    assert on_gpus(**four) == "latent attention with tensor parallelism 4"
    drafted = {"speculative_config": SimpleNamespace(method="ngram")}
    assert of_fp8(**drafted) is on_gpus(**drafted) is None
    by[0] = kind = "compressed-tensors with int8 weights"
    assert on_gpus() is None
    assert on_gpus(tensor_parallel_size=2) == f"latent attention with quantisation {kind} by 2 GPUs"
    said = f"latent attention with quantisation {kind} and speculative decoding on a GPU"
    assert on_gpus(**drafted) == said
    assert on_gpus(**drafted, untried=True) is on_gpus(tensor_parallel_size=2, untried=True) is None
    by[0] = BLOCKS
    by_two = on_gpus(**drafted, tensor_parallel_size=2)
    assert by_two == "latent attention with speculative decoding by 2 workers"
    of_images = "KimiVLForConditionalGeneration"
    assert of_fp8(architecture=of_images) == f"latent attention with quantised weights of {of_images}"
    for kind in ("compressed-tensors with int4 weights", "awq with int4 weights", "experts_int8 with int8 weights"):
        by[0] = kind
        assert of_fp8() is None
    assert on_gpus() == f"latent attention with quantisation {by[0]}"
    by.append("modelopt with float4 weights")
    assert of_fp8() == f"latent attention with quantisation {by[1]}"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_size": 48}, None),
        ({"use_mla": False, "tie_word_embeddings": True, "block_size": 8}, None),
        ({"tie_word_embeddings": True}, "latent attention with tied embeddings"),
        ({"attention_bias": True}, "latent attention with biases"),
        ({"block_size": 24}, "latent attention with --block-size 24"),
    ],
)
def test_latent_attention_whose_weights_or_pages_vllm_lacks_is_found(changes: dict[str, Any], said: str | None) -> None:
    assert latent(of="MLA with tied embeddings", **changes) == said


def test_chunks_of_other_models_are_found() -> None:
    [row] = [row for name, row in ROWS.items() if name.startswith("Other kinds of attention")]

    def said(architecture: str) -> str | None:
        text = SimpleNamespace(attention_chunk_size=8192)
        return row.found(SimpleNamespace(model_config=SimpleNamespace(architecture=architecture, hf_text_config=text)))

    assert said("Llama4ForConditionalGeneration") is None
    assert said("OtherForCausalLM") == "attention in chunks"


def test_heads_of_two_sizes_start_on_a_gpu_by_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu = {"device": "cuda", "version": "0.33.0"}
    assert two_head_sizes(**on_a_gpu) is None
    assert two_head_sizes(**on_a_gpu, use_v2_model_runner=False) == "heads of two sizes with the first model runner"
    monkeypatch.setenv(ATTENTION.name, "flex")
    assert two_head_sizes(**on_a_gpu) == "heads of two sizes with FlexAttention"


def test_heads_of_512_of_other_models_are_found() -> None:
    [row] = [row for name, row in ROWS.items() if name.startswith("Other head sizes")]

    def said(size: int) -> str | None:
        model = SimpleNamespace(get_head_size=lambda: size, runner_type="generate")
        return row.found(SimpleNamespace(model_config=model, device_config=SimpleNamespace(device_type="cpu")))

    assert said(64) is said(256) is None
    assert said(272) == "attention heads of size 272"
    assert said(512) == "attention heads of size 512"


@pytest.mark.parametrize(
    ("attention", "cores", "refused"),
    [
        ("auto", "auto", False),
        ("numba", "0-3|4-5", False),
        ("flex", "auto", True),
        ("flex", "0-3|4-5", True),
        ("flex", "0-3|4-7", False),
        ("flex", "nobind", False),
    ],
)
def test_engines_need_as_many_threads_only_beside_flexattention(
    attention: str, cores: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ATTENTION.name, attention)
    monkeypatch.setenv(coverage.CORES, cores)
    [row] = [feature for name, feature in ROWS.items() if name.startswith("Data parallelism on a CPU")]
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(data_parallel_size=2, world_size=1),
    )
    assert bool(row.found(config)) is refused
