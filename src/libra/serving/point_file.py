"""Writes a point of an answer as a file of engines, which can be simulated again, changed and kept.

Invariant: with the question's requests at the point's rate, repeated as in the search, the file reproduces the search's
own simulation to the last digit. A part that cannot be written exactly is refused by name.
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
    """Write a file of engines for each point of the answer, in order: `point-1.yaml` is the best point. Makes the
    directory. Raises ValueError if the directory already has such files, since a user may have changed them. Also
    raises the errors of `engines_text`."""
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
    """Raise ValueError unless `write_engines` can write there without overwriting a file."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory}: is not a directory; give one to write engine files to")
    there = next(it for it in (directory, *directory.absolute().parents) if it.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{directory}: {there} cannot be written to; give another directory for engine files")
    taken = next(iter(sorted(directory.glob(f"{_PREFIX}*.yaml"))), None)
    if taken is not None:
        raise ValueError(f"{taken}: exists already; give another directory, or remove it")


def simulate_command(question: SizingQuestion, point: Point, path: Path | str) -> str:
    """The command that simulates the file at `path` like the search."""
    origin = _origin(question)
    requests = "REQUESTS" if origin.requests is None else shlex.quote(origin.requests)
    scale = repr(point.trial.rate / question.natural_rate)
    times = point.trial.requests // len(question.requests)
    repeat = f" --repeat {times}" if times > 1 else ""
    return f"libra simulate {shlex.quote(str(path))} --requests {requests}{repeat} --rate-scale {scale}"


def engines_text(question: SizingQuestion, point: Point, path: Path | str) -> str:
    """The text of the file to write at `path`. Raises ValueError if a model, GPU or profile cannot be named."""
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
    yield f"within {limits}. Simulated: {reached}. The same again:"
    yield f"  {simulate_command(question, point, path)}"


def _engines(question: SizingQuestion, pool: EnginePool) -> dict[str, Any]:
    shape, origin = pool.shape, _origin(question)
    nodes = question.cluster.node_class(shape.nodes)
    try:
        gpu = described_gpu(nodes.gpu)
        node = _node(nodes)
    except ValueError as error:
        raise ValueError(f"nodes {nodes.name} cannot be written as a file of engines: {error}") from None
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
        # A host without overhead needs no CUDA graphs, so batches are not padded; but memory for graphs is kept.
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
    """The network of each GPU."""
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
    """The name of a model, or an absolute path. Raises ValueError if neither gives the model."""
    named = str(Path(given).absolute()) if Path(given).exists() else model.name
    try:
        same = load_model(named) == model
    except ValueError:
        same = False
    if not same:
        raise ValueError(
            f"{model.name} cannot be written as a file of engines: {named} is no known model of that shape, and no"
            " config.json; give the search its config.json"
        )
    return named


def _profile(question: SizingQuestion, shape: EngineSetup) -> str:
    """The profile of an engine. Divided experts need times from the same source as the profile of whole engines."""
    given = _file(_origin(question).profile, "auto", "tables", "roofline")
    if (shape.parallel is None and shape.apart is None) or given not in ("auto", "tables"):
        return given
    place = question.cluster.nodes.index(question.cluster.node_class(shape.nodes))
    if question.profiles[place].source.startswith("tables"):
        return "auto" if shape.parallel is not None else "tables"
    model = None if shape.drafts is None else shape.drafts.model
    if model is not None and question.drafters[model].profiles[place].source.startswith("tables"):
        raise ValueError(
            f"{model}, a draft model, has its times from tables, and the engines of {shape.nodes} from a roofline: a"
            " file of engines has one source for both; search with --profile roofline"
        )
    return "roofline"


def _file(given: str, *words: str) -> str:
    return given if given in words else str(Path(given).absolute())


def _origin(question: SizingQuestion) -> Origin:
    if question.origin is None:
        raise ValueError("the question has no origin: give it one, with model, profile and host")
    return question.origin


def _printable(text: str) -> str:
    """The text as one line of printable characters for a YAML comment."""
    return "".join(it if it.isprintable() else "?" for it in text)
