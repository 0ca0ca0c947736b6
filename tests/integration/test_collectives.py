"""What workers exchange: floating-point numbers are added in the order of ranks, and by nobody else."""

import multiprocessing
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from tests.assertions import assert_same_bits
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.parallel import collectives
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.integration.side_table import beside
from vllm_batch_invariant.ops.all_reduce import add_ranks
from vllm_batch_invariant.verify.harness.server import free_port

pytest.importorskip("vllm")


class Communicator:
    """Of three ranks; gathers what each rank would send. ``theirs`` counts calls of vLLM's own sum."""

    def __init__(self, others: list[torch.Tensor]) -> None:
        self.others, self.theirs = others, 0

    def all_gather(self, input_: torch.Tensor, dim: int) -> torch.Tensor:
        assert (input_.shape[0], dim) == (1, 0)
        return torch.cat([input_, *(other.unsqueeze(0) for other in self.others)])

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        self.theirs += 1
        return input_


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_a_workers_all_reduce_adds_rank_after_rank_in_place(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = patch_points.CPU_COMMUNICATOR
    monkeypatch.setattr(point.module(), point.attribute, Communicator)
    monkeypatch.setattr(Communicator, "all_reduce", Communicator.all_reduce)
    collectives.install_cpu(tree=False)
    ranks = (1000 * torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(0))).to(dtype)
    communicator, own = Communicator([ranks[1], ranks[2]]), ranks[0].clone()
    result = communicator.all_reduce(own)
    assert result.data_ptr() == own.data_ptr()
    if dtype.is_floating_point:
        assert_same_bits(own, add_ranks(ranks))
    assert communicator.theirs == (not dtype.is_floating_point)


class CudaCommunicator:
    """As vLLM makes it, of a group whose other ranks add a zero, and of whose ranks each has twice the one before."""

    def __init__(self, unique_name: str, world_size: int) -> None:
        self.unique_name, self.world_size, self.theirs = unique_name, world_size, 0
        self.device_group, self.device, self.rank_in_group = "group", torch.device("cpu"), 0

    def all_gather(self, input_: torch.Tensor, dim: int) -> torch.Tensor:
        assert (input_.shape[0], dim) == (1, 0)
        return torch.cat([input_ * 2**rank for rank in range(self.world_size)])

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        self.theirs += 1
        return input_

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        self.theirs += 1
        return input_


class Nccl:
    """As vLLM makes it: it adds a zero at the end."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.all_reduce(torch.zeros(1))

    def all_reduce(self, in_tensor: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM) -> torch.Tensor:
        return in_tensor

    def reduce_scatter(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM
    ) -> None: ...


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from vllm_batch_invariant.ops.all_reduce import cuda, peers

    for point, fake in ((patch_points.CUDA_COMMUNICATOR, CudaCommunicator), (patch_points.NCCL, Nccl)):
        monkeypatch.setattr(point.module(), point.attribute, type(fake.__name__, (fake,), dict(vars(fake))))
    monkeypatch.setattr(peers, "symmetric_peers", lambda *of: of)
    monkeypatch.setattr(cuda, "AllReduce", lambda ranks, peers, tree: lambda x: (ranks, *peers, tree, x))
    collectives.install_cuda(tree=False)


@pytest.mark.usefixtures("on_gpus")
def test_the_workers_of_a_layer_on_gpus_add_floating_point_numbers_by_ours() -> None:
    communicator = patch_points.CUDA_COMMUNICATOR.get()
    for name, ranks in (("tp:0", 4), ("tp", 2)):
        layers, x = communicator(name, ranks), torch.ones(3)
        assert layers.all_reduce(x) == (ranks, "group", torch.device("cpu"), False, x)
        layers.all_reduce(torch.ones(3, dtype=torch.int32))
        assert layers.theirs == 1
    for name, ranks in (("tp:0", 1), ("pp:0", 2), ("etp:0", 2)):
        assert beside(communicator(name, ranks)).all_reduce is None


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize("sizes", [None, [3, 3], [2, 4], [6, 0]], ids=str)
def test_engines_on_gpus_get_their_own_rows_added_rank_after_rank(sizes: list[int] | None) -> None:
    """Of partial results of all rows: a second rank takes what is behind the first's."""
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole, first = add_ranks(torch.stack([x, 2 * x])), (sizes or [3, 3])[0]
    for rank, rows in enumerate((whole[:first], whole[first:])):
        engines = patch_points.CUDA_COMMUNICATOR.get()("dp:0", 2)
        engines.rank_in_group = rank
        assert_same_bits(engines.reduce_scatterv(x, 0, sizes), rows)
        engines.reduce_scatterv(torch.ones(2, dtype=torch.int64), 0)
        assert engines.theirs == 1


@pytest.mark.usefixtures("on_gpus")
def test_nccl_adds_no_floating_point_numbers_once_it_is_made() -> None:
    nccl, x = patch_points.NCCL.get()(2), torch.ones(4)
    nccl.all_reduce(x, op=torch.distributed.ReduceOp.MAX)
    nccl.all_reduce(torch.ones(4, dtype=torch.int64))
    with pytest.raises(NotCovered, match="all_reduce of float32 by PyTorch or NCCL"):
        nccl.all_reduce(x)
    with pytest.raises(NotCovered, match="reduce_scatter of bfloat16"):
        nccl.reduce_scatter(torch.ones(2, dtype=torch.bfloat16), x)


def _two_ranks(rank: int, port: int, said: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    collectives.refuse_other_sums()
    group = torch.distributed.new_group([0, 1])
    shared = SimpleNamespace(device_group=group, cpu_group=group, world_size=2)
    setattr(patch_points.TENSOR_PARALLEL.module(), patch_points.TENSOR_PARALLEL.attribute, shared)
    kinds, x = torch.distributed.ReduceOp, torch.ones(4)
    torch.distributed.all_reduce(x, op=kinds.MAX, group=group)
    torch.distributed.all_reduce(torch.ones(4, dtype=torch.int64), group=group)
    torch.distributed.all_reduce(x)  # a trainer's, in a group of its own
    lines = []
    for call in (
        lambda: torch.distributed.all_reduce(x, group=group),
        lambda: torch.distributed.all_reduce(x, kinds.SUM, group),
        lambda: torch.distributed.reduce(x, 0, group=group),
        lambda: torch.distributed.reduce_scatter_tensor(torch.ones(2), x, group=group),
    ):
        try:
            call()
        except NotCovered as error:
            lines.append(str(error))
    said.put(lines)
    torch.distributed.barrier()


def test_pytorch_adds_no_floating_point_numbers_of_several_workers() -> None:
    context, port = multiprocessing.get_context("spawn"), free_port()
    said = context.Queue()
    workers = [context.Process(target=_two_ranks, args=(rank, port, said)) for rank in range(2)]
    for worker in workers:
        worker.start()
    lines = [said.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(30)
    assert [len(of_rank) for of_rank in lines] == [4, 4]
    assert "all_reduce of float32 by PyTorch" in lines[0][0]
