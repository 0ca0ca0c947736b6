"""Writes the figures of cost in the documents, out of ``benchmarks/data``: tables, and numbers within sentences.

usage: python -m scripts.cost_figures [DOCUMENT ...]

A document has ``<!--figure:NAME-->...<!--end-->``; what stands between is replaced by what :data:`FIGURES` makes of the
data now. ``tests/docs/test_cost_figures.py`` fails where a document says something else.
"""

import argparse
import csv
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import geometric_mean

from benchmarks.record import DATA, Measurement, read
from scripts import marks
from scripts.see.data import processor

ROOT = Path(__file__).parents[1]
SAMPLES = DATA / "samples.csv"
BEGIN, END = r"<!--figure:([\w-]+)-->", "<!--end-->"
_TAGS = ("model", "layers", "tp", "tree", "spec", "k", "arithmetic", "run", "format", "rank")
"""Keys of a case that say what was served, and not the load."""
_NEWEST, _OLDER = "0.33.0", "0.26.0"
_EQUAL = 0.005
"""A cost that is closer to 1 is not called a gain."""
Rows = Sequence[Measurement]


@dataclass(frozen=True)
class Line:
    """A case of a table: plain vLLM's measurement, the plugin's, and that of vLLM's own mode where there is one."""

    words: str
    stock: Measurement
    ours: Measurement
    native: Measurement | None = None


# What was measured


@cache
def _data(name: str) -> Rows:
    return tuple(read(DATA / f"{name}.csv"))


def _vllm(row: Measurement) -> str:
    return re.search(r"vllm=(\S+)", row.versions)[1]


def cost(row: Measurement) -> float:
    """A ratio to plain vLLM, turned over where more is better, so that below 1 always is less time or memory.

    Raises:
        ValueError: plain vLLM was not measured in that run.
    """
    if row.ratio is None:
        raise ValueError(f"nothing to compare {row.case} with")
    return 1 / row.ratio if row.unit.endswith("/s") else row.ratio


def engine(vllm: str = _NEWEST, gpu: str = "H200", **tags: str) -> list[Measurement]:
    """Measurements of whole engines that served exactly this: the 8B shape whole on one GPU unless tags say else."""
    return [
        row
        for row in _data("engine")
        if _vllm(row) == vllm
        and gpu in row.gpu
        and {key: row.keys[key] for key in _TAGS if key in row.keys} == tags
        and row.metric not in ("step", "length")
    ]


_ORDER = ("images", "embeddings", "throughput", "tpot", "prefill", "turn", "online", "startup", "memory")


def lines(rows: Rows) -> list[Line]:
    """The cases that both were measured in, in the order of a table."""
    by = {(row.provider, row.case, row.metric): row for row in reversed(rows)}
    found = [
        Line(_workload(ours), by["stock", case, metric], ours, by.get(("native", case, metric)))
        for (provider, case, metric), ours in by.items()
        if provider == "ours" and ("stock", case, metric) in by
    ]
    return sorted(found, key=lambda line: _place(line.ours))


def _place(row: Measurement) -> tuple[int, ...]:
    keys = row.keys
    metrics = ("ttft", "ttft-p99", "tpot", "tpot-p99")
    of_metric = metrics.index(row.metric) if keys["workload"] == "online" else 0
    count = keys.get("batch") or keys.get("images") or 0
    load = int(keys.get("context", 0)) > 64, int(keys.get("adapters", 0)), int(count)
    return _ORDER.index(keys["workload"]), *load, of_metric


