"""``vllm-batch-invariant bisect``: the first operation whose bits depend on concurrent requests."""

import argparse
import os
import random
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from ..answers import GENERATE, PROMPT
from ..arguments import (
    OneLineParser,
    add_adapter,
    add_html,
    add_json,
    add_model,
    add_pooling,
    add_task,
    at_least,
    check_adapter,
    check_model,
    check_reports,
    check_task,
    choose_mode,
)
from ..fuzz.finding import Finding
from ..harness import pooling
from ..harness.engine import adapter_request, start_quiet_engine
from ..harness.load import filler
from ..outcome import NoTestError, Status
from ..printing import consoles, waiting
from .engine import ENGINE_ARGUMENTS, BisectResult, Case, bisect, setting_of
from .report import about, as_json, print_results

CONCURRENT, CONCURRENT_TOKENS = (16, 7), 32
"""Two numbers, because a kernel may differ between 1 row and 8 and agree on 1 and 17."""
SHORT_PROMPT = " ".join(PROMPT.split()[:4])
"""A prefill of few rows, for which a library may split a GEMM that it does not split for hundreds."""
LONG_PROMPT_TOKENS = 1500
"""So many keys that attention may split them for one request and not for many."""


def add_arguments(parser: OneLineParser) -> None:
    """Add the command's arguments."""
    parser.set_defaults(run=run, base_url=None)
    parser.description = (
        "Run a prompt alone and with concurrent requests, and find the first layer and operation whose output bits "
        "differ. Layers run eagerly, because recording does not see inside compiled graphs. Exit status: 0 nothing "
        "differs, 1 a difference was found, 2 it could not be tested, 128 + N it was ended by the signal N."
    )
    add_model(parser, served=False)
    add_adapter(parser, "the target has; repeatable: concurrent requests have each in turn, and none")
    parser.add_argument(
        "--prompt",
        help=f"the target prompt (default: one of 120 words, then of 4 words, then of {LONG_PROMPT_TOKENS} tokens)",
    )
    parser.add_argument("--max-tokens", type=at_least(1), default=32, metavar="N", help="tokens to generate")
    parser.add_argument(
        "--logprobs", type=at_least(1), default=5, metavar="N", help="candidates to compare at each position"
    )
    pools = parser.add_argument_group("requests to a model that pools")
    add_task(pools, [name for name, task in pooling.TASKS.items() if task.engine])
    add_pooling(pools)
    concurrent = parser.add_argument_group("concurrent requests")
    concurrent.add_argument(
        "--concurrent",
        type=at_least(1),
        nargs="+",
        metavar="N",
        help="number of concurrent requests; several numbers are tried in turn until something differs "
        f"(default: {' '.join(map(str, CONCURRENT))})",
    )
    concurrent.add_argument(
        "--concurrent-tokens",
        type=at_least(1),
        metavar="N",
        help=f"tokens in each of their prompts (default: {CONCURRENT_TOKENS})",
    )
    concurrent.add_argument("--prompts", type=Path, help="a file with their prompts, one a line")
    concurrent.add_argument(
        "--place",
        type=at_least(0),
        metavar="N",
        help="number of them that come before the target in the batch (default: half)",
    )
    concurrent.add_argument(
        "--case",
        type=Path,
        metavar="FILE",
        help="a file of check --fuzz with the target and the concurrent requests, which start together and are greedy",
    )
    concurrent.add_argument("--seed", type=int, default=0, metavar="N", help="seed of their prompts")
    add_json(parser)
    add_html(parser)


def _check(parser: OneLineParser, options: argparse.Namespace) -> None:
    check_model(parser, options)
    if not options.model:
        parser.error("nothing to bisect: give a model")
    check_adapter(parser, options)
    check_reports(parser, options)
    check_task(parser, options, ("max_tokens", "logprobs", "adapter", "case"), ("dimensions", "activation"))
    if any(argument.startswith("--worker-extension-cls") for argument in options.serve_args):
        parser.error("--serve-args: --worker-extension-cls is taken by the recording")
    options.concurrent_prompts = _concurrent_prompts(parser, options)
    if options.case and (
        options.concurrent_prompts
        or options.concurrent
        or options.concurrent_tokens
        or options.prompt
        or options.adapter
    ):
        parser.error(
            "--case has the prompt and all concurrent requests: leave out --prompt, --prompts, --concurrent and "
            "--adapter"
        )


