"""Which kinds of layers are known: what dense models and mixtures of experts are made of is, and nothing else."""

import inspect
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration import layers, patch_points
from vllm_batch_invariant.integration.attention import FixedSplitAttention

MODELS = "vllm.model_executor.models"
LAYERS = "vllm.model_executor.layers"
DENSE = """
    apertus bloom chatglm commandr exaone exaone4 falcon gemma gemma2 gemma3 gpt2 gpt_j granite hyperclovax
    internlm2 llama mimo mistral nemotron nemotron_nas opt orion phi3 plamo3 qwen2 qwen3 rnj1 solar stablelm
    step1 telechat2 teleflm
"""
EXPERTS = "glm4_moe gpt_oss granitemoe mixtral olmoe qwen2_moe qwen3_moe"


def named(name: str) -> type:
    module, _, kind = name.rpartition(".")
    return getattr(import_module(module), kind)


def bare(kind: type, **attributes: Any) -> torch.nn.Module:
    """A module of a class, of which only the class and some attributes are there."""
    module = torch.nn.Module.__new__(kind)
    torch.nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def of_a_model(name: str, *bases: type, **members: Any) -> type:
    """A class as vLLM's file of a later model might have it."""
    return type(name, bases or (torch.nn.Module,), {"__module__": f"{MODELS}.later", **members})


def written_in_a_model(source: str, name: str, **known: Any) -> Callable[..., Any]:
    """A function of such a file."""
    namespace = {"__name__": f"{MODELS}.later", "torch": torch, **known}
    exec(source, namespace)
    return namespace[name]


@pytest.mark.parametrize("model", [*DENSE.split(), *EXPERTS.split()])
def test_the_classes_of_a_model_are_known(model: str) -> None:
    file = import_module(f"{MODELS}.{model}")
    kinds = [kind for kind in vars(file).values() if inspect.isclass(kind) and issubclass(kind, torch.nn.Module)]
    own = [kind for kind in kinds if kind.__module__ == file.__name__ and not layers._is_known(kind)]
    assert own
    assert {kind.__name__: layers.of_model_class(kind) for kind in own if layers.of_model_class(kind)} == {}


@pytest.mark.parametrize(
    "kind",
    [
        torch.nn.Conv1d,
        torch.nn.LSTM,
        torch.nn.MultiheadAttention,
        f"{LAYERS}.conv.Conv2dLayer",
        f"{LAYERS}.mamba.mamba_mixer2.MambaMixer2",
        f"{LAYERS}.mamba.short_conv.ShortConv",
        f"{LAYERS}.attention.MLAAttention",
        f"{LAYERS}.attention.CrossAttention",
        f"{LAYERS}.attention.EncoderOnlyAttention",
        f"{LAYERS}.attention.ChunkedLocalAttention",
        f"{LAYERS}.layernorm.RMSNorm",
        f"{LAYERS}.layernorm.GemmaRMSNorm",
        f"{LAYERS}.layernorm.RMSNormGated",
        f"{LAYERS}.activation.GeluAndMulSparse",
        f"{LAYERS}.rotary_embedding.MRotaryEmbedding",
        f"{MODELS}.dbrx.DbrxExperts",
        f"{MODELS}.qwen3_next.Qwen3NextSparseMoeBlock",
        f"{MODELS}.deepseek_v2.Indexer",
    ],
)
def test_other_kinds_are_refused(kind: type | str) -> None:
    kind = named(kind) if isinstance(kind, str) else kind
    model = torch.nn.ModuleList([torch.nn.Identity(), bare(kind)])
    with pytest.raises(NotCovered, match=rf"the layer 1 \({kind.__module__}\.{kind.__qualname__}\): ") as refused:
        layers.check(model)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["RowParallelLinear", "QKVParallelLinear"])
def test_a_linear_layer_is_known_unless_it_is_quantised(kind: str) -> None:
    linear = named(f"{LAYERS}.linear.{kind}")
    layers.check(bare(linear, quant_method=torch.nn.Module.__new__(patch_points.LINEAR_METHOD.get())))
    quantised = type("Fp8LinearMethod", (patch_points.LINEAR_METHOD.get(),), {})
    with pytest.raises(NotCovered, match="its matmuls are computed by Fp8LinearMethod"):
        layers.check(bare(linear, quant_method=object.__new__(quantised)))


