"""How far layers with a state are from float64 after many tokens: ``python -m benchmarks.state_accuracy``. Gated delta
nets, state spaces of Mamba-2 and short convolutions, by the mode and by vLLM in prefill and in decode, on a CPU. CSV to
--out.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.record import DATA, Measurement, Setting, case_text, update
from vllm_batch_invariant.envs import FLAG
from vllm_batch_invariant.ops.causal_conv import ConvReduction, ConvStates, causal_conv
from vllm_batch_invariant.ops.delta_rule import (
    DeltaRuleReduction,
    DeltaStates,
    delta_rule,
    gdn_inputs,
    mamba2_inputs,
    reference,
)

TOKENS, LAST = 32_000, 8_000
"""Tokens of a request, and of those at its end whose error is told."""
_ALONE, _CHUNK = 100, 1_000
"""Tokens at the end that come one by one, and those of a chunk before them, when the mode's bits are compared."""
_DTYPE = torch.bfloat16

Results = Callable[[], torch.Tensor]


def _drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _cuts() -> list[int]:
    """Where a request of so many tokens ends a call: at uneven chunks, then at each token."""
    return [*range(_CHUNK, TOKENS - _ALONE, _CHUNK - 1), *range(TOKENS - _ALONE, TOKENS + 1)]


@dataclass(frozen=True)
class Case:
    """A layer's tokens.

    Attributes:
        exact: float64 results of a definition.
        ours: results of a request that comes in calls which end at these tokens.
        plain: what vLLM calls for prefill and for decode.
    """

    exact: torch.Tensor
    ours: Callable[[list[int]], torch.Tensor]
    plain: dict[str, Results]


