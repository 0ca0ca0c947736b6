"""What a layer of a short convolution is told of a step, in the place of vLLM's backend for it."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..reviews import patch_points
from .state_backend import StateBackend, StateStep, StateStepBuilder

_Base: Any = patch_points.SHORT_CONV_BACKEND.get()
_BaseBuilder: Any = patch_points.SHORT_CONV_BUILDER.get()
_BaseMetadata: Any = patch_points.SHORT_CONV_METADATA.get()


@dataclass
class Metadata(StateStep, _BaseMetadata):
    """With the fields of vLLM's."""


class Builder(StateStepBuilder, _BaseBuilder):
    """Makes it."""

    metadata_cls = Metadata
    supports_update_block_table: ClassVar[bool] = False
    needs_causal_conv1d_metadata: ClassVar[bool] = False

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **named: Any
    ) -> Metadata:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build, **named)
        return replace(made, **self.step_of(common_attn_metadata))


class Backend(StateBackend, _Base):
    """In the place of vLLM's."""

    builder = Builder
