"""A setting of vLLM's that nobody has reviewed must have its default, and so must one that could change arithmetic."""

import dataclasses
import zipfile
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from scripts import check_patch_points
from vllm_batch_invariant.envs import FLAG
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration import coverage, devices, reviews
from vllm_batch_invariant.integration.engine import install
from vllm_batch_invariant.integration.reviews import configuration, patch_points
from vllm_batch_invariant.ops.common.gpu import Gpu


@dataclass
class SchedulerConfig:
    """With one field that is reviewed and three that no version has."""

    max_num_seqs: int = 64
    order_of_additions: str = "ascending"
    slices: list[int] = Field(default_factory=lambda: [1, 2])
    precision: int = Field(default=32, gt=0)


def configurations(config: Any) -> Iterator[Any]:
    yield config
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if dataclasses.is_dataclass(value) and type(value).__name__ in reviews.fields():
            yield from configurations(value)


def test_every_field_of_the_installed_vllm_was_reviewed() -> None:
    seen = {type(part).__name__: part for part in configurations(patch_points.CONFIG.get()())}
    assert {"CacheConfig", "CompilationConfig", "KernelConfig", "UVAOffloadConfig"} <= set(seen)
    unknown = {
        name: configuration.unreviewed(name, {field.name for field in dataclasses.fields(part)})
        for name, part in seen.items()
    }
    assert {name: fields for name, fields in unknown.items() if fields} == {}


def test_every_field_of_the_configuration_of_multimodal_models_was_reviewed() -> None:
    """A text model has none."""
    kind = import_module("vllm.config.multimodal").MultiModalConfig
    fields = {field.name for field in dataclasses.fields(kind)}
    assert {"language_model_only", "mm_encoder_only"} <= fields
    assert configuration.unreviewed("MultiModalConfig", fields) == set()


@pytest.mark.parametrize("kernel", ["auto", "triton", "flashinfer"])
def test_a_kernel_whose_layers_are_the_modes_may_be_named(kernel: str) -> None:
    config = patch_points.CONFIG.get()()
    config.additional_config = {"gdn_prefill_backend": kernel}
    configuration.check(config)
    for others in ({"gdn_prefill_backend": "cutedsl"}, {"gdn_prefill_backend": kernel, "fp32_lm_head": True}):
        config.additional_config = others
        with pytest.raises(NotCovered, match="additional_config="):
            configuration.check(config)


def test_defaults_are_accepted_and_what_is_free_may_have_any_value() -> None:
    configuration.check(SchedulerConfig())
    configuration.check(SchedulerConfig(max_num_seqs=1))
    configuration.check(SchedulerConfig(slices=[1, 2]))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"order_of_additions": "any"}, r"order_of_additions='any': .* not know it; .* it is 'ascending'"),
        ({"slices": [3]}, r"slices=\[3\]: .*; leave it out, so that it is \[1, 2\]"),
        ({"precision": 16}, r"precision=16: .*; leave it out, so that it is 32"),
    ],
)
def test_an_unknown_field_is_refused_by_name_unless_it_has_its_default(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(NotCovered, match=told) as refused:
        configuration.check(SchedulerConfig(**changed))
    assert "\n" not in str(refused.value)


VLLM = """
@config
class VllmConfig:
    cache_config: CacheConfig
    order_of_additions: str = "ascending"

@config(option=True)
class CacheConfig:
    block_size: int = 16
    pages_that_forget: InitVar[bool] = False
    rounding: Rounding | None = None

@config
class Rounding:
    up: bool = False
"""
VARIABLES = """
environment_variables: dict[str, Callable[[], Any]] = {
    "VLLM_PORT": get_vllm_port,
    "VLLM_ROUNDING": lambda: os.getenv("VLLM_ROUNDING"),
}
"""
BACKEND = "class {}:\n    supports_guessing: bool = False\n    def supports_sink(cls): ..."


def test_what_a_version_has_and_nobody_has_reviewed_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "wheel", "w") as wheel:
        wheel.writestr("vllm/config/vllm.py", VLLM)
        wheel.writestr("vllm/envs.py", VARIABLES)
        for file, name in (("backend", "AttentionBackend"), ("backends/triton_attn", "TritonAttentionBackend")):
            wheel.writestr(f"vllm/v1/attention/{file}.py", BACKEND.format(name))
        assert check_patch_points.unreviewed(wheel) == [
            "VllmConfig.order_of_additions",
            "CacheConfig.rounding",
            "Rounding.up",
            "AttentionBackend.supports_guessing",
            "TritonAttentionBackend.supports_guessing",
            "VLLM_ROUNDING",
        ]


