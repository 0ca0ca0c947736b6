"""Rows of a step have the adapters of their requests, and an adapter's number stands for what is in its files."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.lora.punica_wrapper.punica_base")

from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest

from tests.assertions import assert_near, assert_same_bits
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.engine import adapters
from vllm_batch_invariant.integration.engine.adapter_request import AdapterRequest
from vllm_batch_invariant.integration.layers.lora import Adapters
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.integration.side_table import beside

SLOTS = [7, None, 9]
"""Numbers of the adapters that are there; the last slot is that of number 9."""
K, N, RANK = 32, 24, 8


def wrapped(kind: type[Any] = Adapters, tokens: tuple[int, ...] = (7, 0, 9, 9), samples: tuple[int, ...] = (7, 0, 9)):
    """Of a step with rows of these adapters, of which one a request is sampled."""
    wrapper = kind(64, 8, torch.device("cpu"))
    wrapper.update_metadata(LoRAMapping(tokens, samples, is_prefill=True), SLOTS, 4, 100)
    return wrapper


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


A, B = draw(3, 1, RANK, K, seed=1), draw(3, 1, N, RANK, seed=2)


def added(x: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """What adapters make of rows, in float64."""
    rows = [B[slot, 0].double() @ (A[slot, 0].double() @ row.double()) for row, slot in zip(x, slots, strict=True)]
    return torch.stack(rows)


def test_a_row_gets_what_its_adapter_adds_and_one_without_nothing() -> None:
    x, y = draw(4, K, seed=3), draw(4, N, seed=4)
    out = y.clone()
    wrapped().add_lora_linear(out, x, (A,), (B,), 1.0, (N,))
    assert_same_bits(out[1], y[1], "without an adapter")
    with_some = [0, 2, 3]
    assert_near(out[with_some], y[with_some] + added(x[with_some], [0, 2, 2]), 4)


def test_vllms_own_gives_a_row_without_an_adapter_the_last_one() -> None:
    x, y = draw(4, K, seed=3), torch.zeros(4, N)
    wrapped(PunicaWrapperCPU).add_lora_linear(y, x, (A,), (B,), 1.0, (N,))
    assert_near(y[1:2], added(x[1:2], [2]), 4)


def test_rows_behind_those_of_the_step_have_no_adapter() -> None:
    wrapper = wrapped()
    wrapper.update_metadata(LoRAMapping((9,), (9,), is_prefill=True), SLOTS, 4, 100)
    y = torch.full((4, N), -0.0)
    wrapper.add_lora_linear(y, draw(4, K), (A,), (B,), 1.0, (N,))
    assert y[0].any()
    assert y[1:].signbit().all()


def test_an_embedding_takes_the_rows_of_a() -> None:
    u, y = draw(4, RANK, seed=5), torch.zeros(4, N)
    wrapped().add_lora_embedding(y, u, B, add_input=True)
    expected = torch.stack([B[slot, 0].double() @ u[row].double() for row, slot in ((0, 0), (2, 2), (3, 2))])
    assert_near(y[[0, 2, 3]], expected, 4)
    assert not y[1].any()


@dataclass
class Model:
    """As vLLM's, with what manages its adapters."""

    lora_manager: Any

    def compute_logits(self) -> None: ...


def test_logits_have_the_adapters_of_what_is_sampled_or_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper, states = wrapped(), draw(4, K, seed=6)
    wide = torch.zeros(3, N + 8)
    wrapper.add_lora_logits(wide, states[[0, 1, 3]], A, B, 1.0)
    assert_near(wide[[0, 2], :N], added(states[[0, 3]], [0, 2]), 4)
    assert not wide[:, N:].any()
    with pytest.raises(RuntimeError, match="logits of 2 rows"):
        wrapper.add_lora_logits(torch.zeros(2, N), states[1:3], A, B, 1.0)
    seen: list[torch.Tensor] = []

    def of_prompts(hidden_states: torch.Tensor) -> None:
        for rows in (slice(1, 3), slice(0, 4)):
            seen.append(torch.zeros(len(hidden_states[rows]), N))
            wrapper.add_lora_logits(seen[-1], hidden_states[rows], A, B, 1.0)

    def of_sampled(hidden_states: torch.Tensor, batch: Any) -> torch.Tensor:
        logits = torch.zeros(len(batch.logits_indices), N)
        wrapper.add_lora_logits(logits, hidden_states[batch.logits_indices], A, B, 1.0)
        return logits

    model = Model(SimpleNamespace(punica_wrapper_mapping={"": wrapper}))
    adapters._by_prompts(lambda _runner, hidden_states: of_prompts(hidden_states), lambda runner: runner)(model, states)
    assert wrapper.hidden_states is None
    assert not seen[0][0].any()
    assert_near(seen[0][1:], added(states[2:3], [2]), 4)
    assert_near(seen[1][[0, 2, 3]], added(states[[0, 2, 3]], [0, 2, 2]), 4)
    worker = type("Worker", (), {"compute_prompt_logprobs": lambda _self, _logits, states: of_prompts(states)})
    monkeypatch.setattr(patch_points.PROMPT_LOGPROBS.module(), "PromptLogprobsWorker", worker)
    runner = type("Runner", (), {"model": model, "sample": lambda _self, states, batch: of_sampled(states, batch)})
    monkeypatch.setattr(patch_points.SECOND_MODEL_RUNNER.module(), "GPUModelRunner", runner)
    adapters.install_second_runner()
    with pytest.raises(RuntimeError, match="logits of 4 rows"):
        runner().sample(states, SimpleNamespace(logits_indices=torch.tensor([0, 2, 3, 1])))
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    adapters.install_second_runner()
    worker().compute_prompt_logprobs(model.compute_logits, states)
    assert all(torch.equal(one, other) for one, other in zip(seen[2:], seen[:2], strict=True))
    with pytest.raises(RuntimeError, match="logits of 2 rows"):
        of_prompts(states)
    drafted = torch.tensor([0, 2, 3, 1])
    given = runner().sample(states, SimpleNamespace(logits_indices=drafted))
    assert_near(given[:3], added(states[[0, 2, 3]], [0, 2, 2]), 4)
    assert not given[3].any()
    assert wrapper.sampled is None


