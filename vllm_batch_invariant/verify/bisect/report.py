"""The report of a bisection, as a table on a console and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...envs import FLAG
from ..outcome import Status
from ..printing import count, printable
from .engine import BisectResult, Case, Found, Setting
from .recording import ITEM, MODULE_OUTPUT

if TYPE_CHECKING:
    from ...compare import Pair

EAGER = (
    "Layers ran eagerly, without compiled graphs and CUDA graphs, because recording does not see inside them: "
    "differences that only compiled layers have are not found."
)


def about(case: Case) -> str:
    """The requests of a case, in words."""
    has = f" and the adapter {case.adapter}" if case.adapter else ""
    return f"{_prompt(case)}{has} with {count(len(case.concurrent), 'concurrent request')}"


def verdict(case: Case, result: BisectResult) -> str:
    """The result in one line."""
    requests, found = f"{about(case)}:", result.found
    if found is not None:
        return f"{requests} the bits diverge at {where(found)}, {_step(found)}"
    if result.first_logprob is not None:
        unit = "value" if case.pooling else "output token"
        return f"{requests} the answer differs from {unit} {result.first_logprob} on, and no recorded output does"
    if result.unrecorded_differ:
        return f"{requests} the answer differs without recording, and does not with it"
    compared = f"{count(result.coverage.compared, 'output')} in {count(result.coverage.steps, 'step')}"
    return f"{requests} nothing differs: {compared} have the same bits as alone"


def where(found: Found) -> str:
    """Module, operation and, if there are several, the worker."""
    key = found.divergence.key
    call = f", call {key.call + 1}" if key.call else ""
    times = f", occurrence {key.occurrence + 1}" if key.occurrence else ""
    output = f", output {key.output + 1}" if key.output else ""
    worker = f" (worker {found.rank} of {found.workers})" if found.workers > 1 else ""
    return f"{key.module or 'the model'}: {key.operation}{call}{times}{output}{worker}"


def print_results(console: Console, setting: Setting, runs: Sequence[tuple[Case, BisectResult]]) -> None:
    """Print a table of the last run, and each run's verdict."""
    case, result = runs[-1]
    title = f"{setting.model}: {_prompt(case)} alone and with {count(len(case.concurrent), 'concurrent request')}"
    table = Table(title=escape(printable(title)), title_justify="left", show_header=False)
    for name, text in rows_of(setting, case, result).items():
        table.add_row(name, escape(text))
    console.print(table)
    console.print(EAGER, highlight=False)
    for case, result in runs:
        style = "green" if result.status == Status.REPRODUCIBLE else "red"
        console.print(verdict(case, result), style=style, highlight=False, markup=False, soft_wrap=True)


def as_json(setting: Setting, runs: Sequence[tuple[Case, BisectResult]]) -> dict[str, Any]:
    """The engine and every run as plain data."""
    return {"engine": asdict(setting), "eager": EAGER, "runs": [plain(*run) for run in runs]}


def plain(case: Case, result: BisectResult) -> dict[str, Any]:
    """The result of a run as plain data."""
    data: dict[str, Any] = {"verdict": verdict(case, result), "case": asdict(case), **asdict(result)}
    if result.found is not None:
        data["found"]["divergence"]["key"] = result.found.divergence.key._asdict()
        data["found"]["comparison"]["dtype"] = result.found.divergence.dtype
    return data


