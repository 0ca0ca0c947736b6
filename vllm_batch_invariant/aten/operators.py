"""What ``batch_invariant_mode()`` makes of PyTorch's operators: a table of every one that has a kernel on a CPU or is
written of others for every device, and does more than compute each element from the elements at its place.

An operator is named without its overload and without the ``_`` of its in-place form. Those that PyTorch composes of
others have no kernel, and so no row: their parts have. tests/aten measures the rows, and fails for an operator in none.
"""

import re
from collections.abc import Iterator
from importlib import import_module

import torch

from .overrides import COMPOSITIONS

_KEYS = ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")

SAME = {
    "sums along a row": (
        "cumprod cumsum dist _foreach_norm _logcumsumexp logcumsumexp logsumexp renorm segment_reduce "
        "_segment_reduce_backward trace _weight_norm_interface _weight_norm_interface_backward"
    ),
    "norms": "native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward",
    "batch norm in evaluation": "native_batch_norm",
    "softmax": "log_softmax _safe_softmax softmax",
    "distances": "_cdist_backward _cdist_forward _euclidean_dist _pdist_backward _pdist_forward",
    "losses without a reduction": (
        "_ctc_loss _ctc_loss_backward multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_backward "
        "multilabel_margin_loss_forward nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward"
    ),
    "pooling": (
        "adaptive_avg_pool1d _adaptive_avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d_backward "
        "_adaptive_avg_pool3d adaptive_avg_pool3d _adaptive_avg_pool3d_backward adaptive_avg_pool3d_backward "
        "avg_pool1d avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward"
    ),
    "interpolation": (
        "grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward upsample_bicubic2d "
        "_upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward upsample_bicubic2d_backward upsample_bilinear2d "
        "_upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward upsample_bilinear2d_backward _upsample_lanczos2d_aa "
        "_upsample_lanczos2d_aa_backward upsample_linear1d upsample_linear1d_backward upsample_trilinear3d "
        "upsample_trilinear3d_backward"
    ),
    "sums by index": (
        "col2im _embedding_bag _embedding_bag_forward_only index_add index_put index_reduce scatter_add scatter_reduce "
        "unfold_backward"
    ),
    "small products": "linalg_cross",
}
"""PyTorch's kernel, which computes a row from itself: measured on a CPU, in every dtype that it has."""

OWN = {
    "convolutions": (
        "conv_depthwise3d conv_tbc _convolution convolution convolution_backward _slow_conv2d_backward "
        "_slow_conv2d_forward slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d "
        "slow_conv_transpose3d"
    ),
    "Fourier transforms": "_fft_c2c _fft_c2r _fft_r2c",
    "decompositions and solvers (LAPACK), matrix_exp": (
        "cholesky cholesky_inverse cholesky_solve _cholesky_solve_helper _compute_linear_combination geqrf "
        "linalg_cholesky_ex _linalg_det linalg_eig _linalg_eigh _linalg_eigvals linalg_eigvals "
        "linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu "
        "linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_pinv linalg_qr _linalg_slogdet _linalg_solve_ex "
        "linalg_solve_triangular _linalg_svd ormqr triangular_solve"
    ),
    "the gradient of embedding_bag by its weights": "_embedding_bag_per_sample_weights_backward",
    "products of integers and of scaled fp8": "_foreach_mm _grouped_mm _int_mm _scaled_mm _scaled_mm_v2",
    "fused attention and layers, which the mode switches off": (
        "linear_backward _masked_softmax _masked_softmax_backward matmul_backward mkldnn_rnn_layer "
        "mkldnn_rnn_layer_backward _native_multi_head_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_fused_attention_overrideable "
        "_scaled_dot_product_fused_attention_overrideable_backward _thnn_fused_gru_cell _thnn_fused_gru_cell_backward "
        "_thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl _transform_bias_rescale_qkv "
        "_transformer_encoder_layer_fwd _triton_multi_head_attention _triton_scaled_dot_attention"
    ),
}
"""PyTorch's own: a row may follow the rows beside it."""

BATCH = (
    "batch_norm_backward batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_gather_stats "
    "batch_norm_gather_stats_with_counts _batch_norm_no_update batch_norm_stats batch_norm_update_stats "
    "_batch_norm_with_update _batch_norm_with_update_functional bincount _embedding_bag_backward "
    "_embedding_bag_dense_backward embedding_dense_backward embedding_renorm _foreach_powsum hash_tensor histc "
    "histogram _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors "
    "native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_functional "
    "_native_batch_norm_legit_no_training native_norm"
)
"""They add up the rows of a batch, or count them, so that there is no row to compare."""

