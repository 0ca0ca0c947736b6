"""``vllm-batch-invariant receipt``: make the receipt of a completion, compute it again elsewhere, compare two."""

import argparse
import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...envs import FLAG
from ..answers import GENERATE, PROMPT
from ..arguments import (
    OneLineParser,
    add_adapter,
    add_base_url,
    add_html,
    add_items,
    add_json,
    add_model,
    add_pooling,
    add_task,
    at_least,
    check_adapter,
    check_base_url,
    check_items,
    check_model,
    check_reports,
    check_task,
    choose_mode,
    not_negative,
    seed_of_a_request,
)
from ..harness import pooling
from ..outcome import NoTestError, Status
from ..printing import consoles, note, printable, waiting
from ..report.files import why_not_writable
from .text import Text

if TYPE_CHECKING:
    from ..harness.worker import Engine
    from .comparison import Kept, Note, Verdict
    from .record import PooledReceipt, Receipt

IN_ENGINE = f"{__package__}.in_engine"
"""The module whose functions the engine's process calls."""


def _make(options: argparse.Namespace, parser: OneLineParser) -> int:
    check_task(
        options.making, options, (*_SAMPLING, "items", "trace", "adapter"), ("dimensions", "activation", "query")
    )
    _check_target(parser, options)
    if options.query is not None and options.task != "score":
        parser.error("--query goes with --task score")
    if options.trace and options.base_url:
        parser.error("--trace looks into an engine that is started here: leave out --base-url")
    if options.receipt.exists():
        raise NoTestError(f"{options.receipt} exists, and a receipt overwrites nothing")
    if why := why_not_writable(options.receipt):
        raise NoTestError(f"{options.receipt} cannot be written: {why}")
    from .comparison import HOW_TO_REPORT, extent
    from .record import Receipt

    receipt = (_complete if options.task == GENERATE else _pool)(options, parser)
    receipt.save(options.receipt)
    made = f"{options.receipt}: {extent(receipt)} of {receipt.model.name}, sha256 {receipt.sha256}"
    print(printable(made))
    if receipt.model.digest is None:
        how = "; name it with --model-files" if options.base_url else ""
        print(f"the receipt has no digest of the model, because {printable(receipt.model.why_no_digest)}{how}")
    if receipt.environment.is_silent:
        print(f"the receipt does not describe the engine that computed it; {HOW_TO_REPORT}")
    elif receipt.environment.mode is False:
        print("the mode is off: nobody can promise that these bits can be computed again")
    if options.json:
        about: dict[str, Any] = {"receipt": str(options.receipt), "sha256": receipt.sha256, "model": receipt.model.name}
        about["digest"] = receipt.model.digest
        about |= (
            {"tokens": len(receipt.completion.token_ids)}
            if isinstance(receipt, Receipt)
            else {"values": len(receipt.pooled.values)}
        )
        options.json.write(options, Status.REPRODUCIBLE, about | {"mode": receipt.environment.mode})
    _write_page(options, receipt)
    return Status.REPRODUCIBLE


_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "ignore_eos")
"""Options of a completion that its receipt holds as they are."""


def _complete(options: argparse.Namespace, parser: OneLineParser) -> "Receipt":
    """The receipt of a completion."""
    from .record import Receipt, Sampling

    sampling = Sampling(**{name: getattr(options, name) for name in _SAMPLING})
    prompt = _prompt(options) or Text(PROMPT, options.chat)
    choose_mode(parser, options)
    if options.base_url:
        from .server import make_on_server

        return asyncio.run(
            make_on_server(options.base_url, prompt, sampling, private=options.private, **_of_server(options))
        )
    with _engine(options, GENERATE) as engine:
        asked: dict[str, Any] = {"prompt": asdict(prompt), "sampling": asdict(sampling)}
        asked |= {"private": options.private, "trace": options.trace, "adapter": _adapter(options)}
        asked["items"] = options.items
        return Receipt.from_json(engine.call(f"{IN_ENGINE}:make", asked))


