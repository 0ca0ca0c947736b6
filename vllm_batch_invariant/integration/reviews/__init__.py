"""What somebody has read of vLLM, and of what its models use, and with what result: data files, one a subject.

They use three words. What is *known* may be used as it is, or have any value; what is *refused* was read, and the mode
says no; what is *default only* must have its default, or a value that is listed. What no file names, nobody has read,
and whoever asks refuses it. The comments in the files say why. Each is read once, when it is first asked for.

======================  ==============================================================
``fields.toml``         fields of vLLM's configurations
``variables.toml``      environment variables of vLLM's
``claims.toml``         what attention backends say that they support
``functions.toml``      functions of vLLM's that stay in use, by digests (:mod:`.sources`)
``calls.toml``          names that the methods of models may use
``layers.toml``         classes of layers
``ran.toml``            what has run where
======================  ==============================================================
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def table(subject: str) -> dict[str, Any]:
    """What a subject's file says."""
    return tomllib.loads(files(__name__).joinpath(f"{subject}.toml").read_text(encoding="utf-8"))


def _names(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for line in lines for name in line.split())


@dataclass(frozen=True)
class Review:
    """What was found of the names of one thing.

    Attributes:
        known: in which * stands for anything.
        refused: after a look at what they mean.
        default_only: with the other values that are covered; of a variable the value that is, and why no other.
    """

    known: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    default_only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, lists: Mapping[str, Any]) -> "Review":
        """Of a table of a file, where what is known may be listed by the reason."""
        known = lists.get("known", [])
        lines = [line for part in known.values() for line in part] if isinstance(known, dict) else known
        only = {name: tuple(values) for name, values in lists.get("default_only", {}).items()}
        return cls(frozenset(_names(lines)), frozenset(_names(lists.get("refused", []))), only)

    def verdict(self, name: str) -> str | None:
        """ "known", "refused" or "default only"; None for what nobody has read."""
        if name in self.default_only:
            return "default only"
        if name in self.refused:
            return "refused"
        return "known" if name in self.known or any(fnmatchcase(name, one) for one in self._patterns) else None

    @property
    def _patterns(self) -> list[str]:
        return [name for name in self.known if "*" in name]


@dataclass(frozen=True)
class Names:
    """Names that are known.

    Attributes:
        module: that defines them, or the package above it.
        names: "name" with all that it has, or "name.attribute"; * stands for anything.
    """

    module: str
    names: tuple[str, ...]

    def have(self, module: str, name: str, attributes: tuple[str, ...] = ()) -> bool:
        """Whether they have what a module has under a name, and under an attribute of that."""
        if not f"{module}.".startswith(f"{self.module}."):
            return False
        whole = ".".join((name, *attributes))
        return any(
            fnmatchcase(name, pattern) if "." not in pattern else fnmatchcase(f"{whole}.", f"{pattern}.*")
            for pattern in self.names
        )


def is_known(rows: Iterable[Names], module: str, name: str, attributes: tuple[str, ...] = ()) -> bool:
    """Whether a name of a module is in one of the rows."""
    return any(row.have(module, name, attributes) for row in rows)


@cache
def fields() -> dict[str, Review]:
    """Of the fields of vLLM's configurations, by the name of the class."""
    return {name: Review.of(lists) for name, lists in table("fields")["fields"].items()}


@cache
def classes() -> Review:
    """Of classes of configurations as a whole: those that decide no arithmetic of a covered model."""
    return Review.of(table("fields")["classes"])


@cache
def judged_with_their_field() -> frozenset[str]:
    """Classes of configurations that were judged with the field that holds them."""
    return frozenset(_names(table("fields")["classes"]["with_their_field"]))


@cache
def claims() -> Review:
    """Of the methods ``supports_*`` of attention backends."""
    return Review.of(table("claims"))


@cache
def variables() -> Review:
    """Of vLLM's environment variables."""
    return Review.of(table("variables"))


