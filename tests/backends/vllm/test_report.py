"""What an engine tells: each token once, in order, under its version; an end at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libra.backends.transport.engine_messages import Generated, Piece
from libra.backends.vllm.report import REPORT_SECONDS, Report, Sampled


def sampled(turn: str, *tokens: int, prefilled: int = 0, ended: bool = False) -> Sampled:
    return Sampled(turn, list(tokens), [-float(token) for token in tokens], prefilled, ended)


def piece(turn: str, version: int, *tokens: int) -> Piece:
    return Piece(turn, version, list(tokens), [-float(token) for token in tokens])


def test_the_tokens_of_iterations_are_one_piece_of_each_turn() -> None:
    report = Report(0.0)
    report.iteration([sampled("a", 1, prefilled=10), sampled("b", 2, prefilled=4)], 3)
    report.iteration([sampled("a", 5), sampled("b", 6, ended=True)], 3)
    assert report.take(1.0, 0.5) == Generated([piece("a", 3, 1, 5), piece("b", 3, 2, 6)], ["b"], 0.5, 14, 2, 4)


def test_new_weights_begin_a_new_piece() -> None:
    report = Report(0.0)
    report.iteration([sampled("a", 1), sampled("b", 2)], 3)
    report.iteration([sampled("a", 5)], 4)
    report.iteration([sampled("a", 6), sampled("b", 7)], 4)
    assert report.take(1.0, 0.5).pieces == [piece("a", 3, 1), piece("b", 3, 2), piece("a", 4, 5, 6), piece("b", 4, 7)]


def test_what_was_taken_is_not_told_again_and_the_counters_go_on() -> None:
    report = Report(0.0)
    report.iteration([sampled("a", 1, prefilled=7)], 3)
    taken = report.take(1.0, 0.5)
    report.iteration([sampled("a", 5, ended=True)], 3)
    assert report.take(2.0, 0.75) == Generated([piece("a", 3, 5)], ["a"], 0.75, 7, 2, 2)
    assert taken.pieces == [piece("a", 3, 1)]


def test_a_turn_that_is_interrupted_ends_with_what_it_has() -> None:
    report = Report(0.0)
    report.iteration([sampled("a", 1)], 3)
    report.interrupted("a")
    report.interrupted("waited")
    told = report.take(1.0, 0.5)
    assert (told.pieces, told.ended) == ([piece("a", 3, 1)], ["a", "waited"])


def test_when_it_is_due() -> None:
    report = Report(1.0)
    assert not report.due(9.0)  # nothing was done
    report.iteration([sampled("a", 1)], 0)
    assert not report.due(1.0 + REPORT_SECONDS / 2)
    assert report.due(1.0 + REPORT_SECONDS)
    report.take(2.0, 0.0)
    assert not report.due(9.0)
    report.iteration([], 0)  # part of a long prompt: no token, and a sign of life
    assert report.due(9.0)
    report.take(9.0, 0.0)
    report.interrupted("a")
    assert report.due(9.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.booleans())))
def test_each_token_is_told_once_under_its_version(script: list[tuple[str, int, bool]]) -> None:
    """Turn, by how much the version rises before the iteration, and whether the report is taken after it."""
    report, version = Report(0.0), 0
    made: dict[str, list[tuple[int, int]]] = {}
    told: dict[str, list[tuple[int, int]]] = {}

    def tell() -> None:
        for part in report.take(0.0, 0.0).pieces:
            told.setdefault(part.turn, []).extend((token, part.version) for token in part.tokens)

    for token, (turn, rise, taken) in enumerate(script):
        version += rise
        report.iteration([sampled(turn, token)], version)
        made.setdefault(turn, []).append((token, version))
        if taken:
            tell()
    tell()
    assert told == made
