"""What docs/contributing.md lists is enough: an operation is added to a copy of the package, a device from outside."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.import_graph import PACKAGE, imports

ROOT = Path(__file__).parents[1]
MOST = {"operation": 8, "device": 7, "weight format": 6}
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
    "toy_device/__init__.py": """
from vllm_batch_invariant.ops.devices import Device

DEVICE = Device(
    "toy",
    "PrivateUse1",
    None,
    False,
    name="a toy",
    title="Toy",
    aten="toy_device.aten",
    vllm="toy_device.vllm",
    operations={"softmax": "toy_device.softmax", "norm": "toy_device.norm"},
    reductions="toy_device.reductions",
    coverage="toy_device.coverage",
    install="install the toys",
)
""",
    "toy_device/softmax.py": """
def softmax(x, dim, *, dtype=None):
    print("toy softmax of", list(x.shape))
    return x
""",
    "toy_device/norm.py": """
import no_such_library
""",
    "toy_device/reductions.py": """
from vllm_batch_invariant.ops.softmax import SoftmaxReduction


def softmax(length, dtype):
    return SoftmaxReduction(length=length, dtype=dtype, exp="toy exp", lanes=3)
""",
    "toy_device/aten.py": """
from vllm_batch_invariant.aten.overrides import OVERRIDES, DeviceOverrides

DEVICE = DeviceOverrides(OVERRIDES)
""",
    "toy_device/vllm.py": """
from vllm_batch_invariant.integration.devices.record import VllmDevice

from . import DEVICE as TOY

DEVICE = VllmDevice(TOY, "toy_device.attention.Backend", ("CUSTOM",), serving="Toys.")
""",
    "toy_device/coverage.py": """
from vllm_batch_invariant.integration.feature import Feature

COVERED = (Feature("Toy", "a test"),)
REFUSED = (Feature("Toys with gadgets", "they rattle", "take them off", lambda config: config.gadget, ("toy",)),)
""",
    "toy_device-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: toy_device\nVersion: 1.0\n",
    "toy_device-1.0.dist-info/entry_points.txt": "[vllm_batch_invariant.devices]\ntoy = toy_device:DEVICE\n",
}
"""A distribution as an installer leaves it."""
FORMAT = {
    "ops/formats/signs.py": """
import torch

from .record import Format


def encode(weight):
    return (weight > 0).to(torch.uint8), weight.abs().amax(1, keepdim=True)


def decode(stored, out):
    return out.copy_((2.0 * stored[0] - 1) * stored[1])


SIGNS = Format("signs", (torch.uint8, torch.float32), exponents=16, encode=encode, decode=decode)
"""
}


def listed(what: str) -> list[str]:
    """The files of the table under "Add an operation" and the like."""
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


def run(folder: Path, code: str, *more: Path) -> str:
    """What a process prints that imports from a folder, and from others."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PYTHONPATH": ":".join(map(str, (folder, *more))), "PATH": "/usr/bin:/bin"},
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
    assert run(package.parent, code) == "[1.0, 1.0]"
    found = imports(package)
    assert found[f"{PACKAGE}.ops.largest"] == {f"{PACKAGE}.ops.dispatch"}
    named = {name.replace("<operation>", "largest").removeprefix(f"{PACKAGE}/") for name in listed("operation")}
    assert {*OPERATION, *edits} <= named


def test_an_operation_that_is_not_in_the_table_is_refused(package: Path) -> None:
    add(package, OPERATION, {})
    with pytest.raises(AssertionError, match=r"NotCovered: .*largest"):
        run(package.parent, "import torch; from vllm_batch_invariant.ops.largest import largest; largest(torch.eye(2))")


