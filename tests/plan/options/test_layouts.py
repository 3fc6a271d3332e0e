"""The menu of layouts against one layout at a time, and its reasons against what they claim."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product

import pytest

from libra.config.recipe import Recipe
from libra.cost.sources.rates import training_rates
from libra.cost.train_batch import batch_of
from libra.cost.train_memory import training_memory
from libra.cost.train_passes import Work
from libra.cost.train_step import train_step
from libra.cost.transfer import fabric
from libra.hardware.cluster import GPUS, NodeClass
from libra.hardware.decoder import decoder
from libra.hardware.mlp import Experts
from libra.hardware.model import ModelSpec
from libra.hardware.parallel import RECOMPUTE, SHARDING, ParallelLayout
from libra.lengths import TrajectoryClass
from libra.plan.options.layout_space import device_counts, families_of, impossible, members_of
from libra.plan.options.layouts import Layouts, priced_step, rejected_layouts, training_layouts
from libra.plan.options.menu import Rejected

QWEN3_14B = decoder("Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936, False, 40960, qk_norm=True)
QWEN3_30B = decoder(
    "Qwen3-30B-A3B",
    48,
    2048,
    32,
    4,
    128,
    0,
    151936,
    False,
    40960,
    qk_norm=True,
    experts=Experts(128, 8, 768, 0),
    sparse=48,
)
SMALL = decoder("small", 6, 2048, 12, 4, 128, 8192, 151936, True, 40960)
SMALL_MOE = decoder("small-moe", 6, 2048, 12, 4, 128, 0, 151936, True, 40960, experts=Experts(12, 2, 1024, 0), sparse=6)


def nodes(count: int = 6, gpus: int = 8, gpu: str = "A800", inter: float = 25e9) -> NodeClass:
    return NodeClass(gpu.lower(), count, gpus, GPUS[gpu], GPUS[gpu].link, inter)


def classes(*kinds: tuple[float, float]) -> list[TrajectoryClass]:
    return [TrajectoryClass(p, int(n), n, n / 2, 1.0, 1.0, 1.0, 0.0, 1.0) for p, n in kinds]


SKEWED = classes((0.7, 3000), (0.25, 9000), (0.05, 30000))


def recipe(batch: int = 512, max_length: int = 40960, **fields: object) -> Recipe:
    return Recipe.model_validate({"batch": batch, "samples_per_prompt": 1, "max_length": max_length, **fields})


def every_layout(model: ModelSpec, at: NodeClass, given: Recipe) -> Iterator[ParallelLayout]:
    """The priced space, written from its description, for a cluster of up to eight nodes."""
    devices, longest = at.devices, given.max_length
    powers = [1, 2, 4, 8, 16]
    multiples = [size for size in (longest * 4**i for i in range(9)) if size <= 65536 or size == longest]
    experts = model.experts.count if model.experts else 1
    for tp, pp, cp, ep in product(powers, range(1, 17), powers, powers):
        replica = tp * pp * cp
        deep = math.ceil(model.layers / pp)
        if (pp not in powers and model.layers % pp) or deep * (pp - 1) >= model.layers:
            continue
        if at.gpus % tp or at.gpus % cp or model.tp_refusal(tp) or experts % ep:
            continue
        # Experts are divided by tp where there are not as many parts of whole ones.
        whole = model.experts is not None and tp > 1 and ep * tp <= 64 and experts % (ep * tp) == 0
        virtual = [
            v for v in range(1, 9) if v == 1 or (pp > 1 and deep % v == 0 and deep * pp - model.layers < deep / v)
        ]
        inside = at.gpus % replica == 0 and replica in (1, 2, 4, 8, 16)
        if replica > devices or not (inside or replica % at.gpus == 0):
            continue
        for dp in range(1, min(given.batch, devices // replica) + 1):
            if dp * cp % ep:
                continue
            quarter = [longest // 4] if pp > 1 and longest // 4 >= 2048 else []
            choices = product(quarter + multiples, RECOMPUTE, SHARDING, (False, True), virtual)
            for micro, recompute, sharding, chunked, parts in choices:
                if parts > 1 and dp * pp > given.batch:
                    continue
                if sharding == "zero1" or (pp == 1 and dp * cp > 1):
                    degree = ep * tp if whole else ep
                    yield ParallelLayout(tp, pp, dp, cp, degree, micro, recompute, sharding, chunked, parts, whole)


@pytest.mark.parametrize(
    ("model", "at", "given"),
    [
        (SMALL, nodes(1, 4), recipe(64, 8192)),
        (SMALL, nodes(1, 4, "L40S"), recipe(3, 40960, reference="offloaded")),
        (SMALL_MOE, nodes(2, 2), recipe(64, 16384, reference="resident")),
        (QWEN3_14B, nodes(8, 1, inter=2e8), recipe(48, 8192)),  # a pipeline is the fastest
    ],
)
def test_options_are_the_fastest_that_fit(model: ModelSpec, at: NodeClass, given: Recipe) -> None:
    menu = training_layouts(model, at, given, SKEWED)
    work = Work(
        model,
        batch_of(SKEWED, given.batch),
        given.training_bytes,
        given.reference,
        at.gpu,
        training_rates(at.gpu),
        fabric(at),
    )
    best: dict[int, float] = {}
    seen = set()
    for layout in every_layout(model, at, given):
        seen.add(layout.family)
        taken = training_memory(
            model, layout, given.max_length, at.gpu.memory, given.training_bytes, given.reference
        ).total
        if taken <= at.gpu.memory:
            seconds = train_step(work, layout).total
            best[layout.devices] = min(seconds, best.get(layout.devices, seconds))
    fastest: dict[int, float] = {}
    for devices, seconds in sorted(best.items()):
        if not fastest or seconds < min(fastest.values()):
            fastest[devices] = seconds
    assert {option.devices: option.seconds for option in menu.options} == pytest.approx(fastest)
    answered = {each.name for each in rejected_layouts(model, at, given, SKEWED)} | {
        layout.family for layout in menu.chosen.values()
    }
    assert seen <= answered


@pytest.mark.parametrize(
    ("model", "at", "given"),
    [
        (SMALL, nodes(1, 4), recipe(3, 8192)),
        (SMALL_MOE, nodes(2, 2), recipe(64, 65536)),
        (SMALL_MOE, nodes(2, 4), recipe(6, 1000)),
    ],
)
def test_the_space_is_the_one_described(model: ModelSpec, at: NodeClass, given: Recipe) -> None:
    families = families_of(model, at, given.max_length)
    owner, table = members_of(families, device_counts(at.gpus, at.count), given.batch)
    found = [table.layout(row) for row in range(len(table))]
    wanted = list(every_layout(model, at, given))
    assert len(found) == len(set(found)) == len(wanted)
    assert set(found) == set(wanted)
    assert [layout.family for layout in found] == [families.layout(int(row)).family for row in owner]


def qwen() -> Layouts:
    return training_layouts(QWEN3_14B, nodes(), recipe(), SKEWED)


def test_options_name_their_layouts() -> None:
    menu = qwen()
    assert [(option.layout, option.replicas) for option in menu.options] == list(menu.chosen)
    for option in menu.options:
        layout = menu.chosen[option.layout, option.replicas]
        assert option.layout == f"a800/{layout.family}"
        assert (option.devices, option.replicas, option.pool) == (layout.devices, layout.dp, "a800")
        assert option.publish > 1
    seconds = [option.seconds for option in menu.options]
    devices = [option.devices for option in menu.options]
    assert seconds == sorted(set(seconds), reverse=True)
    assert devices == sorted(set(devices))
    assert min(devices) >= 4  # below, 16 bytes a parameter do not fit
    assert max(devices) == 48


def reason(rejected: Sequence[Rejected], layout: str) -> str:
    (found,) = (each.reason for each in rejected if each.name == layout)
    return found


def test_an_option_takes_what_its_layout_is_priced_at() -> None:
    menu = training_layouts(QWEN3_14B, nodes(), recipe(), SKEWED)
    for option in menu.options:
        step = priced_step(QWEN3_14B, nodes(), recipe(), SKEWED, menu.chosen[option.layout, option.replicas])
        assert step.total == pytest.approx(option.seconds)
        assert 0 < step.mfu < 0.64


def test_reasons_of_what_qwen3_14b_cannot_do() -> None:
    rejected = rejected_layouts(QWEN3_14B, nodes(), recipe(), SKEWED)
    megatron = "tp1 pp1 cp1 dp* zero1 full-recompute chunked-logits 40960-token"
    assert "the largest item is weights with 29.5 GB" in reason(rejected, megatron)
    assert "it fits at no dp" in reason(rejected, "tp1 pp1 cp1 dp* zero1 40960-token")
    assert "logits" in reason(rejected, "tp1 pp1 cp1 dp* zero3 full-recompute 40960-token")
    sharded = "tp1 pp1 cp1 dp* zero3 full-recompute chunked-logits 40960-token"
    assert sharded in {layout.family for layout in qwen().chosen.values()}
    assert re.fullmatch(r"at dp 4 .*largest item is optimiser with .* GB; it fits from dp 5", reason(rejected, sharded))
    assert reason(rejected, "pp16") == "pp is 16; stages of 3 of the 40 layers leave none for the last stage"
    assert "neither a power of two that divides" in reason(rejected, "tp1 pp5 cp1")
    assert "a replica has 80 devices; there are 48" in reason(rejected, "tp8 pp10 cp1")


@pytest.mark.parametrize(("model", "reference"), [(QWEN3_14B, "none"), (QWEN3_14B, "offloaded"), (QWEN3_30B, "none")])
def test_the_least_dp_of_a_reason_is_the_least_that_fits(model: ModelSpec, reference: str) -> None:
    at, given = nodes(1), recipe(batch=24, reference=reference)
    degrees = r"tp(\d) pp(\d) cp(\d) dp\*(?: ep(\d+))? "
    pattern = re.compile(degrees + r"(zero\d)( full-recompute)?( chunked-logits)? 40960-token")
    claimed = 0
    for each in rejected_layouts(model, at, given, SKEWED):
        found, least = pattern.fullmatch(each.name), re.search(r"fits from dp (\d+)", each.reason)
        if not found or not (least or "at no dp" in each.reason):
            continue
        *given_degrees, sharding, recompute, chunked = found.groups()
        tp, pp, cp, ep = (int(degree or 1) for degree in given_degrees)
        unit = max(1, ep // cp)
        layout = ParallelLayout(tp, pp, unit, cp, ep, 40960, "full" if recompute else "none", sharding, bool(chunked))

        def fits(dp: int, layout: ParallelLayout = layout) -> bool:
            at_dp = replace(layout, dp=dp)
            room = at.gpu.memory
            return training_memory(model, at_dp, 40960, room, given.training_bytes, given.reference).total <= room

        if least:
            dp = int(least.group(1))
            assert fits(dp)
            assert dp % unit == 0
            assert dp == unit or not fits(dp - unit)
            assert ("more than the batch's 24" in each.reason) == (dp > 24 and dp > 8 // layout.replica_devices)
        else:
            assert not fits(64 * 10**6)
        claimed += 1
    assert claimed > 20


def test_every_reason_has_words_no_layout_is_named_twice_and_slower_ones_say_by_how_much() -> None:
    assert qwen() == qwen()
    all_rejected = rejected_layouts(QWEN3_14B, nodes(), recipe(), SKEWED)
    rejected = {each.name: each.reason for each in all_rejected}
    assert len(rejected) == len(all_rejected)
    assert all(reason and "\n" not in reason for reason in rejected.values())
    slower = rejected["tp8 pp1 cp1 dp* zero1 full-recompute 40960-token"]
    percent = re.search(r"slower, by ([\d.]+)% at least, than tp1 .* on \d+ devices", slower)
    assert percent and float(percent.group(1)) > 20


def test_a_trajectory_is_the_least_a_rank_gets() -> None:
    menu = training_layouts(QWEN3_14B, nodes(), recipe(batch=5), SKEWED)
    assert menu.options
    assert max(option.replicas for option in menu.options) <= 5


def test_what_fits_nowhere_has_reasons_only() -> None:
    assert training_layouts(QWEN3_14B, nodes(1, 1), recipe(), SKEWED).options == ()
    rejected = rejected_layouts(QWEN3_14B, nodes(1, 1), recipe(), SKEWED)
    assert any("it fits from dp 5, on 5 devices of which there are 1" in each.reason for each in rejected)


def test_experts_need_whole_groups() -> None:
    rejected = rejected_layouts(SMALL_MOE, nodes(1, 2), recipe(8, 8192), SKEWED)
    assert reason(rejected, "ep8") == "ep is 8; it must divide the 12 experts"
    apart = reason(rejected, "tp2 pp1 cp1 dp* ep4 etp1 zero1 8192-token")
    assert apart.startswith("ep 4 needs a dp of 2 or more; it fits from dp 2, on 4 devices of which there are 2")


@pytest.mark.parametrize(("gpus", "count"), [(8, 1), (8, 6), (8, 427), (4, 1280), (1, 3)])
def test_device_counts_are_dense_enough(gpus: int, count: int) -> None:
    counts = device_counts(gpus, count)
    assert counts[-1] == gpus * count
    assert counts[: gpus * min(8, count)] == tuple(range(1, gpus * min(8, count) + 1))
    for fewer, more in pairwise(counts):
        assert fewer < more
        assert more - fewer <= max(gpus, 0.03 * more)
    assert all(each % gpus == 0 for each in counts if each > 8 * gpus)


def test_degrees_that_no_layout_can_have_say_why() -> None:
    why = dict(impossible(SMALL, nodes(gpus=6)))
    assert why["tp4"] == "tp is 4; a group stays in its node and must divide the node's 6 GPUs"
    assert "tp2" not in why
