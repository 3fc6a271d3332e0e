"""What micro-batches take that go round, visited event by event, against closed forms: equal in every case."""

from fractions import Fraction
from random import Random

from oracles.micro_batches import alike_makespan, makespan

CASES = 10_000
FAR = 120  # layers after which rings of five micro-batches repeat themselves
SPAN = 60  # a multiple of 1 to 6, so that a period of several layers is met whole

Times = list[list[int]]


def serial_of(random: Random) -> tuple[bool, ...]:
    """Whether links carry one micro-batch at a time; attention and FFN always do."""
    links = random.random() < 0.5
    return True, links, True, links


def cycle_mean(times: Times, serial: tuple[bool, ...]) -> Fraction:
    """The most ticks for each layer on any cycle of events that wait for each other, over layers (Karp 1978).

    An event is the start of a micro-batch in a stage. It waits for its start in the stage before, and in a serial stage
    for the start of the micro-batch before; round the corner, the one in the layer before.
    """
    stages, count = len(times), len(times[0])
    names = [(s, i) for s in range(stages) for i in range(count)]
    place = {name: at for at, name in enumerate(names)}
    direct: list[tuple[int, int, int]] = []  # within a layer
    later: list[tuple[int, int, int]] = []  # into the next
    for s, i in names:
        (direct if s + 1 < stages else later).append((place[s, i], place[(s + 1) % stages, i], times[s][i]))
        if serial[s]:
            (direct if i + 1 < count else later).append((place[s, i], place[s, (i + 1) % count], times[s][i]))
    # Longest ways that change the layer once, from each event to each: a matrix whose cycle mean is asked for.
    once: dict[tuple[int, int], int] = {}
    for source in range(len(names)):
        reach = {source: 0}
        for s, t, ticks in sorted(direct, key=lambda it: sum(names[it[0]])):
            if s in reach:
                reach[t] = max(reach.get(t, 0), reach[s] + ticks)
        for s, t, ticks in later:
            if s in reach:
                once[source, t] = max(once.get((source, t), 0), reach[s] + ticks)
    best: list[dict[int, int]] = [{place[0, 0]: 0}]
    for _ in names:
        row: dict[int, int] = {}
        for (s, t), ticks in once.items():
            if s in best[-1]:
                row[t] = max(row.get(t, 0), best[-1][s] + ticks)
        best.append(row)
    size = len(names)
    return max(
        min(Fraction(most - best[k][at], size - k) for k in range(size) if at in best[k])
        for at, most in best[size].items()
    )


def test_alike_micro_batches_take_what_the_closed_form_says() -> None:
    random = Random(1)
    for _ in range(CASES):
        serial, count, layers = serial_of(random), random.randint(1, 5), random.randint(1, 12)
        stages = [random.randint(1, 100) for _ in serial]
        visited = makespan([[ticks] * count for ticks in stages], serial, layers)
        assert visited == alike_makespan(stages, serial, count, layers), (stages, serial, count, layers)


def test_the_period_of_alike_ones_is_the_longest_stage_or_the_way_round() -> None:
    random = Random(2)
    for _ in range(1000):
        serial, count = serial_of(random), random.randint(1, 5)
        stages = [random.randint(1, 100) for _ in serial]
        longest = max(ticks for ticks, one in zip(stages, serial, strict=True) if one)
        period = alike_makespan(stages, serial, count, 8) - alike_makespan(stages, serial, count, 7)
        assert period == max(count * longest, sum(stages))


def test_unequal_ones_have_the_period_of_the_largest_cycle_mean_which_the_bound_of_alike_ones_misses() -> None:
    random = Random(3)
    worst = Fraction(1)
    for _ in range(1000):
        serial, count = serial_of(random), random.randint(1, 4)
        times = [[random.randint(1, 100) for _ in range(count)] for _ in serial]
        period = Fraction(makespan(times, serial, FAR + SPAN) - makespan(times, serial, FAR), SPAN)
        assert period == cycle_mean(times, serial), (times, serial)
        rows = max(sum(row) for row, one in zip(times, serial, strict=True) if one)
        bound = max(rows, max(map(sum, zip(*times, strict=True))))
        assert period >= bound
        worst = max(worst, period / bound)
    assert 1.1 < worst < 4 / 3
