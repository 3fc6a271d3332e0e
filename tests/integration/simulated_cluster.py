"""Several Ray nodes on this machine, and the loss of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

# Ray takes the loopback interface then, in this process and in those that it starts.
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}


class SimulatedCluster:
    def __init__(self, cluster: Any, nodes: list[Any]) -> None:
        self._cluster, self._nodes = cluster, nodes
        self.address: str = cluster.address

    def holds(self, number: int, process: psutil.Process) -> bool:
        """Whether the process runs on that node."""
        raylet = self._nodes[number].all_processes["raylet"][0].process.pid
        return raylet in {parent.pid for parent in process.parents()}

    def lose_node(self, number: int) -> None:
        """Kill its processes, without a word to anybody."""
        self._cluster.remove_node(self._nodes[number], allow_graceful=False)

    def add_node(self, **resources: Any) -> None:
        self._nodes.append(self._cluster.add_node(node_ip_address="127.0.0.1", **resources))


@contextmanager
def simulated_cluster(*cpus: int) -> Iterator[SimulatedCluster]:
    """A cluster of nodes with so many CPUs each, beside a head node that has none."""
    os.environ.update(ON_LOOPBACK)
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "node_ip_address": "127.0.0.1"},
    )
    try:
        made = SimulatedCluster(cluster, [])
        for count in cpus:
            made.add_node(num_cpus=count)
        yield made
    finally:
        cluster.shutdown()
