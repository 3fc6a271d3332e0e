"""Routing by a hash of the session, as in load balancers that hash a session header (nginx, Envoy, vllm-router)."""

from __future__ import annotations

from hashlib import blake2b

from libra.route.live import Live, StickyPolicy
from libra.route.policy import Fleet, Instance, Placement, ToolReturn, TurnRequest


class SessionHash(StickyPolicy[Live]):
    """The `sticky` policy: all turns of a trajectory go to one instance, whatever its load.

    Among the instances with room for the turn, the one with the highest hash of both ids is chosen (rendezvous hashing,
    Thaler and Ravishankar 1998). So when an instance joins or leaves, all other trajectories stay in place.
    O(instances). Without `sticky`, each turn is hashed separately.

    The hash must mix its bits. A linear hash, such as CRC, ranks instances alike for half of all sessions, so that one
    of three instances would get half of the sessions.
    """

    NAME = "sticky"
    REASON = "drawn by a hash of the session"
    BUCKETS = False

    def place(self, request: TurnRequest, fleet: Fleet) -> Placement | None:
        return self._serve(self._live.setdefault(request.trajectory_id, Live()), request, fleet)

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, fleet: Fleet) -> Placement | None:
        return self._serve(self._placed(request), request, fleet)

    def _serve(self, live: Live, request: TurnRequest, fleet: Fleet) -> Placement | None:
        needed = request.context_tokens + fleet.turn_tokens
        session = request.trajectory_id if self._sticky else f"{request.trajectory_id} {request.context_tokens}"

        def weight(instance: Instance) -> tuple[bytes, str]:
            return blake2b(f"{instance.id} {session}".encode(), digest_size=8).digest(), instance.id

        eligible = (instance for instance in fleet.instances if needed <= instance.capacity_tokens)
        chosen = max(eligible, key=weight, default=None)
        return None if chosen is None else self._goes(live, chosen, self.REASON)

    def _row(self, live: Live) -> tuple[str | None, bool]:
        return live.instance, live.prefix_there

    def _of_row(self, instance: str | None, prefix_there: bool) -> Live:
        return Live(instance, prefix_there)