ORDER = (
    "adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d adaptive_max_pool3d_backward all allclose "
    "amax amin _aminmax aminmax any argmax argmin bucketize count_nonzero cummax _cummax_helper cummin _cummin_helper "
    "_foreach_max fractional_max_pool2d fractional_max_pool2d_backward fractional_max_pool3d "
    "fractional_max_pool3d_backward _is_all_true _is_any_true isin kthvalue max max_pool2d_backward "
    "max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward "
    "max_unpool2d max_unpool3d median min mode nanmedian searchsorted sort topk _unique _unique2 unique_consecutive "
    "unique_dim unique_dim_consecutive"
)
"""They compare or count, which is exact in any order. The gradient of a pooling adds what overlapping windows give."""

ELEMENTS = (
    "_add_relu addr affine_grid_generator binary_cross_entropy binary_cross_entropy_backward "
    "binary_cross_entropy_with_logits complex diagonal_backward _dirichlet_grad fill floor_divide _fw_primal "
    "glu_backward glu_backward_jvp glu_jvp hardshrink_backward hardsigmoid_backward hardswish hardswish_backward "
    "hardtanh_backward huber_loss huber_loss_backward __irshift__ leaky_relu_backward log_sigmoid_backward "
    "log_sigmoid_forward _make_dual _masked_scale mse_loss mse_loss_backward native_dropout polar _prelu_kernel "
    "_prelu_kernel_backward rrelu_with_noise rrelu_with_noise_backward rrelu_with_noise_functional select_backward "
    "slice_backward smooth_l1_loss smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward "
    "softshrink_backward _standard_gamma_grad"
)
"""Elementwise, though PyTorch does not mark them so."""

MOVES = (
    "alias alias_copy arange as_strided as_strided_copy as_strided_scatter bartlett_window blackman_window block_diag "
    "cat ccol_indices channel_shuffle _chunk_cat col_indices _conj _conj_copy constant_pad_nd copy _copy_from "
    "_copy_from_and_resize crow_indices dense_dim detach detach_copy diag_embed diagonal diagonal_copy "
    "diagonal_scatter _efficientzerotensor embedding empty empty_like empty_permuted empty_strided expand expand_copy "
    "eye fft_fftfreq fft_rfftfreq flip from_file full full_like _fw_primal_copy gather hamming_window hann_window "
    "_has_same_storage_numel im2col index index_copy index_fill index_select indices _indices_copy is_coalesced "
    "is_pinned is_same_size is_set_to _jagged_to_padded_dense_forward kaiser_window _lazy_clone lift lift_fresh "
    "lift_fresh_copy linspace _local_scalar_dense logspace lu_unpack _make_dual_copy masked_scatter "
    "masked_scatter_backward masked_select narrow_copy native_channel_shuffle _neg_view _neg_view_copy new_empty "
    "new_empty_strided new_full new_ones new_zeros _new_zeros_with_same_feature_meta nonzero nonzero_static ones "
    "ones_like _pack_padded_sequence _padded_dense_to_jagged_forward permute permute_copy _pin_memory pixel_shuffle "
    "pixel_unshuffle range reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward "
    "reflection_pad3d reflection_pad3d_backward repeat repeat_interleave replication_pad1d replication_pad1d_backward "
    "replication_pad2d replication_pad2d_backward replication_pad3d replication_pad3d_backward _reshape_alias "
    "_reshape_alias_copy _reshape_copy resize resize_as _resize_output roll rot90 row_indices scalar_tensor scatter "
    "select select_copy select_scatter set slice slice_copy slice_inverse slice_scatter sparse_dim _spdiags split "
    "split_copy split_with_sizes split_with_sizes_copy squeeze squeeze_copy _stack stack t t_copy take _to_copy "
    "_to_dense to_padded_tensor transpose transpose_copy tril tril_indices triu triu_indices unbind unbind_copy unfold "
    "unfold_copy _unsafe_index _unsafe_index_put _unsafe_masked_index _unsafe_masked_index_put_accumulate unsafe_split "
    "unsafe_split_with_sizes _unsafe_view unsqueeze unsqueeze_copy upsample_nearest1d upsample_nearest1d_backward "
    "upsample_nearest2d upsample_nearest2d_backward upsample_nearest3d upsample_nearest3d_backward "
    "_upsample_nearest_exact1d _upsample_nearest_exact1d_backward _upsample_nearest_exact2d "
    "_upsample_nearest_exact2d_backward _upsample_nearest_exact3d _upsample_nearest_exact3d_backward values "
    "_values_copy values_copy view view_as_complex view_as_complex_copy view_as_real view_as_real_copy view_copy zero "
    "zeros zeros_like"
)
"""They copy, make, index or view; gradients of padding add a few elements of one row."""

