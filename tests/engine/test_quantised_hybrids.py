"""Quantised weights beside layers that keep a state: a request has the same bits alone and among others, from chunks of
any size, after a preemption, from the prefix cache, and in a page that another has left; of weights alone that are
quantised those of the matrices that they stand for.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine import kept_states, multimodal, test_mamba, test_short_conv
from tests.engine.drafters import add_mtp, add_nemotron_mtp
from tests.engine.engines import UNTRIED_THERE, request, tokens
from tests.engine.kept_states import ON_GPU, SAME, decodes_as_it_prefills, distance_from_float64, written
from tests.engine.quantised_layers import (
    BLOCKS,
    FORMS,
    INTEGERS,
    KEPT,
    MODELOPT,
    NVFP4,
    ROWS,
    with_scales_of_cache,
    write,
)
from tests.engine.test_delta_rule import (
    DEFAULT,
    LENGTH,
    PAGES,
    UNCACHED,
    WITH_EXPERTS,
)
from tests.quantised_checkpoints import Stored
from vllm_batch_invariant.envs import TP_TREE
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.harness.requests import NGRAMS
from vllm_batch_invariant.verify.harness.worker import Engine

COVERED = reviews.ran().quantised["cuda" if ON_GPU else "cpu"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]
NEAR = 0.25
"""Of logprobs in bf16."""
NEAR_IN_CODES = 1.5
"""The same where activations have codes of three bits behind the first."""


class Family(NamedTuple):
    """Models, and how an engine serves them so that some requests are preempted."""

    model: type[transformers.PreTrainedModel]
    config: type[transformers.PreTrainedConfig]
    sizes: dict[str, Any]
    write: Callable[[transformers.PreTrainedModel, Path], Path] = written
    settings: dict[str, Any] = DEFAULT
    length: int = LENGTH
    """Of prompts that need a page of keys more than they begin with."""

    def source(self, folder: Path) -> Path:
        """A checkpoint in bf16."""
        return self.write(self.model(self.config(**self.sizes)), folder)


FAMILIES = {
    "Qwen3.5": Family(transformers.Qwen3_5ForCausalLM, transformers.Qwen3_5TextConfig, kept_states.QWEN3_5),
    **{name: Family(*classes, kept_states.QWEN3_5_MOE) for name, classes in WITH_EXPERTS.items()},
    **{name: Family(*of[:3]) for name, of in test_mamba.FAMILIES.items()},
    "LFM2": Family(
        *(transformers.Lfm2ForCausalLM, transformers.Lfm2Config, kept_states.LFM2),
        *(test_short_conv.written, test_short_conv.DEFAULT, test_short_conv.LENGTH),
    ),
}
NANO = "Nemotron 3 Nano"
"""Nemotron-H with experts, which have no gate."""
FAMILIES[NANO] = FAMILIES["Nemotron-H"]._replace(sizes=kept_states.NEMOTRON_H | test_mamba.EXPERTS["Nemotron-H"])
SUPER = "Nemotron 3 Super"
"""Whose experts have latent vectors."""
FAMILIES[SUPER] = FAMILIES["Nemotron-H"]._replace(sizes=kept_states.NEMOTRON_H | test_mamba.LATENT)
AS_NANO_IS_PUBLISHED = KEPT.replace("(lm_head", r"(0\.mixer\.(in|out)_proj|[qkvo]_proj|lm_head")
"""Attention, and the state space before it, keep 16 bits, too."""
WIDE = FAMILIES["Qwen3.5"]._replace(
    sizes=kept_states.QWEN3_5
    | dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 128)
    | {"intermediate_size": 512}
)
"""Of which two workers have whole blocks."""
CASES = [
    *(("Qwen3.5", form) for form in FORMS),
    *(("Qwen3.5-MoE", form) for form in FORMS if "Mistral" not in form),
    *(("Qwen3-Next", form) for form in (BLOCKS, ROWS, INTEGERS, NVFP4[1])),
    *((name, form) for name in test_mamba.FAMILIES for form in (ROWS, INTEGERS, MODELOPT, NVFP4[1])),
    ("Nemotron-H", NVFP4[0]),
    *(("LFM2", form) for form in (ROWS, INTEGERS, BLOCKS)),
    *((NANO, form) for form in (MODELOPT, ROWS, *NVFP4)),
    *((SUPER, form) for form in (MODELOPT, NVFP4[1])),
]


class Case(NamedTuple):
    """Checkpoints of one model: its quantised weights, the matrices that these stand for, and what an engine gave."""

    name: str
    of_weights_alone: bool
    packed: Path
    unpacked: Path
    found: dict[str, Any]

    @property
    def family(self) -> Family:
        return FAMILIES[self.name]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """With what vLLM's files of the models import for images."""
    path = multimodal.python_path(tmp_path_factory.mktemp("path"))
    return partial(kept_states.started, path=path, **PAGES)


