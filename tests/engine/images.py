"""Tiny models of random weights that see images, with their processors; and what an engine gives requests with some."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine import kept_states, multimodal
from tests.engine.pooled import sent_together
from vllm_batch_invariant.integration.engine import whole_images
from vllm_batch_invariant.integration.layers import attention, encoders
from vllm_batch_invariant.ops.attention import AttentionReduction, PackedKeys, PagedAttention, attend

IMAGE, VIDEO, START, END = 4000, 4001, 4002, 4003
SPECIAL = {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>", START: "<|vision_start|>", END: "<|vision_end|>"}
"""Tokens of the models here."""
OF_GEMMA = {IMAGE: "<image_soft_token>", START: "<start_of_image>", END: "<end_of_image>"}
"""What they are called where vLLM knows no other names."""
LINES = {4010 + number: "\n" * (1 + number) for number in range(4)}
"""Ends of lines, which stand around an image of Gemma 3's."""
NORM = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}


def qwen2_5_vl() -> transformers.PretrainedConfig:
    """A tower with two heads of 80, windows of 4 x 4 merged patches on two layers of three, biases and RMS norms. Time
    in a video goes on no further than its rows do: else Transformers has other positions behind it than vLLM.
    """
    config = multimodal.qwen2_5_vl()
    vision = {"depth": 3, "hidden_size": 160, "intermediate_size": 320, "num_heads": 2, "out_hidden_size": 512}
    config.vision_config = type(config.vision_config)(**vision, fullatt_block_indexes=[1], tokens_per_second=1)
    return config


def qwen3_vl(made: Callable[[], transformers.PretrainedConfig] = multimodal.qwen3_vl) -> transformers.PretrainedConfig:
    """A tower with two heads of 72, interpolated positions, two layers that add to the decoder's, and layer norms."""
    config = made()
    vision = {"depth": 3, "hidden_size": 144, "intermediate_size": 320, "num_heads": 2, "out_hidden_size": 512}
    config.vision_config = type(config.vision_config)(
        **vision, deepstack_visual_indexes=[0, 1], num_position_embeddings=64
    )
    return config


def gemma3() -> transformers.PretrainedConfig:
    """A tower with two heads of 72 for pictures of 16 x 16 patches, of which four are a token; and a decoder with a
    window that an image fits into on one layer of two.
    """
    config = multimodal.gemma3()
    vision = {"num_hidden_layers": 2, "hidden_size": 144, "intermediate_size": 320, "num_attention_heads": 2}
    config.vision_config = type(config.vision_config)(**vision, image_size=224, patch_size=14)
    config.mm_tokens_per_image, config.text_config.sliding_window = 64, 100
    config.text_config.query_pre_attn_scalar = 16  # of random weights, so that keys differ
    return config


def mistral3() -> transformers.PretrainedConfig:
    """A tower with two heads of 64, angles by row and column, RMS norms and SwiGLU; four patches are a token, and each
    row of an image ends in a token of text.
    """
    vision = {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 2}
    return transformers.Mistral3Config(
        architectures=["Mistral3ForConditionalGeneration"],
        text_config=multimodal.TEXT | {"model_type": "mistral", "head_dim": 64, "sliding_window": None},
        vision_config=vision | {"image_size": 616, "patch_size": 14, "hidden_act": "silu"},
        image_token_index=IMAGE,
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )


def qwen3_5(text: dict[str, Any] = kept_states.QWEN3_5) -> transformers.PretrainedConfig:
    """The tower of Qwen3-VL, of which nothing is added to the decoder, whose layers have states but one."""
    made = multimodal.qwen3_5(text | {"vocab_size": multimodal.TEXT["vocab_size"]})
    vision = {"depth": 3, "hidden_size": 144, "intermediate_size": 320, "num_heads": 2, "out_hidden_size": 256}
    made.vision_config = type(made.vision_config)(**vision, num_position_embeddings=64)
    made.image_token_id, made.video_token_id = IMAGE, VIDEO
    made.vision_start_token_id, made.vision_end_token_id = START, END
    return made


