"""Two or four workers that share a model which sees images: each layer of its encoder, or the images of a step. A
request has the same bits alone, among others, from the caches, in chunks and after preemption; with a tree those of one
worker.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine import (
    gemma4,
    images,
    kept_states,
    multimodal,
    test_gemma4_images,
    test_image_families,
    test_image_ranges,
    test_images,
)
from tests.engine.engines import CACHE, OF_DEVICE, PATHS, SETTINGS, Engine, arguments_of, differing_answers
from tests.engine.quantised_layers import BLOCKS, FORMS, NVFP4, with_each_expert, write
from tests.engine.test_delta_rule import HEADS_FOR
from vllm_batch_invariant.envs import TP_TREE, UNTRIED
from vllm_batch_invariant.integration.coverage import RAN
from vllm_batch_invariant.verify.harness.worker import EngineFailed

ON_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

MODES = ("weights", "data")
GRIDS = [grid for grid in test_images.GRIDS if grid[0] == 1]
CALLS = [[0, 1], [1, 0], [2, 1], [6, 7], [7, 6, 7], [5, 4, 3, 2, 1, 0], [4] * 12, [5, *[6] * 20, 1]]
OF_QWEN = images.runs_of(test_images.TARGETS, test_images.FEW, test_images.MANY[:10])
OF_FEWER = images.runs_of(
    [test_images.TARGETS[number] for number in (0, 1, 6)], test_images.FEW[:2], test_images.MANY[:5]
)
"""Where a CPU takes its time: an image over the border of a page, several, and a video."""
Requests = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A model, and the requests that its engines get.

    Attributes:
        config: of a checkpoint.
        runs: the requests of each, where the targets are, and what is let go of first.
        limits: of its engines.
        probe: a request with images, alone and behind another whose images share its step.
        modes: how workers may share its encoder.
        has_grids: whether its encoder is called with patches and grids (the Qwens), as :data:`CALLS` are.
        modes_of_trees: in which they have a tree.
        form: of :data:`tests.engine.quantised_layers.FORMS`, which its text model is quantised to; "" is none.
        save: writes a checkpoint.
        path: folders that its processes need on their path.
        has_experts: which a tree cuts none of.
        heads: of its encoder.
        workers: their numbers.
        side: pixels of what images are counted in; 0 is a patch.
        image: what stands for an image, or for a row of one.
    """

    config: Callable[[], transformers.PretrainedConfig]
    runs: dict[str, tuple[Requests, slice, str]]
    limits: dict[str, Any]
    probe: tuple[Requests, Requests]
    modes: tuple[str, ...] = MODES[:1]
    has_grids: bool = False
    modes_of_trees: tuple[str, ...] = MODES
    form: str = ""
    save: Callable[..., torch.nn.Module] = images.save
    path: Callable[[Path], list[str]] = lambda folder: []
    has_experts: bool = False
    heads: int = 4
    workers: tuple[int, ...] = (2,)
    side: int = 0
    image: int = images.IMAGE


def with_heads(of: Callable[[], transformers.PretrainedConfig], heads: int) -> transformers.PretrainedConfig:
    """A model whose encoder has so many heads, by which each slice of a tree has a multiple of 16 columns."""
    config = of()
    vision = config.vision_config
    name = "num_heads" if hasattr(vision, "num_heads") else "num_attention_heads"
    vision.hidden_size = heads * vision.hidden_size // getattr(vision, name)
    setattr(vision, name, heads)
    if config.model_type == "llama4":  # whose MLP behind the encoder has the elements of four patches
        vision.intermediate_size = 4 * vision.hidden_size
    if hasattr(config, "projection_hidden_size"):
        config.projection_hidden_size = vision.hidden_size
    return config


def of_qwen(config: Callable[[], transformers.PretrainedConfig], **limits: Any) -> Case:
    """Images of any number of patches, and videos."""
    own = test_images.LIMITS | {"max_num_batched_tokens": 128} | limits
    target, few = test_images.TARGETS[2], test_images.FEW[0]
    return Case(config, OF_QWEN, own, ([target], [few, target]), MODES, has_grids=True)


