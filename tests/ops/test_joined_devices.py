"""A device that joins by an entry point is the one that it says, and is there once; else one line refuses it."""

import re
import tomllib
from importlib.metadata import EntryPoint, entry_points

import pytest

from tests.docs.documents import ROOT
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops import devices
from vllm_batch_invariant.ops.devices import DEVICES, GROUP, Device

TOY = Device("toy", "PrivateUse1", None, False, "a toy", "Toy", "toy.aten", "toy.vllm")
OTHER = Device("toy", "PrivateUse1", "triton", False, "a toy", "Toy", "other.aten", "other.vllm")
CPU = Device("cpu", "CPU", None, False, "a CPU", "CPU", "toy.aten", "toy.vllm")


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value if ":" in value else f"{__name__}:{value}", GROUP)


def joined(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> dict[str, Device]:
    monkeypatch.setattr(devices, "entry_points", lambda group: points if group == GROUP else ())
    return devices.joined.__wrapped__()


def test_a_device_joins_behind_those_that_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    found = joined(monkeypatch, point("toy", "TOY"))
    assert found == {"toy": TOY}
    monkeypatch.setattr(devices, "joined", lambda: found)
    assert list(devices.known()) == [*DEVICES, "toy"]
    assert devices.get("toy") is TOY


@pytest.mark.parametrize(
    ("points", "why"),
    [
        ([("toy", "no_such_package:DEVICE")], "it cannot be loaded, ModuleNotFoundError: No module named"),
        ([("toy", "MISSING")], "it cannot be loaded, AttributeError: "),
        ([("toy", "GROUP")], "tests.ops.test_joined_devices:GROUP is no Device of that type"),
        ([("top", "TOY")], "tests.ops.test_joined_devices:TOY is no Device of that type"),
        ([("cpu", "CPU")], "there is one of that type already"),
        ([("toy", "TOY"), ("toy", "OTHER")], "there is one of that type already"),
    ],
)
def test_what_is_no_device_or_is_there_already_is_refused(
    points: list[tuple[str, str]], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"does not cover device '{points[-1][0]}' of a package: {why}"
    with pytest.raises(NotCovered, match=re.escape(line)) as refused:
        joined(monkeypatch, *(point(*one) for one in points))
    assert "\n" not in str(refused.value)


def test_a_device_without_reductions_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "joined", lambda: {"toy": TOY})
    for device_type in ("toy", "none"):
        with pytest.raises(NotCovered, match=f"softmax on device '{device_type}': it has no reduction there"):
            devices.reduction_of("softmax", device_type)
    assert devices.reduction_of("softmax", "cpu") is None


def test_the_devices_of_this_checkout_are_installed() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    installed = {one.name: one.value for one in entry_points(group=GROUP)}
    assert declared.items() <= installed.items(), "installed before a device joined: make install"
