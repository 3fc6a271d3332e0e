"""One turn of an episode, on one engine or several in sequence.

Invariant: each token comes from one engine, and no reported token is lost. An engine's part of a turn may end early, by
loss, a stop, or a move to a longer bucket. The next engine then continues after the last reported token. The policy
gets the tool return before the turn once. It sees the turn as in a simulation: a turn that is placed again after a
loss or stop is a new request with its current tokens, and a turn that moves because it exceeded its bucket counts as
placed once.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from libra.backends.protocols import Engine
from libra.backends.transport.engine_messages import Generate, KVTransfer, Piece
from libra.backends.vllm.kv_handover import ContextMove
from libra.exec.protocols import WorkerLostError
from libra.loop.episode import EpisodeRequest
from libra.loop.fleet import ServingFleet
from libra.route.policy import Placement, ToolReturn, TurnRequest
from libra.trajectory import Turn


@dataclass(slots=True)
class Draft:
    """An episode in progress: the tokens of its context, and a mark for generated tokens.

    The four lists have one entry per token at any moment. Engines' reports are added as they arrive, so any other
    engine can continue an interrupted turn from this context.
    """

    asked: EpisodeRequest  # for a branch, with the id of the branch
    started_at: float
    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    generated: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # 0 where not generated
    versions: list[int] = field(default_factory=list)  # -1 where not generated
    turns: list[Turn] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    engine: str = ""  # name of the engine that served it last
    kv_engine: Engine | None = None  # the last engine that generated tokens of it, and may still have its KV
    kv_tokens: int = 0  # tokens of the context that `kv_engine` has computed

    def sampling_seed(self) -> int | None:
        """Seed for the next tokens. It depends on their position, so a turn that continues elsewhere repeats no
        draws."""
        seed = self.asked.seed
        return None if seed is None else zlib.crc32(f"{seed} {len(self.tokens)}".encode())

    def given(self, tokens: list[int]) -> None:
        """Add tokens that no engine sampled: the prompt, and tool returns."""
        self.tokens += tokens
        self.generated += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def sampled(self, piece: Piece) -> None:
        """Add tokens that an engine sampled."""
        self.tokens += piece.tokens
        self.generated += [True] * len(piece.tokens)
        self.logprobs += piece.logprobs
        self.versions += [piece.version] * len(piece.tokens)


class RunningTurn:
    """A turn that is placed and served, several times if needed, until it is complete."""

    def __init__(
        self,
        draft: Draft,
        task: str,
        fleet: ServingFleet,
        most_tokens: int,
        stop_token: int,
        returned: ToolReturn | None = None,
    ) -> None:
        """The turn starts where `draft` ends, after the tool return `returned`, and ends with `stop_token` or after
        `most_tokens`."""
        self._draft, self._task, self._fleet = draft, task, fleet
        self._stop_token = stop_token
        self._returned = returned  # None once the policy has received it
        self._start = len(draft.tokens)
        self._limit = self._start + most_tokens  # tokens of the context
        self._request: TurnRequest  # of the last placement
        self._ask_at: int | None = None  # tokens of the context at which to ask the policy again
        self._destination: tuple[Placement, Engine] | None = None  # after its current engine has stopped it
        self._engine: Engine  # that serves it, or served it last
        self._name: str  # of the request at that engine
        # The move of the context's KV to this engine; None if it was there already, or was computed again.
        self.change: ContextMove | None = None

    @property
    def over(self) -> bool:
        tokens = self._draft.tokens
        return len(tokens) >= self._limit or (len(tokens) > self._start and tokens[-1] == self._stop_token)

    def place(self) -> Placement | None:
        """Choose the engine that continues the turn; None if no engine can serve it now."""
        if self._destination is not None:
            (placement, engine), self._destination = self._destination, None
            if self._fleet.serves(engine):
                return placement
        draft, asked = self._draft, self._draft.asked
        self._request = TurnRequest(
            asked.id, asked.prompt.id, draft.prompt_tokens, len(draft.tokens), self._task, asked.due
        )
        view = self._fleet.view(self._room, asked.version, asked.seed is not None)
        if self._returned is None:
            return self._fleet.policy.place(self._request, view)
        returned, self._returned = self._returned, None
        return self._fleet.policy.tool_returned(self._request, returned, view)

    async def serve(self, placement: Placement, name: str) -> None:
        """Have the engine of `placement` serve the turn until it is over or stopped, or the engine leaves or is
        lost."""
        draft, before = self._draft, len(self._draft.tokens)
        self._name, self._engine = name, self._fleet.handle(placement.instance)
        self._expect(placement.ask_again)
        salt = draft.asked.id if draft.asked.fresh else None
        transfer = await self._bring(salt)
        if not self._fleet.serves(self._engine):  # the engine left meanwhile, and its turns have been stopped already
            self.change = None
            return
        try:
            await self._engine.generate(
                Generate(
                    id=name,
                    tokens=draft.tokens,
                    max_tokens=self._limit - len(draft.tokens),
                    temperature=draft.asked.temperature,
                    stop_token=self._stop_token,
                    priority=placement.priority,
                    salt=salt,
                    transfer=transfer,
                    seed=draft.sampling_seed(),
                ),
                self._take,
            )
        except WorkerLostError:
            if self._fleet.serves(self._engine):
                raise  # the fleet still lists the lost engine, so a retry would send the turn to it for ever
        finally:
            if len(draft.tokens) > before:  # otherwise this engine may have none of the KV
                draft.kv_engine, draft.kv_tokens = self._engine, len(draft.tokens)

    @property
    def _room(self) -> int:
        """Tokens that the turn may still need beyond the context of its request."""
        return self._limit - self._request.context_tokens

    async def _bring(self, salt: str | None) -> KVTransfer | None:
        """Transfer the context's KV to the engine of the turn, if another engine has it and the transfer pays."""
        draft, handover, self.change = self._draft, self._fleet.handover, None
        if handover is None or draft.kv_engine is None or draft.kv_engine is self._engine:
            return None
        with self._engine.expecting(len(draft.tokens)):
            transfer, self.change = await handover.bring(
                draft.tokens[: draft.kv_tokens], salt, draft.kv_engine, self._engine
            )
        return transfer

    def _take(self, piece: Piece) -> None:
        self._draft.sampled(piece)
        if self._ask_at is not None and len(self._draft.tokens) >= self._ask_at and not self.over:
            self._ask()

    def _ask(self) -> None:
        """Let the policy decide whether to move a turn that has generated as many tokens as its placement expected."""
        self._ask_at = None
        generated = len(self._draft.tokens) - self._request.context_tokens
        asked = self._draft.asked
        view = self._fleet.view(self._room, asked.version, asked.seed is not None)
        placement = self._fleet.policy.bucket_overrun(self._request, generated, view)
        if placement is None:
            return
        engine = self._fleet.handle(placement.instance)
        if engine is self._engine:
            self._expect(placement.ask_again)
        else:
            self._destination = placement, engine
            self._engine.interrupt(self._name)

    def _expect(self, ask_again: int | None) -> None:
        self._ask_at = None if ask_again is None else self._request.context_tokens + ask_again
