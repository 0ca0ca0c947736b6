"""Configurations that checkpoints bring, because neither vLLM nor Transformers has them."""

from typing import Any

from transformers import CONFIG_MAPPING, NemotronHConfig, PretrainedConfig, Qwen3_5MoeConfig


class InternVLChatConfig(PretrainedConfig):
    """Of InternVL in its own form: an encoder, and a text model of any type, which vLLM calls ``text_config``."""

    model_type = "internvl_chat"

    def __init__(self, vision_config: Any = None, llm_config: Any = None, **further: Any) -> None:
        self.vision_config = PretrainedConfig(**(vision_config or {}))
        of_text = dict(llm_config or {"model_type": "qwen2"})
        self.llm_config = CONFIG_MAPPING[of_text.pop("model_type")](**of_text)
        super().__init__(**further)


class InternS2PreviewConfig(Qwen3_5MoeConfig):
    """Of Intern-S2, whose text and images are those of Qwen3.5 with experts."""

    model_type = "intern_s2_preview"


class NemotronHNanoVLConfig(PretrainedConfig):
    """Of Nemotron Nano VL and Omni: encoders, and a Nemotron-H, which vLLM calls ``text_config``."""

    model_type = "NemotronH_Nano_VL_V2"

    def __init__(
        self, vision_config: Any = None, llm_config: Any = None, sound_config: Any = None, **further: Any
    ) -> None:
        self.vision_config = PretrainedConfig(**(vision_config or {}))
        self.sound_config = PretrainedConfig(**sound_config) if sound_config else None
        self.llm_config = self.text_config = NemotronHConfig(**(llm_config or {}))
        super().__init__(**further)
