"""Certificates of operations: each is computed for a row alone and in larger batches, and compared bit for bit.

They are made in an engine's worker on the layers of its model, so they certify what serves there, be it of this
project, of vLLM or of PyTorch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...compare import Comparison, bitwise_comparison
from ...envs import is_exact
from ..printing import one_line
from .guarantees import KNOWN, Certificate

if TYPE_CHECKING:
    from ...ops.attention import AttentionReduction, AttentionSpec
    from ...ops.linear import MatmulSpec
    from ...ops.linear.autotune import TunedSchedule


@dataclass(frozen=True)
class Heads:
    """The attention shape of a model."""

    query: int
    kv: int
    size: int
    dtype: torch.dtype = torch.float32


@dataclass
class Request:
    """Queries, keys and values of ``length`` positions, drawn from the request's own seed."""

    heads: Heads
    length: int
    seed: int
    query: torch.Tensor = field(init=False)
    key: torch.Tensor = field(init=False)
    value: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        draw = [
            torch.randn(self.length, count, self.heads.size, generator=generator)
            for count in (self.heads.query, self.heads.kv, self.heads.kv)
        ]
        self.query, self.key, self.value = (tensor.to(self.heads.dtype) for tensor in draw)


@dataclass(frozen=True)
class Chunk:
    """The positions ``start`` to ``stop`` - 1 of a request, which are computed in one call."""

    request: Request
    start: int
    stop: int


