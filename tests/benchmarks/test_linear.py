"""What the linear benchmark makes of providers that keep their promise, break it, or fail."""

import io
from collections.abc import Callable, Sequence

import pytest
import torch
from rich.console import Console

from benchmarks import linear, linear_providers
from benchmarks.fp8_products import Weight
from benchmarks.linear import Sweep
from benchmarks.linear_providers import Provider
from benchmarks.linear_summary import print_summary
from benchmarks.operands import FORMATS
from benchmarks.record import Setting
from benchmarks.roofline import Ceilings, Work
from benchmarks.shapes import Origin, WeightShape
from vllm_batch_invariant.ops import linear as ours
from vllm_batch_invariant.ops.exact import definition

SHAPE = WeightShape(48, 64, (Origin("small", 1, "lm_head"),))


class SteadyTimer:
    """Calls everything once; every way takes the next of 1, 2, 3, ... microseconds."""

    def __init__(self) -> None:
        self.ways = 0

    def time(
        self, ways: Sequence[Sequence[Callable[[], object]]], expected_microseconds: float, replays: int
    ) -> list[list[float]]:
        for calls in ways:
            for call in calls:
                call()
        first, self.ways = self.ways, self.ways + len(ways)
        return [[way + 0.5, way + 1, way + 1.5] for way in range(first, self.ways)]


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.double() @ weight.double().t()).bfloat16()


