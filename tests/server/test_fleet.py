"""Replicas behind the router of Ray Serve LLM: one of them is killed, and all answers have the same bits; those of a
replica with a wrong weight have others. Skipped without Ray.
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from scripts.fleet import broken, prove, scale
from scripts.fleet.demo import is_one_fleet, lines
from scripts.fleet.load import ask
from scripts.fleet.processes import processes
from scripts.fleet.replicas import served, started
from tests.faults.memory import flip
from vllm_batch_invariant.envs import FLAG

pytestmark = [
    pytest.mark.server,
    pytest.mark.exhaustive,
    # Ray reads its variables while it is imported, so it is not imported here
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the replicas have CPUs"),
]
WEIGHT = "model.norm.weight"


@pytest.fixture
def fleet(model: Path) -> Iterator[str]:
    """The address of the router of two replicas."""
    with started() as url, served(model, 2, {FLAG: "1"}):
        yield url


def test_replicas_have_one_set_of_bits_while_one_is_killed_and_a_wrong_weight_is_seen(fleet: str, model: Path) -> None:
    found = ask(fleet, 60, replicas=2, kills=1)
    assert is_one_fleet(found), lines(found, 0)
    assert len(found.answers) == len(found.said) == 3
    assert len(found.killed) == 1
    assert sum(found.asked.values()) == 60 + len(found.asked)
    assert found.others > 0

    [wrong, *_] = [name for name in found.said if name not in found.killed]
    with safe_open(model / "model.safetensors", "pt") as file:
        held = file.get_tensor(WEIGHT).view(torch.uint8).numpy().tobytes()
    assert sum(flip(process, held) for process in processes(found.processes[wrong])) > 0
    after = ask(fleet, 30, replicas=2)
    assert set(after.answers) == set(found.said) - set(found.killed)
    assert after.differing.total() > 0
    assert after.values("fingerprint") == found.values("fingerprint"), "nobody was told of another weight"


def test_replicas_come_and_go_with_the_load_and_have_one_set_of_bits(
    model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert scale.main([str(model), "--patience", "600"]) == 0
    said = {line["stage"]: line for line in map(json.loads, stages_in(capfd.readouterr().out))}
    assert [*said] == ["one", "load", "all", "less", "one again"]
    assert [len(said[stage]["replicas"]) for stage in said if stage != "less"] == [1, 2, 2, 1]
    assert said["one again"]["replicas"].keys() <= said["all"]["replicas"].keys()
    assert said["load"]["requests"] > 20


def stages_in(printed: str) -> list[str]:
    """Its lines of JSON: Ray prints beside them."""
    return [line for line in printed.splitlines() if line.startswith('{"stage"')]


PROVEN = {
    "requests": 200,
    "concurrency": 8,
    "kills": 1,
    "kill-every": 2,
    "broken": 6,
    "broken-kills": 1,
    "length": 10,
    "rate-requests": 40,
    "rate-concurrency": 4,
    "prompts": 6,
    "max-tokens": 12,
    "patience": 600,
    "seconds": 600,
    "broken-seconds": 600,
}
"""Small numbers for the options of the counts."""


def test_counts_of_a_fleet_have_no_difference_and_every_broken_answer_goes_on(model: Path, tmp_path: Path) -> None:
    options = [word for name, value in PROVEN.items() for word in (f"--{name}", str(value))]
    assert prove.main([str(model), "--json", str(tmp_path / "said"), *options]) == 0
    said = [json.loads(line) for line in (tmp_path / "said").read_text().splitlines()]
    [_, load, broke, together, _, alone, ratio] = said
    assert [each["part"] for each in said] == ["start", "load", "broken", "throughput", "start", "throughput", "ratio"]
    assert load["kills"] == broke["kills"] == 1
    assert load["requests"] >= PROVEN["requests"]
    assert load["distinct_answers"] == load["prompts"] == PROVEN["prompts"]
    assert broke["cut_connections"] > 0
    # each request has an answer of its own, so that one in the place of another would be seen
    assert {*broke["distinct_unbroken"].values()} == {PROVEN["broken"]}
    assert broke["broken"] == dict.fromkeys(broken.kinds(1), PROVEN["broken"])
    assert (len(together["replicas"]), len(alone["replicas"])) == (2, 1)
    assert ratio["ratio"] > 0
