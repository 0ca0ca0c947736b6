"""Matplotlib's figures as SVG to be put into a page: text stays text, ids are the figure's own, links have names."""

import io
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from ..outcome import NoTestError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_WIDTH = 6.0
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
}


def require_matplotlib() -> None:
    """Raises ``NoTestError`` in one line where there is no matplotlib."""
    try:
        import matplotlib  # noqa: ICN001, F401
    except ImportError:
        raise NoTestError("--html needs matplotlib: pip install 'vllm-batch-invariant[report]'") from None


def svg(draw: Callable[["Figure"], None], height: float, name: str, description: str, links: Mapping[str, str]) -> str:
    """Draw a figure of ``height`` inches.

    Args:
        name: of the figure, unique in its page; the ids in it begin with it.
        description: what there is to see, for who does not.
        links: names of the addresses that parts of the figure lead to.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _for_a_page(file.getvalue(), name, description, links)


def _for_a_page(text: str, name: str, description: str, links: Mapping[str, str]) -> str:
    """The same picture without what only a file of its own needs, with a name and a description."""
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _XLINK)
    root = ET.fromstring(text)
    ids = {element.get("id") for element in root.iter() if element.get("id")}
    for element in root.iter():
        for attribute, value in element.items():
            if attribute == "id":
                element.set("id", f"{name}-{value}")
            elif attribute == f"{{{_XLINK}}}href" and value[1:] in ids:
                element.set(attribute, f"#{name}-{value[1:]}")
            elif "url(#" in value:
                element.set(attribute, re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", value))
    for link in root.iter(f"{{{_SVG}}}a"):
        target = link.attrib.pop(f"{{{_XLINK}}}href")
        link.attrib.pop("target", None)
        link.set("href", target)
        link.set("aria-label", links.get(target, target))
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    # an image's insides are hidden from a screen reader, and links must not be
    root.set("role", "group" if links else "img")
    root.set("aria-label", description)
    return ET.tostring(root, encoding="unicode")
