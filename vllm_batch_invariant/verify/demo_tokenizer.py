"""A byte-level BPE tokenizer with a chat template, trained on the sources of Python's standard library."""

import json
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, EOS, TURN = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
SPECIAL_TOKENS = (PAD, EOS, TURN)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def training_text(max_bytes: int) -> list[str]:
    """The top-level modules of the standard library in sorted order, up to `max_bytes` of them."""
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_bytes()
        # sitecustomize and its kind differ between machines that run the same Python
        if path.name.startswith(("_sysconfigdata", "sitecustomize", "usercustomize")) or size + len(source) > max_bytes:
            continue
        texts.append(source.decode("utf-8", errors="replace"))
        size += len(source)
    return texts


def train_tokenizer(vocab_size: int, max_bytes: int = 2_000_000) -> Tokenizer:
    """A tokenizer of at most `vocab_size` tokens that maps any UTF-8 text to ids and back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(max_bytes), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write the files from which transformers and vLLM load the tokenizer and its chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "pad_token": PAD,
        "eos_token": EOS,
        "additional_special_tokens": [TURN],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
