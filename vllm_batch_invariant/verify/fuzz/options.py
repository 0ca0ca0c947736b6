"""Settings of an engine that one row each describes, :data:`FIELDS` and :data:`OPTIONS`: a new row is drawn.

What is refused, alone or beside something else, the rows of the gate say (``integration/coverage.py``), and they are
asked (:func:`starts`). A setting that any engine may have stands in a row of what is covered. Rows here add what a
model and a machine have, and what is not to be drawn.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...envs import ARITHMETIC, TP_TREE, UNTRIED, is_exact, supposed
from ...integration import coverage
from ...integration.parallel.tensor_tree import SLICE_STEP
from ...integration.reviews.schemes import OF_TOKENS, TOKEN_CACHE
from ...ops.exact.definition import segments
from ..harness import adapters
from ..harness.engine import argument_of, text_config
from ..harness.requests import BUDGET

NONE = ""
"""The value of every option that adds nothing to an engine."""
TEXT_ONLY = {
    "only": ["--language-model-only"],
    "limits": ["--limit-mm-per-prompt", '{"image": 0, "video": 0, "audio": 0}'],
}
"""Arguments by which vLLM takes nothing but text, by a name."""
DRAFTERS = {"itself": "draft_model", "ngram": "ngram", "ngram_gpu": "ngram_gpu", "mtp": "mtp", "dflash": "dflash"}
"""vLLM's methods of what proposes tokens, by a name."""
_MTP = {
    "DeepseekV3ForCausalLM": "deepseek_mtp",
    "Ernie4_5_MoeForCausalLM": "ernie_mtp",
    "Gemma4ForCausalLM": "gemma4_mtp",
    "Gemma4ForConditionalGeneration": "gemma4_mtp",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_mtp",
    "Glm4MoeForCausalLM": "glm4_moe_mtp",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite_mtp",
    "MiMoForCausalLM": "mimo_mtp",
    "NemotronHForCausalLM": "nemotron_h_mtp",
    "Qwen3NextForCausalLM": "qwen3_next_mtp",
    "GlmOcrForConditionalGeneration": "glm_ocr_mtp",
    "InternS2PreviewForConditionalGeneration": "qwen3_5_mtp",
    "Qwen3_5ForCausalLM": "qwen3_5_mtp",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_mtp",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_mtp",
    "Qwen3_5MoeForCausalLM": "qwen3_5_mtp",
}
"""vLLM's type of the layers that models have for more tokens, or of what drafts for them by the same method."""
_BACKENDS = {"xgrammar": "xgrammar", "guidance": "llguidance", "outlines": "outlines_core"}
"""Values of the backend of ``--structured-outputs-config``, and the module that each needs. With lm-format-enforcer
0.11.3, which they are installed with, vLLM 0.32 and 0.33 refuse every request: it imports a module that they no longer
have. Nor does it take drafts.
"""


_POOL = ("Model", "Classification", "ForRewardModeling", "ForTextEncoding")
"""Ends of the names of architectures that pool where nothing else is asked, as vLLM has them."""
_GENERATE = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
_INSTALLED = tuple(backend for backend, module in _BACKENDS.items() if find_spec(module) is not None)


def attention_of_pooling(model: str, arguments: Sequence[str]) -> str:
    """By attention of which kind a model pools, "decoder" or "encoder_only", as far as its folder and the arguments of
    ``vllm serve`` tell; empty if it generates.
    """
    changed = _json(argument_of(arguments, "--hf-overrides", "--hf_overrides"))
    config = text_config(model) | changed
    architecture = str((config.get("architectures") or [""])[0])
    runner = argument_of(arguments, "--runner")
    asked = runner == "pooling" or argument_of(arguments, "--convert") in ("embed", "classify")
    by_name = architecture.endswith(_POOL) and not architecture.endswith(_GENERATE)
    folder = Path(model).expanduser()
    if not asked and (runner not in ("", "auto") or not (by_name or (folder / "1_Pooling").is_dir())):
        return ""
    sees_all = config.get("is_causal") is False or bool(config.get("use_bidirectional_attention"))
    return "encoder_only" if sees_all or config.get("model_type") in coverage.ENCODERS else "decoder"


def pools_whole(model: str, arguments: Sequence[str]) -> bool:
    """Whether a pooler needs prompts that come whole, as far as the folder and the arguments tell."""
    chosen = _json(argument_of(arguments, "--pooler-config", "--pooler_config"))
    kinds = {str(value).upper() for name, value in chosen.items() if name.endswith("pooling_type")}
    try:
        of_folder = json.loads((Path(model).expanduser() / "1_Pooling" / "config.json").read_text())
    except (OSError, ValueError):
        of_folder = {}
    kinds |= {"MEAN"} if of_folder and not of_folder.get("pooling_mode_lasttoken") else set()
    config = text_config(model) | _json(argument_of(arguments, "--hf-overrides", "--hf_overrides"))
    return bool(kinds - {"LAST", "ALL"}) or "ProcessReward" in str(config.get("architectures"))


