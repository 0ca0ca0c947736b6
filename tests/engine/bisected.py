"""Bisections of an engine in this process: run by the driver, since the mode holds for a whole process."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch

from tests.engine.adapters import DEVICE, EXPANDS, EXPERT_FAULTS, SHRINKS, plant, plant_in_experts
from tests.engine.kept_states import VOCABULARY
from tests.engine.quantisers import step_scaled
from tests.engine.states import LAYERS
from tests.faults.adding import nudge
from tests.faults.experts import FAULTS as OF_EXPERTS
from tests.faults.experts import planted
from tests.faults.fuzz import inject
from vllm_batch_invariant.integration.layers import fp8
from vllm_batch_invariant.ops.dispatch import module_for
from vllm_batch_invariant.verify.bisect.engine import Case, bisect
from vllm_batch_invariant.verify.bisect.recorder import CONVOLUTION, CORE, GATES, NORM, _poolers
from vllm_batch_invariant.verify.bisect.recording import MODULE_OUTPUT
from vllm_batch_invariant.verify.bisect.report import plain
from vllm_batch_invariant.verify.harness.requests import concurrent_requests, tokens

CASE = Case(tuple(tokens(45, 1)), tuple(tuple(tokens(5 + i, 2)) for i in range(7)), 3, max_tokens=2)
"""8 requests of 45 + 56 tokens; two steps."""
OTHER_COUNTS = (1, 3, 15, 16)
"""Numbers of concurrent requests with which tiles of matmuls are padded, whole, or several."""
PREFILL, DECODE = 45, 1
"""Rows of the request alone: a fault of more is variant in the prefill, or only while it decodes."""


def down_proj(layer: Any) -> Any:
    product = layer.forward

    def forward(x: torch.Tensor) -> Any:
        out, bias = product(x)
        return torch.ops.injected.copy(out, PREFILL), bias

    return forward


def norm(layer: Any) -> Any:
    original = layer.forward

    def forward(x: torch.Tensor, residual: torch.Tensor) -> Any:
        out, residual = original(x, residual)
        written = torch.empty_like(out)
        torch.ops.injected.copy_into(written, out, DECODE if len(x) < PREFILL else 1000)
        return written, residual

    return forward


def unseen(layer: Any, most: int = DECODE) -> Any:
    original = layer.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = original(x)
        nudge(out, most if len(x) < PREFILL else 1000)
        return out

    return forward


def unreached(layer: Any) -> Any:
    return unseen(layer, len(CASE.concurrent) + 1)


FAULTS = {
    "a fault that the batch does not reach": ("model.layers.0.mlp.act_fn", unreached),
    "down_proj": ("model.layers.2.mlp.down_proj", down_proj),
    "norm": ("model.layers.1.post_attention_layernorm", norm),
    "unseen": ("model.layers.0.mlp.act_fn", unseen),
}


def injected(llm: Any) -> dict[str, dict[str, Any]]:
    """What is found without a fault, and with one here or there."""
    found = {"no fault": plain(CASE, bisect(llm, CASE))}
    for count in OTHER_COUNTS:
        case = Case(CASE.prompt, tuple(tuple(tokens(3, 5 + i)) for i in range(count)), count // 2, max_tokens=3)
        found[f"no fault with {count}"] = plain(case, bisect(llm, case))
    [model] = llm.apply_model(lambda model: model)
    for name, (path, fault) in FAULTS.items():
        module = model.get_submodule(path)
        module.forward = fault(module)
        found[name] = plain(CASE, bisect(llm, CASE))
        del module.forward
    return found


ONE = 1
"""Requests that a pooler has in the run alone."""


def pooled_one_by_one(layer: Any) -> Any:
    """A mean of each request, by operators that the dispatcher sees, and moved where there are several requests."""

    def forward(hidden_states: torch.Tensor, pooling_metadata: Any) -> torch.Tensor:
        lengths = pooling_metadata.get_pooling_cursor().prompt_lens_cpu.tolist()
        means = [part.float().mean(0, keepdim=True) for part in hidden_states.split(lengths)]
        most = 0 if len(lengths) > ONE else 1000
        return torch.cat([torch.ops.injected.copy(one, most) for one in means])

    return forward


def pooled_unseen(layer: Any) -> Any:
    original = layer.forward

    def forward(*args: Any) -> torch.Tensor:
        out = original(*args)
        nudge(out, ONE)
        return out

    return forward


def pooled_seen(layer: Any) -> Any:
    original = layer.forward

    def forward(*args: Any) -> torch.Tensor:
        return torch.ops.injected.copy(original(*args), ONE)

    return forward


POOLER_FAULTS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "embed": {
        "model.layers.1.mlp.down_proj": down_proj,
        "pooler.embed.pooling": pooled_one_by_one,
        "pooler.embed.head.activation": pooled_seen,
        "pooler.embed.head": pooled_unseen,
    },
    "classify": {
        "score": pooled_unseen,
        "classifier": pooled_unseen,
        "bert.pooler": pooled_seen,
        "pooler.classify.head.activation": pooled_seen,
    },
}
"""By task the paths of layers that some models have, and what is planted there."""


def assert_each_is_named(found: dict[str, Any]) -> None:
    """Of what :func:`pooled` gives: without a fault nothing differs; with one its layer is named, whose operands have
    the bits of the run alone.
    """
    nothing = found.pop("")
    assert nothing["found"] is None
    assert nothing["first_logprob"] is None
    assert nothing["coverage"]["one_sided"] == {}
    for path, one in found.items():
        key = one["found"]["divergence"]["key"]
        assert key["module"] == path
        assert key["operation"] in ("injected.copy", MODULE_OUTPUT)
        assert not one["found"]["operands_differ"]
        assert one["found"]["repeats"]
        assert one["answers_recorded"]
    operations = {one["found"]["divergence"]["key"]["operation"] for one in found.values()}
    assert operations == {"injected.copy", MODULE_OUTPUT}, "faults that are seen and those that are not"


def pooled(llm: Any, asked: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What is found of a model that pools without a fault, and with one in a layer, the pooler or behind it."""
    case = replace(CASE, max_tokens=1, pooling=asked)
    found = {"": plain(case, bisect(llm, case))}
    [model] = llm.apply_model(lambda model: model)
    layers = dict(model.named_modules()) | dict(_poolers(model.pooler, "pooler"))
    for path, fault in POOLER_FAULTS[asked["task"]].items():
        if path not in layers:
            continue
        layers[path].forward = fault(layers[path])
        found[path] = plain(case, bisect(llm, case))
        del layers[path].forward
    return found


