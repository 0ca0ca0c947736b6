"""batch_invariant_mode() on CUDA tensors: every variant reaches the operations, and what stays stock is invariant."""

import pytest
import torch
import torch.nn.functional as F

from tests.assertions import DTYPES, assert_rows_keep_their_bits, assert_same_bits
from vllm_batch_invariant import batch_invariant_mode
from vllm_batch_invariant.ops.dispatch import module_for
from vllm_batch_invariant.ops.pointwise import BINARY, UNARY

MATMULS = {
    "@": lambda x, w: x @ w,
    "mm, out": lambda x, w: torch.mm(x, w, out=torch.empty(7, 33, device="cuda")),
    "matmul, 3-d": lambda x, w: x.expand(3, 7, 48) @ w,
    "matrix @ vector": lambda x, w: x @ w[:, 0],
    "vector @ vector": lambda x, w: x[0] @ w[:, 0],
    "addmm": lambda x, w: torch.addmm(w[:7], x, w),
    "bmm": lambda x, w: torch.bmm(x.expand(3, 7, 48), w.expand(3, 48, 33)),
    "baddbmm": lambda x, w: torch.baddbmm(w[:7], x.expand(3, 7, 48), w.expand(3, 48, 33)),
    "einsum": lambda x, w: torch.einsum("ik,kj->ij", x, w),
    "linear, bias": lambda x, w: F.linear(x, w.t(), w[0]),
    "linear, fp64": lambda x, w: F.linear(x.double(), w.t().double()).float(),
    "attention": lambda x, w: F.scaled_dot_product_attention(*[x[None, None]] * 3, is_causal=True),
}
EXTRA = {"pow.Tensor_Scalar": (3.3,), "softplus_backward": (1.0, 20.0), "elu": (1.0, 1.0, 1.0)}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(sum(shape)), device="cuda")


