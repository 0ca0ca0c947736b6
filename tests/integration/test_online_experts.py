"""vLLM's method for experts that become int8 while they are loaded: what ours makes of them, and what is refused."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.engine.quantised_experts import int8_matrix
from tests.integration.test_experts import routed
from tests.ops.moe.layers import EXPERTS, HIDDEN, INTERMEDIATE, Layer, layer, tokens, uniform
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.layers import fp8, online_experts, review
from vllm_batch_invariant.integration.layers.linear import as_loaded
from vllm_batch_invariant.integration.layers.online_experts import METHOD, OLDER_NAME, TABLE, OnlineExperts
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.ops import dispatch
from vllm_batch_invariant.ops.formats.eight import INT8

pytest.importorskip("vllm")
if not METHOD.is_there():
    pytest.skip("refused with this vLLM", allow_module_level=True)

DTYPES = torch.bfloat16, torch.float16
MOE = SimpleNamespace(w13_num_shards=2, has_bias=False, tp_size=1)


@pytest.fixture(params=["cpu", "cuda"], autouse=True)
def ours(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ours stand in vLLM's modules, those of a device, whatever stood there; no GPU is asked for certificates."""
    found = METHOD.get()
    of_vllm = next(kind for kind in found.__mro__ if kind.__module__ == METHOD.module().__name__)
    table = {key: of_vllm if kind is found else kind for key, kind in TABLE.get().items()}
    for point, value in ((METHOD, of_vllm), (OLDER_NAME, of_vllm), (TABLE, table)):
        monkeypatch.setattr(point.module(), point.attribute, value)
    monkeypatch.setattr("vllm_batch_invariant.integration.layers.experts.certify", lambda *of: None)
    getattr(online_experts, f"install_{request.param}")()
    return request.param


def load(held: Any, of: Layer) -> Any:
    """A layer of vLLM's with the weights of another, whose loading has ended."""
    for name, weight in {"w13_weight": of.gate_up, "w2_weight": of.down}.items():
        setattr(held, name, torch.nn.Parameter(weight.clone(), requires_grad=False))
    held.__dict__.pop(online_experts._DONE, None)
    held.quant_method.process_weights_after_loading(held)
    return held


def vllms(of: Layer) -> Any:
    method = METHOD.get()(moe=MOE)
    return routed(of, quant_method=method, num_experts=EXPERTS, local_num_experts=EXPERTS)


def matrices(of: Layer) -> Layer:
    """The layer of what another's experts stand for."""
    made = (torch.stack([int8_matrix(one) for one in weights]) for weights in (of.gate_up, of.down))
    return Layer(of.reduction, of.router, *made)


def other(of: Layer) -> Layer:
    """Experts with a row of zeros, and one that is too small for a scale."""
    gate_up, down = of.gate_up.flip(0) * 3, of.down.flip(0)
    gate_up[2, 3], down[1, 4] = 0, 0
    down[1, 4, 5] = 2.0**-133
    return Layer(of.reduction, of.router, gate_up, down)


def as_matrices(held: Any) -> list[torch.Tensor]:
    """Also where a CPU has only copies."""
    return [as_loaded(weight) for weight in (held.w13_weight, held.w2_weight)]


def rebound(held: torch.nn.Module, name: str, new: torch.Tensor) -> None:
    """As vLLM 0.33 replaces a parameter: the same one gets what is new."""
    if hasattr(held, name):
        getattr(held, name).data = new
    else:
        held.register_parameter(name, torch.nn.Parameter(new, requires_grad=False))