def rows_of(setting: Setting, case: Case, result: BisectResult) -> dict[str, str]:
    """The rows of the table: name and text."""
    coverage = result.coverage
    rows = {"engine": f"vLLM {setting.vllm}, {setting.device}, {setting.dtype}, {FLAG}={setting.flag}"}
    rows["mode"] = setting.mode
    if result.found is not None:
        rows |= _found(result.found)
    sizes = {count for count in result.requests if count > 1}
    if case.pooling:
        asked = (f"{name} {value}" for name, value in case.pooling.items() if value is not None)
        rows["asked"] = ", ".join(asked)
        rows["first value that differs"] = "none" if result.first_logprob is None else str(result.first_logprob)
    else:
        equal = f"all {case.max_tokens}" if result.first_token is None else f"the first {result.first_token}"
        rows["equal tokens"] = equal
        rows["first logprob that differs"] = (
            "none" if result.first_logprob is None else f"of output token {result.first_logprob}"
        )
    rows["compared"] = (
        f"{count(coverage.compared, 'output')} in {count(coverage.steps, 'step')} of "
        + " to ".join(map(str, sorted({min(sizes), max(sizes)})))
        + " requests"
        + (f"; {count(coverage.untested_steps, 'step')} had no other request" if coverage.untested_steps else "")
    )
    rows["left out: no dimension of rows"] = _counts(coverage.without_rows)
    rows["left out: in one run only"] = _counts(coverage.one_sided)
    rows["left out: not recorded"] = _counts(coverage.left_out)
    if not result.answers_recorded:
        rows["note"] = (
            "recording changed an answer: a function that is compiled by itself (torch.compile) ran eagerly during "
            "recording, or the engine does not repeat its own bits"
        )
    return rows


def _found(found: Found) -> dict[str, str]:
    divergence, comparison = found.divergence, found.comparison
    rows = {
        "the bits diverge at": where(found),
        "step": _step(found),
        "output": f"{divergence.dtype} {list(divergence.shape)}, the request's part",
        "elements that differ": f"{comparison.different} of {comparison.elements}",
    }
    if comparison.first is not None:
        rows["first that differs"] = _first(comparison.first)
    rows["its operands"] = _operands(found)
    others = [
        f"{', '.join(names)} only {when}"
        for names, when in ((divergence.only_alone, "alone"), (divergence.only_concurrent, "with concurrent requests"))
        if names
    ]
    if others:
        rows["just before it"] = "; ".join(others)
    if not found.repeats:
        rows["note"] = "one run gave other bits when it was repeated: concurrent requests are not the only cause"
    return rows


def _step(found: Found) -> str:
    last = found.position + found.rows - 1
    if found.output_token:
        return f"step {found.divergence.step} (decode, output token {found.output_token}, position {last})"
    return f"step {found.divergence.step} (prefill, positions {found.position} to {last})"


def _first(pair: "Pair") -> str:
    concurrent, alone = pair.bits or ("", "")
    expected, actual = f"{pair.expected!r} ({alone})", f"{pair.actual!r} ({concurrent})"
    return f"{list(pair.where)}: {expected} alone, {actual} with concurrent requests"


def _operands(found: Found) -> str:
    if found.divergence.key.operation == MODULE_OUTPUT:
        return (
            "unknown: no operation of PyTorch's dispatcher inside the module differs, so this was written by an "
            "operation of the mode, or by a kernel that is launched without the dispatcher (Triton, numba, a library's "
            "binding)"
        )
    if found.divergence.key.operation == ITEM:
        return "tensors that a processor made, which check compares; an encoder's operations are not told apart"
    if found.operands_differ:
        return (
            f"{', '.join(found.operands_differ)} differ already: a kernel wrote them that PyTorch's dispatcher does "
            "not see (Triton, numba, a library's binding)"
        )
    return "have the same bits in both runs"


def _prompt(case: Case) -> str:
    items = f" and {count(len(case.items), 'item')}" if case.items else ""
    return f"a prompt of {count(len(case.prompt), 'token')}{items}"


def _counts(counts: Mapping[str, int]) -> str:
    if not counts:
        return "none"
    listed = sorted(counts.items(), key=lambda item: -item[1])
    more = f" and {len(listed) - 6} more" if len(listed) > 6 else ""
    return f"{sum(counts.values())}: " + ", ".join(f"{name} ({count})" for name, count in listed[:6]) + more