def _json(text: str) -> dict[str, Any]:
    """An argument in JSON; empty if it is none."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


_BLOCK_ALGORITHM, _BLOCK = "FP8_PB_WO", 128
"""ModelOpt's name of FP8 in blocks, and their sides."""


@dataclass(frozen=True)
class Place:
    """What settings depend on beside each other: a machine, a vLLM, a model, and what somebody has chosen.

    Attributes:
        device: "cpu" or "cuda".
        cores: of the machine.
        gpus: of the machine.
        model: its config.json; empty if it is not known.
        has_tokenizer: the model's folder has one, and the arguments leave it on.
        has_draft_models: vLLM can run a draft model there.
        given: names of arguments that somebody has chosen.
        pools: by attention of which kind the model pools, one of vLLM's "decoder" and "encoder_only"; empty if it
            generates.
        pools_whole: its pooler needs prompts that come whole.
        encodes: its images are encoded there.
    """

    device: str
    cores: int = 1
    gpus: int = 0
    model: Mapping[str, Any] = field(default_factory=dict)
    has_tokenizer: bool = True
    has_draft_models: bool = True
    given: frozenset[str] = frozenset()
    pools: str = ""
    pools_whole: bool = False
    encodes: bool = False

    @property
    def poolers(self) -> tuple[str, ...]:
        """How it may pool prompts: its own way, and others of a model that embeds."""
        embeds = self.pools == "decoder" and not str(self.model.get("architectures")).endswith("Classification']")
        return ("own", "MEAN", "own", "CLS") if embeds and self.is_open("--pooler-config") else ("own",)

    def is_open(self, *beginnings: str) -> bool:
        """Whether nobody has chosen an argument that begins so."""
        return not any(name.startswith(beginnings) for name in self.given)

    def holds(self, workers: int) -> bool:
        """Whether it has a GPU for each, and cores for two."""
        return self.cores >= 2 and (self.device == "cpu" or self.gpus >= workers)

    @property
    def is_multimodal(self) -> bool:
        """Whether the model has an encoder, and it is open which inputs it takes."""
        chosen = (arguments[0] for arguments in TEXT_ONLY.values())
        return self.is_open(*chosen) and bool({"vision_config", "audio_config"} & set(self.model))

    @property
    def text(self) -> Mapping[str, Any]:
        """What its configuration says of the language model."""
        found = self.model.get("text_config")
        return found if isinstance(found, Mapping) else self.model

    @property
    def mtp(self) -> str:
        """vLLM's type of the layers that the model has for more tokens; empty if it has none that have run there."""
        kind = _MTP.get(next(iter(self.model.get("architectures") or ()), ""), "")
        has_layers = any(self.text.get(name) for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
        has_layers |= kind == "gemma4_mtp" and self.has_draft_models
        has_run = self.device == "cpu" or not self.is_quantised
        return kind if has_layers and has_run else ""

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return any("expert" in name for name in self.text)

    @property
    def is_quantised(self) -> bool:
        """Whether the model's weights are quantised, or may become so while they are loaded."""
        return bool(self.model.get("quantization_config")) or not self.is_open("--quantization")

    @property
    def is_served_as_text(self) -> bool:
        """Whether the model, which has an encoder, has been run without it."""
        return not {*coverage.RAN.with_encoder_alone} & {*(self.model.get("architectures") or ())}

    @property
    def is_alone(self) -> bool:
        """Whether nothing but one worker has served it: quantised weights beside short convolutions and state spaces,
        and on a GPU, there without drafts, with latent attention and with heads of two sizes.
        """
        ran, on_a_gpu = coverage.RAN, self.device == "cuda"
        models = {*ran.convolution_models, *ran.mamba2_models, *(ran.two_head_sizes if on_a_gpu else ())}
        found = models & {*(self.model.get("architectures") or ())} or (on_a_gpu and self._of_latent)
        return self.is_quantised and bool(found)

    @property
    def has_codes_beside(self) -> bool:
        """Whether quantised weights are beside states or images, where one worker alone has served adapters."""
        architecture = next(iter(self.model.get("architectures") or ()), "")
        return self.is_quantised and (architecture in coverage.RAN.text_of or bool(coverage.kept_by(architecture)))

    def takes_drafts(self, cached: bool, text: bool) -> bool:
        """Whether drafts have run, also beside a prefix cache: on a GPU of few quantised models, and of none beside
        images.
        """
        if self.encodes and self.is_quantised and not text:
            return False
        if self.device != "cuda" or not self.is_quantised:
            return True
        return not self.is_alone and not (cached and self._of_rules)

    def shares_experts(self, whole: bool) -> bool:
        """Whether two workers may share a model's experts, as a whole or by columns: of those in FP8 whole ones have no
        given scales, and GPUs have shared blocks, and rows by columns.
        """
        config = self.model.get("quantization_config") or {}
        of_experts = self._activations_of(config, ".experts.")
        if not (self.has_experts and of_experts):
            return True
        by_gpus = "tensor" not in self._scales_of_weights and not (whole and of_experts == "token")
        return (by_gpus or self.device != "cuda") and not (whole and of_experts == "tensor")

    @property
    def cache_scheme(self) -> Mapping[str, Any] | None:
        """What a checkpoint says of its KV cache; None: nothing."""
        config = self.model.get("quantization_config") or {}
        by_name = {"num_bits": 8, "type": "float"} if config.get("kv_cache_quant_algo") else None
        return config.get("kv_cache_scheme") or by_name

    def is_divisible(self, workers: int = 2) -> bool:
        """Whether so many workers can share the model's heads, of keys and values also so that several have one."""
        heads, of_rules = self.text.get("num_attention_heads") or 0, self.text.get("linear_num_key_heads") or 0
        kv_heads, of_encoder = self.text.get("num_key_value_heads") or heads, self._encoder[0]
        has_whole = bool(heads) and heads % workers == of_rules % workers == of_encoder % workers == 0
        return has_whole and 0 in (kv_heads % workers, workers % kv_heads) and self.is_open(coverage.TENSOR)

    @property
    def has_k_slices(self) -> bool:
        """Whether two workers may add what they share of a layer as a tree: no odd slices; experts on a CPU alone."""
        sizes = [self.text.get("hidden_size"), self.text.get("intermediate_size"), *self._of_shared_experts]
        sizes += self._encoder[1:]
        takes_experts = not self.has_experts or self.device == "cpu"
        return takes_experts and all(isinstance(size, int) and size % (2 * SLICE_STEP) == 0 for size in sizes)

    def is_shared_beside(self, text: str) -> bool:
        """Whether several workers may share it where it is served as text, or, if ``text`` is empty, with images: these
        only beside some quantised text models.
        """
        names, ran = self.model.get("architectures") or (), coverage.RAN.encoded_quantised_workers
        has_run = any(self.device in ran.get(name, {}) for name in names)
        return bool(text) or not (self.encodes and self.is_quantised) or has_run

    def is_shared_by(self, workers: int) -> bool:
        """Whether it holds so many workers, who can share the model's layers."""
        return self.is_divisible(workers) and self.has_groups(workers) and self.holds(workers)

    @property
    def takes_four_gpus(self) -> bool:
        """Whether four GPUs can share the model: quantised weights have been shared by two alone."""
        return self.device == "cuda" and not self.is_quantised and self.is_shared_by(4)

    @property
    def has_segments(self) -> bool:
        """Whether exact arithmetic adds all that workers may share of a layer in segments: not of experts."""
        return not self.has_experts and all(segments(k, shared=True) > 1 for k in self._shared_inputs)

    def has_groups(self, workers: int = 2) -> bool:
        """Whether so many workers may share a layer without cutting a group or a block of quantised weights."""
        if not self.is_open("--quantization"):  # which may make blocks of a model without any
            return False
        config = self.model.get("quantization_config") or {}
        whole = all(k % (workers * group) == 0 for k in self._shared_inputs for group in _groups(config))
        return whole and all(n % (workers * side) == 0 for n in self._shared_outputs for side in _sides(config))

    @property
    def activations(self) -> str:
        """What has one scale of the codes to which layers quantise activations: a "group", a given "tensor" or a
        "token"; empty: they quantise none.
        """
        return self._activations_of(self.model.get("quantization_config") or {})

    def _activations_of(self, config: Mapping[str, Any], layers: str = "") -> str:
        """The same of layers that have ``layers`` in their names, where a configuration tells them apart."""
        if not self.is_open("--quantization"):
            return "token"
        if config.get("quant_method") == "fp8":
            is_given = config.get("activation_scheme") == "static"
            return "tensor" if is_given else "group" if config.get("weight_block_size") else "token"
        algorithm = str(config.get("quant_algo")).upper()
        if config.get("quant_method") == "modelopt" and "FP8" in algorithm:
            return {"FP8": "tensor", _BLOCK_ALGORITHM: "group"}.get(algorithm, "token")
        recipes = (recipe for name, recipe in config.get("quantized_layers", {}).items() if layers in name)
        if any(str(recipe.get("quant_algo")).upper() == "FP8" for recipe in recipes):
            return "tensor"
        groups = {} if "quantized_layers" in config else config.get("config_groups", {})
        given = [group.get("input_activations") for group in groups.values()]
        coded = [one for one in given if one and one["num_bits"] == 8]
        found = [one["strategy"] if one["type"] == "float" else "token" for one in coded]
        return max(found, default="")  # "token" allows least

    @property
    def _scales_of_weights(self) -> tuple[str, ...]:
        """What has one scale of experts' weights in FP8 that are multiplied with codes: a "block", a row, which is a
        "channel", or a "tensor".
        """
        config = self.model.get("quantization_config") or {}
        if config.get("quant_method") == "fp8":
            return ("block" if config.get("weight_block_size") else "tensor",)
        if config.get("quant_method") == "modelopt":
            return ("tensor",)  # the one of its FP8 in which experts are served
        return tuple(group["weights"]["strategy"] for group in config.get("config_groups", {}).values())

    @property
    def has_trees(self) -> bool:
        """Whether layers may add K as a tree: activations have no scale of a row, and none is cut."""
        return self.has_k_slices and self.activations != "token" and (not self.activations or self.has_groups())

    @property
    def _encoder(self) -> tuple[int, ...]:
        """Heads of the encoder of images, its hidden size, and what is between the layers of its MLPs; 0 if it has
        none.
        """
        vision = self.model.get("vision_config") or {}
        heads = vision.get("num_heads") or vision.get("num_attention_heads")
        return tuple(size or 0 for size in (heads, vision.get("hidden_size"), vision.get("intermediate_size")))

    @property
    def _shared_outputs(self) -> tuple[int, ...]:
        """Outputs of the layers whose outputs workers share: queries, keys or values, also of latent attention and of
        gated delta rules, and a half of an MLP's first.
        """
        heads, hidden = self.text.get("num_attention_heads") or 1, self.text.get("hidden_size") or 0
        size = self.text.get("head_dim") or hidden // heads
        kv_heads = self.text.get("num_key_value_heads") or heads
        of_heads = tuple(heads * size for size in self._of_latent) or (heads * size, kv_heads * size)
        return *of_heads, *self._of_rules, *self._intermediate

    @property
    def _shared_inputs(self) -> tuple[int, ...]:
        """Inputs of the layers whose inputs workers share."""
        heads, hidden = self.text.get("num_attention_heads") or 1, self.text.get("hidden_size") or 0
        size = self.text.get("v_head_dim") if self._of_latent else self.text.get("head_dim")
        return heads * (size or hidden // heads), *self._of_rules[1:], *self._intermediate

    @property
    def _of_latent(self) -> tuple[int, ...]:
        """Of a head with latent attention: its queries, and its keys and values; none of another model."""
        if self.text.get("kv_lora_rank") is None:
            return ()
        names = "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
        unturned, turned, value = (self.text.get(name) or 0 for name in names)
        return unturned + turned, unturned + value

    @property
    def _of_rules(self) -> tuple[int, ...]:
        """Keys and values of gated delta rules; none of another model."""
        names = ("linear_num_key_heads", "linear_key_head_dim"), ("linear_num_value_heads", "linear_value_head_dim")
        has_rules = self.text.get("linear_num_key_heads")
        return tuple(self.text.get(of, 1) * self.text.get(size, 1) for of, size in names if has_rules)

    @property
    def _intermediate(self) -> tuple[int, ...]:
        """Between the layers of an MLP, and of an expert where that is another number; of shared ones together."""
        whole, of_expert = (self.text.get(name) or 0 for name in ("intermediate_size", "moe_intermediate_size"))
        return (whole, of_expert, *self._of_shared_experts) if of_expert else (whole,)

    @property
    def _of_shared_experts(self) -> tuple[int, ...]:
        """Between the layers of shared experts, which are one MLP; none of another model."""
        count = self.text.get("n_shared_experts") or self.text.get("num_shared_experts") or 0
        of_expert = self.text.get("moe_intermediate_size") or 0
        size = self.text.get("shared_expert_intermediate_size") or count * of_expert
        return (size,) if size else ()


def _sides(config: Mapping[str, Any]) -> Iterator[int]:
    """Rows of a block of quantised weights, wherever a configuration has them."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _sides(value)
        elif name in ("block_structure", "weight_block_size") and value:
            yield value[0]
        elif name == "quant_algo" and str(value).upper() == _BLOCK_ALGORITHM:
            yield _BLOCK


def _groups(config: Mapping[str, Any]) -> Iterator[int]:
    """Elements of K with one scale, wherever a configuration of quantised weights has them."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _groups(value)
        elif name == "group_size" and isinstance(value, int) and value > 0:
            yield value
        elif name in ("block_structure", "weight_block_size") and value:
            yield value[1]
        elif name == "quant_algo" and str(value).upper() == _BLOCK_ALGORITHM:
            yield _BLOCK


def starts(settings: Any, place: Place, *names: str) -> bool:
    """Whether the rows of the gate about arguments and variables of these names let settings start in a place."""
    model, options = place.model, settings.options
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=place.device),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=settings.workers,
            pipeline_parallel_size=settings.stages,
            data_parallel_size=1,
            enable_expert_parallel=options.get("experts") == "whole",
            distributed_executor_backend=None,
        ),
        model_config=SimpleNamespace(
            architecture=model.get("architectures", [""])[0],
            runner_type="pooling" if settings.pooler else "generate",
            attn_type=place.pools or "decoder",
            hf_text_config=SimpleNamespace(**place.text),
            hf_config=SimpleNamespace(**{name: model[name] for name in ("audio_config",) if name in model}),
            dtype=model.get("dtype") or model.get("torch_dtype"),
            is_moe=place.has_experts,
            use_mla=place.text.get("kv_lora_rank") is not None,
            is_multimodal_model=place.is_multimodal,
            multimodal_config=SimpleNamespace(
                enable_mm_embeds=False,
                get_limit_per_prompt=lambda _: 0 if settings.text else 1,
                mm_encoder_tp_mode=options.get("encoder", "weights"),
            ),
            quantization=None,
            is_attention_free=False,
            is_hybrid=False,
            has_inner_state=False,
            enable_prompt_embeds="embeds" in options,
            enable_sleep_mode=options.get("sleep") == "on",
            enforce_eager=settings.eager,
        ),
        scheduler_config=SimpleNamespace(
            enable_chunked_prefill=not settings.whole, disable_hybrid_kv_cache_manager=False
        ),
        cache_config=SimpleNamespace(
            cache_dtype=options.get("cache", "auto"), enable_prefix_caching=settings.prefix_cache
        ),
        quant_config=SimpleNamespace(kv_cache_scheme=place.cache_scheme),
        speculative_config=(
            SimpleNamespace(
                method=DRAFTERS[settings.drafter],
                draft_model_config=SimpleNamespace(
                    hf_config=SimpleNamespace(model_type=place.mtp),
                    architectures=["DFlashDraftModel"],
                    quantization=None,
                ),
            )
            if settings.drafts
            else None
        ),
        lora_config=(
            SimpleNamespace(lora_dtype="auto", enable_mixed_moe_lora_format=False) if "adapters" in options else None
        ),
        reasoning_config=options.get("reasoning"),
        use_v2_model_runner=settings.runner != "0",
    )
    with supposed(settings.environment | {UNTRIED.name: UNTRIED.values[0]}):
        return not any(row.found(config) for row in coverage.REFUSED if {*names} & {*row.arguments})


