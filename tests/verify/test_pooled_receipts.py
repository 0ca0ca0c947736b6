"""Receipts of embeddings, scores and classes: what they hold, what is found in them, and what the command says."""

import base64
import json
import struct
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.server import MODELS, Page, fake_server
from tests.verify.commands import ended
from tests.verify.receipts import CPU, INFO, PROMPT, receipt, rewritten
from tests.verify.test_receipt_concurrent import engine
from vllm_batch_invariant.verify.outcome import NoTestError, Status
from vllm_batch_invariant.verify.receipt import Pooled, PooledReceipt, Pooling, Receipt, compare, load, model_files
from vllm_batch_invariant.verify.receipt.record import BadReceipt

VALUES = (0.25, -1.5, 3.0)
PAIR = ("which?", "this one")
NEXT = struct.unpack(">f", bytes.fromhex("bfc00001"))[0]
"""The number after -1.5."""


def pooled(
    values: tuple[float, ...] = VALUES, private: bool = False, about: Any = PROMPT, **asked: Any
) -> PooledReceipt:
    asking = Pooling(**{"task": "embed"} | asked)
    return PooledReceipt.of(INFO, about, asking, Pooled.of(values), private)


def of_pair(private: bool = False, score: float = 0.5) -> PooledReceipt:
    return pooled((score,), private, PAIR, task="score")


def test_a_receipt_is_read_as_it_was_written(tmp_path: Path) -> None:
    for number, made in enumerate((pooled(), pooled(private=True), of_pair(), of_pair(True), pooled(dimensions=3))):
        made.save(tmp_path / f"{number}.json")
        assert load(tmp_path / f"{number}.json") == made
        assert PooledReceipt.from_json(made.to_json()) == made
    assert pooled().pooled.values == ("3e800000", "bfc00000", "40400000")
    assert load(tmp_path / "2.json").pair.texts == PAIR
    assert "which" not in of_pair(private=True).to_json()


def test_kinds_of_receipts_are_not_taken_for_each_other() -> None:
    with pytest.raises(BadReceipt, match="a receipt of what a model pooled, and not of a completion"):
        Receipt.from_json(pooled().to_json())
    with pytest.raises(BadReceipt, match="a receipt of a completion, and not of what a model pooled"):
        PooledReceipt.from_json(receipt().to_json())


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda data: data["pooled"]["values"].__setitem__(1, "bfc00001"), "the sha256 of the values is not theirs"),
        (lambda data: data["pooling"].update(dimensions=2), "has 3 values, and the request asks for an embedding of 2"),
        (lambda data: data["pooling"].update(task="score"), "a score is of a pair of texts"),
        (lambda data: data["pooling"].update(task="token_embed"), "wrong content: pooling.task"),
        (lambda data: data["pooled"].update(values=[]), "wrong content: pooled.values"),
        (lambda data: data["prompt"]["token_ids"].reverse(), "the prompt's sha256 is not that of its token ids"),
        (lambda data: data.update(sampling={}), "wrong content: sampling"),
    ],
)
def test_content_that_does_not_fit_together_is_refused(change: Callable[[dict[str, Any]], Any], line: str) -> None:
    with pytest.raises(BadReceipt, match=line):
        load_text(rewritten(pooled(), change))
    with pytest.raises(BadReceipt, match="tampered with or damaged"):
        load_text(rewritten(pooled(), change, rehash=False))


def load_text(text: str) -> PooledReceipt:
    return PooledReceipt.from_json(text)


def test_a_score_of_two_values_and_dimensions_of_a_score_are_refused() -> None:
    with pytest.raises(BadReceipt, match="has 2 values, and the request asks for a score"):
        pooled((0.5, 0.5), about=PAIR, task="score")
    with pytest.raises(BadReceipt, match="dimensions are of an embedding"):
        pooled(task="classify", dimensions=3)


def test_a_value_that_was_rounded_on_the_way_is_refused() -> None:
    for value in (0.1, 1e39):
        with pytest.raises(NoTestError, match="is no fp32 number"):
            Pooled.of([value])
    assert Pooled.of([float("-inf")]).values == ("ff800000",)


def test_a_flipped_bit_is_named_and_counted() -> None:
    verdict = compare(pooled(), pooled((0.25, NEXT, 3.0)), ("a.json", "b.json"))
    said = "value 1 is 0xbfc00001 (-1.5000001192092896) instead of 0xbfc00000 (-1.5); 1 of 3 values differ"
    assert verdict.result == f"differs: {said}; that is b.json against a.json"
    assert verdict.difference.position == 1
    assert compare(pooled(), pooled()).result == "equal: the bits of 3 values of an embedding"
    fewer = compare(pooled(), pooled(VALUES[:2]))
    assert fewer.result.startswith("differs: it has 2 values instead of 3")


