"""These tests need an NVIDIA GPU; without one they are skipped."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(autouse=True, scope="session")
def one_thread_beside_others() -> None:
    """Threads of several pytest workers, each with as many as there are cores, wait for each other."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


@pytest.fixture(autouse=True, scope="session")
def own_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Certificates of products are read from and written to a folder of this run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def uncertified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No product is certified, neither in memory nor on disk, and none will be timed."""
    from vllm_batch_invariant.ops.linear import cuda

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("_certified", "_plans", "_inconsistent"):
        monkeypatch.setattr(cuda, name, {})
    monkeypatch.setattr(cuda, "_uses", Counter())
    monkeypatch.setattr(cuda, "_TUNING_SECONDS", 0.0)
    cuda._stored.cache_clear()
    yield
    cuda._stored.cache_clear()


@pytest.fixture
def without_cublaslt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The setting that leaves all products to Triton."""
    from vllm_batch_invariant.ops.linear import cuda

    monkeypatch.setenv("VLLM_BATCH_INVARIANT_LINEAR", "triton")
    monkeypatch.setattr(cuda, "_plans", {})
    caches = (cuda._library, cuda._environment, cuda._products, cuda._stored)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
