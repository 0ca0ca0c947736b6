"""vLLM's methods for quantised experts: what ours make of each layout, and what is refused."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.engine.quantised_experts import Integers, awq, compressed_tensors, gptq, words
from tests.fakes.workers import be_worker
from tests.integration.test_experts import routed
from tests.ops.moe.layers import EXPERTS, HIDDEN, INTERMEDIATE, Layer, layer, tokens, uniform
from tests.quantised_checkpoints import FORMATS
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.layers import quantised_experts
from vllm_batch_invariant.integration.layers.linear import restore_weights
from vllm_batch_invariant.integration.layers.quantised_experts import LAYOUTS, QuantisedExperts
from vllm_batch_invariant.integration.reviews import schemes
from vllm_batch_invariant.ops import dispatch
from vllm_batch_invariant.ops.moe import Experts, cpu

pytest.importorskip("vllm")

BY_NAME = {layout.method.attribute: layout for layout in LAYOUTS if layout.method.is_there()}
CHOSEN = quantised_experts._CHOSEN
GROUP = 64
PRODUCTS = {"w13": "gate_up", "w2": "down"}


@pytest.fixture(params=["cpu", "cuda"], autouse=True)
def ours(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Ours stand in vLLM's modules, those of a device."""
    for layout in BY_NAME.values():
        method = layout.method.get()
        if issubclass(method, quantised_experts.QuantisedExperts):  # of a test before
            method = method.__bases__[1]
        monkeypatch.setattr(layout.method.module(), layout.method.attribute, method)
        for config in vars(layout.method.module()).values():
            if getattr(getattr(config, CHOSEN, None), "__name__", "") == method.__name__:
                monkeypatch.setattr(config, CHOSEN, method)
    getattr(quantised_experts, f"install_{request.param}")()
    return request.param


def made(name: str, *arguments: Any) -> Any:
    """A method as vLLM's configuration makes it."""
    return BY_NAME[name].method.get()(*arguments)


def moe_config() -> Any:
    parallel = SimpleNamespace(use_ep=False, ep_size=1)
    of_method = {"w13_num_shards": 2, "is_act_and_mul": True, "moe_parallel_config": parallel}
    return SimpleNamespace(max_capture_size=0, has_bias=False, **of_method)


def quant_config(**fields: Any) -> Any:
    kind = SimpleNamespace(size_bits=4)
    base = {"weight_bits": 4, "group_size": GROUP, "quant_type": kind, "is_sym": True, "pack_factor": 8}
    return SimpleNamespace(**base | fields)


def weight_quant(**fields: Any) -> Any:
    base = {"symmetric": True, "num_bits": 4, "strategy": "group", "group_size": GROUP, "actorder": None}
    return SimpleNamespace(**base | fields)


METHODS: dict[str, tuple[str, bool, Any]] = {
    "compressed-tensors": ("CompressedTensorsWNA16MoEMethod", False, compressed_tensors),
    "compressed-tensors with zeros": ("CompressedTensorsWNA16MoEMethod", True, compressed_tensors),
    "GPTQ": ("AutoGPTQMoEMethod", False, gptq),
    "AWQ": ("AutoAWQMoEMethod", True, awq),
    "bytes": ("MoeWNA16Method", False, None),
    "bytes with zeros": ("MoeWNA16Method", True, None),
    "NVFP4 of ModelOpt": ("ModelOptNvFp4FusedMoE", False, "nvfp4 of ModelOpt"),
    "NVFP4 of compressed-tensors": ("CompressedTensorsW4A4Nvfp4MoEMethod", False, "nvfp4"),
}
NVFP4 = [kind for kind in METHODS if kind.startswith("NVFP4")]
_OF_MATRIX = "weight_scale_2", "weight_global_scale"


class Nvfp4:
    """Matrices [N, K] in NVFP4, each with a scale of its own, as tensors of a checkpoint; behind each other they are
    ``matrix``.
    """

    def __init__(self, kind: str, *parts: torch.Tensor) -> None:
        made = [FORMATS[METHODS[kind][2]].layer(part) for part in parts]
        self.matrix = torch.cat([matrix for _, matrix in made])
        self.tensors = {
            name: torch.stack([tensors[name].reshape(()) for tensors, _ in made]).squeeze()
            if name in _OF_MATRIX
            else torch.cat([tensors[name] for tensors, _ in made])
            for name in made[0][0]
        }