def of_family(name: str, modes: tuple[str, ...] = MODES[:1], has_films: bool = True, **further: Any) -> Case:
    """One of the further models, with videos where it takes some, or without."""
    family = test_image_families.FAMILIES[name]
    family = family if has_films else replace(family, film=None, limit='{"image": 8, "video": 0}')
    limits = test_image_families.LIMITS | {"limit_mm_per_prompt": family.limit} | family.settings
    target, few = family.targets[2], family.few[0]
    own = {name: getattr(family, name) for name in ("save", "path", "image")}
    return Case(family.config, family.runs, limits, ([target], [few, target]), modes, **own | further)


def of_gemma_4(name: str, **further: Any) -> Case:
    """Gemma 4, whose encoder is Transformers' class: each worker has all of it."""
    limits = test_gemma4_images.LIMITS | {"max_num_batched_tokens": test_gemma4_images.STEP}
    probes, own = test_gemma4_images.PROBES, {"modes_of_trees": (), "side": gemma4.SIDE}
    return Case(partial(images.gemma4, name), test_gemma4_images.RUNS, limits, (probes[1:], probes), **own | further)


def with_odd_widths(name: str, width: int) -> Case:
    """A case whose encoder's MLPs have, like published ones, a width of which no worker has a multiple of 16. A tree is
    refused of it.
    """

    def odd() -> transformers.PretrainedConfig:
        config = CASES[name].config()
        config.vision_config.intermediate_size = width
        return config

    return replace(CASES[name], config=odd, modes=MODES[:1], modes_of_trees=(), workers=(2,))


def in_form(
    form: str,
    of: Callable[[], transformers.PretrainedConfig],
    sizes: dict[str, int],
    sections: list[int],
    **limits: Any,
) -> Case:
    """Quantised, of whose blocks and groups each worker has whole ones.

    Args:
        form: of :data:`tests.engine.quantised_layers.FORMS`.
        of: makes a configuration.
        sizes: that its decoder has otherwise.
        sections: of the angles of a head of 128.
    """

    def wide() -> transformers.PretrainedConfig:
        made = of()
        for name, size in (sizes | {"head_dim": 128}).items():
            setattr(made.text_config, name, size)
        made.text_config.rope_parameters["mrope_section"] = sections
        return made

    return replace(of_qwen(wide, **limits), runs=OF_FEWER, has_grids=False, form=form)


def by_four(case: Case) -> Case:
    """A case that two workers share, and four."""
    return replace(case, workers=(2, 4), heads=8)


