from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace

import pytest
from fakes.made_run import DECISIONS, MEASURED, MadeRun, make_step, make_summary, write_lines, write_run
from pages import Page, figure, marks, needs_nothing, titles
from typer import Exit

from libra.cli.errors import require
from libra.config.extras import install_command
from libra.plan.solution import Bottleneck
from libra.records.causes import Cause
from libra.records.run_log import outcomes, read_run
from libra.records.schema import EventRecord, Learned
from libra.report.charts import MAX_COLUMNS
from libra.report.run_figures import role_spans, running_mean
from libra.report.run_page import render_report
from libra.report.run_verdict import headline
from libra.report.words import duration


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    """That no test changes."""
    return write_run(tmp_path_factory.mktemp("run") / "run-7")


@pytest.fixture(scope="module")
def source(run: MadeRun) -> str:
    return render_report(run.directory)


def test_a_page_needs_nothing_but_itself(run: MadeRun, source: str) -> None:
    needs_nothing(source)
    assert render_report(run.directory) == source


def test_a_page_says_what_the_run_came_to(run: MadeRun, source: str) -> None:
    said = Page(source).text
    steps = run.steps
    tokens_per_second = sum(s.generated_tokens for s in steps) / sum(s.step_seconds for s in steps)
    for words in (
        "Accuracy on held-out questions went from 39.1 % to 80.2 % in 120 steps",
        f"{tokens_per_second:,.0f} tokens/s",
        "Devices generated or computed 70 % of the time; the main wait was for a batch to train on (16 %).",
        "2 taken, 1 not",
        "the predicted bottleneck was training ",
        "net gain, estimated: +13.6 s (± 14.9 s); 1 not known",  # 0.5 s over 50 steps, less 11.4 s
        "the 1 with a known gain saved an estimated 13.6 s (± 14.9 s), net of the switch.",
        "Seconds of a step 2.64 s → 2.83 s measured",
        "Largest log-prob gap 0.0013 maximum over tokens",
        "w3 was lost after 3 min 42 s: engine process ended with signal 9",
        "7.00 GiB",
        "15,500 trajectories were started: 15,360 trained on, 140 unfinished",
        "2.74 s → 2.20 s",  # predicted
        "2.79 s → 2.29 s",  # measured
        "+33.7 s over 80 steps",
        "≈ +13.6 s ± 14.9 s over 50 steps",
        "1 plan considered and not carried out",
        "below the uncertainty of 0.12 s",
        "train.learning_rate",
        "3e-05",
        "vllm 0.32.0",
        "→ train 1 | short 1 | long 1 No worker changes its role.",
    ):
        assert words in said, words


def test_text_of_the_run_never_becomes_a_tag(source: str) -> None:
    said = Page(source).text
    for words in ("calculator <demo>", "long episodes <grow> & need", "disk is 91 % full <b>now</b>"):
        assert words in said
        assert words not in source


def test_charts_show_every_step_period_and_worker(run: MadeRun, source: str) -> None:
    steps, periods = len(run.steps), len(run.periods)
    assert marks(figure(source, "Reward"), "symbol") == 2 * steps  # dots, and the running mean
    assert marks(figure(source, "Length of trajectories"), "symbol") == 3 * steps
    assert marks(figure(source, "Length of trajectories"), "line") == 3
    assert marks(figure(source, "Generation speed"), "symbol") == 2 * steps
    trained = [it for it in titles(figure(source, "Where a step's seconds go")) if ": train " in it]
    assert steps / 2 <= len(trained) <= MAX_COLUMNS
    prediction = figure(source, "Step time, predicted and measured")
    assert sum(it.startswith("period ") for it in titles(prediction)) == 2 * periods == 12
    assert len(re.findall('opacity="0.4"', prediction)) == 2 * 2  # both bars of the periods with a role change
    first = run.periods[0]
    assert f">{100 * (2.5 / first.measured_seconds - 1):+.0f}<" in prediction
    lanes = figure(source, "Roles of the workers")
    assert sum(": " in it and " – " in it for it in titles(lanes)) == 1 + 4 + 1 + 1  # w1 trains, drains, joins, serves
    assert lanes.count("✕") == 1 and "Crosses: it was lost." in lanes
    assert figure(source, "Generation speed").count(">lost<") == 1
    assert lanes.count(">D1<") == lanes.count(">D2<") == 1


