"""KV memory that changes hands between two live vLLM engines: how fast, at whose cost, and whether it really moves.

Invariant: both engines are vLLM's own on CPU, in one process that steps them by turns, so that the same arrivals meet
the same steps with the loan and without. Times are of the process's CPU beside those of the clock.

    python -m benchmarks.lending memory [--json FILE]

A serving engine cedes what its scheduler can spare to a rollout engine. Amid 24 turns a burst needs five sixths of all
blocks: some turns are put out, and go on from their last token when the loan has grown again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.command import command_line
from benchmarks.fidelity.models import write_model
from benchmarks.lending._vllm import ask, make_engine
from benchmarks.rows import Row, at_least, at_most, none, report
from libra.backends.launch.fork_server import WORKER_ENVIRONMENT

_BLOCK = 32  # tokens
_BLOCKS = 1050  # of each engine
_BLOCK_BYTES = 48 << 10  # three layers, two heads of 32, keys and values, float32
_LONGEST = 1024  # tokens of a context
_TURNS, _PROMPT, _TOKENS = 24, 300, 24
_BURST_AT = 60  # steps of serving
_BURST = [(f"burst-{index}", 900, 8) for index in range(30)]
_STEADY = [("steady", 50, 400), *((f"first-{index}", 100, 40) for index in range(4))]
_MOVED, _REPEATS, _GOAL = 1000, 9, 0.020
_QUIET = 5.0  # steps
_PATIENCE = 2000  # steps

Tokens = dict[str, list[int]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line("lending memory", __doc__).parse_args(arguments)
    os.environ.update(WORKER_ENVIRONMENT)  # read as vLLM is imported
    with tempfile.TemporaryDirectory() as directory:
        report(measured(Path(directory)), options.json)
    return 0


def measured(directory: Path) -> list[Row]:
    """Rows of everything, with files in `directory`."""
    from libra.lend.backend.borrower_token import BorrowerToken
    from libra.lend.backend.kv_loan import BorrowedKV
    from libra.lend.backend.lender_token import LenderToken
    from libra.lend.backend.scheduler import DEVICE, LendingScheduler

    write_model(directory / "model", "tiny")
    os.environ[DEVICE] = str(directory / "device")
    before = _process_bytes()
    serving = _Engine(directory / "model", scheduler=f"{LendingScheduler.__module__}.{LendingScheduler.__name__}")
    rollout = _Engine(directory / "model")
    print(f"two engines: {(_process_bytes() - before) >> 20} MiB", file=sys.stderr)
    moved = _moved(serving, rollout)
    alone_steps, alone_tokens = _serve(serving, lambda: None)
    undisturbed = _undisturbed(rollout)
    LenderToken(directory / "device").extend(float("inf"))

    borrowed = BorrowedKV(
        rollout.scheduler, BorrowerToken(directory / "device", 1.0), context=_LONGEST // 2, quiet=_QUIET
    )
    for cache in serving.caches:
        cache.fill_(0.0)  # as of a server that has been up for a while
    run = _Rollout(rollout, borrowed, serving)
    lent_steps, lent_tokens = _serve(serving, run.step)
    while rollout.busy:
        if run.now > _PATIENCE:
            raise RuntimeError(f"turns still run after {_PATIENCE} steps: the loan did not grow again")
        run.step()
    both, whole, case = max(run.resident), (_BLOCKS + 1) * _BLOCK_BYTES, "a burst amid a loan"
    differ = sum(one != other for one, other in zip_longest(lent_steps, alone_steps))
    wrong = sum(lent_tokens[it] != alone_tokens[it] for it in alone_tokens)
    same = sum(run.tokens[name] == undisturbed[name] for name in undisturbed)
    rows = [
        at_least(case, "turns put out", len(run.put_out), f"of {_TURNS}", 1),
        at_least(case, "turns with the tokens of an undisturbed run", same, f"of {_TURNS}", _TURNS),
        none(case, "serving's steps with a loan, of other work than without", differ, f"of {len(alone_steps)}"),
        none(case, "serving's requests with other tokens", wrong, f"of {len(alone_tokens)}"),
        Row(case, "most blocks that rollout had", run.most, f"of {_BLOCKS}"),
        Row(case, "blocks that went at once", run.went, ""),
        Row(case, "time to put turns out for them and let them go", 1e3 * run.going, "ms"),
        Row(case, "KV memory of both, at most", both / whole, "of serving's own"),
    ]
    return moved + rows


class _Engine:
    """vLLM in this process."""

    def __init__(self, model: Path, **more: Any) -> None:
        self._engine = make_engine(
            str(model),
            max_model_len=_LONGEST,
            max_num_seqs=32,
            max_num_batched_tokens=_LONGEST,
            kv_cache_memory_bytes=(_BLOCKS + 1) * _BLOCK_BYTES,
            block_size=_BLOCK,
            **more,
        )
        self.scheduler = self._engine.engine_core.engine_core.scheduler
        self.tokens: Tokens = {}
        layers = self.scheduler.vllm_config.compilation_config.static_forward_context.values()
        self.caches = [layer.kv_cache for layer in layers]

    @property
    def busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def add(self, name: str, prompt: list[int], tokens: int) -> None:
        self.tokens.setdefault(name, [])
        ask(self._engine, name, prompt, tokens, temperature=0.0)

    def step(self) -> None:
        for output in self._engine.step():
            self.tokens[output.request_id] += output.outputs[0].token_ids

    def abort(self, name: str) -> None:
        self._engine.abort_request([name], internal=True)

    def reset(self) -> None:
        self.tokens = {}
        self._engine.reset_prefix_cache()

    @property
    def resident(self) -> int:
        """Bytes of its KV memory that have pages."""
        return sum(_resident(cache.data_ptr(), cache.numel() * cache.element_size()) for cache in self.caches)


def _prompt(name: str, length: int) -> list[int]:
    salt = sum(map(ord, name)) * 31
    return [4 + (salt + 7 * index + index * index) % 100 for index in range(length)]


def _serve(engine: _Engine, between: Callable[[], None]) -> tuple[list[list[int]], Tokens]:
    """Tokens that each step computed, and the tokens of each request; `between` is called after each step."""
    engine.reset()
    steps: list[list[int]] = []
    schedule = engine.scheduler.schedule

    def watched(*arguments: Any, **options: Any) -> Any:
        output = schedule(*arguments, **options)
        steps.append(list(output.num_scheduled_tokens.values()))
        return output

    engine.scheduler.schedule = watched
    for request in _STEADY:
        engine.add(request[0], _prompt(*request[:2]), request[2])
    while engine.busy:
        if len(steps) == _BURST_AT:
            for request in _BURST:
                engine.add(request[0], _prompt(*request[:2]), request[2])
        engine.step()
        between()
    del engine.scheduler.schedule
    return steps, engine.tokens


def _undisturbed(engine: _Engine) -> Tokens:
    engine.reset()
    for index in range(_TURNS):
        engine.add(f"turn-{index}", _prompt(f"turn-{index}", _PROMPT), _TOKENS)
    while engine.busy:
        engine.step()
    tokens = engine.tokens
    engine.reset()
    return tokens


class _Rollout:
    """The engine that borrows, step by step beside the one that serves."""

    def __init__(self, engine: _Engine, borrowed: Any, serving: _Engine) -> None:
        self._engine, self._borrowed, self._serving, self.now = engine, borrowed, serving, 0
        self.put_out: list[str] = []
        self.most = self.went = 0
        self.going = 0.0
        self.resident: list[int] = []

    @property
    def tokens(self) -> Tokens:
        return self._engine.tokens

    def step(self) -> None:
        self.now += 1
        before, began = self._borrowed.own, time.perf_counter()
        if self.now > _BURST_AT + 60:
            self._borrowed.trained()
        gone = self._borrowed.in_the_way(float(self.now))
        for name in gone:
            self._engine.abort(name)
        self._borrowed.settle()
        if before - self._borrowed.own > self.went:
            self.went, self.going = before - self._borrowed.own, time.perf_counter() - began
        self.most = max(self.most, self._borrowed.own)
        self.resident.append(self._engine.resident + self._serving.resident)
        for name in (it.rpartition("-")[0] for it in gone):  # vLLM appends to the name that it was given
            self.put_out.append(name)
            made = self._engine.tokens[name]
            self._engine.add(name, _prompt(name, _PROMPT) + made, _TOKENS - len(made))
        if self.now == _BURST_AT - 15:
            for index in range(_TURNS):
                self._engine.add(f"turn-{index}", _prompt(f"turn-{index}", _PROMPT), _TOKENS)
        if self._engine.busy and self._borrowed.own:
            self._engine.step()


def _moved(serving: _Engine, rollout: _Engine) -> list[Row]:
    """A thousand blocks, all of them with pages, from one engine to the other and back."""
    from libra.lend.backend.block_quota import BlockQuota

    case, quotas = f"{_MOVED} blocks that change hands", (BlockQuota(serving.scheduler), BlockQuota(rollout.scheduler))
    quotas[1].take(_MOVED)
    clock, spent, freed = [], [], []
    for repeat in range(_REPEATS):
        donor, taker = repeat % 2, 1 - repeat % 2
        for cache in (serving, rollout)[donor].caches:
            cache.fill_(1.0)
        had, began, cpu = _process_bytes(), time.perf_counter(), time.process_time()
        quotas[donor].take(_MOVED)
        quotas[taker].give(_MOVED)
        clock.append(time.perf_counter() - began)
        spent.append(time.process_time() - cpu)
        freed.append(had - _process_bytes())
    for quota in quotas:
        quota.give(quota.held)
    whole = _MOVED * quotas[0].block_bytes
    middle, least = statistics.median(clock), min(freed)
    return [
        at_most(case, "time", 1e3 * middle, "ms", 1e3 * _GOAL),
        Row(case, "time, the longest", 1e3 * max(clock), "ms"),
        Row(case, "CPU time", 1e3 * statistics.median(spent), "ms"),
        Row(case, "their memory", whole / 2**20, "MiB"),
        at_least(case, "resident memory that the process lost, of it", 100 * least / whole, "%", 99),
    ]


def _process_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _resident(address: int, size: int) -> int:
    """Bytes of a range of addresses that have pages (mincore)."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(address + size - begin) // mmap.PAGESIZE)
    there = (ctypes.c_ubyte * pages)()
    if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(pages * mmap.PAGESIZE), there):
        raise OSError(ctypes.get_errno(), "mincore")
    return bytes(there).count(1) * mmap.PAGESIZE


if __name__ == "__main__":
    sys.exit(main())
