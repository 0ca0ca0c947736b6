"""The places of vLLM that the plugin patches or calls, with where each vLLM version keeps them."""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ... import envs
from ...errors import NotCovered
from . import versions

logger = logging.getLogger("vllm.batch_invariant")


@dataclass(frozen=True)
class PatchPoint:
    """One attribute of vLLM, under the modules that have had it, newest first."""

    modules: tuple[str, ...]
    attribute: str

    def module(self) -> ModuleType:
        """The module of the installed vLLM that has the attribute.

        Raises:
            NotCovered: none has.
        """
        for name in self.modules:
            try:
                module = importlib.import_module(name)
            except ModuleNotFoundError:
                continue
            if hasattr(module, self.attribute):
                return module
        raise NotCovered(
            f"vLLM {installed_version()}",
            f"it has no {self.attribute} in {' or '.join(self.modules)}",
            f"install vLLM {versions.version_range('cuda')}",
        )

    def is_there(self) -> bool:
        """Whether the installed vLLM has the attribute."""
        try:
            self.module()
        except NotCovered:
            return False
        return True

    def get(self) -> Any:
        """The attribute's value."""
        return getattr(self.module(), self.attribute)

    def put(self, value: object) -> None:
        """Replace the attribute."""
        setattr(self.module(), self.attribute, value)


