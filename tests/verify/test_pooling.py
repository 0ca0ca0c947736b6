"""Models that pool: what commands ask of them, how answers are compared, and what is refused. No engine has a model."""

import base64
import hashlib
import json
import math
import os
import random
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.server import MODELS, answering
from tests.verify.commands import ended
from tests.verify.fake_fuzz import FakeFuzzedEngine
from vllm_batch_invariant.cli import main
from vllm_batch_invariant.envs import FLAG
from vllm_batch_invariant.verify.answers import GENERATE, Answer, RequestSpec, answer_of, compare_answers
from vllm_batch_invariant.verify.bisect import command as bisect_command
from vllm_batch_invariant.verify.fuzz import command as fuzz_command
from vllm_batch_invariant.verify.fuzz.compare import difference
from vllm_batch_invariant.verify.fuzz.options import Place, attention_of_pooling, pools_whole
from vllm_batch_invariant.verify.fuzz.schedule import Settings, draw_settings, draw_targets
from vllm_batch_invariant.verify.harness import pooling, worker
from vllm_batch_invariant.verify.harness.engine import context_of
from vllm_batch_invariant.verify.harness.load import Kind, plan_of
from vllm_batch_invariant.verify.harness.metrics import BatchLog, Reading
from vllm_batch_invariant.verify.harness.requests import Accepts
from vllm_batch_invariant.verify.outcome import NoTestError, Status

ROOT = Path(__file__).parents[2]
ABOUT = {"tasks": ["embed", "token_embed"], "attention": "decoder", "by": "LAST", "size": 8, "dimensions": [2, 8]}
"""An engine that embeds."""


def vector(*values: float) -> Answer:
    return Answer.of_values(struct.pack(f"<{len(values)}f", *values), "float32", [len(values)])


@pytest.mark.parametrize(
    ("dtype", "raw", "values"),
    [
        ("float32", struct.pack("<2f", 0.5, -0.0), (0.5, -0.0)),
        ("float64", struct.pack("<2d", 0.1, 2.0), (0.1, 2.0)),
        ("float16", struct.pack("<2e", 0.5, -2.0), (0.5, -2.0)),
        ("bfloat16", struct.pack("<2f", 1.5, -3.0)[2:4] + struct.pack("<2f", 1.5, -3.0)[6:8], (1.5, -3.0)),
    ],
)
def test_an_answer_has_each_value_of_a_vector_with_its_bits(dtype: str, raw: bytes, values: tuple[float, ...]) -> None:
    answer = answer_of({"raw": raw.hex(), "dtype": dtype, "shape": [2]})
    assert [answer.values(place) for place in range(3)] == [(values[0],), (values[1],), ()]
    assert [math.copysign(1, one) for one in values] == [math.copysign(1, *answer.values(place)) for place in (0, 1)]
    assert b"".join(answer.bits) == raw


def test_a_vector_differs_in_one_bit_in_a_zero_s_sign_in_its_shape_and_in_its_dtype() -> None:
    one, raw = vector(1.0, 0.0, 2.0), struct.pack("<4f", 1, 2, 3, 4)
    others = [vector(1.0, -0.0, 2.0), vector(1.0, 0.0), vector(1.0, 0.0, 2.0000002384185791)]
    found = [compare_answers([one, other]) for other in others]
    assert [one.earliest_logprob and one.earliest_logprob.position for one in found] == [1, 2, 2]
    assert [one.identical for one in found] == [False] * 3
    assert str(found[2].earliest_logprob) == "2.00000024 instead of 2"
    flat, square = (Answer.of_values(raw, "float32", shape) for shape in ([4], [2, 2]))
    halves = Answer.of_values(raw, "float16", [8])
    assert [compare_answers([flat, other]).identical for other in (flat, square, halves)] == [True, False, False]
    assert (square.unit, len(square.bits)) == ("row", 2)
    transposed = Answer.of_values(struct.pack("<4f", 1, 3, 2, 4), "float32", [2, 2])
    assert str(compare_answers([square, transposed]).earliest_logprob) == "value 1: 3 instead of value 1: 2"
    wide, long = (Answer.of_values(bytes(32), "float32", shape) for shape in ([4, 2], [2, 4]))
    assert compare_answers([wide, long]).logprob_sequences == 2


def test_batches_of_a_model_that_has_answered_are_counted_by_answers_a_step() -> None:
    """Nobody runs at any of the readings."""
    readings = [
        Reading(0, {8.0: steps}, when=float(steps), answered=count)
        for steps, count in ((4, 9), (6, 11), (9, 30), (9, 30))
    ]
    counted, seen = BatchLog(between_readings=True), BatchLog()
    for reading in readings:
        counted.add(reading)
        seen.add(reading)
    assert (counted.batches().running, seen.batches().running) == ((1, 7), ())


