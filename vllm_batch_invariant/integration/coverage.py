"""What the mode covers, as one table: the start-up check runs it, the command line and docs/coverage.md print it."""

import os
from collections.abc import Collection, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

from .. import envs
from ..errors import NotCovered
from ..ops import exact
from ..ops.devices import joined, known
from . import devices, reviews
from .feature import Config, Feature
from .parallel import tensor_tree
from .reviews import connectors, encoding, expert_adapters, patch_points, schemes
from .reviews.schemes import FP8_CACHES, TOKEN_CACHE

EAGER = "--enforce-eager"
TENSOR, PIPELINE, SPECULATION = "--tensor-parallel-size", "--pipeline-parallel-size", "--speculative-config"
EMBEDDINGS, SLEEP, RUNNER = "--enable-prompt-embeds", "--enable-sleep-mode", "VLLM_USE_V2_MODEL_RUNNER"
SHARED_IMAGES, PRUNING = "--mm-encoder-tp-mode", "--video-pruning-rate"
KV_CACHE, ADAPTERS, WHOLE_EXPERTS = "--kv-cache-dtype", "--enable-lora", "--enable-expert-parallel"
_SMALLER = tuple(range(64, 257, 16))
HEAD_SIZES = (*_SMALLER, 512)
"""Elements of a decoder's attention head that the kernels for CPUs and NVIDIA GPUs have."""
ENCODER_HEAD_SIZES = (32, 48, *_SMALLER)
LATENT_SIZES = ((64, 16), (512, 64))
"""Elements of the cache's vectors of latent attention that are keys and values, and of those that are keys alone: of
DeepSeek's, and of the small models of tests.
"""
LATENT_PAGES = 16
"""Tokens of which its pages are multiples."""
SIZES = f"{_SMALLER[0]} to {_SMALLER[-1]} in steps of 16, and {HEAD_SIZES[-1]}"
"""The former in words."""
DTYPES = ("float32", "bfloat16", "float16")
"""Of weights, activations and the KV cache, as vLLM calls them."""
TWO_SIZES = "heads of two sizes"
"""Of Gemma 4's layers, in words."""
RAN = reviews.ran()
"""What has run with the mode, and where."""
TORCHRUN = "external_launcher"
"""vLLM's executor of workers that torchrun has started, and that a trainer may share."""
CORES = "VLLM_CPU_OMP_THREADS_BIND"
"""vLLM's variable of the cores that each worker on a CPU has."""
LOGITS_PROCESSORS = "vllm.logits_processors"
"""The group of entry points whose logits processors vLLM loads without being told to."""


def _when(condition: object, found: str) -> str | None:
    return found if condition else None


def _first(found: Mapping[str, object]) -> str | None:
    """The first of these that is so."""
    return next((what for what, is_so in found.items() if is_so), None)


def _dtype_of(model: Any) -> str:
    """A model's, as an argument of vLLM has it."""
    return str(model.dtype).removeprefix("torch.")


def _dtype(config: Config) -> str | None:
    name = _dtype_of(config.model_config)
    return None if name in DTYPES else f"dtype {name}"


def _attention_backend(config: Config) -> str | None:
    chosen = [
        config.attention_config.backend,
        *(getattr(config.attention_config, "backend_per_kind", None) or {}).values(),
    ]
    allowed = devices.of_config(config).attention_choices
    if _is_latent(config):
        allowed = (*allowed, *devices.of_config(config).latent_choices)
    if _has_heads_of_two_sizes(config):  # vLLM chooses one for them where nobody has
        allowed = (*allowed, "TRITON_ATTN")
    other = [backend.name for backend in chosen if backend is not None and backend.name not in allowed]
    return f"attention backend {other[0]}" if other else None


def _method(config: Config) -> str | None:
    return getattr(getattr(config, "speculative_config", None), "method", None)


def _later_keys(config: Config) -> str | None:
    """vLLM asks for them itself while it makes a draft model of DFlash, and the gate looks at that configuration, too.
    A target whose layers see them is refused when it is loaded (``layers/review.py``).
    """
    asks = getattr(config.attention_config, "use_non_causal", False)
    drafts = _method(config) == "dflash"
    return _when(asks and not drafts, "attention_config.use_non_causal=True")


def _attention_of_another_device(config: Config) -> str | None:
    chosen, own = envs.ATTENTION.read(), known()[config.device_config.device_type].attention
    others = {device.attention for device in known().values()} - {own}
    return _when(chosen in others, f"{envs.ATTENTION.name}={chosen}")


def _tensor_parallelism(config: Config) -> str | None:
    size, device = config.parallel_config.tensor_parallel_size, devices.of_config(config)
    untried = device.untried_tensor_parallel_sizes if envs.starts_untried() else ()
    return _when(size not in (1, *device.tensor_parallel_sizes, *untried), f"tensor parallelism {size}")


def _tree(config: Config) -> str | None:
    missing = tensor_tree.k_slices() > 1 and not devices.of_config(config).has_tree
    return _when(missing, f"{envs.TP_TREE.name}={tensor_tree.k_slices()}")


def _tree_of_fewer_slices(config: Config) -> str | None:
    size, k_slices = config.parallel_config.tensor_parallel_size, tensor_tree.k_slices()
    return _when(k_slices > 1 and size > k_slices, f"tensor parallelism {size} with {envs.TP_TREE.name}={k_slices}")


def _pipeline_parallelism(config: Config) -> str | None:
    size, by = config.parallel_config.pipeline_parallel_size, config.parallel_config.distributed_executor_backend
    if size > 1 and by == TORCHRUN:
        return f"pipeline parallelism {size} by {by}"
    return _when(size not in (1, *devices.of_config(config).pipeline_parallel_sizes), f"pipeline parallelism {size}")


def _speculation_in_a_pipeline(config: Config) -> str | None:
    size = config.parallel_config.pipeline_parallel_size
    return _when(config.speculative_config and size > 1, f"speculative decoding beside pipeline parallelism {size}")


def _data_parallelism(config: Config) -> str | None:
    size = config.parallel_config.data_parallel_size
    return _when(size > 1 and not devices.of_config(config).has_data_parallelism, f"data parallelism {size}")


def _data_parallel_experts(config: Config) -> str | None:
    """Engines that share experts where that has not been run: each computes the tokens of all with its part."""
    parallel, size = config.parallel_config, config.parallel_config.data_parallel_size
    if size == 1 or not config.model_config.is_moe:
        return None
    named = f"data parallelism {size} of a mixture of experts"
    if size not in devices.of_config(config).data_parallel_sizes_of_experts:
        return named
    beside = {
        "expert parallelism": parallel.enable_expert_parallel,
        f"tensor parallelism {parallel.tensor_parallel_size}": parallel.tensor_parallel_size > 1,
        f"pipeline parallelism {parallel.pipeline_parallel_size}": parallel.pipeline_parallel_size > 1,
    }
    first = _first(beside)
    return _when(first, f"{named} with {first}")


def _other_data_parallelism(config: Config) -> str | None:
    """Anything but the engines of one ``vllm serve``, and an engine in each process of a user's."""
    parallel = config.parallel_config
    if parallel.data_parallel_size == 1:
        return None
    if parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb:
        return "data parallelism with an external or hybrid load balancer"
    if parallel.data_parallel_backend != "mp":
        return f"data parallelism by {parallel.data_parallel_backend}"
    if parallel.distributed_executor_backend == TORCHRUN:
        return f"data parallelism by the executor {TORCHRUN}"
    is_offline = parallel.data_parallel_rank_local is not None
    here = parallel.data_parallel_size_local == parallel.data_parallel_size
    return _when(not here and not is_offline, "data parallelism on several nodes")


def _other_server(config: Config) -> str | None:
    """What of it a configuration tells: the rest is refused where it is asked for."""
    parallel = config.parallel_config
    started = parallel.data_parallel_size > 1 or getattr(parallel, "data_parallel_size_local", 1) > 0
    return _when(not started, "a server whose engine is started elsewhere (--data-parallel-size-local 0)")


def _other_threads(config: Config) -> str | None:
    """Engines with FlexAttention whose workers need not have as many threads as those of the first."""
    parallel, cores = config.parallel_config, os.environ.get(CORES) or "auto"
    if parallel.data_parallel_size == 1 or cores == "nobind" or envs.ATTENTION.read() != "flex":
        return None
    if cores != "auto":
        numbers, workers = [_count(part) for part in cores.split("|")], parallel.world_size
        if len({tuple(numbers[start : start + workers]) for start in range(0, len(numbers), workers)}) == 1:
            return None
    return f"data parallelism {parallel.data_parallel_size} with {CORES}={cores}"


def _count(cores: str) -> int:
    """Of a list such as 0-3,8, as vLLM reads it."""
    ends = [part.partition("-") for part in cores.split(",") if part.strip()]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def _beside_workers_on_gpus(config: Config) -> str | None:
    """What has not been run where several GPUs share a model, or one computes what several would."""
    parallel, model = config.parallel_config, config.model_config
    workers, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    engines = parallel.data_parallel_size if model.is_moe else 1
    shared = workers * stages * engines
    several = f"{envs.TP_TREE.name}={tensor_tree.k_slices()}" if shared == 1 else "several GPUs"
    if shared * tensor_tree.k_slices() == 1 or envs.starts_untried():
        return None
    version = patch_points.installed_version()
    found = {
        "stages of several workers": workers > 1 < stages,
        "a tree in stages": tensor_tree.k_slices() > 1 < stages,
        "the first model runner": not config.use_v2_model_runner,
        "speculative decoding": config.speculative_config is not None,
        "exact arithmetic": devices.of_config(config).is_exact,
        "FlexAttention": envs.ATTENTION.read() == "flex",
        "stages of a mixture of experts": model.is_moe and stages > 1,
        f"vLLM {version}": not version.startswith(RAN.on_gpus),
    }
    first = _first(found)
    return _when(first, f"{several} with {first}")


def _beside_four_gpus(config: Config) -> str | None:
    """What two GPUs have shared and four have not."""
    workers, model = config.parallel_config.tensor_parallel_size, config.model_config
    is_open = 2 < workers in devices.of_config(config).tensor_parallel_sizes
    if not is_open or config.device_config.device_type != "cuda" or envs.starts_untried():
        return None
    beside = {
        "a mixture of experts": model.is_moe,
        "quantised weights": getattr(model, "quantization", None),
        f"{envs.TP_TREE.name}={tensor_tree.k_slices()}": tensor_tree.k_slices() > 1,
    }
    first = _first(beside)
    return _when(first, f"tensor parallelism {workers} on GPUs with {first}")


def _other_parallelism(config: Config) -> str | None:
    parallel = config.parallel_config
    kinds = {
        "decode context": getattr(parallel, "decode_context_parallel_size", 1),
        "prefill context": getattr(parallel, "prefill_context_parallel_size", 1),
    }
    found = [f"{kind} parallelism {size}" for kind, size in kinds.items() if size > 1]
    found += ["sequence parallelism"] * bool(getattr(config.compilation_config.pass_config, "enable_sp", False))
    return found[0] if found else None


def _several_nodes(config: Config) -> str | None:
    parallel = config.parallel_config
    nodes = getattr(parallel, "nnodes", 1)
    processes = parallel.distributed_executor_backend == "mp" and parallel.data_parallel_size == 1
    ran = config.device_config.device_type == "cpu" and nodes == 2 and processes
    ran = ran and patch_points.installed_version().startswith(RAN.on_two_nodes)
    return _when(nodes > 1 and not ran, f"{nodes} nodes")


def _ray(config: Config) -> str | None:
    return _when(config.parallel_config.distributed_executor_backend == "ray", "the Ray executor")


def _quantisation(config: Config) -> str | None:
    return schemes.refused(config.model_config, getattr(config, "quant_config", None))


def _scale_of_the_batch(config: Config) -> str | None:
    return schemes.of_the_batch(config.model_config, getattr(config, "quant_config", None))


def _quantisation_elsewhere(config: Config) -> str | None:
    name = getattr(config.model_config, "quantization", None)
    if not name or _quantisation(config) or _scale_of_the_batch(config):
        return _quantised_draft_elsewhere(config)
    ops, version = devices.of_config(config).ops, patch_points.installed_version()
    where = f"quantisation {name} on {ops.name}"
    kinds = _kinds(config)
    if len(kinds) > 1 and name != schemes.MIXED and any("float4" in kind for kind in kinds):
        return f"quantisation {name} of {' beside '.join(kinds)}"
    if ops.type not in RAN.quantised:
        return where
    if not version.startswith(RAN.quantised[ops.type]):
        return f"{where} with vLLM {version}"
    if envs.starts_untried():
        return None
    model, parallel, of_weights = config.model_config, config.parallel_config, config.quant_config
    if parallel.tensor_parallel_size > 1 and schemes.makes_int8_experts(model, of_weights):
        return f"{where} of experts made int8 by several workers"
    if ops.type != "cuda":
        return None
    of_activations, several = set(schemes.of_activations(model, of_weights)), parallel.tensor_parallel_size > 1
    shared = RAN.expert_activations_by_two_gpus if model.is_moe else RAN.activations_by_two_gpus
    unshared = of_activations - {*shared}
    found = {
        f"of {min(unshared, default='')} by several GPUs": unshared and several and not _keeps(config, _DELTA_RULES),
        "in stages": parallel.pipeline_parallel_size > 1,
        "of experts by several engines": model.is_moe and parallel.data_parallel_size > 1,
        "in exact arithmetic": devices.of_config(config).is_exact,
    }
    first = _first(found)
    return _when(first, f"{where} {first}") or _quantised_draft_elsewhere(config)


def _quantised_draft_elsewhere(config: Config) -> str | None:
    """A draft model in a format that no GPU has served: what a target is refused there for does not see it."""
    draft = getattr(getattr(config, "speculative_config", None), "draft_model_config", None)
    name = getattr(draft, "quantization", None)
    by_mtp = {*RAN.quantised_mtp_on_gpus.get(getattr(getattr(draft, "hf_config", None), "model_type", ""), ())}
    if not name or name in by_mtp or devices.of_config(config).ops.type != "cuda" or envs.starts_untried():
        return None
    read = patch_points.CONFIG.get().get_quantization_config(draft, config.load_config)
    of_experts = RAN.quantised_experts_draft_on_cpus_alone if schemes.has_experts(draft) else ()
    untried = {name, *schemes.kinds(draft, read)} & {*RAN.quantised_drafts_on_cpus_alone, *of_experts} - by_mtp
    return _when(untried, f"drafts of quantisation {name} on a GPU")


def _other_quantisation(config: Config, ran: tuple[str, ...]) -> str | None:
    """Of a quantised model what is none of the kinds that have run beside other layers; None: nothing."""
    name, kinds = getattr(config.model_config, "quantization", None), _kinds(config)
    return next((kind for kind in kinds if kind not in ran), None if kinds else name)


def _kinds(config: Config) -> tuple[str, ...]:
    """Of a quantised model's weights and activations; none of another."""
    model = config.model_config
    quantised = getattr(model, "quantization", None)
    return schemes.kinds(model, getattr(config, "quant_config", None)) if quantised else ()


def _cache_dtype(config: Config) -> str:
    """Of the KV cache: a layer takes that of its checkpoint where nobody has chosen one."""
    dtype = str(config.cache_config.cache_dtype)
    scheme = getattr(getattr(config, "quant_config", None), "kv_cache_scheme", None)
    return FP8_CACHES[0] if scheme and dtype == "auto" else dtype


def _ran_on(device_type: str) -> str:
    """The device whose entries in ``ran.toml`` hold on one: with :data:`~.envs.UNTRIED` a CPU's on a GPU."""
    return "cpu" if device_type == "cuda" and envs.starts_untried() else device_type


def _runs(config: Config) -> tuple[str, ...]:
    """Whose entries in ``ran.toml`` hold, where it has untried ones, too: these with :data:`~.envs.UNTRIED` alone."""
    return _ran_on(devices.of_config(config).ops.type), *["untried"] * envs.starts_untried()


def _is_untried_on_gpus(config: Config) -> bool:
    """Whether GPUs start what no device has run."""
    return devices.of_config(config).ops.type == "cuda" and envs.starts_untried()


def _by_gpus_alone(config: Config) -> bool:
    """Whether it is a GPU's that must have run, and not a CPU's."""
    return _ran_on(devices.of_config(config).ops.type) == "cuda"


def _cache_scales(config: Config) -> str:
    """What has a scale of its own in a KV cache in e4m3."""
    return schemes.scales_of_cache(_cache_dtype(config), getattr(config, "quant_config", None))


