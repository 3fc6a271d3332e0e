"""Ends of trajectories: finished by their client, forgotten, or given up after a time without turns.

Invariant: a finished trajectory is kept before the policy learns from it, and the policy learns from it once. A
trajectory that its client never finishes is kept as unfinished, since its length is a lower bound.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from libra.live.lengths import SeenLengths
from libra.live.trajectories import Trajectories
from libra.records.files import DiskError
from libra.route.policy import Policy
from libra.serve.answers import decoded
from libra.serve.gateway.counts import Counts
from libra.serve.gateway.libra_field import Tokens
from libra.serve.gateway.policy_failures import told_policy_failure
from libra.serve.gateway.unnamed import UnnamedSessions
from libra.serve.gateway.watcher import End, Watcher
from libra.trajectory import Trajectory

_LOG = logging.getLogger(__name__)


class Finish(msgspec.Struct, forbid_unknown_fields=True):
    """Outcome of a trajectory, as reported by its client."""

    reward: float | None = None
    policy_version: Tokens = 0


_finish = msgspec.json.Decoder(Finish)


def read_finish(body: bytes) -> Finish:
    """Parse the body of a finish request. Raises `ValueError` in one line that names the field."""
    return decoded(_finish, body or b"{}")


@dataclass(slots=True)
class TrajectoryEnds:
    """Calls `keep` with every trajectory that ends, before the policy learns from it. `keep` may raise `DiskError`; the
    trajectory has then not ended, and can be ended again."""

    keep: Callable[[Trajectory], None]
    policy: Policy
    trajectories: Trajectories
    unnamed: UnnamedSessions
    lengths: SeenLengths
    counts: Counts
    watcher: Watcher
    _ending: set[str] = field(default_factory=set, init=False)  # ended by their client while a turn was in flight

    def finish(self, id: str, outcome: Finish) -> Trajectory:
        """End a trajectory with its outcome. Raises `KeyError` if it is unknown, `ValueError` if its last turn has no
        answer, and `DiskError`."""
        trajectory = self.trajectories.whole(id, outcome.reward, outcome.policy_version)
        self.keep(trajectory)
        self._drop(id, End.FINISHED, trajectory)
        with told_policy_failure():
            self.policy.finished(trajectory)
        self.lengths.ended(trajectory)
        self.counts.finished += 1
        return trajectory

    def finish_session(self, id: str) -> int:
        """End a trajectory whose client reports no outcome. If its last turn is in flight, the trajectory ends after
        that turn. If its last turn got no answer, the trajectory is kept as unfinished. Returns the number of the
        trajectory's answered turns. Raises `DiskError`."""
        turns = self.trajectories.answered_turns(id)
        if self.trajectories.is_in_flight(id):
            self._ending.add(id)
            return turns
        try:
            self.finish(id, Finish(policy_version=self.trajectories.policy_version))
        except (KeyError, ValueError):  # it is unknown, or its last turn has no answer
            if turns:
                self.expire(id)
            else:
                self.forget(id)
        return turns

    def turn_over(self, id: str) -> None:
        """Handle the end of a turn. If the client ended the trajectory during the turn, the trajectory ends now."""
        if id in self._ending and not self.trajectories.is_in_flight(id):
            self._ending.discard(id)
            try:
                self.finish_session(id)
            except DiskError as error:
                _LOG.warning("trajectory %s is not finished yet: %s", id, error)

    def forget(self, id: str) -> bool:
        """End a trajectory without learning from it. Returns False if it is unknown."""
        return self._leave(id, End.FORGOTTEN, None)

    def expire(self, id: str) -> None:
        """Give up a trajectory that its client does not finish. If the trajectory cannot be kept now, a later call
        gives the trajectory up."""
        bound = self.trajectories.so_far(id)
        if bound is not None:
            try:
                self.keep(bound)
            except DiskError as error:
                _LOG.warning("trajectory %s is not given up yet: %s", id, error)
                return
            self.lengths.ended(bound)
        self._leave(id, End.GIVEN_UP, bound)
        self.counts.forgotten += 1

    def _leave(self, id: str, end: End, trajectory: Trajectory | None) -> bool:
        known = self._drop(id, end, trajectory)
        with told_policy_failure():
            self.policy.forget(id)
        return known

    def _drop(self, id: str, end: End, trajectory: Trajectory | None) -> bool:
        self.unnamed.drop(id)
        self._ending.discard(id)
        self.watcher.closed(id, end, trajectory)
        return self.trajectories.forget(id)
