"""Pages of a GPU that blocks of KV take with them, on a driver that is made up: it refuses every misuse."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from libra.lend.backend.device_page import LendingError

torch = pytest.importorskip("torch")

PAGE = 256  # bytes
BLOCKS = 40
SIZE = 96  # bytes of a block in a layer: pages are shared by two blocks or three
LAYOUTS = {  # a layer each: bytes to its block 0, and from a block to the next
    "layer by layer": [(0, SIZE), (BLOCKS * SIZE, SIZE), (2 * BLOCKS * SIZE, SIZE)],
    "block by block": [(0, 3 * SIZE), (SIZE, 3 * SIZE), (2 * SIZE, 3 * SIZE)],
    "padded": [(128, 2 * PAGE)],
    "one over the other": [(0, SIZE), (0, SIZE + 32)],
}


class Device:
    """Memory that two engines share."""

    def __init__(self, pages: int) -> None:
        self.free = pages


class Mapper:
    """One engine's pages, in the beginning all mapped."""

    size = PAGE

    def __init__(self, device: Device, begin: int, pages: int) -> None:
        self.addresses = begin + PAGE * np.arange(pages, dtype=np.int64)
        self.device, self.mapped, self.settled = device, set(range(pages)), False
        device.free -= pages

    def settle(self) -> None:
        self.settled = True

    def unmap(self, page: int) -> None:
        assert self.settled, "a page goes while something may touch it"
        self.mapped.remove(page)  # KeyError: it was not there
        self.device.free += 1

    def map(self, page: int) -> None:
        assert page not in self.mapped, "mapped twice"
        if not self.device.free:
            raise MemoryError
        self.device.free -= 1
        self.mapped.add(page)
        self.settled = False