def _in_calls(cuts: list[int], call: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    return torch.cat([call(first, end) for first, end in zip([0, *cuts], cuts, strict=False)])


def _request(context: int, count: int) -> dict[str, torch.Tensor]:
    """A page, one request of so many new tokens behind others, and the tokens before them."""
    return {
        "pages": torch.tensor([0], dtype=torch.int32),
        "starts": torch.tensor([0, count], dtype=torch.int32),
        "context_lens": torch.tensor([context], dtype=torch.int32),
    }


def _by_rule(
    inputs: Callable[[slice], tuple[torch.Tensor, ...]],
    reduction: DeltaRuleReduction,
    key_heads: int,
    value_heads: int,
    skip: torch.Tensor | None = None,
) -> Callable[[list[int]], torch.Tensor]:
    """What the rule makes of a request's operands, which ``inputs`` makes of its rows, in calls that end at cuts."""
    rows = reduction.rows(drafts=0)
    size = reduction.page_bytes(key_heads, value_heads, rows)

    def ours(cuts: list[int]) -> torch.Tensor:
        states = torch.full((1, size), 255, dtype=torch.uint8)

        def call(first: int, end: int) -> torch.Tensor:
            held = DeltaStates(states, **_request(first, end - first), longest=end - first, rows=rows)
            return delta_rule(*inputs(slice(first, end)), held, reduction, skip)

        return _in_calls(cuts, call)

    return ours


def delta_net(gate: float, spread: float) -> Case:
    """Two key heads and four value heads of 128, of Qwen3.5's form. Keys are the more alike the less their spread."""
    from vllm import _custom_ops as plain

    key_heads, value_heads, size = 2, 4, 128
    of_keys = key_heads * size
    alike = _drawn(0, of_keys).repeat(2)
    qk = (1 - spread) * alike + spread * _drawn(1, TOKENS, 2 * of_keys)
    mixed = torch.cat([qk, _drawn(2, TOKENS, value_heads * size)], 1).to(_DTYPE)
    a, b = (_drawn(seed, TOKENS, value_heads).to(_DTYPE) for seed in (3, 4))
    dt_bias = torch.full((value_heads,), 1.0, dtype=_DTYPE)
    mean = torch.nn.functional.softplus(a.float() + dt_bias.float()).mean()
    a_log = torch.full((value_heads,), (gate / mean).log().item())

    def inputs(rows: slice) -> tuple[torch.Tensor, ...]:
        return gdn_inputs(mixed[rows], a[rows], b[rows], a_log, dt_bias, key_heads, size)

    ours = _by_rule(inputs, DeltaRuleReduction.of(size, size, _DTYPE), key_heads, value_heads)
    q, k, v = (x.unflatten(1, (-1, size)).contiguous() for x in mixed.split([of_keys, of_keys, value_heads * size], 1))
    index, starts = torch.tensor([0], dtype=torch.int32), torch.tensor([0, TOKENS], dtype=torch.int32)

    def prefill() -> torch.Tensor:
        g, beta = plain.fused_gdn_gating_cpu(A_log=a_log, a=a, b=b, dt_bias=dt_bias)
        state = torch.zeros(1, value_heads, size, size)
        out, _ = plain.chunk_gated_delta_rule_cpu(
            *(x[None] for x in (q, k, v)), g, beta, state, True, starts, False, True, index
        )
        return out.squeeze(0)

    def decode() -> torch.Tensor:
        state = torch.zeros(1, value_heads, size, size)
        one = torch.tensor([0, 1], dtype=torch.int32)
        made = [
            plain.fused_sigmoid_gating_delta_rule_update_cpu(
                A_log=a_log,
                dt_bias=dt_bias,
                q=q[None, t : t + 1],
                k=k[None, t : t + 1],
                v=v[None, t : t + 1],
                a=a[t : t + 1],
                b=b[t : t + 1],
                initial_state_source=state,
                initial_state_indices=index,
                cu_seqlens=one,
                use_qk_l2norm_in_kernel=True,
            ).view(1, value_heads, size)
            for t in range(TOKENS)
        ]
        return torch.cat(made)

    exact, _ = reference.delta_rule(*reference.gdn_inputs(mixed, a, b, a_log, dt_bias, key_heads, size))
    return Case(exact, ours, {"prefill": prefill, "decode": decode})


def state_space(gate: float) -> Case:
    """Four heads of 64 with states of 128, one group, of Nemotron-H's form."""
    from vllm.model_executor.layers.mamba.ops.cpu import mamba_ssm as plain

    heads, size, state_size = 4, 64, 128
    mixed = _drawn(0, TOKENS, heads * size + 2 * state_size).to(_DTYPE)
    dt = _drawn(1, TOKENS, heads).to(_DTYPE)
    dt_bias, skip = torch.ones(heads), _drawn(2, heads)
    a = torch.full((heads,), -gate / torch.nn.functional.softplus(dt.float() + dt_bias).mean().item())

    def inputs(rows: slice) -> tuple[torch.Tensor, ...]:
        return mamba2_inputs(mixed[rows], dt[rows], a, dt_bias, 1, state_size)

    ours = _by_rule(inputs, DeltaRuleReduction.of(state_size, size, _DTYPE, solve=False), 1, heads, skip)
    x, b, c = mixed.split([heads * size, state_size, state_size], 1)
    x, b, c = x.reshape(TOKENS, heads, size), b.reshape(TOKENS, 1, state_size), c.reshape(TOKENS, 1, state_size)

    def prefill() -> torch.Tensor:
        out = torch.empty_like(x)
        starts = torch.tensor([0, TOKENS], dtype=torch.int32)
        plain._mamba_chunk_scan_combined_fwd_cpu(
            x, dt, a, b, c, 256, out, D=skip, dt_bias=dt_bias, cu_seqlens=starts, dt_softplus=True
        )
        return out

    def decode() -> torch.Tensor:
        state = torch.zeros(2, heads, size, state_size)
        wide = a[:, None, None].expand(heads, size, state_size), skip[:, None].expand(heads, size)
        of_dt = dt_bias[:, None].expand(heads, size)
        out, index = torch.empty_like(x), torch.tensor([1], dtype=torch.int32)
        for t in range(TOKENS):
            plain.selective_state_update(
                state,
                x[t : t + 1],
                dt[t : t + 1, :, None].expand(1, heads, size),
                wide[0],
                b[t : t + 1],
                c[t : t + 1],
                wide[1],
                dt_bias=of_dt,
                dt_softplus=True,
                state_batch_indices=index,
                out=out[t : t + 1],
            )
        return out

    g, steps = reference.mamba2_gates(dt, a, dt_bias)
    exact, _ = reference.delta_rule(c, b, x, g, steps, solve=False, skip=skip)
    return Case(exact, ours, {"prefill": prefill, "decode": decode})


def convolution() -> Case:
    """512 channels, four taps, SiLU."""
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu

    channels, width = 512, 4
    x, weight, bias = _drawn(0, TOKENS, channels), 0.5 * _drawn(1, channels, width), 0.1 * _drawn(2, channels)
    x, weight, bias = (one.to(_DTYPE) for one in (x, weight, bias))
    reduction = ConvReduction.of(width, _DTYPE, False)

    def ours(cuts: list[int]) -> torch.Tensor:
        states = torch.full((1, reduction.width - 1, channels), torch.nan, dtype=_DTYPE)

        def call(first: int, end: int) -> torch.Tensor:
            held = ConvStates(states, **_request(first, end - first), longest=end - first)
            return torch.nn.functional.silu(causal_conv(x[first:end], weight, bias, held))

        return _in_calls(cuts, call)

    def prefill() -> torch.Tensor:
        return causal_conv1d_fn_cpu(
            x=x.t(),
            weight=weight,
            bias=bias,
            conv_states=torch.zeros(1, channels, width - 1, dtype=_DTYPE),
            query_start_loc=torch.tensor([0, TOKENS], dtype=torch.int32),
            cache_indices=torch.tensor([0], dtype=torch.int32),
            has_initial_state=torch.tensor([False]),
            activation="silu",
        ).t()

    before = torch.cat([torch.zeros(width - 1, channels), x.float()]).double()
    taps = sum(before[tap : tap + TOKENS] * weight[:, tap].double() for tap in range(width))
    return Case(torch.nn.functional.silu(taps + bias.double()), ours, {"prefill": prefill})


CASES: dict[str, Callable[[], Case]] = {
    "layer=delta-net gate=0.05": lambda: delta_net(0.05, 1.0),
    "layer=delta-net gate=0.001": lambda: delta_net(0.001, 1.0),
    "layer=delta-net gate=0.001 keys=alike": lambda: delta_net(0.001, 0.5),
    "layer=delta-net gate=2": lambda: delta_net(2.0, 1.0),
    "layer=mamba2 gate=0.05": lambda: state_space(0.05),
    "layer=mamba2 gate=0.001": lambda: state_space(0.001),
    "layer=short-convolution": convolution,
}


def measured(name: str, case: Case, setting: Setting) -> Iterator[Measurement]:
    """The rows of a layer: errors of the last tokens, and whether the mode's bits are those of a request that comes in
    other calls.
    """
    whole = case.ours([TOKENS])
    found = {"ours": {"any": whole}, "stock": {phase: results() for phase, results in case.plain.items()}}
    same = torch.equal(whole, case.ours(_cuts()))
    exact = case.exact[-LAST:]

    def error(results: torch.Tensor) -> float:
        return ((results[-LAST:].double() - exact).norm() / exact.norm()).item()

    of_stock = max(error(results) for results in found["stock"].values())
    phases = list(found["stock"].values())
    stock_is_same = all(torch.equal(phases[0], other) for other in phases[1:])
    for provider, results in found.items():
        for phase, given in results.items():
            value = error(given)
            held = same if provider == "ours" else stock_is_same
            yield Measurement(
                benchmark="accuracy", provider=provider, case=f"{name} {case_text(tokens=TOKENS, phase=phase)}",
                metric="error", unit="relative", p50=value, p20=value, p80=value, ratio=value / of_stock,
                bits="equal" if held else "differ", **asdict(setting),
            )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; the exit status is 1 where the mode's bits differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DATA / "accuracy.csv")
    parser.add_argument("--only", nargs="*", choices=[name.split()[0] for name in CASES], help="layers")
    options = parser.parse_args(arguments)
    os.environ.setdefault(FLAG, "0")
    from vllm_batch_invariant.integration.devices.cpu import DEVICE

    setting = replace(Setting.here(), gpu=str(DEVICE.info()["name"]))
    rows: list[Measurement] = []
    for name, of in CASES.items():
        if not options.only or name.split()[0] in options.only:
            rows += measured(name, of(), setting)
            print(f"{name}: {', '.join(f'{row.provider} {row.p50:.2e}' for row in rows[-3:])}", flush=True)
    update(options.out, rows)
    table = Table("provider", "case", "error", "of plain vLLM's largest", "bits")
    for row in rows:
        table.add_row(row.provider, row.case, f"{row.p50:.2e}", f"{row.ratio:.2f}", row.bits)
    Console(width=140).print(table)
    return int(any(row.provider == "ours" and row.bits == "differ" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
