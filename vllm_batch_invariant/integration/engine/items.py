"""Images and the like in vLLM's front end: what identifies one must be made of it, and it must not be drawn.

An engine finds an embedding, and the pages that hold it, by the item's identifier. vLLM makes it of the content, but
takes one of the user's (``multi_modal_uuids``, or an image's EXIF ImageID) as it is: under it a request would be
answered about the image that another request has brought before. A processor of sound may add noise (``dither``), which
it draws of a generator that all requests share. And it may fill a request's sounds to the longest of them before it
multiplies (Gemma 4's), whose rows then follow from their number: vLLM keeps what it made for other requests. Another
(Nemotron Nano Omni's) computes all of a request's together, by compiled code. One of
images (Nemotron Nano Omni's) may scale down those of a request that it does not find among these, until they fit. And
one of videos (GLM-4.6V's) samples frames of all of a request's or of none, as the last of them says.
"""

from collections.abc import Mapping
from functools import wraps
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..reviews import patch_points


def install() -> None:
    """Refuse requests that name an item by an identifier of their own, whose sound gets noise, or whose videos would
    be sampled as one of them says; take no identifier out of an image, and make what is made of a sound of its own
    samples, one of GLM-ASR by itself, and of an image of its own pixels.
    """
    renderer = patch_points.RENDERER.get() if patch_points.RENDERER.is_there() else None
    process = getattr(renderer, "_process_mm_uuids", None)
    if renderer is None or process is None:  # an older vLLM, with which images are refused
        return

    @wraps(process)
    def _process_mm_uuids(self: Any, mm_data: Any, mm_data_items: Any, mm_uuid_items: Any, mm_req_id: str) -> Any:
        named = [kind for kind, given in mm_uuid_items.items() if any(one is not None for one in given or ())]
        if named:
            raise patch_points.VALIDATION_ERROR.get()(
                f"batch-invariant mode does not cover an identifier of the user's for {' and '.join(named)} "
                "(multi_modal_uuids, or uuid in a message): two items could have it; leave it out"
            )
        if _sampled_otherwise(self, mm_data_items.get("video")):
            raise patch_points.VALIDATION_ERROR.get()(
                "batch-invariant mode does not cover videos of one request of which some are sampled already "
                "(do_sample_frames of their metadata): a processor of GLM's treats all as the last; send them apart"
            )
        return process(self, mm_data, mm_data_items, mm_uuid_items, mm_req_id)

    renderer._process_mm_uuids = _process_mm_uuids
    renderer._process_multimodal = _without_noise(renderer._process_multimodal)
    if patch_points.IMAGE_ID.is_there():
        hasher: Any = patch_points.IMAGE_ID.module()
        hasher._get_image_id_bytes = lambda image: None


def _sampled_otherwise(renderer: Any, videos: Any) -> bool:
    """Whether metadata of videos differ in what GLM's processors read: that of GLM-4.6V and GLM-OCR, of the last."""
    metadata = getattr(videos, "metadata", None) or ()
    told = {one.get("do_sample_frames") if isinstance(one, Mapping) else None for one in metadata}
    return len(told) > 1 and hasattr(renderer.get_mm_processor(), "_get_direct_path_inputs")


