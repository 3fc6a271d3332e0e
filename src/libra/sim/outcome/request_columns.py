"""What became of all requests, as columns.

Invariant: a row says what its request said, in the order in which the requests came; what never happened, or is not
known, is -1. The columns are read-only and hold on to no request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from libra.sim.engine.request import Request, Status
from libra.sim.workload.caller import TrajectoryCaller

ENDS: tuple[Status, ...] = ("finished", "interrupted", "cancelled", "refused", "unfinished")

Column = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RequestColumns:
    """Arrays of one entry a request. Times are ticks, lengths are tokens."""

    number: Column
    arrival: Column
    scheduled: Column  # start of its first iteration
    prefill_end: Column
    first_token: Column
    finish: Column  # also of what was cancelled or refused
    prompt: Column
    output: Column  # asked for; less where the model length cuts it
    generated: Column  # as far as it came
    cached: Column  # of the prompt, found in the prefix cache when it was first admitted
    preemptions: Column
    engine: Column  # index
    status: Column  # index into `ENDS`
    reason: Column  # index into `reasons`
    trajectory: Column  # index into `trajectories`
    turn: Column  # of the trajectory, from 0
    last_call: NDArray[np.bool_]  # the trajectory makes no request after this one
    reasons: tuple[str, ...]
    trajectories: tuple[str, ...]  # ids

    def __len__(self) -> int:
        return len(self.number)

    def ended(self, status: Status) -> NDArray[np.bool_]:
        """Which requests ended so."""
        return np.equal(self.status, ENDS.index(status))


def request_columns(requests: Sequence[Request]) -> RequestColumns:
    """The columns of requests that a cluster has run. Raises ValueError where one is still under way, and where a time
    does not fit: an int64 holds 106 days of ticks."""
    reasons: dict[str, int] = {}
    trajectories: dict[str, int] = {}
    codes = {status: code for code, status in enumerate(ENDS)}

    def column(values: Iterable[int]) -> Column:
        return np.fromiter(values, np.int64, len(requests))

    def all_of(field: str) -> Column:
        return column(map(attrgetter(field), requests))

    def where_any(field: str) -> Column:
        of: Callable[[Request], int | None] = attrgetter(field)
        return column(-1 if (value := of(request)) is None else value for request in requests)

    callers = [it if isinstance(it := request.owner, TrajectoryCaller) else None for request in requests]
    try:
        columns = RequestColumns(
            number=all_of("number"),
            arrival=all_of("arrival"),
            scheduled=where_any("scheduled"),
            prefill_end=where_any("prefill_end"),
            first_token=where_any("first_token"),
            finish=where_any("finish"),
            prompt=all_of("prompt_tokens"),
            output=all_of("output_tokens"),
            generated=all_of("generated"),
            cached=all_of("cached_tokens"),
            preemptions=all_of("preemptions"),
            engine=where_any("engine"),
            status=column(codes[request.status] for request in requests),
            reason=column(
                -1 if request.reason is None else reasons.setdefault(request.reason, len(reasons))
                for request in requests
            ),
            trajectory=column(
                -1 if caller is None else trajectories.setdefault(caller.trajectory.id, len(trajectories))
                for caller in callers
            ),
            turn=column(-1 if caller is None else caller.turn for caller in callers),
            last_call=np.fromiter((caller is not None and caller.last for caller in callers), bool, len(requests)),
            reasons=tuple(reasons),
            trajectories=tuple(trajectories),
        )
    except KeyError as error:
        raise ValueError(f"a request is {error.args[0]}: run the cluster to its end before looking at it") from None
    except OverflowError:
        raise ValueError("a request has a time after tick 2^63 - 1, 106 days: set a time limit before that") from None
    for field in fields(columns):
        values = getattr(columns, field.name)
        if isinstance(values, np.ndarray):
            values.flags.writeable = False
    return columns
