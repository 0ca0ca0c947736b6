"""Which kinds of layers are known: what dense models and mixtures of experts are made of is, and nothing else."""

import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama

from tests.assertions import assert_same_bits
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration import devices, reviews
from vllm_batch_invariant.integration.engine import loading
from vllm_batch_invariant.integration.layers import review
from vllm_batch_invariant.integration.layers.attention import FixedSplitAttention
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.ops.attention import AttentionSpec

MODELS = "vllm.model_executor.models"
LAYERS = "vllm.model_executor.layers"


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


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Writes a file of vLLM's models as a later version might have it, and imports it."""
    package, written = import_module(MODELS), []
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])

    def write(source: str) -> ModuleType:
        written.append(f"later_{next(NUMBERS)}")
        (tmp_path / f"{written[-1]}.py").write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(source))
        return import_module(f"{MODELS}.{written[-1]}")

    yield write
    for name in written:
        sys.modules.pop(f"{MODELS}.{name}", None)


NUMBERS = count()
"""Sources are read once by their names."""
BLOCK = "class LaterBlock(nn.Module):\n    def forward(self, x):\n        return nn.functional.silu(x)\n"


@pytest.mark.parametrize("model", [covered for covered in reviews.calls().models if ":" not in covered])
def test_the_classes_of_a_model_are_known(model: str) -> None:
    try:
        file = import_module(f"{MODELS}.{model}")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        pytest.skip("its processor imports torchvision, of which no wheel fits PyTorch's CPU builds")
    kinds = [kind for kind in vars(file).values() if inspect.isclass(kind) and issubclass(kind, torch.nn.Module)]
    own = [kind for kind in kinds if kind.__module__ == file.__name__ and not review._is_known(kind)]
    assert own
    assert {kind.__name__: review.of_model_class(kind) for kind in own if review.of_model_class(kind)} == {}


@pytest.mark.parametrize("model", reviews.calls().from_transformers)
def test_the_classes_of_a_model_of_transformers_are_known(model: str) -> None:
    file = import_module(f"transformers.models.{model}.modeling_{model}")
    kinds = [kind for kind in vars(file).values() if inspect.isclass(kind) and issubclass(kind, torch.nn.Module)]
    own = [kind for kind in kinds if kind.__module__ == file.__name__]
    assert own
    assert {kind.__name__: review.of_model_class(kind) for kind in own if review.of_model_class(kind)} == {}


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "gelu_fast", "quick_gelu", "gelu_pytorch_tanh", "relu2", "silu"])
def test_an_activation_of_transformers_is_known(name: str) -> None:
    review.check(ACT2FN[name])


@pytest.mark.parametrize(
    "kind",
    [
        torch.nn.Conv1d,
        torch.nn.LSTM,
        torch.nn.MultiheadAttention,
        f"{LAYERS}.conv.Conv2dLayer",
        f"{LAYERS}.mamba.mamba_mixer2.MambaMixer2",
        f"{LAYERS}.mamba.mamba_mixer2.Mixer2RMSNormGated",
        f"{LAYERS}.mamba.short_conv.ShortConv",
        f"{LAYERS}.attention.static_sink_attention.StaticSinkAttention",
        f"{LAYERS}.layernorm.RMSNorm",
        f"{LAYERS}.layernorm.GemmaRMSNorm",
        f"{LAYERS}.layernorm.RMSNormGated",
        f"{LAYERS}.activation.GeluAndMulSparse",
        f"{LAYERS}.rotary_embedding.MRotaryEmbedding",
        f"{MODELS}.dbrx.DbrxExperts",
        f"{LAYERS}.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention",
        f"{MODELS}.deepseek_v2.Indexer",
    ],
)
def test_other_kinds_are_refused(kind: type | str) -> None:
    kind = named(kind) if isinstance(kind, str) else kind
    model = torch.nn.ModuleList([torch.nn.Identity(), bare(kind)])
    with pytest.raises(NotCovered, match=rf"the layer 1 \({kind.__module__}\.{kind.__qualname__}\): ") as refused:
        review.check(model)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["RowParallelLinear", "QKVParallelLinear"])
def test_a_linear_layer_is_known_unless_it_is_quantised(kind: str) -> None:
    linear = named(f"{LAYERS}.linear.{kind}")
    review.check(bare(linear, quant_method=torch.nn.Module.__new__(patch_points.LINEAR_METHOD.get())))
    quantised = type("Fp8LinearMethod", (patch_points.LINEAR_METHOD.get(),), {})
    with pytest.raises(NotCovered, match="its matmuls are computed by Fp8LinearMethod"):
        review.check(bare(linear, quant_method=object.__new__(quantised)))


