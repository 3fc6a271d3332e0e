"""A server as its owner runs it, under traffic: `python -m benchmarks.soak.owned_server DIRECTORY NUMBER`.

Invariant: it is vLLM with `LendingScheduler`, and knows of no borrower. Requests come at random, ten times as many at
the same moments at all servers of a machine. A line is written for each as it ends.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

SHARE = 0.3  # of a core: the device
TTFT, TPOT = 0.5, 0.15  # seconds: the SLO
MODEL = {"hidden_size": 128, "layers": 4}
LIMITS = {"max_model_len": 256, "max_num_seqs": 32, "max_num_batched_tokens": 64}
KV_TOKENS = 8192
RATE = 1.5  # requests/s
_PERIOD, _BURST, _TIMES = 20.0, 2.5, 10.0  # seconds, of them a burst, and by how much it is more


def main(directory: Path, number: int) -> None:
    # Here: vLLM takes seconds to import, and the limits above are wanted by others.
    from vllm import EngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine

    from libra.backends.tiny_model import kv_bytes_per_token
    from libra.lend.backend.device import Cores
    from libra.lend.backend.scheduler import DEVICE, SynchronousLending

    os.environ[DEVICE] = str(directory / f"device-{number}")

    class Paced(SynchronousLending):
        device = Cores(SHARE)
        preempted = 0  # requests: never by a memory as large as this one, but for what was lent of it

        def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
            Paced.preempted += 1
            super()._preempt_request(*args, **kwargs)

    model = directory / "chat"
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=KV_TOKENS * kv_bytes_per_token(model, "float32"),
            block_size=32,
            dtype="float32",
            enforce_eager=True,
            disable_log_stats=True,
            async_scheduling=False,
            scheduler_cls=Paced,
            **LIMITS,
        )
    )
    print("ready", flush=True)
    rng, count, live = random.Random(number), 0, dict[str, list[float]]()
    served = open(directory / f"served-{number}.jsonl", "a", buffering=1)  # noqa: SIM115 - as long as the process
    came = time.monotonic()
    while True:
        while came <= time.monotonic():
            prompt = [4 + (count * 31 + 7 * index) % 16 for index in range(rng.randint(8, 80))]
            parameters = SamplingParams(
                max_tokens=rng.randint(8, 48),
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(str(count), {"prompt_token_ids": prompt}, parameters)
            live[str(count)] = [came]
            burst = came % _PERIOD < _BURST
            count, came = count + 1, came + rng.expovariate(RATE * (_TIMES if burst else 1.0))
        if not live:
            time.sleep(max(0.0, min(came - time.monotonic(), 0.1)))
            continue
        for output in engine.step():
            times = live[output.request_id]
            times += [time.monotonic()] * len(output.outputs[0].token_ids)
            if output.finished:
                at, first, *rest = live.pop(output.request_id)
                last = rest[-1] if rest else first
                row = {"came": at, "ttft": first - at, "tpot": (last - first) / max(1, len(rest))}
                served.write(json.dumps({**row, "output_tokens": 1 + len(rest), "preempted": Paced.preempted}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