def _workload(row: Measurement) -> str:
    """A case in words."""
    keys = row.keys
    adapters = {"": "", "1": ", one adapter", "8": ", eight adapters"}[keys.get("adapters", "")]
    match keys["workload"]:
        case "throughput":
            low, _, high = keys["output"].partition("-")
            return f"{keys['prompts']} prompts of {keys['input']} tokens, {low} to {high} output tokens each"
        case "tpot" if int(keys["context"]) > 64:
            return f"time per output token, batch {keys['batch']} behind {_number(int(keys['context']))} tokens"
        case "tpot":
            return f"time per output token, batch {keys['batch']}{adapters}"
        case "images":
            side = f"{keys['side']} x {keys['side']}"
            return f"first token of {keys['images']} image{'s' * (keys['images'] != '1')} of {side} and a question"
        case "embeddings":
            low, _, high = keys["input"].partition("-")
            return f"embeddings of {keys['texts']} texts of {low} to {high} tokens"
        case "prefill":
            return f"prefill, {keys['prompts']} prompts of {keys['input']} tokens{adapters}"
        case "turn":
            return f"first token behind {keys['input']} new tokens and {_number(int(keys['cached']))} cached ones"
        case "online":
            what = "time to the first token" if row.metric.startswith("ttft") else "time per output token"
            return f"server, {float(keys['rate']):g} requests a second: {what}, {_percentile(row.metric)}"
        case "startup":
            return "start-up, all compiling for the first time"
        case "memory":
            return "GPU memory"
    raise ValueError(f"no words for {row.case}")


def _percentile(metric: str) -> str:
    return "p99" if metric.endswith("p99") else "p50"


# How it is written


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ")


def _value(row: Measurement) -> str:
    if row.unit in ("tokens/s", "MiB"):
        return f"{_number(float(f'{row.p50:.4g}') if row.unit == 'tokens/s' else row.p50)} {row.unit}"
    if row.p50 >= 1000:
        return f"{_number(float(f'{row.p50:.3g}'))} {row.unit}"
    return f"{row.p50:#.3g} {row.unit}".replace(". ", " ")


def _bold(ratio: float) -> str:
    return f"**{ratio:.2f}**" if ratio < 1 - _EQUAL else f"{ratio:.2f}"


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    rows = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in (head, *body)]
    return "\n".join((rows[0], "|" + "---|" * len(head), *rows[1:]))


def _engine_table(rows: Rows, native: bool = False) -> str:
    head = ["workload", "plain vLLM", "with the plugin", "cost", *["vLLM's own mode"] * native, "measured"]
    body = []
    for line in lines(rows):
        own = [f"{cost(line.native):.2f}" if line.native else ""] * native
        body.append([line.words, _value(line.stock), _value(line.ours), _bold(cost(line.ours)), *own, line.ours.date])
    return _table(head, body)


def _span(costs: Iterable[float]) -> str:
    found = sorted(costs)
    low, high = f"{found[0]:.2f}", f"{found[-1]:.2f}"
    return low if low == high else f"{low} to {high}"


def _costs(rows: Rows, provider: str = "ours", workload: str | None = None) -> str:
    """From the lowest to the highest cost."""
    wanted = [
        cost(row)
        for row in rows
        if row.provider == provider and row.ratio is not None and workload in (None, row.keys["workload"])
    ]
    return _span(wanted)


# Whole engines


def _first() -> str:
    """The first table of the README."""
    rows = list(csv.DictReader(SAMPLES.open(newline="")))
    newest = [row for row in rows if row["run"] == rows[0]["run"]]
    plain, mode = (next(row for row in newest if row["mode"] == mode) for mode in ("off", "on"))
    head = [f"{plain['samples']} samples of one request at temperature 0", "plain vLLM", "with the plugin"]
    body = [
        ["different completions", plain["completions"], f"**{mode['completions']}**"],
        [
            "different logprobs, of the same text or not",
            plain["logprob_sequences"],
            f"**{mode['logprob_sequences']}**",
        ],
        ["time per output token", "1", f"**{_costs(engine(gpu='H100'), workload='tpot')}**"],
    ]
    low, high = plain["batch"].split("-")
    why = " Random weights are [the harder test](docs/models.md)." if "random" in plain["model"] else ""
    return (
        f"{_table(head, body)}\n\n"
        f"(Samples: {plain['model']}; {plain['machine']}, vLLM {plain['vllm']}, {plain['date']}, in batches of {low} "
        f"to {high}.{why} Time: [what it costs](#what-it-costs).)"
    )


