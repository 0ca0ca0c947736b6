"""What is made of weights when they are loaded is made again, and what was made of the old ones is let go."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch

from tests.assertions import assert_same_bits
from vllm_batch_invariant import envs
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration import devices, reviews
from vllm_batch_invariant.integration.engine import refusals, weights
from vllm_batch_invariant.integration.layers import linear
from vllm_batch_invariant.integration.layers.linear import dispatch, restore_weights
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.integration.side_table import beside
from vllm_batch_invariant.ops.linear.spec import PRODUCT


class Layer(torch.nn.Module):
    """As vLLM's: a weight [N, K], and ``cpu_linear`` once it is loaded."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.cpu_linear(x, self.weight, None)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loaded(weight: torch.Tensor, remove_weight: bool = True) -> Layer:
    layer = Layer(weight.clone())
    dispatch(layer, remove_weight)
    return layer


X = draw(3, 48, seed=7)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_that_was_let_go_comes_back_with_its_bits(dtype: torch.dtype) -> None:
    weight = draw(96, 48, dtype=dtype)
    layer = loaded(weight)
    parameter = layer.weight
    before = layer(X.to(dtype))
    assert layer.weight.numel() == 0
    restore_weights()
    assert layer.weight is parameter
    assert layer.weight.is_contiguous()
    assert_same_bits(layer.weight.data, weight)
    assert_same_bits(layer(X.to(dtype)), before)
    assert layer.weight.numel() == 0


@pytest.mark.parametrize("remove_weight", [True, False])
def test_a_weight_that_is_written_in_its_place_serves_the_next_product(remove_weight: bool) -> None:
    old, new = draw(96, 48), draw(96, 48, seed=1)
    layer = loaded(old, remove_weight)
    layer(X)
    restore_weights()
    layer.weight.data.copy_(new)
    assert_same_bits(layer(X), loaded(new)(X))


def test_an_output_head_follows_the_embedding_whose_weight_it_shares() -> None:
    embedding, head = loaded(draw(96, 48), remove_weight=False), Layer(draw(1, 1))
    head.weight = embedding.weight
    dispatch(head, remove_weight=False)
    head(X)
    restore_weights()
    embedding.weight.data.copy_(draw(96, 48, seed=1))
    dispatch(embedding, remove_weight=False)
    assert_same_bits(head(X), loaded(draw(96, 48, seed=1))(X))


@pytest.mark.parametrize("restored", [True, False])
@pytest.mark.parametrize("remove_weight", [True, False])
def test_a_layer_that_vllm_loads_elsewhere_and_copies_serves_the_copy(restored: bool, remove_weight: bool) -> None:
    """Its layerwise reload: another parameter is loaded and processed, and then copied to the first."""
    layer, new = loaded(draw(96, 48), remove_weight), draw(96, 48, seed=1)
    layer(X)
    if restored:
        restore_weights()
    first, layer.weight = layer.weight, torch.nn.Parameter(new.clone(), requires_grad=False)
    dispatch(layer, remove_weight)
    first.data.copy_(layer.weight)
    layer.weight = first
    assert_same_bits(layer(X), loaded(new)(X))


def test_a_layer_that_is_processed_again_without_a_load_keeps_its_product() -> None:
    layer = loaded(draw(96, 48))
    before = layer(X)
    dispatch(layer, remove_weight=True)
    assert_same_bits(layer(X), before)


def test_a_layer_that_is_gone_is_not_given_its_weight_back() -> None:
    import gc

    products = len(linear._prepared)
    loaded(draw(96, 48))
    gc.collect()
    assert len(linear._prepared) <= products


def test_a_weight_on_a_gpu_is_prepared_again_without_vllms_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    class Method:
        def process_weights_after_loading(self, layer: Any) -> None:
            layer.processed = getattr(layer, "processed", 0) + 1

    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=300, max_num_seqs=5),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4]),
        speculative_config=None,
        num_speculative_tokens=0,
    )
    configs, prepared = [config], []
    monkeypatch.setattr(patch_points.CURRENT_CONFIG.module(), "get_current_vllm_config", lambda: configs.pop())
    monkeypatch.setattr(linear, "prepare", lambda *arguments: prepared.append(arguments))
    linear._prepare_after_loading(Method)
    layer = SimpleNamespace(weight=SimpleNamespace(is_cuda=True, ndim=2), bias=None)
    for _ in range(2):
        Method().process_weights_after_loading(layer)
    assert prepared == [(layer.weight, 300, PRODUCT, (1, 2, 4), None, True)] * 2
    assert layer.processed == 2


