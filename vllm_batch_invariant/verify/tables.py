"""``vllm-batch-invariant coverage`` and ``settings``: tables of what is fixed; they need no other package."""

import argparse
import textwrap
from dataclasses import asdict

from .. import envs
from .arguments import OneLineParser, add_json, check_reports


def add_arguments(parser: OneLineParser) -> None:
    """Add the arguments of either command."""
    parser.set_defaults(run=_coverage if parser.get_default("command") == "coverage" else _settings)
    add_json(parser)


def _coverage(options: argparse.Namespace, parser: OneLineParser) -> int:
    check_reports(parser, options)
    from ..integration.coverage import COVERED, REFUSED, markdown

    if options.json:
        covered = [{"feature": feature.name, "covered": feature.note} for feature in COVERED]
        refused = [
            {"feature": one.name, "why": one.note, "what_to_do": one.remedy, "devices": one.devices} for one in REFUSED
        ]
        options.json.write(options, 0, {"covered": covered, "refused": refused})
    print(markdown())
    return 0


def _settings(options: argparse.Namespace, parser: OneLineParser) -> int:
    check_reports(parser, options)
    if options.json:
        found = [asdict(variable) | {"in_force": variable.read()} for variable in envs.VARIABLES]
        options.json.write(options, 0, {"settings": found})
    for variable in envs.VARIABLES:
        print(f"{variable.name}={variable.read()}    of {', '.join(variable.values)}")
        print(textwrap.indent(textwrap.fill(variable.meaning), "    "))
    return 0
