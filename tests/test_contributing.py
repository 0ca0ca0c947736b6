"""What docs/contributing.md lists is enough: an operation and a device are added to a copy of the package, and work."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.import_graph import PACKAGE, imports

ROOT = Path(__file__).parents[1]
MOST = {"operation": 8, "device": 10}
"""Files to touch."""

OPERATION = {
    "ops/largest/__init__.py": '''
"""The largest element of each row."""

from ..dispatch import implementation


def largest(x):
    return implementation("largest", x).largest(x)
''',
    "ops/largest/reduction.py": '''
from dataclasses import dataclass


@dataclass(frozen=True)
class LargestReduction:
    """A maximum is exact in any order."""
''',
    "ops/largest/reference.py": """
def largest(x):
    return x.double().amax(-1)
""",
    "ops/largest/cpu.py": """
def largest(x):
    return x.amax(-1)
""",
}
DEVICE = {
    "aten/newdevice.py": """
from .overrides import OVERRIDES, DeviceOverrides

DEVICE = DeviceOverrides(OVERRIDES)
""",
    "integration/devices/newdevice.py": """
from ...ops.devices import DEVICES
from .record import VllmDevice

DEVICE = VllmDevice(
    DEVICES["newdevice"], "vllm_batch_invariant.integration.attention_newdevice.Backend", ("NEW_ATTN",)
)
""",
    "integration/attention_newdevice.py": """
class Backend:
    pass
""",
}


def listed(what: str) -> list[str]:
    """The files of the table under "Add an operation" or "Add a device"."""
    text = (ROOT / "docs" / "contributing.md").read_text()
    section = re.search(rf"^## Add an? {what}$(.*?)^## ", text, re.MULTILINE | re.DOTALL)[1]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / PACKAGE


def add(package: Path, files: dict[str, str], edits: dict[str, Callable[[str], str]]) -> None:
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.lstrip())
    for name, edit in edits.items():
        before = (package / name).read_text()
        assert edit(before) != before, name
        (package / name).write_text(edit(before))


def run(package: Path, code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=package.parent,
        env={"PYTHONPATH": str(package.parent), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize("what", MOST)
def test_few_files_are_listed(what: str) -> None:
    assert 0 < len(listed(what)) <= MOST[what]
    assert len(set(listed(what))) == len(listed(what))


def test_an_operation_needs_no_other_file_of_the_package(package: Path) -> None:
    edits = {
        "ops/dispatch.py": lambda text: text.replace('    "linear": (', '    "largest": ("cpu",),\n    "linear": (')
    }
    add(package, OPERATION, edits)
    code = "import torch; from vllm_batch_invariant.ops.largest import largest; print(largest(torch.eye(2)).tolist())"
    assert run(package, code) == "[1.0, 1.0]"
    found = imports(package)
    assert found[f"{PACKAGE}.ops.largest"] == {f"{PACKAGE}.ops.dispatch"}
    named = {name.replace("<operation>", "largest").removeprefix(f"{PACKAGE}/") for name in listed("operation")}
    assert {*OPERATION, *edits} <= named


def test_an_operation_that_is_not_in_the_table_is_refused(package: Path) -> None:
    add(package, OPERATION, {})
    with pytest.raises(AssertionError, match=r"NotCovered: .*largest"):
        run(package, "import torch; from vllm_batch_invariant.ops.largest import largest; largest(torch.eye(2))")


def test_a_device_needs_no_other_file_of_the_package(package: Path) -> None:
    pytest.importorskip("vllm")
    edits = {
        "ops/devices.py": lambda text: text.replace(
            '        Device("npu"', '        Device("newdevice", "PrivateUse1", "triton", True),\n        Device("npu"'
        ),
        "ops/dispatch.py": lambda text: text.replace(
            "in device_types\n}", 'in device_types\n} | {("norm", "float", "newdevice"): ".norm.cpu"}'
        ),
        "ops/attention/reduction.py": lambda text: text.replace(
            "_FASTEST = {", '_FASTEST = {\n    "newdevice": {"auto": AttentionReduction(512)},'
        ),
    }  # fmt: skip
    add(package, DEVICE, edits)
    code = """
from vllm_batch_invariant.integration import devices
from vllm_batch_invariant.ops.dispatch import module_for
device = devices.get("newdevice")
print(device.backend.__name__, device.attention_reduction().split_size, module_for("norm", "newdevice").__name__)
"""
    assert run(package, code).splitlines()[-1] == f"Backend 512 {PACKAGE}.ops.norm.cpu"
    named = {name.replace("<device>", "newdevice").removeprefix(f"{PACKAGE}/") for name in listed("device")}
    assert {*DEVICE, *edits} <= named
