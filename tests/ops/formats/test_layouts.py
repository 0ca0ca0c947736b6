"""Checkpoints' layouts become the stored one, code by code."""

import itertools

import pytest
import torch

from vllm_batch_invariant.ops.formats import layouts

N, K, GROUP = 24, 64, 32
DRAW = torch.Generator().manual_seed(0)
ORDER = 0, 2, 4, 6, 1, 3, 5, 7
"""Of AWQ's columns, from the lowest bits of a word."""


def drawn(bits: int) -> tuple[list[list[int]], list[list[int]], torch.Tensor]:
    """Codes [N][K], zero points [N][G] and scales [N, G]."""
    codes, zeros = (torch.randint(1, 2**bits, (N, k), generator=DRAW).tolist() for k in (K, K // GROUP))
    return codes, zeros, torch.randn(N, K // GROUP, generator=DRAW).bfloat16()


def word(codes: list[int], bits: int) -> int:
    """A signed integer of 32 bits, the first code in the lowest."""
    total = sum(code << place * bits for place, code in enumerate(codes))
    return total - 2**32 if total >= 2**31 else total


def words(codes: list[list[int]], bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Rows packed, in an order within a word."""
    count = 32 // bits
    packed = [[row[first : first + count] for first in range(0, len(row), count)] for row in codes]
    order = order or tuple(range(count))
    return torch.tensor([[word([part[i] for i in order], bits) for part in row] for row in packed], dtype=torch.int32)


def turned(codes: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*codes, strict=True)]


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_their_first_code_lowest(bits: int) -> None:
    codes, _, _ = drawn(bits)
    packed = layouts.pack(torch.tensor(codes), bits)
    assert torch.equal(packed, words(codes, bits))
    assert layouts.unpack(packed, bits).tolist() == codes
    with pytest.raises(ValueError, match=f"9 codes of {bits} bits are no whole number of words"):
        layouts.pack(torch.zeros(2, 9), bits)


@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_packs_zero_points_along_n(bits: int) -> None:
    codes, zeros, scales = drawn(bits)
    index = torch.arange(K).flip(0) // GROUP
    found = layouts.from_compressed_tensors(words(codes, bits), scales, words(turned(zeros), bits).t(), index, bits)
    assert torch.equal(found[0], words(codes, bits))
    assert torch.equal(found[1], scales)
    assert found[2].tolist() == zeros
    assert found[3].tolist() == index.tolist()
    assert [one.dtype for one in found[2:]] == [torch.uint8, torch.int32]
    odd = layouts.from_compressed_tensors(
        found[0][:13], scales[:13], words(turned(zeros), bits).t()[: -(-13 * bits // 32)], bits=bits
    )
    assert odd[2].tolist() == zeros[:13], "a last word that is not full"


@pytest.mark.parametrize(("bits", "offset"), itertools.product((4, 8), (0, 1)))
def test_gptq_packs_along_k_and_stores_zero_points_less_one(bits: int, offset: int) -> None:
    codes, zeros, scales = drawn(bits)
    less = [[zero - offset for zero in column] for column in turned(zeros)]
    packed = words(codes, bits).t().contiguous()
    stored = layouts.from_gptq(packed, scales.t(), words(less, bits), None, bits, offset)
    assert torch.equal(stored[0], words(codes, bits))
    assert torch.equal(stored[1], scales)
    assert stored[2].tolist() == zeros
    assert len(layouts.from_gptq(packed, scales.t())) == 2
    assert all(one.is_contiguous() for one in stored)


def test_a_zero_point_of_sixteen_is_one_and_of_256_is_refused() -> None:
    codes, scales = torch.zeros(1, 8, dtype=torch.int32), torch.ones(1, 8)
    most = torch.full((1, 1), -1, dtype=torch.int32)
    assert layouts.from_gptq(codes, scales, most)[2].tolist() == [[16]] * 8
    with pytest.raises(ValueError, match="a zero point of eight bits is 256"):
        layouts.from_gptq(codes, scales, torch.full((1, 2), -1, dtype=torch.int32), bits=8)


def test_awq_packs_along_n_in_an_order_of_its_own() -> None:
    codes, zeros, scales = drawn(4)
    stored = layouts.from_awq(words(turned(codes), 4, ORDER), scales.t(), words(turned(zeros), 4, ORDER))
    assert torch.equal(stored[0], words(codes, 4))
    assert torch.equal(stored[1], scales)
    assert stored[2].tolist() == zeros
    in_order = layouts.from_awq(words(turned(codes), 4), scales.t(), words(turned(zeros), 4))
    assert not torch.equal(in_order[0], stored[0]), "another order shows"


def test_group_indices_that_follow_k_are_no_order() -> None:
    assert not layouts.is_ordered(torch.arange(64, dtype=torch.int32) // 32, 32)
    assert layouts.is_ordered(torch.arange(64, dtype=torch.int32) // 32, 64)
    assert layouts.is_ordered(torch.arange(64).flip(0) // 32, 32)


def test_each_shard_of_a_fused_layer_keeps_its_scale() -> None:
    found = layouts.per_row(torch.tensor([1.0, 2.0, 3.0]), (2, 1, 3))
    assert found.tolist() == [[1.0], [1.0], [2.0], [3.0], [3.0], [3.0]]


def test_vllm_and_compressed_tensors_pack_so() -> None:
    pytest.importorskip("vllm")
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from vllm.model_executor.layers.quantization.utils import quant_utils

    codes, zeros, scales = drawn(4)
    q, z = torch.tensor(codes, dtype=torch.int32), torch.tensor(zeros, dtype=torch.int32)
    of_gptq = quant_utils.gptq_pack(q.t().contiguous(), 4, K, N), quant_utils.pack_cols(z.t().contiguous() - 1, 4, 2, N)
    of_awq = quant_utils.awq_pack(q.t().contiguous(), 4, K, N), quant_utils.awq_pack(z.t().contiguous(), 4, 2, N)
    of_own = pack_to_int32((q - 8).to(torch.int8), 4), pack_to_int32((z - 8).to(torch.int8), 4, packed_dim=0)
    for stored in (
        layouts.from_gptq(of_gptq[0], scales.t(), of_gptq[1]),
        layouts.from_awq(of_awq[0], scales.t(), of_awq[1]),
        layouts.from_compressed_tensors(of_own[0], scales, of_own[1]),
    ):
        assert torch.equal(stored[0], words(codes, 4))
        assert stored[2].tolist() == zeros
