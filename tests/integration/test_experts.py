"""vLLM's layers of experts: which are known, what is read of them, and what becomes of their weights."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.integration.test_layers import LAYERS, MODELS, bare, named
from tests.ops.moe.layers import EXPERTS, Layer, layer, tokens, uniform
from vllm_batch_invariant.envs import TP_TREE, UNTRIED
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration import coverage, reviews
from vllm_batch_invariant.integration.layers import experts, review
from vllm_batch_invariant.integration.layers.linear import as_loaded, restore_weights
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.ops.moe import MoeReduction, route

pytest.importorskip("vllm")

MOE = f"{LAYERS}.fused_moe"


def routed(of: Layer | None = None, **changes: Any) -> Any:
    """A layer of vLLM's, as far as ours reads it."""
    of = of or layer()
    settings = {
        "layer_name": "model.layers.1.mlp.experts",
        "custom_routing_function": None,
        "apply_router_weight_on_input": False,
        "e_score_correction_bias": of.score_bias,
        "routed_scaling_factor": 1.0,
        "use_grouped_topk": False,
        "num_expert_group": None,
        "topk_group": None,
        "global_num_experts": EXPERTS,
        "top_k": 3,
        "scoring_func": "softmax",
        "renormalize": True,
        "activation": SimpleNamespace(value="silu"),
        "expert_map": None,
    }
    made = torch.nn.Module()
    for name, value in (settings | changes).items():
        setattr(made, name, value)
    made.w13_weight = torch.nn.Parameter(of.gate_up.clone(), requires_grad=False)
    made.w2_weight = torch.nn.Parameter(of.down.clone(), requires_grad=False)
    return made