def save(config: transformers.PretrainedConfig, dtype: torch.dtype, folder: Path) -> torch.nn.Module:
    """A checkpoint with a tokenizer of words and a processor that keeps images of whole patches as they are."""
    made = multimodal.model(config, dtype)
    with torch.no_grad():  # else images would hardly change an answer
        for name, weight in made.named_parameters():
            is_seen = "visual" in name or ("vision_tower" in name and config.model_type == "mistral3")
            if is_seen and weight.dim() > 1:
                weight.mul_(4)
    made.save_pretrained(folder)
    special = SPECIAL | (OF_GEMMA if config.model_type == "gemma3" else {})
    words = {(special | LINES).get(number, f"w{number}"): number for number in range(config.text_config.vocab_size)}
    named = {"image_token": special[IMAGE], "boi_token": special[START], "eoi_token": special[END]}
    seen = "{% if part.type == 'image' %}" + f" {SPECIAL[START]}{SPECIAL[IMAGE]}{SPECIAL[END]} "
    parts = "{% for part in messages[0].content %}" + seen + "{% else %}{{ part.text }}{% endif %}{% endfor %}"
    text = "{{ messages[0].content }}"
    template = "{% if messages[0].content is string %}" + text + "{% else %}" + parts + "{% endif %}"
    settings = {"extra_special_tokens": named, "chat_template": template}
    save_tokenizer(folder, words, list(special.values()), settings, list(LINES.values()))
    patch = config.vision_config.patch_size
    if config.model_type == "gemma3":
        file, tower = folder / "model.safetensors", "vision_tower."
        tensors = load_file(file)
        names = {name: name.replace(tower, f"{tower}vision_model.") for name in tensors}  # as published ones have them
        save_file({names[name]: one.clone() for name, one in tensors.items()}, file, metadata={"format": "pt"})
        side = config.vision_config.image_size
        image = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": side, "width": side}} | NORM
        (folder / "preprocessor_config.json").write_text(json.dumps(image))
        processor = {"processor_class": "Gemma3Processor", "image_seq_length": config.mm_tokens_per_image}
        (folder / "processor_config.json").write_text(json.dumps(processor))
        return made
    if config.model_type == "mistral3":
        merged = {"patch_size": patch, "spatial_merge_size": config.spatial_merge_size}
        names = {"image_token": SPECIAL[IMAGE], "image_break_token": SPECIAL[START], "image_end_token": SPECIAL[END]}
        image = {"image_processor_type": "PixtralImageProcessor", "patch_size": patch} | NORM
        image["size"] = {"longest_edge": config.vision_config.image_size}
        (folder / "preprocessor_config.json").write_text(json.dumps(image))
        processor = {"processor_class": "PixtralProcessor"} | merged | names
        (folder / "processor_config.json").write_text(json.dumps(processor))
        return made
    if config.model_type == "qwen3_vl_moe":
        file = folder / "model.safetensors"
        tensors = {  # as published: inputs first
            name: one.mT.contiguous() if ".experts." in name else one for name, one in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    sizes = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
    sizes["size"] = {"shortest_edge": 4 * patch * patch, "longest_edge": 1024 * patch * patch}
    videos = "Qwen2VLVideoProcessor" if config.model_type == "qwen2_5_vl" else "Qwen3VLVideoProcessor"
    image = {"image_processor_type": "Qwen2VLImageProcessor"} | sizes | NORM
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"video_processor_type": videos} | sizes))
    return made


def save_tokenizer(
    folder: Path, words: dict[str, int], special: list[str], settings: dict[str, Any], added: Sequence[str] = ()
) -> None:
    """A tokenizer of words, some of them special; others may have spaces.

    Args:
        words: with their tokens.
        settings: of ``tokenizer_config.json``.
    """
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(list(added))
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w2", "pad_token": "w0", "unk_token": "w3"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind | settings))


def picture(patch: int, grid: Sequence[int], seed: int) -> np.ndarray:
    """[height, width, 3] bytes of so many patches, with edges and noise."""
    rng = np.random.default_rng(seed)
    height, width = (side * patch for side in grid)
    coarse = rng.integers(0, 256, (grid[0], grid[1], 3)).repeat(patch, 0).repeat(patch, 1)
    return (coarse * 0.7 + rng.integers(0, 77, (height, width, 3))).astype(np.uint8)


