"""Keys and values that leave an engine and come back, to it or to another one, by a KV connector of vLLM's.

They are bytes, and nothing adds them: what decides bits is which ones come. They follow from the tokens before them and
from all that a fingerprint is of but the requests, so that a digest of it, the key, is a part of the name of what is
stored: a folder of its own, and the parent of the first block's hash. Blocks of plain vLLM, of another version, of
other weights or of another kind of machine have other names, and are never found.

Of vLLM's connector of files, which it calls an example, five things are put right here: a part of a prompt is not
stored as the whole; what is being written is not found; a prompt whose last block is full is looked for under the name
that it has; a request that was preempted does not look for tokens of its answer; and a load that would be left out
ends the engine.
"""

import copy
import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..reviews import connectors, patch_points
from ..side_table import beside
from . import endpoint, nixl

METHOD = "batch_invariant_kv_key"
"""Of a worker: gives its connector the key."""


def install() -> None:
    """Complete vLLM's connectors in a process that makes one: for the engine, its worker or both."""
    factory = patch_points.CONNECTOR_FACTORY.get()
    create = factory.create_connector.__func__

    @wraps(create)
    def create_connector(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        name = connectors.name(config)
        if name == connectors.FILES:
            _complete()
        elif name in connectors.NIXL:
            nixl.complete()
        return create(cls, config, *args, **kwargs)

    factory.create_connector = classmethod(create_connector)


@cache
def _complete() -> None:
    files = patch_points.FILE_CONNECTOR.get()
    files.get_num_new_matched_tokens = of_prompts(files.get_num_new_matched_tokens)
    files.build_connector_meta = with_whole_prompts(files.build_connector_meta)
    files._found_match_for_prompt = with_its_name(files._found_match_for_prompt)
    files._generate_foldername_debug = under_the_key(files._generate_foldername_debug)
    files.register_kv_caches = with_layers(files.register_kv_caches)
    files.start_load_kv = complete(files.start_load_kv)
    files.save_kv_layer = apart(files.save_kv_layer)
    files.wait_for_save = published(files.wait_for_save)


def install_in_worker() -> None:
    """Give this process's worker the method."""

    def take_key(worker: Any, key: str) -> None:
        beside(patch_points.KV_CONNECTOR.get()()).kv_key = key

    setattr(patch_points.WORKER.get(), METHOD, take_key)


def of_engine(core: Any) -> Any:
    """The connector of an engine's scheduler; None if there is none."""
    return getattr(core.scheduler, "connector", None)


def take_weights(core: Any, digest: str) -> None:
    """Have an engine find, from now on, only what was computed with these weights.

    Args:
        core: vLLM's ``EngineCore``, between two steps; without a connector nothing happens.
        digest: of its weights.
    """
    if of_engine(core) is None:
        return
    key = key_of(core, digest)
    beside(of_engine(core)).kv_key = key
    core.model_executor.collective_rpc(METHOD, args=(key,))
    kept = beside(core)
    hashes: Any = patch_points.INIT_NONE_HASH.module()
    kept.none_hash = kept.none_hash or hashes.NONE_HASH
    hashes.NONE_HASH = sha256(kept.none_hash + key.encode()).digest()


def key_of(core: Any, digest: str) -> str:
    """64 hexadecimal digits over all that decides the bits of keys and values beside the tokens.

    Args:
        core: vLLM's ``EngineCore``.
        digest: of its weights.
    """
    environment = endpoint.of_workers(core.model_executor.collective_rpc(endpoint.METHOD))
    record = {"environment": environment, "model": endpoint.model_of(core.vllm_config.model_config), "weights": digest}
    return sha256(json.dumps(record, sort_keys=True, default=str).encode()).hexdigest()


def of_prompts(matched: Callable[..., tuple[int | None, bool]]) -> Callable[..., tuple[int | None, bool]]:
    """vLLM's method that counts the tokens that are stored behind those that the engine has, never fewer than none."""

    @wraps(matched)
    def get_num_new_matched_tokens(self: Any, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.num_preemptions:
            return 0, False  # vLLM would load by the name of its prompt and answer, which nobody has stored
        found, later = matched(self, request, num_computed_tokens)
        return max(found or 0, 0), later

    return get_num_new_matched_tokens


def with_whole_prompts(build: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's method that tells workers what to load and to store, of a new request only what its step completes."""

    @wraps(build)
    def build_connector_meta(self: Any, scheduler_output: Any) -> Any:
        whole = [
            one
            for one in scheduler_output.scheduled_new_reqs
            if one.req_id in self._requests_need_load
            or one.num_computed_tokens + scheduler_output.num_scheduled_tokens[one.req_id]
            >= len(one.prompt_token_ids or ())
        ]
        return build(self, dataclasses.replace(scheduler_output, scheduled_new_reqs=whole))

    return build_connector_meta


def with_its_name(found: Callable[..., bool]) -> Callable[..., bool]:
    """vLLM's method that looks for a prompt. One whose last token is alone behind full blocks is stored with all of
    them, and looked for with one fewer.
    """

    @wraps(found)
    def _found_match_for_prompt(self: Any, prompt_token_ids: list[int], mm_hashes: list[str]) -> bool:
        return (len(prompt_token_ids) - 1) % self._block_size != 0 and found(self, prompt_token_ids, mm_hashes)

    return _found_match_for_prompt


def under_the_key(folder_of: Callable[..., str]) -> Callable[..., str]:
    """vLLM's method that names a prompt's folder: below that of the key, and while it is written beside its place."""

    @wraps(folder_of)
    def _generate_foldername_debug(self: Any, token_ids: Any, mm_hashes: list[str], create_folder: bool = False) -> str:
        kept = beside(self)
        if not kept.kv_key:
            raise RuntimeError("a KV connector has no key: nothing is stored or found without one")
        at = Path(folder_of(self, token_ids, mm_hashes, create_folder=False))
        at = at.parent / kept.kv_key / at.name
        if kept.kv_saves:
            final, at = at, at.with_suffix(f".{os.getpid()}")
            kept.kv_written[at] = final
            at.mkdir(parents=True, exist_ok=True)
        return str(at)

    return _generate_foldername_debug


def with_layers(register: Callable[..., None]) -> Callable[..., None]:
    """vLLM's method that is told the caches of all layers, whose number a complete folder has."""

    @wraps(register)
    def register_kv_caches(self: Any, kv_caches: dict[str, Any]) -> None:
        beside(self).kv_layers = len(kv_caches)
        register(self, kv_caches)

    return register_kv_caches


def complete(load: Callable[..., None]) -> Callable[..., None]:
    """vLLM's method that loads, which returns without a word where it is not told of the step: its second model runner
    tells it beside the context.

    It then raises:
        RuntimeError: there is something to load, and it would not be.
    """

    @wraps(load)
    def start_load_kv(self: Any, forward_context: Any, **kwargs: Any) -> None:
        if forward_context.attn_metadata is None and "attn_metadata" in kwargs:
            forward_context = copy.copy(forward_context)
            forward_context.attn_metadata = kwargs["attn_metadata"]
        loads = any(not one.is_store for one in self._get_connector_metadata().requests)
        if loads and not isinstance(forward_context.attn_metadata, dict):
            raise RuntimeError("vLLM would leave out keys and values that a request was promised")
        load(self, forward_context, **kwargs)

    return start_load_kv


def apart(save: Callable[..., None]) -> Callable[..., None]:
    """vLLM's method that stores a layer, in a folder that nobody looks for."""

    @wraps(save)
    def save_kv_layer(self: Any, *args: Any, **kwargs: Any) -> None:
        kept = beside(self)
        kept.kv_saves = True
        try:
            save(self, *args, **kwargs)
        finally:
            kept.kv_saves = False

    return save_kv_layer


def published(wait: Callable[..., None]) -> Callable[..., None]:
    """vLLM's method at the end of a step, after which what has all layers is found."""

    @wraps(wait)
    def wait_for_save(self: Any) -> None:
        wait(self)
        kept = beside(self)
        for at, final in kept.kv_written.items():
            if len(list(at.iterdir())) == kept.kv_layers:
                with suppress(OSError):  # somebody else was first, with the same bits
                    at.rename(final)
            shutil.rmtree(at, ignore_errors=True)
        kept.kv_written.clear()

    return wait_for_save