INIT_BATCH_INVARIANCE = PatchPoint(
    ("vllm.model_executor.determinism.batch_invariant", "vllm.model_executor.layers.batch_invariant"),
    "init_batch_invariance",
)
"""Called by every worker before its process groups exist: where vLLM installs its own mode, and this plugin its own
instead.
"""
CPU_GEMM = PatchPoint(("vllm.model_executor.layers.utils",), "dispatch_cpu_unquantized_gemm")
"""Called for every unquantised linear layer and embedding on the CPU once its weight is loaded."""
CUDA_LINEAR = PatchPoint(("vllm.model_executor.layers.linear",), "linear_batch_invariant")
"""Called on CUDA by every unquantised linear layer while the flag is 1."""
CUDA_EMBEDDING = PatchPoint(("vllm.model_executor.layers.vocab_parallel_embedding",), "linear_batch_invariant")
"""The same for output embeddings."""
ROW_PARALLEL = PatchPoint(("vllm.model_executor.layers.linear",), "RowParallelLinear")
"""The layer whose K tensor-parallel workers share."""
QKV_PARALLEL = PatchPoint(("vllm.model_executor.layers.linear",), "QKVParallelLinear")
"""A layer whose N they share, by heads."""
MERGED_COLUMN_PARALLEL = PatchPoint(("vllm.model_executor.layers.linear",), "MergedColumnParallelLinear")
"""A layer of several products with the same input, each of whose N they share."""
REPLICATED = PatchPoint(("vllm.model_executor.layers.linear",), "ReplicatedLinear")
"""A layer that each of them has all of."""
LINEAR_METHOD = PatchPoint(("vllm.model_executor.layers.linear",), "UnquantizedLinearMethod")
"""Told of every unquantised linear layer once its weight is loaded."""
EMBEDDING_METHOD = PatchPoint(("vllm.model_executor.layers.vocab_parallel_embedding",), "UnquantizedEmbeddingMethod")
"""The same for embeddings."""
INT8_SCHEME = PatchPoint(
    ("vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w8a8_int8",),
    "CompressedTensorsW8A8Int8",
)
"""Makes and computes linear layers whose weights and activations are int8."""
INT8_KERNEL = PatchPoint(
    ("vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel",), "Int8ScaledMMLinearKernel"
)
"""The base of what computes them."""
INT8_KERNELS = PatchPoint(("vllm.model_executor.kernels.linear",), "_POSSIBLE_INT8_KERNELS")
"""Lists of those by platform, the first that can serving."""
SHARD_SCALES = PatchPoint(("vllm.model_executor.parameter",), "PerTensorScaleParameter")
"""A parameter with a number of each shard of a fused layer."""
LINEAR_LAYER = PatchPoint(("vllm.model_executor.layers.linear",), "LinearBase")
METHOD_BASE = PatchPoint(("vllm.model_executor.layers.linear",), "LinearMethodBase")
"""The base of what makes and computes linear layers."""
LINEAR_CHOICE = PatchPoint(("vllm.model_executor.layers.linear",), "resolve_quant_method")
"""Chooses the method of a linear layer of a model with a configuration of quantisation."""
EMBEDDING_CHOICE = PatchPoint(("vllm.model_executor.layers.vocab_parallel_embedding",), "resolve_quant_method")
"""The same for embeddings."""
EXPERTS_CHOICE = PatchPoint(("vllm.model_executor.layers.fused_moe.routed_experts",), "resolve_quant_method")
"""The same for experts."""
ATTENTION_CHOICE = PatchPoint(("vllm.model_executor.layers.attention.attention",), "resolve_quant_method")
"""The same for attention, whose method has the scales of a quantised KV cache."""
LOADERS = PatchPoint(("vllm.model_executor.layers.linear",), "WEIGHT_LOADER_V2_SUPPORTED")
"""Names of methods whose layers load their tensors by the tensors' own rules."""
RELOAD = PatchPoint(("vllm.model_executor.model_loader.reload.layerwise",), "initialize_layerwise_reload")
"""Has layers take a checkpoint's tensors again, each when it has all of them."""
RELOAD_STATE = PatchPoint(("vllm.model_executor.model_loader.reload.layerwise",), "get_layerwise_info")
"""What came of them."""
PLACE_BACK = PatchPoint(("vllm.model_executor.model_loader.reload.layerwise",), "_place_kernel_tensors")
"""Gives a layer for which nothing came what it had before."""
EXPERTS_METHOD = PatchPoint(
    ("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",), "UnquantizedFusedMoEMethod"
)
"""Computes every unquantised layer of experts, and is told of it once its weights are loaded."""
EXPERTS_CONFIG = PatchPoint(("vllm.model_executor.layers.fused_moe.config",), "FusedMoEConfig")
"""Sizes and settings of a layer of experts, completed by its ``__post_init__``."""
ROUTED_EXPERTS = PatchPoint(("vllm.model_executor.layers.fused_moe.routed_experts",), "RoutedExperts")
"""The layer that has their weights, and whose method that is."""
MOE_RUNNER = PatchPoint(("vllm.model_executor.layers.fused_moe.runner.moe_runner",), "MoERunner")
"""The layer that models call: adds what routed experts, shared experts and other workers give."""
VOCABULARY_LAYER = PatchPoint(("vllm.model_executor.layers.vocab_parallel_embedding",), "VocabParallelEmbedding")
CONFIG = PatchPoint(("vllm.config.vllm",), "VllmConfig")
"""Completed by its ``__post_init__``, which also calls the platform."""
CURRENT_CONFIG = PatchPoint(("vllm.config", "vllm.config.vllm"), "get_current_vllm_config")
CUSTOM_OP = PatchPoint(("vllm.model_executor.custom_op",), "CustomOp")
RMS_NORM = PatchPoint(("vllm.model_executor.layers.layernorm",), "RMSNorm")
GEMMA_RMS_NORM = PatchPoint(("vllm.model_executor.layers.layernorm",), "GemmaRMSNorm")
RMS_NORM_GATED = PatchPoint(("vllm.model_executor.layers.layernorm",), "RMSNormGated")
REGISTER_BACKEND = PatchPoint(("vllm.v1.attention.backends.registry",), "register_backend")
BACKENDS = PatchPoint(("vllm.v1.attention.backends.registry",), "AttentionBackendEnum")
CPU_BACKEND = PatchPoint(("vllm.v1.attention.backends.cpu_attn",), "CPUAttentionBackend")
CPU_COMMUNICATOR = PatchPoint(("vllm.distributed.device_communicators.cpu_communicator",), "CpuCommunicator")
"""Moves tensors between workers on CPUs, and adds them."""
CUDA_COMMUNICATOR = PatchPoint(("vllm.distributed.device_communicators.cuda_communicator",), "CudaCommunicator")
"""The same for workers on GPUs: one object a group."""
NCCL = PatchPoint(("vllm.distributed.device_communicators.pynccl",), "PyNcclCommunicator")
"""What it leaves to NCCL."""
TENSOR_PARALLEL = PatchPoint(("vllm.distributed.parallel_state",), "_TP")
"""The group of workers that share each layer; None before there is one."""
CUDA_BACKEND = PatchPoint(("vllm.v1.attention.backends.triton_attn",), "TritonAttentionBackend")
WRITE_CACHE = PatchPoint(("vllm.v1.attention.ops.triton_reshape_and_cache_flash",), "triton_reshape_and_cache_flash")
"""Copies a step's keys and values to their pages on CUDA."""
ATTENTION_CONTEXT = PatchPoint(("vllm.model_executor.layers.attention.attention",), "get_attention_context")
"""What a layer has in the current step, by its name: metadata, itself, its cache, and the slots of its tokens."""
ROTARY = PatchPoint(("vllm._custom_ops",), "rotary_embedding")
"""Turns queries and keys in place."""
ROTARY_EMBEDDING = PatchPoint(("vllm.model_executor.layers.rotary_embedding",), "RotaryEmbedding")
"""The layer that calls it, and the base of those that only scale the angles."""
LLAMA_3_ROTARY_EMBEDDING = PatchPoint(("vllm.model_executor.layers.rotary_embedding",), "Llama3RotaryEmbedding")
LINEAR_ROTARY_EMBEDDING = PatchPoint(("vllm.model_executor.layers.rotary_embedding",), "LinearScalingRotaryEmbedding")
SILU_AND_MUL = PatchPoint(("vllm.model_executor.layers.activation",), "SiluAndMul")
RELU_SQUARED = PatchPoint(("vllm.model_executor.layers.activation",), "ReLUSquaredActivation")
GELU_AND_MUL = PatchPoint(("vllm.model_executor.layers.activation",), "GeluAndMul")
LOGITS_PROCESSOR = PatchPoint(("vllm.model_executor.layers.logits_processor",), "LogitsProcessor")
"""The layer that multiplies with the output embedding, and then caps or scales the logits."""
M_ROPE = PatchPoint(("vllm.model_executor.layers.rotary_embedding",), "MRotaryEmbedding")
"""The layer of multimodal models, whose positions have three rows."""
MM_ENCODER_ATTENTION = PatchPoint(("vllm.model_executor.layers.attention.mm_encoder_attention",), "MMEncoderAttention")
"""Attention of encoders of images and videos, whose items lie one after the other, without a cache."""
CONV2D = PatchPoint(("vllm.model_executor.layers.conv",), "Conv2dLayer")
"""Convolutions of images, on GPUs by cuDNN."""
MOONVIT_ROTARY = PatchPoint(("vllm.model_executor.models.moonvit",), "apply_rope")
PIXTRAL_ROTARY = PatchPoint(("vllm.model_executor.models.pixtral",), "apply_rotary_emb_vit")
LLAMA_4_VISION_ROTARY = PatchPoint(
    ("vllm.model_executor.layers.rotary_embedding.llama4_vision_rope",), "Llama4VisionRotaryEmbedding"
)
"""Turn queries and keys of encoders of images by complex numbers: two functions, and a layer."""
RELATIVE_ATTENTION = PatchPoint(("vllm.model_executor.models.deepencoder",), "RelPosAttention")
"""Attention of SAM's encoder, which the next gives the terms of."""
RELATIVE_POSITIONS = PatchPoint(("vllm.model_executor.models.deepencoder",), "add_decomposed_rel_pos")
RENDERER = PatchPoint(("vllm.renderers.base",), "BaseRenderer")
"""Makes what the engine gets of prompts with images and the like, in the front end."""
IMAGE_ID = PatchPoint(("vllm.multimodal.hasher",), "_get_image_id_bytes")
"""Takes the identifier of an image out of its file, where it has one, instead of its pixels."""
NEMOTRON_TILER = PatchPoint(("vllm.transformers_utils.processors.nano_nemotron_vl",), "DynamicResolutionImageTiler")
"""Scales images of Nemotron Nano VL, beside a function that is compiled."""
PARAKEET_EXTRACTOR = PatchPoint(("vllm.model_executor.models.parakeet",), "ParakeetExtractor")
"""Makes spectrograms of Nemotron Nano Omni's sounds, by methods that are compiled."""
MISSING_STAGE = PatchPoint(("vllm.model_executor.models.utils",), "StageMissingLayer")
"""Stands in a model for a part that vLLM has not built: for encoders where no request may carry what they encode."""
LLAMA_MLP = PatchPoint(("vllm.model_executor.models.llama",), "LlamaMLP")
"""The gated MLP of Llama and of those that are built like it."""
QWEN2_MLP = PatchPoint(("vllm.model_executor.models.qwen2",), "Qwen2MLP")
"""The same of Qwen2 and Qwen3."""
QWEN2_MOE_MLP = PatchPoint(("vllm.model_executor.models.qwen2_moe",), "Qwen2MoeMLP")
"""The same of Qwen3.5, and of Qwen2-MoE's experts that every token has, whose sum has a gate."""
LLAMA_ATTENTION = PatchPoint(("vllm.model_executor.models.llama",), "LlamaAttention")
QWEN2_ATTENTION = PatchPoint(("vllm.model_executor.models.qwen2",), "Qwen2Attention")
QWEN2_MOE_ATTENTION = PatchPoint(("vllm.model_executor.models.qwen2_moe",), "Qwen2MoeAttention")
MIXTRAL_ATTENTION = PatchPoint(("vllm.model_executor.models.mixtral",), "MixtralAttention")
GPT_OSS_ATTENTION = PatchPoint(("vllm.model_executor.models.gpt_oss",), "OAIAttention")
QWEN3_ATTENTION = PatchPoint(("vllm.model_executor.models.qwen3",), "Qwen3Attention")
QWEN3_MOE_ATTENTION = PatchPoint(("vllm.model_executor.models.qwen3_moe",), "Qwen3MoeAttention")
TOKEN_LOGPROBS = PatchPoint(("vllm.v1.worker.gpu.sample.logprob",), "compute_token_logprobs")
"""Logprobs of given tokens in vLLM's second model runner, which serves dense models on GPUs."""
SHORT_CONV = PatchPoint(("vllm.model_executor.layers.mamba.short_conv",), "ShortConv")
"""The layer of a short convolution, of LFM2."""
MAMBA_BACKENDS = PatchPoint(("vllm.v1.attention.backends.registry",), "MambaAttentionBackendEnum")
"""Names of what tells layers with states of a step."""
SHORT_CONV_BACKEND = PatchPoint(("vllm.v1.attention.backends.short_conv_attn",), "ShortConvAttentionBackend")
SHORT_CONV_BUILDER = PatchPoint(("vllm.v1.attention.backends.short_conv_attn",), "ShortConvAttentionMetadataBuilder")
SHORT_CONV_METADATA = PatchPoint(("vllm.v1.attention.backends.short_conv_attn",), "ShortConvAttentionMetadata")
MAMBA_PAGES = PatchPoint(("vllm.v1.attention.backends.utils",), "mamba_get_block_table_tensor")
"""Finds the page of each request's state."""
DELTA_RULE = PatchPoint(("vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn",), "QwenGatedDeltaNetAttention")
"""The layer of a gated delta rule, of Qwen3-Next and Qwen3.5."""
DELTA_RULE_BACKEND = PatchPoint(("vllm.v1.attention.backends.gdn_attn",), "GDNAttentionBackend")
DELTA_RULE_BUILDER = PatchPoint(("vllm.v1.attention.backends.gdn_attn",), "GDNAttentionMetadataBuilder")
DELTA_RULE_METADATA = PatchPoint(("vllm.v1.attention.backends.gdn_attn",), "GDNAttentionMetadata")
DELTA_RULE_WARMUP = PatchPoint(("vllm.model_executor.warmup.kernel_warmup",), "qwen_triton_warmup")
"""Compiles vLLM's own kernels for it on a GPU, with the states of a layer, before the first request."""
MAMBA2 = PatchPoint(("vllm.model_executor.layers.mamba.mamba_mixer2",), "MambaMixer2")
"""The layer of a state space of Mamba-2, of Nemotron-H, Granite 4 H and Falcon-H1."""
MAMBA2_NORM = PatchPoint(("vllm.model_executor.layers.mamba.mamba_mixer2",), "Mixer2RMSNormGated")
"""Its norm, of groups behind their gates."""
LATENT_ATTENTION = PatchPoint(("vllm.model_executor.layers.attention.mla_attention",), "MLAAttention")
"""The layer of latent attention, of DeepSeek's models."""
LATENT_PREFILL = PatchPoint(("vllm.model_executor.layers.attention.mla_attention",), "get_mla_prefill_backend")
"""Chooses what computes its long chunks."""
LATENT_BACKEND = PatchPoint(("vllm.model_executor.layers.attention.mla_attention",), "MLACommonBackend")
"""The base of its backends."""
WRITE_LATENT_CACHE = PatchPoint(("vllm._custom_ops",), "concat_and_cache_mla")
"""Copies a step's latent vectors to their pages on CUDA."""
SHARED_NORM = PatchPoint(("vllm.model_executor.layers.minimax_rms_norm.rms_norm_tp",), "MiniMaxText01RMSNormTP")
"""A norm of all heads' queries or keys, which workers share."""
MAMBA2_BACKEND = PatchPoint(("vllm.v1.attention.backends.mamba2_attn",), "Mamba2AttentionBackend")
MAMBA2_BUILDER = PatchPoint(("vllm.v1.attention.backends.mamba2_attn",), "Mamba2AttentionMetadataBuilder")
MAMBA2_METADATA = PatchPoint(("vllm.v1.attention.backends.mamba2_attn",), "Mamba2AttentionMetadata")
LIGHTNING = PatchPoint(("vllm.model_executor.layers.mamba.linear.bailing_linear_attn",), "BailingMoELinearAttention")
"""The layer of linear attention whose decay is constant, of Ling 2.5."""
KDA = PatchPoint(("vllm.model_executor.models.bailing_moe_v3",), "BailingMoeV3KimiDeltaAttention")
"""The layer of Kimi Delta Attention in Ling 3.0."""
LIGHTNING_BACKEND = PatchPoint(("vllm.v1.attention.backends.linear_attn",), "BailingLinearAttentionBackend")
LIGHTNING_BUILDER = PatchPoint(("vllm.v1.attention.backends.linear_attn",), "BailingLinearAttentionMetadataBuilder")
LIGHTNING_METADATA = PatchPoint(("vllm.v1.attention.backends.linear_attn",), "BailingLinearAttentionMetadata")
GATED_ATTENTION = PatchPoint(("vllm.model_executor.models.qwen3_next",), "Qwen3NextAttention")
"""Attention of Qwen3-Next and Qwen3.5, whose result is multiplied with a gate."""
STATE_SHAPES = PatchPoint(("vllm.model_executor.layers.mamba.mamba_utils",), "MambaStateShapeCalculator")
"""Says of each kind of layer which tensors a request's state is, for models and layers."""
STATE_DTYPES = PatchPoint(("vllm.model_executor.layers.mamba.mamba_utils",), "MambaStateDtypeCalculator")
STATE_COPIES = PatchPoint(("vllm.model_executor.layers.mamba.mamba_utils",), "MambaStateCopyFuncCalculator")
COPY_WHOLE_STATE = PatchPoint(("vllm.model_executor.layers.mamba.mamba_utils",), "get_temporal_copy_spec")
"""Has all of a state's tensor copied from page to page."""
MOVE_STATES = PatchPoint(("vllm.v1.worker.mamba_utils",), "preprocess_mamba")
"""Takes states to the pages of a step in the first model runner."""
KEEP_STATES = PatchPoint(("vllm.v1.worker.mamba_utils",), "postprocess_mamba_align_gpu")
"""Takes those behind accepted drafts to the pages that others find."""
FORWARD_CONTEXT = PatchPoint(("vllm.forward_context",), "get_forward_context")
"""What the layers of a step are told of it."""
WORKER = PatchPoint(("vllm.v1.worker.worker_base",), "WorkerBase")
"""Whose methods an engine calls by name."""
EXECUTOR = PatchPoint(("vllm.v1.executor.abstract",), "Executor")
"""Starts the workers, in the process of the engine."""
ENGINE_CORE = PatchPoint(("vllm.v1.engine.core",), "EngineCore")
"""Holds the executor and the scheduler, schedules steps, and is where calls of the workers pass, of a trainer that
brings weights among them.
"""
SCHEDULER = PatchPoint(("vllm.v1.core.sched.scheduler",), "Scheduler")
"""Says how many tokens of a request a step has."""
INIT_NONE_HASH = PatchPoint(("vllm.v1.core.kv_cache_utils",), "init_none_hash")
"""Makes ``NONE_HASH`` of its module, which is the parent of a prompt's first block when blocks are hashed."""
FILE_CONNECTOR = PatchPoint(("vllm.distributed.kv_transfer.kv_connector.v1.example_connector",), "ExampleConnector")
"""Stores keys and values of prompts in files, and loads them."""
NIXL_CONNECTOR = PatchPoint(("vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector",), "NixlPullConnector")
"""Hands keys and values over to an engine that reads them from this one's memory."""
NIXL_WORKER = PatchPoint(("vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker",), "NixlPullConnectorWorker")
"""Its part that reads."""
CONNECTOR_FACTORY = PatchPoint(("vllm.distributed.kv_transfer.kv_connector.factory",), "KVConnectorFactory")
"""Makes the connectors of schedulers and of workers."""
KV_CONNECTOR = PatchPoint(("vllm.distributed.kv_transfer",), "get_kv_transfer_group")
"""The connector of a worker's process."""
PAUSE_STATE = PatchPoint(("vllm.v1.core.sched.interface",), "PauseState")
WAIT_FOR_ENGINE = PatchPoint(("vllm.v1.engine.utils",), "wait_for_engine_startup")
"""Where the front end learns that a process of the engine has ended."""
DEVICE_WORKER = PatchPoint(("vllm.v1.worker.gpu_worker",), "Worker")
"""The worker of GPUs, from which that of CPUs inherits how a model is loaded; puts a GPU's memory to sleep."""
ENGINE_ARGUMENTS = PatchPoint(("vllm.engine.arg_utils",), "EngineArgs")
"""Makes the configuration of an engine of what the user passes."""
INPUT_PROCESSOR = PatchPoint(("vllm.v1.engine.input_processor",), "InputProcessor")
"""Makes what the engine gets of what a client asks."""
PUNICA_WRAPPER = PatchPoint(("vllm.lora.punica_wrapper.punica_base",), "PunicaWrapperBase")
"""The base of what layers with adapters call, and what knows a step's rows of each."""
LORA_LAYER = PatchPoint(("vllm.lora.layers.base",), "BaseLayerWithLoRA")
"""The base of layers around those that may have adapters."""
LORA_EXPERTS = PatchPoint(("vllm.lora.layers.fused_moe",), "FusedMoEWithLoRA")
"""The layer around experts that may have adapters, and the base of another one."""
LORA_REQUEST = PatchPoint(("vllm.lora.request",), "LoRARequest")
"""An adapter, as requests have it."""
LORA_WORKER = PatchPoint(("vllm.lora.worker_manager",), "WorkerLoRAManager")
"""Loads adapters in a worker."""
ADAPTER_PATH = PatchPoint(("vllm.lora.utils",), "get_adapter_absolute_path")
"""Gives the folder of an adapter, of a model hub or here."""
REQUEST = PatchPoint(("vllm.v1.request",), "Request")
"""What an engine keeps of a request."""
VALIDATION_ERROR = PatchPoint(("vllm.exceptions",), "VLLMValidationError")
"""A server tells the client of it, with status 400."""
FETCH_VIDEO = PatchPoint(("vllm.multimodal.utils",), "fetch_video")
"""Reads frames of a video for a prompt."""
MODEL_CLASS = PatchPoint(("vllm.model_executor.model_loader",), "get_model_cls")
"""The class that serves a model, of its configuration."""
TOP_K_TOP_P = PatchPoint(("vllm.v1.sample.ops.topk_topp_sampler",), "apply_top_k_top_p")
"""Filters logits for vLLM's first model runner."""
TOP_K_TOP_P_SAMPLER = PatchPoint(("vllm.v1.sample.ops.topk_topp_sampler",), "TopKTopPSampler")
"""Filters, and draws a token with the generators of seeded rows, for the first model runner."""
TOP_K_TOP_P_OF_STATES = PatchPoint(("vllm.v1.worker.gpu.sample.states",), "apply_top_k_top_p")
"""The same for the second one, under the two names that it has there."""
TOP_K_TOP_P_OF_SAMPLER = PatchPoint(("vllm.v1.worker.gpu.sample.sampler",), "apply_top_k_top_p")
INPUT_BATCH = PatchPoint(("vllm.v1.worker.gpu_input_batch",), "InputBatch")
"""What the first model runner knows of the requests of a step, a row each."""
THINKING_BUDGETS = PatchPoint(("vllm.v1.sample.thinking_budget_state",), "ThinkingBudgetStateHolder")
"""What it counts of those that may think for so many tokens."""
MOVE_DIRECTIONS = PatchPoint(("vllm.v1.sample.logits_processor.interface",), "MoveDirectionality")
"""Whether a request that moves to another row leaves its own to the one there."""
SAMPLER = PatchPoint(("vllm.v1.sample.sampler",), "Sampler")
"""Samples, and lists logprobs, in the first model runner."""
REJECTION_SAMPLER = PatchPoint(("vllm.v1.sample.rejection_sampler",), "RejectionSampler")
"""Verifies drafts, in the first model runner."""
SECOND_REJECTION_SAMPLER = PatchPoint(("vllm.v1.worker.gpu.spec_decode.rejection_sampler",), "RejectionSampler")
"""The same in the second one."""
DRAFT_NOISE = PatchPoint(("vllm.v1.worker.gpu.spec_decode.speculator",), "gumbel_sample")
"""Draws drafts there with a drafter's probabilities."""
SAMPLED_AND_REJECTED = PatchPoint(("vllm.v1.worker.gpu.input_batch",), "get_num_sampled_and_rejected")
"""Corrects both numbers there for a request whose prompt is not complete."""
SECOND_SAMPLER = PatchPoint(("vllm.v1.worker.gpu.sample.sampler",), "Sampler")
GUMBEL_SAMPLE = PatchPoint(("vllm.v1.worker.gpu.sample.sampler",), "gumbel_sample")
"""Draws a token of each row there, or takes the largest at temperature 0."""
TEMPERATURE_OF_STATES = PatchPoint(("vllm.v1.worker.gpu.sample.states",), "apply_temperature")
MIN_P_OF_STATES = PatchPoint(("vllm.v1.worker.gpu.sample.states",), "apply_min_p")
PENALTIES = PatchPoint(("vllm.v1.worker.gpu.sample.penalties",), "apply_penalties")
BAD_WORDS = PatchPoint(("vllm.v1.worker.gpu.sample.bad_words",), "BadWordsState")
TOPK_SCORES = PatchPoint(("vllm.v1.worker.gpu.sample.logprob",), "compute_topk_scores")
"""Lists logprobs in the second model runner, under the names that it has there."""
TOPK_SCORES_OF_SAMPLER = PatchPoint(("vllm.v1.worker.gpu.sample.sampler",), "compute_topk_scores")
TOPK_SCORES_OF_PROMPT = PatchPoint(("vllm.v1.worker.gpu.sample.prompt_logprob",), "compute_topk_scores")
SECOND_MODEL_RUNNER = PatchPoint(("vllm.v1.worker.gpu.model_runner",), "GPUModelRunner")
PROMPT_LOGPROBS = PatchPoint(("vllm.v1.worker.gpu.sample.prompt_logprob",), "PromptLogprobsWorker")
"""Computes logprobs of prompts there."""
COPY_PAGES = PatchPoint(("vllm.v1.worker.gpu.model_runner",), "copy_kv_cache_blocks_inplace")
"""Copies pages of the cache there, before a step whose prefix is found in a part of one."""
LOGPROBS_TENSORS = PatchPoint(("vllm.v1.outputs",), "LogprobsTensors")
MODEL_RUNNER = PatchPoint(("vllm.v1.worker.gpu_model_runner",), "GPUModelRunner")
"""The first model runner, of CPUs as well."""
MEAN_POOL = PatchPoint(("vllm.model_executor.layers.pooler.seqwise.methods",), "MeanPool")
"""Makes one row of a prompt's tokens in models that embed or classify."""
POOLER_NORMALIZE = PatchPoint(("vllm.model_executor.layers.pooler.activations",), "PoolerNormalize")
"""Gives embeddings the length 1."""
ENCODER_STATE = PatchPoint(("vllm.v1.worker.gpu.model_states.encoder_only",), "EncoderOnlyModelState")
"""What the second model runner gives a model whose tokens see those after them."""
BIND_CAPTURE = PatchPoint(("vllm.distributed.aux_output_connector.worker",), "bind_routed_experts_capturer")
"""Tells each layer of experts, in the second model runner, where to note which experts its tokens have."""
OUTPUT_PROCESSOR = PatchPoint(("vllm.v1.engine.output_processor",), "OutputProcessor")
"""Makes what a client gets of what the engine gives, by the two below."""
REQUEST_STATE = PatchPoint(("vllm.v1.engine.output_processor",), "RequestState")
"""What it keeps of a request."""
DETOKENIZER = PatchPoint(("vllm.v1.engine.detokenizer",), "BaseIncrementalDetokenizer")
LOGPROBS_PROCESSOR = PatchPoint(("vllm.v1.engine.logprobs",), "LogprobsProcessor")
STRUCTURED_OUTPUTS = PatchPoint(("vllm.v1.structured_output",), "StructuredOutputManager")
"""Holds the grammars of requests, in the process of the engine."""
ENDPOINT_PLUGINS = PatchPoint(("vllm.plugins",), "load_endpoint_plugins")
"""Called by a server for the routes that plugins add."""
GAUGE = PatchPoint(("vllm.v1.metrics.loggers",), "Gauge")
"""prometheus_client's, as vLLM has it."""
COUNTER = PatchPoint(("vllm.v1.metrics.loggers",), "Counter")
"""The same."""
METRICS = PatchPoint(("vllm.v1.metrics.prometheus",), "REGISTRY")
ENVIRONMENT = PatchPoint(("vllm.envs",), "environment_variables")
CUDAGRAPH_MODE = PatchPoint(("vllm.config", "vllm.config.compilation"), "CUDAGraphMode")
GRAPH_MANAGER = PatchPoint(("vllm.v1.worker.gpu.cudagraph_utils",), "CudaGraphManager")
"""Decides, in vLLM's second model runner, which CUDA graphs there are and which one a step takes."""
GRAPH = PatchPoint(("vllm.v1.worker.gpu.cudagraph_utils",), "BatchExecutionDescriptor")
"""Says what a CUDA graph there is for."""
DRAFT_MODEL = PatchPoint(("vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator",), "StandaloneARSpeculator")
"""Drafts there with a model of its own, which vLLM launches operator by operator."""
DRAFT_INPUTS = PatchPoint(("vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator",), "prepare_prefill_inputs")
"""Writes what that model reads of a verify step."""
SLOTS_BY_LAYER = PatchPoint(("vllm.v1.worker.gpu.attn_utils",), "build_slot_mappings_by_layer")
DEEP_GEMM = PatchPoint(("vllm.utils.deep_gemm",), "fp8_gemm_nt")
"""Products of e4m3 in blocks, by DeepGEMM where that is installed."""
GROUPED_DEEP_GEMM = PatchPoint(("vllm.utils.deep_gemm",), "m_grouped_fp8_gemm_nt_contiguous")
"""The same of rows of several experts."""
HAS_DEEP_GEMM = PatchPoint(("vllm.utils.deep_gemm",), "is_deep_gemm_supported")
COMPILATION_MODE = PatchPoint(("vllm.config", "vllm.config.compilation"), "CompilationMode")

