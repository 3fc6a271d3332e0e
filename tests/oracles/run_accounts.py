"""Whether a run that has ended accounts for everything, from its files alone.

Invariant: nothing here calls the run's own reading, folding or summing up; what must hold is said anew. A check names
the first things that contradict it.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.oracles.run_files import Row as Line
from tests.oracles.run_files import read_rows

_SHOWN = 5  # groups and steps that a contradiction names


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes from the configuration."""

    steps: int
    groups: int  # in a batch
    samples: int  # in a group
    staleness: int


@dataclass(frozen=True, slots=True)
class Story:
    """Contents of the segments of episodes, in order. `wrong` lists what cannot have happened."""

    started: Mapping[int, int]  # version by group
    episodes: Mapping[tuple[int, int], Line]
    taken: Mapping[int, tuple[int, ...]]  # groups by the version that was made of them
    wrong: Sequence[str]


def tell(segments: Sequence[tuple[int, list[Line]]], sizes: Sizes) -> Story:
    started: dict[int, int] = {}
    episodes: dict[tuple[int, int], Line] = {}
    taken: dict[int, tuple[int, ...]] = {}
    owner: dict[int, int] = {}  # version that was made of a group
    wrong = [f"segment {number} is missing" for number in sorted({*range(segments[-1][0])} - {n for n, _ in segments})]
    for number, row in ((number, row) for number, rows in segments for row in rows):
        where = f"segment {number}: "
        match row["kind"]:
            case "started":
                if row["group"] in started:
                    wrong.append(f"{where}group {row['group']} is started twice")
                started[row["group"]] = row["version"]
            case "finished":
                key = (row["group"], row["index"])
                if key in episodes:
                    wrong.append(f"{where}episode {key} finishes twice")
                if row["group"] not in started or row["group"] in owner:
                    wrong.append(f"{where}episode {key} of a group that is not under way")
                episodes[key] = row["episode"]
            case "taken":
                version, groups = row["version"], tuple(row["groups"])
                if version != len(taken) + 1:
                    wrong.append(f"{where}version {version} is made after {len(taken)}")
                for group in groups:
                    if group in owner:
                        wrong.append(f"{where}group {group} is trained in steps {owner[group]} and {version}")
                    owner[group] = version
                    finished = sum((group, index) in episodes for index in range(sizes.samples))
                    if finished != sizes.samples:
                        wrong.append(f"{where}group {group} is trained with {finished} of {sizes.samples} episodes")
                    stale = version - 1 - started.get(group, version)
                    if not 0 <= stale <= sizes.staleness:
                        wrong.append(f"{where}group {group} is {stale} versions old in step {version}")
                if len(groups) != sizes.groups:
                    wrong.append(f"{where}step {version} is made of {len(groups)} groups")
                taken[version] = groups
    return Story(started, episodes, taken, wrong)


def unequal(story: Story, sizes: Sizes) -> Iterator[str]:
    trained = {group for groups in story.taken.values() for group in groups}
    unfinished = set(story.started) - trained
    if unfinished:
        yield f"groups {sorted(unfinished)[:_SHOWN]} are started and not trained"
    if trained - set(story.started):
        yield f"groups {sorted(trained - set(story.started))[:_SHOWN]} are trained and not started"
    if set(story.taken) != set(range(1, sizes.steps + 1)):
        yield f"steps {sorted(set(story.taken) ^ set(range(1, sizes.steps + 1)))[:_SHOWN]} took no batch, or too much"
    if len(story.episodes) != sizes.steps * sizes.groups * sizes.samples:
        yield f"{len(story.episodes)} episodes finished"


def steps_wrong(metrics: Sequence[Line], summary: Line, sizes: Sizes) -> Iterator[str]:
    if [row["step"] for row in metrics] != list(range(1, sizes.steps + 1)):
        counts = Counter(row["step"] for row in metrics)
        odd = [step for step in range(1, sizes.steps + 1) if counts[step] != 1]
        yield f"metrics.jsonl has steps {odd[:_SHOWN]} not once, or out of order"
    total = sizes.steps * sizes.groups * sizes.samples
    wanted = {"finished": True, "steps": sizes.steps, "trajectories_unfinished": 0}
    for key, value in {**wanted, "trajectories_started": total, "trajectories_trained": total}.items():
        if summary[key] != value:
            yield f"summary.json says {key} {summary[key]}, not {value}"


def trained_wrong(metrics: Sequence[Line], story: Story, sizes: Sizes) -> Iterator[str]:
    """A group whose rewards are all equal gives no gradient, so its tokens do not go through the trainers; the others
    do with their padding, at most to the length of the longest."""
    for row in metrics:
        step = row["step"]
        batch = [
            [story.episodes[group, index] for index in range(sizes.samples) if (group, index) in story.episodes]
            for group in story.taken.get(step, ())
        ]
        rewards = [episode["reward"] for group in batch for episode in group]
        with_signal = [group for group in batch if len({episode["reward"] for episode in group}) > 1]
        lengths = [len(episode["tokens"]) for group in with_signal for episode in group]
        if not sum(lengths) <= row["trained_tokens"] <= len(lengths) * max(lengths, default=0):
            yield f"step {step} trained {row['trained_tokens']} tokens, its trajectories have {sum(lengths)}"
        if (row["groups"], row["groups_without_signal"]) != (len(batch), len(batch) - len(with_signal)):
            yield f"step {step} counts other groups than it took"
        if not rewards or not math.isclose(row["reward_mean"], fmean(rewards), abs_tol=1e-9):
            yield f"step {step} has another mean reward than its trajectories"


