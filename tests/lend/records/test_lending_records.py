"""The record of a loan: the same rule gives the same answers again."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.lend.gate import Grant, ServingView
from libra.lend.recall import RecallPolicy
from libra.lend.records.lending import LendingAnswer, LendingTerms, LentStep, read_lending, replay
from libra.lend.traffic.envelope import Envelope
from libra.records.schema import RecordFormatError

TERMS = LendingTerms("chat", "policy", 0.08, 0.03, 0.002, Envelope(2.0, 900, 6, 4000, 5.0), RecallPolicy(1.0, 8.0))


class Longest:
    """Of a serving step: so long."""

    def __init__(self, step: float) -> None:
        self._step = step

    def longest_step(self, view: ServingView) -> float:
        return self._step

    def catch_up(self, view: ServingView) -> float:
        raise AssertionError


views = st.builds(
    lambda live, waiting, slack, queued, new: (min(live, waiting), live, slack, queued, new),
    st.integers(0, 8),
    st.integers(0, 2),
    st.one_of(st.just(math.inf), st.floats(-0.1, 0.2)),
    st.integers(0, 1200),
    st.integers(0, 4),
)


@given(
    asked=st.lists(
        st.tuples(
            views,
            st.sampled_from([0.001, 0.02, 0.7, 3.0]),
            st.sampled_from([math.inf, 0.01, 0.04]),
            st.sampled_from([None, None, None, "a grant was overstayed"]),
        ),
        max_size=40,
    )
)
def test_the_answers_of_a_record_are_given_again(tmp_path_factory: pytest.TempPathFactory, asked: list) -> None:
    path = tmp_path_factory.mktemp("record") / "lending.jsonl"
    rule, now, came, lines = TERMS.rule(), 0.0, 7, [TERMS.to_json()]
    for (waiting, live, slack, queued, new), gap, step, breach in asked:
        now, came = now + gap, came + new
        view = ServingView(live, waiting, now + slack, queued=queued, came=came)
        if breach is not None:
            rule.recall.observe(breach, now)
        line = LendingAnswer.of(view, now, step, rule.decide(view, now, Longest(step)), breach)
        assert line.view == view
        lines += [line.to_json(), LentStep(now, 0.01, 0.02, 3, False).to_json()]
    path.write_text("\n".join(lines) + "\n")
    assert replay(path).answers == len(asked)
    assert replay(path).different == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}\n", "1: this line does not belong in a lending record; give the file as `libra lend serve` or"),
        ('{"kind":"trace"}\n', "1: this line does not belong in a lending record; give"),
        (
            "words\n",
            "1: this line does not belong in a lending record (not JSON (expected value); give one object on each"
            " line); give",
        ),
        (
            "TERMS" + '{"kind":"step","at":1}\n',
            "2: this line does not belong in a lending record (step.seconds: this field is",
        ),
        (
            '{"kind":"quota","at":1.0,"held":2,"put_out":0}\n',
            "1: a lending record begins with the terms of the loan; give the file as `libra lend serve`",
        ),
    ],
)
def test_what_is_no_record_is_refused_in_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "lending.jsonl"
    path.write_text(text.replace("TERMS", TERMS.to_json() + "\n"))
    with pytest.raises(RecordFormatError) as refused:
        list(read_lending(path))
    assert str(refused.value).startswith(f"{path}:{words}") and "\n" not in str(refused.value)


def test_an_answer_that_the_rule_does_not_give_is_found(tmp_path: Path) -> None:
    view = ServingView(2, 0, 1.0)
    right = LendingAnswer.of(view, 0.0, 0.04, TERMS.rule().decide(view, 0.0, Longest(0.04)), None)
    wrong = LendingAnswer.of(view, 0.5, 0.04, Grant(0.6, 0.1), None)
    path = tmp_path / "lending.jsonl"
    path.write_text("\n".join([TERMS.to_json(), right.to_json(), wrong.to_json(), right.to_json()[:30]]))
    assert replay(path).answers == 2  # the last line was cut off
    assert replay(path).different == (3,)
    assert list(read_lending(path))[1:] == [right, wrong]
