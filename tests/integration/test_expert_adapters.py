"""What of adapters of mixtures of experts is served, by the names in their files, and how ours come to have them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("vllm.lora.layers.fused_moe")

from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA, LoRAMapping
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.utils import WeightsMapper

from tests.integration.test_adapters import Engine, wrapped
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.layers import lora, lora_cuda, lora_experts
from vllm_batch_invariant.integration.layers.experts import CpuExperts
from vllm_batch_invariant.integration.reviews import expert_adapters, patch_points
from vllm_batch_invariant.integration.reviews.expert_adapters import Layers

EXPERTS = 2
PER_EXPERT = tuple(
    f"mlp.experts.{number}.{name}" for number in range(EXPERTS) for name in ("gate_proj", "up_proj", "down_proj")
)
STACKED = ("mlp.experts", "mlp.experts.base_layer")


def written(folder: Path, *modules: str, suffix: str = "safetensors", layer: int = 1) -> str:
    """An adapter of rank 2 with weights of these modules of a layer: "A:", "B:" and "9:" in front of one stand for one
    side and another rank, and "own:" for a whole weight.
    """
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    tensors, file = {}, folder / f"adapter_model.{suffix}"
    for module in modules:
        how, _, name = module.rpartition(":")
        rank = (int(how) if how.isdigit() else 2) * (EXPERTS if name.endswith(STACKED) else 1)
        made = {"A": torch.zeros(rank, 1), "B": torch.zeros(1, rank)}
        for side in [how] if how in made else ["A", "B"]:
            weight = "weight" if how == "own" else f"lora_{side}.weight"
            tensors[f"base_model.model.model.layers.{layer}.{name}.{weight}"] = made[side]
    if suffix == "safetensors":
        save_file(tensors, file)
    else:
        torch.save(tensors, file)
    return str(folder)


def config_of(architecture: str = "Qwen3MoeForCausalLM", is_moe: bool = True, **of_lora: Any) -> Any:
    lora_config = {"target_modules": None, "enable_mixed_moe_lora_format": False, "max_lora_rank": 4} | of_lora
    text = SimpleNamespace(num_hidden_layers=3, mlp_only_layers=[0])
    model = SimpleNamespace(
        architecture=architecture,
        is_moe=is_moe,
        is_hybrid=architecture == "Lfm2ForCausalLM",
        is_multimodal_model=False,
        get_num_experts=lambda: EXPERTS,
        hf_text_config=text,
    )
    return SimpleNamespace(model_config=model, lora_config=SimpleNamespace(**lora_config))


ATTENTION = ("self_attn.q_proj", "self_attn.o_proj")
MIXED = {"enable_mixed_moe_lora_format": True}
CASES: dict[str, tuple[tuple[str, ...], Any, bool, str]] = {
    "attention": (ATTENTION, config_of(), False, ""),
    "all products of all experts": ((*ATTENTION, *PER_EXPERT), config_of(), False, ""),
    "a dense model's gate": (("mlp.gate",), config_of(is_moe=False), False, ""),
    "a router": ((*ATTENTION, "mlp.gate"), config_of(), False, "weights of the router model.layers.1.mlp.gate"),
    "gpt-oss's router": (("mlp.router",), config_of("GptOssForCausalLM"), False, "weights of the router"),
    "the gate of a shared expert": (("mlp.shared_expert_gate",), config_of(), False, "weights of the router"),
    "one product": (PER_EXPERT[::3], config_of(), False, "not all products"),
    "one expert": (PER_EXPERT[:3], config_of(), False, "of all 2 experts"),
    "experts that are left out": (PER_EXPERT, config_of(target_modules=["q_proj"]), False, "leaves out"),
    "experts that are not": (PER_EXPERT, config_of(target_modules=["experts"]), False, ""),
    "stacked ones of gpt-oss": (STACKED, config_of("GptOssForCausalLM"), False, ""),
    "apart ones of gpt-oss": (PER_EXPERT, config_of("GptOssForCausalLM"), False, "those of this model are stacked"),
    "stacked ones": (STACKED, config_of(), False, "its experts are stacked"),
    "stacked ones that nobody said": (STACKED, config_of(**MIXED), False, "its experts are stacked"),
    "stacked ones of an engine without": (STACKED, config_of(), True, "its experts are stacked"),
    "stacked ones that were said": (STACKED, config_of(**MIXED), True, ""),
    "experts of one layer that are not": (
        PER_EXPERT,
        config_of(target_modules=["model.layers.1.mlp.experts", "mlp.experts.0.up_proj"]),
        False,
        "leaves out",
    ),
    "names of another model": (
        tuple(name.replace("mlp", "block_sparse_moe") for name in PER_EXPERT),
        config_of(),
        False,
        "experts of model.layers.1.block_sparse_moe, and those of this model are in mlp",
    ),
    "Mixtral's by Transformers' names": (
        PER_EXPERT,
        config_of("MixtralForCausalLM"),
        False,
        "experts of model.layers.1.mlp, and those of this model are in block_sparse_moe",
    ),
    "other products": (
        tuple(name.replace("gate_proj", "w1") for name in PER_EXPERT),
        config_of(),
        False,
        "not all products (gate_proj, up_proj, down_proj)",
    ),
    "experts of several ranks": (
        (*PER_EXPERT[:3], *(f"3:{one}" for one in PER_EXPERT[3:])),
        config_of(),
        False,
        "ranks 2, 3",
    ),
    "a convolution's": (("conv.conv",), config_of(is_moe=False), False, "conv.conv, which vLLM leaves out"),
    "a gate alone": (("linear_attn.in_proj_z",), config_of(is_moe=False), False, "in_proj_z and not of in_proj_qkv"),
    "no gate": (("linear_attn.in_proj_qkv",), config_of(is_moe=False), False, ""),
    "an embedding": (("embed_tokens",), config_of(is_moe=False), False, ""),
    "an embedding's beside states": (
        ("embed_tokens",),
        config_of("Lfm2ForCausalLM", is_moe=False),
        False,
        "embed_tokens, which have not been run beside states",
    ),
    "too high a rank": (("5:self_attn.q_proj",), config_of(is_moe=False), False, "rank 5, above --max-lora-rank 4"),
    "one matrix": (("B:self_attn.q_proj",), config_of(is_moe=False), False, "one of the two matrices"),
    "a whole weight": (("own:self_attn.q_proj",), config_of(is_moe=False), False, "no weight of a LoRA adapter"),
    "one stacked product": (STACKED[:1], config_of("GptOssForCausalLM"), False, "first or the second product"),
}


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize(("modules", "config", "is_stacked", "said"), CASES.values(), ids=CASES)
def test_what_is_served_follows_from_names(
    modules: tuple[str, ...], config: Any, is_stacked: bool, said: str, suffix: str, tmp_path: Path
) -> None:
    found = expert_adapters.problem_of(written(tmp_path, *modules, suffix=suffix), is_stacked, config)
    assert (said in found) if said else not found


def test_weights_are_refused_for_which_no_layer_of_the_engine_has_the_name(tmp_path: Path) -> None:
    """Which vLLM leaves out without a word."""
    of_text = WeightsMapper(orig_to_new_prefix={"model.language_model.": "language_model.model."})
    layer = "language_model.model.layers.1.mlp.up_proj"
    seeing, plain = (
        Layers(frozenset([layer]), of_text),
        Layers(frozenset([layer.removeprefix("language_model.")]), None),
    )
    names = {
        "model.language_model.layers.1.mlp.up_proj": seeing,
        "model.layers.1.mlp.up_proj": plain,
        "model.visual.blocks.0.attn.qkv": seeing,
        "model.layers.1.mlp.up_proj ": seeing,
        "model.layers.9.mlp.up_proj": plain,
        "model.language_model.layers.1.mlp.up_proj ": plain,
        "lm_head": seeing,
    }
    found = {}
    for name, layers in names.items():
        tensors = {f"base_model.model.{name.strip()}.lora_{side}.weight": torch.zeros(2, 2) for side in "AB"}
        save_file(tensors, Path(written(tmp_path / name)) / "adapter_model.safetensors")
        found[name] = expert_adapters.problem_of(str(tmp_path / name), False, config_of(is_moe=False), layers)
    served, refused = [*found.values()][:2], [*found.items()][2:]
    assert served == ["", ""]
    assert [name for name, said in refused if f"{name.strip()}, which vLLM leaves out" not in said] == []


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = Path(written(tmp_path, *ATTENTION)) / "adapter_model.safetensors"
    file.write_bytes(b"\x02\0\0\0\0\0\0\0{,")
    assert "its tensors cannot be read" in expert_adapters.problem_of(str(tmp_path), False, config_of())


def test_experts_of_a_layer_without_are_refused(tmp_path: Path) -> None:
    found = expert_adapters.problem_of(written(tmp_path, *PER_EXPERT, layer=0), False, config_of())
    assert "experts of model.layers.0.mlp" in found


def test_an_engine_refuses_a_request_and_a_load_of_such_an_adapter(tmp_path: Path) -> None:
    core, path = Engine(), written(tmp_path, "mlp.gate")
    core.vllm_config = config_of()
    adapter = LoRARequest("name", 1, path)
    request = SimpleNamespace(lora_request=adapter, cache_salt=None, request_id="request", client_index=0)
    with pytest.raises(ValueError, match="adapter name is not served: it has weights of the router"):
        core.preprocess_add_request(request)
    with pytest.raises(NotCovered, match="weights of the router"):
        core.add_lora(adapter)
    assert core.loaded == []
    written(tmp_path, *ATTENTION)
    assert core.add_lora(adapter)
    core.preprocess_add_request(request)


class Experts(CpuExperts, patch_points.EXPERTS_METHOD.get()):  # type: ignore[misc] - vLLM's is not typed
    def __init__(self) -> None:
        torch.nn.Module.__init__(self)


def runner(method: torch.nn.Module, use_ep: bool = False) -> torch.nn.Module:
    """As vLLM's of two gated experts."""
    made = torch.nn.Module()
    made.layer_name, made._shared_experts = "model.layers.1.mlp.experts", None
    parallel = SimpleNamespace(use_ep=use_ep, tp_size=1, tp_rank=0)
    made.moe_config = SimpleNamespace(
        moe_parallel_config=parallel, is_act_and_mul=True, num_local_experts=EXPERTS, num_experts=EXPERTS,
        hidden_dim=8, intermediate_size_per_partition=4, experts_per_token=1,
    )  # fmt: skip
    made.routed_experts = torch.nn.Module()
    made.routed_experts.w2_weight = torch.nn.Parameter(torch.zeros(EXPERTS, 8, 4))
    made.routed_experts.quant_method = method
    return made


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__init__", "set_mapping"):
        monkeypatch.setattr(FusedMoEWithLoRA, name, getattr(FusedMoEWithLoRA, name))
    lora_experts.install()


