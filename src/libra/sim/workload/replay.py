"""Replay of trajectories: a turn begins when the tool of the previous turn has returned.

Invariant: requests and tool times are exactly the log's, in tokens and in seconds. The times of requests follow from
the answers of the simulated engines. A trajectory has at most one request in flight, and ends with its first request
that does not finish.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from typing import Any, Literal

import numpy as np

from libra.sim.engine.request import Chain, Request
from libra.sim.workload.caller import UNKNOWN_TOOL_SECONDS, Call, Caller, calls
from libra.sim.workload.distributions import Arrivals, AtOnce
from libra.trajectory import Trajectory

Kept = Literal["prompt", "last prompt"]


class Replay:
    """A closed loop of trajectories.

    Trajectories start in order at `arrivals`. At most `concurrency` are in flight; the next starts when one ends. Each
    trajectory runs as `samples_per_prompt` copies, which start together. Trajectories with the same `prompt_id` share
    the tokens of the shorter prompt, unless `share_prompts` is off.

    A context in the log that is not the running sum was rewritten. An engine then keeps only the KV of the prompt; with
    `rewrite_keeps` "last prompt", it keeps the KV of the whole prompt of the preceding call. If the context is shorter
    than this part, the engine keeps less: the prompt, or nothing.

    Raises ValueError for a repeated id, for copies of a prompt that has several samples in the log, and for a call
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
        """`seed` is for the arrivals; without `arrivals` all start at tick 0. `source` describes the source of the
        trajectories, as JSON values."""
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; give 1 or more trajectories in flight, or leave it out")
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
        arrivals = arrivals or AtOnce()
        chunks = arrivals.chunks(len(asking), np.random.default_rng(seed))
        times = [time for chunk in chunks for time in chunk.tolist()]

        self._trajectories: list[Trajectory] = []
        self._calls: list[tuple[Call, ...]] = []
        self._starts: list[int] = []  # ticks
        counts: list[int] = []  # requests of each trajectory
        for (trajectory, its), time in zip(asking, times, strict=True):
            one = samples_per_prompt == 1
            self._trajectories += [
                trajectory if one else replace(trajectory, id=f"{trajectory.id}/{copy}")
                for copy in range(samples_per_prompt)
            ]
            self._calls += [its] * samples_per_prompt
            self._starts += [time] * samples_per_prompt
            counts += [len(its)] * samples_per_prompt
        *self._numbers, self.requests = accumulate(counts, initial=0)
        self._description = {
            "name": "replay",
            "source": dict(source or {}),
            "trajectories": len(self._trajectories),
            "requests": self.requests,
            "arrivals": arrivals.describe(),
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
        begun.sort(key=lambda which: (self._starts[which] + self._calls[which][0].delay, self._numbers[which]))
        return (self._begin(which, 0) for which in begun)

    def finished(self, request: Request, now: int) -> Request | None:
        caller = request.owner
        if not isinstance(caller, Caller):
            raise ValueError(f"request {request.number} belongs to no trajectory: give it to the workload that made it")
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
        self.completed = 0  # trajectories whose requests have all finished
        self.unfinished: dict[str, str] = {}  # reason, by id of a trajectory that ended early
        self._waiting = iter(range(len(self._trajectories)))
        self._prompts: dict[str, Chain] = {}

    def _begin(self, which: int, now: int) -> Request:
        trajectory, made = self._trajectories[which], self._calls[which]
        prompt = Chain(trajectory.prompt_id)
        if self.share_prompts:
            prompt = self._prompts.setdefault(trajectory.prompt_id, prompt)
        caller = Caller(trajectory, made, prompt, first_number=self._numbers[which])
        arrival = max(now, self._starts[which]) + made[0].delay
        return caller.request(caller.first_number, arrival, caller.fork())

    def _follow(self, request: Request, caller: Caller, now: int) -> Request:
        following = Caller(
            caller.trajectory, caller.calls, caller.prompt, caller.position + 1, first_number=caller.first_number
        )
        call, chain = following.call, request.chain
        if call.rewritten or chain is None:
            kept = request.prompt_tokens
            if self.rewrite_keeps == "last prompt" and call.context_tokens >= kept:
                chain = Chain(following.name, chain, kept)
            else:
                chain = following.fork()
        return following.request(following.first_number + following.position, now + call.delay, chain)


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


def draw(
    log: Sequence[Trajectory], count: int, seed: int, *, same_prompts: bool = True, replaced: bool = False
) -> tuple[Trajectory, ...]:
    """Draw `count` trajectories from a log in random order, by the seed. The draws are without replacement until all
    trajectories were drawn, and then with replacement; with `replaced`, always with replacement. A repeated trajectory
    gets a new id, as another sample of its prompt. With `same_prompts` off, it also gets a new prompt of equal length.
    Raises ValueError if the log is empty."""
    if not log:
        raise ValueError("the log has no finished trajectory to draw; give a log with at least one")
    if count < 1:
        raise ValueError(f"count is {count}; draw 1 trajectory or more")
    generator = np.random.default_rng(seed)
    order = [] if replaced else generator.permutation(len(log))[:count].tolist()
    order += generator.integers(len(log), size=count - len(order)).tolist()
    times: dict[int, int] = {}
    drawn = []
    for which in order:
        again = times[which] = times.get(which, 0) + 1
        trajectory = log[which]
        if again > 1:
            prompt = trajectory.prompt_id if same_prompts else f"{trajectory.prompt_id} (drawn {again})"
            trajectory = replace(trajectory, id=f"{trajectory.id} (drawn {again})", prompt_id=prompt)
        drawn.append(trajectory)
    return tuple(drawn)
