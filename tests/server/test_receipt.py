"""Receipts of a real server, computed again on it with concurrent requests."""

import getpass
from pathlib import Path

import pytest

from tests.verify.receipts import rewritten
from vllm_batch_invariant.cli import main
from vllm_batch_invariant.ops.attention import AttentionReduction
from vllm_batch_invariant.verify.harness.server import Server
from vllm_batch_invariant.verify.receipt import Receipt

pytestmark = pytest.mark.server

LENGTH = 24


@pytest.fixture(scope="module")
def target(server: Server, model: Path) -> list[str]:
    """The server, and the folder of what it serves."""
    return ["--base-url", server.base_url, "--model-files", str(model)]


@pytest.fixture(scope="module")
def made(target: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("receipts") / "greedy.json"
    assert main(["receipt", "make", str(path), *target, "--max-tokens", str(LENGTH), "--ignore-eos"]) == 0
    return path


def test_a_receipt_says_what_computed_it(made: Path) -> None:
    kept = Receipt.load(made)
    assert len(kept.completion.token_ids) == LENGTH
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= kept.model.files.keys()
    assert kept.environment.mode is True
    kind = kept.environment.device["type"]
    assert kind == "cuda" or kept.environment.device.keys() == {"type", "name", "capability"}
    assert kept.environment.engine["dtype"] == "bfloat16"
    reduction = AttentionReduction.of_device(kind)
    in_force = {"split_size": reduction.split_size, "early": str(reduction.early)}
    assert kept.environment.reductions["attention"].items() >= in_force.items()
    assert {"vllm", "torch", "triton", "vllm-batch-invariant"} <= kept.environment.versions.keys()
    assert not {getpass.getuser(), str(Path.home()), str(Path.cwd()), "127.0.0.1"} & set(made.read_text().split('"'))


def test_a_receipt_is_equal_when_it_is_computed_again_with_concurrent_requests(
    target: list[str], made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["receipt", "verify", str(made), *target, "--concurrent", "12"]) == 0
    said = capsys.readouterr().out
    assert "engines: nothing that decides bits differs: bits may be expected equal" in said
    assert f"equal: {LENGTH} tokens and the bits of {6 * LENGTH} logprobs, computed again with " in said


def test_a_changed_bit_is_found_though_the_receipt_was_hashed_again(
    server: Server, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, changed = Receipt.load(made), tmp_path / "changed.json"
    bits = f"{int(kept.completion.logprobs[7], 16) ^ 1:08x}"
    changed.write_text(rewritten(kept, lambda data: data["completion"]["logprobs"].__setitem__(7, bits)))
    assert main(["receipt", "verify", str(changed), "--base-url", server.base_url, "--concurrent", "2"]) == 1
    found, token = kept.completion.logprobs[7], kept.completion.token_ids[7]
    said = capsys.readouterr().out
    assert f"differs: at token 7 the logprob of {token} is 0x{found} " in said
    assert f"instead of 0x{bits} " in said


def test_a_private_receipt_of_a_seeded_chat_is_equal_with_its_prompt_alone(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, prompt = tmp_path / "private.json", ["--prompt", "Which sums?", "--chat"]
    options = ["--temperature", "0.9", "--top-p", "0.9", "--seed", "3", "--max-tokens", "12", "--private"]
    assert main(["receipt", "make", str(path), "--base-url", server.base_url, *prompt, *options]) == 0
    assert Receipt.load(path).prompt.token_ids is None
    assert main(["receipt", "verify", str(path), "--base-url", server.base_url, *prompt]) == 0
    assert main(["receipt", "verify", str(path), "--base-url", server.base_url, "--prompt", "Which sums?"]) == 2
    assert "is not the receipt's" in capsys.readouterr().err