def records_wrong(trajectories: Sequence[Line], story: Story) -> Iterator[str]:
    wanted = {episode["trajectory"]["id"]: episode["trajectory"] for episode in story.episodes.values()}
    counts = Counter(row["id"] for row in trajectories)
    yield from (f"{id} is in it {counts[id]} times" for id in wanted if counts[id] != 1)
    yield from (f"{id} is in it and did not finish" for id in counts if id not in wanted)
    for row in trajectories:
        own = wanted.get(row["id"])
        if own is not None and (row["reward"], len(row["turns"])) != (own["reward"], len(own["turns"])):
            yield f"{row['id']} has another reward or other turns than the episode"


def versions_wrong(story: Story) -> Iterator[str]:
    made = {group: version for version, groups in story.taken.items() for group in groups}
    for (group, index), episode in story.episodes.items():
        generated = [version for version in episode["versions"] if version >= 0]
        low, high = story.started.get(group, 0), made.get(group, math.inf) - 1
        if not low <= min(generated) <= max(generated) <= high:
            yield f"episode {(group, index)} has tokens of {min(generated)} to {max(generated)}, not {low} to {high}"
        if generated != sorted(generated):  # all engines load a version at once
            yield f"episode {(group, index)} goes back to older weights"
        lengths = {len(episode[key]) for key in ("tokens", "generated", "logprobs", "versions")}
        if len(lengths) != 1:
            yield f"episode {(group, index)} has lists of {sorted(lengths)} entries"


def journal_wrong(rows: Sequence[Line], steps: int) -> Iterator[str]:
    """Entries that cannot follow those before them. A session may end anywhere."""
    if [row["kind"] for row in rows].count("end") != 1 or rows[-1] != {"kind": "end", "step": steps}:
        yield f"it does not end with the end of step {steps}"
    version, newest, checkpoint, plan_open = -1, 0, 0, False
    doing: dict[str, Any] = {}
    moving: dict[str, Line] = {}
    idle = {"role": "idle", "shape": None}
    for number, row in enumerate(rows, start=1):
        kind, worker, where = row["kind"], row.get("worker", ""), f"line {number}: "
        match kind:
            case "start":
                # A checkpoint is there a moment before the journal says so.
                if not checkpoint <= row["version"] <= newest:
                    yield f"{where}a session starts at {row['version']}, the checkpoint is of {checkpoint}"
                version, plan_open = row["version"], False
                doing, moving = defaultdict(lambda: idle), {}
            case "plan":
                if plan_open or moving:
                    yield f"{where}a plan begins in the middle of another"
                plan_open = True
            case "applied" | "dropped":
                if not plan_open or moving:
                    yield f"{where}{kind} with {'moves under way' if moving else 'no plan'}"
                plan_open = False
            case "intend":
                if worker in moving or row["before"] != doing[worker]:
                    yield f"{where}{worker} is to go from {row['before']} and is {moving.get(worker, doing[worker])}"
                moving[worker] = row
            case "done" | "undone" | "failed":
                if worker not in moving:
                    yield f"{where}{kind} for {worker}, which was in no move"
                    continue
                move = moving.pop(worker)
                doing[worker] = {"done": move["after"], "undone": move["before"], "failed": idle}[kind]
            case "lost":
                if worker in moving or doing[worker] == idle:
                    yield f"{where}{worker} is lost, and did nothing"
                doing[worker] = idle
            case "step":
                if row["version"] != version + 1:
                    yield f"{where}version {row['version']} follows {version}"
                version = row["version"]
                newest = max(newest, version)
            case "checkpoint":
                if row["step"] != version:
                    yield f"{where}a checkpoint of {row['step']} at version {version}"
                checkpoint = row["step"]


def unreadable(directory: Path) -> Iterator[str]:
    for path in sorted(directory.glob("*.jsonl")):
        if not f"\n{path.read_text(errors='replace')}".endswith("\n"):
            yield f"{path.name} does not end with a whole line"
        try:
            read_rows(path)
        except ValueError as error:
            yield f"{path.name}: {error}"
    for name in ("summary.json", "timeline.json", "profile.json", "config.json"):
        try:
            json.loads((directory / name).read_text())
        except (OSError, ValueError) as error:
            yield f"{name}: {error}"
    if "<svg" not in (directory / "report.html").read_text():
        yield "report.html shows nothing"


def unsound(model: Path) -> Iterator[str]:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tensors = load_file(model / "model.safetensors")
    yield from (f"{name} is not finite" for name, tensor in tensors.items() if not torch.isfinite(tensor).all())
    loaded = AutoModelForCausalLM.from_pretrained(model)
    missing = {name for name, _ in loaded.named_parameters()} - set(tensors)
    yield from (f"{name} is not in it" for name in sorted(missing))
    with torch.no_grad():
        logits = loaded(torch.arange(16).reshape(1, -1)).logits
    if not torch.isfinite(logits).all():
        yield "its logits are not finite"
