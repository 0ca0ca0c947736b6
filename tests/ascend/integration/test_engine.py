"""On vllm-ascend's platform the plugin sets what it must, takes the worker's place, and fills its own mode's gaps.

vllm-ascend is a fake: its own requirements do not go with a vLLM for the CPU.
"""

import importlib
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm.platforms
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.platforms.cpu import CpuPlatform

from scripts import check_patch_points
from tests.ascend import fake_vllm_ascend
from tests.ascend.integration.test_refusals import config
from vllm_batch_invariant import aten, disable_batch_invariant_mode
from vllm_batch_invariant.ascend.integration import install as ascend
from vllm_batch_invariant.ascend.integration import library as ascend_library
from vllm_batch_invariant.ascend.integration import patch_points as ascend_patch_points
from vllm_batch_invariant.errors import BadSetting, NotCovered
from vllm_batch_invariant.integration.engine import install
from vllm_batch_invariant.integration.reviews import patch_points


class Platform(CpuPlatform):
    """vllm-ascend's, which reads its settings and chooses its worker here."""

    device_type = "npu"
    seen: SimpleNamespace | None = None

    @classmethod
    def check_and_update_config(cls, vllm_config: SimpleNamespace) -> None:
        cls.seen = SimpleNamespace(
            settings=dict(vllm_config.additional_config), mode=vllm_config.compilation_config.mode
        )
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = ascend_patch_points.WORKER_CLASS


def full_config(**additional: object) -> SimpleNamespace:
    made = config()
    made.additional_config = additional
    made.compilation_config = SimpleNamespace(
        mode=CompilationMode.VLLM_COMPILE,
        cudagraph_mode=CUDAGraphMode.FULL,
        custom_ops=["none"],
        pass_config=SimpleNamespace(),
    )
    made.parallel_config.worker_cls = "auto"
    return made


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> type:
    """The platform of a process in which the plugin has been installed, as far as a device has a part in it: what every
    device has would stay in vLLM's classes.
    """
    monkeypatch.setattr(install, "install_on_every_device", lambda: None)
    kind = patch_points.CONFIG.get()
    monkeypatch.setattr(kind, "__post_init__", kind.__post_init__)  # to be taken back
    chosen = type("NPUPlatform", (Platform,), {})
    monkeypatch.setattr(vllm.platforms, "_current_platform", chosen())
    monkeypatch.setattr(install, "_installed", False)
    monkeypatch.setattr(ascend_library, "find_spec", lambda name: name)
    monkeypatch.setattr(
        patch_points.PatchPoint, "put", lambda self, value: monkeypatch.setattr(self.module(), self.attribute, value)
    )
    registry = patch_points.REGISTER_BACKEND.module()
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", dict(registry._ATTN_OVERRIDES))
    for name in ascend.DETERMINISTIC:
        monkeypatch.setenv(name, "")  # so that what the plugin sets is taken back
        monkeypatch.delenv(name)
    install.install()
    return chosen


def test_communication_is_deterministic_before_there_is_any(platform: type) -> None:
    assert {name: os.environ[name] for name in ascend.DETERMINISTIC} == {
        "HCCL_DETERMINISTIC": "strict",
        "LCCL_DETERMINISTIC": "1",
    }


def test_another_value_for_communication_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_DETERMINISTIC", "true")
    monkeypatch.setenv("LCCL_DETERMINISTIC", "1")
    with pytest.raises(NotCovered, match=r"HCCL_DETERMINISTIC=true: .*; set HCCL_DETERMINISTIC=strict"):
        ascend.set_deterministic_env()


