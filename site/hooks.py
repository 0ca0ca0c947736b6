"""What MkDocs does beside the documents: the README as its first page, other files that documents link, and scripts."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
BUNDLE = ROOT / ".cache" / "site-bundle"
"""Where build.mjs writes."""
_LINK = re.compile(r"(\]\()([^)\s:#]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """The README, the changelog, whatever documents link outside of docs, and the scripts of the pages."""

    def add(path: Path, place: str) -> None:
        files.append(File.generated(config, place, abs_src_path=str(path)))

    add(ROOT / "README.md", "index.md")
    add(ROOT / "CHANGELOG.md", "CHANGELOG.md")
    add(ROOT / "SECURITY.md", "SECURITY.md")
    for target in sorted(_linked_outside()):
        add(ROOT / target, target)
    for asset in sorted((ROOT / "site" / "assets").iterdir()):
        add(asset, f"assets/{asset.name}")
    for asset in ("see.js", "licences.txt"):
        add(BUNDLE / asset, f"assets/{asset}")
    add(ROOT / "site" / "node_modules" / "iframe-worker" / "shim" / "index.js", "assets/iframe-worker.js")
    return files


def _linked_outside() -> set[str]:
    """Files outside of docs, and no pages, that the README or a document links or shows, from the root."""
    found = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        folder = page.parent.relative_to(ROOT)
        targets = (target for _, target, _ in _LINK.findall(page.read_text(encoding="utf-8")))
        found |= {os.path.normpath(folder / target) for target in targets if not target.endswith(".md")}
    return {target for target in found if not target.startswith("docs" + os.sep) and (ROOT / target).is_file()}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that are right on GitHub, where the README lies above docs, made right on the site, where it lies in it."""
    place = page.file.src_uri
    if place in ("index.md", "CHANGELOG.md", "SECURITY.md"):
        return _LINK.sub(lambda found: found[1] + found[2].removeprefix("docs/") + found[3], markdown)

    def moved(found: re.Match) -> str:
        target = os.path.normpath(os.path.join("docs", os.path.dirname(place), found[2]))
        return found[1] + _on_site(target, os.path.dirname(place)) + found[3]

    return _LINK.sub(moved, markdown)


def _on_site(target: str, folder: str) -> str:
    place = "index.md" if target == "README.md" else target.removeprefix("docs/")
    return os.path.relpath(place, folder or ".").replace(os.sep, "/")


def on_page_content(html: str, **_: Any) -> str:
    """The script, on pages that have something to move."""
    if "data-see=" not in html:
        return html
    return f'{html}\n<script defer src="../assets/see.js"></script>\n'
