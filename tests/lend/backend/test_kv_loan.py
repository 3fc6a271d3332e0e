"""Blocks of KV that change hands: which bytes that is, whom it concerns, and that serving does not notice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, count, islice
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from libra.lend.backend.borrower_token import BorrowerToken
from libra.lend.backend.device_page import LendingError
from libra.lend.backend.serving_token import ServingToken
from libra.sim.engine.config import EngineConfig
from libra.sim.engine.request import Chain, Request

PAGE = 4096
SCHEDULERS = "Scheduler", "AsyncScheduler"


@pytest.fixture(scope="module")
def vllm() -> Iterator[Any]:
    """vLLM's scheduler without a model. Here it has KV memory: a page a block."""
    pytest.importorskip("vllm", reason="the extra `cpu` is not installed")
    with pytest.MonkeyPatch.context() as monkeypatch, patch.dict(os.environ):  # importing vLLM sets LD_PRELOAD and more
        monkeypatch.syspath_prepend(Path(__file__).parents[3])
        import torch

        from tests.oracles.fidelity import vllm_schedule

        class WithMemory:
            def __init__(self, *, vllm_config: Any, kv_cache_config: Any, **others: Any) -> None:
                super().__init__(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **others)
                memory = torch.ones(kv_cache_config.num_blocks, 1, PAGE // 4)
                vllm_config.compilation_config.static_forward_context["attention"] = layer(memory)

        for name in SCHEDULERS:
            monkeypatch.setattr(vllm_schedule, name, type(name, (WithMemory, getattr(vllm_schedule, name)), {}))
        yield vllm_schedule


def scheduler_with(blocks: int, layers: dict[str, Any], *, groups: tuple[tuple[str, ...], ...] = ()) -> Any:
    """As much of vLLM's scheduler as says where KV is."""
    named = groups or (tuple(layers),)
    return SimpleNamespace(
        kv_cache_config=SimpleNamespace(
            num_blocks=blocks, kv_cache_groups=[SimpleNamespace(layer_names=names) for names in named]
        ),
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers)),
    )


def layer(cache: Any) -> Any:
    return SimpleNamespace(kv_cache=cache)