def test_attention_is_known_where_ours_serves_it() -> None:
    attention, ours = named(f"{LAYERS}.attention.Attention"), object.__new__(FixedSplitAttention)
    ours.kv_cache_dtype = "auto"
    review.check(bare(attention, impl=ours, head_size=64, head_size_v=64))
    with pytest.raises(NotCovered, match="its kernels are not ours"):
        review.check(bare(attention, impl=SimpleNamespace(), head_size=64))
    with pytest.raises(NotCovered, match="its values have another size than its keys"):
        review.check(bare(attention, impl=ours, head_size=64, head_size_v=32))
    ours.is_of_block = True
    with pytest.raises(NotCovered, match="its tokens see those after them"):
        review.check(bare(attention, impl=ours, head_size=64, head_size_v=64))


def test_a_class_of_a_model_that_puts_known_layers_together_is_known(later: Callable[[str], ModuleType]) -> None:
    block = bare(later(BLOCK).LaterBlock)
    block.add_module("projection", torch.nn.Linear(2, 2))
    block.register_buffer("inv_freq", torch.ones(2))
    review.check(block)


def test_a_class_of_a_model_may_keep_the_sinks_that_its_attention_reads_and_no_others(
    later: Callable[[str], ModuleType],
) -> None:
    sinks, ours = torch.nn.Parameter(torch.ones(2)), object.__new__(FixedSplitAttention)
    ours.spec, ours.kv_cache_dtype = AttentionSpec(1.0, sinks=sinks), "auto"
    block = bare(later(BLOCK).LaterBlock)
    block.add_module("attn", bare(named(f"{LAYERS}.attention.Attention"), impl=ours, head_size=64, head_size_v=64))
    block.sinks = sinks
    review.check(block)
    block.sinks = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(NotCovered, match=r"LaterBlock\): it keeps weights of its own \(sinks\)"):
        review.check(block)


def test_a_class_of_a_model_with_weights_of_its_own_is_refused(later: Callable[[str], ModuleType]) -> None:
    block = bare(later(BLOCK).LaterBlock)
    block.decay = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(NotCovered, match=r"LaterBlock\): it keeps weights of its own \(decay\)"):
        review.check(block)


def test_a_class_of_a_model_that_calls_what_nobody_has_read_is_refused(later: Callable[[str], ModuleType]) -> None:
    """tests/integration/test_calls.py has the ways to call it."""
    file = later(
        """
        def helper(x):
            return torch.ops.vllm.later(x)

        class LaterBlock(nn.Module):
            def forward(self, x):
                return helper(x)

        class Inherits(LaterBlock):
            pass
        """
    )
    for kind in (file.LaterBlock, file.Inherits):
        said = rf"\({file.__name__}\.{kind.__name__}\): helper calls torch\.ops\.vllm\.later, which nobody has read"
        with pytest.raises(NotCovered, match=said) as refused:
            review.check(bare(kind))
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (f"{MODELS}.cohere2_moe.Cohere2Moe", "token_choice_with_bias calls torch.compile"),
        (f"{MODELS}.minicpm.MiniCPMMoE", "MiniCPMMoE.forward calls .*fused_experts"),
        (f"{MODELS}.k2_horizon.K2HorizonMoVAAttention", "K2HorizonMoVAAttention.* calls "),
        (f"{MODELS}.mimo_v2.MiMoV2Attention", "MiMoV2Attention.__init__ calls "),
        (f"{MODELS}.gemma3n.Gemma3nTextModel", "fast_prefill_forward calls .*get_forward_context"),
    ],
)
def test_a_model_that_calls_kernels_two_calls_away_is_refused(kind: str, said: str) -> None:
    found = list(review._calls(named(kind)))
    assert [problem for problem in found if re.search(said, problem)], found