def paged(
    chunks: list[Chunk], page_size: int = 16, placement: int = 0, filler: float = 7.0
) -> tuple[torch.Tensor, ...]:
    """The tensors of one call of paged attention.

    Args:
        placement: seed of the order of pages.
        filler: value of cache slots that no chunk writes.

    Returns:
        query [tokens, heads, head_size], key and value cache [pages, kv_heads, page_size, head_size] (two halves of one
        tensor, as in vLLM's CPU backend), block table [chunks, pages] int32, sequence lengths [chunks] int32 and
        ``query_start_loc`` [chunks + 1] int32.
    """
    heads = chunks[0].request.heads
    counts = [-(-chunk.stop // page_size) for chunk in chunks]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(placement))
    shape = (len(order), heads.kv, 2 * page_size, heads.size)
    key_cache, value_cache = torch.full(shape, filler, dtype=heads.dtype).chunk(2, dim=2)
    table = torch.full((len(chunks), max(counts) + 1), -1, dtype=torch.int32)
    taken = 0
    for row, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        pages = order[taken : taken + count]
        taken += count
        table[row, :count] = pages
        places = torch.arange(chunk.stop)
        at = pages[places // page_size], slice(None), places % page_size
        key_cache[at] = chunk.request.key[: chunk.stop]
        value_cache[at] = chunk.request.value[: chunk.stop]
    query = torch.cat([chunk.request.query[chunk.start : chunk.stop] for chunk in chunks])
    seq_lens = torch.tensor([chunk.stop for chunk in chunks], dtype=torch.int32)
    query_lens = torch.tensor([0] + [chunk.stop - chunk.start for chunk in chunks])
    return query, key_cache, value_cache, table, seq_lens, query_lens.cumsum(0).int()


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CODES = (torch.int8, torch.float8_e4m3fn)
_PROBES = 16
"""Rows that are compared, spread over a batch from the first row to the last."""


def certificates(llm: Any, operation: str, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Certificates of one operation on the shapes of a ``vllm.LLM``'s model, as plain data: see :func:`certify`."""
    return [asdict(certificate) for certificate in llm.apply_model(partial(certify, operation=operation, rows=rows))[0]]


def certify(model: torch.nn.Module, operation: str, rows: Sequence[int]) -> list[Certificate]:
    """Certificates of one operation on the shapes that a vLLM model has.

    Args:
        operation: one of ``guarantees.OPERATIONS``, or ``guarantees.KNOWN``.
        rows: sizes of the batches, each at least 2.
    """
    make = {
        "linear": _linear,
        "experts": _experts,
        "rms_norm": _norms,
        "attention": _attention,
        KNOWN: _known_answers,
    }.get(operation)
    with torch.inference_mode():
        return list(make(model, rows) if make else _of_rows(model, operation, rows))


def compare_rows(
    operation: Callable[[torch.Tensor], torch.Tensor], columns: int, like: torch.Tensor, rows: Sequence[int]
) -> tuple[int, str]:
    """Compute rows alone and in batches; returns the elements compared, and the first difference in words.

    Args:
        operation: takes [M, columns], returns [M, ...].
        like: gives dtype and device of the operands.
        rows: sizes M of the batches, each at least 2.
    """
    generator = torch.Generator(like.device).manual_seed(columns)
    make = partial(torch.randn, generator=generator, dtype=like.dtype, device=like.device)
    probes, filler = make(_PROBES, columns), make(max(rows), columns)
    alone = torch.cat([operation(probe.clone()) for probe in probes.split(1)])
    compared, difference = 0, ""
    for size in rows:
        places = sorted({place * (size - 1) // (_PROBES - 1) for place in range(_PROBES)})
        batch = filler[:size].clone()
        batch[places] = probes[: len(places)]
        found = bitwise_comparison(operation(batch)[places], alone[: len(places)])
        compared += found.elements
        difference = difference or _words(found, f"in a batch of {size} rows")
    return compared, difference


def _words(found: Comparison, where: str) -> str:
    return "" if found else f"{where}: {found.different} of {found.elements} elements, first {found.first}"


def _linear(model: torch.nn.Module, rows: Sequence[int]) -> Iterator[Certificate]:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    from ...integration.layers import linear

    head = getattr(_decoder(model), "lm_head", None)
    seen = set()
    like = _parameter(model)
    for name, layer in model.named_modules():
        is_head = isinstance(layer, ParallelLMHead) or layer is head
        if is_head and hasattr(model, "pooler"):  # which uses no such weights, and has read none
            continue
        if not (isinstance(layer, LinearBase) or is_head) or getattr(layer, "quant_method", None) is None:
            continue
        if layer.weight.dim() > 2:  # the taps of a convolution, which no product reads
            continue
        depth = layer.embedding_dim if is_head else getattr(layer, "input_size_per_partition", layer.input_size)
        bias = None if is_head or getattr(layer, "skip_bias_add", False) else layer.bias
        # a layer that every worker has whole says only its size
        columns = getattr(layer, "num_embeddings_per_partition" if is_head else "output_size_per_partition", None)
        columns = columns or layer.output_size
        spec = linear.spec_of_layer(layer, bias)
        codes = _name(layer.weight.dtype) if layer.weight.dtype in _CODES and not spec.name else ""
        kind = (columns, depth, spec, codes)
        if kind in seen:
            continue
        seen.add(kind)
        shape = ", ".join(filter(None, (f"K={depth}, N={columns}, {_name(like.dtype)}", spec.name, codes)))
        shape = f"{name.rpartition('.')[2]}: {shape}"
        multiply = partial(layer.quant_method.apply, layer, bias=bias)
        if spec.epilogue.operation:  # as the layer around calls it
            multiply = partial(linear.multiply, layer, spec=spec)
        certificate = _tested(
            Certificate("linear", shape, "batch", _server(layer), tuple(rows), 0, ""), multiply, (depth, like)
        )
        by_float = like.is_cuda and not is_exact()
        yield replace(certificate, note=_gpu_certificate(like, layer, bias, spec)) if by_float else certificate


def _experts(model: torch.nn.Module, rows: Sequence[int]) -> Iterator[Certificate]:
    """Layers of experts with the router's choice. vLLM's kernels are tested in the engine only."""
    from ...integration.layers.experts import BatchInvariantExperts

    seen = set()
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        is_around = hasattr(layer, "routed_experts")  # as one with adapters is
        if is_around or not (hasattr(layer, "global_num_experts") and hasattr(method, "apply_monolithic")):
            continue
        like, experts = _parameter(model), layer.global_num_experts
        shape = f"{layer.top_k} of {experts} experts, K={layer.hidden_size}, {_name(like.dtype)}"
        if shape in seen:
            continue
        seen.add(shape)
        certificate = Certificate("experts", shape, "batch", _qualified(type(method)), tuple(rows), 0, "")
        if not isinstance(method, BatchInvariantExperts):
            why = "a kernel of vLLM, which the cases of the engine test"
            yield replace(certificate, untested=why, not_applicable=True)
            continue

        def apply(x: torch.Tensor, layer: Any = layer, split: tuple[int, int] = (layer.hidden_size, experts)) -> Any:
            tokens, logits = x.split(split, dim=1)
            with layer.quant_method.without_adapters():  # those of the last step would be of other rows
                return layer.quant_method.summed(layer, tokens, logits)

        yield _tested(certificate, apply, (layer.hidden_size + experts, like))


def _tested(
    certificate: Certificate, operation: Callable[[torch.Tensor], torch.Tensor], operands: tuple[int, torch.Tensor]
) -> Certificate:
    try:
        compared, difference = compare_rows(operation, *operands, certificate.rows)
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:
        return replace(certificate, untested=one_line(error))
    return replace(certificate, compared=compared, difference=difference)


def _norms(model: torch.nn.Module, rows: Sequence[int]) -> Iterator[Certificate]:
    seen = set()
    for layer in model.modules():
        kind = type(layer).__name__
        if not kind.endswith("RMSNorm") or not torch.is_tensor(getattr(layer, "weight", None)):
            continue
        columns = layer.weight.shape[-1]
        if (kind, columns) in seen:
            continue
        seen.add((kind, columns))

        def plain(x: torch.Tensor, layer: torch.nn.Module = layer) -> torch.Tensor:
            return layer(x)

        def with_residual(x: torch.Tensor, layer: torch.nn.Module = layer) -> torch.Tensor:
            return torch.cat(layer(x, x.flip(-1).contiguous()), dim=-1)

        like = _parameter(model)
        for operation, ending in ((plain, ""), (with_residual, ", with a residual")):
            shape = f"N={columns}, {_name(like.dtype)}{ending}"
            certificate = Certificate("rms_norm", shape, "batch", _qualified(type(layer)), tuple(rows), 0, "")
            yield _tested(certificate, operation, (columns, like))


def _decoder(model: torch.nn.Module) -> torch.nn.Module:
    """The language model of one that sees images; any other itself."""
    find = getattr(model, "get_language_model", None)
    return find() if callable(find) and hasattr(model, "embed_multimodal") else model


def _of_rows(model: torch.nn.Module, name: str, rows: Sequence[int]) -> Iterator[Certificate]:
    """PyTorch's reductions of rows, whether the mode replaces them or not."""
    from ...aten import is_batch_invariant_mode_enabled

    model = _decoder(model)
    like, head = _parameter(model), getattr(model, "lm_head", None)
    if name in ("softmax", "log_softmax"):
        # vLLM makes logprobs of logits in fp32
        like, columns = like.float(), getattr(head, "num_embeddings_per_partition", None) or model.config.vocab_size
    else:
        columns = getattr(model.config, "hidden_size", None) or like.shape[-1]
    server = "vllm_batch_invariant" if is_batch_invariant_mode_enabled() else "PyTorch"
    certificate = Certificate(name, f"N={columns}, {_name(like.dtype)}", "batch", server, tuple(rows), 0, "")
    if is_exact() and name in ("sum", "mean"):
        yield replace(certificate, untested="exact arithmetic has none of floats", not_applicable=True)
        return
    yield _tested(certificate, partial(getattr(torch, name), dim=-1), (columns, like))


def _known_answers(model: torch.nn.Module, rows: Sequence[int]) -> Iterator[Certificate]:  # noqa: ARG001 - of every maker
    """Of exact arithmetic: what the operations here, and numpy, make of operands that every machine has."""
    if not is_exact():
        return
    import numpy as np

    from ...integration.layers.exact import operations
    from ...ops.exact import FORMAT, known_answers

    certificate = Certificate("a small model by numpy", FORMAT, "hardware", "numpy", (), 0, "")
    digest = known_answers.digest()
    differs = "" if digest == known_answers.DIGEST else f"has the digest {digest[:12]}, not {known_answers.DIGEST[:12]}"
    yield replace(certificate, compared=1, difference=differs)
    device = _parameter(model).device
    ops = operations(device.type)
    for operation, found, right in known_answers.comparisons(ops, lambda x: torch.from_numpy(x).to(device).bfloat16()):
        different = int((~((found == right) | (np.isnan(found) & np.isnan(right)))).sum())
        words = f"{different} of {right.size} elements are not the known ones" if different else ""
        shape = f"{FORMAT}, {' x '.join(map(str, right.shape))}"
        yield Certificate(operation, shape, "hardware", ops.__name__, (), right.size, words)


def _attention(model: torch.nn.Module, rows: Sequence[int]) -> Iterator[Certificate]:
    """This project's attention on a separate KV cache with the engine's pages. vLLM's kernels are tested in the engine
    only.
    """
    from ...integration.layers.attention import FixedSplitAttention, key_cache_of
    from ...ops.attention import AttentionSpec

    seen = set()
    for layer in model.modules():
        impl = getattr(layer, "impl", None)
        if impl is None or not hasattr(impl, "head_size"):
            continue
        heads = Heads(impl.num_heads, getattr(impl, "num_kv_heads", impl.num_heads), impl.head_size, _dtype(model))
        is_ours, device = isinstance(impl, FixedSplitAttention), _parameter(model).device
        how: tuple[Any, ...]
        if is_ours:
            has_numbers = not (impl.holds_codes or impl.is_of_encoder)
            dtype = key_cache_of(layer).dtype if has_numbers else heads.dtype
            heads = replace(heads, dtype=dtype)
            scales = impl.kind_of_scales(layer)
            spec, how = impl.spec.to(device), (impl.reduction, impl.implementation, scales, impl.tail)
        else:
            window = getattr(impl, "sliding_window", None)
            spec = AttentionSpec(1.0, window if isinstance(window, int) and window > 0 else None)
            how = (window,)
        kind = heads, spec, *how
        if kind in seen:
            continue
        seen.add(kind)
        shape = f"{heads.query} query heads, {heads.kv} KV heads of {heads.size}, {_name(heads.dtype)}"
        tail = [f"of which {impl.tail} elements are keys alone"] if is_ours and impl.tail else []
        shape = ", ".join([shape, *tail, *spec.words, *_codes_in_words(scales if is_ours else "")])
        server = _qualified(type(impl))
        certificate = Certificate("attention", shape, "batch", server, tuple(rows), 0, "")
        if not is_ours:
            why = "a kernel of vLLM, which the cases of the engine test"
            for guarantee in ("batch", "schedule"):
                yield replace(certificate, guarantee=guarantee, untested=why, not_applicable=True)
            continue
        if impl.is_of_encoder:
            encode = partial(_encode, spec, impl.reduction, impl.implementation, device)
            compared, difference = _encoder_in_batches(encode, heads, rows)
            yield replace(certificate, compared=compared, difference=difference)
            why = "an encoder, whose prompts do not come in chunks"
            yield replace(certificate, guarantee="schedule", untested=why, not_applicable=True)
            continue
        page_size = key_cache_of(layer).shape[2]
        attend = partial(_attend, spec, impl.reduction, impl.implementation, scales, impl.tail, device, page_size)
        in_batch = partial(_attention_in_batches, attend, heads, rows)
        in_chunks = partial(_attention_in_chunks, attend, heads)
        for guarantee, test in (("batch", in_batch), ("schedule", in_chunks)):
            try:
                compared, difference = test()
            except (RuntimeError, ValueError) as error:
                yield replace(certificate, guarantee=guarantee, untested=one_line(error))
            else:
                note = "prefill, chunks and decode of one request" if guarantee == "schedule" else ""
                yield replace(certificate, guarantee=guarantee, compared=compared, difference=difference, note=note)


def _codes_in_words(scales: str) -> list[str]:
    """Of a KV cache with such scales."""
    from ...integration.reviews.schemes import CACHE_SCALES, ONE_SCALE

    return [] if not scales else ["KV cache in e4m3" + f" with {CACHE_SCALES[scales]}" * (scales != ONE_SCALE)]


def _attend(
    spec: "AttentionSpec",
    reduction: "AttentionReduction",
    implementation: str,
    scales: str,
    tail: int,
    device: torch.device,
    page_size: int,
    chunks: list[Chunk],
) -> list[torch.Tensor]:
    """The output rows of each chunk, computed together, as a layer computes them: over codes with such scales, or over
    numbers; with a tail of each key behind its value.
    """
    from ...integration.reviews.schemes import OF_HEADS, OF_TOKENS
    from ...ops.attention import PagedAttention, PagedCache, attend

    query, *tensors, lengths, starts = (tensor.to(device) for tensor in paged(chunks, page_size))
    keys, _, table = tensors
    cache = PagedCache.latent(keys, keys.shape[-1] - tail, table) if tail else PagedCache(*tensors)
    if scales == OF_TOKENS:
        cache = cache.coded_by_tokens()
    elif scales:
        given = [1 / (1 + head) for head in range(cache.kv_heads if scales == OF_HEADS else 1)]
        cache = cache.coded(given, given)
    call = PagedAttention(query, cache, lengths, starts, spec, reduction)
    return list(attend(call, implementation).split([chunk.stop - chunk.start for chunk in chunks]))


def _encode(
    spec: "AttentionSpec",
    reduction: "AttentionReduction",
    implementation: str,
    device: torch.device,
    requests: list[Request],
) -> list[torch.Tensor]:
    """The output rows of each request over its own keys, computed together, as a layer of an encoder computes them."""
    from ...ops.attention import PackedKeys, PagedAttention, attend

    parts = ("query", "key", "value")
    query, keys, values = (torch.cat([getattr(one, name) for one in requests]).to(device) for name in parts)
    lengths = torch.tensor([request.length for request in requests], dtype=torch.int32, device=device)
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
    call = PagedAttention(query, PackedKeys.of(keys, values, starts), lengths, starts, spec, reduction)
    return list(attend(call, implementation).split(lengths.tolist()))


def _encoder_in_batches(
    encode: Callable[[list[Request]], list[torch.Tensor]], heads: Heads, rows: Sequence[int]
) -> tuple[int, str]:
    """All tokens of each of two requests, alone and in batches with others of other lengths."""
    probes = [Request(heads, length, length) for length in (37, 530)]
    return _in_batches(encode, probes, _others(heads, rows), rows)


def _attention_in_batches(
    attend: Callable[[list[Chunk]], list[torch.Tensor]], heads: Heads, rows: Sequence[int]
) -> tuple[int, str]:
    """A token of each of two requests, alone and in batches with others that decode and prefill."""
    probes = [
        Chunk(request, request.length - 1, request.length) for request in (Request(heads, n, n) for n in (37, 530))
    ]
    concurrent = [
        Chunk(other, max(0, other.length - (1, 1, 5, 40)[i % 4]), other.length)
        for i, other in enumerate(_others(heads, rows))
    ]
    return _in_batches(attend, probes, concurrent, rows)


def _others(heads: Heads, rows: Sequence[int]) -> list[Request]:
    """Requests of other lengths, as many as the largest batch has."""
    return [Request(heads, 1 + 7 * seed % 301, seed) for seed in range(max(rows))]


def _in_batches(
    give: Callable[[list[Any]], list[torch.Tensor]], probes: Sequence[Any], others: list[Any], rows: Sequence[int]
) -> tuple[int, str]:
    """What is given of each probe, alone and at some places of batches of so many rows with others."""
    alone = [give([probe])[0] for probe in probes]
    compared, difference = 0, ""
    for size in rows:
        for probe, expected in zip(probes, alone, strict=True):
            for place in sorted({0, size // 2, size - 1}):
                batch = others[: size - 1]
                batch.insert(place, probe)
                found = bitwise_comparison(give(batch)[place], expected)
                compared += found.elements
                difference = difference or _words(found, f"at place {place} of {size} requests")
    return compared, difference


def _attention_in_chunks(attend: Callable[[list[Chunk]], list[torch.Tensor]], heads: Heads) -> tuple[int, str]:
    """All tokens of a request at once, in chunks of several sizes, and the last ones by decode."""
    request = Request(heads, 530, 1)
    whole = attend([Chunk(request, 0, request.length)])[0]
    compared, difference = 0, ""
    for size, start in ((1, 500), (7, 400), (64, 0), (257, 0)):
        parts = [
            attend([Chunk(request, at, min(at + size, request.length))])[0] for at in range(start, request.length, size)
        ]
        found = bitwise_comparison(torch.cat(parts), whole[start:])
        compared += found.elements
        difference = difference or _words(found, f"in chunks of {size}")
    return compared, difference


def _parameter(model: torch.nn.Module) -> torch.Tensor:
    """A parameter with the dtype and device of the model's activations, which quantised weights do not have."""
    return next(parameter for parameter in model.parameters() if parameter.dtype in _DTYPES)


def _dtype(model: torch.nn.Module) -> torch.dtype:
    return _parameter(model).dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _qualified(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _server(layer: torch.nn.Module) -> str:
    """The function that computes a layer's GEMM."""
    from ...integration.side_table import beside

    function = getattr(layer, "cpu_linear", None) or beside(layer).exact
    if function is not None:
        return _qualified(function if hasattr(function, "__qualname__") else type(function)).partition(".<locals>")[0]
    kernel = getattr(getattr(layer, "scheme", None), "kernel", None)  # of quantised layers
    method = _qualified(type(layer.quant_method if kernel is None else kernel)).replace(".<locals>", "")
    # On a GPU vLLM's method for weights that are not quantised calls PyTorch's product, which the mode replaces.
    return f"vllm_batch_invariant by {method}" if _is_replaced(layer) else method


def _is_replaced(layer: torch.nn.Module) -> bool:
    """Whether the mode replaces the product of PyTorch that computes a layer on a GPU."""
    from ...aten import is_batch_invariant_mode_enabled
    from ...integration.layers import fp8, int8

    if fp8.computes(layer) or int8.computes(layer):
        return False
    return is_batch_invariant_mode_enabled() and layer.weight.is_cuda and layer.weight.dim() == 2


def _gpu_certificate(like: torch.Tensor, layer: torch.nn.Module, bias: torch.Tensor | None, spec: "MatmulSpec") -> str:
    """What was compared when the weight was loaded; empty if the mode does not serve it."""
    from ...integration.layers import fp8, int8

    if fp8.computes(layer):
        return _scaled_certificate(like.dtype, layer, bias)
    if int8.computes(layer):
        return "by Triton alone"
    if not _is_replaced(layer):
        return ""
    from ...ops.linear import cuda
    from ...ops.linear.problem import problem_of

    weight = layer.weight
    x = like.new_empty(1, weight.shape[1] * spec.b_format.packing)
    problem = problem_of(x, weight.t(), bias, spec)
    return describe_entries(cuda.tuned_schedules(problem)) if problem is not None else "by Triton alone"


def _scaled_certificate(dtype: torch.dtype, layer: Any, bias: torch.Tensor | None) -> str:
    """The same of a layer whose weight and activations are FP8."""
    from ...integration.layers import fp8
    from ...ops.scaled_linear import cuda

    method = layer.quant_method
    part = layer.weight.data[:, : layer.weight.shape[1] // method.k_slices]
    of_weight, in_blocks = getattr(layer, method.source.scale).data, method.source.shared == "block"
    scales = fp8.of_blocks(of_weight) if in_blocks else of_weight.view(-1)
    found = cuda.serving(part, scales, dtype, in_blocks, bias is not None)
    rows = found.by_deep_gemm
    said = [describe_entries(found.tuned, found.tiles)] if found.tuned or not rows else []
    if rows:
        least, most = rows[0], rows[-1]
        said.append(f"DeepGEMM serves {len(rows)} values of M, {least} to {most}, compared against {found.tiles}")
    return "; ".join(said)


def describe_entries(entries: "Mapping[int, TunedSchedule]", tiles: str = "Triton") -> str:
    """The certificate of a weight's GEMMs on a GPU in one line.

    Args:
        entries: by the last M of each bucket.
        tiles: the kernels here, against which others are compared.
    """
    if not entries:
        return f"no certificate: by {tiles} alone"
    library = sum(entry.algorithm is not None for entry in entries.values())
    checked = {rows for entry in entries.values() for rows in entry.checked}
    refused = sum(len(entry.refused) for entry in entries.values())
    return (
        f"compared at {len(checked)} values of M up to {max(checked, default=0)} against {tiles}; cuBLASLt "
        f"serves {library} of {len(entries)} buckets of M, {refused} of its algorithms refused"
    )
