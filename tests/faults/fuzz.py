"""Faults that a fuzzer must find, injected in an engine of this process, and taken out again."""

from collections.abc import Callable
from typing import Any

import torch

from tests.faults.adding import nudge
from vllm_batch_invariant.integration.engine import weights
from vllm_batch_invariant.verify.fuzz import engine as fuzz_engine

SEEN = 64
"""Numbers that a tensor has more of which says what is seen, and not how large it is."""
ROWS = 4
"""Rows of a product up to which the injected one is right."""


def _product(model: Any) -> Callable[[], None]:
    """A product whose bits follow the number of rows."""
    layer = model.get_submodule("model.layers.1.mlp.down_proj")
    product = layer.forward

    def forward(x: torch.Tensor) -> Any:
        out, bias = product(x)
        out = out.clone()
        nudge(out, ROWS)
        return out, bias

    layer.forward = forward
    return lambda: delattr(layer, "forward")


def _attention(model: Any) -> Callable[[], None]:
    """Attention whose first row behind a cut of the prompt, by a chunk or by a cached prefix, is wrong."""
    implementation = model.get_submodule("model.layers.0.self_attn.attn").impl
    attention = implementation.forward

    def forward(layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, *out: Any, **more: Any) -> Any:
        result = attention(layer, query, key, value, cache, metadata, *out, **more)
        if metadata is not None:
            starts, lengths = metadata.query_start_loc[:-1], metadata.query_start_loc.diff()
            cut = (metadata.seq_lens[: len(starts)] > lengths) & (lengths > 1)
            result[starts[cut]] *= 1.25
        return result

    implementation.forward = forward
    return lambda: delattr(implementation, "forward")


def _sampler(worker: Any) -> Callable[[], None]:
    """A sampler that looks at a request's place in the batch."""
    sampler = worker.model_runner.sampler
    sample = sampler.sample

    def by_place(logits: torch.Tensor, *arguments: Any, **more: Any) -> Any:
        places = torch.arange(len(logits), device=logits.device)[:, None]
        tokens = torch.arange(logits.shape[1], device=logits.device)
        return sample(logits + 0.3 * places * (tokens * 7919 % 5), *arguments, **more)

    sampler.sample = by_place
    return lambda: delattr(sampler, "sample")


def _pooler(model: Any) -> Callable[[], None]:
    """A pooler that takes the row before the right one where another request is in the step."""
    pooler = model.pooler
    pool = pooler.forward

    def forward(hidden_states: torch.Tensor, pooling_metadata: Any) -> Any:
        company = len(pooling_metadata.prompt_lens) > 1
        return pool(hidden_states.roll(1, 0) if company else hidden_states, pooling_metadata)

    pooler.forward = forward
    return lambda: delattr(pooler, "forward")


def _tower(model: Any) -> Callable[[], None]:
    """An encoder that looks at how many items share its call."""
    encode = model.embed_multimodal

    def beside(**given: Any) -> Any:
        made = encode(**given)
        return [one * (0.75 + 0.25 * len(made)) for one in made] if len(made) > 1 else made

    model.embed_multimodal = beside
    return lambda: setattr(model, "embed_multimodal", encode)


def _processor(llm: Any) -> Callable[[], None]:
    """A processor that looks at how many items it makes tensors of at once."""
    processor = llm.llm_engine.renderer.get_mm_processor()
    process = processor._apply_hf_processor_main

    def beside(mm_items: Any, *arguments: Any, **more: Any) -> Any:
        made, items = process(mm_items, *arguments, **more), sum(mm_items.get_all_counts().values())
        for name, value in made.items() if items > 1 else ():
            several = isinstance(value, list | tuple)  # a tensor of each item
            parts = value if several else [value]
            if all(torch.is_tensor(one) and one.numel() > SEEN for one in parts):
                moved = [one.roll(1) for one in parts]
                made[name] = moved if several else moved[0]
        return made

    processor._apply_hf_processor_main = beside
    return lambda: delattr(processor, "_apply_hf_processor_main")


def _keys() -> Callable[[], None]:
    """Keys of other weights, which stay in the prefix cache when the weights are replaced."""
    look = weights._look

    def forget(core: Any, watch: Any) -> None:
        watch.written, watch.called = weights._written, False

    weights._look = forget
    return lambda: setattr(weights, "_look", look)


def _refusal(llm: Any) -> Callable[[], None]:
    """A core that refuses requests of one token, when the front end has taken them; few steps end a schedule."""
    core, most = llm.llm_engine.engine_core.engine_core, fuzz_engine.MOST_STEPS
    preprocess = core.preprocess_add_request

    def refuse(request: Any) -> Any:
        if request.sampling_params.max_tokens == 1:
            raise ImportError("what compiles its grammar is not installed")
        return preprocess(request)

    def take_out() -> None:
        fuzz_engine.MOST_STEPS = most
        del core.preprocess_add_request

    core.preprocess_add_request, fuzz_engine.MOST_STEPS = refuse, 8
    return take_out


FAULTS = ("product", "attention", "sampler", "keys")
OF_POOLING = ("attention", "pooler")
"""Those that a model has which pools."""
OF_IMAGES = ("tower",)
"""Those that a model has which sees images."""
PROCESSOR = "processor"
"""One in front of a model that sees images: a request has it in any company."""
_take_out: list[Callable[[], None]] = []


def inject(llm: Any, fault: str) -> None:
    """Put a fault into the engine; the one before is taken out."""
    while _take_out:
        _take_out.pop()()
    of_model = {"product": _product, "attention": _attention, "pooler": _pooler, "tower": _tower}
    if fault in of_model:
        [model] = llm.apply_model(lambda model: model)
        _take_out.append(of_model[fault](model))
    elif fault == "sampler":
        [worker] = llm.collective_rpc(lambda worker: worker)
        _take_out.append(_sampler(worker))
    elif fault == PROCESSOR:
        _take_out.append(_processor(llm))
    elif fault == "keys":
        _take_out.append(_keys())
    elif fault == "refusal":
        _take_out.append(_refusal(llm))
