"""Experts in NVFP4: the bits of the matrices that codes, scales of groups and scales of matrices stand for."""

from dataclasses import replace

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.moe.layers import EXPERTS, HIDDEN, INTERMEDIATE, layer, tokens, uniform
from tests.quantised_checkpoints import nvfp4
from vllm_batch_invariant.ops.formats import NVFP4
from vllm_batch_invariant.ops.moe import MoeReduction, StoredExperts, cpu, route

ACTIVATIONS = ("silu", "gelu_tanh", "relu2_no_mul")
"""The last has no gate."""


def stored(weight: torch.Tensor, parts: int) -> tuple[StoredExperts, torch.Tensor]:
    """Weights [experts, N, K], near the given ones, in so many matrices of as many rows, each with its scale."""
    experts, matrices = [], []
    for of_expert in weight:
        made = [nvfp4(None, part) for part in of_expert.chunk(parts)]
        matrices.append(torch.cat([matrix for _, matrix in made]))
        codes, scales, inverse = (
            [tensors[name] for tensors, _ in made] for name in ("weight_packed", "weight_scale", "weight_global_scale")
        )
        experts.append((torch.cat(codes), torch.cat(scales), 1 / torch.stack(inverse)))
    tensors = tuple(torch.stack(one) for one in zip(*experts, strict=True))
    return StoredExperts(NVFP4, tensors, torch.bfloat16), torch.stack(matrices)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_layer_has_the_bits_of_the_matrices(activation: str) -> None:
    of = layer(activation=activation)
    assert isinstance(of.reduction, MoeReduction)
    of.gate_up[:, INTERMEDIATE:] *= 3
    gate_up, first = stored(of.gate_up, 1 + of.reduction.is_gated)
    down, second = stored(of.down, 1)
    assert_same_bits(gate_up.matrices(), first)
    assert_same_bits(down.matrices(), second)
    assert (gate_up.shape, down.shape) == (of.gate_up.shape, (EXPERTS, HIDDEN, INTERMEDIATE))
    x = tokens(17)
    weights, ids = route(uniform(x, of), of.reduction)
    right = cpu.moe(x, weights, ids, replace(of.experts, gate_up=first, down=second))
    of_codes = replace(of.experts, gate_up=gate_up, down=down)
    assert_same_bits(cpu.moe(x, weights, ids, of_codes), right)
    prepared = [cpu.prepare_experts(one) for one in (gate_up, down)]
    assert_same_bits(cpu.prepared_moe(x, weights, ids, replace(of_codes, gate_up=prepared[0], down=prepared[1])), right)
    wrong = gate_up.tensors[0].clone()
    wrong[:, 3, 5] ^= 1  # so the comparison sees one code
    of_wrong = replace(of_codes, gate_up=replace(gate_up, tensors=(wrong, *gate_up.tensors[1:])))
    assert not torch.equal(cpu.moe(x, weights, ids, of_wrong), right)


def test_what_kernels_read_stands_for_the_same_matrices() -> None:
    cuda = pytest.importorskip("vllm_batch_invariant.ops.moe.cuda")
    for parts in (1, 2):
        given, matrices = stored(layer().gate_up, parts)
        read = cuda.as_read(given)
        assert read.format.name == "nvfp4-steps"
        assert read.tensors[0] is given.tensors[0], "codes lie where they did"
        assert_same_bits(read.matrices(), matrices)
        wide = cuda.as_read(replace(given, dtype=torch.float32))
        assert_same_bits(wide.matrices(), replace(given, dtype=torch.float32).matrices())
        swapped = read.tensors[1].unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        assert not torch.equal(replace(read, tensors=(read.tensors[0], swapped)).matrices(), matrices)
