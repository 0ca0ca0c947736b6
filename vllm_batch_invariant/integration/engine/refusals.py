"""A refusal reaches the user as one line, whichever process finds it.

What only a layer or a device knows is refused in a worker, two processes away from the user. vLLM logs such an error
with the traceback of each process on its way and raises another one, "Engine core initialization failed", in the front
end. So the process that refuses leaves its line in a file whose name every process inherits, and ends quietly; the
front end raises the same refusal from there.
"""

import functools
import logging
import multiprocessing
import os
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import NotCovered
from ..reviews import patch_points

logger = logging.getLogger("vllm.batch_invariant")

LEFT_AT = "_VLLM_BATCH_INVARIANT_REFUSAL"
"""The variable that names the file; there is a file only after a refusal, until the front end has read it."""
PREFIX = "vllm-batch-invariant-"
"""How the names of the files begin."""
_ENGINE, _WORKER, _SERVER = "EngineCore", "VllmWorker", "ApiServer"
"""How the names of the processes begin that vLLM starts for an engine, and for several servers of one."""


def install() -> None:
    """Hook into a process that starts others; the user's chooses the file, which those that it starts inherit."""
    if _process().startswith(_WORKER):
        return
    if is_users_process():
        os.environ[LEFT_AT] = f"{tempfile.gettempdir()}/{PREFIX}{uuid.uuid4().hex}"
    if not _process().startswith(_ENGINE):
        patch_points.WAIT_FOR_ENGINE.put(relayed(patch_points.WAIT_FOR_ENGINE.get()))
    for point, method in ((patch_points.EXECUTOR, "__init__"), (patch_points.ENGINE_CORE, "_initialize_kv_caches")):
        setattr(point.get(), method, relayed(getattr(point.get(), method)))


def is_users_process() -> bool:
    """Whether vLLM has not started this process: it names the files by which the others talk to each other."""
    return not _process().startswith((_ENGINE, _WORKER, _SERVER))


def of_requests(process_inputs: Callable[..., Any], problem: Callable[[Any, Any], str]) -> Callable[..., Any]:
    """vLLM's method of the front end, which refuses requests in which there is a ``problem``, asked of vLLM's request
    and configuration; empty if there is none.

    The method then raises:
        VLLMValidationError: vLLM's, of which a server tells the client.
    """

    @functools.wraps(process_inputs)
    def process_and_check(self: Any, *args: Any, **named: Any) -> Any:
        request = process_inputs(self, *args, **named)
        if found := problem(request, self.vllm_config):
            raise patch_points.VALIDATION_ERROR.get()(found)
        return request

    return process_and_check


def relayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose refusals, and errors that follow from a refusal in another process, are refusals here.

    The function then raises:
        NotCovered: in the user's process.
        SystemExit: in a process of the engine, whose parent finds the line that was left.
    """

    @functools.wraps(function)
    def relaying(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except NotCovered as error:
            refusal = error
        except Exception:
            line = _told()
            if line is None:
                raise
            refusal = NotCovered.again(line)
        if not _process().startswith((_ENGINE, _WORKER)):
            raise refusal.with_traceback(None)
        if _tell(str(refusal)):
            logger.error("%s: %s", type(refusal).__name__, refusal)
        sys.exit(1)

    return relaying


def _process() -> str:
    return multiprocessing.current_process().name


def _tell(line: str) -> bool:
    """Leave the line for the processes above, if they want it; False if a process below has."""
    if LEFT_AT not in os.environ:  # who started this process has not loaded the plugin
        return True
    try:
        descriptor = os.open(os.environ[LEFT_AT], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as file:
        file.write(line)
    return True


def _told() -> str | None:
    """The line that a process below has left; the user's process takes it away."""
    file = Path(os.environ.get(LEFT_AT, ""))
    if not file.is_file():
        return None
    line = file.read_text()
    if not _process().startswith((_ENGINE, _WORKER)):
        file.unlink()
    return line
