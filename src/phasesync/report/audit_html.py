"""The audit as one page that opens offline: zoomable lanes, memory per device, a click for the
line.

Everything that a log said is data in a JSON island and becomes text nodes; nothing of it is ever
markup. The page loads nothing.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from phasesync.audit import Answer
from phasesync.core.wire import encode
from phasesync.errors import LogError
from phasesync.report.spans import Moment, Spans, moments_of

__all__ = ("page", "write_html")

_EVENTS_MAX: Final = 20_000


def write_html(paths: Sequence[str | Path], answers: Sequence[Answer], out: str | Path) -> None:
    """Write the page for `answers` on the logs at `paths`.

    Raises:
        LogError: `out` cannot be written.
    """
    text = page(answers, _near(paths, answers))
    try:
        Path(out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LogError(f"{out}: cannot be written ({error.strerror})") from error


def _near(paths: Sequence[str | Path], answers: Sequence[Answer]) -> list[Moment]:
    """The events around the fault, at most so many; the last ones where there is none."""
    wanted = {(line.file, line.line) for answer in answers for line in answer.evidence[:1]}
    before: deque[Moment] = deque(maxlen=_EVENTS_MAX // 2)
    after: list[Moment] = []
    hit = False
    for moment in moments_of(paths):
        if hit:
            after.append(moment)
            if len(after) >= _EVENTS_MAX // 2:
                break
            continue
        before.append(moment)
        hit = (moment.file, moment.line) in wanted
    return [*before, *after]


def page(answers: Sequence[Answer], moments: Iterable[Moment]) -> str:
    """The page, as text."""
    spans = Spans()
    rows: list[dict[str, Any]] = []
    memory: dict[str, list[tuple[float, float]]] = {}
    ranks: dict[str, None] = {}
    figures = "free"
    for moment in moments:
        ranks[moment.rank] = None
        figures = "held" if moment.held else figures
        for device, value in moment.memory:
            memory.setdefault(device, []).append((round(moment.us, 1), round(value, 3)))
        rows += [_row(span) for span in spans.see(moment)]
    rows += [_row(span) for span in spans.finish()]
    guilty = {str(name) for answer in answers for name in answer.guilty}
    data = {
        "answers": [{"run": answer.run, **answer.to_json()} for answer in answers],
        "ranks": sorted(ranks, key=_natural),
        "guilty": sorted(guilty | {name.rpartition("/")[2] for name in guilty}),
        "spans": rows,
        "memory": memory,
        "figures": figures,
        "end": spans.now_us,
    }
    template = files("phasesync.report").joinpath("audit.html").read_text(encoding="utf-8")
    title = answers[0].verdict if answers else "nothing"
    return template.replace("@TITLE@", escape(f"phasesync audit: {title}")).replace(
        "@DATA@", _island(data)
    )


def _island(data: object) -> str:
    """JSON that cannot end the script element that holds it, nor start a comment in it."""
    text = encode(data).decode()
    for char in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _row(span: Any) -> dict[str, Any]:
    return {
        "r": span.rank,
        "n": span.name,
        "a": round(span.began_us, 1),
        "b": round(span.ended_us, 1),
        "f": bool(span.fence),
        "h": span.how,
        "w": f"{span.file}:{span.line}",
        "e": span.epoch,
        "s": span.says,
    }


def _natural(rank: str) -> tuple[str, int, str]:
    role, _, number = rank.rpartition("/")
    return (role, int(number) if number.isdigit() else 1 << 30, number)
