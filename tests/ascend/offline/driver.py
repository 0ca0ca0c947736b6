"""An Ascend driver without a device, under triton-ascend's real JIT: kernels are compiled as for one and not run."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget

from tests.ascend.offline.compiler import ARCHITECTURE, Compiler, Hivm


@dataclass(frozen=True)
class Chip:
    """The cores that a device reports."""

    cube: int
    vector: int


CHIPS = (Chip(20, 40), Chip(24, 48))


@dataclass(frozen=True)
class Variant:
    """One binary that the JIT asked for: a kernel with the types and constants it was specialised for."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, object], ...]
    linalg: str
    hivm: Future[Hivm]

    def __str__(self) -> str:
        types = ", ".join(f"{name}: {type}" for name, type in self.signature if type.startswith("*"))
        return f"{self.kernel}({types}) with {', '.join(f'{name}={value}' for name, value in self.constants)}"


@dataclass(frozen=True)
class Launch:
    """One call of a binary."""

    variant: Variant
    grid: tuple[int, int, int]


class Device:
    """What the JIT takes for a device: it reports ``chip``, and keeps every launch in ``launches``."""

    def __init__(self, compiler: Compiler) -> None:
        self.chip = CHIPS[0]
        self.launches: list[Launch] = []
        self._compiler = compiler
        self._lowered: dict[str, tuple[str, Future[Hivm]]] = {}
        self.utils = SimpleNamespace(
            get_device_properties=lambda index: {
                "max_shared_mem": 1,
                "num_aicore": self.chip.cube,
                "num_vectorcore": self.chip.vector,
            },
            load_binary=lambda name, binary, shared, device: (None, 0, 0, 0),
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("npu", ARCHITECTURE, 0)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, index: int | None = None) -> int:
        return 0

    def launcher_cls(self, source, metadata):
        linalg, hivm = self._lowered[metadata.hash]
        variant = Variant(
            source.fn.__name__, tuple(source.signature.items()), tuple(source.constants.items()), linalg, hivm
        )

        def launch(x, y, z, *arguments) -> None:
            self.launches.append(Launch(variant, (x, y, z)))

        return launch

    def finish(self, linalg: str, metadata: dict) -> bytes:
        """The JIT's last step: the parts of CANN that make a binary are absent, so its input is kept instead."""
        metadata["shared"] = 1
        metadata["name"] = "unused aiv"
        metadata["tensor_kinds"] = []
        self._lowered[metadata["hash"]] = linalg, self._compiler.submit(linalg)
        return b"no binary"

    def variants(self) -> set[Variant]:
        """The binaries launched so far."""
        return {launch.variant for launch in self.launches}


@contextmanager
def installed(compiler: Compiler, cache: str) -> Iterator[Device]:
    """A device in the place of the real driver, with an empty ``cache`` of compiled kernels."""
    device = Device(compiler)
    backend = backends["ascend"].compiler
    add_stages = backend.add_stages

    def add_stages_without_cann(self, stages, options) -> None:
        add_stages(self, stages, options)
        assert list(stages) == ["ttir", "ttadapter", "npubin"]
        stages["npubin"] = device.finish

    active = triton.runtime.driver.active
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", cache)
        patch.setattr(backend, "add_stages", add_stages_without_cann)
        triton.runtime.driver.set_active(device)
        yield device
    triton.runtime.driver.set_active(active)