@dataclass(frozen=True)
class Field:
    """A row: a field of :class:`.schedule.Settings` that rows of the gate are about.

    Attributes:
        name: of the field.
        argument: of ``vllm serve``, or a variable, by which the gate knows it.
        values: those to draw from, as often as they are to be drawn.
        fits: whether a place has them, and they are drawn beside the rest of the settings.
        drawn_as: what they are drawn by; the name if empty.
        of_pooling: whether models that pool have it, too.
    """

    name: str
    argument: str
    values: Callable[[Place], Sequence[Any]]
    fits: Callable[[Place, Any], bool] = lambda *_: True
    drawn_as: str = ""
    of_pooling: bool = False


def _drafters(place: Place) -> list[str]:
    """What has run on a device, and has what it needs: a model that drafts for itself drafts text alone."""
    has = {"itself": place.has_draft_models and not place.is_multimodal, "mtp": bool(place.mtp)}
    targets = {*coverage.RAN.dflash_targets} & {*(place.model.get("architectures") or ())}
    has["dflash"] = place.has_draft_models and bool(targets)
    ran = [one for one, method in DRAFTERS.items() if place.device in coverage.RAN.drafters[method]]
    return [one for one in ran if has.get(one, True)]


DRAFTS = (0, 3, 0, 1, 7)


