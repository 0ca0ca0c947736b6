"""The recorder names the operation that is variant, and no other, in either kind of model runner."""

from collections import Counter
from collections.abc import Callable
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest
import torch

from tests.faults.adding import nudge
from vllm_batch_invariant.ops.linear import cpu
from vllm_batch_invariant.verify.bisect import recorder, recording
from vllm_batch_invariant.verify.bisect.recorder import WorkerExtension
from vllm_batch_invariant.verify.bisect.recording import MODULE_OUTPUT, OutputDivergence, RecordedStep, first_divergence
from vllm_batch_invariant.verify.outcome import NoTestError

SIZE, MOST = 24, 4
TARGET = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(1))
OTHERS = torch.randn(13, SIZE, generator=torch.Generator().manual_seed(2))
"""Together 16 rows: a divisor of no other size here except by 3 rows of 8 heads."""


class Product(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(SIZE), requires_grad=False)
        self.most = 1000

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.injected.copy(x * self.weight, self.most)


class Norm(torch.nn.Module):
    most = 1000

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.injected.copy_into(out, x, self.most)
        return out


class Unseen(torch.nn.Module):
    """A kernel that is launched without the dispatcher."""

    most = 1000
    reads = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        nudge(x, self.most)
        return x.neg() if self.reads else x


class Forked(torch.nn.Module):
    most = 1000

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul(1.0) if x.shape[0] <= self.most else x.div(1.000001)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.product, self.unseen, self.forked = Norm(), Product(), Unseen(), Forked()
        self.register_buffer("cache", torch.zeros(2, 32, 2))

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        self.cache[0, slots] = x[:, :2]  # by place in the batch, as a KV cache is written
        heads = self.norm(x.view(-1, 8)).view(x.shape)
        return self.forked(self.unseen(self.product(heads))).view(x.shape[0], 1, SIZE).squeeze(1)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
        self.head = Product()

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(len(positions)) + 1
        for layer in self.layers:
            x = layer(x, slots)
        return x


