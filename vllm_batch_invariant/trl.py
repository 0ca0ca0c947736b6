"""GRPO by TRL, exactly on policy: the importance ratio trainer / rollout is 1 for every token.

    os.environ["VLLM_BATCH_INVARIANT"] = "1"  # before the trainer is made, which starts an engine
    arguments = GRPOConfig(use_vllm=True, bf16=False)
    OnPolicyGRPOTrainer("MODEL", reward, arguments, train_dataset=dataset).train()

Needs the extra [on-policy]. TRL's methods of one minor version are overridden, so another one is refused.
"""

import atexit
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from . import envs
from .errors import NotCovered
from .hf import Sampling, check_engine, patch, token_logprobs
from .hf.adapters import is_adapters_own, unwrapped
from .installing import how_to_install
from .integration.engine import endpoint
from .integration.reviews import patch_points
from .seeds import sample_seed

TRL = "1.16"
"""The version whose trainer was read and run."""


def _check_version() -> None:
    try:
        installed = version("trl")
    except PackageNotFoundError:
        installed = "that is not installed"
    if not f"{installed}.".startswith(f"{TRL}."):
        raise NotCovered(
            f"a TRL {installed}",
            f"the methods of its GRPOTrainer that are overridden are those of {TRL}",
            how_to_install("on-policy"),
        )


_check_version()

from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402 - which a missing TRL is said of before
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.generation import vllm_generation  # noqa: E402

__all__ = ["OnPolicyGRPOTrainer", "seed_rollouts", "serve_adapter"]

_REQUEST_PARAMETERS = {
    *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "max_tokens", "seed", "detokenize"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
}
"""Of ``generation_kwargs``: those by which no token is drawn in another way."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""That vLLM's ``max_lora_rank`` may be."""
_DEFAULT = "default"
"""PEFT's name of an adapter, which it writes where vLLM looks for it."""
_POSTED = "trained"
"""Name of the adapter in the engine."""
_ROWS_AT_ONCE = 64
"""Whose probabilities are held in memory for their entropies."""


