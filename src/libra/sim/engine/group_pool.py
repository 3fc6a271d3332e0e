"""KV blocks of an engine whose layers are in several KV cache groups: vLLM's `KVCacheManager` with its coordinators.

Invariant: each group has a table for each running request, and all tables take their blocks from one pool. A hit is the
longest prefix of a context that can be found in every group. Blocks that a group no longer reads are released when
their request is scheduled, before the request takes new blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from libra.sim.engine.block_pool import BlockPool
from libra.sim.engine.flight import UnderWay
from libra.sim.engine.generation import Generation
from libra.sim.engine.group_blocks import BlockTable, GroupBlock, Known, Prefix
from libra.sim.engine.group_layout import Layout, StateLayout, WindowLayout
from libra.sim.engine.group_steps import GroupSteps
from libra.sim.engine.request import Owner, Path, Request

Key = tuple[int, Owner, int]  # group, owner of the last token, place


@dataclass(slots=True, eq=False)
class Holding:
    """Tables of a running request, one for each group."""

    tables: list[BlockTable]
    longest: int  # cached tokens of its context that at least one kind of layers found at its admission
    begun: int = 0  # its tokens before the last iteration that includes it
    step: int = 0  # number of the last iteration that includes it
    decided: int = 0  # its tokens after the last scheduled chunk of its prompt, even if it was preempted at once
    path: Path = field(default=())


class GroupPool(BlockPool):
    """A block pool that knows every block. Paths of contexts are in tokens, not in blocks. Like vLLM it releases blocks
    group by group, from the last of a context to the first."""

    __slots__ = (
        *("_ahead", "_fresh", "_held", "_kinds", "_known", "_layouts"),
        *("_line", "_longest", "_most_tokens", "_states", "_step", "_steps"),
    )

    def __init__(
        self,
        blocks: int,
        block_size: int,
        caching: bool,
        layouts: tuple[Layout, ...],
        *,
        most_tokens: int,
        ahead: bool,
    ) -> None:
        """An iteration has up to `most_tokens` tokens. `ahead`: with asynchronous scheduling."""
        super().__init__(blocks, block_size, caching)
        self.unit = 1
        self._most_tokens = most_tokens
        self._ahead = ahead
        self._steps = GroupSteps(layouts, ahead)
        self._layouts = layouts
        self._known = [Known(layout.block_size) for layout in layouts]
        self._kinds = _kinds(layouts)
        self._states = [group for group, layout in enumerate(layouts) if isinstance(layout, StateLayout)]
        self._line: OrderedDict[GroupBlock, None] = OrderedDict()  # findable blocks without holders, as they are reused
        self._held: dict[Request, Holding] = {}
        self._longest = 0  # `Holding.longest` of the last lookup
        self._step = 0
        self._fresh: set[Key] = set()  # states that this iteration computes: no other request of it can use them

    # Lookup

    def knows(self, owner: Owner) -> bool:
        return self.caching

    def find(self, path: Path, most: int) -> tuple[int, int]:
        """As `BlockPool.find`, in blocks of the alignment. The second count covers all groups. It is larger than the
        number of present blocks if a state is computed only in this iteration."""
        found, self._longest = self._hit(path, most * self.block_size)
        unheld = 0
        for group, layout in enumerate(self._layouts):
            known = self._known[group]
            for place in range(layout.first(found), found // layout.block_size):
                block = known.find(path, place)
                assert block is not None
                unheld += not block.holders
        if found and self._fresh and any(self._key(group, path, found) in self._fresh for group in self._states):
            unheld += self.blocks + 1
        return found // self.block_size, unheld

    def _hit(self, path: Path, most: int) -> tuple[int, int]:
        """(cached tokens found in all groups, the most tokens that any kind of layers found on the way). The first
        number is the fixed point of vLLM's `HybridKVCacheCoordinator.find_longest_cache_hit`."""
        kinds, longest, hit = self._kinds, 0, most
        if isinstance(self._layouts[kinds[0][0]], WindowLayout | StateLayout):  # they search from the end
            hit = min(most, min(self._known[group].extent(path) for group in kinds[0]))
        whole: dict[int, int] = {}  # found by layers that read the whole context, which are looked up once
        while True:
            current = hit
            for groups in kinds:
                layout = self._layouts[groups[0]]
                if groups[0] in whole:
                    current = min(current, whole[groups[0]])
                    continue
                current = layout.hit(Prefix([self._known[group] for group in groups], path), current)
                longest = max(longest, current)
                if type(layout) is Layout:
                    whole[groups[0]] = current
            if current >= hit:
                return current, longest
            hit = current

    def _key(self, group: int, path: Path, tokens: int) -> Key:
        """The state of a group after the first `tokens` tokens of a context."""
        owner = next(owner for owner, _, end in path if tokens <= end)
        return group, owner, tokens // self._layouts[group].block_size - 1

    # Blocks of a request

    def admit(self, request: Request, found: int) -> None:
        tokens = found * self.block_size
        path = request.path if self.caching else ()
        holding = self._held[request] = Holding([], self._longest, begun=tokens, path=path)
        for group, layout in enumerate(self._layouts):
            table = BlockTable(layout.first(tokens), tokens // layout.block_size, tokens // layout.block_size)
            for place in range(table.first, table.end):
                block = self._known[group].find(path, place)
                assert block is not None
                if block.holders:
                    self._share(block, 1)
                else:
                    del self._line[block]
                    self.findable -= 1
                block.holders += 1
                table.blocks[place] = block
            holding.tables.append(table)

    def extend(self, request: Request, tokens: int, blocks: int) -> None:
        self.take(blocks)
        holding = self._held[request]
        if tokens <= request.target:
            holding.decided = tokens
        self._extend(holding, tokens)
        self._note_states(holding, request, tokens - (self._ahead and request.flight >= 0))

    def slide(self, request: Request, computed: int, under_way: UnderWay | None) -> None:
        holding = self._held[request]
        if request.flight >= 0:
            in_flight = under_way is not None and request not in under_way.absent
        else:
            in_flight = under_way is not None and holding.step == self._step - 1
        self._slide(holding, computed, in_flight, computed <= request.target)

    def grow(
        self, running: Iterable[Request], generation: Generation, under_way: UnderWay | None, taken: int, steps: int
    ) -> None:
        for step, _, request in self._steps.events(running, generation, under_way, taken, steps):
            computed = generation.computed(request) + step
            holding = self._held[request]
            in_flight = under_way is not None and (step > 0 or request not in under_way.absent)
            self._slide(holding, computed, in_flight, computed <= request.target)
            self.take(sum(len(layout.places(table.end, computed + 1)) for layout, table in self._tables(holding)))
            self._extend(holding, computed + 1)
            self._note_states(holding, request, computed + (not self._ahead))

    def affordable(
        self,
        running: Iterable[Request],
        generation: Generation,
        under_way: UnderWay | None,
        taken: int,
        steps: int,
        free: int,
        enough: int,
    ) -> int:
        firsts: dict[tuple[Request, int], int] = {}
        for step, _, request in self._steps.events(running, generation, under_way, taken, steps):
            computed, holding = generation.computed(request) + step, self._held[request]
            for group, (layout, table) in enumerate(self._tables(holding)):
                free -= layout.new_blocks(computed, computed + 1)
                if step:
                    first, end = firsts.get((request, group), table.first), layout.first(computed - self._ahead)
                    free += _alone(table, first, end)
                    firsts[request, group] = max(first, end)
            if free < 0:
                return max(step, enough)
        return steps

    def steady(
        self, running: Iterable[Request], generation: Generation, under_way: UnderWay | None, steps: int, wanted: int
    ) -> int:
        rises, free = self._steps.rises(running, generation, under_way, steps), self.free
        if rises is None:
            return 1
        for step, rise in rises:
            free += rise
            if free >= wanted:
                return step
        return steps

    def write(self, request: Request, full: int, *, again: bool = False) -> None:
        request.written = full
        self._write(self._held[request], full * self.block_size)

    def let_go(self, request: Request, tokens: int, known: int) -> None:
        holding = self._held.pop(request)
        if self.caching:
            self._write(holding, max(known, holding.decided))
        for table in holding.tables:
            for block in reversed(table.blocks.values()):
                self._drop(block)

    def clip(self, request: Request, computed: int, tokens: int) -> int:
        """Tokens of a chunk of a prompt, at most `tokens`: it ends where a state is to be kept, as with vLLM's
        `_mamba_block_aligned_split`."""
        context = request.prompt_tokens + request.generated
        prefill = max(request.prompt_tokens, context - 1)
        if not self._states or computed >= prefill:
            return tokens
        size, end = self.block_size, computed + tokens
        if end < prefill:
            aligned = end // size * size
            if aligned > computed or size <= self._most_tokens:
                end = aligned
        holding = self._held.get(request)
        longest = self._longest if holding is None else holding.longest
        # vLLM also stops a chunk that begins inside a block at that block's end: it is the aligned end, or this stop.
        stops = [(context - 1) // size * size]
        if computed < longest < end:
            stops.append(computed + (longest - computed) // size * size)
        return max(min((stop for stop in stops if computed < stop < end), default=end) - computed, 0)

    def new_step_starts(self) -> None:
        self._step += 1
        self._fresh.clear()

    # The pool

    def take(self, blocks: int) -> None:
        blank = self.blank
        if blocks <= blank:
            self.blank = blank - blocks
            return
        self.blank = 0
        for _ in range(blocks - blank):
            if not self._line:
                raise ValueError(f"too few blocks are free: {blocks} are needed")
            block, _ = self._line.popitem(last=False)
            self.findable -= 1
            self._known[block.group].forget(block)

    def adopt(self, path: Path, blocks: int) -> int:
        raise ValueError("KV from another engine is not simulated with kv_groups: leave them out, or the transfer")

    def clear(self) -> None:
        super().clear()
        self._line.clear()
        for known in self._known:
            known.clear()

    # Elementary changes

    def _tables(self, holding: Holding) -> Iterable[tuple[Layout, BlockTable]]:
        return zip(self._layouts, holding.tables, strict=True)

    def _extend(self, holding: Holding, tokens: int) -> None:
        """Put blocks for a request's first `tokens` tokens into its tables. The blocks are taken already."""
        holding.step = self._step
        for group, (layout, table) in enumerate(self._tables(holding)):
            for place in layout.places(table.end, tokens):
                table.blocks[place] = GroupBlock(group, place)
            table.end = max(table.end, layout.blocks(tokens))

    def _slide(self, holding: Holding, computed: int, in_flight: bool, prefilled: bool) -> None:
        """Release blocks that a request no longer reads after `computed` tokens. Blocks that the current iteration
        reads stay; `prefilled`: that iteration computes a prompt's tokens."""
        known = processed = computed
        if in_flight:
            processed = holding.begun if prefilled else computed - 1
            known = computed if prefilled else computed - 1
        holding.begun = computed
        if self.caching:
            self._write(holding, known)
        for layout, table in self._tables(holding):
            first = min(layout.first(processed), table.end)
            if first > table.first:
                gone = [place for place in table.blocks if place < first]
                for place in reversed(gone):
                    self._drop(table.blocks.pop(place))
                table.first = first

    def _write(self, holding: Holding, tokens: int) -> None:
        """Let others find the blocks of a request's first `tokens` tokens."""
        tokens -= tokens % self.block_size
        for group, (layout, table) in enumerate(self._tables(holding)):
            end = tokens // layout.block_size
            for place in range(table.cached, end):
                block = table.blocks.get(place)
                if block is not None and layout.keeps(place):
                    self._known[group].add(block, holding.path)
            table.cached = max(table.cached, end)

    def _note_states(self, holding: Holding, request: Request, known: int) -> None:
        """Note the states that an iteration computes for a request, which has `known` known tokens after it."""
        if not (self._states and self.caching):
            return
        size = self.block_size
        end = known // size
        for group in self._states:
            table = holding.tables[group]
            places = [place for place in table.blocks if table.cached <= place < end]
            if end and end == (request.prompt_tokens - 1) // size and end - 1 in table.blocks:
                places.append(end - 1)  # vLLM looks at the prompt's last whole block again
            for place in places:
                self._fresh.add(self._key(group, holding.path, (place + 1) * size))

    def _share(self, block: GroupBlock, more: int) -> None:
        """Add `more` holders to a block, or remove them. `shared` counts only the first group, in blocks of the
        alignment."""
        size = self._layouts[0].block_size
        if block.group == 0 and (block.place + 1) * size % self.block_size == 0:
            self.shared += more

    def _drop(self, block: GroupBlock) -> None:
        block.holders -= 1
        if block.holders:
            self._share(block, -1)
        elif block.owner is None:
            self.blank += 1
        else:
            self.findable += 1
            self._line[block] = None


def _kinds(layouts: tuple[Layout, ...]) -> list[list[int]]:
    """Groups with equal layouts together; groups that read the whole context come first."""
    kinds: dict[tuple[bool, type[Layout], int, int, int], list[int]] = {}
    for group, layout in enumerate(layouts):
        whole = type(layout) is Layout
        key = (not whole, type(layout), layout.block_size, layout.ahead, layout.period)
        kinds.setdefault(key, []).append(group)
    return [*(it for key, it in kinds.items() if not key[0]), *(it for key, it in kinds.items() if key[0])]


def _alone(table: BlockTable, first: int, end: int) -> int:
    """Blocks from place `first` to `end` that no other request holds: they become free once this request releases
    them."""
    if end <= first:
        return 0
    later = end - max(first, table.end)  # taken until then
    held = [table.blocks.get(place) for place in range(first, min(end, table.end))]
    return max(later, 0) + sum(block is not None and block.holders == 1 for block in held)
