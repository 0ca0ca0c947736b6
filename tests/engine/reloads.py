"""Ways to replace the weights of a running engine, as trainers do it: run by the driver and by the engine's worker."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from vllm_batch_invariant.verify.bisect.recorder import WorkerExtension
from vllm_batch_invariant.verify.harness.drive import describe, drive, finished

EXTENSION = f"{__name__}.Extension"
"""For ``worker_extension_cls``."""
TRANSFER = "files"
"""For the backend of ``weight_transfer_config``."""
_BUCKETS = 3


def tensors_of(folder: str) -> dict[str, torch.Tensor]:
    """A checkpoint's weights by name."""
    return load_file(Path(folder) / "model.safetensors")


def buckets(folder: str) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """A checkpoint's weights in parts that cut through layers."""
    weights = list(tensors_of(folder).items())
    for first in range(_BUCKETS):
        yield weights[first::_BUCKETS]


class Extension(WorkerExtension):
    """What trainers add to a worker, beside what a bisection does."""

    def update_in_buckets(self, folder: str) -> None:
        """As verl does: the model loads parts, and vLLM's processing runs once after them, outside its config."""
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        model, device = self.model_runner.get_model(), self.device
        for bucket in buckets(folder):
            model.load_weights((name, tensor.to(device)) for name, tensor in bucket)
        process_weights_after_loading(model, self.model_runner.vllm_config.model_config, device)

    def update_one(self, folder: str, name: str) -> None:
        """As TRL and OpenRLHF do: a call of the workers for every weight, and no processing."""
        self.model_runner.get_model().load_weights([(name, tensors_of(folder)[name].to(self.device))])

    def keep(self) -> None:
        """Remember the weights as they lie in the model."""
        self._kept = {name: weight.clone() for name, weight in self.model_runner.get_model().named_parameters()}

    def put_back(self) -> None:
        """Reload what was remembered, which is not a checkpoint's format."""
        with torch.no_grad():
            self.reload_weights(weights_iterator=iter(self._kept.items()), is_checkpoint_format=False)

    def write_in_place(self) -> None:
        """Put back what was remembered by copies that vLLM sees nothing of."""
        for name, weight in self.model_runner.get_model().named_parameters():
            weight.data.copy_(self._kept[name])

    def nothing(self) -> None:
        """Leave all as it is."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The folder of a checkpoint, and which of its buckets comes."""

    folder: str
    bucket: int


class Transfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's weight transfer from files, since its own backends need GPUs; like its IPC backend in all else."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        bucket = list(buckets(update_info.folder))[update_info.bucket]
        self.model.load_weights((name, tensor.to(self.device)) for name, tensor in bucket)

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(*arguments: object) -> None:
        """Which vLLM 0.26 wants of a backend."""


WeightTransferEngineFactory.register_engine(TRANSFER, Transfer)


def by_reload_weights(llm: Any, folder: str) -> None:
    """vLLM's own reload."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})


def by_transfer(llm: Any, folder: str) -> None:
    """vLLM's weight transfer, in parts."""
    llm.init_weight_transfer_engine({"init_info": {}})
    llm.start_weight_update()
    for bucket in range(_BUCKETS):
        llm.update_weights({"update_info": {"folder": folder, "bucket": bucket}})
    llm.finish_weight_update()


def by_ipc(llm: Any, folder: str) -> None:
    """vLLM's weight transfer between processes on the GPUs of the engine's workers: this one is the trainer's."""
    import base64
    import pickle

    from torch.multiprocessing.reductions import reduce_tensor

    weights = tensors_of(folder)
    gpus = {
        str(torch.cuda.get_device_properties(at).uuid): [tensor.cuda(at) for tensor in weights.values()]
        for at in range(llm.llm_engine.vllm_config.parallel_config.world_size)
    }
    handles = [{gpu: reduce_tensor(there[at])[1] for gpu, there in gpus.items()} for at in range(len(weights))]
    info = {
        "names": list(weights),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
        "shapes": [list(tensor.shape) for tensor in weights.values()],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
    }
    for at in range(len(gpus)):
        torch.cuda.synchronize(at)
    llm.init_weight_transfer_engine({"init_info": {}})
    llm.start_weight_update()
    llm.update_weights({"update_info": info})
    llm.finish_weight_update()


def by_buckets(llm: Any, folder: str) -> None:
    """A function of the trainer's in the worker."""
    llm.collective_rpc("update_in_buckets", args=(folder,))


def by_name(llm: Any, folder: str) -> None:
    """The same, for every weight."""
    for name in tensors_of(folder):
        llm.collective_rpc("update_one", args=(folder, name))


def by_hand(llm: Any, folder: str) -> None:
    """A trainer in the engine's process, which calls no worker."""
    llm.llm_engine.model_executor.driver_worker.model_runner.get_model().load_weights(tensors_of(folder).items())


def call(llm: Any, method: str) -> None:
    """Call a method of the workers."""
    llm.collective_rpc(method)


def sleep(llm: Any, level: int) -> None:
    """Sleep and wake up."""
    llm.sleep(level)
    llm.wake_up()


def asleep_while_loading(llm: Any, kind: str, folder: str) -> None:
    """The order of verl: all sleeps, the weights wake up and are loaded, the KV cache wakes up.

    Args:
        kind: ``sleep_of_engine``, or ``sleep_of_workers``, of which the engine's scheduler knows nothing.
    """
    if kind == "sleep_of_engine":
        llm.sleep(2)
        wake_up = llm.wake_up
    else:
        llm.collective_rpc("sleep", kwargs={"level": 2})

        def wake_up(tags: list[str]) -> None:
            llm.collective_rpc("wake_up", kwargs={"tags": tags})

    wake_up(tags=["weights"])
    by_buckets(llm, folder)
    wake_up(tags=["kv_cache"])


def replaced_while_it_runs(
    llm: Any, asked: dict[str, Any], begun: int, folder: str, adapter: list[Any] | None = None
) -> dict[str, Any]:
    """What a request answers whose weights are replaced once it has ``begun`` tokens or more.

    Args:
        adapter: name, number and folder of the one that it has.
    """
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    from tests.engine.adapters import prompt_of

    engine, params = llm.llm_engine, SamplingParams(**asked["params"])
    lora = None if adapter is None else LoRARequest(*adapter)
    engine.add_request("running", prompt_of(asked), params, lora_request=lora)
    for outputs in drive(engine):
        if outputs and len(outputs[0].outputs[0].token_ids) >= begun:
            break
    by_reload_weights(llm, folder)
    return describe(finished(drive(engine))["running"])


def with_a_budget(llm: Any, asked: dict[str, Any], resets: list[int], beside: dict[str, Any] | None) -> dict[str, Any]:
    """What a request answers that begins in a thought, if its parameters have a budget, and whose engine computes all
    anew before some steps, as after an update of weights; and the end that a budget forces.

    Args:
        resets: numbers of steps.
        beside: a request in the row before, which begins in a thought as well.
    """
    from vllm import SamplingParams

    engine, steps = llm.llm_engine, count()
    thoughts = engine.vllm_config.reasoning_config
    for name, one in {"beside": beside, "target": asked}.items():
        if one is not None:
            prompt = [*one["prompt"], *thoughts.reasoning_start_token_ids, *one["prompt"][:2]]
            engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(**one["params"]))

    def reset() -> bool:
        assert next(steps) not in resets or llm.reset_prefix_cache(reset_running_requests=True)
        return False

    return describe(finished(drive(engine, reset))["target"]) | {"end": thoughts.reasoning_end_token_ids}
