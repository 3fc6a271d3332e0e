"""The Pareto set that a search finds is that of simulating everything; what it claims is what is known."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path

import numpy as np
import pytest

from libra.plan.problem import InfeasiblePlanError
from libra.serving import answer as answers
from libra.serving import ladder
from libra.serving.answer import SizingAnswer, point_of
from libra.serving.draws import ANSWERS, PROMPTS
from libra.serving.engines import NoRoomError
from libra.serving.found import Progress
from libra.serving.holding import held_rate
from libra.serving.ladder import Asking, highest_rate, repeated, sustained_arrivals
from libra.serving.menu import MenuFile, ServingMenu
from libra.serving.objective import Metric, Objective, parse_objectives
from libra.serving.question import BRIEF, LASTING, SizingQuestion
from libra.serving.search import answer, question_of, search
from libra.serving.search_table import headline
from libra.serving.trial import trial
from libra.serving.verdict import Rival, tenths
from libra.sim.workload.requests import RecordedRequest
from tests.serving.small_questions import CLUSTER, MODEL, question, requests

MENU = ServingMenu(
    MenuFile(max_num_seqs=(8, 64), max_num_batched_tokens=(512,), tensor_parallel_size=(1, 2), engines=(1, 2))
)


SMALL = ServingMenu(
    MENU.file.model_copy(
        update={"nodes": ("h100", "l40s"), "tensor_parallel_size": (1,), "max_num_seqs": (64,), "engines": (1,)}
    )
)


def simulate_everything(asked: SizingQuestion, menu: ServingMenu) -> set[str]:
    """The Pareto set, without bounds."""
    points = []
    for candidate in menu.candidates(asked):
        try:
            held = held_rate(asked, Asking(candidate))
        except NoRoomError:
            continue
        if (point := point_of(asked, candidate, inf, held)) is not None:
            points.append(point)
    return {str(it.candidate) for it in points if not any(other.dominates(it) for other in points)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", [{"gpus": 4}, {"gpus": 4, "rate": 6.0}], ids=["any rate", "a rate"])
def test_the_pareto_set_is_that_of_brute_force(seed: int, settings: dict[str, float]) -> None:
    generator = np.random.default_rng(seed)
    asked = question(requests(generator, 40), *parse_objectives("ttft_p90=0.5,tpot_mean=0.05"), **settings)
    menu = MENU if "rate" in settings else SMALL
    found = answer(asked, menu)
    assert {str(it.candidate) for it in found.points} == simulate_everything(asked, menu)
    assert found.candidates == len(list(menu.candidates(asked)))


def test_a_trial_that_stops_early_decides_as_the_whole_does() -> None:
    generator = np.random.default_rng(7)
    for _ in range(20):
        asked = question(requests(generator, 40), *parse_objectives("ttft_p90=0.3,tpot_mean=0.03,latency_p99=5"))
        candidate = next(ServingMenu(MenuFile(max_num_seqs=(16,), engines=(1,))).candidates(asked))
        rate = float(10 ** generator.uniform(-1, 3))
        whole = trial(asked, candidate, rate, to_the_end=True)
        assert trial(asked, candidate, rate).passed == whole.passed


@pytest.mark.parametrize("objectives", ["ttft_p90=0.5,tpot_mean=0.05", "ttft_mean=0.5", "latency_p90=9,tpot_p90=0.03"])
def test_a_trial_is_stopped_for_a_rival_that_is_no_slower_and_for_no_other(objectives: str) -> None:
    generator = np.random.default_rng(11)
    menu = ServingMenu(MenuFile(nodes=("h100",), max_num_seqs=(16,), engines=(1,)))
    for _ in range(8):
        asked = question(requests(generator, 40), *parse_objectives(objectives))
        candidate, rate = next(menu.candidates(asked)), float(10 ** generator.uniform(-1, 1.5))
        whole = trial(asked, candidate, rate, to_the_end=True)
        reached = tenths(asked, whole.ttft, whole.tpot)
        for ttft, tpot in generator.integers(0, 11, (8, 2)).tolist():
            rival = Rival("another", inf, (ttft, tpot))
            stopped = trial(asked, candidate, rate, rivals=(rival,)).slower
            slower = ttft <= reached[0] and tpot <= reached[1]
            assert stopped == (rival if slower and whole.passed else None) or (slower and not whole.passed)


@pytest.mark.parametrize("start", [0.5, 8.0, 512.0])
def test_where_a_search_begins_changes_nothing(start: float) -> None:
    asked = question(requests(np.random.default_rng(3), 60), *parse_objectives("ttft_p90=0.5,tpot_mean=0.05"))
    candidate = next(SMALL.candidates(asked))
    held = held_rate(asked, Asking(candidate))
    for first, sure in ((PROMPTS, True), (ANSWERS, False)):
        again = held_rate(asked, Asking(candidate, start=start, first=first, sure=sure))
        assert (again.trial, again.checks) == (held.trial, held.checks)


def found(menu: ServingMenu = MENU, **settings: float) -> SizingAnswer:
    asked = question(
        [RecordedRequest(number * 10**12, 300, 40) for number in range(60)],
        *parse_objectives("ttft_p99=0.5,tpot_p99=0.05"),
        **settings,
    )
    return answer(asked, menu)


def test_nothing_cheaper_is_proven_where_the_bound_says_so() -> None:
    cheapest = found(gpus=4, rate=2.0)
    assert cheapest.points[0].candidate.devices == 1
    assert cheapest.proven
    assert cheapest.claim() == "nothing with fewer GPUs on the menu can (bound)"


def test_requests_that_are_over_soon_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 requests may wait half a second: they say something of 15 requests/s at most."""
    monkeypatch.setattr(answers, "BRIEF", BRIEF)
    steady = found(gpus=4, rate=14.9).caution()
    assert steady == "ttft_p99 and tpot_p99 of 60 requests are that of the slowest; give 100 requests or more"
    caution = found(gpus=4, rate=16.0).caution()
    assert caution is not None and "the 60 requests come within 3.75 s, and may wait 0.5 s" in caution
    assert caution.endswith("give 256 requests or more")