def method_of(kind: str) -> Any:
    name, zeros, _ = METHODS[kind]
    if kind in NVFP4:
        config = SimpleNamespace(quant_method="NVFP4", moe_activation_override=None, group_size=16)
        return made(name, moe_config()) if name.startswith("Compressed") else made(name, config, moe_config())
    if name.startswith("Compressed"):
        return made(name, weight_quant(symmetric=not zeros), None, moe_config())
    return made(name, quant_config(zero_point=zeros, has_zp=zeros, linear_quant_method="awq"), moe_config())


def stored(kind: str, product: str, matrix: torch.Tensor) -> Any:
    """A matrix of a product in a kind, near the given one, and what a checkpoint has of it."""
    if kind not in NVFP4:
        return Integers(matrix, GROUP, METHODS[kind][1])
    return Nvfp4(kind, *(matrix.chunk(2) if product == "w13" else (matrix,)))


def parameters(kind: str, integers: list[Any]) -> dict[str, torch.Tensor]:
    """What vLLM's loader fills of one product, by the end of its name."""
    if kind in NVFP4:
        return {name: torch.stack([one.tensors[name] for one in integers]) for name in integers[0].tensors}
    _, zeros, write = METHODS[kind]
    if write is not None:
        of_each = [write("of", one) for one in integers]
        return {name.removeprefix("of."): torch.stack([one[name] for one in of_each]) for name in of_each[0]}
    found = {
        "qweight": torch.stack([words(one.codes).view(torch.uint8) for one in integers]),
        "scales": torch.stack([one.scales for one in integers]),
    }
    if zeros:
        low_and_high = (one.zeros.unflatten(0, (-1, 2)) for one in integers)
        found["qzeros"] = torch.stack([(pair[:, 0] | pair[:, 1] << 4).to(torch.uint8) for pair in low_and_high])
    return found


def filled(kind: str, of: Layer) -> tuple[Any, Layer]:
    """A layer of vLLM's with codes of a layer's weights, and the layer of the matrices that they stand for."""
    quantised = {
        product: [stored(kind, product, matrix) for matrix in getattr(of, name)] for product, name in PRODUCTS.items()
    }
    made = routed(of, params_dtype=torch.bfloat16, moe_config=moe_config(), group_size=GROUP, _loaded_expert_biases=())
    del made.w13_weight, made.w2_weight
    for product, integers in quantised.items():
        for name, tensor in parameters(kind, integers).items():
            if tensor.dtype == torch.float16:
                tensor = tensor.bfloat16()  # as vLLM loads it
            if name not in ("weight_shape", "g_idx"):
                setattr(made, f"{product}_{name}", torch.nn.Parameter(tensor, requires_grad=False))
    matrices = (torch.stack([one.matrix for one in integers]) for integers in quantised.values())
    return made, Layer(of.reduction, of.router, *matrices)


def result(method: Any, of: Any, x: torch.Tensor, logits: torch.Tensor, device: str) -> torch.Tensor:
    """Of a CPU, or what a CPU makes of the weights that a GPU is given."""
    if device == "cpu":
        return method.apply_monolithic(of, x, logits)
    weights, ids = cpu.route(logits, method.reduction, None)
    return cpu.moe(x, weights, ids, Experts(*method.weights_of(of), method.reduction))


def addresses(method: Any, of: Any, device: str) -> list[int]:
    """Of what a GPU reads."""
    return [one.data_ptr() for part in method.weights_of(of) for one in part.tensors] if device == "cuda" else []