RANDOM = (
    "bernoulli binomial cauchy exponential _fused_dropout geometric log_normal multinomial normal normal_functional "
    "_philox_normal _philox_uniform poisson rand rand_like randint randint_like randn randn_like random randperm "
    "_sample_dirichlet _standard_gamma uniform"
)
"""They draw from the process's generator, in the order of calls."""

OTHER = re.compile(
    r"_?(sparse|mkldnn|cudnn|miopen|mps|nested|quantized|quantize|fake_quantize|fused_(adagrad|adam|adamw|sgd|moving|sdp)|amp|test|assert|functional"
    r"|convert|validate|coalesce|dyn_quant|make_per|empty_(affine|per_channel)|empty_quantized|weight_int|to_sparse|nnpack"
    r"|histogramdd|lstm_mps|copy_sparse|resize_as_sparse)|sym_constrain|q_per_channel|int_repr|dequantize|to_mkldnn"
    r"|_foobar|_print|_linalg_check|(ccol|crow|col|row)_indices_copy|indices_copy|sspaddmm|_make_dep_token"
    r"|_fused_sdp_choice|_grid_sampler_2d_cpu_fallback|convolution_(backward_)?overrideable|_assert"
)
"""How the names of operators begin that belong to other layouts, other libraries, quantised numbers, optimisers, which
work on one parameter at a time, or PyTorch itself.
"""


def covered(device_type: str) -> frozenset[str]:
    """Operators that the mode replaces on a device type."""
    names = {*COMPOSITIONS, *import_module(f".{device_type}", __package__).DEVICE.operators}
    return frozenset(name.partition(".")[0].removesuffix("_") for name in names)


def leaves() -> Iterator[str]:
    """Every operator of this PyTorch that has to have a row."""
    found: dict[str, bool] = {}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        if namespace != "aten" or not any(has(qualified, key) for key in _KEYS):
            continue
        base, _, overload = name.partition(".")
        is_elementwise = torch.Tag.pointwise in getattr(getattr(torch.ops.aten, base), overload or "default").tags
        base = base.removesuffix("_") if not base.endswith("__") else base
        found[base] = found.get(base, False) or is_elementwise
    yield from sorted(name for name, is_elementwise in found.items() if not is_elementwise)


def rows(device_type: str = "cpu") -> dict[str, str]:
    """The row of each operator: "covered", "same", "own", "batch", "order", "elements", "moves", "random" or "other".
    That of one for a list of tensors is that of the operator for each.
    """
    tables = {
        "same": " ".join(SAME.values()),
        "own": " ".join(OWN.values()),
        "batch": BATCH,
        "order": ORDER,
        "elements": ELEMENTS,
        "moves": MOVES,
        "random": RANDOM,
    }
    found = {name: row for row, names in tables.items() for name in names.split()}
    having_rows = {*leaves()}
    for name in having_rows - {*found}:
        if OTHER.match(name):
            found[name] = "other"
        elif name.startswith("_foreach_") and name.removeprefix("_foreach_") not in having_rows:
            found[name] = "elements"
        elif name.startswith("_foreach_") and (row := found.get(name.removeprefix("_foreach_"))) is not None:
            found[name] = row
    return found | dict.fromkeys(covered(device_type), "covered")


def table() -> str:
    """The rows of a CPU that a user may ask for, in Markdown; docs/contract.md has it."""
    replaced = sorted(covered("cpu"), key=lambda name: (name.lstrip("_"), name))
    lines = ["| on a CPU | operators of PyTorch |", "|---|---|", f"| covered | {_listed(' '.join(replaced))} |"]
    lines += [f"| PyTorch's, measured: {kind} | {_listed(names)} |" for kind, names in SAME.items()]
    lines += [f"| PyTorch's own: {kind} | {_listed(names)} |" for kind, names in OWN.items()]
    lines += [f"| they add up or count the batch itself | {_listed(BATCH)} |"]
    return "\n".join(lines)


def _listed(names: str) -> str:
    return ", ".join(name for name in names.split() if not name.endswith("_backward"))
