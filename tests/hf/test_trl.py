"""What this package has for TRL. All but the first two are skipped without it."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.engines import PATHS, run_example
from tests.hf.test_refusals import refuses
from vllm_batch_invariant import envs
from vllm_batch_invariant.installing import how_to_install
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint

HAS_TRL = find_spec("trl") is not None
needs_trl = pytest.mark.skipif(not HAS_TRL, reason=f"needs TRL: {how_to_install('on-policy')}")


def said_by(program: str) -> str:
    """What a program prints, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": PATHS}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_trainers_are_imported_by_those_who_ask_for_them_alone() -> None:
    loaded = "print({'trl', 'verl', 'ray', 'datasets'} & {*sys.modules} or 'none of them')"
    assert said_by(f"import sys, vllm_batch_invariant.hf, vllm_batch_invariant.verl; {loaded}") == "none of them"


@pytest.mark.parametrize("version", [None, "1.160.0"])
def test_another_trl_than_the_one_that_was_read_is_refused_in_a_line(version: str | None) -> None:
    found = "importlib.metadata.PackageNotFoundError('trl')" if version is None else f"'{version}'"
    program = f"""
import importlib.metadata
known = importlib.metadata.version
def version(name):
    found = {found} if name == "trl" else known(name)
    if isinstance(found, Exception):
        raise found
    return found
importlib.metadata.version = version
import vllm_batch_invariant.trl
"""
    line = said_by(program)
    assert f"does not cover a TRL {version or 'that is not installed'}: " in line
    assert line.endswith(f"{how_to_install('on-policy')}.")


def arguments(**changed: Any) -> SimpleNamespace:
    """Of TRL's GRPOConfig, what is looked at."""
    usual = {
        "use_vllm": True, "vllm_mode": "colocate", "bf16": False, "fp16": False, "cast_lm_head_to_fp32": False,
        "use_liger_kernel": False, "repetition_penalty": 1.0, "vllm_structured_outputs_regex": None,
        "generation_kwargs": None,
    }  # fmt: skip
    return SimpleNamespace(**usual | changed)


