"""The device types that operations have implementations for, a record each, and how others join.

Another distribution adds a device by an entry point of the group :data:`GROUP`. Its name is the device type, and its
value a :class:`Device`, in a module that imports nothing else of weight:

    [project.entry-points."vllm_batch_invariant.devices"]
    mydevice = "my_package:DEVICE"

The record names modules, which are imported when a tensor or an engine on such a device first needs them. What it
leaves out is refused by name there. docs/contributing.md says what each of these modules has.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..errors import NotCovered

GROUP = "vllm_batch_invariant.devices"


@dataclass(frozen=True)
class Device:
    """What operations and PyTorch's dispatcher know of a device type, and where the rest of it lies.

    Attributes:
        type: PyTorch's name of it.
        dispatch_key: where PyTorch's dispatcher keeps its kernels.
        attention: the implementation of attention that "auto" picks; None if there is none here.
        exact_fp64_softmax: whether PyTorch's own softmax of fp64 computes each row from itself alone.
        name: what messages call one, with its article.
        title: what tables call it.
        aten: the module with what the mode replaces there, ``DEVICE`` (:class:`~..aten.overrides.DeviceOverrides`).
        vllm: the module with what an engine needs, ``DEVICE`` (:class:`~..integration.devices.record.VllmDevice`), and
            ``EXACT`` where it has exact arithmetic.
        operations: of a device that joins, the module of each operation that it has (of floats). A module has the
            functions of those beside it: of ``ops.softmax.cpu`` for "softmax".
        reductions: the module with a function for each of these, of the operation's name: it takes what ``of_device``
            of the operation's reduction takes behind the device type, and gives the reduction.
        coverage: the module with ``COVERED`` and ``REFUSED``, rows of :mod:`~..integration.coverage` for it alone.
        patch_points: the module with its places in a vLLM of its own, which scripts.check_patch_points looks for.
        packages: whose versions a benchmark on it names.
        install: what to do where a package that it needs is missing; None for this project's extra of its name.
    """

    type: str
    dispatch_key: str
    attention: str | None
    exact_fp64_softmax: bool
    name: str
    title: str
    aten: str
    vllm: str
    operations: Mapping[str, str] = field(default_factory=dict)
    reductions: str | None = None
    coverage: str | None = None
    patch_points: str | None = None
    packages: tuple[str, ...] = ()
    install: str | None = None

    @property
    def is_present(self) -> bool:
        """Whether tensors can be on such a device in this process; imports no device library to find out."""
        import torch  # here, because the table of what is covered is printed where there is no PyTorch

        module = getattr(torch, self.type, None)
        return module is not None and module.is_available()


_ATEN, _VLLM = "vllm_batch_invariant.aten", "vllm_batch_invariant.integration.devices"
DEVICES = {
    device.type: device
    for device in (
        Device("cpu", "CPU", "numba", True, "a CPU", "CPU", f"{_ATEN}.cpu", f"{_VLLM}.cpu"),
        Device("cuda", "CUDA", "triton", True, "a GPU", "NVIDIA GPU", f"{_ATEN}.cuda", f"{_VLLM}.cuda"),
    )
}
"""Those of this package's own rooms, by type."""


def known() -> dict[str, Device]:
    """Every device by type: :data:`DEVICES`, and those that joined.

    Raises:
        NotCovered: an entry point that gives no device, or one that is there already: tensors on it would be computed
            by nobody knows whom.
    """
    return DEVICES | joined()


@cache
def joined() -> dict[str, Device]:
    """Those that entry points add, by type. Errors as of :func:`known`."""
    found: dict[str, Device] = {}
    for point in sorted(entry_points(group=GROUP)):
        device = _load(point)
        if found.setdefault(point.name, device) is not device or point.name in DEVICES:
            raise _refused(point, "there is one of that type already")
    return found


def get(device_type: str) -> Device:
    """The record of a device that is known. Errors as of :func:`known`."""
    return DEVICES.get(device_type) or joined()[device_type]


def reduction_of(operation: str, device_type: str) -> Callable[..., Any] | None:
    """What makes the reduction of an operation on a device that joined; None where it stands beside the operation.

    Raises:
        NotCovered: the device names none.
    """
    if device_type in DEVICES:
        return None
    device = joined().get(device_type)
    if device is None or device.reductions is None or operation not in device.operations:
        raise NotCovered(
            f"{operation} on device '{device_type}'", "it has no reduction there", "move the tensors to another device"
        )
    return getattr(import_module(device.reductions), operation)


def _load(point: EntryPoint) -> Device:
    try:
        device = point.load()
    except Exception as error:  # of any package
        raise _refused(point, f"it cannot be loaded, {type(error).__name__}: {error}") from error
    if not isinstance(device, Device) or device.type != point.name:
        raise _refused(point, f"{point.value} is no Device of that type")
    return device


def _refused(point: EntryPoint, why: str) -> NotCovered:
    owner = point.dist.name if point.dist else "a package"
    return NotCovered(f"device '{point.name}' of {owner}", why, f"uninstall {owner}, or another version of it")
