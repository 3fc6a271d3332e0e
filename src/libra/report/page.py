"""The parts that pages are made of: the page itself, tiles, figures and sections.

Invariant: a page needs nothing but itself (no script, no address, no font to fetch), and follows the reader's choice of
light or dark.
"""

from __future__ import annotations

from collections.abc import Iterable

from libra.report.figures import Figure
from libra.report.markup import NOTHING, Markup, join, tag, text
from libra.report.page_style import STYLE
from libra.report.verdict import Tile

_DARK = """
.bar { display: inline-block; height: 10px; border-radius: 3px; margin-right: 8px; vertical-align: 0; }
@media (prefers-color-scheme: dark) {
  :root { color-scheme: dark; --ink: #e4e9ee; --soft: #9aa7b4; --line: #2f3a45; --paper: #1a222a; --ground: #12181e;
    --alarm: #ff8a80; }
  .chart .zero { stroke: #5a6673; }
  .notices li { background: #3a2422; }
}
"""

_BAR = 120.0  # px, of the largest bar in a table


def page(title: str, sections: Iterable[Markup], style: str = "") -> str:
    """A whole document; `style` is added to that of all pages."""
    head = join(
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", text(f"{title} · Libra")),
        tag("style", Markup(STYLE + _DARK + style)),
    )
    document = tag("html", tag("head", head), tag("body", tag("main", *sections)), lang="en")
    return f"<!DOCTYPE html>\n{document}\n"


def tile_row(shown: Iterable[Tile]) -> Markup:
    return tag("div", *(_tile(tile) for tile in shown), class_="tiles")


def cards(figures: Iterable[Figure]) -> Markup:
    return tag("div", *(_card(figure) for figure in figures), class_="cards")


def section(title: str, body: Markup, note: str = "") -> Markup:
    head = tag("h3", text(title)) if title else NOTHING
    said = tag("p", text(note), class_="note") if note else NOTHING
    return tag("section", head, said, body, class_="card table")


def bar(part: float, largest: float, colour: str) -> Markup:
    """A bar in the cell of a table, before its number."""
    if largest <= 0:
        return NOTHING
    return tag("i", class_="bar", style=f"width:{_BAR * part / largest:.0f}px;background:{colour}")


def _tile(tile: Tile) -> Markup:
    kind = "tile alarm" if tile.alarming else "tile"
    return tag(
        "div", tag("span", text(tile.label)), tag("b", text(tile.value)), tag("span", text(tile.detail)), class_=kind
    )


def _card(figure: Figure) -> Markup:
    note = tag("p", text(figure.note), class_="note") if figure.note else NOTHING
    body = tag("div", figure.body, class_="scroll") if figure.wide else figure.body
    return tag("figure", tag("h3", text(figure.title)), note, body, class_="card wide" if figure.wide else "card")
