"""The files from which Transformers and vLLM load a tokenizer."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def write_tokenizer(
    tokenizer: "Tokenizer",
    folder: Path,
    max_length: int,
    named: Mapping[str, str | None],
    special: Sequence[str],
    chat_template: str,
    for_processor: Mapping[str, str] = {},
) -> None:
    """Write a tokenizer and its chat template.

    Args:
        tokenizer: any.
        folder: exists.
        max_length: most tokens of a text.
        named: special tokens by name, such as ``eos_token``.
        special: all special tokens.
        chat_template: in Jinja.
        for_processor: further special tokens by the names that a processor of images has for them.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        **named,
        "additional_special_tokens": [token for token in special if token not in named.values()],
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    if for_processor:  # which Transformers 5 wants there, and the others beside them in the tokenizer's own file
        del settings["additional_special_tokens"]
        settings["extra_special_tokens"] = dict(for_processor)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
