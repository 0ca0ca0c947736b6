"""What vLLM's samplers, of both model runners, do by operations of the mode: top-k and top-p, and the listed logprobs.

vLLM cuts top-p in slices whose number follows the batch, and takes the listed candidates from torch.topk, whose choice
among equal values follows the largest number of logprobs that a request of the batch asks for.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...ops.ranking import first, top_and_ranks
from ...ops.softmax import log_softmax_at
from ...ops.top_k_top_p import top_k_top_p
from ..reviews import patch_points, samplers
from ..side_table import beside
from . import speculation


def install(device_type: str) -> None:
    """Replace what the first model runner's sampler calls, and check the functions of vLLM that stay in use.

    Raises:
        NotCovered: a function of vLLM that stays in use has another source than those that were reviewed.
    """
    samplers.check(device_type)
    patch_points.TOP_K_TOP_P.put(_top_k_top_p)
    if device_type == "cpu":
        seeds_stay(patch_points.TOP_K_TOP_P_SAMPLER.get())
    sampler = patch_points.SAMPLER.get()
    forward = sampler.forward

    def remember_and_forward(self: Any, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **named: Any) -> Any:
        beside(self).candidates = sampling_metadata.max_num_logprobs or 0
        # vLLM has two ways to penalise repetition, and rows of a padded vocabulary are contiguous if there is one.
        return forward(self, logits.contiguous(), sampling_metadata, *args, **named)

    masks_follow_their_rows(patch_points.INPUT_BATCH.get())
    sampler.forward = remember_and_forward
    sampler.gather_logprobs = staticmethod(gather_logprobs)
    sampler.gather_specific_token_logprobs = gather_specific_token_logprobs
    speculation.install()


def seeds_stay(sampler: type[Any]) -> None:
    """Have a seeded row keep its generator beside rows without a seed: vLLM 0.26 to 0.28 on a CPU then sample the
    whole batch without one. The method for other devices has the same arithmetic.
    """
    if "len(generators) != logits.shape[0]" in inspect.getsource(sampler.forward_cpu):
        sampler.forward_cpu = sampler.forward_native


def masks_follow_their_rows(batch: type[Any]) -> None:
    """Have the masks of ``allowed_token_ids`` move with their requests: in vLLM 0.26 a row that is exchanged with
    another loses its mask, and one that moves down leaves its mask to whoever gets its place.
    """
    swap, condense = batch.swap_states, batch.condense

    def swap_states(self: Any, i1: int, i2: int) -> None:
        mask = self.allowed_token_ids_mask_cpu_tensor
        exchanged = None if mask is None else mask[[i2, i1]]
        swap(self, i1, i2)
        if mask is not None:
            mask[[i1, i2]] = exchanged

    def condense_and_clear(self: Any) -> None:
        occupied = len(self._req_ids)
        condense(self)
        if self.allowed_token_ids_mask_cpu_tensor is not None:
            self.allowed_token_ids_mask_cpu_tensor[self.num_reqs : occupied] = False

    batch.swap_states, batch.condense = swap_states, condense_and_clear


def install_second_runner() -> None:
    """Replace what the second model runner's sampler calls; only GPUs have one."""
    for point in (patch_points.TOP_K_TOP_P_OF_STATES, patch_points.TOP_K_TOP_P_OF_SAMPLER):
        point.put(_top_k_top_p)
    for point in (patch_points.TOPK_SCORES, patch_points.TOPK_SCORES_OF_SAMPLER, patch_points.TOPK_SCORES_OF_PROMPT):
        point.put(compute_topk_scores)
    patch_points.TOKEN_LOGPROBS.put(log_softmax_at)
    prompt = patch_points.TOPK_SCORES_OF_PROMPT.module()
    if hasattr(prompt, patch_points.TOKEN_LOGPROBS.attribute):  # newer ones score a prompt by given tokens, too
        setattr(prompt, patch_points.TOKEN_LOGPROBS.attribute, log_softmax_at)
    sampler, draws = patch_points.SECOND_SAMPLER.get(), Draws(patch_points.GUMBEL_SAMPLE.get())
    sampler.apply_sampling_params = draws.widened(sampler.apply_sampling_params)
    patch_points.GUMBEL_SAMPLE.put(draws)
    speculation.install_second_runner()