def film(patch: int, grid: Sequence[int], seed: int) -> tuple[np.ndarray, dict[str, Any]]:
    """[frames, height, width, 3] bytes of twice as many pictures as the grid has, one a second, and what is known."""
    count = 2 * grid[0]
    frames = np.stack([picture(patch, grid[1:], seed + 1000 * frame) for frame in range(count)])
    known = {"fps": 1.0, "duration": float(count), "total_num_frames": count, "frames_indices": list(range(count))}
    return frames, known | {"video_backend": "opencv", "do_sample_frames": False}


def answers(
    llm: Any, requests: Sequence[dict[str, Any]], patch: int, reset: str = "", preempted_after: int = 4
) -> dict[str, Any]:
    """Send requests together, and wait for all of them; run by the driver.

    Args:
        requests: each with a ``prompt`` of tokens, ``images`` and ``videos`` as (grid, seed), one for each token of
            an image or a video, and ``params``.
        patch: pixels of a patch's side.
        reset: of :func:`answers_about`.
    """
    from PIL import Image

    def prompt_of(request: dict[str, Any]) -> dict[str, Any]:
        pictures = [Image.fromarray(picture(patch, grid, seed)) for grid, seed in request["images"]]
        films = [film(patch, grid, seed) for grid, seed in request["videos"]]
        items = ({"image": pictures} if pictures else {}) | ({"video": films} if films else {})
        return {"prompt_token_ids": request["prompt"]} | ({"multi_modal_data": items} if items else {})

    return answers_about(llm, requests, prompt_of, reset, preempted_after)


def answers_about(
    llm: Any,
    requests: Sequence[dict[str, Any]],
    prompt_of: Callable[[dict[str, Any]], dict[str, Any]],
    reset: str = "",
    preempted_after: int = 4,
) -> dict[str, Any]:
    """Send requests together, and wait for all of them.

    Args:
        requests: each with ``params``.
        prompt_of: a request's tokens, images and the like, as vLLM takes them.
        reset: "cache" lets go of the prefix cache and of what was encoded first, "prefix" of the first alone, "encoder"
            of the second; "running" also of what runs after so many steps.

    Returns:
        as ``sent_together``, with what each request got in ``given``, the tokens of its ``prompt`` among it, and
        ``calls``: how often the tower was called, with how many items.
    """
    from vllm import SamplingParams

    from vllm_batch_invariant.verify.harness.drive import describe

    if reset in ("cache", "encoder", "running"):
        llm.llm_engine.reset_encoder_cache()
    asked = [
        (number, prompt_of(request), SamplingParams(**request["params"])) for number, request in enumerate(requests)
    ]
    before = dict(encoded(llm))
    found, counts = sent_together(llm, asked, reset if reset in ("cache", "prefix", "running") else "", preempted_after)
    calls = {name: count - before.get(name, 0) for name, count in encoded(llm).items()}
    given = [describe(output) | {"prompt": output.prompt_token_ids} for output in found]
    return {"given": given, "calls": calls} | counts


Requests = list[dict[str, Any]]


def runs_of(targets: Requests, few: Requests, many: Requests) -> dict[str, tuple[Requests, slice, str]]:
    """The requests of each run, where the targets are, and what is let go of first."""
    count = len(targets)
    alone = {f"alone {number}": ([target], slice(1), "cache") for number, target in enumerate(targets)}
    behind = [*few, *targets], slice(len(few), None)
    return alone | {
        "together": (targets, slice(count), "cache"),
        "from the prefix cache": (targets, slice(count), ""),
        "from the cache of embeddings": (targets, slice(count), "prefix"),
        "behind 3": (*behind, "cache"),
        "before many": ([*targets, *many], slice(count), "cache"),
        "preempted": (*behind, "running"),
    }


def encoded(llm: Any) -> dict[str, int]:
    """How often the tower was called, and with how many items in all."""
    return llm.apply_model(_counted)[0]