def _is_fp8_elsewhere(config: Config, beside: str, ran_on: str) -> bool:
    """Whether a KV cache is in e4m3, beside states, heads of two sizes or images where none such has been."""
    has_run = beside in RAN.fp8_kv_cache_beside.get(ran_on, ()) or _is_fp8_with_these_weights(config, beside, ran_on)
    return _cache_dtype(config) in FP8_CACHES and not (has_run and _cache_scales(config) == schemes.ONE_SCALE)


def _is_fp8_with_other_weights(config: Config, beside: str, ran_on: str) -> bool:
    """Whether it is beside quantised weights of kinds that have not been run with it, beside what these are beside."""
    if _cache_dtype(config) not in FP8_CACHES:
        return False
    named = (beside, f"{beside} with experts") if schemes.has_experts(config.model_config) else (beside,)
    kinds = (kind for one in named for kind in RAN.fp8_kv_cache_quantised.get(one, {}).get(ran_on, ()))
    return bool(_other_quantisation(config, tuple(kinds)))


def _is_fp8_with_these_weights(config: Config, beside: str, ran_on: str) -> bool:
    """Whether it is beside quantised weights of kinds that have."""
    is_quantised = _cache_dtype(config) in FP8_CACHES and bool(config.model_config.quantization)
    return is_quantised and not _is_fp8_with_other_weights(config, beside, ran_on)


def _is_fp8_not_run_on_gpus(config: Config) -> bool:
    """Whether such a cache is on a GPU beside states of a model, drafts, weights or a dtype that have not run."""
    if _cache_dtype(config) not in FP8_CACHES or not _by_gpus_alone(config):
        return False
    model, method = config.model_config, _method(config)
    drafters = RAN.fp8_kv_cache_of_states_on_gpus.get(model.architecture)
    of_experts = _is_nemotron(config) and schemes.has_experts(model)
    experts = " with latent experts" if _has_latent_experts(model) else " with experts" * of_experts
    named = f"{model.architecture}{experts}"
    kinds = RAN.fp8_kv_cache_quantised_of_states_on_gpus.get(named, ())
    if model.quantization == schemes.MIXED:
        mixed = f"{named} in mixed precision"
        kinds += RAN.fp8_kv_cache_quantised_of_states_on_gpus.get(mixed, ())
        drafters = (*(drafters or ()), *RAN.fp8_kv_cache_of_states_on_gpus.get(mixed, ()))
    other = _other_quantisation(config, kinds)
    has_run = not other if model.quantization else drafters is not None and not of_experts
    return not has_run or method not in (None, *(drafters or ())) or _dtype_of(model) != "bfloat16"


def _kv_cache(config: Config) -> str | None:
    dtype = _cache_dtype(config)
    return None if dtype in ("auto", *DTYPES, *FP8_CACHES) else f"a KV cache in {dtype}"


def _kv_cache_of_another_dtype(config: Config) -> str | None:
    dtype, of_model = _cache_dtype(config), _dtype_of(config.model_config)
    fits = dtype not in DTYPES or dtype == of_model
    return None if fits else f"a KV cache in {dtype} of a model in {of_model}"


def _fp8_kv_cache_elsewhere(config: Config) -> str | None:
    dtype = _cache_dtype(config)
    if dtype not in FP8_CACHES:
        return None
    device, version, named = devices.of_config(config), patch_points.installed_version(), f"a KV cache in {dtype}"
    scales, workers = _cache_scales(config), config.parallel_config.tensor_parallel_size
    shares_scales = scales in (schemes.OF_HEADS, schemes.OF_TOKENS) and workers > 1
    if device.ops.type not in RAN.fp8_kv_cache:
        return f"{named} on {device.ops.name}"
    found = {
        f"with {schemes.CACHE_SCALES.get(scales, scales)} on {device.ops.name}": scales
        not in RAN.fp8_kv_cache_scales.get(_ran_on(device.ops.type), ()),
        f"with {schemes.CACHE_SCALES.get(scales)} by {workers} workers on {device.ops.name}": shares_scales
        and workers not in RAN.fp8_kv_cache_head_workers.get(_ran_on(device.ops.type), ()),
        f"with vLLM {version}": not version.startswith(RAN.fp8_kv_cache[device.ops.type]),
        "in exact arithmetic": device.is_exact,
        "by FlexAttention": envs.ATTENTION.read() == "flex",
        "of a model in float16": scales == schemes.OF_TOKENS and _dtype_of(config.model_config) == "float16",
    }
    if scales == schemes.OF_TOKENS and _ran_on(device.ops.type) == "cuda":
        parallel, speculation = config.parallel_config, getattr(config, "speculative_config", None)
        with_them = f"with {schemes.CACHE_SCALES[scales]} beside"
        found |= {
            f"{with_them} pipeline parallelism on a GPU": parallel.pipeline_parallel_size > 1,
            f"{with_them} data parallelism on a GPU": parallel.data_parallel_size > 1,
            f"{with_them} speculative decoding on a GPU": speculation is not None,
        }
    first = _first(found)
    return _when(first, f"{named} {first}")


def _other_connector(config: Config) -> str | None:
    name = connectors.name(config)
    if not name or name in connectors.KNOWN:
        return None
    lossy = connectors.LOSSY.get(name)
    return f"the KV connector {name}" + (f" ({lossy})" if lossy else "")


def _connector_elsewhere(config: Config) -> str | None:
    """A known connector where it has not been run."""
    name = connectors.name(config)
    if name not in connectors.KNOWN:
        return None
    ops, version = devices.of_config(config).ops, patch_points.installed_version()
    ran = RAN.kv_connectors.get(name, {}).get(ops.type, "none")
    if not version.startswith(ran) and not (name in connectors.NIXL and envs.starts_untried()):
        on = ops.name if ran == "none" else f"{ops.name} with vLLM {version}"
        return f"the KV connector {name} on {on}"
    first = connectors.unknown_setting(config)
    return _when(first, f"the KV connector {name} with {first}")


def _beside_a_connector(config: Config) -> str | None:
    """What has not been run where keys and values leave the engine."""
    if connectors.name(config) not in connectors.KNOWN:
        return None
    model = config.model_config
    found = {
        **_several(config),
        f"{envs.TP_TREE.name}={tensor_tree.k_slices()}": tensor_tree.k_slices() > 1,
        "speculative decoding": config.speculative_config is not None,
        "exact arithmetic": devices.of_config(config).is_exact,
        "FlexAttention": envs.ATTENTION.read() == "flex",
        f"a KV cache in {_cache_dtype(config)}": _cache_dtype(config) in FP8_CACHES,
        f"quantisation {model.quantization}": model.quantization is not None,
        "a mixture of experts": model.is_moe,
        "pooling": _pools(config),
        "a multimodal model": model.is_multimodal_model,
        "layers that keep states": _has_states(model),
        "windows of attention": model.get_sliding_window() is not None,
        "latent attention": _is_latent(config),
        "embeddings as prompts": model.enable_prompt_embeds,
        "sleep": model.enable_sleep_mode,
    }
    first = _first(found)
    return _when(first, f"the KV connector {connectors.name(config)} beside {first}")


DUAL_STREAM = "VLLM_LORA_ENABLE_DUAL_STREAM"
"""vLLM's variable that has adapters computed beside their layer, and rounded before they are added."""
_LAYERS_WITH_ADAPTERS = (
    "fully_sharded_loras",
    "default_mm_loras",
    "enable_tower_connector_lora",
    "enable_moe_shared_loras",
)
"""Fields of vLLM's configuration of LoRA that have other layers computed."""


def _adapters_elsewhere(config: Config) -> str | None:
    if config.lora_config is None:
        return None
    ops, version = devices.of_config(config).ops, patch_points.installed_version()
    ran = RAN.lora.get(ops.type)
    if ran is not None and version.startswith(ran):
        return None
    return f"LoRA adapters on {ops.name}" + ("" if ran is None else f" with vLLM {version}")


def _other_adapters(config: Config) -> str | None:
    """Adapters that have not been run, by their settings or their model."""
    lora, model, device = config.lora_config, config.model_config, devices.of_config(config)
    if lora is None or _adapters_elsewhere(config):
        return None
    of_model = _dtype_of(model)
    dtype, of_head = (
        str(one).removeprefix("torch.") for one in (lora.lora_dtype, getattr(model, "head_dtype", of_model))
    )
    setting = next((name for name in _LAYERS_WITH_ADAPTERS if getattr(lora, name, None)), "")
    other = _other_quantisation(config, RAN.lora_quantised.get(_ran_on(device.ops.type), ()))
    beside = RAN.lora_beside.get(_ran_on(device.ops.type), ())
    states = kept_by(model.architecture)
    found = {
        f"quantisation {other}": other,
        "pooling": _pools(config),
        f"the multimodal model {model.architecture}": model.is_multimodal_model and model.architecture not in beside,
        f"layers that keep states{f', {states}' if states else ''}": _has_states(model)
        and not {states, model.architecture} & {*beside},
        f"--{setting.replace('_', '-')}": bool(setting),
        f"--lora-dtype {dtype} of a model in {of_model}": dtype not in ("auto", of_model),
        f"logits in {of_head} of a model in {of_model}": of_head != of_model,
        f"{DUAL_STREAM}={os.environ.get(DUAL_STREAM)}": os.environ.get(DUAL_STREAM, "0").lower() not in _OFF,
    }
    first = _first(found)
    return _when(first, f"LoRA adapters with {first}")


def _adapters_of_experts(config: Config) -> str | None:
    """A mixture of experts that has not been run with adapters."""
    model, lora = config.model_config, config.lora_config
    if lora is None or not schemes.has_experts(model) or _adapters_elsewhere(config):
        return None
    ops, workers = devices.of_config(config).ops, config.parallel_config.tensor_parallel_size
    ran, shared = (of.get(_ran_on(ops.type), ()) for of in (RAN.lora_experts, RAN.lora_expert_workers))
    state = kept_by(model.architecture)
    mixed = expert_adapters.takes_stacked(lora) and (model.architecture in expert_adapters.STACKED or state)
    found = {
        f"of the mixture of experts {model.architecture}": model.architecture not in ran,
        "of quantised experts": bool(getattr(model, "quantization", None)),
        "of experts beside expert parallelism": bool(config.parallel_config.enable_expert_parallel),
        f"of a mixture of experts by {workers} workers on {ops.name}": workers > 1 and workers not in shared,
        f"of experts beside states by {workers} workers": workers > 1 and state,
        "of experts beside states and drafts": config.speculative_config is not None and state,
        f"of {model.architecture} with --enable-mixed-moe-lora-format": mixed,
    }
    first = _first(found)
    return _when(first, f"LoRA adapters {first}")


def _beside_adapters(config: Config) -> str | None:
    """What has not been run beside them."""
    model, device = config.model_config, devices.of_config(config)
    if config.lora_config is None or _adapters_elsewhere(config):
        return None
    several, workers = _several(config), config.parallel_config.tensor_parallel_size
    if workers in RAN.lora_workers.get(_ran_on(device.ops.type), ()):
        del several[f"tensor parallelism {workers}"]
    method, drafters = (
        _method(config),
        RAN.lora_drafters.get(_ran_on(device.ops.type), ()),
    )
    found = {
        **several,
        f"{envs.TP_TREE.name}={tensor_tree.k_slices()}": tensor_tree.k_slices() > 1,
        f"speculative decoding with {method}": config.speculative_config is not None and method not in drafters,
        "exact arithmetic": device.is_exact,
        "FlexAttention": envs.ATTENTION.read() == "flex",
        f"a KV cache in {_cache_dtype(config)}": _cache_dtype(config) in FP8_CACHES,
        "embeddings as prompts": model.enable_prompt_embeds,
        "a KV connector": bool(connectors.name(config)),
    }
    if model.is_multimodal_model or kept_by(model.architecture):
        of_model, beside = "states", kept_by(model.architecture)
        if model.is_multimodal_model:
            of_model, beside = "images", model.architecture
        ran_on = _ran_on(device.ops.type)
        shared = beside in RAN.lora_beside_by_two.get(ran_on, ())
        more = workers == 1 and beside in RAN.lora_beside_more.get(ran_on, ())
        kinds = RAN.lora_beside_quantised.get(model.architecture, {}).get(ran_on, ())
        quantised = workers == 1 and not _other_quantisation(config, kinds)
        found |= {
            f"{of_model} and tensor parallelism {workers}": workers > (2 if shared else 1),
            f"{of_model} and speculative decoding": method is not None and not more,
            f"{of_model} and quantised weights": model.quantization is not None and not (more or quantised),
        }
    first = _first(found)
    return _when(first, f"LoRA adapters beside {first}")


_OFF = ("0", "", "false")
"""Of a variable of vLLM's."""


def _logits_processors(config: Config) -> str | None:
    if getattr(config.model_config, "logits_processors", None):
        return "custom logits processors"
    installed = [f"{point.value} of {point.dist.name}" for point in entry_points(group=LOGITS_PROCESSORS) if point.dist]
    return f"the logits processor {installed[0]}" if installed else None


def _outputs_beside_tokens(config: Config) -> str | None:
    """Which experts tokens had, and which candidates their sampling left, where nobody has compared them."""
    asked = {
        "--enable-return-routed-experts": getattr(config, "aux_output_config", None),
        "--return-sampling-mask": config.model_config,
    }
    on = [option for option, holder in asked.items() if getattr(holder, option.strip("-").replace("-", "_"), False)]
    if not on:
        return None
    ops, version = devices.of_config(config).ops, patch_points.installed_version()
    found = {
        f"on {ops.name}": ops.type != "cuda",
        "with pipeline stages": config.parallel_config.pipeline_parallel_size > 1,
        f"with vLLM {version}": not version.startswith(RAN.on_gpus),
        "by vLLM's first model runner": ops.type == "cuda" and not config.use_v2_model_runner,
        "beside speculative decoding": config.speculative_config is not None,
        "in exact arithmetic": devices.of_config(config).is_exact,
    }
    first = _first(found)
    return _when(first, f"{on[0]} {first}")


def _output_head(config: Config) -> str | None:
    """A generating model's head in another dtype than the model: ``head_dtype`` of its configuration, or of its text
    model's, which vLLM's head reads in some multimodal ones.
    """
    model, device, parallel = config.model_config, devices.of_config(config), config.parallel_config
    of_model = _dtype_of(model)
    of_text = getattr(getattr(model, "hf_text_config", None), "head_dtype", None)
    named = {str(one).removeprefix("torch.") for one in (getattr(model, "head_dtype", None), of_text) if one}
    others = sorted(named - {of_model, "model"})
    if _pools(config) or not others:
        return None
    head = f"an output head in {others[0]} of a model in {of_model}"
    has_run = _is_untried_on_gpus(config) or heads_in_fp32(device.ops.type)
    if others != ["float32"] or device.is_exact or not has_run:
        return head
    method = getattr(getattr(config, "speculative_config", None), "method", None)
    beside = {
        "inputs that are encoded": model.is_multimodal_model,
        f"{parallel.tensor_parallel_size} workers": parallel.tensor_parallel_size > 2,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        f"drafts by {method}": method not in (None, "ngram"),
    }
    first = _first(beside)
    return _when(first, f"{head} beside {first}")


def heads_in_fp32(device_type: str) -> bool:
    """Whether engines of the installed vLLM have had an output head in fp32 of a model in 16 bits there."""
    ran = RAN.heads_in_fp32.get(device_type)
    return ran is not None and patch_points.installed_version().startswith(ran)


def _pools(config: Config) -> bool:
    return config.model_config.runner_type == "pooling"


def _other_runner(config: Config) -> str | None:
    runner = config.model_config.runner_type
    return _when(runner not in ("generate", "pooling"), f"the {runner} runner")


def _pooling_elsewhere(config: Config) -> str | None:
    if not _pools(config):
        return None
    ops, version = devices.of_config(config).ops, patch_points.installed_version()
    if ops.type not in RAN.pooling:
        return f"the pooling runner on {ops.name}"
    if not version.startswith(RAN.pooling[ops.type]):
        return f"the pooling runner with vLLM {version}"
    experts = ops.type == "cuda" and config.model_config.is_moe and not envs.starts_untried()
    return _when(experts, "a mixture of experts that pools on a GPU")


def _is_encoder(config: Config) -> bool:
    return _pools(config) and config.model_config.attn_type == "encoder_only"


