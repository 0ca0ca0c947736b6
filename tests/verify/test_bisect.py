"""What the command says, and how it ends. What it finds in a real engine is in the engine tests."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_batch_invariant.cli import main
from vllm_batch_invariant.compare import bitwise_comparison
from vllm_batch_invariant.verify.bisect import command
from vllm_batch_invariant.verify.bisect.engine import BisectResult, Case, Found, Setting, bisect
from vllm_batch_invariant.verify.bisect.recording import MODULE_OUTPUT, Coverage, Key, OutputDivergence
from vllm_batch_invariant.verify.outcome import NoTestError, Status


def engine(**changed: Any) -> SimpleNamespace:
    """As much of a vLLM engine as is looked at before a run."""
    setting = {"mode": "NONE", "graphs": "NONE", "context": 64, "requests": 8, "speculative": None}
    setting |= changed
    modes = {"mode": setting["mode"], "cudagraph_mode": setting["graphs"]}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(**{name: SimpleNamespace(name=value) for name, value in modes.items()}),
        model_config=SimpleNamespace(max_model_len=setting["context"]),
        scheduler_config=SimpleNamespace(max_num_seqs=setting["requests"]),
        speculative_config=setting["speculative"],
    )
    return SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"mode": "VLLM_COMPILE"}, "runs compiled layers"),
        ({"graphs": "FULL"}, "CUDA graphs"),
        ({"context": 12}, "the prompt has 9 tokens, and with --max-tokens 4 that is more than .* 12"),
        ({"requests": 2}, "--max-num-seqs 3"),
        ({"speculative": object()}, "speculative decoding"),
    ],
)
def test_an_engine_that_cannot_be_tested_is_refused_in_one_line(changed: dict[str, Any], line: str) -> None:
    case = Case(prompt=(1,) * 9, concurrent=((1,) * 5, (2,) * 5), place=1, max_tokens=4)
    with pytest.raises(NoTestError, match=line):
        bisect(engine(**changed), case)


EQUAL = BisectResult(
    found=None,
    coverage=Coverage(32, 0, 5600, {"integers": 160}, {}, {}),
    requests=(17,) * 32,
    first_token=None,
    first_logprob=None,
    answers_recorded=True,
    unrecorded_differ=False,
)


def differing(operation: str = "aten.mm", **changed: Any) -> BisectResult:
    alone = torch.zeros(1, 8)
    concurrent = alone.clone()
    concurrent[0, 5] = -0.0
    found = {
        "divergence": OutputDivergence(
            5, 3, Key("model.layers.3.mlp.down_proj", 0, operation, 0, 0), "float32", (1, 8), (), ()
        ),
        "rank": 0,
        "workers": 1,
        "position": 61,
        "rows": 1,
        "output_token": 17,
        "comparison": bitwise_comparison(concurrent, alone),
        "operands_differ": (),
        "repeats": True,
    }
    coverage = Coverage(32, 1, 5599, {}, {"aten.new_zeros": 12}, {"aten.mv": 3})
    return BisectResult(Found(**found | changed), coverage, (1, *(8,) * 31), None, 18, True, True)


CONTEXT = 1200


@pytest.fixture
def engine_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has the command find these results, one after the other, in an engine that counts letters as tokens."""

    def prepare(*results: Any) -> list[Case]:
        cases, left = [], list(results)

        def found(_: Any, case: Case) -> BisectResult:
            cases.append(case)
            result = left.pop(0)
            if isinstance(result, BaseException):
                raise result
            return result

        model = SimpleNamespace(skip_tokenizer_init=False, max_model_len=CONTEXT, runner_type="generate")
        tokenizer = SimpleNamespace(encode=lambda text: [ord(letter) for letter in text])
        engine = SimpleNamespace(model_config=model, vllm_config=SimpleNamespace(model_config=model))
        llm = SimpleNamespace(llm_engine=engine, get_tokenizer=lambda: tokenizer)
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.setattr(command, "start_quiet_engine", lambda model, arguments: llm)
        monkeypatch.setattr(
            command, "setting_of", lambda llm, model: Setting(model, "0.0", "cpu", "bfloat16", "0", "none")
        )
        monkeypatch.setattr(command, "bisect", found)
        return cases

    return prepare


