"""What Gluon has renamed, under one name for every Triton from 3.6 on.

| here          | Triton 3.6           | 3.7                  | 3.8                 | 3.9                |
|---------------|----------------------|----------------------|---------------------|--------------------|
| barrier       | thread_barrier       | barrier              | barrier             | barrier            |
| copy_block    | tma.async_copy_...   | tma.async_copy_...   | tma.async_load      | tma.async_load     |
| write_block   | tma.async_copy_...   | tma.async_copy_...   | tma.async_store     | tma.async_store    |
| copy_elements | async_copy_...       | async_copy_...       | async_load          | async_load         |
| reinterpret   | memory._reinterpret  | memory._reinterpret  | memory._reinterpret | memory.reinterpret |

``async_copy_...`` is ``async_copy_global_to_shared``, to write ``async_copy_shared_to_global``, which 3.8 has too; in
3.9 it is there and raises. All other names that the kernels use are the same in all, or in :mod:`.triton_names`. A
kernel takes these for the functions of Triton that they are. Triton's version is a part of the key of all that it
compiles: what one version's names have made is not found by another's.
"""

import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

_memory = gl.shared_memory_descriptor

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Waits for all threads of the program, or of the partition of it that calls this."""
copy_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""Starts a copy of a block of a descriptor to shared memory, and tells a barrier in memory when it has arrived."""
write_block = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""Starts a copy of shared memory to a block of a descriptor, which ``tma.store_wait`` waits for."""
copy_elements = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Starts a copy of what pointers point to, which ``async_copy.wait_group`` waits for."""
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret
"""Shared memory with another dtype, shape and layout, of the same size: from 3.8 on the compiler insists on that."""