PROBES = [test_image_ranges.asked(31 + number, [0, 1]) for number in range(2)]
"""Of which a step of Gemma 3 has room for both."""
UNCACHED = {"enable_prefix_caching": False}
WITH_EXPERTS = kept_states.QWEN3_5_MOE | HEADS_FOR[4]
"""Of Qwen3.5, of whose rules four workers have whole heads."""
OF_RULES = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128)
OF_EXPERTS = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 512)
IN_SECTIONS, OF_STATES = [24, 20, 20], [6, 5, 5]
"""Of all angles of Qwen3-VL, and of the quarter that Qwen3.5 turns."""
CASES = {
    "qwen3-vl": by_four(of_qwen(images.qwen3_vl)),
    "qwen3.5": of_qwen(images.qwen3_5, **UNCACHED),
    "qwen3.5 with experts": replace(
        by_four(of_qwen(partial(images.qwen3_5, WITH_EXPERTS), **UNCACHED)), has_experts=True
    ),
    "qwen3-vl with experts": replace(
        by_four(of_qwen(partial(images.qwen3_vl, multimodal.qwen3_vl_moe))), has_experts=True
    ),
    "qwen3.5 in FP8": replace(
        in_form(BLOCKS, images.qwen3_5, OF_RULES | {"intermediate_size": 1024}, OF_STATES, **UNCACHED),
        modes=MODES[:1],
    ),
    "qwen3-vl in FP8": replace(
        in_form(BLOCKS, images.qwen3_vl, {"intermediate_size": 1024}, IN_SECTIONS), modes=MODES[:1]
    ),
    **{
        f"qwen3.5 with experts in {name}": replace(
            by_four(in_form(form, partial(images.qwen3_5, WITH_EXPERTS), OF_RULES | OF_EXPERTS, OF_STATES, **UNCACHED)),
            modes_of_trees=(),
            has_experts=True,
        )
        for name, form in {"FP8": BLOCKS, "NVFP4": NVFP4[1], "GPTQ": "gptq"}.items()
    },
    "qwen3-vl with experts in FP8": replace(
        by_four(
            in_form(
                BLOCKS, partial(images.qwen3_vl, multimodal.qwen3_vl_moe), {"moe_intermediate_size": 512}, IN_SECTIONS
            )
        ),
        modes_of_trees=(),
        has_experts=True,
    ),
    "qwen2.5-vl": by_four(of_qwen(images.qwen2_5_vl)),
    "gemma3": Case(
        images.gemma3,
        test_image_ranges.RUNS,
        test_image_ranges.LIMITS,
        (PROBES[1:], PROBES),
        image=images.START,
    ),
    "mistral3": of_family("mistral3"),
    "mistral3 around ministral3": of_family("mistral3 around ministral3"),
    "pixtral": of_family("pixtral"),
    "ministral3 as mistral has it": of_family("ministral3 as mistral has it"),
    "internvl3": of_family("internvl3"),
    "internvl3.5 with a large tower": of_family("internvl3.5 with a large tower", heads=3),
    "glm4.1v": of_family("glm4.1v", MODES, has_films=False, has_grids=True),
    "glm4.5v": of_family("glm4.5v", MODES, has_films=False, has_grids=True, has_experts=True),
    "gemma4": of_gemma_4("31B"),
    "gemma4 with experts": of_gemma_4("26B-A4B", has_experts=True),
    "gemma4 with shared caches": of_gemma_4("E2B"),
    "llama4": of_family("llama4", MODES, has_experts=True, modes_of_trees=MODES[:1]),
    "kimi-vl": of_family("kimi-vl", MODES, has_experts=True),
    "idefics3": of_family("idefics3"),
    "smolvlm": of_family("smolvlm"),
}
CASES["qwen3.5, odd widths"] = with_odd_widths("qwen3.5", 336)
CASES["qwen2.5-vl, odd widths"] = with_odd_widths("qwen2.5-vl", 340)
CASES["kimi-vl, odd widths"] = with_odd_widths("kimi-vl", 336)
CASES["idefics3, odd widths"] = with_odd_widths("idefics3", 336)
CASES["qwen3.5 with experts in NVFP4, KV cache in FP8"] = replace(
    CASES["qwen3.5 with experts in NVFP4"],
    limits=CASES["qwen3.5 with experts in NVFP4"].limits | {"kv_cache_dtype": "fp8"},
)
AS_SEVERAL = {
    "qwen3-vl in FP8": CASES["qwen3-vl in FP8"],
    "qwen3.5": CASES["qwen3.5"],
    "qwen3-vl with experts": CASES["qwen3-vl with experts"],
    "intern-s2": of_qwen(images.intern_s2, **test_images.FURTHER["intern-s2"]),
    "glm4.5v with videos": of_family("glm4.5v", has_grids=True),
}
"""Of which one worker encodes as several would that share the images of a step: by vLLM's functions for these."""
SHARED = [(name, mode, workers) for name, case in CASES.items() for mode in case.modes for workers in case.workers]
BY_TREES = [(name, mode, workers) for name, mode, workers in SHARED if mode in CASES[name].modes_of_trees]


def in_16_bits(name: str) -> bool:
    """Whether a case is served in bf16, as quantised ones are, and all on GPUs."""
    return bool((CASES | AS_SEVERAL)[name].form) or ON_GPU


