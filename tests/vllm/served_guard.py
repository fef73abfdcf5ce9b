"""The guard's middleware as a user writes it: named to the server, it runs in its process."""

import os
from pathlib import Path

from phasesync.core.model import FenceKey, FenceVerdict, Opened
from phasesync.engines.guard import GuardMiddleware
from phasesync.engines.tickets import TicketRules, parse_ticket


def verdicts(key: FenceKey) -> FenceVerdict | None:
    """The verdict that whoever closed the fence wrote down."""
    for line in Path(os.environ["VERDICTS"]).read_text().splitlines():
        if (ticket := parse_ticket(line)).key == key:
            return Opened(ticket=ticket)
    return None


class ReplicaGuard(GuardMiddleware):
    """The guard of replica 0."""

    rules = TicketRules(
        run="run",
        scope="replica/0",
        verdicts=verdicts,
        fences={"kv_cache": ("memory_released",), "generate": ("ready_to_serve",)},
    )
