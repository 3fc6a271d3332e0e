"""The file of a loan, and the watch over its server: what is lent, and what is refused in one line."""

from __future__ import annotations

import copy
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import libra.lend.backend.device_page
from libra.backends.tiny_model import write_tiny_model
from libra.cli.app import app
from libra.config.run import ModelConfig
from libra.config.yaml_file import ConfigError
from libra.lend.backend.device_page import EngineFacts, LendingError
from libra.lend.backend.lender_file import LoanOrder, load_lender_file
from libra.lend.backend.lender_token import LenderToken
from libra.lend.backend.record import LendingRecord
from libra.lend.backend.server_watch import ServerWatch
from libra.lend.backend.serving_token import ServingToken
from libra.lend.certificate import Certificate, Harvest, ServerLimits, certificate_json
from libra.lend.gate import IDLE, Slo
from libra.lend.quota import KVView
from libra.lend.traffic.envelope import Envelope

CERTIFICATE = Certificate(
    model="Qwen/Qwen3-8B",
    hardware="1 x H100",
    slo=Slo(1.0, 0.1),
    use=0.8,
    longest_grant=0.03,
    longest_step=0.06,
    envelope=Envelope(2.0, 900, 60, 40_000, 60.0),
    harvest=(Harvest(1.0, 0.5),),
    traffic="requests.jsonl",
    requests=10,
    missed_alone=0,
    limits=ServerLimits(16384, 256, 1024),
)
LOAN: dict[str, Any] = {
    "device": "device",
    "certificate": "certificate.json",
    "serving": {"model": "Qwen/Qwen3-8B", "hardware": "1 x H100", "ttft": 1.0, "tpot": 0.1},
    "rollout": {"model": "policy", "max_model_len": 512, "kv_cache": "64 MiB"},
    "record": "lending.jsonl",
}
CHAT = EngineFacts("Qwen/Qwen3-8B", 16384, 256, 1024)


def load(directory: Path, changes: dict[str, Any] | None = None) -> LoanOrder:
    """Of the loan with these dotted keys changed."""
    loan = copy.deepcopy(LOAN)
    loan["device"] = str(directory / "device")
    for key, value in (changes or {}).items():
        *sections, last = key.split(".")
        place = loan
        for name in sections:
            place = place[name]
        place[last] = value
    write_tiny_model(directory / "policy", ModelConfig(hidden_size=64, layers=2, heads=2, kv_heads=1), "0123", 512)
    (directory / "certificate.json").write_text(certificate_json(CERTIFICATE))
    (directory / "loan.yaml").write_text(yaml.safe_dump(loan))
    return load_lender_file(directory / "loan.yaml")


def test_a_loan_is_as_its_certificate_says(tmp_path: Path) -> None:
    lender = load(tmp_path)
    assert lender.terms.pace == pytest.approx(0.08)
    assert (lender.terms.longest, lender.terms.envelope) == (0.03, CERTIFICATE.envelope)
    assert lender.start.loan is not None and lender.start.loan.record == str(tmp_path / "lending.jsonl")
    assert lender.listen == tmp_path / "device.agent"
    assert load(tmp_path, {"serving.use": 0.7}).terms.pace == pytest.approx(0.07)
    assert (lender.start.kv_cache_bytes, lender.start.loan.kv_beside) == (64 << 20, None)
    more = load(tmp_path, {"rollout.kv_cache": "0.01 MiB", "rollout.borrowed_kv": "1 GiB"}).start
    assert more.loan is not None
    assert (more.kv_cache_bytes, more.loan.kv_beside) == ((1 << 30) + int(0.01 * 2**20), int(0.01 * 2**20))
    near = load(tmp_path, {"device": "dev", "listen": "agent"})  # names are seen from the file
    assert (near.device, near.listen) == (tmp_path / "dev", tmp_path / "agent")
    lax = load(tmp_path, {"serving.tpot": 1.0})
    assert lax.terms.pace == pytest.approx(0.08)  # what was certified, not what would be allowed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"serving.model": "Qwen/Qwen3-14B"}, "the certificate is for Qwen/Qwen3-8B, not for Qwen/Qwen3-14B"),
        ({"serving.model": "nobody/knows"}, "serving.model:"),
        ({"serving.hardware": "1 x A100"}, "the certificate is for 1 x H100, not for 1 x A100"),
        ({"serving.tpot": 0.05}, "tpot is 0.05 s; the certificate is for 0.1 s"),
        ({"serving.use": 0.9}, "serving.use is 0.9; the certificate is for 0.8: lower it"),
        ({"serving.use": 0.5}, "a serving step may take 60 ms, the pace is 50 ms; raise use"),
        ({"serving.use": 0.0}, "serving.use:"),
        ({"serving.used": 0.5}, "did you mean use?"),
        ({"rollout.model": "none"}, "holds no config.json"),
        ({"rollout.kv_cache": "64"}, "write a number and one of"),
        ({"rollout.kv_cache": "0.01 MiB"}, "one context of max_model_len takes"),
        (
            {"rollout.kv_cache": "0.01 MiB", "rollout.borrowed_kv": "0.02 MiB"},
            "kv_cache is 0.01 MiB, borrowed_kv 0.02 MiB",
        ),
        ({"rollout.borrowed_kv": "much"}, "rollout.borrowed_kv"),
        ({"shortest_grant": 0.04}, "shortest_grant is 0.04 s, more than the 0.03 s"),
        ({"most_quiet": 1.0}, "most_quiet is 1 s, less than quiet, 5 s; raise it"),
        ({"listen": "a" * 108}, "but the path of a socket has at most 107; name a shorter path"),
        ({"listen": "none/agent"}, "none; make it, or name another socket"),
        ({"certificate": "none.json"}, "give a certificate that `libra lend check` has written"),
    ],
)
def test_a_loan_that_nothing_covers_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, changes)
    assert words in str(refused.value) and "\n" not in str(refused.value)


