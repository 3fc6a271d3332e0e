"""What all pages share: figures and tiles, and the templates that they are put in.

A page needs nothing but itself: no script, no address, no font to fetch. Everything that is not markup already is
escaped, so nothing that a run wrote can end up as a tag.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from json import dumps
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from libra.report import words

Legend = tuple[tuple[str, str], ...]  # (name, colour)

_NONE = Markup("")


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with something in it, or without one a note that says what is missing and why."""

    title: str
    note: str
    chart: Markup = _NONE
    legend: Legend = ()
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Tile:
    label: str
    value: str
    detail: str
    alarming: bool = False


def render(template: str, title: str, **facts: Any) -> str:
    """The page that is made of this template of `templates/` and these facts."""
    environment = Environment(
        loader=PackageLoader("libra.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    shown = ("count", "duration", "fine_duration", "percent", "plain", "plural", "signed_duration", "worded")
    environment.filters |= {name: getattr(words, name) for name in shown}
    return environment.get_template(template).render(title=title, **facts)


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Leaves of a JSON value with their dotted paths.

    >>> list(flatten({"train": {"lr": 3e-5}, "seeds": [1, 2]}))
    [('train.lr', '3e-05'), ('seeds', '[1, 2]')]
    """
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        for index, inner in enumerate(value):
            yield from flatten(inner, f"{path}[{index}]")
    else:
        yield path, value if isinstance(value, str) else dumps(value)
