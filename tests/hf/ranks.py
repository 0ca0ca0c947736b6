"""What each of two ranks does with a patched model under DDP and FSDP2, by gloo on a CPU and NCCL on GPUs; a process a
rank.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.assertions import assert_same_bits
from tests.hf.models import DEVICE, model, sequences, ways_to_pad
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.hf import patch, token_logprobs

RANKS = 2
LENGTHS = ((45, 7), (70, 1, 20))
"""Of the sequences that each rank has."""
THREADS = 1
"""Of a rank: so the reference must have as many."""


def logprobs_and_loss(trainer: torch.nn.Module, lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of a rank's real tokens but each sequence's first, and a weighted sum of them."""
    tokens, mask = ways_to_pad(sequences(lengths))["right"]
    every = token_logprobs(trainer(tokens, attention_mask=mask).logits[:, :-1], tokens[:, 1:])
    real = every[mask[:, 1:].bool()]
    return real.detach(), (real * torch.linspace(-1, 1, len(real), device=real.device)).sum()


def step(trainer: torch.nn.Module, lengths: tuple[int, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logprobs and gradients, whole where they are sharded, by the names of the parameters without a wrapper's."""
    trainer.zero_grad()
    logprobs, loss = logprobs_and_loss(trainer, lengths)
    loss.backward()
    grads = {
        name.removeprefix("module."): weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
        for name, weight in trainer.named_parameters()
    }
    return logprobs, grads


def shard(trainer: torch.nn.Module, **options: object) -> torch.nn.Module:
    """FSDP2: each decoder layer, then the rest."""
    for layer in trainer.model.layers:
        fully_shard(layer, **options)
    return fully_shard(trainer, **options)


def mean_of_ranks(grads: list[dict[str, torch.Tensor]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Half of each rank's gradient, added in ``dtype``: a sum of two has one order."""
    first, second = grads
    return {name: first[name].to(dtype) / RANKS + second[name].to(dtype) / RANKS for name in first}


def check(rank: int, folder: str) -> None:
    """Compare a rank's logprobs with those of a model in one process, and gradients with the mean of both ranks'."""
    torch.set_num_threads(THREADS)
    backend = "gloo"
    if DEVICE == "cuda":
        backend = "nccl"
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{Path(folder) / 'meeting'}", rank=rank, world_size=RANKS)
    alone = [step(patch(model()), lengths) for lengths in LENGTHS]
    expected = alone[rank][0]
    mean = mean_of_ranks([grads for _, grads in alone], torch.bfloat16)
    own = alone[rank][1]["model.norm.weight"]
    assert not torch.equal(mean["model.norm.weight"], own), "the ranks' gradients differ"

    trainers = {
        "DDP": lambda trainer: DistributedDataParallel(trainer),
        "FSDP2": shard,
        "FSDP2 with layers computed again": lambda trainer: shard(checkpointed(trainer)),
    }
    for name, wrap in trainers.items():
        logprobs, grads = step(wrap(patch(model())), LENGTHS[rank])
        assert_same_bits(logprobs, expected, name)
        assert grads.keys() == mean.keys()
        for weight, grad in grads.items():
            assert_same_bits(grad, mean[weight], f"{name}, {weight}")

    # Weights in fp32, of which layers are given copies in bf16: the logprobs are those of the model in bf16.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    logprobs, grads = step(shard(patch(model().float()), mp_policy=policy), LENGTHS[rank])
    assert_same_bits(logprobs, expected, "bf16 copies")
    for weight, grad in mean_of_ranks([grads for _, grads in alone], torch.float32).items():
        assert_same_bits(grads[weight], grad, f"bf16 copies, {weight}")

    for wrapped in (DistributedDataParallel(model()), shard(model())):
        with pytest.raises(NotCovered, match="patch it, then shard it"):
            patch(wrapped)
    dist.destroy_process_group()


def checkpointed(trainer: torch.nn.Module) -> torch.nn.Module:
    trainer.train().gradient_checkpointing_enable({"use_reentrant": False})
    return trainer
