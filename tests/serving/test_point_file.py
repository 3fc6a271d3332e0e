"""A point of an answer as a file of engines gives the search's own figures, and nothing else is written."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path

import numpy as np
import pytest
import yaml
from oracles.measured import CALIBRATION
from oracles.reshaped import reshaped

from libra.config.units import RATES, SIZES, SPEEDS, quantity, written
from libra.cost.host import NO_HOST, default_host
from libra.cost.kernels import default_terms
from libra.cost.sources.engine_fit import EngineFit
from libra.cost.sources.files import save_calibration, save_fit
from libra.hardware.cluster import GPU, GPUS, Cluster, NodeClass
from libra.hardware.model_file import load_model
from libra.serving.answer import Point
from libra.serving.candidate import Apart, DataParallel, Drafts, EnginePool, EngineSetup, ServingCandidate
from libra.serving.engines import NoRoomError
from libra.serving.menu import MenuFile
from libra.serving.objective import METRICS, Objective
from libra.serving.point_file import engines_text, simulate_command, write_engines
from libra.serving.question import SizingQuestion
from libra.serving.search import question_of, search
from libra.serving.trial import trial
from libra.sim.engine.speculative import Speculative
from libra.sim.engines_file import load_engines
from libra.sim.engines_keys import SpeculativeSection
from libra.sim.outcome.metrics import metrics_of
from libra.sim.simulate import simulate
from libra.sim.workload.requests import recorded_requests, repeated
from tests.serving.small_questions import CLUSTER, DRAFTER, requests
from tests.serving.test_sizing_drafts import random_drafts
from tests.serving.test_sizing_tiers import random_tiers, turns

DENSE, SPARSE = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"
# Nodes that differ from what an engines file takes them for: in GPUs, in links, in a GPU that nobody knows.
ODD = GPU("Odd", 90_001 * 2.0**20, 2.1e12, 401e12, 123e9, "a card of our own")
SPARSE_CLUSTER = Cluster(
    (
        NodeClass("h200", 4, 4, GPUS["H200"], 300e9, 100e9),
        NodeClass("odd", 6, 6, ODD, 99e9, 33.3e9),
    )
)
OBJECTIVES = [
    Objective(metric, statistic, 1e4) for metric, statistic in product(METRICS, ("mean", "p50", "p90", "p99"))
]


def fit_file(folder: Path, *, priced: bool) -> Path:
    terms = replace(default_terms(36), linear=1.3, decode=1.1)
    host = replace(default_host(36), iteration=1.7e-3, source="measured: here") if priced else NO_HOST
    path = folder / f"{'priced' if priced else 'free'}.json"
    save_fit(path, EngineFit(host, terms, 0.05, 0.06))
    return path


def asked(
    generator: np.random.Generator, model: str, cluster: Cluster, folder: Path, profile: str | None = None
) -> SizingQuestion:
    recorded = requests(generator, int(generator.choice([6, 40])), prefixes=bool(generator.random() < 0.3))
    hosts = ("none", "default", str(fit_file(folder, priced=True)), str(fit_file(folder, priced=False)))
    drafter = SpeculativeSection(
        method="draft_model", num_speculative_tokens=1, model=DRAFTER, synthetic_acceptance_rates=(0.5,)
    )
    return question_of(
        cluster,
        model,
        recorded,
        OBJECTIVES,
        menu=MenuFile(speculative=(drafter,)),
        profile=str(generator.choice(["roofline", "auto"])) if profile is None else profile,
        host=str(generator.choice(hosts)),
    )


def point_of(question: SizingQuestion, candidate: ServingCandidate, rate: float, times: int = 1) -> Point:
    served = trial(question, candidate, rate, requests=repeated(question.requests, times))
    return Point(candidate, question.cost(candidate), inf, served, "", (0, 0), ())


def require_same_figures(
    question: SizingQuestion, candidate: ServingCandidate, rate: float, folder: Path, times: int = 1
) -> None:
    point = point_of(question, candidate, rate, times)
    path = folder / "point.yaml"
    path.write_text(engines_text(question, point, path), encoding="utf-8")
    given = load_engines(path)
    result = simulate(
        given.engines,
        recorded_requests(repeated(question.requests, times), rate_scale=rate / question.natural_rate),
        given.policy(),
        kv_transfer=given.kv_transfer,
        decode_route=given.decode_policy(),
    )
    metrics = metrics_of(result)
    for objective in OBJECTIVES:
        spread = getattr(metrics, objective.metric)
        shown = 0.0 if spread is None else getattr(spread, objective.statistic)
        found = point.trial.latency[objective.name]
        if objective.statistic == "mean":  # of seconds here, of ticks there
            assert shown == pytest.approx(found, rel=1e-14)
        else:
            assert shown == found, (candidate, objective.name)
    assert metrics.preemptions == sum(it.preemptions for it in point.trial.pools)


def pools(generator: np.random.Generator, *shapes: EngineSetup) -> ServingCandidate:
    """Of one shape colocated, of two apart."""
    roles = ("colocated",) if len(shapes) == 1 else ("prefill", "decode")
    counts = generator.integers(1, 4, 2).tolist()
    return ServingCandidate(
        tuple(EnginePool(role, it, n) for role, it, n in zip(roles, shapes, counts, strict=False))  # type: ignore[arg-type]
    )


def random_shape(
    generator: np.random.Generator, cluster: Cluster, drafts: Drafts | None, *, alone: bool
) -> EngineSetup:
    ahead = (drafts is None or drafts.speculative.method != "ngram") and bool(generator.integers(2))
    pipeline = alone and drafts is None and bool(generator.random() < 0.3)
    return EngineSetup(
        nodes=str(generator.choice([nodes.name for nodes in cluster.nodes])),
        tensor_parallel_size=int(generator.choice([1, 2])),
        pipeline_parallel_size=2 if pipeline else 1,
        max_num_seqs=int(generator.choice([4, 16, 128])),
        max_num_batched_tokens=int(generator.choice([512, 1024])),
        async_scheduling=ahead and not pipeline,
        drafts=drafts,
    )


def require_some(
    found: list[tuple[SizingQuestion, ServingCandidate]], generator: np.random.Generator, least: int, folder: Path
) -> None:
    looked = 0
    for question, candidate in found:
        try:
            require_same_figures(question, candidate, float(10 ** generator.uniform(-1, 2)), folder)
        except NoRoomError:
            continue
        looked += 1
    assert looked >= least


@pytest.mark.parametrize("seed", range(4))
def test_dense_engines_on_several_gpu_types(seed: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(8):
        question = asked(generator, DENSE, CLUSTER, tmp_path)
        drafts = random_drafts(generator) if generator.random() < 0.5 else None
        alone = bool(generator.integers(2))
        shapes = [random_shape(generator, CLUSTER, drafts, alone=alone) for _ in range(1 if alone else 2)]
        found.append((question, pools(generator, *shapes)))
    require_some(found, generator, 4, tmp_path)


@pytest.mark.parametrize("seed", range(4))
def test_engines_with_tiers(seed: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(6):
        question = replace(asked(generator, DENSE, CLUSTER, tmp_path), requests=tuple(turns(generator, 15)))
        drafts = random_drafts(generator) if generator.random() < 0.4 else None
        shapes = [random_shape(generator, CLUSTER, drafts, alone=False) for _ in range(int(generator.integers(1, 3)))]
        shapes[0] = replace(shapes[0], nodes="small", kv_tiers=random_tiers(generator))
        found.append((question, pools(generator, *shapes)))
    require_some(found, generator, 3, tmp_path)


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_divide_experts(seed: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(5):
        drafts = None
        if generator.random() < 0.5:
            drafts = Drafts(Speculative(str(generator.choice(["eagle3", "mtp", "ngram"])), 3, (0.8, 0.5, 0.3)))
            if generator.random() < 0.4:
                drafts = Drafts(Speculative("draft_model", 2, (0.8, 0.5), seed=4), DRAFTER)
        shape, other = (
            replace(
                random_shape(generator, SPARSE_CLUSTER, drafts, alone=False),
                parallel=DataParallel(
                    int(generator.choice([2, 4])),
                    "deepep_low_latency" if generator.random() < 0.5 else "allgather_reducescatter",
                ),
            )
            for _ in range(2)
        )
        if generator.random() < 0.4:
            other = replace(other, parallel=None)
        shapes = (shape,) if generator.random() < 0.5 else (other, shape)
        found.append((asked(generator, SPARSE, SPARSE_CLUSTER, tmp_path), pools(generator, *shapes)))
    require_some(found, generator, 3, tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_attention_and_ffn_apart(seed: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(5):
        prefill, decode = (random_shape(generator, SPARSE_CLUSTER, None, alone=False) for _ in range(2))
        if generator.random() < 0.4:
            prefill = replace(prefill, parallel=DataParallel(2, "deepep_low_latency"))
        ffn = int(generator.choice([1, 2, 4]))
        apart = Apart(ffn * int(generator.integers(1, 4)), ffn, int(generator.integers(1, 5)))
        candidate = pools(generator, prefill, replace(decode, apart=apart))
        found.append((asked(generator, SPARSE, SPARSE_CLUSTER, tmp_path), candidate))
    require_some(found, generator, 3, tmp_path)


def test_measured_rates_of_a_gpu(tmp_path: Path) -> None:
    save_calibration(tmp_path / "calibration.json", replace(CALIBRATION, device="H100"))
    h100 = Cluster(CLUSTER.nodes[:1])
    generator = np.random.default_rng(0)
    found = []
    for alone in (True, False, True, False):
        question = asked(generator, DENSE, h100, tmp_path, str(tmp_path / "calibration.json"))
        drafts = None if alone else random_drafts(generator)
        shapes = [random_shape(generator, h100, drafts, alone=alone) for _ in range(1 if alone else 2)]
        found.append((question, pools(generator, *shapes)))
    require_some(found, generator, 4, tmp_path)


def test_requests_that_are_repeated_give_the_same_figures(tmp_path: Path) -> None:
    generator = np.random.default_rng(11)
    candidate = pools(generator, EngineSetup("n", 1, 1, 16, 512, async_scheduling=True))
    nodes = Cluster((NodeClass("n", 4, 4, GPUS["H100"], GPUS["H100"].link, 50e9),))
    question = asked(generator, DENSE, nodes, tmp_path, "roofline")
    require_same_figures(question, candidate, 20.0, tmp_path, times=3)
    command = simulate_command(question, point_of(question, candidate, 20.0, times=3), "point.yaml")
    assert " --repeat 3 --rate-scale " in command


def test_an_answer_is_written_point_by_point(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    shapes = Path(__file__).parents[2] / "src" / "libra" / "hardware" / "models"
    (tmp_path / "model" / "config.json").write_bytes((shapes / "Qwen--Qwen3-8B.json").read_bytes())
    menu = MenuFile(nodes=("h100",), tensor_parallel_size=(1, 2), max_num_seqs=(64,), engines=(1,))
    recorded = requests(np.random.default_rng(1), 30)
    found = search(
        CLUSTER, str(tmp_path / "model"), recorded, "ttft_p99=0.5,tpot_p99=0.1", gpus=2, menu=menu, profile="roofline"
    )
    assert len(found.points) > 1
    files = write_engines(found, tmp_path / "new" / "engines")
    assert [it.name for it in files] == [f"point-{number}.yaml" for number in range(1, len(found.points) + 1)]
    for file, point in zip(files, found.points, strict=True):
        text = file.read_text()
        assert text == engines_text(found.question, point, file)
        assert text.startswith(f"# {point.candidate}\n")
        scale = point.trial.rate / found.question.natural_rate
        times = point.trial.requests // len(recorded)
        repeat = f" --repeat {times}" if times > 1 else ""
        assert f"#   libra simulate {file} --requests REQUESTS{repeat} --rate-scale {scale!r}\n" in text
        assert load_engines(file).engines[0].config.max_model_len == found.question.longest
        assert yaml.safe_load(text)["engines"][0]["model"] == str(tmp_path / "model")
    with pytest.raises(ValueError, match=r"point-1\.yaml: exists already; give another directory, or remove the file"):
        write_engines(found, tmp_path / "new" / "engines")
    with pytest.raises(ValueError, match=r"config\.json: is not a directory"):
        write_engines(found, tmp_path / "model" / "config.json")


def test_what_a_file_cannot_say_is_refused_by_name(tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    candidate = pools(generator, EngineSetup("n", 1, 1, 16, 512, async_scheduling=True))
    fast = NodeClass("n", 4, 4, replace(GPUS["H100"], flops=2e15), GPUS["H100"].link, 50e9)
    question = asked(generator, DENSE, Cluster((fast,)), tmp_path, "roofline")
    with pytest.raises(ValueError, match=r"nodes n cannot be written to an engines file: gpu\.flops: H100 has 9\.89"):
        engines_text(question, point_of(question, candidate, 1.0), "point.yaml")
    usual = Cluster((replace(fast, gpu=GPUS["H100"]),))
    own = question_of(
        usual, reshaped(load_model(DENSE), layers=30), question.requests, OBJECTIVES, profile="roofline", host="none"
    )
    with pytest.raises(
        ValueError, match=r"Qwen/Qwen3-8B cannot be written to an engines file: .* neither a known model"
    ):
        engines_text(own, point_of(own, candidate, 1.0), "point.yaml")
    bare = replace(own, origin=None)
    with pytest.raises(ValueError, match="the question has no origin"):
        engines_text(bare, point_of(bare, candidate, 1.0), "point.yaml")


def test_a_quantity_that_is_written_is_read_to_the_last_digit() -> None:
    generator = np.random.default_rng(0)
    for units in (SIZES, RATES, SPEEDS):
        for unit in units:
            for digits in generator.integers(0, 6, 100).tolist():
                value = quantity("it", f"{1 + 10 ** generator.uniform(0, 3):.{digits}f} {unit}", units)
                assert quantity("it", written(value, units), units) == value
    with pytest.raises(ValueError, match=r"cannot be written exactly in any of TFLOP/s.*: round it"):
        written(2218291483718567.0, SPEEDS)
    assert written(50e9, RATES) == "50 GB/s"
    assert written(GPUS["H100"].memory, SIZES) == "81559 MiB"
