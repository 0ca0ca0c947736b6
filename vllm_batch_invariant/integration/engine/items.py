"""Images and the like in vLLM's front end: what identifies one must be made of it, and it must not be drawn.

An engine finds an embedding, and the pages that hold it, by the item's identifier. vLLM makes it of the content, but
takes one of the user's (``multi_modal_uuids``, or an image's EXIF ImageID) as it is: under it a request would be
answered about the image that another request has brought before. A processor of sound may add noise (``dither``), which
it draws of a generator that all requests share.
"""

from collections.abc import Mapping
from functools import wraps
from typing import Any

from ..reviews import patch_points


def install() -> None:
    """Refuse requests that name an item by an identifier of their own, or whose sound gets noise; and take no
    identifier out of an image.
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
        return process(self, mm_data, mm_data_items, mm_uuid_items, mm_req_id)

    renderer._process_mm_uuids = _process_mm_uuids
    renderer._process_multimodal = _without_noise(renderer._process_multimodal)
    if patch_points.IMAGE_ID.is_there():
        hasher: Any = patch_points.IMAGE_ID.module()
        hasher._get_image_id_bytes = lambda image: None


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
        return process(self, prompt, mm_data, mm_uuids, mm_processor_kwargs, *args, **kwargs)

    return _process_multimodal


def _dither(renderer: Any, asked: Mapping[str, Any]) -> Any:
    """How large the noise is that a processor adds to a request's sound: what is asked for, or its own."""
    of_sound = {**asked, **(asked.get("audio_kwargs") or {})}
    processor = renderer.get_mm_processor().info.get_hf_processor()
    return of_sound.get("dither", getattr(getattr(processor, "feature_extractor", None), "dither", 0.0))