@pytest.fixture
def method(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Ours, as vLLM makes it for a layer."""
    from vllm.config import VllmConfig, set_current_vllm_config

    registered: dict[str, type] = {}
    monkeypatch.setattr(patch_points.CUSTOM_OP.module(), "op_registry_oot", registered)
    experts.install_cpu()
    experts.install_cpu()
    assert len(registered) == 1
    with set_current_vllm_config(VllmConfig()):
        yield patch_points.EXPERTS_METHOD.get()(SimpleNamespace())


def test_vllm_is_given_our_method_for_whole_layers(method: Any) -> None:
    assert isinstance(method, experts.BatchInvariantExperts)
    assert isinstance(method, patch_points.EXPERTS_METHOD.get())
    assert method.is_monolithic
    assert method.moe_kernel is None
    assert review._is_ours(type(method))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        ({"scoring_func": "sigmoid", "e_score_correction_bias": torch.zeros(EXPERTS)}, None),
        ({"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}, None),
        ({"activation": SimpleNamespace(value="swigluoai"), "w2_bias": torch.zeros(1)}, None),
        ({"activation": SimpleNamespace(value="gelu")}, "the activation gelu"),
    ],
)
def test_what_no_gpu_has_run_is_refused_there(
    changes: dict[str, Any], named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "certify", lambda *of: 1)
    made, on_a_gpu = routed(**changes), experts.CudaExperts.__new__(experts.CudaExperts)
    on_a_gpu.reduction = experts.reduction_of(made)
    if named is None:
        on_a_gpu.weights_are_loaded(made)
        return
    with pytest.raises(NotCovered, match=f"with {named} on a GPU"):
        on_a_gpu.weights_are_loaded(made)


def test_a_layer_has_the_bits_of_the_operation(method: Any) -> None:
    of, x = layer(biased=True, scoring="sigmoid", groups=4, top_groups=2), tokens(40)
    grouped = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2, "scoring_func": "sigmoid"}
    made = routed(of, **grouped)
    made.w13_bias, made.w2_bias = of.gate_up_bias, of.down_bias
    method.process_weights_after_loading(made)
    assert method.reduction == of.reduction
    logits = uniform(x, of)
    assert_same_bits(method.apply_monolithic(made, x, logits), of(x, logits))


def test_a_model_tells_the_reductions_of_its_layers_each_once(method: Any) -> None:
    model = torch.nn.ModuleList([torch.nn.Identity()])
    assert experts.reductions(model) == []
    made = routed()
    method.process_weights_after_loading(made)
    made.quant_method = method
    model.extend([made, torch.nn.ModuleList([made])])
    assert experts.reductions(model) == [method.reduction]


def test_workers_with_some_of_the_experts_add_up_to_all(method: Any) -> None:
    of, x = layer(torch.float32), tokens(40, torch.float32)
    logits, whole = uniform(x, of), 0
    for first in (0, EXPERTS // 2):
        here = slice(first, first + EXPERTS // 2)
        places = torch.full((EXPERTS,), -1, dtype=torch.int32)
        places[here] = torch.arange(EXPERTS // 2, dtype=torch.int32)
        made = routed(of, expert_map=places)
        made.w13_weight.data, made.w2_weight.data = of.gate_up[here].clone(), of.down[here].clone()
        method.prepared = ()
        method.process_weights_after_loading(made)
        whole = whole + method.apply_monolithic(made, x, logits)
    torch.testing.assert_close(whole, of(x, logits))


OF_ROUTERS: dict[str, dict[str, Any]] = {
    "with a bias in groups": {
        "use_grouped_topk": True,
        "num_expert_group": 2,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "e_score_correction_bias": torch.linspace(-0.2, 0.2, EXPERTS),
    },
    "that weights inputs": {"apply_router_weight_on_input": True, "top_k": 1, "renormalize": False},
}


@pytest.mark.parametrize("router", OF_ROUTERS)
def test_workers_that_exchange_rows_have_the_bits_of_one(
    method: Any, router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has another number of experts. Sums of the workers' sums have other bits."""
    of, x, sums, sent = layer(), tokens(40), [], []
    logits = uniform(x, of)
    monkeypatch.setenv(TP_TREE.name, "2")

    def worker(here: slice, exchange: Any) -> torch.Tensor:
        places, count = torch.full((EXPERTS,), -1, dtype=torch.int32), here.stop - here.start
        places[here] = torch.arange(count, dtype=torch.int32)
        of_workers = SimpleNamespace(tp_size=1, ep_size=1 + (exchange is not None), dp_size=1)
        of_workers.is_sequence_parallel = False
        config = SimpleNamespace(moe_parallel_config=of_workers, skip_final_all_reduce=False)
        made = routed(of, expert_map=places, moe_config=config, **OF_ROUTERS[router])
        made.w13_weight.data, made.w2_weight.data = of.gate_up[here].clone(), of.down[here].clone()
        method.prepared, method.reduction = (), None
        monkeypatch.setattr(experts, "rows_of_all", exchange)
        method.process_weights_after_loading(made)
        return method.apply_monolithic(made, x, logits)

    workers = slice(0, 3), slice(3, EXPERTS)
    for here in workers:
        sums.append(worker(here, None))
        worker(here, lambda rows: sent.append(rows.clone()) or rows)
    one = worker(slice(0, EXPERTS), None)
    for here in workers:
        assert_same_bits(worker(here, lambda rows: rows.copy_(sent[0] + sent[1])), one)
    assert router == "that weights inputs" or not torch.equal(sums[0] + sums[1], one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_that_were_let_go_come_back_with_their_bits(method: Any, dtype: torch.dtype) -> None:
    of, x = layer(dtype), tokens(5, dtype)
    made, logits = routed(of), uniform(x, of)
    method.process_weights_after_loading(made)
    parameters = made.w13_weight, made.w2_weight
    assert [weight.numel() for weight in parameters] == [0, 0]
    before = method.apply_monolithic(made, x, logits)
    for weight, loaded in zip(parameters, (of.gate_up, of.down), strict=True):
        assert_same_bits(as_loaded(weight), loaded)
    restore_weights()
    assert (made.w13_weight, made.w2_weight) == parameters
    assert_same_bits(made.w13_weight.data, of.gate_up)
    assert_same_bits(made.w2_weight.data, of.down)
    assert_same_bits(method.apply_monolithic(made, x, logits), before)


def test_weights_that_a_trainer_writes_serve_the_next_step(method: Any) -> None:
    old, x = layer(), tokens(5)
    made, logits = routed(old), uniform(x, old)
    method.process_weights_after_loading(made)
    before = method.apply_monolithic(made, x, logits)
    restore_weights()
    made.w2_weight.data.mul_(2)
    method.process_weights_after_loading(made)
    assert_same_bits(method.apply_monolithic(made, x, logits), before * 2)


def routed_by_gemma4(of: Layer, scales: torch.Tensor) -> Any:
    """A layer whose experts Gemma 4's own function chooses, with a factor of each."""
    kind = named(f"{MODELS}.gemma4.Gemma4Router")
    return routed(of, custom_routing_function=bare(kind, per_expert_scale=scales).routing_function)


def test_experts_of_gemma4_have_their_factors_and_those_that_come_later(method: Any) -> None:
    of, x = layer(), tokens(40)
    scales = torch.linspace(0.5, 2.0, EXPERTS, dtype=torch.bfloat16)
    made = routed_by_gemma4(of, scales)
    method.process_weights_after_loading(made)
    logits = torch.randn(40, EXPERTS, generator=torch.Generator().manual_seed(0))
    weights, ids = route(logits, of.reduction)
    got, chosen = method.router(logits, None)
    assert torch.equal(chosen, ids)
    assert_same_bits(got, weights * scales.float()[ids])
    from_vllm, _ = made.custom_routing_function(x, logits, 3, True)
    assert (got - from_vllm).abs().max() < 1e-6, "as vLLM's own function has it"
    scales.fill_(1.0)
    assert_same_bits(method.apply_monolithic(made, x, logits), of(x, logits))
    scales.fill_(2.0)
    assert not torch.equal(method.apply_monolithic(made, x, logits), of(x, logits)), "the negative control"


def test_a_function_of_gemma4_with_another_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = routed_by_gemma4(layer(), torch.ones(EXPERTS))
    assert experts.reduction_of(made) == layer().reduction
    read = reviews.functions("routing")[f"{MODELS}.gemma4"]
    for name in read:
        with monkeypatch.context() as patch:
            patch.setitem(read, name, ("0" * 16,))
            with pytest.raises(NotCovered, match=r"chosen by Gemma4Router\.routing_function"):
                experts.reduction_of(made)


def test_llama_4_chooses_by_logits_as_vllm_does_and_weights_the_input() -> None:
    from vllm.model_executor.models.llama4 import Llama4MoE

    torch.manual_seed(0)
    routing = {"custom_routing_function": Llama4MoE.custom_routing_function, "apply_router_weight_on_input": True}
    made = routed(**routing, top_k=1, renormalize=False)
    reduction = experts.reduction_of(made)
    logits = torch.randn(64, EXPERTS, dtype=torch.bfloat16)
    logits[0], logits[1, 2:4] = 0, 30  # equal ones, and such as have the same sigmoid as the next
    logits[1, 4] = 31
    weights, ids = experts.RouterByLogits(reduction)(logits, None)
    expected = Llama4MoE.custom_routing_function(None, logits, 1, False)
    assert_same_bits(weights, expected[0], "weights")
    assert torch.equal(ids, expected[1].long())
    assert ids[:2].tolist() == [[0], [4]]
    given = []
    method = SimpleNamespace(router=lambda *_: (weights, ids), __call__=None)
    method = type("Method", (), {"router": method.router, "__call__": lambda _, *call: given.append(call)})()
    x = torch.randn(64, 8, dtype=torch.bfloat16)
    experts.BatchInvariantExperts.apply_monolithic(method, made, x, logits)
    [(_, weighted, ones, _)] = given
    assert_same_bits(weighted, x * weights.bfloat16(), "input")
    assert ones.unique().tolist() == [1.0]


def chosen_by_the_model() -> None:
    """Stands for a model's own function."""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"custom_routing_function": chosen_by_the_model}, "chosen by chosen_by_the_model: a model's own function"),
        ({"apply_router_weight_on_input": True}, "weights are applied to the input of several"),
        ({"swiglu_limit": 7.0}, "swiglu_limit=7.0: the activation is defined without it"),
        ({"routed_scaling_factor": 2.5}, "a factor of 2.5: vLLM applies none"),
        ({"scoring_func": "sqrtsoftplus"}, "experts chosen by sqrtsoftplus"),
        ({"activation": SimpleNamespace(value="gelu_no_mul")}, "experts with the activation gelu_no_mul"),
    ],
)
def test_a_layer_that_is_not_in_the_reduction_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(NotCovered, match=said) as refused:
        experts.reduction_of(routed(**changes))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("workers", "device", "said"),
    [
        ({}, "cpu", None),
        ({"ep_size": 4}, "cpu", None),
        ({"tp_size": 2}, "cpu", "of which workers have parts: .*; pass --enable-expert-parallel"),
        ({"ep_size": 2, "dp_size": 2}, "cpu", "by several engines"),
        ({"ep_size": 2, "is_sequence_parallel": True}, "cpu", "by several engines"),
        ({"ep_size": 2}, "cuda", "on a GPU"),
        ({"ep_size": 2, "skip_final_all_reduce": True}, "cpu", "that its model adds up"),
        ({"ep_size": 2, "skip_final_all_reduce": None}, "cpu", "by this vLLM: .*; install vLLM 0.32"),
    ],
)
def test_a_tree_has_experts_that_workers_have_whole(
    workers: dict[str, Any], device: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TP_TREE.name, "4")
    parallel = {"tp_size": 1, "ep_size": 1, "dp_size": 1, "is_sequence_parallel": False} | workers
    skips = parallel.pop("skip_final_all_reduce", False)
    of_workers = SimpleNamespace(**parallel)
    made = routed(moe_config=SimpleNamespace(moe_parallel_config=of_workers, skip_final_all_reduce=skips))
    if device == "cuda":
        made.parameters = lambda: iter([SimpleNamespace(is_cuda=True)])
    if said is None:
        assert experts.reduction_of(made).num_experts == EXPERTS
        assert experts.exchanges(made) == (parallel["ep_size"] > 1)
        return
    with pytest.raises(NotCovered, match=f"{TP_TREE.name} with experts of model.layers.1.mlp.experts {said}"):
        experts.reduction_of(made)
    monkeypatch.setenv(UNTRIED.name, "1")
    if device == "cuda":
        assert experts.reduction_of(made).num_experts == EXPERTS


