"""The words that the controller and its workers exchange.

Invariant: every message is a small typed struct that `msgspec` checks on arrival; nothing is ever unpickled. Tensors do
not travel here: weights go through shared memory (`weights.py`), gradients through a process group (`elastic.py`), KV
lies in frames (`kv_frames.py`), and a joiner reads a core's state from its board (`publication.py`) or through a relay
(`relay.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

Precision = Literal["bf16", "fp32", "fp64"]  # of a trainer's arithmetic; bf16 is autocast over float32 parameters
Dtype = Literal["bfloat16", "float32"]  # of engines, and of the weights that are published for them
DTYPE_BYTES: Mapping[Dtype, int] = {"bfloat16": 2, "float32": 4}
Sharding = Literal["none", "fsdp2"]  # of parameters, moments and gradients among the processes of one replica


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the tag on the wire is the class name."""


# --- from the controller -------------------------------------------------------------------------------------------


class Tensor(msgspec.Struct, frozen=True):
    """Where one weight lies in the shared buffer: elements of `dtype` from `offset` bytes on."""

    name: str
    shape: tuple[int, ...]
    offset: int
    dtype: Dtype


class KVBufferPlace(msgspec.Struct, frozen=True):
    """Where KV is handed over: a file that process `pid` holds open, of `frames` blocks of KV."""

    pid: int
    descriptor: int  # of that process
    frames: int
    frame_bytes: int


class StartEngine(Message, frozen=True):
    """Become a rollout engine."""

    model_directory: str
    max_model_len: int
    max_num_seqs: int
    dtype: Dtype
    kv_cache_bytes: int
    layout: tuple[Tensor, ...]
    buffer_bytes: int
    seed: int
    share: float  # of one core that this device may use
    cores: tuple[int, ...]
    refresh_kv: bool  # salt the prefix cache with the weight version
    kv: KVBufferPlace | None = None  # where it may hand KV over; None: it cannot


class StartTrainer(Message, frozen=True):
    """Become a training replica."""

    model_directory: str
    learning_rate: float
    clip: tuple[float, float]
    denominator: str
    token_constant: float
    temperature: float  # of sampling: the policy that is trained is softmax(logits / temperature)
    micro_batch_tokens: int
    precision: Precision
    seed: int
    share: float  # of one core, that its processes have together
    cores: tuple[int, ...]
    processes: int = 1
    sharding: Sharding = "none"


class KVTransfer(msgspec.Struct, frozen=True):
    """KV of a context's first blocks, one in each of these frames."""

    number: int
    frames: list[int]


class Generate(Message, frozen=True):
    """One turn, or what is left of it. Generation stops at `stop_token` or after `max_tokens`."""

    id: str
    tokens: list[int]
    max_tokens: int
    temperature: float
    stop_token: int
    priority: int
    salt: str | None = None  # a private prefix-cache namespace: a request that must not see old KV
    transfer: KVTransfer | None = None  # KV of its context that another engine has put down; answered by `Fetched`


class Interrupt(Message, frozen=True):
    """Stop a turn where it is. Its last piece and its end are reported like those of any other."""

    id: str


class Save(Message, frozen=True):
    """Put down what there is of this context's KV, whole blocks from its beginning on; answered by `Saved`. Turns go on
    meanwhile."""

    tokens: list[int]
    salt: str | None  # that of its `Generate`
    transfer: KVTransfer


class LoadWeights(Message, frozen=True):
    version: int
    buffer: int
    checksum: int


class MeasureEngine(Message, frozen=True):
    """Time iterations at these (sequences, context tokens each), `repeats` times in turn."""

    points: list[tuple[int, int]]
    repeats: int


class MeasureHandover(Message, frozen=True):
    """Time saving contexts of these tokens into the transfer's frames, and fetching them from there, `repeats` times in
    turn. The prefix cache is empty afterwards."""

    contexts: list[int]
    repeats: int
    transfer: KVTransfer


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
    """Back-propagate this replica's share of a batch and add the gradients of all replicas up; then await the verdict.

    `sequences` and `tokens` are this replica's part of the loss denominator: they count every trajectory of the batch,
    also those whose group gave no signal and that are therefore not sent.
    """

    version: int  # the version that this step makes
    samples: list[Sample]
    sequences: int
    tokens: int
    patience: float  # seconds to wait for the other replicas


class Commit(Message, frozen=True):
    """All replicas hold the summed gradient of this version: take the optimiser step."""

    version: int
    publish_to: int  # buffer index; -1: this replica does not publish


class Discard(Message, frozen=True):
    """The step is not made: forget the gradient that awaits a verdict. The state is what it was before `Train`."""


# To form a membership: everyone is told within milliseconds, and who has not come by then will not come. A replica that
# is told to enter waits for the others so long at most.
FORMING_SECONDS = 20.0


class HostRendezvous(Message, frozen=True):
    """Listen where replicas meet to form memberships; answered by `Rendezvous`."""

    host: str  # address of this replica's node to listen at
    port: int  # 0: any free one


class Prepare(Message, frozen=True):
    """Form the membership of `size` replicas in which this one is number `rank`, beside the present one."""

    generation: int
    rank: int
    size: int
    address: str  # of this replica's node: the others reach it there
    host: str  # where the replicas meet: at number 0, which listens there
    port: int  # 0: it cannot