def engine(views: list[tuple[int, int]], device: Device, begin: int) -> tuple[Any, Mapper, list[set[int]]]:
    """Its pages, their driver, and the pages that each block has bytes in, byte by byte."""
    from libra.lend.backend.gpu_pages import GpuPages
    from libra.lend.backend.kv_layout import KVLayout

    rows = np.array([(begin + at, stride, SIZE) for at, stride in views], dtype=np.int64)
    layout = KVLayout(BLOCKS, rows, torch.UntypedStorage(0))
    end = max(at + stride * (BLOCKS - 1) + SIZE for at, stride in views)
    under = [
        {byte // PAGE for at, stride in views for byte in range(at + stride * number, at + stride * number + SIZE)}
        for number in range(BLOCKS)
    ]
    mapper = Mapper(device, begin, -(-end // PAGE) + 1)  # vLLM's allocator rounds up
    return GpuPages(layout, mapper), mapper, under


@pytest.mark.parametrize("name", LAYOUTS)
def test_pages_are_mapped_where_a_block_has_bytes_and_memory_is_never_had_twice(name: str) -> None:
    """Against the oracle: which pages hold a byte of a block that is there."""
    views, random, refused = LAYOUTS[name], Random(name), 0
    for _ in range(15):
        device = Device(10**6)
        sides = [engine(views, device, begin) for begin in (0, 1 << 20)]
        everything = len(sides[0][1].addresses)
        gone = [list(range(1, BLOCKS)), list(range(1, BLOCKS))]
        for (pages, _, _), numbers in zip(sides, gone, strict=True):
            pages.drop(numbers)
        device.free = random.randrange(everything)  # less than both would have
        # Pages with no byte of a block, or with bytes beyond the cache, are something else's.
        lowest = min(at for at, _ in views)
        highest = max(at + stride * (BLOCKS - 1) + SIZE for at, stride in views)
        used = set().union(*sides[0][2])
        stay = {it for it in range(everything) if it not in used or it * PAGE < lowest or (it + 1) * PAGE > highest}
        for _ in range(60):
            side = random.randrange(2)
            pages, mapper, under = sides[side]
            before = set(mapper.mapped)
            if random.random() < 0.5:
                there = [it for it in range(1, BLOCKS) if it not in gone[side]]
                chosen = random.sample(there, random.randrange(len(there) + 1))
                assert pages.drop(chosen) == PAGE * len(before - mapper.mapped)
                gone[side] += chosen
            else:
                count = random.randrange(len(gone[side]) + 1)
                back = pages.restore(gone[side][len(gone[side]) - count :])
                assert 0 <= back <= count
                if back < count:
                    refused += 1
                    assert device.free < len(under[gone[side][-back - 1]])
                gone[side] = gone[side][: len(gone[side]) - back]
            present = [under[number] for number in range(BLOCKS) if number not in gone[side]]
            assert mapper.mapped == stay.union(*present)
    assert refused > 20


class Driver:
    """CUDA's part of vLLM's allocator: mappings go as they came, and each has its handle where it was told."""

    def __init__(self, handle: tuple[int, int, int, int]) -> None:
        self.mappings, self.left = {handle[2]: handle}, 10**6

    def create_and_map(self, handle: tuple[int, int, int, int]) -> None:
        _, size, address, _ = handle
        if not self.left:
            raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:109")
        assert all(address + size <= at or at + other[1] <= address for at, other in self.mappings.items())
        self.left -= 1
        self.mappings[address] = handle

    def unmap_and_release(self, handle: tuple[int, int, int, int]) -> None:
        assert self.mappings.pop(handle[2]) == handle, "a part of a mapping cannot go"
        self.left += 1


@pytest.fixture
def cumem(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("vllm", reason="the extra `cpu` is not installed")
    from vllm.device_allocator import cumem

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    return cumem


def cuda_cache(cumem: Any, monkeypatch: pytest.MonkeyPatch, tag: str = "kv_cache") -> tuple[Any, Driver]:
    """A layout whose cache vLLM's allocator has."""
    from vllm.device_allocator import AllocationData

    from libra.lend.backend import gpu_pages
    from libra.lend.backend.kv_layout import KVLayout

    memory = torch.ones(8 * PAGE, dtype=torch.uint8)
    begin = memory.data_ptr() // PAGE * PAGE  # a GPU's allocation begins with a page
    layout = KVLayout(20, np.array([(memory.data_ptr(), SIZE, SIZE)], dtype=np.int64), memory.untyped_storage())
    monkeypatch.setattr(gpu_pages, "_PAGE", PAGE)
    monkeypatch.setattr(gpu_pages.CuMemPages, "size", PAGE)
    handle = (0, 9 * PAGE, begin, 4711)
    driver = Driver(handle)
    allocator = SimpleNamespace(pointer_to_data={begin: AllocationData(handle, tag)})
    monkeypatch.setattr(cumem, "create_and_map", driver.create_and_map)
    monkeypatch.setattr(cumem, "unmap_and_release", driver.unmap_and_release)
    monkeypatch.setattr(cumem.CuMemAllocator, "get_instance", lambda: allocator)
    return layout, driver


CONFIG = SimpleNamespace(enable_cumem_allocator=True, enable_sleep_mode=False)


def test_vllms_allocation_is_mapped_page_by_page(cumem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from libra.lend.backend.gpu_pages import CuMemPages, GpuPages

    layout, driver = cuda_cache(cumem, monkeypatch)
    mapper = CuMemPages(layout, CONFIG)
    assert sorted(driver.mappings) == mapper.addresses.tolist()
    assert len({handle[3] for handle in driver.mappings.values()}) == 9  # a handle each
    pages = GpuPages(layout, mapper)
    went = pages.drop(range(1, 20))
    assert went == PAGE * (9 - len(driver.mappings)) > 4 * PAGE
    driver.left = 2
    assert 0 < pages.restore(range(1, 20)) < 19 and driver.left < 2
    monkeypatch.setattr(cumem, "create_and_map", lambda handle: (_ for _ in ()).throw(RuntimeError("CUDA Error: bad")))
    with pytest.raises(RuntimeError, match="bad"):
        pages.restore(range(1, 10))


def test_a_cache_that_vllm_does_not_map_so_is_refused(cumem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from libra.lend.backend.gpu_pages import CuMemPages

    layout, _ = cuda_cache(cumem, monkeypatch, tag="runtime")
    for config, said in (
        (SimpleNamespace(enable_cumem_allocator=False, enable_sleep_mode=False), "--enable-cumem-allocator"),
        (SimpleNamespace(), "--enable-cumem-allocator"),
        (SimpleNamespace(enable_cumem_allocator=True, enable_sleep_mode=True), "without --enable-sleep-mode"),
        (CONFIG, "did not allocate this KV cache with its cumem allocator"),
    ):
        with pytest.raises(LendingError, match=said):
            CuMemPages(layout, config)