def _concurrent_prompts(parser: OneLineParser, options: argparse.Namespace) -> list[str]:
    """The lines of the file; none if the prompts are made up."""
    if options.prompts is None:
        return []
    if options.concurrent or options.concurrent_tokens:
        parser.error("--prompts has all concurrent requests: leave out --concurrent and --concurrent-tokens")
    try:
        prompts = [line for line in options.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--prompts {options.prompts}: {error}")
    if not prompts:
        parser.error(f"--prompts {options.prompts}: no prompt in it")
    return prompts


def run(options: argparse.Namespace, parser: OneLineParser) -> int:
    """Run the command; returns its exit status."""
    _check(parser, options)
    choose_mode(parser, options)
    out, notes = consoles()
    # in one process the first step of an engine holds every request that was added before
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    runs: list[tuple[Case, BisectResult]] = []
    with waiting(notes, "starting an engine"):
        llm = start_quiet_engine(options.model, [*options.serve_args, *ENGINE_ARGUMENTS])
    pooling.require(pooling.about(llm), options.task, "tokens to bisect")
    setting = setting_of(llm, options.model)
    with waiting(notes, "bisecting", told=False) as now:
        cases = list(_cases(llm, options))
        for number, case in enumerate(cases, 1):
            now(f"{number} of {len(cases)}: {about(case)}")
            runs.append((case, bisect(llm, case)))
            if runs[-1][1].status == Status.DIVERGED:
                break
    try:  # the file first, because stdout may be closed
        if options.json:
            options.json.write(options, runs[-1][1].status, as_json(setting, runs))
        if options.html:
            from ..report.parts import write_page
            from .page import page_of

            write_page(options, page_of(setting, runs))
    finally:
        print_results(out, setting, runs)
    return runs[-1][1].status


def _cases(llm: Any, options: argparse.Namespace) -> Iterator[Case]:
    if options.case:
        yield _case_of(llm, Finding.read(options.case), options.logprobs)
        return
    if llm.llm_engine.model_config.skip_tokenizer_init:
        raise NoTestError("--prompt needs a tokenizer: leave out --skip-tokenizer-init")
    encode = llm.get_tokenizer().encode
    if options.task != GENERATE:
        options.max_tokens = 1
    prompts = _prompts(encode, llm.llm_engine.model_config.max_model_len - options.max_tokens, options.prompt)
    if options.concurrent_prompts:
        concurrent = [encode(prompt) for prompt in options.concurrent_prompts]
        yield from (_case(options, prompt, concurrent) for prompt in prompts)
        return
    rng, length = random.Random(options.seed), options.concurrent_tokens or CONCURRENT_TOKENS
    for prompt in prompts:
        for count in options.concurrent or CONCURRENT:
            yield _case(options, prompt, [_made_up(encode, rng, length) for _ in range(count)])


def _case_of(llm: Any, finding: Finding, logprobs: int) -> Case:
    """The requests of a finding in their order; the target keeps its number of tokens."""
    items = sorted(finding.schedule.items, key=lambda item: item.at)
    names = [item.name for item in items]
    if finding.target not in names:
        raise NoTestError("--case: no target's answer differs there, so there is nothing to bisect")
    place = names.index(finding.target)
    folders = [adapter_request(llm, item.adapter).lora_path if item.adapter else "" for item in items]
    target, folder = items.pop(place), folders.pop(place)
    asked = target.params.get("max_tokens", 1), logprobs
    prompts, seen = (tuple(getattr(item, name) for item in items) for name in ("prompt", "images"))
    return Case(target.prompt, prompts, place, *asked, folder, tuple(folders), target.images, seen)


def _prompts(encode: Callable[[str], list[int]], room: int, given: str | None) -> list[list[int]]:
    """The given prompt, or one of each length at which kernels choose differently, if the context holds it."""
    if given is not None:
        return [encode(given)]
    usual, most = encode(PROMPT), min(LONG_PROMPT_TOKENS, room)
    long = (usual * (most // len(usual) + 1))[:most]
    return [usual, encode(SHORT_PROMPT), *([long] if len(long) > 2 * len(usual) else [])]


def _case(options: argparse.Namespace, prompt: list[int], concurrent: list[list[int]]) -> Case:
    place = len(concurrent) // 2 if options.place is None else min(options.place, len(concurrent))
    adapters = [str(folder) for folder in options.adapter]
    in_turn = islice(cycle(["", *adapters]), len(concurrent) if adapters else 0)
    asked = options.max_tokens, options.logprobs, (adapters or [""])[0], tuple(in_turn)
    pools = {pooling.DIMENSIONS: options.dimensions, pooling.ACTIVATION: options.activation}
    task = {} if options.task == GENERATE else {"task": pooling.TASKS[options.task].engine} | pools
    return Case(tuple(prompt), tuple(map(tuple, concurrent)), place, *asked, pooling=task)


def _made_up(encode: Callable[[str], list[int]], rng: random.Random, length: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += encode(filler(rng, 8 * length))
    return tokens[:length]
