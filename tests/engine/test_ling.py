"""Ling 2.5 and Ling 3.0, whose lightning attention and whose Kimi Delta Attention keep a state beside latent attention:
a request has the same bits alone and among others, from chunks of any size, after a preemption, from the prefix cache,
and in a page that another has left.

Plain vLLM has no kernels for these layers on a CPU, so faults of the states are what shows that a test can fail.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine import kept_states, ling
from tests.engine.engines import UNTRIED_THERE
from tests.engine.kept_states import ON_GPU, REPEATING, SAME, decodes_as_it_prefills
from tests.engine.states import FAULTS
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.harness.requests import NGRAMS

COVERED = reviews.ran().on_gpus if ON_GPU else reviews.ran().lightning["cpu"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]
WAYS = ("by_reload_weights", "by_transfer", "by_buckets", "by_name")
"""To replace weights."""
NEAR = 1e-4
"""Of logprobs in fp32; in bf16 a token may get other experts."""
RULE = "DeltaStates"
DEFAULT = {"max_num_batched_tokens": 61, "num_gpu_blocks_override": 25}
"""With so few pages, of 128 tokens, some requests are preempted."""
UNCACHED = {"enable_prefix_caching": False, "max_num_batched_tokens": 61, "num_gpu_blocks_override": 16}
"""A request then has one state, and a prompt is cut anywhere, not also at the ends of pages."""
PAGE = 128
"""Of keys, in tokens."""
LENGTH = 250
"""Of prompts that need a page of keys more than they begin with."""


class Version(NamedTuple):
    """Of Ling.

    Attributes:
        number: its.
        states: kinds of its states.
    """

    number: str
    states: tuple[str, ...]

    def started(self, checkpoint: Path, **more: Any) -> Any:
        asked: dict[str, Any] = {"afterwards": partial(kept_states.ask, of=self.states, length=LENGTH)}
        return started(checkpoint, **asked | more)


started: Callable[..., Any] = partial(kept_states.started, variables=UNTRIED_THERE, trust_remote_code=True)
VERSIONS = {
    "2.5": Version("2.5", (RULE,)),
    "3.0": Version("3.0", ("ConvStates", RULE)),
}
PUBLISHED = {"hidden_size": 512, "head_dim": 128, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 96}
OTHERS = {"2.5": {"group_norm_size": 4, "linear_silu": True}, "3.0": {"kda_safe_gate": False}}
"""What checkpoints of a version may have, too."""


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> Version:
    return VERSIONS[request.param]


@pytest.fixture(scope="module")
def checkpoint(version: Version, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ling.written(tmp_path_factory.mktemp("ling"), version.number)


@pytest.fixture(scope="module")
def found(version: Version, checkpoint: Path) -> dict[str, Any]:
    return version.started(checkpoint, **DEFAULT)


def test_a_request_has_the_same_bits_in_any_company_at_any_cut_and_in_any_page(found: dict[str, Any]) -> None:
    kept_states.check_company(found)


def test_logprobs_of_decode_are_those_of_prefill(found: dict[str, Any]) -> None:
    assert decodes_as_it_prefills(found)


def test_a_fault_of_the_states_shows(found: dict[str, Any], version: Version) -> None:
    faults = [f"{fault}: {kind}" for kind in version.states for fault in FAULTS[kind]]
    assert [fault for fault in faults if found[fault] == found["alone"]] == []


def test_without_a_prefix_cache_the_bits_are_the_same(
    found: dict[str, Any], version: Version, checkpoint: Path
) -> None:
    uncached = version.started(checkpoint, **UNCACHED)
    assert uncached["preemptions"] > 0
    assert [name for name in SAME if uncached[name] != found["alone"]] == []


@pytest.mark.skipif(not ON_GPU, reason="a CPU has no graphs")
@pytest.mark.parametrize("cached", [True, False], ids=["prefix cache", "no prefix cache"])
def test_steps_in_cuda_graphs_have_the_same_bits(
    found: dict[str, Any], version: Version, checkpoint: Path, cached: bool
) -> None:
    replayed = version.started(checkpoint, **(DEFAULT if cached else UNCACHED) | kept_states.IN_GRAPHS)
    assert [name for name in SAME if replayed[name] != found["alone"]] == []


def test_limits_of_one_request_and_one_token_move_no_bit(found: dict[str, Any], checkpoint: Path) -> None:
    one = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "enable_prefix_caching": False}
    assert started(checkpoint, afterwards=kept_states.alone, **one) == found["alone"]


@pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.skipif(ON_GPU, reason="refused there")), "float16"]
)
def test_other_dtypes_keep_their_bits(version: Version, checkpoint: Path, dtype: str) -> None:
    """In fp32 near the model in float64."""
    other = version.started(checkpoint, dtype=dtype, **UNCACHED)
    assert other["preemptions"] > 0
    assert [name for name in SAME if other[name] != other["alone"]] == []
    assert decodes_as_it_prefills(other)
    if dtype == "float32":
        model = ling.drawn(version.number).double()
        assert kept_states.distance_from(model, other["alone"]) < NEAR
        assert kept_states.distance_from(model, other[f"a chunk begins anew: {RULE}"]) > 100 * NEAR


def test_layers_of_published_sizes_keep_their_bits(version: Version, tmp_path: Path) -> None:
    folder = ling.written(tmp_path, version.number, **PUBLISHED, **OTHERS[version.number])
    brief = started(folder, afterwards=kept_states.ask_briefly, max_num_batched_tokens=61)
    assert brief["among others"] == brief["alone"]
    assert decodes_as_it_prefills(brief)


def test_new_weights_give_the_bits_of_a_new_engine(
    found: dict[str, Any], checkpoint: Path, version: Version, tmp_path: Path
) -> None:
    other, first = str(ling.written(tmp_path, version.number, seed=1)), str(checkpoint)
    fresh = {other: started(Path(other), afterwards=kept_states.alone), first: found["alone"]}
    assert fresh[other] != fresh[first]
    answers = started(
        checkpoint,
        afterwards=partial(kept_states.replaced, folders=(other, first), ways=WAYS),
        worker_extension_cls="tests.engine.reloads.Extension",
        weight_transfer_config='{"backend": "files"}',
    )
    assert [how for how, answer in answers.items() if answer != fresh[how[1]]] == []


@kept_states.BY_WORKERS
def test_workers_with_whole_experts_have_the_bits_of_one(version: Version, workers: int, tmp_path: Path) -> None:
    """By a tree. A norm of 2.5 has a group of heads or more for each of them."""
    folder = ling.written(tmp_path, version.number, group_norm_size=4)
    kept_states.check_workers(started, folder, LENGTH, DEFAULT, {}, workers, enable_expert_parallel=True)


@kept_states.BY_WORKERS
def test_workers_without_a_tree_leave_a_request_its_bits(version: Version, workers: int, tmp_path: Path) -> None:
    folder = ling.written(tmp_path, version.number, group_norm_size=4)
    kept_states.check_workers_without_a_tree(started, folder, DEFAULT, {}, workers)


@kept_states.by_first_runner
def test_an_answer_is_that_of_plain_decoding_whatever_is_proposed(
    checkpoint: Path, version: Version, tmp_path: Path
) -> None:
    """And where a step takes drafts for tokens that stay."""
    if version.number == "2.5":
        pytest.skip("drafts are refused")
    found = kept_states.with_any_drafts(started, checkpoint, tmp_path, "keep_drafts", UNCACHED, max_num_seqs=16)
    kept_states.check_drafts(found)


def test_n_grams_leave_answers_alone(checkpoint: Path, version: Version) -> None:
    """Beside a prefix cache, which plain decoding has not. Random weights give few that are right."""
    if version.number == "2.5":
        pytest.skip("drafts are refused")
    beside = {"enable_prefix_caching": True, "num_gpu_blocks_override": 25} | kept_states.IN_GRAPHS
    differing, counted = kept_states.with_drafts(started, checkpoint, NGRAMS, REPEATING, UNCACHED, **beside)
    assert differing == []
    assert counted["drafts"] > 0


@kept_states.by_first_runner
def test_drafts_beside_a_prefix_cache_leave_answers_alone(checkpoint: Path, version: Version, tmp_path: Path) -> None:
    if version.number == "2.5":
        pytest.skip("drafts are refused")
    found = kept_states.in_kept_pages(started, checkpoint, tmp_path, PAGE, kept_states.WAYS_TO_KEEP_PAGES)
    kept_states.check_kept_pages(found)
