"""Logprobs of given tokens, as the engine reports them, with gradients."""

import torch
from torch.autograd.function import once_differentiable

from ..ops import softmax
from ..ops.dispatch import module_for


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The logprob of each token: what vLLM reports for it as a raw logprob, before temperature and penalties. That is
    the mode's log_softmax.

    Args:
        logits: [..., vocabulary] fp32, bf16 or fp16, as the patched model returns them.
        tokens: [...] int64, each the token that follows the row's.

    Returns:
        [...] fp32. The gradient has logits' dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    if logits.shape[:-1] != tokens.shape or tokens.dtype != torch.int64:
        raise ValueError(
            "token_logprobs takes logits [..., vocabulary] and int64 tokens [...], "
            f"got {list(logits.shape)} and {list(tokens.shape)} {tokens.dtype}"
        )
    return _TokenLogprobs.apply(logits, tokens)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits, tokens)
        rows = logits.reshape(-1, logits.shape[-1])
        return softmax.log_softmax_at(rows, tokens.reshape(-1, 1)).view(tokens.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, tokens = ctx.saved_tensors
        all_logprobs = softmax.log_softmax(logits, dtype=torch.float32)
        grads = torch.zeros_like(all_logprobs).scatter_(-1, tokens.unsqueeze(-1), grad.float().unsqueeze(-1))
        module = module_for("softmax", logits.device.type)
        return module.log_softmax_backward(grads, all_logprobs, -1, logits.dtype), None
