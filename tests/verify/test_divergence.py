"""Answers are compared bit for bit, and the report of where they part is right."""

import itertools
import math
import struct

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vllm_batch_invariant.verify.answers import (
    Answer,
    GeneratedToken,
    binned,
    compare_answers,
    first_difference,
    number_of,
    spelled,
)
from vllm_batch_invariant.verify.harness.load import Kind, plan_load, ramp, samples_by_level
from vllm_batch_invariant.verify.harness.metrics import (
    ACCEPTED,
    GENERATED,
    RUNNING,
    STEP_TOKENS,
    BatchLog,
    BatchSizes,
    Reading,
)
from vllm_batch_invariant.verify.outcome import NoTestError


def answer(*steps: GeneratedToken, text: str = "same text") -> Answer:
    return Answer.of(text, steps)


A, B = GeneratedToken("1", -0.5, (("1", -0.5), ("2", -1.25))), GeneratedToken("2", -0.75, (("2", -0.75), ("1", -2.0)))


def test_equal_answers_are_identical():
    found = compare_answers([answer(A, B)] * 5)
    assert found.identical
    assert (found.samples, found.completions, found.logprob_sequences) == (5, 1, 1)
    assert found.earliest_token is None
    assert found.earliest_logprob is None


def test_one_ulp_of_a_logprob_is_a_difference_and_tokens_stay_equal():
    found = compare_answers([answer(A, B), answer(A, GeneratedToken("2", math.nextafter(-0.75, 0), B.top))])
    assert (found.completions, found.logprob_sequences) == (1, 2)
    assert found.logprob_positions == {1: 1}
    assert found.token_positions == {}
    assert not found.identical


def test_one_ulp_of_a_candidate_that_was_not_chosen_is_a_difference():
    other = GeneratedToken("1", -0.5, (("1", -0.5), ("2", math.nextafter(-1.25, 0))))
    assert compare_answers([answer(A), answer(other)]).logprob_sequences == 2


def test_what_is_listed_can_be_read_from_its_bits():
    nan = math.nan
    for one in (
        A,
        GeneratedToken("", -0.0),
        GeneratedToken("\0é", -math.inf, (("\0", nan), ("x", 5e-324)), (1, 1 << 40)),
    ):
        again = GeneratedToken.of_bits(one.bits())
        assert again.bits() == one.bits()
        assert (again.token, again.ranks, len(again.top)) == (one.token, one.ranks, len(one.top))


def test_negative_zero_differs_from_zero():
    assert compare_answers([answer(GeneratedToken("1", 0.0)), answer(GeneratedToken("1", -0.0))]).logprob_sequences == 2


def test_nan_equals_nan_of_the_same_bits_and_no_other():
    nan, other = (struct.unpack(">d", bytes.fromhex(bits))[0] for bits in ("7ff8000000000000", "fff8000000000001"))
    kept = [GeneratedToken("1", number_of(spelled(value))) for value in (nan, nan, other)]
    assert compare_answers([answer(kept[0]), answer(kept[1])]).identical
    assert compare_answers([answer(kept[0]), answer(kept[2])]).logprob_sequences == 2
    assert [number_of(spelled(value)) for value in (-0.5, float("-inf"), 1e-300)] == [-0.5, float("-inf"), 1e-300]


def test_the_order_in_which_candidates_are_listed_is_a_difference_and_so_are_their_ranks():
    assert (
        compare_answers([answer(A), answer(GeneratedToken("1", -0.5, tuple(reversed(A.top))))]).logprob_sequences == 2
    )
    ranked = [GeneratedToken(A.token, A.logprob, A.top, ranks) for ranks in ((1, 2), (1, 3))]
    assert compare_answers([answer(ranked[0]), answer(ranked[1])]).logprob_sequences == 2
    assert compare_answers([answer(ranked[0]), answer(ranked[0])]).identical


def test_the_earliest_divergence_names_position_sample_tokens_and_texts():
    found = compare_answers(
        [
            answer(A, B, A, text="one two three"),
            answer(A, B, B, text="one two four"),
            answer(A, A, A, text="one six"),
        ]
    )
    divergence = found.earliest_token
    assert divergence is not None
    assert (divergence.sample, divergence.position, divergence.expected, divergence.got) == (2, 1, "2", "1")
    assert (divergence.expected_text, divergence.got_text) == ("two three", "six")
    assert found.token_positions == {1: 1, 2: 1}
    assert found.completions == 3


def test_an_answer_that_ends_early_parts_at_its_end():
    found = compare_answers([answer(A, B), answer(A)])
    assert found.earliest_token is not None
    assert (found.earliest_token.position, found.earliest_token.got) == (1, "<end>")


def test_equal_tokens_with_another_text_are_two_completions():
    assert compare_answers([answer(A, text="a"), answer(A, text="b")]).completions == 2


