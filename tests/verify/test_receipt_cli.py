"""What ``receipt make``, ``verify`` and ``compare`` say and how they end, on servers of fixed pages."""

import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.server import MODELS, Page, fake_server
from tests.verify.commands import ended
from tests.verify.receipts import CPU, receipt, rewritten
from vllm_batch_invariant.verify.harness.server import free_port
from vllm_batch_invariant.verify.receipt import Receipt

CHOICE = {
    "index": 0,
    "text": "xy",
    "finish_reason": "length",
    "prompt_token_ids": [11, 12, 13],
    "token_ids": [5, 6],
    "logprobs": {
        "tokens": ["token_id:5", "token_id:6"],
        "token_logprobs": [-0.5, -1.25],
        "top_logprobs": [{"token_id:5": -0.5, "token_id:9": -3.0}, {"token_id:9": -1.0, "token_id:6": -1.25}],
    },
}
ENVIRONMENT = Page(asdict(CPU))


def answer(change: Callable[[dict[str, Any]], Any] = lambda choice: None) -> Page:
    """What a server sends, with a change to its choice."""
    choice = copy.deepcopy(CHOICE)
    change(choice)
    return Page({"id": "1", "object": "text_completion", "created": 0, "model": "fake", "choices": [choice]})


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """The command's exit status, what it printed, and its lines on stderr."""
    said = ended(capsys, "receipt", *arguments)
    return said.status, said.out, "\n".join(said.lines)


def make(capsys: pytest.CaptureFixture[str], path: Path, *arguments: object, **pages: Page) -> tuple[int, str, str]:
    with fake_server(**{"models": MODELS, "batch_invariant": ENVIRONMENT, "completions": answer()} | pages) as url:
        return run(capsys, "make", path, "--base-url", url, "--prompt", "a prompt", *arguments)


def verify(capsys: pytest.CaptureFixture[str], path: Path, *arguments: object, **pages: Page) -> tuple[int, str, str]:
    with fake_server(**{"models": MODELS, "batch_invariant": ENVIRONMENT, "completions": answer()} | pages) as url:
        return run(capsys, "verify", path, "--base-url", url, "--concurrent", "0", *arguments)


@pytest.fixture
def made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Path:
    path = tmp_path / "receipt.json"
    status, out, _ = make(capsys, path)
    assert status == 0
    assert f"2 tokens and the bits of 6 logprobs of fake, sha256 {Receipt.load(path).sha256}" in out
    assert "no digest of the model, because nobody named the folder of the server's files; name it with --model" in out
    return path


def test_a_receipt_holds_what_the_server_sent_and_reports(made: Path) -> None:
    kept = Receipt.load(made)
    assert kept.prompt.token_ids == (11, 12, 13)
    assert kept.completion.token_ids == (5, 6)
    assert kept.completion.logprobs == ("bf000000", "bfa00000")
    assert kept.completion.top_logprobs[1] == ((6, "bfa00000"), (9, "bf800000"))
    assert kept.environment == CPU


def test_the_same_answer_is_equal_and_status_0(capsys: pytest.CaptureFixture[str], made: Path) -> None:
    status, out, _ = verify(capsys, made)
    assert status == 0
    assert "equal: 2 tokens and the bits of 6 logprobs, computed again alone" in out


def test_another_bit_is_different_and_status_1(capsys: pytest.CaptureFixture[str], made: Path) -> None:
    other = answer(lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(1, -1.2500001192092896))
    status, out, _ = verify(capsys, made, completions=other)
    assert status == 1
    assert "differs: at token 1 the logprob of 6 is 0xbfa00001" in out


def test_another_kind_of_cpu_is_said_before_the_bits_are_compared(
    capsys: pytest.CaptureFixture[str], made: Path
) -> None:
    other = Page(asdict(CPU) | {"device": CPU.device | {"name": "another CPU", "threads": 4}})
    status, out, _ = verify(capsys, made, batch_invariant=other)
    assert status == 0
    said = (
        "device: name a CPU in the receipt and another CPU in the server, threads 2 in the receipt and 4 in the server"
    )
    assert f"{said}: equal bits are not promised" in out.splitlines()


