"""The witness of a server and its canary, with an engine whose tokens follow its weights."""

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from vllm_batch_invariant import envs
from vllm_batch_invariant.integration.engine import witness
from vllm_batch_invariant.integration.engine.witness import CANARIES, Witness

pytest.importorskip("vllm")


class Engine:
    """vLLM's client of engines, each of which answers by its weights.

    Attributes:
        weights: of each engine.
        flipped: the place of a token whose logprob has another bit.
    """

    def __init__(self, *weights: float, vocabulary: int = 1000, context: int = 4096) -> None:
        self.weights, self.flipped, self.asked, self.asleep = list(weights), -1, 0, False
        self.model_config = SimpleNamespace(
            runner_type="generate",
            max_model_len=context,
            max_logprobs=20,
            served_model_name=f"of engines {weights}",
            get_vocab_size=lambda: vocabulary,
        )
        parallel = SimpleNamespace(data_parallel_size=len(weights), data_parallel_size_local=1)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)

    async def generate(self, prompt: Any, params: Any, name: str, data_parallel_rank: int | None) -> AsyncIterator[Any]:
        await asyncio.sleep(0)
        self.asked += 1
        weight = self.weights[data_parallel_rank or 0]
        tokens = [(prompt["prompt_token_ids"][0] + place) % 1000 for place in range(params.max_tokens)]
        numbers = [struct.unpack("f", struct.pack("f", -weight - place / 7))[0] for place in range(len(tokens))]
        if 0 <= self.flipped < len(tokens):
            [bits] = struct.unpack("I", struct.pack("f", numbers[self.flipped]))
            [numbers[self.flipped]] = struct.unpack("f", struct.pack("I", bits ^ 1))
        listed = [{token: SimpleNamespace(logprob=number)} for token, number in zip(tokens, numbers, strict=True)]
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=listed)])

    async def is_sleeping(self) -> bool:
        return self.asleep

    async def is_paused(self) -> bool:
        return False


class Server:
    """What a witness knows of a server."""

    def __init__(self, engine: Engine) -> None:
        self.fingerprint, self.shown = "f", [("", "")]
        self.witness = Witness(engine, lambda: self.fingerprint, lambda *labels: self.shown.append(labels))


def run(session: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(session())


def made(engine: Engine) -> str:
    async def session() -> str:
        server = Server(engine)
        await server.witness.make()
        return str(server.witness)

    return run(session)


def counted(engine: Engine) -> tuple[float | None, float | None]:
    labels = {"model_name": engine.model_config.served_model_name}
    runs, differences = (
        REGISTRY.get_sample_value(f"{name}_total", labels) for name in (witness.RUNS, witness.DIFFERENCES)
    )
    return runs, differences


def test_equal_engines_have_one_witness_and_one_bit_makes_another() -> None:
    first, flipped = made(Engine(1.5)), Engine(1.5)
    assert first == made(Engine(1.5)) == made(Engine(1.5, 1.5))
    assert first.startswith(f"{witness.VERSION}-")
    flipped.flipped = 63
    assert made(flipped) not in ("", first)
    assert made(Engine(2.5)) not in ("", first)


def test_the_witness_does_not_follow_the_context() -> None:
    assert made(Engine(1.5, context=witness._CONTEXT)) == made(Engine(1.5, context=10**6)) != ""


def test_engines_of_one_server_that_differ_have_none(log: pytest.LogCaptureFixture) -> None:
    assert made(Engine(1.5, 2.5)) == ""
    assert "the engines of this server differ: canary 'greedy' at token 0: the logprob of" in log.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"runner_type": "pooling"}, "the model generates nothing"),
        ({"is_encoder_decoder": True}, "the model answers about audio"),
        ({"max_model_len": 100}, "--max-model-len is 100"),
        ({"max_logprobs": 0}, "--max-logprobs is 0"),
    ],
)
def test_a_server_that_cannot_compute_it_says_why(
    change: dict[str, Any], said: str, log: pytest.LogCaptureFixture
) -> None:
    engine = Engine(1.5)
    vars(engine.model_config).update(change)
    assert (made(engine), engine.asked) == ("", 0)
    assert f"No witness: {said}" in log.text.replace("the canaries need a context of 320 tokens, and ", "").replace(
        "the canaries list 5 logprobs, and ", ""
    )


