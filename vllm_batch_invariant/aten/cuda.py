"""A GPU: reductions beside what every device gets, computed with the mode's sums, because its own kernels choose their
order by the number of rows; that of layer norm does not.
"""

from .overrides import OVERRIDES, DeviceOverrides, Override
from .reductions import AUTOGRAD, COMPOSED, FURTHER, OUTS, cumprod_below_autograd

DEVICE = DeviceOverrides(
    OVERRIDES
    | {
        name: Override(function, OUTS.get(name, ("out",)))
        for name, function in (COMPOSED | FURTHER | {"cumprod": cumprod_below_autograd}).items()
        if name != "native_layer_norm"
    },
    autograd=AUTOGRAD,
)