@pytest.mark.parametrize("tree", ["1", "2"])
def test_a_tree_completes_the_sums_of_shared_experts_before_a_gate(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those whose layers become row-parallel after the runner was made, as Transformers' do."""
    from vllm.config import VllmConfig, set_current_vllm_config

    def make(self: Any, routed_experts: Any, shared_experts: Any) -> None:
        torch.nn.Module.__init__(self)
        self.routed_experts, self._shared_experts = routed_experts, shared_experts

    def layer_of_two() -> Any:
        of_workers = SimpleNamespace(tp_size=1, ep_size=2, dp_size=1, is_sequence_parallel=False)
        return routed(moe_config=SimpleNamespace(moe_parallel_config=of_workers, skip_final_all_reduce=False))

    monkeypatch.setenv(TP_TREE.name, tree)
    monkeypatch.setattr(patch_points.CUSTOM_OP.module(), "op_registry_oot", {})
    monkeypatch.setattr(patch_points.MOE_RUNNER.get(), "__init__", make)
    experts.install_cpu()
    shared, beside_shared, alone = torch.nn.ModuleList(), layer_of_two(), layer_of_two()
    shared._stream = object()
    for made, of_all in ((beside_shared, shared), (alone, None)):
        patch_points.MOE_RUNNER.get()(made, shared_experts=of_all)
    down = bare(patch_points.ROW_PARALLEL.get(), reduce_results=False)
    shared.append(torch.nn.ModuleList([torch.nn.Identity(), down]))
    with set_current_vllm_config(VllmConfig()):
        for made in (alone, beside_shared):
            assert not down.reduce_results
            patch_points.EXPERTS_METHOD.get()(SimpleNamespace()).process_weights_after_loading(made)
    assert down.reduce_results == beside_shared.moe_config.skip_final_all_reduce == (tree == "2")
    assert (shared._stream is None) == (tree == "2")


def test_a_factor_of_a_router_with_groups_is_read() -> None:
    made = routed(routed_scaling_factor=2.5, use_grouped_topk=True, num_expert_group=2, topk_group=1)
    expected = MoeReduction(EXPERTS, 3, torch.bfloat16, groups=2, top_groups=1, scale=2.5)
    assert experts.reduction_of(made) == expected


def runner(**changes: Any) -> torch.nn.Module:
    router = type("CPURouter", (), {"eplb_state": None})()
    parts = {"router": router, "gate": None, "shared_expert_gate": None}
    return bare(named(f"{MOE}.runner.moe_runner.MoERunner"), **parts | changes)


BLOCKS = ("afmoe.AfmoeMoE", "hy_v3.HYV3MoEFused", "minimax_m2.MiniMaxM2MoE", "step3p5.FusedMoEBlock")
"""Classes of models that keep the router's bias themselves."""


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_may_keep_the_bias_that_its_experts_read_and_no_other(method: Any, block: str) -> None:
    kept = torch.nn.Parameter(torch.zeros(EXPERTS))
    part = bare(named(f"{MOE}.routed_experts.RoutedExperts"), quant_method=method, e_score_correction_bias=kept)
    whole = bare(named(f"{MODELS}.{block}"), experts=runner(routed_experts=part), bias_of_the_block=kept)
    review.check(whole)
    refused = rf"{block.rpartition('.')[2]}\): it keeps weights of its own \(bias_of_the_block\)"
    part.e_score_correction_bias = torch.nn.Parameter(kept.detach().clone())  # equal, and read by others
    with pytest.raises(NotCovered, match=refused):
        review.check(whole)
    part.e_score_correction_bias = kept
    part.quant_method = torch.nn.Identity()
    with pytest.raises(NotCovered, match=refused):
        review.check(whole)


def test_a_bias_of_experts_elsewhere_does_not_count(method: Any) -> None:
    kept = torch.nn.Parameter(torch.zeros(EXPERTS))
    part = bare(named(f"{MOE}.routed_experts.RoutedExperts"), quant_method=method, e_score_correction_bias=kept)
    block = bare(named(f"{MODELS}.{BLOCKS[0]}"), other=part, expert_bias=kept)
    with pytest.raises(NotCovered, match=r"it keeps weights of its own \(expert_bias\)"):
        review.check(block)


def test_layers_of_experts_are_known_where_ours_serves_them(method: Any) -> None:
    review.check(runner())
    routed_experts = named(f"{MOE}.routed_experts.RoutedExperts")
    review.check(bare(routed_experts, quant_method=method))
    with pytest.raises(NotCovered, match="its experts are computed by Fp8MoEMethod"):
        review.check(bare(routed_experts, quant_method=type("Fp8MoEMethod", (), {})()))


def test_linear_layers_around_latent_experts_are_known(method: Any) -> None:
    kind = patch_points.REPLICATED.get()
    around = {f"routed_{side}_transform": bare(kind, quant_method=None) for side in ("input", "output")}
    assert experts.problem_of(runner(**around)) is None


@pytest.mark.parametrize("gated", [True, False])
def test_a_cpu_configures_experts_without_a_gate_as_a_gpu_does(gated: bool) -> None:
    """And only while it does so."""
    module = patch_points.EXPERTS_CONFIG.module()

    def complete(config: Any) -> None:
        config.like_a_gpu = module.current_platform.is_cuda_alike()

    config = SimpleNamespace(is_act_and_mul=gated)
    experts._with_or_without_a_gate(complete)(config)
    assert config.like_a_gpu is (not gated or torch.cuda.is_available())
    assert module.current_platform.is_cuda_alike() is torch.cuda.is_available()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"router": type("ZeroExpertRouter", (), {})()}, "its experts are chosen by ZeroExpertRouter"),
        ({"router": type("CPURouter", (), {"eplb_state": object()})()}, "its experts move between workers"),
        ({"gate": torch.nn.Identity(), "shared_expert_gate": torch.nn.Identity()}, "are one matmul"),
        ({"routed_input_transform": torch.nn.Identity()}, "it has a routed_input_transform"),
    ],
)
def test_a_layer_that_calls_experts_in_another_way_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(NotCovered, match=said):
        review.check(runner(**changes))


