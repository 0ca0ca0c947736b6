"""Speculative decoding with the answers of plain decoding: a drafter decides how long they take and nothing else.

    sampled[j] = what plain decoding samples of row j    j = 0..k, the rows of a verify step
    accepted   = the largest a with drafts[:a] == sampled[:a]; the answer grows by sampled[: a + 1]

Row j of a verify step has the bits of the step of plain decoding that it stands for, since prefill and decode have one
reduction. So it is enough to sample each row as plain decoding would: with the same processed logits, and with the same
noise. vLLM's own rule accepts a draft with the probability that it has, and so lets the drafter decide a seeded answer.
Sampling first and comparing afterwards is drafter-invariant speculation (Daliri et al., arXiv 2408.07978).
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from ...ops.acceptance import NO_TOKEN, accept
from ..reviews import patch_points

_MOST_BYTES = 1 << 30
"""Of logits in fp32 that are sampled at once in the second model runner: a step has 1 + k rows of them a request."""


class SeededDraws(dict[int, torch.Generator]):
    """The generators of rows, of which the rows of one request share one; remembers the state after each row's draw.

    A sampler of vLLM's draws for one row after the other, in the order of :meth:`items`.
    """

    def __init__(self, generators: dict[int, torch.Generator]) -> None:
        super().__init__(generators)
        self.after: dict[int, torch.Tensor] = {}

    def items(self) -> Iterator[tuple[int, torch.Generator]]:  # type: ignore[override] # no view
        """Rows and generators; a row has drawn when the next one is asked for."""
        for row, generator in super().items():
            yield row, generator
            self.after[row] = generator.get_state()


class RowProcessors:
    """vLLM's processors of logits, for a verify step: a request has several rows, each with its own number of tokens
    before it. What a request may not ask for beside speculation (min-p, a bias) has nothing to process.
    """

    def __init__(self, processors: Any, counts: list[int]) -> None:
        self.argmax_invariant = processors.argmax_invariant
        self.non_argmax_invariant = [_OfRows(one, counts) for one in processors.non_argmax_invariant]


class _OfRows:
    def __init__(self, processor: Any, counts: list[int]) -> None:
        self._processor, self._counts = processor, counts

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        by_row = getattr(self._processor, "apply_with_spec_decode", None)
        return self._processor.apply(logits) if by_row is None else by_row(logits, self._counts)


def install() -> None:
    """Replace how the first model runner verifies drafts."""
    patch_points.REJECTION_SAMPLER.get().forward = verify


def install_second_runner() -> None:
    """The same for the second one; only GPUs have one."""
    patch_points.SECOND_REJECTION_SAMPLER.get().__call__ = verify_in_second_runner
    noise = patch_points.DRAFT_NOISE
    noise.put(with_the_models_noise(noise.get()))
    words = patch_points.BAD_WORDS
    if "+ spec_offset)" in Path(words.module().__file__ or "").read_text():
        bad_words_see_drafts(words.get())


def bad_words_see_drafts(state: type[Any]) -> None:
    """Have bad words compared with the drafts of a verify step, which are the inputs of the rows behind a request's
    first. The second model runner of vLLM 0.26 and 0.27 takes each row's own in the place of the next one's.
    """
    original = state.apply_bad_words

    @wraps(original)
    def apply_bad_words(
        self: Any,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping_np: Any,
        input_ids: torch.Tensor,
        expanded_local_pos: torch.Tensor,
    ) -> None:
        original(self, logits, expanded_idx_mapping, idx_mapping_np, input_ids.roll(-1), expanded_local_pos)

    state.apply_bad_words = apply_bad_words


def with_the_models_noise(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """vLLM's function that draws drafts, with the noise that the model's token at that place is sampled with: the two
    then agree more often. From 0.29 on vLLM gives drafts noise of their own, because its rule compares probabilities,
    and from 0.33 on a seed of their own at each step where it keeps their logits, which nobody reads here.
    """
    if "is_drafting" not in inspect.signature(draw).parameters:
        return draw

    def draw_with_the_models_noise(*args: Any, is_drafting: bool = False, **named: Any) -> torch.Tensor:
        kept = {name: value for name, value in named.items() if not name.startswith("logits_cache")}
        return draw(*args, is_drafting=False, **kept)

    return draw_with_the_models_noise


def install_front_end() -> None:
    """Have an answer end with the token that completes a stop string, as in plain decoding. Before 0.32 vLLM returns
    what a verify step gave behind it, too.
    """
    if hasattr(patch_points.OUTPUT_PROCESSOR.get(), "_trim_surplus_tokens"):
        return
    for point, method, wrapper in (
        (patch_points.DETOKENIZER, "update", token_by_token),
        (patch_points.LOGPROBS_PROCESSOR, "update_from_output", of_kept_tokens),
    ):
        setattr(point.get(), method, wrapper(getattr(point.get(), method)))


def token_by_token(update: Callable[..., str | None]) -> Callable[..., str | None]:
    """vLLM's method ``update`` of a detokenizer, which looks for stop strings after each token and takes the tokens
    behind one out of the caller's list.
    """

    def update_one_by_one(self: Any, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        last = len(new_token_ids) - 1
        for place, token in enumerate(new_token_ids):
            found = update(self, [token], stop_terminated and place == last)
            if found:
                del new_token_ids[place + 1 :]
                return found
        return None

    return update_one_by_one


def of_kept_tokens(update_from_output: Callable[..., None]) -> Callable[..., None]:
    """vLLM's method ``update_from_output`` of a processor of logprobs, with those of the tokens that are left."""

    def update_from_kept(self: Any, output: Any) -> None:
        if output.new_logprobs is not None:
            output.new_logprobs = output.new_logprobs.slice_request(0, len(output.new_token_ids))
        update_from_output(self, output)

    return update_from_kept