def add_recording(recording: dict, model: str, machine: str, table: Path = SAMPLES) -> None:
    """Put a run of plain vLLM and of the mode before the others.

    Args:
        recording: what ``vllm-batch-invariant reproduce --compare --json`` wrote.
        model: its name in words.
        machine: the GPU or processor that served it.

    Raises:
        ValueError: it has not one result without the mode and one with it.
    """
    results = recording["results"]
    modes = ["off" if result["info"]["mode"].startswith("none") else "on" for result in results]
    if sorted(modes) != ["off", "on"]:
        raise ValueError(f"one result without the mode and one with it are needed, not {modes}")
    with table.open(newline="") as file:
        old = list(csv.DictReader(file))
    new = []
    for mode, result in zip(modes, results, strict=True):
        running = sorted(map(int, result["batches"]["running"]))
        new.append(
            {
                "run": str(1 + max((int(row["run"]) for row in old), default=0)),
                "mode": mode,
                "samples": str(len(result["samples"]["which"])),
                "completions": str(result["comparison"]["completions"]),
                "logprob_sequences": str(result["comparison"]["logprob_sequences"]),
                "max_tokens": str(recording["request"]["max_tokens"]),
                "batch": f"{running[0]}-{running[-1]}",
                "model": model,
                "machine": machine,
                "vllm": result["info"]["versions"]["vllm"],
                "date": recording["began"][:10],
            }
        )
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(new[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*new, *old])


def _drafts(spec: str) -> str:
    """Time per token with drafts, of texts that no rounding changes."""
    body = []
    for drafts in ("1", "3", "7"):
        for line in lines(engine(model="predictable", spec=spec, k=drafts)):
            row = line.ours
            body.append(
                [drafts, row.keys["batch"], _value(line.stock), _value(row), _bold(cost(row)), row.date],
            )
    return _table(["drafts", "requests", "plain vLLM", "with the plugin", "cost", "measured"], body)


def _fair_drafts() -> list[Measurement]:
    return [row for k in "137" for spec in ("ngram", "eagle3") for row in engine(model="predictable", spec=spec, k=k)]


def _drafts_of_random_texts() -> list[Measurement]:
    return [row for row in _data("engine") if row.keys.get("spec") == "ngram-repeats" and "H200" in row.gpu]


def _two_gpus(**tags: str) -> Rows:
    return engine(gpu="H100", tp="2", **tags)


def _tree(**tags: str) -> str:
    """What a tree of two slices costs against the plugin without one, by token."""
    without = {row.case: row for row in engine(**tags) if row.provider == "ours"}
    with_tree = [row for row in engine(tree="2", **tags) if row.metric == "tpot"]
    return _span(row.p50 / without[row.case.replace(" tree=2", "")].p50 for row in with_tree)


# Parts


def _ratios(rows: Iterable[Measurement], provider: str) -> list[float]:
    return [row.ratio for row in rows if row.provider == provider and row.metric == "time" and row.ratio is not None]


def _mean_and_worst(ratios: Sequence[float]) -> str:
    return f"{geometric_mean(ratios):.2f}, {max(ratios):.2f}"


def _of_rows(low: int, high: int, data: str = "linear") -> Rows:
    return [row for row in _data(data) if low <= int(row.keys["M"]) <= high]


def _by_rows(data: str, head: Sequence[str], cells: Callable[[Rows], Sequence[str]]) -> str:
    """A line for few, 128 and many rows, with cells of the data of these."""
    body = []
    for low, high in ((1, 64), (128, 128), (256, 8192)):
        body.append([f"{low} to {high}" if low != high else str(low), *cells(_of_rows(low, high, data))])
    return _table(["rows M", *head], body)


def _linear() -> str:
    head, providers = ("with cuBLASLt", "Triton only", "vLLM 0.26's own mode"), ("ours", "ours-triton", "native")
    return _by_rows("linear", head, lambda rows: [_mean_and_worst(_ratios(rows, who)) for who in providers])


def _long_linear(provider: str) -> str:
    return _span(geometric_mean(_ratios(_of_rows(*ends), provider)) for ends in ((128, 128), (256, 8192)))


