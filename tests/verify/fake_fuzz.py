"""An engine without a model for the fuzzer, in this process: answers follow the request alone, and go wrong as told.

WRONG is a list of: listed (candidates of equal value change places with a concurrent request that lists 20), rank,
text, finish, prompt (its logprobs differ with concurrent requests), settings (answers follow --max-num-seqs), breaks
(at a prompt of 300 tokens and more), refuses (logit_bias), alone (nothing ever runs together), sleep, update, embeds,
priority (answers follow an event of that kind, or how a concurrent request is sent).
"""

import random
from collections.abc import Sequence
from typing import Any

from vllm_batch_invariant.verify.fuzz.schedule import EVENTS
from vllm_batch_invariant.verify.fuzz.trial import INFO, RUN
from vllm_batch_invariant.verify.harness.worker import EngineFailed

VOCABULARY = 4096


class FakeFuzzedEngine:
    def __init__(self, wrong: Sequence[str] = (), arguments: Sequence[str] = ()) -> None:
        self.wrong, self.arguments, self.schedules = wrong, list(arguments), 0
        self.info: dict[str, Any] = {"vocabulary": VOCABULARY, "device": {"type": "none"}, "versions": {"vllm": "0"}}

    def call(self, function: str, *arguments: Any) -> Any:
        if function == INFO:
            return {"left_out": {}, "runner": "v1"}
        assert function == RUN
        return self._run(*arguments)

    def _run(self, schedule: dict[str, Any]) -> dict[str, Any]:
        self.schedules += 1
        items = schedule["items"]
        if "breaks" in self.wrong and any(len(item["prompt"]) >= 300 for item in items):
            raise EngineFailed("the engine broke as it was told")
        refused = {
            item["name"]: "no logit_bias here"
            for item in items
            if "refuses" in self.wrong and "logit_bias" in item["params"]
        }
        taken = [item for item in items if item["name"] not in refused]
        concurrent = [] if "alone" in self.wrong or len(taken) < 2 else [one["name"] for one in taken if one["target"]]
        counts = dict.fromkeys(("chunked_steps", "graph_replays", "preemptions", "prefix_hits", "encoded"), 1)
        counts |= {kind: len(schedule[kind]) for kind in EVENTS}
        counts |= {"steps": 7, "aborts": sum(item["leaves"] is not None for item in taken), "concurrent": concurrent}
        happens = {"sleep": schedule["sleeps"], "update": schedule["updates"]}
        happens |= {how: [one for one in taken if one[how] and not one["target"]] for how in ("embeds", "priority")}
        wrong = any(happens[name] for name in happens if name in self.wrong)
        answers = {item["name"]: self._answer(item, taken, wrong) for item in taken if item["target"]}
        return {"answers": answers, "refused": refused, "counts": counts}

    def _answer(self, item: dict[str, Any], items: list[dict[str, Any]], wrong: bool) -> dict[str, Any]:
        params = item["params"]
        others = [other["params"].get("logprobs") or 0 for other in items if other is not item]
        said = sorted((name, str(value)) for name, value in params.items() if name != "output_kind")
        chance = random.Random(f"{list(item['prompt'])} {said}")
        tokens = [chance.randrange(100) for _ in range(params["max_tokens"])]
        listed = [[[token, (-0.5).hex(), 1], [101, (-1.0).hex(), 2], [102, (-1.0).hex(), 3]] for token in tokens]
        if "settings" in self.wrong and "--max-num-seqs 1 " in " ".join(self.arguments):
            listed[0][0][1] = (-0.25).hex()
        if wrong:
            listed[0][0][1] = (-0.75).hex()
        if "listed" in self.wrong and any(number == 20 for number in others):
            listed[-1][1:] = [[102, (-1.0).hex(), 2], [101, (-1.0).hex(), 3]]
        if "rank" in self.wrong and others:
            listed[-1][0][2] = 2
        completion = {"text": " ".join(map(str, tokens)), "tokens": tokens, "logprobs": listed}
        completion |= {"finish_reason": "length", "stop_reason": None}
        completion |= {"text": "other"} if "text" in self.wrong and others else {}
        completion |= {"finish_reason": "stop"} if "finish" in self.wrong and others else {}
        prompt = [None, *([[token, (-1.5).hex(), 1]] for token in item["prompt"][1:])]
        if "prompt" in self.wrong and others and len(prompt) > 1:
            prompt[-1] = [[item["prompt"][-1], (-1.25).hex(), 1]]
        return {"completions": [completion], "prompt_logprobs": prompt if "prompt_logprobs" in params else []}