ALL = {name: value for name, value in list(globals().items()) if isinstance(value, PatchPoint)}

OPTIONAL = {
    *("DRAFT_MODEL", "DRAFT_INPUTS", "MEAN_POOL", "POOLER_NORMALIZE", "ENCODER_STATE"),
    *("BIND_CAPTURE", "LORA_EXPERTS"),
    *("INT8_SCHEME", "INT8_KERNEL", "INT8_KERNELS", "SHARD_SCALES"),
    *("LINEAR_CHOICE", "EMBEDDING_CHOICE", "EXPERTS_CHOICE", "ATTENTION_CHOICE"),
    *("MM_ENCODER_ATTENTION", "CONV2D", "RENDERER", "IMAGE_ID"),
    *("MOONVIT_ROTARY", "PIXTRAL_ROTARY", "LLAMA_4_VISION_ROTARY", "RELATIVE_ATTENTION", "RELATIVE_POSITIONS"),
    *("SHORT_CONV", "MAMBA_BACKENDS", "SHORT_CONV_BACKEND", "SHORT_CONV_BUILDER", "SHORT_CONV_METADATA", "MAMBA_PAGES"),
    *("DELTA_RULE", "DELTA_RULE_BACKEND", "DELTA_RULE_BUILDER", "DELTA_RULE_METADATA", "RMS_NORM_GATED"),
    *("DELTA_RULE_WARMUP", "GATED_ATTENTION"),
    *("MAMBA2", "MAMBA2_NORM", "MAMBA2_BACKEND", "MAMBA2_BUILDER", "MAMBA2_METADATA"),
    "KDA",
    *("LIGHTNING", "LIGHTNING_BACKEND", "LIGHTNING_BUILDER", "LIGHTNING_METADATA"),
    "SHARED_NORM",
    *("INIT_NONE_HASH", "FILE_CONNECTOR", "NIXL_CONNECTOR", "NIXL_WORKER"),
    *("STATE_SHAPES", "STATE_DTYPES", "STATE_COPIES", "COPY_WHOLE_STATE", "MOVE_STATES", "KEEP_STATES"),
}
"""Those that vLLM has from 0.32 on, or with torchvision alone. Without the first two the mode is as good but slower;
what the others are for is refused before.
"""
MEMBERS = {
    "CONFIG": ("__post_init__",),
    "CPU_COMMUNICATOR": ("all_reduce", "all_gather"),
    "CUDA_COMMUNICATOR": ("__init__", "all_reduce", "reduce_scatterv"),
    "NCCL": ("__init__", "all_reduce", "reduce_scatter", "reduce_scatterv"),
    "DEVICE_WORKER": ("load_model", "get_model", "sleep", "wake_up"),
    "ENGINE_CORE": (
        *("_initialize_kv_caches", "collective_rpc", "step", "step_with_batch_queue", "reset_prefix_cache"),
        *("preprocess_add_request", "add_request", "add_lora", "remove_lora"),
    ),
    "CONNECTOR_FACTORY": ("create_connector",),
    "FILE_CONNECTOR": (
        *("get_num_new_matched_tokens", "build_connector_meta", "_found_match_for_prompt"),
        *("_generate_foldername_debug", "register_kv_caches", "start_load_kv", "save_kv_layer", "wait_for_save"),
    ),
    "NIXL_CONNECTOR": (
        *("get_num_new_matched_tokens", "request_finished", "request_finished_all_groups"),
        "update_connector_output",
    ),
    "NIXL_WORKER": ("_send_heartbeats", "_pop_done_transfers"),
    "ENGINE_ARGUMENTS": ("create_engine_config",),
    "INPUT_PROCESSOR": ("process_inputs",),
    "REQUEST": ("from_engine_core_request", "append_output_token_ids"),
    "SCHEDULER": ("_preempt_request",),
    "REQUEST_STATE": ("from_new_request",),
    "STRUCTURED_OUTPUTS": ("grammar_init", "_create_grammar"),
    "DETOKENIZER": ("update",),
    "LOGPROBS_PROCESSOR": ("update_from_output",),
    "INPUT_BATCH": ("swap_states", "condense", "add_request", "update_async_output_token_ids"),
    "THINKING_BUDGETS": ("sync_batch", "update_state", "_find_last_sequence_index"),
    "TOP_K_TOP_P_SAMPLER": ("forward_cpu", "forward_native"),
    "LOGITS_PROCESSOR": ("forward", "_get_logits"),
    "SAMPLER": ("forward", "gather_logprobs", "gather_specific_token_logprobs"),
    "REJECTION_SAMPLER": ("forward",),
    "SECOND_REJECTION_SAMPLER": ("__call__",),
    "SECOND_SAMPLER": ("apply_sampling_params", "add_request"),
    "SECOND_MODEL_RUNNER": ("sample",),
    "PROMPT_LOGPROBS": ("compute_prompt_logprobs",),
    "MODEL_RUNNER": (
        *("_sample", "_bookkeeping_sync", "_update_states", "sync_and_gather_intermediate_tensors"),
        *("_get_prompt_logprobs_dict", "_execute_mm_encoder"),
    ),
    "PUNICA_WRAPPER": ("_update_base_metadata",),
    "LORA_WORKER": ("_load_adapter",),
    "MOE_RUNNER": ("__init__",),
    "EXPERTS_CONFIG": ("__post_init__",),
    "LORA_EXPERTS": ("__init__", "set_mapping"),
    "RENDERER": ("_process_mm_uuids", "_process_multimodal"),
    "MEAN_POOL": ("forward",),
    "POOLER_NORMALIZE": ("forward_chunk",),
    "ENCODER_STATE": ("prepare_inputs",),
    "SHORT_CONV": ("forward_native", "forward_cuda"),
    "SHORT_CONV_BACKEND": ("get_builder_cls",),
    "DELTA_RULE": ("forward_cpu", "forward_cuda", "get_state_shape", "split_ba", "_output_projection"),
    "DELTA_RULE_BACKEND": ("get_builder_cls",),
    "DELTA_RULE_BUILDER": ("build", "build_for_cudagraph_capture"),
    "MAMBA2": ("forward", "get_state_shape", "get_kv_cache_spec"),
    "MAMBA2_NORM": ("forward_native", "forward_cuda"),
    "MAMBA2_BACKEND": ("get_builder_cls",),
    "MAMBA2_BUILDER": ("build", "build_for_cudagraph_capture"),
    "LIGHTNING": ("forward", "get_attn_backend", "get_state_shape", "get_kv_cache_spec"),
    "LIGHTNING_BACKEND": ("get_builder_cls",),
    "LIGHTNING_BUILDER": ("build", "build_for_cudagraph_capture"),
    "KDA": ("forward", "get_state_shape", "get_kv_cache_spec"),
    "STATE_SHAPES": (
        *("gated_delta_net_state_shape", "mamba2_state_shape", "linear_attention_state_shape", "kda_state_shape"),
    ),
    "STATE_DTYPES": (
        *("gated_delta_net_state_dtype", "mamba2_state_dtype", "linear_attention_state_dtype", "kda_state_dtype"),
    ),
    "STATE_COPIES": (
        *("gated_delta_net_state_copy_func", "mamba2_state_copy_func", "linear_attention_state_copy_func"),
        "kda_state_copy_func",
    ),
    "GRAPH_MANAGER": ("_init_candidates",),
    "DRAFT_MODEL": ("init_cudagraph_manager", "capture", "_prefill", "_multi_step_decode"),
    "LINEAR_METHOD": ("process_weights_after_loading", "apply"),
    "EMBEDDING_METHOD": ("process_weights_after_loading", "apply"),
    "INT8_SCHEME": ("create_weights",),
    "INT8_KERNEL": ("_get_layer_params",),
    "EXPERTS_METHOD": ("process_weights_after_loading", "apply_monolithic"),
}
"""Methods of those classes that are overridden."""