def pooled_of_a_word(llm: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """What is found of a prompt of one token, of which libraries choose kernels by the batch, beside 16 longer ones."""
    others = tuple(tuple(tokens(32, 5 + number)) for number in range(16))
    case = Case(tuple(tokens(1, 1)), others, 8, max_tokens=1, pooling=asked)
    return plain(case, bisect(llm, case))


PICTURE = {"kind": "image", "size": [96, 160], "seed": 1, "at": 4}
WITH_ITEMS = Case(
    tuple(tokens(12, 1)),
    tuple(tuple(tokens(5 + i, 2)) for i in range(4)),
    2,
    max_tokens=2,
    items=(PICTURE,),
    others_items=((PICTURE | {"seed": 2},), (), (PICTURE | {"size": [64, 64]}, PICTURE | {"seed": 3}), ()),
)
"""A request with a picture beside four, of which two have some."""
OF_DECODER = "language_model.model.layers.1.mlp.down_proj"


def with_items(llm: Any) -> dict[str, dict[str, Any]]:
    """What is found of requests with pictures without a fault, with one in the encoder and with one in the decoder."""
    found = {"": plain(WITH_ITEMS, bisect(llm, WITH_ITEMS))}
    inject(llm, "tower")
    found["tower"] = plain(WITH_ITEMS, bisect(llm, WITH_ITEMS))
    inject(llm, "")
    [layer] = llm.apply_model(lambda model: model.get_submodule(OF_DECODER))
    layer.forward = down_proj(layer)
    found[OF_DECODER] = plain(WITH_ITEMS, bisect(llm, WITH_ITEMS))
    del layer.forward
    return found


def product_in_fp8(layer: Any) -> Any:
    """Its result is moved in a batch of more rows than the request has."""
    apply = layer.quant_method.apply

    def moved(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = apply(layer, x, bias)
        nudge(out, PREFILL)
        return out

    return moved


def scales_in_fp8(layer: Any) -> Any:
    """What it is given has one scale a step."""
    apply = layer.quant_method.apply

    def scaled(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        quantise, fp8.quantise = fp8.quantise, step_scaled
        try:
            return apply(layer, x, bias)
        finally:
            fp8.quantise = quantise

    return scaled


FP8_FAULTS = {
    "a product": ("model.layers.1.mlp.down_proj", product_in_fp8),
    "scales": ("model.layers.0.self_attn.o_proj", scales_in_fp8),
}


def _of_vocabulary(vocabulary: range) -> Case:
    others = tuple(tuple(tokens(len(other), 2, vocabulary)) for other in CASE.concurrent)
    return replace(CASE, prompt=tuple(tokens(PREFILL, 1, vocabulary)), concurrent=others)


def in_fp8(llm: Any, vocabulary: list[int]) -> dict[str, dict[str, Any]]:
    """What is found of layers of FP8 without a fault, and with one in the method of this or that layer.

    Args:
        vocabulary: the first token of requests, and the one behind the last.
    """
    case = _of_vocabulary(range(*vocabulary))
    found = {"no fault": plain(case, bisect(llm, case))}
    [model] = llm.apply_model(lambda model: model)
    for name, (path, fault) in FP8_FAULTS.items():
        layer = model.get_submodule(path)
        assert fp8.computes(layer)
        layer.quant_method.apply = fault(layer)
        found[name] = plain(case, bisect(llm, case))
        del layer.quant_method.apply
    return found


def _first_with_states(model: torch.nn.Module) -> tuple[str, Any]:
    return next((path, layer) for path, layer in model.named_modules() if type(layer).__name__.endswith(LAYERS))


@contextmanager
def _moved(owner: Any, name: str) -> Iterator[None]:
    """What a function or a module gives is moved in a batch of more rows than the request has."""
    right = getattr(owner, name)

    def moved(*args: Any, **kwargs: Any) -> Any:
        out = right(*args, **kwargs)
        nudge(out[-2] if isinstance(out, tuple) else out, PREFILL)  # of gates that of decay
        return out

    setattr(owner, name, moved)
    try:
        yield
    finally:
        setattr(owner, name, right)


def between_modules(llm: Any) -> dict[str, Any]:
    """What is found of a model whose layers keep states without a fault, and with one in what these call between their
    modules, and in the norm behind; and the path of the first layer.
    """
    [(path, layer)] = llm.apply_model(_first_with_states)
    case = _of_vocabulary(VOCABULARY)
    found = {"no fault": plain(case, bisect(llm, case))}
    rule, inputs = (
        module_for("delta_rule", DEVICE),
        "mamba2_gates" if hasattr(layer, "ssm_state_size") else "gdn_inputs",
    )
    places: dict[str, tuple[Any, str]] = {CONVOLUTION: (module_for("causal_conv", DEVICE), "causal_conv")}
    if hasattr(layer, "norm"):
        places |= {GATES: (rule, inputs), CORE: (rule, "delta_rule"), "norm": (layer.norm, "forward")}
    if hasattr(layer, "f_proj"):  # of Kimi Delta Attention
        norm = module_for("norm", DEVICE), "gated_rms_norm"
        places |= {GATES: (rule, "kda_inputs"), CORE: (rule, "delta_rule"), NORM: norm}
    for name, (owner, function) in places.items():
        with _moved(owner, function):
            found[name] = plain(case, bisect(llm, case))
    return {"path": path, "found": found}


def in_a_worker(llm: Any, rank: int, path: str) -> dict[str, dict[str, Any]]:
    """What is found of several workers without a fault, with one in a layer of one of them, and with another before."""
    found = {"no fault": plain(CASE, bisect(llm, CASE))}
    for name, places in {
        "a fault": [(rank, path, down_proj)],
        "a fault in the worker before": [
            (rank, path, down_proj),
            (rank - 1, "model.layers.1.mlp.down_proj", down_proj),
        ],
    }.items():
        for place in places:
            llm.apply_model(partial(_plant, *place))
        found[name] = plain(CASE, bisect(llm, CASE))
        for place in places:
            llm.apply_model(partial(_take_back, *place))
    return found


def _plant(rank: int, path: str, fault: Callable[..., Any], model: torch.nn.Module) -> None:
    """Put a fault into a layer, in the worker of that rank."""
    if torch.distributed.get_rank() == rank:
        module = model.get_submodule(path)
        module.forward = fault(module)


def _take_back(rank: int, path: str, fault: Callable[..., Any], model: torch.nn.Module) -> None:
    if torch.distributed.get_rank() == rank:
        del model.get_submodule(path).forward


def experts(llm: Any) -> dict[str, dict[str, Any]]:
    """What is found of a mixture of experts whose router often has ties, without a fault, and with each."""
    [model] = llm.apply_model(lambda model: model)
    for name, layer in model.named_modules():
        if name.endswith("mlp.gate"):
            if not layer.weight.is_cuda:
                layer.cpu_linear.restore()
            rows = layer.weight.data
            rows.copy_(rows[torch.arange(len(rows)) // 3 * 3])  # a tie decides which four a token has
    found = {"no fault": plain(CASE, bisect(llm, CASE))}
    for fault in OF_EXPERTS:
        with planted(fault):
            found[fault] = plain(CASE, bisect(llm, CASE))
    return found


def first_divergence_among(llm: Any, counts: list[int]) -> dict[str, Any]:
    """The result with the first number of concurrent requests with which anything differs."""
    for count in counts:
        others = [request["prompt"] for request in concurrent_requests(count, count)]
        case = Case(tuple(tokens(45, 1)), tuple(map(tuple, others)), place=0, max_tokens=4)
        result = bisect(llm, case)
        if result.found is not None:
            break
    return plain(case, result)


def adapters(llm: Any, folders: list[str]) -> dict[str, dict[str, Any]]:
    """What is found of requests with adapters in turn without a fault, and with one in a product of the adapters."""
    return _of_adapters(llm, folders, plant, (SHRINKS, EXPANDS) if DEVICE == "cpu" else ())


def expert_adapters(llm: Any, folders: list[str]) -> dict[str, dict[str, Any]]:
    """The same with a fault in the products of adapters of experts."""
    return _of_adapters(llm, folders, plant_in_experts, EXPERT_FAULTS)


def _of_adapters(
    llm: Any, folders: list[str], plant: Callable[[Any, str], None], faults: Iterable[str]
) -> dict[str, dict[str, Any]]:
    found = {}
    in_turn = tuple(islice(cycle(["", *folders]), len(CASE.concurrent)))
    case = replace(CASE, adapter=folders[0], adapters=in_turn)
    for fault in ("", *faults):
        plant(llm, fault)
        found[fault] = plain(case, bisect(llm, case))
    plant(llm, "")
    found["none"] = plain(case, bisect(llm, replace(case, adapter="")))
    return found
