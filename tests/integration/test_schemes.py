"""The table of quantised checkpoints: what vLLM reads of their configurations passes, or is refused by name in one
line.
"""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine import quantised_layers
from tests.fp8_checkpoints import FORMS, GROUP, compressed
from tests.quantised_checkpoints import FORMATS
from vllm_batch_invariant.envs import ARITHMETIC, UNTRIED
from vllm_batch_invariant.integration import coverage
from vllm_batch_invariant.integration.reviews import patch_points, schemes

pytest.importorskip("vllm")
from vllm.model_executor.layers.quantization import get_quantization_config

ROWS = {
    feature.name: feature
    for feature in coverage.REFUSED
    if "uantised weights" in feature.name or "tokens of a step" in feature.name
}
NAMES = {"gptq": "auto_gptq", "awq": "auto_awq"}
CT = "quantisation compressed-tensors"
W4A16 = FORMATS["w4a16 of 128"].config
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}


def named(config: dict[str, Any]) -> str:
    """vLLM's name of the method of a ``quantization_config``."""
    method = config["quant_method"]
    if "FP4" in str(config.get("quantization", config).get("quant_algo")):
        return f"{method}_fp4"
    return NAMES.get(method, method)


def found(
    config: dict[str, Any],
    device: str = "cpu",
    workers: int = 1,
    stages: int = 1,
    engines: int = 1,
    whole_experts: bool = False,
    draft: dict[str, Any] | None = None,
    drafter: dict[str, Any] | None = None,
    **of_model: Any,
) -> list[str]:
    """What the rows find in a model of this ``quantization_config``, with a draft model of another."""
    config = json.loads(json.dumps(config))
    name = of_model.get("quantization") or named(config)
    of_draft = SimpleNamespace(**{"quantization": named(draft) if draft else None, "is_moe": False} | (drafter or {}))
    drafts = SimpleNamespace(draft_model_config=of_draft) if draft else None
    read = get_quantization_config(name).from_config(config)
    model = {"quantization": name, "is_moe": False} | of_model
    given = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(**model),
        quant_config=read,
        load_config=draft,
        speculative_config=drafts,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=workers,
            pipeline_parallel_size=stages,
            data_parallel_size=engines,
            enable_expert_parallel=whole_experts,
        ),
    )
    return [what for row in ROWS.values() if (what := row.found(given))]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")


def with_group(name: str = "w4a16 of 128", **changes: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(FORMATS[name].config))
    group = config["config_groups"]["group_0"]
    for part, of in changes.items():
        group[part] = (group[part] or {}) | of if isinstance(of, dict) else of
    return config


@pytest.mark.parametrize("config", [of.config for of in (*FORMATS.values(), *FORMS.values())], ids=[*FORMATS, *FORMS])
def test_a_checkpoint_whose_layers_are_known_passes(config: dict[str, Any]) -> None:
    assert found(config) == []


@pytest.mark.parametrize("name", quantised_layers.FORMS)
def test_what_has_run_beside_other_layers_is_what_checkpoints_are(name: str) -> None:
    config = quantised_layers.config_of(quantised_layers.FORMS[name], ["lm_head"])
    read = get_quantization_config(named(config)).from_config(config)
    [kind] = schemes.kinds(SimpleNamespace(quantization=named(config)), read)
    beside_images = (kinds for of in coverage.RAN.encoded_quantised.values() for kinds in of["cpu"])
    assert kind in {*coverage.RAN.delta_rule_quantised["cpu"], *beside_images}


MODELOPT = {name: form.config for name, form in FORMS.items() if form.config["quant_method"] == "modelopt"}
SERVED_BY_GPUS = {name: form for name, form in FORMS.items() if name not in MODELOPT}
CACHE_OF_MODELOPT = {"num_bits": 8, "type": "float", "dynamic": False}