def test_a_server_that_cannot_compute_it_says_why_once_for_each_change_of_its_weights(
    log: pytest.LogCaptureFixture,
) -> None:
    engine = Engine(1.5)
    engine.model_config.max_model_len = 100

    async def run() -> None:
        one = witness.Witness(engine, lambda: "fingerprint", lambda fingerprint, shown: None)
        one.keep(None)
        for _ in range(2):
            one.follow("another")
            await asyncio.sleep(0.05)
        one._task.cancel()

    asyncio.run(run())
    assert log.text.count("No witness") == 2


def test_an_engine_that_fails_leaves_a_server_without_one(log: pytest.LogCaptureFixture) -> None:
    engine = Engine(1.5)
    engine.weights = []
    assert made(engine) == ""
    assert "the engine does not compute the canaries" in log.text


def test_canaries_fit_their_context_and_leave_special_tokens_alone() -> None:
    for canary in CANARIES:
        assert canary.prompt + canary.sampling["max_tokens"] <= witness._CONTEXT
        assert all(250 <= token < 750 for token in canary.token_ids(1000))
        assert canary.sampling["temperature"] == 0 or "seed" in canary.sampling
    assert max(canary.sampling["max_tokens"] for canary in CANARIES) == 64


def test_it_follows_the_weights() -> None:
    async def session() -> list[tuple[str, str]]:
        engine = Engine(1.5)
        server = Server(engine)
        await server.witness.make()
        server.witness.keep(None)
        engine.weights, server.fingerprint = [2.5], "g"
        server.witness.follow("g")
        assert str(server.witness) == ""
        while not str(server.witness):
            await asyncio.sleep(0.001)
        return server.shown[1:]

    assert run(session) == [("f", made(Engine(1.5))), ("g", ""), ("g", made(Engine(2.5)))]


def test_weights_that_are_replaced_meanwhile_are_not_taken_for_the_old_ones() -> None:
    async def session() -> str:
        engine = Engine(1.5)
        server = Server(engine)
        original = engine.generate

        async def generate(*args: Any, **named: Any) -> AsyncIterator[Any]:
            engine.weights, server.fingerprint = [2.5], "g"
            async for output in original(*args, **named):
                yield output

        engine.generate = generate  # type: ignore[method-assign]
        await server.witness.make()
        assert server.shown[-1][0] == "g"
        assert engine.asked == 2 * len(CANARIES)
        return str(server.witness)

    assert run(session) == made(Engine(2.5))


def test_the_canary_counts_every_engine_that_has_other_bits(log: pytest.LogCaptureFixture) -> None:
    engine = Engine(3.5, 3.5)

    async def session() -> None:
        server = Server(engine)
        await server.witness.make()
        await server.witness.check()
        assert counted(engine) == (2, 0)
        engine.flipped = 40
        await server.witness.check()
        assert counted(engine) == (4, 2)

    run(session)
    assert "The canary has other bits than at the start: canary 'greedy' at token 40: the logprob of" in log.text


def test_the_canary_waits_while_the_engine_sleeps_and_forgets_what_new_weights_gave() -> None:
    engine = Engine(4.5)

    async def session() -> None:
        server = Server(engine)
        await server.witness.make()
        engine.asleep = True
        await server.witness.check()
        engine.asleep, engine.weights = False, [5.5]
        original = engine.generate

        async def generate(*args: Any, **named: Any) -> AsyncIterator[Any]:
            server.fingerprint = "g"
            async for output in original(*args, **named):
                yield output

        engine.generate = generate  # type: ignore[method-assign]
        await server.witness.check()

    run(session)
    assert counted(engine) == (None, None)


def test_the_canary_runs_as_often_as_it_was_asked_for() -> None:
    engine = Engine(6.5)

    async def session() -> None:
        server = Server(engine)
        await server.witness.make()
        server.witness.keep(0.0001)
        while (counted(engine)[0] or 0) < 3:
            await asyncio.sleep(0.001)

    run(session)
    assert counted(engine)[1] == 0


@pytest.mark.parametrize(("value", "minutes"), [(None, None), ("none", None), ("10", 10.0), ("0.5", 0.5)])
def test_the_setting_is_minutes(value: str | None, minutes: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(envs.CANARY.name, raising=False)
    if value is not None:
        monkeypatch.setenv(envs.CANARY.name, value)
    assert witness.minutes() == minutes


@pytest.mark.parametrize("value", ["0", "0.0", "-1", "often"])
def test_another_value_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.CANARY.name, value)
    with pytest.raises(envs.BadSetting, match="a number of minutes"):
        witness.minutes()