def test_vllm_ascend_is_configured_before_it_reads_its_settings(platform: type) -> None:
    made = full_config(weight_nz_mode=2, ascend_compilation_config={"fuse_norm_quant": True, "other": 1}, mine="kept")
    platform.check_and_update_config(made)
    settings = platform.seen.settings
    assert settings["weight_nz_mode"] == 0
    assert settings["ascend_compilation_config"]["other"] == 1
    assert not any(value for name, value in settings["ascend_compilation_config"].items() if name != "other")
    assert settings["ascend_fusion_config"] == {"fusion_ops_gmmswigluquant": False}
    assert settings["mine"] == "kept"
    assert platform.seen.mode == made.compilation_config.mode == CompilationMode.NONE
    assert made.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    assert made.compilation_config.custom_ops == ["all"]
    assert made.attention_config.backend.name == "CUSTOM"
    assert made.parallel_config.worker_cls == "vllm_batch_invariant.ascend.integration.worker.Worker"


def test_a_configuration_that_is_checked_twice_keeps_our_worker(platform: type) -> None:
    made = full_config()
    for _ in range(2):
        platform.check_and_update_config(made)
    assert made.parallel_config.worker_cls == ascend.WORKER


def test_another_worker_is_refused_by_name(platform: type) -> None:
    made = full_config()
    made.parallel_config.worker_cls = "vllm_ascend.xlite.xlite_worker.XliteWorker"
    with pytest.raises(NotCovered, match=r"the worker vllm_ascend\.xlite\.xlite_worker\.XliteWorker"):
        platform.check_and_update_config(made)


def test_an_implementation_of_attention_that_no_npu_has_is_refused(
    platform: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT_ATTENTION", "flex")
    with pytest.raises(BadSetting, match="'flex' has no implementation on an NPU"):
        platform.check_and_update_config(full_config())


def test_every_model_gets_our_attention(platform: type, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm_ascend.install(monkeypatch)
    module, _, name = platform.get_attn_backend_cls(None, attn_selector_config=None).rpartition(".")
    assert getattr(importlib.import_module(module), name).supports_batch_invariance()


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    """The registry of layers, in which vllm-ascend has put its norms; the mode is switched off afterwards."""
    registry = {"RMSNorm": object, "GemmaRMSNorm": object, "SiluAndMul": object}
    monkeypatch.setattr(patch_points.CUSTOM_OP.module(), "op_registry_oot", registry)
    yield registry
    disable_batch_invariant_mode()


def test_the_worker_switches_the_mode_on_once_before_the_communicator(
    platform: type, norms: dict, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    modules = fake_vllm_ascend.install(monkeypatch, registers=("mm", "linear", "_softmax", "sum"))
    enabled: list[frozenset] = []
    monkeypatch.setattr(aten, "enable_batch_invariant_mode", lambda external_ops: enabled.append(external_ops))
    stock = torch.sum
    worker = importlib.import_module("vllm_batch_invariant.ascend.integration.worker")
    worker.Worker()._init_worker_distributed_environment()
    modules.own._batch_invariant_LIB._destroy()
    assert fake_vllm_ascend.CALLS == ["own mode", "communicator"]
    assert enabled == [frozenset({"mm", "linear"})]
    assert torch.sum is stock
    assert norms["RMSNorm"].__name__ == "BatchInvariantRMSNorm"
    assert norms["GemmaRMSNorm"].__name__ == "BatchInvariantGemmaRMSNorm"
    assert norms["SiluAndMul"] is object
    assert "Matmuls: vllm-ascend's own for linear, mm; Triton for the others." in log.text
    assert "compiled and simulated, never run on hardware" in log.text


def test_a_wheel_without_a_name_or_a_member_of_a_patch_point_is_found_out(tmp_path: Path) -> None:
    module = "vllm_ascend/attention/attention_v1.py"
    with zipfile.ZipFile(tmp_path / "wheel.whl", "w") as wheel:
        wheel.writestr(module, "class AscendAttentionBackendImpl:\n    def forward(self): ...\n")
    with zipfile.ZipFile(tmp_path / "wheel.whl") as wheel:
        absent = check_patch_points.missing(wheel, ascend_patch_points)
    assert "ATTENTION" not in absent
    assert {"ATTENTION.forward_impl", "WORKER", "BACKEND", "METADATA"} <= set(absent)
