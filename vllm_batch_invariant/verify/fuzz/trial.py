"""One engine of the fuzzer: runs schedules, and compares every target with its request alone."""

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from ..harness import images, pooling
from ..harness.requests import EVERY_KIND, Accepts, ordinary
from .compare import difference
from .finding import Row
from .schedule import EVENTS, Item, Schedule, Target, alone, as_item
from .shrink import shrink

SHRINK_SECONDS = 20.0
_LACKS = "the model has no such task"
RUN = "vllm_batch_invariant.verify.fuzz.engine:run_schedule"
INFO = "vllm_batch_invariant.verify.fuzz.engine:info"
_COUNTED = ("steps", "chunked_steps", "graph_replays", "preemptions", "prefix_hits", "encoded", "aborts", *EVENTS)


class Callee(Protocol):
    """The part of ``Engine`` that schedules need."""

    info: dict[str, Any]

    def call(self, function: str, *arguments: object) -> Any:
        """Call a function of the name "module:function" in its process."""


class Trial:
    """A running engine.

    Args:
        engine: that runs.
        row: is filled.
        without: kinds of requests to leave out.

    Attributes:
        accepts: what the engine accepts.
        runner: vLLM's model runner, "v1" or "v2", and the numbers of workers and of stages above 1, or the tree that
            workers add, and a KV cache in fp8: what may answer otherwise; or exact arithmetic, where they do not. The
            two runners draw different noise from a seed.
        left_out: kinds of requests that are left out, and why.
        refused: why the engine refused concurrent requests, and how often.
    """

    def __init__(self, engine: Callee, row: Row, without: Mapping[str, str] | None = None) -> None:
        self._engine, self.row = engine, row
        self._alone: dict[str, dict[str, Any]] = {}
        self.refused: Counter[str] = Counter()
        info = engine.info | engine.call(INFO)
        self.runner: str = info["runner"]
        self.left_out: dict[str, str] = {}
        pools = info.get("pooling") or {}
        images.require_text(info)
        if pools:
            pooling.wanted(pools)  # refuses what cannot be compared
        lacks = dict.fromkeys((kind for kind in pooling.KINDS if kind not in pools["tasks"]), _LACKS) if pools else {}
        self._leave_out(info["left_out"] | lacks | dict(without or {}))
        device, self.versions = info.get("device", {}), info.get("versions", {})
        row.device = str(device.get("name") or device.get("type") or "unknown")
        row.versions = " ".join(f"{name}={version}" for name, version in self.versions.items() if version)
        begins, ends = info.get("thought", ((), ()))
        self._accepts = Accepts(
            ordinary(info["vocabulary"]),
            info["vocabulary"],
            -1,
            thought=(tuple(begins), tuple(ends)),
            pooling=pools,
            images=info.get("images") or {},
        )

    def _leave_out(self, kinds: Mapping[str, str]) -> None:
        self.left_out |= kinds
        self.row.left_out = "; ".join(f"{kind}: {why}" for kind, why in self.left_out.items())

    @property
    def accepts(self) -> Accepts:
        """What the engine accepts, as far as it is known."""
        every = pooling.KINDS if self._accepts.pooling else EVERY_KIND
        return replace(self._accepts, kinds=tuple(kind for kind in every if kind not in self.left_out))

    def run(self, schedule: Schedule) -> dict[str, Any]:
        """Run a schedule; returns what :func:`.engine.run_schedule` does."""
        return self._engine.call(RUN, schedule.plain())

    def take(self, target: Target) -> dict[str, Any] | None:
        """A target's answer alone; None if its kind is left out, as are kinds that the engine has refused."""
        if target.kind in self.left_out:
            return None
        item = as_item(target, "target")
        result = self.run(alone(item))
        if item.name in result["refused"]:
            self._leave_out({target.kind: result["refused"][item.name]})
            return None
        self._alone[_key(item)] = result["answers"][item.name]
        return self._alone[_key(item)]

    def alone(self, item: Item) -> dict[str, Any] | None:
        """The answer to an item's request alone, computed once; None if the engine refuses it."""
        if _key(item) not in self._alone:
            answers = self.run(alone(item))["answers"]
            if item.name not in answers:
                return None
            self._alone[_key(item)] = answers[item.name]
        return self._alone[_key(item)]

    def fuzz(self, schedule: Schedule) -> tuple[str, str]:
        """Run a schedule and count it; returns the first target that differs and how, or two empty strings."""
        result = self.run(schedule)
        self.row.schedules += 1
        self.row.concurrent += bool(result["counts"]["concurrent"])
        for name in _COUNTED:
            setattr(self.row, name, getattr(self.row, name) + result["counts"][name])
        self.refused.update(why for name, why in result["refused"].items())
        targets = [item for item in schedule.items if item.target]
        self.row.compared += sum(item.name in result["answers"] for item in targets)
        compared = ((item.name, self._differs(item, result)) for item in targets)
        name, where = next(((name, where) for name, where in compared if where), ("", ""))
        self.row.differences += bool(where)
        return name, where

    def look(self, schedule: Schedule, name: str) -> tuple[str, dict[str, Any] | None, dict[str, Any] | None]:
        """Run a schedule for one target; returns the difference, its answer alone and its answer in the schedule."""
        item = next(item for item in schedule.items if item.name == name)
        result = self.run(schedule)
        return self._differs(item, result), self.alone(item), result["answers"].get(name)

    def shrunk(self, schedule: Schedule, name: str, seconds: float = SHRINK_SECONDS) -> Schedule:
        """The smallest schedule found within so many seconds in which the target still differs."""
        return shrink(schedule, name, lambda smaller: bool(self.look(smaller, name)[0]), time.monotonic() + seconds)

    def _differs(self, item: Item, result: Mapping[str, Any]) -> str:
        expected, got = self.alone(item), result["answers"].get(item.name)
        if expected is None:
            return ""
        if got is None:
            return f"no answer: {result['refused'].get(item.name, 'it did not come')}"
        return difference(expected, got)


def _key(item: Item) -> str:
    [one] = alone(item).items
    return json.dumps([one.prompt, one.embeds, one.adapter, dict(one.params), [*map(dict, one.images)]])
