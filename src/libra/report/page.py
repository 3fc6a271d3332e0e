"""Parts that all pages share: colours, tiles, and templates.

A page is self-contained: it loads no script, font or other file. All text that is not markup is escaped, so text of a
run cannot become a tag.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from json import dumps
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from libra.plan.transition import Role
from libra.records.causes import Cause
from libra.report import words
from libra.report.charts import Figure

# Each role and each cause has one colour on all pages. Making tokens or gradients has a full colour, and waiting a pale
# one. A change or a failure has the colour of its role. The colours of roles are from the palette of Okabe and Ito
# (2008), which colour-blind people can distinguish.
ROLES: dict[Role, str] = {
    Role.TRAIN: "#e69f00",
    Role.ROLLOUT: "#56b4e9",
    Role.JOINING: "#f0e442",
    Role.DRAINING: "#cc79a7",
    Role.IDLE: "#d5dae0",
    Role.FAILED: "#d55e00",
}
BUCKETS = ("#56b4e9", "#0072b2", "#003f63")  # of engines by bucket: one hue, differing in lightness

CAUSES: dict[Cause, str] = {
    Cause.GENERATING: ROLES[Role.ROLLOUT],
    Cause.COMPUTING: ROLES[Role.TRAIN],
    Cause.EXCHANGING: "#8c5a00",
    Cause.PUBLISHING: "#b5532a",
    Cause.LOADING: "#0072b2",
    Cause.CHECKPOINTING: "#5b4b8a",
    Cause.REDOING: "#8e1b2e",
    Cause.ROLLOUT_BOUND: "#f6dda0",
    Cause.REPLICA_BOUND: "#dcb887",
    Cause.TRAINING_BOUND: "#bcdaf0",
    Cause.TOOL_BOUND: "#addac6",
    Cause.NO_WORK: "#d3c8e3",
    Cause.BOUNDARY: "#cdc5aa",
    Cause.STARTING: ROLES[Role.JOINING],
    Cause.MOVING: ROLES[Role.DRAINING],
    Cause.FAILED: ROLES[Role.FAILED],
    Cause.IDLE: ROLES[Role.IDLE],
    Cause.EVALUATING: "#8a949e",
}


@dataclass(frozen=True, slots=True)
class Tile:
    label: str
    value: str
    detail: str
    alarming: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """Text of a cell after a bar, whose length is `part` (0 to 1) of the longest."""

    words: str
    part: float


@dataclass(frozen=True, slots=True)
class CardTable:
    title: str
    note: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str | Bar]]
    kind: str = ""  # class of the style sheet


@dataclass(frozen=True, slots=True)
class Chapter:
    """A chapter of a page: figures, and tables below them."""

    title: str
    figures: tuple[Figure, ...]
    tables: tuple[CardTable, ...]


def render(template: str, title: str, package: str = "libra.report", **facts: Any) -> str:
    """The page made from a template in a package's `templates/` and the given values."""
    return _templates(package).get_template(template).render(title=title, **facts)


def render_chapter(template: str, package: str, **facts: Any) -> Markup:
    """A part of a page, from a template of another package."""
    return Markup(_templates(package).get_template(template).render(**facts))


def _templates(package: str) -> Environment:
    """The templates of a package, which may extend the shared templates."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(it) for it in dict.fromkeys((package, "libra.report"))]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    shown = ("count", "duration", "fine_duration", "percent", "plain", "plural", "signed_duration", "worded")
    environment.filters |= {name: getattr(words, name) for name in shown}
    return environment


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
