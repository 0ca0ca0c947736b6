"""The benchmark of the trainer on a CPU: models that keep their bits, lose them, fail or are refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("transformers", minversion="5.5")

from benchmarks import trainer, trainer_stock
from benchmarks.record import Setting, read
from benchmarks.shapes import Model
from benchmarks.trainer import PASSES, SHARES, Batch
from vllm_batch_invariant.errors import NotCovered

TINY = Model("tiny", 64, 2, 1, 32, 64, 128)
TOKENS = 2 * sum(SHARES)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(trainer.SIZES, "small", dict.fromkeys(trainer.SIZES["small"], TINY))
    monkeypatch.setattr(trainer, "_WARM_CALLS", 1)


def run(out: Path, *arguments: str) -> int:
    command = ["--layers", "1", "--tokens", str(TOKENS), "--samples", "2", "--out", str(out), *arguments]
    return trainer.main(command)


def test_each_family_and_pass_has_times_as_ratios_to_stock_and_the_bits_of_both(tmp_path: Path) -> None:
    out = tmp_path / "trainer.csv"
    assert run(out, "--families", "qwen3", "qwen2") == 0
    rows = read(out)
    assert [row.provider for row in rows] == ["stock", "ours"] * len(rows[::2])
    wanted = {(family, one) for family in ("qwen3", "qwen2") for one in PASSES}
    assert {(row.keys["family"], row.keys["pass"]) for row in rows} == wanted
    for stock, ours in zip(rows[::2], rows[1::2], strict=True):
        assert stock.case == ours.case
        assert ours.keys["against"] == "sdpa"
        assert ours.ratio == pytest.approx(ours.p50 / stock.p50, rel=1e-3)
        assert (stock.ratio, ours.bits) == (1, "equal")


def test_bits_that_follow_the_batch_are_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = trainer.our_logprobs
    monkeypatch.setattr(trainer, "our_logprobs", lambda model, batch: ours(model, batch) + len(batch.lengths) * 1e-6)
    out = tmp_path / "trainer.csv"
    assert run(out, "--families", "qwen3", "--passes", "forward") == 1
    assert [row.bits for row in read(out) if row.provider == "ours"] == ["differ"]
    assert "BITS DIFFER: ours model=tiny family=qwen3" in capsys.readouterr().err


def test_a_call_that_fails_loses_its_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("no room")
        return torch.zeros(batch.tokens.shape[1] - 1)

    monkeypatch.setattr(trainer, "our_logprobs", fails)
    out = tmp_path / "trainer.csv"
    assert run(out, "--families", "qwen3", "--passes", "both", "forward") == 1
    assert {row.keys["pass"] for row in read(out)} == {"forward"}
    assert "pass=both: OutOfMemoryError: no room" in capsys.readouterr().err


def test_a_family_that_is_refused_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(model: torch.nn.Module) -> torch.nn.Module:
        raise NotCovered("this family", "nobody has compared it", "take another")

    monkeypatch.setattr(trainer, "patch", refuses)
    assert run(tmp_path / "trainer.csv", "--families", "llama") == 2
    assert "llama is left out: " in capsys.readouterr().err


def test_nothing_begins_after_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "trainer.csv", "--families", "llama", "qwen3", "--limit-seconds", "0") == 2
    assert "2 left out for want of time" in capsys.readouterr().out


def test_a_batch_is_sequences_of_different_lengths_whose_positions_begin_again() -> None:
    batch = Batch.random(1000, 50, "cpu")
    assert sum(batch.lengths) == batch.tokens.shape[1] == 1000
    assert len(set(batch.lengths)) == len(batch.lengths) == len(SHARES)
    assert (batch.positions[0] == 0).nonzero().flatten().tolist() == batch.bounds[:-1]
    assert [one.tokens.shape[1] for one in batch.alone()] == list(batch.lengths)
    numbers = torch.arange(1, 1000)  # of each token but the first
    assert [cut.tolist() for cut in batch.cut(numbers)][1][0] == batch.lengths[0] + 1, "no token follows another's end"
    assert sum(map(len, batch.cut(numbers))) == 1000 - len(batch.lengths)


def test_pytorchs_varlen_attention_is_asked_for_what_sdpa_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, enable_gqa):
        assert window_size == (-1, 0)
        assert (max_q, max_k) == (max(batch.lengths), max(batch.lengths))
        assert cu_seq_q.tolist() == cu_seq_k.tolist() == batch.bounds
        parts = zip(*(x.split(batch.lengths) for x in (query, key, value)), strict=True)
        attended = [
            torch.nn.functional.scaled_dot_product_attention(
                *(part.transpose(0, 1) for part in one), is_causal=True, enable_gqa=enable_gqa
            )
            for one in parts
        ]
        return torch.cat(attended, 1).transpose(0, 1)

    monkeypatch.setattr(trainer_stock, "_varlen_attn", lambda: varlen_attn)
    batch = Batch.random(TOKENS, TINY.vocabulary, "cpu")
    model = trainer.model_of("qwen3", TINY, 1, TOKENS, "cpu").float()
    with torch.no_grad():
        expected = trainer.stock_logprobs(model, batch)
        model.set_attn_implementation(trainer_stock.register_varlen())
        got = trainer.stock_logprobs(model, batch)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_rows_of_another_machine_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, here = tmp_path / "trainer.csv", Setting("NVIDIA H200", "torch=0", "2026-01-31")
    for gpu in ("NVIDIA H200", "another"):
        monkeypatch.setattr(trainer, "_setting", lambda device, gpu=gpu: replace(here, gpu=gpu))
        assert run(out, "--families", "llama", "--passes", "forward") == 0
    assert {row.gpu for row in read(out)} == {"NVIDIA H200", "another"}