@dataclass
class Served:
    """What an engine gave in the runs of its case; by the fault of its workers what each made of a probe's images, and
    what the probe got, both alone and behind another request; and of an encoder of grids alone, also with a fault in
    it.
    """

    runs: dict[str, dict[str, Any]]
    names: dict[str, slice]
    made: dict[str, list[list[list[str]]]]
    probed: dict[str, list[list[dict[str, Any]]]]
    encoded: dict[str, list[Any]] | None
    faulty: dict[str, list[Any]] | None

    def given(self, name: str) -> list[dict[str, Any]]:
        return self.runs[name]["given"][self.names[name]]

    @property
    def alone(self) -> list[dict[str, Any]]:
        return [self.given(name)[0] for name in self.names if name.startswith("alone")]

    def differing(self) -> dict[str, list[int]]:
        """Targets that got something else in a run than alone."""
        found = {name: differing_answers(self.given(name), self.alone) for name in self.names if "alone" not in name}
        return {name: differing for name, differing in found.items() if differing}


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Served]:
    version = pytest.importorskip("vllm").__version__
    if not version.startswith(RAN.encoding["cuda" if ON_GPU else "cpu"]):
        pytest.skip("encoders of images have not run here")
    path = os.pathsep.join([*multimodal.python_path(tmp_path_factory.mktemp("path")), PATHS])

    @cache
    def folder(name: str) -> tuple[str, int]:
        case, made = (CASES | AS_SEVERAL)[name], tmp_path_factory.mktemp("model")
        config = with_heads(case.config, case.heads)
        case.save(config, torch.bfloat16 if in_16_bits(name) else torch.float32, made)
        if case.form:
            source = with_each_expert(made, inputs_first=config.model_type == "qwen3_vl_moe")
            made = tmp_path_factory.mktemp("quantised") / "model"
            write(source, FORMS[case.form], made)
        return str(made), case.side or images.patch_of(config)

    @cache
    def served(name: str, workers: int, mode: str, tree: str) -> Served:
        if ON_GPU and workers > torch.cuda.device_count():
            pytest.skip(f"needs {workers} GPUs")
        case, (checkpoint, patch) = (CASES | AS_SEVERAL)[name], folder(name)
        settings = {"dtype": "bfloat16" if in_16_bits(name) else "float32", "mm_encoder_tp_mode": mode}
        settings["tensor_parallel_size"] = workers
        if workers > 1 < int(tree) and case.has_experts:
            settings["enable_expert_parallel"] = True
        variables = {TP_TREE.name: tree} | kept_states.cores_of(workers)
        paths = os.pathsep.join([*case.path(tmp_path_factory.mktemp("path")), path])
        variables |= {UNTRIED.name: "1", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}  # one worker would have more
        arguments = arguments_of(case.limits | OF_DEVICE | CACHE | settings)
        with Engine(checkpoint, arguments, "1", SETTINGS | variables, patience=1500) as running:
            runs = {
                run: running.call("tests.engine.images:answers", requests, patch, reset)
                for run, (requests, _, reset) in case.runs.items()
            }
            encoded, faulty, made, probed = None, None, {}, {}
            faults = images.IN_WORKERS[mode], *((images.OTHER_ROWS,) if mode == "weights" else ())
            if workers == 1:
                faults = (images.IN_WORKERS["weights"],) if mode == "data" else ()
            for fault in ("", *faults) if faults else ():
                asked = "tests.engine.images:with_fault_in_workers", fault
                made[fault] = [running.call(*asked, "made_by_workers", requests, patch) for requests in case.probe]
                probed[fault] = [
                    running.call(*asked, "answers", requests, patch, "cache")["given"][-1:] for requests in case.probe
                ]
            if case.has_grids:
                call = "embeddings", GRIDS, CALLS
                encoded = running.call("tests.engine.images:embeddings", *call[1:])
                if workers > 1:
                    fault = images.IN_WORKERS[mode]
                    faulty = running.call("tests.engine.images:with_fault_in_workers", fault, *call)
        names = {run: targets for run, (_, targets, _) in case.runs.items()}
        return Served(runs, names, made, probed, encoded, faulty)

    def serve(name: str, workers: int, mode: str = "weights", tree: str = "1") -> Served:
        return served(name, workers, mode, tree)  # which one engine serves, however it is asked

    return serve


@pytest.mark.parametrize(
    ("name", "mode", "workers", "tree"),
    [(*shared, tree) for shared in SHARED for tree in ("1", *[str(shared[-1])] * (shared in BY_TREES))],
)
def test_a_request_has_the_same_bits_in_any_company(
    name: str, mode: str, workers: int, tree: str, serve: Callable[..., Served]
) -> None:
    done = serve(name, workers, mode, tree)
    assert done.differing() == {}
    run, case = "from the cache of embeddings", CASES[name]
    before = [one["prompt"].index(case.image) if one["images"] else 0 for one in case.runs[run][0]]
    cached = done.runs[run]["cached"]  # of what two requests begin with
    assert all(count <= most for count, most in zip(cached, before, strict=True)), cached
    assert done.runs["preempted"]["preemptions"] > 0