def _pool(options: argparse.Namespace, parser: OneLineParser) -> "PooledReceipt":
    """The receipt of what a model pools."""
    from .record import PooledReceipt, Pooling

    asking = Pooling(options.task, options.dimensions, options.activation)
    text, query = _prompt(options) or Text(PROMPT, options.chat), options.query or pooling.QUERY
    choose_mode(parser, options)
    if options.base_url:
        from .pooled_server import make_pooled_on_server

        how = _of_server(options) | {"query": query, "private": options.private}
        return asyncio.run(make_pooled_on_server(options.base_url, text, asking, **how))
    with _engine(options, options.task) as engine:
        asked = {"prompt": asdict(text), "query": query, "pooling": asdict(asking), "private": options.private}
        return PooledReceipt.from_json(engine.call(f"{IN_ENGINE}:make_pooled", asked))


def _of_server(options: argparse.Namespace) -> dict[str, Any]:
    """What is told of a server to what computes there."""
    return {"api_key": options.api_key, "model": options.model, "files": options.model_files}


def _verify(options: argparse.Namespace, parser: OneLineParser) -> int:
    _check_target(parser, options)
    if options.without_engine and (options.base_url or options.serve_args):
        parser.error("--without-engine computes it here: leave out --base-url and --serve-args")
    from . import items
    from .comparison import Note, as_json, verdict_of
    from .engine import require_adapter
    from .record import Receipt, load

    receipt = load(options.receipt)
    prompt = _prompt(options)
    if not isinstance(receipt, Receipt):
        verdict = _verify_pooled(options, parser, receipt, prompt)
    elif options.query is not None:
        parser.error("--query is of a score, and the receipt of a completion: leave it out")
    elif options.base_url:
        from .server import verify_on_server

        choose_mode(parser, options)
        verdict = asyncio.run(
            verify_on_server(
                receipt,
                options.base_url,
                concurrent=options.concurrent,
                prompt=prompt,
                before=_print_notes,
                **_of_server(options),
            )
        )
    elif options.without_engine:
        from .recompute import recompute

        if prompt is not None:
            raise NoTestError("--without-engine has no tokenizer for a prompt in words: verify a receipt that holds it")
        with waiting(consoles()[1], "computing it by the definition"):
            verdict = recompute(receipt, options.model, before=_print_notes)
    else:
        require_adapter(receipt, options.adapter is not None)
        items.require(receipt, [kind for kind, _ in options.items])
        if receipt.prompt.token_ids is None and prompt is None:
            receipt.prompt.ids()  # refuses before an engine is started in vain
        choose_mode(parser, options)
        with _engine(options, GENERATE) as engine:
            asked = {"receipt": receipt.to_json(), "prompt": prompt and asdict(prompt)}
            found = engine.call(
                f"{IN_ENGINE}:verify",
                asked | {"items": options.items, "concurrent": options.concurrent, "adapter": _adapter(options)},
                on_progress=lambda notes: _print_notes(tuple(Note(**one) for one in notes)),
            )
        verdict = verdict_of(found)
    print(verdict.result)
    if options.json:
        options.json.write(options, verdict.status, {"receipt": str(options.receipt)} | as_json(verdict))
    _write_page(options, receipt, verdict)
    return verdict.status