class Enter(Message, frozen=True):
    """Exchange gradients in the prepared membership from now on. A replica that follows a core ceases to."""

    generation: int


class StatePlace(msgspec.Struct, frozen=True, tag=True):
    """Where one process of a replica publishes its part of the state, on its own node: two files that process `pid`
    holds open."""

    pid: int
    board: int  # file descriptors of that process
    ring: int


TOKEN_BYTES = 32  # of ASCII


class RelayPlace(msgspec.Struct, frozen=True, tag=True):
    """Where a replica's state is read from another node: a relay that listens for one reader, who knows the token."""

    host: str
    port: int
    token: str


class Serve(Message, frozen=True):
    """Let whoever shows this token read the published state from another node, until it has joined or gone."""

    host: str  # address of this replica's node to listen at
    token: str
    cores: tuple[int, ...]  # of this node, on which the relay may run


class Identify(Message, frozen=True):
    """Say which state this replica holds."""


class Follow(Message, frozen=True):
    """Become what is published there, and keep up with it until `Enter`; answer when level with it."""

    places: list[StatePlace | RelayPlace]  # one for each process of the replica


class CatchUp(Message, frozen=True):
    """Answer when level with state `number` of the core that is followed and ready to enter membership `generation`, or
    after `seconds`."""

    number: int
    generation: int
    seconds: float


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
    """Log-probs of these sequences under the current weights at the temperature of sampling, for the check against the
    engines."""

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


class Saved(Message, frozen=True):
    """What was ordered with this transfer is done: its first `blocks` frames are filled."""

    transfer: int
    blocks: int


class Fetched(Message, frozen=True):
    """The frames of this transfer are not needed any more; `tokens` of the context were taken from them."""

    transfer: int
    tokens: int


class Loaded(Message, frozen=True):
    version: int
    seconds: float


class EngineMeasured(Message, frozen=True):
    """Mean seconds of one iteration per kind: (sequences, context tokens in all, prefilled tokens, seconds)."""

    iterations: list[tuple[float, float, float, float]]


class HandoverMeasured(Message, frozen=True):
    """(tokens, seconds to save and to fetch them) per context."""

    contexts: list[tuple[int, float]]


class TrainingMeasured(Message, frozen=True):
    """(tokens, seconds of forward and backward) per batch, and mean seconds of what comes once a step."""

    batches: list[tuple[int, float]]
    step_seconds: float  # clip, optimiser, hash
    exchange_seconds: float
    failure: str = ""  # why nothing was measured; empty where it was


class Reduced(Message, frozen=True):
    """This replica's vote on a step. Sums over its generated tokens unless said otherwise."""

    version: int
    failure: str  # why it does not hold the summed gradient; empty where it does
    compute_seconds: float
    exchange_seconds: float
    forward_tokens: int
    generated_tokens: int
    clipped: float  # tokens whose ratio was clipped
    behaviour_weight: float  # sum of min(pi_prox / mu, cap)
    prox_gap: float  # sum of |log pi_prox - log mu|


class Trained(Message, frozen=True):
    """One step done."""

    version: int
    checksum: int  # of the published weights; 0 where nothing was published
    parameter_hash: int
    publish_seconds: float
    gradient_norm: float  # of the exchanged gradient, before clipping


class WarmedUp(Message, frozen=True):
    loss: float
    tokens: int


class Published(Message, frozen=True):
    version: int
    checksum: int


class Rendezvous(Message, frozen=True):
    port: int  # 0: it cannot listen, and tells why when it enters a membership


class Entered(Message, frozen=True):
    generation: int
    failure: str  # why the membership did not come about; empty where it did


class StateDigest(Message, frozen=True):
    """Which state a replica holds."""

    number: int  # as the core counts that is or was followed, or else this replica; -1: none
    parameter_hash: int
    size: int  # bytes of the parameters that its processes hold; a moment of AdamW and a gradient are as large
    places: list[StatePlace]  # one for each process of the replica
    ready: bool = False  # to enter the membership that was asked for
    behind: str = ""  # why it ceased to follow


class Serving(Message, frozen=True):
    ports: list[int]  # one for each process of the replica
    failure: str  # why nobody can read it there; empty where the relay listens


class Done(Message, frozen=True):
    """Acknowledges Discard, Prepare, SaveCheckpoint, LoadCheckpoint and Stop."""


class Scored(Message, frozen=True):
    logprobs: list[list[float]]  # per token after the first


class Failure(Message, frozen=True):
    """The worker could not do what it was told."""

    error: str


ToWorker = (
    StartEngine | StartTrainer | Generate | Interrupt | Save | LoadWeights | MeasureEngine | MeasureHandover
    | MeasureTraining | Train | Commit | Discard | HostRendezvous | Prepare | Enter | Identify | Serve | Follow
    | CatchUp | WarmUp | Publish | SaveCheckpoint | LoadCheckpoint | Score | Stop
)  # fmt: skip
FromWorker = (
    Ready | Generated | Saved | Fetched | Loaded | EngineMeasured | HandoverMeasured | TrainingMeasured | Reduced
    | Trained | WarmedUp | Published | Rendezvous | Entered | Serving | StateDigest | Done | Scored | Failure
)  # fmt: skip
