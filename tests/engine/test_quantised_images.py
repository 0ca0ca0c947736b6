"""Quantised text models beside encoders in 16 bits: a request with images has the same bits alone, among others with
other images, from the caches, in chunks that end inside an image and after preemption; of weights alone that are
quantised those of the matrices that they stand for.
"""

import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine import (
    gemma4,
    images,
    mistral_form,
    multimodal,
    nemotron_vl,
    test_gemma4_images,
    test_image_families,
    test_image_ranges,
    test_images,
)
from tests.engine.engines import (
    EAGER_ON_GPU,
    OF_DEVICE,
    PATHS,
    SETTINGS,
    UNTRIED_THERE,
    Engine,
    arguments_of,
    differing_answers,
)
from tests.engine.quantised_layers import (
    BLOCKS,
    FORMS,
    INTEGERS,
    KEPT,
    MODELOPT,
    NVFP4,
    OF_32,
    OF_COMPRESSED,
    ROWS,
    with_each_expert,
    with_scales_of_cache,
    write,
)
from tests.engine.test_audio import GEMMA_4, NEMOTRON_OMNI
from tests.engine.test_quantised_gemma4 import kept_of
from tests.mixed_checkpoints import Mixture
from tests.mixed_checkpoints import write as write_mixed
from tests.quantised_checkpoints import Stored
from vllm_batch_invariant.integration.coverage import RAN
from vllm_batch_invariant.integration.reviews import patch_points

ON = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not patch_points.installed_version().startswith(RAN.encoding[ON]), reason="refused"),
]
Requests = list[dict[str, Any]]
PLAIN = "16 bits"
"""A format of weights that are not quantised."""
MIXED = "ModelOpt's mixed precision"
MIXTURE = Mixture(r"\.mlp\.(gate|up|down)_proj$", r"linear_attn\.(in_proj_(qkv|z)|out_proj)$", cached=False)
"""Of Qwen3.5 that."""


class Family(NamedTuple):
    """Models that see images, what their engines are told and asked; the side of what a token stands for, in pixels,
    where it is more than a patch; what writes a checkpoint; the dtype that it is served in; what gives a checkpoint
    scales of the KV cache; by what the names of layers end that keep 16 bits in a form; and folders that processes need
    on their path.
    """

    config: Callable[[], transformers.PretrainedConfig]
    limits: dict[str, Any]
    requests: tuple[Requests, Requests, Requests]
    side: int | None = None
    save: Callable[[Any, torch.dtype, Path], Any] = images.save
    dtype: str = "bfloat16"
    give_scales: Callable[[Path], Any] | None = None
    kept_of: Callable[[str], str] = lambda _: KEPT
    path: Callable[[Path], list[str]] = lambda folder: []

    def source(self, folder: Path) -> Path:
        """A checkpoint in bf16 with a matrix for each expert."""
        folder.mkdir()
        config = self.config()
        self.save(config, torch.bfloat16, folder)
        if self.save is mistral_form.save or config.model_type == "llama4":  # of whose experts ModelOpt has one tensor
            return folder
        return with_each_expert(folder, inputs_first=config.model_type == "qwen3_vl_moe")

    def write(self, root: Path, form: str) -> None:
        """Checkpoints in a form, and of the matrices that its weights stand for."""
        packed = root / "packed"
        source = self.source(packed if form == PLAIN else root / "source")
        if form == mistral_form.FP8:
            mistral_form.quantise(source, packed)
        elif form == MIXED:
            write_mixed(source, MIXTURE, packed)
        elif form != PLAIN:
            write(source, FORMS[form], packed, root / "unpacked", self.kept_of(form))
        if self.give_scales:
            self.give_scales(packed)

    @property
    def holds_codes(self) -> bool:
        """Whether its KV cache is in FP8."""
        return self.give_scales is not None or "kv_cache_dtype" in self.limits

    @property
    def patch(self) -> int:
        """In pixels, what images are counted in."""
        return self.side or images.patch_of(self.config())

    def engine(self, folder: Path, path: Path, in_graphs: bool = False) -> Engine:
        """Of a checkpoint; ``path`` is a folder for what vLLM imports."""
        paths = os.pathsep.join([*self.path(path), *multimodal.python_path(path), PATHS])
        eager = {} if in_graphs else EAGER_ON_GPU
        arguments = arguments_of(self.limits | OF_DEVICE | eager | {"dtype": self.dtype})
        return Engine(str(folder), arguments, "1", SETTINGS | UNTRIED_THERE | {"PYTHONPATH": paths}, patience=600)


