"""A comparison of policies as sentences, table, CSV and JSON."""

from __future__ import annotations

import csv
import io
from typing import Any

from rich.table import Column, Table

from libra.choose.study import Study
from libra.report.tables import number
from libra.report.words import MISSING, cell, duration, plural, printable, signed_percent

_NOTHING = "unclear"  # the interval includes 0


def verdict(found: Study, policy: int, metric: int) -> str:
    """`faster` or `slower` than the first policy; `unclear` if the interval includes 0; `equal` on all seeds."""
    mean, error = found.over_first(policy, metric)
    if error is None or abs(mean) <= error:
        return _NOTHING if mean or error is None else "equal"
    return "slower" if mean > 0 else "faster"


def over_words(found: Study, policy: int, metric: int) -> str:
    mean, error = found.over_first(policy, metric)
    return signed_percent(mean, 1) + ("" if error is None else f" ± {100 * error:.1f}")


def study_sentences(found: Study) -> tuple[str, ...]:
    """A sentence for each metric: the policy with the lowest mean, and its comparison with the first policy."""
    lines = []
    for metric, name in enumerate(found.metrics):
        best = min(range(len(found.policies)), key=lambda policy: found.mean(policy, metric)[0])
        words = f"Lowest {name}: {printable(found.policies[best])}, {duration(found.mean(best, metric)[0])}"
        if best:
            first = printable(found.policies[0])
            words += f", {over_words(found, best, metric)} against {first} ({verdict(found, best, metric)})"
        lines.append(f"{words}.")
    return tuple(lines)


def study_table(found: Study) -> Table:
    columns: list[Column | str] = [Column("policy", overflow="fold")]
    for name in found.metrics:
        columns += [number(name), number(f"against {cell(found.policies[0])}"), ""]
    table = Table(*columns, title=f"{plural(len(found.seeds), 'seed')}, simulated")
    for policy, name in enumerate(found.policies):
        table.add_row(cell(name), *(cell(it) for it in cells(found, policy)))
    table.caption = "± half of the 95 % interval; differences are paired by seed"
    return table


def cells(found: Study, policy: int) -> list[str]:
    """For each metric the mean, the difference from the first policy, and the verdict on it."""
    words = []
    for metric in range(len(found.metrics)):
        mean, error = found.mean(policy, metric)
        words.append(duration(mean) + ("" if error is None else f" ± {duration(error)}"))
        words += [over_words(found, policy, metric), verdict(found, policy, metric)] if policy else [MISSING, MISSING]
    return words


def as_csv(found: Study) -> str:
    """A line for each run and metric."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("policy", "seed", "metric", "seconds"))
    for policy, name in enumerate(found.policies):
        for metric, values in zip(found.metrics, found.seconds[policy], strict=True):
            writer.writerows((name, seed, metric, repr(value)) for seed, value in zip(found.seeds, values, strict=True))
    return text.getvalue()


def document(found: Study) -> dict[str, Any]:
    """The comparison for programs; `over_first` is a share of the first policy's mean."""
    return {
        "seeds": list(found.seeds),
        "policies": [
            {
                "policy": name,
                **{
                    metric: {
                        "mean": found.mean(policy, which)[0],
                        "error": found.mean(policy, which)[1],
                        "over_first": found.over_first(policy, which)[0],
                        "over_first_error": found.over_first(policy, which)[1],
                        "seconds": list(found.seconds[policy][which]),
                    }
                    for which, metric in enumerate(found.metrics)
                },
            }
            for policy, name in enumerate(found.policies)
        ],
    }
