"""Two workers that share a model which sees images: each layer of its encoder, or the images of a step. A request has
the same bits alone, among others, from the caches, in chunks and after preemption; with a tree those of one worker.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from tests.engine import images, multimodal, test_image_ranges, test_images
from tests.engine.engines import OF_DEVICE, PATHS, SETTINGS, Engine, arguments_of, differing_answers
from vllm_batch_invariant.envs import TP_TREE, UNTRIED
from vllm_batch_invariant.integration.coverage import RAN

ON_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

MODES = ("weights", "data")
GRIDS = [grid for grid in test_images.GRIDS if grid[0] == 1]
CALLS = [[0, 1], [1, 0], [2, 1], [6, 7], [7, 6, 7], [5, 4, 3, 2, 1, 0], [4] * 12, [5, *[6] * 20, 1]]


@dataclass(frozen=True)
class Case:
    """A model, and the requests that its engines get."""

    config: Callable[[], transformers.PretrainedConfig]
    runs: dict[str, tuple[list[dict[str, Any]], slice, str]]
    limits: dict[str, Any]
    modes: tuple[str, ...] = MODES


def with_four_heads(of: Callable[[], transformers.PretrainedConfig]) -> transformers.PretrainedConfig:
    """A model whose encoder has a head for each slice of a tree of four: each has a multiple of 16 columns."""
    config = of()
    vision = config.vision_config
    name = "num_heads" if hasattr(vision, "num_heads") else "num_attention_heads"
    vision.hidden_size *= 4 // getattr(vision, name)
    setattr(vision, name, 4)
    return config


CASES = {
    "qwen3-vl": Case(images.qwen3_vl, test_images.RUNS, test_images.LIMITS | {"max_num_batched_tokens": 128}),
    "gemma3": Case(images.gemma3, test_image_ranges.RUNS, test_image_ranges.LIMITS, MODES[:1]),
}
SHARED = [(name, mode) for name, case in CASES.items() for mode in case.modes]


@dataclass
class Served:
    """What an engine gave in the runs of its case; and of its encoder alone, also with a fault in it."""

    runs: dict[str, dict[str, Any]]
    names: dict[str, slice]
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
        config, made = with_four_heads(CASES[name].config), tmp_path_factory.mktemp("model")
        images.save(config, torch.float32, made)
        return str(made), config.vision_config.patch_size

    @cache
    def engine(name: str, workers: int, mode: str = "weights", tree: str = "1") -> Served:
        if ON_GPU and workers > torch.cuda.device_count():
            pytest.skip(f"needs {workers} GPUs")
        case, (checkpoint, patch) = CASES[name], folder(name)
        settings = {"dtype": "float32", "tensor_parallel_size": workers, "mm_encoder_tp_mode": mode}
        variables = {TP_TREE.name: tree, "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(workers)))}
        variables |= {UNTRIED.name: "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}  # one worker would have more
        arguments = arguments_of(case.limits | OF_DEVICE | settings)
        with Engine(checkpoint, arguments, "1", SETTINGS | variables, patience=500) as running:
            runs = {
                run: running.call("tests.engine.images:answers", requests, patch, reset)
                for run, (requests, _, reset) in case.runs.items()
            }
            encoded = faulty = None
            if name != "gemma3":
                call = "embeddings", GRIDS, CALLS
                encoded = running.call("tests.engine.images:embeddings", *call[1:])
                if workers > 1:
                    fault = images.IN_WORKERS[mode]
                    faulty = running.call("tests.engine.images:with_fault_in_workers", fault, *call)
        return Served(runs, {run: targets for run, (_, targets, _) in case.runs.items()}, encoded, faulty)

    return engine


@pytest.mark.parametrize(("name", "mode"), SHARED)
@pytest.mark.parametrize("tree", ["1", "2"])
def test_a_request_has_the_same_bits_in_any_company(
    name: str, mode: str, tree: str, serve: Callable[..., Served]
) -> None:
    done = serve(name, 2, mode, tree)
    assert done.differing() == {}
    assert max(done.runs["from the cache of embeddings"]["cached"]) == 0
    assert done.runs["preempted"]["preemptions"] > 0


@pytest.mark.parametrize(("name", "mode"), SHARED)
def test_with_a_tree_two_workers_have_the_bits_of_one(name: str, mode: str, serve: Callable[..., Served]) -> None:
    one, two = serve(name, 1, tree="2"), serve(name, 2, mode, "2")
    assert [run for run in one.names if differing_answers(one.given(run), two.given(run))] == []


@pytest.mark.parametrize(("name", "mode"), [shared for shared in SHARED if shared[0] != "gemma3"])
def test_every_worker_gives_an_item_the_same_embedding_whatever_shares_its_call(
    name: str, mode: str, serve: Callable[..., Served]
) -> None:
    done = serve(name, 2, mode)
    assert done.encoded["moved"] == []
    assert {len(set(of_workers)) for of_workers in done.encoded["alone"]} == {1}
    assert done.faulty["moved"], "the negative control"


@pytest.mark.parametrize("name", [name for name, mode in SHARED if mode == "data"])
def test_workers_that_share_the_images_of_a_step_give_the_embeddings_of_one(
    name: str, serve: Callable[..., Served]
) -> None:
    """And those that share each layer give others, but with a tree."""
    one, images_shared, layers_shared = serve(name, 1), serve(name, 2, "data"), serve(name, 2, "weights")
    first = [bits for bits, *_ in one.encoded["alone"]]
    assert [bits for bits, *_ in images_shared.encoded["alone"]] == first
    assert [bits for bits, *_ in layers_shared.encoded["alone"]] != first
    with_tree = [serve(name, workers, mode, "2") for workers, mode in ((1, "weights"), (2, "weights"), (2, "data"))]
    assert len({tuple(bits for bits, *_ in done.encoded["alone"]) for done in with_tree}) == 1
