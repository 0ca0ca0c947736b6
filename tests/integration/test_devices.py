"""A device is a record in three rooms, found by its name and imported when it is needed."""

import subprocess
import sys
from importlib import import_module

import pytest

from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration import devices
from vllm_batch_invariant.ops.devices import DEVICES
from vllm_batch_invariant.ops.dispatch import MODULES, module_for


@pytest.mark.parametrize("device_type", DEVICES)
def test_every_device_has_a_record_for_vllm_and_one_for_pytorch(device_type: str) -> None:
    assert devices.get(device_type).ops is DEVICES[device_type]
    assert import_module(f"vllm_batch_invariant.aten.{device_type}").DEVICE.operators


def test_a_backend_is_found_by_its_name() -> None:
    assert devices.get("cpu").backend.supports_batch_invariance()


def test_every_operation_is_for_devices_that_there_are() -> None:
    assert {device_type for _, device_type in MODULES} == set(DEVICES)


def test_an_operation_that_a_device_lacks_refuses_by_name() -> None:
    with pytest.raises(NotCovered, match="norm_rotary on device 'cpu': this version implements it for cuda only"):
        module_for("norm_rotary", "cpu")
    with pytest.raises(NotCovered, match="ranking on device 'npu': this version implements it for cpu, cuda only"):
        module_for("ranking", "npu")


def test_installing_the_plugin_imports_no_device_that_is_not_there() -> None:
    code = (
        "import sys; from vllm_batch_invariant.integration import install, devices; devices.get('cpu')\n"
        "print(sorted(name for name in sys.modules if name.startswith('vllm_batch_invariant.')\n"
        "             and name.endswith(('.cuda', '.npu', 'ascend.install', 'attention_cuda'))))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
