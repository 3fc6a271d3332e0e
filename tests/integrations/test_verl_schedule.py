"""The schedule policy beside verl's own, called as verl's trainer calls them, in steps of simulated time."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not here: make test-integrations")

from verl.experimental.fully_async_policy.dynamic_schedule import DynamicScheduleContext, build_policy

from libra.integrations.verl import LibraSchedulePolicy

BATCHES, BATCH, SWITCH = 4, 16, 4.0


class Trainer:
    """`FullyAsyncTrainer.fit_step`, of which only time, samples and the calls of the policy are left. `alone` and
    `shared` samples come each second from standalone and from hybrid replicas, `training` seconds take all batches."""

    def __init__(self, policy: Any, alone: float, shared: float, training: float) -> None:
        self.policy, self.alone, self.shared, self.training = policy, alone, shared, training
        self.now = self.queue = self.generated = 0.0
        self.active, self.ended, self.activations = False, [0.0], 0
        policy._clock = lambda: self.now
        policy._ratio = lambda: shared / alone
        policy._await_samples = self.await_samples
        policy.request_rebalance = lambda *_: None

    def pass_seconds(self, seconds: float) -> None:
        came = seconds * (self.alone + self.shared * self.active)
        self.now, self.queue, self.generated = self.now + seconds, self.queue + came, self.generated + came

    def await_samples(self, count: int) -> None:
        self.pass_seconds(max(0.0, count - self.queue) / (self.alone + self.shared * self.active))

    def step(self, number: int, ctx: DynamicScheduleContext) -> None:
        waits, samples = [], []
        for _ in range(BATCHES):
            if self.policy.should_deactivate(number, self.active, ctx):
                self.await_samples(self.policy.deactivate_wait_samples(ctx))
                self.active = False
                self.pass_seconds(SWITCH / 2)
                ctx.last_deactivate_duration_s += SWITCH / 2
            began, lacking = self.now, max(0, round(BATCH - self.queue))
            self.await_samples(BATCH)
            waits.append(self.now - began)
            samples.append(lacking)
            self.queue -= BATCH
            self.pass_seconds(self.training / BATCHES)
        ctx.total_generated_samples, ctx.expected_samples = int(self.generated), BATCHES * BATCH * (number + 1)
        ctx.step_wait_times, ctx.step_wait_samples = waits, samples
        if self.policy.should_activate_after_step(number, self.active, ctx):
            self.pass_seconds(SWITCH / 2)
            ctx.last_activate_duration_s += SWITCH / 2
            self.active, self.activations = True, self.activations + 1
        self.policy.update_after_step(number, ctx)
        ctx.last_activate_duration_s = ctx.last_deactivate_duration_s = 0.0
        self.ended.append(self.now)


def run(name: str, alone: float, shared: float, training: float, steps: int = 60) -> tuple[float, int]:
    """Mean seconds of the later half of the steps, and activations."""
    trainer = Trainer(build_policy(name, deactivate_ratio=0.3, only_hybrid=False), alone, shared, training)
    ctx = DynamicScheduleContext(BATCH, BATCHES, 0, 0, 0)
    for number in range(steps):
        trainer.step(number, ctx)
    return (trainer.ended[-1] - trainer.ended[steps // 2]) / (steps - steps // 2), trainer.activations


@pytest.mark.parametrize("alone", [0.25, 1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("training", [10.0, 40.0])
def test_steps_are_no_longer_than_those_of_verls_policies(alone: float, training: float) -> None:
    ours, _ = run("libra", alone, 2 * alone, training)
    theirs, _ = run("default", alone, 2 * alone, training)
    never, _ = run("static_fully_async", alone, 2 * alone, training)
    print(f"alone {alone:g}/s, training {training:g} s: libra {ours:.1f}, default {theirs:.1f}, never {never:.1f} s")
    assert ours <= 1.02 * min(theirs, never)


def test_gpus_of_a_trainer_that_is_the_bottleneck_stay_with_it() -> None:
    seconds, activations = run("libra", alone=4.0, shared=8.0, training=100.0)
    assert activations <= 1 and seconds == pytest.approx(100.0, rel=0.01)


def test_all_gpus_are_shared_where_there_are_no_others() -> None:
    policy = LibraSchedulePolicy(only_hybrid=True)
    ctx = DynamicScheduleContext(BATCH, BATCHES, 0, 0, 0, only_hybrid=True)
    assert policy.should_activate_after_step(1, False, ctx)
    policy._await_samples = lambda count: None
    assert policy.deactivate_wait_samples(ctx) == BATCH * BATCHES
