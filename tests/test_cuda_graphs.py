"""Which numbers of tokens get a CUDA graph."""

import pytest

from vllm_batch_invariant.integration.cuda_graphs import sizes


@pytest.mark.parametrize(("requests", "largest"), [(1024, 512), (256, 512), (64, 128), (50, 96), (5, 8)])
def test_vllms_sizes_are_followed_by_larger_ones(requests, largest):
    captured = [1, 2, 4, *range(8, largest + 1, 8)]
    found = sizes(captured, requests, 8192)
    assert found[: len(captured)] == captured
    assert max(found) == 2048
    assert found == sorted(set(found))


def test_no_size_is_above_a_steps_tokens():
    assert max(sizes([1, 2, 4, 8], 5, 300)) == 256


@pytest.mark.parametrize("captured", [[], [1, 2, 4], [1, 8, 64, 1000]])
def test_a_users_sizes_are_kept(captured):
    assert sizes(captured, 256, 8192) == captured