def _both_directions_of_a_pooling_model(config: Config) -> str | None:
    kind = config.model_config.attn_type if _pools(config) else "decoder"
    ops = devices.of_config(config).ops
    if _is_encoder(config):
        model = getattr(config.model_config, "architecture", RAN.encoders[0])  # a folder may not tell it
        found = {
            f"attention of the kind {kind} on {ops.name}": ops.type not in ("cpu", "cuda"),
            f"attention of the kind {kind} of {model}": model not in RAN.encoders,
        }
        return _first(found)
    return _when(kind != "decoder", f"attention of the kind {kind}")


def _beside_an_encoder(config: Config) -> str | None:
    """What has not been run with models whose tokens see those after them."""
    if not _is_encoder(config):
        return None
    workers = config.parallel_config.tensor_parallel_size
    found = {
        "prompts in chunks": config.scheduler_config.enable_chunked_prefill,
        f"tensor parallelism {workers}": workers > 1,
        "vLLM's first model runner": devices.of_config(config).ops.type == "cuda" and not config.use_v2_model_runner,
    }
    first = _first(found)
    return _when(first, f"an encoder with {first}")


def _late_interaction(config: Config) -> str | None:
    return _when(_pools(config) and config.model_config.score_type == "late-interaction", "scores of late interaction")


def _beside_pooling(config: Config) -> str | None:
    """What has not been run with pooling models."""
    if not _pools(config):
        return None
    parallel = config.parallel_config
    found = {
        f"pipeline parallelism {parallel.pipeline_parallel_size}": parallel.pipeline_parallel_size > 1,
        f"data parallelism {parallel.data_parallel_size}": parallel.data_parallel_size > 1,
        "several GPUs": devices.of_config(config).ops.type == "cuda" and parallel.tensor_parallel_size > 1,
        f"{envs.TP_TREE.name}={tensor_tree.k_slices()}": tensor_tree.k_slices() > 1,
        "exact arithmetic": devices.of_config(config).is_exact,
        "a multimodal model as text": config.model_config.is_multimodal_model,
    }
    first = _first(found)
    return _when(first, f"a pooling model with {first}")


def _several(config: Config) -> dict[str, bool]:
    """Workers, stages and engines: whether there are more than one."""
    parallel = config.parallel_config
    sizes = {kind: getattr(parallel, f"{kind}_parallel_size") for kind in ("tensor", "pipeline", "data")}
    return {f"{kind} parallelism {size}": size > 1 for kind, size in sizes.items()}


class _Kept(NamedTuple):
    """Layers that keep a state of each request beside attention.

    Attributes:
        name: what a refusal calls them.
        of_rules: what it calls states that must be fp32; empty if there are none.
        models: whose only layers with states these are.
        ran: versions whose engines have served them, by device.
        workers: numbers of workers above 1 that have shared them, by device.
        drafters: methods of speculative decoding that have been run beside them, by device: on a CPU also beside a
            prefix cache.
        quantised: kinds of quantised weights that have been served beside them, by device.
    """

    name: str
    of_rules: str
    models: tuple[str, ...]
    ran: Mapping[str, str]
    workers: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    drafters: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    quantised: Mapping[str, tuple[str, ...]] = MappingProxyType({})


_CONVOLUTIONS = _Kept(
    "short convolutions",
    "",
    RAN.convolution_models,
    RAN.short_convolutions,
    RAN.short_convolution_workers,
    RAN.short_convolution_drafters,
    RAN.short_convolution_quantised,
)
_DELTA_RULES = _Kept(
    "gated delta rules",
    "rules",
    RAN.delta_rule_models,
    RAN.delta_rules,
    RAN.delta_rule_workers,
    RAN.delta_rule_drafters,
    RAN.delta_rule_quantised,
)


_STATE_SPACES = _Kept(
    "state spaces of Mamba-2",
    "state spaces",
    RAN.mamba2_models,
    RAN.mamba2,
    RAN.mamba2_workers,
    RAN.mamba2_drafters,
    RAN.mamba2_quantised,
)

_KDA = _Kept("Kimi Delta Attention", "Kimi Delta Attention", RAN.kda_models, RAN.kda, RAN.kda_workers, RAN.kda_drafters)
_LIGHTNING = _Kept("linear attention", "linear attention", RAN.lightning_models, RAN.lightning, RAN.lightning_workers)


def _has_latent_experts(model: Any) -> bool:
    """Whether experts of a Nemotron-H are given vectors of another size than the others of the model."""
    latent = getattr(getattr(model, "hf_text_config", None), "moe_latent_size", None)
    return latent is not None and schemes.has_experts(model)


def _is_nemotron(config: Config) -> bool:
    """Whether a model's text is a Nemotron-H."""
    named = "NemotronHForCausalLM", "NemotronH_Nano_VL_V2", "NemotronH_Nano_Omni_Reasoning_V3"
    return getattr(config.model_config, "architecture", "") in named


def _keeps(config: Config, kept: _Kept) -> bool:
    return getattr(config.model_config, "architecture", "") in kept.models


def _has_states(model: Any) -> bool:
    return model.is_attention_free or model.is_hybrid or model.has_inner_state


def kept_by(architecture: str) -> str:
    """The name of the states that a model's layers keep, if they are known; else nothing."""
    every = _CONVOLUTIONS, _DELTA_RULES, _STATE_SPACES, _KDA, _LIGHTNING
    return next((kept.name for kept in every if architecture in kept.models), "")


def _states(config: Config) -> str | None:
    model = config.model_config
    known = kept_by(getattr(model, "architecture", ""))
    return _when(_has_states(model) and not known, "Mamba or linear attention")


_OF_STATES = (
    *("prefix_match_unit", "user_specified_mamba_block_size", "use_replayssm", "use_kda_recoverssm"),
    *("enable_mamba_shared_prefix_checkpoint", "enable_mamba_fine_grained_prefix_cache"),
)
"""Settings of a cache that say which states are kept, each off unless a user sets it."""
_RETENTION = "prefix_cache_retention_interval"
"""One that has been run on a CPU: without it no state is kept that an answer has filled a page with."""


def _convolutions_elsewhere(config: Config) -> str | None:
    return _states_elsewhere(config, _CONVOLUTIONS)


def _delta_rules_elsewhere(config: Config) -> str | None:
    return _states_elsewhere(config, _DELTA_RULES)


def _state_spaces_elsewhere(config: Config) -> str | None:
    return _states_elsewhere(config, _STATE_SPACES)


def _linear_attention_elsewhere(config: Config) -> str | None:
    return _states_elsewhere(config, _KDA) or _states_elsewhere(config, _LIGHTNING)


def _states_elsewhere(config: Config, kept: _Kept) -> str | None:
    """What has not been run with layers that keep a state."""
    if not _keeps(config, kept):
        return None
    ops, version = devices.of_config(config).ops, patch_points.installed_version()
    untried = _is_untried_on_gpus(config) and version.startswith(RAN.on_gpus)
    if ops.type not in kept.ran and not untried:
        return f"{kept.name} on {ops.name}"
    if not untried and not version.startswith(kept.ran[ops.type]):
        return f"{kept.name} with vLLM {version}"
    model, cache = config.model_config, config.cache_config
    dtype, of_rules = (getattr(cache, f"mamba_{of}cache_dtype", "auto") for of in ("", "ssm_"))
    of_model = _dtype_of(model)
    settings = _OF_STATES if ops.type == "cpu" else (*_OF_STATES, _RETENTION)
    setting = next((name for name in settings if getattr(cache, name, None)), "")
    rounds = getattr(getattr(config, "mamba_config", None), "enable_stochastic_rounding", False)
    ran_on = _ran_on(ops.type)
    numbers, slices = kept.workers.get(ran_on, ()), tensor_tree.k_slices()
    several = _several(config)
    workers = config.parallel_config.tensor_parallel_size
    most = max(workers, slices)
    if workers in numbers:
        del several[f"tensor parallelism {workers}"]
    drafters, method = kept.drafters.get(ran_on, ()), _method(config)
    caches_drafts = method is not None and cache.enable_prefix_caching
    drafts_mixed = (
        kept is _STATE_SPACES and method == "mtp" and model.quantization == schemes.MIXED and _has_latent_experts(model)
    )
    drafts_quantised = drafts_mixed or (
        kept is _DELTA_RULES
        and all(
            kind not in RAN.delta_rule_quantised_drafters_on_gpus
            or f"{method} of {model.architecture}" in RAN.delta_rule_quantised_drafters_on_gpus[kind]
            for kind in _kinds(config)
        )
    )
    other = _other_quantisation(config, _quantised_beside(config, kept, ran_on))
    of_four = RAN.delta_rule_quantised_by_four if kept is _DELTA_RULES else {}
    by_four = tuple(kind for on in _runs(config) for kind in of_four.get(on, ()))
    found = {
        **several,
        f"{envs.TP_TREE.name}={slices}": slices not in (1, *numbers),
        f"speculative decoding{f' with {method}' if drafters else ''}": method not in (None, *drafters),
        f"speculative decoding with {method} and a prefix cache on a GPU": caches_drafts
        and ran_on == "cuda"
        and method not in RAN.drafts_beside_prefix_caches_on_gpus.get(kept.name, ()),
        "speculative decoding and quantised weights on a GPU": method
        and model.quantization
        and ran_on == "cuda"
        and not drafts_quantised,
        "speculative decoding, quantised weights and a prefix cache on a GPU": caches_drafts
        and ran_on == "cuda"
        and not drafts_mixed
        and _other_quantisation(config, _kinds_beside_drafts(config)),
        "speculative decoding and experts on a GPU": method not in (None, "mtp")
        and ran_on == "cuda"
        and kept is _STATE_SPACES
        and schemes.has_experts(model),
        f"speculative decoding and a prefix cache by {workers} workers": caches_drafts
        and not _have_drafted(config, kept.name),
        f"states in {dtype}": dtype not in ("auto", of_model),
        f"states of {kept.of_rules} in {of_rules}": kept.of_rules and of_rules not in ("auto", "float32"),
        "stochastic rounding": rounds,
        f"quantisation {other}": other,
        f"quantised weights by {most} workers": model.quantization
        and most > 2
        and not untried
        and _other_quantisation(config, by_four if most == 4 else ()),
        f"experts in ModelOpt's FP8 by {most} workers": most > 1
        and model.quantization == "modelopt"
        and schemes.has_experts(model)
        and not untried,
        "quantised experts": model.quantization
        and schemes.has_experts(model)
        and not (kept is _DELTA_RULES or _is_nemotron(config)),
        f"a KV cache in {_cache_dtype(config)}": _is_fp8_elsewhere(config, kept.name, ran_on)
        or _is_fp8_not_run_on_gpus(config),
        f"a KV cache in {_cache_dtype(config)} by {most} workers": _cache_dtype(config) in FP8_CACHES
        and most > 1
        and not (model.quantization and _has_shared_codes(config, RAN.encoded_quantised_beside_fp8_caches)),
        "embeddings as prompts": model.enable_prompt_embeds,
        "sleep": getattr(model, "enable_sleep_mode", False) and ops.type != "cuda",
        f"latent experts by {workers} GPUs": ran_on == "cuda" and workers > 1 and _has_latent_experts(model),
        setting: bool(setting),
        "the first model runner": ops.type == "cuda" and not config.use_v2_model_runner,
        f"{of_model} on a GPU": (kept.of_rules or method) and ran_on == "cuda" and of_model != "bfloat16",
    }
    first = _first(found)
    return _when(first, f"{kept.name} with {first}")


def _have_drafted(config: Config, beside: str) -> bool:
    """Whether one worker drafts, or as many as have beside layers of a kind and a prefix cache, with weights that are
    not quantised; on a GPU any number starts untried.
    """
    workers, device = config.parallel_config.tensor_parallel_size, devices.of_config(config).ops.type
    if workers == 1 or _is_untried_on_gpus(config):
        return True
    model = config.model_config
    if beside != kept_by(model.architecture) and (
        kept_by(model.architecture) or _method(config) not in ("ngram", "mtp")
    ):
        return False
    return not model.quantization and workers in RAN.drafting_workers.get(beside, {}).get(device, ())


def _states_shared(config: Config) -> str | None:
    """What several workers have not run beside layers with states but gated delta rules."""
    workers = max(config.parallel_config.tensor_parallel_size, tensor_tree.k_slices())
    kept = next((kept for kept in (_CONVOLUTIONS, _STATE_SPACES) if _keeps(config, kept)), None)
    if workers == 1 or kept is None:
        return None
    model = config.model_config
    of_experts = RAN.mamba2_expert_workers.get(_ran_on(devices.of_config(config).ops.type), ())
    sizes = getattr(model, "hf_text_config", None)
    groups, untried = getattr(sizes, "mamba_n_groups", getattr(sizes, "n_groups", workers)), _is_untried_on_gpus(config)
    found = {
        f"{groups} groups": kept is _STATE_SPACES and groups % workers > 0,
        "drafts": config.speculative_config is not None,
        "experts": schemes.has_experts(model) and not (_is_nemotron(config) and workers in of_experts) and not untried,
        "quantised weights": model.quantization and not untried,
        "an FP8 cache": _cache_dtype(config) in FP8_CACHES,
        "a tree on GPUs": tensor_tree.k_slices() > 1 and _by_gpus_alone(config),
    }
    first = _first(found)
    return _when(first, f"{kept.name} with {first} by {workers} workers")


def _quantised_beside(config: Config, kept: _Kept, ran_on: str) -> tuple[str, ...]:
    """Kinds of quantised weights that have run beside such layers; fewer of experts on GPUs, and by two of these."""
    several, is_moe = config.parallel_config.tensor_parallel_size > 1, config.model_config.is_moe
    ran = kept.quantised.get(ran_on, ())
    if kept is _DELTA_RULES and ran_on == "cuda" and (several or is_moe):
        by_two = () if is_moe else RAN.delta_rule_quantised_by_two_gpus
        ran = by_two if several else RAN.delta_rule_experts_on_gpus
    elif _is_nemotron(config) and schemes.has_experts(config.model_config):
        ran = RAN.mamba2_quantised_experts.get(ran_on, ())
        if ran_on == "cuda" and _has_latent_experts(config.model_config):
            ran = tuple(kind for kind in ran if kind.startswith("modelopt"))
    without = RAN.quantised_not_run_with.get(ran_on, {}).get(config.model_config.architecture, ())
    return tuple(kind for kind in ran if kind not in without)


def _is_latent(config: Config) -> bool:
    return bool(getattr(config.model_config, "use_mla", False))


def _latent_attention(config: Config) -> str | None:
    model = config.model_config
    architecture = getattr(model, "architecture", "")
    if not model.use_mla or architecture in RAN.latent_models:
        return None
    return f"multi-head latent attention{f' of {architecture}' if architecture else ''}"


def _latent_elsewhere(config: Config) -> str | None:
    """What has not been run with models whose layers have latent attention."""
    named = "latent attention"
    of_models = RAN.latent_models, RAN.latent, RAN.latent_workers, RAN.latent_drafters, RAN.latent_trees
    if found := _beside_layers(config, named, *of_models, RAN.latent_quantised):
        return found
    if not _is_latent(config):
        return None
    text, model = config.model_config.hf_text_config, config.model_config
    device = devices.of_config(config).ops.type
    by_gpus, dtype = _by_gpus_alone(config), _dtype_of(model)
    sizes = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    scaling = getattr(text, "llama_4_scaling", None)
    workers, method = config.parallel_config.tensor_parallel_size, _method(config)
    unshared = _other_quantisation(config, RAN.latent_quantised_by_two_gpus)
    undrafted = _other_quantisation(config, RAN.latent_quantised_drafted_on_gpus)
    beside = {
        "keys that an indexer chooses": getattr(text, "index_topk", None) is not None,
        f"vectors of {sizes[0]} and {sizes[1]} elements": sizes not in LATENT_SIZES,
        "queries that are scaled by their position": scaling is not None,
        f"quantised weights of {model.architecture}": model.quantization is not None
        and model.architecture in RAN.latent_on_cpus_alone,
        "sleep": getattr(model, "enable_sleep_mode", False),
        f"{model.architecture} on a GPU": by_gpus and model.architecture in RAN.latent_on_cpus_alone,
        f"quantisation {unshared} by {workers} GPUs": by_gpus and workers > 1 and unshared,
        f"quantisation {undrafted} and speculative decoding on a GPU": by_gpus and method is not None and undrafted,
        f"{dtype} on a GPU": by_gpus and dtype != "bfloat16",
        "float32 on a GPU": device == "cuda" and dtype == "float32",
    }
    first = _first(beside)
    return _when(first, f"{named} with {first}")


