"""A server whose two workers are on two nodes, as far as one machine has them: in two network namespaces, each with
shared memory of its own, joined by a pair of virtual interfaces.

usage, in namespaces of its own (:func:`command`): python -m tests.server.two_nodes MODEL FLAG OTHER [ARGUMENT ...]

FLAG and OTHER say whether the mode is on at the first node and at the other. Prints a line of JSON: the answers of
:func:`tests.server.test_nodes.answers`, or an empty list where no server starts.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx

from vllm_batch_invariant.envs import FLAG
from vllm_batch_invariant.verify.harness.server import MODULE

FIRST, OTHER = "10.9.0.1", "10.9.0.2"
PORT = 8000
NAMESPACES = ["unshare", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""With them all processes go, and nothing of the machine is changed."""
SECONDS = 240


def command(model: Path, flag: str, other: str, *arguments: str) -> list[str]:
    """Runs this module in its namespaces."""
    return [*NAMESPACES, sys.executable, "-m", __name__, str(model), flag, other, *arguments]


def join(folder: Path) -> list[str]:
    """Make the other node; returns the beginning of a command that runs there."""
    ready = folder / "ready"
    script = f"mount -t tmpfs none /dev/shm && touch {ready} && exec sleep 1000"
    holder = subprocess.Popen(["unshare", "--net", "--mount", "sh", "-c", script])
    while not ready.exists():
        time.sleep(0.05)
        assert holder.poll() is None
    enter = ["nsenter", "--target", str(holder.pid), "--net", "--mount"]
    lines = [
        "ip link set lo up",
        "ip link add first type veth peer name other",
        f"ip link set other netns {holder.pid}",
        f"ip addr add {FIRST}/24 dev first",
        "ip link set first up",
    ]
    for line in lines:
        subprocess.run(line.split(), check=True)
    for line in ("ip link set lo up", f"ip addr add {OTHER}/24 dev other", "ip link set other up"):
        subprocess.run([*enter, *line.split()], check=True)
    return enter


def main(model: str, flag: str, other: str, *arguments: str) -> None:
    """Start both nodes, ask, and print the answers."""
    from tests.server.test_nodes import answers

    folder = Path(os.environ["TWO_NODES_FOLDER"])
    enter = join(folder)
    asked = [model, "--nnodes", "2", "--master-addr", FIRST, "--master-port", "29501", *arguments]
    started = []
    for rank, (address, interface, on, before, what) in enumerate(
        (
            (FIRST, "first", flag, [], ["--host", "127.0.0.1", "--port", str(PORT)]),
            (OTHER, "other", other, enter, ["--headless"]),
        )
    ):
        variables = {"VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": interface, FLAG: on}
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": str(sorted(os.sched_getaffinity(0))[-rank]), "HF_HUB_OFFLINE": "1"}
        with (folder / f"node-{rank}.log").open("wb") as log:
            words = [*before, sys.executable, "-m", MODULE, *asked, *what, "--node-rank", str(rank)]
            started.append(subprocess.Popen(words, env=os.environ | variables, stdout=log, stderr=log))
    deadline, found = time.monotonic() + SECONDS, []
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", trust_env=False, timeout=120) as client:
        while time.monotonic() < deadline and not any(process.poll() is not None for process in started):
            try:
                if client.get("/health").status_code == 200:
                    found = answers(client)
                    break
            except httpx.TransportError:
                time.sleep(0.5)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