BIND_CAPTURE = patch_points.BIND_CAPTURE.get() if patch_points.BIND_CAPTURE.is_there() else None
"""vLLM's own function, before any test has installed ours."""


def capturing(method: Any, of: Layer, places: tuple[int, ...]) -> tuple[torch.nn.Module, Any]:
    """Layers of a model in those places, which our method serves, and vLLM's own notebook for steps of 64 tokens."""
    capturer = pytest.importorskip("vllm.model_executor.layers.fused_moe.routed_experts_capturer")
    kind = patch_points.MOE_RUNNER.get()
    model = torch.nn.ModuleList()
    for place in places:
        made = routed(of)
        served = type(method)(SimpleNamespace())
        served.process_weights_after_loading(made)
        made.quant_method = served
        model.append(bare(kind, routed_experts=made, layer_name=f"model.layers.{place}.mlp.experts"))
    numbers = {
        "get_total_num_hidden_layers": lambda: 3,
        "get_num_experts": lambda: EXPERTS,
        "get_num_experts_per_tok": lambda: 3,
        "hf_text_config": SimpleNamespace(model_type="tests"),
    }
    parallel = SimpleNamespace(data_parallel_rank=0, tensor_parallel_size=1)
    config = SimpleNamespace(model_config=SimpleNamespace(**numbers), parallel_config=parallel)
    return model, capturer.RoutedExpertsCapturer(max_num_batched_tokens=64, vllm_config=config)