def _counted(model: torch.nn.Module) -> dict[str, int]:
    """Counts from when it is first asked."""
    names = dict(model.named_modules())
    [tower] = [names[name] for name in ("visual", "vision_tower", "audio_tower", "model.encoder") if name in names]
    if not hasattr(tower, "counted"):
        tower.counted = {"calls": 0, "items": 0}

        def count(module: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            module.counted["calls"] += 1
            sizes = named.get("grid_thw", named.get("feature_lens"))
            module.counted["items"] += len(given[-1] if sizes is None else sizes)  # Gemma 3's has pictures alone

        tower.register_forward_pre_hook(count, with_kwargs=True)
    return dict(tower.counted)


def pixels(grid: Sequence[int], size: int, seed: int) -> torch.Tensor:
    """[patches, size] bytes, as a processor hands them on."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (math.prod(grid), size), dtype=torch.uint8, generator=generator)


def moved_in_calls(llm: Any, grids: Sequence[Sequence[int]], calls: Sequence[Sequence[int]]) -> list[str]:
    """Items that get other bits from the tower in a call with others than in one of their own; run by the driver.

    Args:
        grids: of the items: frames, rows and columns of patches.
        calls: which items each has.
    """

    def found(model: torch.nn.Module) -> list[str]:
        tower = model.visual
        given = [pixels(grid, tower.patch_embed.proj.input_size, seed) for seed, grid in enumerate(grids)]
        merged = tower.spatial_merge_size**2

        def encode(call: Sequence[int]) -> Sequence[torch.Tensor]:
            rows = tower(torch.cat([given[item] for item in call]), grid_thw=[list(grids[item]) for item in call])
            return rows.split([len(given[item]) // merged for item in call])

        with torch.inference_mode():
            alone = [encode([item])[0] for item in range(len(grids))]
            return [
                f"{item} in {list(call)}"
                for call in calls
                for item, one in zip(call, encode(call), strict=True)
                if not torch.equal(one, alone[item])
            ]

    return llm.apply_model(found)[0]


def embeddings(llm: Any, grids: Sequence[Sequence[int]], calls: Sequence[Sequence[int]]) -> dict[str, list[Any]]:
    """What workers that share a model give for its images; run by the driver.

    Returns:
        ``moved``: items that get other bits in a call with others than in one of their own, of any worker; ``alone``:
        by item, digests of what each worker gives for it in a call of its own.
    """

    of_workers = llm.apply_model(partial(_embeddings, grids, calls))
    moved = [f"{one} of worker {rank}" for rank, (those, _) in enumerate(of_workers) for one in those]
    return {"moved": moved, "alone": list(zip(*(bits for _, bits in of_workers), strict=True))}


def _embeddings(
    grids: Sequence[Sequence[int]], calls: Sequence[Sequence[int]], model: torch.nn.Module
) -> tuple[list[str], list[str]]:
    """:func:`embeddings` of one worker; all of them run it together."""
    given = [pixels(grid, model.visual.patch_embed.proj.input_size, seed) for seed, grid in enumerate(grids)]

    def encode(call: Sequence[int]) -> Sequence[torch.Tensor]:
        patches = torch.cat([given[item] for item in call]).to(next(model.parameters()).device)
        sizes = torch.tensor([list(grids[item]) for item in call])
        return model.embed_multimodal(pixel_values=patches, image_grid_thw=sizes)

    with torch.inference_mode():
        alone = [encode([item])[0] for item in range(len(grids))]
        moved = [
            f"{item} in {list(call)}"
            for call in calls
            for item, one in zip(call, encode(call), strict=True)
            if not torch.equal(one, alone[item])
        ]
    return moved, [hashlib.sha256(one.contiguous().view(torch.uint8).cpu().numpy()).hexdigest() for one in alone]


def with_images_in_parts(llm: Any, method: str, *arguments: Any) -> Any:
    """What another function here gives while steps end in images, and tokens see what there is of them: as in vLLM
    where an image begins with a step.
    """

    def seen(batch: Any) -> torch.Tensor | None:
        starts, lengths = batch.query_start_loc_cpu.tolist(), batch.seq_lens_cpu_upper_bound.tolist()
        there = {
            request: [(low, min(high, lengths[request] - 1)) for low, high in found if low < lengths[request]]
            for request, found in (batch.mm_req_doc_ranges or {}).items()
            if request < len(lengths) and starts[request + 1] > starts[request]
        }
        return ranges_of(SimpleNamespace(**vars(batch) | {"mm_req_doc_ranges": there}))

    ranges_of = attention.ranges_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "ranges_of", seen)
        patch.setattr(whole_images, "tokens_of_step", lambda items, computed, new: new)
        llm.llm_engine.vllm_config.scheduler_config.disable_chunked_mm_input = False
        try:
            return globals()[method](llm, *arguments)
        finally:
            llm.llm_engine.vllm_config.scheduler_config.disable_chunked_mm_input = True


FAULTS = ("attention over the whole call", "splits by the longest sequence", "angles by the number of patches")


def with_fault(llm: Any, fault: str, method: str, *arguments: Any) -> Any:
    """What another function here gives while an encoder has a fault that lets items see their company."""
    with pytest.MonkeyPatch.context() as patch:
        if fault == FAULTS[2]:
            llm.apply_model(lambda model: _share_angles(model.visual, patch))
        else:
            patch.setattr(encoders, "attend", _attend_over_all if fault == FAULTS[0] else _attend_by_the_longest)
        return globals()[method](llm, *arguments)


IN_WORKERS = {"weights": "attention over the whole call", "data": "another tower in the second worker"}
"""Faults, by how the workers share an encoder."""


def with_fault_in_workers(llm: Any, fault: str, method: str, *arguments: Any) -> Any:
    """What another function here gives while the workers of an engine have a fault."""
    llm.apply_model(partial(_plant, fault))
    try:
        return globals()[method](llm, *arguments)
    finally:
        llm.apply_model(partial(_plant, ""))


def _plant(fault: str, model: torch.nn.Module) -> None:
    """Put a fault into a worker, or none."""
    from vllm.distributed import get_tensor_model_parallel_rank

    tower = model.visual
    encoders.attend = _attend_over_all if fault == IN_WORKERS["weights"] else attend
    if fault == IN_WORKERS["data"] and get_tensor_model_parallel_rank() == 1:
        encode = tower.forward
        tower.forward = lambda *given, **named: encode(*given, **named) * 1.25
    else:
        vars(tower).pop("forward", None)


def _attend_over_all(call: PagedAttention, implementation: str) -> torch.Tensor:
    starts = call.query_start_loc[[0, -1]]
    cache = PackedKeys.of(call.cache.keys[:, :, 0], call.cache.values[:, :, 0], starts)
    return attend(replace(call, cache=cache, seq_lens=starts[1:], query_start_loc=starts), implementation)


def _attend_by_the_longest(call: PagedAttention, implementation: str) -> torch.Tensor:
    size = max(16, 1 << (int(call.seq_lens.max()) - 1).bit_length() - 1)
    tile = call.reduction.key_tile if call.query.is_cuda else max(32, size)
    return attend(replace(call, reduction=AttentionReduction(size, key_tile=tile)), implementation)


def _share_angles(tower: Any, patch: pytest.MonkeyPatch) -> None:
    """Items of as many patches get the angles of the first of them in its call."""
    name = "get_rope_by_thw" if hasattr(tower, "get_rope_by_thw") else "rot_pos_ids"
    original, prepare, first = getattr(tower, name), tower.prepare_encoder_metadata, {}

    def by_area(*sides: int) -> Any:
        key = (sides[0], sides[1] * sides[2]) if name == "get_rope_by_thw" else sides[0] * sides[1]
        return first.setdefault(key, original(*sides))

    def prepare_anew(*given: Any, **named: Any) -> Any:
        first.clear()
        return prepare(*given, **named)

    patch.setitem(vars(tower), name, by_area)
    patch.setitem(vars(tower), "prepare_encoder_metadata", prepare_anew)
