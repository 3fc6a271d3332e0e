"""Results of `vllm bench serve --save-result --save-detailed`, as lists with one value per request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from libra.trajectory.logs.entry import LogEntry
from libra.trajectory.logs.format import LogFormat, LogReading, request
from libra.trajectory.record import Trajectory

_PROMPTS, _OUTPUTS, _STARTS, _RATE = "input_lens", "output_lens", "start_times", "request_rate"


def _trajectories(entries: Iterable[LogEntry], reading: LogReading) -> Iterator[Trajectory]:
    number = 0
    for entry in entries:
        if _PROMPTS not in entry:
            raise entry.refusal(_PROMPTS, "only sums were saved: benchmark again with --save-detailed")
        prompts, outputs = entry.values(_PROMPTS), entry.values(_OUTPUTS)
        starts = entry.values(_STARTS) if _STARTS in entry else None
        for name, values in ((_OUTPUTS, outputs), (_STARTS, starts)):
            if values is not None and len(values) != len(prompts):
                raise entry.refusal(name, f"{len(values)} values for the {len(prompts)} requests of {_PROMPTS}")
        at_once = entry.fields.get(_RATE) == "inf"
        if starts is None and prompts:
            said = "all arrive at once, as the rate is inf" if at_once else "unknown"
            reading.remarks[f"requests without a time of arrival (start_times): {said}"] += len(prompts)
        for at, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            number += 1
            places = {f"{_PROMPTS}[{at}]": prompt, f"{_OUTPUTS}[{at}]": output}
            if starts is not None:
                places[f"{_STARTS}[{at}]"] = starts[at]
            row = LogEntry(places, entry.where, number)
            if not row.tokens(f"{_OUTPUTS}[{at}]"):
                reading.remarks["failed requests (0 output tokens) left out"] += 1
                continue
            arrival = row.number_of(f"{_STARTS}[{at}]") if starts is not None else 0.0 if at_once else None
            yield request(row, row.tokens(f"{_PROMPTS}[{at}]"), row.tokens(f"{_OUTPUTS}[{at}]"), arrival)


VLLM_BENCH = LogFormat(
    name="vllm-bench",
    written_by="vllm bench serve --save-result --save-detailed",
    holds="requests",
    silent_on="prefixes that requests share, tools, rewards, policy versions",
    is_one=lambda entry: {_PROMPTS, _OUTPUTS} <= set(entry.fields) or {"num_prompts", _RATE} <= set(entry.fields),
    trajectories=_trajectories,
)
