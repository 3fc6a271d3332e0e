"""The records of a run, one frozen value per JSON line.

Invariant: a written record is read back as the same value. Anything else is refused with the file, the line and the
field: an unknown key, a wrong type, a number that is not finite, an integer beyond 64 bits. Durations are in seconds;
times are in seconds from the start of the RL loop. Lengths are in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from libra.config.input_file import open_input
from libra.config.sealed_line import opened, sealed
from libra.plan.solution import Bottleneck
from libra.plan.transition import Role
from libra.records.causes import Cause

Style = TypeVar("Style")
R = TypeVar("R", bound="Record")

_LARGEST = 2**63 - 1


def role_of(label: str) -> Role:
    """The `Role` of a label in the records: the role's name, or `rollout:BUCKET` for an engine that serves one bucket.
    Raises `ValueError` for any other label."""
    name, colon, bucket = label.partition(":")
    if name not in set(Role):
        raise ValueError(f"role {label!r}: unknown; use one of {', '.join(Role)}, or rollout:BUCKET")
    if colon and (name != Role.ROLLOUT or not bucket):
        raise ValueError(f"role {label!r}: only rollout names a bucket, as in rollout:long")
    return Role(name)


def styles(labels: Iterable[str], of_role: Mapping[Role, Style], of_buckets: Sequence[Style]) -> dict[str, Style]:
    """A style for each distinct label, in the order of first appearance. Buckets get the styles in `of_buckets` in that
    order; further buckets get the last style.
    """
    distinct = dict.fromkeys(labels)
    buckets = [label for label in distinct if ":" in label]
    return {
        label: of_buckets[min(buckets.index(label), len(of_buckets) - 1)] if ":" in label else of_role[role_of(label)]
        for label in distinct
    }


class RecordFormatError(ValueError):
    """A file of a run directory breaks its schema. The message has file, line and field."""


class Record:
    """Base of all records. A record is one line of JSON with only finite numbers."""

    __slots__ = ()
    __pydantic_config__ = ConfigDict(extra="forbid")

    def to_json(self) -> str:
        """The record as one line, without the newline."""
        return _adapter(type(self)).dump_json(self).decode()

    def to_line(self) -> bytes:
        """The record as a line of a file, with its checksum and without the newline."""
        return sealed(_adapter(type(self)).dump_json(self))

    def __post_init__(self) -> None:
        _require_finite(self)


@dataclass(frozen=True, slots=True)
class StepLoan:
    """Seconds of a step in which a lent engine needed its device, and in which it had the device."""

    wanted: float  # seconds in which the engine had turns to make
    lent: float  # seconds of `wanted` in which the engine had the device
    version: int  # version of the engine's weights at the step's end
    away: str  # reason why nothing was lent at the step's end; empty: it was lent


@dataclass(frozen=True, slots=True)
class StepRecord(Record):
    """One optimiser step. `train`, `exchange`, `publish`, `wait`, `checkpoint`, `held` and `redone` are disjoint parts
    of `step_seconds`. The rest is the controller's own time."""

    step: int
    time: float  # end of the step
    version: int  # of the policy that the step produced
    step_seconds: float
    generate_seconds: float  # busy seconds of the busiest engine, which overlap with the trainer's seconds
    train_seconds: float  # forward, backward, optimiser
    exchange_seconds: float  # exchange of gradients between replicas
    publish_seconds: float  # transfer of new weights to the engines
    load_seconds: float  # until one engine has loaded the new weights, as a mean over engines
    wait_seconds: float  # for which the trainer waited for a batch
    checkpoint_seconds: float  # to write a checkpoint after the previous step
    held_seconds: float  # for which a worker that joined or left held the step boundary
    redone_seconds: float  # attempts at this step that failed because a replica was lost, and regrouping
    reward_mean: float
    groups: int
    groups_without_signal: int  # groups whose samples all earned the same reward
    trajectories: int  # number of trajectories trained on
    generated_tokens: int  # by all engines during the step
    trained_tokens: int
    staleness_mean: float  # versions between generation and training
    staleness_max: int
    staleness: tuple[int, ...]  # numbers of trajectories that are 0, 1, ... versions old
    behaviour_weight_mean: float  # mean of min(pi_prox / mu, 2)
    prox_gap_mean: float  # mean over tokens of |log pi_prox - log mu|: how far the policy moved since generation
    clip_share: float  # share of tokens whose ratio was clipped
    grad_norm: float
    context_p50: float  # final context of the trajectories trained on, in tokens
    context_p90: float
    context_p99: float
    turns_mean: float
    predicted_seconds: float | None  # duration of the step that the plan in force predicted; None: no plan
    allocation: str
    roles: Mapping[str, str]  # worker -> role
    device_seconds: Mapping[str, Mapping[Cause, float]]  # worker -> cause -> seconds, with the sum `step_seconds`
    loans: Mapping[str, StepLoan] = field(default_factory=dict)  # by engine on a lent device

    def __post_init__(self) -> None:
        _require_finite(self)
        if self.step_seconds <= 0:
            raise ValueError("step_seconds must be > 0")
        for worker, causes in self.device_seconds.items():
            if not math.isclose(sum(causes.values()), self.step_seconds, rel_tol=1e-6, abs_tol=1e-6):
                raise ValueError(f"device_seconds of {worker} are {sum(causes.values()):g}, not {self.step_seconds:g}")
        for role in self.roles.values():
            role_of(role)  # raises for an unknown role


