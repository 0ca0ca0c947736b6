"""Further models that see images: a request has the same bits alone, among others with other images, from the caches,
in chunks that end inside an image and after preemption; and is near what Transformers gives.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from tests.engine import deepseek_ocr, images, mistral_form, multimodal, nemotron_vl
from tests.engine.engines import OF_DEVICE, PATHS, SETTINGS, Engine, arguments_of, differing_answers
from tests.engine.test_images import by_tools, exact, patches_of, text
from vllm_batch_invariant.integration.coverage import RAN
from vllm_batch_invariant.verify.check.results import CheckResults

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

LIMITS = {
    "max_model_len": 1024, "max_num_seqs": 64, "max_logprobs": -1, "skip_mm_profiling": True,
    "limit_mm_per_prompt": '{"image": 8}', "max_num_batched_tokens": 128, "dtype": "float32",
}  # fmt: skip
TOLERANCES = {
    "nemotron nano vl": 0.15,
    "nemotron nano omni": 0.2,
    "mistral3": 1e-3,
    "mistral3 around ministral3": 1e-3,
    "internvl3.5 with a large tower": 4e-4,
}
TOLERANCE = 1e-4
"""Of logprobs in fp32 beside float64, absolute: rounding of three layers of a tower, and of two of a decoder; and of
models of which it is more, of two in bf16.
"""


ONES = {"max_num_batched_tokens": 1, "max_num_seqs": 1}
Grid = tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """Models of one kind, and what Transformers' class is given beside the tokens.

    Attributes:
        config: of a checkpoint.
        seen: of the pictures and the films of a request, in their order, each [pictures, height, width, 3] bytes.
        grids: patches of images: large, oblong, tall, narrow, small, least and two more.
        film: twice so many frames of so many patches; None where videos are not encoded.
        faults: of its encoder.
        limit: how many images and videos a request may have.
        before: tokens in front of the large image, so that the first step of its request ends in it.
        settings: further ones.
        save: writes a checkpoint.
        written: the tokens of an image in a prompt, where a tokenizer writes all of them.
        image: what stands for an image, or for a row of one.
        path: folders that its processes need on their path.
        dtype: of its checkpoint.
    """

    config: Callable[[], transformers.PretrainedConfig]
    seen: Callable[[list[np.ndarray]], dict[str, torch.Tensor]]
    grids: tuple[Grid, ...]
    film: Grid | None = None
    faults: tuple[str, ...] = images.FAULTS[:2]
    limit: str = LIMITS["limit_mm_per_prompt"]
    before: int = 60
    settings: dict[str, Any] = field(default_factory=dict)
    save: Callable[..., torch.nn.Module] = images.save
    written: Callable[[Grid], list[int]] | None = None
    image: int = images.IMAGE
    path: Callable[[Path], list[str]] = lambda folder: []
    dtype: str = "float32"

    @cached_property
    def targets(self) -> list[dict[str, Any]]:
        """Requests that are looked at; the fourth and the fifth differ in their pictures alone."""
        large, oblong, _, narrow, small, least, *_ = self.grids
        asked = self.asked
        last = [asked(6, 12, [small, self.film])] if self.film else []
        return [
            asked(1, self.before, [large], 20),
            asked(2, 7, [small, oblong, least]),
            asked(3, 20, [narrow]),
            asked(4, 30, [small]) | {"images": [(small, 400)]},
            asked(4, 30, [small]) | {"images": [(small, 401)]},
            asked(5, 40, []),
            *last,
        ]

    @cached_property
    def few(self) -> list[dict[str, Any]]:
        """Others before them."""
        _, _, tall, _, _, least, other, _ = self.grids
        asked, films = self.asked, [self.film] if self.film else []
        return [asked(11, 3, [tall, least]), asked(12, 45, []), asked(13, 1, [other, *films])]

    @cached_property
    def many(self) -> list[dict[str, Any]]:
        """Others behind them."""
        _, _, tall, _, small, least, _, other = self.grids
        kinds: list[list[Grid]] = [[], [small], [least, other], [tall]]
        return [self.asked(20 + n, 1 + 7 * n % 40, kinds[n % 4], count=2) for n in range(24)]

    @property
    def asked(self) -> Callable[..., dict[str, Any]]:
        """Makes a request."""
        return partial(asked, written=self.written)

    @property
    def runs(self) -> dict[str, tuple[list[dict[str, Any]], slice, str]]:
        return images.runs_of(self.targets, self.few, self.many)


def padded(pictures: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """Pictures in the corner of the largest, and their sizes."""
    pixels = [scaled(torch.from_numpy(one[0]).permute(2, 0, 1)) for one in pictures]
    sizes = torch.tensor([one.shape[1:] for one in pixels])
    together = torch.zeros(len(pixels), 3, *sizes.amax(0).tolist(), dtype=torch.float64)
    for into, one in zip(together, pixels, strict=True):
        into[:, : one.shape[1], : one.shape[2]] = one
    return {"pixel_values": together, "image_sizes": sizes}


def in_squares(pictures: list[np.ndarray], side: int = 56) -> dict[str, torch.Tensor]:
    """Squares of pictures, row by row, and behind those of one that has several a square of all of it; pictures of a
    film have one each.
    """
    found = []
    for one in pictures:
        pixels, squares = images.squares_of(one, side)
        found.append(scaled(squares))
        if len(squares) > len(pixels):
            least = F.interpolate(pixels.float(), size=(side, side), mode="bicubic", antialias=True)
            found.append(scaled(least.round().clamp(0, 255)))
    return {"pixel_values": torch.cat(found)}


def in_squares_of_pictures(pictures: list[np.ndarray], side: int = 56) -> dict[str, torch.Tensor]:
    """The same of InternVL's own form, whose processor scales pictures, and by other numbers."""
    from PIL import Image

    found = []
    for one in (frame for several in pictures for frame in several):
        rows, columns = (size // side for size in one.shape[:2])
        cut = one.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
        found.append(cut)
        if rows * columns > 1:
            found.append(np.array(Image.fromarray(one).resize((side, side)))[None])
    pixels = torch.from_numpy(np.concatenate(found)).permute(0, 3, 1, 2)
    mean, std = (torch.tensor(one).double()[:, None, None] for one in images.OF_IMAGENET)
    return {"pixel_values": (pixels.double() / 255 - mean) / std}


def in_squares_and_whole(pictures: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """The same of Idefics 3, whose images have several each, of one request."""
    return {"pixel_values": in_squares(pictures, 84)["pixel_values"][None]}


def scaled(pixels: torch.Tensor) -> torch.Tensor:
    """[..., 3, height, width] in float64 of bytes."""
    mean, std = (torch.tensor(one).double()[:, None, None] for one in images.NORM.values())
    return (pixels.double() / 255 - mean) / std


MISTRAL3 = Family(images.mistral3, padded, ((20, 22), (12, 16), (16, 12), (2, 30), (4, 4), (2, 2), (8, 30), (6, 10)))
SQUARES = (12, 8), (4, 8), (8, 4), (4, 20), (4, 4), (4, 4), (4, 12), (6, 10)
"""Of 4 x 4 patches; the last one's pixels are resized."""


def merged(pictures: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """Patches of pictures, or of two frames each of a film, those that are merged one after the other, and how many
    rows and columns there are; groups of frames are images for the model.
    """
    vision, grids, pixels = images.glm4_1v().vision_config, [], []
    for one in pictures:
        frames = one if len(one) > 1 else one.repeat(2, 0)
        pixels.append(patches_of(frames, vision))
        grids += [[1, *(side // vision.patch_size for side in one.shape[1:3])]] * (len(frames) // 2)
    return {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}


def in_rows(pictures: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """The same, row by row."""
    side, found = images.kimi_vl().vision_config.patch_size, []
    for one in pictures:
        cut = scaled(torch.from_numpy(one[0]).permute(2, 0, 1)).unflatten(2, (-1, side)).unflatten(1, (-1, side))
        found.append(cut.permute(1, 3, 0, 2, 4).flatten(0, 1))
    grids = [[1, *(size // side for size in one.shape[1:3])] for one in pictures]
    return {"pixel_values": torch.cat(found), "image_grid_thw": torch.tensor(grids)}


def in_tiles(pictures: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """The same of Llama 4, whose processor computes in bf16."""
    side, found = images.llama4().vision_config.image_size, []
    for one in pictures:
        pixels = torch.from_numpy(one).permute(0, 3, 1, 2)
        rows, columns = (size // side for size in pixels.shape[2:])
        cut = pixels.unflatten(3, (columns, side)).unflatten(2, (rows, side)).permute(0, 2, 4, 1, 3, 5)
        found.append(cut.flatten(0, 2))
        if rows * columns > 1:
            least = F.interpolate(pixels.float(), size=(side, side), mode="bilinear", antialias=True)
            found.append(least.round().clamp(0, 255).to(torch.uint8))
    scaled = torch.cat(found).bfloat16() * (1 / 255)
    return {"pixel_values": ((scaled - 0.5) / 0.5).double()}


def in_tiles_or_whole(pictures: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """The same of LFM2-VL, whose processor cuts large images and shows all of it in less patches, and keeps others."""
    side, tile, most = images.lfm2_vl().vision_config.patch_size, 8, 144
    cut: list[torch.Tensor] = []
    for one in pictures:
        pixels = torch.from_numpy(one).permute(0, 3, 1, 2)
        rows, columns = (size // side for size in pixels.shape[2:])
        if rows * columns <= most:
            cut.append(pixels[0])
            continue
        size = tile * side
        cut += pixels[0].unflatten(2, (-1, size)).unflatten(1, (-1, size)).permute(1, 3, 0, 2, 4).flatten(0, 1)
        share = (rows * columns / most) ** 0.5
        least = [int(count / share) // 2 * 2 * side for count in (rows, columns)]
        small = F.interpolate(pixels.float(), size=least, mode="bilinear", antialias=True)
        cut.append(small[0].round().clamp(0, 255))
    grids = torch.tensor([[size // side for size in one.shape[1:]] for one in cut])
    patches = [scaled(one).unflatten(2, (-1, side)).unflatten(1, (-1, side)) for one in cut]
    patches = [one.permute(1, 3, 2, 4, 0).flatten(0, 1).flatten(1) for one in patches]
    longest = max(map(len, patches))
    together = torch.stack([F.pad(one, (0, 0, 0, longest - len(one))) for one in patches])
    seen = torch.arange(longest) < grids.prod(-1)[:, None]
    return {"pixel_values": together, "spatial_shapes": grids, "pixel_attention_mask": seen.int()}


def in_groups(pictures: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """Patches of pictures twice, or of two frames of a film, row by row, as Muse Glimmer has them."""
    side, found, grids = multimodal.muse_glimmer().vision_config.patch_size, [], []
    for one in pictures:
        frames = (torch.from_numpy(one).double().permute(0, 3, 1, 2) / 255 - 0.5) / 0.5
        groups = frames.unflatten(0, (-1, 2)) if len(frames) > 1 else frames[:, None].repeat(1, 2, 1, 1, 1)
        cut = groups.unflatten(4, (-1, side)).unflatten(3, (-1, side))  # [groups, 2, 3, rows, side, columns, side]
        found.append(cut.permute(0, 3, 5, 1, 2, 4, 6).flatten(0, 2).flatten(1))
        grids.append([len(groups), *(size // side for size in one.shape[1:3])])
    return {"pixel_values": torch.cat(found), "image_grid_thw": torch.tensor(grids)}


TILES = (8, 8), (4, 8), (8, 4), (4, 16), (4, 4), (4, 4), (4, 12), (6, 10)
"""Of 4 x 4 patches; the last one's pixels are resized."""
IN_TILES = (16, 16), (8, 16), (16, 8), (2, 30), (4, 4), (2, 2), (8, 24), (6, 10)
"""Of which the first and the last but one are cut into tiles of 8 x 8."""
IN_TWO = (12, 12), (6, 12), (12, 6), (6, 12), (12, 6), (6, 12), (12, 12), (6, 10)
"""Of 6 x 6 patches, two squares at the longest side; the last one's pixels are resized."""
IN_LARGE = (16, 24), (8, 16), (16, 8), (8, 24), (8, 8), (3, 5), (24, 8), (6, 8)
"""Of 8 x 8 patches; the last but two are smaller, or resized."""
IN_MISTRALS_FORM = replace(
    MISTRAL3,
    settings=dict.fromkeys(("tokenizer_mode", "config_format", "load_format"), "mistral"),
    save=mistral_form.save,
    image=mistral_form.IMAGE,
)
OF_SQUARES = images.FAULTS[0], images.OF_NUMBER
"""All are as long as each other."""
INTERNVL3 = Family(images.internvl, in_squares, SQUARES, (2, 4, 4), OF_SQUARES, before=110)
OMNI = Family(  # with an encoder of sound that nothing reaches
    nemotron_vl.omni,
    nemotron_vl.whole,
    MISTRAL3.grids,
    (2, 4, 4),
    faults=(images.FAULTS[0], images.OF_ITEMS),  # the longest sequence moves no bit of bf16
    limit='{"image": 8, "audio": 0}',
    settings={"trust_remote_code": True},
    save=nemotron_vl.save,
    path=nemotron_vl.python_path,
    dtype="bfloat16",
)
IN_ITS_OWN_FORM = replace(
    INTERNVL3,
    seen=in_squares_of_pictures,
    settings={"trust_remote_code": True},
    save=images.save_chat,
    written=lambda grid: [images.IN_CHAT_OF["image" if len(grid) == 2 else "video"]],
    image=images.IN_CHAT_OF["image"],
)
GLM = Family(
    images.glm4_1v,
    merged,
    MISTRAL3.grids,
    (2, 4, 4),
    written=lambda grid: [images.IMAGE] if len(grid) == 2 else [4004, images.VIDEO, 4005],
)
FAMILIES = {
    "mistral3": MISTRAL3,
    "mistral3 around ministral3": replace(MISTRAL3, config=images.ministral3),
    "pixtral": replace(
        IN_MISTRALS_FORM,
        config=images.pixtral,
        grids=((10, 11), (6, 8), (8, 6), (1, 30), (2, 2), (1, 1), (4, 15), (3, 5)),
        written=partial(mistral_form.written, 1),
    ),
    "ministral3 as mistral has it": replace(
        IN_MISTRALS_FORM, config=images.ministral3, written=partial(mistral_form.written, 2)
    ),
    "glm4.1v": GLM,
    "glm4.5v": replace(GLM, config=images.glm4_5v),
    "idefics3": Family(images.idefics3, in_squares_and_whole, IN_TWO, None, OF_SQUARES, before=110),
    "smolvlm": Family(images.smolvlm, in_squares_and_whole, IN_TWO, None, OF_SQUARES, before=110),
    "deepseek-ocr": Family(
        deepseek_ocr.config,
        deepseek_ocr.seen,
        IN_LARGE,
        faults=(images.OF_ITEMS,),  # each has calls of its own
        before=490,
        settings={"max_num_batched_tokens": 512},  # as many rows are kept of what was encoded
        save=deepseek_ocr.save,
        path=deepseek_ocr.python_path,
    ),
    "kimi-vl": Family(images.kimi_vl, in_rows, MISTRAL3.grids, settings={"trust_remote_code": True}),
    "paddleocr-vl": Family(images.paddleocr_vl, in_rows, MISTRAL3.grids, faults=(images.OF_ITEMS,)),
    "glm-ocr": replace(GLM, config=images.glm_ocr),
    "lfm2-vl": Family(
        images.lfm2_vl,
        in_tiles_or_whole,
        IN_TILES,
        before=490,
        settings={"max_num_batched_tokens": 512},  # as many rows are kept of what was encoded
    ),
    "muse-glimmer": Family(multimodal.muse_glimmer, in_groups, MISTRAL3.grids, (2, 4, 4)),
    "llama4": Family(images.llama4, in_tiles, TILES, None, OF_SQUARES, before=110),
    "nemotron nano vl": replace(
        OMNI, config=nemotron_vl.nano_vl, seen=nemotron_vl.in_squares, grids=SQUARES, faults=OF_SQUARES, before=110
    ),
    "nemotron nano omni": OMNI,
    "internvl3": INTERNVL3,
    "internvl3 in its own form": IN_ITS_OWN_FORM,
    "internvl3.5 in its own form": replace(IN_ITS_OWN_FORM, config=partial(images.internvl, "qwen3")),
    "internvl3.5 with a large tower": Family(
        images.internvl3_5, in_squares, SQUARES, (2, 4, 4), OF_SQUARES, before=110
    ),
}
PRUNED = {
    f"{name}, pruned": replace(
        FAMILIES[name],
        film=(4, 4, 4),
        faults=(images.OF_EARLIER,),
        settings=OMNI.settings | {"video_pruning_rate": 0.5},
    )
    for name in ("nemotron nano vl", "nemotron nano omni")
}
"""Whose videos keep, of the tokens behind their first picture, those that differ most from what they had before."""
FAMILIES |= PRUNED


def asked(
    seed: int,
    before: int,
    grids: list[Grid],
    after: int = 3,
    count: int = 6,
    written: Callable[[Grid], list[int]] | None = None,
) -> dict[str, Any]:
    """A request with tokens, an image or a video of each grid, and some tokens behind each.

    Args:
        written: of :class:`Family`; no token of text is a special one then.
    """

    def words(length: int, seed: int) -> list[int]:
        return [token + 64 * (written is not None) for token in text(length, seed)]

    prompt = words(before, seed)
    for place, grid in enumerate(grids):
        item = written(grid) if written else [images.IMAGE if len(grid) == 2 else images.VIDEO]
        prompt += [*item, *words(after, seed + 50 + place)]
    params = {"temperature": 0, "max_tokens": count, "logprobs": 20, "ignore_eos": True}
    items = [(grid, 100 * seed + place) for place, grid in enumerate(grids)]
    pictures, films = ([item for item in items if len(item[0]) == length] for length in (2, 3))
    return {"prompt": prompt, "images": pictures, "videos": films, "params": params}


DRAWN = (
    *(
        "deepseek-ocr",
        "glm4.1v",
        "glm-ocr",
        "internvl3",
        "kimi-vl",
        "lfm2-vl",
        "llama4",
        "muse-glimmer",
        "nemotron nano vl",
        "nemotron nano omni",
        *PRUNED,
    ),
    *("paddleocr-vl", "pixtral", "smolvlm"),
)
"""Which a fuzzer and a check look at."""


@dataclass
class Served:
    """A family, and what an engine gave; what it gave a target alone and behind another request, by the fault of its
    encoder; what a fuzzer and a check found, by the fault; and its checkpoint.
    """

    family: Family
    runs: dict[str, dict[str, Any]]
    faulty: dict[str, list[list[dict[str, Any]]]]
    fuzzed: dict[str, str]
    checked: dict[str, CheckResults]
    model: torch.nn.Module

    def given(self, name: str) -> list[dict[str, Any]]:
        return self.runs[name]["given"][self.family.runs[name][1]]

    @property
    def alone(self) -> list[dict[str, Any]]:
        return [self.given(f"alone {number}")[0] for number in range(len(self.family.targets))]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Engine, Any, int]]:
    """An engine of a family's model, with further settings; the model, and the side of its patches."""
    version, on = pytest.importorskip("vllm").__version__, "cuda" if torch.cuda.is_available() else "cpu"
    if not version.startswith(RAN.encoding[on]):
        pytest.skip("encoders of images have not run here")
    path = [*multimodal.python_path(tmp_path_factory.mktemp("path")), PATHS]

    @cache
    def made(name: str) -> tuple[Path, Any, int]:
        family, folder = FAMILIES[name], tmp_path_factory.mktemp("model")
        config = family.config()
        return folder, family.save(config, getattr(torch, family.dtype), folder), images.patch_of(config)

    def start(name: str, settings: dict[str, Any]) -> tuple[Engine, Any, int]:
        folder, model, patch = made(name)
        family = FAMILIES[name]
        own = {"limit_mm_per_prompt": family.limit, "dtype": family.dtype} | family.settings
        arguments = arguments_of(LIMITS | OF_DEVICE | own | settings)
        paths = os.pathsep.join([*family.path(tmp_path_factory.mktemp("path")), *path])
        return Engine(str(folder), arguments, "1", SETTINGS | {"PYTHONPATH": paths}, patience=400), model, patch

    return start


@pytest.fixture(scope="module")
def served(started: Callable[..., tuple[Engine, Any, int]]) -> Callable[[str], Served]:
    @cache
    def serve(name: str) -> Served:
        family = FAMILIES[name]
        starting, model, patch = started(name, {})
        with starting as engine:

            def by_faulty(fault: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
                call = "answers", requests, patch, "cache"
                return engine.call("tests.engine.images:with_fault", fault, *call)["given"][-1:]

            runs = {
                run: engine.call("tests.engine.images:answers", requests, patch, reset)
                for run, (requests, _, reset) in family.runs.items()
            }
            seen, others = (-1, 2) if name in PRUNED else (2, 0)  # those with videos
            company = [family.targets[seen]], [family.few[others], family.targets[seen]]
            faulty = {fault: [by_faulty(fault, requests) for requests in company] for fault in family.faults}
            found = by_tools(engine) if name in DRAWN else ({}, {})
        return Served(family, runs, faulty, *found, model)

    return serve


@pytest.mark.parametrize("name", FAMILIES)
def test_a_request_with_images_has_the_same_bits_in_any_company(name: str, served: Callable[[str], Served]) -> None:
    found = served(name)
    differing = {run: differing_answers(found.given(run), found.alone) for run in found.runs if "alone" not in run}
    assert {run: numbers for run, numbers in differing.items() if numbers} == {}
    runs = found.runs
    assert runs["behind 3"]["calls"]["items"] > runs["behind 3"]["calls"]["calls"], "no images shared a call"
    assert runs["from the prefix cache"]["calls"]["calls"] == 0
    assert runs["from the prefix cache"]["cached"][0] >= 128, runs["from the prefix cache"]["cached"]
    assert runs["from the cache of embeddings"]["calls"]["calls"] == 0
    before = [one["prompt"].index(found.family.image) if one["images"] else 0 for one in found.family.targets]
    cached = runs["from the cache of embeddings"]["cached"]  # of what two requests begin with
    assert all(count <= most for count, most in zip(cached, before, strict=True)), cached
    assert runs["preempted"]["preemptions"] > 0
    assert found.alone[3]["completions"] != found.alone[4]["completions"], "the model does not look at images"


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name in FAMILIES for fault in FAMILIES[name].faults])
def test_encoders_with_faults_fail_the_same_comparison(name: str, fault: str, served: Callable[[str], Served]) -> None:
    """The negative control: on a CPU plain vLLM may have the same bits."""
    assert differing_answers(*served(name).faulty[fault]) == [0]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (name, settings)
        for name in ("smolvlm", "kimi-vl", "lfm2-vl", "muse-glimmer", "paddleocr-vl", "pixtral")
        for settings in ({"dtype": "bfloat16"}, {"dtype": "float16"}, ONES)
        if (name, settings) != ("lfm2-vl", ONES)  # vLLM then keeps fewer rows than an image in tiles has
    ]
    + [
        (name, {"dtype": dtype})
        for name in ("glm-ocr", "internvl3.5 in its own form", "llama4")
        for dtype in ("bfloat16", "float16")
    ]
    + [(name, ONES) for name in ("nemotron nano vl", "nemotron nano omni", *PRUNED)],
    ids=str,
)
def test_other_dtypes_and_limits_of_1_keep_the_bits(
    name: str,
    settings: dict[str, Any],
    started: Callable[..., tuple[Engine, Any, int]],
    served: Callable[[str], Served],
) -> None:
    family, found = FAMILIES[name], []
    starting, _, patch = started(name, settings)
    with starting as engine:
        for requests in ([family.targets[1]], [*family.few, *family.targets[:2]]):
            call = "tests.engine.images:answers", requests, patch, "cache"
            found.append(engine.call(*call)["given"][-1])
    assert differing_answers(found[1:], found[:1]) == []
    if "dtype" not in settings:
        assert differing_answers(found[:1], served(name).alone[1:2]) == []


@pytest.mark.parametrize("name", DRAWN)
def test_a_check_finds_nothing_but_an_encoder_that_looks_at_its_call_and_a_fuzzer_nothing(
    name: str, served: Callable[[str], Served]
) -> None:
    found = served(name)
    assert found.fuzzed[""] == ""
    multimodal.assert_a_check_finds_the_faulty_tower(found.checked)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in PRUNED])
def test_logprobs_are_near_transformers_in_float64(name: str, served: Callable[[str], Served]) -> None:
    found = served(name)
    model, errors = exact(found.model), []
    for number, target in enumerate(found.family.targets):
        given = found.given("together")[number]
        [answer] = given["completions"]
        to_be_images = *images.SPECIAL, images.PATCH, *images.OF_IDEFICS, found.family.image
        ends = [place for place, token in enumerate(answer["tokens"]) if token in to_be_images]
        tokens = answer["tokens"][: ends[0] + 1 if ends else None]
        expected = by_transformers(name, model, target, given["prompt"], tokens)
        listed = [
            (place, token, float.fromhex(logprob))
            for place, entry in enumerate(answer["logprobs"][: len(expected)])
            for token, logprob, _ in entry
        ]
        errors.append(max(abs(logprob - expected[place, token].item()) for place, token, logprob in listed))
    tolerance = TOLERANCES.get(name, TOLERANCE)
    assert max(errors) < tolerance, errors
    prompt = found.given("together")[3]["prompt"]
    one, other = (by_transformers(name, model, found.family.targets[number], prompt, [7]) for number in (3, 4))
    apart = 10 if found.family.dtype == "float32" else 5
    assert (one - other).abs().max() > apart * tolerance, "another picture is as near"


def by_transformers(
    name: str, model: Any, target: dict[str, Any], prompt: list[int], answer: list[int]
) -> torch.Tensor:
    """[tokens of the answer, vocabulary] logprobs."""
    patch = images.patch_of(model.config)
    pictures = [images.picture(patch, grid, seed)[None] for grid, seed in target["images"]]
    pictures += [images.film(patch, grid, seed)[0] for grid, seed in target["videos"]]
    seen = FAMILIES[name].seen(pictures) if pictures else {}
    ids = torch.tensor([prompt + answer[:-1]])
    ids[ids == images.VIDEO] = images.IMAGE  # Transformers has one name for both
    kinds = {"mm_token_type_ids": (ids == images.IMAGE).int()} if "image_grid_thw" in seen else {}
    with torch.no_grad():
        logits = model(input_ids=ids, **kinds, **seen).logits[0]
    return logits[-len(answer) :].log_softmax(-1)
