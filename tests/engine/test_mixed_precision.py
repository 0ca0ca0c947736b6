"""An engine of a checkpoint of ModelOpt whose layers are in NVFP4, in FP8 and in 16 bits, with a KV cache in FP8, gives
a request the same bits alone, among others, from chunks, after a preemption and from the prefix cache: those of a
checkpoint in FP8 alone that has the matrices of what is in NVFP4.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine import kept_states, multimodal, test_quantised_hybrids
from tests.engine.drafters import add_nemotron_mtp
from tests.engine.engines import EngineFailed, untried_on_gpu
from tests.engine.reloads import EXTENSION
from tests.engine.test_mamba import DEFAULT, PAGES
from tests.engine.test_modelopt import attend_to_codes, codes_of
from tests.engine.test_quantised_hybrids import LONG, NANO, OF_CODES, SUPER
from tests.fp8_checkpoints import INPUT_SCALE
from tests.mixed_checkpoints import SCALES, Mixture, said, say, write
from vllm_batch_invariant.envs import TP_TREE
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.requests import NGRAMS
from vllm_batch_invariant.verify.harness.worker import Engine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not patch_points.EXPERTS_CHOICE.is_there(), reason="refused with this vLLM"),
    untried_on_gpu,
]

SHAPE = Shape(hidden=256, intermediate=512, layers=3, head_size=64, vocab=512, max_length=1024, dtype="bfloat16")
OF_EXPERTS = replace(SHAPE, experts=6, top_k=2, expert_intermediate=128, dense_layers=0)
LENGTH = 122
"""Of prompts that need a page of keys more than they begin with, without states."""
NEAR = 1.5
"""Of logprobs that follow from codes, whose neighbours bf16 may reach."""
OF_STATES = Mixture(r"\.experts\.\d+\.|\.[14]\.mixer\.(up|down)_proj$", r"\.(in|out)_proj$|shared_experts\.")
"""As Nemotron 3 Super is published: attention, the layers around latent experts and the output head keep 16 bits."""


class Family(NamedTuple):
    """A model, and how its layers are quantised."""

    source: Callable[[Path], Path]
    mixture: Mixture
    settings: dict[str, Any]
    length: int
    fault: str = "one_scale_a_step"

    @property
    def has_states(self) -> bool:
        return self.length >= OF_CODES


def _dense(shape: Shape) -> Callable[[Path], Path]:
    return lambda folder: make_checkpoint(folder, shape)


_FEW = {"max_num_batched_tokens": 61, "num_gpu_blocks_override": 14}
_HYBRID = {"settings": DEFAULT | {"max_model_len": 1024}, "length": OF_CODES}
FAMILIES = {
    "Qwen3": Family(
        _dense(SHAPE),
        Mixture(r"0\.mlp\.|1\.self_attn\.._proj$|2\.mlp\.down", r"_proj$(?<!2\.self_attn\.[qkv]_proj)"),
        _FEW,
        LENGTH,
    ),
    "Qwen3 with experts": Family(
        _dense(OF_EXPERTS),
        Mixture(r"layers\.[01]\.mlp\.experts\.", r"layers\.[02]\..*_proj$", "W4A16_NVFP4"),
        _FEW,
        LENGTH,
    ),
    **{
        name: Family(test_quantised_hybrids.FAMILIES[name].source, OF_STATES, **_HYBRID)
        for name in ("Nemotron-H", NANO, SUPER)
    },
    "Qwen3.5": Family(
        test_quantised_hybrids.FAMILIES["Qwen3.5"].source,
        Mixture(r"\.mlp\.(gate|up|down)_proj$", r"linear_attn\.(in_proj_(qkv|z)|out_proj)$"),
        _HYBRID["settings"] | {"num_gpu_blocks_override": 12},
        500,
    ),
}
"""Layers of the first two differ in what is in which format."""


class Case(NamedTuple):
    """Checkpoints of one model, and what an engine of the first gave."""

    name: str
    packed: Path
    unpacked: Path
    found: dict[str, Any]

    @property
    def family(self) -> Family:
        return FAMILIES[self.name]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    path = multimodal.python_path(tmp_path_factory.mktemp("path"))
    return partial(kept_states.started, path=path, **PAGES)


def ask(engine: Engine, family: Family) -> dict[str, Any]:
    company = kept_states.others(family.length)
    if family.has_states:
        found = kept_states.ask(engine, (), family.length)
        cold, warm = (engine.step(f"long {number}", [LONG], number == 0).requests[0] for number in range(2))
        assert cold["completions"] == warm["completions"]
        found["cached"] = [warm["cached"]]
    else:
        found = kept_states.everywhere(engine, company, "poison_keys")
        found["no fault"] = kept_states.alone(engine, "again")
    found["bytes"] = engine.call("tests.engine.fp8_caches:bytes_of_caches")
    found["one scale"] = kept_states.with_one_scale(engine, company, family.fault)
    return found


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.exhaustive] * (name != "Qwen3")) for name in FAMILIES],
)
def case(request: pytest.FixtureRequest, started: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, root = FAMILIES[request.param], tmp_path_factory.mktemp("mixed")
    packed, unpacked = root / "packed", root / "unpacked"
    write(family.source(root / "source"), family.mixture, packed, unpacked)
    found = started(packed, afterwards=partial(ask, family=family), **family.settings)
    return Case(request.param, packed, unpacked, found)


def test_a_request_has_the_same_bits_in_any_company_at_any_cut_and_in_any_page(case: Case) -> None:
    assert {dtype for dtype, _ in case.found["bytes"]} == {"torch.uint8"}
    assert case.found["preemptions"] > 0
    assert case.found["cached"][0] > 0
    assert [name for name in kept_states.SAME if case.found[name] != case.found["alone"]] == []
    assert kept_states.decodes_as_it_prefills(case.found)


@pytest.mark.skipif(not kept_states.ON_GPU, reason="a CPU has no graphs")
def test_steps_in_cuda_graphs_have_the_same_bits(case: Case, started: Callable[..., Any]) -> None:
    replayed = started(case.packed, afterwards=kept_states.ask_briefly, **case.family.settings | kept_states.IN_GRAPHS)
    assert replayed["among others"] == replayed["alone"] == case.found["alone"]


@pytest.mark.exhaustive
def test_each_layer_has_the_bits_of_a_checkpoint_in_fp8_with_the_matrices_of_the_others(
    case: Case, started: Callable[..., Any]
) -> None:
    """Which says nothing of NVFP4; one element of one of the matrices shows."""
    settings = {"afterwards": kept_states.alone, **case.family.settings}
    assert case.found["alone"] == started(case.unpacked, **settings)
    changed = shutil.copytree(case.unpacked, case.unpacked.parent / "changed")
    tensors = load_file(changed / "model.safetensors")
    recipes = said(case.packed)["quantized_layers"].items()
    layer = next(name for name, recipe in recipes if recipe["quant_algo"] != "FP8")
    tensors[f"{layer}.weight"][5, 7] += 2
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    assert case.found["alone"] != started(changed, **settings)


def reference(folder: Path) -> torch.nn.Module:
    """Transformers' model in float64 of the numbers of a checkpoint's codes, whose layers in FP8, and whose attention,
    are given numbers of codes.
    """
    weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).double().eval()
    in_fp8 = {name.removesuffix(".input_scale") for name in weights if name.endswith(".input_scale")}
    for name in in_fp8:
        weights[f"{name}.weight"] *= weights[f"{name}.weight_scale"]
        layer = model.get_submodule(name)
        layer.register_forward_pre_hook(lambda _, given: (codes_of(given[0], INPUT_SCALE),))
    whole = {name: tensor for name, tensor in weights.items() if not name.endswith("_scale")}
    missing, unexpected = model.load_state_dict(whole, strict=False)
    assert not unexpected
    assert {*missing} <= {"lm_head.weight"}
    model.tie_weights()
    attend_to_codes(model, lambda _: (SCALES["k"], SCALES["v"]))
    return model


def test_its_logprobs_are_near_float64(case: Case) -> None:
    """One of which a layer has another scale is not; norms take that of queries and keys out."""
    if case.name != "Qwen3":
        pytest.skip("in bf16 a token may have other experts")
    model = reference(case.unpacked)
    near = kept_states.distance_from(model, case.found["alone"])
    far = []
    for name in ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"):
        layer = model.get_submodule(name)
        layer.weight.data *= 1.5
        far.append(kept_states.distance_from(model, case.found["alone"]))
        layer.weight.data /= 1.5
    assert near < NEAR < min(far)


def test_one_scale_of_all_rows_of_a_step_is_found(case: Case) -> None:
    """So the comparison of companies sees what layers in FP8 quantise."""
    alone, among_others = case.found["one scale"]
    assert alone != among_others


WAYS = ("by_reload_weights", "by_transfer")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["Qwen3", "Qwen3 with experts", SUPER])
def test_weights_that_come_again_serve(started: Callable[..., Any], tmp_path: Path, name: str) -> None:
    """As those of an engine that was started with them."""
    family = FAMILIES[name]
    source = family.source(tmp_path / "source")
    first, other = (
        write(source, family.mixture, tmp_path / of, factor=factor) for of, factor in (("first", 1), ("other", 0.75))
    )

    def replaced(engine: Engine) -> tuple[list[Any], dict[tuple[str, str], Any]]:
        before = kept_states.alone(engine)
        return before, kept_states.replaced(engine, [str(other), str(first)], WAYS)

    parts = {"worker_extension_cls": EXTENSION, "weight_transfer_config": '{"backend": "files"}'}
    before, after = started(first, afterwards=replaced, **family.settings, **parts)
    changed = started(other, afterwards=kept_states.alone, **family.settings)
    assert before != changed
    assert after == {(way, str(of)): found for way in WAYS for of, found in ((other, changed), (first, before))}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "method", "cached"),
    [
        *((name, "ngram", False) for name in ("Qwen3", "Qwen3 with experts", NANO, SUPER)),
        *((SUPER, "mtp", cached) for cached in (False, True)),
    ],
)
def test_drafts_leave_answers_alone(
    started: Callable[..., Any], tmp_path: Path, name: str, method: str, cached: bool
) -> None:
    """Also those of layers for more tokens, and beside a prefix cache, which plain decoding has not."""
    family = FAMILIES[name]
    source = family.source(tmp_path / "source")
    folder = write(add_nemotron_mtp(source) if method == "mtp" else source, family.mixture, tmp_path / "packed")
    settings = family.settings | {"enable_prefix_caching": False, "num_gpu_blocks_override": 18}
    drafts: dict[str, Any] = {"ngram": NGRAMS, "mtp": {"method": "mtp"}}[method]
    asked = kept_states.REPEATING if method == "ngram" else kept_states.drafted_requests()[::3]
    beside = {"enable_prefix_caching": cached} | kept_states.IN_GRAPHS
    differing, counted = kept_states.with_drafts(started, folder, drafts, asked, settings, **beside)
    assert differing == []
    assert counted["accepted" if method == "ngram" else "drafts"] > 0


def shared(started: Callable[..., Any], folder: Path, family: Family, **more: Any) -> dict[str, Any]:
    """What an engine of two workers finds, which has the same bits in every company."""
    variables = more.pop("variables", {}) | kept_states.cores_of(2)
    asked = partial(kept_states.everywhere, company=kept_states.others(family.length), poison="poison_keys")
    settings = family.settings | {"tensor_parallel_size": 2} | more
    two = started(folder, afterwards=asked, variables=variables, **settings)
    assert two["alone"] == two["among others"] == two["warm"]
    assert kept_states.decodes_as_it_prefills(two)
    return two


@pytest.mark.exhaustive
def test_two_workers_have_the_bits_of_one(started: Callable[..., Any], tmp_path: Path) -> None:
    """By a tree, which is another order of sums than one worker has without it."""
    family, tree = FAMILIES["Qwen3"], {TP_TREE.name: "2"}
    folder = write(family.source(tmp_path / "source"), family.mixture, tmp_path / "packed")
    one = started(folder, afterwards=kept_states.alone, variables=tree, **family.settings)
    assert shared(started, folder, family, variables=tree)["alone"] == one


@pytest.mark.exhaustive
@pytest.mark.parametrize("whole", [False, True], ids=["by columns", "whole"])
def test_two_workers_share_experts(started: Callable[..., Any], tmp_path: Path, whole: bool) -> None:
    """With the bits of those that share the matrices; as a whole where none is in FP8."""
    family = FAMILIES["Qwen3 with experts"]
    mixture = family.mixture._replace(four=r"\.experts\.") if whole else family.mixture
    packed, unpacked = tmp_path / "packed", tmp_path / "unpacked"
    write(family.source(tmp_path / "source"), mixture, packed, unpacked)
    found = [shared(started, folder, family, enable_expert_parallel=whole)["alone"] for folder in (packed, unpacked)]
    assert found[0] == found[1]


LEFT_OUT = {
    "a layer in FP8": ("Qwen3", r"0\.self_attn\.o_proj", "no module or parameter named 'layers.0.self_attn.o_proj."),
    "a layer in NVFP4": ("Qwen3", r"0\.mlp\.down_proj", "no module or parameter named 'layers.0.mlp.down_proj."),
    "a part of a fused layer": ("Qwen3", r"0\.self_attn\.k_proj", "v_proj in FP8 and k_proj in 16 bits"),
    "experts in NVFP4": ("Qwen3 with experts", r"0\.mlp\.experts", "layers.0.mlp.experts has no parameter 'w2_"),
    "experts in FP8": ("Qwen3 with experts", r"2\.mlp\.experts", "layers.2.mlp.experts has no parameter 'w2_"),
    "experts of a Nemotron-H": (NANO, r"1\.mixer\.experts", "quantised, of which quantized_layers says nothing"),
}
"""Patterns of names, and what is said: by the mode what vLLM would guess."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", LEFT_OUT)
def test_codes_of_what_the_configuration_leaves_out_are_no_weights(
    started: Callable[..., Any], tmp_path: Path, what: str
) -> None:
    name, pattern, line = LEFT_OUT[what]
    family = FAMILIES[name]
    folder = write(family.source(tmp_path / "source"), family.mixture, tmp_path / "packed")
    config = said(folder)
    layers = config["quantized_layers"]
    left = {name: recipe for name, recipe in layers.items() if not re.search(pattern, name)}
    assert left.keys() < layers.keys()
    say(folder, config | {"quantized_layers": left})
    with pytest.raises(EngineFailed, match=re.escape(line)):
        started(folder, afterwards=kept_states.alone, **family.settings)


@pytest.mark.exhaustive
@pytest.mark.parametrize("of", ["four", "eight"])
def test_weights_of_16_bits_of_one_expert_are_no_codes(started: Callable[..., Any], tmp_path: Path, of: str) -> None:
    """Which vLLM takes to be quantised as the others are, of which alone it asks."""
    family = FAMILIES["Qwen3 with experts"]
    mixture = Mixture(*("^$", r"experts\.[^1]\.") if of == "eight" else (r"experts\.[^1]\.", r"self_attn\.._proj$"))
    folder = write(family.source(tmp_path / "source"), mixture, tmp_path / "packed")
    with pytest.raises(EngineFailed, match="size of tensor a" if of == "four" else "experts in bfloat16"):
        started(folder, afterwards=kept_states.alone, **family.settings)
