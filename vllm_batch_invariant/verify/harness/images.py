"""Images, videos and audio of requests: which of them an engine encodes, what is drawn, and what is let go of between
runs.

A request has its items beside the tokens of its text, each with the place in the text before which it stands: plain
data, of which pixels are made where they are needed.
"""

import math
import random
import struct
import wave as wav
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import Any, cast

from ..answers import held_at, is_url, url_with
from ..outcome import NoTestError
from ..printing import one_line

SHAPES = ((1, 1), (2, 2), (1, 15), (3, 5), (5, 3), (4, 6), (8, 9))
"""Rows and columns of what is drawn, in the smallest squares that a processor keeps as they are."""
SQUARES = ((1, 1), (1, 2), (2, 1), (2, 3))
"""The same where a processor cuts images into squares of one size."""
FRAMES = (4, 2, 6, 3)
"""Of videos; an odd number is filled where an encoder takes frames in pairs."""
SECONDS = (0.05, 0.3, 0.99, 1.0, 1.6, 3.1)
"""Of sound."""
RATE = 16_000
"""Samples a second of what a server is sent."""
DIFFERENT = 5
"""Pictures of each size: so few that requests soon have the same."""
OF_SERVERS = ((224, 224), (224, 448), (448, 224), (448, 448))
"""Heights and widths of images that a server is sent: whole patches of 14 and of 16 pixels, merged or not."""
OF_VIDEOS = ((112, 112), (112, 224), (224, 112), (224, 224))
"""The same of videos."""
_BLOCK = 5
"""Pixels of the side of a square of one colour: no patch is of one."""
_TRIED = 0.34
"""Part of the context that one item may take."""

_SHOWN = 60
"""Characters of a path or a URL in an error: one of data may be long."""

Item = dict[str, Any]
"""``kind`` ("image", "video" or "audio"), ``size`` ([height, width], [frames, height, width] or [samples]), ``seed``
and ``at``, the token of the text before which it stands; or ``data``, as vLLM takes it, for size and seed.
"""


