"""Attention of encoders of images, which of them are refused, and how a user may name an image."""

import ast
import importlib.util
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("vllm")

from vllm.config import set_current_vllm_config

from tests.assertions import assert_near, assert_same_bits
from tests.fakes import torchvision
from tests.integration.test_layers import named
from vllm_batch_invariant.envs import ATTENTION, UNTRIED
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.engine import items
from vllm_batch_invariant.integration.layers import encoders, review
from vllm_batch_invariant.integration.reviews import patch_points, sources

HEADS = 2
LENGTHS = (9, 300, 1, 64, 17)
"""Of sequences in one call."""


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The layer registered, in this test only."""
    if not patch_points.MM_ENCODER_ATTENTION.is_there():
        pytest.skip("this vLLM has no such layer")
    monkeypatch.setattr(patch_points.CUSTOM_OP.module(), "op_registry_oot", {})
    encoders.install()
    with set_current_vllm_config(patch_points.CONFIG.get()()):
        yield


def layer(size: int) -> Any:
    return patch_points.MM_ENCODER_ATTENTION.get()(HEADS, size, size**-0.5)


def starts(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def drawn(size: int, dtype: torch.dtype) -> torch.Tensor:
    """[3, 1, rows, heads, size]: queries, keys and values of all sequences, as parts of one matrix."""
    torch.manual_seed(0)
    return torch.randn(1, sum(LENGTHS), 3, HEADS, size, dtype=dtype).permute(2, 0, 1, 3, 4)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", encoders.HEAD_SIZES)
def test_a_sequence_sees_its_own_keys_with_the_same_bits_in_any_call(
    size: int, device: str, dtype: torch.dtype
) -> None:
    made, qkv, ends = layer(size), drawn(size, dtype).to(device), starts(LENGTHS).to(device)
    together = made(*qkv, cu_seqlens=ends, max_seqlen=torch.tensor(max(LENGTHS)))
    assert together.shape == qkv[0].shape
    for first, last in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        own = [part[:, first:last] for part in qkv]
        alone = made(*own, cu_seqlens=torch.tensor([0, last - first], dtype=torch.int32, device=device))
        assert_same_bits(together[:, first:last], alone, f"{last - first} rows")
        assert_same_bits(made(*own), alone, "without a word about sequences")
        q, k, v = (part[0].double().transpose(0, 1) for part in own)
        weights = (q @ k.transpose(1, 2) * size**-0.5).softmax(-1)
        assert_near(alone[0].cpu(), (weights @ v).transpose(0, 1).cpu(), factor=2)


def test_layers_that_hear_nothing_of_sequences_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is kept beside the tensor that says where sequences begin, and a new one waits for the GPU."""
    planned: list[torch.Tensor] = []
    monkeypatch.setattr(encoders, "_plan_of", lambda _, starts, __: planned.append(starts))
    qkv = drawn(64, torch.float32)
    for count in (1, 2):
        both = [one.expand(count, -1, -1, -1) for one in qkv]
        for made in (layer(64), layer(64)):
            made(*both)
    assert [one.tolist() for one in planned[::2]] == [[0, sum(LENGTHS)], [0, sum(LENGTHS), 2 * sum(LENGTHS)]]
    assert all(one is other for one, other in zip(planned[::2], planned[1::2], strict=True))


def test_towers_build_ours_whose_offsets_are_rows() -> None:
    kind = patch_points.MM_ENCODER_ATTENTION.get()
    assert review._problem(layer(72)) is None
    ends = starts(LENGTHS).numpy()
    flashinfer = "FLASHINFER"
    given = kind.maybe_recompute_cu_seqlens(flashinfer, ends, 144, 1, torch.device("cpu"))
    assert given.tolist() == ends.tolist()
    assert kind.maybe_compute_seq_lens(flashinfer, ends, torch.device("cpu")) is None
    patch_points.CUSTOM_OP.module().op_registry_oot.clear()
    with pytest.raises(NotCovered, match=r"MMEncoderAttention"):
        review.check(layer(72))


def test_other_head_sizes_and_implementations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotCovered, match="heads of size 64, 72, 80, 88, 96, 128, and this one of 104; "):
        review.check(layer(104))
    monkeypatch.setenv(ATTENTION.name, "flex")
    with pytest.raises(NotCovered, match=f"encoders have not been run with {ATTENTION.name}=flex"):
        review.check(layer(80))


def test_heads_that_no_gpu_has_run_are_refused_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(size: int, is_cuda: bool) -> str | None:
        weight = SimpleNamespace(is_cuda=is_cuda)
        return encoders.problem_of_heads(SimpleNamespace(parameters=lambda: [weight], modules=lambda: [layer(size)]))

    assert problem(96, is_cuda=True) == "no GPU has run heads of 96"
    assert problem(96, is_cuda=False) is problem(88, is_cuda=True) is None
    monkeypatch.setenv(UNTRIED.name, "1")
    assert problem(96, is_cuda=True) is None


