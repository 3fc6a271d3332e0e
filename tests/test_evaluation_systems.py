"""Experiments on whole systems: what is asked, what is made of results, and baselines rebuilt from their choice."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.evaluation_page import require_found, require_places

from benchmarks.evaluation import ablation, baselines, systems, throughput, whole_runs
from benchmarks.evaluation.baselines import Choice, choices
from benchmarks.evaluation.cells import Cell, Result
from benchmarks.evaluation.estimates import ratio
from benchmarks.evaluation.experiment import Experiment
from benchmarks.evaluation.runs import Runs, key, run_cell, with_searches
from benchmarks.evaluation.setting import Setting
from benchmarks.evaluation.systems import (
    EFFORT,
    MAKERS,
    NAMES,
    ORACLE_BUCKETS,
    Parts,
    oracle,
    ours,
)
from benchmarks.evaluation.whole_runs import FINALISTS, choice_cell, choose, chosen, kept_ours, run, search, told
from libra.choose.choice import choose_plan
from libra.choose.confirmation import simulated_gain
from libra.config.cache import cache_directory
from libra.config.recipe import Recipe
from libra.cost.device import SwitchCost
from libra.plan.simulated import SimulatedGain
from libra.sim.training_run.loop import simulate_posttraining
from libra.sim.training_run.system import PUBLISHED_SWITCH, System

MODEL = "Qwen/Qwen3-14B"
SMALL = Setting(MODEL, "search_r1", nodes=2, groups=2, steps=3, staleness=1)
BUSY = replace(SMALL, groups=8)  # so much to train on that trainers alone rule choices out
EXPERIMENTS = [it.EXPERIMENT for it in (throughput, ablation)]
SPEED = {"colocated": 1000.0, "even": 2000.0, "static": 2500.0, "ours": 4000.0, "oracle": 4400.0}  # others: 1500


def made_up(cell: Cell) -> dict[str, Any]:
    """Each seed a little faster, and ours more so than others; without a part ours is a fifth slower."""
    asked = cell.arguments
    if cell.function is search:
        choice = {"training": 24, "shape": "a800/tp4", "concurrency": None}
        return {"choice": choice, "judged": [choice | {"throughput": 1.0}], "left_out": 3}
    if cell.function is choose:
        return {"plan": {}}
    seed, steps = asked["setting"]["seed"], asked["setting"]["steps"]
    speed = SPEED.get(asked["system"], 1500.0) * (1 + seed * (0.02 if asked["system"] == "ours" else 0.01))
    speed *= 0.8 if asked.get("parts") else 1.0
    return {
        "throughput": speed,
        "seconds": steps * 1e6 / speed,
        "trainer_share": 0.5,
        "engine_share": 0.25,
        "migrated_share": 0.1,
        "tokens": [1e6] * steps,
        "staleness": [0.0 if asked["system"] == "colocated" else 1.0] * steps,
        "changes": 2,
        "ended": [(number + 1) * 1e6 / speed for number in range(steps)],
    }


def results(experiment: Experiment, quick: bool = False) -> list[Result]:
    return [Result(cell, made_up(cell), 2.0, found=False) for cell in experiment.cells(quick)]


# What is asked


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda it: it.name)
def test_tables_rows_and_figures_are_made_of_the_results(experiment: Experiment, quick: bool) -> None:
    found = require_found(experiment, results(experiment, quick))
    assert all(math.isfinite(row.value) for row in found.rows)
    intervals = any(re.search(r"\d \([\d.,]+ to [\d.,]+\)", table.markdown()) for table in found.tables.values())
    assert intervals == (not quick)
    if not quick:
        require_places(experiment, found)


def test_a_run_that_two_experiments_ask_for_is_one_call() -> None:
    def calls(experiment: Experiment) -> list[tuple[str, Any]]:
        return [(cell.function_name, cell.arguments) for cell in experiment.cells(False)]

    whole, chain = calls(throughput.EXPERIMENT), calls(ablation.EXPERIMENT)
    assert [call for call in chain if not call[1].get("parts")] == [call for call in chain if call in whole]
    begins = [arguments["parts"] for function, arguments in chain if function.endswith(":choose")]
    assert {} in begins and len(begins) == len(ablation.PARTS) + 2  # routed otherwise, and whole batches


def test_runs_of_other_lengths_share_their_searches() -> None:
    def searches(experiment: Experiment) -> list[dict[str, Any]]:
        return [dict(cell.arguments) for cell in experiment.cells(False) if cell.function is search]

    whole = searches(throughput.EXPERIMENT)
    systems = [*NAMES, *throughput.SECOND]
    assert len(whole) == len(throughput.WORKLOADS) * sum(system in baselines.NAMES for system in systems)


def test_a_search_is_one_for_all_seeds_and_starts_before_the_runs() -> None:
    runs = [run_cell(Setting(MODEL, "search_r1", seed=seed), system) for system in NAMES for seed in (0, 1, 2)]
    cells = with_searches(runs)
    searches = [cell for cell in cells if cell.function in (search, choose)]
    assert [cell.arguments["system"] for cell in searches[:-1]] == list(baselines.NAMES)
    assert [cell.function for cell in searches[-1:]] == [choose]  # the plan that ours begins with
    assert min(cell.cost for cell in searches) > max(cell.cost for cell in runs)
    assert cells[len(searches) :] == runs


# What is made of results


@given(st.lists(st.tuples(st.floats(0.5, 2), st.floats(0.5, 2)), min_size=2, max_size=5))
def test_ratios_are_paired_by_seed_whatever_the_order_of_the_results(pairs: list[tuple[float, float]]) -> None:
    setting = Setting(MODEL, "search_r1")
    found = []
    for number, values in enumerate(pairs):
        for system, value in zip(("ours", "even"), values, strict=True):
            cell = run_cell(replace(setting, seed=number), system)
            found.append(Result(cell, {"throughput": value}, 1.0, found=False))
    wanted = ratio([one for one, _ in pairs], [other for _, other in pairs])
    for order in (found, found[::-1][1:2] + found[::-1][:1] + found[::-1][2:]):
        found_ratio = Runs(order).ratio(key(setting, "ours"), key(setting, "even"), "throughput")
        assert found_ratio.value == pytest.approx(wanted.value)
        assert found_ratio.ends == pytest.approx(wanted.ends)


def test_runs_without_partners_are_refused() -> None:
    setting = Setting(MODEL, "search_r1")
    asked = [(0, "ours"), (1, "ours"), (0, "even")]
    found = [Result(run_cell(replace(setting, seed=s), n), {"throughput": 1.0}, 1.0, False) for s, n in asked]
    with pytest.raises(ValueError, match=r"ours ran with seeds \[0, 1\], even with \[0\]"):
        Runs(found).ratio(key(setting, "ours"), key(setting, "even"), "throughput")


def test_goals_stand_where_a_number_is_published_and_are_met_or_not() -> None:
    rows = [row for row in throughput.EXPERIMENT.found(results(throughput.EXPERIMENT)).rows if row.goal is not None]
    found = {(row.case.partition(",")[0], row.metric): row.met for row in rows if "14B" in row.case}
    over_oracle = "time of ours over the oracle's"
    assert found == {
        **{(workload, "ours over colocated"): True for workload in throughput.WORKLOADS},
        ("r2e_gym", "ours over even"): True,
        ("search_r1", "ours over static"): True,
        **{(workload, over_oracle): True for workload in throughput.WORKLOADS},
    }
    slow = [
        replace(it, values={**it.values, "throughput": 1.5 * it.values["throughput"]})
        if it.cell.arguments["system"] in ("colocated", "static")
        else it
        for it in results(throughput.EXPERIMENT)
        if it.cell.function is run
    ]
    missed = {row.metric for row in throughput.EXPERIMENT.found(slow).rows if row.met is False}
    assert missed == {"ours over colocated", "ours over static"}


def test_what_a_part_is_worth_is_found_where_it_was_put() -> None:
    found = ablation.EXPERIMENT.found(results(ablation.EXPERIMENT))
    shares = [row.value for row in found.rows if row.metric == "of ours"]
    assert shares == pytest.approx([0.8] * sum(map(len, ablation.PARTS.values())))
    tables = {name: table.markdown() for name, table in found.tables.items()}
    assert "| 763 | 1.80 |" in tables["chain-qwen3-14b-r2e-gym"].splitlines()[-1]
    for workload, names in ablation.PARTS.items():
        assert len(tables[f"parts-qwen3-14b-{workload}".replace("_", "-")].splitlines()) == 3 + len(names)


def test_choices_that_were_left_out_of_a_search_count_among_all() -> None:
    table = throughput.EXPERIMENT.found(results(throughput.EXPERIMENT)).tables["choices"].markdown()
    assert table.splitlines()[-1].endswith("| 24 | tp4 | as admitted | 1 of 4 |")


# Systems


@pytest.mark.parametrize("name", baselines.NAMES)
def test_a_baseline_is_rebuilt_from_its_choice(name: str) -> None:
    offered = choices(SMALL, name)
    assert len(set(offered)) == len(offered) > 0
    limits = {it.concurrency for it in offered}
    assert limits == ({None} if name == "colocated" else {None, 32})
    assert {it.training for it in offered} >= {{"colocated": 16, "even": 8}.get(name, offered[0].training)}
    for choice in offered[:: max(1, len(offered) // 4)]:
        system = baselines.system(SMALL, name, choice)
        plan = system.plan
        assert plan.layout is not None
        (bucket,) = plan.allocation.buckets
        found = Choice(plan.layout.devices, bucket.shape, system.request.recipe.concurrency)
        assert found == choice
    with pytest.raises(ValueError, match="choose one of `choices`"):
        baselines.system(SMALL, name, Choice(3, "a800/tp1", None))


def test_more_staleness_leaves_more_concurrency_open() -> None:
    for staleness, limits in ((0, {None}), (1, {None, 32}), (2, {None, 32, 64}), (8, {None, 32, 64})):
        offered = choices(replace(SMALL, staleness=staleness), "even")
        assert {it.concurrency for it in offered} == limits


def test_a_search_returns_the_choice_that_it_judged_best_and_the_run_takes_it() -> None:
    found = search(replace(SMALL, steps=15).arguments(), "even")
    judged = {tuple(asdict(it).values()): baselines.judged(SMALL, "even", it) for it in choices(SMALL, "even")}
    ranked = sorted(judged, key=lambda it: -judged[it])
    assert [it["throughput"] for it in found["judged"]] == pytest.approx([judged[it] for it in ranked])
    finals = {it: baselines.judged_at_length(SMALL, "even", Choice(*it)) for it in ranked[:FINALISTS]}
    assert tuple(found["choice"].values()) == max(finals, key=finals.__getitem__)
    outcome = ran("even", Choice(**found["choice"]))
    assert outcome["plan"].startswith("8 train") and len(outcome["ended"]) == 3
    assert outcome["throughput"] == pytest.approx(outcome["generated"] / outcome["seconds"])
    assert outcome == ran("even", Choice(**found["choice"]))


def ran(name: str, choice: Choice) -> dict[str, Any]:
    """Outcome of a baseline with this choice, in the small setting."""
    system = baselines.system(SMALL, name, choice)
    return told(system, simulate_posttraining(system, SMALL.episodes, SMALL.steps))


@pytest.mark.parametrize(
    ("setting", "name"),
    [(SMALL, "even"), (SMALL, "static"), (BUSY, "static")],
    ids=["small even", "small static", "busy static"],
)
def test_no_choice_is_judged_to_exceed_its_trainers_and_a_search_may_leave_it_out(setting: Setting, name: str) -> None:
    offered = choices(setting, name)
    judged = {it: baselines.judged(setting, name, it) for it in offered}
    assert all(found <= baselines.at_most(setting, name, it) for it, found in judged.items())
    found = search(setting.arguments(), name)
    best = max(judged, key=judged.__getitem__)
    assert found["choice"] in [asdict(it) for it in sorted(judged, key=lambda it: -judged[it])[:FINALISTS]]
    assert len(found["judged"]) + found["left_out"] == len(offered)
    assert (found["left_out"] > 0) == ((setting, name) == (BUSY, "static"))
    simulated = {Choice(it["training"], it["shape"], it["concurrency"]): it["throughput"] for it in found["judged"]}
    assert simulated == {it: judged[it] for it in simulated}
    assert all(baselines.at_most(setting, name, it) <= judged[best] for it in offered if it not in simulated)


def own_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """An empty cache, but for what engines cost, which is found again."""
    grids = cache_directory() / "grids"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    if grids.is_dir():
        cache_directory().mkdir()
        (cache_directory() / "grids").symlink_to(grids)


def test_a_search_that_is_not_given_is_looked_up_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own_cache(monkeypatch, tmp_path)
    outcome = run(SMALL.arguments(), "colocated")
    (kept,) = (cache_directory() / "evaluation").iterdir()
    written = kept.stat().st_mtime_ns
    best = chosen(replace(SMALL, seed=3), "colocated")
    assert outcome == ran("colocated", best)
    assert kept.stat().st_mtime_ns == written


def test_the_plan_that_ours_begins_with_is_that_of_libra_plan_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own_cache(monkeypatch, tmp_path)
    planner = SMALL.planner(early_gradients=True)
    assert planner.recipe.max_buckets == Recipe.model_fields["max_buckets"].default
    plan = choose_plan(planner.request(SMALL.tracker(planner)), SMALL.known, effort=EFFORT)
    assert plan.simulated is not None and len(plan.finalists) > 1
    for seed, parts in ((0, {}), (3, {"move_kv": False})):
        assert kept_ours(replace(SMALL, seed=seed), parts).plan == plan
    assert ours(SMALL).plan == plan
    (kept,) = (cache_directory() / "evaluation").iterdir()
    assert json.loads(kept.read_text())["arguments"] == choice_cell(SMALL, {}, "choice").arguments


def test_changes_of_ours_are_tried_in_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[SimulatedGain] = []

    def rehearsed(*arguments: Any, **more: Any) -> SimulatedGain:
        tried.append(simulated_gain(*arguments, **more))
        return tried[-1]

    monkeypatch.setattr(systems, "simulated_gain", rehearsed)
    setting = replace(SMALL, steps=8)
    worst = baselines.system(setting, "static", choices(setting, "static")[-1]).plan
    monkeypatch.setattr(systems, "PUBLISHED_SWITCH", SwitchCost(0.0, 0.0, 0.0))
    changes = simulate_posttraining(ours(setting, plan=worst), setting.episodes, 8).changes
    assert len(changes) == sum(it.seconds > it.error for it in tried) > 0
    tried.clear()
    simulate_posttraining(ours(setting, Parts(most_buckets=1), worst), setting.episodes, 8)
    assert not tried


def test_sizes_reach_the_run() -> None:
    assert SMALL.gpus == 16 and SMALL.recipe().batch == 32
    assert replace(SMALL, groups=None).recipe().batch == 512
    assert ours(SMALL, Parts(most_buckets=1)).switch == PUBLISHED_SWITCH


def test_sizes_by_hand_are_those_of_prices_and_kv_moves_from_published_cmlfq_on() -> None:
    def sizes(system: System) -> int:
        return len({bucket.shape for bucket in system.plan.allocation.buckets})

    setting = replace(SMALL, groups=16)  # for which prices have two
    by_hand = ours(setting, Parts(most_buckets=1))
    assert by_hand.plan.simulated is None
    assert sizes(by_hand) == sizes(MAKERS["homogeneous"](setting)) == 1
    assert sizes(ours(setting, Parts(most_buckets=4))) == 2
    assert MAKERS["published"](setting).request.recipe.max_buckets == 4
    moves = [name for name, make in MAKERS.items() if name != "ours" and make(SMALL).move_kv]
    assert moves == ["published-cmlfq", "published"]
    assert by_hand.move_kv


@pytest.mark.parametrize("sizes", [ORACLE_BUCKETS, ORACLE_BUCKETS[::-1]], ids=str)
def test_the_oracle_takes_the_better_of_its_two_runs(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    setting = replace(SMALL, groups=4)
    monkeypatch.setattr(whole_runs, "ORACLE_BUCKETS", sizes)
    runs = []
    for most in ORACLE_BUCKETS:
        what, episodes = oracle(setting, most)
        runs.append(told(what, simulate_posttraining(what, episodes, setting.steps)))
    slower, faster = sorted(runs, key=lambda values: float(values["throughput"]))
    assert slower["throughput"] < faster["throughput"]
    assert run(setting.arguments(), "oracle") == faster


@pytest.mark.parametrize(
    ("system", "more", "message"),
    [
        ("fastest", {}, "choose one of colocated"),
        ("even", {"parts": {"replan": False}}, "has no parts"),
    ],
)
def test_what_a_system_cannot_take_is_refused(system: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(SMALL.arguments(), system, **more)