@needs_trl
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"use_vllm": False}, "a rollout that is not by TRL's colocated engine"),
        ({"vllm_mode": "server"}, "a rollout that is not by TRL's colocated engine"),
        ({"bf16": True}, r"autocast: .*; GRPOConfig\(bf16=False\)"),
        ({"fp16": True}, "autocast"),
        ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32"),
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        ({"repetition_penalty": 1.1}, "a repetition penalty"),
        ({"vllm_structured_outputs_regex": "a+"}, "structured outputs"),
        ({"generation_kwargs": {"min_tokens": 3, "stop": ["."]}}, "generation_kwargs of min_tokens: "),
    ],
)
def test_arguments_with_which_the_logprobs_would_be_others_are_refused(
    changed: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_batch_invariant import trl

    monkeypatch.setenv(envs.FLAG, "1")
    trl._check(arguments(), {})
    trl._check(arguments(generation_kwargs={"stop": ["."], "seed": 3}), {"peft_config": None})
    refuses(lambda: trl._check(arguments(**changed), {}), said)


@needs_trl
def test_a_trainer_without_the_mode_and_what_trl_would_wrap_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_batch_invariant import trl

    monkeypatch.delenv(envs.FLAG, raising=False)
    refuses(lambda: trl._check(arguments(), {}), r'the rollout without the mode: .*; set os.environ\["VLLM_BATCH_INV')
    monkeypatch.setenv(envs.FLAG, "1")
    refuses(lambda: trl._check(arguments(), {"peft_config": object()}), "peft_config")


class OfPeft(torch.nn.Module):
    """Stands for PEFT's model: an adapter of a rank, beside a weight that may be trained."""

    def __init__(self, rank: int, trains_all: bool = False, of_experts: Sequence[str] = ()) -> None:
        super().__init__()
        self.add_module(
            "q_proj", torch.nn.ModuleDict({"lora_A": torch.nn.ModuleDict({"default": torch.nn.Linear(4, 4)})})
        )
        self.embed_tokens = torch.nn.Embedding(4, 4).requires_grad_(trains_all)
        self.peft_config = {
            "default": SimpleNamespace(r=rank, rank_pattern={"v_proj": 4}, target_parameters=of_experts)
        }
        self.active_adapters = ["default"]


@needs_trl
@pytest.mark.parametrize(("rank", "room"), [(1, 8), (8, 8), (9, 16), (300, 320)])
def test_the_engine_has_room_for_the_adapters_rank(rank: int, room: int) -> None:
    from vllm_batch_invariant import trl

    assert trl._room_for(OfPeft(rank)) == {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}


@needs_trl
def test_what_an_adapters_files_cannot_hold_is_refused() -> None:
    from vllm_batch_invariant import trl

    refuses(lambda: trl._room_for(OfPeft(8, trains_all=True)), "weights beside the adapter .*embed_tokens.weight")
    refuses(lambda: trl._room_for(OfPeft(513)), "an adapter of rank 513")
    refuses(lambda: trl._room_for(OfPeft(8, of_experts=["experts.down_proj"])), "an adapter of experts.down_proj in a")
    other = OfPeft(8)
    other.active_adapters = ["mine"]
    refuses(lambda: trl._room_for(other), "the adapter mine: .* whose name is 'default'")


@needs_trl
def test_the_adapter_is_written_and_loaded_in_place_before_each_rollout() -> None:
    pytest.importorskip("vllm")
    from vllm_batch_invariant import trl

    seen: list[Any] = []

    def generate(prompts: Any, sampling_params: Any = None, **named: Any) -> None:
        seen.append(("asked", named["lora_request"].lora_path))

    served = SimpleNamespace(load_weights=lambda weights: seen.extend((name, "sent") for name, _ in weights))
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: served))
    engine = SimpleNamespace(
        add_lora=lambda one: seen.append((one.lora_int_id, one.lora_path, one.load_inplace)),
        model_executor=SimpleNamespace(driver_worker=worker),
    )
    layer = torch.nn.ModuleDict({"base_layer": torch.nn.Linear(4, 4, bias=False), "lora_A": OfPeft(8).q_proj["lora_A"]})
    base = torch.nn.ModuleDict({"q_proj": layer})
    generation = SimpleNamespace(llm=SimpleNamespace(generate=generate, llm_engine=engine))
    model = SimpleNamespace(
        save_pretrained=lambda folder: seen.append(("written", folder)), get_base_model=lambda: base
    )
    trainer = SimpleNamespace(
        vllm_generation=generation,
        model=model,
        args=SimpleNamespace(vllm_enable_sleep_mode=False),
        accelerator=SimpleNamespace(num_processes=1),
    )
    folder = str(trl.serve_adapter(trainer))
    generation.sync_weights()
    generation.llm.generate(["a"], None)
    assert seen == [("q_proj.weight", "sent"), ("written", folder), (1, folder, True), ("asked", folder)]
    trainer.accelerator.num_processes = 2
    refuses(lambda: trl.serve_adapter(trainer), "an adapter that several processes train")
    trainer.args.vllm_enable_sleep_mode = True
    refuses(lambda: trl.serve_adapter(trainer), "an adapter whose engine sleeps")


def test_arguments_are_those_of_trl() -> None:
    pytest.importorskip("trl")
    from trl import GRPOConfig

    assert all(hasattr(GRPOConfig(bf16=False, use_cpu=True), name) for name in vars(arguments()))


class Asked:
    """Stands for TRL's trainer, whose engine only notes with which seeds it is asked."""

    def __init__(self, process: int = 0, workers: int = 1) -> None:
        self.seeds: list[int] = []
        self.args, self.state = SimpleNamespace(seed=42), SimpleNamespace(global_step=0)
        self.model, self.accelerator = torch.nn.Linear(1, 1), SimpleNamespace(process_index=process)
        self.vllm_generation = SimpleNamespace(llm=SimpleNamespace(generate=self.note), tensor_parallel_size=workers)

    def note(self, prompts: list[Any], sampling_params: Any, **_: Any) -> None:
        assert len(prompts) == len(sampling_params)
        self.seeds += [params.seed for params in sampling_params]

    def ask(self, **given: Any) -> list[int]:
        """Seeds of eight completions of a prompt, asked for as TRL does."""
        from vllm import SamplingParams

        before, self.seeds = self.seeds, []
        self.vllm_generation.llm.generate([[5]] * 8, sampling_params=SamplingParams(**given), use_tqdm=False)
        found, self.seeds = self.seeds, before
        return found