class OnPolicyGRPOTrainer(GRPOTrainer):
    """TRL's GRPOTrainer with a patched model, whose logprobs are those of its colocated engine, bit for bit, and with a
    seed for every completion: a run gives the same weights again, however the engine is loaded.

    TRL logs ``sampling/sampling_logp_difference/max``, which is 0 in every step, and
    ``sampling/importance_sampling_ratio/min`` and ``max``, which are 1.

    Args:
        model: a folder, a name, or a model of :func:`.hf.patch`'s families that is not patched yet; also one that PEFT
            has put a LoRA adapter into, see :func:`serve_adapter`. By name it has the checkpoint's dtype unless
            ``args.model_init_kwargs`` say another. It needs the engine's.
        reward_funcs: as TRL has them.
        args: with ``use_vllm=True`` and ``bf16=False``, which is about autocast and not about the model's weights.
        quantization: of :func:`.hf.patch`: the engine quantises the weights that come at every step, and the model's
            forward pass as well.
        others: the other arguments of GRPOTrainer, but for ``peft_config`` and quantised models.

    Attributes:
        adapter: folder of the files of the adapter that the engine serves, of a model of PEFT's; else None.

    Raises:
        NotCovered: arguments with which the logprobs would not be the engine's, the flag off, or a model or an engine
            that is not covered.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        quantization: str | None = None,
        **others: Any,
    ) -> None:
        args = args or GRPOConfig()
        _check(args, others)
        if isinstance(model, str):
            model = AutoModelForCausalLM.from_pretrained(model, **{"dtype": "auto"} | (args.model_init_kwargs or {}))
        model.to(args.device)  # before it is patched: what is covered depends on the device
        self.adapter: Path | None = None
        is_adapted = unwrapped(model) is not model
        of_engine: dict[str, Any] = {} if quantization is None else {"quantization": quantization}
        of_engine |= _room_for(model) if is_adapted else {}
        with _engine_with(of_engine):
            super().__init__(patch(model, quantization), reward_funcs, args, **others)
        if self.ref_model is not None:
            patch(self.ref_model, quantization)
        self.check_engine()
        if is_adapted:
            self.adapter = serve_adapter(self)
        seed_rollouts(self)

    def check_engine(self) -> None:
        """Refuse an engine whose logprobs are not promised to be the model's.

        Raises:
            NotCovered: what differs.
        """
        check_engine(self.model, self.vllm_generation.llm.collective_rpc(endpoint.METHOD))

    @property
    def _sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k or 0, self.top_p, self.min_p or 0.0)

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """Logprobs [rows, logits_to_keep] as the engine reports them. TRL multiplies by the output head in tiles of its
        own, which have other bits.
        """
        for name, value in others.items():
            if value is not None and value is not False:
                raise NotCovered(f"TRL's {name}", "a patched model takes tokens and a mask", "leave it out")
        logprobs, entropies = [], []
        size = batch_size or len(input_ids)
        for rows, mask in zip(input_ids.split(size), attention_mask.split(size), strict=True):
            logits = model(input_ids=rows, attention_mask=mask, logits_to_keep=logits_to_keep + 1).logits[:, :-1]
            logprobs.append(_drawn_logprobs(logits, rows[:, -logits_to_keep:], self._sampling))
            if compute_entropy:
                with nullcontext() if self._entropy_bonus_enabled else torch.no_grad():
                    entropies.append(_entropies(logits, self.temperature))
        return torch.cat(logprobs), torch.cat(entropies) if compute_entropy else None, None


@contextmanager
def _engine_with(settings: dict[str, Any]) -> Iterator[None]:
    """TRL, which has no option for these, starts its engine with them."""
    make = vllm_generation.LLM

    def made(*arguments: Any, **named: Any) -> Any:
        return make(*arguments, **named | settings)

    vllm_generation.LLM = made if settings else make
    try:
        yield
    finally:
        vllm_generation.LLM = make


def _room_for(model: Any) -> dict[str, Any]:
    """Settings of an engine that serves the one adapter of a model of PEFT's.

    Raises:
        NotCovered: other weights of the model are trained, too, the adapter has another name than PEFT's default, whose
            files are read, it is of experts, or its rank is larger than vLLM has room for.
    """
    if [*model.active_adapters] != [_DEFAULT]:
        raise NotCovered(
            f"the adapter {', '.join(model.active_adapters)}",
            f"the engine reads the files of the one whose name is {_DEFAULT!r}",
            "leave adapter_name out",
        )
    own = [name for name, weight in model.named_parameters() if weight.requires_grad and not is_adapters_own(name)]
    if own:
        raise NotCovered(
            f"weights beside the adapter that are trained, such as {own[0]}",
            "the engine is sent the adapter alone",
            "train the adapter alone, or all weights without one",
        )
    of_experts = [name for one in model.peft_config.values() for name in one.target_parameters or ()]
    if of_experts:
        raise NotCovered(
            f"an adapter of {', '.join(sorted(of_experts))} in a colocated engine",
            "it has not been run there",
            "train one of linear layers, or roll out by an engine of your own with --enable-mixed-moe-lora-format",
        )
    ranks = [rank for one in model.peft_config.values() for rank in (one.r, *one.rank_pattern.values())]
    room = next((room for room in _RANKS if room >= max(ranks)), None)
    if room is None:
        raise NotCovered(f"an adapter of rank {max(ranks)}", "vLLM has room for 512 at most", "train a smaller one")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}


def serve_adapter(trainer: GRPOTrainer) -> Path:
    """Have the colocated engine of a trainer serve the adapter that is trained from its files, loaded in place before
    each rollout, above the base weights of the trainer's model, which are sent now. TRL's own way is to merge it into
    the weights, which rounds them, and to take it out again, by which the weights change.

    Args:
        trainer: with a model of PEFT's, whose ``vllm_generation`` has started an engine with ``enable_lora``.

    Returns:
        The folder of the files, for calls of the engine by a ``rollout_func``; gone when the process ends.

    Raises:
        NotCovered: several processes train, or the engine sleeps.
    """
    if trainer.args.vllm_enable_sleep_mode:
        raise NotCovered(
            "an adapter whose engine sleeps", "it would forget the base weights, which are sent once", "leave it awake"
        )
    if trainer.accelerator.num_processes > 1:
        raise NotCovered("an adapter that several processes train", "that has not been run", "train it by one")
    generation, made = trainer.vllm_generation, tempfile.mkdtemp(prefix="vllm-adapter-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    generate, engine, of_vllm = generation.llm.generate, generation.llm.llm_engine, patch_points.LORA_REQUEST.get()
    base = trainer.model.get_base_model().named_parameters()
    # the engine has read the model's name, which may stand for other weights than those in memory
    engine.model_executor.driver_worker.model_runner.get_model().load_weights(
        (name.replace(".base_layer.", "."), weight.data) for name, weight in base if not is_adapters_own(name)
    )

    def post() -> None:
        trainer.model.save_pretrained(made)
        engine.add_lora(of_vllm(_POSTED, 1, made, load_inplace=True))

    def adapted(prompts: Any, *args: Any, **named: Any) -> Any:
        return generate(prompts, *args, **{"lora_request": of_vllm(_POSTED, 1, made)} | named)

    generation.sync_weights, generation.llm.generate = post, adapted
    return Path(made)


def seed_rollouts(trainer: GRPOTrainer) -> None:
    """Give every completion that the colocated engine of a trainer samples a seed of its own, which follows from
    ``args.seed``, the step, and the completion's place in it.

    TRL asks with one set of sampling parameters for all completions of a step. Without a seed they are not repeatable,
    and with one (``generation_kwargs``) all completions of a prompt would be equal.

    Args:
        trainer: whose ``vllm_generation`` has started its engine. Calls of the engine by a ``rollout_func`` are seeded,
            too.
    """
    generation = trainer.vllm_generation
    generate = generation.llm.generate
    asked_in: Counter[str] = Counter()

    def seeded(prompts: Any, sampling_params: Any = None, *args: Any, **named: Any) -> Any:
        if not isinstance(prompts, list | tuple) or sampling_params is None:
            return generate(prompts, sampling_params, *args, **named)
        step = f"{'train' if trainer.model.training else 'eval'} {trainer.state.global_step}"
        turn = asked_in[step]  # a step asks more than once where it has turns, or batches
        asked_in[step] += 1
        group = trainer.accelerator.process_index // generation.tensor_parallel_size  # of processes that ask the same
        shared = isinstance(sampling_params, list | tuple)
        of_prompts = sampling_params if shared else [sampling_params] * len(prompts)
        asked = [
            _with_seed(params, trainer.args.seed, f"{step} {turn} {group * len(prompts) + place}")
            for place, params in enumerate(of_prompts)
        ]
        return generate(prompts, asked, *args, **named)

    generation.llm.generate = seeded


def _with_seed(params: Any, seed: int, sample_id: str) -> Any:
    own = params.clone()
    own.seed = sample_seed(seed if params.seed is None else params.seed, sample_id)
    return own


def _drawn_logprobs(logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    if sampling == Sampling():  # processed logprobs have the bits of raw ones, which take less memory
        return token_logprobs(logits, tokens)
    found = token_logprobs(logits, tokens, mode="processed_logprobs", sampling=sampling)
    # padding and what a tool said were not drawn, and may be what the filters take away
    return found.masked_fill(found.isinf(), 0.0)


def _entropies(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Of each row of logits [..., vocabulary], in fp32: a metric, and no part of what is promised."""
    found = []
    for rows in logits.flatten(0, -2).split(_ROWS_AT_ONCE):
        every = torch.log_softmax(rows.float() / temperature, -1)
        found.append(-(every.exp() * every).sum(-1))
    return torch.cat(found).view(logits.shape[:-1])


