"""One rollout engine: vLLM in this process, stepped by our own loop.

Invariant: between two iterations the engine belongs to us, so a weight update is a plain call there: running turns are
neither drained nor lost, and a token is of the version that the engine held in the iteration that made it. (vLLM says
which tokens are of which version only with the end of a turn that it ended itself.)
"""

from __future__ import annotations

import time
from itertools import count
from statistics import fmean

import msgspec
from vllm import EngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from libra.backends.launch.worker import Pacer
from libra.backends.transport.channel import WorkerChannel
from libra.backends.transport.engine_messages import (
    EngineMeasured,
    Fetched,
    Generate,
    HandoverMeasured,
    Interrupt,
    KVTransfer,
    Loaded,
    LoadWeights,
    MeasureEngine,
    MeasureHandover,
    Save,
    Saved,
    StartEngine,
)
from libra.backends.transport.messages import Acknowledged, Failure, Ready, Stop
from libra.backends.transport.shared_memory import WeightBuffer, WeightUpdateError
from libra.backends.vllm.kv_connector import FrameConnector, request_arguments, transfer_config
from libra.backends.vllm.report import Report, Sampled
from libra.backends.vllm.weight_transfer import BACKEND
from libra.cost.engine_memory import BLOCK_TOKENS


class VllmEngine:
    """vLLM behind a handful of verbs: add, interrupt, step, give, load."""

    def __init__(self, start: StartEngine, buffer: WeightBuffer) -> None:
        self._refresh_kv = start.refresh_kv
        self._buffer = buffer
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=start.model_directory,
                skip_tokenizer_init=True,
                max_model_len=start.max_model_len,
                max_num_seqs=start.max_num_seqs,
                kv_cache_memory_bytes=start.kv_cache_bytes,
                block_size=BLOCK_TOKENS,
                enable_prefix_caching=True,
                scheduling_policy="priority",
                logprobs_mode="processed_logprobs",  # of what is sampled from: logits divided by the temperature
                dtype=start.dtype,
                enforce_eager=True,
                disable_log_stats=True,
                async_scheduling=False,
                seed=start.seed,
                weight_transfer_config=WeightTransferConfig(backend=BACKEND),
                kv_transfer_config=transfer_config(start.kv) if start.kv is not None else None,
            )
        )
        # Beside the scheduler of an engine that is stepped in this process. None: it hands no KV over.
        self._kv: FrameConnector | None = self._engine.engine_core.engine_core.scheduler.get_kv_connector()
        self._engine.collective_rpc("init_weight_transfer_engine", args=({"buffer": buffer, "layout": start.layout},))
        self.version = 0
        self._turns: set[str] = set()  # that it has to make
        self._untouched: set[str] = set()  # those of them without a token yet

    @property
    def generating(self) -> bool:
        return self._engine.has_unfinished_requests()

    @property
    def busy(self) -> bool:
        return self.generating or (self._kv is not None and self._kv.giving)

    def add(self, request: Generate) -> None:
        salt = self._salt(request.salt)
        prompt: dict[str, object] = {"prompt_token_ids": request.tokens}
        if salt is not None:
            prompt["cache_salt"] = salt
        self._engine.add_request(
            request.id,
            prompt,
            SamplingParams(
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                seed=request.seed,
                stop_token_ids=[request.stop_token] if request.stop_token >= 0 else [],
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                extra_args=request_arguments(request.transfer) if request.transfer is not None else None,
            ),
            priority=request.priority,
        )
        self._turns.add(request.id)
        self._untouched.add(request.id)

    def interrupt(self, turn: str) -> bool:
        """Stop a turn between two iterations; all that it generated was in the steps so far. False: it had ended."""
        if turn not in self._turns:
            return False
        self._turns.remove(turn)
        self._untouched.discard(turn)
        self._engine.abort_request([turn])
        return True

    def step(self) -> list[Sampled]:
        """One iteration; what it made of each turn that it served."""
        sampled = []
        for output in self._engine.step():
            turn, completion = output.request_id, output.outputs[0]
            prefilled = 0
            if turn in self._untouched:
                self._untouched.remove(turn)
                prefilled = len(output.prompt_token_ids or ()) - (output.num_cached_tokens or 0)
            if output.finished:
                self._turns.remove(turn)
            tokens = list(completion.token_ids)
            assert completion.logprobs is not None
            logprobs = [entry[token].logprob for entry, token in zip(completion.logprobs, tokens, strict=True)]
            sampled.append(Sampled(turn, tokens, logprobs, prefilled, output.finished))
        return sampled

    def give(self, order: Save) -> None:
        """Save KV of a context for another engine, a little in each of the next steps."""
        self._connector.give(msgspec.structs.replace(order, salt=self._salt(order.salt)))

    def handed(self) -> list[Saved | Fetched]:
        """KV that was saved for others, or that others had saved, since the last call."""
        return self._kv.done() if self._kv is not None else []

    def forget(self) -> None:
        """Empty the prefix cache."""
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache is in use")

    def load(self, order: LoadWeights) -> None:
        """Take a new version between two iterations. On `WeightUpdateError` the old one stays: the check comes before
        vLLM's reload, which empties the layers as its first act."""
        self._buffer.verify(order.buffer, order.checksum)
        self._engine.collective_rpc("start_weight_update")
        self._engine.collective_rpc("update_weights", args=({"buffer": order.buffer, "checksum": order.checksum},))
        self._engine.collective_rpc("finish_weight_update")
        self.version = order.version
        if self._kv is not None:
            self._kv.version = order.version

    @property
    def _connector(self) -> FrameConnector:
        if self._kv is None:
            raise RuntimeError("this engine was started without frames for KV")
        return self._kv

    def _salt(self, asked: str | None) -> str | None:
        """The namespace in the prefix cache of a request that asked for this one."""
        return f"v{self.version}" if asked is None and self._refresh_kv else asked


