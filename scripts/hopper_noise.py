"""The noise of vLLM's second model runner on a GPU, for :mod:`.hopper_bits`: needs vLLM 0.32 or later."""

import torch
import triton
import triton.language as tl
from vllm.v1.worker.gpu.sample import gumbel

_uniform, _log1p_neg = gumbel.murmur3_uniform32, gumbel._log1p_neg_stable


@triton.jit
def _noise_kernel(seed_ptr, out_ptr, length, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    u = _uniform(tl.load(seed_ptr), tl.load(seed_ptr + 1), offs)
    tl.store(out_ptr + offs, -tl.log(-_log1p_neg(u)), mask=offs < length)


def noise(seed: int, position: int, length: int, device: str) -> torch.Tensor:
    """[length] fp32, as the kernel that draws adds it."""
    given = torch.tensor([seed, position], dtype=torch.int64, device=device)
    out = torch.empty(length, dtype=torch.float32, device=device)
    _noise_kernel[(triton.cdiv(length, 1024),)](given, out, length, BLOCK=1024)
    return out


def draws(logits: torch.Tensor, temperature: float, seeds: object, positions: object) -> torch.Tensor:
    """A token of each row of fp32 logits [rows, vocabulary], which are divided by the temperature."""
    count, device = len(logits), logits.device
    requests = torch.arange(count, dtype=torch.int32, device=device)
    temperatures = torch.full((count,), temperature, dtype=torch.float32, device=device)
    of_rows = (torch.as_tensor(one, dtype=torch.int64, device=device) for one in (seeds, positions))
    gumbel.apply_temperature(logits, requests, temperatures)
    return gumbel.gumbel_sample(logits, requests, temperatures, *of_rows, apply_temperature=False, is_drafting=False)
