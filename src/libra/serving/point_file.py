"""Writes a point of an answer as an engines file, which users can simulate again, change and keep.

Invariant: with the question's requests at the point's rate, repeated as in the search, the file reproduces the search's
own simulation to the last digit. A point with a part that cannot be written exactly is refused, with the part's name.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from libra.config.units import RATES, written
from libra.cost.host import NAMED_HOSTS
from libra.cost.transfer import Fabric, fabric
from libra.hardware.cluster import NodeClass
from libra.hardware.cluster_file import described_gpu
from libra.hardware.model import ModelSpec
from libra.hardware.model_file import load_model
from libra.serving.answer import Point, SizingAnswer
from libra.serving.candidate import Drafts, EnginePool, EngineSetup
from libra.serving.engines import configuration, grid_of, network
from libra.serving.question import Origin, SizingQuestion
from libra.serving.trial import ROUTE

_PREFIX = "point-"
_WIDTH = 120


def write_engines(answer: SizingAnswer, directory: Path | str) -> tuple[Path, ...]:
    """Write an engines file for each point of the answer, in order: `point-1.yaml` is the best point. Creates the
    directory if needed. Raises ValueError if the directory already has such files, since a user may have changed them,
    and the errors of `engines_text`."""
    directory = Path(directory)
    check_engines_directory(directory)
    paths = [directory / f"{_PREFIX}{number}.yaml" for number in range(1, len(answer.points) + 1)]
    texts = [engines_text(answer.question, it, path) for it, path in zip(answer.points, paths, strict=True)]
    if paths:
        directory.mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    return tuple(paths)


def check_engines_directory(directory: Path) -> None:
    """Raise ValueError unless `write_engines` can write to `directory` without overwriting a file."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory}: is not a directory; give a directory for engine files")
    there = next(it for it in (directory, *directory.absolute().parents) if it.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{directory}: {there} cannot be written to; give another directory for engine files")
    taken = next(iter(sorted(directory.glob(f"{_PREFIX}*.yaml"))), None)
    if taken is not None:
        raise ValueError(f"{taken}: exists already; give another directory, or remove the file")


def simulate_command(question: SizingQuestion, point: Point, path: Path | str) -> str:
    """The command that simulates the file at `path` as the search did."""
    origin = _origin(question)
    requests = "REQUESTS" if origin.requests is None else shlex.quote(origin.requests)
    scale = repr(point.trial.rate / question.natural_rate)
    times = point.trial.requests // len(question.requests)
    repeat = f" --repeat {times}" if times > 1 else ""
    return f"libra simulate {shlex.quote(str(path))} --requests {requests}{repeat} --rate-scale {scale}"


def engines_text(question: SizingQuestion, point: Point, path: Path | str) -> str:
    """The text of a point's file at `path`. Raises ValueError if the file cannot name a model, GPU or profile."""
    candidate, link = point.candidate, network(question, point.candidate)
    document: dict[str, Any] = {"engines": [_engines(question, pool) for pool in candidate.pools], "route": ROUTE}
    if link is not None:
        document["kv_transfer"] = {"bandwidth": link.bandwidth, "latency": link.latency, "route": ROUTE}
    body = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, allow_unicode=True, width=_WIDTH)
    comment = "".join(f"# {_printable(line)}\n" for line in _comment(question, point, path))
    return comment + body


def _comment(question: SizingQuestion, point: Point, path: Path | str) -> Iterator[str]:
    limits = ", ".join(f"{it.name}={it.limit:g}" for it in question.objectives)
    reached = ", ".join(f"{name} {seconds:.4g} s" for name, seconds in point.trial.latency.items())
    gpus = f"{point.candidate.devices:,} GPU{'s' if point.candidate.devices > 1 else ''}"
    yield str(point.candidate)
    yield f"Found by libra search for {question.model.name}: {point.trial.rate:.6g} requests/s on {gpus}"
    yield f"within {limits}. Simulated: {reached}. To simulate again:"
    yield f"  {simulate_command(question, point, path)}"


