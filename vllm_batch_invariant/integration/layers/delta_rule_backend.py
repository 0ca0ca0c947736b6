"""What a layer of a gated delta rule is told of a step, in the place of vLLM's backend for it."""

from dataclasses import dataclass
from typing import Any

from ..reviews import patch_points
from .state_backend import StateBackend, StateStep, StateStepBuilder

_Base: Any = patch_points.DELTA_RULE_BACKEND.get()
_BaseBuilder: Any = patch_points.DELTA_RULE_BUILDER.get()
_BaseMetadata: Any = patch_points.DELTA_RULE_METADATA.get()


@dataclass
class Metadata(StateStep, _BaseMetadata):
    """With the fields of vLLM's, which say how a step is cut into kernels of its own: zeros."""


class Builder(StateStepBuilder, _BaseBuilder):
    """Makes it, without the chunks and the order of requests that vLLM's kernels need."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *_: Any, **__: Any) -> Metadata:
        split = {f"num_{kind}{of}": 0 for kind in ("prefill", "decode", "spec_decode") for of in ("s", "_tokens")}
        return Metadata(
            **split, num_actual_tokens=common_attn_metadata.num_actual_tokens, **self.step_of(common_attn_metadata)
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        return self.build(0, common_attn_metadata)


class Backend(StateBackend, _Base):
    """In the place of vLLM's."""

    builder = Builder