def test_every_axis_has_a_unit(source: str) -> None:
    for title, *labels in (
        ("Reward", "mean reward of a trajectory", "time since the RL loop began (min)"),
        ("Length of trajectories", "tokens", "optimiser step"),
        ("Generation speed", "generated tokens per second", "time since the RL loop began (min)"),
        ("Where a step's seconds go", "seconds of one step", "optimiser step"),
        ("Step time, predicted and measured", "seconds of one step", "steps of the planning period"),
        ("Where the device time went", "% of the time in which steps were made"),
        ("Where the device time went, step by step", "% of the device time of a step", "optimiser step"),
        ("Roles of the workers", "time since the RL loop began (min)"),
    ):
        for label in labels:
            assert f">{label}</text>" in figure(source, title), (title, label)


def test_device_time_is_shown_whole_for_everybody_and_each_worker(run: MadeRun, source: str) -> None:
    said = titles(figure(source, "Where the device time went"))
    lanes = ["all devices", "w0", "w1", "w2", "w3"]
    assert [it for it in said if ":" not in it] == lanes
    for name in lanes:
        shares = [float(it.split()[name.count(" ") + 1]) for it in said if it.startswith(f"{name}: ")]
        assert len(shares) >= 4
        assert sum(shares) == pytest.approx(100, abs=0.3)
    computed = sum(sum(row.get(Cause.COMPUTING, 0.0) for row in s.device_seconds.values()) for s in run.steps)
    whole = sum(len(step.roles) * step.step_seconds for step in run.steps)
    assert any(it.startswith(f"all devices: {100 * computed / whole:.1f} % computing (forward") for it in said)
    columns: dict[str, float] = defaultdict(float)
    for it in titles(figure(source, "Where the device time went, step by step")):
        column, _, part = it.partition(": ")
        if column.startswith("optimiser step"):
            columns[column] += float(part.rsplit(" ", 1)[1])
    assert len(columns) == 60
    assert list(columns.values()) == pytest.approx([100.0] * 60, abs=0.5)


def test_an_interrupted_run_is_shown_and_called_so(made_run: MadeRun) -> None:
    (made_run.directory / "summary.json").unlink()
    metrics = made_run.directory / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-25])
    source = render_report(made_run.directory)
    said = Page(source).text
    assert "Interrupted, or still running" in said
    assert "until step 119" in said
    assert "The last line of metrics.jsonl was cut off" in said
    assert "No evaluation is known: the run wrote no summary." in said
    assert "Mean reward went from" in said
    assert marks(figure(source, "Length of trajectories"), "symbol") == 3 * 119


def test_a_run_that_stopped_early_is_called_so(made_run: MadeRun) -> None:
    summary = replace(make_summary(made_run.steps), finished=False, lost_workers=("w3", "w9"), logprob_gap=None)
    (made_run.directory / "summary.json").write_text(summary.to_json())
    said = Page(render_report(made_run.directory)).text
    assert "The run ended before its last step" in said
    assert "w9 was lost; time and reason were not recorded." in said
    assert "Largest log-prob gap never compared" in said


def test_many_losses_are_one_line_and_a_table_further_down(made_run: MadeRun) -> None:
    losses = [
        EventRecord(float(number), "worker_lost", f"w{number % 4}", f"signal {number}; its slot is idle")
        for number in range(60)
    ]
    write_lines(made_run.directory / "events.jsonl", losses)
    source = render_report(made_run.directory)
    notices, table = source.index('class="notices"'), source.index("<h3>Lost workers</h3>")
    opening = source[notices : source.index('class="tiles"')]
    assert "4 workers were lost, 60 times in all: “Lost workers” below says when and why." in opening
    assert opening.count("<li>") == 1
    assert "lost<" not in figure(source, "Generation speed") and "The 60 losses" in figure(source, "Generation speed")
    assert figure(source, "Roles of the workers").count("✕") == 60
    rows = source[table : source.index("</section>", table)]
    assert rows.count("<tr>") == 1 + len(losses)
    assert all(event.text in rows for event in losses)


def test_a_run_without_a_loss_has_no_table_of_them(made_run: MadeRun) -> None:
    write_lines(made_run.directory / "events.jsonl", [])
    assert "<h3>Lost workers</h3>" not in render_report(made_run.directory)


@pytest.mark.parametrize(
    ("bottleneck", "words"),
    [
        ("rollout", "the predicted bottleneck was generation 100 % of the time"),
        ("training", "the predicted bottleneck was training 100 % of the time"),
        ("latency", "the predicted bottleneck was the latency of a batch 100 % of the time"),
    ],
)
def test_the_bottleneck_is_said_in_a_sentence(made_run: MadeRun, bottleneck: Bottleneck, words: str) -> None:
    periods = [replace(period, predicted_bottleneck=bottleneck) for period in made_run.periods]
    write_lines(made_run.directory / "periods.jsonl", periods)
    assert words in headline(read_run(made_run.directory))


