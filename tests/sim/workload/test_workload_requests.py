"""Open loops: order, recorded requests and their clock, and files that are read whole or refused by line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from libra.sim.clock import TICKS
from libra.sim.engine.request import Request
from libra.sim.workload.request_file import RecordedRequest, RequestFormatError, read_azure_requests, read_requests
from libra.sim.workload.requests import Requests, recorded_requests
from tests.trajectory.logs.samples import SAMPLES

ROOT = Path(__file__).parents[3]
AZURE = ROOT.parent / "shared" / "data" / "serving" / "azure_2023_conv.csv"


@pytest.mark.parametrize(
    ("arrivals_and_numbers", "in_order"),
    [
        ([], True),
        ([(0, 0), (0, 1), (5, 2)], True),
        ([(0, 1), (5, 0)], True),
        ([(5, 0), (4, 1)], False),
        ([(0, 1), (0, 0)], False),
        ([(0, 0), (0, 0)], False),
    ],
)
def test_requests_come_by_arrival_and_number(arrivals_and_numbers: list[tuple[int, int]], in_order: bool) -> None:
    requests = Requests(lambda: (Request(n, at, 1, 1) for at, n in arrivals_and_numbers), {"name": "given"})
    if in_order:
        assert [(r.arrival, r.number) for r in requests.start()] == arrivals_and_numbers
    else:
        with pytest.raises(ValueError, match="sort the requests by arrival and number"):
            list(requests.start())


def test_an_open_loop_does_not_react() -> None:
    requests = Requests(lambda: [Request(0, 0, 1, 1)], {"name": "given"})
    (request,) = requests.start()
    assert requests.finished(request, 10) is None
    assert requests.describe() == {"name": "given"}


def written(path: Path, *lines: str) -> Path:
    path.write_bytes("\n".join(lines).encode())
    return path


def test_a_line_gives_what_it_says(tmp_path: Path) -> None:
    path = written(
        tmp_path / "r.jsonl",
        '{"arrival": 0, "prompt_tokens": 3, "output_tokens": 1}',
        '{"arrival": 0.25, "prompt_tokens": 9, "output_tokens": 2, "prefix": "p", "prefix_tokens": 9, "priority": -3,'
        ' "cancel_at": 1.5}',
    )
    assert read_requests(path) == (
        RecordedRequest(0, 3, 1),
        RecordedRequest(TICKS // 4, 9, 2, "p", 9, -3, TICKS * 3 // 2),
    )


def valid() -> dict[str, Any]:
    return {"arrival": 1.0, "prompt_tokens": 10, "output_tokens": 5}


BAD_LINES: list[tuple[str, dict[str, Any], str]] = [
    ("a missing field is set to a text", {"arrival": "1.0"}, "arrival: Input should be a valid number"),
    ("negative arrival", {"arrival": -1.0}, "r.jsonl:2: arrival must be >= 0"),
    ("endless arrival", {"arrival": float("inf")}, "arrival: Input should be less than 9200000"),
    ("no number", {"arrival": float("nan")}, "arrival: Input should be less than 9200000"),
    ("an arrival beyond the clock", {"arrival": 9.2e6}, ":2: arrival: Input should be less than 9200000"),
    ("patience beyond the clock", {"cancel_at": 1e9}, ":2: cancel_at: Input should be less than 9200000"),
    ("a prompt of any length", {"prompt_tokens": 2**31}, ":2: prompt_tokens: Input should be less than or equal to"),
    ("an output of any length", {"output_tokens": 10**30}, ":2: output_tokens: Input should be less than or equal to"),
    (
        "a prefix of any length",
        {"prefix": "p", "prefix_tokens": 2**31},
        ":2: prefix_tokens: Input should be less than or equal to 2147483647",
    ),
    ("fraction of a token", {"prompt_tokens": 1.5}, "prompt_tokens: Input should be a valid integer"),
    ("whole float", {"prompt_tokens": 1.0}, "prompt_tokens: Input should be a valid integer"),
    ("no prompt", {"prompt_tokens": 0}, "prompt_tokens must be >= 1"),
    ("no output", {"output_tokens": 0}, "output_tokens must be >= 1"),
    ("truth for a count", {"output_tokens": True}, "output_tokens: Input should be a valid integer"),
    ("prefix without length", {"prefix": "p"}, "r.jsonl:2: prefix and prefix_tokens must both be given"),
    ("length without prefix", {"prefix_tokens": 3}, "prefix and prefix_tokens must both be given"),
    ("prefix beyond the prompt", {"prefix": "p", "prefix_tokens": 11}, "prefix_tokens must be >= 0, and no more than"),
    ("cancelled before it came", {"cancel_at": 0.5}, "cancel_at must not be before arrival"),
    ("cancelled before all time", {"cancel_at": -1}, "cancel_at must not be before arrival"),
    ("misspelt field", {"prompt_token": 3}, "unknown field 'prompt_token'; did you mean prompt_tokens?"),
    ("unknown field", {"number": 3}, "unknown field 'number'; known are arrival, cancel_at, output_tokens, pref"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in BAD_LINES], ids=[case[0] for case in BAD_LINES])
def test_a_bad_line_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = written(tmp_path / "r.jsonl", json.dumps(valid()), json.dumps({**valid(), **change}))
    with pytest.raises(RequestFormatError) as error:
        read_requests(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROW = "2023-11-16 18:15:46.6805900,374,44"
BAD_FILES: list[tuple[str, Callable[[Path], object], list[str], str]] = [
    ("blank JSON line", read_requests, [json.dumps(valid()), ""], ""),
    ("empty JSONL", read_requests, [], ": there is no request"),
    ("falling", read_requests, [json.dumps(valid()), json.dumps({**valid(), "arrival": 0.5})], ":2: arrival: before"),
    ("no JSON", read_requests, ["{"], ":1: not JSON (EOF while parsing an object); give one object on each line"),
    ("no arrival", read_requests, ['{"prompt_tokens": 3}'], ":1: arrival: this field is required; add it"),
    ("a list", read_requests, ["[]"], ":1: line: "),
    ("no header", read_azure_requests, [ROW], ":1: line: the header must be TIMESTAMP"),
    ("nothing at all", read_azure_requests, [], ":1: line: the header must be TIMESTAMP"),
    ("header only", read_azure_requests, [HEADER], ": there is no request"),
    ("two fields", read_azure_requests, [HEADER, "2023-11-16 18:15:46,3"], ":2: line: 2 fields instead of 3"),
    ("blank CSV line", read_azure_requests, [HEADER, ROW, "", ROW], ":3: line: 1 fields instead of 3"),
    ("no date", read_azure_requests, [HEADER, "yesterday,1,1"], ":2: TIMESTAMP: 'yesterday' is not"),
    ("no such day", read_azure_requests, [HEADER, "2023-02-30 00:00:00,1,1"], ":2: TIMESTAMP: "),
    ("zero tokens", read_azure_requests, [HEADER, "2023-02-03 00:00:00,1,0"], ":2: GeneratedTokens: '0' is not"),
    ("signed", read_azure_requests, [HEADER, "2023-02-03 00:00:00,+1,1"], ":2: ContextTokens: '+1' is not"),
    ("other digits", read_azure_requests, [HEADER, "2023-02-03 00:00:00,²,1"], ":2: ContextTokens: '²' is not"),
    ("very many", read_azure_requests, [HEADER, f"2023-02-03 00:00:00,1{'0' * 5000},1"], ":2: ContextTokens: '1000"),
    ("too many", read_azure_requests, [HEADER, f"2023-02-03 00:00:00,1,{2**31}"], ":2: GeneratedTokens: '2147483648'"),
    ("months later", read_azure_requests, [HEADER, ROW, "2024-11-16 18:15:46,3,4"], ":3: TIMESTAMP: 2024-11-16"),
    ("falls", read_azure_requests, [HEADER, ROW, "2023-11-16 18:15:46.68,3,4"], ":3: arrival: before"),
]


@pytest.mark.parametrize(("read", "lines", "message"), [c[1:] for c in BAD_FILES], ids=[c[0] for c in BAD_FILES])
def test_a_bad_file_is_refused_by_line(
    tmp_path: Path, read: Callable[[Path], object], lines: list[str], message: str
) -> None:
    path = written(tmp_path / "requests", *lines)
    if message == "":  # a last line feed ends a line, a blank line follows only after another
        path.write_bytes(path.read_bytes() + b"\n")
        message = ":2: not JSON "
    with pytest.raises(RequestFormatError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}{message}")
    assert "\n" not in str(error.value)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 8), st.sampled_from(["jsonl", "csv"]))
def test_a_damaged_file_is_read_or_refused_in_one_line(
    tmp_path: Path, damage: bytes, at: int, length: int, kind: str
) -> None:
    text = (ROOT / "examples" / f"requests.{kind}").read_bytes()
    path = tmp_path / "requests"
    path.write_bytes(text[:at] + damage + text[at + length :])
    try:
        read = (read_requests if kind == "jsonl" else read_azure_requests)(path)
    except RequestFormatError as error:
        assert str(error).startswith(str(path))
        assert "\n" not in str(error)
    else:
        assert all(r.arrival >= 0 and r.prompt_tokens >= 1 and r.output_tokens >= 1 for r in read)


def test_timestamps_are_exact_to_the_tick(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_bytes(
        f"{HEADER}\r\n2023-12-31 23:59:59.9999999,1,2\r\n2024-01-01 00:00:00,3,4\r\n"
        "2024-01-01 00:00:00.000000000001,5,6".encode()
    )
    assert [(r.arrival, r.prompt_tokens, r.output_tokens) for r in read_azure_requests(path)] == [
        (0, 1, 2),
        (TICKS // 10**7, 3, 4),
        (TICKS // 10**7 + 1, 5, 6),
    ]


RECORDS = (
    RecordedRequest(0, 8, 1),
    RecordedRequest(4 * TICKS, 8, 2, prefix="p", prefix_tokens=6, priority=2, cancel_at=5 * TICKS),
    RecordedRequest(4 * TICKS, 9, 3, prefix="p", prefix_tokens=4),
    RecordedRequest(9 * TICKS, 8, 4, prefix="q", prefix_tokens=8),
)


def test_records_are_asked_as_they_came() -> None:
    requests = list(recorded_requests(RECORDS).start())
    assert [(r.number, r.arrival, r.prompt_tokens, r.output_tokens, r.priority, r.cancel_at) for r in requests] == [
        (0, 0, 8, 1, 0, None),
        (1, 4 * TICKS, 8, 2, 2, 5 * TICKS),
        (2, 4 * TICKS, 9, 3, 0, None),
        (3, 9 * TICKS, 8, 4, 0, None),
    ]
    chains = [r.chain for r in requests]
    assert chains[0] is None
    assert [(c.parent.name, c.fork) for c in chains if c and c.parent] == [("p", 6), ("p", 4), ("q", 8)]
    assert chains[1] is not chains[2] and chains[1] and chains[2] and chains[1].parent is chains[2].parent


def test_a_scale_moves_arrivals_and_not_patience() -> None:
    requests = recorded_requests(RECORDS, start_seconds=1.0, rate_scale=2.0)
    for _ in range(2):  # each start makes them anew
        assert [(r.number, r.arrival, r.cancel_at) for r in requests.start()] == [
            (0, TICKS * 3 // 2, TICKS * 5 // 2),
            (1, TICKS * 3 // 2, None),
            (2, 4 * TICKS, None),
        ]
    assert requests.describe() == {
        "name": "recorded requests",
        "source": {},
        "requests": 3,
        "start_seconds": 1.0,
        "rate_scale": 2.0,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate_scale": 0.0}, "rate_scale is 0.0"),
        ({"rate_scale": float("inf")}, "rate_scale is inf"),
        ({"start_seconds": -1.0}, "-1.0 seconds is not a duration"),
        ({"start_seconds": 9.5}, "start_seconds is 9.5; no request arrives then or later"),
    ],
)
def test_what_leaves_no_requests_is_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recorded_requests(RECORDS, **arguments)  # type: ignore[arg-type]


def test_the_examples_can_be_asked() -> None:
    for records in (
        read_requests(ROOT / "examples" / "requests.jsonl"),
        read_azure_requests(ROOT / "examples" / "requests.csv"),
    ):
        assert len(list(recorded_requests(records).start())) == len(records) == 12


@pytest.mark.skipif(not AZURE.exists(), reason="no Azure trace")
def test_the_azure_trace_is_read_in_full() -> None:
    records = read_azure_requests(AZURE)
    assert len(records) == 19_366
    assert sum(r.prompt_tokens for r in records) == 22_361_870
    assert sum(r.output_tokens for r in records) == 4_088_665
    assert records[1].arrival == 43_145_790 * (TICKS // 10**7)
    requests = list(recorded_requests(records, rate_scale=10.0).start())
    assert requests[-1].arrival == records[-1].arrival // 10


def test_a_rate_that_takes_requests_beyond_the_clock_is_refused() -> None:
    records = [RecordedRequest(0, 10, 5), RecordedRequest(TICKS, 10, 5)]
    with pytest.raises(ValueError, match=r"rate_scale is 1e-300: .* raise rate_scale"):
        recorded_requests(records, rate_scale=1e-300)


def test_the_csv_of_a_trace_is_read_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"{HEADER}\n{ROW}\n")
    assert read_requests(path) == read_azure_requests(path)


def test_times_of_2024_say_that_they_are_utc(tmp_path: Path) -> None:
    rows = ("2024-05-10 00:00:00.009930+00:00,2162,5", "2024-05-10 00:00:01+00:00,2399,6")
    path = written(tmp_path / "azure_2024.csv", HEADER, *rows)
    assert [it.arrival for it in read_azure_requests(path)] == [0, 990_070_000_000]
    path = written(tmp_path / "elsewhere.csv", HEADER, "2024-05-10 00:00:00+02:00,2162,5")
    with pytest.raises(RequestFormatError, match=r"elsewhere\.csv:2: TIMESTAMP: .* is not YYYY-MM-DD"):
        read_azure_requests(path)


LOGS = {
    "mooncake": (SAMPLES["mooncake"], [(0.0, 1000, 20), (0.5, 1001, 20), (1.0, 1002, 20)]),
    "vidur": (SAMPLES["vidur"], [(0.0, 300, 40), (0.75, 310, 41)]),
    "vllm-bench": (SAMPLES["vllm-bench"], [(0.0, 100, 20), (0.0, 50, 7)]),
    "azure, multimodal": (SAMPLES["azure"], [(0.0, 700, 30), (2.5, 900, 12)]),
    "out of order": (b"arrived_at,num_prefill_tokens,num_decode_tokens\n5,1,2\n3,4,5\n", [(0.0, 4, 5), (2.0, 1, 2)]),
}


@pytest.mark.parametrize(("content", "expected"), LOGS.values(), ids=LOGS)
def test_logs_of_others_are_read_as_requests(
    tmp_path: Path, content: bytes, expected: list[tuple[float, int, int]]
) -> None:
    path, notes = tmp_path / "log", list[str]()
    path.write_bytes(content)
    found = read_requests(path, notes.append)
    assert [(it.arrival / TICKS, it.prompt_tokens, it.output_tokens) for it in found] == expected
    assert notes[0].startswith(f"{path}: read as ")


NO_REQUESTS = {
    "turns": (SAMPLES["openai"], "1: a trajectory of 2 turns, not a request; give the log to --trajectories"),
    "no arrival": (
        b'{"request_rate": 2.0, "input_lens": [1], "output_lens": [2]}\n',
        "1: the log has no time of arrival; give the log to --trajectories",
    ),
    "no prompt": (b'{"timestamp": 1, "input_length": 0, "output_length": 2}\n', "request 1: 0 prompt tokens, not 1 to"),
    "too late": (
        b"arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,2\n1e7,1,2\n",
        "request 2: arrives 9,200,000 s or more after the first; cut the log there",
    ),
    "damaged": (b"arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,2\n1,x,2\n", "num_prefill_tokens: 'x' is not"),
}


@pytest.mark.parametrize(("content", "words"), NO_REQUESTS.values(), ids=NO_REQUESTS)
def test_logs_that_hold_no_requests_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(RequestFormatError) as error:
        read_requests(path, lambda _: None)
    assert str(error.value).startswith(f"{path}:")
    assert words in str(error.value)
