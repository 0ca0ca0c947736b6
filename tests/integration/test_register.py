"""The plugin's entry point: found by vLLM, silent without the flag, clear about a wrong setting."""

from importlib.metadata import entry_points
from pathlib import Path

import pytest

import vllm_batch_invariant
from tests.fakes import torchvision
from vllm_batch_invariant import envs
from vllm_batch_invariant.cli import main
from vllm_batch_invariant.errors import BadSetting, NotCovered
from vllm_batch_invariant.integration import coverage
from vllm_batch_invariant.integration.reviews import patch_points


def test_vllm_finds_the_entry_point() -> None:
    found = [point for point in entry_points(group="vllm.general_plugins") if point.name == "batch_invariant"]
    assert [point.load() for point in found] == [vllm_batch_invariant.register]


@pytest.mark.parametrize("value", ["", "0"])
def test_nothing_is_read_or_checked_without_the_flag(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT_NONSENSE", "1")
    vllm_batch_invariant.register()


@pytest.mark.parametrize("value", ["yes", "2", "true", "-1"])
def test_a_wrong_flag_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    with pytest.raises(BadSetting, match=f"VLLM_BATCH_INVARIANT='{value}' is not a value it can have; use 0 or 1"):
        vllm_batch_invariant.register()


def test_an_unknown_variable_is_refused_with_the_nearest_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT_ATENTION", "flex")
    with pytest.raises(BadSetting, match="ATENTION; did you mean VLLM_BATCH_INVARIANT_ATTENTION"):
        vllm_batch_invariant.register()


@pytest.mark.parametrize("flag", [None, "0", "1"])
@pytest.mark.parametrize(
    "name",
    [
        "VLLM_BATCH_INVARIENT",
        "VLLM_BATCH_INVARIANCE",
        "VLLM_ENABLE_BATCH_INVARIANT",
        "VLLM_BATCH_INVARIANT_MODE",
        "vllm_batch_invariant",
    ],
)
def test_a_misspelt_flag_is_refused_with_the_mode_and_without(
    name: str, flag: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if flag is None:
        monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    else:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", flag)
    monkeypatch.setenv(name, "1")
    with pytest.raises(BadSetting, match=f"unknown environment variable {name}; did you mean VLLM_BATCH_INVARIANT\\?"):
        vllm_batch_invariant.register()


@pytest.mark.parametrize("flag", ["0", "1"])
def test_no_variable_of_vllms_or_of_a_service_of_kubernetes_is_taken_for_a_misspelt_one(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", flag)
    service = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_8000_TCP", "PORT_8000_TCP_ADDR")
    for name in (
        "BATCH_INVARIANT",
        *patch_points.ENVIRONMENT.get(),
        *(f"VLLM_BATCH_INVARIANT_{end}" for end in service),
    ):
        if name != "VLLM_BATCH_INVARIANT":
            monkeypatch.setenv(name, "")
    envs.check_flag()
    envs.check_names()


def test_settings_shows_a_misspelt_flag(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    monkeypatch.setenv("VLLM_BATCH_INVARIENT", "1")
    assert main(["settings"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "VLLM_BATCH_INVARIENT; did you mean VLLM_BATCH_INVARIANT?" in said.err


def test_a_wrong_implementation_of_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_batch_invariant.envs import ATTENTION

    monkeypatch.setenv("VLLM_BATCH_INVARIANT_ATTENTION", "flash")
    with pytest.raises(BadSetting, match="use auto or flex or numba or triton"):
        ATTENTION.read()


@pytest.mark.parametrize("device", ["xpu", "tpu"])
def test_a_device_without_implementation_is_refused(device: str) -> None:
    with pytest.raises(NotCovered, match=f"device '{device}'.*unset VLLM_BATCH_INVARIANT"):
        coverage.check_device(device)


@pytest.mark.parametrize("name", patch_points.ALL)
def test_the_installed_vllm_has_every_patch_point(name: str, tmp_path: Path) -> None:
    if name == "NEMOTRON_TILER":
        torchvision.import_beside(tmp_path, *patch_points.NEMOTRON_TILER.modules)
    assert patch_points.ALL[name].is_there() or name in patch_points.OPTIONAL


@pytest.mark.parametrize("name", patch_points.MEMBERS)
def test_the_installed_vllm_has_every_method_that_is_overridden(name: str) -> None:
    point = patch_points.ALL[name]
    if name in patch_points.OPTIONAL and not point.is_there():
        pytest.skip("this vLLM does not have it")
    assert [member for member in patch_points.MEMBERS[name] if not hasattr(point.get(), member)] == []


def test_a_missing_patch_point_is_named() -> None:
    with pytest.raises(NotCovered, match=r"it has no nothing in vllm\.envs"):
        patch_points.PatchPoint(("vllm.envs",), "nothing").get()
