"""A router inside a trainer: servers come and go, turns are given up and asked for again, ends are told or not."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.live.session_router import SessionRouter
from libra.route.catalogue import POLICIES, policy_named
from libra.trajectory import Turn


def router(policy: str = "cmlfq", servers: int = 2, **keys: object) -> SessionRouter:
    made = SessionRouter(policy_named(policy), capacity_tokens=1000, turn_tokens=100, **keys)  # type: ignore[arg-type]
    made.add(f"s{i}" for i in range(servers))
    return made


@pytest.mark.parametrize("policy", POLICIES)
def test_a_trajectory_is_what_its_caller_told(policy: str) -> None:
    now = [0.0]
    of = router(policy, clock=lambda: now[0])
    of.began("t", "p", "math")
    of.release(of.acquire("t", 100), "t")
    of.answered("t", 100, 20)
    now[0] = 5.0
    of.returned("t", "search", "ok")
    of.release(of.acquire("t", 150), "t")
    of.answered("t", 150, 7)
    done = of.finished("t", 0.5, 3)
    assert done is not None
    assert (done.prompt_id, done.task, done.prompt_tokens, done.reward, done.policy_version) == (
        "p",
        "math",
        100,
        0.5,
        3,
    )
    assert done.turns == (Turn(20, "search", "ok", 30, 5.0), Turn(7, None, None, 0))
    assert len(of) == 0 and of.in_flight == {"s0": 0, "s1": 0}
    assert of.finished("t", None, 0) is None


def test_a_turn_that_is_given_up_goes_on_and_is_one_turn() -> None:
    of = router()
    first = of.acquire("t", 100)
    of.remove([first])
    of.release(first, "t")
    second = of.acquire("t", 140)  # with the 40 tokens that came before
    assert second != first
    of.release(second, "t")
    of.answered("t", 100, 60)
    done = of.finished("t", None, 0)
    assert done is not None and done.turns == (Turn(60, None, None, 0),)


def test_later_turns_stay_with_their_prefix_until_prefixes_are_lost() -> None:
    of = router("least-loaded")
    home = of.acquire("a", 100)
    of.release(home, "a")
    assert of.acquire("b", 10) == home
    assert of.acquire("a", 120) == home
    of.release(home, "a")
    of.prefixes_lost()
    assert of.acquire("a", 120) != home


def test_a_server_that_comes_back_owes_nothing_to_its_turns_of_before() -> None:
    of = router(servers=1)
    of.acquire("t", 100)
    of.remove(["s0"])
    with pytest.raises(LookupError, match="no server is available"):
        of.acquire("u", 1)
    of.add(["s0"])
    of.release("s0", "t")
    assert [server.load_tokens for server in of.servers] == [0]


def test_a_context_beyond_every_server_goes_to_the_least_loaded() -> None:
    of = router(servers=3)
    assert {of.acquire(str(i), 2000) for i in range(3)} == {"s0", "s1", "s2"}


def test_trajectories_whose_ends_are_not_told_are_forgotten_but_not_while_they_run() -> None:
    now = [0.0]
    of = router(idle_seconds=100, clock=lambda: now[0])
    of.release(of.acquire("ended", 10), "ended")
    of.acquire("runs", 10)
    now[0] = 200.0
    of.release(of.acquire("new", 10), "new")
    assert len(of) == 2
    of.acquire("runs", 10)


_step = st.tuples(
    st.sampled_from(["acquire", "release", "answered", "returned", "finished", "forget", "add", "remove", "lost"]),
    st.integers(0, 4),
    st.integers(0, 3),
)


@given(st.sampled_from(POLICIES), st.lists(_step, max_size=60))
def test_loads_are_the_turns_that_are_not_released(policy: str, steps: list[tuple[str, int, int]]) -> None:
    of, there, lives = router(policy, servers=4), {f"s{i}" for i in range(4)}, Counter[str]()
    held: list[tuple[str, int, str]] = []  # server, which of its lives, trajectory
    for what, number, place in steps:
        id, server = f"t{number}", f"s{place}"
        if what == "acquire" and there:
            at = of.acquire(id, 100)
            held.append((at, lives[at], id))
        elif what == "release":
            of.release(server, id)
            if (first := next((it for it in held if (it[0], it[2]) == (server, id)), None)) is not None:
                held.remove(first)
        elif what == "answered":
            of.answered(id, 100, 5)
        elif what == "returned":
            of.returned(id, "tool", "ok")
        elif what in ("finished", "forget"):
            of.finished(id, None, 0) if what == "finished" else of.forget(id)
            held = [it for it in held if it[2] != id]
        elif what == "add":
            of.add([server])
            there.add(server)
        elif what == "remove":
            of.remove([server])
            there.discard(server)
            lives[server] += 1
        elif what == "lost":
            of.prefixes_lost()
        expected = {each: sum(it[:2] == (each, lives[each]) for it in held) for each in there}
        assert of.in_flight == expected
        assert {each.id: each.load_tokens for each in of.servers} == {at: 100 * n for at, n in expected.items()}