def verify_in_second_runner(
    self: Any,
    logits: torch.Tensor,
    input_batch: Any,
    draft_logits: object = None,  # a drafter decides no token
    invalid_drafts: torch.Tensor | None = None,
) -> Any:
    """The second model runner's method ``RejectionSampler.__call__``. Its sampler knows rows from requests, and takes
    the noise of a row from the seed and the position.

    Args:
        self: vLLM's ``RejectionSampler``, whose ``sampler`` is that of plain decoding.
        logits: [rows, vocabulary], the rows of a request after each other.
        input_batch: vLLM's, of the step.
        invalid_drafts: [rows] bool, rows whose input a grammar does not allow.

    Returns:
        vLLM's ``SamplerOutput`` with ``sampled_token_ids`` [requests, 1 + most drafts] int64.
    """
    output = _sampled_in_parts(self.sampler, logits, input_batch)
    inputs = input_batch.input_ids[input_batch.logits_indices]
    if invalid_drafts is not None:
        inputs = inputs.masked_fill(invalid_drafts, NO_TOKEN)
    tokens, counts = accept(
        output.sampled_token_ids.view(-1), inputs, input_batch.cu_num_logits, self.num_speculative_steps + 1
    )
    num_sampled, num_rejected = patch_points.SAMPLED_AND_REJECTED.get()(
        counts,
        input_batch.seq_lens,
        input_batch.cu_num_logits,
        input_batch.idx_mapping,
        self.sampler.req_states.prefill_len.gpu,
    )
    return replace(output, sampled_token_ids=tokens, num_sampled=num_sampled, num_rejected=num_rejected)


def _sampled_in_parts(sampler: Any, logits: torch.Tensor, input_batch: Any) -> Any:
    """What the second model runner's sampler gives, some requests after the others where all take much memory."""
    most_rows = _MOST_BYTES // (4 * logits.shape[1])
    if len(logits) <= most_rows:
        return sampler(logits, input_batch)
    starts = input_batch.cu_num_logits_np.tolist()
    borders = [0]
    for request, end in enumerate(starts[1:]):
        if end - starts[borders[-1]] > most_rows and request > borders[-1]:
            borders.append(request)
    parts = list(pairwise([*borders, len(starts) - 1]))
    outputs = [
        sampler(logits[starts[first] : starts[end]], _requests_of(input_batch, first, end)) for first, end in parts
    ]
    listed = [one.logprobs_tensors for one in outputs]
    return replace(
        outputs[0],
        sampled_token_ids=torch.cat([one.sampled_token_ids for one in outputs]),
        logprobs_tensors=_joined(listed, [starts[end] - starts[first] for first, end in parts], starts),
        num_nans=None if outputs[0].num_nans is None else torch.cat([one.num_nans for one in outputs]),
    )


def _requests_of(input_batch: Any, first: int, end: int) -> Any:
    """Some requests of a step, as the sampler reads them."""
    requests, starts = slice(first, end), slice(first, end + 1)
    rows = slice(*input_batch.cu_num_logits_np[[first, end]].tolist())
    of_rows = ("expanded_idx_mapping", "expanded_local_pos", "logits_indices")
    of_requests = ("idx_mapping", "idx_mapping_np", "seq_lens", "seq_lens_cpu_upper_bound")
    return replace(
        input_batch,
        num_reqs=end - first,
        cu_num_logits=input_batch.cu_num_logits[starts] - rows.start,
        cu_num_logits_np=input_batch.cu_num_logits_np[starts] - rows.start,
        **{name: getattr(input_batch, name)[rows] for name in of_rows},
        **{name: getattr(input_batch, name)[requests] for name in of_requests},
    )


