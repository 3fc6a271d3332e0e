"""Pieces of HTML and SVG.

Invariant: text becomes markup only through `text`, which escapes it, so nothing that a run wrote can end up as a tag;
the type checker sees to it, as `Markup` and `str` are different types.
"""

from __future__ import annotations

from html import escape
from typing import NewType

Markup = NewType("Markup", str)

NOTHING = Markup("")


def text(value: str) -> Markup:
    return Markup(escape(value))


def join(*pieces: Markup) -> Markup:
    return Markup("".join(pieces))


def tag(name: str, *children: Markup, **attributes: str | float) -> Markup:
    """An element. Attribute names take `_` for `-`, and a trailing `_` where Python has the word for itself."""
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{written}>{''.join(children)}</{name}>")


def _value(value: str | float) -> str:
    if isinstance(value, str):
        return escape(value, quote=True)
    return f"{value:.2f}".rstrip("0").rstrip(".")  # a hundredth of a pixel is enough
