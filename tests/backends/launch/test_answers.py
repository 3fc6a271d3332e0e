"""Several workers asked at once: who answers in time, and who is lost for not answering."""

from __future__ import annotations

import asyncio
import time

from fakes.far_end import PATIENCE, connect

from libra.backends.grpo.membership import ask_all
from libra.backends.launch.handle import Handle
from libra.backends.transport.trainer_messages import Publish, Published


async def test_who_answered_while_the_controller_was_held_up_is_not_lost() -> None:
    lost: list[str] = []
    far_ends = [await connect(Handle, lambda name, why: lost.append(name), name) for name in ("a", "b")]
    (first, first_end), (second, second_end) = far_ends
    orders = [(first, Publish(1, 0)), (second, Publish(1, 0))]
    asking = asyncio.create_task(ask_all(orders, Published, lambda elapsed: 0.3, lambda worker: None))
    for _, end in far_ends:
        await end.receive()
    first_end.send(Published(1, 5))
    await asyncio.sleep(0.05)  # the patience with the other begins
    second_end.send(Published(1, 6))
    time.sleep(0.5)  # as in a controller that is stopped
    assert await asyncio.wait_for(asking, PATIENCE) == [Published(1, 5), Published(1, 6)]
    assert lost == []
    for handle, end in far_ends:
        handle.close()
        end.close()
