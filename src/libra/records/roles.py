"""The roles that a worker can have, as they are written in records.

A role is a `Role`, or `rollout:BUCKET` for an engine that serves one bucket; anything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

Style = TypeVar("Style")


class Role(StrEnum):
    IDLE = "idle"
    JOINING = "joining"  # a process is starting, or entering the gradient exchange
    ROLLOUT = "rollout"
    TRAIN = "train"
    DRAINING = "draining"  # finishing what runs, taking nothing new
    FAILED = "failed"  # its process is gone


def role_of(label: str) -> Role:
    """The role without the bucket. Raises `ValueError` for one that does not exist."""
    name, colon, bucket = label.partition(":")
    if name not in set(Role):
        raise ValueError(f"role {label!r}: unknown; use one of {', '.join(Role)}, or rollout:BUCKET")
    if colon and (name != Role.ROLLOUT or not bucket):
        raise ValueError(f"role {label!r}: only rollout names a bucket, as in rollout:long")
    return Role(name)


def styles(labels: Iterable[str], of_role: Mapping[Role, Style], of_buckets: Sequence[Style]) -> dict[str, Style]:
    """A style for each distinct label, in order of first appearance. Buckets take `of_buckets` in that order; the last
    of these serves all that follow."""
    distinct = dict.fromkeys(labels)
    buckets = [label for label in distinct if ":" in label]
    return {
        label: of_buckets[min(buckets.index(label), len(of_buckets) - 1)] if ":" in label else of_role[role_of(label)]
        for label in distinct
    }
