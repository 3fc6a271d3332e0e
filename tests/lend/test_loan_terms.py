"""What a cluster file says of pools that lend, and what it is refused for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tables import by_name

from libra.config.yaml_file import ConfigError
from libra.hardware.cluster import Cluster
from libra.hardware.cluster_file import load_cluster
from libra.lend.loan_terms import LoanTerms, RatesAhead, TrafficLog

NODE = {"name": "a", "count": 6, "gpus": 8, "gpu": "A800", "inter_bandwidth": "200 Gb/s"}
LENDS = {
    "model": "Qwen/Qwen3-8B",
    "ttft": 1.0,
    "tpot": 0.1,
    "certificates": ["c.json"],
    "forecast": {"rates": [20, 30.5], "seconds": 300},
}
LOG = {"requests": "chat.csv", "bin": 300, "season": 86400}


def load(directory: Path, **lends: Any) -> Cluster:
    given = {key: value for key, value in {**LENDS, **lends}.items() if value is not None}
    path = directory / "cluster.yaml"
    path.write_text(yaml.safe_dump({"nodes": [NODE], "serving": [{**NODE, "name": "chat", "lends": given}]}))
    return load_cluster(path)


def test_terms_are_read_with_a_forecast_or_a_log(tmp_path: Path) -> None:
    (pool,) = load(tmp_path).serving
    assert pool.lends == LoanTerms("Qwen/Qwen3-8B", 1, 1.0, 0.1, ("c.json",), RatesAhead((20.0, 30.5), 300.0))
    (pool,) = load(tmp_path, forecast=None, traffic=LOG, tensor_parallel_size=2).serving
    assert pool.lends is not None
    assert (pool.lends.tensor_parallel_size, pool.lends.traffic) == (2, TrafficLog("chat.csv", 300.0, 86400.0))
    assert TrafficLog("chat.csv", 300.0, 86400.0).season_bins == 288


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("no traffic", {"forecast": None}, "lends.traffic: give either a log of the pool's traffic (requests"),
    ("both", {"traffic": LOG}, "lends.traffic: give either a log of the pool's traffic (requests"),
    ("no certificate", {"certificates": []}, "lends.certificates is empty; name one that `libra lend check`"),
    ("certificates left out", {"certificates": None}, "lends.certificates: this key is required"),
    ("no SLO", {"tpot": None}, "lends.tpot: this key is required; add it"),
    ("no time for a token", {"tpot": 0}, "lends.tpot is 0; give a positive number of seconds"),
    ("part of a node", {"tensor_parallel_size": 3}, "lends.tensor_parallel_size is 3; it must divide the 8 GPUs"),
    ("no GPU", {"tensor_parallel_size": 0}, "lends.tensor_parallel_size is 0; set it to 1 or more"),
    ("no rates", {"forecast": {"rates": [], "seconds": 9}}, "lends.forecast.rates are requests/s, 0 or more"),
    ("a rate below 0", {"forecast": {"rates": [-1], "seconds": 9}}, "lends.forecast.rates are requests/s, 0 or more"),
    ("no time ahead", {"forecast": {"rates": [1], "seconds": 0}}, "lends.forecast.seconds is 0; give a positive"),
    ("part of a bin", {"forecast": None, "traffic": {**LOG, "season": 400}}, "lends.traffic.season is 400 s; give 1"),
    ("no season", {"forecast": None, "traffic": {**LOG, "season": 0}}, "lends.traffic.season is 0 s; give 1 to"),
    (
        "too many bins",
        {"forecast": None, "traffic": {**LOG, "bin": 1, "season": 1000001}},
        "lends.traffic.season is 1e+06 s; give 1 to 1,000,000 whole bins of 1 s",
    ),
    ("no bin", {"forecast": None, "traffic": {**LOG, "bin": 0}}, "lends.traffic.bin is 0; give a positive number"),
    ("typo", {"usage": 0.8}, "lends.usage: unknown key 'usage'"),
]  # fmt: skip


@by_name("lends, message", REFUSED)
def test_terms_that_mean_nothing_are_refused_by_key(tmp_path: Path, lends: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path, **lends)
    text = str(refusal.value)
    assert text.startswith(f"{tmp_path / 'cluster.yaml'}: serving.0.")
    assert message in text
    assert "\n" not in text
