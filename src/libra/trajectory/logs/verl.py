"""Generations that verl dumps (`trainer.rollout_data_dir`, `validation_data_dir`), with one decoded sample per line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from libra.trajectory.logs.decoded import turns_of_text
from libra.trajectory.logs.entry import LogEntry
from libra.trajectory.logs.format import LogFormat, LogReading, episode, same_prompt
from libra.trajectory.record import Trajectory

_ONE_ANSWER = 2  # chat turns of a sample with a prompt and one answer


def _trajectories(entries: Iterable[LogEntry], reading: LogReading) -> Iterator[Trajectory]:
    for entry in entries:
        prompt, turns = entry.text("input"), turns_of_text(entry.text("output"), reading)
        if "num_turns" in entry and entry.tokens("num_turns") > _ONE_ANSWER and len(turns) == 1:
            reading.remarks["samples of several turns, read as one: their text has no <tool_response>"] += 1
        if "step" not in entry:
            reading.remarks["samples without a step: policy version 0"] += 1
        step = entry.tokens("step") if "step" in entry else 0
        yield episode(
            entry,
            f"{step}-{entry.number}",
            reading.tokens_of(prompt),
            turns,
            task=entry.text_or("data_source", "verl"),
            prompt_id=same_prompt(prompt),
            reward=entry.number_of("score"),
            policy_version=step,
        )


VERL = LogFormat(
    name="verl",
    written_by="verl: rollout_data_dir and validation_data_dir",
    holds="trajectories",
    silent_on="tool seconds, outcomes of tools, which answers were cut at the limit; the step is the policy version",
    is_one=lambda entry: {"input", "output", "score"} <= set(entry.fields),
    trajectories=_trajectories,
)