def _slower_triton() -> str:
    """How much longer Triton's matmuls take than cuBLAS's, in percent."""
    low, high = (round(100 * (float(ratio) - 1)) for ratio in _long_linear("ours-triton").split(" to "))
    return f"{low} to {high} %"


def _linear_fp8() -> str:
    return _by_rows("linear_fp8", ("mean", "worst"), lambda rows: _mean_and_worst(_ratios(rows, "ours")).split(", "))


def _fp8_accuracy() -> str:
    """The least and the most of all layers, in per cent."""
    rows = [row for row in _data("accuracy") if row.keys.get("op") == "fp8-linear"]

    def of_layers(who: str, metric: str, kind: str, m: str) -> str:
        found = [
            100 * row.p50
            for row in rows
            if (row.provider, row.metric, row.keys["kind"], row.keys["M"]) == (who, metric, kind, m)
        ]
        low, high = (f"{end:.1f}" if end else "0" for end in (min(found), max(found)))
        return low if low == high else f"{low} to {high}"

    head = [
        "activations",
        "rows",
        *(f"{what}: {who}" for what in ("error", "differ") for who in ("plain vLLM", "plugin")),
    ]
    cases = dict.fromkeys((row.keys["kind"], row.keys["M"]) for row in rows)
    columns = [(who, metric) for metric in ("error", "differing") for who in ("stock", "ours")]
    body = [[kind.replace("-", " "), m, *(f"{of_layers(*of, kind, m)} %" for of in columns)] for kind, m in cases]
    return _table(head, body)


def _state_accuracy() -> str:
    """A line for each layer and kind of its tokens."""
    kinds: dict[tuple[str, str | None, str | None], dict[tuple[str, str], float]] = {}
    for row in _data("accuracy"):
        if "layer" in row.keys:
            kind = row.keys["layer"], row.keys.get("gate"), row.keys.get("keys")
            kinds.setdefault(kind, {})[row.provider, row.keys["phase"]] = row.p50
    head = ["layer", "tokens", "the plugin", "plain vLLM, prefill", "plain vLLM, decode"]
    body = []
    for (layer, gate, keys), found in kinds.items():
        words = f"decays of e^-{gate}" if gate else ""
        cells = [found.get(key) for key in (("ours", "any"), ("stock", "prefill"), ("stock", "decode"))]
        body.append(
            [
                layer.replace("-", " "),
                words + f", keys {keys}" * bool(keys),
                *("" if error is None else f"{1e3 * error:.2f}" for error in cells),
            ]
        )
    return _table(head, body)


def _is_decode(row: Measurement) -> bool:
    return row.keys["phase"] == "decode"


def _attention_phase(row: Measurement) -> str:
    keys = row.keys
    if _is_decode(row):
        return "decode"
    return "prefill" if keys["phase"] == "prefill" and keys["context"] == keys["tokens"] else "chunk and mixed"


def _attention() -> str:
    names = {
        "ours-triton": "the plugin's kernels",
        "ours-flex": "the plugin's FlexAttention",
        "fa3-one-split": "FlashAttention 3 with one split",
        "native-triton": "vLLM's Triton backend",
    }
    body = []
    for provider, name in names.items():
        phases: dict[str, list[float]] = {}
        for row in _data("attention"):
            if row.provider == provider and row.metric == "time" and row.ratio is not None:
                phases.setdefault(_attention_phase(row), []).append(row.ratio)
        body.append([name, *(_mean_and_worst(phases[phase]) for phase in ("decode", "prefill", "chunk and mixed"))])
    return _table(["", "decode", "prefill", "chunks, and prefills among decodes"], body)


