"""``vllm-batch-invariant receipt``: make the receipt of a completion, compute it again elsewhere, compare two."""

import argparse
import asyncio
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from ..answers import PROMPT
from ..arguments import OneLineParser, add_base_url, at_least, check_base_url, check_model, not_negative
from ..harness.mode import THEIRS, of_engine
from ..outcome import NoTestError, Status
from ..printing import one_line, printable
from ..report.files import why_not_writable
from .comparison import HOW_TO_REPORT, Note, compare, describe_notes, extent
from .engine import complete, engine_info, verify
from .record import Receipt, Sampling
from .server import Text, make_on_server, verify_on_server


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit status: 0 equal, or made; 1 different; 2 it could not be tested; 130 it was
    interrupted.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if "model_files" in options:
        _check_target(parser, options)
    try:
        return options.run(options)
    except NoTestError as error:
        print(f"receipt: {error}", file=sys.stderr)
        return Status.NO_TEST
    except KeyboardInterrupt:
        print("receipt: interrupted; nothing was decided", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:  # a traceback would end with status 1, which means that bits differ
        print(f"receipt: the run failed: {type(error).__name__}: {one_line(error)}", file=sys.stderr)
        return Status.NO_TEST


def _make(options: argparse.Namespace) -> int:
    if options.receipt.exists():
        raise NoTestError(f"{options.receipt} exists, and a receipt overwrites nothing")
    if why := why_not_writable(options.receipt):
        raise NoTestError(f"{options.receipt} cannot be written: {why}")
    held = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "ignore_eos")
    sampling = Sampling(**{name: getattr(options, name) for name in held})
    prompt = _prompt(options) or Text(PROMPT, options.chat)
    if options.base_url:
        receipt = asyncio.run(
            make_on_server(
                options.base_url,
                prompt,
                sampling,
                api_key=options.api_key,
                model=options.model,
                files=options.model_files,
                private=options.private,
            )
        )
    else:
        llm = _engine(options)
        token_ids = tuple(_token_ids(llm, prompt))
        completion, _ = complete(llm, token_ids, sampling)
        receipt = Receipt.of(engine_info(llm), token_ids, sampling, completion, options.private)
    receipt.save(options.receipt)
    made = f"{options.receipt}: {extent(receipt.completion)} of {receipt.model.name}, sha256 {receipt.sha256}"
    print(printable(made))
    if receipt.model.digest is None:
        how = "; name it with --model-files" if options.base_url else ""
        print(f"the receipt has no digest of the model, because {printable(receipt.model.why_no_digest)}{how}")
    if receipt.environment.is_silent:
        print(f"the receipt does not describe the engine that computed it; {HOW_TO_REPORT}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    receipt = Receipt.load(options.receipt)
    prompt = _prompt(options)
    if options.base_url:
        verdict = asyncio.run(
            verify_on_server(
                receipt,
                options.base_url,
                concurrent=options.concurrent,
                prompt=prompt,
                api_key=options.api_key,
                model=options.model,
                files=options.model_files,
                before=_print_notes,
            )
        )
    else:
        if receipt.prompt.token_ids is None and prompt is None:
            receipt.prompt.ids()  # refuses before an engine is started in vain
        llm = _engine(options)
        token_ids = None if prompt is None else _token_ids(llm, prompt)
        verdict = verify(receipt, llm, concurrent=options.concurrent, prompt_token_ids=token_ids, before=_print_notes)
    print(verdict.result)
    return verdict.status


def _print_notes(notes: tuple[Note, ...]) -> None:
    print(describe_notes(notes), flush=True)


def _compare(options: argparse.Namespace) -> int:
    left, right = (Receipt.load(path) for path in (options.first, options.second))
    verdict = compare(left, right, (options.first.name, options.second.name))
    print(verdict)
    return verdict.status


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


def _engine(options: argparse.Namespace) -> Any:
    from ..harness.engine import start_quiet_engine

    llm = start_quiet_engine(options.model, shlex.split(options.serve_args))
    if of_engine() == THEIRS:
        print(f"receipt: mode: {THEIRS}", file=sys.stderr)
    return llm


def _token_ids(llm: Any, prompt: Text) -> list[int]:
    tokenizer = llm.get_tokenizer()
    if not prompt.chat:
        return tokenizer.encode(prompt.text)
    messages = [{"role": "user", "content": prompt.text}]
    templated = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(templated, add_special_tokens=False)


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="vllm-batch-invariant receipt",
        description="Make the receipt of a completion, compute the completion again elsewhere, or compare two "
        "receipts, bit for bit. Exit status: 0 equal, or made; 1 different; 2 it could not be tested; 130 it was "
        "interrupted.",
    )
    commands = parser.add_subparsers(required=True, metavar="make, verify or compare")
    making = commands.add_parser("make", help="complete a prompt and write the receipt")
    making.set_defaults(run=_make)
    making.add_argument("receipt", type=Path, help="the file to write")
    _add_target(making)
    _add_prompt(making, "the prompt (default: one about floating-point sums)")
    making.add_argument("--private", action="store_true", help="keep only the sha256 of the prompt's tokens")
    usual, value = Sampling(), "default: %(default)s"
    making.add_argument("--max-tokens", type=at_least(1), default=usual.max_tokens, help=f"tokens to generate, {value}")
    making.add_argument("--temperature", type=not_negative, default=usual.temperature, help=f"0 is greedy, {value}")
    making.add_argument("--top-p", type=not_negative, default=usual.top_p, help=value)
    making.add_argument("--top-k", type=at_least(0), default=usual.top_k, help=f"0 is all, {value}")
    making.add_argument("--min-p", type=not_negative, default=usual.min_p, help=value)
    making.add_argument("--seed", type=int, default=0, help=f"seed of the request, {value}")
    making.add_argument("--logprobs", type=at_least(0), default=usual.logprobs, help=f"candidates a token, {value}")
    making.add_argument("--ignore-eos", action="store_true", help="always generate --max-tokens")

    verifying = commands.add_parser("verify", help="compute a completion again, with concurrent requests")
    verifying.set_defaults(run=_verify)
    verifying.add_argument("receipt", type=Path, help="the receipt's file")
    _add_target(verifying)
    _add_prompt(verifying, "the prompt of a private receipt")
    verifying.add_argument(
        "--concurrent", type=at_least(0), default=8, metavar="N", help="concurrent requests, default: %(default)s"
    )

    comparing = commands.add_parser("compare", help="compare two receipts, without a model")
    comparing.set_defaults(run=_compare)
    comparing.add_argument("first", type=Path, help="a receipt")
    comparing.add_argument("second", type=Path, help="another receipt of the same request")
    return parser


def _check_target(parser: OneLineParser, options: argparse.Namespace) -> None:
    if not options.base_url and not options.model:
        parser.error("nothing to compute it: give --base-url of a server, or --model to load here")
    if options.base_url and options.serve_args:
        parser.error("--base-url is a server that already runs: leave out --serve-args")
    if options.model_files and not options.base_url:
        parser.error("--model-files is for a server: the files of --model are known")
    if options.model_files and not options.model_files.is_dir():
        parser.error(f"--model-files {options.model_files}: no such folder")
    check_base_url(parser, options)
    check_model(parser, options, "--model")


def _add_target(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument_group("engine")
    add_base_url(target)
    target.add_argument("--model", help="a model to load here; with --base-url, the name of the served model")
    target.add_argument("--serve-args", default="", help="with a model loaded here: more arguments of `vllm serve`")
    target.add_argument("--model-files", type=Path, help="with --base-url: a folder here with the served files")


def _add_prompt(parser: argparse.ArgumentParser, help: str) -> None:
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help=help)
    prompt.add_argument("--prompt-file", type=Path, help="a text file with the prompt")
    parser.add_argument("--chat", action="store_true", help="the prompt is the message of a chat")
