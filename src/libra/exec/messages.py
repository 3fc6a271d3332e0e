"""The words that the controller and its workers exchange.

Invariant: every message is a small typed struct that `msgspec` checks on arrival; nothing is ever unpickled. Tensors do
not travel here: weights go through shared memory (`weights.py`), gradients through a process group (`elastic.py`).
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag on the wire is the class name."""


# --- from the controller -------------------------------------------------------------------------------------------


class Tensor(msgspec.Struct, frozen=True):
    """Where one weight lies in the shared buffer: elements of bfloat16 from `offset` bytes on."""

    name: str
    shape: tuple[int, ...]
    offset: int


class StartEngine(Message, frozen=True):
    """Become a rollout engine."""

    model_directory: str
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int
    layout: tuple[Tensor, ...]
    buffer_bytes: int
    seed: int
    share: float  # of one core that this device may use
    cores: tuple[int, ...]
    refresh_kv: bool  # salt the prefix cache with the weight version


class StartTrainer(Message, frozen=True):
    """Become a training replica. `replica` 0 is the core replica that publishes weights and writes checkpoints."""

    model_directory: str
    replica: int
    learning_rate: float
    clip: tuple[float, float]
    denominator: str
    token_constant: float
    micro_batch_tokens: int
    seed: int
    share: float
    cores: tuple[int, ...]


class Generate(Message, frozen=True):
    """One turn, or what is left of it. Generation stops at `stop_token` or after `max_tokens`."""

    id: str
    tokens: list[int]
    max_tokens: int
    temperature: float
    stop_token: int
    priority: int
    salt: str | None = None  # a private prefix-cache namespace: a request that must not see old KV


class Interrupt(Message, frozen=True):
    """Stop a turn where it is. Its last piece and its end are reported like those of any other."""

    id: str


class LoadWeights(Message, frozen=True):
    version: int
    buffer: int
    checksum: int


class MeasureEngine(Message, frozen=True):
    """Time iterations at these (sequences, context tokens each), `repeats` times in turn."""

    points: list[tuple[int, int]]
    repeats: int


class MeasureTraining(Message, frozen=True):
    """Time steps on samples of these lengths, `repeats` times in turn; the state is put back afterwards."""

    batches: list[list[int]]
    repeats: int


class Sample(msgspec.Struct, frozen=True):
    """What training needs of one trajectory. The four lists have one entry per token."""

    id: str
    tokens: list[int]
    generated: list[bool]  # the loss mask: True where the policy wrote the token
    logprobs: list[float]  # of the behaviour policy, 0 where not generated
    versions: list[int]  # weight version that generated the token, -1 where none did
    advantage: float


class Train(Message, frozen=True):
    """One optimiser step over this replica's share of a batch.

    `sequences` and `tokens` are this replica's part of the loss denominator: they count every trajectory of the batch,
    also those whose group gave no signal and that are therefore not sent.
    """

    version: int  # the version that this step makes
    samples: list[Sample]
    sequences: int
    tokens: int
    publish_to: int  # buffer index; -1: this replica does not publish


class Regroup(Message, frozen=True):
    """Exchange gradients with `size` replicas from now on, as number `rank`; -1 leaves the exchange."""

    generation: int
    rank: int
    size: int
    port: int
    share_state: bool  # rank 0 broadcasts parameters and optimiser state to the others


class StatePlace(msgspec.Struct, frozen=True):
    """Where a replica publishes its state: two files that process `pid` holds open."""

    pid: int
    board: int  # file descriptors of that process
    ring: int


class WarmUp(Message, frozen=True):
    """Supervised steps on demonstrations: (tokens, generated mask) per sequence."""

    batch: list[tuple[list[int], list[bool]]]
    learning_rate: float


class Publish(Message, frozen=True):
    version: int
    buffer: int


class SaveCheckpoint(Message, frozen=True):
    directory: str
    optimiser: bool  # with its moments, to continue from; without, just the model


class LoadCheckpoint(Message, frozen=True):
    directory: str


class Score(Message, frozen=True):
    """Log-probs of these sequences under the current weights, for the check against the engines."""

    sequences: list[list[int]]


class Stop(Message, frozen=True):
    pass


# --- from a worker -------------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """The role is taken. `layout` and `buffer_bytes` are set by trainers."""

    seconds: float
    layout: tuple[Tensor, ...] = ()
    buffer_bytes: int = 0


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """What a turn generated since the piece before, all with one version of the weights."""

    turn: str  # id of its `Generate`
    version: int
    tokens: list[int]
    logprobs: list[float]  # one per token


class Generated(Message, frozen=True):
    """What an engine generated since it last said so, and its counters since it started. Comes every
    `report.REPORT_SECONDS` while it has work, and at once when a turn ends."""

    pieces: list[Piece]  # those of one turn in order
    ended: list[str]  # turns that generate no more; all their pieces have come
    busy_seconds: float  # wall seconds with work, messages, loads and pacing included
    prefilled_tokens: int  # prompt tokens computed, prefix-cache hits excluded
    iterations: int
    generated_tokens: int


class Loaded(Message, frozen=True):
    version: int
    seconds: float


class EngineMeasured(Message, frozen=True):
    """Mean seconds of one iteration per kind: (sequences, context tokens in all, prefilled tokens, seconds)."""

    iterations: list[tuple[float, float, float, float]]


class TrainingMeasured(Message, frozen=True):
    """(tokens, seconds of forward and backward) per batch, and mean seconds of what comes once a step."""

    batches: list[tuple[int, float]]
    step_seconds: float  # clip, optimiser, hash
    exchange_seconds: float


class Trained(Message, frozen=True):
    """One step done. Sums over this replica's generated tokens unless said otherwise."""

    version: int
    checksum: int  # of the published weights; 0 where nothing was published
    parameter_hash: int
    compute_seconds: float
    exchange_seconds: float
    publish_seconds: float
    forward_tokens: int
    generated_tokens: int
    clipped: float  # tokens whose ratio was clipped
    behaviour_weight: float  # sum of min(pi_prox / mu, cap)
    prox_gap: float  # sum of |log pi_prox - log mu|
    gradient_norm: float  # of the exchanged gradient, before clipping


class WarmedUp(Message, frozen=True):
    loss: float
    tokens: int


class Published(Message, frozen=True):
    version: int
    checksum: int


class Regrouped(Message, frozen=True):
    generation: int
    seconds: float


class Done(Message, frozen=True):
    """Acknowledges SaveCheckpoint, LoadCheckpoint and Stop."""


class Scored(Message, frozen=True):
    logprobs: list[list[float]]  # per token after the first


class Failure(Message, frozen=True):
    """The worker could not do what it was told. `remedy` may be empty."""

    error: str
    peer_lost: bool = False


ToWorker = (
    StartEngine | StartTrainer | Generate | Interrupt | LoadWeights | MeasureEngine | MeasureTraining | Train | Regroup
    | WarmUp | Publish | SaveCheckpoint | LoadCheckpoint | Score | Stop
)  # fmt: skip
FromWorker = (
    Ready | Generated | Loaded | EngineMeasured | TrainingMeasured | Trained | WarmedUp | Published | Regrouped | Done
    | Scored | Failure
)  # fmt: skip