def test_a_layer_with_adapters_is_not_processed_beside_the_one_within(monkeypatch: pytest.MonkeyPatch) -> None:
    """In vLLM 0.33 it shows what the one within has, its method among it."""

    class Method:
        def process_weights_after_loading(self, layer: Any) -> None:
            raise AssertionError(layer)

    linear._prepare_after_loading(Method)
    with_adapters: Any = torch.nn.Module()
    with_adapters.base_layer = torch.nn.Linear(2, 2)
    Method().process_weights_after_loading(with_adapters)


def test_digits_on_a_gpu_are_made_again_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """By stand-ins for the kernels: what is looked at is when they are called, and which memory has the result."""
    from vllm_batch_invariant.ops.exact import cuda

    class Method:
        def process_weights_after_loading(self, layer: Any) -> None:
            pass

    certified, segments = [], []

    def prepare(weight: torch.Tensor, parts: int) -> cuda.ExactWeight:
        segments.append(parts)
        return cuda.ExactWeight(torch.stack((weight, weight)), weight.float()[:, :1] * 0 + weight.float().sum())

    monkeypatch.setattr(cuda, "prepare", prepare)
    monkeypatch.setattr(cuda, "certify", lambda *arguments: certified.append(arguments[:3]))
    monkeypatch.setattr(linear, "_prepared", WeakSet())  # no other test has these layers' kernels
    linear._certify.cache_clear()
    monkeypatch.setattr(cuda, "linear", lambda x, weight, bias: x @ weight.digits[0].T)
    linear._multiply_exactly(Method)
    layer, x = Layer(draw(96, 48)), draw(3, 48)
    Method().process_weights_after_loading(layer)
    before = [part.data_ptr() for part in beside(layer).exact.copy]
    assert torch.equal(Method().apply(layer, x, bias=None), x @ layer.weight.T)
    with torch.no_grad():
        layer.weight.copy_(draw(96, 48) * 3)
    assert not torch.equal(Method().apply(layer, x), x @ layer.weight.T), "nobody has looked at the weights"
    restore_weights()
    assert torch.equal(Method().apply(layer, x), x @ layer.weight.T)
    layer.weight = torch.nn.Parameter(draw(96, 48) * 7, requires_grad=False)  # as vLLM loads a layer elsewhere
    Method().process_weights_after_loading(layer)
    assert torch.equal(Method().apply(layer, x), x @ layer.weight.T)
    assert [part.data_ptr() for part in beside(layer).exact.copy] == before
    Method().process_weights_after_loading(Layer(draw(96, 48)))
    Method().process_weights_after_loading(Layer(draw(3001, 48)))
    assert certified == [(96, 48, False), (1024 + 953, 48, False)], "once a shape, of a part of many rows"
    assert set(segments) == {1}
    layer.weight = torch.nn.Parameter(torch.full((96, 48), torch.nan), requires_grad=False)
    with pytest.raises(NotCovered, match=r"weights of .* that are not finite"):
        Method().process_weights_after_loading(layer)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(draw(96, 48))
        self.norm = torch.nn.Parameter(draw(48))
        self.register_buffer("cache", draw(4, 6, dtype=torch.float32))


def worker_of(model: torch.nn.Module) -> Any:
    return SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))


@pytest.mark.parametrize("name", ["layer.weight", "norm", "cache"])
def test_a_changed_bit_of_any_tensor_changes_the_fingerprint(name: str) -> None:
    model = Model()
    worker = worker_of(model)
    dispatch(model.layer, remove_weight=True)
    before = weights.fingerprint(worker)
    model.layer(X)
    assert weights.fingerprint(worker) == before
    tensor = model.state_dict()[name].flatten()
    integers = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    integers[-1] ^= 1
    assert weights.fingerprint(worker) != before
    integers[-1] ^= 1
    assert weights.fingerprint(worker) == before


def test_a_fingerprint_can_be_taken_without_giving_the_layers_their_weights_back() -> None:
    model = Model()
    worker, lost = worker_of(model), draw(96, 48)
    model.layer.weight.data = lost.clone()
    dispatch(model.layer, remove_weight=True)
    found = weights.fingerprint(worker, restore=False)
    assert model.layer.weight.numel() == 0
    assert weights.fingerprint(worker) == found
    assert_same_bits(model.layer.weight.data, lost)