def _has_room_for_drafts(settings: Any) -> bool:
    """Whether a step has that of every request with the most, as vLLM wants beside adapters."""
    return "adapters" not in settings.options or settings.requests * (max(DRAFTS) + 1) <= settings.step_tokens


FIELDS = (
    Field(
        "eager",
        coverage.EAGER,
        lambda _: (False, False, True),
        lambda place, _: place.device == "cuda",
        of_pooling=True,
    ),
    Field(
        "runner", coverage.RUNNER, lambda _: ("0", "1", "1"), lambda place, _: place.device == "cuda", of_pooling=True
    ),
    Field(
        "drafts",
        coverage.SPECULATION,
        lambda _: DRAFTS,
        lambda place, one: place.takes_drafts(one.prefix_cache, bool(one.text)) and _has_room_for_drafts(one),
    ),
    Field("drafter", coverage.SPECULATION, _drafters, lambda _, one: one.drafts > 0),
    Field(
        "workers",
        coverage.TENSOR,
        lambda place: (1, 2, 1, 4) if place.takes_four_gpus else (1, 2, 1),
        lambda place, one: (
            place.is_shared_by(2)
            and place.is_shared_beside(one.text)
            and not place.is_alone
            and not ("adapters" in one.options and place.has_codes_beside)
            and place.shares_experts(whole=False)
            and (place.has_segments or not one.exact)
            and not (place.pools and place.device == "cuda")
        ),
        of_pooling=True,
    ),
    Field(
        "tree",
        TP_TREE.name,
        lambda _: (1, 2),
        lambda place, one: (
            place.is_divisible()
            and place.holds(1)
            and place.has_trees
            and place.is_shared_beside(one.text)
            and not place.is_alone
            and not ("adapters" in one.options and place.has_codes_beside)
        ),
    ),
    # two cores are too few for stages of several workers
    Field(
        "stages",
        coverage.PIPELINE,
        lambda place: (2, 1) if place.device == "cuda" else (2,),
        lambda place, one: (
            place.is_open("--pipeline", "--tensor", "--speculative")
            and not (place.device == "cuda" and place.is_quantised)
            and place.text.get("num_hidden_layers", 1) > 1
            and place.holds(2)
            and one.workers == one.tree == 1
        ),
    ),
    Field(
        "exact",
        ARITHMETIC.name,
        lambda _: (True, False),
        lambda place, one: (
            place.device == "cpu"
            and place.is_open("--dtype", "--hf-overrides", coverage.TENSOR)
            and not is_exact()
            and not place.activations
            and (one.text or not place.is_multimodal)
            and (one.workers == 1 or place.has_segments)
        ),
        "arithmetic",
    ),
)


