"""The same question to the sweep of aiconfigurator-core and to `libra search`, with the same tables.

Invariant: both have the kernel times of one version of the tables, no host and no prefix cache; prompts and answers
have one length. The sweep takes a steady state of equal batches, and tells its TTFT and TPOT; here requests come at
random (Poisson), and mean TTFT and TPOT are limited. What the sweep finds is also simulated, at its rate and batch.

The core has the sweep over colocated engines alone. That of prefill and decode apart is in the package
`aiconfigurator`, which this project does not depend on: it is used where it is installed.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import Row
from libra.config.recipe import Recipe
from libra.cost.sources.profiles import engine_profiles
from libra.cost.sources.tables import _configuration
from libra.hardware.cluster import GPUS, Cluster, NodeClass
from libra.hardware.model_file import load_model
from libra.serving.candidate import Architecture, EnginePool, EngineSetup, ServingCandidate
from libra.serving.ladder import highest_rate, repeated
from libra.serving.menu import MenuFile, ServingMenu
from libra.serving.mix import plan_mix
from libra.serving.objective import parse_objectives
from libra.serving.question import SizingQuestion
from libra.serving.trial import trial
from libra.sim.clock import ticks
from libra.sim.workload.requests import RecordedRequest

MODEL, SYSTEM, VLLM = "Qwen/Qwen3-14B", "h100_sxm", "0.24.0"
PROMPT, OUTPUT, TTFT, TPOT = 1024, 256, 1.0, 0.05
DEGREES = (1, 2, 4, 8)
SEQS = (32, 64, 128, 256)
REQUESTS = 1000
GPU_COUNTS = (8, 16, 32)


def peer_rows() -> Iterator[Row]:
    asked = _question()
    for tp in DEGREES:
        case = f"{MODEL} {SYSTEM} tp{tp}, {PROMPT} + {OUTPUT} tokens, TTFT {TTFT:g} s, TPOT {TPOT:g} s"
        began = time.process_time()
        theirs = _sweep(tp)
        yield Row(case, "aiconfigurator-core: CPU time", time.process_time() - began, "s")
        if theirs is None:
            yield Row(case, "aiconfigurator-core", 0.0, "requests/s")
        else:
            yield Row(case, "aiconfigurator-core", theirs["seq/s"], "requests/s")
            yield Row(case, "its batch", int(theirs["bs"]), "requests")
            yield Row(case, "its TTFT", theirs["ttft"] / 1e3, "s")
            yield Row(case, "its TPOT", theirs["tpot"] / 1e3, "s")
            simulated = trial(asked, _candidate(tp, int(theirs["bs"])), theirs["seq/s"], to_the_end=True)
            yield Row(case, "that, simulated: mean TTFT", simulated.ttft, "s")
            yield Row(case, "that, simulated: mean TPOT", simulated.tpot, "s")
        began = time.process_time()
        found = [(highest_rate(asked, _candidate(tp, seqs)), seqs) for seqs in SEQS]
        best, seqs = max(((served, seqs) for served, seqs in found if served is not None), key=lambda it: it[0].rate)
        yield Row(case, "libra: CPU time", time.process_time() - began, "s")
        yield Row(case, "libra", best.rate, "requests/s")
        yield Row(case, "its max_num_seqs", seqs, "")
        yield Row(case, "its mean TTFT", best.ttft, "s")
        yield Row(case, "its mean TPOT", best.tpot, "s")


def apart_rows() -> Iterator[Row]:
    """The package's own comparison of colocated engines and of prefill and decode apart: its best deployment of each on
    `GPU_COUNTS` GPUs, the same simulated at its rate, and the fewest GPUs of a plan of ours for that rate."""
    for gpus in GPU_COUNTS:
        began = time.process_time()
        theirs = _sweep_roles(gpus)
        spent = time.process_time() - began
        yield Row(f"{MODEL} {SYSTEM}, {gpus} GPUs", "aiconfigurator: CPU time, both", spent, "s")
        for architecture, row in theirs.items():
            case = f"{MODEL} {SYSTEM}, {gpus} GPUs, {architecture}"
            candidate, rate = _deployment(architecture, row, gpus)
            asked = replace(_question(4), rate=rate)
            yield Row(case, f"aiconfigurator: {candidate}", rate, "requests/s")
            yield Row(case, "its TTFT", row["ttft"] / 1e3, "s")
            yield Row(case, "its TPOT", row["tpot"] / 1e3, "s")
            many = repeated(asked.requests, REQUESTS * candidate.devices // 2)
            simulated = trial(asked, candidate, rate, requests=many, to_the_end=True)
            yield Row(case, "that, simulated: mean TTFT", simulated.ttft, "s")
            yield Row(case, "that, simulated: mean TPOT", simulated.tpot, "s")
            began = time.process_time()
            menu = MenuFile(
                architectures=(architecture,),
                max_num_seqs=(256, 512),
                max_num_batched_tokens=(8192,),
                async_scheduling=(False,),
            )
            ours = plan_mix(asked, ServingMenu(menu))
            yield Row(case, "libra: CPU time", time.process_time() - began, "s")
            yield Row(case, f"libra for that rate: {ours.candidate}", ours.candidate.devices, "GPUs")
            yield Row(case, "plans that missed before", len(ours.missed), "")
            yield Row(case, "its mean TTFT", ours.trial.ttft, "s")
            yield Row(case, "its mean TPOT", ours.trial.tpot, "s")


def _sweep_roles(gpus: int) -> dict[Architecture, dict[str, Any]]:
    """The package's best row of each."""
    try:
        from aiconfigurator.cli.api import cli_default
    except ImportError as error:
        raise SystemExit(
            f"--peer apart needs the package aiconfigurator 0.12, which is not of this project ({error}): install it"
            " into an environment of its own, beside this one's packages, and run it there"
        ) from None
    logging.disable(logging.WARNING)  # it prints its tables as a log
    with _folder() as folder:
        found = cli_default(
            folder,
            gpus,
            SYSTEM,
            backend="vllm",
            backend_version=VLLM,
            isl=PROMPT,
            osl=OUTPUT,
            ttft=1e3 * TTFT,
            tpot=1e3 * TPOT,
            top_n=1,
        )
    names: dict[str, Architecture] = {"agg": "colocated", "disagg": "prefill-decode"}
    return {names[name]: dict(rows.iloc[0]) for name, rows in found.best_configs.items()}


