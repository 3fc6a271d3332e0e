"""What surrounds the timing of real engines: workloads, their texts, prices from steps, summaries, files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from benchmarks.fidelity.fit import CONTEXT_KNOTS, TOKEN_KNOTS, FittedCost, Prices, engine_grid, fit_prices, residuals
from benchmarks.fidelity.measured import Measured, Run, read_measured
from benchmarks.fidelity.sessions import Sessions, make_sessions
from benchmarks.fidelity.step import Step
from benchmarks.fidelity.summary import Outcome, outcomes, relative_error, repeat_error, summarize
from benchmarks.fidelity.texts import Texts
from benchmarks.fidelity.workloads import Group, Workload, random_time_workload, read_workloads
from libra.sim.clock import TICKS, seconds, ticks
from libra.sim.engine.iteration_cost import UNLIMITED, DecodeBatch
from libra.sim.engine.request import Chain, Request

PRICES = Prices(
    tokens=(0.006, 0.0068, 0.007, 0.0075, 0.009, 0.0135, 0.02, 0.028, 0.034, 0.048, 0.061, 0.091, 0.125),
    per_context_token=(7e-7, 1.5e-7),
    per_pair=1.6e-7,
    per_chunk_token=6e-7,
    per_sequence=2e-5,
    per_admitted=8e-5,
    per_finished=3e-5,
    per_change=1.5e-4,
    per_added=1.2e-4,
    per_added_token=1.3e-7,
    error=0.0,
)


# Workloads


def test_fixed_workloads_cover_what_was_promised() -> None:
    workloads = {workload.name: workload for workload in read_workloads()}
    assert len(workloads) >= 10
    assert any(workload.engines == 2 for workload in workloads.values())
    assert any(workload.engine.policy == "priority" for workload in workloads.values())
    assert any(group.turns[1] > 1 for workload in workloads.values() for group in workload.groups)
    assert any(
        workload.engine.kv_blocks * 32 < workload.engine.max_num_seqs * group.longest // 2
        for workload in workloads.values()
        for group in workload.groups
    )


@given(st.integers(0, 2**32))
def test_a_seed_names_one_random_workload_that_its_engine_can_run(seed: int) -> None:
    workload = random_time_workload(seed)
    assert workload == random_time_workload(seed)
    assert Workload.model_validate(workload.model_dump(mode="json")) == workload
    assert make_sessions(workload)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": {"prompt": (5, 4)}}, "prompt is 5 to 4"),
        ({"group": {"prompt": (0, 4)}}, "1 or more"),
        ({"group": {"priorities": ()}}, "priorities is empty"),
        ({"group": {"output": (1, 4000)}}, "more than max_model_len"),
        ({"group": {"arrivals": {"kind": "sometimes"}}}, "sometimes"),
        ({"group": {"outputs": (1, 2)}}, "outputs"),
        ({"engine": {"kv_blocks": 8}}, "kv_blocks is 8"),
        ({"groups": ()}, "groups is empty"),
    ],
)
def test_a_workload_that_cannot_be_run_says_what_to_change(changes: dict[str, object], message: str) -> None:
    group = {"sessions": 2, "prompt": (4, 8), "output": (1, 2)} | changes.pop("group", {})  # type: ignore[operator]
    with pytest.raises(ValidationError, match=message):
        Workload.model_validate({"name": "a", "why": "b", "seed": 1, "groups": (group,)} | changes)


def test_names_of_workloads_differ(tmp_path: Path) -> None:
    one = Workload(name="a", why="b", seed=1, groups=(Group(sessions=1, prompt=(4, 4), output=(1, 1)),))
    path = tmp_path / "workloads.json"
    path.write_text(json.dumps([one.model_dump(mode="json")] * 2))
    with pytest.raises(ValueError, match="give each workload its own"):
        read_workloads(path)


# Sessions


@given(st.integers(0, 1000), st.integers(0, 10**6))
def test_turns_follow_each_other_whoever_serves_them(seed: int, pace: int) -> None:
    workload = random_time_workload(seed)
    sessions = Sessions(workload)
    coming, numbers, served = sessions.start(), set(), 0
    assert [(it.arrival, it.number) for it in coming] == sorted((it.arrival, it.number) for it in coming)
    random = Random(pace)
    while coming:
        request = coming.pop(random.randrange(len(coming)))
        served += 1
        numbers.add(request.number)
        now = request.arrival + random.randrange(TICKS)
        following = sessions.finished(request, now)
        if following is not None:
            assert following.arrival >= now and following.chain is request.chain
            assert following.prompt_tokens > request.prompt_tokens + request.output_tokens
            assert following.prompt_tokens + following.output_tokens <= workload.engine.max_model_len
            coming.append(following)
    assert served == len(numbers) == sum(len(session.turns) for session in make_sessions(workload))


def test_bursts_come_together_and_poisson_arrivals_at_their_rate() -> None:
    def arrivals(count: int, kind: dict[str, object]) -> list[int]:
        group = Group.model_validate({"sessions": count, "prompt": (1, 1), "output": (1, 1), "arrivals": kind})
        workload = Workload(name="a", why="b", seed=3, groups=(group,))
        return [request.arrival for request in Sessions(workload).start()]

    assert arrivals(5, {"kind": "bursts", "size": 2, "every_seconds": 0.5}) == [
        ticks(at) for at in (0.0, 0.0, 0.5, 0.5, 1.0)
    ]
    assert seconds(arrivals(4000, {"kind": "poisson", "per_second": 8.0})[-1]) == pytest.approx(500, rel=0.05)


# Texts


def test_chains_share_tokens_as_far_as_they_are_one() -> None:
    prompt = Chain("prompt")
    first, second = Chain("first", prompt, 20), Chain("second", prompt, 20)
    texts = Texts(1000)
    one, other = texts.prompt(first, 30), texts.prompt(second, 30)
    assert one[:20] == other[:20] == texts.prompt(prompt, 20)
    assert one[20:] != other[20:]
    texts.generated(first, 30, [7, 8, 9])
    assert texts.prompt(first, 35)[:33] == [*one, 7, 8, 9]
    assert texts.prompt(first, 10) == one[:10]
    assert Texts(1000).prompt(second, 30) == other


def test_generated_tokens_follow_what_is_known() -> None:
    texts, chain = Texts(1000), Chain("chain")
    texts.prompt(chain, 10)
    with pytest.raises(ValueError, match="10 tokens are known, and 9 precede"):
        texts.generated(chain, 9, [5])


# Prices


def step(decodes: int, attended: int, chunks: tuple[tuple[int, int], ...], finished: int = 0) -> Step:
    """As long as PRICES say."""
    new = Step(
        engine=0,
        begin=0,
        adding=0,
        duration=0,
        decodes=decodes,
        attended=attended,
        chunks=chunks,
        added=len(chunks),
        added_tokens=9 * len(chunks),
        admitted=len(chunks),
        finished=finished,
        preempted=0,
        changed=finished % 2 == 1,
    )
    adding = PRICES.per_added * new.added + PRICES.per_added_token * new.added_tokens
    return replace(new, adding=ticks(adding), duration=ticks(PRICES.step(new) - adding))


def steps_of_a_grid() -> list[Step]:
    chunks = [1, 3, 8, 20, 32, 64, 80, 100, 128, 160, 200, 256, 300, 400, 450, 512]
    alone = [step(0, 0, ((chunk, prefix),), chunk % 2) for chunk in chunks for prefix in (0, 300, 900)]
    decodes = [step(b, b * c, (), b % 3) for b in (1, 2, 4, 8, 16, 32) for c in (10, 300, 900)]
    together = [step(b, 300 * b, ((40, 0),) * n, n) for b in (0, 2, 20) for n in (1, 2, 5)]
    spread = [
        replace(it, added_tokens=it.added_tokens + 90, adding=it.adding + ticks(90 * PRICES.per_added_token))
        for it in together
    ]
    return [*alone, *decodes, *together, *spread]


def test_prices_are_found_again_in_steps_that_were_made_from_them() -> None:
    steps = steps_of_a_grid()
    slow = [replace(it, duration=it.duration + it.duration // 4) for it in steps]
    fast = [replace(it, duration=it.duration - it.duration // 4) for it in steps]
    fitted = fit_prices([slow, steps, fast])
    assert fitted.error < 1e-4
    for decodes, context, chunks in ((30, 27000, []), (5, 900, [(100, 50), (17, 1000)]), (0, 0, [(300, 0)])):
        assert fitted.iteration(decodes, context, chunks) == pytest.approx(
            PRICES.iteration(decodes, context, chunks), rel=1e-3
        )
    assert fitted.per_added == pytest.approx(PRICES.per_added, rel=1e-3)
    for residual in residuals(fitted, steps):
        assert abs(residual.bias) < 1e-3 and residual.error < 1e-3
    assert {residual.kind for residual in residuals(fitted, steps)} == {
        "decode",
        "mixed",
        "prefill",
        "several prefills",
    }


def test_rounds_of_different_steps_are_refused() -> None:
    steps = steps_of_a_grid()
    with pytest.raises(ValueError, match="different steps"):
        fit_prices([steps, steps[::-1]])


CHUNKS = st.lists(st.tuples(st.integers(1, 600), st.integers(0, 3000)), max_size=4)


@given(st.integers(1, 100), st.integers(1, 60_000), CHUNKS)
def test_the_cost_in_ticks_is_the_prices(decodes: int, context: int, chunks: list[tuple[int, int]]) -> None:
    cost = FittedCost(PRICES)
    base, slope, limit = cost.line(DecodeBatch(decodes), context)
    assert context < limit and base > 0
    assert cost.mixed(DecodeBatch(decodes), context, []) == base + slope * context + ticks(PRICES.per_change)
    assert limit == UNLIMITED or limit in CONTEXT_KNOTS
    of_a_request = PRICES.per_admitted + PRICES.per_finished + PRICES.per_change + PRICES.per_added
    of_requests = len(chunks) * of_a_request + sum(PRICES.per_added_token * (new + before) for new, before in chunks)
    assert seconds(cost.mixed(DecodeBatch(decodes), context, chunks)) == pytest.approx(
        PRICES.iteration(decodes, context, chunks) + of_requests + PRICES.per_change, rel=1e-6
    )


def test_the_grid_has_the_prices_at_its_points() -> None:
    grid = engine_grid(PRICES, (1, 8, 32), (16, 512), (0, 1024))
    assert grid.decode_seconds(8, 512) == pytest.approx(PRICES.iteration(8, 8 * 512, ()))
    assert grid.prefill_seconds(64, 1024) == pytest.approx(PRICES.iteration(0, 0, [(64, 1024)]))
    assert grid.chunks == TOKEN_KNOTS


# Summaries


def outcome(number: int, arrival: float, first: float, finish: float, output: int = 11) -> Outcome:
    return Outcome(number, 0, ticks(arrival), ticks(first), ticks(finish), 100, output, 64, 1)


def test_a_summary_is_of_all_requests() -> None:
    summary = summarize([outcome(0, 0.0, 0.5, 1.5), outcome(1, 1.0, 1.25, 3.0, output=1)])
    assert (summary.makespan, summary.throughput) == (3.0, 4.0)
    assert (summary.ttft_mean, summary.ttft_p99) == (0.375, 0.5)
    assert (summary.tpot_mean, summary.tpot_p99) == (0.1, 0.1)  # one token has none between
    assert (summary.latency_mean, summary.latency_p99) == (1.75, 2.0)
    assert (summary.preemptions, summary.cached_tokens) == (2, 128)


def test_an_engine_is_compared_with_itself() -> None:
    one, other = summarize([outcome(0, 0, 0.5, 2.0)]), summarize([outcome(0, 0, 0.5, 2.5)])
    error = repeat_error([one, other])
    assert error.latency_mean == pytest.approx((0.2 + 0.25) / 2)
    assert error.ttft_mean == 0
    with pytest.raises(ValueError, match="two or more"):
        repeat_error([one])
    assert (relative_error(0, 0), relative_error(1, 0)) == (0, float("inf"))


def test_what_was_not_served_has_no_outcome() -> None:
    request = Request(4, 0, 10, 5)
    with pytest.raises(ValueError, match="request 4 is waiting"):
        outcomes([request])
    request.engine, request.first_token, request.finish, request.generated = 0, 5, 6, 3
    with pytest.raises(ValueError, match="generated 3 of 5"):
        outcomes([request])
    with pytest.raises(ValueError, match="no outcomes"):
        summarize([])


# Files


def test_measured_runs_are_read_as_they_were_written(tmp_path: Path) -> None:
    steps = tuple(steps_of_a_grid())
    run = Run((outcome(0, 0.0, 0.5, 1.5),), steps[:3])
    measured = Measured("a processor", "an engine", "tiny", (steps, steps), ((random_time_workload(1), (run, run)),))
    path = tmp_path / "measured.json.gz"
    measured.write(path)
    assert read_measured(path) == measured
    before = path.read_bytes()
    measured.write(path)
    assert path.read_bytes() == before
    path.write_text("[]")
    with pytest.raises(ValueError, match="measure again"):
        read_measured(path)