def test_another_pooler_is_said_before_the_bits_are_compared() -> None:
    first, mean = (
        replace(
            made, environment=replace(CPU, engine=CPU.engine | {"pooler_config": f'{{"seq_pooling_type": "{how}"}}'})
        )
        for made, how in ((pooled(), "LAST"), (pooled((1.0, 2.0, 3.0)), "MEAN"))
    )
    verdict = compare(first, mean)
    assert 'pooler_config {"seq_pooling_type": "LAST"} in the first and {"seq_pooling_type": "MEAN"}' in str(verdict)
    assert not verdict.promised
    assert verdict.status == Status.DIVERGED


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (pooled(dimensions=3), "different requests: dimensions None in the first and 3 in the second"),
        (pooled(activation=False), "different requests: activation None in the first and False in the second"),
        (pooled(task="classify"), "different requests: task embed in the first and classify in the second"),
        (pooled(about=(11, 12)), "different prompts, of 3 and 2 tokens"),
        (receipt(), "the first is of what a model pooled and the second of a completion"),
    ],
)
def test_receipts_of_other_requests_are_not_compared(other: Any, line: str) -> None:
    with pytest.raises(NoTestError, match=line):
        compare(pooled(), other)


def test_pairs_are_compared_also_where_one_is_private() -> None:
    assert compare(of_pair(), of_pair(private=True))
    other = pooled((0.5,), about=("which?", "that one"), task="score")
    with pytest.raises(NoTestError, match="receipts of different pairs of texts"):
        compare(of_pair(), other)


def test_a_private_pair_needs_its_texts() -> None:
    kept = of_pair(private=True).pair
    with pytest.raises(NoTestError, match="give both, query and prompt"):
        kept.both()
    with pytest.raises(NoTestError, match="are not the receipt's"):
        kept.both(PAIR[::-1])
    assert kept.both(PAIR) == PAIR