def _verify_pooled(
    options: argparse.Namespace, parser: OneLineParser, receipt: "PooledReceipt", text: Text | None
) -> "Verdict":
    """The verdict on what a model pooled."""
    from .comparison import Note, verdict_of
    from .pooled import about_of

    if options.without_engine:
        raise NoTestError("the definition is of models that generate, and the receipt of what a model pooled")
    if options.adapter or options.items:
        what = "--adapter" if options.adapter else f"--{options.items[0][0]}"
        raise NoTestError(f"a receipt of what a model pooled has no adapter and no items: leave {what} out")
    if options.query is not None and not receipt.pair:
        raise NoTestError("--query is of a score, and the receipt of another task: leave it out")
    if text is None:
        about_of(receipt, None, None)  # refuses before an engine is started in vain
    query = options.query or pooling.QUERY
    choose_mode(parser, options)
    if options.base_url:
        from .pooled_server import verify_pooled_on_server

        how = _of_server(options) | {"concurrent": options.concurrent, "before": _print_notes}
        how |= {"text": text, "query": query}
        return asyncio.run(verify_pooled_on_server(receipt, options.base_url, **how))
    with _engine(options, receipt.pooling.task) as engine:
        asked = {"receipt": receipt.to_json(), "prompt": text and asdict(text), "query": query}
        found = engine.call(
            f"{IN_ENGINE}:verify_pooled",
            asked | {"concurrent": options.concurrent},
            on_progress=lambda notes: _print_notes(tuple(Note(**one) for one in notes)),
        )
    return verdict_of(found)


def _print_notes(notes: "tuple[Note, ...]") -> None:
    from .comparison import describe_notes

    print(describe_notes(notes), flush=True)


def _compare(options: argparse.Namespace, parser: OneLineParser) -> int:
    check_reports(parser, options)
    from .comparison import as_json, compare
    from .record import load

    left, right = (load(path) for path in (options.first, options.second))
    verdict = compare(left, right, (options.first.name, options.second.name))
    if options.json:
        files = {"first": str(options.first), "second": str(options.second)}
        options.json.write(options, verdict.status, files | as_json(verdict))
    _write_page(options, left, verdict)
    print(verdict)
    return verdict.status


def _write_page(options: argparse.Namespace, receipt: "Kept", verdict: "Verdict | None" = None) -> None:
    if options.html:
        from ..report.parts import write_page
        from .page import page_of

        write_page(options, page_of(receipt, verdict))


def _adapter(options: argparse.Namespace) -> str | None:
    return str(options.adapter) if options.adapter else None


def _prompt(options: argparse.Namespace) -> Text | None:
    text = options.prompt
    if options.prompt_file:
        try:
            text = options.prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise NoTestError(f"--prompt-file {options.prompt_file} cannot be read: {error}") from error
    if text == "":
        raise NoTestError("the prompt is empty")
    return None if text is None else Text(text, options.chat)


@contextmanager
def _engine(options: argparse.Namespace, task: str) -> Iterator["Engine"]:
    """An engine for a task in a process of its own, which an interruption ends at any moment."""
    from ..bisect.engine import WORKER_EXTENSION
    from ..harness.mode import THEIRS
    from ..harness.worker import Engine

    with ExitStack() as stack:
        with waiting(consoles()[1], "starting an engine"):
            traced = ("--worker-extension-cls", WORKER_EXTENSION) * getattr(options, "trace", False)
            engine = stack.enter_context(Engine(options.model, [*options.serve_args, *traced], os.environ.get(FLAG)))
        pooling.require(engine.info.get("pooling") or {}, task, "completion for a receipt")
        if engine.info["mode"] == THEIRS:
            note(f"mode: {THEIRS}")
        yield engine


