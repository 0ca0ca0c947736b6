"""What is said of a server that did not start: the reason in its log, in one line."""

from pathlib import Path

import pytest

from vllm_batch_invariant.verify.harness.engine import reason_in

PROCESSES = """\
(APIServer pid=1) WARNING 11-21 21:13:29 [utils.py:255] This can cause fd limit errors like `OSError: [Errno 24]`.
(Worker pid=3) ERROR 11-21 21:14:07 [executor.py:953] Traceback (most recent call last):
(Worker pid=3) ERROR 11-21 21:14:07 [executor.py:953] safetensors._rust.SafetensorError: incomplete metadata
(EngineCore pid=2) ERROR 11-21 21:14:09 [core.py:1510] Exception: WorkerProc initialization failed due to an exception
Exception: WorkerProc initialization failed due to an exception
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


OF_A_STEP = """\
(Worker pid=3) ERROR 11-27 03:47:26 [executor.py:1063]   File "/v/site-packages/vllm/fixed.py", line 621, in softmax
(Worker pid=3) ERROR 11-27 03:47:26 [executor.py:1063]     _softmax_kernel[(n_rows,)](
(Worker pid=3) ERROR 11-27 03:47:26 [executor.py:1063] TypeError: 'function' object is not subscriptable
  File "/v/site-packages/vllm/v1/executor.py", line 444, in get_response
RuntimeError: Worker failed with error ''function' object is not subscriptable', please check the stack trace above
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (PROCESSES, ": incomplete metadata"),
        (
            OF_A_STEP,
            ": 'function' object is not subscriptable (TypeError in vllm/fixed.py, line 621, in softmax)",
        ),
        ("usage: server [options]\nserver.py: error: unrecognized arguments: --a", ": unrecognized arguments: --a"),
        ("OSError: first\n\nDuring handling ...\n\nValueError: " + "last " * 100, ": last last"),
        ("INFO [utils.py:1] loading\n", ""),
        ("KeyError: 'layer'", ": 'layer'"),
    ],
)
def test_the_reason_is_the_last_error_that_follows_from_no_other(tmp_path: Path, log: str, reason: str) -> None:
    path = tmp_path / "log"
    path.write_text(log)
    found = reason_in(path)
    assert found.startswith(reason)
    assert len(found) <= 302
    assert bool(found) == bool(reason)
