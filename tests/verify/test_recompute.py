"""A receipt of exact arithmetic is computed again without an engine, and a difference is found in its operation."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.known_model import save_known_model
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.exact import FORMAT, definition, known_answers
from vllm_batch_invariant.provenance import EXACT, Environment
from vllm_batch_invariant.verify.outcome import NoTestError
from vllm_batch_invariant.verify.receipt.comparison import Verdict
from vllm_batch_invariant.verify.receipt.model_files import model_at
from vllm_batch_invariant.verify.receipt.recompute import LOWEST_TEMPERATURE, recompute
from vllm_batch_invariant.verify.receipt.record import Completion, Prompt, Receipt, Sampling, TracedStep

PROMPT = (5, 77, 1234, 9, 8, 7, 6, 5, 4, 3)
SAMPLINGS = {
    "greedy": Sampling(max_tokens=4, logprobs=3),
    "seeded": Sampling(max_tokens=4, logprobs=2, temperature=0.8, seed=11, top_p=0.9, top_k=40),
    "penalties and min-p": Sampling(
        max_tokens=4, logprobs=0, temperature=1.2, seed=-3, min_p=0.001, repetition_penalty=1.3, frequency_penalty=0.5,
        presence_penalty=-0.2,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_known_model(tmp_path_factory.mktemp("known"))


def receipt_of(folder: Path, sampling: Sampling, prompt: tuple[int, ...] = PROMPT) -> Receipt:
    """Of tokens that are drawn one after the other, as an engine does, with the trace of a prefill and of decode."""
    model, tokens, positions, steps = known_answers.model(), [*prompt], [], []
    for position in range(sampling.max_tokens):
        digests = {}
        first = 0 if position == 0 else len(tokens) - 1

        def seen(layer: str, made: np.ndarray, digests: dict = digests, first: int = first) -> None:
            bits = definition.to_bits(made[first:]).astype("<u2")
            digests[layer] = hashlib.sha256(bits.tobytes()).hexdigest()[:16]

        [row] = model.logits(tokens, slice(len(tokens) - 1, None), seen)
        logprobs = definition.log_softmax(row)
        counts = np.bincount(tokens[len(prompt) :], minlength=len(row))
        changed = definition.penalised(
            row, np.isin(np.arange(len(row)), prompt), counts,
            sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty,
        )  # fmt: skip
        chosen = sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed or 0, position, sampling.min_p
        token = definition.draw(changed, *chosen)
        listed = {*np.argsort(-logprobs, kind="stable")[: sampling.logprobs].tolist(), token}
        positions.append((token, float(logprobs[token]), [(one, float(logprobs[one])) for one in listed]))
        steps.append(TracedStep(first, len(tokens) - first, digests))
        tokens.append(token)
    engine = {"logprobs_mode": "raw_logprobs"}
    environment = Environment(True, {"vllm": "1"}, {"type": "cuda"}, engine, {EXACT: {"format": FORMAT}})
    completion = Completion.of(positions, "length")
    made = Receipt(model_at(folder, "known"), Prompt.of(prompt), sampling, completion, environment, tuple(steps))
    return Receipt.from_json(made.to_json())


@pytest.fixture(scope="module")
def greedy(folder: Path) -> Receipt:
    return receipt_of(folder, SAMPLINGS["greedy"])


@pytest.mark.parametrize("how", SAMPLINGS)
def test_a_receipt_is_equal_whatever_its_sampling(folder: Path, how: str) -> None:
    verdict = recompute(receipt_of(folder, SAMPLINGS[how]), str(folder))
    assert verdict, verdict
    assert verdict.promised
    assert "outputs of layers" in verdict.compared


def test_a_changed_bit_and_a_changed_token_are_found(folder: Path, greedy: Receipt) -> None:
    completion = greedy.completion
    bits = (*completion.logprobs[:2], f"{int(completion.logprobs[2], 16) ^ 1:08x}", *completion.logprobs[3:])
    ids = (*completion.token_ids[:1], 7, *completion.token_ids[2:])
    for changed, position in ((replace(completion, logprobs=bits), 2), (replace(completion, token_ids=ids), 1)):
        assert recompute(replace(greedy, completion=changed, trace=()), str(folder)).difference.position == position


def test_the_first_operation_that_differs_is_named(folder: Path, greedy: Receipt) -> None:
    step = greedy.trace[2]
    layers = ("model.layers.1.mlp.act_fn", "model.layers.1.mlp.down_proj")
    digests = step.digests | dict.fromkeys(layers, "0" * 16)
    changed = replace(greedy, trace=(*greedy.trace[:2], replace(step, digests=digests), *greedy.trace[3:]))
    verdict = recompute(changed, str(folder))
    assert not verdict
    assert verdict.difference.text.endswith(f"first operation that differs is {layers[0]} at position {step.position}")


def test_a_receipt_without_a_trace_has_the_hash_that_it_had_before_there_were_any(greedy: Receipt) -> None:
    plain = replace(greedy, trace=())
    assert "trace" not in plain.to_json()
    assert Receipt.from_json(plain.to_json()) == plain
    assert plain.sha256 != greedy.sha256


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"environment": {"reductions": {}}}, "not in another arithmetic"),
        ({"environment": {"reductions": {EXACT: {"format": "X17"}}}}, "not in X17"),
        ({"environment": {"engine": {"logprobs_mode": "processed_logprobs"}}}, "only raw logprobs"),
        ({"sampling": {"min_tokens": 2}}, "min_tokens is not known"),
        (
            {"environment": {"engine": {"hf_overrides": '{"rope_theta": 5}'}}},
            "with hf_overrides {.rope_theta",
        ),
        ({"environment": {"reductions": {EXACT: {}}}}, "not in another arithmetic"),
        ({"completion": {"token_ids": (3, 5, 7, 4096)}}, "the token 4096, and the model a vocabulary of 4096"),
    ],
)
def test_what_is_not_computed_here_refuses(folder: Path, greedy: Receipt, changes: dict, said: str) -> None:
    [(part, fields)] = changes.items()
    with pytest.raises(NoTestError, match=said):
        recompute(replace(greedy, **{part: replace(getattr(greedy, part), **fields)}), str(folder))


def test_a_trace_of_positions_that_nobody_computes_refuses(folder: Path, greedy: Receipt) -> None:
    digests = {"model.embed_tokens": hashlib.sha256(b"").hexdigest()[:16]}
    for position in (len(PROMPT) + 3, 10**30):
        with pytest.raises(NoTestError, match="trace has other positions than the 13"):
            recompute(replace(greedy, trace=(TracedStep(position, 1, digests),)), str(folder))


def test_what_ended_a_completion_is_computed_or_said_to_be_the_receipts_word(folder: Path, greedy: Receipt) -> None:
    ids = greedy.completion.token_ids
    assert "what the receipt says" not in recompute(greedy, str(folder)).compared

    def ended(tokens: int, reason: str, **sampling: Any) -> Verdict:
        first = {name: getattr(greedy.completion, name)[:tokens] for name in ("token_ids", "logprobs", "top_logprobs")}
        asked = replace(greedy.sampling, **sampling)
        cut = replace(greedy, completion=Completion(**first, finish_reason=reason), sampling=asked, trace=())
        return recompute(cut, str(folder))

    for reason in ("length", "stop"):
        verdict = ended(2, reason)
        assert verdict
        assert verdict.compared.endswith(f"; that it ended there ({reason}) is what the receipt says")
    assert ended(2, "stop", stop_token_ids=(ids[1],)).compared.endswith(f"arithmetic {FORMAT}")
    assert "ended by 'stop' instead of 'length'" in ended(2, "length", stop_token_ids=(ids[1],)).difference.text
    assert "token 2 is the end (stop) instead of" in ended(4, "length", stop_token_ids=(ids[1],)).difference.text
    assert "ended by 'length' instead of 'abort'" in ended(4, "abort").difference.text


def test_a_temperature_below_vllms_lowest_is_that(folder: Path, greedy: Receipt) -> None:
    pytest.importorskip("vllm")
    from vllm import SamplingParams

    assert SamplingParams(temperature=1e-9, seed=1).temperature == LOWEST_TEMPERATURE
    assert SamplingParams(temperature=LOWEST_TEMPERATURE, seed=1).temperature == LOWEST_TEMPERATURE
    # of two logits one apart in bf16, which a tenth of the temperature would not let a seed exchange
    drawn = receipt_of(folder, Sampling(max_tokens=1, temperature=LOWEST_TEMPERATURE, seed=0), prompt=(2217,))
    assert drawn.completion.token_ids != receipt_of(folder, Sampling(max_tokens=1), (2217,)).completion.token_ids
    for temperature in (0.001, 1e-9):
        assert recompute(replace(drawn, sampling=replace(drawn.sampling, temperature=temperature)), str(folder))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda config: config.update(num_hidden_layers=3), "do not fit together: 'model.layers.2"),
        (lambda config: config.update(num_attention_heads=3), "do not fit together: "),
        (lambda config: config.pop("num_hidden_layers"), "do not fit together: 'num_hidden_layers'"),
        (None, "config.json cannot be read"),
    ],
)
def test_files_that_do_not_fit_together_refuse(
    change: Callable[[dict], Any] | None, said: str, folder: Path, greedy: Receipt, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    if change:
        change(config)
    (tmp_path / "config.json").write_text(json.dumps(config) if change else "[1]")
    with pytest.raises(NoTestError, match=said):
        recompute(greedy, str(tmp_path))


def test_a_quantised_checkpoint_refuses(folder: Path, greedy: Receipt, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotCovered, match="does not cover a quantised checkpoint"):
        recompute(greedy, str(tmp_path))


def test_an_output_head_in_another_dtype_refuses(folder: Path, greedy: Receipt, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"head_dtype": "float32"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(NoTestError, match="an output head in float32 is not computed again"):
        recompute(greedy, str(tmp_path / "model"))


def test_missing_files_and_prompts_refuse(greedy: Receipt, folder: Path) -> None:
    with pytest.raises(NoTestError, match="are not on this machine"):
        recompute(greedy, "nobody/nothing")
    private = replace(greedy, prompt=Prompt.of(PROMPT, private=True))
    with pytest.raises(NoTestError, match="give the prompt"):
        recompute(private, str(folder))
    assert recompute(private, str(folder), prompt_token_ids=PROMPT)


@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_a_file_of_weights_that_was_cut_off_is_named(folder: Path, greedy: Receipt, tmp_path: Path, left: int) -> None:
    [file] = folder.glob("*.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / file.name).write_bytes(file.read_bytes()[:left])
    with pytest.raises(NoTestError, match=f"^{file.name} is no whole file of safetensors$"):
        recompute(greedy, str(tmp_path))