@pytest.mark.skipif(BIND_CAPTURE is None, reason="this vLLM tells it in another way")
def test_a_request_is_told_the_experts_that_our_router_chose(method: Any) -> None:
    from vllm.forward_context import ForwardContext, override_forward_context

    of = layer()
    model, notebook = capturing(method, of, (1, 2))
    with pytest.raises(ValueError, match="not supported with monolithic"):  # vLLM's own function
        BIND_CAPTURE(model, notebook)
    experts.bind_capture(model, notebook)
    x, steps = tokens(40), {}
    logits = [uniform(x, of), uniform(x, of).roll(1, dims=-1)]
    with override_forward_context(ForwardContext({}, {}, {})):
        for count in (40, 1, 17):
            for part, of_layer in zip(model, logits, strict=True):
                made = part.routed_experts
                made.quant_method.apply_monolithic(made, x[:count], of_layer[:count])
            steps[count] = notebook.snapshot_routing_data(count)
    for count, told in steps.items():
        assert told.dtype == torch.uint8
        assert told.shape == (count, 3, 3)
        assert not told[:, 0].any()  # a dense layer
        for place, of_layer in enumerate(logits, 1):
            chosen = route(of_layer, reduction_in(model), None)[1]
            assert torch.equal(told[:, place], chosen[:count].to(torch.uint8))
            assert not torch.equal(told[:, place], chosen[:count].sort(-1).values.to(torch.uint8))