@dataclass(frozen=True)
class Option:
    """A row.

    Attributes:
        name: of the setting, also in labels.
        arguments: what each value but :data:`NONE` adds to ``vllm serve``.
        values: those to draw from, as often as they are to be drawn.
        where: whether an engine in a place has it; everywhere if None.
        beside: whether it is drawn beside the rest of the settings, a :class:`.schedule.Settings`, in a place; if not,
            it is :data:`NONE`.
        decides: kinds of requests whose tokens follow from it.
        of_pooling: whether models that pool have it, too.
        is_first: whether it is drawn before all fields: of what few of them are open beside.
    """

    name: str
    arguments: Mapping[str, tuple[str, ...]]
    values: tuple[str, ...]
    where: Callable[[Place], bool] | None = None
    beside: Callable[[Any, Place], bool] | None = None
    decides: frozenset[str] = frozenset()
    of_pooling: bool = False
    is_first: bool = False

    @property
    def names(self) -> set[str]:
        """Of its arguments."""
        return {arguments[0] for arguments in self.arguments.values() if arguments}

    def is_in(self, place: Place) -> bool:
        """Whether it is drawn in a place."""
        here = self.of_pooling or not place.pools
        return here and not self.names & place.given and (self.where is None or self.where(place))


def _thought(start: str, end: str) -> tuple[str, ...]:
    return ("--reasoning-config", json.dumps({"reasoning_start_str": start, "reasoning_end_str": end}))