def _deployment(architecture: Architecture, row: dict[str, Any], gpus: int) -> tuple[ServingCandidate, float]:
    """The deployment of a row, as often as it fits the GPUs; and its requests/s."""
    times = gpus // int(row["num_total_gpus"])
    shape = EngineSetup("h100", 1, 1, 256, 8192, False)
    if architecture == "colocated":
        one = replace(shape, tensor_parallel_size=int(row["tp"]), max_num_seqs=int(row["bs"]))
        return ServingCandidate((EnginePool("colocated", one, times),)), times * row["seq/s"]
    tokens = max(PROMPT, int(row["(p)bs"]) * PROMPT)
    prompts = replace(shape, tensor_parallel_size=int(row["(p)tp"]), max_num_batched_tokens=tokens)
    many = replace(shape, tensor_parallel_size=int(row["(d)tp"]), max_num_seqs=int(row["(d)bs"]))
    pools = (
        EnginePool("prefill", prompts, times * int(row["(p)workers"])),
        EnginePool("decode", many, times * int(row["(d)workers"])),
    )
    return ServingCandidate(pools), times * row["seq/s"]


@contextmanager
def _folder() -> Iterator[str]:
    """A temporary folder with the model's config.json."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_configuration(load_model(MODEL))), encoding="utf-8")
        yield folder


def _question(nodes: int = 1) -> SizingQuestion:
    model = load_model(MODEL)
    there = Cluster((NodeClass("h100", nodes, 8, GPUS["H100"], GPUS["H100"].link, 50e9),))
    recipe = Recipe(batch=1, samples_per_prompt=1, max_length=4096)
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1.0, REQUESTS)).tolist()
    requests = tuple(RecordedRequest(ticks(at), PROMPT, OUTPUT) for at in arrivals)
    profiles = engine_profiles(there, model, recipe, "tables")
    objectives = parse_objectives(f"ttft_mean={TTFT},tpot_mean={TPOT}")
    return SizingQuestion(there, model, profiles, requests, objectives)


def _candidate(tp: int, seqs: int) -> ServingCandidate:
    shape = EngineSetup("h100", tp, 1, seqs, 8192, False)
    return ServingCandidate((EnginePool("colocated", replace(shape, max_num_seqs=min(seqs, 512)), 1),))


def _sweep(tp: int) -> dict[str, Any] | None:
    """The best row of the sweep, if one keeps the limits."""
    from aiconfigurator_core.sdk import common, config
    from aiconfigurator_core.sdk.backends.factory import get_backend
    from aiconfigurator_core.sdk.models import get_model
    from aiconfigurator_core.sdk.perf_database import get_database

    with _folder() as folder:
        asked = config.ModelConfig(
            tp_size=tp,
            gemm_quant_mode=common.GEMMQuantMode.bfloat16,
            kvcache_quant_mode=common.KVCacheQuantMode.bfloat16,
            fmha_quant_mode=common.FMHAQuantMode.bfloat16,
            moe_quant_mode=common.MoEQuantMode.bfloat16,
        )
        model = get_model(folder, asked, "vllm")
        runtime = config.RuntimeConfig(isl=PROMPT, osl=OUTPUT, ttft=1e3 * TTFT, tpot=1e3 * TPOT)
        # A backend remembers batches without the degree: one for each.
        found = get_backend("vllm").find_best_agg_result_under_constraints(
            model, get_database(SYSTEM, "vllm", VLLM), runtime, top_k=1, max_batch_size=512, enable_chunked_prefill=True
        )
        rows = found.get_summary_df()
        return None if not len(rows) else dict(rows.iloc[0])