OF_QWEN = test_images.TARGETS, test_images.FEW, test_images.MANY[:10]
QWEN_LIMITS = test_images.LIMITS | {"max_num_batched_tokens": test_images.BUDGET}
OF_GEMMA = test_image_ranges.TARGETS, test_image_ranges.FEW, test_image_ranges.MANY[:8]


def of_family(name: str) -> Family:
    """One of the further models."""
    family = test_image_families.FAMILIES[name]
    limits = test_image_families.LIMITS | {"limit_mm_per_prompt": family.limit} | family.settings
    requests = family.targets, family.few, family.many[:8]
    made = Family(family.config, limits, requests, save=family.save, path=family.path)
    if name != NEMOTRON[1]:
        return made
    sounds = NEMOTRON_OMNI.targets[:5], NEMOTRON_OMNI.few, NEMOTRON_OMNI.many[:6]
    requests = tuple([*seen, *heard] for seen, heard in zip(requests, sounds, strict=True))
    heard = {"limit_mm_per_prompt": '{"image": 8, "audio": 4}'}
    return made._replace(config=nemotron_vl.hearing, limits=limits | heard, requests=requests)


NEMOTRON = "nemotron nano vl", "nemotron nano omni"
OF_MISTRAL, IN_MISTRALS_FORM = ("mistral3", "mistral3 around ministral3"), "ministral3 as mistral has it"
GEMMA4_LIMITS = test_gemma4_images.LIMITS | {"max_num_batched_tokens": test_gemma4_images.STEP}
OF_GEMMA4 = test_gemma4_images.TARGETS, test_gemma4_images.FEW, test_gemma4_images.MANY[:8]
HEARING = tuple(
    [*seen, *heard] for seen, heard in zip(OF_GEMMA4, (GEMMA_4.targets[:5], GEMMA_4.few, GEMMA_4.many[:6]), strict=True)
)
"""With sounds."""
HEARING_LIMITS = GEMMA4_LIMITS | {
    "max_num_batched_tokens": 156,
    "limit_mm_per_prompt": GEMMA4_LIMITS["limit_mm_per_prompt"].replace('"audio": 0', '"audio": 4'),
}
FP8 = {"kv_cache_dtype": "fp8"}
FEW_PAGES = {"num_gpu_blocks_override": 800}
"""Of which an engine holds those in bf16, too."""
IN_FP8, SCALED = "KV cache in FP8", "KV cache in FP8 with scales"


def of_gemma4(name: str, more: str = "") -> Family:
    """A model of Gemma 4, whose KV cache may be in FP8, also with scales of the checkpoint."""
    requests, limits = (HEARING, HEARING_LIMITS) if name in ("E2B", "12B") else (OF_GEMMA4, GEMMA4_LIMITS)
    if name == "12B":
        limits = limits | {"max_num_batched_tokens": 800}  # a step has all of the longest sound
    limits = limits | (FP8 if more == IN_FP8 else {}) | (FEW_PAGES if more else {})
    family = Family(partial(images.gemma4, name), limits, requests, gemma4.SIDE)
    family = family._replace(give_scales=gemma4.with_scales) if more == SCALED else family
    return family._replace(kept_of=kept_of) if name == "E2B" else family


GEMMA4 = [
    *[("E2B",), ("12B",), ("26B-A4B",)],
    *((name, IN_FP8) for name in ("31B", "E2B", "26B-A4B")),
    *((name, SCALED) for name in ("31B", "26B-A4B")),
]
FAMILIES = {
    **{
        name: Family(config, QWEN_LIMITS | test_images.FURTHER.get(name, {}), OF_QWEN)
        for name, config in test_images.MODELS.items()
    },
    "gemma3": Family(images.gemma3, test_image_ranges.LIMITS, OF_GEMMA),
    "gemma4": of_gemma4("31B"),
    **{", ".join(("gemma4", *of)): of_gemma4(*of) for of in GEMMA4},
    **{
        name: of_family(name)
        for name in (*OF_MISTRAL, IN_MISTRALS_FORM, "internvl3", "muse-glimmer", "glm4.5v", "llama4")
    },
    **{name: of_family(name) for name in NEMOTRON},
}
for _name in ("qwen3.5", "qwen3.5 with experts", "llama4"):
    FAMILIES[f"{_name}, {SCALED}"] = FAMILIES[_name]._replace(
        limits=FAMILIES[_name].limits | FEW_PAGES, give_scales=with_scales_of_cache
    )
for _name in ("qwen3-vl with experts", *NEMOTRON):
    FAMILIES[f"{_name}, {IN_FP8}"] = FAMILIES[_name]._replace(limits=FAMILIES[_name].limits | FP8 | FEW_PAGES)