def _attention_of_codes() -> str:
    """Decode over a KV cache in FP8, by requests and keys."""
    rows = [row for row in _data("attention_fp8") if row.provider == "ours-triton" and row.metric == "time"]
    by = {tuple(row.keys[key] for key in ("heads", "kv_heads", "batch", "context")): row.ratio for row in rows}
    contexts = sorted({context for *_, context in by}, key=int)
    body = []
    for heads, kv_heads, batch in dict.fromkeys(key[:3] for key in by):
        found = [by.get((heads, kv_heads, batch, context)) for context in contexts]
        body.append([f"{heads} over {kv_heads}, {batch}", *(_bold(one) if one else "" for one in found)])
    return _table(["heads, requests", *(f"{int(context) >> 10}k keys" for context in contexts)], body)


_LAYERS = {
    "Mistral 7B, window of 4096": {"heads": "32", "head": "128", "window": "4096"},
    "gpt-oss-20b, sinks": {"heads": "64", "head": "64", "sinks": "yes"},
    "gpt-oss-20b, sinks, window of 128": {"heads": "64", "head": "64", "window": "128", "sinks": "yes"},
    "Gemma 3 12B, heads of 256": {"heads": "16", "head": "256"},
    "Gemma 3 12B, heads of 256, window of 1024": {"heads": "16", "head": "256", "window": "1024"},
}
"""Layers that are more than plain causal attention, by their names in words."""
_TOWERS = {"Qwen3-VL, heads of 72": "72", "Qwen2.5-VL, 80": "80", "InternVL, 64": "64", "GLM-4.1V, 128": "128"}


@cache
def _layer_rows() -> dict[tuple[str, ...], float | None]:
    """Ratios of ours, by phase, requests, new tokens, keys, and what is known of the layer."""
    keys = ("phase", "batch", "tokens", "context", "heads", "head", "window", "sinks")
    return {
        tuple(row.keys.get(key, "") for key in keys): row.ratio
        for row in _data("attention_layers")
        if row.provider == "ours-triton" and row.metric == "time"
    }


def _cells(of: dict[str, str], cases: Sequence[tuple[str, int, int, int]]) -> list[str]:
    found, rows = [], _layer_rows()
    for phase, *numbers in cases:
        layer = (of.get(key, "") for key in ("heads", "head", "window", "sinks"))
        ratio = rows.get((phase, *map(str, numbers), *layer))
        found.append(_bold(ratio) if ratio else "")
    return found


def _attention_of_layers(phase: str) -> str:
    """Layers with windows, sinks and large heads, in decode or else."""
    if phase == "decode":
        sizes = ((1, 1024), (8, 8192), (64, 1024), (64, 8192), (1, 32768))
        head = [f"{batch} x {context >> 10}k keys" for batch, context in sizes]
        cases = [("decode", batch, 1, context) for batch, context in sizes]
    else:
        head = ["1k tokens", "4k", "16k", "512 behind 15.5k"]
        cases = [("prefill", 1, tokens, tokens) for tokens in (1024, 4096, 16_384)] + [("chunk", 1, 512, 16_384)]
    return _table(["", *head], [[name, *_cells(of, cases)] for name, of in _LAYERS.items()])


def _attention_of_encoders() -> str:
    sizes = ((1, 1024), (8, 1024), (1, 4096), (1, 16_384))
    cases = [("encode", batch, tokens, tokens) for batch, tokens in sizes]
    body = []
    for name, head in _TOWERS.items():
        of = {"heads": "12" if head == "128" else "16", "head": head}
        body.append([name, *_cells(of, cases)])
    return _table(["", *(f"{batch} x {tokens >> 10}k patches" for batch, tokens in sizes)], body)


def _flex(phase: str) -> str:
    rows = [row for row in _data("attention") if _attention_phase(row) == phase]
    return f"{geometric_mean(_ratios(rows, 'ours-flex')):.1f}"


def _experts(gpu: str) -> str:
    rows = [row for row in _data("moe") if gpu in row.gpu and row.provider == "ours" and row.metric == "time"]
    rows = [row for row in rows if "format" not in row.keys]
    found = {tuple(row.keys[key] for key in ("E", "top", "H", "I")) for row in rows}
    shapes = sorted(found, key=lambda shape: (-int(shape[0]), *map(int, shape[1:])))
    by = {(row.keys["M"], tuple(row.keys[key] for key in ("E", "top", "H", "I"))): row.ratio for row in rows}
    head = ["tokens", *(f"{e} experts, top {top}, {h} x {i}" for e, top, h, i in shapes)]
    tokens = sorted({row.keys["M"] for row in rows}, key=int)
    return _table(head, [[m, *(_bold(by[m, shape]) if by.get((m, shape)) else "" for shape in shapes)] for m in tokens])


