"""One training run of ``examples.grpo.runs``: TRL's GRPOTrainer with its colocated vLLM, in a process of its own,
because the mode holds for a whole process.

usage: python -m examples.grpo.run SPECIFICATION     a file of JSON, see :class:`examples.grpo.runs.Specification`
"""

import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

from examples.grpo.runs import CONTEXT, Run, Specification, Step
from examples.grpo.task import questions, reward
from scripts.parity import Gap, Sample
from vllm_batch_invariant.hf import patch
from vllm_batch_invariant.trl import OnPolicyGRPOTrainer
from vllm_batch_invariant.verify.harness.requests import request, sampling_requests
from vllm_batch_invariant.verify.harness.worker_main import Driver

ADAPTER = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
"""Arguments of PEFT's LoraConfig."""
OLD_LAYER = "model.layers.1."
"""Of the weights that the fault "one layer" does not send."""


def digest(model: torch.nn.Module) -> str:
    """SHA-256 of a model's parameters, their names, dtypes and shapes."""
    found = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        found.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
        found.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Measured:
    """A part of a trainer's class: measures how far the logprobs of its loss are from the rollout's."""

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> tuple[Any, ...]:
        found = super()._get_per_token_logps_and_entropies(*arguments, **named)
        self._found = found[0].detach()
        return found

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        real = inputs["completion_mask"].bool().cpu()
        ours, theirs = self._found.cpu()[real], inputs["sampling_per_token_logps"].cpu()[real]
        gap = Gap.of([Sample([0, *inputs["completion_ids"].cpu()[real].tolist()], 1, theirs)], [ours])
        outside = ((ours - theirs).exp() - 1).abs() > self.args.epsilon
        for name, value in {**asdict(gap), "clipped": float(outside.double().mean())}.items():
            self._metrics["train"][name].append(value)
        return loss


class Trainer(Measured, GRPOTrainer):
    """TRL's own."""


class PatchedTrainer(Measured, OnPolicyGRPOTrainer):
    """The same for a patched model."""


class PatchedTrainerAlone(PatchedTrainer):
    """The same without looking at the engine: plain vLLM would be refused."""

    def __init__(self, model: torch.nn.Module, **arguments: Any) -> None:
        GRPOTrainer.__init__(self, patch(model.to(arguments["args"].device)), **arguments)


def _trainer(run: Run) -> type[Trainer] | type[PatchedTrainer]:
    return (PatchedTrainer if run.mode else PatchedTrainerAlone) if run.patched else Trainer


