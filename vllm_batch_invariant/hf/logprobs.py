"""Logprobs of given tokens, as the engine reports them under each of its ``--logprobs-mode``, with gradients."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from ..integration.reviews import patch_points
from ..ops import softmax
from ..ops.dispatch import module_for
from ..ops.top_k_top_p import top_k_top_p

MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
_ROWS_AT_ONCE = 64
"""Of which processed logits are held in memory."""
_GREEDY_BELOW, _LOWEST_TEMPERATURE = 1e-5, 1e-2
"""vLLM takes a lower temperature than the first for 0, and any other for at least the second."""


@dataclass(frozen=True)
class Sampling:
    """What changes a row's logits before a token is sampled: vLLM's ``SamplingParams`` of these names, of which others
    (penalties, biases, masks) have to be left at their defaults.

    Attributes:
        temperature: 0 for greedy, which no filter changes.
        top_k: candidates that stay; all for 0 and -1.
        top_p: probability of the candidates that stay.
        min_p: least probability of a candidate that stays, in units of the likeliest one's.

    Raises:
        ValueError: by the constructor: a value that vLLM would not take.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and self.top_k >= -1 and 0 < self.top_p <= 1 and 0 <= self.min_p <= 1):
            raise ValueError(f"vLLM takes no such parameters: {self}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def divisor(self) -> float:
        """What logits are divided by."""
        return 1.0 if self.is_greedy else max(self.temperature, _LOWEST_TEMPERATURE)


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, *, mode: str = "raw_logprobs", sampling: Sampling | None = None
) -> torch.Tensor:
    """The logprob of each token: what vLLM reports for it under ``--logprobs-mode``. The default is vLLM's: the mode's
    log_softmax, before temperature and penalties.

    Processed ones are those of a sampled token. vLLM reports raw ones for a prompt whatever the setting is (logits
    where the setting's name says logits).

    Args:
        logits: [..., vocabulary] fp32, bf16 or fp16, as the patched model returns them.
        tokens: [...] int64, each the token that follows the row's.
        mode: one of :data:`MODES`, vLLM's names.
        sampling: the parameters of the requests, for processed ones; None for the default of :class:`Sampling`.

    Returns:
        [...] fp32; -inf for a token that a filter took away, whose gradient is 0. The gradient has logits' dtype.

    Raises:
        ValueError: shapes that do not fit, another mode, or parameters that a raw mode would ignore.
        NotCovered: processed ones on a GPU whose vLLM has no second model runner.
    """
    if logits.shape[:-1] != tokens.shape or tokens.dtype != torch.int64:
        raise ValueError(
            "token_logprobs takes logits [..., vocabulary] and int64 tokens [...], "
            f"got {list(logits.shape)} and {list(tokens.shape)} {tokens.dtype}"
        )
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    processed = mode.startswith("processed")
    if sampling is not None and not processed:
        raise ValueError(f"{mode} come before {sampling}: leave it out, or ask for processed ones")
    sampling = (sampling or Sampling()) if processed else None
    if mode.endswith("logits"):
        return _TokenLogits.apply(logits, tokens, sampling)
    return _TokenLogprobs.apply(logits, tokens, sampling)