@cache
def functions(use: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """Digests of sources that were read for a use, by module and name; "" stands for what a version does not have."""
    return {
        module: {name: tuple(known) for name, known in of_module.items()}
        for module, of_module in table("functions")[use].items()
    }


@dataclass(frozen=True)
class Calls:
    """What the methods of models may call.

    Attributes:
        known: names of modules.
        methods: that models call of what they hold or are given, beside those of tensors, layers and containers.
        models: modules of vLLM's models, or "module:class", that are said to pass.
        from_transformers: models that a version of vLLM takes from Transformers, and that are said to pass.
        operations: PyTorch's, refused by their names.
        compilers: PyTorch's functions that have other code computed than what is written; refused.
        built_in: functions that reach what no name in the source tells; refused.
        modules: of Python's, that do the same; refused.
    """

    known: tuple[Names, ...]
    methods: frozenset[str]
    models: tuple[str, ...]
    from_transformers: tuple[str, ...]
    operations: frozenset[str]
    compilers: frozenset[str]
    built_in: frozenset[str]
    modules: frozenset[str]

    def have(self, module: str, name: str, attributes: tuple[str, ...] = ()) -> bool:
        """Whether somebody has read what a module has under a name, and under an attribute of that."""
        return is_known(self.known, module, name, attributes)


@cache
def calls() -> Calls:
    """Of names that the methods of models use."""
    of = table("calls")
    return Calls(
        tuple(Names(row["module"], _names(row["names"])) for row in of["known"]),
        frozenset(_names(of["methods"])),
        _names(of["models"]["known"]),
        _names(of["models"]["from_transformers"]),
        **{kind: frozenset(_names(lines)) for kind, lines in of["refused"].items()},
    )


@dataclass(frozen=True)
class Layers:
    """Classes of layers, and what is known inside some.

    Attributes:
        known: keep a request's bits.
        exact: compute what exact arithmetic defines.
        routers: choose experts by the settings of the layer, which our own router reads.
        own_tensors: buffers that models' own classes may keep.
        steady_rotary: kinds of Transformers' rotary embeddings whose frequencies are fixed.
    """

    known: tuple[Names, ...]
    exact: tuple[Names, ...]
    routers: frozenset[str]
    own_tensors: frozenset[str]
    steady_rotary: frozenset[str]


@cache
def layers() -> Layers:
    """Of the layers of a loaded model."""
    of = table("layers")
    known, exact = (
        tuple(Names(module, _names(lines)) for module, lines in of[kind].items()) for kind in ("known", "exact")
    )
    routers, own_tensors, steady_rotary = (
        frozenset(_names(of[kind])) for kind in ("routers", "own_tensors", "steady_rotary")
    )
    return Layers(known, exact, routers, own_tensors, steady_rotary)


@dataclass(frozen=True)
class Ran:
    """What has run with the mode; models and drafters by vLLM's names, versions by their beginning.

    Attributes:
        on_gpus: versions, in exact arithmetic, with experts, and with two workers.
        on_two_nodes: versions whose workers on two nodes of CPUs have run.
        exact_models_on_gpus: models whose engines have had the definition's bits.
        experts_on_cpus_alone: mixtures of experts whose engines no GPU has run.
        experts_by_one_gpu: those that several GPUs have not shared.
        with_encoder_alone: multimodal models that have not been run without their encoder.
        text_by_one_worker: those whose text, a decoder of their own, has run by one worker, not quantised.
        encoded_in_bf16: those of them whose encoder gives bf16, whatever dtype the model has.
        mtp_models: types of models whose layers for more tokens have run.
        dflash_targets: models that have been drafted for by dflash.
        dflash_targets_of_the_first_runner_on_gpus: those of them by vLLM's first model runner on GPUs.
        dflash_models: architectures of draft models of dflash that have run.
        encoders: models whose tokens see those after them that have pooled.
        convolution_models: with short convolutions beside attention.
        delta_rule_models: with gated delta rules beside attention.
        delta_rule_experts_on_gpus: kinds of quantised weights that GPUs have served of those with experts.
        delta_rule_quantised_by_two_gpus: kinds that two GPUs have shared, without experts.
        activations_by_two_gpus: kinds of quantised weights and activations of dense models that two GPUs have shared.
        expert_activations_by_two_gpus: the same of mixtures of experts.
        quantised_experts_draft_on_cpus_alone: kinds of mixtures of experts that have drafted on no GPU.
        quantised_mtp_on_gpus: kinds in which layers for more tokens have drafted on a GPU, by vLLM's type of these.
        quantised_drafts_on_cpus_alone: kinds, and names of methods, in which GPUs have served models, none that draft.
        large_head_quantised_by_one: kinds that models with heads of two sizes have run in by one worker alone.
        quantised_not_run_with: kinds that have run beside states, but not with these models, by device.
        fp8_kv_cache_of_states_on_gpus: models with states that GPUs served with such a cache, and drafters of each.
        fp8_kv_cache_quantised_of_states_on_gpus: kinds of their quantised weights, by model, its experts and whether
            it mixes these.
        encoded_data_by_one: models of which one worker has encoded as several would that share images, by device.
        encoded_by_two_gpus: models of which two have shared images ("data"), or the encoder by a tree ("tree").
        mamba2_models: with state spaces of Mamba-2 beside attention.
        kda_models: with Kimi Delta Attention beside latent attention.
        lightning_models: with linear attention whose decay is constant, beside latent attention.
        two_head_sizes: models whose layers of full attention have larger heads than the others.
        large_heads_on_cpus_alone: those of them that no GPU has run but by one worker, in 16 bits or with
            images, and with drafts beside these alone
            and, with images, in :attr:`encoded_quantised`.
        chunked_models: models with layers that see the keys of a token's own chunk alone.
        chunk_image_dtypes_on_gpus: dtypes in which GPUs have served them with images, of unquantised weights.
        latent_models: models whose layers have latent attention.
        latent_on_cpus_alone: those of them that no GPU has run.
        latent: versions whose engines have served it, by device.
        latent_workers: numbers of workers above 1 that have shared it, by device.
        latent_trees: slices of a tree by which as many workers, with whole experts, have had one's bits, by device.
        latent_drafters: methods of speculative decoding that one worker has run beside it, by device.
        latent_quantised_by_two_gpus: kinds of quantised weights that two GPUs have shared with it.
        latent_quantised_drafted_on_gpus: those that one has run with drafts.
        latent_quantised: kinds of quantised weights that have been served with it, by device.
        chunks: versions whose engines have served these, by device.
        encoded_drafters: methods of speculative decoding that one worker has run beside images, by model and device.
        encoded_quantised_drafted: kinds of quantised weights beside which they have, by model, device and method.
        encoded_quantised_drafted_in_fp8_alone_on_gpus: those beside which GPUs have with a KV cache in FP8 alone, by
            model.
        encoded_drafters_beside_fp8_caches: methods that have run beside a KV cache in FP8, by model and device.
        grammars_behind_thoughts: versions whose engines have had them beside drafts, by device.
        chunk_workers: numbers of workers above 1 that have shared such models, by device.
        chunk_trees: slices of a tree by which as many workers, with whole experts, have had one's bits, by device.
        chunk_quantised: kinds of quantised weights that one worker has run with them, by device.
        pooling: versions whose engines have pooled, by device.
        quantised: versions whose engines have served quantised weights, by device.
        large_heads: versions whose engines have served heads of 512, by device.
        large_head_workers: numbers of workers above 1 that have shared such models, by device.
        large_head_drafters: methods of speculative decoding that one worker has run with them, by device.
        large_head_quantised: kinds of quantised weights that have been served with them, by device.
        fp8_kv_cache: versions whose engines have served a KV cache in e4m3, by device.
        fp8_kv_cache_scales: what has a scale of its own in such a cache, by device.
        fp8_kv_cache_head_workers: numbers of workers above 1 that have shared heads with a scale each, by device.
        fp8_kv_cache_beside: states, heads of two sizes and models that take images, beside which one scale a tensor
            has, by device.
        fp8_kv_cache_quantised: kinds of quantised weights beside which it has with two sizes and images, by device;
            some with experts alone.
        fp8_kv_cache_shared_on_gpus: kinds of quantised weights whose layers have shared such a cache on GPUs.
        fp8_kv_cache_shared_with_scales_on_gpus: models that have with scales of the checkpoint.
        short_convolutions: versions whose engines have served them, by device.
        short_convolution_quantised: kinds of quantised weights that have been served beside them, by device.
        short_convolution_workers: numbers of workers above 1 that have shared them, by device.
        short_convolution_drafters: methods of speculative decoding that have been run beside them, by device.
        drafts_beside_prefix_caches_on_gpus: methods that GPUs have run beside layers with states and a prefix cache.
        delta_rule_quantised_drafters_on_gpus: methods that GPUs have run beside some kinds of their quantised weights.
        delta_rules: versions whose engines have served gated delta rules, by device.
        delta_rule_workers: numbers of workers above 1 that have shared them, by device.
        delta_rule_drafters: methods of speculative decoding that have been run beside them, by device.
        delta_rule_quantised: kinds of quantised weights that have been served beside them, by device.
        delta_rule_quantised_by_four: those that four workers have shared, by device.
        mamba2: versions whose engines have served state spaces of Mamba-2, by device.
        mamba2_workers: numbers of workers above 1 that have shared them, by device.
        mamba2_drafters: methods of speculative decoding that have been run beside them, by device.
        mamba2_expert_workers: numbers of workers above 1 that have shared those of Nemotron-H with experts, by device.
        mamba2_quantised: kinds of quantised weights that have been served beside them, by device.
        mamba2_quantised_experts: kinds of those of Nemotron-H with experts, by device.
        kda: versions whose engines have served Kimi Delta Attention, by device.
        kda_workers: numbers of workers above 1 that have shared it, by device.
        kda_drafters: methods of speculative decoding that have been run beside it, by device.
        lightning: versions whose engines have served linear attention whose decay is constant, by device.
        lightning_workers: numbers of workers above 1 that have shared it, by device.
        kv_connectors: versions whose engines have stored and loaded keys and values, by connector and device.
        heads_in_fp32: versions whose engines have had an output head in fp32 of a model in 16 bits, by device.
        lora: versions whose engines have served LoRA adapters, by device.
        lora_beside: states, and models that take images, beside which they have been served, by device.
        lora_beside_by_two: of these what two workers have shared, by device.
        lora_beside_more: beside what one worker has served them with drafts and quantised weights, by device.
        lora_beside_quantised: kinds of quantised weights with which one worker has served them beside images, by model
            and device.
        lora_updates_beside: models with states or images whose weights have been replaced beneath them, by device.
        lora_workers: numbers of workers above 1 that have served them, by device.
        lora_drafters: methods of speculative decoding that have been run beside them, by device.
        lora_experts: mixtures of experts that have been served with them, by device.
        lora_quantised: kinds of quantised weights that have been served with them, by device.
        lora_expert_workers: numbers of workers above 1 that have served those of mixtures of experts, by device.
        lora_without_updates: models whose weights vLLM does not replace beneath them.
        lora_expert_updates: devices where weights of mixtures of experts have been replaced beneath them.
        encoding: versions whose engines have encoded images and the like, by device.
        encoded: what else multimodal models take that is encoded.
        encoded_workers: numbers of workers above 1 that have shared an encoder, or the images of a step, by device and
            model; ``untried`` ones no device has run, here and below.
        encoded_data_workers: further ones that have shared the images of a step alone, without a tree.
        pruned_videos: models whose videos have been pruned by EVS, by device.
        encoded_by_one: what of the inputs of these one worker alone has encoded.
        encoded_quantised_workers: kinds of quantised weights of text models beside which workers have, by model, device
            and number of workers.
        encoded_quantised_beside_fp8_caches: those beside which they have with a KV cache in FP8.
        images_by_no_tree: those whose workers that share the images of a step add by no tree what others do.
        encoded_on_cpus_alone: what of that no GPU has encoded.
        served_by: classes of vLLM's that serve models of other names.
        encoded_quantised: kinds of quantised weights of their text models that have been served beside that, by model
            and device.
        encoded_quantised_around_on_gpus: types of the text models around which GPUs have run some of those, whose
            layers share no KV caches, by model and kind.
        encoded_quantised_in_float16_on_gpus: those that GPUs have run in float16, too, by model.
        encoded_quantised_experts: those of them that models with heads of two sizes have had of experts, too.
        text_of: multimodal models that are served as text, with what else they take.
        text_models: types of the text models that have been run in multimodal ones which may have others, too.
        drafting_workers: numbers of workers above 1 that have drafted beside a prefix cache, by layers and device.
        drafters: methods of speculative decoding, with the devices.
        dflash: versions whose engines have had drafts of dflash, by device.
    """

    on_gpus: str
    on_two_nodes: str
    exact_models_on_gpus: tuple[str, ...]
    experts_on_cpus_alone: tuple[str, ...]
    experts_by_one_gpu: tuple[str, ...]
    with_encoder_alone: tuple[str, ...]
    text_by_one_worker: tuple[str, ...]
    encoded_in_bf16: tuple[str, ...]
    mtp_models: tuple[str, ...]
    dflash_targets: tuple[str, ...]
    dflash_targets_of_the_first_runner_on_gpus: tuple[str, ...]
    dflash_models: tuple[str, ...]
    encoders: tuple[str, ...]
    convolution_models: tuple[str, ...]
    delta_rule_models: tuple[str, ...]
    delta_rule_experts_on_gpus: tuple[str, ...]
    delta_rule_quantised_by_two_gpus: tuple[str, ...]
    activations_by_two_gpus: tuple[str, ...]
    expert_activations_by_two_gpus: tuple[str, ...]
    quantised_experts_draft_on_cpus_alone: tuple[str, ...]
    quantised_mtp_on_gpus: Mapping[str, tuple[str, ...]]
    quantised_drafts_on_cpus_alone: tuple[str, ...]
    large_head_quantised_by_one: tuple[str, ...]
    quantised_not_run_with: Mapping[str, Mapping[str, tuple[str, ...]]]
    fp8_kv_cache_of_states_on_gpus: Mapping[str, tuple[str, ...]]
    fp8_kv_cache_quantised_of_states_on_gpus: Mapping[str, tuple[str, ...]]
    encoded_data_by_one: Mapping[str, tuple[str, ...]]
    encoded_by_two_gpus: Mapping[str, tuple[str, ...]]
    mamba2_models: tuple[str, ...]
    kda_models: tuple[str, ...]
    lightning_models: tuple[str, ...]
    two_head_sizes: tuple[str, ...]
    large_heads_on_cpus_alone: tuple[str, ...]
    chunked_models: tuple[str, ...]
    chunk_image_dtypes_on_gpus: tuple[str, ...]
    latent_models: tuple[str, ...]
    latent_on_cpus_alone: tuple[str, ...]
    latent: Mapping[str, str]
    latent_workers: Mapping[str, tuple[int, ...]]
    latent_trees: Mapping[str, tuple[int, ...]]
    latent_drafters: Mapping[str, tuple[str, ...]]
    latent_quantised_by_two_gpus: tuple[str, ...]
    latent_quantised_drafted_on_gpus: tuple[str, ...]
    latent_quantised: Mapping[str, tuple[str, ...]]
    chunks: Mapping[str, str]
    chunk_workers: Mapping[str, tuple[int, ...]]
    chunk_trees: Mapping[str, tuple[int, ...]]
    chunk_quantised: Mapping[str, tuple[str, ...]]
    pooling: Mapping[str, str]
    quantised: Mapping[str, str]
    large_heads: Mapping[str, str]
    large_head_workers: Mapping[str, tuple[int, ...]]
    large_head_drafters: Mapping[str, tuple[str, ...]]
    large_head_quantised: Mapping[str, tuple[str, ...]]
    fp8_kv_cache: Mapping[str, str]
    fp8_kv_cache_scales: Mapping[str, tuple[str, ...]]
    fp8_kv_cache_head_workers: Mapping[str, tuple[int, ...]]
    fp8_kv_cache_beside: Mapping[str, tuple[str, ...]]
    fp8_kv_cache_quantised: Mapping[str, Mapping[str, tuple[str, ...]]]
    fp8_kv_cache_shared_on_gpus: tuple[str, ...]
    fp8_kv_cache_shared_with_scales_on_gpus: tuple[str, ...]
    short_convolutions: Mapping[str, str]
    short_convolution_quantised: Mapping[str, tuple[str, ...]]
    short_convolution_workers: Mapping[str, tuple[int, ...]]
    short_convolution_drafters: Mapping[str, tuple[str, ...]]
    drafts_beside_prefix_caches_on_gpus: Mapping[str, tuple[str, ...]]
    delta_rule_quantised_drafters_on_gpus: Mapping[str, tuple[str, ...]]
    delta_rules: Mapping[str, str]
    delta_rule_workers: Mapping[str, tuple[int, ...]]
    delta_rule_drafters: Mapping[str, tuple[str, ...]]
    delta_rule_quantised: Mapping[str, tuple[str, ...]]
    delta_rule_quantised_by_four: Mapping[str, tuple[str, ...]]
    mamba2: Mapping[str, str]
    mamba2_workers: Mapping[str, tuple[int, ...]]
    mamba2_drafters: Mapping[str, tuple[str, ...]]
    mamba2_expert_workers: Mapping[str, tuple[int, ...]]
    mamba2_quantised: Mapping[str, tuple[str, ...]]
    mamba2_quantised_experts: Mapping[str, tuple[str, ...]]
    kda: Mapping[str, str]
    kda_workers: Mapping[str, tuple[int, ...]]
    kda_drafters: Mapping[str, tuple[str, ...]]
    lightning: Mapping[str, str]
    lightning_workers: Mapping[str, tuple[int, ...]]
    kv_connectors: Mapping[str, Mapping[str, str]]
    heads_in_fp32: Mapping[str, str]
    lora: Mapping[str, str]
    lora_beside: Mapping[str, tuple[str, ...]]
    lora_beside_by_two: Mapping[str, tuple[str, ...]]
    lora_beside_more: Mapping[str, tuple[str, ...]]
    lora_beside_quantised: Mapping[str, Mapping[str, tuple[str, ...]]]
    lora_updates_beside: Mapping[str, tuple[str, ...]]
    lora_workers: Mapping[str, tuple[int, ...]]
    lora_expert_workers: Mapping[str, tuple[int, ...]]
    lora_drafters: Mapping[str, tuple[str, ...]]
    lora_experts: Mapping[str, tuple[str, ...]]
    lora_quantised: Mapping[str, tuple[str, ...]]
    lora_without_updates: tuple[str, ...]
    lora_expert_updates: tuple[str, ...]
    encoding: Mapping[str, str]
    encoded: Mapping[str, tuple[str, ...]]
    encoded_workers: Mapping[str, Mapping[str, tuple[int, ...]]]
    encoded_data_workers: Mapping[str, Mapping[str, tuple[int, ...]]]
    pruned_videos: Mapping[str, tuple[str, ...]]
    encoded_by_one: Mapping[str, tuple[str, ...]]
    encoded_quantised_workers: Mapping[str, Mapping[str, Mapping[str, tuple[str, ...]]]]
    encoded_quantised_beside_fp8_caches: Mapping[str, Mapping[str, Mapping[str, tuple[str, ...]]]]
    images_by_no_tree: tuple[str, ...]
    encoded_on_cpus_alone: Mapping[str, tuple[str, ...]]
    served_by: Mapping[str, str]
    encoded_quantised: Mapping[str, Mapping[str, tuple[str, ...]]]
    encoded_quantised_around_on_gpus: Mapping[str, Mapping[str, tuple[str, ...]]]
    encoded_quantised_in_float16_on_gpus: Mapping[str, tuple[str, ...]]
    encoded_quantised_experts: Mapping[str, Mapping[str, tuple[str, ...]]]
    text_of: Mapping[str, tuple[str, ...]]
    text_models: Mapping[str, tuple[str, ...]]
    drafting_workers: Mapping[str, Mapping[str, tuple[int, ...]]]
    drafters: Mapping[str, tuple[str, ...]]
    dflash: Mapping[str, str]
    encoded_drafters: Mapping[str, Mapping[str, tuple[str, ...]]]
    encoded_quantised_drafted: Mapping[str, Mapping[str, Mapping[str, tuple[str, ...]]]]
    encoded_quantised_drafted_in_fp8_alone_on_gpus: Mapping[str, tuple[str, ...]]
    encoded_drafters_beside_fp8_caches: Mapping[str, Mapping[str, tuple[str, ...]]]
    grammars_behind_thoughts: Mapping[str, str]


@cache
def ran() -> Ran:
    """Of what has run where."""

    def value(found: Any) -> Any:
        match found:
            case list():
                return tuple(found)
            case dict():
                return {name: value(inside) for name, inside in found.items()}
        return found

    return Ran(**{name: value(found) for name, found in table("ran").items()})