def _experts_fp8() -> str:
    """By tokens: the time of plain vLLM's choice, and what others take of it."""
    rows = [row for row in _data("moe") if row.keys.get("format") == "w8a8-fp8-block" and row.metric == "time"]
    by = {(row.provider, row.keys["M"]): row for row in rows}
    head = ["tokens", "plain vLLM, Triton", "plain vLLM, DeepGEMM", "the plugin"]
    body = []
    for m in sorted({m for _, m in by}, key=int):
        others = [by.get((who, m)) for who in ("stock-deep-gemm", "ours")]
        cells = (_bold(one.ratio) if one and one.ratio else "" for one in others)
        body.append([m, f"{by['stock', m].p50:.0f} us", *cells])
    return _table(head, body)


def _collectives(gpus: str) -> str:
    rows = [row for row in _data("collectives") if row.metric == "time" and row.keys["gpus"] == gpus]
    by = {(row.provider, row.keys["op"], int(row.keys["bytes"])): row for row in rows}
    sizes = sorted({size for _, op, size in by if op == "all_reduce"})
    head = ["bytes"]
    ops = {"all_reduce": "all-reduce", "all_reduce+norm": "all-reduce, residual and RMSNorm"}
    for name in ops.values():
        head += [f"{name}: vLLM", "the plugin", "ratio"]
    body = []
    for size in sizes:
        cells = [f"{size >> 20} MiB" if size >> 20 else f"{size >> 10} KiB"]
        for op in ops:
            stock, ours = by["stock", op, size], by["ours", op, size]
            cells += [f"{stock.p50:.1f}", f"{ours.p50:.1f}", _bold(ours.ratio)]
        body.append(cells)
    return _table(head, body)


