"""Sessions by a hash, as balancers route them that hash a session header (nginx, Envoy, vllm-router)."""

from __future__ import annotations

from typing import Any
from zlib import crc32

from libra.route.live import Live, LivePolicy
from libra.route.policy import Fleet, Instance, Placement, ToolReturn, TurnRequest


class SessionHash(LivePolicy[Live]):
    """The `sticky` policy: all turns of a trajectory go to one instance, whatever it has to do.

    The instance is the one with the highest hash of both ids (rendezvous hashing, Thaler and Ravishankar 1998), of
    those that hold the turn: when instances come or go, no other trajectory moves. O(instances).
    """

    NAME = "sticky"
    BUCKETS = False

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        return self._serve(self._live.setdefault(request.trajectory_id, Live()), request, fleet)

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        return self._serve(self._placed(request), request, fleet)

    def _serve(self, live: Live, request: TurnRequest, fleet: Fleet) -> Placement | None:
        needed = request.context_tokens + fleet.turn_tokens

        def weight(instance: Instance) -> tuple[int, str]:
            return crc32(f"{instance.id} {request.trajectory_id}".encode()), instance.id

        eligible = (instance for instance in fleet.instances if needed <= instance.capacity_tokens)
        chosen = max(eligible, key=weight, default=None)
        return None if chosen is None else self._goes(live, chosen, "drawn by a hash of the session")

    def _learned(self) -> dict[str, Any]:
        return {}

    def _resume(self, snapshot: dict[str, Any]) -> None:
        pass

    def _row(self, live: Live) -> tuple[str | None, bool]:
        return live.instance, live.prefix_there

    def _of_row(self, instance: str | None, prefix_there: bool) -> Live:
        return Live(instance, prefix_there)
