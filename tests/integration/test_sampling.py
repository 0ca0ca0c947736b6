"""What vLLM's samplers list and cut with the mode in them, and which sources of vLLM are known."""

import inspect
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.sampling.test_ranking import tied_rows
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration import reviews, side_table
from vllm_batch_invariant.integration.reviews import patch_points, samplers
from vllm_batch_invariant.integration.sampling import sampler
from vllm_batch_invariant.ops import ranking
from vllm_batch_invariant.ops.softmax import log_softmax, log_softmax_at

vllm = pytest.importorskip("vllm")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these are tensors of the CPU")

ROWS, VOCABULARY = 24, 3001
ASKED = (1, 5, 20, 300, VOCABULARY)
"""Largest numbers of logprobs that a batch may ask for."""
Scores = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def logits() -> torch.Tensor:
    return (3 * torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(2))).bfloat16()


@pytest.fixture
def sampled() -> torch.Tensor:
    return torch.randint(VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(3))


def parts(tensors: object, count: int) -> Scores:
    return tensors.logprob_token_ids[:, : count + 1], tensors.logprobs[:, : count + 1], tensors.selected_token_ranks


def assert_begins_alike(short: object, long: object, count: int) -> None:
    for ours, theirs in zip(parts(short, count), parts(long, count), strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("count", ASKED[:-1])
def test_the_first_runner_lists_a_rows_candidates_whatever_number_the_batch_asks_for(logits, sampled, count):
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    alone = sampler.gather_logprobs(logprobs, count, sampled)
    for most in (most for most in ASKED if most > count):
        assert_begins_alike(alone, sampler.gather_logprobs(logprobs, most, sampled), count)


def test_vllms_own_list_fails_the_same_check(logits, sampled):
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    few, many = (torch.topk(logprobs, most).indices[:, :5] for most in (5, 20))
    assert not torch.equal(few, many)


@pytest.mark.parametrize("raw", [False, True], ids=["logprobs", "logits"])
@pytest.mark.parametrize("count", ASKED[:-1])
def test_the_second_runner_lists_a_rows_candidates_whatever_number_the_batch_asks_for(logits, sampled, count, raw):
    alone = sampler.compute_topk_scores(logits, count, sampled, logits_mode=raw)
    for most in (most for most in ASKED if most > count):
        assert_begins_alike(alone, sampler.compute_topk_scores(logits, most, sampled, logits_mode=raw), count)
    for row in range(ROWS):
        one = slice(row, row + 1)
        single = sampler.compute_topk_scores(logits[one], count, sampled[one], logits_mode=raw)
        for ours, theirs in zip(parts(single, count), parts(alone, count), strict=True):
            assert_same_bits(ours[0], theirs[row])


def test_logits_that_company_has_widened_have_the_same_scores(logits, sampled):
    narrow, wide = (sampler.compute_topk_scores(x, 5, sampled) for x in (logits, logits.float()))
    assert_begins_alike(narrow, wide, 5)


def test_both_runners_list_the_same(logits, sampled):
    first = sampler.gather_logprobs(log_softmax(logits, dtype=torch.float32), 20, sampled)
    second = sampler.compute_topk_scores(logits, 20, sampled)
    assert_same_bits(second.logprob_token_ids.int(), first.logprob_token_ids)
    assert_same_bits(second.logprobs, first.logprobs)
    assert_same_bits(second.selected_token_ranks, first.selected_token_ranks)


def test_the_first_candidate_is_the_one_that_greedy_sampling_takes(logits):
    import vllm._custom_ops  # noqa: F401 - vLLM's operators for this CPU

    wide = logits.float()
    first, _ = ranking.top_and_ranks(logits, 1, torch.zeros(ROWS, dtype=torch.int64))
    assert (wide == wide.max(-1, keepdim=True).values).sum(-1).max() > 1
    assert_same_bits(wide.argmax(-1), first[:, 0])
    assert_same_bits(torch.ops._C.greedy_argmax(wide), first[:, 0])
    assert_same_bits(torch.ops._C.greedy_argmax(wide[3:4]), first[3:4, 0])


def by_id(asked: dict[int, list[int]]) -> SimpleNamespace:
    """What the second model runner keeps of the tokens that requests ask for by id; request i is row i."""
    tokens, numbers = torch.full((ROWS, 128), -7, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    for row, ids in asked.items():
        tokens[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        numbers[row] = len(ids)
    return SimpleNamespace(token_ids=SimpleNamespace(gpu=tokens), num_token_ids=SimpleNamespace(gpu=numbers))


@pytest.mark.parametrize("runner", ["first", "second"])
def test_a_neighbour_that_asks_for_tokens_by_id_leaves_a_row_its_candidates(logits, sampled, runner):
    asked = {2: [9, 8, 7, 6, 5, 4, 3], 5: [1]}
    logprobs = log_softmax(logits, dtype=torch.float32)
    alone = sampler.compute_topk_scores(logits, 5, sampled)
    if runner == "first":
        step = SimpleNamespace()
        side_table.beside(step).candidates = 5
        beside = sampler.gather_specific_token_logprobs(step, logprobs, asked, sampled)
    else:
        rows = torch.arange(ROWS, dtype=torch.int32)
        state = {"logprob_token_ids_state": by_id(asked), "expanded_idx_mapping": rows, "max_per_req_token_ids": 7}
        beside = sampler.compute_topk_scores(logits, 5, sampled, **state)
    for row in range(ROWS):
        ids, scores = beside.logprob_token_ids[row].long(), beside.logprobs[row]
        assert ids[0] == sampled[row]
        if row in asked:
            wanted = torch.tensor(asked[row])
            assert_same_bits(ids[1 : len(wanted) + 1], wanted)
            assert_same_bits(scores[1 : len(wanted) + 1], logprobs[row, wanted])
        else:
            assert_same_bits(ids[:6], alone.logprob_token_ids[row])
            assert_same_bits(scores[:6], alone.logprobs[row])
        assert (scores[len(asked.get(row, range(5))) + 1 :] == -torch.inf).all()
    assert_same_bits(beside.selected_token_ranks, alone.selected_token_ranks)


def test_log_softmax_at_places_has_the_bits_of_the_whole():
    x = tied_rows(150, 2000)
    places = torch.randint(2000, (150, 3), generator=torch.Generator().manual_seed(1))
    assert_same_bits(log_softmax_at(x, places), log_softmax(x).gather(-1, places))


@pytest.mark.parametrize("named", [False, True])
def test_logits_of_a_batch_with_a_sampled_row_are_widened(named):
    def apply(self, logits, expanded_idx_mapping, idx_mapping_np, pos):
        return logits

    states = SimpleNamespace(temperature=SimpleNamespace(np=np.array([0.0, 1.0, 0.0])))
    states_of, logits = SimpleNamespace(sampling_states=states), torch.zeros(2, 4, dtype=torch.bfloat16)
    widened = sampler.Draws(pytest.fail).widened(apply)
    for requests, dtype in (([0, 2], torch.bfloat16), ([0, 1], torch.float32)):
        rows = np.array(requests)
        arguments = {"idx_mapping_np": rows, "pos": None} if named else {}
        assert widened(states_of, logits, None, *(() if named else (rows, None)), **arguments).dtype == dtype


@pytest.mark.parametrize("value", [torch.nan, 1.0])
def test_a_greedy_row_takes_its_first_candidate_in_any_company(value, logits):
    def draw(logits, requests, temperature, seed, pos, *, apply_temperature):
        assert not apply_temperature
        asked.append(len(logits))
        return logits.argmin(-1)

    asked = []
    heat = np.array([0.0, 1.0, 0.0, 0.5])
    states = SimpleNamespace(temperature=SimpleNamespace(np=heat))
    draws = sampler.Draws(draw)
    apply = draws.widened(lambda sampler, logits, idx_mapping_np: logits)
    logits[:, [70, 2000]] = value  # an equal, or what a kernel may take by its place
    first = ranking.first(logits)
    drawn = logits.argmin(-1)
    for requests, of_rows, expected in (
        ([0, 2], [0, 0, 2], first[:3]),
        ([1, 3], [1, 3, 3, 3], drawn[:4]),
        ([0, 1], [0, 0, 1, 0, 1, -1], torch.stack([first[0], first[1], drawn[2], first[3], drawn[4]])),
    ):
        rows = torch.tensor(of_rows, dtype=torch.int32)
        given = apply(SimpleNamespace(sampling_states=states), logits[: len(rows)], np.array(requests))
        found = draws(given, rows, torch.tensor(heat), None, None, apply_temperature=False)
        assert_same_bits(found[: len(expected)], expected)
    assert asked == [4, 6], "never of greedy rows alone"


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_what_samples_in_the_installed_vllm_was_reviewed(device_type):
    samplers.check(device_type)


def source_of(module: str) -> str | None:
    file = Path(vllm.__file__).parents[1] / f"{module.replace('.', '/')}.py"
    return file.read_text() if file.exists() else None


@pytest.mark.parametrize(
    ("module", "before", "after", "names"),
    [
        ("vllm.v1.worker.gpu.sample.min_p", "tl.log(min_p)", "tl.log2(min_p)", {"_min_p_kernel"}),
        ("vllm.v1.sample.sampler", "logits.div_(temp", "logits.mul_(temp", {"Sampler.apply_temperature"}),
        ("vllm.v1.sample.ops.bad_words", 'float("-inf")', "-1e9", {"_SMALLEST_LOGIT"}),
        ("vllm.v1.sample.ops.penalties", "def _convert", "def convert", {"_convert_to_tensors"}),
        ("vllm.v1.sample.sampler", "# Apply temperature.", "# Apply heat.", {"Sampler.sample"}),
    ],
)
def test_a_function_that_nobody_has_reviewed_is_found(module, before, after, names):
    def changed(name: str) -> str | None:
        source = source_of(name)
        assert name != module or before in source
        return source.replace(before, after) if name == module else source

    assert set(samplers.not_reviewed(changed, "cuda")) == {f"{module}.{name}" for name in names}


def test_a_function_of_the_gpus_runner_that_nobody_has_reviewed_is_no_matter_on_a_cpu():
    assert samplers.not_reviewed(lambda name: source_of(name) if ".gpu." not in name else None, "cpu") == {}


def test_an_unknown_source_is_refused_at_the_start(monkeypatch):
    monkeypatch.setitem(reviews.functions("sampling"), "vllm.v1.sample.sampler", {"Sampler.sample": ("0" * 16,)})
    with pytest.raises(NotCovered, match=r"nobody has reviewed its vllm\.v1\.sample\.sampler\.Sampler\.sample"):
        samplers.check("cpu")


def test_the_places_that_sampling_takes_hold_of_are_there():
    for name in ("TOP_K_TOP_P", "SAMPLER", "LOGPROBS_TENSORS", "MODEL_RUNNER", "SECOND_SAMPLER", "TOPK_SCORES"):
        assert patch_points.ALL[name].get() is not None


class Rows:
    """As vLLM 0.26's batch: masks are exchanged by views of each other, and stay where a row moved away."""

    def __init__(self) -> None:
        self._req_ids: list[str | None] = ["a", "b", None, "d"]
        self.allowed_token_ids_mask_cpu_tensor = torch.eye(5, 6, dtype=torch.bool)

    @property
    def num_reqs(self) -> int:
        return sum(name is not None for name in self._req_ids)

    def swap_states(self, i1: int, i2: int) -> None:
        mask = self.allowed_token_ids_mask_cpu_tensor
        (mask[i1], mask[i2]) = (mask[i2], mask[i1])

    def condense(self) -> None:
        self.allowed_token_ids_mask_cpu_tensor[2] = self.allowed_token_ids_mask_cpu_tensor[3]
        self._req_ids[2:] = ["d"]


@pytest.fixture
def rows() -> Rows:
    batch = type("MaskedRows", (Rows,), {})
    sampler.masks_follow_their_rows(batch)
    return batch()


def test_rows_that_are_exchanged_exchange_their_masks(rows):
    before = rows.allowed_token_ids_mask_cpu_tensor.clone()
    rows.swap_states(0, 3)
    assert torch.equal(rows.allowed_token_ids_mask_cpu_tensor, before[[3, 1, 2, 0, 4]])
    unmended = Rows()
    unmended.swap_states(0, 3)
    assert not torch.equal(unmended.allowed_token_ids_mask_cpu_tensor, before[[3, 1, 2, 0, 4]])


def test_a_row_that_moves_takes_its_mask_along(rows):
    before = rows.allowed_token_ids_mask_cpu_tensor.clone()
    rows.condense()
    expected = before[[0, 1, 3, 3, 4]]
    expected[3] = False
    assert torch.equal(rows.allowed_token_ids_mask_cpu_tensor, expected)


def test_a_batch_without_masks_is_left_alone():
    batch = type("Plain", (), {"swap_states": lambda *_: None, "condense": lambda *_: None})
    sampler.masks_follow_their_rows(batch)
    plain = batch()
    plain.allowed_token_ids_mask_cpu_tensor, plain._req_ids = None, []
    plain.swap_states(0, 1)
    plain.condense()


def test_the_installed_batch_has_what_is_wrapped():
    batch = patch_points.INPUT_BATCH.get()
    source = inspect.getsource(batch)
    assert all(name in source for name in ("self.allowed_token_ids_mask_cpu_tensor", "self._req_ids", "def num_reqs"))


class Forgets:
    """How vLLM 0.26 to 0.28 sample on a CPU, as far as it matters here."""

    def forward_cpu(self, logits, generators, k, p):
        if len(generators) != logits.shape[0]:
            return torch.empty_like(logits).exponential_(), None
        return self.forward_native(logits, generators, k, p)

    def forward_native(self, logits, generators, k, p):
        noise = torch.empty_like(logits).exponential_()
        for row, generator in generators.items():
            noise[row].exponential_(generator=generator)
        return noise, None


@pytest.mark.parametrize("mended", [False, True])
def test_a_seeded_row_keeps_its_seed_beside_rows_without_one(logits, mended):
    kind = type("Sampler", (Forgets,), {})
    if mended:
        sampler.seeds_stay(kind)

    def noise(rows: int) -> torch.Tensor:
        return kind().forward_cpu(logits[:rows], {0: torch.Generator().manual_seed(5)}, None, None)[0][0]

    assert torch.equal(noise(1), noise(3)) is mended


def test_a_sampler_that_keeps_seeds_stays_as_it_is():
    kind = patch_points.TOP_K_TOP_P_SAMPLER.get()
    before = kind.forward_cpu
    assert "compiled_random_sample" not in inspect.getsource(before) or "not generators" in inspect.getsource(before)
    sampler.seeds_stay(kind)
    assert kind.forward_cpu is before
