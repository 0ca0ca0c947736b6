"""``vllm-batch-invariant coverage`` and ``settings``: tables of what is fixed, which need no other package, and whether
an engine would start.
"""

import argparse
import os
import textwrap
from dataclasses import asdict

from .. import envs
from ..errors import NotCovered
from .arguments import OneLineParser, add_json, add_model, check_model, check_reports


def add_arguments(parser: OneLineParser) -> None:
    """Add the arguments of either command."""
    is_coverage = parser.get_default("command") == "coverage"
    parser.set_defaults(run=_coverage if is_coverage else _settings)
    if is_coverage:
        add_model(parser, served=False, plain=False)
    add_json(parser)


def _coverage(options: argparse.Namespace, parser: OneLineParser) -> int:
    check_reports(parser, options)
    check_model(parser, options)
    if options.model:
        return _would_start(options)
    if options.serve_args:
        parser.error("--serve-args: of which model?")
    from ..integration.coverage import COVERED, REFUSED, markdown

    if options.json:
        covered = [{"feature": feature.name, "covered": feature.note} for feature in COVERED]
        refused = [
            {"feature": one.name, "why": one.note, "what_to_do": one.remedy, "devices": one.devices} for one in REFUSED
        ]
        options.json.write(options, 0, {"covered": covered, "refused": refused})
    print(markdown())
    return 0


def _would_start(options: argparse.Namespace) -> int:
    """Ask the start-up check about a model's configuration and an engine's arguments; no weight is loaded.

    Raises:
        NoTestError: vLLM or this plugin is missing, or vLLM makes no configuration of these.
        NotCovered: everything that the check refuses.
    """
    from .harness.engine import engine_arguments
    from .harness.mode import OURS, of_started
    from .outcome import NoTestError
    from .printing import one_line

    os.environ[envs.FLAG] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if of_started(os.environ) != OURS:
        raise NoTestError("vLLM does not find this plugin in this Python, so nothing is refused")
    found = {"model": options.model, "serve_args": options.serve_args}
    try:
        config = engine_arguments(options.model, options.serve_args).create_engine_config()
    except NotCovered as refusal:
        if options.json:
            options.json.write(options, 2, found | {"starts": False, "refused": str(refusal)})
        raise
    except NoTestError:
        raise
    except Exception as error:  # vLLM's own checks raise anything
        raise NoTestError(f"vLLM makes no configuration of these: {one_line(error)}") from error
    if options.json:
        options.json.write(options, 0, found | {"starts": True, "refused": None})
    model, device = config.model_config, config.device_config.device_type
    kind = f", {model.quantization}" if model.quantization else ""
    print(
        f"starts: {model.architecture} in {str(model.dtype).removeprefix('torch.')}{kind} on {device}, as far as its "
        "configuration tells; layers and kernels are looked at when it is loaded"
    )
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