@pytest.mark.parametrize(("name", "mode", "workers"), BY_TREES)
def test_with_a_tree_several_workers_have_the_bits_of_one(
    name: str, mode: str, workers: int, serve: Callable[..., Served]
) -> None:
    one, several = serve(name, 1, tree=str(workers)), serve(name, workers, mode, str(workers))
    assert [run for run in one.names if differing_answers(one.given(run), several.given(run))] == []


@pytest.mark.parametrize("name", AS_SEVERAL)
def test_one_worker_gives_the_same_however_several_would_share_images(name: str, serve: Callable[..., Served]) -> None:
    one, other = (serve(name, 1, mode) for mode in ("weights", "data"))
    assert [run for run in one.names if differing_answers(one.given(run), other.given(run))] == []
    assert other.differing() == {}
    assert differing_answers(*other.probed[""]) == []
    assert differing_answers(*other.probed[images.IN_WORKERS["weights"]]) == [0], "the negative control"


@pytest.mark.parametrize(("name", "mode", "workers"), SHARED)
def test_each_worker_makes_the_same_of_the_images_of_a_step(
    name: str, mode: str, workers: int, serve: Callable[..., Served]
) -> None:
    done = serve(name, workers, mode)
    first, *others = done.made[""][1]
    assert first != []
    assert others == [first] * (workers - 1)
    assert differing_answers(*done.probed[""]) == []
    assert differing_answers(*done.probed[images.IN_WORKERS[mode]]) == [0], "the negative control"
    if mode == "weights":
        first, second, *others = done.made[images.OTHER_ROWS][1]
        assert first != second, "the negative control"
        assert others == [first] * (workers - 2), "the fault is in one worker"


@pytest.mark.parametrize(("name", "mode", "workers"), SHARED)
def test_an_image_has_the_same_embedding_whatever_shares_its_call(
    name: str, mode: str, workers: int, serve: Callable[..., Served]
) -> None:
    done = serve(name, workers, mode)
    moved = {fault: {*alone[0]} - {*together[0]} for fault, (alone, together) in done.made.items()}
    assert moved[""] == set()
    assert moved[images.IN_WORKERS[mode]], "the negative control"


@pytest.mark.parametrize(("name", "mode", "workers"), [shared for shared in SHARED if CASES[shared[0]].has_grids])
def test_every_worker_gives_an_item_the_same_embedding_whatever_shares_its_call(
    name: str, mode: str, workers: int, serve: Callable[..., Served]
) -> None:
    done = serve(name, workers, mode)
    assert done.encoded["moved"] == []
    assert {len(set(of_workers)) for of_workers in done.encoded["alone"]} == {1}
    assert done.faulty["moved"], "the negative control"


@pytest.mark.parametrize(
    ("name", "workers"),
    [(name, workers) for name, mode, workers in SHARED if mode == "data" and CASES[name].has_grids],
)
def test_workers_that_share_the_images_of_a_step_give_the_embeddings_of_one(
    name: str, workers: int, serve: Callable[..., Served]
) -> None:
    """And those that share each layer give others, but with a tree."""
    one, images_shared, layers_shared = serve(name, 1), serve(name, workers, "data"), serve(name, workers, "weights")
    first = [bits for bits, *_ in one.encoded["alone"]]
    assert [bits for bits, *_ in images_shared.encoded["alone"]] == first
    assert [bits for bits, *_ in layers_shared.encoded["alone"]] != first
    by_tree = ((1, "weights"), (workers, "weights"), (workers, "data"))
    with_tree = [serve(name, number, mode, str(workers)) for number, mode in by_tree]
    assert len({tuple(bits for bits, *_ in done.encoded["alone"]) for done in with_tree}) == 1


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["qwen3.5", "kimi-vl", "idefics3"])
def test_a_tree_is_refused_of_an_encoder_that_it_cannot_cut(
    name: str, workers: int, serve: Callable[..., Served]
) -> None:
    with pytest.raises(EngineFailed, match=r"VLLM_BATCH_INVARIANT_TP_TREE=2 for the 336 inputs of .*(visual|vision)"):
        serve(f"{name}, odd widths", workers, tree="2")
