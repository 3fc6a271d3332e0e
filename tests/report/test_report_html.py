from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from made_run import DECISIONS, MadeRun, make_step, make_summary, write_lines, write_run

from libra.plan.problem import Bottleneck
from libra.records.causes import Cause
from libra.records.schema import EventRecord
from libra.report.charts import MAX_COLUMNS
from libra.report.figures import role_spans, running_mean
from libra.report.html import render_report


class Page(HTMLParser):
    """Text and elements of a page; fails on a tag that is not closed where it should be."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def count(self, tag: str, **attributes: str) -> int:
        return sum(name == tag and attributes.items() <= found.items() for name, found in self.tags)


def figure(source: str, title: str) -> str:
    """The markup of the figure with this title."""
    found: list[str] = [part for part in re.findall(r"<figure.*?</figure>", source) if f"<h3>{title}</h3>" in part]
    assert len(found) == 1
    return found[0]


def test_a_page_needs_nothing_but_itself(made_run: MadeRun) -> None:
    source = render_report(made_run.directory)
    page = Page(source)
    assert page.count("script") == page.count("link") == page.count("img") == 0
    for address in ("http", "src=", "href", "url(", "@import", "//"):
        assert address not in source, address
    assert render_report(made_run.directory) == source


def test_a_page_says_what_the_run_came_to(made_run: MadeRun) -> None:
    said = Page(render_report(made_run.directory)).text
    steps = made_run.steps
    tokens_per_second = sum(s.generated_tokens for s in steps) / sum(s.step_seconds for s in steps)
    for words in (
        "Accuracy on held-out questions went from 39.1 % to 80.2 % in 120 steps",
        f"{tokens_per_second:,.0f} tokens/s",
        "Devices generated or computed 70 % of the time; what they waited for most was a batch to train on (16 %).",
        "2 taken, 1 not",
        "the predicted bottleneck was training ",
        "net gain realised +13.6 s; 1 not measured",  # 0.5 s over 50 steps, less 11.4 s
        "w3 was lost after 3 min 42 s: engine process ended with signal 9",
        "7.00 GiB",
        "15,500 trajectories were started: 15,360 trained on, 140 unfinished",
        "2.74 s → 2.20 s",  # predicted
        "2.79 s → 2.29 s",  # measured
        "+33.7 s over 80 steps",
        "+13.6 s over 50 steps",
        "1 plan looked at and not carried out",
        "below the uncertainty of 0.12 s",
        "train.learning_rate",
        "3e-05",
        "vllm 0.32.0",
    ):
        assert words in said, words


def test_text_of_the_run_never_becomes_a_tag(made_run: MadeRun) -> None:
    source = render_report(made_run.directory)
    said = Page(source).text
    for words in ("calculator <demo>", "long episodes <grow> & need", "disk is 91 % full <b>now</b>"):
        assert words in said
        assert words not in source


def test_charts_show_every_step_period_and_worker(made_run: MadeRun) -> None:
    source = render_report(made_run.directory)
    steps, periods = len(made_run.steps), len(made_run.periods)
    assert figure(source, "Reward").count("<circle") == 2 * steps  # dots, and the running mean
    assert figure(source, "Length of trajectories").count("<circle") == 3 * steps
    assert figure(source, "Generation speed").count("<circle") == 2 * steps
    seconds = figure(source, "Where a step&#x27;s seconds go")
    assert steps / 2 <= seconds.count("<rect") / 8 <= MAX_COLUMNS
    prediction = figure(source, "Step time, predicted and measured")
    assert prediction.count('class="pair"') == periods == 6
    assert prediction.count('opacity="0.4"') == 2 * 2  # both bars of the periods with a role change
    first = made_run.periods[0]
    assert f">{100 * (2.5 / first.measured_seconds - 1):+.0f}<" in prediction
    lanes = figure(source, "Who did what")
    assert lanes.count('class="role"') == 1 + 4 + 1 + 1  # w1 trains, drains, joins, generates
    assert lanes.count('class="cross"') == 1 and "Crosses: it was lost." in lanes
    assert figure(source, "Generation speed").count(">lost<") == 1
    assert lanes.count(">D1<") == lanes.count(">D2<") == 1


def test_every_axis_has_a_unit(made_run: MadeRun) -> None:
    source = render_report(made_run.directory)
    labels = [re.findall(r'class="unit"[^>]*>([^<]*)<', svg) for svg in re.findall(r"<svg.*?</svg>", source)]
    assert labels == [
        ["mean reward of a trajectory", "time since the RL loop began (min)"],
        ["tokens", "optimiser step"],
        ["generated tokens per second", "time since the RL loop began (min)"],
        ["seconds of one step", "optimiser step"],
        ["seconds of one step", "steps of the planning period"],
        ["% of the time in which steps were made"],
        ["% of the device time of a step", "optimiser step"],
        ["time since the RL loop began (min)"],
    ]


def test_device_time_is_shown_whole_for_everybody_and_each_worker(made_run: MadeRun) -> None:
    chart = figure(render_report(made_run.directory), "Where the device time went")
    lanes = re.findall(r"<g><title>([^<]*)</title>.*?</g></g>", chart)
    assert lanes == ["all devices", "w0", "w1", "w2", "w3"]
    for name in lanes:
        shares = [float(share) for share in re.findall(rf"<title>{name}: ([\d.]+) %", chart)]
        assert len(shares) >= 4
        assert sum(shares) == pytest.approx(100, abs=0.3)
    computed = sum(sum(row.get(Cause.COMPUTING, 0.0) for row in s.device_seconds.values()) for s in made_run.steps)
    whole = sum(len(step.roles) * step.step_seconds for step in made_run.steps)
    assert f"<title>all devices: {100 * computed / whole:.1f} % computing (forward" in chart
    columns = figure(render_report(made_run.directory), "Where the device time went, step by step")
    for column in re.findall(r"<title>optimiser step [\d.,]+: ([^<]*)</title>", columns):
        assert sum(float(part.rsplit(" ", 1)[1]) for part in column.split(", ")) == pytest.approx(100, abs=0.5)


def test_labels_stay_on_the_sheet(made_run: MadeRun) -> None:
    for svg in re.findall(r"<svg.*?</svg>", render_report(made_run.directory)):
        width, height = (float(size) for size in re.findall(r'viewBox="0 0 (\d+) (\d+)"', svg)[0])
        for x, y in re.findall(r'<text x="([\d.-]+)" y="([\d.-]+)"', svg):
            assert 0 <= float(x) <= width
            assert 10 <= float(y) <= height


def test_an_interrupted_run_is_shown_and_called_so(made_run: MadeRun) -> None:
    (made_run.directory / "summary.json").unlink()
    metrics = made_run.directory / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-25])
    source = render_report(made_run.directory)
    said = Page(source).text
    assert "Interrupted, or still going on" in said
    assert "until step 119" in said
    assert "The last line of metrics.jsonl was cut off" in said
    assert "No evaluation is known: the run wrote no summary." in said
    assert "Mean reward went from" in said
    assert figure(source, "Length of trajectories").count("<circle") == 3 * 119


def test_a_run_that_stopped_early_is_called_so(made_run: MadeRun) -> None:
    summary = replace(make_summary(made_run.steps), finished=False, lost_workers=("w3", "w9"), logprob_gap=None)
    (made_run.directory / "summary.json").write_text(summary.to_json())
    said = Page(render_report(made_run.directory)).text
    assert "The run ended early" in said
    assert "w9 was lost; when and why was not recorded." in said
    assert "engine and trainer never compared" in said


def test_many_losses_are_one_line_and_a_table_further_down(made_run: MadeRun) -> None:
    losses = [
        EventRecord(float(number), "worker_lost", f"w{number % 4}", f"signal {number}; its slot is idle")
        for number in range(60)
    ]
    write_lines(made_run.directory / "events.jsonl", losses)
    source = render_report(made_run.directory)
    notices, table = source.index('class="notices"'), source.index("<h3>Lost workers</h3>")
    opening = source[notices : source.index('class="tiles"')]
    assert "4 workers were lost, 60 times in all: when and why is in “Lost workers” below." in opening
    assert opening.count("<li>") == 1
    assert "lost<" not in figure(source, "Generation speed") and "The 60 losses" in figure(source, "Generation speed")
    assert figure(source, "Who did what").count('class="cross"') == 60
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
        ("latency", "the predicted bottleneck was the longest episodes 100 % of the time"),
    ],
)
def test_the_bottleneck_is_said_in_a_sentence(made_run: MadeRun, bottleneck: Bottleneck, words: str) -> None:
    periods = [replace(period, predicted_bottleneck=bottleneck) for period in made_run.periods]
    write_lines(made_run.directory / "periods.jsonl", periods)
    assert words in Page(render_report(made_run.directory)).text


def test_what_is_missing_is_said_in_words(made_run: MadeRun) -> None:
    for path in made_run.directory.iterdir():
        path.unlink()
    (made_run.directory / "config.json").write_text(json.dumps({"model": "m"}))
    source = render_report(made_run.directory)
    said = Page(source).text
    assert "<svg" not in source
    for words in (
        "No step was finished, so there is nothing to judge yet.",
        "before its first step ended",
        "No planning period was completed",
        "No decision was taken because none came up",
        "No event was recorded.",
    ):
        assert words in said, words


def test_refusals_only_are_explained(made_run: MadeRun) -> None:
    write_lines(made_run.directory / "decisions.jsonl", [DECISIONS[0], replace(DECISIONS[0], period=1, step=40)])
    said = Page(render_report(made_run.directory)).text
    assert "No decision was taken because no other allocation was worth its switch: 2 plans looked at" in said
    assert "The allocation never changed." in said
    assert "2 plans looked at and not carried out" in said


@pytest.mark.parametrize("steps", [1, 2, 3, 700])
def test_runs_of_any_length_fit(made_run: MadeRun, steps: int) -> None:
    source = render_report(write_run(made_run.directory, steps).directory)
    Page(source)
    assert "nan" not in re.sub(r"<style>.*?</style>", "", source, flags=re.DOTALL)
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
