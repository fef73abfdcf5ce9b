"""The last screen of a demo, made of its journals, its ending and the audit's answer."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from phasesync.demo.ending import Ending
from phasesync.demo.settings import Script
from phasesync.report import timeline
from phasesync.report.timeline import NOTICEABLE_S, Run

__all__ = ("HEIGHT", "WIDTH", "screen_of")

WIDTH = 80
HEIGHT = 40
WAITED_MAX = 3
CAUSE_MAX = 6
FEW = 4


def screen_of(
    script: Script, ending: Ending, lines: Sequence[dict[str, Any]], verdict: Sequence[str]
) -> list[Text]:
    """At most HEIGHT lines of at most WIDTH columns; only a long path is longer."""
    run = timeline.read(lines)
    above = [
        _title(script, run),
        Text(),
        *timeline.lanes_of(run, width=WIDTH),
        *timeline.legend(run, width=WIDTH),
        Text(),
        _heading(f"memory of each device ({script.sizes.capacity >> 20} MiB)"),
        *timeline.memory_of(run, width=WIDTH),
        Text(),
        *_waits(run),
        *_outputs(run, script),
        *_ranks(ending),
        Text(),
    ]
    below = _where(script.shown)
    taken = len(above) + sum(_height(row) for row in below)
    return [*above, *_verdict(verdict, HEIGHT - taken), *below]


def _height(row: Text) -> int:
    """How many lines of a terminal a row takes."""
    return max(-(-len(row) // WIDTH), 1)


def _title(script: Script, run: Run) -> Text:
    took = run.ended_s - run.began_s
    broken = "  memory_released taken away" if script.broken else ""
    text = (
        f"{script.protocol.name}: {len(script.plan.members)} ranks, {script.backend}, seed "
        f"{script.seed}, {took:.1f} s{broken}"
    )
    return Text(text, style="bold")


def _heading(text: str) -> Text:
    return Text(text, style="bold")


def _waits(run: Run) -> list[Text]:
    waits = [each for each in timeline.waited_for(run) if each.longest_s >= NOTICEABLE_S]
    if not waits:
        return [Text(f"waited for: nobody, as long as {NOTICEABLE_S:g} s at one fence")]
    return [
        Text(
            f"waited for: {each.rank}, {each.total_s:.1f} s in all, longest at {each.fence} "
            f"({each.longest_s:.1f} s)"
        )
        for each in waits[:WAITED_MAX]
    ]


def _outputs(run: Run, script: Script) -> list[Text]:
    """What `serve` proved: outputs equal to the trainer's own, unlike those of the epoch before."""
    proofs: dict[int, set[str]] = {}
    for line in run.lines:
        if line["event"] == "phase.progress" and "moved" in line:
            proofs.setdefault(int(line["epoch"]), set()).add(f"{line['role']}/{line['rank']}")
    if not proofs:
        return [Text("engine outputs: none were served")]
    counts = {epoch: len(ranks) for epoch, ranks in sorted(proofs.items())}
    return _wrapped(f"engine outputs equal the trainer's own and are new on {_spans(counts)}")


def _spans(counts: dict[int, int]) -> str:
    """`4 ranks in epochs 1 to 3, 2 in epoch 4`."""
    spans: list[list[int]] = []
    for epoch, count in counts.items():
        if spans and spans[-1][2] == count:
            spans[-1][1] = epoch
        else:
            spans.append([epoch, epoch, count])
    parts = []
    for first, last, count in spans:
        ranks = "rank" if count == 1 else "ranks"
        when = f"epoch {first}" if first == last else f"epochs {first} to {last}"
        parts.append(f"{count} {ranks} in {when}")
    return ", ".join(parts)


def _ranks(ending: Ending) -> list[Text]:
    """How ranks ended, those with the same cause together."""
    most = CAUSE_MAX if len(ending.ranks) <= FEW else CAUSE_MAX // 2
    alike: dict[tuple[str, str], list[str]] = {}
    for end in ending.ranks:
        alike.setdefault((end.how, end.cause), []).append(str(end.rank))
    rows = []
    for (how, cause), ranks in alike.items():
        text = f"{', '.join(ranks)}: {_ENDS[how]}{cause}"
        rows += _wrapped(text, most=most)
    if ending.survived_s is not None:
        rows.append(Text(f"from the kill to the end of the last rank: {ending.survived_s:.1f} s"))
    return rows


_ENDS = {"done": "done", "failed": "epoch failed: ", "died": "", "error": "error: "}


def _verdict(verdict: Sequence[str], room: int) -> list[Text]:
    rows = [row for line in verdict for row in _wrapped(line)]
    if len(rows) > room:
        rows = [*rows[: max(room - 1, 1)], Text("... the rest: the command below")][:room]
    if rows:
        rows[0].stylize("bold")
    return rows


def _where(folder: Path) -> list[Text]:
    """Never broken: whoever copies it gets what works."""
    return [
        Text(f"journals:  {folder}"),
        Text(f"audit it:  phasesync audit {shlex.quote(str(folder))}"),
    ]


def _wrapped(text: str, *, most: int = 8) -> list[Text]:
    """`text` in lines of WIDTH, broken at spaces where there are any."""
    rows: list[str] = []
    while len(text) > WIDTH:
        cut = text.rfind(" ", WIDTH // 2, WIDTH + 1)
        cut = WIDTH if cut < 0 else cut
        rows.append(text[:cut])
        text = "  " + text[cut:].lstrip()
    rows.append(text)
    if len(rows) > most:
        rows = [*rows[: most - 1], rows[most - 1][: WIDTH - 3] + "..."]
    return [Text(row) for row in rows]