def test_a_tensor_without_memory_is_left_out_of_the_fingerprint() -> None:
    model = Model()
    before = weights.fingerprint(worker_of(model))
    model.left_out = torch.nn.Parameter(torch.empty(3, device="meta"))
    assert weights.fingerprint(worker_of(model)) == before


@pytest.mark.parametrize("shape", [(100, 97), (4096, 48), (5,), ()])
def test_sums_tell_every_changed_bit_and_words_that_changed_places(shape: tuple[int, ...]) -> None:
    weight = draw(*shape)
    before = weights._sums(weights._bytes(weight))
    assert sum(part.numel() for part in before) < max(weight.numel(), 1024) + 8192

    def differs(other: torch.Tensor) -> bool:
        after = weights._sums(weights._bytes(other))
        return any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))

    assert not differs(weight.clone())
    for place in {0, weight.numel() // 2, weight.numel() - 1}:
        other = weight.clone()
        other.view(torch.int16).view(-1)[place] ^= 1
        assert differs(other)
    if weight.numel() > 1:
        assert differs(weight.flip(0))
        assert differs(weight.flip(-1))


def test_a_tensor_that_is_a_part_of_another_is_read_at_any_place() -> None:
    memory = draw(3 * 4096 + 1)
    for part in (memory[1:], memory[1:].view(3, -1)[:, 5:], memory[2:].view(-1)[::3]):
        assert_same_bits(weights._bytes(part).view(torch.bfloat16), part.flatten())


def test_memory_that_was_taken_from_the_kv_cache_changes_the_fingerprint() -> None:
    class Worker:
        model_runner = worker_of(Model()).model_runner

        def sleep(self, level: int) -> None:
            assert level == 1

    Worker.sleep = weights._counted(Worker.sleep)
    worker = Worker()
    before = weights.fingerprint(worker)
    worker.sleep(level=1)
    assert weights.fingerprint(worker) != before


def test_a_fingerprint_of_several_workers_follows_every_part_of_the_model() -> None:
    assert weights.of_workers(["0 a"]) == "0 a"
    assert weights.of_workers(["", ""]) == ""
    found = [weights.of_workers(parts) for parts in (["0 a", "0 b"], ["0 a", "0 c"], ["0 b", "0 a"], ["0 a", "1 b"])]
    assert len(set(found)) == 4
    assert len(set(map(weights.digest_in, found))) == 3  # memory that was taken is no other weight


class Core:
    """As vLLM's ``EngineCore``, of a worker whose weights have a name."""

    def __init__(self, device_type: str = "cuda") -> None:
        self.vllm_config = SimpleNamespace(
            device_config=SimpleNamespace(device_type=device_type),
            model_config=SimpleNamespace(is_multimodal_model=False, architecture="Qwen3ForCausalLM"),
            lora_config=None,
        )
        self.scheduler = SimpleNamespace(pause_state=0, has_requests=lambda: True, running=["one"])
        self.model_executor = SimpleNamespace(is_sleeping=False, collective_rpc=self.on_workers)
        self.weights, self.asked, self.resets, self.steps = "A", [], [], 0
        self.batch_queue = None

    def on_workers(self, method: str, *args: Any, kwargs: dict[str, Any] | None = None) -> list[str]:
        if method == weights.METHOD:
            self.asked.append(kwargs)
            return [self.weights if (kwargs or {}).get("compare", True) else ""]
        if method == "load":
            [self.weights] = args
        if method == "fail":
            self.weights = "half of B"
            raise RuntimeError("no more")
        return ["done"]

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        self.resets.append(reset_running_requests)
        return True

    def reset_encoder_cache(self) -> None:
        self.resets.append("encoder")

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple = (), kwargs: Any = None) -> list:
        return self.on_workers(method, *args)

    def step(self) -> str:
        self.steps += 1
        return "stepped"

    step_with_batch_queue = step


@pytest.fixture
def core_class(monkeypatch: pytest.MonkeyPatch) -> type[Core]:
    kind = type("Core", (Core,), dict(Core.__dict__))
    monkeypatch.setattr(patch_points.ENGINE_CORE.module(), "EngineCore", kind)
    weights.install(devices.of_config)
    return kind


