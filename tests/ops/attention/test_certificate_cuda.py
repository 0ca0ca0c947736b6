"""The certificate of attention on a real GPU: it passes kernels that agree, and no others."""

from dataclasses import replace

import pytest
import torch

from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.attention import AttentionReduction, AttentionSpec
from vllm_batch_invariant.ops.attention import certificate as module
from vllm_batch_invariant.ops.attention.certificate import certify
from vllm_batch_invariant.ops.attention.params import PagedAttention
from vllm_batch_invariant.ops.attention.plan import WIDE_DECODE_ROWS, Kernels, Plan, Planner
from vllm_batch_invariant.ops.attention.shapes import AttentionShape

REDUCTION = AttentionReduction.of_device("cuda")
PLAIN, WINDOW = AttentionSpec(1.0), AttentionSpec(1.0, sliding_window=300, logits_soft_cap=30.0)
SHAPES = {
    "8b": AttentionShape(32, 8, 128, torch.bfloat16, REDUCTION),
    "0.5b": AttentionShape(14, 2, 64, torch.bfloat16, REDUCTION),
    "MHA": AttentionShape(8, 8, 128, torch.float16, REDUCTION),
    "MQA": AttentionShape(71, 1, 64, torch.bfloat16, REDUCTION),
    "Gemma": AttentionShape(4, 1, 256, torch.bfloat16, REDUCTION),
    "Gemma 4": AttentionShape(16, 2, 512, torch.bfloat16, REDUCTION),
    "80": AttentionShape(4, 4, 80, torch.float16, REDUCTION),
    "fp32": AttentionShape(4, 2, 64, torch.float32, REDUCTION),
}


@pytest.fixture(autouse=True)
def forget() -> None:
    certify.cache_clear()


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_fastest_kernels_of_this_gpu_agree(shape, page_size):
    found = certify(shape, device(), page_size, (PLAIN, WINDOW))
    assert found.kernels == next(Kernels.candidates(shape, device()))
    assert found.refused == ()
    assert found.elements > 4 * 100 * shape.heads * shape.head_size


@pytest.mark.parametrize("shape", [SHAPES["8b"], SHAPES["0.5b"]], ids=["8b", "0.5b"])
def test_every_candidate_agrees_with_itself(shape):
    data = [operands(shape, device(), 64) for operands in (module.by_scores, module.by_values)]
    for kernels in Kernels.candidates(shape, device(), verify_len=WIDE_DECODE_ROWS // shape.queries_per_kv):
        assert isinstance(module.compare(kernels, shape, data, (PLAIN, WINDOW)), int), kernels


@pytest.mark.parametrize("operands", [module.by_scores, module.by_values])
@pytest.mark.parametrize("split", [128, 512])
def test_a_decode_of_other_splits_is_found_in_most_elements(operands, split, monkeypatch):
    shape = SHAPES["8b"]
    other = Planner(replace(shape, reduction=AttentionReduction(split)), device(), 64, 2000, 200_000)
    computed = module.paged_attention

    def with_other_splits(call: PagedAttention, out: torch.Tensor, plan: Plan) -> None:
        if call.tokens == len(call.seq_lens):
            plan = other.plan(call.query_start_loc, call.seq_lens, call.tokens, 1)
            call = replace(call, reduction=other.shape.reduction)
        computed(call, out, plan)

    monkeypatch.setattr(module, "paged_attention", with_other_splits)
    found = module.compare(Kernels(sm90=False), shape, [operands(shape, device(), 64)], (PLAIN,))
    assert "other bits by decode than by prefill" in found
    with pytest.raises(NotCovered, match="other bits by prefill than by decode"):
        certify(shape, device(), 64, (PLAIN,))


def test_gluon_kernels_that_do_not_compile_leave_attention_to_triton(sm90, monkeypatch, caplog):
    from vllm_batch_invariant.ops.attention import sm90 as gluon

    def broken(*arguments: object) -> None:
        raise AttributeError("module 'gluon.language' has no attribute 'thread_barrier'")

    monkeypatch.setattr(gluon, "launch_decode", broken)
    assert certify(SHAPES["8b"], device(), 64, (PLAIN,)).kernels == Kernels(sm90=False)
    assert "Attention is not served by the Gluon kernels" in caplog.text
