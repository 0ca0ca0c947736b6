"""Mixtures of experts, also with shared and quantised ones: by a tree 1, 2 and 4 workers that have experts whole give a
request the same bits.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests import fp8_checkpoints, quantised_checkpoints
from tests.engine import mla, quantised_layers
from tests.engine.engines import Result, differing_answers, request, run, tokens, untried_on_gpu
from tests.engine.plans import GREEDY, SEEDED, alone_and_among, moved, targets
from tests.engine.quantised_experts import mxfp4_of
from tests.engine.test_experts import FAMILIES, GLM, LIMITS, SOFTMAX, engine_of_config
from vllm_batch_invariant.envs import TP_TREE
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points

COVERED = reviews.ran().quantised["cuda" if torch.cuda.is_available() else "cpu"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    untried_on_gpu,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]

TREE = "4"
GLM_OF_SIX = transformers.Glm4MoeConfig(
    **GLM | {"head_dim": 128, "n_routed_experts": 6, "moe_intermediate_size": 256},
    num_experts_per_tok=2,
    n_shared_experts=2,
    n_group=2,
    topk_group=1,
    routed_scaling_factor=2.5,
    first_k_dense_replace=1,
    use_qk_norm=True,
)
"""Each of four workers has two experts or one, and of shared ones, dense layers and heads whole groups of 128."""
QWEN2_OF_FIVE = transformers.Qwen2MoeConfig(
    **SOFTMAX | {"num_experts": 5}, shared_expert_intermediate_size=256, mlp_only_layers=[1]
)
"""Its shared expert has a gate."""


def of_config(config: transformers.PretrainedConfig) -> Callable[[Path], Path]:
    """Writes a checkpoint of random weights."""

    def written(folder: Path) -> Path:
        return Path(engine_of_config(config, folder / "bf16")["model"])

    return written


def of_mla(name: str) -> Callable[[Path], Path]:
    """Writes a checkpoint with latent attention, and with words for the plan of requests."""

    def written(folder: Path) -> Path:
        return mla.written(name, folder / "bf16", vocab_size=4096)

    return written


def of_mla_in(form: str) -> Callable[[Path], Path]:
    """The same like DeepSeek-V3 in a form, of which each of four workers has whole blocks and groups."""

    def written(folder: Path) -> Path:
        sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "qk_nope_head_dim": 128}
        source = mla.written_wide("V3", folder / "bf16", vocab_size=4096, **sizes)
        return quantised_layers.write(source, mla.FORMS[form], folder / "packed")

    return written


def in_fp8(folder: Path, form: str = "fp8 by blocks") -> Path:
    """Writes dense layers and experts in FP8."""
    return fp8_checkpoints.write(of_config(GLM_OF_SIX)(folder), folder / "fp8", fp8_checkpoints.FORMS[form])


def in_int4(folder: Path) -> Path:
    """Writes dense layers and experts in INT4, as compressed-tensors does."""
    source, stored = of_config(GLM_OF_SIX)(folder), quantised_checkpoints.FORMATS["w4a16 of 128"]
    quantised_checkpoints.write(source, stored, folder / "packed", folder / "matrices")
    return folder / "packed"


def in_mxfp4(folder: Path) -> Path:
    """Writes experts of gpt-oss in MXFP4."""
    return mxfp4_of(of_config(FAMILIES["gpt-oss with sinks and biases"])(folder), folder)


KINDS: dict[str, Callable[[Path], Path]] = {
    "GLM-4.5": of_config(GLM_OF_SIX),
    "GLM-4.5 in FP8 by blocks": in_fp8,
    "GLM-4.5 in INT4": in_int4,
    "Qwen2-MoE": of_config(QWEN2_OF_FIVE),
    "dots.llm1 of Transformers": of_config(FAMILIES["dots.llm1 of Transformers"]),
    "gpt-oss in MXFP4": in_mxfp4,
    "DeepSeek-V2": of_mla("V2-Lite"),
    "DeepSeek-V3": of_mla("V3"),
    "DeepSeek-V3 in FP8 by blocks": of_mla_in(mla.BLOCKS),
    "DeepSeek-V3 in INT4": of_mla_in(mla.INTEGERS),
}
BY_FOUR = ("GLM-4.5", "GLM-4.5 in FP8 by blocks", "Qwen2-MoE", "DeepSeek-V2", "DeepSeek-V3 in FP8 by blocks")
"""Those that four workers share, too."""
LENGTH = 352
LIMITS_OF = {
    1: {"max_num_batched_tokens": 128},
    2: {"max_num_batched_tokens": 61, "num_gpu_blocks_override": 12, "block_size": 32, "max_num_seqs": 24},
    4: {"max_num_batched_tokens": 512, "enable_prefix_caching": False, "max_num_seqs": 5},
}
"""By the number of workers, which do not decide bits either: two have so few pages that requests are preempted."""
WINDOWED = {"gpt-oss in MXFP4": {"num_gpu_blocks_override": 24}}
"""Layers with a window have pages of their own."""
CROWDED = [request(tokens(60, 70 + number), max_tokens=40) for number in range(8)]
"""Who grows over the ends of pages."""
STEPS = [
    *(step for step in alone_and_among() if step["name"].startswith(("alone", "among 17", "warm"))),
    {"name": "crowded", "reset_prefix_cache": True, "requests": [*GREEDY, SEEDED, *CROWDED]},
]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """What an engine of a kind answers, by a number of workers and slices of a tree."""

    @cache
    def model(kind: str) -> Path:
        return KINDS[kind](tmp_path_factory.mktemp("model"))

    @cache
    def engine(kind: str, workers: int, tree: str) -> Result:
        settings: dict[str, Any] = LIMITS | {"dtype": "bfloat16", "max_model_len": LENGTH} | LIMITS_OF[workers]
        settings |= WINDOWED.get(kind, {}) if workers == 2 else {}
        settings |= {"model": str(model(kind)), "tensor_parallel_size": workers, "enable_expert_parallel": tree != "1"}
        cores = "|".join(str(rank % 2) for rank in range(workers))
        return run(settings, STEPS, "1", **{"VLLM_CPU_OMP_THREADS_BIND": cores, TP_TREE.name: tree})

    return engine


@pytest.mark.parametrize(
    ("kind", "workers"), [(kind, count) for kind in KINDS for count in (1, 2, 4) if count < 4 or kind in BY_FOUR]
)
def test_a_tree_and_whole_experts_give_every_number_of_workers_the_same_bits(
    kind: str, workers: int, answered: Callable[..., Result]
) -> None:
    done = answered(kind, workers, TREE)
    assert workers != 2 or done.preemptions > 0
    assert moved(done) == []
    assert differing_answers(targets(done), targets(answered(kind, 1, TREE))) == []


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_tree_two_workers_have_other_bits_than_one(kind: str, answered: Callable[..., Result]) -> None:
    """The negative control."""
    one, two = (answered(kind, workers, "1") for workers in (1, 2))
    assert differing_answers(targets(one), targets(two))
