"""How many threads numba's kernels and PyTorch have beside each other."""

import os
import subprocess
import sys

RUN = """
import numpy, torch
from vllm_batch_invariant.ops.common import numba_rows
torch.set_num_threads(1)

def add_one(x):
    for i in numba_rows.numba.prange(len(x)):
        x[i] += 1

kernel = numba_rows.compiled(add_one, parallel=True)
if {ours}:
    numba_rows.use_threads(2)
else:
    numba_rows.numba.set_num_threads(2)
kernel(numpy.zeros(10000))
print(torch.get_num_threads(), numba_rows.numba.get_num_threads())
"""


def _threads(ours: bool) -> str:
    command = [sys.executable, "-c", RUN.replace("{ours}", str(ours))]
    settings = os.environ | {"NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=settings, capture_output=True, text=True, check=True).stdout.strip()


def test_pytorch_keeps_its_threads_where_numba_starts_its_own() -> None:
    assert _threads(ours=True) == "1 2"
    assert _threads(ours=False) == "2 2", "the negative control: numba's pool alone takes them"
