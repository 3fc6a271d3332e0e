"""Tables of single layers as LLMServingSim 2 publishes them, summed over the layers of a model.

Invariant: every number was measured there, by itself, on the same GPU; what a table does not have is refused by name.
Older tables and newer ones are read alike: attention by what is before a chunk, or by what its tokens see in the mean;
experts with everything around them, or by their parts; and collectives without a name, which are all-reduces.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.fidelity.layer_tables import price_at
from libra.hardware.mlp import Experts
from libra.hardware.model import ModelSpec

Pairs = list[tuple[float, float]]

_ONCE = frozenset({"embedding", "final_layernorm"})
_TWICE = frozenset({"layernorm"})  # before attention and after it
_EACH = frozenset({"qkv_proj", "qk_norm", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj"})
_HEAD = frozenset({"lm_head", "sampler"})
_BYTES = 2  # of a number
_ROUTE = 8  # bytes that say where a token goes and with what weight, for each of its experts


def layer_tables(bundle: Path, hardware: Path, model: ModelSpec, tp: int, dp: int) -> dict[str, Any]:
    """Microseconds of all layers on one GPU, as `layers` of a run. What tensor parallelism does not divide is only in
    the table of one GPU. Raises ValueError, KeyError or OSError that says what there is no table of."""
    reduce = _collective(hardware, "all_reduce", model) if tp > 1 else []
    dense, whole = (_columns(bundle / f"tp{degree}" / "dense.csv", "tokens") for degree in (tp, 1))
    head, alone = (_columns(bundle / f"tp{degree}" / "per_sequence.csv", "sequences") for degree in (tp, 1))
    dense, head = whole | dense, alone | head
    unknown = sorted((dense.keys() - _ONCE - _TWICE - _EACH) | (head.keys() - _HEAD))
    if unknown:
        raise ValueError(f"layers {', '.join(unknown)} are not known")
    times = {name: 1 if name in _ONCE else model.layers * (2 if name in _TWICE else 1) for name in dense}
    found = {
        "tokens": [
            (count, us + 2 * model.layers * (price_at(reduce, count) if reduce else 0.0))
            for count, us in _summed(dense, times)
        ],
        "sequences": _summed(head, dict.fromkeys(head, 1)),
        "attention": _attention(bundle / f"tp{tp}" / "attention.csv", model.layers),
        "spread": _spread(bundle / f"tp{tp}" / "skew.csv"),
    }
    if model.experts is not None:
        if tp > 1:
            raise ValueError("experts of tensor-parallel GPUs are not predicted from tables of layers")
        exchange = _exchange(hardware, model, model.experts, dp) if dp > 1 else []
        found["experts"] = _experts(bundle / "tp1", model, model.experts, dp, exchange)
    return found


def _columns(path: Path, axis: str) -> dict[str, dict[int, float]]:
    """By layer and size."""
    found: dict[str, dict[int, float]] = {}
    for row in _csv(path):
        found.setdefault(row["layer"], {})[int(row[axis])] = float(row["time_us"])
    return found


def _summed(layers: Mapping[str, Mapping[int, float]], times: Mapping[str, int]) -> list[tuple[int, float]]:
    sizes = sorted(set.intersection(*(set(points) for points in layers.values())))
    return [(size, sum(times[name] * points[size] for name, points in layers.items())) for size in sizes]


def _attention(path: Path, layers: int) -> list[tuple[float, ...]]:
    """Newer tables have how far tokens of prompts look back in the mean: all that is before their chunk, and half of
    it. Older ones have one chunk, and what is before it."""
    found: list[tuple[float, ...]] = []
    others = set()
    for row in _csv(path):
        if row.get("layer", "attention") != "attention":
            others.add(row["layer"])
            continue
        chunk = _count(row.get("prefill_tokens") or row["prefill_chunk"])
        keys = row.get("prefill_key")
        seen = float(row["kv_prefill"]) + chunk / 2 if keys is None else float(keys)
        if _count(row.get("decode_q_len", "1")) < 2:
            decodes = _count(row["n_decode"]), _count(row["kv_decode"])
            found.append((chunk, seen, *decodes, layers * float(row["time_us"])))
    if others:
        raise ValueError(f"attention {', '.join(sorted(others))} is not known")
    return found


def _spread(path: Path) -> dict[str, Pairs]:
    """Extra time of contexts that differ over even ones, as tokens of context for each of their standard deviation, by
    decodes: least squares over batches of two lengths, each against even ones of its mean and of its longest."""
    sums: dict[str, dict[int, list[float]]] = {}
    for row in _csv(path) if path.is_file() else ():
        if row.get("layer", "attention") != "attention" or _count(row.get("decode_q_len", "1")) > 1:
            continue
        count, longest, mean = int(row["n"]), float(row["kv_big"]), float(row["kv_mean"])
        even, most, mixed = (float(row[f"t_{name}_us"]) for name in ("mean", "max", "skew"))
        if most <= even or longest <= mean:
            continue
        part = int(row["nb"]) / count
        spread = (longest - float(row["kvs"])) * (part * (1 - part)) ** 0.5
        each = spread * (most - even) / (longest - mean) / even
        found = sums.setdefault("beside" if _count(row["pc"]) else "alone", {}).setdefault(count, [0.0, 0.0])
        found[0] += each * (mixed - even) / even
        found[1] += each * each
    return {
        kind: [(count, max(0.0, top / below)) for count, (top, below) in sorted(counts.items()) if below]
        for kind, counts in sums.items()
    }


def _experts(folder: Path, model: ModelSpec, experts: Experts, dp: int, exchange: Pairs) -> dict[str, Pairs]:
    """(tokens of all GPUs, microseconds) of the experts of all layers on one of them, in a graph and without one. Each
    token asks for any of them alike, and the rows between which as many of a GPU's are met are read in proportion."""
    parts = _parts(folder, dp) or _whole(folder / "moe.csv", dp)
    here = experts.count // dp
    found = {}
    for mode, (by_tokens, local) in parts.items():
        points = []
        for tokens, times in sorted(by_tokens.items()):
            met = here * (1 - (1 - experts.active / experts.count) ** tokens)
            us = price_at(sorted(times.items()), met)
            us += sum(price_at(sorted(part.items()), tokens / dp) for part in local)
            points.append((float(tokens), model.layers * (us + (price_at(exchange, tokens / dp) if exchange else 0))))
        found[mode] = points
    return found