class Draws:
    """The second model runner's function that draws a token of each row: at temperature 0 it is the first of the row's
    candidates, also beside rows that vLLM's function adds noise to. That one reads logits at a quarter of the bandwidth
    of an H100, and where NaN is among them what it takes follows the places that it has for them.

    Args:
        draw: vLLM's function ``gumbel_sample``.
    """

    def __init__(self, draw: Callable[..., torch.Tensor]) -> None:
        self._draw = draw
        self._is_greedy = np.zeros(1, dtype=bool)
        """Of the requests of the step."""

    def widened(self, apply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """vLLM's method ``apply_sampling_params``, which is called before a step's tokens are drawn, with logits in
        fp32 wherever a row is sampled, so that one kernel adds noise to it. vLLM 0.27 and later widen them where a
        request of the batch has a temperature other than 1, a filter or the like.
        """
        index = list(inspect.signature(apply).parameters).index("idx_mapping_np")

        def apply_sampling_params(sampler: Any, *args: Any, **named: Any) -> torch.Tensor:
            logits = apply(sampler, *args, **named)
            requests = named["idx_mapping_np"] if "idx_mapping_np" in named else args[index - 1]
            self._is_greedy = sampler.sampling_states.temperature.np[requests] == 0
            return logits if self._is_greedy.all() else logits.to(torch.float32)

        return apply_sampling_params

    def __call__(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        *args: Any,
        **named: Any,
    ) -> torch.Tensor:
        """vLLM's function of that name."""
        if self._is_greedy.all():
            return first(logits)
        drawn = self._draw(logits, expanded_idx_mapping, temperature, *args, **named)
        if not self._is_greedy.any():
            return drawn
        of_rows = temperature[expanded_idx_mapping.to(torch.int64).clamp(min=0)]
        return torch.where(of_rows == 0, first(logits), drawn)


def _top_k_top_p(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, **_: object) -> torch.Tensor:
    return top_k_top_p(logits, k, p)


def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
    """vLLM's method of that name: each row's token, its first ``num_logprobs`` candidates, and the token's rank."""
    top, ranks = top_and_ranks(logprobs, num_logprobs, token_ids)
    ids = torch.cat((token_ids.unsqueeze(-1), top), dim=1)
    return patch_points.LOGPROBS_TENSORS.get()(ids.to(torch.int32), logprobs.gather(-1, ids), ranks)


def gather_specific_token_logprobs(
    self: Any, logprobs: torch.Tensor, logprob_token_ids: dict[int, list[int]], sampled: torch.Tensor
) -> Any:
    """vLLM's method of that name: the tokens that a row asks for by id. Rows that ask for none get their first
    candidates, which vLLM drops where another row of the batch asks for ids.
    """
    if not logprob_token_ids:
        return None
    top, ranks = top_and_ranks(logprobs, beside(self).candidates, sampled)
    numbers = torch.zeros(len(logprobs), dtype=torch.int64)
    tokens = torch.zeros(len(logprobs), max(map(len, logprob_token_ids.values())), dtype=torch.int64)
    for row, ids in logprob_token_ids.items():
        numbers[row] = len(ids)
        tokens[row, : len(ids)] = torch.as_tensor(ids)
    wanted, there = listed(sampled, top, tokens.to(top.device), numbers.to(top.device))
    scores = logprobs.gather(-1, wanted).masked_fill(~there, -torch.inf)
    return patch_points.LOGPROBS_TENSORS.get()(wanted.to(torch.int32), scores, ranks)


def compute_topk_scores(
    logits: torch.Tensor,
    num_logprobs: int,
    sampled_token_ids: torch.Tensor,
    cu_num_logits: list[int] | torch.Tensor | None = None,
    logprob_token_ids_state: Any = None,
    expanded_idx_mapping: torch.Tensor | None = None,
    max_per_req_token_ids: int = 0,
    logits_mode: bool = False,
) -> Any:
    """The second model runner's function of that name: scores of each row's token and of its first ``num_logprobs``
    candidates, or of the tokens that its request asks for by id, and the token's rank. The order is that of the logits.
    """
    sampled = sampled_token_ids.to(torch.int64)
    top, ranks = top_and_ranks(logits, num_logprobs, sampled)
    if max_per_req_token_ids == 0:
        ids, there = torch.cat((sampled.unsqueeze(-1), top), dim=1), None
    else:
        assert expanded_idx_mapping is not None
        requests = expanded_idx_mapping.to(torch.int64)
        tokens = logprob_token_ids_state.token_ids.gpu[requests, :max_per_req_token_ids]
        ids, there = listed(sampled, top, tokens, logprob_token_ids_state.num_token_ids.gpu[requests])
    scores = logits.gather(-1, ids).to(torch.float32) if logits_mode else log_softmax_at(logits, ids)
    if there is not None:
        scores = scores.masked_fill(~there, -torch.inf)
    generated = "cu_num_generated_tokens" + ("_tensor" if isinstance(cu_num_logits, torch.Tensor) else "")
    return patch_points.LOGPROBS_TENSORS.get()(
        logprob_token_ids=ids, logprobs=scores, selected_token_ranks=ranks, **{generated: cu_num_logits}
    )


def listed(
    sampled: torch.Tensor, top: torch.Tensor, tokens: torch.Tensor, numbers: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each row lists: its sampled token, then the tokens it asks for by id, or its candidates if it asks for none.

    Args:
        sampled: [rows] int64.
        top: [rows, candidates] int64.
        tokens: [rows, n] integers, of which the first ``numbers`` [rows] of a row are asked for.

    Returns:
        [rows, 1 + the larger of candidates and n] int64, 0 where a row has nothing; and where it has something.
    """
    width = max(top.shape[1], tokens.shape[1])
    by_id = (numbers > 0).unsqueeze(-1)
    offs = torch.arange(width, device=top.device)
    there = offs < torch.where(by_id, numbers.unsqueeze(-1), top.shape[1])
    ids = torch.zeros(len(top), width, dtype=torch.int64, device=top.device)
    ids[:, : top.shape[1]] = top
    asked = torch.zeros_like(ids)
    asked[:, : tokens.shape[1]] = tokens
    ids = torch.where(there, torch.where(by_id, asked, ids), 0)
    first = sampled.unsqueeze(-1)
    return torch.cat((first, ids), dim=1), torch.cat((torch.ones_like(first, dtype=torch.bool), there), dim=1)