@pytest.mark.parametrize(("kind", "method"), [("gemma4.Gemma4Model", "forward"), ("gemma4.Gemma4Router", "forward")])
def test_a_class_that_is_known_by_its_sources_is_refused_with_another_one(
    kind: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = named(f"{MODELS}.{kind}")
    review._other_source.cache_clear()
    review.check(bare(of))
    review._other_source.cache_clear()
    monkeypatch.setattr(of, method, elsewhere)
    with pytest.raises(NotCovered, match=f"its {method} is not the one that was read"):
        review.check(bare(of))
    review._other_source.cache_clear()


def elsewhere(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x


def test_a_method_that_somebody_has_put_on_a_class_is_refused(
    later: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    patched, wrapped, one = (later(BLOCK).LaterBlock for _ in range(3))
    monkeypatch.setattr(patched, "forward", elsewhere)
    monkeypatch.setattr(wrapped, "forward", functools.wraps(wrapped.forward)(lambda self, x: x))
    block = bare(one)
    review.check(block)
    block.forward = functools.partial(elsewhere, block)
    for module in (bare(patched), bare(wrapped), block):
        with pytest.raises(NotCovered, match=rf"its LaterBlock\.forward is {__name__}\..*, which nobody has read"):
            review.check(module)


def test_a_method_of_ours_on_a_class_of_a_model_passes(
    later: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = later(BLOCK).LaterBlock
    monkeypatch.setattr(kind, "forward", review.check)
    review.check(bare(kind))


@pytest.mark.parametrize(
    "keep",
    [
        lambda layer: [layer],
        lambda layer: {"a": (layer,)},
        lambda layer: functools.partial(torch.add, layer),
        lambda layer: layer.forward,
    ],
)
def test_a_layer_that_a_class_of_a_model_keeps_aside_is_looked_at(
    keep: Callable[[torch.nn.Module], Any], later: Callable[[str], ModuleType]
) -> None:
    block = bare(later(BLOCK).LaterBlock)
    block.kept = keep(torch.nn.Linear(2, 2))
    review.check(block)
    block.kept = keep(torch.nn.Conv1d(1, 1, 1))
    with pytest.raises(NotCovered, match=r"the layer kept \(torch\.nn\.modules\.conv\.Conv1d\): this version"):
        review.check(block)


def rotary(kind: str, positions: int) -> torch.nn.Module:
    """A rotary embedding of Transformers', for a context that is longer than what the model was trained with."""
    settings = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": positions // 2}
    if kind == "longrope":
        settings |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = LlamaConfig(
        hidden_size=8, num_attention_heads=1, max_position_embeddings=positions, rope_parameters=settings
    )
    return modeling_llama.LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_a_rotary_embedding_of_transformers_is_known(kind: str) -> None:
    embedding, x = rotary(kind, 32), torch.ones(1)
    review.check(embedding)
    alone = embedding(x, torch.tensor([[3]]))[0]
    assert_same_bits(embedding(x, torch.tensor([[3, 40]]))[0][:, :1], alone)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotary_embedding_of_transformers_that_follows_the_longest_context_is_refused(kind: str) -> None:
    embedding, x = rotary(kind, 32), torch.ones(1)
    alone = embedding(x, torch.tensor([[3]]))[0]
    assert not torch.equal(embedding(x, torch.tensor([[3, 40]]))[0][:, :1], alone)
    with pytest.raises(NotCovered, match=rf"follow the longest context of a step \(rope_type {kind}\)"):
        review.check(embedding)


def test_a_class_of_a_model_that_changes_a_layer_is_refused(later: Callable[[str], ModuleType]) -> None:
    file = later(
        f"from {LAYERS}.linear import RowParallelLinear\nclass LaterLinear(RowParallelLinear):\n    pass\n",
    )
    with pytest.raises(NotCovered, match="it is a RowParallelLinear of its own"):
        review.check(bare(file.LaterLinear))


def test_an_encoder_is_refused_unless_vllm_has_not_built_it(later: Callable[[str], ModuleType]) -> None:
    model = bare(later(BLOCK + "    _tower_model_names = ['vision.tower']\n").LaterBlock)
    model.vision, model.text = torch.nn.ModuleDict({"tower": torch.nn.Identity()}), torch.nn.Identity()
    with pytest.raises(NotCovered, match=r"the encoder vision\.tower: .*--language-model-only"):
        review.check(model)
    model.vision["tower"] = patch_points.MISSING_STAGE.get()("image_tower", torch.nn.Conv2d(1, 1, 1, device="meta"))
    review.check(model)
    assert list(model.parameters()) == []


def test_an_encoder_with_quantised_layers_is_refused(later: Callable[[str], ModuleType]) -> None:
    kind, plain = later(BLOCK + "    _tower_model_names = ['visual']\n").LaterBlock, patch_points.LINEAR_METHOD.get()
    kind.__name__ = "Qwen3VLForConditionalGeneration"
    for method in (plain, type("UnpackingMethod", (plain,), {"unpacks": True})):
        linear = bare(named(f"{LAYERS}.linear.RowParallelLinear"), quant_method=object.__new__(method))
        model = bare(kind)
        model.visual = torch.nn.ModuleList([torch.nn.Linear(1, 1), linear])
        if method is plain:
            review.check(model)
            continue
        with pytest.raises(NotCovered, match=r"quantised weights of the encoder visual: .*--language-model-only"):
            review.check(model)


def test_a_model_from_elsewhere_is_refused() -> None:
    kind = type("Model", (torch.nn.Module,), {"__module__": "somebody.model"})
    with pytest.raises(NotCovered, match=r"the model itself \(somebody\.model\.Model\): this version"):
        review.check(bare(kind))


def test_a_worker_looks_at_each_model_that_it_has_loaded() -> None:
    class Worker:
        def load_model(self, *, load_dummy_weights: bool = False) -> None:
            self.model = torch.nn.GRU(2, 2)

        def get_model(self) -> torch.nn.Module:
            return self.model

    Worker().load_model(load_dummy_weights=True)
    loading.hook(Worker, lambda: None, devices.get("cpu").after_loading)
    with pytest.raises(NotCovered, match="GRU"):
        Worker().load_model(load_dummy_weights=True)