def ask(engine: Engine, length: int, fault: str) -> dict[str, Any]:
    """What :func:`kept_states.ask` finds; and where activations are quantised, as "one scale", answers alone and among
    others when all rows of a step share one, by a ``fault`` of :mod:`.quantisers`.
    """
    found = kept_states.ask(engine, (), length)
    if fault:
        found["one scale"] = kept_states.with_one_scale(engine, kept_states.others(length), fault)
    return found


@pytest.fixture(scope="module", params=CASES, ids=", ".join)
def case(request: pytest.FixtureRequest, started: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, form = request.param
    family, root = FAMILIES[name], tmp_path_factory.mktemp("hybrid")
    packed, unpacked = root / "packed", root / "unpacked"
    write(family.source(root / "source"), FORMS[form], packed, unpacked)
    alone = isinstance(FORMS[form], Stored)
    fault = "" if alone else "one_scale_of_experts" if name in (NANO, SUPER) else "one_scale_a_step"
    asked = partial(ask, length=family.length, fault=fault)
    found = started(packed, afterwards=asked, variables=UNTRIED_THERE, **family.settings)
    return Case(name, alone, packed, unpacked, found)


def test_a_request_has_the_same_bits_in_any_company_at_any_cut_and_in_any_page(case: Case) -> None:
    kept_states.check_company(case.found)
    assert decodes_as_it_prefills(case.found)


@pytest.mark.skipif(not ON_GPU, reason="a CPU has no graphs")
def test_steps_in_cuda_graphs_have_the_same_bits(case: Case, started: Callable[..., Any]) -> None:
    settings = case.family.settings | kept_states.IN_GRAPHS | {"variables": UNTRIED_THERE}
    replayed = started(case.packed, afterwards=kept_states.ask_briefly, **settings)
    assert replayed["among others"] == replayed["alone"] == case.found["alone"]


def test_weights_alone_that_are_quantised_have_the_bits_of_their_matrices(
    case: Case, started: Callable[..., Any]
) -> None:
    if not case.of_weights_alone:
        pytest.skip("activations are quantised too")
    settings = {"afterwards": kept_states.alone, "variables": UNTRIED_THERE} | case.family.settings
    assert case.found["alone"] == started(case.unpacked, **settings)


def test_one_scale_of_all_rows_of_a_step_is_found(case: Case) -> None:
    """So the comparison of companies sees what depends on them."""
    if case.of_weights_alone:
        pytest.skip("activations are not quantised")
    alone, among_others = case.found["one scale"]
    assert alone != among_others


def test_logprobs_are_near_those_of_transformers_in_float64(case: Case) -> None:
    """With the matrices that codes stand for."""
    if {"num_experts", "n_routed_experts"} & {*case.family.sizes}:
        pytest.skip("in bf16 a token may have other experts")
    near = NEAR if case.of_weights_alone else NEAR_IN_CODES
    assert distance_from_float64(case.unpacked, case.found["alone"]) < near


def quantised(form: str, folder: Path, source: Path | None = None) -> Path:
    """A checkpoint in a form, of Qwen3.5 or of another source."""
    return write(source or FAMILIES["Qwen3.5"].source(folder / "source"), FORMS[form], folder / "packed")


@pytest.mark.parametrize(
    ("name", "form", "of"),
    [
        ("Qwen3.5", INTEGERS, "model.layers.0.linear_attn.out_proj.weight"),
        (NANO, NVFP4[1], "backbone.layers.1.mixer.experts.3.up_proj.weight"),
    ],
)
def test_one_element_of_one_matrix_shows(
    started: Callable[..., Any], tmp_path: Path, name: str, form: str, of: str
) -> None:
    """So the comparison with matrices would see a wrong code."""
    source, settings = FAMILIES[name].source(tmp_path / "source"), {"variables": UNTRIED_THERE} | DEFAULT
    write(source, FORMS[form], tmp_path / "packed", tmp_path / "unpacked")
    given = started(tmp_path / "packed", afterwards=kept_states.alone, **settings)
    file = tmp_path / "unpacked" / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    tensors[of][5, 7] += 2
    save_file(tensors, file, metadata={"format": "pt"})
    assert started(tmp_path / "unpacked", afterwards=kept_states.alone, **settings) != given


@pytest.mark.parametrize("form", [BLOCKS, INTEGERS])
def test_a_multimodal_checkpoint_as_text_has_the_bits_of_the_text_model(
    started: Callable[..., Any], tmp_path: Path, form: str
) -> None:
    """As Qwen3.5 is published, with an encoder that keeps 16 bits."""
    source = FAMILIES["Qwen3.5"].source(tmp_path / "source")
    text = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    config = multimodal.qwen3_5(kept_states.QWEN3_5)
    whole = transformers.AutoModelForImageTextToText.from_config(config).bfloat16()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path / "whole")
    seeing = write(tmp_path / "whole", FORMS[form], tmp_path / "seeing")
    settings = {"afterwards": kept_states.alone, "max_num_batched_tokens": 61, "variables": UNTRIED_THERE}
    as_text = started(seeing, language_model_only=True, **settings)
    assert as_text == started(quantised(form, tmp_path, source), **settings)


