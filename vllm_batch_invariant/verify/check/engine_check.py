"""Engines of one setting, one after the other: as they are served, then with limits that force other schedules."""

from collections.abc import Sequence
from typing import Any

from ..harness.worker import Engine
from .engine import CHUNK, EngineRun, Say
from .presets import Size
from .results import Findings

OTHER_CHUNK = 200
SMALL_CACHE = 1024
"""Tokens in the KV cache of an engine that has to preempt."""
_MAIN, _LATER, _LAST = "as served", "with small chunks and a small KV cache", "with other chunks and pages"


def check_engine(model: str, arguments: Sequence[str], flag: str, size: Size, findings: Findings, say: Say) -> None:
    """Put engines of one setting through everything, and keep what is found as it comes.

    Args:
        model: its folder or name.
        arguments: more arguments of ``vllm serve``.
        flag: the value of VLLM_BATCH_INVARIANT.
        findings: is filled.
        say: is told what happens now.

    Raises:
        NoTestError: an engine did not start, or broke.
    """
    say("starting the engine")
    with Engine(model, arguments, flag) as engine:
        findings.about = engine.about
        run = EngineRun(engine, _MAIN, size, findings, say)
        run.certify()
        run.as_served()
    about = engine.about
    limits = ["--max-model-len", str(run.small_context), "--max-num-seqs", str(CHUNK), "--no-enable-prefix-caching"]
    pages = str(-(-SMALL_CACHE // about["page"]))
    small = [*limits, *_steps_of(CHUNK, about), "--num-gpu-blocks-override", pages]
    say(f"starting an engine {_LATER}")
    with Engine(model, [*arguments, *small], flag) as engine:
        EngineRun(engine, _LATER, size, findings, say).with_small_limits(run)
    if size.engines > 1:
        page = str(32 if about["page"] != 32 else 64)
        other = [*limits, *_steps_of(OTHER_CHUNK, about), "--async-scheduling", "--block-size", page]
        say(f"starting an engine {_LAST}")
        with Engine(model, [*arguments, *other], flag) as engine:
            EngineRun(engine, _LAST, size, findings, say).with_other_pages(run)


def _steps_of(tokens: int, about: dict[str, Any]) -> list[str]:
    """Arguments for steps of so many tokens, which an engine without chunks cannot have."""
    return ["--max-num-batched-tokens", str(tokens)] if about["chunked_prefill"] else []
