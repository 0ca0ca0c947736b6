"""A look at the layers of a model that is loaded: each must be of a kind that is known to keep a request's bits.

A configuration says what it says about a model; what computes is its modules. The rule for each of them:

- A layer of vLLM's or PyTorch's must be on a list here, by its exact class: a subclass may compute something else.
  Linear layers, embeddings and experts must not be quantised, attention and experts must be served by ours, and a norm
  of vLLM's must have been replaced by ours. Classes of this project are known.
- A class of a model's own file (vLLM's or Hugging Face's: decoder layers, blocks, whole models) only calls other layers
  and PyTorch, whose operations the mode replaces. It passes if it inherits from such classes alone, keeps no weights of
  its own but the sinks of its attention, and none of its methods names a kernel: Triton's, a compiled one, a function
  of vLLM's kernel packages, or an operation of PyTorch's that the mode leaves alone. Exceptions that were reviewed are
  listed.
- Anything else is refused: convolutions, state spaces, quantised layers, encoders, models to come.
"""

import functools
import inspect
import re
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from .. import envs
from ..errors import NotCovered
from . import exact, experts, patch_points, pooling

KNOWN = {
    "torch.nn.modules": """ModuleList ModuleDict Sequential Identity Dropout Linear Embedding LayerNorm
        GELU ReLU SiLU Sigmoid Tanh""",
    # matmuls and embeddings
    "vllm.model_executor.layers.linear": """ReplicatedLinear ColumnParallelLinear MergedColumnParallelLinear
        QKVParallelLinear RowParallelLinear""",
    "vllm.model_executor.layers.vocab_parallel_embedding": "VocabParallelEmbedding ParallelLMHead",
    "vllm.model_executor.layers.logits_processor": "LogitsProcessor",
    # PyTorch's layer_norm, which is replaced; vLLM's RMS norms must have become ours
    "vllm.model_executor.layers.layernorm": "LayerNorm",
    # Element by element
    "vllm.model_executor.layers.activation": """SiluAndMul MulAndSilu SiluAndMulWithClamp GeluAndMul GELU GELUTanh
        NewGELU FastGELU QuickGELU ReLUSquaredActivation XIELU FatreluAndMul ScaledActivation""",
    "vllm.model_executor.layers.rotary_embedding": """RotaryEmbedding ApplyRotaryEmb LinearScalingRotaryEmbedding
        Llama3RotaryEmbedding NTKScalingRotaryEmbedding DynamicNTKScalingRotaryEmbedding
        DynamicNTKAlphaRotaryEmbedding YaRNScalingRotaryEmbedding Phi3LongRoPEScaledRotaryEmbedding""",
    "vllm.model_executor.layers.attention": "Attention",
    # A linear layer whose other GEMMs are for GPUs; experts, which ours must serve, and what calls them
    "vllm.model_executor.layers.fused_moe.router.gate_linear": "GateLinear",
    "vllm.model_executor.layers.fused_moe": "RoutedExperts MoERunner SharedExperts",
    # Loads weights in an order of its own
    "vllm.model_executor.models.gpt_oss": "GptOssRoutedExperts",
    # Poolers: rows are copied; sums, norms, products and softmax are ours
    "vllm.model_executor.layers.pooler": """DispatchPooler SequencePooler TokenPooler BOSEOSFilter LastPool CLSPool
        MeanPool AllPool StepPool EmbeddingPoolerHead ClassifierPoolerHead TokenEmbeddingPoolerHead
        TokenClassifierPoolerHead PoolerIdentity PoolerNormalize PoolerMultiLabelClassify PoolerClassify""",
    # Layers of one model: norms in plain PyTorch, and an embedding that adds to its positions
    "vllm.model_executor.models.commandr": "LayerNorm RMSNorm",
    "vllm.model_executor.models.nemotron": "NemotronLayerNorm1P",
    "vllm.model_executor.models.opt": "OPTLearnedPositionalEmbedding",
}
"""Names of classes, by the module that has them or the package above it."""

POOLERS = "vllm.model_executor.layers.pooler."
"""The package of poolers."""
MODELS = ("vllm.model_executor.models.", "vllm.models.", "transformers.")
"""Packages of models' own classes."""
PLAIN = (torch.nn.Module, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential, torch.nn.Identity)
"""What such a class may inherit from besides."""
OWN_TENSORS = frozenset({"normalizer", "inv_freq", "original_inv_freq"})
"""Buffers that models' own classes may keep: factors that each element is multiplied with."""
KERNELS = re.compile(
    r"(^|\.)(_\w*ops|ops|fla|flashinfer|fused_moe|kda|kernels|lightning_attn|mamba|mhc|quantization|triton\w*)(\.|$)"
)
"""Modules whose functions launch kernels."""
BUILDERS = frozenset(
    {"FusedMoE", "FusedMoEFactory", "fused_moe_make_expert_params_mapping", "resolve_layer_fused_shared_expert"}
)
"""Functions of such modules that make layers, which are looked at, and tell which there are and how weights are called.
"""
OPERATIONS = """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d lstm gru rnn_tanh rnn_relu
    fft rfft irfft ifft stft istft associative_scan scaled_dot_product_attention multi_head_attention_forward"""
"""Names of PyTorch's operations that the mode does not replace."""
LOADING = ("load_weights", "get_expert_mapping")
"""Methods of models that compute nothing for a request."""


