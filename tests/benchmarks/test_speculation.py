"""The rows of the benchmark of speculative decoding; engines themselves are made up here."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import engine, speculation
from benchmarks.engine_worker import tokens_per_step
from benchmarks.engine_workloads import SPECIAL, WORKLOADS, _prompts
from benchmarks.predictable_model import CYCLE, follows, make_predictable
from benchmarks.record import Setting, read
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint

SETTING = Setting("NVIDIA H200", "vllm=0.33.0", "2026-01-31")
NAME = "speculation-small"


def result(factor: float, accepted: float, alone: str = "bits") -> dict:
    """What a worker writes: every sample is ``factor``, give or take."""
    samples = [[factor * part for part in (0.9, 1.0, 1.2)] for _ in WORKLOADS[NAME]]
    tokens = [accepted] * len(samples)
    return {"same_bits": True, "alone": alone, "accepted": accepted, "tokens_per_step": tokens, "samples": samples}


def test_ratios_are_to_plain_vllm_with_the_same_drafter_and_bits_are_those_without_one() -> None:
    results = {
        ("stock", "ngram", 3): result(2.0, 1.25),
        ("ours", "ngram", 3): result(1.0, 1.0),
        ("stock", "itself", 3): result(4.0, 4.0),
        ("ours", "itself", 3): result(1.0, 4.0, alone="others"),
    }
    rows = speculation.measurements(results, NAME, "bits", SETTING)
    assert len(rows) == 4 * (2 * len(WORKLOADS[NAME]) + 1)
    assert len({(row.provider, row.case, row.metric) for row in rows}) == len(rows)
    found = {(row.provider, row.keys["spec"], row.metric): (row.ratio, row.bits) for row in rows}
    assert found == {
        ("stock", "ngram", "tpot"): (1.0, "-"),
        ("stock", "ngram", "length"): (1.0, "-"),
        ("stock", "ngram", "step"): (1.0, "-"),
        ("ours", "ngram", "tpot"): (0.5, "equal"),
        ("ours", "ngram", "step"): (0.4, "equal"),
        ("ours", "ngram", "length"): (0.8, "equal"),
        ("stock", "itself", "tpot"): (1.0, "-"),
        ("stock", "itself", "length"): (1.0, "-"),
        ("stock", "itself", "step"): (1.0, "-"),
        ("ours", "itself", "tpot"): (0.25, "differ"),
        ("ours", "itself", "step"): (0.25, "differ"),
        ("ours", "itself", "length"): (1.0, "differ"),
    }
    assert {row.keys["k"] for row in rows} == {"3"}


def test_a_drafter_by_prompts_that_repeat_themselves_has_workloads_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    plans = []

    def measure(provider: str, plan: dict, timeout: float) -> dict | None:
        plans.append((plan["workloads"], plan["engine"].get("speculative_config", {}).get("method")))
        return result(1.0, 2.0)

    monkeypatch.setattr(engine, "measure", measure)
    out = tmp_path / "engine.csv"
    arguments = ["model", "--workloads", NAME, "--drafts", "3", "--out", str(out), "--providers", "ours"]
    assert speculation.main([*arguments, "--drafters", "ngram", "ngram-repeats"]) == 0
    assert plans == [("none", None), (NAME, "ngram"), (f"{NAME}-repeats", "ngram")]
    cases = {row.split(",")[2] for row in out.read_text().splitlines()[1:]}
    assert "workload=tpot batch=3 context=32 run=4 spec=ngram-repeats k=3" in cases
    assert len(cases) == 6


def test_prompts_repeat_their_first_tokens() -> None:
    config = SimpleNamespace(get_vocab_size=lambda: 1000)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=config))
    [plain], [repeated] = (_prompts(llm, 1, 10, 7, run) for run in (0, 4))
    assert len(set(plain["prompt_token_ids"])) > 4
    ids = repeated["prompt_token_ids"]
    assert ids == [*ids[:4], *ids[:4], *ids[:2]]


@pytest.mark.parametrize("vocabulary", [SPECIAL + 1, 2 * CYCLE + SPECIAL, 1000])
def test_every_token_follows_one(vocabulary: int) -> None:
    tokens = torch.arange(vocabulary)
    found = follows(tokens, vocabulary)
    assert torch.equal(found.sort().values, tokens)
    assert torch.equal(found[:SPECIAL], tokens[:SPECIAL])
    again = tokens
    for _ in range(CYCLE):
        again = follows(again, vocabulary)
    whole = vocabulary - (vocabulary - SPECIAL) % CYCLE
    assert torch.equal(again[:whole], tokens[:whole])


def _answers(model: Path, prompts: torch.Tensor, count: int) -> torch.Tensor:
    from transformers import Qwen3ForCausalLM

    loaded = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    found = loaded.generate(prompts, max_new_tokens=count, do_sample=False, eos_token_id=None)
    return found[:, prompts.shape[1] :]


def test_a_predictable_model_writes_the_tokens_that_follow(tmp_path: Path) -> None:
    shape = Shape(layers=3)
    model = make_checkpoint(tmp_path / "model", shape)
    made = make_predictable(model, tmp_path / "predictable")
    assert (made / "tokenizer.json").is_symlink()
    assert not (made / "model.safetensors").is_symlink()
    prompts = torch.randint(SPECIAL, shape.vocab, (8, 12), generator=torch.Generator().manual_seed(0))
    expected, token = [], prompts[:, -1]
    for _ in range(CYCLE + 3):
        token = follows(token, shape.vocab)
        expected.append(token)
    expected = torch.stack(expected, 1)
    assert torch.equal(_answers(made, prompts, CYCLE + 3), expected)
    assert not torch.equal(_answers(model, prompts, CYCLE + 3), expected)


def test_a_model_whose_head_is_its_embedding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    with pytest.raises(ValueError, match="of its own"):
        make_predictable(tmp_path, tmp_path / "predictable")


def test_the_benchmark_of_a_predictable_model_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, seen = make_checkpoint(tmp_path / "model", Shape(layers=1, hidden=64)), []

    def measure(provider: str, plan: dict, timeout: float) -> dict | None:
        seen.append((Path(plan["engine"]["model"]) / "model.safetensors").exists())
        return result(1.0, 2.0)

    monkeypatch.setattr(engine, "measure", measure)
    out = tmp_path / "engine.csv"
    arguments = [str(model), "--workloads", NAME, "--drafts", "3", "--drafters", "ngram", "eagle3", "--out", str(out)]
    assert speculation.main([*arguments, "--predictable"]) == 0
    assert seen == [True] * 5
    assert {row.keys["model"] for row in read(out)} == {"predictable"}


def test_engines_start_together_in_groups(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    groups = []

    def in_turns(plans: list, timeout: float) -> Iterator[dict]:
        configs = [(who, plan["engine"].get("speculative_config", {})) for who, plan in plans]
        groups.append([(who, config.get("num_speculative_tokens", 0)) for who, config in configs])
        return (result(1.0, 2.0) for _ in plans)

    monkeypatch.setattr(engine, "measure_in_turns", in_turns)
    out = tmp_path / "engine.csv"
    arguments = ["model", "--workloads", NAME, "--out", str(out), "--drafters", "ngram", "--together", "4"]
    arguments += ["--keys", "layers=12", "--tensor-parallel-size", "2"]
    assert speculation.main([*arguments, "--drafts", "1", "3", "7"]) == 0
    drafts = [("ours", 0), ("stock", 1), ("ours", 1), ("stock", 3), ("ours", 3), ("stock", 7), ("ours", 7)]
    assert groups == [drafts[:4], drafts[4:]]
    rows = read(out)
    assert len(rows) == 6 * (2 * len(WORKLOADS[NAME]) + 1)
    assert {(row.keys["layers"], row.keys["tp"], row.keys["spec"]) for row in rows} == {("12", "2", "ngram")}


def test_an_engine_that_fails_fails_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    plans = []

    def measure(provider: str, plan: dict, timeout: float) -> dict | None:
        plans.append((provider, plan["workloads"], plan["engine"].get("speculative_config", {}).get("method")))
        return result(1.0, 2.0) if provider == "ours" or len(plans) < 5 else None

    monkeypatch.setattr(engine, "measure", measure)
    arguments = ["model", "--workloads", NAME, "--drafts", "3", "--out", str(tmp_path / "engine.csv")]
    assert speculation.main([*arguments, "--drafters", "ngram"]) == 0
    assert plans == [("ours", "none", None), ("stock", NAME, "ngram"), ("ours", NAME, "ngram")]
    assert speculation.main([*arguments, "--drafters", "itself"]) == 1


def test_tokens_of_a_step_are_those_between_two_counts() -> None:
    assert tokens_per_step((10, 5), (30, 35)) == 2.5
    assert tokens_per_step((10, 5), (10, 5)) == 1
