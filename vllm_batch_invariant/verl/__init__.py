"""verl with samples that differ within a group, and with an actor whose logprobs are the rollout's, bit for bit.

    VERL_USE_EXTERNAL_MODULES=vllm_batch_invariant.verl.plugin python -m verl.trainer.main_ppo \
        actor_rollout_ref.rollout.full_determinism=True actor_rollout_ref.actor.strategy=fsdp2 ...

verl imports that module in every process that has this variable. It puts two classes into verl's registries: for the
rollout ``vllm`` one whose servers give every request a seed of its own, and for the actor and the reference model on
NVIDIA GPUs with the strategy ``fsdp2`` one that patches the model (:func:`..hf.patch`). What they replace and call is
compared with what was read; another verl is refused.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from ..errors import NotCovered
from ..hf import Sampling, patch, token_logprobs
from ..seeds import sample_seed

__all__ = ["on_policy_engine", "register", "rollout_seed", "seeded_replica"]

READ = {
    "vLLMHttpServer.generate": ("9c9bd3b936eb3a76", "e295b0eba6b8d127"),
    "FSDPEngine._build_module": ("cf852379bfb5391a",),
    "FSDPEngine._build_fsdp_module": ("00cf2459efe83f33",),
    "FSDPEngineWithLMHead.prepare_model_inputs": ("a62cf5f518395dcc", "950ee4785d5a1a7d"),
    "FSDPEngineWithLMHead.prepare_model_outputs": ("d46e492c66ebdac3", "7640dac44120fd71"),
    "FSDPEngineWithLMHead.forward_step": ("225b50e1bed5091a", "c853cdc0454a0c4b"),
}
"""Digests of verl's functions as they were read, in 0.9.1 and, where another, 0.9.0."""


def check(function: Callable[..., Any]) -> None:
    """Whether a function of verl's is one that was read.

    Raises:
        NotCovered: it is another.
    """
    name = function.__qualname__
    if digest_of(inspect.getsource(function)) not in READ[name]:
        raise NotCovered(
            f"a verl with another {name}",
            "nobody has read whether what is overridden there still fits",
            "install verl 0.9.1 or 0.9.0, or leave vllm_batch_invariant.verl.plugin out of VERL_USE_EXTERNAL_MODULES",
        )


def digest_of(source: str) -> str:
    """Of a function's text, however far it is indented."""
    return hashlib.sha256(inspect.cleandoc(source).encode()).hexdigest()[:16]


def rollout_seed(seed: int, weights: int | None, priority: int, prompt_tokens: int) -> int:
    """The seed of a request of verl's rollout, the same whichever replica serves it.

    Args:
        seed: ``rollout.seed``.
        weights: the trainer's step whose weights serve it (verl's ``global_steps``); None before the first.
        priority: by which verl numbers the samples of a step, those of all prompts.
        prompt_tokens: so many; they grow from turn to turn.
    """
    return sample_seed(seed, f"{weights} {priority} {prompt_tokens}")


@cache
def seeded_replica() -> type:
    """verl's replica of vLLM, whose servers give every request :func:`rollout_seed`. verl itself gives all requests of
    a replica one seed, with which all samples of a prompt are equal.

    Raises:
        NotCovered: a verl that was not read.
    """
    import ray
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

    class SeededReplica(vLLMReplica):
        """Replica of :func:`seeded_server`."""

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self.server_class = ray.remote(seeded_server())

    return SeededReplica


@cache
def seeded_server() -> type:
    """verl's server of vLLM, for :func:`seeded_replica`."""
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    check(vLLMHttpServer.generate)

    class SeededServer(vLLMHttpServer):
        """Gives a request without a seed one of its own, under ``full_determinism``."""

        async def generate(
            self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, *args: Any, **named: Any
        ) -> Any:
            if self.config.full_determinism and "seed" not in sampling_params:
                chosen = self.config.seed, self.global_steps, named.get("priority", 0), len(prompt_ids)
                sampling_params = sampling_params | {"seed": rollout_seed(*chosen)}
            return await super().generate(prompt_ids, sampling_params, request_id, *args, **named)

    return SeededServer


