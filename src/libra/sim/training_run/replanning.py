"""The library's replanner, as a simulated system has it.

Invariant: it is asked and told what an executor would ask and tell it, and no more.
"""

from __future__ import annotations

from dataclasses import dataclass

from libra.plan.plan import Plan
from libra.plan.replanner import Replanner
from libra.sim.training_run.system import Moment


@dataclass(slots=True)
class Replanning:
    replanner: Replanner
    period: int  # steps

    def decide(self, moment: Moment) -> Plan | None:
        if self.replanner.looks:
            self.replanner.realised(moment.seconds_per_step)
        decision = self.replanner.step(moment.finished, moment.running)
        return self.replanner.plan if decision.taken else None
