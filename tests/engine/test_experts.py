"""Mixtures of experts: a request has the same bits in any batch, in every family that is said to be covered."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine.engines import EAGER_ON_GPU, OF_DEVICE, Result, certified, run, untried_on_gpu
from tests.engine.plans import GREEDY, SEEDED, alone_and_among, moved
from tests.engine.test_models import GQA, SIZES, checkpoint
from tests.faults.experts import FAULTS
from vllm_batch_invariant.verify.check.guarantees import OPERATIONS
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.worker import Engine

pytestmark = [pytest.mark.engine, pytest.mark.core]

SHAPE = Shape(layers=3, intermediate=512, experts=8, max_length=1024)
WIDE = Shape(hidden=512, intermediate=2048, layers=3, heads=8, experts=8, expert_intermediate=512, max_length=1024)
"""Wide enough for plain vLLM to vary."""
LIMITS = {"max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": 128, "skip_tokenizer_init": True}
SOFTMAX = SIZES | GQA | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
GLM = SIZES | GQA | {"n_routed_experts": 8, "moe_intermediate_size": 128}
ON_GPU = torch.cuda.is_available()
OF_TWO_WORKERS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
FAMILIES = {
    "Qwen2-MoE with a shared expert": transformers.Qwen2MoeConfig(
        **SOFTMAX, shared_expert_intermediate_size=256, mlp_only_layers=[1]
    ),
    "Mixtral": transformers.MixtralConfig(**SIZES, **GQA, num_local_experts=8),
    "GraniteMoe with multipliers": transformers.GraniteMoeConfig(
        **SIZES,
        num_key_value_heads=2,
        num_local_experts=8,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.125,
        logits_scaling=6.0,
    ),
    "OLMoE without renormalised weights": transformers.OlmoeConfig(
        **SIZES, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, norm_topk_prob=False
    ),
    "GLM-4.5 with groups, a bias and a dense layer": transformers.Glm4MoeConfig(
        **GLM,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        use_qk_norm=True,
    ),
    "GLM-4.5 with a bias and no groups": transformers.Glm4MoeConfig(
        **GLM,
        num_experts_per_tok=3,
        n_shared_experts=2,
        routed_scaling_factor=1.5,
        first_k_dense_replace=0,
    ),
    "Trinity with a bias on the block and a gate of its attention": transformers.AfmoeConfig(
        **SIZES,
        **GQA,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        num_dense_layers=1,
        num_shared_experts=1,
        score_func="sigmoid",
        route_norm=True,
        route_scale=2.5,
        n_group=1,
        topk_group=1,
        sliding_window=64,
    ),
    "Hunyuan v3 with a bias on the block": transformers.HYV3Config(
        **SIZES,
        **GQA,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        expert_hidden_dim=128,
        num_shared_experts=1,
        first_k_dense_replace=1,
        router_scaling_factor=2.5,
        route_norm=True,
        qk_norm=True,
    ),
    "MiniMax-M2 with norms of all heads and a bias on the block": transformers.MiniMaxM2Config(
        **SIZES,
        **GQA,
        num_local_experts=8,
        num_experts_per_tok=2,
        rotary_dim=32,
        scoring_func="sigmoid",
        use_routing_bias=True,
        use_qk_norm=True,
    ),
    "dots.llm1 of Transformers": transformers.Dots1Config(
        **GLM,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
    ),
    "gpt-oss with sinks and biases": transformers.GptOssConfig(
        **SIZES,
        **GQA,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """An engine of a small Qwen3-MoE."""

    def engine(
        flag: str,
        targets: Sequence[dict[str, Any]] = (*GREEDY, SEEDED),
        shape: Shape = SHAPE,
        bisection: Sequence[Any] = (),
        afterwards: Callable[[Engine], Any] = lambda engine: None,
        **others: Any,
    ) -> Result:
        path = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), shape)
        settings = {"model": str(path)} | LIMITS | OF_DEVICE | others
        variables = OF_TWO_WORKERS if "tensor_parallel_size" in others else {}
        return run(settings, alone_and_among(targets), flag, bisection=bisection, afterwards=afterwards, **variables)

    return engine


@pytest.fixture(scope="module")
def kept(start: Callable[..., Result]) -> Result:
    """An engine with the mode on, which is then certified, and on a CPU bisected without a fault and with some."""
    return start("1", bisection=() if torch.cuda.is_available() else ("experts",), afterwards=certified)


@pytest.fixture(scope="module")
def bisected(start: Callable[..., Result], kept: Result) -> dict[str, Any]:
    """What is found without a fault and with some; on a GPU by an engine without CUDA graphs, which hide modules."""
    if not torch.cuda.is_available():
        return kept.bisected
    return start("1", GREEDY[:1], bisection=("experts",), enable_prefix_caching=False, **EAGER_ON_GPU).bisected


def test_a_request_has_the_same_bits_alone_and_among_others(kept: Result) -> None:
    assert moved(kept) == []


def test_a_check_certifies_the_experts(kept: Result) -> None:
    certificates = kept.afterwards.results.certificates
    assert {certificate.operation for certificate in certificates} == set(OPERATIONS)
    assert all(certificate.compared and not certificate.difference for certificate in certificates)
    assert all("vllm_batch_invariant" in certificate.served_by for certificate in certificates)


def test_a_bisection_without_a_fault_finds_nothing(bisected: dict[str, Any]) -> None:
    found = bisected["no fault"]
    assert found["found"] is None
    assert found["first_logprob"] is None
    assert found["coverage"]["compared"] > 100


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_its_layer_named(bisected: dict[str, Any], fault: str) -> None:
    module = bisected[fault]["found"]["divergence"]["key"]["module"]
    layer, _, part = module.partition(".mlp.experts.routed_experts.quant_method")
    assert layer in ("model.layers.1", "model.layers.2")
    assert part == (".router" if fault == "another router kernel" else "")


@pytest.mark.exhaustive
def test_plain_vllm_fails_the_same_comparison(start: Callable[..., Result]) -> None:
    assert moved(start("0", GREEDY, WIDE, enforce_eager=True, max_num_batched_tokens=512))


by_two_workers = pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs 2 GPUs")


@by_two_workers
@pytest.mark.parametrize("shared", ["by columns", "whole"])
@pytest.mark.exhaustive
def test_workers_that_share_experts_keep_the_bits(start: Callable[..., Result], shared: str) -> None:
    assert moved(start("1", tensor_parallel_size=2, enable_expert_parallel=shared == "whole")) == []


@by_two_workers
@pytest.mark.skipif(not ON_GPU, reason="on a CPU the workers of every family call the same functions")
@pytest.mark.parametrize("shared", ["by columns", "whole"])
@pytest.mark.parametrize("family", ["GLM-4.5 with groups, a bias and a dense layer", "gpt-oss with sinks and biases"])
def test_workers_that_share_experts_of_a_family_keep_the_bits(family: str, shared: str, tmp_path: Path) -> None:
    parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": shared == "whole"}
    assert moved(run(engine_of(family, tmp_path) | parallel, alone_and_among(), "1", **OF_TWO_WORKERS)) == []


@by_two_workers
@untried_on_gpu
@pytest.mark.parametrize("shared", ["by columns", "whole"])
@pytest.mark.exhaustive
def test_workers_that_share_the_heads_of_a_norm_keep_the_bits(shared: str, tmp_path: Path) -> None:
    engine = engine_of("MiniMax-M2 with norms of all heads and a bias on the block", tmp_path)
    parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": shared == "whole"}
    assert moved(run(engine | parallel, alone_and_among(), "1", **OF_TWO_WORKERS)) == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.exhaustive
def test_a_family_keeps_the_bits(family: str, tmp_path: Path) -> None:
    assert moved(run(engine_of(family, tmp_path), alone_and_among(), "1")) == []


def engine_of(family: str, path: Path, seed: int = 0) -> dict[str, Any]:
    """Arguments of an engine of a family."""
    return engine_of_config(FAMILIES[family], path, seed)


def engine_of_config(config: transformers.PretrainedConfig, path: Path, seed: int = 0) -> dict[str, Any]:
    """Arguments of an engine of a model, with random weights and, unlike Hugging Face's, random biases, and sinks that
    are large.
    """
    model = checkpoint(config, torch.bfloat16, seed)
    for name, own in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("_bias", "router.bias")):
            own.data.normal_(std=0.1)
        elif name.endswith("sinks"):
            own.data.copy_(torch.linspace(-1, 3, len(own)).roll(seed))
    model.save_pretrained(path)
    return {"model": str(path), "dtype": "bfloat16"} | LIMITS | OF_DEVICE