def test_a_record_that_is_too_short_gives_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one token that may wait for minutes are served at any rate."""
    monkeypatch.setattr(answers, "BRIEF", BRIEF)
    monkeypatch.setattr(ladder, "_ARRIVALS", 100)
    tiny = [RecordedRequest(number * 10**12, 1, 1) for number in range(10)]
    menu = ServingMenu(MenuFile(nodes=("h100",), architectures=("colocated",), max_num_seqs=(64,), engines=(1,)))
    asked = question(tiny, *parse_objectives("ttft_p99=600s"), gpus=1)
    none = answer(asked, menu)
    assert none.points and not none.told
    assert headline(none).startswith("No rate can be given: at 131,072 requests/s the 100 requests come within ")
    document = none.document()
    assert document["caution"] == none.caution() and all("rate" not in it for it in document["pareto"])
    assert answer(replace(asked, rate=2.0), menu).told


def test_a_rate_that_is_found_is_one_that_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The highest rung that many requests pass: a record that is over soon is served faster."""
    monkeypatch.setattr(ladder, "LASTING", LASTING)
    monkeypatch.setattr(ladder, "_ENOUGH", 4_000)
    even = [RecordedRequest(number * 10**12, 300, 40) for number in range(20)]
    asked = question(even, *parse_objectives("ttft_p99=0.5,tpot_p99=0.05"))
    candidate = next(ServingMenu(MenuFile(max_num_seqs=(8,), engines=(1,), nodes=("l40s",))).candidates(asked))
    once = highest_rate(asked, candidate)
    lasting = held_rate(asked, Asking(candidate)).trial
    assert once is not None and lasting is not None
    assert lasting.rate < once.rate
    assert lasting.requests >= sustained_arrivals(asked, lasting.rate) > len(asked.requests)
    above = lasting.rate * ladder.rate_of(1)
    many = repeated(asked.requests, sustained_arrivals(asked, above))
    assert not trial(asked, candidate, above, requests=many).passed
    assert held_rate(asked, Asking(candidate, bound=once.rate)).trial == lasting


def test_simulation_alone_proves_nothing() -> None:
    most = found(SMALL, gpus=4)
    assert not most.proven
    near = most.near_miss
    assert near is not None
    missing = replace(most, near_miss=replace(near, objective="ttft_p99", seconds=0.75, limit=0.5))
    said = f"no deployment is better in simulation ({most.possible} tried); the next best"
    assert missing.claim() == f"{said} misses ttft_p99 by 0.25 s on the record"
    as_good = replace(most, near_miss=replace(near, seconds=near.limit))
    assert as_good.claim() == f"{said} is as good on the record"