def test_two_numbers_of_concurrent_requests_are_tried_until_something_differs(
    engine_of: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    cases = engine_of(EQUAL, differing())
    assert (
        main(["bisect", "x/y", "--prompt", "abc", "--concurrent-tokens", "20", "--json", str(report)])
        == Status.DIVERGED
    )
    assert [(len(case.concurrent), case.place) for case in cases] == [(16, 8), (7, 3)]
    assert cases[0].prompt == (97, 98, 99)
    assert {len(prompt) for prompt in cases[0].concurrent} == {20}
    said = capsys.readouterr().out
    for line in (
        "the bits diverge at model.layers.3.mlp.down_proj: aten.mm, step 5 (decode, output token 17, position 61)",
        "1 of 8",
        "[0, 5]: 0.0 (0x00000000) alone, -0.0 (0x80000000) with concurrent requests",
        "float32 [1, 8], the request's part",
        "5599 outputs in 32 steps of 8 requests; 1 step had no other request",
        "12: aten.new_zeros (12)",
        "3: aten.mv (3)",
        "have the same bits in both runs",
        "of output token 18",
        "Layers ran eagerly",
        "a prompt of 3 tokens with 16 concurrent requests: nothing differs: 5600 outputs in 32 steps",
    ):
        assert line in said, said
    data = json.loads(report.read_text())
    assert data["status"] == Status.DIVERGED
    assert [run["found"] is None for run in data["runs"]] == [True, False]
    assert data["runs"][1]["found"]["divergence"]["key"]["operation"] == "aten.mm"
    assert data["runs"][1]["found"]["comparison"]["first"]["bits"] == ["0x80000000", "0x00000000"]


def test_without_a_prompt_several_lengths_are_tried(
    engine_of: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "PROMPT", "Explain in detail why sums vary.")
    cases = engine_of(*[EQUAL] * 6)
    assert main(["bisect", "x/y", "--max-tokens", "9"]) == Status.REPRODUCIBLE
    usual, short, long = "Explain in detail why sums vary.", "Explain in detail why", 1200 - 9
    assert [len(case.prompt) for case in cases] == [
        length for length in (len(usual), len(short), long) for _ in (16, 7)
    ]
    assert "a prompt of 1191 tokens with 7 concurrent requests: nothing differs" in capsys.readouterr().out


def test_nothing_that_differs_is_status_0(engine_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("one\n\nthe other\n")
    cases = engine_of(EQUAL)
    words = ["--prompt", "a", "--prompts", str(prompts), "--place", "9", "--html", str(tmp_path / "page.html")]
    assert main(["bisect", "x/y", *words]) == Status.REPRODUCIBLE
    assert "Nothing differs." in (tmp_path / "page.html").read_text()
    assert [len(prompt) for prompt in cases[0].concurrent] == [3, 9]
    assert cases[0].place == 2
    assert "with 2 concurrent requests: nothing differs" in capsys.readouterr().out


def test_while_it_runs_a_bisection_says_how_many_runs_are_left(engine_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("vllm_batch_invariant.verify.bisect.command.waiting", lambda *_, **__: nullcontext(told.append))
    engine_of(EQUAL, EQUAL, EQUAL)
    assert main(["bisect", "x/y", "--prompt", "a", "--concurrent", "1", "7", "16"]) == Status.REPRODUCIBLE
    assert [line.partition(":")[0] for line in told] == ["1 of 3", "2 of 3", "3 of 3"]


@pytest.mark.parametrize(
    ("result", "line"),
    [
        (
            differing(MODULE_OUTPUT, operands_differ=None),
            "written by an operation of the mode, or by a kernel",
        ),
        (differing(operands_differ=("0.0",)), "0.0 differ already"),
        (differing(repeats=False), "gave other bits when it was repeated"),
        (differing(output_token=0, position=0, rows=62), "step 5 (prefill, positions 0 to 61)"),
    ],
)
def test_what_is_not_certain_is_said(
    engine_of: Any, capsys: pytest.CaptureFixture[str], result: BisectResult, line: str
) -> None:
    engine_of(result)
    assert main(["bisect", "x/y", "--concurrent", "7"]) == Status.DIVERGED
    assert line in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_an_interrupted_run_is_one_line_and_status_130(engine_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    engine_of(KeyboardInterrupt())
    assert main(["bisect", "x/y"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "vllm-batch-invariant bisect: interrupted; nothing was decided"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (NoTestError("the prompt has 9 tokens"), "vllm-batch-invariant bisect: the prompt has 9 tokens"),
        (KeyError("layer"), "vllm-batch-invariant bisect: the run failed: KeyError: 'layer'"),
    ],
)
def test_a_run_that_fails_is_one_line_and_status_2(
    engine_of: Any, capsys: pytest.CaptureFixture[str], error: Exception, line: str
) -> None:
    engine_of(error)
    assert main(["bisect", "x/y"]) == Status.NO_TEST
    said = capsys.readouterr()
    assert (said.out, said.err.splitlines()[-1]) == ("", line)
