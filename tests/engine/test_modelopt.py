"""An engine of a checkpoint in FP8 as ModelOpt writes it, with a KV cache in FP8, gives a request the same bits alone,
among others, in chunks and from the prefix cache: those of vLLM's own format of the same codes and scales. So does one
of a mixture of experts.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.engine.engines import EAGER_ON_GPU, OF_DEVICE, concurrent_requests, request, run, tokens, untried_on_gpu
from tests.fp8_checkpoints import FORMS, INPUT_SCALE, write
from vllm_batch_invariant.envs import TP_TREE, UNTRIED
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.worker import Engine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not patch_points.LINEAR_CHOICE.is_there(), reason="refused with this vLLM"),
    untried_on_gpu,
]

CACHES, RELOADS = "tests.engine.fp8_caches", "tests.engine.reloads"
SHAPE = Shape(hidden=256, intermediate=512, layers=2, head_size=128, vocab=1024, max_length=512, dtype="bfloat16")
OF_EXPERTS = replace(SHAPE, experts=6, top_k=2, expert_intermediate=256, dense_layers=0)
FAULTS = {SHAPE: "one_scale_a_step", OF_EXPERTS: "one_scale_of_experts"}
VOCABULARY = range(3, 900)
TARGETS = [
    request(tokens(150, 1, VOCABULARY), max_tokens=12, logprobs=5),
    request(tokens(70, 2, VOCABULARY), max_tokens=2, prompt_logprobs=8),
]
OTHERS = concurrent_requests(14, 3, vocabulary=VOCABULARY)
LIMITS = {"max_model_len": 512, "max_num_seqs": 24, "max_num_batched_tokens": 96, "skip_tokenizer_init": True}
LIMITS |= OF_DEVICE | EAGER_ON_GPU
SCALES = {"k_scale": 0.03125, "v_scale": 0.015625}
"""Of the KV cache of the first layer; that of the second has twice as much."""
WAYS = ("by_reload_weights", "by_transfer", "by_buckets", "by_name", "by_hand")
WITH_SCALES = WAYS[:2]
"""Those that bring scales of the cache, too: vLLM has let go of these when the others load."""
NEAR = 0.6
"""The root of the mean square of what logprobs are from float64, where logits have a deviation of 4. A code that is
rounded to its other neighbour moves codes of the next layer: float64 is 0.4 from itself where embeddings move by 2^-9.
"""
MODELOPT = FORMS["ModelOpt's by tensors, given"]
CONFIGS: dict[str, dict[str, Any]] = {
    "in config.json": MODELOPT.config | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
    "in a file": {
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    },
    "vLLM's": FORMS["fp8 by tensors, given"].config,
}
Answers = list[Any]


def config_of(name: str, kept: list[str]) -> dict[str, Any]:
    """That of a key of :data:`CONFIGS`, of a checkpoint of which some layers keep 16 bits."""
    config = CONFIGS[name]
    if name == "in a file":
        return config | {"quantization": config["quantization"] | {"exclude_modules": kept}}
    return config | {"modules_to_not_convert" if name == "vLLM's" else "ignore": kept}


class Checkpoints:
    """Folders of the same codes and scales, written when they are asked for."""

    def __init__(self, root: Path, shape: Shape) -> None:
        self._root, self.shape = root, shape

    def of(self, name: str, seed: int = 0, factor: float = 1) -> str:
        """Of a key of :data:`CONFIGS`, with so much of the scales of the cache."""
        source = self._root / f"source {seed} {factor}"
        folder = self._root / f"{name} {seed} {factor}"
        if folder.exists():
            return str(folder)
        if not source.exists():
            write(make_checkpoint(self._root / f"plain {seed}", self.shape, seed), source, MODELOPT)
            weights = load_file(source / "model.safetensors")
            for layer in range(self.shape.layers):
                for part, scale in SCALES.items():
                    of = f"model.layers.{layer}.self_attn.{part[0]}_proj.{part}"
                    weights[of] = torch.tensor(scale * factor * 2**layer)
            save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
        shutil.copytree(source, folder)
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] = config_of(name, config["quantization_config"]["ignore"])
        if name == "in a file":
            (folder / "hf_quant_config.json").write_text(json.dumps(config.pop("quantization_config")))
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)


@pytest.fixture(
    scope="module", params=[SHAPE, pytest.param(OF_EXPERTS, marks=pytest.mark.exhaustive)], ids=["dense", "experts"]
)
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("modelopt"), request.param)


def seen(answers: list[dict[str, Any]]) -> Answers:
    """Tokens, logprobs and candidates of the targets, which come last."""
    return [[one["completions"], one["prompt_logprobs"]] for one in answers[-len(TARGETS) :]]


def ask(engine: Engine) -> dict[str, Answers]:
    """Answers of the targets alone, among others and from the prefix cache."""
    alone = [engine.step(f"alone {number}", [one], True).requests[0] for number, one in enumerate(TARGETS)]
    among = engine.step("among others", [*OTHERS, *TARGETS], True).requests
    warm = engine.step("warm", TARGETS).requests
    return {"alone": seen(alone), "among others": seen(among), "warm": seen(warm)}


def started(model: str, afterwards: Callable[[Engine], Any] = ask, environment: Any = None, **more: object) -> Any:
    variables = {UNTRIED.name: "1"} if torch.cuda.is_available() else {}
    return run(
        {"model": model, **LIMITS, **more}, [], "1", afterwards=afterwards, **variables, **environment or {}
    ).afterwards


@pytest.fixture(scope="module")
def found(checkpoints: Checkpoints) -> dict[str, Any]:
    first, other, scaled = (checkpoints.of("in a file", *of) for of in ((), (1,), (0, 0.5)))

    def asked(engine: Engine) -> dict[str, Any]:
        made: dict[str, Any] = ask(engine)
        made["bytes"] = engine.call(f"{CACHES}:bytes_of_caches")
        for way in WAYS:
            rest = (("scaled", scaled), ("back", first)) if way in WITH_SCALES else ()
            for name, folder in (("other", other), ("back", first), *rest):
                engine.call(f"{RELOADS}:{way}", folder)
                steps = [engine.step(f"{way} {name} {number}", [one], True) for number, one in enumerate(TARGETS)]
                made[f"{way} {name}"] = seen([step.requests[0] for step in steps])
        made["scales"] = engine.call(f"{CACHES}:in_numbers", True)
        made["numbers of the codes"] = seen(engine.step("numbers of the codes", TARGETS, True).requests)
        engine.call(f"{CACHES}:in_numbers", False)
        made["exact numbers"] = seen(engine.step("exact numbers", TARGETS, True).requests)
        engine.call(f"tests.engine.quantisers:{FAULTS[checkpoints.shape]}")
        made["one scale"] = ask(engine)
        return made

    in_parts = {"worker_extension_cls": f"{RELOADS}.Extension", "weight_transfer_config": '{"backend": "files"}'}
    return started(first, asked, **in_parts)


def test_a_request_has_the_same_bits_alone_among_others_in_chunks_and_from_the_cache(found: dict[str, Any]) -> None:
    assert {dtype for dtype, _ in found["bytes"]} == {"torch.uint8"}
    assert all(written for _, written in found["bytes"])
    assert found["alone"] == found["among others"] == found["warm"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA graphs keep what they captured")
def test_one_scale_of_all_rows_of_a_step_is_found(found: dict[str, Any]) -> None:
    assert found["one scale"]["alone"] != found["one scale"]["among others"]


def test_its_cache_has_the_scales_of_the_checkpoint(found: dict[str, Any]) -> None:
    """And the bits of a cache in bf16 of the codes' numbers, times scales that are powers of two."""
    assert found["scales"] == [[scale * 2**layer for scale in SCALES.values()] for layer in range(SHAPE.layers)]
    assert found["alone"] == found["numbers of the codes"] != found["exact numbers"]


