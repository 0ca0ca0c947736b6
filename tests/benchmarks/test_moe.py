"""What the benchmark of mixtures of experts makes of providers that keep their promise, break it, or fail."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import moe, moe_cases, moe_variants
from benchmarks.moe import Sweep
from benchmarks.moe_cases import LAYERS, TOKENS, Inputs, MoeLayer, Provider, Weights
from benchmarks.record import Setting
from vllm_batch_invariant.ops.formats import MXFP4, Format
from vllm_batch_invariant.ops.formats.eight import FP8, FP8_BLOCK
from vllm_batch_invariant.ops.formats.fp4 import NVFP4
from vllm_batch_invariant.ops.moe import Experts, StoredExperts, reference, route

LAYER = MoeLayer("small", 6, 2, 32, 16)
CACHE = 1 << 14


class SteadyTimer:
    """Calls everything once; every way takes the next of 1, 2, 3, ... microseconds."""

    def time(
        self, ways: Sequence[Sequence[Callable[[], object]]], expected_microseconds: float, replays: int
    ) -> list[list[float]]:
        for calls in ways:
            for call in calls:
                call()
        return [[way + 0.5, way + 1, way + 1.5] for way in range(len(ways))]


def exact(layer: MoeLayer, weights: Weights, inputs: Inputs) -> torch.Tensor:
    chosen = route(inputs.logits, layer.reduction)
    return reference.moe(inputs.x, *chosen, Experts(weights.gate_up, weights.down, layer.reduction)).bfloat16()


def varying(layer: MoeLayer, weights: Weights, inputs: Inputs) -> torch.Tensor:
    return exact(layer, weights, inputs) + (len(inputs.x) == 3)


def of_codes(layer: MoeLayer, weights: Weights, inputs: Inputs) -> torch.Tensor:
    """Something else where experts are stored as codes."""
    return exact(layer, weights, inputs) + isinstance(weights.gate_up, StoredExperts)


def sweep(
    call: Callable[[MoeLayer, Weights, Inputs], torch.Tensor],
    layer: MoeLayer = LAYER,
    others: Sequence[Provider] = (),
) -> Sweep:
    run = Sweep(
        providers=(
            Provider("stock", exact, promises_bits=False),
            *others,
            Provider("ours", call, promises_bits=True),
        ),
        tokens=(1, 3, 5),
        timer=SteadyTimer(),
        setting=Setting("none", "torch=0", "2026-01-31"),
        cache=CACHE,
        device="cpu",
    )
    run.measure(layer)
    return run


def test_every_case_has_a_time_and_a_bandwidth_beside_stock() -> None:
    run = sweep(exact)
    assert run.problems == 0
    times = [row for row in run.measurements if row.metric == "time"]
    assert [(row.provider, row.keys["M"], row.bits) for row in times] == [
        (provider, tokens, bits) for tokens in "135" for provider, bits in (("stock", "-"), ("ours", "equal"))
    ]
    assert {row.ratio for row in times if row.provider == "ours"} == {2.0}
    assert {row.ratio for row in run.measurements if row.metric == "bandwidth" and row.provider == "ours"} == {0.5}


def test_bits_that_follow_the_batch_are_loud(capsys: pytest.CaptureFixture[str]) -> None:
    run = sweep(varying)
    assert run.problems == 1
    assert {row.keys["M"] for row in run.measurements if row.bits == "differ"} == {"3"}
    assert "BITS DIFFER: ours layer=small M=3" in capsys.readouterr().err


def test_stored_experts_have_their_format_in_the_case_and_the_bits_of_the_matrices() -> None:
    stored = MoeLayer("small", 6, 2, 64, 32, form=MXFP4)
    for call, bits in {exact: "equal", of_codes: "differ"}.items():
        run = sweep(call, stored)
        assert {row.bits for row in run.measurements if row.provider == "ours"} == {bits}
        assert {row.keys["format"] for row in run.measurements} == {"mxfp4"}
    assert stored.expert_bytes == 3 * 64 * 32 * 17 / 32


@pytest.mark.parametrize(("form", "name", "scales"), [(FP8_BLOCK, "w8a8-fp8-block", 2), (FP8, "w8a8-fp8-channel", 128)])
def test_experts_in_fp8_are_multiplied_with_activations_in_fp8(form: Format, name: str, scales: int) -> None:
    layer = MoeLayer("small", 6, 2, 256, 128, form=form)
    assert layer.reduction.products is not None
    assert layer.reduction.activation == "silu"
    assert layer.expert_bytes == 3 * (256 * 128 + scales * 4)
    run = sweep(moe_cases.ours().call, layer)
    assert run.problems == 0
    assert {row.bits for row in run.measurements if row.provider == "ours"} == {"equal"}
    assert {row.keys["format"] for row in run.measurements} == {name}
    weights, inputs = Weights.random(layer, "cpu"), Inputs.random(layer, 5, 0, "cpu")
    near = exact(MoeLayer("small", 6, 2, 256, 128), weights.unpacked(), inputs)
    torch.testing.assert_close(moe_cases.ours().call(layer, weights, inputs), near, atol=0.1, rtol=0.1)
    options = moe._parse(["--formats", name])
    assert [one.name for one in options.layers] == ["Qwen3-30B-A3B"]
    assert max(options.tokens) == 16_384


def test_experts_in_nvfp4_have_the_bits_of_the_matrices_and_one_scale_each() -> None:
    layer = MoeLayer("small", 6, 2, 256, 128, form=NVFP4)
    weights = Weights.random(layer, "cpu")
    assert weights.gate_up.tensors[2].shape == (6, 1, 1)
    for call, bits in {moe_cases.ours().call: "equal", of_codes: "differ"}.items():
        run = sweep(call, layer)
        assert {row.bits for row in run.measurements if row.provider == "ours"} == {bits}
        assert {row.keys["format"] for row in run.measurements} == {"nvfp4"}
    assert 0.5 < weights.gate_up.matrices().float().std() * 256**0.5 < 3


def test_who_fails_with_the_most_tokens_loses_the_layer(capsys: pytest.CaptureFixture[str]) -> None:
    def failing(layer: MoeLayer, weights: Weights, inputs: Inputs) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    run = sweep(exact, others=(Provider("stock-deep-gemm", failing, promises_bits=False),))
    assert run.problems == 1
    assert "FAILED: stock-deep-gemm layer=small M=5" in capsys.readouterr().err
    assert {row.provider for row in run.measurements} == {"stock", "ours"}


def test_the_work_is_that_of_the_experts_that_are_chosen() -> None:
    logits = torch.zeros(2, LAYER.experts)
    logits[0, :2], logits[1, 1:3] = 1, 1
    work = Inputs(torch.zeros(2, LAYER.hidden, dtype=torch.bfloat16), logits).work(LAYER)
    assert work.moved_bytes == 3 * LAYER.expert_bytes + 2 * 2 * 32 * 2
    assert work.operations == 4 * 2 * 3 * 32 * 16


def test_batches_together_are_more_than_the_cache_holds() -> None:
    run = sweep(exact)
    first = Inputs.random(LAYER, 1, 0, "cpu")
    batches = run._batches(LAYER, first)
    assert sum(one.work(LAYER).moved_bytes for one in batches) > CACHE
    assert len(run._batches(LAYER, Inputs.random(LAYER, 100, 0, "cpu"))) == 1


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_every_case_has_candidates_for_both_products(layer: MoeLayer) -> None:
    for tokens in TOKENS:
        tried = moe_variants.blocks_tried(tokens * layer.top_k, layer.experts)
        assert tried
        for size in tried:
            for tiles in (moe_variants.GATE_UP, moe_variants.DOWN):
                assert any(tile.block_m == size for tile in tiles)


def test_without_a_gpu_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert moe.main(["--out", str(tmp_path / "moe.csv")]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        moe.main(["--layers", "no such"])
