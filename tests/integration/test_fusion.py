"""Which devices fuse what, when a worker does it, and which forward methods are replaced."""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm_batch_invariant.envs import ARITHMETIC
from vllm_batch_invariant.integration import devices
from vllm_batch_invariant.integration.devices import cuda, record
from vllm_batch_invariant.integration.layers import activation, code_fusion, norm_fusion, norm_rotary
from vllm_batch_invariant.integration.layers.fusion import ForwardFusion, Fusion
from vllm_batch_invariant.integration.reviews import sources
from vllm_batch_invariant.integration.side_table import beside


class Noting(Fusion):
    """Notes what is called, with what."""

    def __init__(self, seen: list[Any]) -> None:
        self._seen = seen

    def install(self) -> None:
        self._seen.append("installed")

    def fuse_in(self, worker: Any) -> None:
        self._seen.append(worker)


def test_a_gpu_fuses_floats_and_nothing_else_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = (
        activation.GATED_MLP,
        norm_rotary.HEAD_NORMS,
        norm_rotary.ROTATIONS,
        norm_rotary.ROTATIONS_BEHIND_STATES,
        code_fusion.WRITING_CODES,
        norm_fusion.ADDING_NORMS,
    )
    assert [devices.get(device).fusions for device in ("cuda", "cpu")] == [fused, ()]
    monkeypatch.setenv(ARITHMETIC.name, "exact")
    assert [devices.get(device).fusions for device in ("cuda", "cpu")] == [(), ()]


def test_a_worker_fuses_what_its_device_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    parts = (record.sampler, record.generators, record.request_state, record.norm, record.mrope, record.pooling)
    for module in parts:
        monkeypatch.setattr(module, "install", lambda *_: None)
    monkeypatch.setattr(record.latent, "prepare", lambda _: None)
    monkeypatch.setattr(record.weights, "watch", lambda _: None)
    monkeypatch.setattr(record.weights, "watch_loading", lambda *_: seen.append("watched"))
    monkeypatch.setattr(record.review, "check", lambda _: seen.append("reviewed"))
    monkeypatch.setattr(record.loading, "hook", lambda worker, before, after: seen.append(after))
    device = record.VllmDevice(**vars(replace(devices.get("cpu"), fusions=(Noting(seen),))))
    device.install_worker()
    installed, after_loading = seen
    assert installed == "installed"
    config = SimpleNamespace(model_config=SimpleNamespace(quantization=None))
    worker = SimpleNamespace(get_model=lambda: None, vllm_config=config)
    after_loading(worker)
    assert seen[2:] == ["reviewed", "watched", worker]


@pytest.mark.parametrize("arithmetic", ["float", "exact"])
def test_products_are_timed_in_a_row_where_floats_are_added(arithmetic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ARITHMETIC.name, arithmetic)
    monkeypatch.setattr(record.VllmDevice, "after_loading", lambda *_: None)
    monkeypatch.setattr(cuda, "settle", (settled := []).append)
    worker = SimpleNamespace(get_model=torch.nn.Module, device="a GPU")
    devices.get("cuda").after_loading(worker)
    assert settled == (["a GPU"] if arithmetic == "float" else [])


def fusion(kind: type) -> ForwardFusion:
    """Doubles what a class gives, unless it is given nothing."""
    return ForwardFusion(
        kinds=(SimpleNamespace(get=lambda: kind),),
        parts=("first", "last"),
        apart="stays apart",
        fits=lambda layer, parts, x: x is not None,
        forward=lambda layer, parts, x: (layer, *parts, 2 * x),
        is_built=lambda layer: setattr(layer, "built", True),
    )


@pytest.fixture
def kind() -> type:
    class Layer:
        def __init__(self) -> None:
            self.first, self.last = torch.nn.Identity(), torch.nn.Identity()

        def forward(self, x: int | None) -> Any:
            return "apart", x

    return Layer


def test_a_method_that_was_read_is_replaced_once(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = kind.forward
    monkeypatch.setattr(sources, "is_read", lambda use, method: (use, method) == ("forwards", apart))
    made = fusion(kind)
    made.install()
    forward = kind.forward
    made.install()
    assert kind.forward is forward is not apart
    layer = kind()
    assert layer.built
    assert layer.forward(x=2) == layer.forward(2) == (layer, layer.first, layer.last, 4)
    assert layer.forward(None) == ("apart", None)
    handle = layer.last.register_forward_hook(lambda *_: None)
    assert layer.forward(2) == ("apart", 2), "somebody looks at a part"
    handle.remove()
    own = type("Own", (kind,), {"forward": apart})
    assert made.serves(kind)
    assert not made.serves(own)
    assert not hasattr(own(), "built")


def test_a_method_that_nobody_has_read_stays_and_the_log_says_so(kind: type, caplog: pytest.LogCaptureFixture) -> None:
    apart = kind.forward
    with caplog.at_level(logging.INFO, "vllm.batch_invariant"):
        fusion(kind).install()
    assert kind.forward is apart
    assert caplog.messages == ["Layer is not the one known here: stays apart."]


def test_an_object_has_one_entry_and_others_have_their_own() -> None:
    layer, other = torch.nn.Linear(1, 1), SimpleNamespace()
    beside(layer).resting[0] = "generator"
    assert beside(layer) is beside(layer)
    assert beside(layer).resting == {0: "generator"}
    assert beside(other).resting == {}
    assert {name for name in vars(layer) if name.startswith("_batch_invariant")} == {"_batch_invariant"}
