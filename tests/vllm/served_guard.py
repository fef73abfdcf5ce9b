"""The guard's middleware as a user writes it: named to the server, it runs in its process."""

import os

from phasesync.engines.guard import GuardMiddleware
from phasesync.engines.tickets import TicketRules
from phasesync.engines.verdicts import JournalVerdicts


class ReplicaGuard(GuardMiddleware):
    """The guard of replica 0, which reads the fences' verdicts where whoever closed them writes."""

    rules = TicketRules(
        run="run",
        scope="replica/0",
        verdicts=JournalVerdicts(os.environ["PHASESYNC_RUNS"]),
        fences={"kv_cache": ("memory_released",), "generate": ("ready_to_serve",)},
    )
