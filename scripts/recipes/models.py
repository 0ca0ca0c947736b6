"""The checkpoints of the recipes: the class that vLLM serves each with, its sizes, and the form of its weights.

Written down from knowledge of the published checkpoints, from what recipes say of them and from the configuration that
Transformers has for a model where nobody gives another, not fetched: no checkpoint was loaded. Sizes are there as far
as the start-up check asks for them. A checkpoint that is not here is unknown, and so is one whose form is
:data:`UNKNOWN`: nothing is guessed.
"""

from dataclasses import dataclass, replace
from typing import Any

from ..trainers.kinds import (
    EXPERTS,
    MAMBA,
    MLA,
    Model,
    deepseek_v3,
    dense,
    nemotron_h,
    qwen2_5_vl,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_vl,
)
from ..trainers.models import MODELS

UNKNOWN = "unknown"
"""The form of weights that are quantised in a way which nobody here knows."""


def _compressed(weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    """``quantization_config`` of compressed-tensors, of linear layers in one form."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False} | weights}
    if activations:
        group["input_activations"] = {"symmetric": True} | activations
    return {"quant_method": "compressed-tensors", "ignore": ["lm_head"], "config_groups": {"group_0": group}}


def _modelopt(algorithm: str, cached: bool = True, **more: Any) -> dict[str, Any]:
    """The same of ModelOpt, with scales for a KV cache in FP8 or without."""
    cache = {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}} if cached else {}
    of = {"quant_method": "modelopt", "quant_algo": algorithm, "producer": {"name": "modelopt", "version": "0.37.0"}}
    return {**of, "ignore": ["lm_head"], "group_size": 16, **cache, **more}


_FLOAT8, _INT8 = {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "int"}
_FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_TOKEN = {"dynamic": True, "strategy": "token"}
_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_NVFP4 = _compressed(_FLOAT4, _FLOAT4 | {"dynamic": "local"})
_FP8_BLOCKS = _compressed(
    _FLOAT8 | {"strategy": "block", "block_structure": [128, 128]},
    _FLOAT8 | {"dynamic": True, "strategy": "group", "group_size": 128},
)
_LAYER = "model.layers.0"
FORMS: dict[str, dict[str, Any]] = {
    "FP8 by blocks": _BLOCKS,
    "FP8 by blocks, scales of powers of two": _BLOCKS | {"scale_fmt": "ue8m0"},
    "FP8 by blocks, compressed-tensors": _FP8_BLOCKS,
    "FP8 by rows, compressed-tensors": _compressed(_FLOAT8 | {"strategy": "channel"}, _FLOAT8 | _TOKEN),
    "FP8 with given scales": {"quant_method": "fp8", "activation_scheme": "static"},
    "FP8, ModelOpt": _modelopt("FP8"),
    "NVFP4, ModelOpt": _modelopt("NVFP4"),
    "NVFP4 beside FP8, ModelOpt": _modelopt(
        "MIXED_PRECISION",
        quantized_layers={
            f"{_LAYER}.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
            f"{_LAYER}.self_attn.o_proj": {"quant_algo": "FP8"},
        },
    ),
    "NVFP4, compressed-tensors": _NVFP4,
    "NVFP4 of experts beside FP8 by blocks, compressed-tensors": _NVFP4 | {
        "config_groups": {
            "group_0": _NVFP4["config_groups"]["group_0"] | {"targets": ["re:.*experts.*"]},
            "group_1": _FP8_BLOCKS["config_groups"]["group_0"] | {"targets": ["re:.*self_attn.*"]},
        }
    },
    "INT8 with activations, compressed-tensors": _compressed(_INT8 | {"strategy": "channel"}, _INT8 | _TOKEN),
    "INT4 by groups of 32, compressed-tensors": _compressed(
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    ),
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "GPTQ": {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "lm_head": False,
        "dynamic": {"-:.*attn.*": {}, "-:.*shared_expert.*": {}, "-:.*mtp.*": {}, "-:.*visual.*": {}},
    },
    "MXFP4 of experts": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
}  # fmt: skip
"""By a name in words: what ``config.json`` says of a checkpoint's weights."""

_ROWS, _CT_NVFP4, _NV, _NV8 = (
    "FP8 by rows, compressed-tensors", "NVFP4, compressed-tensors", "NVFP4, ModelOpt", "FP8, ModelOpt"
)  # fmt: skip
_W8A8, _B, _MIXED = "INT8 with activations, compressed-tensors", "FP8 by blocks", "NVFP4 beside FP8, ModelOpt"
_POWERS, _GROUPS = "FP8 by blocks, scales of powers of two", "INT4 by groups of 32, compressed-tensors"


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint.

    Attributes:
        architecture: vLLM's name of its class.
        form: a key of :data:`FORMS`; empty if its weights are not quantised.
        model: its kind; None if the form is unknown.
    """

    architecture: str
    form: str
    model: Model | None


def _gemma4(*sizes: int, sounds: bool = False, kind: str = "gemma4", **more: Any) -> Model:
    """Windows in five of six layers, heads of 256 and 512, and encoders of images and, of some, of sounds."""
    usual = {"head_dim": 256, "global_head_dim": 512, "vocab_size": 262144, "max_position_embeddings": 131072}
    text = dense(
        "", f"{kind}_text", *sizes, **usual | {"use_bidirectional_attention": None if sounds else "vision"} | more
    )
    name = {"gemma4": "Gemma4", "gemma4_unified": "Gemma4Unified"}[kind]
    config = {"model_type": kind, "text_config": text.config, "vision_config": {}}
    return Model(f"{name}ForConditionalGeneration", config | ({"audio_config": {}} if sounds else {}))


def _gemma3(*sizes: int, head_dim: int) -> Model:
    text = dense("", "gemma3_text", *sizes, head_dim=head_dim, vocab_size=262208, sliding_window=1024)
    vision = {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_attention_heads": 16}
    config = {"model_type": "gemma3", "text_config": text.config, "vision_config": vision | {"num_hidden_layers": 1}}
    return Model("Gemma3ForConditionalGeneration", config | {"mm_tokens_per_image": 256})


def _lfm2(name: str, hidden: int, heads: int, attention: tuple[int, ...], layers: int, **more: Any) -> Model:
    """Short convolutions but in some layers; dense ("Lfm2"), or with experts ("Lfm2Moe")."""
    kind = {"Lfm2": "lfm2", "Lfm2Moe": "lfm2_moe"}[name]
    types = ["full_attention" if number in attention else "conv" for number in range(layers)]
    sizes = {"layer_types": types, "vocab_size": 65536, "max_position_embeddings": 128000, "conv_L_cache": 3}
    return dense(f"{name}ForCausalLM", kind, hidden, heads, 8, layers, **sizes, **more)


def _llama(*sizes: int, **more: Any) -> Model:
    return dense(
        "LlamaForCausalLM", "llama", *sizes, **{"vocab_size": 128256, "max_position_embeddings": 131072} | more
    )


def _phi3(*sizes: int, **more: Any) -> Model:
    return dense("Phi3ForCausalLM", "phi3", *sizes, **{"pad_token_id": 0, "vocab_size": 100352} | more)


def _glm4_moe(*sizes: int) -> Model:
    return dense(
        "Glm4MoeForCausalLM", "glm4_moe", *sizes, head_dim=128, n_routed_experts=160, num_experts_per_tok=8,
        moe_intermediate_size=1536, n_shared_experts=1, first_k_dense_replace=3, max_position_embeddings=131072,
        num_nextn_predict_layers=1,
    )  # fmt: skip


def _lfm2_vl(text: Model) -> Model:
    parts = {"text_config": text.config | {"architectures": [text.architecture]}}
    parts["vision_config"] = {"model_type": "siglip2_vision_model", "vision_use_head": False}
    return Model("Lfm2VlForConditionalGeneration", {"model_type": "lfm2_vl", **parts})


def _nemotron_vl(architecture: str, text: Model, **more: Any) -> Model:
    parts = {"text_config": text.config | {"architectures": [text.architecture]}, "vision_config": {"args": {}}}
    return _with_own_parts(architecture, "NemotronH_Nano_VL_V2", **parts, **more)


def _with_own_parts(architecture: str, kind: str, **more: Any) -> Model:
    """Of parts, whose checkpoint brings the class of its configuration."""
    return Model(architecture, {"model_type": kind, "auto_map": {"AutoConfig": "configuration_own.Own"}, **more})


def _of_transformers(architecture: str, kind: str, **more: Any) -> Model:
    """Of the sizes that Transformers has for a model where its file says nothing."""
    return Model(architecture, {"model_type": kind, **more})


def _ministral(hidden: int, layers: int, inner: int) -> Model:
    """In Mistral's own form, which does not name the class: images make it Pixtral's."""
    text = {
        "dim": hidden, "n_layers": layers, "head_dim": 128, "hidden_dim": inner, "n_heads": 32, "n_kv_heads": 8,
        "vocab_size": 131072, "norm_eps": 1e-5, "rope_theta": 1e9, "max_position_embeddings": 262144,
        "yarn": {
            "original_max_position_embeddings": 16384, "factor": 16, "beta": 32, "alpha": 1, "apply_scale": False
        },
        "llama_4_scaling": {"original_max_position_embeddings": 16384, "beta": 0.1},
    }  # fmt: skip
    vision = {
        "hidden_size": 1024, "num_channels": 3, "image_size": 1540, "patch_size": 14, "intermediate_size": 4096,
        "num_hidden_layers": 24, "num_attention_heads": 16, "rope_theta": 10000.0, "image_token_id": 10,
        "adapter_bias": False, "spatial_merge_size": 2, "mm_projector_id": "patch_merge",
        "add_pre_mm_projector_layer_norm": True,
    }  # fmt: skip
    return Model("PixtralForConditionalGeneration", text | {"vision_encoder": vision}, "params.json")


def _with_own_class(architecture: str, kind: str, *sizes: int, **more: Any) -> Model:
    """Of a checkpoint that brings the class of its configuration."""
    return dense(architecture, kind, *sizes, auto_map={"AutoConfig": "configuration_own.Own"}, **more)


_LING = {
    "head_dim": 128, "layer_group_size": 8, "q_lora_rank": 1536, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024, "num_shared_experts": 1, "n_group": 8, "topk_group": 4, "group_norm_size": 4,
    "rms_norm_eps": 1e-6, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
    **{name: MLA[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
}  # fmt: skip
_MTP_OF_QWEN = {"mtp_num_hidden_layers": 1}
_QWEN3_5 = {
    "0.8B": qwen3_5(1024, 8, 2, 24, **_MTP_OF_QWEN),
    "2B": qwen3_5(2048, 8, 2, 24, **_MTP_OF_QWEN),
    "4B": qwen3_5(2560, 16, 4, 32, **_MTP_OF_QWEN),
    "9B": qwen3_5(4096, 16, 4, 32, **_MTP_OF_QWEN),
    "27B": qwen3_5(5120, 24, 4, 64, **_MTP_OF_QWEN),
    "35B-A3B": qwen3_5(2048, 16, 2, 40, **EXPERTS, **_MTP_OF_QWEN),
    "122B-A10B": qwen3_5(3072, 32, 2, 48, **EXPERTS, **_MTP_OF_QWEN),
    "397B-A17B": qwen3_5(4096, 32, 2, 60, **EXPERTS | {"num_experts": 512}, **_MTP_OF_QWEN),
}
_QWEN3_235B = MODELS["Qwen/Qwen3-235B-A22B-Instruct-2507"]
_QWEN3_NEXT = dense(
    "Qwen3NextForCausalLM", "qwen3_next", 2048, 16, 2, 48, head_dim=256, num_experts=512, num_experts_per_tok=10,
    moe_intermediate_size=512, shared_expert_intermediate_size=512, max_position_embeddings=262144,
    num_nextn_predict_layers=1,
)  # fmt: skip
_MINIMAX_M2 = dense(
    "MiniMaxM2ForCausalLM", "minimax_m2", 3072, 48, 8, 62, head_dim=128, num_local_experts=256, num_experts_per_tok=8,
    intermediate_size=1536, vocab_size=200064, max_position_embeddings=196608, use_qk_norm=True, rotary_dim=64,
)  # fmt: skip
_NANO_9B = nemotron_h(
    "M-M*", 4480, 40, 8, **MAMBA | {"mamba_num_heads": 128, "mamba_head_dim": 80}
)  # fmt: skip
_LLAMA_8B, _LLAMA_1B, _LLAMA_3B = _llama(4096, 32, 8, 32), _llama(2048, 32, 8, 16), _llama(3072, 24, 8, 28)
_LLAMA_4 = _of_transformers("Llama4ForConditionalGeneration", "llama4", text_config={}, vision_config={})
_PHI_4_MINI = _phi3(
    3072, 24, 8, 32, vocab_size=200064, partial_rotary_factor=0.75, max_position_embeddings=131072,
    original_max_position_embeddings=4096,
    rope_scaling={"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48},
)  # fmt: skip
_DEEPSEEK = {"q_lora_rank": 1536, "n_routed_experts": 256, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1}
_DEEPSEEK |= {"max_position_embeddings": 163840, "moe_intermediate_size": 2048, "n_shared_experts": 1}
_V3 = deepseek_v3(7168, 128, 128, 61, **_DEEPSEEK)
_SPARSE = {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
_V32 = dense("DeepseekV32ForCausalLM", "deepseek_v32", 7168, 128, 128, 61, **MLA | _DEEPSEEK | _SPARSE)
_K2 = deepseek_v3(7168, 64, 64, 61, **_DEEPSEEK | {"n_routed_experts": 384})
_GLM_5 = _of_transformers("GlmMoeDsaForCausalLM", "glm_moe_dsa", num_nextn_predict_layers=1)
_GLM_4_5, _GLM_4_5V = (
    _glm4_moe(5120, 96, 8, 92),
    Model(
        "Glm4vMoeForConditionalGeneration",
        {
            "model_type": "glm4v_moe",
            "text_config": dense(
                "",
                "glm4v_moe_text",
                4096,
                96,
                8,
                46,
                head_dim=128,
                n_routed_experts=128,
                num_experts_per_tok=8,
                moe_intermediate_size=1408,
                n_shared_experts=1,
                max_position_embeddings=65536,
            ).config,
            "vision_config": {"depth": 1, "hidden_size": 64, "num_heads": 2, "out_hidden_size": 4096},
        },
    ),
)
_GPT_OSS = {"head_dim": 64, "vocab_size": 201088, "num_experts_per_tok": 4, "intermediate_size": 2880}
_GPT_OSS |= {"max_position_embeddings": 131072, "sliding_window": 128}
_LAGUNA = "LagunaForCausalLM", "laguna"
_HY3 = _of_transformers("HYV3ForCausalLM", "hy_v3", num_nextn_predict_layers=1)
_STEP_3_5 = dense(
    "Step3p5ForCausalLM", "step3p5", 4096, 64, 8, 45, num_attention_groups=8, head_dim=128, moe_num_experts=288,
    moe_top_k=8, moe_intermediate_size=1280, share_expert_dim=1280, max_seq_len=262144,
    moe_layers_enum=",".join(map(str, range(3, 45))), vocab_size=128896, max_position_embeddings=262144,
    num_nextn_predict_layers=3,
)  # fmt: skip
_MELLUM = _of_transformers("MellumForCausalLM", "mellum")
_V4 = _of_transformers(
    "DeepseekV4ForCausalLM", "deepseek_v4", expert_dtype="fp4", num_nextn_predict_layers=1,
    hidden_size=4096, num_attention_heads=64, num_key_value_heads=1, head_dim=512, num_hidden_layers=43,
    n_routed_experts=256, num_experts_per_tok=6, moe_intermediate_size=2048, n_shared_experts=1, vocab_size=129280,
    qk_rope_head_dim=64, q_lora_rank=1024, sliding_window=128, index_topk=512, index_n_heads=64, index_head_dim=128,
    compress_ratios=[0, 0, 4, 128],
)  # fmt: skip

_QWEN_35B = MODELS["Qwen/Qwen3.5-35B-A3B"]

PUBLISHED: tuple[tuple[Model, dict[str, str]], ...] = (
    (_gemma4(3840, 16, 8, 48, sounds=True, kind="gemma4_unified", attention_k_eq_v=True,
             num_global_key_value_heads=1, sliding_window=1024),
     {"google/gemma-4-12B-it": "", "google/gemma-4-12B-it-qat-w4a16-ct": _GROUPS}),
    (_gemma4(2816, 16, 8, 30, attention_k_eq_v=True, num_global_key_value_heads=2, sliding_window=1024,
             enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
             hidden_size_per_layer_input=0),
     {"google/gemma-4-26B-A4B-it": "", "RedHatAI/gemma-4-26B-A4B-it-FP8-dynamic": _ROWS,
      "RedHatAI/gemma-4-26B-A4B-it-NVFP4": _CT_NVFP4, "nvidia/Gemma-4-26B-A4B-NVFP4": _NV}),
    (_gemma4(5376, 32, 16, 60, attention_k_eq_v=True, num_global_key_value_heads=4, sliding_window=1024,
             hidden_size_per_layer_input=0),
     {"google/gemma-4-31B-it": "", "RedHatAI/gemma-4-31B-it-FP8-dynamic": _ROWS, "nvidia/gemma-4-31B-it-NVFP4": _NV,
      "google/gemma-4-31B-it-qat-w4a16-ct": _GROUPS}),
    (_gemma4(1536, 8, 1, 35, sounds=True, num_kv_shared_layers=20, use_double_wide_mlp=True),
     {"google/gemma-4-E2B-it": "", "RedHatAI/gemma-4-E2B-it-FP8-dynamic": _ROWS,
      "google/gemma-4-E2B-it-qat-w4a16-ct": _GROUPS, "google/gemma-4-E2B-it-qat-mobile-ct": UNKNOWN}),
    (_gemma4(2560, 8, 2, 42, sounds=True, num_kv_shared_layers=18),
     {"google/gemma-4-E4B-it": "", "RedHatAI/gemma-4-E4B-it-FP8-dynamic": _ROWS,
      "google/gemma-4-E4B-it-qat-w4a16-ct": _GROUPS, "google/gemma-4-E4B-it-qat-mobile-ct": UNKNOWN}),
    (_gemma3(5376, 32, 16, 62, head_dim=128),
     {"google/translategemma-27b-it": "", "Infomaniak-AI/vllm-translategemma-27b-it": ""}),
    (_gemma3(2560, 8, 4, 34, head_dim=256), {"google/translategemma-4b-it": ""}),
    (_MELLUM, {"JetBrains/Mellum2-12B-A2.5B-Instruct": "", "JetBrains/Mellum2-12B-A2.5B-Thinking": ""}),
    (_lfm2_vl(_lfm2("Lfm2", 2048, 32, (2, 5, 8, 10, 12, 14), 16)), {"LiquidAI/LFM2.5-VL-1.6B": ""}),
    (_lfm2_vl(_lfm2("Lfm2", 1024, 16, (2, 5, 8, 10, 12, 14), 16)), {"LiquidAI/LFM2.5-VL-450M": ""}),
    (_of_transformers("PaddleOCRVLForConditionalGeneration", "paddleocr_vl", vision_config={},
                      rope_scaling={"rope_type": "default", "mrope_section": [16, 24, 24]}),
     {f"PaddlePaddle/PaddleOCR-VL{of}": "" for of in ("", "-1.5", "-1.6")}),
    (_of_transformers("GlmOcrForConditionalGeneration", "glm_ocr", text_config={"num_nextn_predict_layers": 1},
                      vision_config={}),
     {"zai-org/GLM-OCR": ""}),
    (_of_transformers("MuseGlimmerForConditionalGeneration", "muse_glimmer", text_config={}, vision_config={}),
     {"meta-models/Muse-Glimmer-30B": "", "RedHatAI/Muse-Glimmer-30B-FP8-block": "FP8 by blocks, compressed-tensors",
      "Inferact/Muse-Glimmer-30B-NVFP4-W4A4": UNKNOWN}),
    (_nemotron_vl("NemotronH_Nano_VL_V2", nemotron_h(
        "M-M*", 5120, 40, 8, **MAMBA | {"mamba_num_heads": 128, "mamba_head_dim": 80})),
     {"nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL-BF16": "", "nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL-FP8": _NV8,
      "nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL-NVFP4-QAD": UNKNOWN}),
    (_nemotron_vl("NemotronH_Nano_Omni_Reasoning_V3", MODELS["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"], sound_config={}),
     {"nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16": "",
      "nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-FP8": _NV8,
      "nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-NVFP4": UNKNOWN}),
    (_with_own_parts("InternVLChatModel", "internvl_chat", llm_config=qwen3(4096, 32, 8, 36).config, vision_config={
        "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24, "image_size": 448, "patch_size": 14}),
     {"OpenGVLab/InternVL3_5-8B": ""}),
    (_with_own_parts("InternS2PreviewForConditionalGeneration", "intern_s2_preview", **{
        name: value for name, value in _QWEN_35B.config.items() if name != "model_type"}),
     {"internlm/Intern-S2-Preview": "", "internlm/Intern-S2-Preview-FP8": UNKNOWN}),
    (_lfm2("Lfm2", 2048, 32, (2, 5, 8, 10, 12, 14), 16),
     {f"LiquidAI/LFM2.5-1.2B-{name}": "" for name in ("Base", "Instruct", "JP-202606", "JP", "Thinking")}),
    (_lfm2("Lfm2", 1024, 16, (2, 5, 8, 10, 12, 14), 16), {"LiquidAI/LFM2.5-350M": ""}),
    (_lfm2("Lfm2", 1024, 16, (2, 4, 6, 8, 10, 12), 14), {"LiquidAI/LFM2.5-230M": ""}),
    (_lfm2("Lfm2Moe", 2048, 32, (2, 6, 10, 14, 18, 21), 24, num_experts=32,
           num_experts_per_tok=4, moe_intermediate_size=1792, num_dense_layers=2), {"LiquidAI/LFM2.5-8B-A1B": ""}),
    (_MINIMAX_M2, {**{f"MiniMaxAI/MiniMax-{name}": _B for name in ("M2", "M2.1", "M2.5", "M2.7")},
                   "nvidia/MiniMax-M2.5-NVFP4": _NV, "nvidia/MiniMax-M2.7-NVFP4": _NV,
                   "RedHatAI/MiniMax-M2-NVFP4": _CT_NVFP4}),
    (MODELS["Qwen/Qwen2.5-32B"], {"Qwen/Qwen2.5-32B": ""}),
    (qwen2_5_vl(8192, 64, 8, 80),
     {"Qwen/Qwen2.5-VL-72B-Instruct": "", "Qwen/Qwen2.5-VL-72B-Instruct-AWQ": "AWQ"}),
    (MODELS["Qwen/Qwen2.5-VL-7B-Instruct"],
     {"Qwen/Qwen2.5-VL-7B-Instruct": "", "Qwen/Qwen2.5-VL-7B-Instruct-AWQ": "AWQ"}),
    (MODELS["Qwen/Qwen3-1.7B"], {"Qwen/Qwen3-1.7B": ""}),
    (MODELS["Qwen/Qwen3-4B"], {"Qwen/Qwen3-4B": "", "Qwen/Qwen3-4B-FP8": _B, "Qwen/Qwen3Guard-Gen-4B": ""}),
    (MODELS["Qwen/Qwen3-8B"], {"Qwen/Qwen3-8B": "", "Qwen/Qwen3Guard-Gen-8B": ""}),
    (MODELS["Qwen/Qwen3-0.6B"], {"Qwen/Qwen3Guard-Gen-0.6B": ""}),
    (qwen3(5120, 64, 8, 64), {"Qwen/Qwen3-32B": "", "Qwen/Qwen3-32B-FP8": _B, "Qwen/Qwen3-32B-AWQ": "AWQ"}),
    (MODELS["Qwen/Qwen3-30B-A3B"], {"Qwen/Qwen3-30B-A3B": ""}),
    (_QWEN3_235B, {"Qwen/Qwen3-235B-A22B-Instruct-2507": "", "Qwen/Qwen3-235B-A22B-FP8": _B,
                   "nvidia/Qwen3-235B-A22B-Instruct-2507-NVFP4": _NV}),
    (qwen3_vl(_QWEN3_235B, "Moe"),
     {"Qwen/Qwen3-VL-235B-A22B-Instruct": "", "Qwen/Qwen3-VL-235B-A22B-Instruct-FP8": _B,
      "nvidia/Qwen3-VL-235B-A22B-Instruct-NVFP4": _NV}),
    (qwen3_moe(6144, 96, 8, 62, num_experts=160, moe_intermediate_size=2560, max_position_embeddings=262144),
     {"Qwen/Qwen3-Coder-480B-A35B-Instruct": "", "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8": _B,
      "nvidia/Qwen3-Coder-480B-A35B-Instruct-NVFP4": _NV}),
    (_QWEN3_NEXT, {"Qwen/Qwen3-Next-80B-A3B-Instruct": "", "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8": _B,
                   "nvidia/Qwen3-Next-80B-A3B-Instruct-NVFP4": _NV}),
    *((_QWEN3_5[size], {f"Qwen/Qwen3.5-{size}": ""}) for size in ("0.8B", "2B", "4B", "9B")),
    (_QWEN3_5["27B"], {
        "Qwen/Qwen3.5-27B": "", "Qwen/Qwen3.5-27B-FP8": _B, "Qwen/Qwen3.5-27B-GPTQ-Int4": "GPTQ",
        "Qwen/Qwen3.6-27B": "", "Qwen/Qwen3.6-27B-FP8": _B, "nvidia/Qwen3.6-27B-NVFP4": _MIXED,
        "Qwen/Qwen3.8-27B": "", "Qwen/Qwen3.8-27B-FP8": _B, "Inferact/Qwen3.8-27B-NVFP4": _NV,
    }),
    (_QWEN3_5["35B-A3B"], {
        "Qwen/Qwen3.5-35B-A3B": "", "Qwen/Qwen3.5-35B-A3B-FP8": _B, "Qwen/Qwen3.5-35B-A3B-GPTQ-Int4": "GPTQ",
        "Qwen/Qwen3.6-35B-A3B": "", "Qwen/Qwen3.6-35B-A3B-FP8": _B, "nvidia/Qwen3.6-35B-A3B-NVFP4": _NV,
    }),
    (_QWEN3_5["122B-A10B"], {"Qwen/Qwen3.5-122B-A10B": "", "Qwen/Qwen3.5-122B-A10B-FP8": _B,
                             "Qwen/Qwen3.5-122B-A10B-GPTQ-Int4": "GPTQ"}),
    (_QWEN3_5["397B-A17B"], {"Qwen/Qwen3.5-397B-A17B": "", "nvidia/Qwen3.5-397B-A17B-NVFP4": _NV,
                             "Qwen/Qwen3.5-397B-A17B-GPTQ-Int4": "GPTQ"}),
    (MODELS["ByteDance-Seed/Seed-OSS-36B-Base"],
     {"ByteDance-Seed/Seed-OSS-36B-Instruct": ""}),
    (dense("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", 2560, 20, 4, 28, moe_num_experts=64, moe_k=6,
           moe_intermediate_size=1536, moe_num_shared_experts=2, vocab_size=103424, max_position_embeddings=131072),
     {"baidu/ERNIE-4.5-21B-A3B-PT": ""}),
    (dense("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", 8192, 64, 8, 54, moe_num_experts=64, moe_k=8,
           moe_intermediate_size=3584, vocab_size=103424, max_position_embeddings=131072),
     {"baidu/ERNIE-4.5-300B-A47B-PT": ""}),
    (dense("GraniteForCausalLM", "granite", 2048, 32, 8, 40, vocab_size=49155, max_position_embeddings=131072),
     {"ibm-granite/granite-3.2-2b-instruct": ""}),
    (_LLAMA_8B, {
        "meta-llama/Llama-3.1-8B-Instruct": "", "meta-llama/Llama-3.1-8B": "",
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8": _W8A8,
        "RedHatAI/Meta-Llama-3.1-8B-quantized.w8a8": _W8A8,
        "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4": "AWQ",
        "nvidia/Llama-3.1-8B-Instruct-NVFP4": _NV, "nvidia/Llama-3.1-8B-Instruct-FP8": _NV8,
    }),
    (_LLAMA_1B, {"meta-llama/Llama-3.2-1B": "", "meta-llama/Llama-3.2-1B-Instruct": "",
                 "RedHatAI/Llama-3.2-1B-Instruct-quantized.w8a8": _W8A8, "AMead10/Llama-3.2-1B-Instruct-AWQ": "AWQ",
                 "openbmb/MiniCPM5-1B": ""}),
    (_LLAMA_3B, {"meta-llama/Llama-3.2-3B-Instruct": "", "RedHatAI/Llama-3.2-3B-Instruct-quantized.w8a8": _W8A8,
                 "AMead10/Llama-3.2-3B-Instruct-AWQ": "AWQ"}),
    (_llama(8192, 64, 8, 80), {"meta-llama/Llama-3.3-70B-Instruct": "", "nvidia/Llama-3.3-70B-Instruct-FP8": _NV8,
                               "nvidia/Llama-3.3-70B-Instruct-NVFP4": _NV}),
    (_LLAMA_4, {"meta-llama/Llama-4-Scout-17B-16E-Instruct": "",
                "nvidia/Llama-4-Scout-17B-16E-Instruct-FP8": _NV8,
                "nvidia/Llama-4-Scout-17B-16E-Instruct-NVFP4": _NV}),
    (_PHI_4_MINI, {"microsoft/Phi-4-mini-instruct": "", "microsoft/Phi-4-mini-reasoning": ""}),
    (_phi3(5120, 40, 10, 40, max_position_embeddings=32768), {"microsoft/Phi-4-reasoning": ""}),
    (_ministral(5120, 40, 16384), {"mistralai/Ministral-3-14B-Instruct-2512": "FP8 with given scales",
                                   "mistralai/Ministral-3-14B-Reasoning-2512": "",
                                   "mistralai/Ministral-3-14B-Instruct-2512-FP8": UNKNOWN}),
    (_ministral(4096, 34, 14336), {"mistralai/Ministral-3-8B-Instruct-2512": "FP8 with given scales",
                                   "mistralai/Ministral-3-8B-Reasoning-2512": ""}),
    (_ministral(3072, 26, 9216), {"mistralai/Ministral-3-3B-Instruct-2512": "FP8 with given scales",
                                  "mistralai/Ministral-3-3B-Reasoning-2512": ""}),
    (MODELS["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"], {"nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "",
                 "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8": _NV8}),
    (MODELS["nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16"],
     {"nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16": "", "nvidia/NVIDIA-Nemotron-3-Nano-4B-FP8": _NV8}),
    (_NANO_9B, {"nvidia/NVIDIA-Nemotron-Nano-9B-v2": "", "nvidia/NVIDIA-Nemotron-Nano-9B-v2-FP8": _NV8,
                "nvidia/NVIDIA-Nemotron-Nano-9B-v2-NVFP4": _NV, "nvidia/NVIDIA-Nemotron-Nano-9B-v2-Base": "",
                "nvidia/NVIDIA-Nemotron-Nano-9B-v2-Japanese": ""}),
    (MODELS["nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16"], {"nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": "",
              "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-Base-BF16": "",
              "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8": _NV8,
              "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4": _MIXED}),
    (dense("GptOssForCausalLM", "gpt_oss", 2880, 64, 8, 36, num_local_experts=128, **_GPT_OSS),
     {"openai/gpt-oss-120b": "MXFP4 of experts", "amd/gpt-oss-120b-w-mxfp4-a-fp8": UNKNOWN}),
    (dense("GptOssForCausalLM", "gpt_oss", 2880, 64, 8, 24, num_local_experts=32, **_GPT_OSS),
     {"openai/gpt-oss-20b": "MXFP4 of experts"}),
    (Model("WhisperForConditionalGeneration", {
        "model_type": "whisper", "torch_dtype": "float16", "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32,
        "encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120,
        "decoder_ffn_dim": 5120, "max_source_positions": 1500, "max_target_positions": 448, "num_mel_bins": 128,
        "vocab_size": 51866}),
     {"openai/whisper-large-v3": ""}),
    (Model("DeepseekOCRForCausalLM", {
        "model_type": "deepseek_vl_v2", "tile_tag": "2D", "candidate_resolutions": [[1024, 1024]],
        "projector_config": {"projector_type": "linear", "input_dim": 2048, "n_embed": 1280},
        "vision_config": {"image_size": 1024}, "language_config": {
            "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "torch_dtype": "bfloat16",
            "hidden_size": 1280, "num_attention_heads": 10, "num_key_value_heads": 10, "num_hidden_layers": 12,
            "intermediate_size": 6848, "moe_intermediate_size": 896, "n_routed_experts": 64, "n_shared_experts": 2,
            "num_experts_per_tok": 6, "first_k_dense_replace": 1, "vocab_size": 129280, "use_mla": False,
            "q_lora_rank": None, "kv_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0,
            "topk_method": "greedy", "topk_group": 1, "n_group": 1, "norm_topk_prob": False,
            "scoring_func": "softmax", "max_position_embeddings": 8192}}),
     {"deepseek-ai/DeepSeek-OCR": ""}),
    (Model("Qwen3ASRForConditionalGeneration", {
        "model_type": "qwen3_asr", "thinker_config": {
            "text_config": {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8,
                            "num_hidden_layers": 28, "head_dim": 128, "vocab_size": 151936,
                            "max_position_embeddings": 65536,
                            "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20],
                                             "mrope_interleaved": True}},
            "audio_config": {"d_model": 1024, "encoder_layers": 1, "encoder_attention_heads": 16,
                             "output_dim": 2048}}}),
     {"Qwen/Qwen3-ASR-1.7B": ""}),
    (Model("GlmAsrForConditionalGeneration", {
        "model_type": "glmasr", "torch_dtype": "bfloat16",
        "text_config": {"model_type": "llama", "hidden_size": 2048, "num_attention_heads": 16,
                        "num_key_value_heads": 4, "num_hidden_layers": 28, "head_dim": 128,
                        "intermediate_size": 6144, "vocab_size": 59264, "max_position_embeddings": 8192},
        "audio_config": {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 20,
                         "intermediate_size": 5120}}),
     {"zai-org/GLM-ASR-Nano-2512": ""}),
    (_of_transformers(*_LAGUNA), {
        **{f"poolside/Laguna-{name}": "" for name in ("XS.2", "XS-2.1")},
        **{f"poolside/Laguna-XS.2-{form}": UNKNOWN for form in ("FP8", "NVFP4", "INT4")},
        **{f"poolside/Laguna-XS-2.1-{form}": UNKNOWN for form in ("FP8", "NVFP4", "INT4")},
    }),
    (_of_transformers(*_LAGUNA, num_hidden_layers=48, num_experts_per_tok=10),
     {"poolside/Laguna-S-2.1": "",
      **{f"poolside/Laguna-S-2.1-{form}": UNKNOWN for form in ("FP8", "NVFP4", "INT4")}}),
    (_of_transformers(*_LAGUNA, num_hidden_layers=70, num_attention_heads=64, num_experts_per_tok=16),
     {"poolside/Laguna-M.1": "", "poolside/Laguna-M.1-FP8": UNKNOWN, "poolside/Laguna-M.1-NVFP4": UNKNOWN}),
    (_STEP_3_5, {"stepfun-ai/Step-3.5-Flash": "", "stepfun-ai/Step-3.5-Flash-FP8": _B,
                 "stepfun-ai/Step-3.5-Flash-INT4": UNKNOWN, "stepfun-ai/Step-3.5-Flash-INT8": UNKNOWN}),
    (_of_transformers("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", num_experts=64, moe_topk=8, head_dim=128,
                      num_attention_heads=32, num_key_value_heads=8),
     {"tencent/Hunyuan-A13B-Instruct": "", "tencent/Hunyuan-A13B-Instruct-FP8": UNKNOWN}),
    (_HY3, {"tencent/Hy3": "", "tencent/Hy3-preview": "", "tencent/Hy3-FP8": UNKNOWN,
            "RedHatAI/Hy3-NVFP4-FP8": "NVFP4 of experts beside FP8 by blocks, compressed-tensors"}),
    (_GLM_4_5, {**{f"zai-org/GLM-{version}": "" for version in ("4.5", "4.6", "4.7")},
                **{f"zai-org/GLM-{version}-FP8": _ROWS for version in ("4.5", "4.6", "4.7")},
                "nvidia/GLM-4.7-NVFP4": _NV}),
    (_GLM_4_5V, {"zai-org/GLM-4.5V": "", "zai-org/GLM-4.5V-FP8": _ROWS, "zai-org/GLM-4.6V": "",
                 "zai-org/GLM-4.6V-FP8": _ROWS}),
    (MODELS["zai-org/GLM-4.1V-9B-Thinking"], {"zai-org/Glyph": "", "zai-org/GLM-GA": ""}),
    (dense("GlmForCausalLM", "glm", 4096, 32, 2, 40, head_dim=128, vocab_size=151552, max_position_embeddings=131072),
     {"zai-org/glm-4-9b-hf": ""}),
    (_GLM_5, {"zai-org/GLM-5": "", "zai-org/GLM-5.1": "", "zai-org/GLM-5.2": "", "zai-org/GLM-5-FP8": _B,
              "zai-org/GLM-5.1-FP8": _B, "zai-org/GLM-5.2-FP8": _B, "nvidia/GLM-5-NVFP4": _NV,
              "nvidia/GLM-5.1-NVFP4": _NV, "nvidia/GLM-5.2-NVFP4": UNKNOWN,
              "mindlab-research/Macaron-V1-Coding-Venti": ""}),
    (_V3, {"deepseek-ai/DeepSeek-R1": _B, "deepseek-ai/DeepSeek-R1-0528": _B, "deepseek-ai/DeepSeek-V3": _B,
           "deepseek-ai/DeepSeek-V3.1": _POWERS,
           "nvidia/DeepSeek-R1-0528-NVFP4-v2": _NV, "nvidia/DeepSeek-V3.1-NVFP4": _NV,
           "nvidia/DeepSeek-V3-FP4": _NV}),
    (_V32, {"deepseek-ai/DeepSeek-V3.2-Exp": _POWERS,
            "deepseek-ai/DeepSeek-V3.2": _POWERS, "nvidia/DeepSeek-V3.2-NVFP4": _NV}),
    (_V4, {**{f"deepseek-ai/DeepSeek-V4-Flash{of}": _POWERS for of in ("", "-0731", "-DSpark")},
           "nvidia/DeepSeek-V4-Flash-NVFP4": UNKNOWN}),
    (_K2, {"moonshotai/Kimi-K2-Instruct": _B, "moonshotai/Kimi-K2-Thinking": _GROUPS,
           "nvidia/Kimi-K2-Thinking-NVFP4": _NV}),
    (dense("KimiLinearForCausalLM", "kimi_linear", 2304, 32, 32, 27, head_dim=72, vocab_size=163840,
           num_experts=256, num_experts_per_token=8, moe_intermediate_size=1024, num_shared_experts=1,
           first_k_dense_replace=1, linear_attn_config={
               "kda_layers": [n for n in range(1, 28) if n % 4 and n != 27],
               "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
               "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4},
           max_position_embeddings=1048576, q_lora_rank=None,
           **{name: MLA[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}),
     {"moonshotai/Kimi-Linear-48B-A3B-Instruct": ""}),
    (_with_own_class("BailingMoeV2_5ForCausalLM", "bailing_hybrid", 4096, 32, 32, 32, **_LING),
     {"inclusionAI/Ling-2.6-flash": ""}),
    (_with_own_class("BailingMoeV2_5ForCausalLM", "bailing_hybrid", 8192, 64, 64, 80, **_LING),
     {"inclusionAI/Ling-2.6-1T": UNKNOWN, "inclusionAI/Ring-2.6-1T": UNKNOWN}),
    (_with_own_class("BailingMoeV3ForCausalLM", "bailing_hybrid", 4096, 32, 32, 32,
                     **_LING | {"num_experts": 512, "short_conv_kernel_size": 4, "no_kda_lora": True}),
     {"inclusionAI/Ling-3.0-flash": "", "inclusionAI/Ling-3.0-flash-fp8": _B}),
    (_of_transformers("MiMoV2FlashForCausalLM", "mimo_v2_flash"), {"XiaomiMiMo/MiMo-V2-Flash": _B}),
    (dense("AfmoeForCausalLM", "afmoe", 3072, 48, 8, 60, head_dim=128, num_experts=256, num_experts_per_tok=4,
           moe_intermediate_size=3072, num_shared_experts=1, num_dense_layers=6, max_position_embeddings=262144),
     {"arcee-ai/Trinity-Large-Thinking": "", "arcee-ai/Trinity-Large-Thinking-NVFP4": UNKNOWN}),
)  # fmt: skip
"""Kinds of models, and the form of each checkpoint of theirs."""

CLASSES = {
    "DeepseekOCR2ForCausalLM": ("deepseek-ai/DeepSeek-OCR-2",),
    "DiffusionGemmaForBlockDiffusion": (
        *("google/diffusiongemma-26B-A4B-it", "RedHatAI/diffusiongemma-26B-A4B-it-FP8-dynamic"),
        *("RedHatAI/diffusiongemma-26B-A4B-it-NVFP4", "nvidia/diffusiongemma-26B-A4B-it-NVFP4"),
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": (*("baidu/ERNIE-4.5-VL-28B-A3B-PT", "baidu/ERNIE-4.5-VL-424B-A47B-PT"),),
    "HunYuanVLForConditionalGeneration": ("tencent/HunyuanOCR",),
    "InklingForConditionalGeneration": (
        *("thinkingmachines/Inkling-Small-NVFP4", "thinkingmachines/Inkling-Small", "thinkingmachines/Inkling"),
        "thinkingmachines/Inkling-NVFP4",
    ),
    "InternS1ForConditionalGeneration": ("internlm/Intern-S1", "internlm/Intern-S1-FP8"),
    "JinaVLForRanking": ("jinaai/jina-reranker-m0",),
    "KimiK25ForConditionalGeneration": (
        *("moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2.6", "moonshotai/Kimi-K2.7-Code"),
        *("nvidia/Kimi-K2.5-NVFP4", "nvidia/Kimi-K2.6-NVFP4"),
    ),
    "MiniCPMV4_6ForConditionalGeneration": ("openbmb/MiniCPM-V-4.6",),
    "MiniMaxM3SparseForConditionalGeneration": (
        *("MiniMaxAI/MiniMax-M3", "MiniMaxAI/MiniMax-M3-MXFP8", "nvidia/MiniMax-M3-NVFP4"),
    ),
    "MossTranscribeDiarizeForConditionalGeneration": ("OpenMOSS-Team/MOSS-Transcribe-Diarize",),
    "Phi4MMForCausalLM": ("microsoft/Phi-4-multimodal-instruct",),
    "Step3p7ForConditionalGeneration": tuple(f"stepfun-ai/Step-3.7-Flash{of}" for of in ("", "-FP8", "-NVFP4")),
    "UnlimitedOCRForCausalLM": ("baidu/Unlimited-OCR",),
    "VoxtralRealtimeGeneration": ("mistralai/Voxtral-Mini-4B-Realtime-2602",),
}
"""Checkpoints of which nothing but the class of vLLM's is known here."""

_EAGLE3 = {"draft_vocab_size": 32000, "eagle_config": {}}
_OF_LAGUNA = {
    "head_dim": 128, "vocab_size": 100352, "max_position_embeddings": 131072,
    "dflash_config": {"mask_token_id": 12, "target_layer_ids": [0, 8, 16, 35, 38]},
}  # fmt: skip


def _dflash_of_laguna(hidden: int, heads: int) -> Model:
    """All of whose layers have a window."""
    layers = 6
    return dense(
        "DFlashLagunaForCausalLM", "laguna", hidden, heads, 8, layers, draft_vocab_size=100352, sliding_window=512,
        layer_types=["sliding_attention"] * layers, num_attention_heads_per_layer=[heads] * layers,
        mlp_layer_types=["dense"] * layers, **_OF_LAGUNA,
    )  # fmt: skip


DRAFTS: dict[str, Model] = {
    **{
        f"google/gemma-4-{size}-it-assistant": _of_transformers("Gemma4AssistantForCausalLM", "gemma4_assistant")
        for size in ("26B-A4B", "31B", "E2B", "E4B")
    },
    "google/gemma-4-12B-it-assistant": _of_transformers(
        "Gemma4UnifiedAssistantForCausalLM", "gemma4_unified_assistant"
    ),
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": replace(
        _llama(4096, 32, 8, 1, **_EAGLE3), architecture="LlamaForCausalLMEagle3"
    ),
    "poolside/Laguna-XS.2-speculator.dflash": dense(
        "DFlashDraftModel", "qwen3", 2048, 32, 8, 5, draft_vocab_size=32000, **_OF_LAGUNA
    ),
    "poolside/Laguna-XS-2.1-DFlash": _dflash_of_laguna(2048, 48),
    "poolside/Laguna-S-2.1-DFlash": _dflash_of_laguna(3072, 72),
    "nvidia/gpt-oss-120b-Eagle3-v3": replace(
        _llama(2880, 64, 8, 1, head_dim=64, vocab_size=201088, **_EAGLE3 | {"draft_vocab_size": 201088}),
        architecture="LlamaForCausalLMEagle3",
    ),
}
"""Draft models."""


def _checkpoints() -> dict[str, Checkpoint]:
    found = {}
    for model, forms in PUBLISHED:
        for name, form in forms.items():
            found[name] = Checkpoint(model.architecture, form, None if form == UNKNOWN else _in(model, form))
    for architecture, names in CLASSES.items():
        found |= {name: Checkpoint(architecture, "", Model(architecture)) for name in names}
    return found


def _in(model: Model, form: str) -> Model:
    """A kind of model with quantised weights."""
    if not form:
        return model
    if model.file == "params.json":
        said = {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}
    else:
        said = {"quantization_config": FORMS[form]} | ({"torch_dtype": "float16"} if form == "AWQ" else {})
    return replace(model, config=model.config | said)


CHECKPOINTS = _checkpoints()
"""By Hugging Face's name."""


def checkpoint_of(name: str) -> Checkpoint | None:
    """A published checkpoint; None if it is unknown."""
    return CHECKPOINTS.get(name)


def drafts_of(name: str) -> Model | None:
    """The kind of a draft model, which a checkpoint may bring for itself; None if it is unknown."""
    checkpoint = checkpoint_of(name)
    return DRAFTS.get(name) or (checkpoint.model if checkpoint else None)
