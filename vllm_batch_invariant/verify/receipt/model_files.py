"""The sha256 of the files that decide what a model computes: weights, configuration, tokenizer."""

import hashlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ... import kept_file
from .record import Model, sha256_of

WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
"""In vLLM's order of preference: of the kinds that are present only the first is loaded."""
SETTINGS = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt", "*.py")
"""Configurations, tokenizers, chat templates, and the model's own code."""


def model_at(folder: Path | None, name: str, why_not: str = "the model's files are not on this machine") -> Model:
    """The model whose files are in a folder.

    Args:
        folder: None if the files are elsewhere.
        name: of the model. Of a path only the last part is kept, because the others tell who keeps it where.
        why_not: why there is no digest, if there is none.
    """
    found = [] if folder is None else list(_files(folder))
    if not any(path.match(pattern) for path in found for pattern in WEIGHTS):
        return Model(public_name(name), why_no_digest=why_not if folder is None else "the folder holds no weights")
    names = [path.relative_to(folder).as_posix() for path in found]  # type: ignore[arg-type]  # there is a folder
    files = dict(zip(names, _sha256_of_files(found), strict=True))
    return Model(public_name(name), files, sha256_of(files))


def public_name(name: str) -> str:
    """A model's name without its folders; ``organisation/model`` stays, also from the hub's cache."""
    cached = re.search(r"models--([^/\\]+)[/\\]snapshots[/\\]", name)
    if cached:
        return cached[1].replace("--", "/")
    parts = [part for part in name.replace("\\", "/").split("/") if part]
    is_path = name.startswith(("/", "\\", ".", "~")) or ":" in name or len(parts) > 2
    return parts[-1] if is_path and parts else name


def local_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder of a model on this machine, or in the cache of Hugging Face's hub; None if there is none."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


MODULES = "modules.json"
"""Where sentence-transformers names what is behind a model: poolers and linear layers, each in a folder of its own."""


def _files(folder: Path) -> Iterator[Path]:
    for place in (folder, *_modules(folder)):
        weights = next((found for pattern in WEIGHTS if (found := sorted(place.glob(pattern)))), [])
        settings = {path for pattern in SETTINGS for path in place.glob(pattern)}
        yield from (path for path in sorted({*weights, *settings}) if path.is_file())


def _modules(folder: Path) -> Iterator[Path]:
    """Folders of what is behind a model."""
    try:
        listed = json.loads((folder / MODULES).read_text(encoding="utf-8"))
        paths = {str(one["path"]) for one in listed} - {"", "."}
    except (OSError, ValueError, KeyError, TypeError):
        return
    yield from (folder / path for path in sorted(paths) if (folder / path).is_dir())


def _sha256_of_files(paths: list[Path]) -> list[str]:
    """Cached by path, inode, size and times of last change, in the folder of the certificates. The time of the inode's
    change is part of the key because no copy and no tool sets it back.
    """
    keys = [_key(path.resolve()) for path in paths]  # of a hub's cache two names may be one file
    of_keys = dict(zip(keys, paths, strict=True))
    known = _known(kept_file.read(_store()))
    if missing := of_keys.keys() - known.keys():
        with ThreadPoolExecutor() as threads:
            found = dict(zip(missing, threads.map(_sha256_of_file, (of_keys[key] for key in missing)), strict=True))
        kept_file.update(_store(), lambda content: _known(content) | found)
        known |= found
    return [known[key] for key in keys]


def _key(path: Path) -> str:
    state = path.stat()
    times = f"{state.st_mtime_ns}\0{state.st_ctime_ns}"
    key = f"{path}\0{state.st_ino}\0{state.st_size}\0{times}"
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def _sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _store() -> Path | None:
    return kept_file.path_of("model-digests.json")


def _known(content: Any) -> dict[str, str]:
    """Digests by key; none if the file holds something else, which is then overwritten."""
    if not isinstance(content, dict) or not all(re.fullmatch("[0-9a-f]{64}", str(each)) for each in content.values()):
        return {}
    return content
