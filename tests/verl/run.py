"""Start the ranks of a job, and collect what they say within a time."""

import queue
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.verl.ledger import Ledger, context
from tests.verl.rank import Job, Said, main

__all__ = ("Outcome", "run")


class Outcome:
    """What the ranks said, call by call; `waiting` are those that had not come back in time."""

    def __init__(self, job: Job, said: list[Said], runs: Path) -> None:
        self.job = job
        self.said = sorted(said, key=lambda each: (each.epoch, each.rank))
        self.runs = runs
        back = {each.rank for each in said if each.epoch == max(s.epoch for s in said)}
        self.waiting = tuple(rank for rank in range(job.ranks) if rank not in back)

    def of(self, epoch: int = 1) -> list[Said]:
        return [each for each in self.said if each.epoch == epoch]

    def outcomes(self, epoch: int = 1) -> list[str]:
        return [each.outcome for each in self.of(epoch)]

    @property
    def line(self) -> str:
        """The job's end in a few words."""
        if self.waiting:
            who = ", ".join(map(str, self.waiting))
            failed = [each for each in self.said if each.outcome != "ok"]
            why = f"rank {failed[0].rank} raised; " if failed else ""
            return f"HANGS: {why}ranks {who} still wait"
        bad = [each for each in self.said if each.outcome != "ok"]
        if not bad:
            return "passes"
        oom = [each for each in bad if each.outcome == "OOM"]
        if oom:
            return f"OOM: {oom[0].error}"
        causes = {each.cause or f"{each.outcome}: {each.error}" for each in bad}
        slowest = max(each.since_failure_s or each.seconds for each in bad)
        if len(causes) == 1 and len(bad) == self.job.ranks:
            return f"all stop in {slowest:.2f} s: {causes.pop()}"
        return f"{len(bad)} of {self.job.ranks} fail: {bad[0].error}"


def run(job: Job, tmp_path: Path, *, within_s: float = 60.0) -> Outcome:
    """Run a job to its end, or until `within_s` after its ranks have begun."""
    job = replace(job, settings={"runs": str(tmp_path / "runs"), "run": "job", **job.settings})
    processes = context()
    ledger = Ledger(processes, job.ranks)
    said: Any = processes.Queue()
    joined = processes.Barrier(job.ranks)
    failed_at = processes.Value("d", 0.0)
    tmp_path.mkdir(parents=True, exist_ok=True)
    meet = f"{tmp_path}/{secrets.token_hex(4)}:{_port()}"
    ranks = [
        processes.Process(
            target=main, args=(job, rank, ledger, meet, said, joined, failed_at), daemon=True
        )
        for rank in range(job.ranks)
    ]
    for rank in ranks:
        rank.start()
    answers: list[Said] = []
    at_work = job.ranks
    until = time.monotonic() + within_s
    while at_work and time.monotonic() < until:
        with suppress(queue.Empty):
            answer = said.get(timeout=0.2)
            answers += [answer] if answer else []
            at_work -= answer is None
    for rank in ranks:
        rank.kill()
        rank.join()
    assert answers, "no rank said anything"
    return Outcome(job, answers, tmp_path / "runs")


def _port() -> int:
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        port: int = end.getsockname()[1]
        return port