@pytest.mark.parametrize("name", reviews.variables().default_only)
def test_a_variable_that_puts_other_kernels_in_the_place_of_ours_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, reviews.variables().default_only[name][0])
    configuration.check_variables([])
    monkeypatch.setenv(name, "1")
    with pytest.raises(NotCovered, match=f"{name}=1: .*; unset {name}"):
        configuration.check_variables([])


def test_every_variable_of_the_installed_vllm_was_read() -> None:
    names = list(patch_points.ENVIRONMENT.get())
    assert {"VLLM_PLUGINS", "VLLM_USE_RUST_FRONTEND"} <= set(names)
    assert configuration.unread_variables(names) == []


def test_a_variable_that_nobody_has_read_must_not_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["VLLM_PORT", "VLLM_ROCM_ROUNDING", "VLLM_ROUNDING", FLAG]
    for name in names:
        monkeypatch.setenv(name, "")
    configuration.check_variables(names)
    monkeypatch.setenv("VLLM_PORT", "8000")
    monkeypatch.setenv("VLLM_ROCM_ROUNDING", "up")
    monkeypatch.setenv(FLAG, "1")
    configuration.check_variables(names)
    monkeypatch.setenv("VLLM_ROUNDING", "secret")
    with pytest.raises(NotCovered, match=r"variable VLLM_ROUNDING: .*does not know it; unset VLLM_ROUNDING") as told:
        configuration.check_variables(names)
    assert "secret" not in str(told.value)


def test_a_variable_is_read_once_and_either_covered_or_refused() -> None:
    names = [name for lists in reviews.table("variables")["known"].values() for line in lists for name in line.split()]
    assert len(names) > 200
    assert [name for name, times in Counter(names).items() if times > 1] == []
    assert [name for name in names if name in reviews.variables().default_only] == []
    patterns = [name for name in names if "*" in name]
    assert "VLLM_ROCM_*" in patterns
    assert [name for name in names if name not in patterns and any(fnmatchcase(name, one) for one in patterns)] == []


def test_rocm_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    coverage.check_device("cuda")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(NotCovered, match="device 'rocm'"):
        coverage.check_device("cuda")


def test_a_gpu_of_rocms_is_refused_in_plain_pytorch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compute capability says 9.0, like a Hopper GPU's."""
    found = type("Properties", (), {"name": "MI300X", "major": 9, "minor": 0})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(NotCovered, match=r"does not cover MI300X: .*NVIDIA"):
        Gpu.of.__wrapped__(0)


@pytest.mark.parametrize(("name", "nvidia"), [("rocm", False), ("cuda", True)])
def test_a_platform_that_only_claims_to_be_cuda_is_called_by_its_name(name: str, nvidia: bool) -> None:
    class Platform:
        device_type, device_name = "cuda", name

        def is_cuda(self) -> bool:
            return nvidia

    assert devices.type_of(Platform()) == name


def test_a_part_that_vllm_makes_after_the_platform_was_asked_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Configuration:
        model_config = device_config = type("Any", (), {"device_type": "cpu"})()

        def __post_init__(self) -> None:
            self.kv_transfer_config = "made of another setting"

    looked_at = []
    monkeypatch.setattr(install, "check", lambda config: looked_at.append(config.kv_transfer_config))
    install._check_again(Configuration)
    Configuration().__post_init__()
    assert looked_at == ["made of another setting"]


class Arguments:
    """Stands for vLLM's of an engine."""

    def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> tuple[Any, bool]:
        return usage_context, headless


def test_an_engine_is_not_started_apart_from_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "ENGINE_ARGUMENTS", SimpleNamespace(get=lambda: Arguments))
    monkeypatch.setattr(Arguments, "create_engine_config", Arguments.create_engine_config)
    install._refuse_other_servers()
    assert Arguments().create_engine_config(usage_context="server") == ("server", False)
    with pytest.raises(NotCovered, match=r"without its server \(--headless\): .*; start server and engine by one vllm"):
        Arguments().create_engine_config(usage_context="server", headless=True)
    workers = Arguments()
    workers.node_rank, workers.nnodes = 1, 1
    with pytest.raises(NotCovered, match="without its server"):
        workers.create_engine_config(usage_context="server", headless=True)
    workers.nnodes = 2  # of an engine whose server is on the first node
    assert workers.create_engine_config(usage_context="server", headless=True) == ("server", True)