SERVE = """
import sys
from pathlib import Path
from libra.lend.backend.device_page import EngineFacts
from libra.lend.backend.serving_token import ServingToken
ServingToken(Path(sys.argv[1]), EngineFacts("Qwen/Qwen3-8B", 16384, 256, 1024))
"""
NO_MEMORY, LITTLE, MUCH = KVView(), KVView(1 << 20, 1 << 20), KVView(1 << 30, 1 << 20)


@pytest.mark.parametrize(
    ("case", "kv", "words"),
    [
        ("no server", MUCH, "No such file or directory; start the serving engine with LendingScheduler"),
        ("ended", MUCH, "the serving engine has ended; start the server first"),
        ("another model", MUCH, "serving.model is Qwen/Qwen3-8B, but the server on"),
        (
            "other limits",
            MUCH,
            "max_num_batched_tokens is 8192 at the server and 1024 in the certificate; start the server with",
        ),
        ("another agent", MUCH, "another agent lends this device; end that agent first"),
        ("damaged", MUCH, "/device: the serving engine ended while it wrote; start the server again"),
        ("a file at listen", MUCH, "listen: {} exists and is not a socket; name another file, or remove this one"),
        ("a socket in use", MUCH, "listen: another process has the socket {}; name another socket, or end that"),
        (
            "a file at record",
            MUCH,
            "record: {} exists and is not the record of a loan; name another file, or remove it",
        ),
        ("a record in use", MUCH, "record: {} is written for another loan; name another file"),
        (
            "",
            LITTLE,
            "rollout.borrowed_kv: a reserve of 1,048,576 and one rollout context of 131,072 bytes are more than",
        ),
        ("", NO_MEMORY, "rollout.borrowed_kv: the serving engine cannot cede KV memory; remove"),
    ],
)
def test_a_loan_that_its_device_does_not_allow_is_refused_as_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, kv: KVView, words: str
) -> None:
    pytest.importorskip("vllm", reason="the extra `cpu` is not installed")
    order = load(tmp_path, {"rollout.kv_cache": "0.1 MiB", "rollout.borrowed_kv": "8 MiB"})
    device, record, kept = order.device, order.record, "what\nsomebody wrote"
    assert record is not None
    named = order.listen if "listen" in case or "socket" in case else record
    with ExitStack() as stack:
        if "a file" in case:
            named.write_text(kept)
        elif case == "a socket in use":
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(named))
            listener.listen()
        elif case == "a record in use":
            stack.callback(LendingRecord(record, order.terms, print).close)
        if case == "ended":
            subprocess.run([sys.executable, "-c", SERVE, str(device)], check=True)
        elif case != "no server":
            other = {"another model": {"model": "other"}, "other limits": {"max_num_batched_tokens": 8192}}
            serving = ServingToken(device, CHAT._replace(**other.get(case, {})))  # type: ignore[arg-type]
            stack.callback(serving.close)
            serving.publish(IDLE, kv, 0.0)
            if case == "damaged":
                monkeypatch.setattr(libra.lend.backend.device_page, "_PATIENCE", 0.0)
                with device.open("r+b") as page:
                    page.seek(64)
                    page.write(b"damage")
        if case == "another agent":
            stack.callback(LenderToken(device).close)
        found = CliRunner().invoke(app, ["lend", "serve", str(tmp_path / "loan.yaml")])
    assert found.exit_code == 2, found.output
    [line] = found.stderr.splitlines()
    assert line.startswith("libra: ") and words.format(named) in line and found.stdout == ""
    assert case != "damaged" or line.count("device:") == 1
    assert "a file" not in case or named.read_text() == kept


def test_a_server_that_ends_or_comes_back_is_seen(tmp_path: Path) -> None:
    lender = load(tmp_path)
    with pytest.raises(LendingError, match="start the serving engine with LendingScheduler"):
        LenderToken(lender.device)
    serving = ServingToken(lender.device, CHAT)
    lenders = LenderToken(lender.device)
    with pytest.raises(LendingError, match="another agent lends this device"):
        LenderToken(lender.device)
    watch = ServerWatch(lender, lenders)
    assert watch.objection() is None
    serving.close()

    def serve(facts: EngineFacts) -> subprocess.Popen[str]:
        """Another process takes the device over."""
        code = (
            "import sys; from pathlib import Path; from libra.lend.backend.device_page import EngineFacts;"
            "from libra.lend.backend.serving_token import ServingToken;"
            f"ServingToken(Path(sys.argv[1]), {facts!r}); print('ready', flush=True); sys.stdin.readline()"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(lender.device)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    def end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate()

    again = serve(CHAT)
    assert watch.objection() is None
    end(again)
    assert watch.objection() == "the serving engine has ended"
    with pytest.raises(LendingError, match="the serving engine has ended; start the server first"):
        ServerWatch(lender, lenders)
    larger = serve(CHAT._replace(max_num_batched_tokens=8192))
    assert "max_num_batched_tokens is 8192 at the server and 1024 in the certificate" in (watch.objection() or "")
    end(larger)
    shorter = serve(CHAT._replace(max_model_len=8192))  # as certified, but not as the borrower has learnt
    assert "was restarted with max_model_len 8192 instead of 16384" in (watch.objection() or "")
    end(shorter)
    other = serve(CHAT._replace(model="other"))
    assert "serving.model is Qwen/Qwen3-8B, but the server on" in (watch.objection() or "")
    end(other)
    same = serve(CHAT)
    assert watch.objection() is None
    end(same)
    assert not lenders.replaced
    lender.device.unlink()
    assert lenders.replaced
    watch.close()
    lenders.close()