# name: bytes of the buffer, and for each layer (offset, shape, strides) in numbers of 4 bytes
BLOCKS, SIZE = 9, 1536  # one and a half pages a block of a layer
WHOLE = (BLOCKS, 2, 24, 32)
LAYOUTS = {
    "layer by layer": [(0, WHOLE, (SIZE, 768, 32, 1)), (BLOCKS * SIZE, WHOLE, (SIZE, 768, 32, 1))],
    "block by block": [(0, WHOLE, (2 * SIZE, 768, 32, 1)), (SIZE, WHOLE, (2 * SIZE, 768, 32, 1))],
    "two kernel blocks a block": [(0, (2 * BLOCKS, 2, 12, 32), (SIZE // 2, 384, 32, 1))],
    "tokens before heads": [(0, WHOLE, (SIZE, 32, 64, 1))],
    "one over the other": [(0, WHOLE, (SIZE, 768, 32, 1)), (0, (BLOCKS, 1, 24, 64), (SIZE, SIZE, 64, 1))],
    "padded": [(16, WHOLE, (SIZE + 512, 768, 32, 1))],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_that_are_of_dropped_blocks_alone_are_dropped(layout: str) -> None:
    torch = pytest.importorskip("torch")
    from libra.lend.backend.kv_pages import kv_pages

    views, random = LAYOUTS[layout], Random(layout)
    numbers = max(offset + shape[0] * strides[0] for offset, shape, strides in views) + 64
    for _ in range(10):
        buffer = torch.ones(numbers + 4 * PAGE, dtype=torch.float32)
        start = random.randrange(PAGE // 4)  # vLLM's buffer begins anywhere in a page
        caches = [torch.as_strided(buffer, shape, strides, start + offset) for offset, shape, strides in views]
        pages = kv_pages(scheduler_with(BLOCKS, {str(i): layer(cache) for i, cache in enumerate(caches)}))
        dropped = random.sample(range(BLOCKS), random.randrange(1, BLOCKS))
        covered = np.zeros(buffer.numel(), dtype=bool)
        for offset, shape, strides in views:
            marks = np.lib.stride_tricks.as_strided(
                covered[start + offset :], shape, [it * covered.itemsize for it in strides], writeable=True
            )
            ratio = shape[0] // BLOCKS
            for block in dropped:
                marks[block * ratio : (block + 1) * ratio] = True
        address = buffer.data_ptr() + 4 * np.arange(buffer.numel())
        whole = {page for page in np.unique(address // PAGE) if covered[address // PAGE == page].sum() == PAGE // 4}
        gone = np.isin(address // PAGE, list(whole))
        assert pages.drop(dropped) == len(whole) * PAGE
        assert np.array_equal(buffer.numpy() == 0, gone)


def test_memory_that_cannot_change_hands_is_refused() -> None:
    torch = pytest.importorskip("torch")
    from libra.lend.backend.kv_pages import kv_pages

    strided = torch.zeros(2 * 9 * 64).as_strided((9, 2, 64), (64, 9 * 64, 1))  # heads before blocks
    for layers, said in (
        ({"a": layer(torch.tensor([]))}, "runs in another process than its scheduler.*MULTIPROCESSING=0"),
        ({"a": layer([torch.zeros(9, 4), torch.zeros(9, 4)])}, r"a \(SimpleNamespace\) keeps list, not blocks of KV"),
        ({"a": layer(torch.zeros((9, 4), device="meta"))}, "KV memory on meta cannot be lent"),
        ({"a": layer(torch.zeros(10, 4))}, r"a: a KV cache of \(10, 4\) for 9 blocks is not block-outermost"),
        ({"a": layer(strided)}, "bytes of a KV block are not side by side.*VLLM_KV_CACHE_LAYOUT"),
    ):
        with pytest.raises(LendingError, match=said):
            kv_pages(scheduler_with(9, layers))
    with pytest.raises(LendingError, match="has no KV that could be lent"):
        kv_pages(scheduler_with(9, {}))
    with pytest.raises(LendingError, match="runs in another process"):
        kv_pages(scheduler_with(9, {}, groups=(("a",),)))


def test_blocks_that_are_taken_are_nobodys(vllm: Any) -> None:
    """On vLLM's own pool, amid requests that share prompts. Whoever is in the way is of the last admitted, and no more
    of them than have to go."""
    from libra.lend.backend.block_quota import BlockQuota

    put_out = shared = 0
    for seed in range(20):
        random, numbers = Random(seed), count()
        config = EngineConfig(256, 64, 4, max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=seed % 4 > 0)
        engine, prompts = vllm.VllmEngine(config), [Chain("one"), Chain("another")]
        scheduler, memory = engine.scheduler, engine.scheduler.kv_cache_manager
        quota, pool = BlockQuota(scheduler), memory.block_pool
        assert (quota.size, quota.own, quota.held, quota.block_bytes) == (64, 64, 0, PAGE)
        for _ in range(12):
            quota.give(quota.held)
            for number in islice(numbers, random.randrange(4)):
                length = random.randrange(1, 120)
                own = Chain(str(number), random.choice(prompts), random.randrange(length))
                engine.add(Request(number, 0, length, random.randrange(1, 20), chain=own))
            for _ in range(random.randrange(6)):
                if engine.unfinished:
                    engine.schedule()
                    engine.end_oldest(0)
            quota.take(random.randrange(quota.free + 1))
            quota.give(random.randrange(quota.held + 1))
            wanted = random.randrange(quota.own + 1)
            names = quota.in_the_way(wanted)
            assert names == [it.request_id for it in reversed(scheduler.running)][: len(names)]
            shared += any(block.ref_cnt > 1 for block in pool.blocks)
            for name in names:
                assert quota.free < wanted
                engine.cancel(int(name))
            assert quota.free >= wanted
            put_out += len(names)
            held = quota.held
            assert quota.take(wanted) == wanted == quota.held - held
            assert quota.own == quota.size - quota.held
            for request in scheduler.running:
                for number in chain.from_iterable(memory.get_block_ids(request.request_id)):
                    assert pool.blocks[number] not in quota._held
            assert all(block.block_hash is None for block in quota._held)
        for name in list(scheduler.requests):
            engine.cancel(int(name))
        quota.take(quota.size)
        assert quota.give(quota.size) == quota.size == quota.free == quota.own
    assert put_out > 20 and shared > 20


@pytest.mark.parametrize("caching", [False, True])
def test_serving_is_scheduled_as_if_nothing_were_lent(
    vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caching: bool
) -> None:
    """Whatever rollout asks for and holds: no request is preempted, refused or put off that would not be without it.
    With a prefix cache less may be found in it, as rollout has had the memory; then each request is still served."""
    from libra.lend.backend.kv_loan import CededKV
    from tests.oracles.fidelity.clocked import vllm_schedule
    from tests.oracles.fidelity.random_workloads import random_case

    serving, borrower = ServingToken(tmp_path / "device"), BorrowerToken(tmp_path / "device", 0.1)
    seen = dict.fromkeys(("ceded", "taken back", "preempted"), 0)

    class Lending:
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.memory = CededKV(self)
            self.memory._reserve *= random.randrange(2)  # to one that has none every burst is beyond it

        def schedule(self, *arguments: Any, **options: Any) -> Any:
            before = self.memory.view()
            asked = random.choice([0, random.randrange(before.capacity + 1), before.capacity])
            borrower.say_kv(asked, random.choice([0, before.ceded, random.randrange(before.capacity + 1)]))
            self.memory.settle(serving)
            after = borrower.look().kv if asked or before.ceded else self.memory.view()
            assert after == self.memory.view()
            assert after.ceded <= before.ceded or after.need + after.ceded + after.reserve <= after.capacity
            seen["ceded"] += after.ceded > before.ceded
            seen["taken back"] += after.ceded < min(before.ceded, asked)
            return super().schedule(*arguments, **options)

    for seed in range(25):
        config, requests = random_case(seed)
        config = replace(config, enable_prefix_caching=caching, async_scheduling=seed % 2 > 0)
        random = Random(seed)
        alone = vllm_schedule(config, requests)
        with monkeypatch.context() as patched:
            for name in SCHEDULERS:
                patched.setattr(vllm, name, type(name, (Lending, getattr(vllm, name)), {}))
            lent = vllm_schedule(config, requests)
        seen["preempted"] += sum(len(step.preempted) for step in alone)
        if caching:
            assert {it for step in lent for it in step.finished} == {it for step in alone for it in step.finished}
        else:
            assert [replace(step, free_blocks=0) for step in lent] == [replace(step, free_blocks=0) for step in alone]
    assert min(seen.values()) > 20
