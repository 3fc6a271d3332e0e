"""An episode under way: the tokens of its context, and who wrote them.

Invariant: the four lists have one entry per token at any moment. What engines report is entered as it comes, so a turn
that is cut short leaves the context from which any other engine can go on with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from libra.backends.launch.handles import EngineHandle
from libra.backends.transport.messages import Piece
from libra.environments.protocol import Prompt
from libra.trajectory import Turn


@dataclass(slots=True)
class Draft:
    id: str
    prompt: Prompt
    due: float
    temperature: float
    fresh: bool
    started_at: float
    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    generated: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # 0 where not generated
    versions: list[int] = field(default_factory=list)  # -1 where not generated
    turns: list[Turn] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    engine: str = ""  # that served it last
    home: EngineHandle | None = None  # the last that made some of it, and so has the KV of what it consisted of then
    at_home: int = 0  # tokens of it that this engine had

    def given(self, tokens: list[int]) -> None:
        """Tokens that no engine sampled: the prompt, what a tool returned."""
        self.tokens += tokens
        self.generated += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def sampled(self, piece: Piece) -> None:
        """Tokens that an engine sampled."""
        self.tokens += piece.tokens
        self.generated += [True] * len(piece.tokens)
        self.logprobs += piece.logprobs
        self.versions += [piece.version] * len(piece.tokens)