@pytest.mark.parametrize("task", pooling.TASKS)
def test_the_load_of_a_task_varies_lengths_parameters_and_texts_a_request(task: str) -> None:
    plan = plan_of(RequestSpec(task=task), 400, 32, 512)
    others = [arrival for arrival in plan if arrival.kind is not Kind.SAMPLE]
    assert len(plan) - len(others) == 399
    assert {arrival.kind for arrival in others} == set(Kind) - {Kind.SAMPLE}
    assert {name for arrival in others for name in arrival.params} == set(pooling.TASKS[task].takes)
    assert {True, False} <= {arrival.params.get("use_activation") for arrival in others}
    assert len({len(arrival.prompt) for arrival in others}) > 3
    assert {len(arrival.beside) for arrival in others} == {0, 3, 15}
    assert max(len(text) for arrival in others for text in (arrival.prompt, *arrival.beside)) <= 512 - 64
    assert not any(arrival.streamed for arrival in plan)


class FakePooling:
    """A server of a model that pools: what it gives follows the text and the parameters.

    Args:
        wrong: the last bit of a score or of an embedding's last value follows the number of requests at a time.
        whole: it refuses a part of an embedding.
    """

    def __init__(self, wrong: bool = False, whole: bool = False) -> None:
        self.wrong, self.whole, self.asked = wrong, whole, list[dict[str, Any]]()
        self._lock, self._now, self._steps, self._answered = threading.Lock(), 0, 0, 0

    def metrics(self) -> str:
        return (
            'vllm:num_requests_running{engine="0"} 0.0\n'
            f'vllm:iteration_tokens_total_bucket{{engine="0",le="+Inf"}} {self._steps}\n'
            f'vllm:request_success_total{{engine="0",finished_reason="stop"}} {self._answered}\n'
            'vllm:request_success_total{engine="0",finished_reason="abort"} 1000000\n'
        )

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        texts = body.get("input", body.get("text_2"))
        texts = texts if isinstance(texts, list) else [texts]
        if self.whole and "dimensions" in body:
            return 400, {"error": {"message": "no Matryoshka embeddings here", "type": "BadRequestError", "code": 400}}
        with self._lock:
            self.asked.append(body | {"path": path})
            self._now += 1
        time.sleep(0.004)
        with self._lock:
            together, self._now = self._now, self._now - 1
            self._steps, self._answered = self._steps + 1, self._answered + len(texts)
        return 200, {"data": [self._of(path, text, body, together) for text in texts]}

    def _of(self, path: str, text: str, body: dict[str, Any], together: int) -> dict[str, Any]:
        chance = random.Random(f"{text} {body.get('use_activation')}")
        values = [chance.uniform(-1, 1) for _ in range(8)][: body.get("dimensions", 8)]
        raw = bytearray(struct.pack(f"<{len(values)}f", *values))
        raw[-4] ^= self.wrong and together > 2
        numbers = list(struct.unpack(f"<{len(values)}f", raw))
        if path == "/v1/embeddings":
            is_base64 = body.get("encoding_format") == "base64"
            return {"embedding": base64.b64encode(raw).decode() if is_base64 else numbers}
        return {"score": numbers[-1]} if path == "/score" else {"probs": numbers}

    @contextmanager
    def serving(self) -> Iterator[str]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                pages = {"/v1/models": MODELS.body, "/metrics": fake.metrics()}
                self._send(200, pages[self.path]) if self.path in pages else self._send(404, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                known = {task.path for task in pooling.TASKS.values()}
                self._send(*fake.answer(self.path, body)) if self.path in known else self._send(404, {"no": "route"})

            def _send(self, status: int, page: Any) -> None:
                data = page.encode() if isinstance(page, str) else json.dumps(page).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain" if isinstance(page, str) else "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with suppress(BrokenPipeError):  # of a request that is aborted
                    self.wfile.write(data)

            def log_message(self, *arguments: object) -> None:
                pass

        with answering(Handler) as url:
            yield url


LOAD = ("--samples", "50", "--concurrency", "12", "--seed", "1")


@pytest.mark.parametrize("task", pooling.TASKS)
def test_equal_vectors_are_status_0_and_what_was_asked_is_told(
    task: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake, report = FakePooling(), tmp_path / "report.json"
    with fake.serving() as url:
        said = ended(capsys, "reproduce", "--task", task, "--base-url", url, *LOAD, "--json", report)
    assert (said.status, said.lines) == (Status.REPRODUCIBLE, []), said.err
    assert "Reproducible. All 50 answers are equal, bit for bit." in said.out
    assert "different vectors" in said.out
    data = json.loads(report.read_text())
    assert data["request"]["task"] == task
    assert not {"max_tokens", "logprobs"} & set(data["request"])
    [result] = data["results"]
    assert (result["comparison"]["logprob_sequences"], result["failed_others"]) == (1, 0)
    assert len(result["samples"]["different"][0]["values"]) == (1 if task == "score" else 8)
    asked = [body for body in fake.asked if body["path"] == pooling.TASKS[task].path]
    assert {name for body in asked for name in body} >= {*pooling.TASKS[task].takes, "model"}
    if task == "embed":
        assert {body.get("dimensions") for body in asked} >= {None, 1, 2, 4, 8}
        assert {"float", "base64"} <= {body.get("encoding_format") for body in asked}


@pytest.mark.parametrize("task", ["embed", "score"])
def test_one_bit_that_follows_the_load_is_status_1_and_named(
    task: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report, page = tmp_path / "report.json", tmp_path / "page.html"
    with FakePooling(wrong=True).serving() as url:
        target = ("reproduce", "--task", task, "--base-url", url)
        said = ended(capsys, *target, *LOAD, "--json", report, "--html", page, "--verbose")
    assert said.status == Status.DIVERGED, said.err
    place = 0 if task == "score" else 7
    assert f"server: at value {place} answer 0 has " in said.out
    assert f"1 of {place + 1} values differ at most" in said.out
    assert "have other values" in said.out
    [result] = json.loads(report.read_text())["results"]
    assert result["comparison"]["logprob_sequences"] == 2
    assert result["samples"]["different"][1]["first_value"] == place
    assert "first value to differ" in page.read_text()


def test_a_part_of_an_embedding_is_asked_only_of_a_model_that_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakePooling(whole=True)
    with fake.serving() as url:
        said = ended(capsys, "reproduce", "--task", "embed", "--base-url", url, *LOAD)
    assert said.status == Status.REPRODUCIBLE, said.err
    assert "failed" not in said.out
    assert not any("dimensions" in body for body in fake.asked)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--task", "embed", "--max-tokens", "3"), "--task embed goes without --max-tokens"),
        (("--dimensions", "3"), "--dimensions: for a model that pools"),
        (("--task", "score", "--dimensions", "3"), "--dimensions is of an embedding"),
        (("--task", "score", "--offline"), "leave out --offline"),
    ],
)
def test_arguments_of_another_task_are_refused(
    arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ended(capsys, "reproduce", "x/y", *arguments)
    assert said.status == Status.NO_TEST
    assert line in said.lines[-1]


@pytest.mark.parametrize("command", [("reproduce",), ("check", "--quick"), ("receipt", "make", "new.json")])
def test_a_server_that_pools_is_refused_in_a_line_with_what_to_do(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with FakePooling().serving() as url:
        said = ended(capsys, *command, "--base-url", url)
    assert said.status == Status.NO_TEST
    assert "--task embed, score" in said.lines[-1]


def test_a_bisection_refuses_a_model_that_pools(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = SimpleNamespace(runner_type="pooling", embedding_size=8, is_matryoshka=False, attn_type="decoder")
    model.pooler_config = SimpleNamespace(seq_pooling_type="LAST")
    engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model), get_supported_tasks=lambda: ("embed",))
    monkeypatch.setattr(bisect_command, "start_quiet_engine", lambda *_: SimpleNamespace(llm_engine=engine))
    monkeypatch.setenv(FLAG, "1")
    said = ended(capsys, "bisect", "x/y")
    assert said.status == Status.NO_TEST
    assert "the model pools (embed) and gives no tokens to bisect: " in said.lines[-1]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(worker, "DRIVER", "tests.verify.fake_driver")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv(FLAG, "1")


@pytest.mark.usefixtures("driver")
def test_a_receipt_of_a_model_that_pools_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "pools")
    said = ended(capsys, "receipt", "make", tmp_path / "new.json", "x/y")
    assert said.status == Status.NO_TEST
    assert "the model pools (embed, token_embed) and gives no completion for a receipt" in said.lines[-1]
    assert not (tmp_path / "new.json").exists()


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("wrong", "status", "untested"),
    [
        ("pools", 0, set()),
        ("pools breaks", 1, set()),
        ("pools never-preempts", 2, {"preemption"}),
        ("pools whole", 0, {"preemption", "prefill in small chunks", "from a warm prefix cache"}),
    ],
)
def test_a_check_of_a_model_that_pools_compares_its_vectors(
    wrong: str,
    status: int,
    untested: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", wrong)
    report, page = tmp_path / "report.json", tmp_path / "page.html"
    said = ended(capsys, "check", "x/y", "--quick", "--json", report, "--html", page)
    assert (said.status, said.lines) == (status, []), said.err
    [run] = json.loads(report.read_text())["runs"]
    cases = {case["name"]: case for guarantee in run["guarantees"] for case in guarantee["cases"]}
    assert not {name for name in cases if "seeded" in name or "logprobs" in name}
    wanted = cases["every task and parameter of pooling with concurrent requests"]
    assert {name for name, case in cases.items() if case["outcome"] == "not tested"} == untested
    if "breaks" in wrong:
        assert {cases["with concurrent requests"]["outcome"], wanted["outcome"]} == {"breaks"}
        assert "value 3" in cases["with concurrent requests"]["difference"]
        assert "value 3" in page.read_text()
    else:
        assert "12 answers of " in wanted["detail"]
        assert "every row and value has the same bits; batches of up to" in wanted["detail"]
        assert "task embed/token_embed" in wanted["detail"]


CONFIGS = {
    "causal": ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, (), ("", False)),
    "that embeds": (
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, ("--convert", "embed"), ("decoder", False)
    ),
    "by the mean": (
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        ("--runner=pooling", "--pooler-config", '{"pooling_type": "MEAN"}'), ("decoder", True),
    ),
    "that classifies": ({"architectures": ["LlamaForSequenceClassification"]}, (), ("decoder", False)),
    "of steps": ({"architectures": ["Qwen2ForProcessRewardModel"]}, (), ("decoder", True)),
    "an encoder": ({"architectures": ["BertModel"], "model_type": "bert"}, (), ("encoder_only", False)),
    "not causal": (
        {"architectures": ["Qwen3Model"]}, ("--hf-overrides", '{"is_causal": false}'), ("encoder_only", False)
    ),
    "GPT-2": ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, (), ("", False)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_and_arguments_tell_how_a_model_pools(name: str, tmp_path: Path) -> None:
    config, arguments, expected = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = attention_of_pooling(str(tmp_path), arguments), pools_whole(str(tmp_path), arguments)
    assert found == expected


def test_the_positions_of_a_roberta_begin_behind_its_padding(tmp_path: Path) -> None:
    config = {"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_of(str(tmp_path), ()) == 512


def drawn(place: Place) -> list[Settings]:
    return [draw_settings(3, number, 512, place) for number in range(12)]


def test_settings_of_models_that_pool_are_such_as_they_have() -> None:
    qwen = {"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 4, "hidden_size": 256}
    qwen |= {"intermediate_size": 512, "num_hidden_layers": 2}
    causal = drawn(Place("cpu", cores=2, model=qwen, pools="decoder"))
    assert {one.pooler for one in causal} == {"own", "MEAN", "CLS"}
    assert all(one.whole == (one.pooler != "own") for one in causal)
    assert {one.prefix_cache for one in causal if not one.whole} == {True, False}
    assert {one.workers for one in causal} == {1, 2}
    encoder = drawn(Place("cpu", cores=2, model=qwen, pools="encoder_only"))
    assert {(one.pooler, one.whole, one.prefix_cache, one.workers) for one in encoder} == {("own", True, False, 1)}
    for one in (*causal, *encoder):
        assert (one.drafts, one.tree, one.stages, one.exact) == (0, 1, 1, False)
        assert not {"reasoning", "embeds", "grammar", "cache"} & set(one.options)
        arguments = one.arguments("m")
        assert ("--no-enable-chunked-prefill" if one.whole else "--enable-chunked-prefill") in arguments
        steps = int(arguments[arguments.index("--max-num-batched-tokens") + 1])
        assert steps >= 512 or not one.whole
    assert {"policy", "updates"} <= {name for one in causal for name in one.options}


def test_targets_of_models_that_pool_have_every_length_up_to_the_limit() -> None:
    targets = draw_targets(0, 46, Accepts(range(16, 100), 100, pooling=ABOUT), 512)
    assert {target.kind for target in targets} == set(pooling.KINDS)
    assert {target.params["task"] for target in targets} == set(pooling.KINDS)
    assert max(len(target.prompt) for target in targets) == 512
    assert min(len(target.prompt) for target in targets) < 5
    assert {target.params.get("use_activation") for target in targets} == {None, True, False}
    assert {target.params.get("dimensions") for target in targets} == {None, 2, 8}


def pooled(*values: float, **changed: Any) -> dict[str, Any]:
    answer = vector(*values)
    one = {"dtype": "float32", "shape": [len(values)], "raw": b"".join(answer.bits).hex()} | changed
    return {"completions": [one], "prompt_logprobs": []}


def test_a_difference_of_vectors_says_what_differs_and_where() -> None:
    assert difference(pooled(1.0, 2.0), pooled(1.0, 2.0)) == ""
    assert difference(pooled(1.0, 2.0), pooled(1.0, 2.5)) == "value 1 of [2]: 2.5 instead of 2"
    assert difference(pooled(1.0, 2.0), pooled(1.0)) == "shape: [1] instead of [2]"
    assert difference(pooled(1.0), pooled(1.0, dtype="bfloat16")) == "dtype: bfloat16 instead of float32"
    many, other = (pooled(shape=[2, 9], rows=rows) for rows in (["a", "b"], ["a", "c"]))
    assert difference(many, other) == "row 1 of 2"


class FakePooledEngine(FakeFuzzedEngine):
    """Gives vectors; a wrong one where a concurrent request asks for no activation."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.info |= {"pooling": ABOUT}
        self._is_wrong = wrong

    def _answer(self, item: dict[str, Any], items: list[dict[str, Any]], wrong: bool) -> dict[str, Any]:
        said = hashlib.sha256(f"{list(item['prompt'])} {sorted(item['params'].items())}".encode()).digest()
        others = [other["params"].get("use_activation") for other in items if other is not item]
        return pooled(*(byte / 256 for byte in said[:7]), 2.0 if self._is_wrong and False in others else 1.0)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_fuzzed_model_that_pools_is_compared_made_small_and_run_again(
    wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def started(*_: Any) -> Iterator[Any]:
        yield FakePooledEngine(wrong)

    monkeypatch.setattr(fuzz_command, "started", started)
    config = {"architectures": ["BertModel"], "model_type": "bert", "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("--fuzz", "1", "--settings", "2", "--schedules", "6", "--found", str(tmp_path))
    said = ended(capsys, "check", tmp_path, *arguments)
    assert said.status == (Status.DIVERGED if wrong else Status.REPRODUCIBLE), said.err
    assert "left out: classify: the model has no such task; token_classify" in said.out
    assert "pooler=own whole" in said.out
    files = [*tmp_path.glob("fuzz-*-company.json")]
    assert bool(files) == wrong
    if wrong:
        assert "value 7 of [8]: 2 instead of 1" in said.out
        assert "bisect" not in said.out
        data = json.loads(files[0].read_text())
        assert len(data["schedule"]["items"]) == 2
        other = next(item for item in data["schedule"]["items"] if not item["target"])
        assert (len(other["prompt"]), other["params"]["use_activation"]) == (1, False)
        assert main(["check", "--replay", str(files[0])]) == Status.DIVERGED


def test_the_task_of_a_request_is_one_of_the_table() -> None:
    assert GENERATE not in pooling.TASKS
    assert {task.engine for task in pooling.TASKS.values()} <= {*pooling.KINDS, ""}


def test_an_engine_without_a_task_that_is_compared_is_refused() -> None:
    with pytest.raises(NoTestError, match="none of the tasks that are compared: embed, classify"):
        pooling.wanted(ABOUT | {"tasks": []})


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--task", "embed", "--case", "found.json"), "--task embed goes without --case"),
        (("--task", "classify", "--max-tokens", "3"), "--task classify goes without --max-tokens"),
        (("--no-activation",), "--no-activation: for a model that pools"),
        (("--task", "classify", "--dimensions", "3"), "--dimensions is of an embedding"),
        (("--task", "score"), "invalid choice: 'score'"),
    ],
)
def test_options_of_another_task_are_refused_of_a_bisection(
    arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ended(capsys, "bisect", "x/y", *arguments)
    assert said.status == Status.NO_TEST
    assert line in said.err


def test_a_bisection_refuses_a_task_that_the_engine_has_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FLAG, "1")
    for about, line in (
        ({}, "the engine generates: --task classify needs"),
        ({"tasks": ["embed"]}, "the model has no task classify: it has embed"),
    ):
        monkeypatch.setattr(bisect_command, "start_quiet_engine", lambda *_: SimpleNamespace())
        monkeypatch.setattr(bisect_command.pooling, "about", lambda _, about=about: about)
        said = ended(capsys, "bisect", "x/y", "--task", "classify")
        assert said.status == Status.NO_TEST
        assert line in said.lines[-1]
