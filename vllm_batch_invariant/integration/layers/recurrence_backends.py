"""What layers of gated delta rules, state spaces and linear attention are told of a step, in the place of vLLM's
backends for them.
"""

from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

from ..reviews import patch_points
from ..reviews.patch_points import PatchPoint
from .state_backend import StateBackend, StateStep, StateStepBuilder


class UncutStepBuilder(StateStepBuilder):
    """Makes a step without the chunks and the order of requests that vLLM's kernels need.

    Attributes:
        metadata: of a step, with the fields of vLLM's.
    """

    metadata: ClassVar[Any]
    supports_update_block_table: ClassVar[bool] = False

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *_: Any, **__: Any) -> Any:
        # vLLM's fields without a default say how a step is cut into kernels of its own: zeros, and no tensors.
        cut = {
            field.name: 0 if field.name.startswith("num_") else None
            for field in fields(self.metadata)
            if field.default is MISSING and field.default_factory is MISSING
        }
        if "num_actual_tokens" in cut:
            cut["num_actual_tokens"] = common_attn_metadata.num_actual_tokens
        return self.metadata(**cut, **self.step_of(common_attn_metadata))

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self.build(0, common_attn_metadata)


def _backend(kind: str, backend: PatchPoint, builder: PatchPoint, metadata: PatchPoint) -> Any:
    """The backend in the place of vLLM's, for layers of a kind."""
    named = {"__module__": __name__}
    of_step: Any = dataclass(type(f"{kind}Metadata", (StateStep, metadata.get()), dict(named)))
    makes = type(f"{kind}Builder", (UncutStepBuilder, builder.get()), named | {"metadata": of_step})
    return type(f"{kind}Backend", (StateBackend, backend.get()), named | {"builder": makes})


DeltaRuleBackend = _backend(
    "DeltaRule",
    patch_points.DELTA_RULE_BACKEND,
    patch_points.DELTA_RULE_BUILDER,
    patch_points.DELTA_RULE_METADATA,
)
Mamba2Backend = _backend(
    "Mamba2", patch_points.MAMBA2_BACKEND, patch_points.MAMBA2_BUILDER, patch_points.MAMBA2_METADATA
)
LightningBackend = _backend(
    "Lightning", patch_points.LIGHTNING_BACKEND, patch_points.LIGHTNING_BUILDER, patch_points.LIGHTNING_METADATA
)