@pytest.mark.parametrize("name", MODELOPT)
def test_modelopt_in_fp8_passes_in_both_files_with_a_cache_in_fp8_and_without(name: str) -> None:
    """Also in lower case, as vLLM reads it."""
    config = MODELOPT[name]
    assert found(config | {"kv_cache_scheme": CACHE_OF_MODELOPT}) == []
    for algorithm in (config["quant_algo"], config["quant_algo"].lower()):
        of = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
        assert found({"quant_method": "modelopt", "quantization": of}) == []
        assert found({"quant_method": "modelopt", "quantization": of | {"kv_cache_quant_algo": "FP8"}}) == []
        for other in ("NVFP4", "INT8"):
            said = ["quantisation modelopt with this scheme for the KV cache"]
            assert found({"quant_method": "modelopt", "quantization": of | {"kv_cache_quant_algo": other}}) == said


NVFP4_OF_MODELOPT: dict[str, Any] = {
    "quant_method": "modelopt",
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}


@pytest.mark.parametrize("is_moe", [False, True], ids=["dense", "experts"])
def test_so_does_its_nvfp4(is_moe: bool) -> None:
    assert found(NVFP4_OF_MODELOPT, is_moe=is_moe) == []
    config = FORMATS["nvfp4 of ModelOpt with activations"].config | {"kv_cache_scheme": CACHE_OF_MODELOPT}
    assert found(config, is_moe=is_moe) == []


