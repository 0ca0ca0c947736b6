"""Logprobs of given tokens, as the engine reports them, with gradients."""

import torch
from torch.autograd.function import once_differentiable

from ..integration import seams
from ..ops import softmax
from ..ops.devices import module_for

_UNIT = 16
"""Bytes and elements: what Triton knows of an engine's logits, whose rows lie 64 elements or a multiple apart. It
compiles another kernel for others, which adds in another order.
"""


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The logprob of each token: what vLLM reports for it as a raw logprob, before temperature and penalties.

    On a CPU that is the mode's log_softmax; on a GPU the kernel of vLLM's model runner V2, or the mode's log_softmax
    where ``VLLM_USE_V2_MODEL_RUNNER=0`` chooses the older runner: set it for the trainer as for the engine.

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


def _by_vllm(device: torch.device) -> bool:
    return device.type == "cuda" and seams.ENVIRONMENT.get()["VLLM_USE_V2_MODEL_RUNNER"]() is not False


def as_in_the_engine(logits: torch.Tensor) -> torch.Tensor:
    """[rows, vocabulary] of [..., vocabulary], with the alignment that an engine's logits have."""
    rows = logits.reshape(-1, logits.shape[-1])
    if rows.stride(1) == 1 and rows.stride(0) % _UNIT == 0 and rows.data_ptr() % _UNIT == 0:
        return rows
    count, vocabulary = rows.shape
    aligned = rows.new_empty(count, -(-vocabulary // _UNIT) * _UNIT)[:, :vocabulary]
    return aligned.copy_(rows)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits, tokens)
        chosen = tokens.unsqueeze(-1)
        if _by_vllm(logits.device) and tokens.numel():
            with torch.cuda.device_of(logits):
                rows = as_in_the_engine(logits)
                return seams.TOKEN_LOGPROBS.get()(rows, chosen.reshape(-1, 1)).view(tokens.shape)
        return softmax.log_softmax(logits, dtype=torch.float32).gather(-1, chosen).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, tokens = ctx.saved_tensors
        all_logprobs = softmax.log_softmax(logits, dtype=torch.float32)
        grads = torch.zeros_like(all_logprobs).scatter_(-1, tokens.unsqueeze(-1), grad.float().unsqueeze(-1))
        module = module_for("softmax", logits.device.type)
        return module.log_softmax_backward(grads, all_logprobs, -1, logits.dtype), None