@dataclass(frozen=True, slots=True)
class Learned(Record):
    """Learned bias of the prices of one bottleneck. Measured seconds are `factor` times the priced seconds."""

    factor: float
    error: float  # standard error of the factor's logarithm, which is about its relative error


@dataclass(frozen=True, slots=True)
class PeriodRecord(Record):
    """The steps between two planning decisions, predicted and measured."""

    period: int
    first_step: int
    last_step: int
    allocation: str
    predicted_seconds: float  # of one step, corrected by the bias that was known before the period
    measured_seconds: float  # mean over the steps of the period
    predicted_bottleneck: Bottleneck
    switching: bool  # whether a worker changed its role in the period, so that the prediction does not apply
    # The following fields are None in older runs, which did not correct prices.
    priced_seconds: float | None = None  # of one step, without the correction
    measured_error: float | None = None  # standard error of `measured_seconds`
    hindsight_seconds: float | None = None  # the price for measurements up to the period's end
    learned: Mapping[Bottleneck, Learned] = field(default_factory=dict)  # at the period's end

    def __post_init__(self) -> None:
        _require_finite(self)
        if self.last_step < self.first_step:
            raise ValueError("last_step must be >= first_step")
        if self.measured_seconds <= 0:
            raise ValueError("measured_seconds must be > 0")

    @property
    def relative_error(self) -> float:
        """Relative error of the prediction; positive if the step was faster than predicted."""
        return (self.predicted_seconds - self.measured_seconds) / self.measured_seconds


@dataclass(frozen=True, slots=True)
class DecisionRecord(Record):
    """One decision on a change of allocation, taken or not. Measured fields are None until they are measured."""

    period: int
    step: int  # the last step under the old allocation
    time: float
    before: str
    after: str
    before_seconds: float  # predicted seconds of one step
    after_seconds: float
    gain_per_step: float  # predicted saving in seconds
    horizon_steps: int
    cost: float  # predicted seconds of the switch
    uncertainty: float  # seconds per step that the gain must exceed, from errors of tracked work and of prices
    taken: bool
    reason: str
    solver_status: str
    solver_gap: float  # relative gap
    solver_seconds: float
    moves: tuple[str, ...]
    measured_before: float | None = None  # mean step seconds in the period before the change
    measured_after: float | None = None  # mean step seconds in the first full period after the change
    measured_cost: float | None = None  # seconds
    realised_gain_per_step: float | None = None  # seconds
    price_error: float | None = None  # standard error of `gain_per_step` due to prices, in seconds; None: unknown
    realised_error: float | None = None  # standard error of `realised_gain_per_step`, in seconds; None: unknown

    @property
    def predicted_net(self) -> float:
        """Seconds that the change was expected to save over its horizon, minus its own cost."""
        return self.gain_per_step * self.horizon_steps - self.cost

    @property
    def realised_interval(self) -> float | None:
        """Half the width, in seconds, of the 95 % interval of `realised_gain_per_step` (normal errors); None:
        unknown."""
        return None if self.realised_error is None else 2 * self.realised_error

    @property
    def surely_lost(self) -> bool:
        """Whether the change made steps longer by more than `realised_interval`."""
        gain, interval = self.realised_gain_per_step, self.realised_interval
        return gain is not None and interval is not None and gain + interval < 0


@dataclass(frozen=True, slots=True)
class EventRecord(Record):
    """An event at one moment, such as `role_change`, `move_failed`, `worker_lost`, `checkpoint` or `warning`. Each
    session has one event of kind `began`, at the start of its steps.
    """

    time: float
    kind: str
    worker: str | None
    text: str
    seconds: float | None = None  # duration of a move, or of a join from the start of the process
    held_seconds: float | None = None  # for which a step waited for a join
    clock: float | None = None  # time on the machine's monotonic clock; only in events of kind `began`


