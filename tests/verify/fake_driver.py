"""A fake of the program that holds an engine, without one: answers follow the prompt, and go wrong as told.

FAKE_ENGINE is a list of: pools (it gives vectors), whole (its prompts come whole), breaks (in a batch a token or value
differs), lists (in a batch the candidates change places), refuses (structured outputs), never-batches, never-preempts,
no-logprobs, nonsense, no-start, dies, hangs (at the step "with 7 others", after it has written its process id to the
file FAKE_ENGINE_PID).
"""

import json
import os
import random
import struct
import sys
import time
from pathlib import Path
from typing import Any

WRONG = os.environ.get("FAKE_ENGINE", "").split()
INFO = {
    "context": 2048,
    "vocabulary": 4096,
    "tokens_in_a_step": 4096,
    "requests_in_a_step": 256,
    "page": 128,
    "most_logprobs": 20,
    "tokenizer": True,
    "chunked_prefill": True,
    "prefix_caching": True,
    "device": {"type": "none"},
}


POOLING = {"tasks": ["embed", "token_embed"], "attention": "decoder", "by": "LAST", "size": 4, "dimensions": [2, 4]}


class FakeEngine:
    small = False

    def start(self, arguments: list[str]) -> dict[str, Any]:
        if "no-start" in WRONG:
            raise RuntimeError("the engine did not start: no such model")
        self.small = "--num-gpu-blocks-override" in arguments
        limits = {"tokens_in_a_step": 64, "prefix_caching": False} if self.small else {}
        limits |= {"requests_in_a_step": 1} if "never-batches" in WRONG else {}
        limits |= {"pooling": POOLING} if "pools" in WRONG else {}
        limits |= {"chunked_prefill": False, "prefix_caching": False} if "whole" in WRONG else {}
        return INFO | limits | {"arguments": arguments, "flag": os.environ.get("VLLM_BATCH_INVARIANT")}

    def call(self, what: dict[str, Any]) -> list[dict[str, Any]]:
        operation, rows = what["arguments"]
        made = {"operation": operation, "shape": "K=4", "served_by": "nobody", "rows": rows, "compared": 4}
        guarantees = ("batch", "schedule") if operation == "attention" else ("batch",)
        return [made | {"guarantee": guarantee, "difference": ""} for guarantee in guarantees]

    def step(self, step: dict[str, Any]) -> dict[str, Any]:
        if step["name"] == "with 7 others" and "hangs" in WRONG:
            Path(os.environ["FAKE_ENGINE_PID"]).write_text(str(os.getpid()))
            time.sleep(600)
        if step["name"] == "again" and "dies" in WRONG:
            os._exit(7)
        if "nonsense" in WRONG:
            return {"requests": []}
        size = 1 if "never-batches" in WRONG else len(step["requests"])
        preempted = self.small and step["name"] == "many" and "never-preempts" not in WRONG
        return {
            "requests": [self._answer(request, step, size) for request in step["requests"]],
            "batches": [[0.1 * place, size] for place in range(1, 5)],
            "preemptions": 3 if preempted else 0,
        }

    def _answer(self, request: dict[str, Any], step: dict[str, Any], size: int) -> dict[str, Any]:
        params, prompt = request["params"], request["prompt"]
        if "refuses" in WRONG and "structured_outputs" in params and request.get("may_be_refused"):
            return {"refused": "no structured outputs here"}
        cold = step["reset_prefix_cache"] or self.small
        if "pools" in WRONG:
            return self._pooled(request, size) | {"cached": 0 if cold else 256}
        chance = random.Random(f"{prompt} {params.get('seed')}")
        tokens = [chance.randrange(100) for _ in range(params["max_tokens"])]
        if size > 1 and "breaks" in WRONG:
            tokens[3:] = [100] * len(tokens[3:])
        listed = [[[token, (-0.5).hex(), 1], [101, (-0.5).hex(), 2]] for token in tokens]
        if size > 1 and "lists" in WRONG:
            listed[-1].reverse()
        completion = {"text": " ".join(map(str, tokens)), "tokens": tokens, "logprobs": listed}
        if params["logprobs"] is None or "no-logprobs" in WRONG:
            completion["logprobs"] = None
        return {
            "completions": [completion],
            "prompt_logprobs": [None, *([[token, (-1.5).hex(), 1]] for token in prompt[1:])],
            "cached": 0 if cold else 256,
            "token_seconds": [0.1 * place for place in range(1, len(tokens) + 1)],
        }

    def _pooled(self, request: dict[str, Any], size: int) -> dict[str, Any]:
        chance = random.Random(f"{request}")
        rows = len(request["prompt"]) if request["params"]["task"] == "token_embed" else 1
        count = request["params"].get("dimensions", 4)
        values = [chance.uniform(-1, 1) for _ in range(rows * count)]
        values[-1] += size > 1 and "breaks" in WRONG
        shape = [rows, count] if request["params"]["task"] == "token_embed" else [count]
        raw = struct.pack(f"<{len(values)}f", *values).hex()
        return {"completions": [{"dtype": "float32", "shape": shape, "raw": raw}], "token_seconds": [0.1]}


def main(descriptor: int) -> None:
    engine = FakeEngine()
    with os.fdopen(descriptor, "w") as answers:
        for line in sys.stdin:
            [(command, argument)] = json.loads(line).items()
            try:
                answer = {command: getattr(engine, command)(argument)}
            except RuntimeError as error:
                answer = {"failed": str(error)}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
