"""Modules of a checkpoint under the names of quantisation tools, and shares of parameters that lists of names cover.

Invariant: every matrix of every layer is one module, with all names that publishers use for it. One routed expert
represents all routed experts of its layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import translate

from libra.config.yaml_file import shown
from libra.hardware.layers import LayerKind
from libra.hardware.model import ModelSpec
from libra.hardware.stored_weights import MATRIX_KINDS, KeptShares, MatrixKind

_MIXERS = ("self_attn", "mixer", "attn", "attention")
_MLPS = ("mlp", "mixer", "ffn", "block_sparse_moe", "feed_forward")
_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass(frozen=True, slots=True)
class Module:
    """A matrix of a layer. Its `names` begin with `layers`."""

    kind: MatrixKind
    names: tuple[str, ...]
    size: int


def modules(model: ModelSpec) -> Iterator[Module]:
    """All matrices of all layers."""
    parts = [list(_parts(kind, model.hidden)) for kind in model.kinds]
    for layer, index in enumerate(model.order):
        for kind, names, size in parts[index]:
            yield Module(kind, tuple(f"layers.{layer}.{name}" for name in names), size)


def _parts(layer: LayerKind, hidden: int) -> Iterator[tuple[MatrixKind, list[str], int]]:
    if layer.mixer is not None:
        for matrix in layer.mixer.matrices(hidden):
            first, _, rest = matrix.name.partition(".")
            first_names = _MIXERS if first == "self_attn" else (first,)
            yield "attention", [f"{it}.{rest}" for it in first_names], matrix.size
    experts, dense = layer.experts, layer.dense
    if dense is not None:
        yield from _mlp("dense", "", hidden, dense.intermediate, dense.gated)
    if experts is not None:
        if experts.shared_intermediate:
            place = "" if experts.beside else "shared_experts."
            yield from _mlp("shared", place, hidden, experts.shared_intermediate, experts.gated)
        if experts.latent:
            for name in ("fc1_latent_proj", "fc2_latent_proj"):
                yield "shared", [f"{it}.{name}" for it in _MLPS], hidden * experts.latent
        width = experts.width(hidden)
        for kind, names, size in _mlp("experts", "experts.0.", width, experts.intermediate, experts.gated):
            yield kind, [it.partition(".")[2] for it in names] if experts.beside else names, size


def _mlp(
    kind: MatrixKind, inside: str, hidden: int, intermediate: int, gated: bool
) -> Iterator[tuple[MatrixKind, list[str], int]]:
    places = (inside, "shared_expert.") if inside == "shared_experts." else (inside,)
    for name, other in _NAMES.items():
        if gated or name != "gate_proj":
            names = [f"{mlp}.{place}{it}" for mlp in _MLPS for place in places for it in (name, other)]
            yield kind, names, hidden * intermediate


def shares(model: ModelSpec, patterns: list[str]) -> KeptShares:
    """Share of each kind's parameters that match the patterns. Raises `ValueError` for an invalid regular
    expression."""
    matches = _matcher(patterns)
    named, total = dict.fromkeys(MATRIX_KINDS, 0), dict.fromkeys(MATRIX_KINDS, 0)
    for module in modules(model):
        total[module.kind] += module.size
        if any(map(matches, module.names)):
            named[module.kind] += module.size
    return KeptShares(**{kind: named[kind] / total[kind] if total[kind] else 0.0 for kind in MATRIX_KINDS})


def _matcher(patterns: list[str]) -> Callable[[str], bool]:
    """A function that tests whether a pattern matches the name of a module. A pattern is the module's name, a parent's
    name, or a part of the path (`self_attn`). With `re:` it is a regular expression, and `*` is a wildcard. The prefix
    before `layers` is ignored.
    """
    plain: set[str] = set()
    expressions: list[re.Pattern[str]] = []
    wildcards: list[str] = []
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                expressions.append(re.compile(pattern[3:]))
            except re.error as error:
                raise ValueError(f"{shown(pattern)} is not a regular expression: {error}") from None
            continue
        short = pattern[pattern.index("layers.") :] if "layers." in pattern else pattern
        if "*" in pattern:
            wildcards += [short] if short != pattern else [pattern, f"layers.{pattern}"]
        else:
            plain.add(short)
    wild = (
        re.compile("|".join(f"(?:{translate(it)}|{translate(it + '.*')})" for it in wildcards)) if wildcards else None
    )

    def matches(name: str) -> bool:
        parts = ["model", *name.split(".")]
        spans = ((start, end) for start in range(len(parts)) for end in range(start + 1, len(parts) + 1))
        return (
            any(".".join(parts[start:end]) in plain for start, end in spans)
            or (wild is not None and (wild.match(name) is not None or wild.match(f"model.{name}") is not None))
            or any(it.match(f"model.{name}") for it in expressions)
        )

    return matches
