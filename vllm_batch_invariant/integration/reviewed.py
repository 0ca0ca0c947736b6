"""What of vLLM was reviewed, and with what result: fields of its configuration, claims of its attention backends, its
environment variables.

A field that is in no list is not known, and must have its default; a variable that is in none must not be set.
``make test-patch-points`` prints those that a version of vLLM has and nobody has reviewed.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .. import envs
from ..errors import NotCovered
from . import reviewed_variables

_ABSENT = object()


@dataclass(frozen=True)
class Fields:
    """What was found of one class of configurations.

    Attributes:
        free: cannot change how a covered model is computed, or every value is covered.
        elsewhere: looked at by a row of ``support.py``, or set by the mode itself.
        fixed: may change how a covered model is computed: the default, or another of these values.
    """

    free: str = ""
    elsewhere: str = ""
    fixed: dict[str, tuple[object, ...]] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """All that were reviewed."""
        return {*self.free.split(), *self.elsewhere.split(), *self.fixed}


FIELDS = {
    "VllmConfig": Fields(
        # Configurations of their own, below.
        free="""model_config cache_config parallel_config scheduler_config device_config load_config offload_config
        attention_config aux_output_config mamba_config kernel_config structured_outputs_config observability_config
        logging_config compilation_config profiler_config kv_events_config ec_manager_config reasoning_config
        weight_transfer_config watchdog_config fault_tolerance_config"""
        # Names, times, and levels that choose among compiled passes, graph sizes and batch sizes.
        """ instance_id shutdown_timeout optimization_level performance_mode""",
        elsewhere="quant_config lora_config speculative_config kv_transfer_config watermark_config diffusion_config",
        fixed={"ec_transfer_config": (), "engram_config": (), "additional_config": ({},)},
    ),
    "ModelConfig": Fields(
        # Which model, tokenizer and weights; what of a prompt is admitted; what of an answer is formatted.
        free="""model model_weights tokenizer tokenizer_mode trust_remote_code seed hf_config hf_text_config
        is_submodel_config word_embeddings_untied_by_checkpoint hf_config_path allowed_local_media_path
        allowed_media_domains revision code_revision tokenizer_revision max_model_len spec_target_max_model_len
        allow_deprecated_quantization max_logprobs skip_tokenizer_init enable_prompt_embeds served_model_name
        config_format hf_token hf_overrides generation_config override_generation_config io_processor_plugin
        renderer_num_workers"""
        # The layers that these choose are looked at when the model is there.
        """ model_class_overrides model_impl"""
        # Schedules: eager layers, masks over keys that a window hides anyway, cascades (which ours never run).
        """ enforce_eager disable_sliding_window disable_cascade_attn"""
        # Memory that is given back and taken again, with the same weights.
        """ enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph
        enable_nccl_comm_suspend enable_cumem_allocator""",
        elsewhere="""runner convert dtype quantization quantization_config logits_processors logprobs_mode pooler_config
        multimodal_config return_sampling_mask""",
        fixed={
            "use_fp64_gumbel": (),
            "enable_trace_replay": (),
            "enable_return_routed_experts": (),
            "override_attention_dtype": (),
        },
    ),
    "CacheConfig": Fields(
        # Pages: how many, how large, how they are found again, when they are let go.
        free="""block_size user_specified_block_size _block_size_resolved prefix_match_unit gpu_memory_utilization
        num_gpu_blocks_override enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval
        num_gpu_blocks num_cpu_blocks simple_cpu_offload_num_blocks effective_attention_block_size kv_cache_size_tokens
        kv_cache_max_concurrency hash_block_size cache_hit_alignment_tokens kv_cache_memory_bytes kv_cache_layout
        skip_page_size_padded"""
        # Of the model.
        """ is_attention_free sliding_window"""
        # Of layers that are refused: state spaces, and layers that read another's cache.
        """ mamba_page_size_padded mamba_block_size user_specified_mamba_block_size mamba_cache_dtype
        mamba_ssm_cache_dtype mamba_cache_mode enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm
        use_kda_recoverssm swa_bounded_replay enable_mamba_fine_grained_prefix_cache""",
        elsewhere="cache_dtype kv_offloading_size kv_offloading_backend",
        fixed={"kv_cache_dtype_skip_layers": (), "kv_sharing_fast_prefill": (), "calculate_kv_scales": ()},
    ),
    "ParallelConfig": Fields(
        # Addresses, ranks, ports, processes and cores; what several workers say to each other, of which there is one.
        free="""data_parallel_rank data_parallel_master_ip data_parallel_rpc_port dp_sync_interval
        data_parallel_master_port data_parallel_index _data_parallel_master_port_list
        _coord_store_port master_addr
        master_port node_rank numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids rank world_size
        distributed_timeout_seconds cpu_distributed_timeout_seconds disable_nccl_for_dp_synchronization
        disable_custom_all_reduce enable_shm_tensor_arena max_parallel_loading_workers ray_workers_use_nsight
        ray_runtime_env placement_group _api_process_count _api_process_rank enable_fault_tolerance
        fault_tolerance_config dcp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate
        cp_kv_cache_interleave_size _allow_auto_resolve_cp_interleave_size"""
        # Of experts: whether workers share each or have some whole, which weights they read, and how they send tokens
        # to each other under data parallelism, which is refused.
        """ is_moe_model enable_expert_parallel enable_ep_weight_filter all2all_backend elastic_ep_max_dp_size"""
        # Batches cut in two, which ubatch_size and enable_dbo switch on.
        """ dbo_decode_token_threshold dbo_prefill_token_threshold"""
        # Methods that a trainer adds to a worker.
        """ worker_extension_cls""",
        elsewhere="""pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size data_parallel_size
        data_parallel_size_local data_parallel_rank_local data_parallel_backend data_parallel_external_lb
        data_parallel_hybrid_lb decode_context_parallel_size enable_eplb eplb_config nnodes""",
        fixed={
            "expert_placement_strategy": (),
            "enable_hc_sp": (),
            "enable_batch_sharded_sampling": (False,),
            "enable_elastic_ep": (),
            "enable_dbo": (),
            "ubatch_size": (),
            "sd_worker_cls": (),
            "distributed_executor_backend": ("mp", "uni", "ray", "external_launcher"),
            "worker_cls": (
                "vllm.v1.worker.gpu_worker.Worker",
                "vllm.v1.worker.cpu_worker.CPUWorker",
                "vllm_ascend.worker.worker.NPUWorker",
                "vllm_batch_invariant.integration.ascend.worker.Worker",
            ),
        },
    ),
    "SchedulerConfig": Fields(
        # Which requests and how many tokens a step has, and when.
        free="""max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs
        long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_partial_prefills
        max_long_partial_prefills max_num_queued_reqs max_num_queued_tokens enable_chunked_prefill
        max_num_encoder_input_tokens encoder_cache_size policy disable_chunked_mm_input scheduler_cls
        disable_hybrid_kv_cache_manager scheduler_reserve_full_isl watermark prefill_schedule_interval async_scheduling
        stream_interval""",
        elsewhere="runner_type is_multimodal_model",
    ),
    "CompilationConfig": Fields(
        # Nothing is compiled, so passes, backends and their caches are not used.
        free="""debug_dump_path cache_dir local_cache_dir compile_cache_save_format backend ir_enable_torch_wrap
        splitting_ops compile_mm_encoder compile_sizes compile_ranges_endpoints inductor_compile_config inductor_passes
        use_inductor_graph_partition pass_config dynamic_shapes_config fast_moe_cold_start traced_files compilation_time
        encoder_compilation_time"""
        # Of CUDA graphs: a replay computes what was captured; which sizes there are is a schedule.
        """ cudagraph_num_of_warmups cudagraph_copy_inputs cudagraph_specialize_lora"""
        # Of encoders and of layers that read another's cache, which are refused.
        """ cudagraph_mm_encoder encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch
        encoder_cudagraph_max_frames_per_batch cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes
        decoder_replay_trim_threshold"""
        # What vLLM notes down there.
        """ enabled_custom_ops disabled_custom_ops static_forward_context static_all_moe_layers""",
        elsewhere="mode custom_ops cudagraph_mode cudagraph_capture_sizes max_cudagraph_capture_size",
    ),
    "AttentionConfig": Fields(
        # Of backends that do not serve, of MLA and of its indexer.
        free="""minimax_m3_msa_decode_backend flash_attn_version flash_attn_max_num_splits_for_cuda_graph
        tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph use_trtllm_attention
        disable_flashinfer_q_quantization mla_prefill_backend use_prefill_query_quantization trtllm_ragged_backend
        indexer_kv_dtype indexer_sparse_logits indexer_tp_shard_min_rows minimax_m3_indexer_cp sparse_mla_force_mqa
        sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n flex_attn_q_block_size
        flex_attn_kv_block_size use_prefill_decode_attention use_fp4_indexer_cache""",
        elsewhere="backend backend_per_kind",
        fixed={"use_non_causal": (), "hisparse_config": ()},
    ),
    "KernelConfig": Fields(
        # Norms and experts are the mode's own whatever their priority; no kernel of FlashInfer's is used; warm-ups.
        free="""ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup
        enable_jit_warmup moe_backend sparse_indexer_topk_backend""",
        fixed={
            "monokernel": (),
            "linear_backend": (),
            "linear_backend_per_quant": (),
            "enable_bf16x3_router_gemm": (),
        },
    ),
    # Of a model that is served as text: no encoder is built, and no input is processed.
    "MultiModalConfig": Fields(
        free="""media_io_kwargs mm_processor_kwargs mm_device_do_normalize mm_processor_cache_gb mm_processor_cache_type
        mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend
        mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin
        interleave_mm_strings skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc
        mm_ipc_gpu_memory_gb""",
        elsewhere="language_model_only limit_per_prompt enable_mm_embeds",
        fixed={"mm_encoder_only": (), "allow_missing_mm_embeddings": ()},
    ),
    # A weight that is moved while it is used has not been proven.
    "OffloadConfig": Fields(fixed={"offload_backend": (), "uva": (), "prefetch": ()}),
    "UVAOffloadConfig": Fields(fixed={"cpu_offload_gb": (), "cpu_offload_params": ()}),
    "PrefetchOffloadConfig": Fields(
        fixed={"offload_group_size": (), "offload_num_in_group": (), "offload_prefetch_step": (), "offload_params": ()}
    ),
    "AuxOutputConfig": Fields(free="max_bytes", elsewhere="enable_return_routed_experts"),
    "PoolerConfig": Fields(
        # Which rows of a prompt are given, which columns of them, and what is done to each.
        free="""task pooling_type seq_pooling_type tok_pooling_type use_activation dimensions max_embed_len logit_mean
        logit_sigma step_tag_id returned_token_ids logit_bias logit_scale"""
        # Of scores that are refused.
        """ enable_flash_late_interaction""",
        # A prompt in parts that are requests of their own, and a mean of what they give.
        fixed={"enable_chunked_processing": ()},
    ),
    # How a checkpoint is read: the weights are what they are.
    "LoadConfig": Fields(
        free="""load_format download_dir safetensors_load_strategy safetensors_prefetch_num_threads
        safetensors_prefetch_block_size model_loader_extra_config device ignore_patterns use_tqdm_on_load
        pt_load_map_location"""
    ),
    "DeviceConfig": Fields(elsewhere="device device_type"),
    # Masks: a token that a grammar forbids has a logit of -inf, whoever computes the mask.
    "StructuredOutputsConfig": Fields(
        free="""backend disable_any_whitespace disable_additional_properties reasoning_parser reasoning_parser_plugin
        enable_in_reasoning"""
    ),
    # Tokens that end a thought are forced by a mask of the request's own.
    "ReasoningConfig": Fields(
        free="""reasoning_parser reasoning_start_str reasoning_end_str _reasoning_start_token_ids
        _reasoning_end_token_ids _natural_reasoning_end_token_ids _enabled"""
    ),
    "WeightTransferConfig": Fields(free="backend"),
    "SpeculativeConfig": Fields(
        # What makes drafts: they decide how long an answer takes.
        free="""num_speculative_tokens num_speculative_tokens_per_batch_size model revision code_revision quantization
        draft_lm_head_quantization kv_cache_dtype moe_backend attention_backend enforce_eager draft_load_config
        draft_model_config draft_parallel_config draft_tensor_parallel_size tensor_parallel_size max_model_len
        prompt_lookup_min prompt_lookup_max suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests
        suffix_decoding_max_spec_factor suffix_decoding_min_token_prob parallel_drafting draft_sample_method
        dspark_draft_topk xpress_topc use_heterogeneous_vocab use_local_argmax_reduction index_share_for_mtp_iteration
        disable_padded_drafter_batch disable_eagle_block_drop disable_lookahead_block_hashes"""
        # Of verifications that are refused.
        """ fly_entropy_threshold fly_entropy_top_k""",
        elsewhere="method target_model_config target_parallel_config",
        # Which drafts are accepted, by another rule than that they are what is sampled.
        fixed={
            "rejection_sample_method": (),
            "synthetic_acceptance_rates": (),
            "synthetic_acceptance_length": (),
            "fly_window_size": (),
            "enable_adaptive_verification": (),
        },
    ),
}
"""By the name of the class. Every name that vLLM 0.26 to 0.33 has."""

UNREAD = frozenset(
    {
        "EncoderCacheManagerConfig",
        "EPLBConfig",
        "FaultToleranceConfig",
        "KVEventsConfig",
        "LoggingConfig",
        "MambaConfig",
        "ObservabilityConfig",
        "ProfilerConfig",
        "WatchdogConfig",
    }
)
"""Classes that as a whole decide no arithmetic of a covered model: logs, metrics, profiles, watchdogs, events; experts
that move, state spaces and encoders, which are refused.
"""

BELONG_TO_A_FIELD = frozenset(
    {"DynamicShapesConfig", "IrOpPriorityConfig", "PassConfig"}
    | {"ECTransferConfig", "EngramConfig", "HiSparseConfig", "WatermarkConfig", "DiffusionConfig"}
    | {
        "KVTransferConfig",
        "LoRAConfig",
        "QuantizationConfigArgs",
    }
)
"""Classes that were judged with the field that holds them: free, or refused as soon as they are there."""


def unreviewed(name: str, fields: set[str]) -> set[str]:
    """The fields of a class of configurations that nobody has reviewed."""
    if name in UNREAD | BELONG_TO_A_FIELD:
        return set()
    return fields - (FIELDS[name].names if name in FIELDS else set())


def check(config: Any, where: str = "") -> None:
    """Refuse a field that is not free and has not its default, in a configuration or in one that it holds.

    Raises:
        NotCovered: the first such field.
    """
    kind = type(config).__name__
    reviewed = FIELDS.get(kind, Fields())
    passed = {*reviewed.free.split(), *reviewed.elsewhere.split()}
    for name, default in _defaults(config):
        value, path = getattr(config, name), f"{where}{name}"
        if dataclasses.is_dataclass(value) and type(value).__name__ in FIELDS:
            check(value, f"{path}.")
        elif name in passed or type(value).__name__ in UNREAD:
            continue
        elif value not in (default, *reviewed.fixed.get(name, ())):
            why = "it has not been proven that it leaves a request's arithmetic alone"
            if name not in reviewed.fixed:
                why = "this version of the plugin does not know it"
            raise NotCovered(f"{path}={_shown(value)}", why, f"leave it out, so that it is {_shown(default)}")


def _defaults(config: Any) -> Iterator[tuple[str, object]]:
    """The fields of a configuration that have a value, each with its default; a value of its own where it has none."""
    for field in dataclasses.fields(config):
        if not hasattr(config, field.name):
            continue
        default: Any = field.default
        if field.default_factory is not dataclasses.MISSING:
            yield field.name, field.default_factory()
        elif hasattr(default, "get_default"):  # a field of pydantic's
            made = default.default_factory
            yield field.name, made() if made is not None else default.default
        else:
            yield field.name, _ABSENT if default is dataclasses.MISSING else default


def _shown(value: object) -> str:
    if value is _ABSENT:
        return "not there"
    text = repr(value.value if isinstance(value, Enum) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


CLAIMS = frozenset(
    {
        "supports_attn_type",
        "supports_batch_invariance",
        "supports_block_size",
        "supports_combination",
        "supports_compute_capability",
        "supports_dtype",
        "supports_head_size",
        "supports_kv_cache_dtype",
        "supports_sink",
        "supports_sliding_window",
    }
)
"""Methods ``supports_*`` of attention backends that ours answers, or lets vLLM's backend for the device answer. To
whatever else a version of vLLM asks, ours says no.
"""
DENIED = frozenset(
    {
        "supports_alibi_sqrt",
        "supports_dcp",
        "supports_device_cpu_query_lens_mismatch",
        "supports_kv_cache_update_bypass",
        "supports_kv_connector",
        "supports_mm_prefix",
        "supports_non_causal",
        "supports_non_causal_dcp",
        "supports_pcp",
        "supports_per_head_quant_scales",
        "supports_rswa",
    }
)
"""Those that vLLM 0.26 to 0.33 have and that are denied after a look at what they mean."""

VARIABLES = {
    "VLLM_FLOAT32_MATMUL_PRECISION": ("highest", "matmuls in fp32 would be computed in TF32 or bf16"),
    "VLLM_KV_CACHE_LAYOUT": ("", "the kernels read pages as the mode's backend lays them out"),
    "VLLM_USE_SIMPLE_KV_OFFLOAD": ("0", "a KV cache that is moved has not been proven"),
    "VLLM_USE_OINK_OPS": ("0", "its norms and matmuls are not ours"),
    "VLLM_ENABLE_HPC_OPS": ("0", "its fused layers are not ours"),
    "VLLM_USE_HW_AGNOSTIC": ("0", "its layers are not ours"),
    "VLLM_MLA_DISABLE": ("0", "latent attention that is computed as plain attention has not been proven"),
    "VLLM_CPU_SGL_KERNEL": ("0", "its matmuls are not ours"),
    "VLLM_ENABLE_GEMM_RS": ("0", "its matmuls are not ours"),
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": ("", "experts would be chosen by something else than the model's router"),
    "VLLM_USE_RUST_FRONTEND": (
        "0",
        "a server in Rust would answer instead of vLLM's in Python, which the mode has give seeds, end answers at stop "
        "strings and tell its fingerprint",
    ),
}
"""Environment variables of vLLM's that could put other kernels in the place of ours, or another process in the place of
one that the mode patches: the value that is covered, and why no other. :mod:`.reviewed_variables` has the others.
"""


def unread_variables(names: Iterable[str]) -> list[str]:
    """Those of vLLM's variables that nobody has read."""
    ours = {variable.name for variable in envs.VARIABLES}
    return sorted(name for name in {*names} - ours - {*VARIABLES} if not reviewed_variables.has_read(name))


def check_variables(names: Iterable[str]) -> None:
    """Refuse an environment variable that could change arithmetic, or that nobody has read.

    Args:
        names: of all variables that the installed vLLM knows.

    Raises:
        NotCovered: the first that has another value than the covered one, or else the first unread one that is set.
    """
    for name, (covered, why) in VARIABLES.items():
        value = os.environ.get(name, covered)
        if value.lower() not in (covered, "", *(("false",) if covered == "0" else ())):
            raise NotCovered(f"{name}={value}", why, f"unset {name}")
    for name in unread_variables(names):
        if os.environ.get(name):  # what it is set to may be a secret
            raise NotCovered(f"the variable {name}", "this version of the plugin does not know it", f"unset {name}")
