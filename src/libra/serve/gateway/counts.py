"""Counts of a gateway's turns, tokens and failures."""

from __future__ import annotations

from dataclasses import dataclass, field

from libra.serve.gateway.usage import Usage


def _counter(help: str) -> int:
    counter: int = field(default=0, metadata={"help": help})
    return counter


@dataclass(slots=True)
class Counts:
    """Counts since the start of the gateway."""

    placements: int = _counter("Turns sent to an engine.")
    migrations: int = _counter("Turns sent to another engine than the previous turn.")
    retries: int = _counter("Turns sent again after their engine failed, or was full.")
    turns: int = _counter("Turns answered.")
    prompt_tokens: int = _counter("Prompt tokens of answered turns.")
    generated_tokens: int = _counter("Generated tokens of answered turns.")
    finished: int = _counter("Trajectories finished.")
    forgotten: int = _counter(
        "Trajectories given up: idle for idle_seconds, or ended without an answer to their last turn."
    )

    def answered(self, usage: Usage) -> None:
        self.turns += 1
        self.prompt_tokens += usage[0]
        self.generated_tokens += usage[1]
