"""Which norms of vLLM's models add what the layer before them gives, and that a model computes the same with them."""

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("vllm")

from tests.assertions import assert_same_bits
from vllm_batch_invariant.envs import TP_TREE
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.layers import decoders, experts, norm_fusion
from vllm_batch_invariant.integration.layers.decoders import DECODERS, Decoder
from vllm_batch_invariant.integration.layers.experts import CudaExperts
from vllm_batch_invariant.integration.parallel import tensor_tree
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.integration.side_table import beside
from vllm_batch_invariant.ops.norm import rms_norm

HIDDEN, LAYERS = 32, 3


class AllReduce:
    """Of two ranks, the second of which has twice the partial result; counts its calls."""

    def __init__(self) -> None:
        self.sums = self.norms = self.sent = self.expected = 0
        self.sends_everything = False

    def expect(self, size: int) -> bool:
        self.expected = size
        return True

    def sends(self, rows: int, length: int, dtype: torch.dtype) -> bool:
        assert (length, dtype) == (HIDDEN, torch.float32)
        return self.sends_everything and rows > 1

    def send(self, multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> "SentRows":
        self.sent += 1
        return SentRows([multiply(rows) for rows in x.split(3)])

    def __call__(self, partial: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return partial + 2 * partial

    def add_and_norm(
        self, partial: Any, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.norms += 1
        partial = partial if isinstance(partial, torch.Tensor) else partial.added()
        return rms_norm(partial + 2 * partial, weight, eps, residual)


class Products(NamedTuple):
    """What two experts make of tokens."""

    expert_out: torch.Tensor
    """[2, tokens, hidden]"""

    def added(self) -> torch.Tensor:
        return self.expert_out.sum(0)


class SentRows(NamedTuple):
    """Rows of a partial result."""

    parts: list[torch.Tensor]

    def added(self) -> torch.Tensor:
        return torch.cat(self.parts)


class Moe:
    """The operation on a GPU; counts its calls."""

    def __init__(self) -> None:
        self.sums = self.norms = 0

    def a_norm_may_add(self, *_: Any) -> bool:
        return True

    def products(self, x: torch.Tensor, *_: Any) -> Products:
        return Products(torch.stack((x.sin(), x.cos())))

    def moe(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        self.sums += 1
        return x.sin() + x.cos()

    def add_and_norm(
        self, of: Products, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.norms += 1
        return rms_norm(of.added(), weight, eps, residual)


class Runner(torch.nn.Module):
    """What calls experts, as far as it is read here."""

    def __init__(self, add: AllReduce | None) -> None:
        super().__init__()
        self.shared_experts = self.routed_output_transform = None
        self.routed_scaling_factor = 1.0
        method = made(type("Method", (CudaExperts, torch.nn.Module), {"reduction": object()}))
        self.routed_experts = torch.nn.Module()
        self.routed_experts.quant_method, self._add = method, add
        config = {"is_sequence_parallel": False, "skip_final_all_reduce": False, "dp_size": 1, "pcp_size": 1}
        self.moe_config = SimpleNamespace(**config)

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        del router_logits
        layer = SimpleNamespace(w13_weight=None, w2_weight=None, expert_map=None)
        found = self.routed_experts.quant_method.forward(layer, hidden_states, None, None)
        return self._add(found) if self._add and not self.moe_config.skip_final_all_reduce else found


class Norm(torch.nn.Module):
    """As vLLM builds ours."""

    has_weight, variance_size_override, variance_epsilon = True, None, 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(HIDDEN))
        self._forward_method = lambda x, residual=None: rms_norm(x, self.weight.data, self.variance_epsilon, residual)

    def forward(self, *given: torch.Tensor) -> Any:
        return self._forward_method(*given)


class Split(torch.nn.Module):
    """A column-parallel layer, which gives its input so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x.repeat(1, self.times), None


def made(kind: type, **values: Any) -> Any:
    """A module of vLLM's class, that is not initialised."""
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    for name, value in values.items():
        setattr(module, name, value)
    return module


def row_parallel(bias: torch.Tensor | None = None) -> Any:
    weight = torch.randn(HIDDEN, HIDDEN)

    def apply(layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """PyTorch gives a row other bits among other rows."""
        del layer
        return torch.cat([torch.nn.functional.linear(row, weight, bias) for row in x.split(1)])

    flags = {"input_is_parallel": True, "reduce_results": True, "return_bias": True, "skip_bias_add": False}
    kind = patch_points.ROW_PARALLEL.get()
    sizes = {"tp_size": 2, "tp_rank": 0, "output_size": HIDDEN}
    return made(kind, **sizes, quant_method=SimpleNamespace(apply=apply), bias=bias, prefix="x", **flags)


def kind_of(name: str) -> type:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(f"vllm.model_executor.models.{module}"), attribute)


def decoder_of(kinds: Decoder, bias: torch.Tensor | None = None, add: AllReduce | None = None) -> Any:
    """A model of vLLM's classes, whose layers compute little. ``add`` adds what experts of two workers give."""
    torch.manual_seed(0)
    layers = []
    for number in range(LAYERS):
        attention = made(
            kind_of(kinds.attention),
            q_size=HIDDEN,
            kv_size=HIDDEN,
            head_dim=HIDDEN,
            do_llama_4_scaling=False,
            qk_norm=False,
            qkv_proj=Split(3),
            o_proj=row_parallel(bias),
            attn=lambda q, k, v: q - k + v,
            q_norm=torch.nn.Identity(),
            k_norm=torch.nn.Identity(),
            rotary_emb=lambda at, q, k: (q, 2 * k),
        )
        kind = kind_of(kinds.blocks[-1 if number != 1 else 0])
        mlp = {"gate_up_proj": Split(1), "act_fn": torch.nn.functional.silu, "expert_gate": None}
        moe = {"gate": lambda x: (x, None), "hidden_size": HIDDEN, "is_sequence_parallel": False}
        is_dense = kind.__name__.endswith("MLP")
        block = made(kind, down_proj=row_parallel(bias), **mlp) if is_dense else made(kind, experts=Runner(add), **moe)
        norms = {"input_layernorm": Norm(), "post_attention_layernorm": Norm(), "ada_rms_norm_t_cond": None}
        layers.append(made(kind_of(kinds.layer), self_attn=attention, **{kinds.name: block}, **norms))
    return made(kind_of(kinds.model), layers=torch.nn.ModuleList(layers), norm=Norm(), start_layer=0, end_layer=LAYERS)


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> AllReduce:
    """What adds the partial results of two workers, wherever vLLM asks for it."""
    add = AllReduce()
    stage = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    for name in ("llama", "mixtral", "qwen2", "qwen3_moe"):
        monkeypatch.setattr(import_module(f"vllm.model_executor.models.{name}"), "get_pp_group", lambda: stage)
    monkeypatch.setattr(patch_points.ROW_PARALLEL.module(), "tensor_model_parallel_all_reduce", add)
    group = SimpleNamespace(world_size=2, device_communicator=SimpleNamespace())
    beside(group.device_communicator).all_reduce = add
    monkeypatch.setattr(patch_points.TENSOR_PARALLEL.module(), patch_points.TENSOR_PARALLEL.attribute, group)
    monkeypatch.setattr(patch_points.CUSTOM_OP.module(), "op_registry_oot", {"RMSNorm": Norm})
    monkeypatch.setattr(patch_points.MOE_RUNNER.module(), patch_points.MOE_RUNNER.attribute, Runner)
    return add


@pytest.fixture(autouse=True)
def moe(monkeypatch: pytest.MonkeyPatch) -> Moe:
    """What computes experts on a GPU."""
    operation = Moe()
    for module in (experts, norm_fusion):
        monkeypatch.setattr(module, "module_for", lambda *_: operation)
    return operation


def hidden_states(decoder: Any) -> torch.Tensor:
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    return type(decoder).forward(decoder, None, torch.arange(5), None, x)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kinds", DECODERS, ids=lambda kinds: kinds.model)
def test_a_model_computes_the_same_with_norms_that_add(kinds: Decoder, has_bias: bool, ours: AllReduce) -> None:
    decoder = decoder_of(kinds, torch.randn(HIDDEN) if has_bias else None, ours)
    apart = hidden_states(decoder)
    assert (ours.sums, ours.norms) == (2 * LAYERS, 0)
    assert norm_fusion.fuse(torch.nn.Sequential(decoder), ours) == 2 * LAYERS
    assert_same_bits(hidden_states(decoder), apart)
    assert (ours.sums, ours.norms) == (2 * LAYERS, 2 * LAYERS)
    assert norm_fusion.fuse(decoder, ours) == 0, "once is enough"


def row_parallel_layers(decoder: Any) -> list[torch.nn.Module]:
    return [one for one in decoder.modules() if isinstance(one, patch_points.ROW_PARALLEL.get())]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kinds", DECODERS, ids=lambda kinds: kinds.model)
def test_a_model_computes_the_same_where_rows_are_sent_while_others_are_multiplied(
    kinds: Decoder, has_bias: bool, ours: AllReduce
) -> None:
    decoder = decoder_of(kinds, torch.randn(HIDDEN) if has_bias else None, ours)
    apart, layers = hidden_states(decoder), row_parallel_layers(decoder)
    norm_fusion.fuse(decoder, ours)
    ours.sends_everything = True
    assert_same_bits(hidden_states(decoder), apart)
    assert (ours.sent, ours.norms) == (len(layers), 2 * LAYERS)
    ours.sent, handle = 0, layers[0].register_forward_hook(lambda *_: None)
    assert_same_bits(hidden_states(decoder), apart)
    assert ours.sent == len(layers) - 1, "what somebody looks at is not sent"
    handle.remove()
    assert_same_bits(hidden_states(decoder), apart)
    assert ours.sent == 2 * len(layers) - 1


def with_experts(decoder: Any) -> list[Runner]:
    return [one for one in decoder.modules() if isinstance(one, Runner)]


of_experts = pytest.mark.parametrize("kinds", DECODERS[4:], ids=lambda kinds: kinds.model)


@of_experts
def test_on_one_gpu_norms_add_what_experts_give(kinds: Decoder, ours: AllReduce, moe: Moe) -> None:
    decoder = decoder_of(kinds)
    runners, apart = with_experts(decoder), hidden_states(decoder)
    assert (moe.sums, moe.norms) == (len(runners), 0)
    assert norm_fusion.fuse(decoder, None) == len(runners) == LAYERS - kinds.model.startswith("qwen3")
    before = ours.sums
    assert_same_bits(hidden_states(decoder), apart)
    assert (moe.sums, moe.norms) == (len(runners), len(runners))
    assert ours.sums == 2 * before, "row-parallel layers stay as they are"
    assert norm_fusion.fuse(decoder, None) == 0, "once is enough"


@of_experts
@pytest.mark.parametrize("workers", [1, 2])
def test_experts_that_somebody_looks_at_give_their_sum(kinds: Decoder, workers: int, ours: AllReduce, moe: Moe) -> None:
    decoder = decoder_of(kinds, add=ours if workers == 2 else None)
    runners, apart = with_experts(decoder), hidden_states(decoder)
    norm_fusion.fuse(decoder, ours if workers == 2 else None)
    handles = [one.routed_experts.quant_method.register_forward_hook(lambda *_: None) for one in runners]
    assert_same_bits(hidden_states(decoder), apart)
    assert (moe.sums, moe.norms) == (2 * len(runners), 0)
    for handle in handles:
        handle.remove()
    assert_same_bits(hidden_states(decoder), apart)
    assert moe.sums == 2 * len(runners)


@of_experts
@pytest.mark.parametrize("workers", [1, 2])
def test_a_check_of_experts_has_their_sum_and_leaves_nothing_to_the_norm(
    kinds: Decoder, workers: int, ours: AllReduce
) -> None:
    decoder = decoder_of(kinds, add=ours if workers == 2 else None)
    norm_fusion.fuse(decoder, ours if workers == 2 else None)
    method, x = with_experts(decoder)[0].routed_experts.quant_method, torch.randn(5, HIDDEN)
    method.router = lambda logits, bias: (None, None)
    layer = SimpleNamespace(
        w13_weight=None,
        w2_weight=None,
        expert_map=None,
        e_score_correction_bias=None,
        apply_router_weight_on_input=False,
    )
    assert_same_bits(method.summed(layer, x, x), x.sin() + x.cos())
    assert method.take_deferred() is None


def set_of(runner: Runner, name: str, value: object) -> None:
    setattr(runner.moe_config if name in vars(runner.moe_config) else runner, name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shared_experts", torch.nn.Identity()),
        ("routed_output_transform", torch.nn.Identity()),
        ("routed_scaling_factor", 2.5),
        ("is_sequence_parallel", True),
        ("skip_final_all_reduce", True),
        ("dp_size", 2),
        ("pcp_size", 2),
    ],
)
def test_experts_whose_sum_is_not_all_of_their_layer_add_it(name: str, value: object, ours: AllReduce) -> None:
    for all_reduce in (None, ours):
        decoder = decoder_of(DECODERS[-1], add=all_reduce)
        set_of(with_experts(decoder)[1], name, value)
        assert norm_fusion.fuse(decoder, all_reduce) == (LAYERS - 1 if all_reduce is None else 0)


def own_kind(module: torch.nn.Module) -> None:
    """Has a module be of a subclass."""
    module.__class__ = type("Own", (type(module),), {})


CHANGES = {
    "auxiliary hidden states": lambda decoder: setattr(decoder, "aux_hidden_state_layers", (1,)),
    "a first stage": lambda decoder: setattr(decoder, "end_layer", LAYERS - 1),
    "a last stage": lambda decoder: setattr(decoder, "start_layer", 1),
    "another model": own_kind,
    "another layer": lambda decoder: own_kind(decoder.layers[1]),
    "another attention": lambda decoder: own_kind(decoder.layers[1].self_attn),
    "another MLP": lambda decoder: own_kind(decoder.layers[1].mlp),
    "another norm": lambda decoder: own_kind(decoder.norm),
    "a norm of a part of rows": lambda decoder: setattr(decoder.norm, "variance_size_override", 8),
    "another projection": lambda decoder: own_kind(decoder.layers[1].mlp.down_proj),
    "a projection that each worker has": lambda decoder: setattr(decoder.layers[1].mlp.down_proj, "tp_size", 1),
    "sums somewhere else": lambda decoder: setattr(decoder.layers[1].mlp.down_proj, "reduce_results", False),
    "a bias that is returned": lambda decoder: setattr(decoder.layers[1].mlp.down_proj, "skip_bias_add", True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_differs_stays_as_it_is(change: str, ours: AllReduce) -> None:
    decoder = decoder_of(DECODERS[0])
    CHANGES[change](decoder)
    assert norm_fusion.fuse(decoder, ours) == 0
    assert decoder.layers[0].self_attn.o_proj.reduce_results


def test_a_vllm_whose_layers_nobody_has_read_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, ours: AllReduce) -> None:
    assert decoders.was_read(), "the installed one was"
    read = reviews.functions("decoders")["vllm.model_executor.models.llama"]
    monkeypatch.setitem(read, "LlamaMLP.forward", ("",))
    monkeypatch.setattr(decoders, "was_read", decoders.was_read.__wrapped__)
    assert norm_fusion.fuse(decoder_of(DECODERS[0]), ours) == 0


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_tree_adds_a_bias_behind_the_sum(has_bias: bool, monkeypatch: pytest.MonkeyPatch, ours: AllReduce) -> None:
    row = patch_points.ROW_PARALLEL.get()
    monkeypatch.setattr(row, "forward", row.forward)
    monkeypatch.setenv(TP_TREE.name, "2")
    tensor_tree.install(tensor_tree.with_bias)
    decoder = decoder_of(DECODERS[0], torch.randn(HIDDEN) if has_bias else None)
    apart = hidden_states(decoder)
    assert norm_fusion.fuse(decoder, ours) == (0 if has_bias else 2 * LAYERS)
    assert_same_bits(hidden_states(decoder), apart)


@pytest.mark.parametrize("serves", [True, False])
def test_a_worker_fuses_what_it_has_loaded(serves: bool, ours: AllReduce, monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker:
        vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(get_hidden_size=lambda: HIDDEN, dtype=torch.float32),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=100),
        )

        model = decoder_of(DECODERS[0])

        def get_model(self) -> torch.nn.Module:
            return self.model

    if not serves:
        beside(patch_points.TENSOR_PARALLEL.get().device_communicator).all_reduce = None
    worker = Worker()
    norm_fusion.ADDING_NORMS.fuse_in(worker)
    hidden_states(worker.model)
    assert ours.norms == serves * 2 * LAYERS
    assert ours.expected == serves * 100 * HIDDEN * 4


@pytest.mark.parametrize("has_experts", [True, False])
def test_a_worker_alone_reads_sources_only_for_experts(
    has_experts: bool, moe: Moe, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Worker:
        model = decoder_of(DECODERS[-1] if has_experts else DECODERS[0])

        def get_model(self) -> torch.nn.Module:
            return self.model

    if not has_experts:
        monkeypatch.setattr(decoders, "was_read", lambda: pytest.fail("sources were read"))
    monkeypatch.setattr(patch_points.TENSOR_PARALLEL.get(), "world_size", 1)
    beside(patch_points.TENSOR_PARALLEL.get().device_communicator).all_reduce = None
    worker = Worker()
    norm_fusion.ADDING_NORMS.fuse_in(worker)
    hidden_states(worker.model)
    assert moe.norms == has_experts * LAYERS