def test_a_server_that_does_not_describe_itself_is_said_with_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    silent = {"batch_invariant": Page("nothing here", 404), "version": Page({"version": "0.26.0"})}
    status, out, _ = make(capsys, tmp_path / "receipt.json", **silent)
    assert status == 0
    assert "the receipt does not describe the engine that computed it; a server with the mode on describes" in out
    assert Receipt.load(tmp_path / "receipt.json").environment.versions == {"vllm": "0.26.0"}


@pytest.mark.parametrize(
    ("pages", "line"),
    [
        ({"completions": answer(lambda choice: choice.update(logprobs=None))}, "returned no logprobs"),
        ({"completions": answer(lambda choice: choice.pop("prompt_token_ids"))}, "returns no token ids"),
        ({"completions": answer(lambda choice: choice.pop("token_ids"))}, "returns no token ids"),
        ({"completions": answer(lambda choice: choice["token_ids"].reverse())}, "do not belong together"),
        (
            {"completions": answer(lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(0, -0.1))},
            "the logprob -0.1 is no fp32 number",
        ),
        ({"completions": answer(lambda choice: choice["logprobs"]["tokens"].pop())}, "no completion of vLLM's API"),
        ({"completions": Page({"choices": []})}, "no completion of vLLM's API"),
        ({"completions": Page("hello")}, "no completion of vLLM's API"),
        ({"completions": Page({"error": {"message": "the prompt is too long"}}, 400)}, "the prompt is too long"),
        ({"batch_invariant": Page({"mode": "yes"})}, "the engine's description is not understood: mode"),
        ({"batch_invariant": Page("hello")}, "the engine's description is not understood"),
        ({"batch_invariant": Page({"error": "Unauthorized"}, 401)}, "/v1/batch_invariant does not answer"),
        ({"models": Page("hello", 404)}, "no OpenAI-compatible server answers"),
    ],
)
def test_a_server_that_gives_no_such_answer_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, pages: dict[str, Page], line: str
) -> None:
    kept = tmp_path / "kept.json"
    receipt().save(kept)
    for command, path in ((make, tmp_path / "new"), (verify, kept)):
        status, out, err = command(capsys, path, **pages)
        assert status == 2
        assert line in err
        assert "equal:" not in out
        assert err.startswith("vllm-batch-invariant receipt: ")
        assert "\n" not in err
    assert not (tmp_path / "new").exists()


def test_another_model_is_said_even_where_it_refuses_the_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    receipt().save(tmp_path / "receipt.json")
    refusal = Page({"error": {"message": "token 13 is out of vocabulary"}}, 400)
    status, out, err = verify(capsys, tmp_path / "receipt.json", completions=refusal)
    assert status == 2
    assert out.startswith("model: organisation/model in the receipt and fake in the server, compared by name only")
    assert "token 13 is out of vocabulary" in err


def test_concurrent_requests_that_get_no_answer_are_no_test(capsys: pytest.CaptureFixture[str], made: Path) -> None:
    status, _, err = verify(capsys, made, "--concurrent", "3")
    assert status == 2
    assert err == "vllm-batch-invariant receipt: the concurrent requests get no answer: the server does not stream"


def test_a_tampered_receipt_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], made: Path) -> None:
    made.write_text(made.read_text().replace("bf000000", "bf000001", 1))
    status, _, err = verify(capsys, made)
    assert status == 2
    assert err.startswith(
        f"vllm-batch-invariant receipt: {made}: the receipt was tampered with or damaged: its sha256 is "
    )
    assert "\n" not in err


def test_a_private_receipt_needs_its_prompt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, prompt = tmp_path / "private.json", tmp_path / "prompt.txt"
    assert make(capsys, path, "--private")[0] == 0
    assert "[11, 12, 13]" not in path.read_text()
    status, _, err = verify(capsys, path)
    assert (status, "give the prompt" in err) == (2, True)
    other = answer(lambda choice: choice.update(prompt_token_ids=[11, 12, 14]))
    status, _, err = verify(capsys, path, "--prompt", "another prompt", completions=other)
    assert (status, "is not the receipt's" in err) == (2, True)
    prompt.write_text("a prompt")
    assert verify(capsys, path, "--prompt-file", prompt)[0] == 0
    status, _, err = verify(capsys, path, "--prompt-file", tmp_path / "nowhere")
    assert (status, "cannot be read" in err) == (2, True)