def add_arguments(parser: OneLineParser) -> None:
    """Add the subcommands."""
    parser.description = (
        "Make the receipt of a completion, compute the completion again elsewhere, or compare two receipts, bit for "
        "bit. Exit status: 0 equal, or made; 1 different; 2 it could not be tested; 128 + N it was ended by the signal "
        "N."
    )
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    making = commands.add_parser("make", help="complete a prompt and write the receipt")
    making.set_defaults(run=_make, command="receipt make", making=making)
    making.add_argument("receipt", type=Path, help="the file to write", metavar="FILE")
    _add_target(making)
    _add_prompt(making, "the prompt (default: one about floating-point sums)")
    pools = making.add_argument_group("request to a model that pools")
    add_task(pools, pooling.TASKS)
    add_pooling(pools)
    _add_query(pools, f"what the prompt is scored against (default: {pooling.QUERY!r})")
    making.add_argument("--private", action="store_true", help="keep only the sha256 of the prompt's tokens")
    making.add_argument("--max-tokens", type=at_least(1), default=64, metavar="N", help="tokens to generate")
    making.add_argument("--temperature", type=not_negative, default=0.0, metavar="T", help="0 is greedy")
    making.add_argument("--top-p", type=not_negative, default=1.0, metavar="P", help="most probability to sample from")
    making.add_argument("--top-k", type=at_least(0), default=0, metavar="K", help="candidates to sample from; 0 is all")
    making.add_argument(
        "--min-p", type=not_negative, default=0.0, metavar="P", help="least share of the largest probability"
    )
    making.add_argument("--seed", type=seed_of_a_request, default=0, metavar="N", help="seed of the request")
    making.add_argument("--logprobs", type=at_least(0), default=5, metavar="N", help="candidates at each position")
    making.add_argument("--ignore-eos", action="store_true", help="always generate --max-tokens")
    making.add_argument(
        "--trace",
        action="store_true",
        help="with an engine here: keep digests of what layers make, so that a difference is found in its operation",
    )
    add_json(making)
    add_html(making)

    verifying = commands.add_parser("verify", help="compute a completion again, with concurrent requests")
    verifying.set_defaults(run=_verify, command="receipt verify")
    verifying.add_argument("receipt", type=Path, help="the receipt's file", metavar="FILE")
    _add_target(verifying)
    _add_prompt(verifying, "the prompt of a private receipt")
    _add_query(verifying, "what the prompt of a private receipt of a score is scored against")
    verifying.add_argument(
        "--without-engine",
        action="store_true",
        help="compute it from the model's files by the definition of its arithmetic, on any CPU",
    )
    verifying.add_argument(
        "--concurrent", type=at_least(0), default=8, metavar="N", help="concurrent requests at a time"
    )
    add_json(verifying)
    add_html(verifying)

    comparing = commands.add_parser("compare", help="compare two receipts, without a model")
    comparing.set_defaults(run=_compare, command="receipt compare")
    comparing.add_argument("first", type=Path, help="a receipt")
    comparing.add_argument("second", type=Path, help="another receipt of the same request")
    add_json(comparing)
    add_html(comparing)


def _check_target(parser: OneLineParser, options: argparse.Namespace) -> None:
    check_model(parser, options)
    if not options.base_url and not options.model:
        parser.error("nothing to compute it: give --base-url of a server, or a model to load here")
    if options.base_url and options.serve_args:
        parser.error("--base-url is a server that already runs: leave out --serve-args")
    check_adapter(parser, options)
    if options.items and (options.base_url or getattr(options, "without_engine", False)):
        parser.error(f"--{options.items[0][0]} is for an engine that is started here: a server tells no tensors")
    check_items(parser, options)
    if options.model_files and not options.base_url:
        parser.error("--model-files is for a server: the files of a model that is loaded here are known")
    if options.model_files and not options.model_files.is_dir():
        parser.error(f"--model-files {options.model_files}: no such folder")
    check_base_url(parser, options)
    check_reports(parser, options)


def _add_target(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument_group("engine")
    add_model(target)
    add_base_url(target)
    add_adapter(target, "the request has", repeatable=False)
    add_items(target, "with an engine here")
    target.add_argument(
        "--model-files", type=Path, metavar="FOLDER", help="with --base-url: a folder here with the served files"
    )


def _add_query(parser: argparse._ActionsContainer, help: str) -> None:
    parser.add_argument("--query", metavar="TEXT", help=help)


def _add_prompt(parser: argparse.ArgumentParser, help: str) -> None:
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help=help)
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="a text file with the prompt")
    parser.add_argument("--chat", action="store_true", help="the prompt is the message of a chat")
