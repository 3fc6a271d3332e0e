"""Readers given anything: they answer with a value, or with one line that names the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from libra.config.recipe import load_recipe
from libra.config.run import ConfigError, load_config
from libra.hardware.cluster_file import load_cluster
from libra.hardware.model_file import load_model
from libra.trajectory import TrajectoryFormatError, read_workload

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MODELS = ROOT / "src" / "libra" / "hardware" / "models"


def _read_log(path: Path) -> None:
    for _ in read_workload(path, 4096, truncate_context=True):
        pass


# reader -> a document that it accepts
YAML_READERS: dict[Callable[[Path], object], Any] = {
    load_cluster: yaml.safe_load((EXAMPLES / "cluster_mixed.yaml").read_text()),
    load_recipe: yaml.safe_load((EXAMPLES / "request.yaml").read_text()),
    load_config: yaml.safe_load((EXAMPLES / "calculator.yaml").read_text()),
}
JSON_READERS: dict[Callable[[Path], object], Any] = {
    load_model: json.loads((MODELS / "Qwen--Qwen3-30B-A3B.json").read_text()),
    _read_log: json.loads((ROOT / "tests" / "data" / "trajectories.jsonl").read_text().splitlines()[0]),
}
DOCUMENTS = {**YAML_READERS, **JSON_READERS}

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

# Words that are read as something else than text, and numbers at the edges of what is countable.
words = st.sampled_from(
    ["200 Gb/s", "25 GB/s", "A800", "null", "-0", "2024-13-01", "0b_", "!!bool x", "<<", "a\nb", "\x85"]
)
numbers = st.sampled_from([0, 1, -1, 8, 2**31, 2**63, 2**64, 10**40, 0.5, -0.0, 1e308, float("nan"), float("inf")])
leaves = st.none() | st.booleans() | numbers | st.integers() | st.floats() | words | st.text(max_size=8)
keys = words | st.text(max_size=8)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
)


@st.composite
def mutated(draw: st.DrawFn, document: Any) -> Any:
    """The document with one to three of its places changed, removed, doubled or added to."""
    changed = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 3))):
        place, depth = changed, draw(st.integers(0, 3))
        while depth and place:
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            if not isinstance(place[key], (dict, list)):
                break
            place, depth = place[key], depth - 1
        if isinstance(place, dict):
            key = draw(st.sampled_from(sorted(place)) if place and draw(st.booleans()) else keys)
            if draw(st.booleans()):
                place[key] = draw(values)
            else:
                place.pop(key, None)
        else:
            place.append(draw(st.sampled_from(place) if place and draw(st.booleans()) else values))
    return changed


def answers(reader: Callable[[Path], object], path: Path) -> bool:
    """Whether `reader` takes the file; where it does not, its refusal must be one printable line naming the file."""
    try:
        reader(path)
    except (ConfigError, TrajectoryFormatError) as error:
        message = str(error)
        assert message.startswith(str(path))
        assert len(message) > len(str(path)) + 3
        assert message.splitlines() == [message]
        assert message.encode("utf-8")
        assert len(message) < 2000
        return False
    return True


def write_json(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")
    return path


def write_yaml(path: Path, document: object) -> Path:
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


OF_EACH = pytest.mark.parametrize("reader", DOCUMENTS, ids=lambda reader: reader.__name__)


@OF_EACH
def test_the_documents_that_are_mutated_are_taken(tmp_path: Path, reader: Callable[[Path], object]) -> None:
    assert answers(reader, write_json(tmp_path / "file.json", DOCUMENTS[reader]))


@OF_EACH
@FUZZ
@given(data=st.data())
def test_a_mutated_file(tmp_path: Path, reader: Callable[[Path], object], data: st.DataObject) -> None:
    write = write_yaml if reader in YAML_READERS else write_json
    answers(reader, write(tmp_path / "file", data.draw(mutated(DOCUMENTS[reader]))))


@OF_EACH
@FUZZ
@given(document=values)
def test_any_document(tmp_path: Path, reader: Callable[[Path], object], document: object) -> None:
    assert not answers(reader, write_json(tmp_path / "file.json", document))


@OF_EACH
@FUZZ
@given(content=st.binary(max_size=40) | st.text(alphabet="{}[]:,-&*!|>#%@`'\"\\ \n\tab0", max_size=40).map(str.encode))
@example(b"")
@example(b"\xff\xfe")
@example(b"&a [*a]")
@example(b"&a {b: *a}")
@example(b"&a {<<: *a}")
@example(b"a: !!bool x")
@example(b"a: !!timestamp x")
@example(b"a: !!python/object/apply:os.getcwd []")
@example(b"a: 2024-13-01")
@example(b"a: 0b_")
@example(b"? [a]\n: b")
@example(b"? {a: b}\n: c")
@example(b"1: 2")
@example(b"null: 2")
@example(b"2024-01-01: 2")
@example(b'"\\ud800": 1')
@example(b'batch: "\\ud800"')
@example((EXAMPLES / "calculator.yaml").read_bytes().replace(b"short:", b'"\\ud800":'))
@example(b"batch: " + b"9" * 5000)
@example(b"batch: [&a [x, x, x, x, x, x], &b [*a, *a, *a, *a, *a, *a], &c [*b, *b, *b, *b, *b], [*c, *c, *c, *c, *c]]")
@example(b"[" * 3000)
@example(b"{a: " * 3000)
@example(b'{"model_type": "llama", "num_hidden_layers": 1' + b"0" * 5000 + b"}")
def test_any_bytes(tmp_path: Path, reader: Callable[[Path], object], content: bytes) -> None:
    path = tmp_path / "file.txt.json"
    path.write_bytes(content)
    assert not answers(reader, path)


@OF_EACH
@FUZZ
@given(cut=st.integers(0, 10**4), junk=st.binary(max_size=3))
def test_a_file_cut_short(tmp_path: Path, reader: Callable[[Path], object], cut: int, junk: bytes) -> None:
    path = write_json(tmp_path / "file.json", DOCUMENTS[reader])
    content = path.read_bytes().rstrip()
    path.write_bytes(content[: cut % len(content)] + junk)
    answers(reader, path)