def test_a_receipt_holds_no_secret_and_does_not_say_where_things_lie(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", "sk-not-to-be-told")
    monkeypatch.setenv("USER", "somebody")
    folder = tmp_path / "somebody" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    served = {"id": str(folder), "root": str(folder), "object": "model", "created": 0, "owned_by": "somebody"}
    pages = {"models": Page({"data": [served]}), "batch_invariant": ENVIRONMENT, "completions": answer()}
    with fake_server(**pages) as url:
        for secret in (
            ("--base-url", url.replace("http://", "http://user:password@")),
            ("--base-url", url, "--api-key-env", "SERVER_KEY"),
        ):
            path = tmp_path / f"{len(secret)}.json"
            target = (*secret, "--model-files", folder)
            assert run(capsys, "make", path, *target, "--prompt", "a prompt")[0] == 0
    text = path.read_text()
    assert text == (tmp_path / "2.json").read_text()
    kept = Receipt.from_json(text)
    assert (kept.model.name, sorted(kept.model.files)) == ("model", ["config.json", "model.safetensors"])
    for secret in ("sk-not-to-be-told", "somebody", "password", "127.0.0.1", str(tmp_path), str(Path.home()) + "/"):
        assert secret not in text


def test_no_file_is_read_because_a_server_names_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What answers at localhost may be the end of a tunnel, and the folder that it names another machine's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_text("weights")
    served = {"id": "fake", "root": str(folder), "object": "model", "created": 0, "owned_by": "somebody"}
    models, path = Page({"data": [served]}), tmp_path / "receipt.json"
    status, out, _ = make(capsys, path, models=models)
    assert status == 0
    assert "no digest of the model, because nobody named the folder" in out
    assert (Receipt.load(path).model.files, Receipt.load(path).model.digest) == ({}, None)
    status, out, _ = verify(capsys, path, models=models)
    line = "with --model-files for the receipt and the server, their bytes would be compared"
    assert f"model: fake, compared by name only ({line}): equal bits are not promised" in out
    assert not (tmp_path / "cache").exists(), "no digest was kept either"
    status, out, _ = make(capsys, tmp_path / "with.json", "--model-files", folder, models=models)
    assert (status, "no digest" in out) == (0, False)
    assert sorted(Receipt.load(tmp_path / "with.json").model.files) == ["model.safetensors"]


def test_an_address_is_told_without_its_password(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    address = f"http://user:password@127.0.0.1:{free_port()}"
    status, _, err = run(capsys, "make", tmp_path / "receipt.json", "--base-url", address)
    assert status == 2
    assert "no OpenAI-compatible server answers at http://127.0.0.1:" in err
    assert "password" not in err


def test_two_receipts_are_compared_without_a_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.json", "c.json", "d.json")]
    receipt().save(paths[0])
    receipt().save(paths[1])
    paths[2].write_text(rewritten(receipt(), lambda data: data["completion"]["logprobs"].__setitem__(0, "bf000001")))
    paths[3].write_text(rewritten(receipt(), lambda data: data["model"].update(name="another")))
    assert run(capsys, "compare", paths[0], paths[1])[0] == 0
    page = tmp_path / "page.html"
    status, out, _ = run(capsys, "compare", paths[0], paths[2], "--html", page)
    assert status == 1
    assert "Different from token 0 on." in page.read_text()
    assert "vllm-batch-invariant receipt compare" in page.read_text()
    assert "differs: at token 0 the logprob of 5 is 0xbf000001" in out
    status, out, err = run(capsys, "compare", paths[0], paths[3])
    assert (status, out) == (2, "")
    assert "receipts of different models: organisation/model in a.json and another in d.json" in err
    assert json.loads(paths[0].read_text()) == json.loads(paths[1].read_text())


def test_items_are_files_for_an_engine_that_is_started_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    receipt().save(tmp_path / "kept.json")
    for where, line in (
        (("--model", "here"), f"--image {Path('no.png').resolve()}: no such file"),
        (("--base-url", "http://localhost:1"), "--image is for an engine that is started here"),
        (("--model", "here", "--without-engine"), "--image is for an engine that is started here"),
    ):
        said = ended(capsys, "receipt", "verify", str(tmp_path / "kept.json"), *where, "--image", "no.png")
        assert said.status == 2
        assert line in said.err