SETTINGS = SimpleNamespace(
    max_loras=3,
    max_lora_rank=4,
    lora_dtype=torch.float32,
    fully_sharded_loras=False,
    enable_moe_shared_loras=False,
)


def around(layer: type[Any] = FusedMoEWithLoRA) -> tuple[Any, Experts]:
    method = Experts()
    made = layer(runner(method))
    made.create_lora_weights(3, SETTINGS, SimpleNamespace(architectures=["Qwen3MoeForCausalLM"]))
    return made, method


@pytest.mark.parametrize(("layer", "slices"), [(FusedMoEWithLoRA, (4, 4)), (FusedMoE3DWithLoRA, (8,))])
def test_ours_get_the_adapters_of_a_step(layer: type[Any], slices: tuple[int, ...]) -> None:
    made, method = around(layer)
    assert method.adapters is None
    wrapper = wrapped(lora.Adapters)
    made.set_mapping(wrapper)
    assert made.punica_wrapper is wrapper
    found = method.adapters()
    assert found.slots.tolist()[:4] == [0, -1, 2, 2]
    assert tuple(one.shape[2] for one in found.gate_up[1]) == slices
    found.check(4, EXPERTS, 8, 4, 8)
    with method.without_adapters():
        assert method.adapters is None
    assert method.adapters is not None
    wrapper.update_metadata(LoRAMapping((0, 0), (0, 0), is_prefill=True), [None] * 3, 4, 100)
    assert method.adapters() is None
    assert made.base_layer.routed_experts.quant_method is method