def test_what_is_missing_is_said_in_words(made_run: MadeRun) -> None:
    for path in made_run.directory.iterdir():
        path.unlink()
    (made_run.directory / "config.json").write_text(json.dumps({"model": "m"}))
    source = render_report(made_run.directory)
    said = Page(source).text
    assert "<svg" not in source
    for words in (
        "No step was finished, so there is no result yet.",
        "before its first step ended",
        "No step was finished, so there is nothing to show.",
        "No decision was taken, since the run recorded no planning result",
        "No event was recorded.",
    ):
        assert words in said, words


def test_what_was_promised_realised_and_learned_is_a_table(made_run: MadeRun) -> None:
    assert "Predictions and corrections" not in Page(render_report(made_run.directory)).text
    learned = {"rollout": Learned(1.25, 0.1), "training": Learned(1.125, 0.2), "latency": Learned(1.0, 0.2)}
    first, *others = made_run.periods
    taught = replace(first, priced_seconds=2.0, measured_error=0.25, hindsight_seconds=2.1, learned=learned)
    write_lines(made_run.directory / "periods.jsonl", [taught, *others])
    said = Page(render_report(made_run.directory)).text
    took = duration(first.measured_seconds)
    assert f"2.00 s {duration(first.predicted_seconds)} {took} ± 0.50 s" in said
    assert "generation × 1.25 ± 20 %, training × 1.12 ± 40 %" in said
    assert "a worker changed role" in said


def test_a_realised_gain_has_its_interval(made_run: MadeRun) -> None:
    judged = replace(MEASURED, price_error=0.2, realised_error=0.1)
    write_lines(made_run.directory / "decisions.jsonl", [*DECISIONS, judged])
    assert "≈ +0.50 s ± 0.20 s" in Page(render_report(made_run.directory)).text
    [outcome, _] = outcomes(read_run(made_run.directory))
    assert outcome.error_seconds == pytest.approx(0.2 * outcome.steps)


def test_refusals_only_are_explained(made_run: MadeRun) -> None:
    write_lines(made_run.directory / "decisions.jsonl", [DECISIONS[0], replace(DECISIONS[0], period=1, step=40)])
    said = Page(render_report(made_run.directory)).text
    assert "No decision was taken because no other allocation was worth its switch: 2 plans were considered" in said
    assert "The allocation never changed." in said
    assert "2 plans considered and not carried out" in said


@pytest.mark.parametrize("steps", [1, 2, 3, 700])
def test_runs_of_any_length_fit(made_run: MadeRun, steps: int) -> None:
    source = render_report(write_run(made_run.directory, steps).directory)
    needs_nothing(source)
    assert len(source) < 1_000_000
    assert ("Each mark is the mean of 3 steps." in source) == (steps == 700)


def test_role_spans_join_equal_roles_and_leave_gaps() -> None:
    rows = [("train", 1), ("train", 2), ("rollout", 3), (None, 4), ("rollout", 5)]
    steps = [
        replace(
            make_step(number, 0.0),
            time=float(number),
            step_seconds=1.0,
            roles={"w": role} if role else {},
            device_seconds={},
        )
        for role, number in rows
    ]
    assert role_spans(steps, "w") == [("train", 0.0, 2.0), ("rollout", 2.0, 3.0), ("rollout", 4.0, 5.0)]
    assert role_spans(steps, "unknown") == []


def test_a_running_mean_does_not_reach_across_parts() -> None:
    assert running_mean([1.0, 3.0, 5.0, 10.0, 20.0], 2, ["a", "a", "a", "b", "b"]) == [1.0, 2.0, 4.0, 10.0, 15.0]


def test_pages_without_their_libraries_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(Exit) as ended:
        require("report")
    assert ended.value.exit_code == 2
    assert f"altair is not installed: {install_command('report')}" in capsys.readouterr().err


PLANNING = """
import sys
from libra.cli import app, explain, plan, trace
from libra.report import explain_table, plan_table, tables
print(sorted({"altair", "jinja2", "vl_convert"} & set(sys.modules)))
"""


def test_planning_loads_nothing_that_only_pages_need() -> None:
    assert subprocess.run([sys.executable, "-c", PLANNING], capture_output=True, text=True, check=True).stdout == "[]\n"
