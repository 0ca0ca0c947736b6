"""Builds the site: its scripts with esbuild, then its pages with MkDocs. Needs the extra [site] and npm's packages.

usage: python -m scripts.site [--out FOLDER]
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / ".cache" / "site"
BUNDLE = ROOT / ".cache" / "site-bundle"


def build(out: Path = OUT) -> None:
    """Build it into a folder.

    Raises:
        subprocess.CalledProcessError: a link that leads nowhere, or a script that cannot be bundled.
    """
    BUNDLE.mkdir(parents=True, exist_ok=True)
    subprocess.run(["node", "site/build.mjs", BUNDLE], cwd=ROOT, check=True)
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "-q", "-f", "site/mkdocs.yml", "-d", out.resolve()]
    subprocess.run(mkdocs, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)


def main(arguments: list[str] | None = None) -> None:
    """Build the site, and print where it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="where to build it (default: .cache/site)")
    out = parser.parse_args(arguments).out
    build(out)
    print(out / "index.html")


if __name__ == "__main__":
    main()
