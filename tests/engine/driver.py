"""Runs a plan of requests through one real engine; a program of its own, because the flag holds for a whole process.

usage: python -m tests.engine.driver PLAN.json RESULT.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.engine.kernels import kernels


def bits(entry: dict[int, Any] | None) -> list[tuple[int, str]] | None:
    """One position's logprobs as (token, exact value) in the order of their ids; None for a prompt's first position."""
    return None if entry is None else [(token, entry[token].logprob.hex()) for token in sorted(entry)]


def describe(output: Any) -> dict[str, Any]:
    """One request's completions: their tokens and, where asked for, the logprobs, and those of the prompt."""
    return {
        "completions": [
            {
                "tokens": list(completion.token_ids),
                "logprobs": None if completion.logprobs is None else [bits(entry) for entry in completion.logprobs],
            }
            for completion in output.outputs
        ],
        "prompt_logprobs": None
        if output.prompt_logprobs is None
        else [bits(entry) for entry in output.prompt_logprobs],
        "cached": output.num_cached_tokens,
    }


def run(plan: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, send each step's requests together, and say what came back and what served it."""
    from vllm import LLM, SamplingParams

    llm = LLM(disable_log_stats=False, **plan["engine"])
    steps = {}
    for step in plan["steps"]:
        if step.get("reset_prefix_cache"):
            assert llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": request["prompt"]} for request in step["requests"]]
        params = [SamplingParams(**request["params"]) for request in step["requests"]]
        steps[step["name"]] = [describe(output) for output in llm.generate(prompts, params, use_tqdm=False)]
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    compilation = llm.llm_engine.vllm_config.compilation_config
    return {
        "steps": steps,
        "preemptions": counters["vllm:num_preemptions"],
        "kernels": llm.apply_model(kernels)[0],
        "compilation": compilation.mode.name,
    }


def main(plan_path: str, result_path: str) -> None:
    Path(result_path).write_text(json.dumps(run(json.loads(Path(plan_path).read_text()))))


if __name__ == "__main__":
    main(*sys.argv[1:])