@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("form", [BLOCKS, INTEGERS, MODELOPT, NVFP4[1]])
def test_two_workers_have_the_bits_of_one(started: Callable[..., Any], tmp_path: Path, form: str) -> None:
    """By a tree, which is another order of sums than one worker has without it."""
    folder, tree = quantised(form, tmp_path, WIDE.source(tmp_path / "source")), UNTRIED_THERE | {TP_TREE.name: "2"}
    one = started(folder, afterwards=kept_states.alone, variables=tree, **DEFAULT)
    asked = partial(kept_states.ask, of=(), length=LENGTH)
    two = started(folder, afterwards=asked, variables=tree | kept_states.cores_of(2), tensor_parallel_size=2, **DEFAULT)
    assert [name for name in ("alone", *SAME) if two[name] != one] == []
    assert decodes_as_it_prefills(two)


@pytest.mark.parametrize(
    ("name", "form", "method"),
    [("Qwen3.5", BLOCKS, "ngram"), ("Qwen3.5", BLOCKS, "mtp"), (SUPER, NVFP4[1], "mtp")],
)
def test_drafts_leave_answers_alone(
    started: Callable[..., Any], tmp_path: Path, name: str, form: str, method: str
) -> None:
    """Also those of layers for more tokens that are quantised, too."""
    source = FAMILIES[name].source(tmp_path / "source")
    with_layers = {"Qwen3.5": add_mtp, SUPER: add_nemotron_mtp}[name]
    folder = quantised(form, tmp_path, with_layers(source) if method == "mtp" else source)
    asked = kept_states.REPEATING if method == "ngram" else kept_states.drafted_requests()[::3]
    drafts: dict[str, Any] = {"ngram": NGRAMS, "mtp": {"method": "mtp"}}[method]
    settings = UNCACHED | {"variables": UNTRIED_THERE}
    differing, counted = kept_states.with_drafts(started, folder, drafts, asked, settings, **kept_states.IN_GRAPHS)
    assert differing == []
    assert counted["drafts"] > 0


@pytest.mark.parametrize(
    ("name", "form"),
    [("Qwen3.5", BLOCKS), ("Qwen3.5", INTEGERS), *((NANO, form) for form in (MODELOPT, ROWS, NVFP4[1]))],
)
def test_weights_that_come_again_serve(started: Callable[..., Any], tmp_path: Path, name: str, form: str) -> None:
    """As those of an engine that was started with them."""
    first = quantised(form, tmp_path / "first", FAMILIES[name].source(tmp_path / "first" / "source"))
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first" / "source", dtype=torch.bfloat16)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            weight.mul_(0.75 if "proj" in name else 1)
    other.save_pretrained(tmp_path / "other")
    second = quantised(form, tmp_path / "second", tmp_path / "other")

    def replaced(engine: Engine) -> list[Any]:
        found = [kept_states.alone(engine)]
        for folder in (second, first):
            engine.call("tests.engine.reloads:by_reload_weights", str(folder))
            found.append(kept_states.alone(engine, folder.parent.name))
        return found

    settings = {"variables": UNTRIED_THERE} | DEFAULT
    before, changed, back = started(first, afterwards=replaced, **settings)
    assert before == back != changed == started(second, afterwards=kept_states.alone, **settings)


OF_CODES = 370
"""Of prompts that need a page of codes more than they begin with, beside state spaces."""
LONG = request(tokens(600, 9, kept_states.VOCABULARY), max_tokens=6, logprobs=5)
"""Of more tokens than a page has."""