_ByTokens = dict[int, dict[int, float]]  # by tokens of all GPUs, and by how many of a GPU's experts they meet
_Parts = dict[str, tuple[_ByTokens, list[dict[int, float]]]]


def _parts(folder: Path, dp: int) -> _Parts:
    """Times of experts measured apart from what every GPU does with its own tokens; empty where there are none."""
    index = folder / "moe_components.json"
    entries = json.loads(index.read_text(encoding="utf-8"))["entries"] if index.is_file() else []
    target = {"tp": 1, "dp": dp, "ep": dp, "rank": 0}
    entries = [it for it in entries if target.items() <= it["target"].items() and not it["target"]["sequence_parallel"]]
    if not entries:
        return {}
    found: _Parts = {}
    local: dict[str, dict[str, dict[int, float]]] = {}
    for row in _csv(folder / entries[0]["path"] / "components.csv"):
        by_tokens, _ = found.setdefault(row["mode"], ({}, []))
        us, tokens, met = float(row["time_us"]), int(row["tokens"]), int(row["activated_experts"])
        if row["component"] == "experts":
            by_tokens.setdefault(tokens, {})[met] = us
        else:
            local.setdefault(row["mode"], {}).setdefault(row["component"], {})[tokens] = us
    return {mode: (by_tokens, [*local.get(mode, {}).values()]) for mode, (by_tokens, _) in found.items()}


def _whole(path: Path, dp: int) -> _Parts:
    by_tokens: _ByTokens = {}
    for row in _csv(path):
        if int(row.get("ep", "1")) == dp:
            by_tokens.setdefault(int(row["tokens"]), {})[int(row["activated_experts"])] = float(row["time_us"])
    if not by_tokens:
        raise ValueError(f"{path.name} has no experts divided over {dp} GPUs")
    return {"graph": (by_tokens, []), "eager": (by_tokens, [])}


def _exchange(hardware: Path, model: ModelSpec, experts: Experts, dp: int) -> Pairs:
    """(tokens of each GPU, microseconds) to gather all tokens and to give back what was made of them. Without times of
    the two parts it is an all-reduce of all tokens, which does the same."""
    try:
        gather = _collective(hardware, "all_gather", model, _ROUTE * experts.active)
        scatter = _collective(hardware, "reduce_scatter", model)
    except ValueError:
        return [(tokens / dp, us) for tokens, us in _collective(hardware, "all_reduce", model)]
    return [(tokens, us + price_at(scatter, tokens)) for tokens, us in gather]


def _collective(path: Path, name: str, model: ModelSpec, more: int = 0) -> Pairs:
    """(tokens, microseconds) of a collective of a layer's output, in 16 bits and `more` additional bytes a token."""
    measured = yaml.safe_load(path.read_text(encoding="utf-8"))["measured"]["interconnect"]
    samples: Iterable[Mapping[str, Any]] = measured["samples"] if measured else ()
    samples = [it for it in samples if it.get("collective", "all_reduce") == name]
    if not samples:
        raise ValueError(f"{path.name} has no {name}")
    each = _BYTES * model.hidden + more
    return sorted((it["bytes"] / each, it.get("us_graphed") or it["us"]) for it in samples)


def _count(text: str) -> int:
    """Newer tables write some whole numbers with a point."""
    return int(float(text))


def _csv(path: Path) -> Sequence[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