def _keeps_requests(place: Place) -> bool:  # noqa: ARG001 - everywhere, in some versions
    """Whether requests that run go on after a sleep; earlier versions of vLLM abort them."""
    return in_vllm("v1/engine/__init__.py", '"keep"')


def _takes_head_in_fp32(place: Place) -> bool:
    """Whether an output head in fp32 has run there: of text models."""
    return coverage.heads_in_fp32(place.device) and not {"vision_config", "audio_config", "text_config"} & {
        *place.model
    }


def _takes_adapters(place: Place) -> bool:
    """Whether adapters have run there, and the model has the layers that those to draw are for, quantised or not."""
    architecture = next(iter(place.model.get("architectures") or ()), "")
    has_run = not place.has_experts or architecture in coverage.RAN.lora_experts.get(place.device, ())
    has_run &= _has_run(coverage.RAN.lora, place)
    names = {architecture}
    if architecture not in coverage.RAN.text_of:  # which states alone do not open
        names.add(coverage.kept_by(architecture))
    beside = names & {*coverage.RAN.lora_beside.get(place.device, ())}
    return has_run and bool(architecture in adapters.MODELS or beside) and _quantised_beneath_adapters(place)


def _quantised_beneath_adapters(place: Place) -> bool:
    """Whether weights as a model's have been served with adapters: of quantised ones some, without experts."""
    if not place.is_quantised:
        return True
    if place.has_experts or not place.is_open("--quantization"):
        return False
    ran, architecture = coverage.RAN, next(iter(place.model.get("architectures") or ()), "")
    kinds = ran.lora_quantised.get(place.device, ())
    if architecture in ran.text_of:
        kinds = ran.lora_beside_quantised.get(architecture, {}).get(place.device, ())
    elif state := coverage.kept_by(architecture):
        kinds = kinds if state in ran.lora_beside_more.get(place.device, ()) else ()
    return _are_quantised_as(place, kinds)