@dataclass(frozen=True, slots=True)
class Evaluation(Record):
    """Accuracy on held-out questions with the weights after `step`. Accuracies are from 0 to 1."""

    name: str
    step: int
    questions: int
    sampled_accuracy: float
    greedy_accuracy: float
    turns_mean: float


@dataclass(frozen=True, slots=True)
class MovedContexts(Record):
    """Contexts whose trajectory continued on another engine."""

    handed_over: int  # contexts whose KV was transferred
    handed_tokens: int  # tokens whose KV came from the previous engine
    handed_seconds: float  # sum of the times from the order for the KV to the end of its transfer
    computed: int  # contexts without transferred KV
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class ServedSummary:
    """Requests of users, over all servers. TTFT and TPOT are seconds at the 99th percentile."""

    requests: int  # requests that ended
    missed: int  # requests that missed their SLO, of which some would miss it without lending, too
    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class LendingSummary:
    """The run's gain from lending, and the cost for users."""

    rule: str
    share: float  # share of time that rollout had the lent devices, of the time in which it had turns to make
    grants: int
    overstayed: int  # grants whose end serving did not wait for
    recalls: int
    users: ServedSummary | None  # of the run's own servers; None: no server, or no request has ended

    @property
    def words(self) -> str:
        had = f"rollout had the lent devices for {100 * self.share:.0f} % of the time it wanted them"
        if self.rule == "off":
            had = "nothing was lent"
        if (users := self.users) is None:
            return f"lending ({self.rule}): {had}"
        return (
            f"lending ({self.rule}): {had}; {users.missed} of {users.requests} users' requests missed their SLO, TTFT"
            f" {1e3 * users.ttft:.0f} ms and TPOT {1e3 * users.tpot:.0f} ms at the 99th percentile"
        )


@dataclass(frozen=True, slots=True)
class RunSummary(Record):
    """The whole run in one value, written at its end."""

    name: str
    seed: int
    finished: bool  # whether all steps were made
    wall_seconds: float
    steps: int
    evaluations: tuple[Evaluation, ...]
    prediction_error: float | None  # mean absolute relative error of periods without a role change
    lost_workers: tuple[str, ...]
    peak_memory_bytes: int
    trajectories_started: int
    trajectories_trained: int
    trajectories_unfinished: int
    moved_contexts: MovedContexts  # of this session
    logprob_gap: float | None  # largest measured |engine - trainer| log-probability; None: not measured
    device_seconds: Mapping[Cause, float]  # by cause, over all workers in this session, from its start to its end
    versions: Mapping[str, str]  # library -> version
    allocation_mode: str
    arithmetic: str | None = None  # precision of the run, with the reason; None: in older runs
    lending: LendingSummary | None = None  # None: the run has no lent devices


_ADAPTERS: dict[type[Record], TypeAdapter[Any]] = {}


def _adapter(kind: type[Record]) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def _require_finite(record: Any) -> None:
    for it in fields(record):
        for value in _numbers(getattr(record, it.name)):
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{it.name} is {value}: a record has only finite numbers")
            if isinstance(value, int) and abs(value) > _LARGEST:
                raise ValueError(f"{it.name} has {len(str(value))} digits: a record has only integers of 64 bits")


def _numbers(value: object) -> Iterator[float]:
    """All numbers in a field, except those of nested records, which check their own."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, Mapping):
        yield from (number for it in value.values() for number in _numbers(it))
    elif isinstance(value, tuple | list):
        yield from (number for it in value for number in _numbers(it))


def parse_record(kind: type[R], text: str | bytes, where: str) -> R:
    """Parse one JSON object, with or without a checksum, as a record. Error messages begin with `where`, as in
    `metrics.jsonl:12`."""
    try:
        record: R = _adapter(kind).validate_json(opened(text), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "line"
        raise RecordFormatError(f"{where}: {field}: {first['msg']}") from None
    except ValueError as error:
        raise RecordFormatError(f"{where}: {error}") from None
    return record


def read_records(kind: type[R], path: Path) -> Iterator[R]:
    """Yield all records of a JSON-lines file. Raises `RecordFormatError`, also for a blank line."""
    with open_input(path) as lines:
        for number, line in enumerate(lines, start=1):
            yield parse_record(kind, line, f"{path}:{number}")