FAMILIES["qwen2.5-vl in float16"] = FAMILIES["qwen2.5-vl"]._replace(dtype="float16")
CASES = [
    *(("qwen3-vl", form) for form in (BLOCKS, INTEGERS, ROWS, "awq", MODELOPT, *NVFP4)),
    *(("qwen3-vl with experts", form) for form in (BLOCKS, NVFP4[1])),
    (f"qwen3-vl with experts, {IN_FP8}", NVFP4[1]),
    *(("qwen2.5-vl", form) for form in (INTEGERS, ROWS, "awq", MODELOPT, *NVFP4)),
    ("qwen2.5-vl in float16", "awq"),  # as the dtype of the published ones is
    *((name, form) for name in ("gemma3", "mistral3") for form in (INTEGERS, ROWS, "awq")),
    *(("gemma4", form) for form in (BLOCKS, INTEGERS, ROWS, "awq", MODELOPT, NVFP4[1])),
    ("mistral3 around ministral3", "fp8 by tensors, given, in Mistral's names"),
    (IN_MISTRALS_FORM, mistral_form.FP8),
    *(("internvl3", form) for form in (ROWS, "awq")),
    *(("muse-glimmer", form) for form in (BLOCKS, OF_COMPRESSED, INTEGERS, *NVFP4)),
    *((name, form) for name in NEMOTRON for form in (MODELOPT, NVFP4[1])),
    *((f"{name}, {IN_FP8}", MODELOPT) for name in NEMOTRON),
    ("glm4.5v", ROWS),
    *((name, form) for name in ("llama4", f"llama4, {SCALED}") for form in (MODELOPT, NVFP4[1])),
    *(("qwen3.5", form) for form in (BLOCKS, INTEGERS, "gptq", MODELOPT, NVFP4[1])),
    *(("qwen3.5 with experts", form) for form in (BLOCKS, "gptq", NVFP4[1])),
    *((f"{name}, {SCALED}", NVFP4[1]) for name in ("qwen3.5", "qwen3.5 with experts")),
    *((f"qwen3.5, {SCALED}", form) for form in (MODELOPT, MIXED)),
    *((f"gemma4, {name}", OF_32) for name in ("E2B", "12B")),
    *(("gemma4, 26B-A4B", form) for form in (ROWS, *NVFP4)),
    *((f"gemma4, 31B, {IN_FP8}", form) for form in (PLAIN, ROWS)),
    (f"gemma4, 31B, {SCALED}", NVFP4[1]),
    (f"gemma4, E2B, {IN_FP8}", ROWS),
    *((f"gemma4, 26B-A4B, {IN_FP8}", form) for form in (ROWS, NVFP4[0])),
    (f"gemma4, 26B-A4B, {SCALED}", NVFP4[1]),
]


class Case(NamedTuple):
    """What an engine of quantised weights gave, by run; and where activations or keys and values are codes, two
    requests with one scale for all rows of a step. Or what an engine of the matrices gave.
    """

    requests: tuple[Requests, Requests, Requests]
    of_weights_alone: bool
    runs: dict[str, dict[str, Any]]
    with_one_scale: tuple[Requests, Requests] | None
    of_matrices: dict[str, dict[str, Any]]
    of_numbers: tuple[dict[str, dict[str, Any]], ...]
    """From a cache of the numbers of codes, and of numbers as they come, where the engine's has codes."""
    in_graphs: dict[str, dict[str, Any]]
    """Some of the runs in CUDA graphs, where the others are not in graphs, too."""

    @property
    def alone(self) -> Requests:
        return alone(self.runs)


def alone(runs: dict[str, dict[str, Any]]) -> Requests:
    """What each target got by itself."""
    return [done["given"][0] for run, done in runs.items() if "alone" in run]


