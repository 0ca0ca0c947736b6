"""vLLM's connectors, by which keys and values leave an engine and come back: which are known, and what of them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

FILES = "ExampleConnector"
"""vLLM's connector of files, which any number of engines may share."""
NIXL = ("NixlConnector", "NixlPullConnector")
"""vLLM's connector by which an engine reads the memory of another one, by its two names."""
_IN_MEMORY = ("cpu_bytes_to_use",)
KNOWN: Mapping[str, tuple[str, ...]] = {
    FILES: ("shared_storage_path",),
    "OffloadingConnector": (*_IN_MEMORY, "eviction_policy", "store_threshold", "max_tracker_size"),
    "SimpleCPUOffloadConnector": (*_IN_MEMORY, "cpu_bytes_to_use_per_rank", "lazy_offload"),
    **dict.fromkeys(NIXL, ("backends", "num_threads", "kv_lease_duration")),
}
"""Settings (``kv_connector_extra_config``) of each connector that move bytes as they are. Those of the second and the
third are of the memory of one engine.
"""
_OF_LMCACHE = "it may compress keys and values (CacheGen), or reuse those behind another prefix (CacheBlend)"
LOSSY = {
    "LMCacheConnectorV1": _OF_LMCACHE,
    "LMCacheMPConnector": _OF_LMCACHE,
    "DecodeBenchConnector": "it fills the cache with numbers that nobody computed",
    "HiSparseConnector": "attention reads a part of what it holds",
}
"""Connectors that do not give back what was stored, and why."""
_OF_OFFLOADING = {"native": "OffloadingConnector", "lmcache": "LMCacheMPConnector"}
"""By ``--kv-offloading-backend``."""
_MADE_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(_dp[0-9]+)?")
"""An ``engine_id`` that vLLM makes; two engines that are given the same one would share memory."""


def name(config: Any) -> str:
    """The connector of a configuration of vLLM, also one that vLLM has not made yet; empty if there is none."""
    transfer, cache = getattr(config, "kv_transfer_config", None), getattr(config, "cache_config", None)
    if transfer is not None and transfer.kv_connector:
        return str(transfer.kv_connector)
    if not getattr(cache, "kv_offloading_size", None):
        return ""
    backend = str(getattr(cache, "kv_offloading_backend", "native"))
    return _OF_OFFLOADING.get(backend, backend)


def unknown_setting(config: Any) -> str:
    """The first setting of a known connector that is not known, in words; empty if there is none."""
    transfer = config.kv_transfer_config
    return "" if transfer is None else next(_unknown(transfer), "")


def _unknown(transfer: Any) -> Iterator[str]:
    extra = transfer.kv_connector_extra_config or {}
    for setting in sorted(extra.keys() - {*KNOWN[transfer.kv_connector]}) if transfer.kv_connector else ():
        yield f"its setting {setting}"
    for field in ("kv_connector_module_path", "enable_permute_local_kv"):
        if value := getattr(transfer, field, None):
            yield f"{field}={value}"
    policies = ("fail", "recompute") if transfer.kv_connector in NIXL else ("fail",)
    if (policy := getattr(transfer, "kv_load_failure_policy", "fail")) not in policies:
        yield f"kv_load_failure_policy={policy}"
    if not _MADE_ID.fullmatch(str(transfer.engine_id)):
        yield f"engine_id={transfer.engine_id}"