@pytest.mark.parametrize("name", MODELOPT)
def test_experts_have_one_kind_of_modelopt_in_fp8(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And two GPUs have it of dense models alone."""
    config = MODELOPT[name]
    read = get_quantization_config("modelopt").from_config(json.loads(json.dumps(config)))
    [kind] = schemes.kinds(SimpleNamespace(quantization="modelopt"), read)
    has_run = config["quant_algo"] == "FP8"
    assert found(config, is_moe=True) == ([] if has_run else [f"quantisation {kind} of a mixture of experts"])
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    assert found(config, "cuda") == found(config, "cuda", workers=2) == []
    if has_run:
        assert found(config, "cuda", is_moe=True) == []
        [refused] = found(config, "cuda", is_moe=True, workers=2)
        assert refused == f"quantisation modelopt on a GPU of {kind} by several GPUs"
        monkeypatch.setenv(UNTRIED.name, "1")
        assert found(config, "cuda", is_moe=True, workers=2) == []


@pytest.mark.parametrize("target", [{"quantization": None}, {}], ids=["plain", "INT4"])
def test_no_gpu_has_a_draft_model_of_modelopt_in_fp8(target: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As its own configuration says: in FP4 it has."""
    read = staticmethod(lambda draft, of: get_quantization_config(draft.quantization).from_config(dict(of)))
    monkeypatch.setattr(patch_points.CONFIG.get(), "get_quantization_config", read)
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    refused = ["drafts of quantisation modelopt on a GPU"]
    for draft in MODELOPT.values():
        assert found(W4A16, "cuda", draft=draft, **target) == refused
    for other in (W4A16, FORMS["fp8 by blocks"].config, FORMATS["nvfp4 of ModelOpt"].config):
        assert found(W4A16, "cuda", draft=other, **target) == []
    with monkeypatch.context() as untried:
        untried.setenv(UNTRIED.name, "1")
        assert found(W4A16, "cuda", draft=draft, **target) == []
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    assert found(W4A16, draft=draft, **target) == []


OTHER_CACHES = {"num_bits": 4}, {"dynamic": True}, {"type": "int"}, {"symmetric": False}, {"strategy": "token"}


@pytest.mark.parametrize("strategy", schemes.GIVEN_SCALES)
@pytest.mark.parametrize("change", [{}, *OTHER_CACHES])
def test_a_cache_with_given_scales_of_a_layer_or_its_heads_passes_and_no_other(
    change: dict[str, Any], strategy: str
) -> None:
    scheme = FLOAT | {"strategy": strategy, "dynamic": False} | change
    said = [f"{CT} with this scheme for the KV cache"] if change else []
    assert found(W4A16 | {"kv_cache_scheme": scheme}) == said


@pytest.mark.parametrize(("pattern", "has"), [(None, True), ("M-M*-E", True), ("M-M*-", False)])
def test_a_model_whose_layers_have_no_experts_has_none(pattern: str | None, has: bool) -> None:
    """Nemotron-H's configuration has a number of them, whatever its layers are."""
    model = SimpleNamespace(is_moe=True, hf_text_config=SimpleNamespace(hybrid_override_pattern=pattern))
    assert schemes.has_experts(model) is has
    assert bool(found(FORMS["compressed-tensors by rows, given"].config, **vars(model))) is has


TOKEN = FLOAT | {"strategy": "token", "dynamic": True}
REFUSED = {
    "activations by other groups than blocks": (
        compressed("block", GROUP | {"group_size": 64}),
        f"{CT} with float8 weights (one scale a block (128, 128)) and float8 dynamic group 64 activations",
    ),
    "activations by tokens of weights by blocks": (
        compressed("block", TOKEN),
        f"{CT} with float8 weights (one scale a block (128, 128)) and float8 dynamic token activations",
    ),
    "activations by a scale of the whole batch": (
        with_group("fp8 by tensor", input_activations=TOKEN | {"strategy": "tensor"}),
        f"{CT} with float8 weights (one scale a tensor) and float8 dynamic tensor activations",
    ),
    "INT8 activations with zero points": (
        with_group(
            weights={"num_bits": 8, "strategy": "channel", "group_size": None},
            input_activations=TOKEN | {"type": "int", "symmetric": False},
        ),
        f"{CT} with int8 weights (one scale a channel) and asymmetric int8 dynamic token activations",
    ),
    "W4A8": (
        with_group(input_activations=TOKEN),
        f"{CT} with int4 weights (one scale a group 128) and float8 dynamic token activations",
    ),
    "FP4 activations of INT4 weights": (
        with_group(input_activations=FORMATS["nvfp4"].group["weights"] | {"dynamic": "local"}),
        f"{CT} with int4 weights (one scale a group 128) and float4 dynamic tensor_group activations",
    ),
    "MXFP4 weights with FP8 activations": (
        with_group("mxfp4", input_activations=TOKEN),
        f"{CT} with float4 weights (one scale a group 32) and float8 dynamic token activations",
    ),
    "NVFP4 of ModelOpt in other groups": (
        FORMATS["nvfp4 of ModelOpt"].config | {"group_size": 32},
        "quantisation modelopt with float4 weights (one scale a tensor_group 32)",
    ),
    "NVFP4 of ModelOpt with a KV cache in FP4": (
        NVFP4_OF_MODELOPT | {"quantization": NVFP4_OF_MODELOPT["quantization"] | {"kv_cache_quant_algo": "NVFP4"}},
        "quantisation modelopt_fp4 with this scheme for the KV cache",
    ),
    "activations of an output": (
        with_group(output_activations=FLOAT | {"strategy": "tensor", "dynamic": False, "type": "int"}),
        f"{CT} with int4 weights (one scale a group 128) and int8 static tensor output activations",
    ),
    "INT8 activations of an output alone": (
        with_group(
            weights={"num_bits": 8, "strategy": "channel", "group_size": None},
            output_activations=TOKEN | {"type": "int"},
        ),
        f"{CT} with int8 weights (one scale a channel) and int8 dynamic token output activations",
    ),
    "groups that nobody has tested": (
        with_group(weights={"group_size": 16}),
        f"{CT} with int4 weights (one scale a group 16)",
    ),
    "blocks that nobody has tested": (
        with_group("fp8 by block", weights={"block_structure": [64, 128]}),
        f"{CT} with float8 weights (one scale a block (64, 128))",
    ),
    "numbers of bits that nobody has tested": (
        with_group(weights={"num_bits": 3}),
        f"{CT} with int3 weights (one scale a group 128)",
    ),
    "a KV cache": (
        W4A16 | {"kv_cache_scheme": FLOAT | {"strategy": "channel", "dynamic": False}},
        f"{CT} with this scheme for the KV cache",
    ),
    "rotations": (
        W4A16
        | {
            "transform_config": {
                "config_groups": {"R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}}
            }
        },
        f"{CT} with transforms of activations",
    ),
    "layers of GPTQ by another rule": (
        FORMATS["gptq"].config | {"dynamic": {"+:.*down.*": {"group_size": 16}}},
        "quantisation gptq with int4 weights (one scale a group 16)",
    ),
    "AWQ without zero points": (
        FORMATS["awq"].config | {"zero_point": False},
        "quantisation awq with int4 weights (one scale a group 128)",
    ),
    "other blocks of FP8": (
        FORMS["fp8 by blocks"].config | {"weight_block_size": [64, 128]},
        "quantisation fp8 with float8 weights (one scale a block (64, 128)) and float8 dynamic group 128 activations",
    ),
    "FP8 in another storage": (
        FORMS["fp8 by tensors"].config | {"store_dtype": "mxfp4"},
        "quantisation fp8 with float8 stored as mxfp4 weights (one scale a tensor) and float8 dynamic token "
        "activations",
    ),
}


@pytest.mark.parametrize(("config", "said"), REFUSED.values(), ids=REFUSED)
def test_another_checkpoint_is_refused_by_what_it_has(config: dict[str, Any], said: str) -> None:
    assert found(config) == [said]


@pytest.mark.parametrize("name", FORMATS)
def test_what_vllm_quantises_where_fp4_is_multiplied_is_refused_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NVFP4 checkpoint that names no activations is served there, too."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "has_device_capability", classmethod(lambda _, least: least <= 103))
    refused = name.endswith("with activations") or name == "mxfp4"
    assert [what.partition(" on a GPU that multiplies FP4")[1] != "" for what in found(FORMATS[name].config)] == (
        [True] * refused
    )


GPTQ = FORMATS["gptq"].config | {"group_size": 32}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"bits": 8}, None),
        ({"sym": False}, "quantisation moe_wna16 of gptq with int4 weights (one scale a group 32) with zero points"),
        ({"group_size": -1}, "quantisation moe_wna16 of gptq with int4 weights (one scale a channel)"),
        ({"dynamic": {"-:.*down.*": {}}}, "quantisation moe_wna16 with rules of layers"),
    ],
)
def test_gptq_of_experts_as_moe_wna16_passes_in_symmetric_groups(changed: dict[str, Any], said: str | None) -> None:
    asked = found(GPTQ | changed, quantization="moe_wna16", is_moe=True)
    assert asked == ([] if said is None else [said])