def reduction_in(model: torch.nn.Module) -> MoeReduction:
    [reduction] = experts.reductions(model)
    return reduction


def test_a_model_without_experts_tells_none(method: Any) -> None:
    with pytest.raises(NotCovered, match="of a model without experts"):
        experts.bind_capture(torch.nn.ModuleList([torch.nn.Identity()]), SimpleNamespace())


@pytest.mark.parametrize(
    ("device", "version", "said"),
    [
        ("cpu", "0.32.0", []),
        ("cuda", "0.33.0", []),
        ("cuda", "0.32.0", ["mixture of experts with vLLM 0.32.0"]),
    ],
)
def test_where_mixtures_of_experts_are_refused(
    device: str, version: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: version)
    rows = [feature for feature in coverage.REFUSED if feature.name.startswith("Mixture of experts")]
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_moe=True), device_config=SimpleNamespace(device_type=device)
    )
    assert [what for row in rows if (what := row.found(config))] == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"enable_eplb": True}, "load balancing of experts"),
        ({"eplb_config": SimpleNamespace(num_redundant_experts=2)}, "redundant experts"),
    ],
)
def test_experts_that_move_are_refused(changes: dict[str, Any], said: str | None) -> None:
    row = next(feature for feature in coverage.REFUSED if "EPLB" in feature.name)
    parallel = {"enable_eplb": False, "eplb_config": SimpleNamespace(num_redundant_experts=0)} | changes
    assert row.found(SimpleNamespace(parallel_config=SimpleNamespace(**parallel))) == said
