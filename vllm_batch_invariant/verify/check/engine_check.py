"""Engines of one setting, one after the other: as they are served, then with limits that force other schedules."""

from collections.abc import Sequence
from typing import Any

from ..harness.worker import Engine
from .engine import CHUNK, EngineRun, OnProgress
from .presets import Preset
from .results import CheckResults

OTHER_CHUNK = 200
SMALL_CACHE = 1024
"""Tokens in the KV cache of an engine that has to preempt."""
_MAIN, _LATER, _LAST = "as served", "with small chunks and a small KV cache", "with other chunks and pages"


def check_engine(model: str, arguments: Sequence[str], flag: str, size: Preset, results: CheckResults, on_progress: OnProgress) -> None:
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
    on_progress("starting the engine")
    with Engine(model, arguments, flag) as engine:
        results.info = engine.info
        run = EngineRun(engine, _MAIN, size, results, on_progress)
        run.certify()
        run.as_served()
    info = engine.info
    limits = ["--max-model-len", str(run.small_context), "--max-num-seqs", str(CHUNK), "--no-enable-prefix-caching"]
    pages = str(-(-SMALL_CACHE // info["page"]))
    small = [*limits, *_steps_of(CHUNK, info), "--num-gpu-blocks-override", pages]
    on_progress(f"starting an engine {_LATER}")
    with Engine(model, [*arguments, *small], flag) as engine:
        EngineRun(engine, _LATER, size, results, on_progress).with_small_limits(run)
    if size.engines > 1:
        page = str(32 if info["page"] != 32 else 64)
        other = [*limits, *_steps_of(OTHER_CHUNK, info), "--async-scheduling", "--block-size", page]
        on_progress(f"starting an engine {_LAST}")
        with Engine(model, [*arguments, *other], flag) as engine:
            EngineRun(engine, _LAST, size, results, on_progress).with_other_pages(run)


def _steps_of(tokens: int, info: dict[str, Any]) -> list[str]:
    """Arguments for steps of so many tokens, which an engine without chunks cannot have."""
    return ["--max-num-batched-tokens", str(tokens)] if info["chunked_prefill"] else []