def test_a_layer_that_gptq_leaves_alone_is_not_asked_for() -> None:
    assert found(FORMATS["gptq"].config | {"dynamic": {"-:.*down.*": {}}}) == []


@pytest.mark.parametrize(
    "name",
    ["torchao", "quark", "inc", "mxfp8", "fbgemm_fp8", "modelopt_mxfp8", "one of a later vLLM"],
)
def test_a_method_without_a_row_is_refused(name: str) -> None:
    model = SimpleNamespace(quantization=name)
    assert schemes.refused(model, SimpleNamespace()) == f"quantisation {name}"


def test_what_is_quantised_once_more_is_refused() -> None:
    model = SimpleNamespace(quantization="compressed-tensors", quantization_config=object())
    said = f"{CT} beside quantisation while loading"
    assert schemes.refused(model, SimpleNamespace()) == said


def online(name: str, more: dict[str, Any] | None = None) -> Any:
    """vLLM's configuration of what is quantised while it is loaded."""
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.layers.quantization.experts_int8 import ExpertsInt8Config
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    return (
        ExpertsInt8Config()
        if name == "experts_int8"
        else OnlineQuantizationConfig(resolve_quantization_config(name, more))
    )


ONLINE = [
    ("fp8_per_block", {}, None),
    ("fp8_per_channel", {}, None),
    ("fp8_per_tensor", {}, None),
    ("online", {"linear": "fp8_per_block_static"}, None),
    ("online", {"targets": {"*.mlp.*": "fp8_per_block", "*.self_attn.*": "fp8_per_channel"}}, None),
    ("online", {"targets": {"*.mlp.*": "fp8_per_block", "*.self_attn.*": "mxfp4"}}, "online with mxfp4_static weights"),
    ("nvfp4_per_token", {}, "quantisation nvfp4_per_token"),
    (
        "int8_per_channel_weight_only",
        {"moe": {"weight": "int8_per_channel_static", "activation": "fp8_per_token"}},
        "online with int8_per_channel_static with ",
    ),
]