class Rollout:
    """TRL's ``rollout_func``: every completion has a seed of its own, so it does not depend on what runs beside.

    Args:
        specification: of the run.
    """

    def __init__(self, specification: Specification) -> None:
        self._specification = specification
        self.batches: list[int] = []
        """Most requests of each rollout that got a token in one step of the engine."""
        self.cached: list[int] = []
        """Tokens of each rollout's prompts that were found in the prefix cache."""

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Completions of the prompts, in their order."""
        chosen, step = self._specification, trainer.state.global_step
        chance = random.Random(f"{chosen.seed} {step}")
        ids = trainer.processing_class(prompts).input_ids
        asked = {"temperature": 1.0, "max_tokens": chosen.max_tokens, "logprobs": 0, "ignore_eos": False}
        adapter = {"adapter": str(folder)} if (folder := getattr(trainer, "adapter", None)) else {}
        requests = [request(prompt, seed=chance.randrange(1 << 31), **asked) | adapter for prompt in ids]
        order = list(range(len(requests)))
        if chosen.schedule.shuffled:
            chance.shuffle(order)
        others = sampling_requests()[: chosen.schedule.others]
        driver = Driver()
        driver.llm = trainer.vllm_generation.llm
        # the engine draws for requests without a seed from the generator that shuffles the trainer's batch
        with torch.random.fork_rng():
            done = driver.step({"name": f"step {step}", "requests": [*others, *(requests[place] for place in order)]})
        answers = dict(zip(order, done["requests"][len(others) :], strict=True))
        self.batches.append(max(size for _, size in done["batches"]))
        self.cached.append(sum(answer["cached"] for answer in answers.values()))
        completions = [answers[place]["completions"][0] for place in range(len(requests))]
        return {
            "prompt_ids": ids,
            "completion_ids": [completion["tokens"] for completion in completions],
            "logprobs": [
                [float.fromhex(value) for [(_, value, _)] in completion["logprobs"]] for completion in completions
            ],
        }


class _Digests(TrainerCallback):
    def __init__(self) -> None:
        self.found: list[str] = []

    def on_step_end(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        self.found.append(digest(model))


def reload_weights(generation: Any) -> None:
    """Send the weights by vLLM's ``reload_weights``: plain vLLM frees them on a CPU once it has packed them, so that
    ``load_weights``, which TRL calls, fails there.
    """
    generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": generation._iter_named_params()})
    generation.llm.reset_prefix_cache()


def _with_fault(generation: Any, fault: str | None) -> None:
    if fault == "stale cache":
        core = generation.llm.llm_engine.engine_core.engine_core
        core.scheduler.reset_prefix_cache = lambda *_, **__: True
    elif fault == "one layer":
        every = generation._iter_named_params

        def others() -> Iterator[tuple[str, torch.Tensor]]:
            return (pair for pair in every() if not pair[0].startswith(OLD_LAYER))

        generation._iter_named_params = others
    elif fault == "stale adapter":
        post, steps = generation.sync_weights, count()
        generation.sync_weights = lambda: next(steps) or post()


def _engine(make: Callable[..., Any], specification: Specification, **arguments: Any) -> Any:
    """TRL's engine, with the settings that TRL has no option for."""
    schedule = specification.schedule
    on_gpu, on_cpu = {"kv_cache_memory_bytes": 2 << 30}, {"enforce_eager": True, "block_size": 32}
    of_device = on_gpu if torch.cuda.is_available() else on_cpu
    chosen = {"max_num_seqs": schedule.max_num_seqs, "max_num_batched_tokens": schedule.max_num_batched_tokens}
    chosen |= {"quantization": specification.quantization, "disable_log_stats": False}
    return make(**arguments | of_device | chosen)


def train(specification: Specification) -> list[Step]:
    """Run it; starts an engine in this process."""
    on_cpu = not torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(specification.model)
    model = AutoModelForCausalLM.from_pretrained(specification.model, dtype=torch.bfloat16)
    if specification.run.adapter:
        torch.manual_seed(specification.seed)
        model = get_peft_model(model, LoraConfig(**ADAPTER))
    dataset = Dataset.from_list(questions())
    arguments = GRPOConfig(
        output_dir=str(Path(specification.out).parent / "trainer"),
        use_cpu=on_cpu,
        bf16=False,  # no autocast: the model's weights are in bf16
        gradient_checkpointing=not on_cpu,
        per_device_train_batch_size=specification.prompts * specification.group,
        num_generations=specification.group,
        max_completion_length=specification.max_tokens,
        max_steps=specification.steps,
        learning_rate=specification.learning_rate,
        lr_scheduler_type="constant",
        seed=specification.seed,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=CONTEXT,
        vllm_importance_sampling_correction=specification.run.corrected,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rollout, digests = Rollout(specification), _Digests()
    engine = partial(_engine, vllm_generation.LLM, specification)
    run = specification.run
    quantised = {"quantization": specification.quantization} if run.mode and run.patched else {}
    with mock.patch.object(vllm_generation, "LLM", engine):
        trainer = _trainer(specification.run)(
            model,
            reward_funcs=reward,
            args=arguments,
            train_dataset=dataset,
            processing_class=tokenizer,
            rollout_func=rollout,
            callbacks=[digests],
            **quantised,
        )
    generation = trainer.vllm_generation
    _with_fault(generation, specification.run.fault)
    if on_cpu and not specification.run.mode:
        generation.sync_weights = partial(reload_weights, generation)
    trainer.train()
    logged = [found for found in trainer.state.log_history if "kl" in found]
    return [
        Step(
            found["reward"],
            int(found["tokens"]),
            int(found["different"]),
            found["largest"],
            found["kl"],
            found["clipped"],
            found["grad_norm"],
            batch,
            cached,
            weights,
        )
        for found, batch, cached, weights in zip(logged, rollout.batches, rollout.cached, digests.found, strict=True)
    ]


def main(path: Path) -> None:
    """Run what a file specifies, and write the steps where it says."""
    specification = Specification.read(path)
    steps = train(specification)
    Path(specification.out).write_text(json.dumps([asdict(step) for step in steps]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