@pytest.fixture(autouse=True)
def uncertified(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a GPU would be certified for."""
    asked: list[Any] = []
    monkeypatch.setattr("vllm_batch_invariant.integration.layers.experts.certify", lambda *of: asked.append(of))
    return asked


@pytest.mark.parametrize("kind", METHODS)
def test_a_layer_has_the_bits_of_the_matrices(kind: str, ours: str, uncertified: list[Any]) -> None:
    """Also after a trainer has written others, where the checkpoint's parameters lie."""
    x, method = tokens(9), method_of(kind)
    for seed in (0, 1):
        of = (
            layer()
            if seed == 0
            else Layer(layer().reduction, layer().router, layer().gate_up * 2, layer().down.flip(0))
        )
        new, right = filled(kind, of)
        logits = uniform(x, of)
        if seed == 0:
            held = new
            method.process_weights_after_loading(held)
            kept = addresses(method, held, ours)
        else:
            for name, parameter in new.named_parameters():
                getattr(held, name).data.copy_(parameter)
            restore_weights()
            assert addresses(method, held, ours) == kept
        assert_same_bits(result(method, held, x, logits, ours), right(x, logits))
    names = {name for name, _ in held.named_parameters()}
    assert names == {name for name, _ in new.named_parameters()}, "the checkpoint's, and no others"
    if ours == "cuda":
        assert [of[:2] for of in uncertified] == [(2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
        form = "nvfp4-steps" if kind in NVFP4 else "w4a16-g64" + "-zp" * METHODS[kind][1]
        assert {of[5].name for of in uncertified} == {form}


@pytest.mark.parametrize("kind", NVFP4)
def test_gate_and_up_have_the_scale_of_their_own_matrix(kind: str, ours: str) -> None:
    """That of gate for both, as vLLM takes it, and another code are other matrices."""
    x, of = tokens(9), layer()
    of.gate_up[:, INTERMEDIATE:] *= 3
    logits = uniform(x, of)
    held, right = filled(kind, of)
    scales = next(getattr(held, f"w13_{name}") for name in _OF_MATRIX if hasattr(held, f"w13_{name}"))
    assert bool((scales[:, 0] != scales[:, 1]).all())
    method, wanted = method_of(kind), right(x, logits)
    method.process_weights_after_loading(held)
    assert_same_bits(result(method, held, x, logits, ours), wanted)
    codes, own = getattr(held, method.names[0]).data, scales.data.clone()
    scales.data[:, 1] = scales.data[:, 0]
    restore_weights()
    assert not torch.equal(result(method, held, x, logits, ours), wanted)
    scales.data.copy_(own)
    codes[:, INTERMEDIATE + 1, 2] ^= 0x10
    restore_weights()
    assert not torch.equal(result(method, held, x, logits, ours), wanted)
    codes[:, INTERMEDIATE + 1, 2] ^= 0x10
    restore_weights()
    assert_same_bits(result(method, held, x, logits, ours), wanted)


@pytest.mark.parametrize("kind", NVFP4)
def test_scales_that_were_not_loaded_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    be_worker(monkeypatch, 0, 1)
    loaded = dict(filled(kind, layer())[0].named_parameters())
    for left_out in ("w2_weight_scale", next(name for name in loaded if name.endswith(_OF_MATRIX))):
        method = method_of(kind)
        method.moe = SimpleNamespace(is_act_and_mul=True)
        method.quant_config = SimpleNamespace(group_size=16, is_checkpoint_nvfp4_serialized=True)
        new = routed(params_dtype=torch.bfloat16, moe_config=moe_config(), _loaded_expert_biases=())
        del new.w13_weight, new.w2_weight
        sizes = EXPERTS, HIDDEN, INTERMEDIATE
        method.create_weights(new, *sizes, params_dtype=torch.bfloat16, weight_loader=lambda *_: None)
        for name, tensor in loaded.items():
            if name != left_out:
                getattr(new, name).data.copy_(tensor)
        with pytest.raises(NotCovered, match=r"nvfp4 with .*scales: \d+ of \d+ are NaN or infinite"):
            method.process_weights_after_loading(new)


def test_fp4_that_vllm_multiplies_with_fp4_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes, "device_multiplies_fp4", lambda: True)
    for kind in NVFP4:
        with pytest.raises(NotCovered, match="experts in FP4 on a GPU that multiplies FP4"):
            method_of(kind)
    method = made("CompressedTensorsW4A4Nvfp4MoEMethod", moe_config(), None, True)
    assert method.use_a16


def test_rows_of_gate_and_up_in_turn_are_refused_in_nvfp4() -> None:
    held, _ = filled(NVFP4[0], layer())
    held.activation = SimpleNamespace(value="swigluoai")
    with pytest.raises(NotCovered, match="in NVFP4 with the activation swigluoai"):
        method_of(NVFP4[0]).process_weights_after_loading(held)


def test_a_gpu_reads_codes_where_they_lie(ours: str) -> None:
    if ours == "cpu":
        pytest.skip("a CPU has copies")
    for kind in ("compressed-tensors", "GPTQ", "bytes"):
        held, _ = filled(kind, layer())
        method = method_of(kind)
        method.process_weights_after_loading(held)
        lie = {parameter.untyped_storage().data_ptr() for parameter in held.parameters()}
        for part in method.weights_of(held):
            assert all(tensor.is_contiguous() for tensor in part.tensors)
            assert {tensor.untyped_storage().data_ptr() for tensor in part.tensors} <= lie


def test_vllm_finds_ours_under_the_names_of_its_own() -> None:
    for name, layout in BY_NAME.items():
        found = layout.method.get()
        assert issubclass(found, QuantisedExperts)
        configs = [getattr(config, CHOSEN, None) for config in vars(layout.method.module()).values()]
        assert found in configs or not name.startswith("ModelOpt")
        assert found.__name__ == name
        assert found.is_monolithic
    quantised_experts.install_cpu()
    assert all(layout.method.get().__mro__.count(QuantisedExperts) == 1 for layout in BY_NAME.values())


REFUSED = {
    "an order of their own": (
        "CompressedTensorsWNA16MoEMethod",
        (weight_quant(actorder="group"), None),
        "actorder group",
    ),
    "AWQ without zeros": ("AutoAWQMoEMethod", (quant_config(zero_point=False),), "of AWQ without zero points"),
    "GPTQ with zeros": (
        "MoeWNA16Method",
        (quant_config(has_zp=True, linear_quant_method="gptq"),),
        "of GPTQ with zero points",
    ),
}


@pytest.mark.parametrize(("name", "arguments", "said"), REFUSED.values(), ids=REFUSED)
def test_what_no_format_stores_is_refused_in_one_line(name: str, arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(NotCovered, match=said) as refused:
        made(name, *arguments, moe_config())
    assert "\n" not in str(refused.value)


def given_in_fp8(name: str, *arguments: Any) -> tuple[Any, Any]:
    """A method of experts in FP8 by matrices whose input scales are given, and a layer with codes and scales."""
    method, of = made(name, *arguments), layer()
    held = routed(of, params_dtype=torch.bfloat16, moe_config=moe_config())
    del held.w13_weight, held.w2_weight
    sizes = HIDDEN, INTERMEDIATE
    method.create_weights(held, EXPERTS, *sizes, params_dtype=torch.bfloat16, weight_loader=lambda param, loaded: None)
    draw = torch.Generator().manual_seed(3)
    for parameter in held.parameters():
        assert parameter.isnan().all(), "what is never loaded shows"
        parameter.data.copy_(torch.rand(parameter.shape, generator=draw) + 0.5)
    return method, held


def test_modelopts_experts_have_the_bits_of_vllms_format_of_the_same_codes_and_scales(
    ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gate and its up keep theirs, and its configuration makes them of one algorithm alone."""
    from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config

    if ours == "cuda":
        pytest.skip("a CPU has no products of a GPU's")
    be_worker(monkeypatch, 0, 1)
    configs = {name: ModelOptFp8Config(name, True, None, []) for name in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")}
    [chosen] = {config.FusedMoEMethodCls for config in configs.values()}
    assert chosen is BY_NAME["ModelOptFp8MoEMethod"].method.get()
    with pytest.raises(NotCovered, match="experts in ModelOpt's FP8_PER_CHANNEL_PER_TOKEN"):
        chosen(configs["FP8_PER_CHANNEL_PER_TOKEN"], moe_config())
    own = SimpleNamespace(weight_block_size=None, activation_scheme="static", is_scale_e8m0=False)
    found = {}
    x, logits = tokens(9), uniform(tokens(9), layer())
    for name, arguments in {
        "ModelOptFp8MoEMethod": (configs["FP8"], moe_config()),
        "Fp8MoEMethod": (own, SimpleNamespace(moe_config=moe_config())),
    }.items():
        method, held = given_in_fp8(name, *arguments)
        method.process_weights_after_loading(held)
        found[name] = method.apply_monolithic(held, x, logits)
        held.w13_weight_scale.data[:, 1] = held.w13_weight_scale.data[:, 0]
        assert not torch.equal(method.apply_monolithic(held, x, logits), found[name])
        held.w13_input_scale.data[2] = 0
        with pytest.raises(NotCovered, match=r"mlp.experts whose w13_input_scale is missing, negative or not finite"):
            method.process_weights_after_loading(held)
    assert_same_bits(*found.values())


def test_exact_arithmetic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "arithmetic", lambda: "exact")
    with pytest.raises(NotCovered, match="quantised experts in exact arithmetic"):
        made("GptOssMxfp4MoEMethod", moe_config())


def test_a_part_of_a_group_is_refused() -> None:
    method = made("GptOssMxfp4MoEMethod", moe_config())
    with pytest.raises(NotCovered, match=r"720 columns of a worker of the experts of model.layers.1.*32 neighbours"):
        method.create_weights(routed(), EXPERTS, 2880, 720)


def test_scales_that_are_no_numbers_are_refused() -> None:
    held, _ = filled("compressed-tensors", layer())
    held.w2_weight_scale.data[3, 2, 1] = torch.nan
    with pytest.raises(NotCovered, match=r"scales: 1 of \d+ are NaN or infinite \(w2 of model.layers.1.mlp.experts\)"):
        method_of("compressed-tensors").process_weights_after_loading(held)


def test_eight_bits_of_activations_are_refused() -> None:
    held, _ = filled("GPTQ", layer())
    method = method_of("GPTQ")
    method.input_dtype = torch.int8
    with pytest.raises(NotCovered, match="unset VLLM_MARLIN_INPUT_DTYPE"):
        method.process_weights_after_loading(held)