class Runner:
    """What the recorder uses of a model runner of vLLM's."""

    def __init__(self, second: bool) -> None:
        torch.manual_seed(0)
        self.model, self.kv_caches = Model(), []
        self.sampler = object() if second else torch.nn.Softmax(-1)
        if second:
            self.prepare_inputs = lambda batch: batch
            self.sample = self._sample

    def get_model(self) -> torch.nn.Module:
        return self.model

    def _sample(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(-1)

    @torch.inference_mode()
    def step(self, rows: dict[str, torch.Tensor], position: int, padding: int = 0) -> None:
        """A step of these requests, with some rows of nothing at its end."""
        starts = np.cumsum([0, *(len(part) for part in rows.values())])
        computed = np.full(len(rows), position)
        batch = SimpleNamespace(
            req_ids=[f"{name}-a1b2" for name in rows],
            query_start_loc_np=starts,
            num_computed_tokens_np=computed,
            num_computed_tokens_cpu=computed,
        )
        if hasattr(self, "sample"):
            self.prepare_inputs(batch)
        else:
            self.input_batch, self.query_start_loc = batch, SimpleNamespace(np=starts)
        x = torch.cat([*rows.values(), torch.zeros(padding, SIZE)])
        self._finish(self.model(x, positions=torch.arange(len(x))), starts)

    def _finish(self, x: torch.Tensor, starts: np.ndarray) -> None:
        logits = self.model.head(x[starts[1:] - 1])
        (self.sample if hasattr(self, "sample") else self.sampler)(logits)


@pytest.fixture(params=[False, True], ids=["first runner", "second runner"])
def worker(request: pytest.FixtureRequest) -> SimpleNamespace:
    class Worker(WorkerExtension):
        model_runner = Runner(request.param)

    return Worker()


def record(worker: WorkerExtension, alone: bool, target: list | None = None) -> dict:
    worker.bisect_begin("target", alone, target)
    rows = {} if alone else {"other": OTHERS[:7], "target": TARGET, "third": OTHERS[7:]}
    worker.model_runner.step(rows or {"target": TARGET}, 0)
    # a step with one row alone and four with concurrent requests, in another order
    rows = {} if alone else {"target": TARGET[:1], "other": OTHERS[:2], "third": OTHERS[3:4]}
    worker.model_runner.step(rows or {"target": TARGET[:1]}, 3)
    recorded = worker.bisect_end()
    assert not recorded["problem"]
    return recorded


def steps(recorded: dict) -> list[RecordedStep]:
    return [RecordedStep.from_plain(step) for step in recorded["steps"]]


def part(worker: WorkerExtension) -> tuple[OutputDivergence | None, list[RecordedStep]]:
    concurrent = steps(record(worker, alone=False))
    alone = steps(record(worker, alone=True))
    divergence, coverage = first_divergence(alone, concurrent, last=99)
    assert coverage.compared > 20
    assert coverage.left_out["integers"]
    return divergence, alone


def inject(worker: WorkerExtension, module: str, most: int = MOST, **attributes: object) -> None:
    module = worker.model_runner.model.get_submodule(module)
    for name, value in {"most": most, **attributes}.items():
        setattr(module, name, value)


def test_where_nothing_is_variant_nothing_is_found(worker: WorkerExtension) -> None:
    divergence, alone = part(worker)
    assert divergence is None
    assert [(step.position, step.rows) for step in alone] == [(0, 3), (3, 1)]
    assert alone[0].left_out["weights and KV cache"]


@pytest.mark.parametrize(
    ("module", "most", "operation", "shape"),
    [
        ("layers.2.product", MOST, "injected.copy", (3, SIZE)),
        ("layers.1.norm", 3 * MOST, "injected.copy_into", (9, 8)),
        ("layers.1.unseen", MOST, MODULE_OUTPUT, (3, SIZE)),
    ],
)
def test_the_variant_operation_is_named(
    worker: WorkerExtension, module: str, most: int, operation: str, shape: tuple[int, ...]
) -> None:
    inject(worker, module, most)
    inject(worker, "layers.2.forked")  # another one after it
    divergence, _ = part(worker)
    assert (divergence.step, divergence.key.module, divergence.key.operation) == (0, module, operation)
    assert divergence.shape == shape


def test_an_operation_of_the_sampler_or_the_head_is_compared_by_requests(worker: WorkerExtension) -> None:
    inject(worker, "head", most=1)
    divergence, _ = part(worker)
    assert (divergence.key.module, divergence.key.operation, divergence.shape) == ("head", "injected.copy", (1, SIZE))


def test_a_step_is_compared_only_where_the_batch_reaches_the_fault(worker: WorkerExtension) -> None:
    inject(worker, "layers.0.product", most=16)
    assert part(worker)[0] is None


def test_another_way_through_a_module_shows_in_its_output_and_names_both_ways(worker: WorkerExtension) -> None:
    inject(worker, "layers.0.forked")
    divergence, _ = part(worker)
    assert (divergence.key.module, divergence.key.operation) == ("layers.0.forked", MODULE_OUTPUT)
    assert (divergence.only_alone, divergence.only_concurrent) == (("aten.mul.Tensor",), ("aten.div.Tensor",))


class Mean(torch.nn.Module):
    """Of one request after another, of which each is moved in a batch of more requests."""

    most = 1000

    def forward(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        most = 0 if len(lengths) > self.most else 1000
        return torch.cat([torch.ops.injected.copy(part.mean(0, keepdim=True), most) for part in x.split(lengths)])


class Pooler(torch.nn.Module):
    """As vLLM's, which chooses among others."""

    def __init__(self) -> None:
        super().__init__()
        part = torch.nn.Module()
        part.pooling, part.head = Mean(), Product()
        part.forward = lambda x, lengths: part.head(part.pooling(x, lengths))
        self.poolers_by_task = {"embed": part}

    def forward(self, x: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        return list(self.poolers_by_task["embed"](x, lengths))


class Pooling(Runner):
    """A runner of a model that pools."""

    def __init__(self) -> None:
        super().__init__(second=False)
        self.model.pooler = Pooler()

    def _finish(self, x: torch.Tensor, starts: np.ndarray) -> None:
        self.model.pooler(x, np.diff(starts).tolist())


@pytest.fixture
def pooling() -> WorkerExtension:
    class Worker(WorkerExtension):
        model_runner = Pooling()

    return Worker()


def test_what_a_pooler_computes_for_each_request_is_compared_with_the_request_alone(pooling: WorkerExtension) -> None:
    divergence, alone = part(pooling)
    assert divergence is None
    compared = {(record.key.module, record.key.operation): record for record in alone[0].records}
    assert [one.shape for one in compared["pooler.embed.pooling", "aten.mean.dim"].slices] == [(1, SIZE)]
    assert [one.shape for one in compared["pooler.embed.head", "injected.copy"].slices] == [(1, SIZE)]
    assert [one.shape for one in compared["pooler", MODULE_OUTPUT].slices] == [(SIZE,)]


@pytest.mark.parametrize("layer", ["pooling", "head"])
def test_the_layer_of_a_pooler_that_looks_at_other_requests_is_named(pooling: WorkerExtension, layer: str) -> None:
    getattr(pooling.model_runner.model.pooler.poolers_by_task["embed"], layer).most = 1
    divergence, _ = part(pooling)
    key = divergence.key
    assert (divergence.step, key.module, key.operation) == (0, f"pooler.embed.{layer}", "injected.copy")
    assert divergence.shape == (1, SIZE)
    alone, concurrent = fetch(pooling, divergence)
    found = [next(data for shape, data in one["parts"] if shape == [1, SIZE]) for one in (alone, concurrent)]
    values = [torch.frombuffer(bytearray(data), dtype=torch.float32) for data in found]
    assert (values[0] != values[1]).nonzero().flatten().tolist() == [SIZE - 1]
    assert dict(alone["operands"])["0.0"][0] in dict(concurrent["operands"])["0.0"]


def fetch(worker: WorkerExtension, divergence: OutputDivergence) -> tuple[dict, dict]:
    target = [divergence.step, list(divergence.key)]
    concurrent = record(worker, False, target)["fetched"]
    return record(worker, True, target)["fetched"], concurrent


def test_an_output_is_fetched_whole_with_what_was_read(worker: WorkerExtension) -> None:
    inject(worker, "layers.2.product")
    alone, concurrent = fetch(worker, part(worker)[0])
    values = []
    for fetched in (alone, concurrent):
        [data] = [data for shape, data in fetched["parts"] if shape == [3, SIZE]]
        values.append(torch.frombuffer(bytearray(data), dtype=torch.float32).view(3, SIZE))
    assert (values[0] != values[1]).nonzero().tolist() == [[row, SIZE - 1] for row in range(3)]
    assert dict(alone["operands"])["0.0"][0] in dict(concurrent["operands"])["0.0"]


def test_an_operand_that_differs_already_is_noticed(worker: WorkerExtension) -> None:
    inject(worker, "layers.1.unseen", reads=True)
    divergence, _ = part(worker)
    assert divergence.key.operation == "aten.neg"
    alone, concurrent = fetch(worker, divergence)
    assert dict(alone["operands"])["0.0"][0] not in dict(concurrent["operands"])["0.0"]


def test_a_padded_step_is_refused(worker: WorkerExtension) -> None:
    worker.bisect_begin("target", False, None)
    worker.model_runner.step({"target": TARGET}, 0, padding=5)
    assert "called with 8 rows for 3 tokens" in worker.bisect_end()["problem"]


def test_steps_cut_elsewhere_are_no_test(worker: WorkerExtension) -> None:
    worker.bisect_begin("target", False, None)
    worker.model_runner.step({"target": TARGET[:2], "other": OTHERS}, 0)
    concurrent = steps(worker.bisect_end())
    with pytest.raises(NoTestError, match="positions 0 to 2 alone and 0 to 1 with concurrent requests"):
        first_divergence(steps(record(worker, alone=True)), concurrent, last=0)


def _by_tiles(x: torch.Tensor) -> torch.Tensor:
    """Of 16 rows: alone one that is filled up, with the others a whole one."""
    out, tile = x.new_empty(x.shape), x
    if len(x) < 16:
        tile = x.new_zeros(16, x.shape[1])
        tile[: len(x)] = x
    return out.copy_((tile * 2)[: len(x)])


by_tiles = FunctionType(_by_tiles.__code__, globals() | {"__name__": f"{recorder._OPERATIONS}by_tiles"})
"""The same as an operation of the mode."""


class Tiled(torch.nn.Module):
    """The mode's own matmul on a CPU, behind an operation with tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(SIZE, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cpu.prepared_linear(by_tiles(x), cpu.prepare_weight(self.weight), None)


@pytest.fixture
def tiled(worker: WorkerExtension) -> WorkerExtension:
    worker.model_runner.model.layers[0].product = Tiled()
    return worker


def test_tiles_inside_an_operation_of_the_mode_are_not_compared(tiled: WorkerExtension) -> None:
    divergence, alone = part(tiled)
    assert divergence is None
    assert alone[0].left_out["inside an operation of the mode"] > 3


def test_compared_they_would_be_a_false_alarm(tiled: WorkerExtension, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_inside_an_operation", lambda: False)
    monkeypatch.setattr(recording, "_times", lambda records: Counter())
    divergence, _ = part(tiled)
    assert (divergence.key.module, divergence.key.operation) == ("layers.0.product", "aten.copy_")


def test_a_fault_in_an_operation_of_the_mode_shows_in_its_modules_output(
    tiled: WorkerExtension, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = cpu.prepared_linear
    monkeypatch.setattr(cpu, "prepared_linear", lambda x, *rest: product(x, *rest) * (1 + 1e-6 * (len(x) > MOST)))
    divergence, _ = part(tiled)
    assert divergence.key.module == "layers.0.product"


class Gathered(torch.nn.Module):
    """What two workers have of each row, all rows of the first before those of the second."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(2 * len(x), SIZE)
        torch.ops.injected.gather(x, out)
        return out.view(2, *x.shape)[0]


torch.library.define("injected::gather", "(Tensor own, Tensor(a!) out) -> ()")


@torch.library.impl("injected::gather", "CPU")
def gather(own: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.cat([own, own]))


def test_what_workers_exchange_has_the_rows_of_the_batch_once_for_each_of_them(
    worker: WorkerExtension, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.model_runner.model.layers[1].product = Gathered()
    assert part(worker)[0].key.operation == "injected.gather", "a false alarm"
    monkeypatch.setitem(recorder._GATHERS, "injected.gather", (0, 1))
    assert part(worker)[0] is None


class Exchanged(torch.nn.Module):
    """A layer whose tensor a collective of PyTorch's writes, some time after it has been called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out.numpy()[...] = np.random.default_rng().standard_normal(out.shape)  # what was there, past the recorder
        torch.ops.c10d.injected_exchange(x, out)
        return x


_c10d = torch.library.Library("c10d", "FRAGMENT")
_c10d.define("injected_exchange(Tensor own, Tensor(a!) out) -> ()")
_begun: list[Callable[[], object]] = []
_c10d.impl("injected_exchange", lambda own, out: _begun.append(lambda: out.copy_(own)), "CPU")


def test_what_a_collective_writes_is_looked_at_when_it_is_there(
    worker: WorkerExtension, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.model_runner.model.layers[1].product = Exchanged()
    monkeypatch.setattr(recorder, "_wait", lambda result: None)
    assert part(worker)[0].key.operation == "c10d.injected_exchange", "a false alarm"
    monkeypatch.setattr(recorder, "_wait", lambda result: _begun.pop()())
    divergence, alone = part(worker)
    assert divergence is None
    assert any(record.key.operation == "c10d.injected_exchange" for step in alone for record in step.records)


def test_an_activation_that_lies_where_a_weight_was_is_recorded(worker: WorkerExtension) -> None:
    worker.bisect_begin("target", False, None)
    weight = worker.model_runner.model.head.weight
    memory, found = weight.data, worker.__dict__["_bisect_recorder"]
    assert found._reason_against(memory) == "weights and KV cache"
    weight.data = torch.empty(0)
    assert found._reason_against(memory) is None