@pytest.mark.parametrize("replaces", [None, rebound], ids=["as the vLLM here replaces", "as 0.33 replaces"])
def test_a_layer_has_the_bits_of_the_matrices(
    ours: str, replaces: Callable[..., None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of weights that come again; and what is quantised is not quantised again."""
    if replaces:
        monkeypatch.setattr(METHOD.module(), "replace_parameter", replaces)
    held, x = vllms(layer()), tokens(9)
    for of in (layer(), other(layer())):
        load(held, of)
        right = matrices(of)
        for _ in range(2):
            assert_same_bits(as_matrices(held)[0], right.gate_up)
            assert_same_bits(as_matrices(held)[1], right.down)
            held.quant_method.process_weights_after_loading(held)
        assert [name for name, _ in held.named_parameters()] == ["w13_weight", "w2_weight"]
        if ours == "cpu":
            logits = uniform(x, of)
            assert_same_bits(held.quant_method.apply_monolithic(held, x, logits), right(x, logits))
            assert not torch.equal(right(x, logits), of(x, logits)), "what was loaded has other bits"
    assert held in fp8.quantised_here


def test_vllm_finds_ours_wherever_it_has_the_method() -> None:
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.layers.quantization.experts_int8 import ExpertsInt8Config
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    config = OnlineQuantizationConfig(resolve_quantization_config("int8_per_channel_weight_only", None))
    kind = patch_points.ROUTED_EXPERTS.get()
    for one in (config, ExpertsInt8Config()):
        of_layer = kind.__new__(kind)
        torch.nn.Module.__init__(of_layer)
        of_layer.moe_config = MOE
        of_layer.quant_method = one.get_quant_method(of_layer, "model.layers.0.mlp.experts")
        assert isinstance(of_layer.quant_method, OnlineExperts)
        assert of_layer.quant_method.is_monolithic
        assert review._of_layer(of_layer) is None
    others = [found for found in TABLE.get().values() if found is not METHOD.get()]
    assert len(others) == len(TABLE.get()) - 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_the_same_on_every_device(dtype: torch.dtype) -> None:
    """PyTorch multiplies by 1 / 127 on a GPU where it divides by 127 on a CPU: of every largest magnitude the scale is
    the same.
    """
    every = torch.arange(1 << 15, dtype=torch.int16).view(dtype)
    every = every[every.isfinite()]
    inverse = torch.tensor(1.0) / 127
    assert_same_bits((every.float() * inverse).to(dtype), every / 127)
    assert not torch.equal(every.float() * inverse, every.float() / 127), "in fp32 they differ"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(("name", "product"), [("gate_up", "w13"), ("down", "w2")])
def test_weights_that_are_no_numbers_are_refused(bad: float, name: str, product: str) -> None:
    of = layer()
    broken = {"gate_up": of.gate_up.clone(), "down": of.down.clone()}
    broken[name][3, 2, 1] = bad
    said = rf"{INT8.name} with scales: 1 of \d+ are NaN or infinite \({product} of model.layers.1.mlp.experts\)"
    with pytest.raises(NotCovered, match=said):
        load(vllms(of), Layer(of.reduction, of.router, **broken))


def test_codes_or_matrices_that_are_sent_are_refused() -> None:
    held = load(vllms(layer()), layer())
    for weight in held.parameters():
        with pytest.raises(
            NotCovered, match=r"codes for model.layers.1.mlp.experts, whose weights are quantised while"
        ):
            weight.weight_loader(weight, torch.zeros(1), "w1", expert_id=0, return_success=True)


@pytest.mark.parametrize("loaded", [0, 5])
def test_a_part_of_a_layer_is_refused(loaded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also none of it, of a model that copies its experts past vLLM's loaders; but for vLLM's dummy weights."""
    held, config = vllms(layer()), SimpleNamespace(load_config=SimpleNamespace(load_format="auto"))
    monkeypatch.setattr(patch_points.CURRENT_CONFIG.module(), patch_points.CURRENT_CONFIG.attribute, lambda: config)
    info = patch_points.RELOAD_STATE.get()(held)
    info.load_numel, info.load_numel_total = loaded, 9
    with pytest.raises(NotCovered, match=f"{loaded} of 9 elements of the experts of model.layers.1.mlp.experts"):
        load(held, layer())
    config.load_config.load_format = "dummy"
    if loaded == 0:
        load(held, layer())
    else:
        with pytest.raises(NotCovered):
            load(held, layer())


def test_exact_arithmetic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "arithmetic", lambda: "exact")
    with pytest.raises(NotCovered, match="quantised experts in exact arithmetic"):
        METHOD.get()(moe=MOE)


def test_weights_that_were_quantised_before_are_refused() -> None:
    held = vllms(layer())
    held.quant_method.requantization_source = object()
    with pytest.raises(NotCovered, match=r"experts of model.layers.1.mlp.experts that are quantised twice"):
        load(held, layer())


def test_what_is_loaded_waits_for_memory() -> None:
    method = METHOD.get()(moe=MOE)
    held = routed(quant_method=method, num_experts=EXPERTS, local_num_experts=EXPERTS)
    held.w13_weight = torch.nn.Parameter(torch.empty(EXPERTS, 2 * INTERMEDIATE, HIDDEN, device="meta"))
    method.process_weights_after_loading(held)
    assert method.reduction is None
