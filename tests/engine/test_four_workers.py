"""Four workers, and two where no other test has them, share models of the kinds that are published for as many: dense
and of experts, in 16 bits and quantised, with latent attention, and with states. A request has the same bits alone,
among others, in chunks and from the prefix cache, on GPUs in CUDA graphs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests import int8_checkpoints
from tests.engine import kept_states, ling, mla, quantised_layers, test_mamba
from tests.engine.engines import EAGER_ON_GPU, OF_DEVICE, UNTRIED_THERE, Result, run
from tests.engine.plans import alone_and_among, moved
from tests.engine.quantised_experts import mxfp4_of
from tests.engine.test_delta_rule import WITH_EXPERTS
from tests.engine.test_experts import FAMILIES, engine_of_config
from tests.engine.test_models import SIZES
from tests.fp8_checkpoints import FORMS as FP8
from tests.quantised_checkpoints import FORMATS
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.harness.worker import Engine

ON_GPU = torch.cuda.is_available()
COVERED = reviews.ran().quantised["cuda" if ON_GPU else "cpu"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]

Writer = Callable[[Path], Path]
VOCABULARY = {"vocab_size": 4096}
WIDE = SIZES | {"num_key_value_heads": 2, "head_dim": 128}
"""Of four heads, and dense layers, each of four workers has a block of 128."""
OF_EXPERTS = WIDE | {"num_experts_per_tok": 2, "moe_intermediate_size": 512}
BLOCKS, ROWS, INTEGERS = quantised_layers.BLOCKS, quantised_layers.ROWS, quantised_layers.INTEGERS
NVFP4 = quantised_layers.NVFP4[1]
DENSE_FORMS = FP8 | {name: FORMATS[name] for name in (INTEGERS, "w4a16 of 32", "w8a16 of 64", "awq", "nvfp4", "mxfp4")}
DENSE_FORMS |= {name: quantised_layers.FORMS[name] for name in ("gptq", NVFP4)}
EXPERT_FORMS = {name: quantised_layers.FORMS[name] for name in (BLOCKS, ROWS, INTEGERS, "gptq", NVFP4)}
EXPERT_FORMS |= {"fp8 by tensors": FP8["fp8 by tensors"]}
STATES = {"max_num_seqs": 24, "num_gpu_blocks_override": 60}


def of_config(config: transformers.PretrainedConfig) -> Writer:
    """Writes a checkpoint of random weights in bf16."""
    return lambda folder: Path(engine_of_config(config, folder)["model"])


def of_model(
    model: type[transformers.PreTrainedModel], config: type[transformers.PretrainedConfig], **sizes: Any
) -> Writer:
    """Writes a checkpoint of a model that keeps states."""
    return lambda folder: kept_states.written(model(config(**sizes | VOCABULARY)), folder)


def of_latent_attention(folder: Path) -> Path:
    """Writes one like DeepSeek-V3, of whose heads and experts each of four workers has whole blocks."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "qk_nope_head_dim": 128, "moe_intermediate_size": 512}
    return mla.written_wide("V3", folder, **VOCABULARY, **sizes, n_shared_experts=1)


def of_ling(version: str) -> Writer:
    """Writes one of Ling, of whose groups each of four workers has some."""
    return lambda folder: ling.written(folder, version, **VOCABULARY, group_norm_size=4)


@dataclass(frozen=True)
class Case:
    """A model and how it is served.

    Attributes:
        source: writes it in bf16.
        form: how its linear layers are stored, or None.
        has_experts: which workers share by columns or have whole.
        settings: of the engine.
        workers: numbers of these.
    """

    source: Writer
    form: Any = None
    has_experts: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    workers: tuple[int, ...] = (4,)

    def write(self, folder: Path) -> Path:
        source = self.source(folder / "source")
        if self.form is None:
            return source
        if callable(self.form):
            return self.form(source, folder / "packed")
        return quantised_layers.write(source, self.form, folder / "packed")


DENSE = of_config(transformers.Qwen3Config(**WIDE))
GLM = of_config(
    transformers.Glm4MoeConfig(
        **OF_EXPERTS, n_routed_experts=6, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1
    )
)
"""Of whose experts each of four workers has two or one."""
GPT_OSS = of_config(FAMILIES["gpt-oss with sinks and biases"])
MINIMAX = of_config(
    transformers.MiniMaxM2Config(
        **WIDE | {"num_experts_per_tok": 2, "num_local_experts": 8, "rotary_dim": 64},
        scoring_func="sigmoid",
        use_routing_bias=True,
        use_qk_norm=True,
    )
)
"""Whose norms of queries and keys are over the heads of all workers."""
QWEN3_5 = kept_states.QWEN3_5 | {
    **dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 128),
    "intermediate_size": 512,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
