"""Which MLPs of vLLM's models activate in the launch that multiplies."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm_batch_invariant.integration.layers import activation, linear
from vllm_batch_invariant.integration.layers.activation import GATED_MLP
from vllm_batch_invariant.integration.reviews import patch_points, sources
from vllm_batch_invariant.integration.side_table import beside
from vllm_batch_invariant.ops.linear.spec import GATED, PRODUCT

MLPS = [patch_points.LLAMA_MLP, patch_points.QWEN2_MLP, patch_points.QWEN2_MOE_MLP]


class _Ours(torch.nn.Module):
    """Stands for the activation that is registered."""


def without_init(kind: type) -> Any:
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    return made


class _Mlp(SimpleNamespace):
    """Has the forward method of :mod:`~vllm_batch_invariant.integration.layers.activation`."""

    forward = GATED_MLP.fused(pytest.fail)


class _WithAnother(_Mlp):
    """Derived from it, with a forward method of its own."""

    def forward(self, x: Any) -> Any:
        raise NotImplementedError


def mlp(changes: dict[str, Any]) -> SimpleNamespace:
    """What is asked of an MLP, with other values for some attributes."""
    method = patch_points.LINEAR_METHOD.get()
    first = without_init(patch_points.MERGED_COLUMN_PARALLEL.get())
    first.quant_method, first.bias, first.gather_output = method.__new__(method), None, False
    first.output_sizes = [64, 64]
    made = _Mlp()
    made.gate_up_proj, made.act_fn = first, _Ours()
    made.down_proj = SimpleNamespace(quant_method=method.__new__(method))
    for name, value in changes.items():
        owner, _, attribute = name.rpartition(".")
        setattr(getattr(made, owner) if owner else made, attribute, value)
    return made


CHANGES = {
    "another activation": {"act_fn": torch.nn.SiLU()},
    "a bias": {"gate_up_proj.bias": torch.zeros(128)},
    "a quantised product": {"gate_up_proj.quant_method": object()},
    "a quantised layer behind it, which may want a quantised activation": {"down_proj.quant_method": object()},
    "gathered results": {"gate_up_proj.gather_output": True},
    "halves of other lengths": {"gate_up_proj.output_sizes": [64, 32]},
    "a gate behind it": {"expert_gate": torch.nn.Linear(1, 1)},
    "three products": {"gate_up_proj.output_sizes": [64, 64, 64]},
    "another layer": {
        "gate_up_proj": SimpleNamespace(quant_method=None, bias=None, gather_output=False, output_sizes=[1, 1])
    },
}


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points.CUSTOM_OP.module(), "op_registry_oot", {"SiluAndMul": _Ours})


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("change", CHANGES)
def test_an_mlp_that_differs_keeps_two_operations(change: str) -> None:
    assert activation._fits(mlp({}))
    assert not activation._fits(mlp(CHANGES[change]))
    assert GATED_MLP.serves(_Mlp)
    assert not GATED_MLP.serves(_WithAnother)


@pytest.mark.parametrize("layer", MLPS, ids=lambda layer: layer.attribute)
def test_the_forward_method_of_this_vllm_is_the_one_known(layer: patch_points.PatchPoint) -> None:
    assert sources.is_read("forwards", layer.get().forward)


@pytest.mark.usefixtures("registered")
def test_a_fitting_mlp_says_what_its_weight_is_for_and_multiplies_with_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in MLPS:
        monkeypatch.setattr(layer.get(), "__init__", lambda self, made: self.__dict__.update(vars(made)))
        monkeypatch.setattr(layer.get(), "forward", layer.get().forward)
    for _ in range(2):
        GATED_MLP.install()
    monkeypatch.setattr(linear.torch_op, "linear", lambda *given: given)
    x = SimpleNamespace(is_cuda=True)
    for layer in MLPS:
        kind, parts = layer.get(), mlp({})
        parts.gate_up_proj.weight, parts.down_proj = "weight", _Down(parts.down_proj.quant_method)
        made = without_init(kind)
        kind.__init__(made, parts)
        assert beside(made.gate_up_proj).activation is _Ours
        beside(made.gate_up_proj).expected = SimpleNamespace(spec=GATED)
        assert kind.forward(made, x) == ("down", (x, "weight", None, GATED.name, []))
        derived = type("Derived", (kind,), {"forward": _WithAnother.forward})
        for other, parts in ((without_init(kind), mlp(CHANGES["a bias"])), (without_init(derived), mlp({}))):
            kind.__init__(other, parts)
            assert beside(other.gate_up_proj).activation is None


class _Down:
    def __init__(self, quant_method: Any) -> None:
        self.quant_method = quant_method

    def __call__(self, x: Any) -> tuple[Any, None]:
        return ("down", x), None


def test_an_mlp_that_is_watched_or_on_another_device_or_not_marked_has_its_own_method() -> None:
    apart: list[Any] = []
    forward = GATED_MLP.fused(lambda _, x: apart.append(x))
    watched, plain, unmarked, changed = (mlp({}) for _ in range(4))
    for made in (watched, plain, changed):
        beside(made.gate_up_proj).activation = _Ours
    watched.act_fn.register_forward_hook(lambda *_: None)
    changed.act_fn = torch.nn.GELU()  # by a class that is derived from vLLM's
    forward(plain, SimpleNamespace(is_cuda=False))
    for made in (watched, unmarked, changed):
        forward(made, SimpleNamespace(is_cuda=True))
    assert len(apart) == 4


def test_a_marked_layer_is_prepared_for_its_activation() -> None:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=300, max_num_seqs=5),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2]),
        num_speculative_tokens=0,
    )
    layer = SimpleNamespace(bias=None)
    assert linear._expected(layer, config) == (300, PRODUCT, (1, 2), None, True)
    beside(layer).activation = _Ours
    assert linear._expected(layer, config) == (300, GATED, (1, 2), None, True)