def test_a_function_that_nobody_has_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    encoders.check("cpu")
    installed = sources.installed

    def changed(module: str) -> str | None:
        source = installed(module)
        return source and source.replace("def _gather_mm_embeddings(", "def _gather_mm_embeddings(  # another")

    monkeypatch.setattr(sources, "installed", changed)
    with pytest.raises(NotCovered, match=r"reviewed its vllm\.v1\.worker\.gpu_model_runner\.GPUModelRunner\._gather"):
        encoders.check("cpu")


@pytest.mark.parametrize(("changes", "refused"), [({}, False), ({"stride": 1}, True), ({"padding": 1}, True)])
def test_a_convolution_passes_that_is_a_matmul(changes: dict[str, Any], refused: bool) -> None:
    made = named("vllm.model_executor.layers.conv.Conv3dLayer")(3, 8, 2, **{"stride": 2} | changes)
    assert (review._problem(made) is not None) == refused


def test_an_image_has_no_identifier_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = patch_points.RENDERER.get()
    monkeypatch.setattr(renderer, "_process_mm_uuids", lambda self, data, found, uuids, request: uuids)
    monkeypatch.setattr(renderer, "_process_multimodal", renderer._process_multimodal)
    hasher = patch_points.IMAGE_ID.module()
    monkeypatch.setattr(hasher, "_get_image_id_bytes", hasher._get_image_id_bytes)
    hashed = [hasher.MultiModalHasher.hash_kwargs("sha256", image=image(named)) for named in (False, True)]
    items.install()
    again = [hasher.MultiModalHasher.hash_kwargs("sha256", image=image(named)) for named in (False, True)]
    assert hashed[0] != hashed[1]
    assert again == [hashed[0]] * 2
    process = renderer._process_mm_uuids
    for free in ({}, {"image": [None, None]}, {"image": None}):
        assert process(SimpleNamespace(), {}, {}, free, "1") == free
    with pytest.raises(patch_points.VALIDATION_ERROR.get(), match="identifier of the user's for image"):
        process(SimpleNamespace(), {}, {}, {"image": [None, "mine"]}, "1")


def test_videos_of_a_request_are_sampled_alike_where_a_processor_reads_the_last_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renderer = patch_points.RENDERER.get()
    monkeypatch.setattr(renderer, "_process_mm_uuids", lambda *given: "processed")
    monkeypatch.setattr(renderer, "_process_multimodal", renderer._process_multimodal)
    hasher = patch_points.IMAGE_ID.module()
    monkeypatch.setattr(hasher, "_get_image_id_bytes", hasher._get_image_id_bytes)
    items.install()
    glm, other = SimpleNamespace(_get_direct_path_inputs=None), SimpleNamespace()

    def process(processor: Any, *metadata: Any) -> Any:
        renderer_of = SimpleNamespace(get_mm_processor=lambda: processor)
        videos = {"video": SimpleNamespace(metadata=[*metadata])}
        return renderer._process_mm_uuids(renderer_of, {}, videos, {}, "1")

    sampled, whole, untold = {"do_sample_frames": False}, {"do_sample_frames": True}, {"fps": 2.0}
    for mixed in ((whole, sampled), (untold, sampled), (object(), sampled)):
        with pytest.raises(patch_points.VALIDATION_ERROR.get(), match="some are sampled already"):
            process(glm, *mixed)
        assert process(other, *mixed) == "processed"
    for alike in ((whole, whole), (sampled,), (untold, untold)):
        assert process(glm, *alike) == "processed"


def image(named: bool) -> Any:
    """One with an identifier in it, or without."""
    made = Image.new("RGB", (2, 3))
    if named:
        made.getexif()[Image.ExifTags.Base.ImageID] = uuid.UUID(int=7)
    return made