@pytest.mark.parametrize("name", ["in config.json", "vLLM's"])
def test_other_files_of_the_same_codes_and_scales_have_its_bits(
    name: str, found: dict[str, Any], checkpoints: Checkpoints
) -> None:
    """No scale is that of another shard: vLLM itself codes shards again with the largest. On a GPU in CUDA graphs."""
    cache = {"kv_cache_dtype": "fp8"} if name == "vLLM's" else {}
    in_graphs = {"enforce_eager": False} if torch.cuda.is_available() else {}
    answers = started(checkpoints.of(name), **cache, **in_graphs)
    assert answers["alone"] == answers["among others"] == answers["warm"] == found["alone"]


@pytest.mark.parametrize("way", WAYS)
def test_codes_and_scales_that_come_again_serve(way: str, found: dict[str, Any]) -> None:
    assert found[f"{way} back"] == found["alone"] != found[f"{way} other"]
    assert found[f"{way} other"] == found[f"{WAYS[0]} other"]


@pytest.mark.parametrize("way", WITH_SCALES)
def test_scales_of_the_cache_come_with_weights(way: str, found: dict[str, Any], checkpoints: Checkpoints) -> None:
    assert found[f"{way} scaled"] == found[f"{WITH_SCALES[0]} scaled"] != found["alone"]