@pytest.mark.parametrize("method", ["reload_weights", "start_weight_update"])
def test_weights_of_a_model_whose_layers_are_not_found_beneath_adapters_are_refused(
    core_class: type[Core], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, other = core_class("cpu"), core_class()
    core.vllm_config.model_config.architecture = "GptOssForCausalLM"
    assert core.collective_rpc(method) == ["done"]
    core.vllm_config.lora_config = other.vllm_config.lora_config = object()
    assert other.collective_rpc(method) == ["done"]
    monkeypatch.setenv(envs.UNTRIED.name, "1")
    with pytest.raises(NotCovered, match="new weights of GptOssForCausalLM with LoRA adapters"):
        core.collective_rpc(method)


@pytest.mark.parametrize("architecture", ["GraniteMoeHybridForCausalLM", *reviews.ran().served_by.values()])
def test_weights_beneath_adapters_beside_states_and_images_are_refused_where_nobody_has_replaced_them(
    core_class: type[Core], architecture: str
) -> None:
    core = core_class("cpu")
    core.vllm_config.model_config.architecture = architecture
    assert core.collective_rpc("reload_weights") == ["done"]
    core.vllm_config.lora_config = object()
    with pytest.raises(NotCovered, match="beside its states or images nobody"):
        core.collective_rpc("reload_weights")


@pytest.mark.parametrize("architecture", reviews.ran().lora_updates_beside["cpu"])
def test_weights_beneath_adapters_beside_states_and_images_are_taken_on_a_cpu(
    core_class: type[Core], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = core_class("cpu")
    core.vllm_config.lora_config = object()
    core.vllm_config.model_config.architecture = architecture
    assert core.collective_rpc("reload_weights") == ["done"]
    core.vllm_config.device_config.device_type = "cuda"
    with pytest.raises(NotCovered, match=f"new weights of {architecture} with LoRA adapters on cuda"):
        core.collective_rpc("reload_weights")
    monkeypatch.setenv(envs.UNTRIED.name, "1")
    assert core.collective_rpc("reload_weights") == ["done"]


def test_quantised_weights_beneath_adapters_beside_states_are_refused(core_class: type[Core]) -> None:
    class Lfm2ForCausalLM(torch.nn.Linear):
        lora_manager = object()

        def load_weights(self, names: list[str]) -> list[str]:
            return names

    core = core_class("cpu")
    core.vllm_config.lora_config = object()
    core.vllm_config.model_config.architecture = "Lfm2ForCausalLM"
    assert core.collective_rpc("reload_weights") == ["done"]
    core.vllm_config.model_config.quantization = "fp8"
    with pytest.raises(NotCovered, match="new quantised weights of Lfm2ForCausalLM with LoRA adapters"):
        core.collective_rpc("reload_weights")
    model = Lfm2ForCausalLM(1, 1)
    weights.watch_loading(model, is_quantised=True)
    with pytest.raises(NotCovered, match="new quantised weights of Lfm2ForCausalLM"):
        model.load_weights(["one"])


def test_weights_beneath_adapters_of_experts_are_refused_where_nobody_has_replaced_them(
    core_class: type[Core], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = core_class("cpu")
    core.vllm_config.lora_config = object()
    core.vllm_config.model_config.architecture = "Qwen3MoeForCausalLM"
    assert core.collective_rpc("reload_weights") == ["done"]
    core.vllm_config.device_config.device_type = "cuda"
    with pytest.raises(NotCovered, match="new weights of Qwen3MoeForCausalLM with LoRA adapters on cuda"):
        core.collective_rpc("reload_weights")
    monkeypatch.setenv(envs.UNTRIED.name, "1")
    assert core.collective_rpc("reload_weights") == ["done"]


def test_other_weights_empty_the_cache_of_encoded_items_too(core_class: type[Core]) -> None:
    core = core_class()
    core.vllm_config.model_config.is_multimodal_model = True
    core.collective_rpc("load", args=("B",))
    core.step()
    core.collective_rpc("load", args=("B",))
    core.step()
    assert core.resets == [True, "encoder"]


def test_the_same_weights_empty_the_cache_of_encoded_items_where_vllm_lets_workers_forget_them(
    core_class: type[Core],
) -> None:
    """Its scheduler would count on them."""
    core, text = core_class(), core_class()
    core.vllm_config.model_config.is_multimodal_model = True
    for one in (core, text):
        one.collective_rpc("reload_weights")
        one.step()
        one.step()
    assert core.resets == [True, "encoder"]
    assert text.resets == []


@pytest.mark.parametrize("step", ["step", "step_with_batch_queue"])
def test_other_weights_empty_the_prefix_cache_before_the_next_step_and_once(core_class: type[Core], step: str) -> None:
    core = core_class()
    take = getattr(core, step)
    assert take() == "stepped"
    assert core.asked == []  # who calls no worker pays nothing
    assert core.collective_rpc("load", args=("B",)) == ["done"]
    assert core.resets == []
    take()
    take()
    assert core.resets == [True]
    assert core.steps == 3


def test_the_same_weights_leave_the_prefix_cache_alone(core_class: type[Core]) -> None:
    core = core_class()
    for method, arguments in (("anything", ()), ("load", ("A",))):
        core.collective_rpc(method, args=arguments)
        core.step()
    assert core.resets == []


def test_many_calls_are_looked_at_once(core_class: type[Core]) -> None:
    core = core_class()
    for name in "BCDE":
        core.collective_rpc("load", args=(name,))
    core.step()
    assert len(core.asked) == 2
    assert core.resets == [True]


def test_a_call_that_fails_half_way_is_looked_at_too(core_class: type[Core]) -> None:
    core = core_class()
    core.step()
    with pytest.raises(RuntimeError, match="no more"):
        core.collective_rpc("fail")
    core.step()
    assert core.resets == [True]


def test_what_an_engine_is_asked_to_declare_is_no_reason_to_look(core_class: type[Core]) -> None:
    core = core_class()
    core.collective_rpc("batch_invariant_declaration")
    core.step()
    assert core.asked == []


def test_a_client_that_asks_for_the_weights_gets_those_of_the_last_step(core_class: type[Core]) -> None:
    core = core_class()
    core.weights = "0 A"
    for _ in range(2):
        assert core.collective_rpc(weights.METHOD) == ["A"]
    assert core.asked == [{"restore": False}]
    core.collective_rpc("load", args=("0 B",))
    assert core.collective_rpc(weights.METHOD) == ["A"]
    core.step()
    assert core.collective_rpc(weights.METHOD) == ["B"]


def test_other_weights_are_told_to_every_process_before_the_step_that_uses_them(
    core_class: type[Core], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(refusals.LEFT_AT, str(tmp_path / "engine"))
    core = core_class()
    core.weights = "0 A"
    core.collective_rpc("load", args=("0 A",))
    core.step()
    assert weights.published() is None
    core.collective_rpc("load", args=("1 B",))
    assert weights.published() is None
    core.step()
    assert weights.published() == "B"
    monkeypatch.delenv(refusals.LEFT_AT)
    assert weights.published() is None


@pytest.fixture
def publishing(core_class: type[Core], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Core:
    """An engine that serves the weights B, and was started with A; its files are in a folder of their own."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv(refusals.LEFT_AT, str(tmp_path / "temporary" / f"{refusals.PREFIX}1"))
    monkeypatch.setattr(weights, "_seen", {})
    core = core_class()
    core.weights = "0 A"
    core.collective_rpc("load", args=("1 B",))
    return core


def test_weights_do_not_go_back_to_those_of_the_start_when_the_file_is_taken_away(publishing: Core) -> None:
    publishing.step()
    assert weights.published() == "B"
    weights._published_at().unlink()
    assert weights.published() == "B"


def test_a_server_that_was_idle_is_told_before_it_answers_though_the_file_was_taken_away(publishing: Core) -> None:
    publishing.step()
    weights._published_at().unlink()
    assert weights.published() is None, "the negative control: this server has not read it"
    publishing.step()
    assert weights.published() == "B"


@pytest.mark.parametrize("known", [True, False])
def test_a_folder_that_cannot_be_written_ends_no_step_and_no_server_tells_the_weights_before(
    known: bool, publishing: Core, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """A folder without space, in which a file can still be made empty, or without permission."""
    if known:
        publishing.step()
        assert weights.published() == "B"
    publishing.collective_rpc("load", args=("2 C",))
    write = Path.write_text

    def no_space(path: Path, content: str) -> int:
        if content:
            raise OSError(28, "No space left on device")
        return write(path, content)

    monkeypatch.setattr(Path, "write_text", no_space)
    told = []
    for _ in range(3):
        publishing.step()
        told.append(weights.published())
    assert len(set(told)) == 1
    assert told[0].startswith("unknown, of "), "with a name that no other server has"
    assert log.text.count("cannot be written ([Errno 28] No space left on device)") == 1
    monkeypatch.setattr(Path, "write_text", write)
    publishing.step()
    assert weights.published() == "C"
    folder = weights._published_at().parent
    assert [path.name for path in folder.iterdir()] == [weights._published_at().name]


def test_a_folder_that_is_gone_ends_no_step(publishing: Core, log: pytest.LogCaptureFixture) -> None:
    weights._published_at().parent.rmdir()
    publishing.step()
    publishing.step()
    assert log.text.count("cannot be written") == 1


def test_what_a_server_that_was_killed_has_left_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights.atexit, "register", lambda *_, **__: None)
    killed, alive, mine = (tmp_path / f"{refusals.PREFIX}{name}.weights" for name in ("killed", "alive", "mine"))
    others = tmp_path / "others.weights"
    for path in (killed, alive, others):
        path.write_text("B")
        weights._lock_of(path).write_text("")
    weights._hold(alive)
    weights._take_away_what_was_left(mine)
    weights._hold(mine)
    assert {path.name for path in tmp_path.iterdir()} == {
        *(path.name for path in (alive, others)),
        *(weights._lock_of(path).name for path in (alive, others, mine)),
    }
    while weights._locks:
        weights.os.close(weights._locks.pop())
    weights._take_away_what_was_left(mine)
    assert {path.name for path in tmp_path.iterdir()} == {others.name, weights._lock_of(others).name}


@pytest.mark.parametrize("idle", ["asleep", "paused", "without requests"])
def test_weights_are_not_looked_at_while_nothing_is_served(core_class: type[Core], idle: str) -> None:
    core = core_class()
    core.collective_rpc("load", args=("B",))
    asked = len(core.asked)
    if idle == "asleep":
        core.model_executor.is_sleeping = True
    elif idle == "paused":
        core.scheduler.pause_state = patch_points.PAUSE_STATE.get().PAUSED_ALL
    else:
        core.scheduler.has_requests = lambda: False
    core.collective_rpc("load", args=("C",))
    core.step()
    assert len(core.asked) == asked
    core.model_executor.is_sleeping = False
    core.scheduler.pause_state, core.scheduler.has_requests = 0, lambda: True
    core.step()
    assert core.resets == [True]


def test_weights_that_were_never_seen_empty_the_prefix_cache(core_class: type[Core]) -> None:
    core = core_class()
    core.model_executor.is_sleeping = True
    core.collective_rpc("load", args=("B",))
    core.model_executor.is_sleeping = False
    core.step()
    assert core.resets == [True]


def test_a_trainer_that_writes_into_the_model_of_its_process_is_seen(core_class: type[Core]) -> None:
    class Loading(torch.nn.Module):
        def load_weights(self, names: list[str]) -> list[str]:
            return names

    model, core = Loading(), core_class()
    weights.watch_loading(model)
    core.step()
    assert core.asked == []
    assert model.load_weights(["one"]) == ["one"]
    core.step()
    core.step()
    assert core.resets == [True]


def test_weights_beneath_adapters_of_experts_are_those_of_the_device_that_has_them() -> None:
    """vLLM's reload puts tensors without memory in their place before it loads."""

    class Qwen3MoeForCausalLM(torch.nn.Linear):
        lora_manager = object()

        def load_weights(self, names: list[str]) -> list[str]:
            return names

    model, elsewhere = Qwen3MoeForCausalLM(1, 1), Qwen3MoeForCausalLM(1, 1, device="meta")
    for one in (model, elsewhere):
        weights.watch_loading(one)
    model.to("meta")
    assert model.load_weights(["one"]) == ["one"]
    with pytest.raises(NotCovered, match="new weights of Qwen3MoeForCausalLM with LoRA adapters on meta"):
        elsewhere.load_weights(["one"])


def test_slopes_of_alibi_come_back_when_a_gpu_wakes_up() -> None:
    from vllm_batch_invariant.integration.layers.attention import FixedSplitAttention

    layer = FixedSplitAttention(2, 64, 1.0, 2, alibi_slopes=[0.5, 0.25])
    lies, wanted = layer.spec.alibi_slopes, layer.spec.alibi_slopes.clone()
    lies.fill_(float("nan"))
    layer.restore_after_sleep()
    assert layer.spec.alibi_slopes is lies
    assert_same_bits(lies, wanted)


class AheadOfItsWorkers:
    """An engine with two steps on their way, the second of which computes nothing; its scheduler is itself."""

    def __init__(self) -> None:
        self.pause_state = "running"
        self.states: list[Any] = []
        self.scheduler = self
        self.batch_queue = [
            ("later", SimpleNamespace(total_num_scheduled_tokens=0)),
            ("first", SimpleNamespace(total_num_scheduled_tokens=3)),
        ]
        self.done: list[str] = []

    def set_pause_state(self, state: Any) -> None:
        self.pause_state = state

    def step(self) -> tuple[dict[int, str], bool]:
        self.states.append(self.pause_state)
        name, _ = self.batch_queue.pop()
        self.done.append(name)
        return {0: name}, True

    def reset(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.done.append(f"reset {reset_running_requests} {reset_connector}")
        return True


def test_what_is_on_its_way_arrives_before_running_requests_are_computed_again() -> None:
    core = AheadOfItsWorkers()
    reset = weights._after_arrivals(AheadOfItsWorkers.reset, AheadOfItsWorkers.step)
    assert reset(core, True, reset_connector=True)
    assert core.done == ["first", "reset True True"]
    assert core.states == [patch_points.PAUSE_STATE.get().PAUSED_ALL]  # nothing more is scheduled meanwhile
    assert core.pause_state == "running"
    assert list(weights._watch_of(core).arrived) == [{0: "first"}]


def test_a_reset_that_leaves_running_requests_alone_waits_for_nothing() -> None:
    core = AheadOfItsWorkers()
    assert weights._after_arrivals(AheadOfItsWorkers.reset, AheadOfItsWorkers.step)(core)
    assert core.done == ["reset False False"]


def test_what_arrived_meanwhile_is_what_the_next_step_gives() -> None:
    core = AheadOfItsWorkers()
    weights._deliver(core, {0: "an output"})
    weights._deliver(core, {})
    assert not weights._watch_of(core).called
    looking = weights._looking(AheadOfItsWorkers.step)
    assert looking(core) == ({0: "an output"}, True)
    assert looking(core) == ({0: "first"}, True)


def test_an_engine_in_a_process_of_its_own_sends_what_arrived() -> None:
    core = AheadOfItsWorkers()
    core.output_queue = SimpleNamespace(put_nowait=core.done.append)
    weights._deliver(core, {0: "an output"})
    assert core.done == [(0, "an output")]
    assert not weights._watch_of(core).arrived


@pytest.mark.parametrize(("level", "tags"), [(2, None), (2, ["weights"]), (1, None)])
def test_a_sampler_keeps_its_constants_through_a_sleep_that_discards(level: int, tags: list[str] | None) -> None:
    """vLLM's second model runner makes it among the weights, and restores buffers of the model alone."""
    sampling = pytest.importorskip("vllm.v1.worker.gpu.sample.thinking_budget")
    budgets = object.__new__(sampling.ThinkingBudgetState)
    budgets.reasoning_end_token_ids = torch.tensor([7, 91])
    budgets.req_states = SimpleNamespace(all_token_ids=torch.tensor([5]))
    sampler = object.__new__(patch_points.SECOND_SAMPLER.get())
    sampler.processors = [budgets]

    class Worker:
        device, vllm_config = (
            torch.device("cpu"),
            SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={})),
        )
        model_runner = SimpleNamespace(sampler=sampler)

        def load_model(self) -> None: ...

        def sleep(self, level: int = 1) -> None:
            budgets.reasoning_end_token_ids.zero_()
            budgets.req_states.all_token_ids.zero_()

        def wake_up(self, tags: list[str] | None = None) -> None:
            if level == 1:
                budgets.reasoning_end_token_ids.copy_(torch.tensor([7, 91]))

    weights.watch(Worker)
    worker = Worker()
    for _ in range(2):
        worker.sleep(level)
        worker.wake_up(["kv_cache"])
        worker.wake_up(tags)
        assert budgets.reasoning_end_token_ids.tolist() == [7, 91]
    assert budgets.req_states.all_token_ids.tolist() == [0]  # of requests: written when one is added