def serve_engine(channel: WorkerChannel, start: StartEngine, descriptor: int, began: float) -> None:
    """The life of an engine worker: until `Stop`, or until the controller goes away."""
    engine = VllmEngine(start, WeightBuffer(descriptor, start.buffer_bytes))
    pacer = Pacer(start.share, start.cores)
    channel.send(Ready(seconds=time.monotonic() - began))
    busy_seconds, report = 0.0, Report(time.monotonic())
    while True:
        if not engine.busy:
            channel.poll(None)
        began = time.monotonic()
        while channel.poll():
            match message := channel.receive():
                case Generate():
                    engine.add(message)
                case Interrupt():
                    if engine.interrupt(message.id):
                        report.interrupted(message.id)
                case LoadWeights():
                    try:
                        engine.load(message)
                    except WeightUpdateError as error:
                        channel.send(Failure(f"weight update to version {message.version}: {error}"))
                        continue
                    pacer.pace()
                    channel.send(Loaded(message.version, time.monotonic() - began))
                case Save():
                    engine.give(message)
                case MeasureEngine():
                    channel.send(measure(engine, message, pacer))
                case MeasureHandover():
                    channel.send(measure_handover(engine, message, pacer))
                case Stop():
                    # Turns that run go on elsewhere, from where this report leaves them.
                    channel.send(report.take(time.monotonic(), busy_seconds))
                    channel.send(Acknowledged())
                    return
                case _:
                    raise TypeError(f"{type(message).__name__} is not a message for an engine")
        worked = engine.busy
        if engine.generating:
            report.iteration(engine.step(), engine.version)
        elif worked:
            engine.step()  # which saves KV and is no iteration
        for handed in engine.handed():
            channel.send(handed)
        if not worked and not report.due(began):
            continue
        if report.due(now := time.monotonic()):
            channel.send(report.take(now, busy_seconds))
        pacer.pace()
        busy_seconds += time.monotonic() - began


def measure(engine: VllmEngine, order: MeasureEngine, pacer: Pacer) -> EngineMeasured:
    """Time this engine at its device's pace. Prompts are arbitrary tokens; every request is private to the cache."""
    tokens = 12  # decoded per request

    def run(sequences: int, context: int, tag: str) -> list[float]:
        for index in range(sequences):
            prompt = [4 + (index + 7 * position) % 16 for position in range(context)]
            engine.add(Generate(f"{tag}-{index}", prompt, tokens, 1.0, -1, 0, salt=f"{tag}-{index}"))
        seconds = []
        while engine.busy:
            began = time.monotonic()
            engine.step()
            pacer.pace()
            seconds.append(time.monotonic() - began)
        return seconds

    rows: dict[tuple[int, int], list[list[float]]] = {point: [] for point in order.points}
    for repeat in range(order.repeats + 1):
        for point in order.points:
            seconds = run(*point, f"measure-{repeat}-{point[0]}-{point[1]}")
            if repeat > 0:  # the first time pays for kernels that are set up when they are first met
                rows[point].append(seconds)
    iterations: list[tuple[float, float, float, float]] = []
    for (sequences, context), runs in rows.items():
        iterations.append((sequences, 0, sequences * context, fmean(run[0] for run in runs)))
        decoding = sequences * (context + tokens / 2)
        iterations.append((sequences, decoding, 0, fmean(fmean(run[1:]) for run in runs)))
    return EngineMeasured(iterations)


def measure_handover(engine: VllmEngine, order: MeasureHandover, pacer: Pacer) -> HandoverMeasured:
    """Time what the two engines of a hand-over do, with one that is both: it saves a context, forgets it, and takes it.
    What taking costs is what the request takes longer than one that finds its context in the prefix cache."""
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
            if repeat > 0:  # the first time pays for memory that is touched for the first time
                rows.append((length // BLOCK_TOKENS * BLOCK_TOKENS, saved + max(0.0, taken - found)))
    engine.forget()
    return HandoverMeasured(rows)