def test_the_digest_of_a_model_is_also_of_what_is_behind_it(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    plain = model_files.model_at(tmp_path, "m")
    assert plain.files.keys() == {"model.safetensors"}
    (dense := tmp_path / "2_Dense").mkdir()
    (dense / "config.json").write_text("{}")
    (dense / "model.safetensors").write_bytes(b"behind")
    assert model_files.model_at(tmp_path, "m") == plain  # no list names the folder
    listed = [{"idx": 0, "path": "", "type": "Transformer"}, {"idx": 1, "path": "2_Dense", "type": "Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    names = {"model.safetensors", "modules.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
    one = model_files.model_at(tmp_path, "m")
    assert one.files.keys() == names
    (dense / "model.safetensors").write_bytes(b"Behind")
    assert model_files.model_at(tmp_path, "m").digest != one.digest


def embedded(values: tuple[float, ...] = VALUES, tokens: int = 3) -> Page:
    raw = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
    return Page({"data": [{"embedding": raw}], "usage": {"prompt_tokens": tokens}})


PAGES = {
    "models": MODELS,
    "batch_invariant": Page(asdict(CPU)),
    "tokenize": Page({"tokens": list(PROMPT)}),
    "embeddings": embedded(),
    "classify": Page({"data": [{"probs": [0.25, 0.75]}], "usage": {"prompt_tokens": 3}}),
    "score": Page({"data": [{"score": 0.5}]}),
}


def run(capsys: pytest.CaptureFixture[str], action: str, path: Path, *arguments: object, **pages: Page) -> Any:
    with fake_server(**PAGES | pages) as url:
        return ended(capsys, "receipt", action, path, "--base-url", url, *arguments)


def verify(capsys: pytest.CaptureFixture[str], path: Path, *arguments: object, **pages: Page) -> Any:
    return run(capsys, "verify", path, "--concurrent", "0", *arguments, **pages)


@pytest.mark.parametrize(
    ("task", "extent"),
    [("embed", "3 values of an embedding"), ("classify", "2 values of classes"), ("score", "1 value of a score")],
)
def test_the_command_makes_and_verifies_what_a_server_gives(
    task: str, extent: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, page = tmp_path / "receipt.json", tmp_path / "page.html"
    said = run(capsys, "make", path, "--task", task, "--prompt", "a text", "--json", tmp_path / "made.json")
    assert said.status == 0, said.err
    assert f"the bits of {extent} of fake, sha256 {load(path).sha256}" in said.out
    assert json.loads((tmp_path / "made.json").read_text())["values"] == len(load(path).pooled.values)
    said = verify(capsys, path, "--html", page)
    assert (said.status, said.out.splitlines()[-1]) == (0, f"equal: the bits of {extent}, computed again alone")
    assert "Every value has the same bits." in page.read_text()
    assert ended(capsys, "receipt", "compare", path, path).status == 0


def test_another_bit_of_a_server_is_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pooled().save(tmp_path / "kept.json")
    said = verify(capsys, tmp_path / "kept.json", embeddings=embedded((0.25, NEXT, 3.0)))
    assert said.status == 1
    assert "differs: value 1 is 0xbfc00001" in said.out
    said = verify(capsys, tmp_path / "kept.json", embeddings=embedded(VALUES[:2]))
    assert (said.status, said.out.splitlines()[-1]) == (1, "differs: it has 2 values instead of 3")


@pytest.mark.parametrize(("at_once", "status"), [(1, Status.NO_TEST), (2, Status.REPRODUCIBLE)])
def test_texts_that_only_wait_for_each_other_are_no_test(
    at_once: int, status: Status, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pooled().save(tmp_path / "kept.json")
    with engine(at_once, embedding=embedded().body) as url:
        said = ended(capsys, "receipt", "verify", tmp_path / "kept.json", "--base-url", url, "--concurrent", "4")
    assert said.status == status
    if status == Status.NO_TEST:
        assert "not a test: none of the 4 concurrent requests ran at the same time" in said.lines[-1]
    else:
        assert said.out.splitlines()[-1].startswith(
            "equal: the bits of 3 values of an embedding, computed again 8 times"
        )


@pytest.mark.parametrize(
    ("pages", "line"),
    [
        ({"tokenize": Page("nothing", 404)}, "/tokenize gives no answer"),
        ({"tokenize": Page({"tokens": ["a"]})}, "/tokenize tells no token ids"),
        ({"embeddings": Page("nothing", 404)}, "the model may have another --task, of generate, embed"),
        ({"embeddings": Page({"data": []})}, "is no answer"),
        ({"embeddings": embedded(tokens=2)}, "the server took 2 tokens for a prompt of 3"),
    ],
)
def test_a_server_that_gives_no_such_answer_is_one_line_and_status_2(
    pages: dict[str, Page], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = run(capsys, "make", tmp_path / "new.json", "--task", "embed", "--prompt", "a text", **pages)
    assert said.status == 2
    assert line in said.lines[-1]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--task", "embed", "--seed", "3", "--trace"), "--task embed goes without --seed, --trace"),
        (("--task", "embed", "--image", "cat.png"), "--task embed goes without --image"),
        (("--dimensions", "3"), "--dimensions: for a model that pools, with --task embed, score, classify"),
        (("--task", "score", "--dimensions", "3"), "--dimensions is of an embedding"),
        (("--task", "embed", "--query", "which?"), "--query goes with --task score"),
        (("--query", "which?"), "--query: for a model that pools"),
    ],
)
def test_options_of_another_task_are_refused(
    arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = ended(capsys, "receipt", "make", tmp_path / "new.json", "--base-url", "http://localhost:1", *arguments)
    assert said.status == 2
    assert line in said.err


@pytest.mark.parametrize(
    ("made", "arguments", "line"),
    [
        (pooled(), ("--without-engine",), "the definition is of models that generate"),
        (pooled(), ("--query", "which?"), "--query is of a score"),
        (receipt(), ("--query", "which?"), "--query is of a score, and the receipt of a completion"),
        (pooled(private=True), (), "the receipt is private"),
        (of_pair(private=True), (), "give both, query and prompt"),
    ],
)
def test_a_receipt_of_another_kind_is_not_computed_so(
    made: Any, arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made.save(tmp_path / "kept.json")
    said = ended(capsys, "receipt", "verify", tmp_path / "kept.json", "--model", "x/y", *arguments)
    assert said.status == 2
    assert line in said.err


def test_a_private_receipt_is_verified_with_its_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pooled(private=True).save(tmp_path / "prompt.json")
    of_pair(private=True).save(tmp_path / "pair.json")
    assert verify(capsys, tmp_path / "prompt.json", "--prompt", "a text").status == 0
    assert verify(capsys, tmp_path / "pair.json", "--query", PAIR[0], "--prompt", PAIR[1]).status == 0
    said = verify(capsys, tmp_path / "pair.json", "--query", PAIR[1], "--prompt", PAIR[0])
    assert said.status == 2
    assert "are not the receipt's" in said.lines[-1]
    other = Page({"tokens": [1, 2]})
    assert verify(capsys, tmp_path / "prompt.json", "--prompt", "another", tokenize=other).status == 2