def _latent_without_its_weights(config: Config) -> str | None:
    """Latent attention whose weights vLLM does not load, or whose pages it does not make."""
    if not _is_latent(config):
        return None
    text, page = config.model_config.hf_text_config, config.cache_config.block_size
    found = {
        "tied embeddings": getattr(text, "tie_word_embeddings", False),
        "biases": getattr(text, "attention_bias", False),
        f"--block-size {page}": page and page % LATENT_PAGES,
    }
    first = _first(found)
    return _when(first, f"latent attention with {first}")


def _head_size(config: Config) -> str | None:
    if _is_latent(config):  # whose sizes are others
        return None
    size = config.model_config.get_head_size()
    others = HEAD_SIZES if _has_heads_of_two_sizes(config) else _SMALLER
    sizes = ENCODER_HEAD_SIZES if _is_encoder(config) else others
    return _when(size not in sizes, f"attention heads of size {size}")


def _has_heads_of_two_sizes(config: Config) -> bool:
    return getattr(config.model_config, "architecture", "") in RAN.two_head_sizes


def _shares_caches(model: Any) -> bool:
    """Whether layers read the KV cache of another."""
    return bool(getattr(getattr(model, "hf_text_config", None), "num_kv_shared_layers", 0))


def _two_head_sizes_elsewhere(config: Config) -> str | None:
    """What has not been run with models whose layers have heads of two sizes, or share KV caches."""
    named = TWO_SIZES
    of_models = RAN.two_head_sizes, RAN.large_heads, RAN.large_head_workers
    if found := _beside_layers(config, named, *of_models, RAN.large_head_drafters, {}, RAN.large_head_quantised):
        return found
    model, workers = config.model_config, config.parallel_config.tensor_parallel_size
    if not _has_heads_of_two_sizes(config):
        return None
    drafts, several = config.speculative_config is not None, max(workers, tensor_tree.k_slices()) > 1
    drafted = _kinds_beside_drafts(config)
    kind = next((kind for kind in _kinds(config) if kind in RAN.large_head_quantised_by_one), "")
    if kind and (several or (drafts and kind not in drafted)):
        return f"{named} with quantisation {kind} by several workers or beside drafts"
    if kind.startswith("compressed-tensors") and _shares_caches(model) and _by_gpus_alone(config):
        return f"{named} with quantisation {kind} and KV caches that layers share on a GPU"
    of_cache = f"{named} with a KV cache in {_cache_dtype(config)}"
    if _is_fp8_with_other_weights(config, named, _ran_on(devices.of_config(config).ops.type)):
        return f"{of_cache} beside quantisation {' and '.join(_kinds(config))}"
    if _cache_dtype(config) in FP8_CACHES and (several or _drafts_beside_other_caches(config)):
        return f"{of_cache} by several workers or beside drafts"
    if not _by_gpus_alone(config):
        return None
    dtype, quantised = _dtype_of(model), "quantised weights"
    drafts_beside_images = bool(_encoded(config)) and _method(config) in RAN.encoded_drafters.get(
        model.architecture, {}
    ).get("cuda", ())
    together = {"speculative decoding": drafts, f"tensor parallelism {workers}": workers > 1}
    asked = {
        quantised: bool(model.quantization),
        f"a KV cache in {_cache_dtype(config)}": _cache_dtype(config) in FP8_CACHES,
        **together,
    }
    by_one = model.architecture in RAN.large_heads_on_cpus_alone
    other = _other_quantisation(config, RAN.encoded_quantised.get(model.architecture, {}).get("cuda", ()))
    seen = {quantised: bool(_encoded(config)) and other is None, "speculative decoding": drafts_beside_images}
    beside = {
        f"{what} of {model.architecture} on a GPU": is_so and by_one and not seen.get(what)
        for what, is_so in asked.items()
    }
    beside |= {f"{what} in {dtype} on a GPU": is_so and dtype != "bfloat16" for what, is_so in asked.items()}
    if drafts and _other_quantisation(config, drafted) is None:
        del together["speculative decoding"]
    beside |= {f"{quantised} and {what} on a GPU": asked[quantised] and is_so for what, is_so in together.items()}
    first = _first(beside) or _fp8_of_two_head_sizes_elsewhere(config)
    return _when(first, f"{named} with {first}")


def _kinds_beside_drafts(config: Config) -> tuple[str, ...]:
    """Kinds of quantised weights of a model that takes images, with which its method of drafting has run."""
    ran_on = _ran_on(devices.of_config(config).ops.type)
    of_model = RAN.encoded_quantised_drafted.get(config.model_config.architecture, {})
    return of_model.get(ran_on, {}).get(str(_method(config)), ())


def _drafts_beside_other_caches(config: Config) -> bool:
    """Whether a method drafts that has not run beside a KV cache in FP8 of a model that takes images."""
    ran_on, method = _ran_on(devices.of_config(config).ops.type), _method(config)
    of_model = RAN.encoded_drafters_beside_fp8_caches.get(config.model_config.architecture, {})
    return method is not None and method not in of_model.get(ran_on, ())


def _fp8_of_two_head_sizes_elsewhere(config: Config) -> str | None:
    """What GPUs have not run of such a cache beside heads of two sizes."""
    model, scheme = config.model_config, getattr(getattr(config, "quant_config", None), "kv_cache_scheme", None)
    if _cache_dtype(config) not in FP8_CACHES:
        return None
    shares, seen = _shares_caches(model), bool(_encoded(config)) and not model.quantization
    other = _other_quantisation(config, RAN.fp8_kv_cache_shared_on_gpus)
    found = {
        f"that layers share, beside quantisation {other}": shares and other,
        "that layers share, with scales of the checkpoint": shares
        and scheme
        and model.architecture not in RAN.fp8_kv_cache_shared_with_scales_on_gpus,
        "that layers share, with images, of weights in 16 bits": shares and seen,
        "with images, of experts in 16 bits": seen and schemes.has_experts(model),
    }
    first = _first(found)
    return _when(first, f"a KV cache in {_cache_dtype(config)} {first} on a GPU")


def _chunks_elsewhere(config: Config) -> str | None:
    """What has not been run with models whose layers see the keys of a token's own chunk alone."""
    of_models = RAN.chunked_models, RAN.chunks, RAN.chunk_workers
    if found := _beside_layers(config, "attention in chunks", *of_models, {}, RAN.chunk_trees, RAN.chunk_quantised):
        return found
    model, most = config.model_config, max(config.parallel_config.tensor_parallel_size, tensor_tree.k_slices())
    if getattr(model, "architecture", "") in RAN.chunked_models:
        quantised, by_gpus, dtype = bool(model.quantization), _by_gpus_alone(config), _dtype_of(model)
        images, given = _encoded(config), dtype in RAN.chunk_image_dtypes_on_gpus
        beside = {
            f"quantised weights by {most} workers": quantised and most > 1,
            f"quantised weights of {model.architecture}": quantised and not model.is_multimodal_model,
            f"quantised weights in {dtype} on a GPU": quantised and by_gpus and dtype != "bfloat16",
            f"{images} in {dtype} on a GPU": images and not quantised and by_gpus and not given,
            "sleep on a GPU": by_gpus and getattr(model, "enable_sleep_mode", False),
        }
        if first := _first(beside):
            return f"attention in chunks with {first}"
    chunk = getattr(getattr(config.model_config, "hf_text_config", None), "attention_chunk_size", None)
    page = getattr(config.cache_config, "block_size", None)
    # vLLM, which makes a request of each chunk, ends at the first one
    return _when(chunk and page and chunk % page, f"attention in chunks of {chunk} tokens with --block-size {page}")