def varying(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return exact(x, weight) + (len(x) == 3)


def refusing(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if len(x) == 8:
        raise RuntimeError("no such tile")
    return exact(x, weight)


STOCK = Provider("stock", exact, promises_bits=False)


def sweep(*others: Provider, stock: Provider = STOCK, shape: WeightShape = SHAPE, **options: object) -> Sweep:
    run = Sweep(
        providers=(stock, *others),
        rows=(2, 8, 512, 2048),
        timer=SteadyTimer(),
        ceilings=Ceilings(bytes_per_microsecond=1e6, operations_per_microsecond=1e9),
        setting=Setting("none", "torch=0", "2026-01-31"),
        cache=8192,
        device="cpu",
        **options,
    )
    run.measure(shape)
    return run


def verdicts(run: Sweep, provider: str) -> dict[str, str]:
    return {row.keys["M"]: row.bits for row in run.measurements if row.provider == provider and row.metric == "time"}


def test_a_norm_may_make_the_operand_of_what_is_timed() -> None:
    seen = []

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return exact(x, weight)

    run = sweep(Provider("ours", call), behind_norm=True)
    assert run.problems == 0
    assert verdicts(run, "ours") == {"2": "equal", "8": "equal", "512": "equal"}
    assert {row.keys["behind"] for row in run.measurements} == {"norm"}
    torch.testing.assert_close(seen[-1].float().square().mean(1), torch.ones(512), atol=0.02, rtol=0)


def test_an_activation_may_be_behind_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(ours, "prepare", lambda *weight, spec: asked.append(spec))
    providers = Provider("ours", pytest.fail), Provider("ours-triton", exact)
    run = sweep(*map(linear_providers.gated, providers), gated=True)
    assert run.problems == 0
    for provider in ("ours", "ours-triton"):
        assert verdicts(run, provider) == {"2": "equal", "8": "equal", "512": "equal"}
    assert {row.keys["act"] for row in run.measurements} == {"silu"}
    assert asked == [ours.GATED]
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    one, other = (linear_providers.gated(Provider(name, exact)).call(x, weight) for name in ("ours", "ours-triton"))
    assert one.shape == other.shape == (3, 24)
    torch.testing.assert_close(one, other)
    shapes = {origin.projection for shape in linear._parse(["--gated"]).shapes for origin in shape.origins}
    assert "gate_up" in shapes
    assert "lm_head" not in shapes


def test_every_case_is_checked_and_timed() -> None:
    run = sweep(Provider("ours", exact))
    assert run.problems == 0
    assert verdicts(run, "stock") == {"2": "-", "8": "-", "512": "-"}
    assert verdicts(run, "ours") == {"2": "equal", "8": "equal", "512": "equal"}
    first = [row for row in run.measurements if row.provider == "ours"][:3]
    assert {row.metric: row.p50 for row in first} == pytest.approx(
        {
            "time": 2.0,
            "bandwidth": (2 * 64 + 48 * 64 + 2 * 48) * 2 / 2 / 1e3,
            "roofline": (2 * 64 + 48 * 64 + 2 * 48) * 2 / 1e6 / 2,
        }
    )
    assert {row.metric: row.ratio for row in first} == {
        "time": 2.0,
        "bandwidth": 0.5,
        "roofline": 0.5,
    }


def test_a_neighbour_of_m_with_other_bits_is_loud(capsys: pytest.CaptureFixture[str]) -> None:
    run = sweep(Provider("ours", varying))
    assert run.problems == 1
    assert verdicts(run, "ours") == {"2": "differ", "8": "equal", "512": "equal"}
    assert "BITS DIFFER: ours M=2 N=48 K=64 dtype=bf16: M of [3]" in capsys.readouterr().err


def test_a_failing_call_loses_one_case(capsys: pytest.CaptureFixture[str]) -> None:
    run = sweep(Provider("ours", refusing))
    assert run.problems == 1
    assert verdicts(run, "ours") == {"2": "equal", "512": "equal"}
    assert "FAILED: ours M=8 N=48 K=64 dtype=bf16: RuntimeError: no such tile" in capsys.readouterr().err


def test_a_failing_preparation_loses_the_weight() -> None:
    def prepare(weight: torch.Tensor, rows: int) -> None:
        raise RuntimeError(f"no algorithm for {rows} rows")

    run = sweep(Provider("ours", exact, prepare=prepare))
    assert run.problems == 1
    assert verdicts(run, "ours") == {}
    assert len(verdicts(run, "stock")) == 3


def test_the_floor_is_the_slower_of_memory_and_arithmetic() -> None:
    ceilings = Ceilings(bytes_per_microsecond=10, operations_per_microsecond=100)
    assert ceilings.floor(Work(moved_bytes=1000, operations=1000)) == 100
    assert ceilings.floor(Work(moved_bytes=10, operations=1000)) == 10


def test_the_summary_counts_and_ranks() -> None:
    console = Console(file=io.StringIO(), width=120)
    print_summary(sweep(Provider("ours", varying)).measurements, console)
    text = console.file.getvalue()
    assert "M=2 N=48 K=64 dtype=bf16" in text
    [row] = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│ ours") and "dtype" not in line]
    assert [cell.strip() for cell in row] == ["ours", "1.633", "", "1.200", "2", "1", "3"]


def test_exact_arithmetic_has_the_definitions_bits_and_makes_a_weight_integers_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = pytest.importorskip("vllm_batch_invariant.ops.exact.cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    prepared: list[int] = []
    prepare = cpu.prepare
    monkeypatch.setattr(cpu, "prepare", lambda weight, parts: prepared.append(parts) or prepare(weight, parts))
    provider = linear_providers.load("ours-exact")
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    rows = definition.two_digits(definition.in_segments(weight.float().numpy(), 1))
    expected = torch.from_numpy(definition.linear(x.float().numpy(), rows)).bfloat16()
    assert torch.equal(provider.call(x, weight), expected)
    assert torch.equal(provider.call(x[:2], weight), expected[:2])
    assert prepared == [1]
    provider.call(torch.zeros(1, 3072).bfloat16(), torch.zeros(1024, 3072).bfloat16())  # Qwen3-0.6B's down_proj
    assert prepared == [1, 8]
    run = sweep(provider)
    assert run.problems == 0
    assert verdicts(run, "ours-exact") == {"2": "equal", "8": "equal", "512": "equal"}


def test_exact_arithmetic_and_trees_are_measured_where_they_are_asked_for() -> None:
    for name in ("ours-exact", "ours-tree-2", "ours-tree-4"):
        assert name in linear_providers.NAMES
        assert name not in linear._parse([]).providers
    x, weight = torch.randn(5, 64), torch.randn(48, 64)
    assert torch.equal(linear_providers.load("ours-tree-4").call(x, weight), ours.linear(x, weight, k_slices=4))


def test_codes_of_fp8_are_multiplied_with_those_of_activations_in_bf16() -> None:
    given = []

    def load(weight: Weight) -> torch.Tensor:
        given.append(weight)
        return weight.in_float64

    run = sweep(
        linear_providers.load("ours", "fp8"),
        stock=Provider("stock", exact, promises_bits=False, load=load),
        shape=WeightShape(128, 256, (Origin("small", 1, "lm_head"),)),
        form=FORMATS["fp8"],
    )
    assert run.problems == 0
    assert verdicts(run, "ours") == {"2": "equal", "8": "equal", "512": "equal"}
    assert run.measurements[0].case == "M=2 N=128 K=256 dtype=bf16 format=w8a8-fp8-block"
    bandwidth = next(row.p50 for row in run.measurements if row.metric == "bandwidth")
    assert bandwidth == pytest.approx((2 * 256 * 2 + 128 * 256 + 2 * 128 * 2) / 1e3)
    assert len(given) == 2  # that of the bits, and the one that is timed
    x, weight = torch.randn(3, 256).bfloat16(), Weight.of(torch.randn(128, 256) / 16)
    y = linear_providers.load("ours", "fp8").load(weight)(x)
    torch.testing.assert_close(y.double(), x.double() @ weight.in_float64.T, atol=0.2, rtol=0.05)


def test_formats_have_shapes_files_and_providers_of_their_own() -> None:
    options = linear._parse(["--format", "fp8"])
    assert options.out.name == "linear_fp8.csv"
    assert linear._parse([]).out.name == "linear.csv"
    models = {origin.model for shape in options.shapes for origin in shape.origins}
    assert {"Qwen3-8B", "Qwen3-30B-A3B"} <= models
    assert "lm_head" not in {origin.projection for shape in options.shapes for origin in shape.origins}
    assert {(shape.out_features, shape.in_features) for shape in options.shapes} >= {(5120, 2048), (2048, 4096)}
    with pytest.raises(linear_providers.Absent, match="no weights in fp8"):
        linear_providers.load("ours-triton", "fp8")
    with pytest.raises(SystemExit):
        linear._parse(["--format", "fp8", "--gated"])
