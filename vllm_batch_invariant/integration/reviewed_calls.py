"""Names of vLLM's, of Transformers' and of other packages that the methods of models may use, because somebody has read
them: none launches a kernel that computes what a request gets, other than by a layer or an operation of the mode's.

A name is listed with the module that defines it, or a package above. ``python -m scripts.check_patch_points
vllm==VERSION`` prints those that covered models of a version use and that are not here: read each, and what it gives,
before you add it.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Read:
    """Names that were read.

    Attributes:
        module: that defines them, or the package above it.
        names: "name" with all that it has, or "name.attribute"; * stands for anything.
        what: they are.
    """

    module: str
    names: str
    what: str


CALLS = (
    # Workers
    Read(
        "vllm.distributed",
        """get_pp_group get_tp_group get_ep_group get_dp_group get_tensor_model_parallel_rank
        get_tensor_model_parallel_world_size model_parallel_is_initialized""",
        "groups of workers; what a method may call of one is in METHODS",
    ),
    Read(
        "vllm.distributed",
        "tensor_model_parallel_all_reduce tensor_model_parallel_all_gather",
        "moves and adds by the communicators that the mode replaces",
    ),
    Read("vllm.distributed.utils", "get_pp_indices divide", "numbers of layers and heads"),
    Read("vllm.distributed.utils", "split_tensor_along_last_dim", "views"),
    Read("vllm.model_executor.models.utils", "sequence_parallel_chunk", "a worker's part of the tokens: pad and slice"),
    Read("torch.distributed", "get_world_size is_initialized", "numbers of workers"),
    # What there is
    Read(
        "vllm.config", "get_current_vllm_config get_current_vllm_config_or_none getattr_iter *Config", "configuration"
    ),
    Read("vllm.config.model", "str_dtype_to_torch_dtype", "a dtype by its name"),
    Read("vllm.transformers_utils.configs", "*Config", "configuration"),
    Read(
        "vllm.transformers_utils.config",
        "set_default_rope_theta is_interleaved is_rope_parameters_nested patch_rope_parameters iter_rope_parameters",
        "configuration",
    ),
    Read("vllm.model_executor.layers.quantization", "QuantizationConfig", "configuration; what it makes is looked at"),
    Read("vllm.envs", "*", "environment variables"),
    Read("vllm._aiter_ops", "rocm_aiter_ops.is_*", "whether there are kernels for ROCm, which is refused"),
    Read("vllm.model_executor.layers.utils", "rocm_unquantized_gemm", "called on ROCm alone, which is refused"),
    Read(
        "vllm.platforms",
        "current_platform.is_* current_platform.device_type current_platform.current_device",
        "which device there is",
    ),
    Read("vllm.v1.attention", "AttentionType", "names of kinds of attention"),
    Read("vllm.sequence", "IntermediateTensors", "tensors between stages, by their names"),
    Read("vllm.logger", "init_logger", "a logger"),
    Read("vllm.utils", "supports_kw cdiv round_up common_prefix is_torch_equal_or_newer", "numbers, signatures"),
    Read("torch", "_assert", "raises"),
    Read("typing_extensions", "*", "types"),
    Read("regex", "*", "texts"),
    Read("packaging", "*", "versions"),
    Read("transformers", "*Config __version__", "configuration"),
    # Layers: made by these, and looked at when they are there
    Read("vllm.model_executor.layers.activation", "get_act_fn get_act_and_mul_fn", "layers of activations by name"),
    Read("vllm.model_executor.layers.activation", "_ACTIVATION*_REGISTRY", "the same"),
    Read("vllm.model_executor.layers.rotary_embedding", "get_rope", "a layer of rotary embeddings"),
    Read(
        "vllm.model_executor.layers.fused_moe",
        """FusedMoE FusedMoEFactory fused_moe_make_expert_params_mapping resolve_layer_fused_shared_expert
        is_model_fused_shared_expert_compatible""",
        "layers of experts, which there are, and how their weights are called",
    ),
    Read(
        "vllm.model_executor.layers.pooler",
        "DispatchPooler.for_* pooler_for_*",
        "layers of pooling models, which are refused",
    ),
    Read(
        "vllm.model_executor.layers.fusion",
        "maybe_fused_act_quant",
        "the activation, where the next linear layer is not quantised, which is refused",
    ),
    Read("vllm.model_executor.layers.hpc", "HpcRopeNorm.support QkNormPolicy", "whether a layer is made, and of what"),
    Read("torch.nn.modules.module", "register_module_module_registration_hook", "layers that a model is made of"),
    Read("vllm.model_executor.layers.quantization", "get_quark_ocp_mx_group_size", "a number of quantised layers"),
    Read("vllm.model_executor.layers.vocab_parallel_embedding", "DEFAULT_VOCAB_PADDING_SIZE", "a number"),
    Read("vllm.model_executor.offloader", "get_offloader", "moves weights to the host, which is refused"),
    Read(
        "vllm.compilation",
        "support_torch_compile _support_torch_compile TorchCompileWithNoGuardsWrapper",
        "compiles where the mode lets it: nowhere",
    ),
    Read("vllm.compilation", "set_model_tag", "a name for what is compiled"),
    # Multimodal models, as text
    Read("vllm.multimodal", "MULTIMODAL_REGISTRY", "which classes process images and the like on the host"),
    Read("vllm.config", "get_multimodal_config", "configuration"),
    Read("vllm.model_executor.model_loader", "initialize_model", "the text model, whose layers are looked at"),
    Read("vllm.transformers_utils.processor", "get_processor get_processor_config", "of images, on the host"),
    Read("vllm.tokenizers", "cached_tokenizer_from_config", "a tokenizer"),
    Read("vllm.model_executor.layers.fusion", "build_mm_input_norm", "a layer, of encoders"),
    Read(
        "numpy",
        "arange array broadcast_to concatenate full indices repeat stack zeros int32 int64 float32 ndarray",
        "positions, on the host",
    ),
    # Weights
    Read(
        "vllm.model_executor.model_loader.weight_utils",
        """default_weight_loader composed_weight_loader sharded_weight_loader row_parallel_weight_loader
        make_attention_sink maybe_remap_kv_scale_name""",
        "copies a checkpoint's weights",
    ),
    Read("vllm.model_executor.utils", "set_weight_attrs", "attributes of weights"),
    # vLLM's backend of Transformers' models
    Read(
        "vllm.model_executor.models.transformers",
        "Fusers get_fusers init_on_device_without_buffers BaseFuser *Fuser",
        "has a class of Transformers' call layers of vLLM's: rewrites its source",
    ),
    Read("vllm.model_executor.layers.attention.mla_attention", "get_mla_dims", "sizes of heads"),
    Read("transformers", "AutoModel.from_config", "the model, whose layers are looked at"),
    Read(
        "transformers.conversion_mapping",
        "WeightRenaming get_checkpoint_conversion_mapping get_model_conversion_mapping",
        "names of weights",
    ),
    Read("transformers.utils.output_capturing", "*", "hands on what layers give"),
    Read("transformers.utils", "*docstring can_return_tuple merge_with_config_defaults logging", "form"),
    Read("transformers.utils.generic", "maybe_autocast", "a dtype"),
    Read("transformers.utils.deprecation", "deprecate_kwarg", "form"),
    Read("transformers.modeling_outputs", "*", "tuples with names"),
    Read("transformers.cache_utils", "*Cache", "vLLM asks for none"),
    Read("transformers.masking_utils", "create_*mask*", "a mask, which vLLM's attention does not read"),
    Read("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS AttentionInterface", "vLLM has put its own there"),
    Read("transformers.modeling_utils", "PreTrainedModel", "its own methods load, save and generate"),
    Read("transformers.generation", "GenerationMixin", "vLLM generates by itself"),
    Read("transformers.modeling_layers", "Generic* GradientCheckpointingLayer", "calls the layer while it serves"),
    Read("transformers.activations", "ACT2FN", "layers of activations by name"),
    Read("transformers.initialization", "*", "first values of weights"),
    Read(
        "transformers.integrations",
        "use_kernel_forward_from_hub use_kernelized_func use_kernel_func_from_hub use_experts_implementation",
        "names what kernelize() may replace, which vLLM does not call",
    ),
    Read(
        "transformers.modeling_rope_utils",
        "ROPE_INIT_FUNCTIONS dynamic_rope_update",
        "frequencies; layers.py looks for those that follow the longest context of a step",
    ),
)

COVERED = (
    """apertus bloom chatglm commandr ernie45 exaone exaone4 falcon gemma gemma2 gemma3 glm4 gpt2 gpt_j granite
    hyperclovax internlm2 llama mimo mistral nemotron nemotron_nas opt orion phi3 plamo3 qwen2 qwen3 rnj1 solar
    stablelm step1 telechat2 teleflm"""
    # mixtures of experts
    """ afmoe bailing_moe ernie45_moe exaone_moe glm4_moe gpt_oss granitemoe granitemoeshared hy_v3 laguna mixtral
    qwen3_next:Qwen3NextSparseMoeBlock
    olmoe qwen2_moe qwen3_moe"""
    # drafters
    """ glm4_moe_mtp llama_eagle llama_eagle3 medusa mimo_mtp qwen3_eagle3"""
    # multimodal ones, as text; vLLM's backend of Transformers' models
    """ gemma3_mm:Gemma3ForConditionalGeneration qwen2_5_vl:Qwen2_5_VLForConditionalGeneration
    qwen3_vl:Qwen3VLForConditionalGeneration qwen3_vl:Qwen3LLMModel qwen3_vl:Qwen3LLMForCausalLM
    transformers:TransformersForCausalLM transformers.base transformers.causal transformers.legacy"""
)
"""Modules of vLLM's models, or "module:class", that are said to pass."""
FROM_TRANSFORMERS = "arcee cohere2 gpt_neox helium olmo2 phi seed_oss smollm3 stablelm starcoder2"
"""Models that a version of vLLM takes from Transformers, and that are said to pass."""
METHODS = (
    # of groups of workers
    """wrap_modules rank"""
    # of configurations and tables of names
    """ apply_vllm_mapper get_name get_rename_mapper get_unstacked_mapper get_text_config get_hidden_size get_vocab_size
    get_total_num_hidden_layers get_head_size get_num_kv_heads _map_name rename_source_key search match compile
    get_num_attention_heads exists get_seq_length
    get_multimodal_config get_limit_per_prompt is_multimodal_pruning_enabled with_hf_config enter_context get_num_layers
    get_video_pruning_spec astype"""
    # of layers: each is looked at by itself
    """ forward_native embed_tokens embed_input_ids tie_weights get_top_tokens get_language_model fc input_norm
    _set_aux_hidden_state_layers get_expert_weights set_eplb_state update_expert_map load_weights
    get_input_embeddings get_output_embeddings set_input_embeddings get_decoder decoder
    compute_logits model shared_head"""
    # of vLLM's rewriting of Transformers' layers
    """ fuse info layer_index orig_to_new_stacked scale sinks"""
)
"""Methods that models call of what they hold or are given, beside those of tensors, layers and Python's containers."""


def is_reviewed(module: str, name: str, attributes: tuple[str, ...] = ()) -> bool:
    """Whether somebody has read what a module has under a name, and under an attribute of that."""
    whole = ".".join((name, *attributes))
    return any(
        f"{module}.".startswith(f"{read.module}.")
        and any(
            fnmatchcase(name, pattern) if "." not in pattern else fnmatchcase(f"{whole}.", f"{pattern}.*")
            for pattern in read.names.split()
        )
        for read in CALLS
    )