def look_after_loading(worker: type) -> None:
    """Have a class of workers check each model that it has loaded."""
    load = worker.load_model

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **named: Any) -> None:
        load(self, *args, **named)
        check(self.get_model())

    worker.load_model = load_model


def check(model: torch.nn.Module) -> None:
    """Refuse a model that has a layer of an unknown kind, or an encoder.

    Raises:
        NotCovered: the first such layer.
    """
    for name in getattr(model, "_tower_model_names", ()):  # vLLM notes there what it builds of a multimodal model
        if type(model.get_submodule(name)) is not patch_points.MISSING_STAGE.get():
            raise NotCovered(
                f"the encoder {name}", "its kernels are not ours", "serve text only, with --language-model-only"
            )
    for name, module in _modules(model):
        problem = _problem(module)
        if problem:
            which = f"the layer {name}" if name else "the model itself"
            raise NotCovered(
                f"{which} ({type(module).__module__}.{type(module).__qualname__})",
                problem,
                "serve a model made of known layers",
            )


def _modules(model: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """A model's modules by name, and the poolers that PyTorch does not list."""
    for name, module in model.named_modules(prefix=prefix):
        yield name, module
        for task, pooler in pooling.parts(module):
            yield from _modules(pooler, f"{name}.{task}")


def _problem(module: torch.nn.Module) -> str | None:
    """Why a layer is refused; None if it is known."""
    kind = type(module)
    if _is_ours(kind):
        return None
    if envs.is_exact() and (undefined := _undefined(module)):
        return undefined
    if _is_known(kind):
        return _of_layer(module)
    return of_model_class(kind) or _of_tensors(module)


def _undefined(module: torch.nn.Module) -> str | None:
    """Why exact arithmetic has no definition of a layer; None if it has."""
    defined = _is_known(type(module), exact.LAYERS) or type(module).__module__.startswith(MODELS)
    return None if defined else "it has no definition in exact arithmetic"


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith(f"{__package__.partition('.')[0]}.")


def _is_known(kind: type, known: dict[str, str] = KNOWN) -> bool:
    return any(
        f"{kind.__module__}.".startswith(f"{place}.") and kind.__name__ in names.split()
        for place, names in known.items()
    )


def _of_layer(layer: torch.nn.Module) -> str | None:
    """Of a layer of a known class."""
    method = getattr(layer, "quant_method", None)
    if type(layer).__name__ == "Attention":
        if not any(_is_ours(kind) for kind in type(layer.impl).__mro__):
            return "its kernels are not ours"
        if getattr(layer, "head_size_v", layer.head_size) != layer.head_size:
            return "its values have another size than its keys"
    elif isinstance(layer, patch_points.MOE_RUNNER.get()):
        return experts.problem_of(layer)
    elif isinstance(layer, patch_points.ROUTED_EXPERTS.get()):
        return None if _is_ours(type(method)) else f"its experts are computed by {type(method).__name__}"
    elif type(layer).__module__.startswith(POOLERS):
        return pooling.problem_of(layer)
    elif type(layer).__name__ == "GateLinear" and (problem := experts.problem_of_gate(layer)):
        return problem
    elif method is not None and type(method) not in (
        patch_points.LINEAR_METHOD.get(),
        patch_points.EMBEDDING_METHOD.get(),
    ):
        return f"its matmuls are computed by {type(method).__name__}"
    return None


def of_model_class(kind: type) -> str | None:
    """Why a class of a model's own file is refused; None if it only puts other layers together."""
    if not kind.__module__.startswith(MODELS):
        return "this version of the plugin does not know it"
    for base in kind.__mro__:
        of_model = base.__module__.startswith(MODELS) and not _is_known(base)
        if issubclass(base, torch.nn.Module) and base not in PLAIN and not of_model:
            return f"it is a {base.__name__} of its own"
    kernel = next(_kernels(kind), None)
    return f"it calls {kernel} itself" if kernel else None


def _of_tensors(module: torch.nn.Module) -> str | None:
    """Of a layer of a model's own class; the sinks that it gives its attention are read by ours."""
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    sinks = [getattr(getattr(child, "impl", None), "sinks", None) for child in module.children()]
    strange = [
        name for name, tensor in own.items() if name not in OWN_TENSORS and not any(tensor is sink for sink in sinks)
    ]
    return f"it keeps weights of its own ({strange[0]})" if strange else None


def _kernels(kind: type) -> Iterator[str]:
    """Kernels that the methods of a class and of its bases name."""
    for base in kind.__mro__:
        if base.__module__.startswith(MODELS):
            for function in (_function(member) for name, member in vars(base).items() if name not in LOADING):
                if function is not None and function.__globals__.get("__name__") == base.__module__:
                    yield from _kernels_named(function)


def _function(member: Any) -> FunctionType | None:
    member = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", None) or member)
    return member if isinstance(member, FunctionType) else None


def _kernels_named(function: FunctionType) -> Iterator[str]:
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    yield from sorted(names & set(OPERATIONS.split()))
    if {"torch", "ops"} <= names:
        yield "torch.ops"
    for name in sorted(names & set(function.__globals__)):
        value = function.__globals__[name]
        function_of = getattr(value, "__module__", None) if callable(value) and not isinstance(value, type) else None
        of_kernels = KERNELS.search(function_of or "") and name not in BUILDERS
        if type(value).__module__.startswith("triton") or of_kernels:
            yield name


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
