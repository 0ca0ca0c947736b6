"""A GPU: reductions beside what every device gets, computed with the mode's sums, because its own kernels choose their
order by the number of rows; that of layer norm does not.
"""

from .overrides import OVERRIDES, DeviceOverrides, Override
from .reductions import COMPOSED, OUTS

DEVICE = DeviceOverrides(
    OVERRIDES
    | {
        name: Override(function, OUTS.get(name, ("out",)))
        for name, function in COMPOSED.items()
        if name != "native_layer_norm"
    }
)
