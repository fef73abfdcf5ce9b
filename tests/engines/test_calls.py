"""The thread in which an engine's blocking calls are made."""

import asyncio
import gc
import threading
from functools import partial

from phasesync.engines.calls import CallThread


def test_calls_keep_their_order_in_one_thread_that_ends_when_nobody_has_it_any_more() -> None:
    made: list[tuple[int, str]] = []

    async def main() -> None:
        calls = CallThread("one engine")

        def note(at: int) -> None:
            made.append((at, threading.current_thread().name))

        await asyncio.gather(*(calls.run(partial(note, at)) for at in range(3)))

    asyncio.run(main())
    gc.collect()
    assert made == [(at, "one engine") for at in range(3)]
    for left in threading.enumerate():
        if left.name == "one engine":
            left.join(20)
            assert not left.is_alive()
