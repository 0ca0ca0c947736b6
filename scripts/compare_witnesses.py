"""Shows whether a release computes other bits than the one before: small models are served by both on this machine, and
their witnesses compared. CHANGELOG.md says for each model, under Bits, whether they changed and why.

usage: python -m scripts.compare_witnesses [--against REVISION] [--record [--why TEXT]]

Exit status: 0 if the changelog says what is found, 1 if it does not, 2 if nothing could be compared.
"""

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.bit_sources import CHANGELOG, ROOT, recorded
from vllm_batch_invariant.cli import main as command
from vllm_batch_invariant.envs import FLAG
from vllm_batch_invariant.verify.harness.server import serve
from vllm_batch_invariant.verify.outcome import NoTestError

MODELS: dict[str, tuple[str, ...]] = {
    "dense, bf16": (),
    "experts, bf16": ("--experts", "8"),
    "dense, INT4": ("--format", "w4a16-g128"),
}
"""Arguments of make-checkpoint, by what the changelog calls the model."""
HEADER = "| witness on a CPU, against {} | bits changed |\n| --- | --- |\n"
TABLE = re.compile(
    r"^\| witness on a CPU, against (\S+) \| bits changed \|\n\| --- \| --- \|\n((?:\|.*\n)+)\n", re.MULTILINE
)
ROW = re.compile(r"^\| (.*?) \| (.*) \|$", re.MULTILINE)


def last_release() -> str:
    """The newest tag before this revision."""
    return _git("describe", "--tags", "--abbrev=0").decode().strip()


def sources_of(revision: str, folder: Path) -> Path:
    """The package of a revision, in a folder that Python can import it from."""
    with tarfile.open(fileobj=io.BytesIO(_git("archive", revision, "vllm_batch_invariant"))) as files:
        files.extractall(folder, filter="data")
    return folder


def witness(model: Path, sources: Path) -> tuple[str, str]:
    """The witness of a served model, and the version of this project that served it with a digest of its sources.

    Args:
        model: a checkpoint.
        sources: a folder that holds the package.

    Raises:
        NoTestError: the server does not start, has another package, or has no witness.
    """
    # without PYTHONSAFEPATH the folder from which this runs would come first
    variables = {FLAG: "1", "PYTHONSAFEPATH": "1", "PYTHONPATH": str(sources), "VLLM_CPU_KVCACHE_SPACE": "1"}
    with serve(str(model), ["--enforce-eager", "--max-model-len", "512"], variables) as server:
        open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        with open_url(f"{server.base_url}/batch_invariant", timeout=60) as reply:
            said = json.load(reply)
    if not said["witness"]:
        raise NoTestError(f"{sources} has no witness of {model}")
    return said["witness"], said["versions"]["vllm-batch-invariant"]


def changed(revision: str, folder: Path) -> dict[str, bool]:
    """Whether the witness of each of :data:`MODELS` is another one than at a revision.

    Raises:
        NoTestError: one of both cannot be had, or they are of other requests.
    """
    before, found = sources_of(revision, folder / "before"), {}
    for name, arguments in MODELS.items():
        model = folder / name.replace(", ", "-")
        if command(["make-checkpoint", str(model), "--layers", "2", *arguments]):
            raise NoTestError(f"no model {name}")
        (was, by), (now, here) = (witness(model, sources) for sources in (before, ROOT))
        print(f"{name}: {was} by {by}, {now} by {here}", flush=True)
        if was.partition("-")[0] != now.partition("-")[0]:
            raise NoTestError("the witnesses are of other requests, and cannot be compared")
        found[name] = was != now
    return found


def said_in(changelog: str) -> dict[str, str]:
    """By the name of a model, whether the changelog says that bits changed: "no", or "yes: " and why."""
    return dict(ROW.findall(table[2])) if (table := TABLE.search(changelog)) else {}


def wrong(said: Mapping[str, str], found: Mapping[str, bool]) -> list[str]:
    """Where the changelog says something else than what was found, a line each."""
    return [
        f"{name}: bits {'changed' if other else 'did not change'}, and CHANGELOG.md says {said.get(name, 'nothing')!r}"
        for name, other in found.items()
        if not (said.get(name, "").startswith("yes: ") if other else said.get(name) == "no")
    ]


def with_table(changelog: str, revision: str, found: Mapping[str, bool], why: str) -> str:
    """The changelog with a table of what was found, above that of the digests of the same release.

    Raises:
        ValueError: bits changed, and nobody says why.
    """
    if any(found.values()) and not why:
        raise ValueError("bits changed: say why")
    rows = "".join(f"| {name} | {f'yes: {why}' if other else 'no'} |\n" for name, other in found.items())
    digests = recorded(changelog)
    above, below = TABLE.sub("", changelog.partition(digests)[0], count=1), changelog.partition(digests)[2]
    return f"{above}{HEADER.format(revision)}{rows}\n{digests}{below}"


def _git(*words: str) -> bytes:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True)
    if done.returncode:
        raise NoTestError(done.stderr.decode().strip())
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, and record or check; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REVISION", help="of git; by default the newest tag")
    parser.add_argument("--record", action="store_true", help="write what is found into CHANGELOG.md")
    parser.add_argument("--why", default="", metavar="TEXT", help="why bits changed")
    options = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        revision = options.against or last_release()
        with tempfile.TemporaryDirectory() as folder:
            found = changed(revision, Path(folder))
        if options.record:
            CHANGELOG.write_text(with_table(CHANGELOG.read_text(), revision, found, options.why))
    except (NoTestError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    problems = wrong(said_in(CHANGELOG.read_text()), found)
    print("\n".join(problems or ["CHANGELOG.md says what was found"]))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
