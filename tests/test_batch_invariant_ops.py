"""A program that imports Thinking Machines' package by name gets the operations of this one, if it says so."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional

from tests.assertions import assert_near, assert_same_bits
from vllm_batch_invariant import aten, batch_invariant_ops
from vllm_batch_invariant.ops import linear

THEIRS = {
    "AttentionBlockSize", "disable_batch_invariant_mode", "enable_batch_invariant_mode",
    "get_batch_invariant_attention_block_size", "is_batch_invariant_mode_enabled", "log_softmax", "matmul_persistent",
    "mean_dim", "set_batch_invariant_mode",
}  # fmt: skip
"""``__all__`` of batch_invariant_ops 0.1.0."""
UNDER_THE_NAME = """
import sys
import vllm_batch_invariant.batch_invariant_ops

sys.modules["batch_invariant_ops"] = vllm_batch_invariant.batch_invariant_ops
"""
AS_TORCHTITAN_DOES = """
from batch_invariant_ops import enable_batch_invariant_mode as _upstream_enable

_upstream_enable()

import torch
from vllm_batch_invariant.ops import linear

x, weight = torch.randn(7, 300).bfloat16(), torch.randn(300, 50).bfloat16()
assert torch.equal(x @ weight, linear.mm(x, weight))
assert torch.equal((x @ weight)[:1], x[:1] @ weight)
print("replaced")
"""


def program(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)


def test_it_has_the_names_of_the_other_package() -> None:
    assert set(batch_invariant_ops.__all__) == THEIRS
    assert all(hasattr(batch_invariant_ops, name) for name in THEIRS)


def test_under_the_other_name_torchtitans_call_replaces_pytorchs_operators() -> None:
    ran = program(UNDER_THE_NAME + AS_TORCHTITAN_DOES)
    assert ran.stdout == "replaced\n", ran.stderr


def test_without_the_line_the_name_is_left_alone() -> None:
    ran = program("import vllm_batch_invariant, sys; assert 'batch_invariant_ops' not in sys.modules")
    assert ran.returncode == 0, ran.stderr


def test_the_mode_is_this_packages() -> None:
    assert not aten.is_batch_invariant_mode_enabled()
    with batch_invariant_ops.set_batch_invariant_mode():
        assert aten.is_batch_invariant_mode_enabled()
        assert batch_invariant_ops.is_batch_invariant_mode_enabled()
    assert not batch_invariant_ops.is_batch_invariant_mode_enabled()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_its_functions_are_these_operations(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((9, 33), (33, 20), (20,)))
    product = batch_invariant_ops.matmul_persistent(x, weight, bias)
    assert_same_bits(product, linear.mm(x, weight, bias))
    assert_same_bits(batch_invariant_ops.matmul_persistent(x[4:5], weight, bias), product[4:5])
    assert_near(product, x.double() @ weight.double() + bias.double())
    logprobs = batch_invariant_ops.log_softmax(x, dim=-1)
    assert logprobs.dtype == dtype
    assert_near(logprobs, functional.log_softmax(x.double(), -1))
    assert_near(batch_invariant_ops.mean_dim(x, 1, keepdim=True), x.double().mean(1, keepdim=True))
    assert_same_bits(batch_invariant_ops.mean_dim(torch.arange(6).view(2, 3), -1), torch.tensor([1.0, 4.0]))


def test_blocks_of_attention_are_those_of_the_other_package() -> None:
    size = batch_invariant_ops.get_batch_invariant_attention_block_size()
    assert size == (16, 16)
    assert (size.block_m, size.block_n) == (16, 16)