def _joined(parts: Sequence[Any], rows: Sequence[int], starts: list[int]) -> Any:
    """vLLM's ``LogprobsTensors`` of all parts, as wide as the widest; None if no request wants any.

    Args:
        parts: those of each part, or None.
        rows: of each part.
        starts: the first row of each request, and the number of rows.
    """
    there = [part for part in parts if part is not None]
    if not there:
        return None
    width, like = max(part.logprobs.shape[1] for part in there), there[0]

    def column(name: str) -> torch.Tensor:
        found = []
        for part, count in zip(parts, rows, strict=True):
            value = getattr(like, name)
            if part is None:
                found.append(value.new_zeros(count, *[width] * (value.ndim - 1)))
            else:
                value = getattr(part, name)
                found.append(pad(value, (0, width - value.shape[1])) if value.ndim > 1 else value)
        return torch.cat(found)

    return patch_points.LOGPROBS_TENSORS.get()(
        column("logprob_token_ids"), column("logprobs"), column("selected_token_ranks"), starts
    )


def verify(self: Any, metadata: Any, draft_probs: object, logits: torch.Tensor, sampling_metadata: Any) -> Any:
    """The first model runner's method ``RejectionSampler.forward``.

    Args:
        self: vLLM's ``RejectionSampler``, whose ``sampler`` is that of plain decoding.
        metadata: vLLM's ``SpecDecodeMetadata``: request i has ``num_draft_tokens[i]`` drafts and a row more.
        draft_probs: not used: a drafter decides no token.
        logits: [rows, vocabulary], the rows of a request after each other.
        sampling_metadata: vLLM's, of the step's requests.

    Returns:
        vLLM's ``SamplerOutput`` with ``sampled_token_ids`` [requests, 1 + most drafts] int32, -1 behind the accepted
        ones, and the logprobs of as many tokens.
    """
    counts = [drafts + 1 for drafts in metadata.num_draft_tokens]
    starts = [0, *accumulate(counts)]
    inputs = torch.full((starts[-1],), NO_TOKEN, dtype=torch.int64, device=logits.device)
    inputs[metadata.target_logits_indices.to(torch.int64) + 1] = metadata.draft_token_ids.to(torch.int64)
    of_rows = rows_of(sampling_metadata, counts, starts, inputs)
    output = self.sampler(logits=logits[: starts[-1]], sampling_metadata=of_rows)
    row_starts = torch.tensor(starts, dtype=torch.int32, device=logits.device)
    tokens, accepted = accept(output.sampled_token_ids.view(-1), inputs, row_starts, max(counts))
    if of_rows.generators:
        number = accepted.tolist()
        for request, generator in sampling_metadata.generators.items():
            generator.set_state(of_rows.generators.after[starts[request] + number[request] - 1])
    logprobs = output.logprobs_tensors
    if logprobs is not None:  # vLLM reads as many of each request, and leaves out those without a token
        offs = torch.arange(max(counts), device=logits.device)
        rows = (row_starts[:-1, None] + offs).clamp(max=starts[-1] - 1).flatten()
        logprobs = patch_points.LOGPROBS_TENSORS.get()(
            logprobs.logprob_token_ids[rows], logprobs.logprobs[rows], logprobs.selected_token_ranks[rows]
        )
    return replace(output, sampled_token_ids=tokens.to(torch.int32), logprobs_tensors=logprobs)


def rows_of(metadata: Any, counts: list[int], starts: list[int], inputs: torch.Tensor) -> Any:
    """vLLM's ``SamplingMetadata`` of a verify step's rows, as plain decoding would have it when it samples each.

    Args:
        metadata: of the requests.
        counts: rows of each request.
        starts: the first row of each request, and the number of rows.
        inputs: [rows] int64, the draft that each row was fed; anything for the first of a request.
    """
    request_of = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(inputs.device)

    def each(of_requests: torch.Tensor | None) -> torch.Tensor | None:
        return None if of_requests is None else of_requests[request_of]

    def by_row(of_requests: dict[int, Any] | None) -> dict[int, Any]:
        there = of_requests or {}
        return {starts[request] + j: there[request] for request in sorted(there) for j in range(counts[request])}

    outputs = metadata.output_token_ids
    if outputs and (metadata.bad_words_token_ids or not metadata.no_penalties):
        drafts = inputs.tolist()
        outputs = [
            [*outputs[request], *drafts[start + 1 : start + 1 + j]]
            for request, (start, count) in enumerate(zip(starts[:-1], counts, strict=True))
            for j in range(count)
        ]
    return replace(
        metadata,
        temperature=each(metadata.temperature),
        top_p=each(metadata.top_p),
        top_k=each(metadata.top_k),
        generators=SeededDraws(by_row(metadata.generators)),
        prompt_token_ids=each(metadata.prompt_token_ids),
        frequency_penalties=each(metadata.frequency_penalties),
        presence_penalties=each(metadata.presence_penalties),
        repetition_penalties=each(metadata.repetition_penalties),
        output_token_ids=outputs,
        allowed_token_ids_mask=each(metadata.allowed_token_ids_mask),
        bad_words_token_ids=by_row(metadata.bad_words_token_ids),
        logitsprocs=RowProcessors(metadata.logitsprocs, counts),
        logprob_token_ids=by_row(metadata.logprob_token_ids),
        spec_token_ids=None,
    )
