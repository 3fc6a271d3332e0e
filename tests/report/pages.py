"""What a page or a table says and draws, as a reader finds it."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

from markupsafe import escape
from rich.table import Table


class Page(HTMLParser):
    """Text and elements of a page; fails on a tag that is not closed where it should be."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def count(self, tag: str, **attributes: str) -> int:
        return sum(name == tag and attributes.items() <= found.items() for name, found in self.tags)


def figure(source: str, title: str) -> str:
    """The markup of the figure with this title."""
    found: list[str] = [
        part for part in re.findall(r"<figure.*?</figure>", source, re.DOTALL) if f"<h3>{escape(title)}</h3>" in part
    ]
    assert len(found) == 1
    return found[0]


def titles(chart: str) -> list[str]:
    """What the marks of a chart say under the pointer."""
    return [unescape(found) for found in re.findall(r"<title>([^<]*)</title>", chart)]


def marks(chart: str, kind: str) -> int:
    """How many marks of this kind (line, symbol, rect, text, rule) a chart has."""
    groups = re.findall(rf'class="mark-{kind} role-mark[^>]*>(.*?)</g>', chart)
    return sum(len(re.findall(r"<(?:path|line|text)\b", group)) for group in groups)


def needs_nothing(source: str) -> None:
    """The page loads nothing, is well-formed, and follows the reader's choice of light or dark."""
    page = Page(source)
    assert page.count("script") == page.count("link") == page.count("img") == 0
    for address in ("http", "src=", "href", "url(", "@import", "//"):
        assert address not in source, address
    assert "prefers-color-scheme: dark" in source
    assert "nan" not in re.sub(r"<style>.*?</style>", "", source, flags=re.DOTALL).lower()


def cells(table: Table) -> list[tuple[str, ...]]:
    """The rows of a terminal's table."""
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    return list(zip(*columns, strict=True))