def rgb(height: int, width: int, seed: int) -> bytes:
    """The pixels of a picture: squares of random colours, row by row."""
    chance, lines = random.Random(f"{height} {width} {seed}"), []
    for _ in range(-(-height // _BLOCK)):
        row = b"".join(chance.randbytes(3) * _BLOCK for _ in range(-(-width // _BLOCK)))[: 3 * width]
        lines.append(row * _BLOCK)
    return b"".join(lines)[: 3 * width * height]


def for_server(chance: random.Random, kind: str) -> tuple[list[int], int]:
    """A drawn size of an item, and the most tokens that it has in any model: of an image of squares of 28 pixels, or as
    many as each of a model that makes all equal; of a frame of a video as many, and its time in words; of a sound of
    half a minute, to which models fill it.
    """
    if kind == "audio":
        return [int(chance.choice(SECONDS) * RATE)], 760
    height, width = chance.choice(OF_SERVERS if kind == "image" else OF_VIDEOS)
    most = max(264, height * width // 784 + 8)
    if kind == "image":
        return [height, width], most
    count = chance.choice(FRAMES)
    return [count, height, width], count * (most + 16)


def url(item: Mapping[str, Any]) -> str:
    """A drawn item for a server, as an address that has all of it."""
    if item["kind"] == "audio":
        return url_with("audio/wav", wav_of(item))
    *count, height, width = item["size"]
    if item["kind"] == "image":
        return url_with("image/png", png(height, width, item["seed"]))
    # vLLM's name of several pictures that are a video, each of which it reads as any picture
    return url_with("video/jpeg", *(png(height, width, seed) for seed in _seeds(item["seed"], *count)))


def _seeds(seed: int, frames: int) -> list[int]:
    """Of the pictures of a video."""
    return [seed + 1000 * one for one in range(frames)]


def wav_of(item: Mapping[str, Any]) -> bytes:
    """A drawn sound as a WAV file."""
    held, [samples] = BytesIO(), item["size"]
    with wav.open(held, "wb") as sound:
        sound.setparams((1, 2, RATE, 0, "NONE", ""))
        sound.writeframes((wave(samples, item["seed"]) * 32768).astype("<i2").tobytes())
    return held.getvalue()


def png(height: int, width: int, seed: int) -> bytes:
    """The same as a file."""
    pixels = rgb(height, width, seed)
    rows = b"".join(b"\0" + pixels[start : start + 3 * width] for start in range(0, len(pixels), 3 * width))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    made = b"\x89PNG\r\n\x1a\n"
    for kind, data in parts:
        made += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return made


def wave(samples: int, seed: int) -> Any:
    """[samples] in fp32 from -1 to 1: three rectangles of random lengths, one after the other and again, and noise."""
    import numpy as np

    chance = random.Random(f"{samples} {seed}")
    lengths = [chance.randint(4, 200) for _ in range(3)]
    period = np.concatenate([np.full(length, sign * 60.0) for sign, length in zip((1, -1, 0), lengths, strict=True)])
    noise = np.frombuffer(chance.randbytes(samples), np.int8) / 4
    return ((np.resize(period, samples) + noise) / 128).astype(np.float32)


def data_of(item: Mapping[str, Any]) -> Any:
    """What vLLM takes for an item: a picture, frames with what is known of them, or samples at the model's rate."""
    import numpy as np
    from PIL import Image

    if "data" in item:
        return item["data"]
    if item["kind"] == "audio":
        return wave(item["size"][0], item["seed"])
    if item["kind"] == "image":
        height, width = item["size"]
        return Image.frombytes("RGB", (width, height), rgb(height, width, item["seed"]))
    count, height, width = item["size"]
    frames = [np.frombuffer(rgb(height, width, seed), np.uint8) for seed in _seeds(item["seed"], count)]
    known = {"fps": 1.0, "duration": float(count), "total_num_frames": count, "frames_indices": list(range(count))}
    known |= {"video_backend": "opencv", "do_sample_frames": False}
    return np.stack(frames).reshape(count, height, width, 3), known


def read(kind: str, where: str) -> Any:
    """What vLLM takes for an item that is in a file: a picture, or fp32 samples and how many a second has.

    Args:
        kind: "image" or "audio".
        where: a path, or a URL with ``file:`` or ``data:``.

    Raises:
        NoTestError: it cannot be read, or is none; a sound is a WAV file of one channel of 16 bits.
    """
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    try:
        held = held_at(where)
        if kind == "image":
            return Image.open(BytesIO(held)).convert("RGB")
        with wav.open(BytesIO(held)) as sound:
            if (sound.getnchannels(), sound.getsampwidth()) != (1, 2):
                raise wav.Error("it has other channels than one of 16 bits")
            samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2")
            return (samples / 32768).astype(np.float32), sound.getframerate()
    except (OSError, ValueError, EOFError, UnidentifiedImageError, wav.Error) as error:
        hint = "" if kind == "image" else "; a sound is read of a WAV file of one channel of 16 bits"
        raise NoTestError(f"--{kind} {where[:_SHOWN]}: {one_line(error)}{hint}") from error


def read_all(llm: Any, files: Iterable[tuple[str, str]]) -> list[Item]:
    """Items without a place, each of its kind and of a file that :func:`read` or vLLM's reader of videos reads.

    Raises:
        NoTestError: a file cannot be read, or is none of its kind.
    """
    return [
        {"kind": kind, "data": _film(llm, where) if kind == "video" else read(kind, where)} for kind, where in files
    ]


def _film(llm: Any, where: str) -> Any:
    """Frames of a video, and what is known of them, as a user of ``vllm.LLM`` reads them, by ``--media-io-kwargs``."""
    from ...integration.reviews import patch_points

    model = llm.llm_engine.model_config.multimodal_config
    settings = dict(getattr(model, "media_io_kwargs", {}).get("video", {}))
    try:
        held = patch_points.FETCH_VIDEO.get()(where if is_url(where) else Path(where).resolve().as_uri(), settings)
    except Exception as error:  # decoders raise anything
        raise NoTestError(f"--video {where[:_SHOWN]}: {one_line(error)}") from error
    return getattr(held, "media", held)


@cache
def placeholders(llm: Any) -> dict[str, list[int]]:
    """The tokens by which a prompt says where an item stands, by kind, or none where all that it takes stand there;
    empty of an engine that encodes none.
    """
    from ...integration.reviews import encoding

    model = llm.llm_engine.model_config
    kinds = encoding.encoded(model)
    if not kinds or model.is_encoder_decoder:
        return {}
    written, tokenizer, processor = _written(model), llm.get_tokenizer(), _processor(llm)
    own = processor.info.get_hf_processor()
    texts = {
        kind: text
        if (text := written.get(kind)) and getattr(own, f"{kind}_token", text) in text
        else processor.dummy_inputs.get_dummy_text({kind: 1})
        for kind in kinds
    }
    return {kind: tokenizer.encode(text, add_special_tokens=False) for kind, text in texts.items()}


def _processor(llm: Any) -> Any:
    """vLLM's, of the engine's front end."""
    return llm.llm_engine.renderer.get_mm_processor()


def _written(model: Any) -> dict[str, str | None]:
    """What stands for an item in a chat, by kind; None where a chat template has it."""
    from ...integration.reviews import patch_points

    kind_of_model, found = patch_points.MODEL_CLASS.get()(model), {}
    for kind in ("image", "video", "audio"):
        with suppress(ValueError):  # a model has none of that kind
            found[kind] = kind_of_model.get_placeholder_str(kind, 1)
    return found


def _tokens_in_full(llm: Any, item: Mapping[str, Any]) -> list[int]:
    """What stands for an item in a prompt of a model whose tokenizer is mistral-common's: as many as it takes."""
    processor = _processor(llm).info.get_hf_processor()
    if item["kind"] == "image":
        _, rows, columns = processor.image_processor.get_number_of_image_patches(*item["size"])
        found = [*[processor.image_token_id] * columns, processor.image_break_id] * rows
        return [*found[:-1], processor.image_end_id]
    extractor = processor.feature_extractor
    encoder = extractor.audio_encoder
    data = data_of(item)
    samples = len(encoder.pad(data[0] if isinstance(data, tuple) else data, extractor.sampling_rate))
    ids = encoder.special_ids
    return [ids.begin_audio, *[ids.audio] * extractor.get_num_audio_tokens(samples)]


def prompt_of(llm: Any, tokens: Sequence[int], items: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A prompt for vLLM's ``add_request``."""
    written, data, done = list[int](), dict[str, list[Any]](), 0
    for item in sorted(items, key=lambda item: item["at"]):
        at = min(item["at"], len(tokens))
        data.setdefault(item["kind"], []).append(data_of(item))
        written += [*tokens[done:at], *(placeholders(llm)[item["kind"]] or _tokens_in_full(llm, item))]
        done = at
    made: dict[str, Any] = {"prompt_token_ids": [*written, *tokens[done:]]}
    return made | {"multi_modal_data": data} if data else made


def chat_prompt(llm: Any, text: str, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The message of a chat that begins with items.

    Raises:
        NoTestError: the engine encodes none of that kind, or its tokenizer writes no text of a chat.
    """
    require_encoded(llm, items)
    if not all(placeholders(llm)[item["kind"]] for item in items):
        raise NoTestError("the model's tokenizer is mistral-common's, which writes items itself: ask a server")
    content = [*({"type": item["kind"]} for item in items), {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    made = llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    data = dict[str, list[Any]]()
    for item in items:
        data.setdefault(item["kind"], []).append(data_of(item))
    return {"prompt": made, "multi_modal_data": data}


def require_encoded(llm: Any, items: Iterable[Mapping[str, Any]]) -> None:
    """Refuse items of a kind that an engine does not encode.

    Raises:
        NoTestError: there is one.
    """
    known = placeholders(llm)
    for kind in (item["kind"] for item in items if item["kind"] not in known):
        senses = "hears it" if kind == "audio" else "sees them"
        named = "audio" if kind == "audio" else f"{kind}s"
        raise NoTestError(f"the engine takes no {named}: leave out --{kind}, or serve a model that {senses}")


def require_text(info: Mapping[str, Any]) -> None:
    """Refuse an engine whose every request needs a recording, which drawn ones have not.

    Args:
        info: what a driver says of its engine.

    Raises:
        NoTestError: it is one.
    """
    if info.get("encoder_decoder"):
        raise NoTestError(
            "the model answers about audio alone, and a check asks about tokens: compare what its server transcribes "
            "of a file alone and beside others"
        )


def about(llm: Any) -> dict[str, Any]:
    """What requests depend on of an engine that encodes images or audio; empty for any other.

    Returns:
        ``kinds``: by kind ``sizes`` (size and tokens of each that may be drawn) and ``most`` items of a request;
        ``whole``: whether a step must have an image whole.
    """
    if not placeholders(llm):
        return {}
    engine, kinds = llm.llm_engine, {}
    model, step = engine.model_config, engine.vllm_config.scheduler_config.max_num_batched_tokens
    whole = bool(getattr(model, "is_mm_prefix_lm", False))
    room = min(_TRIED * model.max_model_len, step if whole else model.max_model_len)
    for kind in placeholders(llm):
        tried = [(size, _tokens_of(llm, kind, size)) for size in _sizes(llm, kind)]
        sizes = [[list(size), count] for size, count in tried if 0 < count <= room]
        if sizes:
            kinds[kind] = {"sizes": sizes, "most": min(4, _processor(llm).info.allowed_mm_limits[kind])}
    forget(llm)
    return {"kinds": kinds, "whole": whole} if kinds else {}


def _sizes(llm: Any, kind: str) -> list[tuple[int, ...]]:
    """Sizes that a processor keeps as they are."""
    found: list[tuple[int, ...]]
    processor = _processor(llm).info.get_hf_processor()
    if kind == "audio":
        extractor = getattr(processor, "feature_extractor", None) or processor.audio_extractor.config  # Nemotron's
        return [(int(seconds * extractor.sampling_rate),) for seconds in SECONDS]
    of_kind = getattr(processor, "video_processor" if kind == "video" else "image_processor", processor)
    side = getattr(of_kind, "image_size", 0)
    if side and (hasattr(of_kind, "base_size") or not getattr(of_kind, "size", None)):
        squares = ((1, 1),) if kind == "video" else SQUARES  # of DeepSeek-OCR's and of InternVL's own form
        found = [(rows * side, columns * side) for rows, columns in squares]
        return _films(found) if kind == "video" else found
    if most := getattr(of_kind, "max_soft_tokens", None):  # of Gemma 4's, which fills as many with an image of any size
        unit, square = of_kind.patch_size * of_kind.pooling_kernel_size, math.isqrt(most)
        wide = [(rows, most // rows) for rows in (1, 2, square // 2, square)]
        found = [
            (rows * unit, columns * unit) for rows, columns in (*wide, *((long, short) for short, long in wide[1:3]))
        ]
        return _films(found[2:]) if kind == "video" else found
    size = getattr(of_kind, "size", None) or {}  # none of Kimi-VL's and mistral-common's
    if patch := getattr(of_kind, "encoder_patch_size", None):  # of LFM2-VL's, which cuts larger ones into tiles
        unit = patch * of_kind.downsample_factor
        size = {"shortest_edge": of_kind.min_image_tokens * unit**2}
    elif hasattr(of_kind, "do_image_splitting"):  # into tiles, of images with a longest side of their own
        tile = of_kind.max_image_size["longest_edge"]
        most = size["longest_edge"] // tile
        sides = [(side * tile, most * tile) for side in range(1, most + 1)]
        return sides + [(long, short) for short, long in sides[:-1]]
    elif size.get("height"):
        squares = SQUARES if hasattr(of_kind, "crop_to_patches") else ((1, 1),)
        found = [(rows * size["height"], columns * size["width"]) for rows, columns in squares]
        return _films(found) if kind == "video" else found
    elif encoder := getattr(of_kind, "mm_encoder", None):
        unit = encoder.mm_config.image_patch_size * encoder.mm_config.spatial_merge_size
    elif merged := getattr(processor, "spatial_merge_size", None):  # of Pixtral's, whose own patch has two numbers
        unit = processor.patch_size * merged
    else:
        kernel = getattr(of_kind, "merge_kernel_size", None)
        merged = getattr(of_kind, "downsample_factor", 0) or getattr(of_kind, "merge_size", 0)  # the first, Muse's
        unit = of_kind.patch_size * (max(kernel) if kernel else merged)
    found = []
    for rows, columns in SHAPES:
        scale = 1
        while rows * columns * (scale * unit) ** 2 < (size.get("shortest_edge") or 0):
            scale += 1
        found.append((rows * scale * unit, columns * scale * unit))
    return _films(found[:-2]) if kind == "video" else found


def _films(sizes: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Videos whose frames have these sizes."""
    return [(count, *size) for count, size in zip(cycle(FRAMES), sizes)]


def _tokens_of(llm: Any, kind: str, size: Sequence[int]) -> int:
    """Tokens of an item in a prompt; 0 if vLLM refuses it, or does not find where the checkpoint's prompts have one."""
    from ...integration.reviews import patch_points

    engine, refused = llm.llm_engine, cast("type[Exception]", patch_points.VALIDATION_ERROR.get())
    item = {"kind": kind, "size": list(size), "seed": 0, "at": 0}
    try:
        prompt = prompt_of(llm, [], [item])
        made = engine.input_processor.process_inputs("size", prompt, llm.get_default_sampling_params(), ("generate",))
    except (ValueError, AssertionError, refused):
        return 0
    return len(made.prompt_token_ids)


def forget(llm: Any) -> None:
    """Let go of what was encoded, and of what processors made."""
    llm.llm_engine.reset_mm_cache()
    llm.llm_engine.reset_encoder_cache()


def encoded(llm: Any) -> dict[str, int]:
    """How often items were encoded, ``calls``, and how many in all, ``items``, since this was first asked for."""
    return llm.apply_model(_counted)[0] if placeholders(llm) else {"calls": 0, "items": 0}


def _counted(model: Any) -> dict[str, int]:
    """Runs in the engine's worker."""
    counts = vars(model).get("items_encoded")
    if counts is None:
        counts, encode = {"calls": 0, "items": 0}, model.embed_multimodal

        def counting(**given: Any) -> Any:
            made = encode(**given)
            counts["calls"] += 1
            counts["items"] += len(made)
            return made

        model.items_encoded, model.embed_multimodal = counts, counting
    return dict(counts)


def draw(chance: random.Random, about: Mapping[str, Any], text: int, room: int, least: int = 1) -> list[Item]:
    """Items of a request, one or several, as many as fit.

    Args:
        chance: the source of every choice.
        about: the engine, see :func:`about`.
        text: tokens of its text.
        room: tokens that all may have together.
        least: items to try for.
    """
    items: list[Item] = []
    for _ in range(max(least, chance.choice((1, 1, 2, 3)))):
        kind = chance.choice(sorted(about["kinds"]))
        of_kind = about["kinds"][kind]
        size, count = chance.choice(of_kind["sizes"])
        if count > room or sum(item["kind"] == kind for item in items) >= of_kind["most"]:
            continue
        room -= count
        place = chance.choice((0, text, chance.randint(0, text)))
        items.append({"kind": kind, "size": size, "seed": chance.randrange(DIFFERENT), "at": place})
    return sorted(items, key=lambda item: item["at"])


def tokens_of(items: Iterable[Mapping[str, Any]], about: Mapping[str, Any]) -> int:
    """Tokens that items take in a prompt."""
    sizes = {kind: {tuple(size): count for size, count in of["sizes"]} for kind, of in about.get("kinds", {}).items()}
    return sum(sizes[item["kind"]][tuple(item["size"])] for item in items)


def largest(about: Mapping[str, Any]) -> int:
    """Most tokens of an item that is drawn."""
    return max((count for of in about.get("kinds", {}).values() for _, count in of["sizes"]), default=0)