def _are_quantised_as(place: Place, kinds: Sequence[str]) -> bool:
    """Whether a checkpoint's layers are of these kinds, as ``ran.toml`` has them."""
    found = _beginnings_of_kinds(place.model.get("quantization_config") or {})
    return bool(found) and all(any(kind.startswith(one) for kind in kinds) for one in found)


def _beginnings_of_kinds(config: Mapping[str, Any]) -> list[str]:
    """Of kinds of quantised weights, as ``ran.toml`` has them, what a checkpoint's layers are; empty if that is others.

    Args:
        config: of the checkpoint's config.json.
    """
    method = config.get("quant_method")
    if method == "fp8":
        return ["fp8 with float8 weights (one scale a block"] if config.get("weight_block_size") else []
    if method == "modelopt" and config.get("quant_algo") == "NVFP4":
        return ["modelopt with float4 weights (one scale a tensor_group 16)"]
    if method != "compressed-tensors":
        return [f"{method} with int{config.get('bits')} weights"]
    found = []
    for group in config.get("config_groups", {}).values():
        weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
        kind = f"{method} with {weights.get('type')}{weights.get('num_bits')} weights"
        if inputs:
            shared = str(weights.get("strategy"))
            shared += f" {weights.get('group_size')}" if shared == "tensor_group" else ""
            kind += f" (one scale a {shared}) and {inputs.get('type')}{inputs.get('num_bits')} "
            kind += f"{'dynamic' if inputs.get('dynamic') else 'static'} {inputs.get('strategy')} activations"
        found.append(kind)
    return found


def _replaces_beneath_adapters(place: Place) -> bool:
    """Whether weights have been replaced beneath adapters on such a device."""
    architecture = next(iter(place.model.get("architectures") or ()), "")
    of_experts = not place.has_experts or place.device in coverage.RAN.lora_expert_updates
    beside = architecture in coverage.RAN.lora_updates_beside.get(place.device, ())
    return (beside and not place.is_quantised) or (architecture in adapters.MODELS and of_experts)


def _takes_weights(settings: Any, place: Place) -> bool:
    """Whether weights may come while an engine serves, as they do after a sleep that lets go of them."""
    return "adapters" not in settings.options or _replaces_beneath_adapters(place)


def _has_run(versions: Mapping[str, str], place: Place) -> bool:
    """Whether the installed version is among those that have run on a device."""
    ran = versions.get(place.device)
    return ran is not None and coverage.patch_points.installed_version().startswith(ran)


def _has_fp8_caches(place: Place) -> bool:
    """Whether a KV cache in fp8 has run there, and no checkpoint says what it is."""
    return _has_run(coverage.RAN.fp8_kv_cache, place) and not place.cache_scheme


def _has_cache_beside(settings: Any, place: Place) -> bool:
    """Whether one in fp8 may be beside a model's weights: of quantised ones some with images or heads of two sizes,
    there without drafts, and no drafts of dflash on a GPU.
    """
    if settings.drafts and settings.drafter == "dflash" and place.device == "cuda":
        return False
    if not place.is_quantised:
        return True
    architecture = next(iter(place.model.get("architectures") or ()), "")
    beside = [architecture] if place.encodes and not settings.text else []
    beside += [coverage.TWO_SIZES] if architecture in coverage.RAN.two_head_sizes else []
    if settings.drafts and beside:
        return False
    kinds = (coverage.RAN.fp8_kv_cache_quantised.get(name, {}).get(place.device, ()) for name in beside)
    return all(_are_quantised_as(place, ran) for ran in kinds)


def _is_among(ran: Mapping[str, Collection[str]], place: Place) -> bool:
    """Whether a model is among those that have run so on a device."""
    return next(iter(place.model.get("architectures") or ()), "") in ran.get(place.device, ())


def _scales_tokens(place: Place) -> bool:
    """Whether one with a scale a token and head has run on such a device."""
    return OF_TOKENS in coverage.RAN.fp8_kv_cache_scales.get(place.device, ())


