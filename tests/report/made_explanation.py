"""One explanation of round numbers, with what a page must cope with: ties, no plan, a name that looks like markup."""

from __future__ import annotations

from libra.plan.explain.explanation import (
    Bound,
    BucketView,
    Explanation,
    Otherwise,
    PlanView,
    PoolView,
    RejectedKind,
    Relief,
    Routing,
    SmallerCluster,
    Split,
)
from libra.plan.solution import Prediction, Proof

CLASSES = [(4_000, 0.5), (8_000, 0.3), (40_960, 0.2)]


def plan(devices: int, engines: dict[str, int], step: float, buckets: int = 2) -> PlanView:
    predicted = Prediction(step, step, 80.0, 90.0, "rollout")
    return PlanView("dp8", devices, "a", devices, tuple(engines.items()), buckets, predicted, step / 100 - 1)


EXPLANATION = Explanation(
    plan=plan(32, {"a/tp1": 3, "a/tp8": 1}, 100.0),
    proof=Proof("optimal", 99.99, 1e-4),
    bound=Bound("rollout", (("rollout", 100.0),), 2, 0.2),
    buckets=(
        BucketView("a/tp1", "a", 3, 3, 32, 0, 8_000, 75.0, 120.0, 70.0, 0.75),
        BucketView("a/tp8", "a", 1, 8, 8, 8_000, 40_960, 100.0, 150.0, 90.0, 1.0),
    ),
    pools=(PoolView("a", 48, 32, 11, 5, "others suffice"), PoolView("[b]", 8, 0, 0, 8, "too slow")),
    runners_up=(plan(32, {"a/tp4": 2}, 100.0), plan(24, {"a/tp1": 3, "a/tp8": 1}, 110.0)),
    otherwise=(Otherwise("a single bucket", plan(24, {"a/tp8": 3}, 150.0, 1)), Otherwise("no a/tp8", None)),
    reliefs=(
        Relief("one more node of a (8 devices)", "devices", "a", 87.5, 12.5, 0.125, True),
        Relief("at most 3 buckets instead of 2", "most_buckets", None, 100.0, 0.0, 0.0, False),
    ),
    fewer_nodes=(
        SmallerCluster((("a", 5, 6), ("[b]", 1, 1)), 8, 104.0, 4.0),
        SmallerCluster((("a", 6, 6), ("[b]", 0, 1)), 8, 100.05, 0.05),
    ),
    smallest=SmallerCluster((("a", 6, 6), ("[b]", 0, 1)), 8, 100.05, 0.05),
    routing=Routing(100.0, 95.0, 90.0),
    splits=(
        Split("dp6", "a", 24, 107.0, 80.0, 107.0),
        Split("dp8", "a", 32, 80.0, 100.0, 100.0),
        Split("dp10", "a", 40, 64.0, 190.0, 190.0),
    ),
    rejected=(RejectedKind("needs … GB", (("tp1", "needs 200 GB; [80] are there"), ("tp2", "needs 120 GB"))),),
    synchronous=False,
)
