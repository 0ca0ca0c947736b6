"""The places of vllm-ascend that the plugin patches or calls, as in :data:`WHEEL`."""

from ...integration.reviews.patch_points import PatchPoint

WHEEL = "vllm-ascend==0.26.0rc1"

WORKER = PatchPoint(("vllm_ascend.worker.worker",), "NPUWorker")
OWN_MODE_CALLED = PatchPoint(("vllm_ascend.worker.worker",), "init_batch_invariance")
"""Under which name the worker calls vllm-ascend's own mode, before its process groups exist."""
OWN_MODE = PatchPoint(("vllm_ascend.batch_invariant",), "init_batch_invariance")
OWN_LIBRARY = PatchPoint(("vllm_ascend.batch_invariant",), "_batch_invariant_LIB")
"""The torch.library.Library with what that mode registered; None before."""
TORCH_SUM = PatchPoint(("vllm_ascend.batch_invariant",), "torch_sum")
"""torch.sum as it was before that mode replaced it."""
BACKEND = PatchPoint(("vllm_ascend.attention.attention_v1",), "AscendAttentionBackend")
ATTENTION = PatchPoint(("vllm_ascend.attention.attention_v1",), "AscendAttentionBackendImpl")
METADATA = PatchPoint(("vllm_ascend.attention.attention_v1",), "AscendMetadata")

ALL = {name: value for name, value in list(globals().items()) if isinstance(value, PatchPoint)}

MEMBERS = {
    "WORKER": ("_init_worker_distributed_environment",),
    "BACKEND": ("get_name", "get_impl_cls", "get_kv_cache_shape"),
    "ATTENTION": ("forward", "forward_impl"),
    "METADATA": (
        "actual_seq_lengths_q",
        "attn_mask",
        "block_tables",
        "num_decode_tokens",
        "num_decodes",
        "seq_lens_list",
    ),
}
"""Members of those classes that are overridden or read."""

WORKER_CLASS = "vllm_ascend.worker.worker.NPUWorker"
"""What its platform chooses as the worker of a model on Ascend 910."""
SETTINGS = {
    "weight_nz_mode": 0,
    "ascend_compilation_config": {
        "enable_npugraph_ex": False,
        "enable_static_kernel": False,
        "fuse_norm_quant": False,
        "fuse_qknorm_rope": False,
        "fuse_muls_add": False,
    },
    "ascend_fusion_config": {"fusion_ops_gmmswigluquant": False},
}
"""Entries of vLLM's additional_config: weights in their own layout, and no fused norms or quantisation."""
