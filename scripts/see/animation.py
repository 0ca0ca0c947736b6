"""One dot product in batches of several sizes, as an SVG that moves: plain PyTorch's sums change, the mode's do not.

It shows site/data/dot.json. Where the reader prefers reduced motion, or nothing moves, all lines are there at once.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scripts.see.data import DATA

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SECONDS = 2.5
"""For each order of additions."""


def recorded() -> dict[str, Any]:
    """What scripts/see/dot.py wrote."""
    return json.loads((DATA / "dot.json").read_text())


def name_of(order: dict[str, Any]) -> str:
    """The batches that have an order."""
    first, last = min(order["batches"]), max(order["batches"])
    return f"{first} row{'s' * (first > 1)}" if first == last else f"{first} to {last} rows"


def described(dot: dict[str, Any]) -> str:
    """What is seen, in words."""
    stock = ", ".join(f"{name_of(order)}: {order['result']!r}" for order in dot["stock"])
    where, ours = dot["where"], dot["ours"][0]
    return (
        f"One element of a matmul of {dot['k']} terms ({where['machine']}, PyTorch {where['torch']}, fp32). "
        f"Plain PyTorch in a batch of {stock}. The mode in a batch of {name_of(ours)}: {ours['result']!r}"
    )


def drawing(dot: dict[str, Any], other: str, ours: str) -> Callable[["Figure"], None]:
    """Draws the errors of the running sums: plain PyTorch's in groups ``order-0``, ``order-1``, ..."""

    def draw(figure: "Figure") -> None:
        places = figure.subplots(1, 2, sharey=True)
        terms = range(dot["step"], dot["k"] + 1, dot["step"])

        def line(place: Any, order: dict[str, Any], colour: str, row: int, group: str | None) -> None:
            errors = [1e7 * (sum - exact) for sum, exact in zip(order["running"], dot["exact"], strict=True)]
            [drawn] = place.plot(terms, errors, color=colour, linewidth=1.8)
            label = f"{name_of(order)}: {order['result']!r}"
            text = place.text(0.03, 0.97 - 0.09 * row, label, transform=place.transAxes, va="top", color=colour)
            for artist, part in ((drawn, "line"), (text, "text")):
                artist.set_gid(group and f"{group}-{part}")

        for number, order in enumerate(dot["stock"]):
            line(places[0], order, other, number, f"order-{number}")
        line(places[1], dot["ours"][0], ours, 0, None)
        for place, title in zip(places, ("plain PyTorch", "the mode"), strict=True):
            place.axhline(0, color="black", linewidth=0.6)
            place.set_title(title)
            place.set_xlabel("terms added")
            place.set_ylim(top=place.get_ylim()[1] * 1.6)
        places[0].set_ylabel("error so far, 1e-7")

    return draw


def moving(picture: str, orders: int) -> str:
    """The picture with a style that shows plain PyTorch's orders one after the other."""
    share, cycle = 100 / orders, orders * SECONDS
    steps = f"0%, {share:.3f}% {{ opacity: 1 }} {share + 0.001:.3f}%, 100% {{ opacity: 0.15 }}"
    rules = [f"@keyframes turn {{ {steps} }}"]
    for number in range(orders):
        # a negative delay: it begins in the middle of its cycle
        turn = f"turn {cycle}s step-end {number * SECONDS - cycle}s infinite"
        rules.append(f"#order-{number}-line, #order-{number}-text {{ animation: {turn} }}")
    style = f"<style>@media (prefers-reduced-motion: no-preference) {{ {' '.join(rules)} }}</style>"
    return picture.replace("<defs>", f"{style}<defs>", 1)
