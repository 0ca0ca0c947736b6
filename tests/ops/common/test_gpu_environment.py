"""Which compiler a measurement is true for."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from vllm_batch_invariant.ops.common import gpu_environment


@pytest.fixture(autouse=True)
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable tells the compiler anything."""
    for name in list(gpu_environment.os.environ):
        if name.startswith(gpu_environment._TELLS_COMPILER):
            monkeypatch.delenv(name)


def test_nothing_told_is_the_compiler_that_triton_brings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert gpu_environment.compiler() == "as Triton has it"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PTXAS_OPTIONS", "")
    assert gpu_environment.compiler() == "as Triton has it"


@pytest.mark.parametrize(
    "name",
    [
        "PTXAS_OPTIONS",
        "TRITON_LIBDEVICE_PATH",
        "TRITON_F32_DEFAULT",
        "TRITON_KERNEL_OVERRIDE",
        "TRITON_OF_A_LATER_TRITON",
    ],
)
def test_what_tells_it_something_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "-O1")
    assert gpu_environment.compiler() == f"{name}=-O1"


def test_what_triton_itself_compiles_anew_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLOW_LHS_TMEM_LAYOUT_CONVERSION", "1")
    assert gpu_environment.compiler() == "ALLOW_LHS_TMEM_LAYOUT_CONVERSION=true"


def test_another_ptxas_under_the_same_name_is_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ptxas, said = tmp_path / "ptxas", []
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(ptxas))
    for content in ("one", "another", "one"):
        ptxas.write_text(content)
        said.append(gpu_environment.compiler())
    assert said[0] == said[2] != said[1]
    assert said[0].startswith(f"TRITON_PTXAS_PATH={ptxas} (")


def test_it_is_part_of_what_a_measurement_is_true_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = type("Properties", (), {"name": "GPU", "major": 9, "minor": 0, "multi_processor_count": 132})
    monkeypatch.setattr(gpu_environment.torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(gpu_environment.torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    plain = gpu_environment.gpu_environment(0, "ops/common")
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    told = gpu_environment.gpu_environment(0, "ops/common")
    assert {name for name in told if told[name] != plain[name]} == {"compiler"}
    assert gpu_environment.kept_path("linear", told) != gpu_environment.kept_path("linear", plain)