def test_a_step_without_adapters_adds_nothing_whatever_its_rows_are() -> None:
    wrapper, y = wrapped(tokens=(0, 0), samples=(0, 0)), torch.full((5, N), -0.0)
    wrapper.add_lora_linear(y, draw(5, K), (A,), (B,), 1.0, (N,))
    wrapper.add_lora_logits(y, draw(5, K), A, B, 1.0)
    wrapper.add_lora_embedding(y, draw(5, RANK), B)
    assert y.signbit().all()


def test_what_has_not_been_compared_is_refused() -> None:
    wrapper, x, y = wrapped(), draw(4, K), torch.zeros(4, N)
    for call in (
        lambda: wrapper.add_lora_linear(y, x, (A,), (B,), 0.5, (N,)),
        lambda: wrapper.add_lora_linear(y, x, (A,), (B,), 1.0, (N,), add_inputs=False),
        lambda: wrapper.add_lora_linear(y, x, (A,), (B,), 1.0, (N - 1, 1)),
        lambda: wrapper.add_lora_embedding(y, x, B, add_inputs=False),
        lambda: wrapper.add_lora_logits(y, x, A, B, 0.5),
        lambda: wrapper.add_shrink((y,), x, (A,), 1.0),
        lambda: wrapper.add_expand(y, (x,), (B,), (N,)),
        lambda: wrapper.apply_lora_full_linear(y, x, A, B, y),
    ):
        with pytest.raises(NotCovered):
            call()


def files(folder: Path, content: str) -> Path:
    """Of an adapter without tensors."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(content)
    header = json.dumps({"__metadata__": {"content": content}}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


class Core:
    """An engine's core, as far as adapters need one."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []
        self.removed: list[int] = []
        self.scheduler = SimpleNamespace(requests={})
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(is_moe=False, is_hybrid=False, is_multimodal_model=False), lora_config=None
        )

        self.model_executor = SimpleNamespace(collective_rpc=lambda method: [f"answer to {method}"])

    def _initialize_kv_caches(self) -> str:
        return "made"

    def preprocess_add_request(self, request: Any) -> Any:
        return request

    def add_lora(self, lora_request: Any) -> bool:
        self.loaded.append(lora_request)
        return True

    def add_request(self, request: Any) -> None:
        self.scheduler.requests[request.request_id] = request

    def remove_lora(self, lora_id: int) -> bool:
        self.removed.append(lora_id)
        return True


class Engine(Core):
    _initialize_kv_caches = adapters._that_asks_for_layers(Core._initialize_kv_caches)
    preprocess_add_request = adapters._with_digest(Core.preprocess_add_request)
    add_request = adapters._that_stands(Core.add_request)
    add_lora = adapters._told_apart(Core.add_lora, Core.remove_lora)
    remove_lora = adapters._forgotten(Core.remove_lora)


def sent(core: Core, path: Path, number: int = 1, salt: str | None = None, **more: Any) -> Any:
    """A request with an adapter, as the engine takes it."""
    adapter = LoRARequest("name", number, str(path), **more)
    request = SimpleNamespace(lora_request=adapter, cache_salt=salt, request_id="request", client_index=0)
    return core.preprocess_add_request(request)


def test_a_prompt_is_found_by_what_is_in_its_adapters_files(tmp_path: Path) -> None:
    core, folder = Engine(), files(tmp_path / "one", "first")
    first, salted = sent(core, folder), sent(core, folder, salt="salt")
    assert first.cache_salt == first.lora_request.digest == adapters.digest_of(str(folder))
    assert salted.cache_salt == f"{first.cache_salt} salt"
    files(folder, "other")
    assert core.add_lora(LoRARequest("name", 1, str(folder), load_inplace=True))
    second = sent(core, folder)
    assert second.cache_salt != first.cache_salt
    assert (second.lora_request.lora_name, second.lora_request.lora_path) == ("name", str(folder))


