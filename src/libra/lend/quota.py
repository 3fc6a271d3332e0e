"""The quota of a device's KV memory that rollout may use, and the return of this memory to serving.

Invariant: serving always gets the memory that it needs, even memory that rollout has. Rollout (`KVQuota`) leaves
serving a reserve, and returns memory at once, by halves. Rollout gets more memory only after a training step and a
quiet time, so its quota does not change with every burst. Serving (`ceded`) takes the memory that it needs; beyond the
reserve, it does not wait until rollout has released the memory.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVView:
    """A serving engine's report of its KV memory between two steps, in bytes. With the defaults nothing can be lent."""

    capacity: int = 0  # of all its blocks, ceded or not
    reserve: int = 0  # kept free: one longest prompt, and the needs of requests while rollout returns memory
    need: int = 0  # memory that its requests use, and may still take for their present tokens
    ceded: int = 0  # memory that it leaves to rollout


@dataclass(frozen=True, slots=True)
class KVLimits:
    """Bytes of one device's KV memory, and the growth rate of the lent part. Raises ValueError."""

    capacity: int  # of the serving engine (`KVView`)
    reserve: int  # of the serving engine (`KVView`)
    context: int  # one longest rollout context: a smaller loan is of no use
    addresses: int  # of all blocks of the rollout engine: a larger loan is of no use
    quiet: float  # seconds without a change before the loan grows; the growth spares serving's peak of this time
    beside: int = 0  # memory of the device that neither the serving engine nor the rollout engine's weights take

    def __post_init__(self) -> None:
        if self.reserve < 0 or self.context < 1 or self.quiet < 0:
            raise ValueError("reserve and quiet are 0 or more, context is 1 byte or more")
        if self.beside < 0:
            raise ValueError(
                f"the rollout engine's weights are {-self.beside:,} bytes more than the memory beside the serving"
                " engine: lower the serving engine's KV memory, or roll out with a smaller model"
            )
        if self.context > self.addresses:
            raise ValueError(
                f"one rollout context is {self.context:,} bytes of KV and the rollout engine has addresses for"
                f" {self.addresses:,}: shorten its max_model_len or raise its kv_cache_memory_bytes"
            )
        if self.reserve + self.context > self.capacity + self.beside:
            raise ValueError(
                f"a reserve of {self.reserve:,} and one rollout context of {self.context:,} bytes are more than the"
                f" {self.capacity + self.beside:,} of the device: shorten the rollout's max_model_len or lower the"
                " reserve (the serving engine's max_model_len and max_num_seqs)"
            )


class KVQuota:
    """Decides the bytes of KV that rollout may have. Begins with nothing lent."""

    def __init__(self, limits: KVLimits) -> None:
        self.limits = limits
        self.lent = 0  # bytes, `limits.beside` included; serving may not have ceded all of them yet
        self._changed = -float("inf")
        self._stepped = True  # a training step has passed since the loan last changed
        self._since = -float("inf")  # start of the current quiet time
        self._peaks = 0, 0  # serving's peak need in the last quiet time, and in the current one

    @property
    def asked(self) -> int:
        """Bytes that serving should cede. Rollout sends this number after it has applied the last answer."""
        return max(0, self.lent - self.limits.beside)

    def observe(self, serving: KVView, now: float) -> int:
        """Bytes that rollout may have from now on. Raises ValueError if serving needs more than the device has."""
        limits, said = self.limits, self.asked
        total = limits.capacity + limits.beside
        if not 0 <= serving.need <= total:
            raise ValueError(f"serving needs {serving.need:,} of {total:,} bytes of KV")
        if now - self._since >= limits.quiet:
            self._since, self._peaks = now, (self._peaks[1], 0)
        self._peaks = self._peaks[0], max(self._peaks[1], serving.need)
        room = max(0, total - limits.reserve - serving.need)
        if self.lent > room:
            while self.lent > room:
                self.lent //= 2
            if self.lent < limits.context:
                self.lent = 0
            self._changed, self._stepped = now, False
        elif self._stepped and now - self._changed >= limits.quiet:
            quiet = min(total - limits.reserve - max(self._peaks), limits.addresses)
            if quiet >= limits.context and quiet > self.lent:
                self.lent, self._changed, self._stepped = quiet, now, False
        # Serving may be taking back memory that it ceded beyond rollout's request, so only requested memory counts.
        return min(self.lent, limits.beside + min(serving.ceded, said))

    def trained(self) -> None:
        """A training step has passed."""
        self._stepped = True


def ceded(now: int, *, asked: int, held: int, free: int, wanted: int, reserve: int) -> int:
    """Memory that serving leaves to rollout from its next step on, in the unit of the arguments.

    `now` is the present amount. Rollout requests `asked` and still uses `held`. The part `free` of serving's memory is
    unused; requests may take `wanted` of it in the next step.
    """
    if wanted > free:
        return max(0, now - (wanted - free))
    if asked > now:
        return now + max(0, min(asked - now, free - wanted - reserve))
    return min(now, max(asked, held))
