"""The main loop of an engine worker: iterations, with orders and reports between them, and measurements."""

from __future__ import annotations

import time
from itertools import count
from statistics import fmean

from libra.backends.launch.worker import Pacer
from libra.backends.transport.channel import WorkerChannel
from libra.backends.transport.engine_messages import (
    EngineMeasured,
    ExpectWeights,
    Generate,
    HandoverMeasured,
    Interrupt,
    KVTransfer,
    Loaded,
    LoadWeights,
    MeasureEngine,
    MeasureHandover,
    Save,
    Sleep,
    StartEngine,
    Wake,
)
from libra.backends.transport.messages import Acknowledged, Failure, Ready, Stop
from libra.backends.transport.shared_memory import WeightBuffer, WeightUpdateError
from libra.backends.vllm.device_loan import EngineLoan
from libra.backends.vllm.engine import VllmEngine
from libra.backends.vllm.report import Report
from libra.config.rooms import offered
from libra.cost.engine_memory import BLOCK_TOKENS


def serve_engine(channel: WorkerChannel, start: StartEngine, descriptor: int, began: float) -> None:
    """Serve orders until `Stop`, or until the controller is lost."""
    worker = _EngineWorker(channel, start, descriptor)
    channel.send(Ready(seconds=time.monotonic() - began))
    while worker.turn():
        pass


class _EngineWorker:
    """The engine with its channel, its pacer and, on a lent device, its loan."""

    def __init__(self, channel: WorkerChannel, start: StartEngine, descriptor: int) -> None:
        self._channel, self._descriptor = channel, descriptor
        self._lent: EngineLoan | None = None if start.loan is None else next(offered("device loan"))(start.loan)
        scheduler = None if self._lent is None else self._lent.scheduler
        self._engine = VllmEngine(start, WeightBuffer(descriptor, start.buffer_bytes), scheduler)
        if self._lent is not None:
            self._lent.lend(self._engine)
        elif start.device == "cuda":
            self._engine.warm_up()
        self._pacer = Pacer(start.share, start.cores)
        self._busy_seconds, self._report = 0.0, Report(time.monotonic())

    def turn(self) -> bool:
        """Handle the waiting messages, then make one iteration. Returns False after `Stop`."""
        channel, engine, lent, report = self._channel, self._engine, self._lent, self._report
        if not engine.busy:
            channel.poll(None if lent is None else lent.rest())
        began = time.monotonic()
        if lent is not None and lent.changed:
            self._tell(began)
        while channel.poll():
            message = channel.receive()
            if isinstance(message, Stop):
                # Running turns continue on other engines, after the tokens of this report.
                self._tell(time.monotonic())
                channel.send(Acknowledged())
                return False
            self._carry_out(message, began)
        if lent is not None:
            for turn in lent.settle():
                report.interrupted(turn)
        if not self._iterate(began) and not report.due(began):
            return True
        if report.due(now := time.monotonic()):
            self._tell(now)
        self._pacer.pace()
        self._busy_seconds += time.monotonic() - began
        return True

    def _carry_out(self, message: object, began: float) -> None:
        channel, engine = self._channel, self._engine
        match message:
            case Generate():
                engine.add(message)
            case Interrupt():
                if engine.interrupt(message.id):
                    self._report.interrupted(message.id)
            case ExpectWeights():
                engine.expect(WeightBuffer(self._descriptor, message.buffer_bytes), message.layout)
            case LoadWeights():
                self._load(message, began)
            case Save():
                engine.give(message)
            case Sleep():
                for sampled in engine.drained():
                    self._report.iteration(sampled, engine.version)
                engine.sleep()
                channel.send(Acknowledged())
            case Wake():
                engine.wake()
                channel.send(Acknowledged())
            case MeasureEngine() | MeasureHandover() if self._lent is not None:
                raise ValueError("an engine on a lent device cannot be measured, since serving would wait for it")
            case MeasureEngine():
                channel.send(measure(engine, message, self._pacer))
            case MeasureHandover():
                channel.send(measure_handover(engine, message, self._pacer))
            case _:
                raise TypeError(f"{type(message).__name__} is not a message for an engine")

    def _load(self, message: LoadWeights, began: float) -> None:
        for sampled in self._engine.drained():
            self._report.iteration(sampled, self._engine.version)
        try:
            self._engine.load(message)
        except WeightUpdateError as error:
            self._channel.send(Failure(f"weight update to version {message.version}: {error}"))
            return
        if self._lent is not None:
            self._lent.trained()
        self._pacer.pace()
        self._channel.send(Loaded(message.version, time.monotonic() - began))

    def _iterate(self, began: float) -> bool:
        """Make one iteration if there is work. Returns False if nothing took time."""
        engine, report = self._engine, self._report
        worked = engine.busy
        if engine.generating:
            sampled = engine.step() if self._lent is None else self._lent.step()
            if sampled is not None:
                report.iteration(sampled, engine.version)
            elif not report.due(began):
                if report.silent(began):
                    self._tell(began)
                return False
        elif worked:
            engine.step()  # saves KV, and does not count as an iteration
        for handed in engine.handed():
            self._channel.send(handed)
        return worked

    def _tell(self, now: float) -> None:
        lent = self._lent
        self._channel.send(self._report.take(now, self._busy_seconds, None if lent is None else lent.state()))