def test_an_engine_that_takes_adapters_asks_its_workers_which_layers_do() -> None:
    core = Engine()
    assert core._initialize_kv_caches() == "made"
    assert beside(core).adapter_layers is None
    core.vllm_config.lora_config = object()
    core._initialize_kv_caches()
    assert beside(core).adapter_layers == f"answer to {adapters.METHOD}"


def test_a_request_without_an_adapter_is_left_alone() -> None:
    request = Engine().preprocess_add_request(SimpleNamespace(lora_request=None, cache_salt=None))
    assert request.cache_salt is None


def test_a_request_does_not_load_its_adapter_anew(tmp_path: Path) -> None:
    assert not sent(Engine(), files(tmp_path / "one", "first"), load_inplace=True).lora_request.load_inplace


def test_a_number_stands_for_the_same_files_until_they_are_loaded_in_place(tmp_path: Path) -> None:
    core, folder = Engine(), files(tmp_path / "one", "first")
    sent(core, folder)
    other = files(tmp_path / "two", "other")
    for changed in (other, files(folder, "changed")):
        with pytest.raises(ValueError, match="are not those that number 1 stands for"):
            sent(core, changed)
        with pytest.raises(NotCovered, match="another LoRA adapter with the number 1"):
            core.add_lora(LoRARequest("name", 1, str(changed)))
    sent(core, other, number=2)
    assert core.loaded == []
    core.add_lora(LoRARequest("name", 1, str(folder), load_inplace=True))
    sent(core, folder)
    core.remove_lora(1)
    sent(core, other, number=1)


def test_an_adapter_is_not_replaced_while_requests_have_it(tmp_path: Path) -> None:
    core, folder = Engine(), files(tmp_path / "one", "first")
    core.scheduler.requests["running"] = sent(core, folder)
    again = LoRARequest("name", 1, str(folder), load_inplace=True)
    core.add_lora(again)  # the same files
    files(folder, "other")
    with pytest.raises(NotCovered, match="while requests have it"):
        core.add_lora(again)
    core.remove_lora(1)
    with pytest.raises(ValueError, match="are not those"):
        sent(core, folder)
    core.scheduler.requests.clear()
    core.add_lora(again)


def test_a_request_that_a_load_in_place_overtakes_ends(tmp_path: Path) -> None:
    """A thread of its own takes it from the client."""
    core, folder, other = Engine(), files(tmp_path / "one", "first"), files(tmp_path / "two", "other")
    overtaken = sent(core, folder)
    core.add_lora(LoRARequest("name", 1, str(other), load_inplace=True))
    with pytest.raises(ValueError, match="are not those that number 1 stands for"):
        core.add_request(overtaken)
    ended: list[Any] = []
    core.output_queue, core._send_error_outputs_to_client = object(), lambda *said: ended.append(said)
    core.add_request(overtaken)
    assert ended == [(["request"], 0)]
    assert not core.scheduler.requests
    core.add_request(sent(core, other))
    core.add_request(SimpleNamespace(lora_request=None, request_id="without one"))
    assert [*core.scheduler.requests] == ["request", "without one"]


def test_a_load_that_fails_leaves_no_part_of_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core, folder, other = Engine(), files(tmp_path / "one", "first"), files(tmp_path / "two", "other")
    sent(core, folder)

    def fail(self: Core, lora_request: Any) -> bool:
        raise RuntimeError("its shapes are another model's")

    monkeypatch.setattr(Engine, "add_lora", adapters._told_apart(fail, Core.remove_lora))
    with pytest.raises(RuntimeError, match="another model's"):
        core.add_lora(LoRARequest("name", 1, str(other), load_inplace=True))
    assert core.removed == [1]
    sent(core, folder)


def test_two_adapters_of_one_name_are_two() -> None:
    first, again, second = (AdapterRequest("name", number, "path") for number in (1, 1, 2))
    assert {first, again, second} == {first, second}
    assert len({first, again, second}) == 2
    assert first != "name"


def test_an_adapter_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no LoRA adapter is in"):
        sent(Engine(), tmp_path)
    assert Engine().add_lora(LoRARequest("name", 1, str(tmp_path)))  # vLLM says so itself


def test_a_worker_reads_the_files_that_the_engine_has_seen(tmp_path: Path) -> None:
    folder = files(tmp_path / "one", "first")
    layer = SimpleNamespace(lora_a=torch.arange(3), lora_b=None)
    file, weights = layer.lora_a, SimpleNamespace(loras={"layer": layer})
    load = adapters._verified(lambda self, lora_request: weights)
    seen = AdapterRequest("name", 1, str(folder), digest=adapters.digest_of(str(folder)))
    assert load(None, seen) is weights
    file.zero_()
    assert layer.lora_a.tolist() == [0, 1, 2]
    files(folder, "other")
    for unseen in (seen, LoRARequest("name", 1, str(folder))):
        with pytest.raises(RuntimeError, match="changed while requests have it"):
            load(None, unseen)