def _check(args: GRPOConfig, others: dict[str, Any]) -> None:
    """Whether the logprobs of TRL's loss can be those of its engine.

    Raises:
        NotCovered: the first thing for which they cannot.
    """
    drawn_otherwise = sorted({*(args.generation_kwargs or {})} - _REQUEST_PARAMETERS)
    refused = {
        "the rollout without the mode": (
            not envs.enabled(),
            "plain vLLM's bits follow the batch",
            f'set os.environ["{envs.FLAG}"] = "1" before the trainer is made',
        ),
        "a rollout that is not by TRL's colocated engine": (
            not args.use_vllm or args.vllm_mode != "colocate",
            "no other was compared with the trainer",
            "GRPOConfig(use_vllm=True, vllm_mode='colocate')",
        ),
        "autocast": (
            args.bf16 or args.fp16,
            "the engine computes in one dtype",
            "GRPOConfig(bf16=False), and a model whose weights have the engine's dtype",
        ),
        "cast_lm_head_to_fp32": (args.cast_lm_head_to_fp32, "the engine does not do so", "leave it out"),
        "use_liger_kernel": (args.use_liger_kernel, "its kernels have other bits", "leave it out"),
        "a repetition penalty": (
            args.repetition_penalty != 1,
            "it follows the tokens before, which the trainer's logprobs leave out",
            "leave it out",
        ),
        "structured outputs": (
            args.vllm_structured_outputs_regex is not None,
            "they take tokens away, which the trainer does not",
            "leave them out",
        ),
        f"generation_kwargs of {', '.join(drawn_otherwise)}": (
            drawn_otherwise,
            "the trainer's logprobs would leave them out",
            "set temperature, top_p, top_k and min_p in GRPOConfig",
        ),
        "peft_config": (
            others.get("peft_config") is not None,
            "TRL would put the adapter into a model that is patched already",
            "pass the model of peft.get_peft_model(model, peft_config)",
        ),
        "quantised models": (
            others.get("quantization_config") is not None,
            "they have not been compared",
            "pass OnPolicyGRPOTrainer(quantization='fp8_per_block') with a model in bf16",
        ),
    }
    for what, (is_found, why, remedy) in refused.items():
        if is_found:
            raise NotCovered(what, why, remedy)