@pytest.mark.parametrize(
    ("own", "asked", "refused"),
    [
        (0.0, None, False),
        (0.1, None, True),
        (0.0, {"dither": 0.1}, True),
        (0.1, {"audio_kwargs": {"dither": 0.0}}, False),
    ],
)
def test_sound_gets_no_noise(own: float, asked: Any, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    process = items._without_noise(lambda self, *_: "processed")
    processor = SimpleNamespace(feature_extractor=SimpleNamespace(dither=own))
    info = SimpleNamespace(get_hf_processor=lambda: processor)
    renderer = SimpleNamespace(get_mm_processor=lambda: SimpleNamespace(info=info))
    assert process(renderer, [], {"image": []}, None, asked) == "processed"
    if not refused:
        assert process(renderer, [], {"audio": []}, None, asked) == "processed"
        return
    with pytest.raises(patch_points.VALIDATION_ERROR.get(), match="noise in sound"):
        process(renderer, [], {"audio": []}, None, asked)


def methods_of_deepstack() -> dict[str, Any]:
    """vLLM's, out of its file: to import it takes torchvision."""
    folder = Path(importlib.util.find_spec("vllm.model_executor.models").origin).parent
    [model] = [
        node
        for node in ast.parse((folder / "qwen3_vl.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Qwen3VLForConditionalGeneration"
    ]
    wanted = {f"_{does}_deepstack_input_embeds" for does in ("get", "set", "clear")}
    model.bases, model.decorator_list, model.keywords = [], [], []
    model.body = [node for node in model.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    from vllm.sequence import IntermediateTensors

    made: dict[str, Any] = {"torch": torch, "IntermediateTensors": IntermediateTensors}
    exec(compile(ast.Module([model], []), "qwen3_vl.py", "exec"), made)
    return {name: vars(made[model.name])[name] for name in wanted}


class Deepstack:
    """A model with the buffers of vLLM's Qwen3-VL, and its methods."""

    def __init__(self) -> None:
        for name, method in methods_of_deepstack().items():
            setattr(self, name, method.__get__(self))
        self.deepstack_num_level = 2
        self.deepstack_input_embeds = [torch.zeros(8, 4) for _ in range(2)]
        self.deepstack_input_embeds_num_tokens = 0

    def embed_input_ids(self, ids: torch.Tensor, features: torch.Tensor | None = None) -> torch.Tensor:
        if features is not None:
            self._set_deepstack_input_embeds(features)
        return ids

    def added(self) -> list[torch.Tensor]:
        """As a graph of the forward reads it, which runs none of its code."""
        return [one.clone() for one in self._get_deepstack_input_embeds(3).tensors.values()]


@pytest.mark.parametrize("covered", [True, False], ids=["ours", "vLLM's"])
def test_features_of_an_image_are_gone_in_the_step_behind_a_replayed_graph(covered: bool) -> None:
    model, features = Deepstack(), torch.ones(2, 3, 4)
    if covered:
        encoders.clear_before_each_step(model)
    model.embed_input_ids(torch.arange(3), features)
    assert all(torch.equal(one, torch.ones(3, 4)) for one in model.added())
    model.embed_input_ids(torch.arange(3))
    assert all(torch.equal(one, torch.zeros(3, 4)) for one in model.added()) == covered


def test_a_square_of_zeros_is_encoded_and_a_tower_that_attends_under_a_mask_is_refused() -> None:
    """vLLM leaves the square out, and gives the rows of those behind it to other images."""
    called: list[dict[str, Any]] = []
    model: Any = type("Idefics3ForConditionalGeneration", (torch.nn.Module,), {})()
    model.model, model._tower_model_names = torch.nn.Module(), []
    model.model.image_pixels_to_features = lambda *pixels, **named: called.append(named)
    encoders.prepare(model)
    model.model.image_pixels_to_features(torch.zeros(1), pixel_attention_mask=torch.ones(1))
    assert called[0]["remove_padding"] is False
    assert encoders.problem_of_tower(SimpleNamespace(apply_encoder_attention_mask=False)) is None
    assert encoders.problem_of_tower(SimpleNamespace(apply_encoder_attention_mask=True)) == "its attention has a mask"


def test_an_image_of_nemotron_is_scaled_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM scales images that it has not seen down together, until they fit."""
    processor = torchvision.import_beside(tmp_path, "vllm.transformers_utils.processors.nano_nemotron_vl")
    compiled, kind = processor._bicubic_resize_and_normalize, processor.DynamicResolutionImageTiler
    for owner, name in ((processor, compiled.__name__), (kind, "_images_to_pixel_values_lst")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    sizes = {"max_model_len": 64, "patch_size": 16, "min_num_patches": 4, "max_num_patches": 0, "downsample_ratio": 0.5}
    tiler = kind(**sizes, norm_mean=(0.5, 0.4, 0.3), norm_std=(0.2, 0.3, 0.4))
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 256, (*side, 3), dtype=np.uint8)) for side in ((192, 224), (160, 96))]

    def alone() -> list[torch.Tensor]:
        return [tiler._images_to_pixel_values_lst(0, [one])[0][0] for one in pictures]

    monkeypatch.setattr(processor, compiled.__name__, compiled._torchdynamo_orig_callable)
    assert [one.shape for one in tiler._images_to_pixel_values_lst(9, pictures)[0]] != [one.shape for one in alone()]
    monkeypatch.setattr(processor, compiled.__name__, compiled)
    for _ in range(2):
        items.of_own_pixels()
    assert processor._bicubic_resize_and_normalize is compiled._torchdynamo_orig_callable
    together, tokens = tiler._images_to_pixel_values_lst(9, pictures)
    assert all(map(torch.equal, together, alone()))
    assert tokens == [one.shape[1] * one.shape[2] // 32**2 for one in together]


@pytest.mark.parametrize(("asked", "of_engine", "hears"), [({}, {}, False), ({}, True, True), (True, {}, True)])
def test_sound_of_videos_is_found(asked: Any, of_engine: Any, hears: bool) -> None:
    said = {"use_audio_in_video": True}
    settings = SimpleNamespace(merge_mm_processor_kwargs=lambda given: (of_engine and said) | given)
    info = SimpleNamespace(ctx=SimpleNamespace(model_config=SimpleNamespace(get_multimodal_config=lambda: settings)))
    assert items._hears_videos(info, asked and said) is hears
