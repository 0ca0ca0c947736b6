"""batch_invariant_mode(): every variant reaches the operations, gradients included, and everything is given back."""

import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import vllm_batch_invariant
from tests.assertions import DTYPES, assert_rows_keep_their_bits, assert_same_bits
from vllm_batch_invariant import aten, batch_invariant_mode, set_batch_invariant_mode
from vllm_batch_invariant.aten import cpu
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.dispatch import module_for
from vllm_batch_invariant.ops.linear import cpu as linear_cpu

draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
X, W, V = draw(7, 48), draw(48, 33), draw(48)
BATCH_X, BATCH_W = draw(3, 7, 48), draw(3, 48, 33)
ADDED = draw(7, 33)

MATMULS = {
    "@": lambda: X @ W,
    "matmul": lambda: torch.matmul(X, W),
    "matmul, 3-d": lambda: torch.matmul(BATCH_X, W),
    "matmul, batched": lambda: torch.matmul(BATCH_X, BATCH_W),
    "matmul, broadcast": lambda: torch.matmul(X, BATCH_W),
    "matrix @ vector": lambda: X @ V,
    "vector @ matrix": lambda: V @ W,
    "vector @ vector": lambda: V @ V,
    "mm": lambda: torch.mm(X, W),
    "mm, out": lambda: torch.mm(X, W, out=torch.empty(7, 33)),
    "matmul, out": lambda: torch.matmul(X, W, out=torch.empty(7, 33)),
    "addmm": lambda: torch.addmm(ADDED, X, W),
    "addmm, scaled": lambda: torch.addmm(ADDED, X, W, beta=0.5, alpha=2.0),
    "addmm, out": lambda: torch.addmm(ADDED, X, W, out=torch.empty(7, 33)),
    "addmm_": lambda: ADDED.clone().addmm_(X, W),
    "bmm": lambda: torch.bmm(BATCH_X, BATCH_W),
    "bmm, out": lambda: torch.bmm(BATCH_X, BATCH_W, out=torch.empty(3, 7, 33)),
    "baddbmm": lambda: torch.baddbmm(ADDED, BATCH_X, BATCH_W),
    "baddbmm_": lambda: ADDED.expand(3, 7, 33).clone().baddbmm_(BATCH_X, BATCH_W),
    "addbmm": lambda: torch.addbmm(ADDED, BATCH_X, BATCH_W),
    "mv": lambda: torch.mv(X, V),
    "addmv": lambda: torch.addmv(ADDED[:, 0], X, V),
    "dot": lambda: torch.dot(V, V),
    "vdot": lambda: torch.vdot(V, V),
    "inner": lambda: torch.inner(X, W.t()),
    "tensordot": lambda: torch.tensordot(BATCH_X, W, 1),
    "einsum": lambda: torch.einsum("bik,kj->bij", BATCH_X, W),
    "einsum, batched": lambda: torch.einsum("bik,bkj->bij", BATCH_X, BATCH_W),
    "linear": lambda: F.linear(X, W.t()),
    "linear, bias": lambda: F.linear(X, W.t(), ADDED[0]),
    "linear, 3-d, bias": lambda: F.linear(BATCH_X, W.t(), ADDED[0]),
    "chain": lambda: torch.linalg.multi_dot([X, W, W.t()]),
    "linear module": lambda: torch.nn.functional.linear(X.double(), W.t().double()).float(),
    "attention": lambda: F.scaled_dot_product_attention(
        BATCH_X[:, None], BATCH_X[:, None], BATCH_X[:, None], is_causal=True
    ),
}


@pytest.mark.parametrize("variant", MATMULS)
def test_every_variant_of_a_matmul_reaches_the_operation(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = MATMULS[variant]()
    calls = []
    product = linear_cpu._product
    monkeypatch.setattr(linear_cpu, "_product", lambda a, *given: calls.append(a.shape) or product(a, *given))
    with batch_invariant_mode(), torch.no_grad():
        ours = MATMULS[variant]()
    assert calls, "PyTorch served it"
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_gives_a_token_the_same_bits_in_a_turned_batch_of_any_size(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, weight, bias = (torch.randn(*s, generator=generator).to(dtype) for s in ((5, 3, 64), (96, 64), (96,)))
    with batch_invariant_mode(), torch.no_grad():
        whole = F.linear(tokens.transpose(0, 1), weight, bias)
        for batch in (1, 2):
            part = F.linear(tokens[:, :batch].contiguous().transpose(0, 1), weight, bias)
            assert_same_bits(part, whole[:batch], f"batch of {batch}")


@pytest.mark.parametrize(
    "call",
    [
        lambda: X @ W.bfloat16(),
        lambda: torch.addmm(ADDED[0].bfloat16(), X, W),
        lambda: torch.bmm(BATCH_X, BATCH_W.bfloat16()),
        lambda: torch.mv(X, V.bfloat16()),
    ],
    ids=["@", "addmm", "bmm", "mv"],
)
def test_operands_of_several_dtypes_are_an_error_as_in_pytorch(call) -> None:
    with pytest.raises(RuntimeError):
        call()
    with batch_invariant_mode(), pytest.raises((RuntimeError, ValueError)):
        call()


FORM = draw(5, 48, 48) / 48
REDUCTIONS = {
    "mean": lambda x: x.mean(),
    "mean, dim": lambda x: x.mean(-1),
    "mean, out": lambda x: torch.mean(x, 1, out=torch.empty(7)),
    "sum": lambda x: x.sum(),
    "sum, dims": lambda x: x.sum((0, 1)),
    "sum, out": lambda x: torch.sum(x, 1, out=torch.empty(7)),
    "sum, dtype": lambda x: x.sum(1, dtype=torch.float64).float(),
    "logsumexp": lambda x: torch.logsumexp(x, 1),
    "rms_norm": lambda x: F.rms_norm(x, (48,)),
    "bilinear": lambda x: F.bilinear(x, x, FORM),
    "softmax": lambda x: F.softmax(x, -1),
    "softmax, out": lambda x: torch.softmax(x, -1, out=torch.empty(7, 48)),
    "softmax module": lambda x: torch.nn.Softmax(0)(x),
    "log_softmax": lambda x: x.log_softmax(1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(7), reduction="none"),
}


@pytest.mark.parametrize("variant", REDUCTIONS)
def test_every_variant_of_a_reduction_reaches_the_operation(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = REDUCTIONS[variant](X)
    calls = []
    for operation, names in (("reduce", ("sum", "mean")), ("softmax", ("softmax", "log_softmax"))):
        module = module_for(operation, "cpu")
        for name in names:
            function = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *a, f=function, **k: calls.append(1) or f(*a, **k))
    with batch_invariant_mode(), torch.no_grad():
        ours = REDUCTIONS[variant](X)
    assert calls, "PyTorch served it"
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_small_network_gives_a_row_the_same_bits_forward_and_backward(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(96, 200),
        torch.nn.SiLU(),
        torch.nn.RMSNorm(200),
        torch.nn.Linear(200, 50),
        torch.nn.LogSoftmax(-1),
    ).to(dtype)
    x = torch.randn(130, 96).to(dtype)

    with batch_invariant_mode():
        assert_rows_keep_their_bits(network, x)


def test_the_same_network_on_stock_pytorch_differs() -> None:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.SiLU(), torch.nn.Linear(1024, 512))
    x = torch.randn(130, 1024)
    with torch.no_grad():
        assert any(not torch.equal(network(x[:rows]), network(x)[:rows]) for rows in (1, 2, 3, 7))
    with pytest.raises(AssertionError, match="differ"):
        assert_rows_keep_their_bits(network, x)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "silu", "gelu"])
