"""Images and the like in vLLM's front end: what identifies one must be made of it.

An engine finds an embedding, and the pages that hold it, by the item's identifier. vLLM makes it of the content, but
takes one of the user's (``multi_modal_uuids``) as it is: under it a request would be answered about the image that
another request has brought before.
"""

from functools import wraps
from typing import Any

from ..reviews import patch_points


def install() -> None:
    """Refuse requests that name an item by an identifier of their own."""
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
