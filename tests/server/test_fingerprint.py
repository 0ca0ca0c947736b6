"""What two real servers say of themselves, and what their answers say of the servers."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import SHAPE, TOOLS
from vllm_batch_invariant.integration.engine.endpoint import METRIC
from vllm_batch_invariant.integration.engine.server import FIELD
from vllm_batch_invariant.verify.demo_model import make_checkpoint
from vllm_batch_invariant.verify.harness.server import Server, serve
from vllm_batch_invariant.version import __version__

pytestmark = pytest.mark.server

KEY = "a key"
FREE = ["--max-num-seqs", "7", "--no-enable-prefix-caching", "--max-model-len", "1024", "--block-size", "32"]
"""Arguments that decide no bits; the port and the key are others, too."""


@dataclass(frozen=True)
class Asked:
    """A server with a client of it."""

    api: openai.OpenAI
    http: httpx.Client
    root: str

    @classmethod
    def of(cls, server: Server, key: str = "none") -> "Asked":
        http = httpx.Client(trust_env=False, timeout=120)
        return cls(openai.OpenAI(base_url=server.base_url, api_key=key, http_client=http), http, server.base_url[:-3])

    @property
    def model(self) -> str:
        return self.api.models.list().data[0].id

    def completion(self) -> tuple[str | None, list[float]]:
        """The fingerprint of an answer, and its logprobs."""
        options = {"max_tokens": 8, "temperature": 0, "logprobs": 1}
        answer = self.api.completions.create(model=self.model, prompt="Call me", **options)
        return answer.system_fingerprint, answer.choices[0].logprobs.token_logprobs

    def fingerprints(self) -> dict[str, str | None]:
        """Of an answer in every form; of a stream that of its last part."""
        model, chat = self.model, [{"role": "user", "content": "Call me"}]
        forms: dict[str, Any] = {
            "completion": self.api.completions.create(model=model, prompt="Call me", max_tokens=3),
            "completion streamed": self.api.completions.create(
                model=model, prompt="Call me", max_tokens=3, stream=True
            ),
            "chat": self.api.chat.completions.create(model=model, messages=chat, max_tokens=3),
            "chat streamed": self.api.chat.completions.create(model=model, messages=chat, max_tokens=3, stream=True),
        }
        return {
            name: (form if hasattr(form, FIELD) else list(form)[-1]).system_fingerprint for name, form in forms.items()
        }

    def metric(self) -> dict[str, str]:
        """The labels of the gauge where it is 1."""
        families = text_string_to_metric_families(self.http.get(f"{self.root}/metrics").text)
        samples = [sample for family in families if family.name == METRIC for sample in family.samples]
        [labels] = [sample.labels for sample in samples if sample.value == 1]
        return labels

    def witness(self, other_than: str = "") -> str:
        """The server's witness, waited for until it is another one."""
        headers = {"Authorization": f"Bearer {self.api.api_key}"}
        for _ in range(600):
            found = self.http.get(f"{self.root}/v1/batch_invariant", headers=headers).json()["witness"]
            if found not in ("", other_than):
                return str(found)
            time.sleep(0.1)
        raise AssertionError(f"the witness stays {found!r}")

    def load(self, folder: Path) -> None:
        """Other weights, as a trainer brings them over HTTP."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self.http.post(f"{self.root}/collective_rpc", json=call).raise_for_status()


@pytest.fixture(scope="module")
def first(server: Server) -> Asked:
    return Asked.of(server)


@pytest.fixture(scope="module")
def second(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """A server of the same model with other settings that decide no bits, and with the metrics of several processes."""
    variables = {
        "VLLM_BATCH_INVARIANT": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path_factory.mktemp("metrics")),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_PLUGINS", raising=False)
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        with serve(str(model), [*TOOLS, *FREE, "--api-key", KEY], variables) as running:
            yield Asked.of(running, KEY)


def test_servers_that_differ_in_what_decides_no_bits_have_one_fingerprint_and_one_answer(
    first: Asked, second: Asked
) -> None:
    [said] = {*first.fingerprints().values(), *second.fingerprints().values()}
    assert said is not None
    assert "-batch-invariant-" in said
    assert first.completion() == second.completion() == (said, first.completion()[1])


def test_the_fingerprint_follows_the_weights_and_comes_back_with_them(
    second: Asked, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before, witness = second.completion(), second.witness()
    second.load(make_checkpoint(tmp_path_factory.mktemp("other"), SHAPE, seed=1))
    other = second.completion()
    assert other[0] not in (None, before[0])
    assert other[1] != before[1]
    assert set(second.fingerprints().values()) == {other[0]}
    assert second.metric()["fingerprint"] == other[0]
    others = second.witness(other_than=witness)
    assert second.metric()["witness"] == others
    second.load(model)
    assert second.completion() == before
    assert second.metric()["fingerprint"] == before[0]
    assert second.witness(other_than=others) == witness


def test_the_metrics_of_one_process_and_of_several_say_what_is_promised(first: Asked, second: Asked) -> None:
    assert first.witness() == second.witness()
    assert first.metric() == second.metric()
    said = first.metric()
    assert (said["version"], said["guarantees"]) == (__version__, "run,batch,schedule")
    assert said["fingerprint"] == first.completion()[0]
    assert said["attention"] in ("numba", "triton")


def test_the_route_needs_the_flag_alone_and_the_servers_key(first: Asked, second: Asked) -> None:
    route = f"{second.root}/v1/batch_invariant"
    assert second.http.get(route).status_code == 401
    found = second.http.get(route, headers={"Authorization": f"Bearer {KEY}"}).json()
    assert found == first.http.get(f"{first.root}/v1/batch_invariant").json()
    assert found["fingerprint"] == second.completion()[0]
    assert found["mode"] is True