def test_gradients_are_those_of_pytorch(name: str) -> None:
    function = getattr(torch, name, None) or getattr(F, name)
    arguments = (-1,) if "softmax" in name else ()

    def gradient() -> torch.Tensor:
        x = X.clone().requires_grad_()
        (function(x, *arguments) * X.flip(0)).sum().backward()
        return x.grad

    stock = gradient()
    with batch_invariant_mode():
        torch.testing.assert_close(gradient(), stock)


def test_compiled_functions_run_eagerly_inside_the_mode() -> None:
    compiled = torch.compile(lambda x: torch.softmax(x @ W, -1), backend="eager")
    x = torch.randn(40, 48)
    with batch_invariant_mode():
        assert_same_bits(compiled(x)[:1], compiled(x[:1]))
        assert_same_bits(compiled(x), torch.softmax(x @ W, -1))


def test_integers_are_served_by_pytorch() -> None:
    integers = torch.arange(12).view(3, 4)
    with batch_invariant_mode():
        assert (integers @ integers.t()).dtype == torch.int64
        assert integers.sum().item() == 66
        assert (integers > 3).sum().item() == 8


def test_pytorch_gets_everything_back() -> None:
    before = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in cpu.DEVICE.operators}
    flags = torch.backends.cuda.flash_sdp_enabled(), torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(ZeroDivisionError), batch_invariant_mode():
        assert vllm_batch_invariant.is_batch_invariant_mode_enabled()
        raise ZeroDivisionError
    assert not vllm_batch_invariant.is_batch_invariant_mode_enabled()
    assert {name: repr(torch.library.get_kernel(f"aten::{name}", "CPU")) for name in before} == {
        n: repr(k) for n, k in before.items()
    }
    assert flags == (torch.backends.cuda.flash_sdp_enabled(), torch.backends.mha.get_fastpath_enabled())


def test_modes_nest_and_can_be_switched_off_inside() -> None:
    enabled = vllm_batch_invariant.is_batch_invariant_mode_enabled
    with set_batch_invariant_mode(True):
        with set_batch_invariant_mode(False):
            assert not enabled()
        with set_batch_invariant_mode():
            assert enabled()
        assert enabled()
    vllm_batch_invariant.enable_batch_invariant_mode()
    vllm_batch_invariant.enable_batch_invariant_mode()
    vllm_batch_invariant.disable_batch_invariant_mode()
    assert not enabled()


def test_importing_the_package_imports_neither_pytorch_nor_a_device_library() -> None:
    code = (
        "import sys, vllm_batch_invariant; vllm_batch_invariant.register(); "
        "print([name for name in ('torch', 'numba', 'vllm', 'triton') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PATH": ""})
    assert printed.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "function", [lambda x: 2.0**x, lambda x: 2**x, lambda x: torch.float_power(3, x), lambda x: 2j**x]
)
def test_a_number_has_a_tensor_as_its_exponent(function) -> None:
    """PyTorch makes a tensor of the number, which an override gets as a number again."""
    x = torch.tensor([0.5, 1.0, 3.0])
    with batch_invariant_mode():
        found = [function(x), function(x.to(torch.bfloat16)), function(torch.tensor([1, 2]))]
    expected = [function(x), function(x.to(torch.bfloat16)), function(torch.tensor([1, 2]))]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)


def test_the_mode_of_a_cpu_without_its_compiler_is_refused_when_it_is_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = "does not cover PyTorch on a CPU: the package 'numba'.* is not installed; pip install numba"
    with pytest.raises(NotCovered, match=line), aten.batch_invariant_mode():
        pass
    assert not aten.is_batch_invariant_mode_enabled()
    aten._check_packages({"cpu", "cuda"})  # whose GPU may be all that is used
