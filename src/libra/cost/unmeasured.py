"""Parts of a model whose prices were not compared with any measurement."""

from __future__ import annotations

from libra.hardware.attention import Attention
from libra.hardware.context import ALL
from libra.hardware.layers import Mixer
from libra.hardware.model import ModelSpec


def unmeasured(model: ModelSpec) -> str | None:
    """Record that names the kinds of mixers whose times come from FLOPs and bytes alone; None without such mixers."""
    names = sorted({name for kind in model.kinds if kind.mixer and (name := _name(kind.mixer)) is not None})
    if not names:
        return None
    return f"times of {', '.join(names)} of {model.name} are modelled by FLOPs and bytes, and not compared with any run"


def _name(mixer: Mixer) -> str | None:
    if not mixer.reads():
        return "states"
    if len(mixer.reads()) > 1:
        return "attention to chosen keys"
    if mixer.reads()[0].reach != ALL:
        return "windows" if isinstance(mixer, Attention) else "attention to chosen keys"
    return None