_ADAPTERS = (
    *(coverage.ADAPTERS, "--max-lora-rank", str(adapters.MOST_RANK)),
    *("--max-loras", "2", "--max-cpu-loras", "2"),  # fewer than there are
)
OPTIONS = (
    # the end of "phrase" has several tokens, that of "marker" one
    Option(
        "reasoning",
        {"phrase": _thought("def", "return self.x"), "marker": _thought("def", "self")},
        (NONE, "phrase", "marker"),
        lambda place: place.has_tokenizer and in_vllm("config/reasoning.py", "reasoning_start_str"),
        decides=frozenset((BUDGET,)),
    ),
    Option(
        "processor",
        {"uncached": ("--mm-processor-cache-gb", "0")},
        (NONE, "uncached"),
        lambda place: place.encodes,
        lambda settings, _: not settings.text,
    ),
    # which vLLM does not do, and says so, of encoders that cannot
    Option(
        "encoder",
        {"data": (coverage.SHARED_IMAGES, "data")},
        (NONE, "data"),
        lambda place: place.encodes,
        lambda settings, place: (
            not settings.text and (settings.workers > 1 or _is_among(coverage.RAN.encoded_data_by_one, place))
        ),
    ),
    Option(
        "pruning",
        {"half": (coverage.PRUNING, "0.5")},
        (NONE, "half"),
        lambda place: _is_among(coverage.RAN.pruned_videos, place),
        lambda settings, _: not settings.text,
    ),
    Option("adapters", {"on": _ADAPTERS}, (NONE, "on", NONE, NONE), _takes_adapters, is_first=True),
    Option("embeds", {"on": (coverage.EMBEDDINGS,)}, (NONE, "on")),
    Option(
        "head",
        {"float32": ("--hf-overrides", json.dumps({"head_dtype": "float32"}))},
        (NONE, "float32", NONE),
        _takes_head_in_fp32,
        lambda settings, _: (
            not settings.exact
            and "adapters" not in settings.options
            and max(settings.workers, 2) == 2
            and settings.stages == 1
            and not (settings.drafts and settings.drafter != "ngram")
        ),
    ),
    # of states and windows also those behind pages that an answer has filled
    Option(
        "retention",
        {"all": ("--prefix-cache-retention-interval", "None")},
        (NONE, "all"),
        lambda _: in_vllm("config/cache.py", "prefix_cache_retention_interval"),
        lambda settings, _: settings.prefix_cache,
    ),
    Option(
        "cache",
        {"fp8": (coverage.KV_CACHE, "fp8")},
        (NONE, "fp8", NONE),
        lambda place: _has_fp8_caches(place) and not _scales_tokens(place),
        _has_cache_beside,
    ),
    Option(
        "cache",
        {name: (coverage.KV_CACHE, name) for name in ("fp8", TOKEN_CACHE)},
        (NONE, "fp8", NONE, TOKEN_CACHE),
        lambda place: _has_fp8_caches(place) and _scales_tokens(place),
        _has_cache_beside,
    ),
    *(
        Option(name, values, (NONE, *values), of_pooling=True)
        for feature in coverage.COVERED
        for name, values in feature.drawn.items()
    ),
    Option(
        "grammar",
        {backend: ("--structured-outputs-config", json.dumps({"backend": backend})) for backend in _INSTALLED},
        _INSTALLED,
        lambda place: place.has_tokenizer and bool(_INSTALLED),
        decides=frozenset(("json", "regex", "choice")),
    ),
    Option(
        "sleep",
        {"on": (coverage.SLEEP,)},
        (NONE, "on"),
        lambda place: place.device == "cuda" and _keeps_requests(place),
        _takes_weights,
        of_pooling=True,
    ),
    # a CPU sleeps without the argument, which vLLM refuses there, and forgets its prefix cache
    Option(
        "sleep",
        {},
        ("cache",),
        lambda place: place.device == "cpu" and _keeps_requests(place),
        _takes_weights,
        of_pooling=True,
    ),
    Option(
        "updates",
        {},
        (NONE, "on", NONE),
        lambda place: place.is_open("--load-format"),
        _takes_weights,
        of_pooling=True,
    ),
    Option(
        "experts",
        {"whole": (coverage.WHOLE_EXPERTS,)},
        (NONE, "whole"),
        lambda place: place.has_experts,
        lambda settings, place: settings.workers > 1 and place.shares_experts(whole=True),
    ),
)


def in_vllm(file: str, word: str) -> bool:
    """Whether a source file of the installed vLLM has a word: what a version has is seen without its import."""
    found = find_spec("vllm")
    folders = (found.submodule_search_locations or ()) if found else ()
    paths = [Path(folder) / file for folder in folders]
    return any(word in path.read_text() for path in paths if path.is_file())
