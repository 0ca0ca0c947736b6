"""What of the table of coverage is about NPUs alone."""

from ...integration.feature import Config, Feature
from .. import DEVICE as NPU
from .library import attention_library


def _attention(_: Config) -> str | None:
    return "attention on an NPU as it is installed here" if attention_library() is None else None


def _multimodal(config: Config) -> str | None:
    return "multimodal models on an NPU" if config.model_config.is_multimodal_model else None


def _chunked_prefill(config: Config) -> str | None:
    return "chunked prefill on an NPU" if config.scheduler_config.enable_chunked_prefill else None


def _prefix_caching(config: Config) -> str | None:
    return "prefix caching on an NPU" if config.cache_config.enable_prefix_caching else None


COVERED = (Feature(NPU.title, "compiled and simulated, never run on hardware"),)
REFUSED = (
    Feature(
        "Ascend: attention without a library for it",
        "vllm-ascend's kernel splits keys by the batch, and neither batch_invariant_ops (AscendC) nor "
        "flash_attn_npu_v3 is installed",
        "install one of them",
        _attention,
        (NPU.type,),
    ),
    Feature(
        "Ascend: multimodal models, also as text",
        "their rotary embedding has not been proven there",
        "serve a text model",
        _multimodal,
        (NPU.type,),
    ),
    Feature(
        "Ascend: chunked prefill",
        "it has not been proven there that a chunk of any size gives the same bits",
        "pass --no-enable-chunked-prefill",
        _chunked_prefill,
        (NPU.type,),
    ),
    Feature(
        "Ascend: prefix caching",
        "it has not been proven there that a warm and a cold cache give the same bits",
        "pass --no-enable-prefix-caching",
        _prefix_caching,
        (NPU.type,),
    ),
)
