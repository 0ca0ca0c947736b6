"""Puts the batch-invariant operations in PyTorch's place through torch.library, and takes them back.

The overrides sit at the device's dispatch key, below autograd: every variant of a matmul or reduction that decomposes
to one of these operators reaches them, and so does every gradient, whose formula PyTorch writes with the same
operators.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch

from ..errors import NotCovered
from ..ops.common import native_kernels
from ..ops.devices import known
from .overrides import COMPOSITIONS


@dataclass
class _Enabled:
    """What has to be put back."""

    library: torch.library.Library
    others: ExitStack
    flash: bool
    memory_efficient: bool
    cudnn: bool
    fast_path: bool
    stance: AbstractContextManager[None]


_enabled: _Enabled | None = None


def is_batch_invariant_mode_enabled() -> bool:
    """Whether PyTorch's operators are replaced in this process."""
    return _enabled is not None


def enable_batch_invariant_mode(external_ops: Iterable[str] = ()) -> None:
    """Replace PyTorch's matmuls, reductions and elementwise functions by batch-invariant ones, for the whole process.

    Besides the operators in :data:`.overrides.OVERRIDES`: scaled_dot_product_attention takes its path of plain matmuls,
    nn.MultiheadAttention its slow one, and compiled functions run eagerly, because a compiled graph has no operators
    left to replace.

    Args:
        external_ops: operators that another library has made batch-invariant on a device, and that are left to it.

    Raises:
        NotCovered: there is nothing but a CPU, and not the package that compiles its kernels.
    """
    global _enabled
    if _enabled is not None:
        return
    devices = [device for device in known().values() if device.is_present]
    _check_packages({device.type for device in devices})
    external_ops = frozenset(external_ops)
    library = torch.library.Library("aten", "IMPL")
    others = ExitStack()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for device in devices:
            overrides = import_module(device.aten).DEVICE
            for name in overrides.operators:
                native_kernels.keep(name, device.dispatch_key)
            for operator, function in overrides.registrations(external_ops):
                library.impl(operator, function, device.dispatch_key, allow_override=True)
            for operator, function in overrides.autograd.items():
                library.impl(operator, function, f"Autograd{device.dispatch_key}", allow_override=True)
            others.enter_context(overrides.replaced(external_ops))
        for operator, function in COMPOSITIONS.items():
            native_kernels.keep(operator, "CPU")
            library.impl(operator, function, "CompositeImplicitAutograd", allow_override=True)
    _enabled = _Enabled(
        library,
        others,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.compiler.set_stance("force_eager"),
    )
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.mha.set_fastpath_enabled(False)


def _check_packages(present: set[str]) -> None:
    """Refuse a machine on which sums would fail one by one. Beside a GPU a CPU's tensors may never be added."""
    if present == {"cpu"} and find_spec("numba") is None:
        raise NotCovered(
            "PyTorch on a CPU", "the package 'numba', which compiles its kernels, is not installed", "pip install numba"
        )


def disable_batch_invariant_mode() -> None:
    """Give PyTorch its operators back."""
    global _enabled
    if _enabled is None:
        return
    before, _enabled = _enabled, None
    before.others.close()
    before.library._destroy()
    torch.backends.cuda.enable_flash_sdp(before.flash)
    torch.backends.cuda.enable_mem_efficient_sdp(before.memory_efficient)
    torch.backends.cuda.enable_cudnn_sdp(before.cudnn)
    torch.backends.mha.set_fastpath_enabled(before.fast_path)
    before.stance.__exit__(None, None, None)


@contextmanager
def set_batch_invariant_mode(enabled: bool = True) -> Iterator[None]:
    """Switch the mode on (or off) for a block, and back to what it was at the end."""
    before = is_batch_invariant_mode_enabled()
    (enable_batch_invariant_mode if enabled else disable_batch_invariant_mode)()
    try:
        yield
    finally:
        (enable_batch_invariant_mode if before else disable_batch_invariant_mode)()


def batch_invariant_mode() -> AbstractContextManager[None]:
    """The mode for one block: ``with batch_invariant_mode(): ...``. Nested blocks are one.

    It is the whole process's: other threads compute in the mode, too, while the block runs.

    Forward and backward, these have the same bits in every batch of rows of one width: matmuls and linear layers,
    softmax, norms, sums, products, variances and distances, losses without a reduction, elementwise functions, and
    attention by ``scaled_dot_product_attention``, which is computed by matmuls and softmax; on a CPU also LSTM and GRU.
    Compiled functions run eagerly. Padding and packing are the business of :mod:`vllm_batch_invariant.hf`.

    Left out, and PyTorch's own without a word: convolutions, a GPU's recurrent layers, Fourier transforms,
    decompositions and solvers (``torch.linalg.svd``, ``solve``), ``torch.add`` and ``torch.sub`` with
    ``alpha`` in bf16 and fp16, and operators of other libraries. docs/contract.md lists every operator, and says on
    what each promise rests, and where it ends: with other machines and versions.
    """
    return set_batch_invariant_mode(True)


__all__ = [
    "batch_invariant_mode",
    "disable_batch_invariant_mode",
    "enable_batch_invariant_mode",
    "is_batch_invariant_mode_enabled",
    "set_batch_invariant_mode",
]
