"""How the weight of a matmul is stored: a format stands for a matrix, and the bits are those of a matmul with it.

:data:`PLAIN` stores the matrix itself. Another format is a record in a file of its own here, and a row of
:data:`FORMATS`. Without a kernel that reads what it stores (:data:`..linear.schedule.TILES`), the matrix is written to
memory before whatever multiplies.
"""

from .eight import EIGHT, FP8, FP8_BLOCK, INT8
from .fp4 import MXFP4, NVFP4
from .integers import INTEGERS, integers
from .record import Format

__all__ = ["FORMATS", "FP8", "FP8_BLOCK", "INT8", "MXFP4", "NVFP4", "PLAIN", "Format", "integers"]

PLAIN = Format("", names=("weight",))
"""The matrix itself: fp32, bf16, fp16 or fp64."""
FORMATS = (PLAIN, *INTEGERS, *EIGHT, NVFP4, MXFP4)
"""Every one."""
