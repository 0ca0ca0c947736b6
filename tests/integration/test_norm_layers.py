"""Every RMSNorm that vLLM builds is the mode's, also those of models that it takes from Transformers."""

import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from tests.assertions import assert_same_bits
from vllm_batch_invariant import envs
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.layers import norm, review, shared_norm
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.ops.all_reduce import add_ranks
from vllm_batch_invariant.ops.norm import rms_norm

pytest.importorskip("vllm")


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, type]]:
    """Of out-of-tree layers, as a worker leaves it."""
    registered: dict[str, type] = {}
    monkeypatch.setattr(patch_points.CUSTOM_OP.module(), "op_registry_oot", registered)
    norm.install()
    monkeypatch.delitem(sys.modules, norm.OF_TRANSFORMERS, raising=False)
    importlib.import_module(norm.OF_TRANSFORMERS)
    yield registered
    for point in (patch_points.RMS_NORM, patch_points.GEMMA_RMS_NORM):
        del point.get().__init_subclass__  # of the class's own


@pytest.mark.parametrize("name", ["RMSNorm", "GemmaRMSNorm", "TPAwareRMSNorm", "TPAwareGemmaRMSNorm"])
def test_a_norm_has_the_operations_bits(name: str, registry: dict[str, type]) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    module = importlib.import_module(norm.OF_TRANSFORMERS)
    with set_current_vllm_config(VllmConfig()):
        layer = getattr(module, name)(96, eps=1e-6).bfloat16()
    assert type(layer) is registry[name]
    layer.weight.data = torch.randn(96).bfloat16()
    x, residual = torch.randn(5, 96).bfloat16(), torch.randn(5, 96).bfloat16()
    weight = layer.weight.data.float() + 1 if "Gemma" in name else layer.weight.data
    assert_same_bits(layer(x), rms_norm(x, weight, 1e-6))
    for one, other in zip(layer(x, residual.clone()), rms_norm(x, weight, 1e-6, residual.clone()), strict=True):
        assert_same_bits(one, other)


def test_another_subclass_is_left_to_its_author(registry: dict[str, type]) -> None:
    type("Own", (patch_points.RMS_NORM.get(),), {})
    assert "Own" not in registry


SIZES = 3 * 64, 2 * 64
"""Of queries and of keys of one of two workers."""


@pytest.fixture
def heads() -> list[tuple[torch.Tensor, SimpleNamespace, SimpleNamespace]]:
    """Of two workers each: queries, keys and values [33, 448] in bf16, and the norms of queries and keys."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return [
        (
            normal(33, SIZES[0] + 2 * SIZES[1]).mul(1 + worker).bfloat16(),
            *(SimpleNamespace(weight=normal(size), variance_epsilon=1e-6, tp_world=2) for size in SIZES),
        )
        for worker in range(2)
    ]


def of_workers(
    heads: list[tuple[torch.Tensor, SimpleNamespace, SimpleNamespace]],
    rows: slice,
    monkeypatch: pytest.MonkeyPatch,
    add: Callable[[torch.Tensor], torch.Tensor] = add_ranks,
) -> list[tuple[torch.Tensor, ...]]:
    """What each worker has of some rows: called twice, first for its means, [workers, rows, 2], which are added."""
    means: list[torch.Tensor] = []
    given: list[tuple[torch.Tensor, ...]] = []

    def all_reduce(mean: torch.Tensor) -> torch.Tensor:
        means.append(mean.clone())
        return add(torch.stack(means[:2])) if len(means) > 2 else mean

    monkeypatch.setattr(patch_points.TENSOR_PARALLEL.module(), "_TP", SimpleNamespace(all_reduce=all_reduce))
    for _ in range(2):
        given = [shared_norm.forward_qkv(q, k, qkv[rows], *SIZES) for qkv, q, k in heads]
    return given


def test_a_norm_of_all_workers_heads_is_near_float64(heads: list, monkeypatch: pytest.MonkeyPatch) -> None:
    given = of_workers(heads, slice(None), monkeypatch)
    for part, place in enumerate((slice(0, SIZES[0]), slice(SIZES[0], sum(SIZES)))):
        whole = torch.cat([qkv[:, place] for qkv, *_ in heads], -1).double()
        expected = whole / (whole.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        expected = expected * torch.cat([norms[part].weight for _, *norms in heads]).double()
        torch.testing.assert_close(torch.cat([one[part] for one in given], -1).double(), expected, rtol=2**-8, atol=0)
    assert_same_bits(given[1][2], heads[1][0][:, sum(SIZES) :])


def test_a_row_of_a_norm_of_all_heads_has_its_bits_in_any_company(heads: list, monkeypatch: pytest.MonkeyPatch) -> None:
    together = of_workers(heads, slice(None), monkeypatch)
    for row in (0, 16, 32):
        alone = of_workers(heads, slice(row, row + 1), monkeypatch)
        for one, other in zip(alone, together, strict=True):
            for part, whole in zip(one, other, strict=True):
                assert_same_bits(part, whole[row : row + 1])


def test_a_sum_of_means_that_follows_the_number_of_rows_moves_a_row(
    heads: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""

    def by_size(partials: torch.Tensor) -> torch.Tensor:
        return partials.sum(0) if partials.shape[1] == 1 else partials.bfloat16().sum(0).float()

    alone, together = (of_workers(heads, rows, monkeypatch, by_size) for rows in (slice(1), slice(None)))
    assert not torch.equal(alone[0][0], together[0][0][:1])


def test_one_worker_has_the_bits_of_vllms_norm_of_all_heads(heads: list, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = patch_points.SHARED_NORM.get()
    [(qkv, q_norm, k_norm), _] = heads
    q_norm.tp_world = k_norm.tp_world = 1
    expected = layer.forward_qk(q_norm, k_norm, *qkv.split([*SIZES, SIZES[1]], -1)[:2])
    for one, other in zip(shared_norm.forward_qkv(q_norm, k_norm, qkv, *SIZES), expected, strict=False):
        assert_same_bits(one, other)


def test_a_norm_of_all_heads_is_refused_beside_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = patch_points.SHARED_NORM.get()
    layer = torch.nn.Module.__new__(kind)
    torch.nn.Module.__init__(layer)
    review.check(layer)
    monkeypatch.setenv(envs.TP_TREE.name, "2")
    with pytest.raises(NotCovered, match="has no tree of its workers' means"):
        review.check(layer)