QWEN3_5_MOE = QWEN3_5 | {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 512),
}
GATED_DELTA_RULES = {
    "Qwen3.5": of_model(transformers.Qwen3_5ForCausalLM, transformers.Qwen3_5TextConfig, **QWEN3_5),
    **{name: of_model(*classes, **QWEN3_5_MOE) for name, classes in WITH_EXPERTS.items()},
}
NEMOTRON = {
    name: of_model(
        *(transformers.NemotronHForCausalLM, transformers.NemotronHConfig),
        **kept_states.NEMOTRON_H | test_mamba.GROUPS_FOR["Nemotron-H"][4] | experts,
    )
    for name, experts in (("Nano", test_mamba.EXPERTS["Nemotron-H"]), ("Super", test_mamba.LATENT))
}


def in_mxfp4(source: Path, folder: Path) -> Path:
    """gpt-oss's experts."""
    return mxfp4_of(source, folder.parent)


CASES = {
    "Qwen3": Case(DENSE, None, False),
    **{f"Qwen3, {name}": Case(DENSE, form, False) for name, form in DENSE_FORMS.items()},
    "Qwen3, int8": Case(DENSE, int8_checkpoints.write, False),
    "GLM-4.5": Case(GLM),
    **{f"GLM-4.5, {name}": Case(GLM, form) for name, form in EXPERT_FORMS.items()},
    "gpt-oss": Case(GPT_OSS),
    "gpt-oss, MXFP4": Case(GPT_OSS, in_mxfp4),
    "MiniMax-M2": Case(MINIMAX, workers=(2, 4)),
    f"MiniMax-M2, {BLOCKS}": Case(MINIMAX, EXPERT_FORMS[BLOCKS], workers=(2, 4)),
    "DeepSeek-V3": Case(of_latent_attention),
    **{
        f"DeepSeek-V3, {name}": Case(of_latent_attention, quantised_layers.FORMS[name])
        for name in (BLOCKS, ROWS, INTEGERS, NVFP4)
    },
    **{name: Case(source, None, name != "Qwen3.5", STATES) for name, source in GATED_DELTA_RULES.items()},
    **{
        f"{name}, {form}": Case(
            GATED_DELTA_RULES[name], quantised_layers.FORMS[form], name != "Qwen3.5", STATES, (2, 4)
        )
        for name, form in (("Qwen3.5", BLOCKS), *(("Qwen3.5-MoE", form) for form in (BLOCKS, "gptq", NVFP4)))
    },
    **{name: Case(source, None, True, STATES, (2, 4)) for name, source in NEMOTRON.items()},
    **{
        f"Ling {version}": Case(of_ling(version), None, True, STATES | {"trust_remote_code": True}, (2, 4))
        for version in ("2.5", "3.0")
    },
}
SHARED = [
    pytest.param(
        *(name, workers, whole),
        marks=pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < workers, reason=f"needs {workers} GPUs"),
        id=f"{name}-{workers}{'-whole' if whole else '-by columns' if case.has_experts else ''}",
    )
    for name, case in CASES.items()
    for workers in case.workers
    for whole in (False, True)[: 1 + case.has_experts]
]
LIMITS = {"max_model_len": 512, "max_num_seqs": 40, "max_num_batched_tokens": 128, "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """An engine of a case."""

    @cache
    def model(name: str) -> str:
        return str(CASES[name].write(tmp_path_factory.mktemp("model")))

    def engine(name: str, workers: int, whole: bool = False, **others: Any) -> Result:
        afterwards = others.pop("afterwards", lambda running: None)
        settings = {"model": model(name), "dtype": "bfloat16"} | LIMITS | OF_DEVICE | CASES[name].settings
        settings |= {"tensor_parallel_size": workers, "enable_expert_parallel": whole} | others
        variables = UNTRIED_THERE | kept_states.cores_of(workers)
        return run(settings, alone_and_among(), "1", afterwards=afterwards, **variables)

    return engine


@pytest.mark.parametrize(("name", "workers", "whole"), SHARED)
def test_a_request_has_the_same_bits_in_any_company(
    start: Callable[..., Result], name: str, workers: int, whole: bool
) -> None:
    assert moved(start(name, workers, whole)) == []


def faulty(running: Engine) -> Result:
    """The answers of an engine whose last worker counts the rows of a step."""
    running.call("tests.engine.faulty_worker:counts_rows", 3, "model.layers.1.mlp")
    steps = {step["name"]: running.step(**step).requests for step in alone_and_among()}
    return Result(steps, 0, {}, "", None, None, None, None, "")


@kept_states.needs_four
@pytest.mark.parametrize("name", ["Qwen3", "GLM-4.5"])
def test_a_fault_in_the_last_of_four_workers_shows(start: Callable[..., Result], name: str) -> None:
    done = start(name, 4, afterwards=faulty, **EAGER_ON_GPU)
    assert moved(done) == []
    assert moved(done.afterwards)
