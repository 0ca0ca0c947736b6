"""What verl adds to vLLM's worker, and what calls it: weights come in buckets through shared memory, announced by zmq.

The order of the calls is that of ``vLLMColocateWorkerExtension`` and of what sends to it (volcengine/verl,
``verl/workers/rollout/vllm_rollout``), for a model without adapters and quantisation.
"""

import os
from collections.abc import Iterable, Iterator
from multiprocessing import shared_memory
from typing import Any

import torch
import zmq

EXTENSION = f"{__name__}.Extension"
"""For ``worker_extension_cls``."""
ADDRESS = "TESTS_OF_VERL_ZMQ"
"""An environment variable: where the trainer listens."""
BUCKET_BYTES = 1 << 18
PATIENCE_MS = 60_000
"""How long either side waits for the other: one that failed says nothing."""


class Extension:
    """A part of the worker's class."""

    def update_weights_from_ipc(
        self, peft_config: dict | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Load the weights that the trainer sends; vLLM's processing runs once after the last of them."""
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        assert use_shm, "a CPU has no other memory that two processes share"
        assert peft_config is None
        assert not base_sync_done
        with zmq.Context() as context, context.socket(zmq.REP) as socket:
            socket.rcvtimeo = PATIENCE_MS
            socket.linger = PATIENCE_MS
            socket.connect(os.environ[ADDRESS])
            memory = shared_memory.SharedMemory(name=socket.recv_pyobj()["name"])
            socket.send(b"")
            is_last = False
            while not is_last:
                announced = socket.recv_pyobj()
                weights = []
                for name, meta in announced["bucket_meta"].items():
                    shape, place = meta["shape"], {"dtype": meta["dtype"], "offset": meta["offset"]}
                    flat = torch.frombuffer(memory.buf, count=shape.numel(), **place)
                    weights.append((name, flat.view(shape).clone()))
                    del flat
                socket.send(b"")
                self.model_runner.model.load_weights(weights)
                is_last = announced["is_last"]
            memory.close()
        process_weights_after_loading(self.model_runner.model, self.model_runner.vllm_config.model_config, self.device)


def update(llm: Any) -> None:
    """What verl's server does when the trainer has new weights."""
    llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
    llm.reset_prefix_cache()


def _buckets(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket: list[tuple[str, torch.Tensor]] = []
    for name, weight in weights:
        if bucket and sum(one.nbytes for _, one in bucket) + weight.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append((name, weight))
    yield bucket


def send(weights: list[tuple[str, torch.Tensor]], address: str) -> int:
    """The trainer's side: send all weights, and return in how many buckets."""
    size = max(BUCKET_BYTES, *(weight.nbytes for _, weight in weights))
    memory = shared_memory.SharedMemory(create=True, size=size)
    buckets = list(_buckets(weights))
    try:
        with zmq.Context() as context, context.socket(zmq.REQ) as socket:
            socket.rcvtimeo = PATIENCE_MS
            socket.linger = 0
            socket.bind(address)
            socket.send_pyobj({"name": memory.name, "size": size})
            socket.recv()
            for number, bucket in enumerate(buckets):
                offset, metas = 0, {}
                for name, weight in bucket:
                    target = torch.frombuffer(memory.buf, dtype=weight.dtype, count=weight.numel(), offset=offset)
                    target.copy_(weight.detach().flatten())
                    metas[name] = {"dtype": weight.dtype, "shape": weight.shape, "offset": offset}
                    offset += weight.nbytes
                    del target
                socket.send_pyobj({"bucket_meta": metas, "is_last": number == len(buckets) - 1})
                socket.recv()
    finally:
        memory.close()
        memory.unlink()
    return len(buckets)