def _without_noise(process: Any) -> Any:
    @wraps(process)
    def _process_multimodal(
        self: Any, prompt: Any, mm_data: Any, mm_uuids: Any, mm_processor_kwargs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if "audio" in mm_data and _dither(self, mm_processor_kwargs or {}):
            raise patch_points.VALIDATION_ERROR.get()(
                "batch-invariant mode does not cover noise in sound: its processor draws it for whatever comes first; "
                "set dither to 0, in preprocessor_config.json or mm_processor_kwargs"
            )
        if "audio" in mm_data:
            each_sound_by_itself(self.get_mm_processor())
            of_own_samples(getattr(self.get_mm_processor().info.get_hf_processor(), "feature_extractor", None))
        info = self.get_mm_processor().info
        if type(info).__name__ == "NanoNemotronVLProcessingInfo":
            if _hears_videos(info, mm_processor_kwargs or {}):
                raise patch_points.VALIDATION_ERROR.get()(
                    "batch-invariant mode does not cover the sound of videos: leave use_audio_in_video out of "
                    "mm_processor_kwargs"
                )
            of_own_pixels()
            of_own_sounds()
        return process(self, prompt, mm_data, mm_uuids, mm_processor_kwargs, *args, **kwargs)

    return _process_multimodal


def of_own_samples(extractor: Any) -> None:
    """Have the class of an extractor that fills sounds (Gemma 4's) compute frames of the samples that a sound has.

    Args:
        extractor: Transformers', or None.
    """
    kind: Any = type(extractor)
    extract: Any = getattr(kind, "_extract_spectrogram", None)
    if kind.__name__ != "Gemma4AudioFeatureExtractor" or hasattr(extract, "__wrapped__"):
        return

    @wraps(extract)
    def _extract_spectrogram(self: Any, waveform: Any, attention_mask: Any) -> Any:
        """Of [1, samples], of which the first are seen: [frames, bins], and whether a frame is."""
        window, before = self.frame_length + 1, self.frame_length // 2

        def frames(samples: int) -> int:
            return (before + samples - window) // self.hop_length + 1

        own = int(np.sum(attention_mask))
        if frames(own) < 1:
            return extract(self, waveform, attention_mask)
        made, seen = extract(self, waveform[..., :own], attention_mask[:own])
        behind = frames(waveform.shape[-1]) - len(made)
        return np.pad(made, ((0, behind), (0, 0))), np.pad(seen, (0, behind))

    kind._extract_spectrogram = _extract_spectrogram


def each_sound_by_itself(processor: Any) -> None:
    """Have the class of vLLM's processor of GLM-ASR process each sound by itself, and refuse one that is not filled to
    whole chunks. Transformers wants a text for each sound and vLLM gives one for all that it does not find among those
    of other requests, so one request would fail as others come before it; and their chunks are encoded as one tensor.

    Args:
        processor: vLLM's, of any model.
    """
    kind: Any = type(processor)
    call: Any = getattr(kind, "_call_hf_processor", None)
    if kind.__name__ != "GlmAsrMultiModalProcessor" or hasattr(call, "__wrapped__"):
        return

    @wraps(call)
    def _call_hf_processor(self: Any, hf_data: Mapping[str, Any], hf_kwargs: Mapping[str, Any]) -> Any:
        """Of chunks of all sounds: features [chunks, bins, frames], and [chunks, frames] which of them are heard."""
        text, frames = self._get_hf_mm_text({"audio": 1}), self.info.get_feature_extractor().nb_max_frames
        made = [call(self, {**hf_data, "text": text, "audio": [sound]}, hf_kwargs) for sound in hf_data["audio"]]
        if any(one["input_features"].shape[-1] != frames for one in made):
            raise patch_points.VALIDATION_ERROR.get()(
                "batch-invariant mode does not cover sounds of GLM-ASR that are not filled to whole chunks; leave "
                "padding and lengths out of mm_processor_kwargs"
            )
        names = "input_features", "input_features_mask"
        return type(made[0])({name: torch.cat([one[name] for one in made]) for name in names})

    kind._call_hf_processor = _call_hf_processor


def of_own_pixels() -> None:
    """Have vLLM's processor of Nemotron Nano VL scale each image as if there was no other and no text: what is too much
    for the model's context is refused then. And have it compute as it is written: compiled code follows from the sizes
    that came before.
    """
    module: Any = patch_points.NEMOTRON_TILER.module()
    tiler = patch_points.NEMOTRON_TILER.get()
    scale, several = module._bicubic_resize_and_normalize, tiler._images_to_pixel_values_lst
    module._bicubic_resize_and_normalize = getattr(scale, "_torchdynamo_orig_callable", scale)
    if hasattr(several, "__wrapped__"):
        return

    @wraps(several)
    def _images_to_pixel_values_lst(self: Any, text_prompt_length: int, images: Any, **named: Any) -> Any:
        """Pixels [3, height, width] of each image, and its tokens."""
        made = [several(self, 0, [image], **named) for image in images]
        return [one for pixels, _ in made for one in pixels], [count for _, counts in made for count in counts]

    tiler._images_to_pixel_values_lst = _images_to_pixel_values_lst


def of_own_sounds() -> None:
    """Have vLLM's extractor of Nemotron Nano Omni compute each sound by itself, as it is written: in tensors of a
    request's sounds, its sums and products follow from their number and the longest of them, and compiled code from the
    sizes that came before.
    """
    extractor: Any = patch_points.PARAKEET_EXTRACTOR.get()
    for name in ("_apply_mel_filters", "_apply_preemphasis", "_normalize_mel_features"):
        compiled = getattr(extractor, name)
        setattr(extractor, name, getattr(compiled, "_torchdynamo_orig_callable", compiled))
    extract = extractor.__call__
    if hasattr(extract, "__wrapped__"):
        return

    @wraps(extract)
    def call(self: Any, raw_speech: Any, **named: Any) -> dict[str, Any]:
        """Features [clips, frames, bins], as many as half a minute has, with 0 behind a clip; whether a frame is of it;
        and how many clips each sound has.
        """
        most = 1 + self._clip_target_samples // self.config.hop_length
        made = [extract(self, [one], **named) for one in raw_speech]
        counts = [count for one in made for count in one.pop("audio_num_clips")]
        filled = {
            name: torch.cat([F.pad(one[name], (*axes, 0, most - one[name].shape[1])) for one in made])
            for name, axes in (("input_audio_features", (0, 0)), ("feature_attention_mask", ()))
        }
        return filled | {"audio_num_clips": counts}

    extractor.__call__ = call


def _hears_videos(info: Any, asked: Mapping[str, Any]) -> bool:
    """Whether a model encodes the sound of videos, too, past its limit of audio: by a request's settings, or an
    engine's.
    """
    settings = info.ctx.model_config.get_multimodal_config()
    return bool(settings.merge_mm_processor_kwargs(asked).get("use_audio_in_video"))


def _dither(renderer: Any, asked: Mapping[str, Any]) -> Any:
    """How large the noise is that a processor adds to a request's sound: what is asked for, or its own."""
    of_sound = {**asked, **(asked.get("audio_kwargs") or {})}
    processor = renderer.get_mm_processor().info.get_hf_processor()
    return of_sound.get("dither", getattr(getattr(processor, "feature_extractor", None), "dither", 0.0))