def replace_layer(
    layer: type[Any], prefix: str, forward: Callable[..., object], **methods: Callable[..., object]
) -> None:
    """Register a class as the out-of-tree form of one of vLLM's layers, so that every model builds it instead; the
    first one stays.

    Args:
        layer: vLLM's.
        prefix: of the class's name.
        forward: on every device; of a layer that has one method for all of them, that method.
        methods: others.
    """
    if layer.__name__ in CUSTOM_OP.module().op_registry_oot:
        return
    of_devices = ("forward_native", "forward_cpu", "forward_cuda", "forward_oot")
    methods |= dict.fromkeys(of_devices if hasattr(layer, "forward_cuda") else ("forward",), forward)
    made = type(f"{prefix}{layer.__name__}", (layer,), {"__module__": __name__, **methods})
    layer.register_oot(made, name=layer.__name__)


def installed_version() -> str:
    """The version of the installed vLLM."""
    import vllm

    return vllm.__version__


def check_version(device_type: str) -> None:
    """Refuse a vLLM that nobody has tested on a device, unless :data:`~.envs.UNTESTED_VLLM` names it.

    Raises:
        NotCovered: it is newer or older than those that were, or between them and in no list, or failed.
    """
    version = installed_version()
    objection = versions.objection(version, device_type)
    if objection and version != envs.UNTESTED_VLLM.read():
        raise NotCovered(
            f"vLLM {version} on {device_type}",
            objection,
            f"install vLLM {versions.version_range(device_type)}, or set {envs.UNTESTED_VLLM.name}={version} "
            "to start it untested",
        )


def untested(device_type: str) -> str:
    """The warning about a vLLM that only :data:`~.envs.UNTESTED_VLLM` lets start; empty about any other."""
    objection = versions.objection(installed_version(), device_type)
    if not objection:
        return ""
    return (
        f"vLLM {installed_version()} was not tested with batch-invariant mode ({objection}), and starts because "
        f"{envs.UNTESTED_VLLM.name} names it; run vllm-batch-invariant check before relying on its bits."
    )
