"""The section `lending` of a run's configuration, and how one that says something else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from libra.config.run import ConfigError, load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZE = {"max_model_len": 64, "max_num_seqs": 4, "kv_tokens": 256}
AGENTS = {"agents": ["/dev/shm/device-0.agent", "agent.sock"], "engine": SIZE}
LENDING = {"servers": 1, "server": {"traffic": "traffic.csv"}, "ttft": 1.0, "tpot": 0.1, "engine": SIZE}


def write(directory: Path, lending: dict[str, Any], engines: int = 0) -> Path:
    """The configuration of an example that borrows, with a bucket for that number of lent engines."""
    data = yaml.safe_load((EXAMPLES / "calculator.yaml").read_text())
    data["lending"] = lending
    if engines:
        data["start"]["buckets"].insert(1, {"shape": "lent", "engines": engines, "up_to": 50})
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.mark.parametrize("name", ["borrow", "lent"])
def test_the_examples_are_complete(name: str) -> None:
    config = load_config(EXAMPLES / f"{name}.yaml")
    assert config.name == name and config.lent_devices > 0


BAD = [
    ("servers without engines", LENDING, "start.buckets has 0 engines of shape lent, and 1"),
    (
        "agents without engines",
        AGENTS,
        "start.buckets has 0 engines of shape lent, and 2 servers and",
    ),
    ("no lenders", {"engine": SIZE}, "lending: no device is lent: name agents, or set servers to"),
    (
        "servers of nothing",
        {**AGENTS, "servers": 1},
        "servers is 1: give server and ttft and tpot, t",
    ),
    ("an agent twice", {**AGENTS, "agents": ["a", "a"]}, "lending: agents names a socket twice"),
    (
        "a baseline at agents",
        {**AGENTS, "rule": "naive"},
        "agents lend by their own gate; give gate",
    ),
    (
        "a lent engine for the longest contexts",
        {**LENDING, "engine": {**SIZE, "max_model_len": 192, "kv_tokens": 400}},
        "lending.engine holds 192 tokens: give fewer than 192, so that engines of your own serve the longest",
    ),
    (
        "grants that are longer than the longest",
        {**LENDING, "shortest_grant": 0.2},
        "lending: shortest_grant is 0.2 s, longest_grant 0.05 s: lower the first",
    ),
    ("all of the SLO and more", {**LENDING, "use": 1.5}, "lending.use: Input should be less than"),
    ("unknown rule", {**LENDING, "rule": "rose"}, "lending.rule: Input should be 'gate', 'serve-f"),
]


@pytest.mark.parametrize(("lending", "message"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_what_cannot_be_lent_is_refused_with_key_and_remedy(
    tmp_path: Path, lending: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(write(tmp_path, lending))
    assert message in str(refusal.value)


def test_traffic_lies_beside_the_file_and_off_leaves_the_devices_to_their_servers(tmp_path: Path) -> None:
    path = write(tmp_path, LENDING, 1)
    config = load_config(path)
    assert config.lending is not None and config.lending.server is not None
    assert config.lending.server.traffic == tmp_path / "traffic.csv"
    assert (config.lent_devices, set(config.all_engines)) == (1, {"short", "long", "lent"})
    assert load_config(path, {"lending.rule": "off"}).lent_devices == 0


def test_agents_are_named_as_seen_from_the_configuration(tmp_path: Path) -> None:
    path = write(tmp_path, AGENTS, 2)
    config = load_config(path)
    assert config.lending is not None and config.lent_devices == 2
    assert config.lending.agents == (Path("/dev/shm/device-0.agent"), tmp_path / "agent.sock")
    assert load_config(path, {"lending.rule": "off"}).lent_devices == 0
