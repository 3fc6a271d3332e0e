"""Trajectories run again: a turn follows when the tool after the turn before has returned.

Invariant: what is asked is the log's, token for token and tool second for tool second; when it is asked follows from
when the simulated engines answered. A trajectory has one request in flight at most, and ends with the first one that
is not finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, islice
from typing import Any, Literal

import numpy as np

from libra.sim.engine.request import Chain, Request
from libra.sim.workload.arrivals import Arrivals, AtOnce
from libra.sim.workload.caller import UNKNOWN_TOOL_SECONDS, Call, TrajectoryCaller, calls
from libra.trajectory import Trajectory

Kept = Literal["prompt", "last prompt"]


class Replay:
    """A closed loop of trajectories.

    They start in their order at `arrivals`, and no more than `concurrency` are in flight: the next one starts when one
    ends. With `samples_per_prompt` each is run as so many copies, which start together. Trajectories of one `prompt_id`
    share its tokens as far as the shorter prompt goes, unless `share_prompts` is off.

    Where the log's context is not the running sum, it was rewritten, and of what an engine holds remains the prompt;
    or, with `rewrite_keeps` of "last prompt", all that the call before was asked. A context shorter than what would
    remain keeps less: the prompt, or nothing.

    Raises ValueError for an id that is given twice, for copies of what the log has several samples of, and for a call
    without any context.
    """

    def __init__(
        self,
        trajectories: Iterable[Trajectory],
        *,
        arrivals: Arrivals | None = None,
        seed: int = 0,
        concurrency: int | None = None,
        samples_per_prompt: int = 1,
        share_prompts: bool = True,
        unknown_tool_seconds: float = UNKNOWN_TOOL_SECONDS,
        rewrite_keeps: Kept = "prompt",
        source: Mapping[str, Any] | None = None,
    ) -> None:
        """`seed` is that of the arrivals; none are given: all at tick 0. `source` says where the trajectories are from,
        as JSON values."""
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; let 1 trajectory or more be in flight, or give None")
        if samples_per_prompt < 1:
            raise ValueError(f"samples_per_prompt is {samples_per_prompt}; run each trajectory 1 time or more")
        if rewrite_keeps not in ("prompt", "last prompt"):
            raise ValueError(f"rewrite_keeps is {rewrite_keeps!r}; set it to 'prompt' or 'last prompt'")
        self.concurrency = concurrency
        self.share_prompts = share_prompts
        self.unknown_tool_seconds = unknown_tool_seconds
        self.rewrite_keeps = rewrite_keeps
        logged = list(trajectories)
        _check_ids(logged, samples_per_prompt)
        made = [calls(trajectory, unknown_tool_seconds) for trajectory in logged]
        asking = [(trajectory, its) for trajectory, its in zip(logged, made, strict=True) if its]
        self.silent = (len(logged) - len(asking)) * samples_per_prompt  # trajectories that generate nothing
        times = _start_times(arrivals or AtOnce(), len(asking), seed)

        self._trajectories: list[Trajectory] = []
        self._calls: list[tuple[Call, ...]] = []
        self._starts: list[int] = []  # ticks
        self._delays: list[int] = []  # ticks from the start to the first request
        counts: list[int] = []  # of requests
        for (trajectory, its), time in zip(asking, times, strict=True):
            self._trajectories += _copies(trajectory, samples_per_prompt)
            self._calls += [its] * samples_per_prompt
            self._starts += [time] * samples_per_prompt
            self._delays += [its[0].delay] * samples_per_prompt
            counts += [len(its)] * samples_per_prompt
        *self._numbers, self.requests = accumulate(counts, initial=0)
        self._description = {
            "name": "replay",
            "source": dict(source or {}),
            "trajectories": len(self._trajectories),
            "requests": self.requests,
            "arrivals": (arrivals or AtOnce()).describe(),
            "seed": seed,
            "concurrency": concurrency,
            "samples_per_prompt": samples_per_prompt,
            "share_prompts": share_prompts,
            "unknown_tool_seconds": unknown_tool_seconds,
            "rewrite_keeps": rewrite_keeps,
        }
        self._forget()

    def start(self) -> Iterator[Request]:
        self._forget()
        first = len(self._trajectories) if self.concurrency is None else self.concurrency
        begun = list(islice(self._waiting, first))
        begun.sort(key=lambda which: (self._starts[which] + self._delays[which], self._numbers[which]))
        return (self._begin(which, 0) for which in begun)

    def finished(self, request: Request, now: int) -> Request | None:
        caller = request.owner
        if not isinstance(caller, TrajectoryCaller):
            raise ValueError(f"request {request.number} was made by no trajectory: tell the workload that it came from")
        if request.status != "finished":
            self.unfinished[caller.trajectory.id] = request.reason or "cancelled"
        elif not caller.last:
            return self._follow(request, caller, now)
        else:
            self.completed += 1
        which = next(self._waiting, None)
        return None if which is None else self._begin(which, now)

    def describe(self) -> dict[str, Any]:
        return dict(self._description)

    def _forget(self) -> None:
        self.completed = 0  # trajectories of which every request finished
        self.unfinished: dict[str, str] = {}  # id -> why, of those that ended early
        self._waiting = iter(range(len(self._trajectories)))
        self._prompts: dict[str, Chain] = {}

    def _begin(self, which: int, now: int) -> Request:
        trajectory, made = self._trajectories[which], self._calls[which]
        caller = TrajectoryCaller(trajectory, made, 0, self._prompt(trajectory), self._numbers[which])
        arrival = max(now, self._starts[which]) + made[0].delay
        return _request(caller, arrival, _chain_of_prompt(caller))

    def _follow(self, request: Request, caller: TrajectoryCaller, now: int) -> Request:
        following = TrajectoryCaller(
            caller.trajectory, caller.calls, caller.position + 1, caller.prompt, caller.first_number
        )
        return _request(following, now + following.call.delay, self._chain(request, following))

    def _chain(self, request: Request, following: TrajectoryCaller) -> Chain:
        call = following.call
        if not call.rewritten and request.chain is not None:
            return request.chain
        if self.rewrite_keeps == "last prompt" and call.context_tokens >= request.prompt_tokens:
            return Chain(_name(following.trajectory, call), request.chain, request.prompt_tokens)
        return _chain_of_prompt(following)

    def _prompt(self, trajectory: Trajectory) -> Chain:
        if not self.share_prompts:
            return Chain(trajectory.prompt_id)
        if trajectory.prompt_id not in self._prompts:
            self._prompts[trajectory.prompt_id] = Chain(trajectory.prompt_id)
        return self._prompts[trajectory.prompt_id]


def _chain_of_prompt(caller: TrajectoryCaller) -> Chain:
    """A new chain that keeps the prompt, where the context is no shorter than that."""
    name = _name(caller.trajectory, caller.call)
    prompt_tokens = caller.trajectory.prompt_tokens
    return Chain(name, caller.prompt, prompt_tokens) if caller.call.context_tokens >= prompt_tokens else Chain(name)


def _request(caller: TrajectoryCaller, arrival: int, chain: Chain) -> Request:
    call = caller.call
    number = caller.first_number + caller.position
    return Request(number, arrival, call.context_tokens, call.output_tokens, chain=chain, owner=caller)


def _name(trajectory: Trajectory, call: Call) -> str:
    return f"{trajectory.id} from turn {call.turn}"


def _copies(trajectory: Trajectory, count: int) -> list[Trajectory]:
    return [trajectory] if count == 1 else [replace(trajectory, id=f"{trajectory.id}/{copy}") for copy in range(count)]


def _start_times(arrivals: Arrivals, count: int, seed: int) -> list[int]:
    generator = np.random.default_rng(seed)
    return [time for chunk in arrivals.chunks(count, generator) for time in chunk.tolist()]


def _check_ids(trajectories: list[Trajectory], samples_per_prompt: int) -> None:
    ids: set[str] = set()
    prompts: set[str] = set()
    for trajectory in trajectories:
        if trajectory.id in ids:
            raise ValueError(f"trajectory {trajectory.id!r} is given twice: ids must be unique")
        if samples_per_prompt > 1 and trajectory.prompt_id in prompts:
            raise ValueError(
                f"samples_per_prompt is {samples_per_prompt}, but the log has several samples of prompt"
                f" {trajectory.prompt_id!r}: set it to 1, or keep one trajectory of each prompt"
            )
        ids.add(trajectory.id)
        prompts.add(trajectory.prompt_id)