@pytest.mark.parametrize(
    ("name", "length", "few"),
    [
        ("LFM2", 242, {}),
        *((name, OF_CODES, {}) for name in test_mamba.FAMILIES),
        *((name, 500, {"num_gpu_blocks_override": 12}) for name in ("Qwen3.5", *WITH_EXPERTS)),
    ],
    ids=["LFM2", *test_mamba.FAMILIES, "Qwen3.5", *WITH_EXPERTS],
)
def test_a_cache_in_fp8_moves_no_bit(
    started: Callable[..., Any], tmp_path: Path, name: str, length: int, few: dict[str, int]
) -> None:
    """With prompts of a length that needs a page of codes more than they begin with."""
    family = FAMILIES[name]
    folder = family.source(tmp_path / "source")

    def asked(engine: Engine) -> dict[str, Any]:
        found = kept_states.ask(engine, (), length)
        found["bytes"] = engine.call("tests.engine.fp8_caches:bytes_of_caches")
        cold, warm = (engine.step(f"long {number}", [LONG], number == 0).requests[0] for number in range(2))
        return found | {"long": (cold["completions"], warm["completions"]), "cached": warm["cached"]}

    settings = family.settings | kept_states.IN_GRAPHS | {"max_model_len": 1024, "variables": UNTRIED_THERE} | few
    found = started(folder, afterwards=asked, kv_cache_dtype="fp8", **settings)
    assert {dtype for dtype, _ in found["bytes"]} == {"torch.uint8"}
    assert found["preemptions"] > 0
    assert [company for company in SAME if found[company] != found["alone"]] == []
    assert decodes_as_it_prefills(found)
    assert found["long"][0] == found["long"][1]
    assert found["cached"] > 0
    plain = started(folder, afterwards=kept_states.alone, **settings)
    assert plain != found["alone"], "so the comparison sees what codes lose"


@pytest.mark.parametrize(
    ("name", "method"), [("Qwen3.5", "mtp"), *((name, "ngram") for name in ("Qwen3.5", *test_mamba.FAMILIES, NANO))]
)
def test_drafts_leave_answers_from_a_cache_in_fp8_alone(
    started: Callable[..., Any], tmp_path: Path, name: str, method: str
) -> None:
    """Also those of a layer for more tokens, whose cache is in FP8, too; beside a prefix cache; of experts in FP8."""
    source = FAMILIES[name].source(tmp_path / "source")
    folder = add_mtp(source) if method == "mtp" else source
    if name == NANO:
        folder = quantised(MODELOPT, tmp_path, source)
    drafts: dict[str, Any] = {"ngram": NGRAMS, "mtp": {"method": "mtp"}}[method]
    asked = kept_states.REPEATING if method == "ngram" else kept_states.drafted_requests()[::3]
    settings = UNCACHED | {"kv_cache_dtype": "fp8", "variables": UNTRIED_THERE}
    cached = {"enable_prefix_caching": True, "num_gpu_blocks_override": 18} | kept_states.IN_GRAPHS
    differing, counted = kept_states.with_drafts(started, folder, drafts, asked, settings, **cached)
    assert differing == []
    assert counted["accepted" if method == "ngram" else "drafts"] > 0


CACHED_BY_MODELOPT = [
    *((name, MODELOPT) for name in ("Nemotron-H", NANO)),
    *((name, NVFP4[1]) for name in (NANO, "Nemotron-H", SUPER, "Qwen3.5", "Qwen3.5-MoE", "Qwen3-Next")),
]


@pytest.mark.parametrize("of", CACHED_BY_MODELOPT, ids=", ".join)
def test_a_cache_of_modelopt_has_the_scales_of_its_checkpoint_beside_states(
    started: Callable[..., Any], tmp_path: Path, of: tuple[str, str]
) -> None:
    """And the bits of a cache in bf16 of the codes' numbers."""
    name, form = of
    family, kept = FAMILIES[name], AS_NANO_IS_PUBLISHED if name == NANO else KEPT
    folder = write(family.source(tmp_path / "source"), FORMS[form], tmp_path / "packed", kept=kept)
    scales = with_scales_of_cache(folder)

    def asked(engine: Engine) -> dict[str, Any]:
        found = kept_states.ask(engine, (), OF_CODES)
        cold, warm = (engine.step(f"long {number}", [LONG], number == 0).requests[0] for number in range(2))
        return found | {"long": (cold["completions"], warm["completions"]), "cached": warm["cached"]}

    def of_numbers(engine: Engine) -> list[Any]:
        scales = engine.call("tests.engine.fp8_caches:in_numbers", True)
        numbers = kept_states.alone(engine, "numbers")
        engine.call("tests.engine.fp8_caches:in_numbers", False)
        return [scales, numbers, kept_states.alone(engine, "as they come")]

    settings = family.settings | {"max_model_len": 1024, "variables": UNTRIED_THERE}
    settings |= {"num_gpu_blocks_override": 12} if name.startswith("Qwen") else {}
    found = started(folder, afterwards=asked, **settings | kept_states.IN_GRAPHS)
    assert found["preemptions"] > 0
    assert [company for company in SAME if found[company] != found["alone"]] == []
    assert decodes_as_it_prefills(found)
    assert found["long"][0] == found["long"][1]
    assert found["cached"] > 0
    held, numbers, plain = started(folder, afterwards=of_numbers, **settings)  # graphs would keep the cache of codes
    assert held == scales
    assert found["alone"] == numbers
    assert plain != numbers, "so the comparison sees what codes lose"