def test_a_weight_format_needs_no_other_file_of_the_package(package: Path) -> None:
    edits = {
        "ops/formats/__init__.py": lambda text: text.replace(
            "from .record import Format", "from .record import Format\nfrom .signs import SIGNS"
        ).replace("FORMATS = (PLAIN, ", "FORMATS = (PLAIN, SIGNS, ")
    }
    add(package, FORMAT, edits)
    code = """
import torch
from vllm_batch_invariant.ops.linear import linear, prepare, torch_op
from vllm_batch_invariant.ops.linear.spec import NAMED
spec, x, weight = NAMED["signs bias"], torch.ones(2, 8), torch.arange(-16.0, 16.0).view(4, 8)
codes, *scales = spec.b_format.stored(weight)
prepare(codes, 2, spec, dtype=x.dtype)
matrix = torch.where(weight > 0, scales[0], -scales[0])
out = torch_op.linear(x, codes, x[0, :4], spec.name, scales)
print(torch.equal(out, linear(x, matrix, x[0, :4])), out[0].tolist())
"""
    assert run(package.parent, code) == "True [-127.0, -63.0, 43.0, 121.0]"
    named = {name.replace("<format>", "signs").removeprefix(f"{PACKAGE}/") for name in listed("weight format")}
    assert {*FORMAT, *edits} <= named


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """Where the distribution is installed."""
    add(tmp_path, DEVICE, {})
    return tmp_path


def test_a_device_from_outside_serves_what_it_has_and_is_refused_the_rest_by_name(toy: Path) -> None:
    code = """
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("toy")
from vllm_batch_invariant import batch_invariant_mode
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops import linear, softmax
from vllm_batch_invariant.ops.dispatch import module_for
from vllm_batch_invariant.ops.norm import NormReduction

x = torch._C._acc.create_empty_tensor((2, 3), torch.float32)
softmax.softmax(x)
with batch_invariant_mode(), torch.inference_mode():
    torch.softmax(x, -1)
print(softmax.SoftmaxReduction.of_device("toy", 8, x.dtype).exp)
for call in (
    lambda: module_for("linear", "toy"),
    lambda: module_for("softmax", "xpu"),
    lambda: module_for("norm", "toy"),
    lambda: linear.LinearReduction.of_device("toy", 8, 8, x.dtype),
):
    try:
        call()
    except NotCovered as refusal:
        print(refusal)
"""
    printed = run(toy, code, ROOT).splitlines()
    assert printed[:3] == ["toy softmax of [2, 3]", "toy softmax of [2, 3]", "toy exp"]
    refused = [line.removeprefix("batch-invariant mode does not cover ") for line in printed[3:]]
    assert refused[0].startswith("linear on device 'toy': this version implements it for cpu, cuda, ")
    assert re.match(
        r"softmax on device 'xpu': this version implements it for cpu, cuda, (\w+, )*toy only; ", refused[1]
    )
    assert refused[2] == "norm on device 'toy': the package 'no_such_library' is not installed; install the toys."
    assert refused[3].startswith("linear on device 'toy': it has no reduction there; ")


def test_the_gate_knows_a_device_from_outside(toy: Path) -> None:
    pytest.importorskip("vllm")
    code = """
from types import SimpleNamespace
from vllm_batch_invariant.integration import coverage, devices

toy = SimpleNamespace(device_type="toy")
print(devices.of_config(SimpleNamespace(device_config=toy)).summary(())[1])
print(coverage.markdown())
config = SimpleNamespace(
    device_config=toy,
    speculative_config=object(),
    reasoning_config=object(),
    model_config=SimpleNamespace(is_moe=True, runner_type="pooling"),
    gadget="gadgets",
)
for feature in coverage.REFUSED:
    try:
        print("found:", feature.found(config))
    except AttributeError:
        pass
"""
    printed = run(toy, code, ROOT).splitlines()
    assert printed[0].startswith("Toys. ")
    assert "| Toy | a test |" in printed
    assert "| Toys with gadgets | they rattle | take them off |" in printed
    found = {line.removeprefix("found: ") for line in printed if line.startswith("found: ")}
    assert found - {"None"} >= {
        *("speculative decoding", "mixture of experts", "a reasoning configuration"),
        *("the pooling runner on a toy", "gadgets"),
    }


def test_the_files_of_a_device_are_those_that_are_listed() -> None:
    named = {name.replace("<package>", "toy_device").replace("<operation>", "softmax") for name in listed("device")}
    written = {name for name in DEVICE if name.startswith("toy_device/")} - {"toy_device/norm.py"}
    assert written | {"pyproject.toml"} == named