def test_the_next_best_at_a_rate_is_the_one_nearest_to_its_objectives() -> None:
    even = [RecordedRequest(number * 10**12, 900, 40) for number in range(100)]  # however drawn, gaps are the same
    objectives = parse_objectives("ttft_p99=0.05,tpot_p99=0.05")
    asked = question(even, *objectives, gpus=4, rate=100.0)
    found = answer(asked, MENU)
    assert found.possible == 2 and found.near_miss is not None
    cheaper = [it for it in MENU.candidates(asked) if asked.cost(it) < found.points[0].cost]
    ends = [trial(asked, it, 100.0, to_the_end=True) for it in cheaper]
    nearest = min(max(end.latency[it.name] / it.limit for it in objectives) for end in ends)
    assert found.near_miss.seconds / found.near_miss.limit == pytest.approx(nearest)


def test_batches_beyond_all_times_are_refused_by_their_key() -> None:
    asked = question(requests(np.random.default_rng(0), 4), Objective("ttft", "p99", 1.0))
    with pytest.raises(ValueError, match=r"max_num_seqs 1000000000 of the menu: .* up to 2,048; lower it"):
        answer(asked, ServingMenu(MenuFile(max_num_seqs=(64, 10**9))))


def test_every_rejection_has_its_reason_and_all_is_json() -> None:
    some = found(gpus=4, rate=30.0)
    assert all(it.reason for it in some.rejected)
    document = json.loads(json.dumps(some.document(), allow_nan=False))
    assert len(document["pareto"]) + len(document["rejected"]) == document["candidates"]
    assert document["out_by_bound"] == some.out_by_bound


@pytest.mark.parametrize("settings", [{"gpus": 2}, {"gpus": 4, "rate": 6.0}], ids=["any rate", "a rate"])
def test_nothing_is_due_at_the_end_and_all_that_is_tried_was_due(settings: dict[str, float]) -> None:
    asked = question(
        requests(np.random.default_rng(2), 40), *parse_objectives("ttft_p90=0.5,tpot_mean=0.05"), **settings
    )
    moments: list[Progress] = []
    answer(asked, SMALL, progress=moments.append)
    assert moments[0].tried == 0 and moments[0].out < moments[0].candidates  # when bounds are known
    assert moments[-1].due == 0 and moments[-1].tried <= moments[-1].candidates
    for before, after in pairwise(moments):
        assert after.tried > before.tried
        assert 0 <= after.due <= after.candidates - after.tried