def _beside_layers(
    config: Config,
    named: str,
    models: Collection[str],
    ran: Mapping[str, str],
    numbers: Mapping[str, Collection[int]],
    drafters: Mapping[str, Collection[str]],
    trees: Mapping[str, Collection[int]] = MappingProxyType({}),
    quantised: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> str | None:
    """What has not been run with models that have layers of a kind.

    Args:
        named: the kind, in words.
        models: that have them.
        ran: versions that have served them, by device.
        numbers: of workers above 1 that have shared them, by device.
        drafters: methods of speculative decoding that one worker has run beside them, by device.
        trees: slices of a tree by which as many workers, with whole experts, have had the bits of one, by device.
        quantised: kinds of quantised weights that one worker has run with them, by device.
    """
    if getattr(config.model_config, "architecture", "") not in models:
        draft_model = getattr(config.speculative_config, "draft_model_config", None)
        return _when(getattr(draft_model, "architecture", "") in models, f"a draft model with {named}")
    device, version = devices.of_config(config), patch_points.installed_version()
    ops, untried = device.ops, _is_untried_on_gpus(config)
    if ops.type not in ran and not untried:
        return f"{named} on {ops.name}"
    if not version.startswith(ran.get(ops.type, RAN.on_gpus)):
        return f"{named} with vLLM {version}"
    model, method = config.model_config, _method(config)
    several, workers = _several(config), config.parallel_config.tensor_parallel_size
    ran_on = _ran_on(ops.type)
    slices, of_trees = tensor_tree.k_slices(), trees.get(ran_on, ())
    has_tree = slices in of_trees
    in_fp8 = _is_fp8_with_these_weights(config, named, ran_on)
    other = None if in_fp8 else _other_quantisation(config, quantised.get(ran_on, ()))
    by_gpus = ran_on == "cuda"
    shares_quantised = has_tree or workers <= 2 or untried
    if workers in (*numbers.get(ran_on, ()), *(of_trees if has_tree else ())):
        del several[f"tensor parallelism {workers}"]
    found = {
        **several,
        f"{envs.TP_TREE.name}={slices}": slices > 1 and not has_tree,
        f"speculative decoding with {method}": method not in (None, *drafters.get(ran_on, ())),
        f"speculative decoding by {workers} workers": method is not None and not _have_drafted(config, named),
        f"speculative decoding and {envs.TP_TREE.name}={slices}": method is not None and slices > 1,
        f"quantisation {other}": other,
        f"quantised weights by {workers} workers": model.quantization and not shares_quantised,
        f"a KV cache in {_cache_dtype(config)}": _is_fp8_elsewhere(config, named, ran_on),
        "LoRA adapters": config.lora_config is not None,
        "pooling": _pools(config),
        "embeddings as prompts": model.enable_prompt_embeds,
        "exact arithmetic": device.is_exact,
        "FlexAttention": envs.ATTENTION.read() == "flex",
        "the first model runner": by_gpus and not config.use_v2_model_runner,
        "expert parallelism": model.is_moe
        and config.parallel_config.enable_expert_parallel
        and not (has_tree or untried),
        "--disable-hybrid-kv-cache-manager": config.scheduler_config.disable_hybrid_kv_cache_manager,
    }
    first = _first(found)
    return _when(first, f"{named} with {first}")


def _kind_of_attention(config: Config) -> str | None:
    text = getattr(config.model_config, "hf_text_config", None)
    if getattr(text, "num_kv_shared_layers", None) and not _has_heads_of_two_sizes(config):
        return "layers that share a KV cache"
    architecture = getattr(config.model_config, "architecture", "")
    if getattr(text, "attention_chunk_size", None) and architecture not in RAN.chunked_models:
        return "attention in chunks"
    return _when(getattr(text, "dual_chunk_attention_config", None), "dual chunk attention")


def _unknown_multimodal(config: Config) -> str | None:
    model = config.model_config
    if not model.is_multimodal_model:
        return None
    if model.architecture not in RAN.text_of:
        return f"the model {model.architecture}"
    text, known = getattr(getattr(model, "hf_text_config", None), "model_type", ""), RAN.text_models
    found = text not in known.get(model.architecture, (text,))
    return _when(found, f"the model {model.architecture} around one of the type {text!r}")


def _rounded_to_bf16(config: Config) -> str | None:
    """Models whose encoder gives bf16 by vLLM's source, and whose projector has the dtype of the model."""
    model, dtype = config.model_config, _dtype_of(config.model_config)
    architecture = getattr(model, "architecture", "")
    rounded = model.is_multimodal_model and architecture in RAN.encoded_in_bf16
    return _when(rounded and dtype != "bfloat16", f"{architecture} in {dtype}")


def _multimodal_not_run_on_gpus(config: Config) -> str | None:
    model = config.model_config
    if not model.is_multimodal_model or envs.starts_untried():
        return None
    kinds = RAN.encoded_on_cpus_alone.get(model.architecture, ())
    kinds = tuple(kind for kind in kinds if kind in encoding.encoded(model))  # it may be served without these
    return _when(kinds, f"{' and '.join(kinds)} inputs of {model.architecture} on a GPU")


def _text_of_a_decoder_of_its_own(config: Config) -> str | None:
    """What has not been run with multimodal models as text whose decoder no text model has."""
    model = config.model_config
    if getattr(model, "architecture", "") not in RAN.text_by_one_worker or _encoded(config):
        return None
    slices = tensor_tree.k_slices()
    found = {
        **_several(config),
        f"{envs.TP_TREE.name}={slices}": slices > 1,
        "speculative decoding": config.speculative_config is not None,
        f"quantisation {model.quantization}": model.quantization,
        f"a KV cache in {_cache_dtype(config)}": _cache_dtype(config) in FP8_CACHES,
        "LoRA adapters": config.lora_config is not None,
        "exact arithmetic": devices.of_config(config).is_exact,
    }
    first = _first(found)
    return _when(first, f"{model.architecture} as text with {first}")


def _text_of_what_sees(config: Config) -> str | None:
    model = config.model_config
    if not model.is_multimodal_model or model.architecture not in RAN.with_encoder_alone:
        return None
    return _when(not encoding.encoded(model), f"{model.architecture} as text")


def _multimodal_inputs(config: Config) -> str | None:
    model = config.model_config
    if not model.is_multimodal_model:
        return None
    taken = encoding.taken(model)
    refused = [kind for kind in taken if kind not in encoding.encoded(model)]
    if getattr(model, "supports_multimodal_inputs", False) and not taken:
        refused = ["multimodal"]
    return _when(refused, f"{' and '.join(refused)} inputs")


def _encoded(config: Config) -> str:
    """What is encoded, in words; empty if nothing is."""
    kinds = encoding.encoded(config.model_config)
    return f"{' and '.join(kinds)} inputs" if kinds else ""


def _encoded_elsewhere(config: Config) -> str | None:
    named = _encoded(config)
    if not named:
        return None
    ops, version = devices.of_config(config).ops, patch_points.installed_version()
    if ops.type not in RAN.encoding:
        return f"{named} on {ops.name}"
    return _when(not version.startswith(RAN.encoding[ops.type]), f"{named} with vLLM {version}")


def _encoded_by_several(config: Config) -> str | None:
    """Workers that share an encoder, or the images of a step, where as many have not: two or four, of some models,
    without audio and videos of GLM.
    """
    named, model, k_slices = _encoded(config), config.model_config, tensor_tree.k_slices()
    if not named:
        return None
    ran_on, workers = _ran_on(devices.of_config(config).ops.type), config.parallel_config.tensor_parallel_size
    by_one = {*RAN.encoded_by_one.get(model.architecture, ())} & {*encoding.encoded(model)}
    several, shares_images = max(workers, k_slices) > 1, model.multimodal_config.mm_encoder_tp_mode != "weights"
    shared = RAN.encoded_workers, *[RAN.encoded_data_workers] * (shares_images and k_slices == 1)
    of_model = [of.get(on, {}).get(model.architecture, ()) for of in shared for on in _runs(config)]
    numbers = [] if by_one else [number for found in of_model for number in found]
    tree, by_no_tree = f"{envs.TP_TREE.name}={k_slices}", model.architecture in RAN.images_by_no_tree
    by_gpus = ran_on == "cuda"
    data_of_one = not several and model.architecture in RAN.encoded_data_by_one.get(ran_on, ())
    data_elsewhere, tree_elsewhere = (
        by_gpus and model.architecture not in RAN.encoded_by_two_gpus[way] for way in ("data", "tree")
    )
    found = {
        f"tensor parallelism {workers}": workers not in (1, *numbers),
        f"{SHARED_IMAGES} data": shares_images and not (numbers or data_of_one),
        tree: k_slices > 1 and not numbers,
        f"{SHARED_IMAGES} data and {tree}": shares_images and k_slices > 1 and by_no_tree,
        f"{SHARED_IMAGES} data on GPUs": shares_images and data_elsewhere and not data_of_one,
        f"{SHARED_IMAGES} data and quantised weights on GPUs": shares_images
        and by_gpus
        and model.quantization
        and several,
        f"{tree} on GPUs": k_slices > 1 and tree_elsewhere,
        "a prefix cache beside states on GPUs": by_gpus
        and several
        and kept_by(model.architecture)
        and config.cache_config.enable_prefix_caching,
        "quantised weights by several workers": several
        and model.quantization
        and not _has_shared_codes(config, RAN.encoded_quantised_workers),
        f"a KV cache in {_cache_dtype(config)} by several workers": several
        and _cache_dtype(config) in FP8_CACHES
        and not (model.quantization and _has_shared_codes(config, RAN.encoded_quantised_beside_fp8_caches)),
    }
    first = _first(found)
    return _when(first, f"{named} of {model.architecture} with {first}")


def _has_shared_codes(config: Config, shared: Mapping[str, Mapping[str, Mapping[str, tuple[str, ...]]]]) -> bool:
    """Whether as many workers have shared a model whose weights are quantised so; one has a tree where two do.

    Args:
        shared: kinds of quantised weights, by model, device and number of workers.
    """
    model, workers = config.model_config, config.parallel_config.tensor_parallel_size
    of_model = shared.get(model.architecture, {})
    kinds = {kind for on in _runs(config) for kind in of_model.get(on, {}).get(str(max(workers, 2)), ())}
    return bool(kinds) and {*_kinds(config)} <= kinds


def _around_another_text_model(config: Config) -> str | None:
    """Of quantised weights what GPUs have run with images around other text models alone."""
    model = config.model_config
    text = getattr(getattr(model, "hf_text_config", None), "model_type", "")
    around = RAN.encoded_quantised_around_on_gpus.get(model.architecture, {})
    kinds = (kind for kind in _kinds(config) if kind in around)
    kind = next((kind for kind in kinds if text not in around[kind] or _shares_caches(model)), None)
    caches = " whose layers share KV caches" * _shares_caches(model)
    return kind and f"{kind} around one of the type {text!r}{caches} on a GPU"


def _beside_encoded(config: Config) -> str | None:
    """What has not been run with models that encode."""
    named = _encoded(config)
    if not named:
        return None
    model, attention, on = config.model_config, envs.ATTENTION.read(), devices.of_config(config).ops.type
    ran_on = _ran_on(on)
    other = _other_quantisation(config, RAN.encoded_quantised.get(model.architecture, {}).get(ran_on, ()))
    in_fp8 = _is_fp8_with_these_weights(config, model.architecture, ran_on)
    of_experts = RAN.encoded_quantised_experts.get(model.architecture, {}).get(ran_on, ())
    drafters = RAN.encoded_drafters.get(model.architecture, {}).get(ran_on, ())
    around = _around_another_text_model(config) if ran_on == "cuda" else None
    dtype = _dtype_of(model) if model.quantization else ""
    in_float16 = RAN.encoded_quantised_in_float16_on_gpus.get(model.architecture, ())
    method = _method(config)
    most = max(config.parallel_config.tensor_parallel_size, tensor_tree.k_slices())
    found = {
        **{what: is_so for what, is_so in _several(config).items() if not what.startswith("tensor")},
        f"speculative decoding with {method}": config.speculative_config is not None and method not in drafters,
        f"speculative decoding by {most} workers": method and most > 1,
        f"speculative decoding with {method} beside quantised weights": method
        and _other_quantisation(config, _kinds_beside_drafts(config)),
        f"speculative decoding beside a KV cache in {_cache_dtype(config)}": _cache_dtype(config) in FP8_CACHES
        and _drafts_beside_other_caches(config),
        "speculative decoding beside quantised weights and a KV cache in 16 bits on a GPU": method
        and ran_on == "cuda"
        and _cache_dtype(config) not in FP8_CACHES
        and {*_kinds(config)} & {*RAN.encoded_quantised_drafted_in_fp8_alone_on_gpus.get(model.architecture, ())},
        f"quantisation {other}": other and not in_fp8,
        f"quantised experts of {model.architecture}": model.quantization
        and _has_heads_of_two_sizes(config)
        and schemes.has_experts(model)
        and not in_fp8
        and _other_quantisation(config, of_experts),
        f"quantisation {around}": around and not in_fp8,
        f"quantised weights in {dtype} on a GPU": model.quantization
        and ran_on == "cuda"
        and dtype != "bfloat16"
        and (dtype != "float16" or _other_quantisation(config, in_float16)),
        f"a KV cache in {_cache_dtype(config)}": _is_fp8_elsewhere(config, model.architecture, ran_on),
        f"quantised weights and a KV cache in {_cache_dtype(config)}": _is_fp8_with_other_weights(
            config, model.architecture, ran_on
        ),
        "exact arithmetic": devices.of_config(config).is_exact,
        f"{envs.ATTENTION.name}={attention}": attention not in encoding.ATTENTION,
        "the first model runner": on == "cuda" and not config.use_v2_model_runner,
    }
    first = _first(found)
    return _when(first, f"{named} with {first}")


def _encoder(config: Config) -> str | None:
    """How an encoder runs, if nobody has run it so, or the items of a step decide what comes out."""
    named, model = _encoded(config), config.model_config
    if not named:
        return None
    items, compilation = model.multimodal_config, config.compilation_config
    pruned = RAN.pruned_videos.get(_ran_on(devices.of_config(config).ops.type), ())
    method = getattr(items, "video_pruning_method", "evs")
    found = {
        "--mm-encoder-attn-backend": items.mm_encoder_attn_backend is not None,
        "--mm-encoder-attn-dtype": items.mm_encoder_attn_dtype is not None,
        PRUNING: items.video_pruning_rate and (model.architecture not in pruned or "audio" in encoding.encoded(model)),
        f"--video-pruning-method {method}": items.video_pruning_rate and method != "evs",
        "--mm-processor-device": items.get_mm_processor_device_type() not in (None, "cpu"),
        "compile_mm_encoder": getattr(compilation, "compile_mm_encoder", False),
        "cudagraph_mm_encoder": getattr(compilation, "cudagraph_mm_encoder", False),
        "--ec-manager-config": getattr(getattr(config, "ec_manager_config", None), "encoder_cache_manager_cls", None),
    }
    first = _first(found)
    return _when(first, f"{named} with {first}")


def _embeddings(config: Config) -> str | None:
    model = config.model_config
    if not model.is_multimodal_model:
        return None
    if model.multimodal_config.enable_mm_embeds:
        return "embeddings of images"
    return _when(model.enable_prompt_embeds, "embeddings as prompts of a multimodal model")


def _drafts_beside_embeddings(config: Config) -> str | None:
    """All but n-grams on a CPU. vLLM asks a prompt for the next token of a chunk, which a draft model begins with, and
    ends the engine where the prompt is embeddings.
    """
    if not (config.speculative_config and config.model_config.enable_prompt_embeds):
        return None
    method, on = config.speculative_config.method, devices.of_config(config).ops.type
    ran = method == "ngram" and (on == "cpu" or envs.starts_untried())
    return _when(not ran, f"embeddings as prompts beside speculative decoding with {method}")


def _stages_beside_embeddings(config: Config) -> str | None:
    stages = config.parallel_config.pipeline_parallel_size
    found = stages > 1 and config.model_config.enable_prompt_embeds and not envs.starts_untried()
    return _when(found, f"embeddings as prompts beside pipeline parallelism {stages}")


def _both_directions(config: Config) -> str | None:
    model = config.model_config
    if not (model.is_multimodal_model and model.is_mm_prefix_lm):
        return None
    threshold = config.scheduler_config.long_prefill_token_threshold
    found = {
        f"of {model.architecture}": not encoding.encoded(model),
        f"beside --long-prefill-token-threshold {threshold}": threshold > 0,
    }
    first = _first(found)
    return _when(first, f"attention of an image's tokens in both directions {first}")


def _encoder_decoder(config: Config) -> str | None:
    """A decoder that sees what an encoder gave, where none has run: its tokens are the last of as many positions."""
    model = config.model_config
    if not model.is_encoder_decoder:
        return None
    rows = getattr(model.hf_config, "max_source_positions", 0)
    found = {
        f"of {model.architecture}": not encoding.encoded(model),
        f"with --max-model-len {model.max_model_len}": model.max_model_len > rows,
    }
    first = _first(found)
    return _when(first, f"cross attention {first}")


def _experts(config: Config) -> str | None:
    missing = config.model_config.is_moe and not devices.of_config(config).has_experts
    return _when(missing, "mixture of experts")


def _experts_by_another_version(config: Config) -> str | None:
    version = patch_points.installed_version()
    other = config.model_config.is_moe and not version.startswith(RAN.on_gpus)
    return _when(other, f"mixture of experts with vLLM {version}")


def _experts_not_run_on_gpus(config: Config) -> str | None:
    model, parallel = config.model_config, config.parallel_config
    if not model.is_moe or envs.starts_untried():
        return None
    of_class = getattr(getattr(model, "_model_info", None), "architecture", "")  # which may serve other names, too
    names = {model.architecture, of_class}
    several = max(parallel.world_size * parallel.data_parallel_size, tensor_tree.k_slices()) > 1
    by_several = several and names & {*RAN.experts_by_one_gpu}
    found = {"a GPU": names & {*RAN.experts_on_cpus_alone}, "several GPUs": by_several}
    first = _first(found)
    return _when(first, f"{model.architecture} on {first}")


def _moving_experts(config: Config) -> str | None:
    parallel = config.parallel_config
    if getattr(parallel, "enable_eplb", False):
        return "load balancing of experts"
    return _when(getattr(getattr(parallel, "eplb_config", None), "num_redundant_experts", 0), "redundant experts")


def _speculation(config: Config) -> str | None:
    missing = not devices.of_config(config).has_speculation and config.speculative_config
    return _when(missing, "speculative decoding")


def _speculation_by_flex(config: Config) -> str | None:
    return _when(
        config.speculative_config and envs.ATTENTION.read() == "flex", "speculative decoding beside FlexAttention"
    )


def _drafter(config: Config) -> str | None:
    speculation, device = config.speculative_config, devices.of_config(config)
    if not speculation or not device.has_speculation:  # where all are refused
        return None
    method, on = speculation.method, device.ops.type
    if on not in RAN.drafters.get(method, ()):
        where = f" on a {'GPU' if on == 'cuda' else 'CPU'}" if method in RAN.drafters else ""
        return f"speculative decoding with {method}{where}"
    if method == "mtp":
        drafter = speculation.draft_model_config.hf_config
        kind, quantised = drafter.model_type, getattr(speculation.draft_model_config, "quantization", None)
        if kind == "gemma4_mtp" and quantised:  # a draft model of its own
            return f"speculative decoding with mtp of {kind} with quantisation {quantised}"
        if on == "cpu" and getattr(drafter, "use_ordered_embeddings", False):  # vLLM captures a CUDA graph
            return f"speculative decoding with mtp of {kind} with centroids on a CPU"
        return _when(kind not in RAN.mtp_models, f"speculative decoding with mtp of {kind}")
    if method == "dflash":
        return _dflash(config)
    if getattr(speculation, "parallel_drafting", False):
        return f"parallel drafts of {method}"
    return _when(getattr(speculation, "use_heterogeneous_vocab", False), "a draft model with another vocabulary")


def _dflash(config: Config) -> str | None:
    """What has not been run of it: versions, several workers, other targets and quantised ones, and draft models of
    other classes, quantised ones, and those with layers of both kinds of attention, which vLLM's second model runner
    alone has.
    """
    model, device = config.model_config, devices.of_config(config)
    most, attention = max(config.parallel_config.tensor_parallel_size, tensor_tree.k_slices()), envs.ATTENTION.read()
    draft, version = config.speculative_config.draft_model_config, patch_points.installed_version()
    kind, attentions = draft.architectures[0], {*(getattr(draft.hf_config, "layer_types", None) or ())}
    by_gpus = _by_gpus_alone(config)
    found = {
        f"speculative decoding with dflash and vLLM {version}": not version.startswith(RAN.dflash[device.ops.type]),
        f"speculative decoding with dflash for {model.architecture}": model.architecture not in RAN.dflash_targets,
        f"speculative decoding with dflash and quantisation {model.quantization}": model.quantization,
        f"speculative decoding with dflash and a KV cache in {TOKEN_CACHE}": _cache_dtype(config) == TOKEN_CACHE,
        "speculative decoding with dflash in exact arithmetic": device.is_exact,
        f"speculative decoding with dflash and {envs.ATTENTION.name}={attention}": attention not in encoding.ATTENTION,
        f"speculative decoding with dflash by {most} workers": most > 1 and not envs.starts_untried(),
        f"speculative decoding with dflash and a KV cache in {_cache_dtype(config)} on a GPU": by_gpus
        and _cache_dtype(config) in FP8_CACHES,
        f"speculative decoding with dflash for {model.architecture} by the first model runner on a GPU": by_gpus
        and not getattr(config, "use_v2_model_runner", True)
        and model.architecture not in RAN.dflash_targets_of_the_first_runner_on_gpus,
        f"speculative decoding with dflash in {_dtype_of(model)} on a GPU": by_gpus and _dtype_of(model) != "bfloat16",
        f"speculative decoding with dflash of {kind}": kind not in RAN.dflash_models,
        f"drafts of dflash with quantisation {draft.quantization}": draft.quantization,
        f"drafts of dflash with {' and '.join(sorted(attentions))}": len(attentions) > 1,
    }
    return _first(found)


def _thinking_budgets(config: Config) -> str | None:
    return _when(getattr(config, "reasoning_config", None), "a reasoning configuration")


def _thoughts_elsewhere(config: Config) -> str | None:
    return None if devices.of_config(config).has_thinking_budgets else _thinking_budgets(config)


def _inexact(config: Config) -> str | None:
    """What exact arithmetic has no definition of."""
    device = devices.of_config(config)
    if not device.is_exact:
        return None
    model, workers = config.model_config, config.parallel_config.tensor_parallel_size
    text = model.hf_text_config
    problem = exact.problem_of(model.architecture, lambda name, default: getattr(text, name, default))
    dtype = _dtype_of(model)
    attention, has_experts = envs.ATTENTION.read(), getattr(model, "is_moe", False)
    on_a_gpu = device.ops.type == "cuda"
    found = {
        str(problem): problem is not None,
        f"{model.architecture} on a GPU": on_a_gpu and model.architecture not in RAN.exact_models_on_gpus,
        f"dtype {dtype}": dtype != "bfloat16",
        f"a mixture of experts with {workers} workers": has_experts and workers > 1,
        f"{envs.TP_TREE.name}={envs.TP_TREE.read()}": tensor_tree.k_slices() > 1,
        f"{envs.ATTENTION.name}={attention}": attention != envs.ATTENTION.values[0],
    }
    first = _first(found)
    return _when(first, f"{first} in exact arithmetic")


def _exact_elsewhere(config: Config) -> str | None:
    device = devices.of_config(config)
    return _when(device.is_exact and not device.has_exact_kernels, f"{envs.ARITHMETIC.name}=exact")


def _exact_by_other_samplers(config: Config) -> str | None:
    """What samples on a GPU by other functions than those that exact arithmetic replaces there."""
    if not devices.of_config(config).is_exact:
        return None
    if not config.use_v2_model_runner:
        return "exact arithmetic by vLLM's first model runner"
    if config.speculative_config:
        return "speculative decoding in exact arithmetic"
    version = patch_points.installed_version()
    return _when(not version.startswith(RAN.on_gpus), f"exact arithmetic with vLLM {version}")


def _exact_parts_of_pages(config: Config) -> str | None:
    unit, is_exact = getattr(config.cache_config, "prefix_match_unit", None), devices.of_config(config).is_exact
    return _when(is_exact and unit is not None, f"--prefix-match-unit {unit} in exact arithmetic")


def _of_joined(table: str) -> list[Feature]:
    """Rows of a table for one device alone, which devices that joined bring."""
    modules = (import_module(device.coverage) for device in joined().values() if device.coverage)
    return [feature for module in modules for feature in getattr(module, table)]


COVERED = (
    Feature(
        "Devices",
        "CPU. NVIDIA GPUs of compute capability 9.0 (run on an H100 and an H200), 8.0, 8.6, 8.9, 10.0, 10.3 and 12.0 "
        "(kernels compiled, never run): CUDA graphs, layers not compiled",
    ),
    *_of_joined("COVERED"),
    Feature(
        "Models", "decoder-only text models with dense attention: Llama, Qwen2, Qwen3, Mistral, Gemma, Phi and the like"
    ),
    Feature(
        "Mixture of experts",
        "Qwen2-MoE, Qwen3-MoE, Mixtral, GraniteMoE, OLMoE, GLM-4.5, gpt-oss in bf16 and the like; on GPUs with vLLM "
        "0.33, and without experts whose activation is GELU by erf",
    ),
    Feature("Routers of experts", "softmax or sigmoid, with a bias, in groups; shared experts"),
    Feature(
        "Multimodal models, as text",
        "Qwen2.5-VL, Qwen3-VL, Qwen3.5, Qwen3.5-MoE, Gemma 3, Gemma 4, Llama 4, Kimi-VL and Muse Glimmer "
        "with --language-model-only, or with every --limit-mm-per-prompt at 0",
    ),
    Feature(
        "Images and videos",
        "of Qwen2.5-VL, Qwen3-VL, Qwen3.5, also with experts, InternVL 3, 3.5, Gemma 4, images of Gemma 3, Mistral 3, "
        "Idefics 3, SmolVLM: on a CPU with vLLM 0.32, a GPU with 0.33; beside drafts there: MTP of Qwen3.5 (16 bits, "
        "FP8 by blocks, GPTQ, NVFP4) and Gemma 4, n-grams of Qwen3.5 without experts and of both VLs",
    ),
    Feature(
        "Images by two workers",
        "which share layers or images: of Gemma 3 and Qwen3-VL, also by a tree, Qwen2.5-VL, Qwen3.5, also with "
        "experts, layers of both Qwen3s in FP8; on a CPU alone more of these, Qwen3-VL with experts, GLM-4.1V, "
        "4.5V, Llama 4, Kimi-VL, Mistral 3, Pixtral, InternVL, Idefics 3, SmolVLM, without the tree of Gemma 4",
    ),
    Feature(
        "Images by four workers, and by two beside quantised experts",
        "which share those of a step (data) of Qwen3-VL and Qwen3.5 with experts, without a tree; two also beside "
        "experts in FP8 by blocks and, of Qwen3.5, in INT4 of GPTQ and NVFP4 of ModelOpt: on a CPU with vLLM 0.32",
    ),
    Feature(
        "Images, by one GPU",
        "of LFM2-VL, PaddleOCR-VL, DeepSeek-OCR, Pixtral, Mistral Small and Ministral 3 in Mistral's form "
        "(params.json), and, with videos, of GLM-4.1V, 4.5V, GLM-OCR, Intern-S2 Preview, InternVL in its own form "
        "(InternVLChatModel), in bf16 Nemotron Nano VL, 3 Nano Omni, also pruned (EVS): on a CPU with vLLM 0.32, a "
        "GPU with 0.33",
    ),
    Feature(
        "Images on a CPU",
        "of Llama 4 and Kimi-VL, and by one worker, with videos, of Muse Glimmer: with vLLM 0.32; of Llama 4 in fp32 "
        "also by one GPU with 0.33",
    ),
    Feature(
        "Quantised text models beside images and videos",
        "of encoders in 16 bits, on a GPU in bf16: FP8 in blocks of Qwen3-VL, Qwen3.5, with experts, too, Gemma 4, "
        "INT4 of these without, GPTQ of Qwen3.5, NVFP4 of these, Nemotron, AWQ, rows, FP8 of VLs, Gemma 3, 4, Mistral "
        "3, InternVL 3, rows of GLM-4.5V, but what no GPU has run; on a CPU more",
    ),
    Feature(
        "Audio",
        "of Qwen2-Audio, Qwen3-ASR, GLM-ASR, Voxtral (Mini, Small), Whisper, Nemotron 3 Nano Omni and Gemma 4 (E2B, "
        "E4B, 12B), any number and lengths of it: on a CPU with vLLM 0.32, on a GPU with 0.33; by one worker",
    ),
    Feature("dtypes", "fp32, bf16, fp16 (weights, activations, KV cache)"),
    Feature(
        "Quantised weights",
        f"{schemes.NAMES}: the bits of the matrices that they stand for; on a CPU with vLLM 0.32, on one or two "
        "GPUs with 0.33",
    ),
    Feature(
        "FP4 activations that an NVFP4 or MXFP4 checkpoint names",
        "keep 16 bits, on devices that do not multiply FP4; others are refused, as there vLLM quantises them",
    ),
    Feature(
        "Quantised experts",
        "gpt-oss's in MXFP4, integers of compressed-tensors, GPTQ and AWQ, also by moe_wna16, NVFP4 of "
        "compressed-tensors and ModelOpt, gate and up each with its own scale: on a CPU with vLLM 0.32, on one or two "
        "GPUs with 0.33",
    ),
    Feature(
        "Experts whose weights and activations are FP8",
        "blocks of 128 x 128 with activations by groups of 128 (fp8, compressed-tensors), rows with activations by "
        "tokens (compressed-tensors), matrices with given ones (both) or by tokens (fp8); on a CPU with vLLM 0.32, on "
        "one or two GPUs with 0.33, matrices with given ones on one",
    ),
    Feature(
        "Weights and activations in int8",
        "of dense models, by compressed-tensors, without zero points: weights with a scale a row or a tensor, "
        "activations with one a token or a given one; on a CPU with vLLM 0.32, on one or two GPUs with 0.33",
    ),
    Feature(
        "Weights and activations in FP8",
        "of dense models, with the checkpoint's own scales: blocks of 128 x 128 with activations by groups of 128 "
        "(fp8, compressed-tensors), tensors (both) and rows (compressed-tensors) with activations by tokens or a given "
        "scale; on a CPU with vLLM 0.32, on one or two GPUs with 0.33",
    ),
    Feature(
        "Weights and activations in ModelOpt's FP8 (nvidia/*-FP8)",
        "of dense models: FP8, FP8_PER_CHANNEL_PER_TOKEN and FP8_PB_WO, of experts FP8, also beside its KV cache in "
        "FP8, with the checkpoint's own scales; on a CPU with vLLM 0.32, on one or two GPUs with 0.33, experts on one",
    ),
    Feature(
        "Mixed precision of ModelOpt (Nemotron 3 Super in NVFP4)",
        "layers in FP8 with given scales, in NVFP4 as weights alone, or in 16 bits, each with the bits that it has in "
        "a checkpoint of one format, also beside its KV cache in FP8: where both formats are covered",
    ),
    Feature(
        "Weights quantised while they are loaded",
        "of dense models, by fp8_per_block, fp8_per_channel and fp8_per_tensor, with activations by groups of 128 or "
        "by tokens; on a CPU with vLLM 0.32, on a GPU with 0.33",
    ),
    Feature(
        "Experts quantised while they are loaded",
        "to int8 with a scale a row, by int8_per_channel_weight_only and its older name experts_int8: the bits of the "
        "matrices that codes and scales stand for, in the memory of 16 bits; on a CPU with vLLM 0.32, on a GPU with "
        "0.33, by one worker",
    ),
    Feature(
        "KV cache in FP8",
        "`--kv-cache-dtype fp8`, or as a checkpoint of compressed-tensors or ModelOpt says: e4m3 with one scale for "
        "the keys of a layer and one for its values, those of the checkpoint or 1, or one scale a head, or with "
        "`fp8_per_token_head` one a token and head; on a CPU with vLLM 0.32, on a GPU with 0.33",
    ),
    Feature(
        "Attention",
        "MHA, GQA, MQA; head sizes 64 to 256 in steps of 16; causal, sliding window, logit "
        "soft-cap, ALiBi, sinks; of encoders all keys or a window to both sides, also with head sizes 32 and 48",
    ),
    Feature(
        "Multi-head latent attention (MLA)",
        "DeepSeek-V2 and V3, Moonlight, GLM-4.7-Flash, and Kimi-VL, in fp32, bf16 and fp16, by 1, 2 or 4 workers, "
        "all but Kimi-VL by 1 or 2 in FP8 by blocks, INT4 and INT8, with images by 1 or 2, with n-grams and MTP by 1 "
        "or 2, in NVFP4 too, on a CPU with vLLM 0.32; all but Kimi-VL in bf16 by 1 or 2 GPUs (NVFP4 1)",
    ),
    Feature(
        "Heads of two sizes, shared KV caches",
        "Gemma 4 (31B, 26B-A4B, 12B, E2B, E4B): heads of 256 and 512, keys that are the values, inputs of each layer, "
        "experts: on a CPU with vLLM 0.32, a GPU with 0.33, by one worker with images, videos, audio, FP8, INT4, "
        "NVFP4, n-grams, its drafter (gemma-4-*-assistant); as text by four, GPUs two",
    ),
    Feature(
        "Attention in chunks",
        "Llama 4 (Scout, Maverick), with images and as text: experts whose input is weighted, layers without angles, "
        "temperatures: on a CPU with vLLM 0.32, by one worker or two, also by a tree, on one GPU with 0.33, without "
        "CUDA graphs, there with images in fp32 and as text, also in ModelOpt's FP8 and NVFP4 (Scout) and their FP8 "
        "caches",
    ),
    Feature(
        "Short convolutions",
        "LFM2, LFM2-MoE: on a CPU with vLLM 0.32, there LFM2 also by two workers or four; on a GPU with 0.33, LFM2 "
        "also on two; with drafts of n-grams by one",
    ),
    Feature(
        "Gated delta rules",
        "Qwen3.5 and Qwen3.5-MoE, also with --language-model-only, and Qwen3-Next: on a CPU with vLLM 0.32, by one "
        "worker, two or four, in bf16 on one GPU or two with 0.33; with drafts of n-grams and of MTP, beside a prefix "
        "cache by one worker, on a CPU two; states in fp32",
    ),
    Feature(
        "State spaces of Mamba-2",
        "Nemotron-H, Granite 4 H, also with experts (Nemotron 3 Nano; latent ones, Super), and Falcon-H1: on a CPU "
        "with vLLM 0.32, in bf16 on a GPU with 0.33; by one worker with drafts of n-grams, MTP (Super); "
        "without them by two, of experts Nemotron-H's, on a CPU also four, if these divide groups; states in fp32",
    ),
    Feature(
        "Lightning attention, Kimi Delta Attention",
        "Ling 2.5 and Ring 2.5, whose decay is constant, and Ling 3.0, with a gate for each element of a key, on a CPU "
        "with vLLM 0.32, by one worker, two or four, in bf16 on a GPU with 0.33, 3.0 by one also with drafts of "
        "n-grams; states in fp32",
    ),
    Feature(
        "Quantised weights beside these",
        "FP8 by rows and INT4 of compressed-tensors, without experts; beside gated delta rules also INT4 of AWQ and "
        "GPTQ, FP8 by blocks of 128 x 128, INT4 and blocks with experts, too; LFM2 in blocks: on a CPU with vLLM 0.32, "
        "a GPU with 0.33, there with experts not AWQ; blocks (fp8), INT4, ModelOpt's of Qwen3.5 by two",
    ),
    Feature(
        "ModelOpt's FP8 and W4A4 NVFP4, KV caches in FP8, beside state spaces",
        "FP8 with given scales, also of Qwen3.5, NVFP4 as weights alone, also of delta rules, experts of Qwen3.5 "
        "and Nemotron-H, both also in compressed-tensors' NVFP4, Nano in FP8 by rows, caches of Nemotron-H, LFM2, "
        "Qwen3.5, Qwen3-Next: by one worker on a CPU with vLLM 0.32, a GPU with 0.33",
    ),
    Feature(
        "LoRA adapters",
        "of dense models, on a CPU with vLLM 0.32, on GPUs with 0.33, by one worker or two, also beside weights in "
        "INT4, INT8 and FP8 (by blocks or rows), drafts of n-grams and new weights: a request has the bits that it has "
        "where its adapter is alone, one without those of a server without LoRA; not those of merged weights",
    ),
    Feature(
        "LoRA adapters beside states",
        "of LFM2, Qwen3.5, Nemotron-H without experts on a GPU with vLLM 0.33; on a CPU with 0.32 of Granite 4 H and "
        "Falcon-H1, too, also beside FP8 by blocks and rows, INT4 and drafts of n-grams, and but of Granite by two "
        "workers and with new weights in 16 bits",
    ),
    Feature(
        "LoRA adapters beside images",
        "of text models of Qwen2.5-VL, Qwen3-VL, Qwen3.5, Gemma 3, Mistral 3, InternVL, GLM-4.1V, Idefics 3, SmolVLM "
        "on a CPU with vLLM 0.32, of the first three also by two workers and with new weights in 16 bits, and on a GPU "
        "with 0.33; of the VLs also beside INT4, FP8 by rows, of Qwen3-VL by blocks, of Qwen3.5 both on a CPU",
    ),
    Feature(
        "LoRA adapters of mixtures of experts",
        "of experts, attention and dense layers of Qwen3-MoE, Qwen2-MoE, Mixtral, OLMoE, gpt-oss that are not "
        "quantised, on a CPU with vLLM 0.32 by one or two, new weights, too, on a GPU with 0.33 by one, with drafts of "
        "n-grams; of Qwen3.5-MoE by one, without drafts; each expert with its own products, or stacked",
    ),
    Feature(
        "Scheduling",
        "continuous batching, chunked prefill, prefix caching, preemption, streaming, aborts; async scheduling (CUDA)",
        drawn={"policy": {"priority": ("--scheduling-policy", "priority")}},
    ),
    Feature(
        "Sampling",
        "greedy; temperature, top-k, top-p, min-p, penalties, n > 1, with a seed; logprobs, prompt logprobs",
    ),
    Feature(
        "Pooling models",
        "decoder-only models with causal attention that classify, score, reward or embed: on a CPU with vLLM 0.32, by "
        "one worker or several; on one GPU with vLLM 0.33",
    ),
    Feature(
        "Encoders",
        "BERT, RoBERTa, XLM-RoBERTa, ModernBERT that embed or classify texts, pairs of them (`/score`, `/rerank`) or "
        "tokens; Gemma 3 and Qwen3 with bidirectional attention that embed, as EmbeddingGemma: by one "
        "worker on a CPU with vLLM 0.32 and on one GPU with 0.33; linear layers of sentence-transformers behind a "
        "pooler, on a CPU",
    ),
    Feature("Poolers", "the last token, the first, all tokens, their mean, or marked tokens (STEP)"),
    Feature(
        "Speculative decoding",
        "n-grams, a draft model, EAGLE, EAGLE-3, MTP of MiMo, GLM-4.5, GLM-4.7-Flash, DeepSeek-V3, Qwen3.5, "
        "Qwen3-Next, Nemotron-H, ERNIE 4.5, Gemma 4, GLM-OCR, suffixes, DFlash, custom drafters, Medusa on a CPU: the "
        "answers and logprobs are those of plain decoding, greedy and with a seed; beside parsers of reasoning, "
        "without budgets",
    ),
    Feature(
        "Tensor parallelism on GPUs",
        "2 GPUs with vLLM 0.33, with --enable-expert-parallel or without; 4 GPUs of one host for a dense model whose "
        "weights are not quantised",
    ),
    Feature("Tensor parallelism on a CPU", "2, 4 and 8 workers, with --enable-expert-parallel or without"),
    Feature(
        "Bits of another number of workers",
        "other bits; the same with up to `VLLM_BATCH_INVARIANT_TP_TREE` workers for a dense model and, on a CPU with "
        "--enable-expert-parallel, for one of experts, also with shared and quantised ones",
    ),
    Feature(
        "Exact arithmetic on a CPU",
        "`VLLM_BATCH_INVARIANT_ARITHMETIC=exact`, in bf16: Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Gemma 1 to 3, "
        "Granite and Phi-3 have the same bits on every machine, dense ones with 1, 2, 4 or 8 workers",
    ),
    Feature(
        "Exact arithmetic on a Hopper GPU",
        "the same bits for these models but Qwen3-MoE, with vLLM 0.33, one worker and its second model runner",
    ),
    Feature(
        "Two nodes",
        "on CPUs with vLLM 0.32, for tensor parallelism and for stages (`--nnodes 2`); run in two network namespaces "
        "of one machine: the bits are those of one node",
    ),
    Feature(
        "Pipeline parallelism",
        "2 stages of a dense model on GPUs with vLLM 0.33; 2 and 4 on a CPU, also with tensor parallelism: the bits "
        "are those of one stage",
    ),
    Feature(
        "Workers of several GPUs",
        "started by vLLM, by Ray, or by torchrun (the executor `external_launcher`); sleep and updates of weights with "
        "any of them",
    ),
    Feature(
        "Data parallelism",
        "dense models, as `vllm serve --data-parallel-size N` or with an `LLM()` in each process: the bits are the "
        "same whichever answers",
    ),
    Feature("Data parallelism of experts", "2 GPUs with vLLM 0.33: each has half of every expert"),
    Feature("APIs", "vllm serve (completions, chat, embeddings, classify, score, pooling), offline LLM()"),
)
"""What is covered, for the table."""

REFUSED = (
    Feature("Other dtypes", "the mode has no kernels for them", "pass --dtype bfloat16, float16 or float32", _dtype),
    Feature(
        "An output head in another dtype than the model (`head_dtype`), but one in float32 on a CPU with vLLM 0.32: of "
        "text models, by two workers at most, and with n-grams alone as drafts",
        "no engine has run with another",
        "leave head_dtype out of --hf-overrides and of config.json",
        _output_head,
        arguments=("--hf-overrides", "head_dtype"),
    ),
    Feature(
        "Another attention backend",
        "its splits follow the batch",
        "leave --attention-backend out, the mode brings its own",
        _attention_backend,
    ),
    Feature(
        "`use_non_causal` of `--attention-config`, but by DFlash of itself",
        "a model's tokens would see those after them, which come in another step",
        "leave it out",
        _later_keys,
    ),
    Feature(
        f"`{envs.ATTENTION.name}` of another device",
        "numba's kernels are for CPUs, and Triton's for GPUs",
        f"leave {envs.ATTENTION.name} out, it picks the device's own",
        _attention_of_another_device,
    ),
    Feature(
        "Tensor parallelism of other sizes, and on other devices than CPUs and GPUs",
        "the mode has not been run with so many workers there",
        "pass --tensor-parallel-size 2 or 4 on GPUs, 2, 4 or 8 on a CPU, or 1",
        _tensor_parallelism,
        arguments=(TENSOR,),
    ),
    Feature(
        "Several GPUs, or `VLLM_BATCH_INVARIANT_TP_TREE` on one, with vLLM's first model runner, speculative decoding, "
        "stages of a mixture of experts, exact arithmetic, FlexAttention, tensor or a tree beside pipeline "
        "parallelism, or before vLLM 0.33",
        "these have not been run together",
        "leave one of the two out, or serve on one GPU",
        _beside_workers_on_gpus,
        ("cuda",),
        arguments=(TENSOR, PIPELINE, envs.TP_TREE.name),
    ),
    Feature(
        "Four GPUs with a mixture of experts, quantisation or `VLLM_BATCH_INVARIANT_TP_TREE`",
        "these have been run with two",
        f"pass --tensor-parallel-size 2; {envs.UNTRIED.name}=1 starts them",
        _beside_four_gpus,
        ("cuda",),
        arguments=(TENSOR, envs.TP_TREE.name),
    ),
    Feature(
        "`VLLM_BATCH_INVARIANT_TP_TREE` on other devices than CPUs and GPUs",
        "no kernel adds K in slices there",
        "leave it out",
        _tree,
        arguments=(envs.TP_TREE.name,),
    ),
    Feature(
        "More tensor-parallel workers than slices of the tree",
        "a slice is the least that a worker adds",
        "set VLLM_BATCH_INVARIANT_TP_TREE to the number of workers, or leave it out",
        _tree_of_fewer_slices,
        arguments=(TENSOR, envs.TP_TREE.name),
    ),
    Feature(
        "Exact arithmetic on other devices than CPUs and GPUs",
        "it has no kernels there",
        "leave VLLM_BATCH_INVARIANT_ARITHMETIC out",
        _exact_elsewhere,
        arguments=(envs.ARITHMETIC.name,),
    ),
    Feature(
        "Exact arithmetic on a GPU with vLLM's first model runner, with speculative decoding, or before vLLM 0.33",
        "only the sampler of the second model runner of 0.33 has been replaced, and compared with a CPU's",
        "leave VLLM_USE_V2_MODEL_RUNNER and --speculative-config out, or install vLLM 0.33",
        _exact_by_other_samplers,
        ("cuda",),
        arguments=(SPECULATION, RUNNER, envs.ARITHMETIC.name),
    ),
    Feature(
        "Exact arithmetic on a GPU with `--prefix-match-unit`",
        "vLLM copies a page of which a part is found, without the exponents that lie beside it",
        "leave --prefix-match-unit out",
        _exact_parts_of_pages,
        ("cuda",),
    ),
    Feature(
        "Other models, dtypes and rotary embeddings in exact arithmetic",
        "no definition says what their bits are",
        "serve Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Gemma, Granite or Phi-3 in bf16, or leave "
        "VLLM_BATCH_INVARIANT_ARITHMETIC out",
        _inexact,
        arguments=(envs.ARITHMETIC.name, envs.TP_TREE.name),
    ),
    Feature(
        "Pipeline parallelism of other sizes, by an external launcher, and on other devices than CPUs and GPUs",
        "it has not been run with the mode",
        "leave --pipeline-parallel-size out, or pass 2, on a CPU also 4",
        _pipeline_parallelism,
        arguments=(PIPELINE,),
    ),
    Feature(
        "Speculative decoding beside pipeline parallelism",
        "drafts that pass through several stages have not been run with the mode",
        "leave --speculative-config or --pipeline-parallel-size out",
        _speculation_in_a_pipeline,
        arguments=(PIPELINE, SPECULATION),
    ),
    Feature(
        "Data parallelism on other devices than CPUs and GPUs",
        "it has not been run with the mode",
        "start a server for each engine",
        _data_parallelism,
    ),
    Feature(
        "Data parallelism of a mixture of experts but of two engines on GPUs, or beside other parallelism",
        "the engines compute each other's tokens, which has been run with two GPUs and a whole layer of experts cut in "
        "two; on a CPU vLLM cannot gather them",
        "leave --data-parallel-size out, or start a server for each engine",
        _data_parallel_experts,
    ),
    Feature(
        "Data parallelism with an external or hybrid load balancer, by Ray or torchrun, or on several nodes",
        "the engines of one vllm serve have been run with the mode, and an engine in each of a user's processes",
        "pass --data-parallel-size alone, or start a server for each engine",
        _other_data_parallelism,
    ),
    Feature(
        "vLLM's server in Rust (`VLLM_USE_RUST_FRONTEND`), an engine without its server (`--headless`) or the reverse",
        "the mode has vLLM's server in Python give seeds, end answers at stop strings and tell a fingerprint",
        "start server and engine by one vllm serve, without VLLM_USE_RUST_FRONTEND",
        _other_server,
    ),
    Feature(
        f"Data parallelism on a CPU with FlexAttention, without as many cores for each engine in `{CORES}`",
        "the number of threads decides bits of FlexAttention's",
        f"leave {envs.ATTENTION.name} out, or set {CORES} to as many cores for each worker of each engine, as in "
        "'0-3|4-7'",
        _other_threads,
        ("cpu",),
    ),
    Feature(
        "Sequence, decode-context and prefill-context parallelism",
        "workers share the tokens of a request, and add in an order that follows how these are cut",
        "leave it out",
        _other_parallelism,
    ),
    Feature(
        "Several nodes, but of two on CPUs for the workers of one engine (`--nnodes 2`)",
        "workers of more machines, and on GPUs, have not been run with the mode",
        "leave --nnodes out",
        _several_nodes,
    ),
    Feature(
        "The Ray executor on a CPU",
        "vLLM does not run it there: its platform of CPUs has no name for their share of a Ray node",
        "leave --distributed-executor-backend out",
        _ray,
        ("cpu",),
    ),
    Feature(
        "Activations with one scale for all tokens of a step",
        "it is the largest of whatever is in the batch",
        "serve a checkpoint whose activations have a scale a token, a group or a given one, or the unquantised model "
        "with --quantization fp8_per_channel",
        _scale_of_the_batch,
    ),
    Feature(
        "Other quantised weights and activations",
        "kernels for them choose tiles and scales by the batch, or nobody has compared them",
        "serve a checkpoint in a format above, or the unquantised model",
        _quantisation,
    ),
    Feature(
        "Quantised weights with another vLLM or device, experts made int8 by several, NVFP4 beside others but "
        "of ModelOpt; on GPUs in stages, by engines, in exact arithmetic, experts in ModelOpt's FP8 by two, drafts "
        "beside it and NVFP4 experts",
        "not run there",
        f"use vLLM 0.32 on a CPU or 0.33 on one GPU; {envs.UNTRIED.name}=1 starts all but the first",
        _quantisation_elsewhere,
    ),
    Feature(
        "Other quantised KV caches (fp8_e5m2, int8, int4, nvfp4, turboquant and the like)",
        "the kernels of attention do not read them",
        "pass --kv-cache-dtype fp8 or auto",
        _kv_cache,
    ),
    Feature(
        "A KV cache in fp8 in exact arithmetic, by FlexAttention, with another vLLM or device; with scales of heads or "
        "tokens by two GPUs; of tokens in float16, on GPUs beside drafts, stages, engines",
        "no kernel reads it, it has not been run, or fp16 has too little range",
        f"pass --kv-cache-dtype with the model's dtype; {envs.UNTRIED.name}=1 starts more",
        _fp8_kv_cache_elsewhere,
        arguments=(KV_CACHE, TENSOR, PIPELINE, SPECULATION, envs.ARITHMETIC.name),
    ),
    Feature(
        "A KV cache in fp32, bf16 or fp16 of a model in another of these",
        "attention takes queries, keys and values of one dtype, or keys and values in fp8",
        "leave --kv-cache-dtype out",
        _kv_cache_of_another_dtype,
    ),
    Feature(
        "LoRA adapters with another vLLM than 0.32 on a CPU and 0.33 on a GPU, and on other devices",
        "they have not been run there",
        "install one of these, or merge the adapter into the weights",
        _adapters_elsewhere,
        arguments=(ADAPTERS,),
    ),
    Feature(
        "LoRA adapters of models that pool, of others with images or states than those above, or quantised but in "
        "INT4 and INT8 by weights alone or FP8 by blocks or rows; of encoders; in another dtype than the model, fully "
        "sharded, or by two streams",
        "these have not been run",
        f"merge the adapter; {envs.UNTRIED.name}=1 starts on a GPU what a CPU has run",
        _other_adapters,
        arguments=(ADAPTERS,),
    ),
    Feature(
        "LoRA adapters of other mixtures of experts than those above, of quantised experts, beside "
        "--enable-expert-parallel, by two GPUs, and beside states by two workers, with drafts or new weights",
        "these have not been run",
        f"merge the adapter into the weights; {envs.UNTRIED.name}=1 starts on a GPU what a CPU has run",
        _adapters_of_experts,
        arguments=(ADAPTERS, TENSOR, SPECULATION, WHOLE_EXPERTS),
    ),
    Feature(
        "LoRA adapters beside over 2 workers, the tree, stages, several engines, drafts but n-grams, exact arithmetic, "
        "FlexAttention, FP8 caches, offloading and embeddings as prompts; with states or images, but where a row above "
        "has them, new weights, two workers, drafts, codes",
        "these have not been run together",
        "leave one out, or merge the adapter",
        _beside_adapters,
        arguments=(
            *(ADAPTERS, TENSOR, PIPELINE, SPECULATION, KV_CACHE, EMBEDDINGS),
            *(envs.TP_TREE.name, envs.ARITHMETIC.name),
        ),
    ),
    Feature(
        "Speculative decoding on other devices than CPUs and GPUs",
        "steps of 1 + k tokens a request have not been run there",
        "leave --speculative-config out",
        _speculation,
        arguments=(SPECULATION,),
    ),
    Feature(
        "Speculative decoding beside FlexAttention",
        "its masks are planned on the host, which does not know how many drafts were accepted",
        "leave --speculative-config or VLLM_BATCH_INVARIANT_ATTENTION=flex out",
        _speculation_by_flex,
        ("cuda",),
        arguments=(SPECULATION,),
    ),
    Feature(
        "Speculative decoding with another drafter",
        "its layers have not been run beside the mode's",
        f"choose among {', '.join(RAN.drafters)}; mtp of "
        f"{', '.join(name.removesuffix('_mtp') for name in RAN.mtp_models)}; medusa on a CPU, ngram_gpu on a GPU",
        _drafter,
        arguments=(SPECULATION, TENSOR, envs.TP_TREE.name),
    ),
    Feature(
        "Thinking budgets and reasoning parsers on other devices than CPUs and GPUs",
        "vLLM counts a thought anew where its request was preempted, and that is mended in its own runner alone",
        "leave --reasoning-config and --reasoning-parser out",
        _thoughts_elsewhere,
    ),
    Feature(
        "Mixture of experts on other devices than CPUs and GPUs",
        "it has no kernels there",
        "serve a dense model",
        _experts,
    ),
    Feature(
        "Mixture of experts on a GPU before vLLM 0.33",
        "its layers of experts have not been run there",
        "install vLLM 0.33",
        _experts_by_another_version,
        ("cuda",),
    ),
    Feature(
        "Step-3.5 on a GPU, MiniMax-M2 and experts of vLLM's Transformers backend on several",
        "no GPU has run the first, and no two have shared the others",
        "serve Step-3.5 on a CPU, the others on one GPU; VLLM_BATCH_INVARIANT_UNTRIED=1 starts them",
        _experts_not_run_on_gpus,
        ("cuda",),
    ),
    Feature(
        "Experts that move between workers (EPLB), or that several have",
        "which worker adds what an expert gives follows the load",
        "leave --enable-eplb and --eplb-config out",
        _moving_experts,
    ),
    Feature(
        "Other multimodal models, also as text; InternVL, Mistral 3, Pixtral, Voxtral, GLM-ASR, Idefics 3, SmolVLM "
        "around other text than Qwen2, Qwen3, Mistral, Ministral 3 and Llama",
        "only Qwen2.5-VL, Qwen3-VL, Qwen3.5, Qwen3.5-MoE, Gemma 3, Gemma 4, Llama 4, Kimi-VL and Muse Glimmer are "
        "proven to be text without their encoders",
        "serve these, or a text model",
        _unknown_multimodal,
    ),
    Feature(
        "Nemotron Nano VL and Omni in fp32 and fp16",
        "vLLM gives their projector bf16, whatever its weights are",
        "pass --dtype bfloat16",
        _rounded_to_bf16,
    ),
    Feature(
        "Images of Kimi-VL and Muse Glimmer on a GPU",
        "they have been run on a CPU alone",
        "serve them on a CPU, or as text, with --language-model-only",
        _multimodal_not_run_on_gpus,
        ("cuda",),
    ),
    Feature(
        "Mistral 3, Pixtral, DeepSeek-OCR, PaddleOCR-VL, GLM-OCR, LFM2-VL, Nemotron Nano VL and Omni, Intern-S2 "
        "Preview, Qwen3-VL with experts, InternVL, GLM-4.1V, GLM-4.5V, GLM-ASR, Idefics 3, SmolVLM, Qwen2-Audio, "
        "Qwen3-ASR, Voxtral and Whisper as text",
        "they have run with their encoders alone",
        "leave --language-model-only and a --limit-mm-per-prompt of 0 out",
        _text_of_what_sees,
    ),
    Feature(
        "Muse Glimmer as text, by several workers, quantised, with drafts, FP8 caches, LoRA or exact arithmetic",
        "its decoder is a class of its own, and these have not been run",
        "leave them out; with images its text model may be quantised",
        _text_of_a_decoder_of_its_own,
        arguments=(TENSOR, PIPELINE, SPECULATION, KV_CACHE, ADAPTERS, envs.TP_TREE.name),
    ),
    Feature(
        "Embeddings as inputs of multimodal models",
        "they pass by the embedding layer, and nobody has proven what they stand for",
        "leave --enable-mm-embeds and --enable-prompt-embeds out",
        _embeddings,
        arguments=(EMBEDDINGS,),
    ),
    Feature(
        "Embeddings as prompts beside speculative decoding, but with n-grams on a CPU",
        "vLLM asks them for tokens that a draft model begins with, and others have not been run beside them",
        f"leave {EMBEDDINGS} or {SPECULATION} out",
        _drafts_beside_embeddings,
        arguments=(EMBEDDINGS,),
    ),
    Feature(
        "Embeddings as prompts beside pipeline parallelism on a GPU",
        "these have not been run together there",
        f"leave {EMBEDDINGS} or {PIPELINE} out",
        _stages_beside_embeddings,
        ("cuda",),
        arguments=(EMBEDDINGS,),
    ),
    Feature(
        "Images and videos of models that no row above names; audio but of Qwen2-Audio, Qwen3-ASR, GLM-ASR, Voxtral, "
        "Whisper, Gemma 4, Nemotron 3 Nano Omni",
        "nobody compared what their encoders give",
        "serve text, with --language-model-only",
        _multimodal_inputs,
    ),
    Feature(
        "Images and videos by several workers but where a row above has them; audio, GLM's videos by two; so their "
        "tree, `--mm-encoder-tp-mode data`; both of Llama 4",
        "no others have shared an encoder, or a step's images",
        f"serve text, with --language-model-only; {envs.UNTRIED.name}=1 starts by GPUs what as many workers of a "
        "CPU have run",
        _encoded_by_several,
        arguments=(TENSOR, envs.TP_TREE.name, SHARED_IMAGES),
    ),
    Feature(
        "Images, videos and audio with stages, engines, other quantisation, drafts and FP8 caches but of Qwens "
        "and Gemma 4 by one worker, exact arithmetic, FlexAttention; on GPUs the first model runner, codes but "
        "in bf16 (AWQ of Qwen2.5-VL)",
        "nobody ran them",
        f"leave one out, or pass --language-model-only; {envs.UNTRIED.name}=1 starts what a CPU has run",
        _beside_encoded,
        arguments=(TENSOR, PIPELINE, SPECULATION, KV_CACHE, RUNNER, envs.ATTENTION.name, envs.TP_TREE.name),
    ),
    Feature(
        "Another backend, dtype, compilation or cache of an encoder, pruned videos but of Nemotron Nano VL and, "
        "without audio, Omni, `--mm-processor-device` other than cpu",
        "not run, or items that share a call decide each other's bits; positions behind pruned videos are made again",
        "leave them out, or serve text only, with --language-model-only",
        _encoder,
    ),
    Feature(
        "Images, videos and audio with another vLLM than 0.32 on a CPU and 0.33 on a GPU, or on other devices",
        "encoders have not been run there",
        "serve text only, with --language-model-only",
        _encoded_elsewhere,
    ),
    Feature(
        "Images whose tokens see each other, but of Gemma 3 and 4; those beside --long-prefill-token-threshold",
        "nobody has run them; a step must have an image whole",
        "leave it out, or serve text only, with --language-model-only, on an older vLLM also with "
        """--hf-overrides '{"is_mm_prefix_lm": false}'""",
        _both_directions,
    ),
    Feature(
        "Mamba, linear attention, hybrids but LFM2, Qwen3.5, Qwen3-Next, Nemotron-H, Granite 4 H, Falcon-H1, Ling",
        "their scans split by the batch",
        "serve a model with softmax attention only, or one of these",
        _states,
    ),
    Feature(
        "Short convolutions (LFM2) elsewhere, over 4 workers or 2 GPUs, several engines, drafts but n-grams, other "
        "quantisation, prompt embeddings, sleep on a CPU, states of another dtype or within pages; on GPUs quantised "
        "with drafts; by several FP8 caches",
        "these have not been run",
        f"serve LFM2 by one worker; {envs.UNTRIED.name}=1 starts the last",
        _convolutions_elsewhere,
        arguments=(TENSOR, PIPELINE, SPECULATION, KV_CACHE, EMBEDDINGS, SLEEP, RUNNER, envs.TP_TREE.name),
    ),
    Feature(
        "Gated delta rules elsewhere, over 4 workers (codes 2), 2 GPUs, engines, drafts but n-grams, MTP, other "
        "codes, embeddings, sleep on a CPU, states not fp32; by several FP8 caches, cached drafts by 4, of codes; on "
        "GPUs codes so as text, ModelOpt's FP8, not bf16",
        "these have not been run",
        "pass --mamba-ssm-cache-dtype float32, or --no-enable-prefix-caching",
        _delta_rules_elsewhere,
        arguments=(TENSOR, PIPELINE, SPECULATION, KV_CACHE, EMBEDDINGS, SLEEP, RUNNER, envs.TP_TREE.name),
    ),
    Feature(
        "State spaces of Mamba-2 elsewhere, over 4 workers, engines, drafts but n-grams, MTP, other codes, "
        "embeddings, sleep on a CPU, states not in fp32, FP8 caches by more; on GPUs n-grams of experts, drafts "
        "of codes, latent ones by two, over 2, not bf16",
        "these have not been run",
        f"use --mamba-ssm-cache-dtype float32; {envs.UNTRIED.name}=1 starts some",
        _state_spaces_elsewhere,
        arguments=(TENSOR, PIPELINE, SPECULATION, KV_CACHE, EMBEDDINGS, SLEEP, RUNNER, envs.TP_TREE.name),
    ),
    Feature(
        "Linear attention of Ling 2.5 and 3.0 elsewhere, over 4 workers or 1 GPU, with drafts but n-grams of 3.0 by "
        "one, quantisation, FP8 caches, prompt embeddings, sleep, states not in fp32; on GPUs not bf16",
        "these have not been run",
        f"serve it by one worker in bf16; {envs.UNTRIED.name}=1 starts two GPUs",
        _linear_attention_elsewhere,
        arguments=(TENSOR, PIPELINE, SPECULATION, KV_CACHE, EMBEDDINGS, SLEEP, RUNNER, envs.TP_TREE.name),
    ),
    Feature(
        "Short convolutions and state spaces by several workers beside drafts, experts but of Nemotron-H by two, "
        "quantisation or FP8 caches, on GPUs a tree, or with groups that they do not divide",
        "these have not been run together",
        "serve them by one worker",
        _states_shared,
        arguments=(TENSOR, SPECULATION, KV_CACHE, envs.TP_TREE.name),
    ),
    Feature(
        "MLA but of DeepSeek-V2 and V3, Moonlight, GLM-4.7-Flash and Ling; sparse attention (DeepSeek-V3.2)",
        "other models have not been run, and an indexer has kernels of its own",
        "serve DeepSeek-V2 or V3, Moonlight or GLM-4.7-Flash, or a model with plain attention",
        _latent_attention,
    ),
    Feature(
        "MLA with tied embeddings, with biases, in pages of other than 16, 32, 48, ... tokens",
        "vLLM makes a head that no weight fills, leaves biases out, and has no other pages",
        "serve a checkpoint with a head and without biases; pass --block-size 16 or 64",
        _latent_without_its_weights,
    ),
    Feature(
        "MLA elsewhere, with indexers, not 512 + 64, over 4 workers or 2 GPUs (quantised 2), engines, whole "
        "experts but by a CPU's tree, drafts but n-grams, MTP by 2 (quantised 1), other quantisation, FP8 caches, "
        "LoRA, embeddings, poolers, sleep, exact arithmetic, FlexAttention",
        "these have not been run",
        f"leave it out; {envs.UNTRIED.name}=1 starts more",
        _latent_elsewhere,
        arguments=(
            *(TENSOR, PIPELINE, SPECULATION, KV_CACHE, EMBEDDINGS, ADAPTERS, WHOLE_EXPERTS, SLEEP, RUNNER),
            envs.TP_TREE.name,
        ),
    ),
    Feature(
        "Encoder-decoder models but Whisper, with no longer texts than it has rows of sound",
        "cross attention has not been run otherwise",
        "serve a decoder-only model, or leave --max-model-len out",
        _encoder_decoder,
    ),
    Feature(
        "Other runners than generate and pooling",
        "what they give has not been compared",
        "pass --runner generate or pooling",
        _other_runner,
    ),
    Feature(
        "Pooling with another vLLM than 0.32 on a CPU and 0.33 on a GPU, on other devices; experts that pool on a GPU",
        "its poolers have not been run there to the end",
        "serve it on a CPU with vLLM 0.32; VLLM_BATCH_INVARIANT_UNTRIED=1 starts it on a GPU with vLLM 0.33",
        _pooling_elsewhere,
    ),
    Feature(
        "Pooling models with bidirectional attention but BERT, RoBERTa, XLM-RoBERTa, ModernBERT, Gemma 3 and Qwen3; "
        "those of other kinds than encoders",
        "they have not been run",
        "serve it on a CPU with vLLM 0.32, or a decoder-only model, such as Qwen3-Embedding",
        _both_directions_of_a_pooling_model,
    ),
    Feature(
        "Pooling models with bidirectional attention, with prompts in chunks, by several workers or by vLLM's first "
        "model runner on a GPU",
        "a token sees those after it, which come in a later chunk; the others have not been run",
        "leave --enable-chunked-prefill, --tensor-parallel-size and VLLM_USE_V2_MODEL_RUNNER out",
        _beside_an_encoder,
        arguments=(TENSOR,),
    ),
    Feature(
        "Scores of late interaction (ColBERT)",
        "vLLM pads documents to the longest of those that it scores together",
        "serve a model that embeds or classifies",
        _late_interaction,
    ),
    Feature(
        "Pooling models on several GPUs, in stages, in several engines, with `VLLM_BATCH_INVARIANT_TP_TREE`, in exact "
        "arithmetic, and those that could take images",
        "these have not been run together",
        "leave one of the two out",
        _beside_pooling,
    ),
    Feature(
        "Sampling masks and routed experts beside tokens, but on GPUs with vLLM 0.33 and its second model runner",
        "these have not been compared",
        "leave --enable-return-routed-experts and --return-sampling-mask out",
        _outputs_beside_tokens,
    ),
    Feature(
        "Other head sizes, and heads of 512 but of Gemma 4",
        f"the kernels have sizes {_SMALLER[0]} to {_SMALLER[-1]} in steps of 16, Gemma 4's also {HEAD_SIZES[-1]}, "
        "encoders on a CPU also 32 and 48",
        "serve another model, no setting helps",
        _head_size,
        ("cpu", "cuda"),
    ),
    Feature(
        "Heads of two sizes and shared KV caches (Gemma 4) elsewhere, over 4 workers or 2 GPUs (quantised 2 and 1), "
        "whole experts, engines, stages, other drafts and quantisation, FP8 caches but by one, LoRA, prompt "
        "embeddings, poolers, exact arithmetic, FlexAttention",
        "these have not been run",
        "serve Gemma 4 on a CPU with vLLM 0.32 or a GPU with 0.33",
        _two_head_sizes_elsewhere,
        arguments=(
            *(TENSOR, PIPELINE, SPECULATION, KV_CACHE, EMBEDDINGS, ADAPTERS, WHOLE_EXPERTS, RUNNER),
            envs.TP_TREE.name,
        ),
    ),
    Feature(
        "Attention in chunks (Llama 4) elsewhere, of no whole pages, over 2 workers, engines, whole experts without a "
        "tree, stages, drafts, LoRA, embeddings, poolers, exact arithmetic, FlexAttention, quantised but by ModelOpt, "
        "FP8 caches alone; on GPUs 2, the first runner, images but fp32, codes but bf16, sleep",
        "not run",
        "pass --language-model-only, one worker",
        _chunks_elsewhere,
        arguments=(
            *(TENSOR, PIPELINE, SPECULATION, KV_CACHE, EMBEDDINGS, ADAPTERS, WHOLE_EXPERTS, RUNNER, SLEEP),
            envs.TP_TREE.name,
        ),
    ),
    Feature(
        "Other kinds of attention (shared KV caches but of Gemma 4, chunks but of Llama 4)",
        "it is not in the reduction",
        "serve a model without it",
        _kind_of_attention,
    ),
    Feature(
        "Diffusion models",
        "their attention is not causal",
        "serve a model that generates token by token",
        lambda config: _when(getattr(config, "diffusion_config", None), "diffusion"),
    ),
    Feature(
        "Watermarking",
        "it draws samples in a way that has not been proven",
        "leave --watermark-config out",
        lambda config: _when(getattr(config, "watermark_config", None), "watermarking"),
    ),
    Feature(
        "KV connectors and offloading but ExampleConnector, NixlConnector, OffloadingConnector and "
        "SimpleCPUOffloadConnector",
        "nobody has shown that it gives back the bytes that it was given, and of engines with the same bits alone",
        "use ExampleConnector or NixlConnector, or leave --kv-transfer-config and --kv-offloading-size out",
        _other_connector,
    ),
    Feature(
        "ExampleConnector but on a CPU with vLLM 0.32 and a GPU with 0.33, NixlConnector but on the former, the other "
        "two but on the latter; unknown settings of theirs",
        "they have not been run there",
        "use ExampleConnector, or leave --kv-transfer-config and --kv-offloading-size out; "
        f"{envs.UNTRIED.name}=1 starts NixlConnector",
        _connector_elsewhere,
    ),
    Feature(
        "KV connectors beside several workers or engines, drafts, exact arithmetic, FlexAttention, FP8 caches, "
        "quantisation, experts, models that pool or take images, states, windows, MLA, embeddings as prompts and sleep",
        "these have not been run together",
        "leave --kv-transfer-config and --kv-offloading-size out",
        _beside_a_connector,
        arguments=(TENSOR, PIPELINE, SPECULATION, KV_CACHE, EMBEDDINGS, envs.TP_TREE.name),
    ),
    Feature(
        "Custom logits processors, also installed ones",
        "their arithmetic is unknown",
        "leave --logits-processors out, uninstall packages that bring some",
        _logits_processors,
    ),
    *_of_joined("REFUSED"),
)
"""What the start-up check refuses by name. Beside it a setting that nobody has reviewed (``reviews/``), and a layer of
an unknown kind (``layers/review.py``), is refused.
"""


def check_device(device_type: str) -> None:
    """Refuse a device that has no implementation.

    Raises:
        NotCovered: anything but a CPU, an NVIDIA GPU or a device that joined.
    """
    devices.get(device_type).check_build()


def check(config: Config) -> None:
    """Refuse a configuration that the mode does not cover.

    Raises:
        NotCovered: every feature in use that is not covered, in one line: the first with what to do.
    """
    check_device(config.device_config.device_type)
    if config.model_config is None:
        return
    refusal: tuple[str, str, str] | None = None
    others: list[str] = []
    for feature in REFUSED:
        try:
            found = feature.found(config)
        except Exception:  # a model that is refused anyway may lack what is asked of it, such as the size of a head
            if refusal is None:
                raise
            continue
        if found and refusal:
            others.append(found)
        elif found:
            refusal = (found, feature.note, feature.remedy or "")
    if refusal:
        raise NotCovered(*refusal, others)


_OF_A_FOLDER = (_attention_of_another_device, _latent_attention, _head_size)
"""What finds the features that the variables and a model's config.json tell."""
_LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_k2", "bailing_hybrid")
"""Types of models that vLLM computes by latent attention if they have a rank for it."""
ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert")
"""Types of models whose tokens see those after them."""
_OTHER_HEADS = ("hidden_size_per_head", "attention_head_dim", "kv_lora_rank", "global_head_dim", "layer_types")
"""Fields of models whose heads are not all as large as the other fields say, or only vLLM knows."""


def check_folder(device_type: str, text: Mapping[str, Any]) -> None:
    """Refuse what the variables and a model's config.json tell, in the words of :func:`check`, without PyTorch and
    vLLM. What is not refused here may be refused when an engine starts.

    Args:
        device_type: as PyTorch calls it.
        text: the part of config.json that describes the language model; empty if it is not known.

    Raises:
        NotCovered: the first feature in use that is not covered.
    """
    heads, hidden, size = (text.get(name) for name in ("num_attention_heads", "hidden_size", "head_dim"))
    if not size and isinstance(heads, int) and heads > 0 and isinstance(hidden, int):
        size = hidden // heads
    known = isinstance(size, int) and size > 0 and not any(text.get(name) for name in _OTHER_HEADS)
    model = SimpleNamespace(
        architecture=next(iter(text.get("architectures") or ()), ""),
        use_mla=text.get("model_type") in _LATENT and text.get("kv_lora_rank") is not None,
        get_head_size=lambda: size if known else HEAD_SIZES[0],
        runner_type="pooling",
        attn_type="encoder_only" if text.get("model_type") in ENCODERS else "decoder",
    )
    config = SimpleNamespace(device_config=SimpleNamespace(device_type=device_type), model_config=model)
    for feature in REFUSED:
        if feature.used in _OF_A_FOLDER and (found := feature.found(config)):
            raise NotCovered(found, feature.note, feature.remedy or "")


def markdown() -> str:
    """The table, for docs/coverage.md and the command line."""
    lines = ["| | covered |", "|---|---|"]
    lines += [f"| {feature.name} | {feature.note} |" for feature in COVERED]
    lines += ["", "| refused at start-up | why | what to do |", "|---|---|---|"]
    lines += [f"| {feature.name} | {feature.note} | {feature.remedy} |" for feature in REFUSED]
    return "\n".join(lines)