def _processed(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits [rows, vocabulary] in fp32 as the engine samples from them: divided, then min-p, then top-k and top-p."""
    if sampling.is_greedy:
        return logits.to(torch.float32)
    rows = (_divided_by_kernels if logits.is_cuda else _divided)(logits, sampling)
    k = torch.full((len(rows),), sampling.top_k, device=rows.device) if sampling.top_k > 0 else None
    p = torch.full((len(rows),), sampling.top_p, device=rows.device) if sampling.top_p < 1 else None
    return top_k_top_p(rows, k, p)


def _divided(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Divided by the temperature, without what min-p takes away: as a CPU's engine does it."""
    rows = logits.to(torch.float32)
    # By a tensor, as vLLM does: a number may be turned into a factor.
    rows = rows / torch.full((len(rows), 1), sampling.divisor, device=rows.device)
    if sampling.min_p > 0:
        probabilities = softmax.softmax(rows)
        least = probabilities.amax(-1, keepdim=True) * torch.full((len(rows), 1), sampling.min_p, device=rows.device)
        rows = rows.masked_fill(probabilities < least, -torch.inf)
    return rows


def _divided_by_kernels(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The same by the kernels of vLLM's second model runner, whose division is not rounded as IEEE 754 asks for."""
    rows = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(rows):
        numbers = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        patch_points.TEMPERATURE_OF_STATES.get()(rows, numbers, torch.full_like(rows[:, 0], sampling.divisor))
        if sampling.min_p > 0:
            patch_points.MIN_P_OF_STATES.get()(rows, numbers, torch.full_like(rows[:, 0], sampling.min_p))
    return rows


def _parts(count: int) -> Iterator[slice]:
    return (slice(start, start + _ROWS_AT_ONCE) for start in range(0, count, _ROWS_AT_ONCE))


class _TokenLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling | None
    ) -> torch.Tensor:
        rows, ids = logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1, 1)
        if sampling is None:
            out = rows.gather(-1, ids).to(torch.float32)
        else:
            found = [_processed(rows[part], sampling).gather(-1, ids[part]) for part in _parts(len(rows))]
            out = torch.cat(found) if found else rows.new_empty(0, 1, dtype=torch.float32)
        ctx.save_for_backward(tokens, out)
        ctx.like, ctx.divisor = (logits.shape, logits.dtype), 1.0 if sampling is None else sampling.divisor
        return out.view(tokens.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        tokens, out = ctx.saved_tensors
        shape, dtype = ctx.like
        at_tokens = (grad.float() / ctx.divisor).masked_fill(out.view(tokens.shape).isinf(), 0.0)
        zeros = torch.zeros(shape, dtype=dtype, device=grad.device)
        return zeros.scatter_(-1, tokens.unsqueeze(-1), at_tokens.to(dtype).unsqueeze(-1)), None, None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling | None
    ) -> torch.Tensor:
        ctx.save_for_backward(logits, tokens)
        ctx.sampling = sampling
        rows, ids = logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1, 1)
        if sampling is None:
            return softmax.log_softmax_at(rows, ids).view(tokens.shape)
        out = torch.zeros(tokens.shape, dtype=torch.float32, device=logits.device)
        for part in _parts(len(rows)):
            processed = _processed(rows[part], sampling)
            out.view(-1, 1)[part] = softmax.log_softmax_at(processed, ids[part])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, tokens = ctx.saved_tensors
        module = module_for("softmax", logits.device.type)

        def of_rows(x: torch.Tensor, ids: torch.Tensor, of_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            all_logprobs = softmax.log_softmax(x, dtype=torch.float32)
            grads = torch.zeros_like(all_logprobs).scatter_(-1, ids.unsqueeze(-1), of_ids.float().unsqueeze(-1))
            return module.log_softmax_backward(grads, all_logprobs, -1, dtype)

        if ctx.sampling is None:
            return of_rows(logits, tokens, grad, logits.dtype), None, None
        out = torch.zeros_like(logits, memory_format=torch.contiguous_format)
        rows, of_logits = logits.reshape(-1, logits.shape[-1]), out.view(-1, logits.shape[-1])
        ids, of_ids = tokens.reshape(-1), grad.reshape(-1)
        for part in _parts(len(rows)):
            processed = _processed(rows[part], ctx.sampling)
            taken_away = processed.gather(-1, ids[part].unsqueeze(-1)).squeeze(-1).isinf()
            wanted = of_ids[part].float().masked_fill(taken_away, 0.0)
            found = of_rows(processed, ids[part], wanted, torch.float32) / ctx.sampling.divisor
            of_logits[part] = found.to(out.dtype)
        return out, None, None