@cache
def on_policy_engine() -> type:
    """verl's FSDP engine for language models, with a patched model and :func:`..hf.token_logprobs`.

    Raises:
        NotCovered: a verl that was not read; by its instances: settings with which the logprobs would be others.
    """
    from verl.workers.engine.fsdp import transformer_impl as verls

    base: Any = verls.FSDPEngineWithLMHead
    for function in (
        *(verls.FSDPEngine._build_module, verls.FSDPEngine._build_fsdp_module),
        *(base.prepare_model_inputs, base.prepare_model_outputs, base.forward_step),
    ):
        check(function)

    class OnPolicyFSDPEngine(base):
        """Computes log_probs as the rollout reports them, and all else as verl does."""

        def _build_module(self) -> torch.nn.Module:
            check_settings(self.engine_config, self.model_config)
            with _replaced(verls, get_init_weight_context_manager=_of_real_weights):
                return patch(super()._build_module())

        def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
            sharded = super()._build_fsdp_module(module)
            self._autocast_dtype = torch.float32  # verl's word for no autocast; FSDP2's copies have the dtype already
            return sharded

        def prepare_model_outputs(
            self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
        ) -> dict[str, Any]:
            sampling = _sampling_of(micro_batch["temperature"], output_args)

            def logprobs(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
                if sampling is None:
                    return token_logprobs(logits, labels)
                raw = output.logits.squeeze(0)  # verl's own are divided in the model's dtype
                return token_logprobs(raw, labels, mode="processed_logprobs", sampling=sampling)

            with _replaced(verls, logprobs_from_logits=logprobs):
                return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)

    return OnPolicyFSDPEngine


def _of_real_weights(use_meta_tensor: bool = True, mesh: Any = None) -> Any:  # noqa: ARG001 - verl's names
    """Every rank loads the weights, because a model of meta tensors cannot be patched."""
    from verl.utils.fsdp_utils import get_init_weight_context_manager

    return get_init_weight_context_manager(use_meta_tensor=False, mesh=mesh)


def _sampling_of(temperature: Any, output_args: Mapping[str, Any]) -> Sampling | None:
    """None where the temperature is 1, at which processed logprobs have the bits of raw ones."""
    if isinstance(temperature, torch.Tensor):
        raise NotCovered(
            "a temperature for each sample in verl's actor", "it was not compared with vLLM's", "give all the same"
        )
    if float(temperature) == 1:
        return None
    if "temperature_rmpad" not in output_args:
        raise NotCovered(
            f"a temperature of {temperature} with padded batches in verl's actor",
            "verl divides the logits in the model's dtype, which the engine does not",
            "set actor_rollout_ref.model.use_remove_padding=True, or temperature 1",
        )
    return Sampling(float(temperature))


def check_settings(engine: Any, model: Any) -> None:
    """Whether an engine of verl's computes what its rollout does.

    Args:
        engine: verl's ``FSDPEngineConfig``.
        model: verl's ``HFModelConfig``.

    Raises:
        NotCovered: a setting with which it does not.
    """
    refused = {
        "the strategy fsdp": (engine.strategy != "fsdp2", "only FSDP2 was compared", "set actor.strategy=fsdp2"),
        "sequence parallelism": (
            engine.ulysses_sequence_parallel_size > 1,
            "a patched model has whole sequences",
            "set ulysses_sequence_parallel_size=1",
        ),
        "use_fused_kernels": (model.use_fused_kernels, "they have other bits", "leave it out"),
        "use_liger": (model.use_liger, "its kernels have other bits", "leave it out"),
        "adapters": (model.lora_rank > 0, "they have not been compared with vLLM's", "train all weights"),
    }
    for what, (is_found, why, remedy) in refused.items():
        if is_found:
            raise NotCovered(f"{what} in verl's actor", why, remedy)


@contextmanager
def _replaced(module: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def register() -> None:
    """Put both classes into verl's registries, in the place of verl's own. Idempotent.

    Raises:
        NotCovered: a verl that was not read.
    """
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register("vllm", seeded_replica)
    engine = on_policy_engine()
    if EngineRegistry._engines["language_model"]["fsdp2"].get(("cuda", "nvidia")) is not engine:
        EngineRegistry.register("language_model", backend="fsdp2", device="cuda", vendor="nvidia")(engine)