@pytest.fixture(scope="module", params=CASES, ids=", ".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, form = request.param
    family, root = FAMILIES[name], tmp_path_factory.mktemp("quantised")
    family.write(root, form)
    weights_alone = isinstance(FORMS.get(form), Stored) and not family.holds_codes
    path = tmp_path_factory.mktemp("path")
    patch, asked = family.patch, images.runs_of(*family.requests)
    by_itself = [run for run in asked if "alone" in run]
    fault = "fp8_caches:scale_by_steps" if family.holds_codes else "quantisers:one_scale_a_step"

    def answers(engine: Engine, run: str) -> dict[str, Any]:
        requests, _, reset = asked[run]
        return engine.call("tests.engine.images:answers", requests, patch, reset)

    def from_numbers(engine: Engine, rounds: bool) -> dict[str, dict[str, Any]]:
        engine.call("tests.engine.fp8_caches:in_numbers", rounds)
        return {run: answers(engine, run) for run in by_itself}

    def served(folder: Path, runs: list[str], in_graphs: bool = False) -> dict[str, dict[str, Any]]:
        with family.engine(folder, path, in_graphs) as engine:
            return {run: answers(engine, run) for run in runs}

    faulty, of_numbers = None, ()
    graphs_alone = ON == "cuda" and weights_alone  # whose fault and numbers would need steps outside of them
    with family.engine(root / "packed", path, graphs_alone) as engine:
        runs = {run: answers(engine, run) for run in asked}
        if not weights_alone:
            engine.call(f"tests.engine.{fault}")
            place = asked["behind 3"][1]
            faulty = answers(engine, "alone 0")["given"], answers(engine, "behind 3")["given"][place][:1]
        if family.holds_codes:
            of_numbers = tuple(from_numbers(engine, rounds) for rounds in (True, False))
    stands_for = weights_alone and family.dtype == "bfloat16"
    of_matrices = served(root / "unpacked", by_itself) if stands_for else {}
    in_graphs = {}
    if ON == "cuda" and not graphs_alone:
        in_graphs = served(root / "packed", [*by_itself, "behind 3"], in_graphs=True)
    return Case(family.requests, weights_alone, runs, faulty, of_matrices, of_numbers, in_graphs)


def test_a_request_with_images_has_the_same_bits_in_any_company(case: Case) -> None:
    places = {run: place for run, (_, place, _) in images.runs_of(*case.requests).items()}
    differing = {
        run: differing_answers(done["given"][places[run]], case.alone)
        for run, done in case.runs.items()
        if "alone" not in run
    }
    assert {run: numbers for run, numbers in differing.items() if numbers} == {}
    assert case.runs["behind 3"]["calls"]["items"] > case.runs["behind 3"]["calls"]["calls"], "no images shared a call"
    assert case.runs["preempted"]["preemptions"] > 0


def test_steps_in_cuda_graphs_have_the_same_bits(case: Case) -> None:
    if not case.in_graphs:
        pytest.skip("a CPU has no graphs; and of weights alone all steps on a GPU are in graphs")
    place = images.runs_of(*case.requests)["behind 3"][1]
    assert differing_answers(alone(case.in_graphs), case.alone) == []
    assert differing_answers(case.in_graphs["behind 3"]["given"][place], case.alone) == []


def test_weights_alone_that_are_quantised_have_the_bits_of_their_matrices(case: Case) -> None:
    if not case.of_matrices:
        pytest.skip("activations are quantised too, or the matrices are rounded to another dtype")
    assert differing_answers(case.alone, alone(case.of_matrices)) == []


def test_a_cache_of_codes_has_the_bits_of_one_of_their_numbers(case: Case) -> None:
    if not case.of_numbers:
        pytest.skip("it has none")
    numbers, as_they_come = (alone(runs) for runs in case.of_numbers)
    assert differing_answers(case.alone, numbers) == []
    assert differing_answers(as_they_come, numbers) != [], "so the comparison sees what codes lose"


def test_one_scale_of_all_rows_of_a_step_is_found(case: Case) -> None:
    """So the comparison of companies sees what depends on them."""
    if case.with_one_scale is None:
        pytest.skip("nothing but weights is in codes")
    assert differing_answers(*case.with_one_scale) == [0]


@pytest.mark.parametrize(
    ("name", "form"), [("qwen2.5-vl", MODELOPT), ("qwen3-vl with experts", BLOCKS), ("glm4.5v", ROWS)]
)
def test_codes_have_the_scales_of_the_checkpoint(name: str, form: str, tmp_path: Path) -> None:
    """Without them they would have the same bits in any company, too."""
    family = FAMILIES[name]
    packed, matrices, other = (tmp_path / folder for folder in ("packed", "matrices", "other"))
    write(family.source(tmp_path / "source"), FORMS[form], packed, matrices)
    shutil.copytree(packed, other)
    tensors = load_file(packed / "model.safetensors")
    for layer in [layer for layer in tensors if re.search(r"up_proj\.weight_scale(_inv)?$", layer)]:
        tensors[layer] = tensors[layer] * 4
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    target = family.requests[0][0]
    asked = target | {"params": target["params"] | {"max_tokens": 1, "logprobs": -1}}

    def logprobs(folder: Path) -> torch.Tensor:
        with family.engine(folder, tmp_path / "path") as engine:
            [given] = engine.call("tests.engine.images:answers", [asked], family.patch, "cache")["given"]
        listed = sorted((token, float.fromhex(value)) for token, value, _ in given["completions"][0]["logprobs"][0])
        return torch.tensor([value for _, value in listed])

    exact = logprobs(matrices)
    near, far = ((logprobs(folder) - exact).square().mean().sqrt() for folder in (packed, other))
    assert 0 < 2 * near < far