def test_attention_is_known_where_ours_serves_it() -> None:
    attention, ours = named(f"{LAYERS}.attention.Attention"), object.__new__(FixedSplitAttention)
    layers.check(bare(attention, impl=ours, head_size=64, head_size_v=64))
    with pytest.raises(NotCovered, match="its kernels are not ours"):
        layers.check(bare(attention, impl=SimpleNamespace(), head_size=64))
    with pytest.raises(NotCovered, match="its values have another size than its keys"):
        layers.check(bare(attention, impl=ours, head_size=64, head_size_v=32))


def test_a_class_of_a_model_that_puts_known_layers_together_is_known() -> None:
    forward = written_in_a_model("def forward(self, x):\n    return torch.nn.functional.silu(x)", "forward")
    block = bare(of_a_model("LaterBlock", forward=forward))
    block.add_module("projection", torch.nn.Linear(2, 2))
    block.register_buffer("inv_freq", torch.ones(2))
    layers.check(block)


def test_a_class_of_a_model_may_keep_the_sinks_that_its_attention_reads_and_no_others() -> None:
    sinks, ours = torch.nn.Parameter(torch.ones(2)), object.__new__(FixedSplitAttention)
    ours.sinks = sinks
    block = bare(of_a_model("LaterAttention"))
    block.add_module("attn", bare(named(f"{LAYERS}.attention.Attention"), impl=ours, head_size=64, head_size_v=64))
    block.sinks = sinks
    layers.check(block)
    block.sinks = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(NotCovered, match=r"LaterAttention\): it keeps weights of its own \(sinks\)"):
        layers.check(block)


def test_a_class_of_a_model_with_weights_of_its_own_is_refused() -> None:
    block = bare(of_a_model("LaterMixer"))
    block.decay = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(NotCovered, match=r"LaterMixer\): it keeps weights of its own \(decay\)"):
        layers.check(block)


class Launched:
    """Stands for a kernel."""

    __module__ = "triton.runtime.jit"


def launched() -> None:
    """Stands for what launches one."""


launched.__module__ = "vllm.v1.attention.ops.later"


@pytest.mark.parametrize(
    ("source", "called"),
    [
        ("def forward(self, x):\n    return kernel[(1,)](x)", "kernel"),
        ("def forward(self, x):\n    return [launch(row) for row in x]", "launch"),
        ("def forward(self, x):\n    return torch.ops.vllm.later(x)", "torch.ops"),
        ("def forward(self, x):\n    return torch.nn.functional.conv1d(x, x)", "conv1d"),
    ],
)
def test_a_class_of_a_model_that_calls_a_kernel_itself_is_refused(source: str, called: str) -> None:
    forward = written_in_a_model(source, "forward", kernel=Launched(), launch=launched)
    with pytest.raises(NotCovered, match=f"it calls {called} itself"):
        layers.check(bare(of_a_model("LaterBlock", forward=forward)))
    with pytest.raises(NotCovered, match=f"it calls {called} itself"):
        layers.check(bare(of_a_model("Inherits", of_a_model("LaterBlock", forward=forward))))


def test_a_class_of_a_model_that_changes_a_layer_is_refused() -> None:
    kind = of_a_model("LaterLinear", named(f"{LAYERS}.linear.RowParallelLinear"))
    with pytest.raises(NotCovered, match="it is a RowParallelLinear of its own"):
        layers.check(bare(kind))


def test_an_encoder_is_refused_unless_vllm_has_not_built_it() -> None:
    model = bare(of_a_model("LaterForConditionalGeneration", _tower_model_names=["vision.tower"]))
    model.vision, model.text = torch.nn.ModuleDict({"tower": torch.nn.Identity()}), torch.nn.Identity()
    with pytest.raises(NotCovered, match=r"the encoder vision\.tower: .*--language-model-only"):
        layers.check(model)
    model.vision["tower"] = patch_points.MISSING_STAGE.get()("image_tower", torch.nn.Conv2d(1, 1, 1, device="meta"))
    layers.check(model)
    assert list(model.parameters()) == []


def test_a_model_from_elsewhere_is_refused() -> None:
    kind = type("Model", (torch.nn.Module,), {"__module__": "somebody.model"})
    with pytest.raises(NotCovered, match=r"the model itself \(somebody\.model\.Model\): this version"):
        layers.check(bare(kind))


def test_a_worker_looks_at_each_model_that_it_has_loaded() -> None:
    class Worker:
        def load_model(self, *, load_dummy_weights: bool = False) -> None:
            self.model = torch.nn.GRU(2, 2)

        def get_model(self) -> torch.nn.Module:
            return self.model

    Worker().load_model(load_dummy_weights=True)
    layers.look_after_loading(Worker)
    with pytest.raises(NotCovered, match="GRU"):
        Worker().load_model(load_dummy_weights=True)
