"""Forks the processes of engines from one that has imported vLLM: that is most of an engine's start on a CPU.

:func:`start` stands for :func:`.worker.start_process`. What a variable decides when modules are imported is decided:
an environment that differs from the first one in others than :data:`LATE` gets a process of its own, as usual.

usage: python -m tests.fork_server DESCRIPTOR, of a socket; by this module itself
"""

import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import IO, Any, NoReturn

from vllm_batch_invariant.verify.harness import worker

LATE = (
    *("VLLM_BATCH_INVARIANT", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_USE_V2_MODEL_RUNNER"),
    *("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_PLUGINS", "PYTEST_CURRENT_TEST"),
    "DRAFTED_ANSWERS",  # of the tests of speculation
)
"""Beginnings of the names of variables that are read when an engine is made, and not before."""
VLLMS = (
    *("vllm.entrypoints.llm", "vllm.engine.arg_utils", "vllm.entrypoints.launchers.cli_args"),
    *("vllm.v1.engine.core", "vllm.v1.core.sched.scheduler", "vllm.v1.worker.cpu_worker"),
    *("vllm.v1.attention.backends.cpu_attn", "vllm.distributed.device_communicators.cpu_communicator"),
    *("vllm.model_executor.models.qwen3", "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"),
    *("vllm.model_executor.layers.quantization.inc", "vllm.model_executor.layers.quantization.online.base"),
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe",
    *("vllm.plugins.lora_resolvers.filesystem_resolver", "vllm.plugins.lora_resolvers.hf_hub_resolver"),
)
OURS = (
    worker.DRIVER,
    *("vllm_batch_invariant.integration.engine.install", "vllm_batch_invariant.integration.engine.loading"),
    *("vllm_batch_invariant.integration.devices.cpu", "vllm_batch_invariant.integration.layers.attention_cpu"),
    *(f"vllm_batch_invariant.ops.{name}.cpu" for name in ("attention", "kv_cache", "linear", "norm", "pointwise")),
    *(f"vllm_batch_invariant.ops.{name}.cpu" for name in ("ranking", "reduce", "softmax", "top_k_top_p")),
    "vllm_batch_invariant.aten.cpu",
)
"""What most engines import. Importing one of ours changes nothing in vLLM."""
_LARGEST_MESSAGE = 1 << 20
_start_process = worker.start_process


class Forked:
    """A forked process; of subprocess.Popen's interface what an engine needs."""

    def __init__(self, pid: int, pidfd: int, stdin: int, server: "Server") -> None:
        self.pid, self.stdin = pid, os.fdopen(stdin, "wb")
        self._pidfd, self._server = pidfd, server
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        if self._status is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if not poll.poll(None if timeout is None else 1e3 * timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self._status = self._server.ask({"wait": self.pid})[0]["status"]
            os.close(self._pidfd)
        return self._status


class Server:
    """The process that forks, seen from the one that asks."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._imported_with = _early(environment)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self._end)

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether an engine of this environment may be forked."""
        return _early(environment) == self._imported_with

    def ask(self, request: dict[str, Any], descriptors: tuple[int, ...] = ()) -> tuple[dict[str, Any], list[int]]:
        """Send a request with files; returns the answer, and its file."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            answer, found, _, _ = socket.recv_fds(self._socket, _LARGEST_MESSAGE, 1)
        return json.loads(answer), list(found)

    def _end(self) -> None:
        self._socket.close()
        self._process.wait()


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(LATE)}


_server: Server | None = None
_server_lock = threading.Lock()


def start(
    module: str, answers: int, log: IO[bytes], environment: Mapping[str, str]
) -> Forked | subprocess.Popen[bytes]:
    """As :func:`.worker.start_process`; an engine's driver is forked."""
    global _server
    with _server_lock:
        if _server is None:
            _server = Server(environment)
    if module != worker.DRIVER or not _server.fits(environment):
        return _start_process(module, answers, log, environment)
    theirs, mine = os.pipe()
    try:
        request = {"fork": module, "environment": dict(environment), "directory": os.getcwd()}
        answer, [pidfd] = _server.ask(request, (theirs, log.fileno(), answers))
    finally:
        os.close(theirs)
    return Forked(answer["pid"], pidfd, mine, _server)


def serve(descriptor: int) -> NoReturn:
    """Import, then fork for every request until there is nobody to ask."""
    connection = socket.socket(fileno=descriptor)
    before = set(os.environ)
    for module in VLLMS:
        with suppress(ModuleNotFoundError):  # not every version of vLLM has it
            import_module(module)
    _replace_triton_kernels()
    for module in OURS:
        import_module(module)
    _fill_numbas_tables()
    _read_vllm()
    of_imports = {name: value for name, value in os.environ.items() if name not in before}
    gc.freeze()  # collections of the forked ones have less to look at, and copy less
    while True:
        message, files, _, _ = socket.recv_fds(connection, _LARGEST_MESSAGE, 3)
        if not message:
            os._exit(0)  # libraries have more to say of a usual end
        request = json.loads(message)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            connection.send(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode())
            continue
        pid = os.fork()
        if pid == 0:
            connection.close()
            request["environment"] = of_imports | request["environment"]
            _become(request, *files)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(connection, [json.dumps({"pid": pid}).encode()], [pidfd])
        for file in (pidfd, *files):
            os.close(file)


def _replace_triton_kernels() -> None:
    """Put vLLM's functions for a CPU in the places of its Triton kernels, for which it looks through every module, as a
    worker does first; before numba is imported, of which it cannot look at some.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if hasattr(platform, "register_triton_kernel_overrides"):
        platform.register_triton_kernel_overrides()
        platform.register_triton_kernel_overrides = classmethod(lambda _: None)


def _fill_numbas_tables() -> None:
    """What numba does before it compiles or loads a first kernel."""
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


def _read_vllm() -> None:
    """What the mode reads of vLLM's sources whatever an engine is told, and of the model that most engines have."""
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    from vllm_batch_invariant.integration.layers import review
    from vllm_batch_invariant.integration.reviews import samplers, sources

    list(samplers.not_reviewed(sources.installed, "cpu"))
    review.of_model_class(Qwen3ForCausalLM)


def _become(request: dict[str, Any], stdin: int, log: int, answers: int) -> NoReturn:
    """Run the module in this process, which was forked for it."""
    status = 1
    try:
        os.setsid()
        for theirs, mine in ((stdin, 0), (log, 1), (log, 2)):
            os.dup2(theirs, mine)
        os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["environment"])
        gc.unfreeze = lambda: None  # vLLM's last act: it would look through all that the server has imported
        import_module(request["fork"]).main(answers)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends those who ask
    import_module("tests.fork_server").serve(int(sys.argv[1]))
