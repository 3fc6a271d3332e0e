"""The worth of loans in the explanation of a plan: a sentence for each serving pool, and steps to compare."""

from __future__ import annotations

from libra.plan.explain.explanation import Explanation, LenderView
from libra.plan.explain.what_if import SAME_STEP
from libra.report.words import BOTTLENECK_WORDS, duration, percent, plural


def lender_sentences(explanation: Explanation) -> tuple[str, ...]:
    """The value of the loan of each serving pool, or the reason why there is none."""
    return tuple(f"{_lender_sentence(view)} {_one_more(explanation, view.pool)}" for view in explanation.lenders)


def lender_steps(explanation: Explanation) -> tuple[tuple[str, str, float], ...]:
    """(pool, case, seconds of a step) with and without the loan of each pool that lends, and with one more node."""
    rows: list[tuple[str, str, float]] = []
    for view in explanation.lenders:
        if view.engines:
            rows.append((view.pool, f"the plan, with a loan of {plural(view.engines, 'engine')}", view.step))
            average = (view.pool, "the plan on average, as traffic may take the loan away", view.average)
            rows += [average] if view.away else []
            rows.append((view.pool, "the plan while nothing is lent", view.recalled))
            rows.append((view.pool, "the loan, with training as in the best plan without it", view.kept))
            rows.append((view.pool, "the best plan without the loan", view.without))
        rows += [
            (view.pool, "with one more node of the pool", relief.step)
            for relief in explanation.reliefs
            if relief.node_of == view.pool and relief.binds
        ]
    return tuple(rows)


def _one_more(explanation: Explanation, pool: str) -> str:
    """The gain of one more node of a serving pool, or the bottleneck if there is no gain."""
    relief = next((it for it in explanation.reliefs if it.node_of == pool), None)
    if relief is not None and relief.binds:
        return f"One more node of {pool} would save {duration(relief.seconds)} a step ({percent(relief.gain)})."
    bound = BOTTLENECK_WORDS[explanation.bound.by]
    return f"One more node of {pool} would save nothing: the step is bound by {bound}."


def _lender_sentence(view: LenderView) -> str:
    if view.why_not:
        return f"{view.pool} lends nothing: {view.why_not}."
    use = " and ".join(f"{use:g}" for use in view.use)
    gain = percent(1 - view.step / view.without) if view.without > 0 else "nothing"
    kept = view.without - view.kept
    alone = f"{duration(kept)}" if kept > SAME_STEP * view.without else "nothing"
    worth = (
        f"{view.pool} lends {plural(view.engines, 'engine')} for {percent(view.share)} of their devices' time (use"
        f" {use}): a step of {duration(view.step)} instead of {duration(view.without)}, {gain} shorter; with training"
        f" as in the best plan without it, the loan would save {alone}"
    )
    if not view.away:
        return f"{worth}."
    return (
        f"{worth}. In {percent(view.away)} of cases traffic takes the whole loan away, and a step then takes"
        f" {duration(view.recalled)}: {duration(view.average)} on average."
    )
