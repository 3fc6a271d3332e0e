"""Choice of the data-parallel rank for a request, as in vLLM's front end (`DPLBAsyncMPClient`).

Invariant: the rank with the fewest requests is chosen. If more than half of a rank's KV memory is used, its waiting
requests count more. Among equal ranks the first is chosen; each search starts one rank further. vLLM's front end sees
waiting requests and memory up to a tenth of a second late, whereas here they are always current.
"""

from __future__ import annotations

from collections.abc import Sequence

from libra.route.baselines import Baseline
from libra.route.policy import Instance
from libra.sim.instances import EngineInstance


class RankBalancer(Baseline):
    NAME = "data-parallel"
    REASON = "fewest requests"

    def __init__(self, *, sticky: bool = True) -> None:
        super().__init__(sticky=sticky)
        self._start = 0

    def _choose(self, instances: Sequence[Instance], needed: int) -> int | None:
        count, start = len(instances), self._start
        places = ((start + turn) % count for turn in range(count))
        eligible = [place for place in places if needed <= instances[place].capacity_tokens]
        if not eligible:
            return None
        self._start = (start + 1) % count
        return min(eligible, key=lambda place: _score(instances[place]))

    def _rule(self) -> int:
        return self._start

    def _resume_rule(self, rule: int) -> None:
        self._start = rule


def _score(instance: Instance) -> float:
    assert isinstance(instance, EngineInstance)
    waiting, running = instance.requests
    return waiting + running + (waiting * 6 * max(0.0, instance.kv_usage - 0.5) if waiting else 0.0)
