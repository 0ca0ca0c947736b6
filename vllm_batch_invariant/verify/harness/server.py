"""Start a ``vllm serve`` on a free port of this machine, wait until it answers, and stop it again."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import httpx

from ...serve import MODULE
from ..outcome import NoTestError
from .engine import kv_cache_space, reason_in

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Server:
    """A running server."""

    base_url: str
    log: Path
    startup_seconds: float
    process: int = 0
    """The id of its first process, which leads the group of all."""


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


@contextmanager
def serve(
    model: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None, patience: float = 900
) -> Iterator[Server]:
    """Serve ``model`` with the same Python while the block runs; ``environment`` is put over this process's own.

    The server's log is removed after a success or an interruption. After a failure it stays, and the error names it: in
    its text, or in a note if the error is not this project's.

    Raises:
        NoTestError: the server does not start, or ends by itself.
    """
    if find_spec("vllm") is None:
        raise NoTestError("a server needs vLLM in this Python; give --base-url of one that runs elsewhere")
    port = free_port()
    handle, name = tempfile.mkstemp(prefix="vllm-serve-", suffix=".log")
    log = Path(name)
    command = [sys.executable, "-m", *_module(model), "--host", HOST, "--port", str(port), *arguments]
    begin, failed = time.monotonic(), False
    with os.fdopen(handle, "wb") as file:
        # a session of its own: a signal to its group reaches the engine, and Ctrl-C reaches only this process
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **kv_cache_space(model, arguments), **(environment or {})},
            start_new_session=True,
        )
    try:
        _wait_until_healthy(process, f"http://{HOST}:{port}/health", log, patience)
        try:
            yield Server(f"http://{HOST}:{port}/v1", log, time.monotonic() - begin, process.pid)
            _require_running(process, log)
        except NoTestError as error:
            _require_running(process, log)
            raise NoTestError(f"{error}; the server's log is {log}") from error
    except Exception as error:
        failed = True
        if not isinstance(error, NoTestError):
            error.add_note(f"the server's log is {log}")
        raise
    finally:
        _stop(process)
        if not failed:
            log.unlink(missing_ok=True)


def _require_running(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is not None:
        raise NoTestError(f"the server stopped during the run{reason_in(log)}; its log is {log}")


def _module(model: str) -> list[str]:
    try:
        version("vllm")
    except PackageNotFoundError:
        return [MODULE, model]  # vLLM's command needs metadata of that name
    return ["vllm.entrypoints.cli.main", "serve", model]


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path, patience: float) -> None:
    deadline = time.monotonic() + patience
    # no proxy from the environment, and no certificates to load: the server is on this machine
    with httpx.Client(timeout=5, trust_env=False, verify=False) as client:
        while time.monotonic() < deadline:
            if (status := process.poll()) is not None:
                raise NoTestError(f"the server did not start (status {status}){reason_in(log)}; its log is {log}")
            with suppress(httpx.HTTPError):
                if client.get(url).status_code == 200:
                    return
            time.sleep(0.5)
    raise NoTestError(f"the server did not answer within {patience:.0f} s{reason_in(log)}; its log is {log}")


def _stop(process: subprocess.Popen[bytes], patience: float = 20) -> None:
    # what is started in the background, or by nohup, ignores interrupts, and so does its server
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM if ignored else signal.SIGINT)
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        pass
    finally:
        # also an engine that outlived its server
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