def test_an_adapter_of_a_slot_goes_to_its_experts() -> None:
    made, method = around()
    made.set_mapping(wrapped(lora.Adapters))
    a = [torch.full((EXPERTS, 2, k), value) for value, k in ((1.0, 8), (2.0, 4), (3.0, 8))]
    b = [torch.full((EXPERTS, n, 2), value) for value, n in ((4.0, 4), (5.0, 8), (6.0, 4))]
    made.set_lora(2, a, b)
    found = method.adapters()
    for slices, expected in (
        (found.gate_up[0], (1, 3)),
        (found.gate_up[1], (4, 6)),
        (found.down[0], (2,)),
        (found.down[1], (5,)),
    ):
        assert [one[2].max().item() for one in slices] == [*expected]
        assert not any(one[:2].any() for one in slices)
    assert found.gate_up[0][0][2, :, 2:].abs().max() == 0


def test_receipts_name_both_products_of_experts() -> None:
    made, _ = around()
    assert [of.k for of in lora.reductions(made, torch.float32).values()] == [4, 8]


def test_other_experts_are_refused() -> None:
    with pytest.raises(NotCovered, match="computed by Identity"):
        FusedMoEWithLoRA(runner(torch.nn.Identity()))
    with pytest.raises(NotCovered, match="expert parallelism"):
        FusedMoEWithLoRA(runner(Experts(), use_ep=True))


def test_kernels_of_both_products_are_compared_before_a_gpu_serves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    grouped: list[Any] = []

    def empty(*of: Any) -> Any:
        grouped.append(of)
        return SimpleNamespace(set=lambda slots: None)

    module = SimpleNamespace(RowGroups=SimpleNamespace(empty=empty), certify=lambda *of: compared.append(of))
    monkeypatch.setattr(lora_cuda, "module_for", lambda *_: module)
    lora_cuda._certify.cache_clear()
    lora_cuda._compile_grouping.cache_clear()
    made, method = around()
    wrapper = lora_cuda.GpuAdapters(6, 8, torch.device("cpu"), lora_config=SETTINGS)
    made.set_mapping(wrapper)
    assert method.adapters() is None
    wrapper.update_metadata(LoRAMapping((7, 9), (7, 9), is_prefill=True), [7, None, 9], 4, 100)
    for _ in range(2):
        assert method.adapters() is not None
    assert [one[:3] for one in compared] == [(8, (4, 4), 4), (4, (8,), 4)]
    assert [one[:2] for one in grouped] == [(6, 3), (6, 3 * EXPERTS)]