FIGURES: dict[str, Callable[[], str]] = {
    "first": _first,
    "engine": lambda: _engine_table(engine(gpu="H100")),
    "engine-older": lambda: _engine_table(engine(_OLDER), native=True),
    "w4a16": lambda: _engine_table(engine(gpu="H100", format="w4a16-g128")),
    "fp8": lambda: _engine_table(engine(gpu="H100", format="w8a8-fp8-block")),
    "fp8-h200": lambda: _engine_table(engine(gpu="H200", format="w8a8-fp8-block")),
    "fp8-experts": lambda: _engine_table(engine(model="30b-a3b", format="w8a8-fp8-block")),
    "delta-rule-engine": lambda: _engine_table(engine(model="qwen3.5-9b")),
    "delta-rule-experts": lambda: _engine_table(engine(model="qwen3.5-35b-a3b")),
    "state-space-engine": lambda: _engine_table(engine(model="nemotron-h-8b")),
    "images-qwen": lambda: _engine_table(engine(model="qwen2.5-vl-7b")),
    "images-gemma": lambda: _engine_table(engine(model="gemma-3-4b")),
    "embeddings": lambda: _engine_table(engine(model="qwen3-embedding-0.6b")),
    "adapters-16": lambda: _engine_table(engine(rank="16")),
    "adapters-64": lambda: _engine_table(engine(rank="64")),
    "experts": lambda: _engine_table(engine(model="30b-a3b")),
    "two-8b": lambda: _engine_table(_two_gpus()),
    "two-32b": lambda: _engine_table(_two_gpus(model="32b", layers="24")),
    "two-30b-a3b": lambda: _engine_table(_two_gpus(model="30b-a3b")),
    "two-30b-a3b-part": lambda: _engine_table(_two_gpus(model="30b-a3b", layers="12")),
    "two-8b-part": lambda: _engine_table(_two_gpus(model="8b", layers="12")),
    "drafts-ngram": lambda: _drafts("ngram"),
    "drafts-eagle3": lambda: _drafts("eagle3"),
    "linear": _linear,
    "linear-fp8": _linear_fp8,
    "fp8-accuracy": _fp8_accuracy,
    "state-accuracy": _state_accuracy,
    "attention": _attention,
    "attention-decode-layers": lambda: _attention_of_layers("decode"),
    "attention-prefill-layers": lambda: _attention_of_layers("prefill"),
    "attention-encoders": _attention_of_encoders,
    "attention-fp8": _attention_of_codes,
    "attention-fp8-mean": lambda: f"{geometric_mean(_ratios(_data('attention_fp8'), 'ours-triton')):.2f}",
    "moe-h200": lambda: _experts("H200"),
    "moe-h100": lambda: _experts("H100"),
    "moe-fp8": _experts_fp8,
    "collectives": lambda: _collectives("2"),
    "collectives-four": lambda: _collectives("4"),
    "cost-token": lambda: _costs(engine(gpu="H100"), workload="tpot"),
    "cost-prompts": lambda: _costs(engine(gpu="H100"), workload="throughput"),
    "cost-token-w4a16": lambda: _costs(engine(gpu="H100", format="w4a16-g128"), workload="tpot"),
    "cost-token-fp8": lambda: _costs(engine(gpu="H200", format="w8a8-fp8-block"), workload="tpot"),
    "cost-token-experts": lambda: _costs(engine(model="30b-a3b"), workload="tpot"),
    "cost-prompts-experts": lambda: _costs(engine(model="30b-a3b"), workload="throughput"),
    "cost-two-token": lambda: _costs(_two_gpus(model="32b", layers="24"), workload="tpot"),
    "cost-older-token": lambda: _costs(engine(_OLDER), workload="tpot"),
    "own-mode-token": lambda: _costs(engine(_OLDER), "native", "tpot"),
    "tree-one": _tree,
    "tree-two": lambda: _tree(gpu="H100", tp="2"),
    "cost-drafts": lambda: _costs(_fair_drafts()),
    "cost-drafts-of-random-texts": lambda: _costs(_drafts_of_random_texts(), workload="tpot"),
    "linear-cublas": lambda: _long_linear("ours"),
    "linear-triton": lambda: _long_linear("ours-triton"),
    "slower-triton": _slower_triton,
    "flex-decode": lambda: _flex("decode"),
    "flex-prefill": lambda: _flex("prefill"),
}
"""What may stand in a document, by its name."""


def written(text: str) -> str:
    """A document with its figures as the data have them.

    Raises:
        KeyError: a mark names no figure.
        ValueError: a mark within a sentence begins a line, where Markdown would take the line for HTML.
    """

    def figure_at(found: re.Match[str]) -> str:
        name, before = found[1], text[: found.start()]
        figure = FIGURES[name]()
        begins_line = not before or before.endswith("\n")
        if "\n" in figure:
            return f"\n\n{figure}\n\n"
        if begins_line:
            raise ValueError(f"the figure {name} begins a line")
        return figure

    return marks.put_each(text, BEGIN, END, figure_at)


def documents() -> list[Path]:
    """Those that have figures."""
    return [
        path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))) if re.search(BEGIN, path.read_text())
    ]


def main(arguments: list[str] | None = None) -> None:
    """Write the figures of all documents, and print which changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", nargs="*", type=Path, metavar="DOCUMENT", help="default: all that have figures")
    parser.add_argument(
        "--add", type=Path, metavar="JSON", help="first add a run that reproduce --compare --json wrote"
    )
    parser.add_argument("--model", default="the model of make-checkpoint", help="of --add, in words")
    parser.add_argument("--machine", default=processor(), help="of --add (default: this processor)")
    options = parser.parse_args(arguments)
    if options.add:
        add_recording(json.loads(options.add.read_text()), options.model, options.machine)
    for path in options.documents or documents():
        before = path.read_text()
        after = written(before)
        if after != before:
            path.write_text(after)
            print(path)


if __name__ == "__main__":
    main()