@pytest.mark.exhaustive
def test_weights_that_came_serve_as_those_that_an_engine_started_with(
    found: dict[str, Any], checkpoints: Checkpoints
) -> None:
    for name, of in (("other", (1,)), ("scaled", (0, 0.5))):
        assert started(checkpoints.of("in a file", *of))["alone"] == found[f"{WAYS[0]} {name}"]


def codes_of(x: torch.Tensor, scale: float) -> torch.Tensor:
    """The numbers of e4m3's codes of x, by torch's own rounding."""
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def attend_to_codes(model: Any, scales_of: Callable[[int], tuple[float, float]]) -> None:
    """Give attention of Transformers' model the numbers of codes of keys and values, with the scales of each layer."""
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def of_codes(module: Any, query: Any, key: Any, value: Any, *arguments: Any, **named: Any) -> Any:
        k_scale, v_scale = scales_of(module.layer_idx)
        return attend(module, query, codes_of(key, k_scale), codes_of(value, v_scale), *arguments, **named)

    ALL_ATTENTION_FUNCTIONS.register("of_codes", of_codes)
    model.config._attn_implementation = "of_codes"


def reference(folder: str) -> torch.nn.Module:
    """Transformers' model in float64 of the numbers of a checkpoint's codes; its layers are given numbers of codes."""
    weights = load_file(Path(folder) / "model.safetensors")
    config = json.loads((Path(folder) / "config.json").read_text())
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).double().eval()
    whole = {name: tensor.double() for name, tensor in weights.items() if not name.endswith("_scale")}
    for name in whole:
        if f"{name}_scale" in weights:
            whole[name] *= weights[f"{name}_scale"].double()
    missing, unexpected = model.load_state_dict(whole, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    attend_to_codes(model, lambda layer: (SCALES["k_scale"] * 2**layer, SCALES["v_scale"] * 2**layer))
    for name, layer in model.named_modules():
        if name.endswith("_proj"):
            layer.register_forward_pre_hook(lambda _, given: (codes_of(given[0], INPUT_SCALE),))
    return model


def distance(model: torch.nn.Module, answers: Answers) -> float:
    """Of the logprobs of a prompt, as :data:`NEAR` is."""
    prompt, listed = TARGETS[1]["prompt"], answers[1][1]
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    rows = zip(expected, listed[1:], strict=False)
    apart = [float.fromhex(value) - row[token].item() for row, of in rows for token, value, _ in of]
    return torch.tensor(apart).square().mean().sqrt().item()


def test_its_logprobs_are_near_float64(found: dict[str, Any], checkpoints: Checkpoints) -> None:
    """One whose MLP has one scale for both halves is not: the larger one's, with codes of the other."""
    if checkpoints.shape.experts:
        pytest.skip("in bf16 a token may have other experts")
    model = reference(checkpoints.of("in a file"))
    assert distance(model, found["alone"]) < NEAR
    scales = load_file(Path(checkpoints.of("in a file")) / "model.safetensors")
    for number, layer in enumerate(model.model.layers):
        of = [scales[f"model.layers.{number}.mlp.{name}_proj.weight_scale"].item() for name in ("gate", "up")]
        layer.mlp.gate_proj.weight.data *= max(of) / of[0]
        layer.mlp.up_proj.weight.data *= max(of) / of[1]
    assert distance(model, found["alone"]) > 2 * NEAR


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_two_workers_have_the_bits_of_one_by_a_tree(checkpoints: Checkpoints) -> None:
    if checkpoints.shape.experts:
        pytest.skip("a tree has no parts of experts")
    tree = {TP_TREE.name: "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    one, two = (started(checkpoints.of("in a file"), environment=tree, tensor_parallel_size=size) for size in (1, 2))
    assert two["alone"] == two["among others"] == two["warm"] == one["alone"]


@pytest.mark.exhaustive
def test_a_cache_in_bf16_leaves_its_scales_alone(found: dict[str, Any], checkpoints: Checkpoints) -> None:
    """If it is asked for."""
    plain = started(checkpoints.of("in a file"), kv_cache_dtype="bfloat16")
    assert plain["alone"] == plain["among others"] == plain["warm"]
    assert plain["alone"] == found["exact numbers"]