def test_more_processes_find_the_same() -> None:
    asked = question(
        [RecordedRequest(number * 10**12, 300, 40) for number in range(30)], *parse_objectives("ttft_p99=0.5"), gpus=2
    )
    assert answer(asked, SMALL, jobs=2).document() == answer(asked, SMALL).document()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttft_p99", "'ttft_p99' is not an objective; give objectives like ttft_p99=1s,tpot_p99=50ms"),
        ("ttft_p98=1", "unknown objective"),
        ("ttft_p99=soon", "give seconds"),
        ("ttft_p99=1000", "ttft_p99 is 1000 seconds, which is long; write 1000ms or 1000s"),
        ("ttft_p99=-1", "more than 0"),
        ("ttft_p99=1e308s", r"ttft_p99 is 1e\+308; give seconds, more than 0 and less than 9.22e\+06"),
        ("ttft_p99=1,ttft_p99=2", "given twice"),
        ("tpot_p99=0.05", "limits the wait of a request"),
    ],
)
def test_objectives_that_are_none(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_objectives(text)


@pytest.mark.parametrize(("metric", "statistic"), [("ttft", "p98"), ("itl", "p99")])
def test_an_objective_of_nothing_is_refused(metric: Metric, statistic: str) -> None:
    with pytest.raises(ValueError, match=f"unknown objective '{metric}_{statistic}'"):
        Objective(metric, statistic, 1.0)


def test_an_objective_below_the_fastest_iteration_is_refused() -> None:
    asked = question(
        [RecordedRequest(number * 10**12, 300, 40) for number in range(4)],
        Objective("ttft", "p99", 1),
        Objective("tpot", "p99", 1e-4),
    )
    with pytest.raises(
        ValueError, match=r"tpot_p99 is 0.0001 s; without any queue nothing on the menu is faster than 0"
    ):
        answer(asked, MENU)


def test_questions_that_do_not_fit_are_refused() -> None:
    recorded = [RecordedRequest(0, 10, 10), RecordedRequest(10**12, 10, 10)]
    limit = Objective("ttft", "p99", 1)
    with pytest.raises(ValueError, match="gpus is 100; give 1 to 48"):
        question(recorded, limit, gpus=100)
    with pytest.raises(ValueError, match="h100 has no price"):
        question(recorded, limit, budget=10.0)
    for settings, said in (
        ({"rate": True}, "rate is True; give a finite number above 0"),
        ({"rate": "2"}, "rate is '2'; give a finite number above 0"),
        ({"rate": float("nan")}, "rate is nan; give a finite number above 0"),
        ({"gpus": 1.5}, "gpus is 1.5; give a whole number"),
        ({"gpus": True}, "gpus is True; give a whole number"),
    ):
        with pytest.raises(ValueError, match=said):
            question(recorded, limit, **settings)  # type: ignore[arg-type]
    for spoiled, said in (
        (replace(recorded[1], prompt_tokens=0), "request 1: prompt_tokens is 0; give a whole number of 1 or more"),
        (replace(recorded[1], output_tokens=1.5), "request 1: output_tokens is 1.5; give a whole number of 1 or more"),  # type: ignore[arg-type]
        (replace(recorded[1], arrival=-1), "request 1: arrival is -1; give a whole number of 0 or more"),
        (replace(recorded[1], prefix="p", prefix_tokens=11), "prefix_tokens is 11, more than prompt_tokens, 10"),
        ("no request", "request 1 is 'no request'; give RecordedRequests"),
    ):
        with pytest.raises(ValueError, match=said):
            question([recorded[0], spoiled], limit)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="jobs is 0; give the number of processes, 1 or more"):
        answer(question(recorded, limit), ServingMenu(), jobs=0)
    with pytest.raises(ValueError, match=r"slo is \['ttft_p99=1'\]; give a text such as ttft_p99=1,tpot_p99=0\.05"):
        question_of(CLUSTER, MODEL, recorded, ["ttft_p99=1"], profile="roofline")  # type: ignore[list-item]
    with pytest.raises(ValueError, match="requests all arrive at one time"):
        question([replace(it, arrival=0) for it in recorded], limit)
    with pytest.raises(ValueError, match="request 1 has cancel_at"):
        question([recorded[0], replace(recorded[1], cancel_at=2 * 10**12)], limit)
    with pytest.raises(ValueError, match="tensor_parallel_size 3 of the menu"):
        answer(question(recorded, limit), ServingMenu(MenuFile(tensor_parallel_size=(3,))))
    with pytest.raises(ValueError, match="requests are not in the order of their arrival: sort them"):
        question(recorded[::-1], limit)
    with pytest.raises(InfeasiblePlanError, match=r"1 x h100 tp2 .* needs 2 GPUs, of 1; raise gpus or budget"):
        answer(question(recorded, limit, gpus=1), ServingMenu(MenuFile(tensor_parallel_size=(2,))))
    with pytest.raises(
        ValueError, match="no engine of the menu fits this cluster: engines with a pipeline must not have"
    ):
        answer(
            question(recorded, limit),
            ServingMenu(MenuFile(pipeline_parallel_size=(2,), architectures=("prefill-decode",))),
        )


def test_what_a_menu_says_twice_is_asked_once() -> None:
    recorded = [RecordedRequest(number * 10**12, 300, 40) for number in range(9)]
    asked = question(recorded, Objective("ttft", "p99", 1), gpus=2, rate=1.0)
    once = MenuFile(tensor_parallel_size=(1,), max_num_seqs=(64,), max_num_batched_tokens=(2048,), engines=(1, 2))
    twice = once.model_copy(update={"tensor_parallel_size": (1, 1), "max_num_seqs": (64, 64), "engines": (1, 2, 2)})
    assert answer(asked, ServingMenu(twice)).document() == answer(asked, ServingMenu(once)).document()


def test_a_search_reads_its_files(tmp_path: Path) -> None:
    (tmp_path / "menu.yaml").write_text("nodes: [h100]\ntensor_parallel_size: [1]\narchitectures: [colocated]\n")
    examples = Path(__file__).parents[2] / "examples"
    found = search(
        str(examples / "cluster_mixed.yaml"),
        "Qwen/Qwen3-8B",
        examples / "serving.jsonl",
        "ttft_p99=1",
        rate=2.0,
        gpus=1,
        menu=tmp_path / "menu.yaml",
        profile="roofline",
    )
    assert found.points[0].candidate.pools[0].shape.nodes == "h100"


def test_a_pipeline_is_as_busy_as_its_stages_are() -> None:
    """Requests that come at once keep both stages at work nearly all the time."""
    recorded = [RecordedRequest(number, 300, 40) for number in range(200)]
    asked = question(recorded, Objective("ttft", "p99", 100.0))
    menu = MenuFile(pipeline_parallel_size=(2,), async_scheduling=(False,), architectures=("colocated",), engines=(1,))
    (use,) = trial(asked, next(ServingMenu(menu).candidates(asked)), asked.natural_rate).pools
    assert 0.8 < use.busy <= 1.0
