"""A vLLM engine that serves, `libra lend serve` beside it, and a controller that has turns made: all real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from oracles.small_loan import ROOMY, write_loan

from libra.backends.launch.fork_server import WORKER_ENVIRONMENT
from libra.backends.launch.launcher import WorkerLink
from libra.backends.transport.channel import ControllerChannel
from libra.backends.transport.engine_messages import Borrow, Generate, Lent
from libra.backends.transport.messages import Message
from libra.backends.vllm.engine_handle import EngineHandle
from libra.exec.protocols import WorkerLostError
from libra.lend.records.lending import LendingAnswer, LentStep, read_lending, replay

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
LEAST, MOST = 12, 240  # rounds of the same requests: enough steps for a bound, and an end


SERVE = """
import json, os, select, sys
from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

def make(scheduler):
    return LLMEngine.from_engine_args(EngineArgs(
        model=sys.argv[1], skip_tokenizer_init=True, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64,
        kv_cache_memory_bytes=8 << 20, block_size=32, dtype="float32", enforce_eager=True, disable_log_stats=True,
        seed=0, scheduler_cls=scheduler))

def serve(engine):
    for number in range(12):
        prompt = [4 + (number + 7 * i) % 16 for i in range(20 + 5 * number)]
        engine.add_request(str(number), {"prompt_token_ids": prompt},
                           SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0, detokenize=False))
    made = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                made[output.request_id] = list(output.outputs[0].token_ids)
        if engine is not first:
            ceded.append(engine.engine_core.engine_core.scheduler._kv.view().ceded)
    return made

ceded = []
first = make(None)
alone = serve(first)
assert not os.path.exists(os.environ["LIBRA_LEND_DEVICE"])  # nothing is lent, no file is touched
engine = make("libra.lend.backend.scheduler.LendingScheduler")
print("ready", flush=True)
sys.stdin.readline()
same = []
least, most = map(int, sys.argv[2:])
while len(same) < least or (len(same) < most and not select.select([sys.stdin], [], [], 0)[0]):
    same.append(serve(engine) == alone)
print(json.dumps(same), flush=True)
print(max(ceded), flush=True)
sys.stdin.readline()
sys.stdin.readline()
"""


@contextmanager
def serving(model: Path, device: Path) -> Iterator[subprocess.Popen[str]]:
    """An engine that waits for a line before it serves, and for another before it stops serving."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(model), str(LEAST), str(MOST)],
        env={**os.environ, **WORKER_ENVIRONMENT, "LIBRA_LEND_DEVICE": str(device)},
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        while (line := process.stdout.readline()) != "ready\n":  # vLLM may print before
            assert line
        yield process
    finally:
        process.kill()
        process.communicate()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def same_as_alone(process: subprocess.Popen[str]) -> list[bool]:
    """Whether the tokens of each round are those that vLLM's own scheduler makes."""
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


async def engine_at(socket: Path) -> EngineHandle:
    """The engine that borrows, once it is ready."""
    while True:
        try:
            channel = ControllerChannel(*await asyncio.open_unix_connection(socket))
        except OSError:
            await asyncio.sleep(0.2)
            continue
        engine = EngineHandle(WorkerLink("lent", 0, channel, (0,), 0), lambda name, why: None)
        try:
            if isinstance(await engine.ask(Borrow(256, 8, 0), Message), Lent):
                return engine
        except WorkerLostError:
            pass
        engine.close()
        await asyncio.sleep(0.2)


async def turns(socket: Path, count: int) -> list[int]:
    """A controller that comes, has turns of 30 tokens made, and goes: how many tokens each got."""
    engine, tokens = await engine_at(socket), [0] * count

    async def turn(number: int) -> None:
        def take(piece: object) -> None:
            tokens[number] += len(piece.tokens)  # type: ignore[attr-defined]

        prompt = [4 + (3 * number + index) % 16 for index in range(20 + number)]
        await engine.generate(Generate(f"t{number}", prompt, 30, 1.0, -1, 0), take)

    await asyncio.gather(*(turn(number) for number in range(count)))
    engine.close()
    return tokens


def test_a_server_lends_its_device_and_makes_the_same_tokens(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    write = [sys.executable, str(REPOSITORY / "tests" / "oracles" / "small_model.py"), str(tmp_path / "model")]
    subprocess.run(write, cwd=REPOSITORY, check=True, timeout=120)
    engine = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache": "1 MiB", "borrowed_kv": "4 MiB"}
    loan = write_loan(
        tmp_path / "loan.yaml",
        ROOMY,
        tmp_path / "model",
        {"model": "model", **engine},
        device="device",
        quiet=0.2,
        record="lending.jsonl",
    )
    with serving(tmp_path / "model", tmp_path / "device") as lent:
        agent = subprocess.Popen(
            [
                *(sys.executable, "-m", "libra.cli.app", "lend", "serve", str(loan)),
                *("--json", "--period", "1", "--logs", str(tmp_path / "logs")),  # read at the end: a pipe holds 200
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert agent.stdout is not None
            idle = asyncio.run(turns(tmp_path / "device.agent", 6))
            go(lent)
            busy = asyncio.run(turns(tmp_path / "device.agent", 40))  # another controller, and users beside it
            go(lent)
            same = same_as_alone(lent)
            assert all(same) and len(same) >= LEAST
            assert set(idle) == set(busy) == {30}
            assert lent.stdout is not None
            assert int(lent.stdout.readline()) > 3 << 20  # bytes of KV that were rollout's for a while
            lent.send_signal(signal.SIGKILL)
            for line in agent.stdout:
                if json.loads(line)["why"] == "the serving engine has ended":
                    break
            agent.send_signal(signal.SIGTERM)
            said, _ = agent.communicate(timeout=60)
            assert agent.returncode == 0
            assert all(json.loads(line)["grants"] == 0 for line in said.splitlines())
        finally:
            agent.kill()
            agent.communicate()
    record = tmp_path / "lending.jsonl"
    answers = [line for line in read_lending(record) if isinstance(line, LendingAnswer)]
    assert replay(record).answers == len(answers) and replay(record).different == ()
    assert sum(isinstance(line, LentStep) for line in read_lending(record)) > 40
    assert any(answer.granted and answer.live for answer in answers)  # while serving had requests, too
    assert not any(answer.granted and answer.waiting for answer in answers)
    assert not (tmp_path / "device.agent").exists()