def asked(**named: int) -> Asked:
    from vllm_batch_invariant.trl import seed_rollouts

    trainer = Asked(**named)
    seed_rollouts(trainer)
    return trainer


@needs_trl
def test_every_completion_of_a_run_has_a_seed_of_its_own_and_the_next_run_has_the_same() -> None:
    def run() -> list[int]:
        trainer, found = asked(), []
        for step in range(3):
            trainer.state.global_step = step
            trainer.model.train()
            found += trainer.ask() + trainer.ask()  # a second turn
            trainer.model.eval()
            found += trainer.ask()
        return found + asked(process=1).ask() + asked().ask(seed=7)

    seeds = run()
    assert len(set(seeds)) == len(seeds)
    assert run() == seeds


@needs_trl
def test_a_step_that_is_run_again_from_a_checkpoint_and_workers_of_one_engine_have_the_same_seeds() -> None:
    trainer, resumed = asked(), asked()
    trainer.ask()
    trainer.state.global_step = resumed.state.global_step = 9
    assert trainer.ask() == resumed.ask()
    assert asked(process=0, workers=2).ask() == asked(process=1, workers=2).ask() != asked(process=2, workers=2).ask()


@needs_trl
def test_parameters_that_completions_share_are_not_changed_and_a_list_of_them_is_followed() -> None:
    from vllm import SamplingParams

    trainer, shared = asked(), SamplingParams(temperature=0.7)
    generate = trainer.vllm_generation.llm.generate
    generate([[5]] * 2, sampling_params=shared)
    assert shared.seed is None
    generate([[5]] * 2, sampling_params=[shared, SamplingParams(seed=3)])
    assert len(set(trainer.seeds)) == 4


@needs_trl
def test_logprobs_of_what_filters_take_away_are_0_where_nothing_was_drawn() -> None:
    from vllm_batch_invariant import trl
    from vllm_batch_invariant.hf import Sampling, token_logprobs

    logits = torch.tensor([[0.0, 5.0, 4.0]] * 2, requires_grad=True)
    tokens = torch.tensor([0, 1])
    found = trl._drawn_logprobs(logits, tokens, Sampling(top_k=2))
    assert found[0] == 0
    assert found[1] < 0
    found.sum().backward()
    assert logits.grad.isfinite().all()
    assert torch.equal(trl._drawn_logprobs(logits, tokens, Sampling()), token_logprobs(logits, tokens))


@needs_trl
def test_entropies_are_those_of_the_temperature() -> None:
    from vllm_batch_invariant import trl

    logits = torch.randn(2, 70, 300)
    expected = torch.distributions.Categorical(logits=logits.double() / 0.7).entropy()
    assert torch.allclose(trl._entropies(logits, 0.7).double(), expected, rtol=1e-5)


@needs_trl
@pytest.mark.engine
@pytest.mark.exhaustive
def test_the_example_of_the_page_trains_exactly_on_policy(tmp_path: Path) -> None:
    shape = Shape(hidden=128, intermediate=2048, layers=2, heads=2, kv_heads=1, max_length=512)
    make_checkpoint(tmp_path / "MODEL", shape)
    told = "\nimport json; print(json.dumps(trainer.state.log_history))\n"
    done = run_example("docs/on-policy.md", "OnPolicyGRPOTrainer(", tmp_path, told, seconds=500)
    assert "trainer.train()" in (tmp_path / "example.py").read_text()
    steps = [step for step in json.loads(done.stdout.splitlines()[-1]) if "loss" in step]
    assert len(steps) > 1
    for step in steps:
        assert step["sampling/sampling_logp_difference/max"] == 0
        assert step["sampling/importance_sampling_ratio/min"] == step["sampling/importance_sampling_ratio/max"] == 1
        assert step["reward_std"] > 0, "the completions of a prompt are all the same"
    assert steps[-1]["grad_norm"] > 0
