"""A turn on several engines: where it goes on, with what, and what the policy is told of it."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from fakes.engines import STOP, MadeUpEngine, connect_made_up, next_token
from fakes.scripted import FirstInstance

from libra.backends.vllm.engine_handle import EngineHandle
from libra.backends.vllm.kv_handover import KVHandover
from libra.environments.protocol import Prompt
from libra.loop.episode import EpisodeRequest
from libra.loop.fleet import ServingEngine, ServingFleet
from libra.loop.running_turn import Draft, RunningTurn
from libra.plan.allocation import Allocation, Bucket
from libra.route.policy import Placement, ToolReturn, TurnRequest, View

PROMPT = [ord("a"), STOP]  # after which the model goes on for longer than a turn may
MOST = 8
TURN: list[int] = []
while len(TURN) < MOST:
    TURN.append(next_token(PROMPT + TURN))
assert STOP not in TURN

Outlived = tuple[str, int, int | None]  # instance, its bucket, when to ask again


class Asking(FirstInstance):
    """Starts in the shortest bucket and wants to be asked after some tokens; what it answers then was written down."""

    def __init__(self, ask_again: int, *answers: Outlived | None) -> None:
        super().__init__()
        self._ask_again, self._answers = ask_again, list(answers)
        self.overrun_at: list[tuple[TurnRequest, int, int]] = []  # request, generated tokens, room of a turn

    def _first(self, view: View) -> Placement | None:
        if not view.instances:
            return None
        found = view.instances[0]
        return Placement(found.id, found.bucket, False, "starts", ask_again=self._ask_again)

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, view: View) -> Placement | None:
        self.overrun_at.append((request, generated_tokens, view.turn_tokens))
        answer = self._answers.pop(0)
        return None if answer is None else Placement(*answer[:2], True, "moves", 7, ask_again=answer[2])


class Scene:
    """A turn, and a short and a long engine to make it."""

    def __init__(
        self, policy: FirstInstance, most: int = MOST, returned: ToolReturn | None = None, prompt: str = "a;"
    ) -> None:
        self.policy = policy
        self.fleet = ServingFleet(policy, Allocation(1, (Bucket("short", 1, 0, 4), Bucket("long", 1, 4, 40))))
        self.handles: dict[str, EngineHandle] = {}
        self.workers: dict[str, MadeUpEngine] = {}
        for shape in ("short", "long"):
            self.add(shape, shape)
        self.draft = Draft(EpisodeRequest("g0-0", Prompt("p", prompt, ""), 2.5, 1.0), started_at=0.0)
        self.draft.given([ord(character) for character in prompt])
        self.draft.prompt_tokens = len(prompt)
        self.turn = RunningTurn(self.draft, "ask", self.fleet, most, STOP, returned)

    def add(self, name: str, shape: str) -> None:
        handle, worker = connect_made_up(name, 40, lambda lost, why: self.fleet.remove(lost))
        self.handles[name], self.workers[name] = handle, worker
        self.fleet.add(ServingEngine(handle, shape, 40))

    async def begin(self) -> asyncio.Task[Placement]:
        """Have the turn made by one engine, until that ends it."""

        async def part() -> Placement:
            placement = self.turn.place()
            assert placement is not None
            await self.turn.serve(placement, f"part-{len(self.made)}")
            return placement

        task = asyncio.create_task(part())
        await asyncio.sleep(0)
        return task

    async def step(self, name: str, count: int = 1) -> None:
        """Iterations of which the controller hears at once."""
        for _ in range(count):
            self.workers[name].step()
            self.workers[name].tell()
            for _ in range(3):
                await asyncio.sleep(0)

    def say_without_end(self, name: str) -> None:
        """Report the iterations so far, as if the end of the turn had not been in it."""
        report = self.workers[name].report()
        report.ended.clear()
        self.workers[name].say(report)

    @property
    def made(self) -> list[int]:
        return self.draft.tokens[self.draft.prompt_tokens :]


FIRST = TurnRequest("g0-0", "p", 2, 2, "ask", 2.5)


async def test_a_turn_that_outlives_its_bucket_goes_on_in_a_longer_one() -> None:
    policy = Asking(3, ("long", 1, None))
    scene = Scene(policy)
    part = await scene.begin()
    await scene.step("short", 3)
    assert (scene.made, part.done()) == (TURN[:3], False)
    await scene.step("short")  # with which it says that it has stopped
    assert (await part).instance == "short"
    assert not scene.turn.over
    kept = len(scene.made)
    part = await scene.begin()
    await scene.step("long", MOST - kept)
    moved = await part
    assert (moved.instance, moved.bucket, moved.priority) == ("long", 1, 7)
    assert scene.turn.over and scene.made == TURN
    # To the policy it is the turn that it placed once.
    assert policy.overrun_at == [(FIRST, 3, MOST)]
    assert [verb for verb, _ in policy.asked] == ["place"]


async def test_a_turn_that_stays_is_asked_about_when_the_policy_said() -> None:
    policy = Asking(2, ("short", 0, 5), None)
    scene = Scene(policy)
    part = await scene.begin()
    await scene.step("short", MOST)
    await part
    assert scene.turn.over and scene.made == TURN
    assert policy.overrun_at == [(FIRST, 2, MOST), (FIRST, 5, MOST)]


async def test_a_turn_that_is_over_is_not_asked_about() -> None:
    policy = Asking(3)
    scene = Scene(policy, most=3)
    part = await scene.begin()
    await scene.step("short", 3)
    await part
    assert scene.turn.over and scene.made == TURN[:3]
    assert policy.overrun_at == []


@pytest.mark.parametrize("again", [False, True], ids=["gone", "another of its name"])
async def test_a_destination_that_is_gone_is_chosen_anew(again: bool) -> None:
    policy = Asking(3, ("long", 1, None), None)
    scene = Scene(policy)
    part = await scene.begin()
    await scene.step("short", 3)
    assert policy.overrun_at == [(FIRST, 3, MOST)]
    scene.fleet.remove("long")
    if again:
        scene.handles["long"].close()
        scene.add("long", "long")
    await scene.step("short")
    await part
    kept = len(scene.made)
    part = await scene.begin()
    await scene.step("short", MOST - kept)
    assert (await part).instance == "short"
    assert scene.turn.over and scene.made == TURN
    # It was placed anew, so tokens count from there.
    assert policy.overrun_at[1:] == [(TurnRequest("g0-0", "p", 2, 2 + kept, "ask", 2.5), 3, MOST - kept)]


async def test_a_turn_that_is_placed_again_starts_with_what_it_has() -> None:
    """And needs room for the rest only: with what it may still generate it fits where it fitted at first."""

    policy = Asking(100)
    scene = Scene(policy, returned=ToolReturn("e", "ok", 1))
    part = await scene.begin()
    await scene.step("short", 3)
    scene.workers["short"].step()  # nobody heard of this one
    scene.workers["short"].die()
    await part
    assert scene.made == TURN[:3]
    part = await scene.begin()
    await scene.step("long", MOST - 3)
    await part
    assert scene.made == TURN
    assert policy.requests == [FIRST, TurnRequest("g0-0", "p", 2, 5, "ask", 2.5)]
    assert [view.turn_tokens for view in policy.views] == [MOST, MOST - 3]
    # A tool return is told once.
    assert policy.asked == [("tool_returned", ToolReturn("e", "ok", 1)), ("place", None)]


ENDINGS = {
    "nothing came": (0, False),
    "its first token came": (1, False),
    "all but its last token came": (MOST - 1, False),
    "its last token came, but not its end": (MOST, True),
}


@pytest.mark.parametrize(("came", "over"), ENDINGS.values(), ids=ENDINGS.keys())
async def test_an_engine_is_lost_at_any_token(came: int, over: bool) -> None:
    scene = Scene(Asking(100))
    part = await scene.begin()
    for _ in range(came):
        scene.workers["short"].step()
    scene.say_without_end("short")
    scene.workers["short"].die()
    await part
    assert (scene.made, scene.turn.over) == (TURN[:came], over)
    if not over:
        part = await scene.begin()
        await scene.step("long", MOST - came)
        await part
    assert scene.turn.over and scene.made == TURN


async def test_a_turn_of_which_the_stop_token_came_is_over() -> None:
    scene = Scene(Asking(100), prompt="ff;")
    assert not scene.turn.over  # the stop token before it is not its own
    part = await scene.begin()
    for _ in range(3):
        scene.workers["short"].step()
    scene.say_without_end("short")
    scene.workers["short"].die()
    await part
    assert len(scene.made) == 3 and scene.made[-1] == STOP
    assert scene.turn.over


async def test_an_engine_that_leaves_while_kv_comes_to_it_is_not_given_the_turn() -> None:
    class Leaving:
        async def bring(self, *_: object) -> tuple[None, str]:
            scene.fleet.remove("long")
            return None, "handed over"

    scene = Scene(Asking(100))
    part = await scene.begin()
    await scene.step("short", 3)
    scene.workers["short"].die()
    await part
    scene.fleet.handover = cast(KVHandover, Leaving())
    part = await scene.begin()
    assert part.done() and not scene.workers["long"]._turns
    assert scene.turn.change is None and scene.made == TURN[:3]