@pytest.mark.parametrize("variant", MATMULS)
def test_every_variant_of_a_matmul_reaches_the_operation(variant, monkeypatch):
    x, w = draw(7, 48), draw(48, 33)
    stock = MATMULS[variant](x, w)
    module, calls = module_for("linear", "cuda"), []
    for name in ("mm", "accumulate", "bmm", "accumulate_batch"):
        product = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, product=product: calls.append(1) or product(*a))
    with batch_invariant_mode(), torch.no_grad():
        ours = MATMULS[variant](x, w)
    assert calls, "PyTorch served it"
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mm", "bmm"])
def test_a_product_that_names_its_dtype_reaches_the_operation(name):
    x, w = draw(300, 4864).bfloat16(), draw(4864, 896).bfloat16()
    batch = (1,) if name == "bmm" else ()
    with batch_invariant_mode():
        whole = getattr(torch, name)(x.view(*batch, 300, 4864), w.view(*batch, 4864, 896), out_dtype=torch.float32)
        for rows in (1, 2, 8, 16, 64):
            part = getattr(torch, name)(
                x[:rows].view(*batch, rows, 4864), w.view(*batch, 4864, 896), out_dtype=torch.float32
            )
            assert_same_bits(part.view(rows, 896), whole.view(300, 896)[:rows], f"{rows} rows")


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: torch.mm(x, w[:40]),
        lambda x, w: x @ w[:40],
        lambda x, w: torch.bmm(x[None], w[None, :40]),
        lambda x, w: x.bfloat16() @ w,
        lambda x, w: x @ w.bfloat16(),
        lambda x, w: torch.addmm(w[0].bfloat16(), x, w),
    ],
    ids=["mm, shapes", "@, shapes", "bmm, shapes", "@, bf16 and fp32", "@, fp32 and bf16", "addmm, bias of bf16"],
)
def test_operands_that_do_not_fit_are_an_error_as_in_pytorch(call):
    x, w = draw(7, 48), draw(48, 33)
    with pytest.raises(RuntimeError):
        call(x, w)
    with batch_invariant_mode(), pytest.raises((RuntimeError, ValueError)):
        call(x, w)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_small_network_gives_a_row_the_same_bits_forward_and_backward(dtype):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(96, 200), torch.nn.SiLU(), torch.nn.RMSNorm(200), torch.nn.Linear(200, 50)]
    network = torch.nn.Sequential(*layers, torch.nn.LogSoftmax(-1)).to("cuda", dtype)
    x = draw(130, 96).to(dtype)

    with batch_invariant_mode():
        assert_rows_keep_their_bits(network, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_stock_elementwise_functions_give_an_element_the_same_bits_at_every_place(name, dtype):
    """Why the mode leaves them to PyTorch on a GPU."""
    if name in ("igamma", "igammac") and dtype in (torch.bfloat16, torch.float16):
        pytest.skip("PyTorch has no such kernel")
    base, _, overload = name.partition(".")
    function = getattr(getattr(torch.ops.aten, base), overload or "default")

    def apply(x: torch.Tensor) -> torch.Tensor:
        return function(*[x] * (2 if name in BINARY else 1), *EXTRA.get(name, ()))

    x = (draw(300, 777).abs() * 3 + 0.01).to(dtype)
    x = x / (1 + x) if name == "atanh" else x
    whole = apply(x)
    for start in (0, 1, 3):
        for rows in (1, 2, 3, 5, 7, 64, 100, 297):
            part = x[start : start + rows]
            for form in (part, part.contiguous(), part.t().contiguous().t()):
                assert_same_bits(apply(form), whole[start : start + rows], f"rows {start} to {start + rows}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [64, 100, 777, 4096])
def test_stock_norms_give_a_row_the_same_bits_at_every_batch_size(length, dtype):
    x, weight = draw(300, length).to(dtype), draw(length).to(dtype)
    functions = {
        "rms_norm": lambda x: F.rms_norm(x, (length,), weight, 1e-6),
        "layer_norm": lambda x: F.layer_norm(x, (length,), weight, weight),
    }
    with batch_invariant_mode():
        for name, function in functions.items():
            whole = function(x)
            for rows in (1, 2, 3, 7, 64, 65, 255, 256, 257):
                assert_same_bits(function(x[:rows]), whole[:rows], f"{name}, {rows} rows")
                assert_same_bits(function(x[300 - rows :]), whole[300 - rows :], f"{name}, last {rows} rows")


REDUCTIONS = {
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "cumsum": lambda x: torch.cumsum(x, -1),
    "nansum": lambda x: torch.nansum(x, -1),
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(-1, keepdim=True),
    "var_mean": lambda x: torch.stack(torch.var_mean(x, -1)),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "norm, 3": lambda x: torch.linalg.vector_norm(x, 3, dim=-1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_row_is_reduced_alike_at_every_batch_size(name, dtype):
    x = draw(1030, 5000).to(dtype)
    reduce, rows_at = REDUCTIONS[name], -1 if name == "var_mean" else 0
    with batch_invariant_mode():
        whole = reduce(x)
        for rows in (1, 2, 3, 17, 64, 500):
            part = reduce(x[:rows])
            assert_same_bits(part, whole.narrow(rows_at, 0, rows), f"{rows} rows")
    error = (whole.double() - reduce(x.double())).abs() / reduce(x.double()).abs().clamp_min(1)
    assert error.max() < {torch.float32: 5e-5, torch.bfloat16: 2e-2}.get(dtype, 2e-3)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_gradients_are_those_of_pytorch(name):
    def gradient() -> torch.Tensor:
        x = draw(7, 48).requires_grad_()
        (getattr(torch, name)(x, -1) * x.detach().flip(0)).sum().backward()
        return x.grad

    stock = gradient()
    with batch_invariant_mode():
        torch.testing.assert_close(gradient(), stock)


def test_pytorch_gets_everything_back():
    x, w = draw(7, 48), draw(48, 33)
    flags = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
    before = x @ w
    with batch_invariant_mode():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert_same_bits(x @ w, before)
    assert flags == (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled())


def test_integers_are_served_by_pytorch():
    integers = torch.arange(12, device="cuda").view(3, 4)
    with batch_invariant_mode():
        assert integers.sum().item() == 66
        assert (integers > 3).sum().item() == 8
