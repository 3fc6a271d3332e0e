"""`libra lend check` and `libra lend report` as a user meets them."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import yaml
from cli.calls import BASE, EXAMPLES, assert_refused, changed, libra, write
from fakes.made_loans import TERMS, write_loans

from libra.hardware.model_file import load_model
from libra.lend.certificate import ServerLimits, load_certificate

LENDER, REQUESTS = EXAMPLES / "lender.yaml", EXAMPLES / "requests.jsonl"
SLO = ("--ttft", 2, "--tpot", 0.1)


def check(*arguments: object, engine: Path = LENDER, traffic: Path = REQUESTS):
    return libra("lend", "check", engine, "--traffic", traffic, *arguments)


def test_a_certificate_is_found_shown_and_written(tmp_path: Path) -> None:
    shown = check(*SLO, "--use", "0.5,0.8", "-o", tmp_path / "c.json")
    assert shown.exit_code == 0, shown.stderr
    assert "can lend" in shown.stdout and "Qwen/Qwen3-8B on 1 x H100" in shown.stdout
    written = load_certificate(tmp_path / "c.json")
    found = json.loads(check(*SLO, "--use", "0.5,0.8", "--json").stdout)
    assert [it["use"] for it in found] == [0.5, 0.8]
    assert json.loads((tmp_path / "c.json").read_text()) in found
    assert written.limits == ServerLimits(16384, 256, 1024)
    assert written.parameters == load_model("Qwen/Qwen3-8B").parameters
    assert written.traffic == "requests.jsonl" and 0 < written.harvest[-1].share < 1


def test_each_certificate_has_a_file_of_its_own(tmp_path: Path) -> None:
    shown = check(*SLO, "--use", "0.5,0.825", "-o", tmp_path / "chat_{use}.json")
    assert shown.exit_code == 0, shown.stderr
    assert {it.name: load_certificate(it).use for it in tmp_path.iterdir()} == {
        "chat_50.json": 0.5,
        "chat_82.5.json": 0.825,
    }
    assert_refused(check(*SLO, "-o", tmp_path / "none" / "{use}.json"), "there is no directory")


@pytest.mark.parametrize(
    ("arguments", "words", "status"),
    [
        (
            ("--ttft", 2, "--tpot", 0.02),
            ("requests.jsonl: nothing can be lent at 0.1 times its rate", "a serving step may"),
            3,
        ),
        (("--ttft", 1e-6, "--tpot", 0.1), ("serving alone misses ttft of 1e-06 s for", "raise ttft"), 2),
        (("--ttft", 0, "--tpot", 0.1), ("ttft is 0 s; give a positive number",), 2),
        ((*SLO, "--use", "1.5"), ("--use has 1.5; a share of tpot",), 2),
        ((*SLO, "--use", "much"), ("--use is 'much'; give shares",), 2),
        ((*SLO, "--longest-grant", 0), ("--longest-grant is 0",), 2),
        ((*SLO, "-o", "/no/such/place/c.json"), ("there is no directory /no/such/place",), 2),
        ((*SLO, "-o", "/proc/c.json"), ("libra: /proc/c.json: ", "give another file to write to"), 2),
    ],
)
def test_what_is_refused(arguments: tuple[object, ...], words: tuple[str, ...], status: int) -> None:
    result = check(*arguments)
    assert result.exit_code == status, result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("libra: ") and result.stdout == ""
    for word in words:
        assert word in last
    if status == 2:
        assert result.stderr.count("\n") == 1  # before anything was replayed


def test_files_that_do_not_do_are_refused(tmp_path: Path) -> None:
    data = yaml.safe_load(LENDER.read_text())
    data["engines"][0]["count"] = 2
    two = write(tmp_path / "two.yaml", data)
    assert_refused(check(*SLO, engine=two), "two.yaml: engines has 2 entries; a certificate is for one")
    assert_refused(check(*SLO, engine=tmp_path / "none.yaml"), "none.yaml")
    none = check(*SLO, traffic=tmp_path / "none.jsonl")
    assert_refused(none, "--traffic: ", "none.jsonl: No such file or directory; give a file of requests")


@pytest.mark.parametrize("arrivals", [[0.0], [3.0], [0.0, 0.0, 0.0], [2.5, 2.5]])
def test_traffic_without_a_rate_is_refused(tmp_path: Path, arrivals: list[float]) -> None:
    lines = [json.dumps({"arrival": at, "prompt_tokens": 10, "output_tokens": 5}) for at in arrivals]
    (tmp_path / "burst.jsonl").write_text("\n".join(lines) + "\n")
    refused = check(*SLO, traffic=tmp_path / "burst.jsonl")
    assert_refused(refused, "burst.jsonl: all requests arrive at one time", "give requests at two times or more")


def test_a_device_without_a_server_is_not_lent(tmp_path: Path) -> None:
    serve = libra("lend", "serve", EXAMPLES / "loan.yaml")
    assert_refused(serve, "certificate.json", "give a certificate that `libra lend check` has written")
    assert_refused(libra("lend", "serve", EXAMPLES / "loan.yaml", "--period", 0), "--period is 0; give more than 0")
    refused = libra("lend", "serve", EXAMPLES / "loan.yaml", "--logs", EXAMPLES / "loan.yaml")
    assert_refused(refused, "--logs: ", "loan.yaml is not a directory; give a directory")


def test_a_record_of_a_loan_is_shown(tmp_path: Path) -> None:
    write_loans(tmp_path)
    html, trace = tmp_path / "loan.html", tmp_path / "loan.json"
    shown = libra("lend", "report", tmp_path / "lending-0.jsonl", "--html", html, "--timeline", trace)
    assert shown.exit_code == 0, shown.stderr
    words = (
        "In 3.01 s rollout had the device 1.3 % of the time (2 grants, 1 recall); at 1 of 2 steps of serving a token"
        " came after it was due."
    )
    assert shown.stdout == f"{words}\n"
    page = html.read_text()
    assert words in page and "How early tokens came" in page and "lending-0" in page
    drawn = [(it["name"], it["ts"]) for it in json.loads(trace.read_text()) if it["ph"] == "X"]
    assert drawn[:2] == [("grant", 0), ("grant", 1_000_000)]


def test_a_record_without_a_loan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text(TERMS.to_json() + "\n")
    assert_refused(libra("lend", "report", tmp_path / "empty.jsonl"), "the record has no request to the gate")
    (tmp_path / "other.jsonl").write_text("{}\n")
    assert_refused(libra("lend", "report", tmp_path / "other.jsonl"), "other.jsonl:1: ")
    assert_refused(libra("lend", "report", tmp_path / "none.jsonl"), "none.jsonl")


def test_a_run_whose_weights_have_a_port_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    short, long = BASE["start"]["buckets"]
    lent = {"shape": "lent", "engines": 1, "up_to": short["up_to"] + 8}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        borrowing = changed(
            lending={
                "agents": ["agent"],
                "weights": {"port": port},
                "engine": {"max_model_len": lent["up_to"], "max_num_seqs": 4, "kv_tokens": 256},
            },
            start={"buckets": [short, lent, long]},
        )
        config = write(tmp_path / "run.yaml", borrowing)
        assert_refused(
            libra("run", config),
            f"lending.weights.port: {port} cannot be used on 127.0.0.1 (Address already in use); give a free port",
        )
    assert list(tmp_path.iterdir()) == [config]