def test_first_difference_of_equal_sequences_is_none():
    assert first_difference("abc", "abc") is None
    assert first_difference("abc", "abd") == 2
    assert first_difference("", "a") == 0


@pytest.mark.parametrize("length", [1, 7, 8, 64, 100])
def test_bins_cover_every_position_once_and_keep_the_count(length: int):
    positions = {0: 3, length - 1: 2} if length > 1 else {0: 5}
    ranges = binned(positions, length)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == length - 1
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(ranges))
    assert sum(count for *_, count in ranges) == 5


def test_a_ramp_climbs_to_its_peak_and_comes_down():
    assert ramp(128) == (1, 2, 3, 5, 7, 16, 45, 64, 128, 64, 45, 16, 7, 5, 3, 2, 1)
    assert ramp(2) == (1, 2, 1)


@pytest.mark.parametrize("samples", [1, 19, 199, 999])
def test_no_sample_is_lost_between_levels(samples: int):
    assert sum(samples_by_level(samples, ramp(128))) == samples


def test_a_plan_depends_on_its_seed_alone_and_has_every_kind_of_request():
    plan = plan_load(1000, 128, 64, 2048, 3)
    assert plan == plan_load(1000, 128, 64, 2048, 3)
    assert plan != plan_load(1000, 128, 64, 2048, 4)
    assert sum(arrival.kind is Kind.SAMPLE for arrival in plan) == 999
    assert {arrival.kind for arrival in plan} == set(Kind)
    assert {arrival.streamed for arrival in plan if arrival.kind is Kind.SAMPLE} == {True, False}


def test_no_prompt_of_the_load_is_longer_than_the_context_even_at_a_token_a_byte():
    for context in (256, 2048, 40960):
        for arrival in plan_load(500, 64, 64, context, 0):
            assert len(arrival.prompt.encode()) + max(arrival.params.get("max_tokens", 0), 64) < context


def test_the_others_of_a_load_differ_in_parameters_as_much_as_in_lengths():
    others = [arrival for arrival in plan_load(1000, 128, 64, 2048, 3) if arrival.kind is not Kind.SAMPLE]
    assert {other.params["logprobs"] for other in others} == {None, 0, 1, 5, 20}
    asked = {name for other in others for name in other.params}
    assert asked >= {"seed", "top_k", "top_p", "min_p", "n", "logit_bias", "bad_words", "min_tokens", "prompt_logprobs"}
    assert asked >= {"structured_outputs", "allowed_token_ids", "stop", "repetition_penalty"}
    assert not any("prompt_logprobs" in other.params for other in others if other.streamed)


@pytest.mark.parametrize(("running", "reason"), [((), "more than 1"), ((1, 1), "more than 1"), ((3, 3), "ran 3")])
def test_a_batch_that_never_varied_is_no_test(running: tuple[int, ...], reason: str):
    with pytest.raises(NoTestError, match=reason):
        BatchSizes(running, ()).require_variation()


def test_a_batch_that_varied_is_a_test():
    BatchSizes((1, 2, 5), ()).require_variation()


def test_steps_are_counted_from_the_first_reading():
    log = BatchLog([Reading(0, {1.0: 4, 8.0: 1}), Reading(5, {1.0: 4, 8.0: 7}), Reading(0, {1.0: 6, 8.0: 7})])
    assert log.batches() == BatchSizes((5,), ((1.0, 2), (8.0, 6)))


@pytest.mark.parametrize(
    ("tokens", "drafted", "together"),
    [(16, 0, 1), (17, 0, 2), (32, 0, 2), (33, 0, 3), (64, 48, 1), (0, 0, 0)],
    ids=["alone", "once together", "two", "more than two", "alone with drafts", "idle"],
)
def test_requests_that_nobody_saw_running_together_are_counted(tokens: int, drafted: int, together: int):
    """By sixteen engine steps between two looks, both at an idle engine."""
    registry = CollectorRegistry()
    Gauge(RUNNING, "requests", registry=registry).set(0)
    steps = Histogram(STEP_TOKENS, "tokens", ["engine"], buckets=(1, 8), registry=registry).labels("0")
    generated, accepted = (Counter(name, "tokens", registry=registry) for name in (GENERATED, ACCEPTED))
    log = BatchLog()
    for count, given, guessed in ((3, 100, 9), (16, tokens, drafted)):
        for held in range(count):
            steps.observe(held)
        generated.inc(given)
        accepted.inc(guessed)
        log.add(Reading.of(registry.collect()))
    assert log.largest_since(0) == together


def test_what_was_seen_running_counts_where_it_is_more():
    log = BatchLog([Reading(9, {1.0: 0}, 0), Reading(1, {1.0: 1}, 1), Reading(3, {1.0: 5}, 5), Reading(1, {1.0: 9}, 9)])
    assert log.largest_since(1) == 3
    assert log.largest_since(3) == 1