def _engines(question: SizingQuestion, pool: EnginePool) -> dict[str, Any]:
    shape, origin = pool.shape, _origin(question)
    nodes = question.cluster.node_class(shape.nodes)
    try:
        gpu = described_gpu(nodes.gpu)
        node = _node(nodes)
    except ValueError as error:
        raise ValueError(f"nodes {nodes.name} cannot be written to an engines file: {error}") from None
    keys: dict[str, Any] = {"name": pool.role, "count": pool.count}
    if pool.role != "colocated":
        keys["role"] = pool.role
    keys |= {"model": _model(origin.model, question.model), "gpu": gpu, "node": node}
    keys |= {"profile": _profile(question, shape), "host": _file(origin.host, "none", *NAMED_HOSTS)}
    keys["tensor_parallel_size"] = shape.tensor_parallel_size
    if shape.pipeline_parallel_size > 1:
        keys["pipeline_parallel_size"] = shape.pipeline_parallel_size
    keys |= {"max_model_len": question.longest, "max_num_seqs": shape.max_num_seqs}
    keys["max_num_batched_tokens"] = shape.max_num_batched_tokens
    keys["async_scheduling"] = shape.async_scheduling
    if origin.host != "none" and not grid_of(question, shape).host.priced:
        # A host without overhead needs no CUDA graphs, so batches are not padded; memory for graphs stays reserved.
        keys |= {"enforce_eager": True, "kv_blocks": configuration(question, shape).kv_blocks}
    if shape.parallel is not None:
        keys |= {"data_parallel_size": shape.parallel.size, "enable_expert_parallel": True}
        keys["all2all_backend"] = shape.parallel.all2all_backend
    if shape.apart is not None:
        keys["afd"] = {"attention": shape.apart.attention, "ffn": shape.apart.ffn, **_link(fabric(nodes))}
        keys["afd"]["micro_batches"] = shape.apart.micro_batches
    if shape.kv_tiers:
        keys["kv_tiers"] = [asdict(it) for it in shape.kv_tiers]
    if shape.drafts is not None:
        keys["speculative"] = _drafts(question, shape.drafts)
    return keys


def _node(nodes: NodeClass) -> dict[str, Any]:
    """The keys of a node, as in a cluster file."""
    inter, intra = (written(it, RATES) for it in (nodes.inter_bandwidth, nodes.intra_bandwidth))
    return {"gpus": nodes.gpus, "inter_bandwidth": inter, "intra_bandwidth": intra}


def _link(net: Fabric) -> dict[str, float]:
    """The keys of each GPU's share of the network."""
    return {"bandwidth": net.network / net.gpus, "latency": net.network_latency}


def _drafts(question: SizingQuestion, drafts: Drafts) -> dict[str, Any]:
    its = drafts.speculative
    keys: dict[str, Any] = {"method": its.method, "num_speculative_tokens": its.num_speculative_tokens}
    if drafts.model is not None:
        keys["model"] = _model(drafts.model, question.drafters[drafts.model].model)
    if its.accepted:
        keys["accepted"] = list(its.accepted)
    else:
        keys["synthetic_acceptance_rates"] = list(its.synthetic_acceptance_rates)
    return keys | {"seed": its.seed}


def _model(given: str, model: ModelSpec) -> str:
    """The name of a model, or its absolute path. Raises ValueError if loading it would give another model."""
    named = str(Path(given).absolute()) if Path(given).exists() else model.name
    try:
        same = load_model(named) == model
    except ValueError:
        same = False
    if not same:
        raise ValueError(
            f"{model.name} cannot be written to an engines file: {named} is neither a known model of that shape nor a"
            " config.json; give the search its config.json"
        )
    return named


def _profile(question: SizingQuestion, shape: EngineSetup) -> str:
    """The profile of an engine. The file's one key is also the source of times of divided experts and groups."""
    given = _file(_origin(question).profile, "auto", "tables", "roofline")
    if (shape.parallel is None and shape.apart is None) or given not in ("auto", "tables"):
        return given
    place = question.cluster.nodes.index(question.cluster.node_class(shape.nodes))
    if question.profiles[place].source.startswith("tables"):
        return "auto" if shape.parallel is not None else "tables"
    model = None if shape.drafts is None else shape.drafts.model
    if model is not None and question.drafters[model].profiles[place].source.startswith("tables"):
        raise ValueError(
            f"the draft model {model} has times from tables, but the engines of {shape.nodes} from a roofline; an"
            " engines file has one source for both: search with --profile roofline"
        )
    return "roofline"


def _file(given: str, *words: str) -> str:
    return given if given in words else str(Path(given).absolute())


def _origin(question: SizingQuestion) -> Origin:
    if question.origin is None:
        raise ValueError("the question has no origin: set its origin, with model, profile and host")
    return question.origin


def _printable(text: str) -> str:
    """The text as one line of printable characters for a YAML comment."""
    return "".join(it if it.isprintable() else "?" for it in text)
