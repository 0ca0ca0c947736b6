"""An engine in a process of its own, which takes commands one by one."""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from ...envs import FLAG
from ..outcome import NoTestError
from .engine import kv_cache_space, root_cause

DRIVER = "vllm_batch_invariant.verify.harness.worker_main"
"""The module that runs in the engine's process."""
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}
"""Without multiprocessing an engine starts in a third of the time, and its first step holds every request that was
added before. Functions of this project are sent to its workers, which vLLM calls insecure serialization.
"""


class EngineFailed(NoTestError):
    """The engine did not come up, or broke.

    Attributes:
        log: the output of its process.
    """

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True)
class StepResult:
    """What an engine did with requests that were sent together."""

    requests: list[dict[str, Any]]
    """Of each request: ``completions`` (``text``, ``tokens``, ``logprobs``; of a pooling model the one thing that
    :func:`..answers.answer_of` reads), ``prompt_logprobs``, ``cached`` (tokens
    found in the prefix cache) and ``token_seconds`` (when each token came); or ``refused``, why vLLM did not take it.
    """
    batches: list[tuple[float, int]]
    """(seconds, requests that got a token) of every step of the engine."""
    preemptions: int
    encoded: dict[str, int] = field(default_factory=dict)
    """How often images and videos were encoded, ``calls``, and how many of them in all, ``items``."""

    @property
    def largest_batch(self) -> int:
        """The most requests that got a token in one step of the engine."""
        return max((size for _, size in self.batches), default=0)


def start_process(module: str, answers: int, log: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start ``python -m module ANSWERS`` in a session of its own: a signal to its group reaches the workers, and Ctrl-C
    reaches only this process.

    Args:
        module: the driver.
        answers: a descriptor that it inherits.
        log: takes what it prints.
        environment: all of it.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, str(answers)],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        pass_fds=[answers],
        start_new_session=True,
    )


class Engine:
    """A ``vllm.LLM`` with the arguments of ``vllm serve``, for the length of a ``with`` block.

    Args:
        model: its folder or name.
        arguments: more arguments of ``vllm serve``.
        flag: the value of VLLM_BATCH_INVARIANT; None for not set.
        environment: put over this process's own.
        patience: seconds to wait for an answer.
    """

    def __init__(
        self,
        model: str,
        arguments: Sequence[str] = (),
        flag: str | None = None,
        environment: Mapping[str, str] | None = None,
        patience: float = 1800,
    ) -> None:
        self._arguments, self._patience = [model, *arguments], patience
        inherited = {name: value for name, value in os.environ.items() if name != FLAG}
        self._environment = inherited | kv_cache_space(model, arguments) | _SETTINGS | dict(environment or {})
        self._environment |= {} if flag is None else {FLAG: flag}
        self._process: subprocess.Popen[bytes] | None = None
        self.info: dict[str, Any] = {}
        """Description of the engine, see :func:`.worker_main.describe_engine`."""

    def __enter__(self) -> Self:
        if find_spec("vllm") is None:
            raise EngineFailed("an engine needs vLLM in this Python; give --base-url of a server that runs elsewhere")
        handle, name = tempfile.mkstemp(prefix="vllm-engine-", suffix=".log")
        self._log = Path(name)
        mine, theirs = os.pipe()
        with os.fdopen(handle, "wb") as log:
            self._process = start_process(DRIVER, theirs, log, self._environment)
        os.close(theirs)
        self._answers, self._unread = mine, b""
        try:
            self.info = self.ask("start", self._arguments)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._stop()
        finally:
            if not isinstance(error, EngineFailed):
                self._log.unlink(missing_ok=True)

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def _commands(self) -> IO[bytes]:
        assert self._running.stdin is not None
        return self._running.stdin

    @property
    def log(self) -> str:
        """The output of the engine's process so far."""
        return self._log.read_text(errors="replace")

    def step(
        self,
        name: str,
        requests: list[dict[str, Any]],
        reset_prefix_cache: bool = False,
        preempt_after: int | None = None,
        forget_images: bool = False,
    ) -> StepResult:
        """Send the requests of :mod:`.requests` together and wait for all of them.

        Args:
            name: of the step.
            requests: each a ``prompt`` and its ``params``, and perhaps the folder of its LoRA ``adapter``.
            reset_prefix_cache: let go of what is cached first.
            preempt_after: steps of the engine after which what runs is preempted; None for never.
            forget_images: let go of encoded images first, and of what processors made of them.

        Raises:
            EngineFailed: the engine refused one of them or broke.
        """
        told = {"name": name, "requests": requests, "reset_prefix_cache": reset_prefix_cache}
        told |= {} if preempt_after is None else {"preempt_after": preempt_after}
        told |= {"forget_images": True} if forget_images else {}
        answer = self.ask("step", told)
        batches = [(seconds, size) for seconds, size in answer["batches"]]
        return StepResult(answer["requests"], batches, answer["preemptions"], answer.get("encoded", {}))

    def kill(self) -> None:
        """Kill the engine's processes, from any thread; a call that waits for an answer raises ``EngineFailed``."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def call(
        self,
        function: str,
        *arguments: object,
        on_progress: Callable[[Any], None] | None = None,
        patience: float | None = None,
    ) -> Any:
        """Call the function "module:function" in the engine's process, with its ``vllm.LLM`` as the first argument.

        Arguments, progress and result are plain data.

        Args:
            on_progress: is called with what the function tells (:func:`.worker_main.tell`).
            patience: seconds for the whole call; the engine's own if None.

        Raises:
            EngineFailed: it failed, or took longer.
        """
        return self.ask("call", {"function": function, "arguments": arguments}, on_progress, patience)

    def ask(
        self,
        command: str,
        argument: object,
        on_progress: Callable[[Any], None] | None = None,
        patience: float | None = None,
    ) -> Any:
        """Send a command to the driver; returns its answer.

        Raises:
            EngineFailed: the command failed.
        """
        with suppress(BrokenPipeError):
            self._commands.write(json.dumps({command: argument}).encode() + b"\n")
            self._commands.flush()
        seconds = self._patience if patience is None else patience
        deadline = time.monotonic() + seconds
        while "progress" in (answer := json.loads(self._line(deadline, seconds))):
            if on_progress is not None:
                on_progress(answer["progress"])
        if "failed" in answer:
            why = root_cause(answer["failed"], self._log)
            raise EngineFailed(f"{why} (the engine's log is {self._log})", self.log)
        return answer[command]

    def _line(self, deadline: float, patience: float) -> bytes:
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise EngineFailed(f"the engine gave no answer in {patience:.0f} s; its log is {self._log}")
                read = os.read(self._answers, 1 << 20)
                if not read:
                    raise EngineFailed(
                        f"the engine's process ended (status {self._running.wait()}); its log is {self._log}", self.log
                    )
                self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _stop(self, patience: float = 20) -> None:
        with suppress(BrokenPipeError):
            self._commands.close()
        os.close(self._answers)
        try:
            self._running.wait(patience if sys.exc_info()[0] is None else 1)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()  # also workers that outlived the engine
            self._running.wait()