@pytest.mark.parametrize(("name", "more", "said"), ONLINE, ids=lambda _: "")
def test_16_bit_weights_are_quantised_while_they_are_loaded_by_what_is_known(
    name: str, more: dict[str, Any], said: str | None
) -> None:
    config = online(name, more or None)
    model = SimpleNamespace(quantization=name, quantization_config=config.args, is_moe=False)
    refused = schemes.refused(model, config)
    assert refused is None if said is None else refused is not None and said in refused
    model.is_moe = True
    assert schemes.refused(model, config) is not None
    model.quantization = "fp8"  # as vLLM 0.32 also calls it
    assert schemes.refused(model, config) == "quantisation fp8"


@pytest.mark.parametrize("name", ["int8_per_channel_weight_only", "experts_int8"])
def test_experts_become_int8_while_they_are_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside linear layers of 16 bits, and none in FP8."""
    config = online(name)
    model = SimpleNamespace(quantization=name, quantization_config=getattr(config, "args", None), is_moe=True)
    assert schemes.refused(model, config) is None
    assert schemes.of_activations(model, config) == ()
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1)
    given = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=model,
        quant_config=config,
        parallel_config=parallel,
    )
    assert [row.found(given) for row in ROWS.values()] == [None] * 3
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    given.device_config.device_type = "cuda"
    assert [row.found(given) for row in ROWS.values()] == [None] * 3
    parallel.tensor_parallel_size, given.device_config.device_type = 2, "cpu"
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    assert [what for row in ROWS.values() if (what := row.found(given))] == [
        f"quantisation {name} on a CPU of experts made int8 by several workers"
    ]
    monkeypatch.setenv(UNTRIED.name, "1")
    assert [row.found(given) for row in ROWS.values()] == [None] * 3
    model.is_moe = False
    assert schemes.refused(model, config) == f"quantisation {name} of a model without experts, which alone it is for"
    model.is_moe = True
    if name != "experts_int8":
        both = online(name, {"linear": "fp8_per_block_static"})
        refused = schemes.refused(model, both)
        assert refused is not None
        assert refused.endswith(" of a mixture of experts")


def test_experts_in_other_formats_and_another_vllm_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    where = f"{CT} on a CPU"
    assert found(W4A16, is_moe=True) == []
    assert [name for name in FORMATS if "nvfp4" in name and found(FORMATS[name].config, is_moe=True)] == []
    [of_mxfp4] = found(FORMATS["mxfp4"].config, is_moe=True)
    assert of_mxfp4.endswith(" of a mixture of experts")
    apart = [name for name in FORMS if found(FORMS[name].config, is_moe=True)]
    of_modelopt = [name for name, config in MODELOPT.items() if config["quant_algo"] != "FP8"]
    assert apart == ["compressed-tensors by rows, given", "compressed-tensors by tensors", *of_modelopt]
    [of_experts] = found(FORMATS["fp8 by channel"].config, is_moe=True)
    assert of_experts.endswith(" of a mixture of experts")
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.31.0")
    assert found(W4A16) == [f"{where} with vLLM 0.31.0"]


def test_nvfp4_beside_another_format_has_run_in_mixed_precision_alone() -> None:
    """A checkpoint of compressed-tensors may have groups of layers in several."""
    both = json.loads(json.dumps(FORMATS["nvfp4 with activations"].config))
    both["config_groups"]["group_1"] = FORMATS["fp8 by channel"].config["config_groups"]["group_0"] | {"targets": ["x"]}
    for device in ("cpu", "cuda"):
        [refused] = found(both, device, is_moe=False)
        assert refused.startswith("quantisation compressed-tensors of compressed-tensors with float")


def test_what_no_gpu_has_run_is_refused_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    assert found(W4A16, "cuda") == []
    for form in (*FORMATS.values(), *SERVED_BY_GPUS.values()):
        assert found(form.config, "cuda") == []
    assert found(W4A16, "cuda", is_moe=True) == found(W4A16, "cuda", workers=2) == []
    for more, what in (
        ({"stages": 2}, " in stages"),
        ({"engines": 2, "is_moe": True}, " of experts by several engines"),
    ):
        [refused] = found(W4A16, "cuda", **more)
        assert refused.endswith(what)
        with monkeypatch.context() as untried:
            untried.setenv(UNTRIED.name, "1")
            assert found(W4A16, "cuda", **more) == []
    for form in (of for name, of in FORMATS.items() if "nvfp4" in name):
        assert found(form.config, "cuda", is_moe=True) == found(form.config, "cuda", is_moe=True, workers=2) == []
        with monkeypatch.context() as drafting:
            read = staticmethod(lambda draft, of: get_quantization_config(draft.quantization).from_config(dict(of)))
            drafting.setattr(patch_points.CONFIG.get(), "get_quantization_config", read)
            assert found(form.config, "cuda", is_moe=True, draft=W4A16) == []
            [refused] = found(W4A16, "cuda", draft=form.config, drafter={"is_moe": True})
            assert refused.startswith("drafts of quantisation ")
            assert found(form.config, "cuda", draft=W4A16) == found(W4A16, "cuda", is_moe=True, draft=W4A16) == []
    assert found(NVFP4_OF_MODELOPT, "cuda") == found(NVFP4_OF_MODELOPT, "cuda", is_moe=True) == []
    of_experts = {name for name, form in FORMS.items() if found(form.config, "cuda", is_moe=True) == []}
    by_two = {name for name in of_experts if found(FORMS[name].config, "cuda", is_moe=True, workers=2) == []}
    assert by_two == {
        *("fp8 by blocks", "fp8 by tensors", "compressed-tensors by blocks", "compressed-tensors by rows"),
    }
    assert of_experts - by_two == {f"{of} by tensors, given" for of in ("fp8", "compressed-tensors", "ModelOpt's")}
    asked = {"is_moe": True, "workers": 2, "whole_experts": True}
    assert {name for name in by_two if found(FORMS[name].config, "cuda", **asked)} == set()
    shared = {name for name, form in FORMS.items() if found(form.config, "cuda", workers=2) == []}
    assert shared == {*FORMS}
    monkeypatch.setattr(coverage, "RAN", replace(coverage.RAN, activations_by_two_gpus=()))
    [several] = found(FORMS["fp8 by blocks"].config, "cuda", workers=2)
    assert several.endswith(" float8 dynamic group 128 activations by several GPUs")
    monkeypatch.setenv(ARITHMETIC.name, "exact")
    [exact] = found(W4A16, "cuda")
    assert exact.endswith(" in exact arithmetic")
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    assert found(W4A16, "cpu", workers=2) == []


def test_a_plain_model_is_not_asked() -> None:
    given = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"), model_config=SimpleNamespace(quantization=None)
    )
    assert [row.found(given) for row in ROWS.values()] == [None] * len(ROWS) == [None] * 3
