"""Exact arithmetic in the sampler of vLLM's second model runner, whose own kernels divide by an approximation, fuse
products with sums, and draw another noise. That of the first one is in :mod:`..layers.exact`.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from ...ops.exact.definition import NEXT_KEY
from ..layers.exact import operations
from ..reviews import patch_points

_WORDS = 2**64
_BITS = 32
"""Tokens of a word of vLLM's mask of a prompt's tokens."""


def install() -> None:
    """Replace what the sampler calls."""
    sampler = patch_points.SECOND_SAMPLER.get()
    sampler.add_request = keyed(sampler.add_request)
    patch_points.GUMBEL_SAMPLE.put(draw)
    patch_points.TEMPERATURE_OF_STATES.put(apply_temperature)
    patch_points.MIN_P_OF_STATES.put(apply_min_p)
    patch_points.PENALTIES.put(apply_penalties)


def signed(number: int) -> int:
    """A number modulo 2**64, as int64 holds its bits."""
    return (number + _WORDS // 2) % _WORDS - _WORDS // 2


def keyed(add_request: Callable[..., None]) -> Callable[..., None]:
    """vLLM's method with a seed from which :func:`draw` finds the noise of a token by its place in prompt and output:
    the definition counts places in the output.
    """

    @wraps(add_request)
    def add_request_and_key(self: Any, req_idx: int, *args: Any, **named: Any) -> None:
        add_request(self, req_idx, *args, **named)
        seeds, prompt = self.sampling_states.seeds.np, int(self.req_states.prompt_len.np[req_idx])
        seeds[req_idx] = signed(int(seeds[req_idx]) + (1 - prompt) * NEXT_KEY)

    return add_request_and_key


def draw(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
    **_: object,
) -> torch.Tensor:
    """vLLM's function ``gumbel_sample``: [rows] int64, a token of each row, drawn with the noise of its request's seed
    and its place, or at temperature 0 the largest.

    Args:
        logits: [rows, vocabulary], already divided by the temperature.
        expanded_idx_mapping: [rows], the request of each row.
        temperature: [requests].
        seed: [requests] int64, of :func:`keyed`.
        pos: [rows], the place of the token before the one that is drawn.
    """
    requests = expanded_idx_mapping.to(torch.int64)
    keys = seed[requests] + pos.to(torch.int64) * signed(NEXT_KEY)  # modulo 2**64
    draws = operations(logits.device.type).draw
    return draws(logits.to(torch.float32), keys, temperature[requests].to(torch.float32))


def apply_temperature(logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, temperature: torch.Tensor) -> None:
    """vLLM's function of that name, in place."""
    operations(logits.device.type).heat(logits, temperature[expanded_idx_mapping.to(torch.int64)])


def apply_min_p(logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, min_p: torch.Tensor) -> None:
    """vLLM's function of that name, in place."""
    operations(logits.device.type).min_p(logits, min_p[expanded_idx_mapping.to(torch.int64)])


def apply_penalties(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,  # of drafts, and exact arithmetic on a GPU has none
    expanded_local_pos: torch.Tensor,
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    output_bin_counts: torch.Tensor,
) -> None:
    """vLLM's function of that name, in place; a request has one row."""
    requests, vocabulary = expanded_idx_mapping.to(torch.int64), logits.shape[1]
    bit = torch.arange(_BITS, dtype=torch.int32, device=logits.device)
    in_prompt = (prompt_bin_mask[requests].unsqueeze(-1) >> bit & 1).flatten(1)[:, :vocabulary] != 0
    penalties = (one[requests] for one in (repetition_penalty, frequency_penalty, presence_penalty))
    counts = output_bin_counts[requests][:, :vocabulary]
    operations(logits.device.type).penalise(logits, in_prompt, counts, *penalties)