def measure(engine: VllmEngine, order: MeasureEngine, pacer: Pacer) -> EngineMeasured:
    """Measure this engine at its device's speed. Prompts are arbitrary tokens, and no request shares cached blocks."""
    tokens = 12  # generated by each request

    def run(sequences: int, context: int, tag: str) -> tuple[list[float], list[float]]:
        """Seconds of the iterations until all sequences have a token, and of the iterations after that."""
        for index in range(sequences):
            prompt = [4 + (index + 7 * position) % 16 for position in range(context)]
            engine.add(Generate(f"{tag}-{index}", prompt, tokens, 1.0, -1, 0, salt=f"{tag}-{index}"))
        prefills, decodes, begun = list[float](), list[float](), set[str]()
        while engine.busy:
            began, seconds = time.monotonic(), decodes if len(begun) == sequences else prefills
            begun |= {part.turn for part in engine.step()}
            pacer.pace()
            seconds.append(time.monotonic() - began)
        return prefills, decodes

    rows: dict[tuple[int, int], list[tuple[list[float], list[float]]]] = {point: [] for point in order.points}
    for repeat in range(order.repeats + 1):
        for point in order.points:
            seconds = run(*point, f"measure-{repeat}-{point[0]}-{point[1]}")
            if repeat > 0:  # the first repeat includes the set-up of kernels
                rows[point].append(seconds)
    iterations: list[tuple[float, float, float, float]] = []
    for (sequences, context), runs in rows.items():
        # Prompts beyond an iteration's budget take several iterations, which count as their mean.
        count = max(1, -(-sequences * context // engine.most_tokens))
        prefill = fmean(sum(prefills) for prefills, _ in runs) / count
        iterations.append((sequences / count, 0, sequences * context / count, prefill))
        decoding = sequences * (context + tokens / 2)
        iterations.append((sequences, decoding, 0, fmean(fmean(decodes) for _, decodes in runs)))
    return EngineMeasured(iterations)


def measure_handover(engine: VllmEngine, order: MeasureHandover, pacer: Pacer) -> HandoverMeasured:
    """Measure both sides of a KV transfer. This engine saves a context, forgets it, and fetches it. The cost of
    fetching is the difference to a request whose context is in the prefix cache."""
    numbers = count(order.transfer.number)

    def first_token(context: list[int], name: str, transfer: KVTransfer | None = None) -> float:
        engine.add(Generate(name, context, 1, 1.0, -1, 0, transfer=transfer))
        began = time.monotonic()
        while engine.busy:
            engine.step()
        engine.handed()
        pacer.pace()
        return time.monotonic() - began

    rows: list[tuple[int, float]] = []
    for repeat in range(order.repeats + 1):
        for length in order.contexts:
            context = [4 + (repeat + 7 * position) % 16 for position in range(length)]
            name = f"handover-{repeat}-{length}"
            first_token(context, f"{name}-computed")
            found = first_token(context, f"{name}-found")
            transfer = KVTransfer(next(numbers), order.transfer.frames[: length // BLOCK_TOKENS])
            began = time.monotonic()
            engine.give(Save(context, None, transfer))
            while engine.busy:
                engine.step()
                engine.handed()
            pacer.pace()
            saved = time.monotonic() - began
            engine.forget()
            taken = first_token(context, f"{name}-taken", transfer)
            if repeat > 0:  # the first repeat includes the first access to memory
                rows.append((length // BLOCK_TOKENS * BLOCK_TOKENS, saved + max(0.0, taken - found)))
    engine.forget()
    return HandoverMeasured(rows)
