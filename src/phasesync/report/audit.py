"""Audits of files: what is read, what is asked, and what is printed for people and programs.

The first line says what happened, to whom, and whose fault it is; then the lines that prove it,
what followed, and what to record next time. Nothing that a log says reaches the terminal
unescaped.
"""

import gc
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from phasesync import logs
from phasesync.audit import Answer, audit_traces
from phasesync.audit.events import text_of
from phasesync.audit.replay import audit_journals
from phasesync.core.protocol import Protocol
from phasesync.errors import InputError, LogError, ProtocolError
from phasesync.report.around import around
from phasesync.report.stats import skew_lines
from phasesync.spec import load

__all__ = ("BAD", "WORST", "as_json", "as_text", "audit_paths", "audit_run", "exit_code")

BAD: Final = ("violation", "hang", "failure", "false_alarm")
WORST: Final = (*BAD, "inconclusive", "ok")
_OK, _BROKEN, _UNDECIDED = 0, 1, 3
_SHOWN: Final = 8
# Whose fault it is where no rank is guilty.
_NOBODY: Final = {
    "R-BUDGET": "the plan is at fault, and no rank",
    "R-TIMEOUT": "the time limit is at fault, and no rank",
    "R-SAMEPLAN": "who is right is not decidable: there is no majority",
}
_FOUND_BESIDE: Final = "protocol.yaml"
_TELLS: Final = 1000


def audit_paths(
    paths: Iterable[str | Path],
    *,
    protocol: str | Path | None = None,
    vocabulary: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    jobs: int | None = 1,
) -> list[Answer]:
    """One answer for each run in `paths`: trace files, journals, folders of them, or packs.

    `protocol` is the declaration that journals are held against; else the one beside them, else
    the shipped one of the name they give. `vocabulary` maps phase names of traces to known ones;
    `progress` is told how many bytes of all files have been read, of how many, now and then; of
    compressed files those are compressed ones. `jobs` processes read a run's
    journals; None is as many as pay.

    Raises:
        LogError: a path is not there or holds no log.
        ProtocolError: `protocol` is none.
    """
    given = load(protocol) if protocol is not None else None
    with logs.unpacked(paths) as here:
        return _audited(here, given, vocabulary, progress, jobs)


def _audited(
    paths: Sequence[logs.Shown],
    given: Protocol | None,
    vocabulary: Mapping[str, str] | None,
    progress: Callable[[int, int], None] | None,
    jobs: int | None,
) -> list[Answer]:
    found = logs.sources(paths)
    told = _telling(found, progress) if progress is not None else None
    answers = [
        answer
        for each in found
        if each.kind == "trace"
        for answer in audit_traces(each.name, logs.lines(each.path, told), vocabulary=vocabulary)
    ]
    journals = [each for each in found if each.kind == "journal"]
    for run, files in logs.by_run(journals).items():
        answers.append(_journals(run, files, given, told, jobs))
    if not answers:
        names = ", ".join(each.name for each in paths)
        raise LogError(f"{names}: no log here; give a trace or a run folder")
    return sorted(answers, key=lambda answer: WORST.index(answer.verdict))


def _journals(
    run: str,
    files: Sequence[logs.Source],
    given: Protocol | None,
    progress: Callable[[int], None] | None,
    jobs: int | None,
) -> Answer:
    _open_many(len(files))
    beside = {each.path.parent for each in files}

    def find(name: str) -> Protocol | None:
        if given is not None:
            return given
        for folder in sorted(beside):
            file = folder / _FOUND_BESIDE
            if file.is_file():
                return _loaded(file)
        return _loaded(name)

    members = set().union(*{each.members for each in files})
    declared = any(find(name) is not None for name in {each.protocol for each in files} - {""})
    with logs.reading(files, jobs=jobs, progress=progress) as ranks, _rare_collections():
        return audit_journals(run, ranks, members, find, declared=declared)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Lines become millions of short-lived values without a cycle: look for cycles less often."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _loaded(name: str | Path) -> Protocol | None:
    try:
        return load(name)
    except ProtocolError:
        return None


def _open_many(files: int) -> None:
    """Let this process hold as many files open as there are journals, where it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files + 256
    if soft < wanted and (hard == resource.RLIM_INFINITY or hard > soft):
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _telling(
    files: Sequence[logs.Source], progress: Callable[[int, int], None]
) -> Callable[[int], None]:
    """Adds up what was read of `files`, and tells it a thousand times on the way."""
    total = sum(each.path.stat().st_size for each in files)
    done = said = 0

    def more(size: int) -> None:
        nonlocal done, said
        done += size
        if (done - said) * _TELLS >= total or (done == total and said < total):
            said = done
            progress(done, total)

    return more


def audit_run(folder: Path) -> tuple[int, list[str]]:
    """Audit the journals in `folder`: the exit code, and lines for people."""
    try:
        answers = audit_paths([folder])
    except InputError as error:
        return _BROKEN, [str(error)]
    return exit_code(answers), as_text(answers, brief=True)


def exit_code(answers: Iterable[Answer], *, strict: bool = False) -> int:
    """What the process should end with: 0 ok, 1 something is wrong, 3 not decidable."""
    codes = [_code(answer, strict) for answer in answers]
    return next((code for code in (_BROKEN, _UNDECIDED) if code in codes), _OK)


def _code(answer: Answer, strict: bool) -> int:
    if answer.verdict in BAD:
        return _BROKEN
    if answer.verdict == "inconclusive" or (strict and answer.findings):
        return _UNDECIDED
    return _OK


def as_json(answers: Sequence[Answer]) -> dict[str, Any]:
    """The object that `audit --json` prints; of several runs, the worst on top."""
    top = answers[0].to_json()
    if len(answers) > 1:
        top["runs"] = [{"run": answer.run, **answer.to_json()} for answer in answers]
    return top


def as_text(
    answers: Sequence[Answer], *, brief: bool = False, paths: Sequence[str | Path] = ()
) -> list[str]:
    """The answers for people, a list of lines; with `paths`, the moments around the worst."""
    rows: list[str] = []
    for answer in answers:
        if rows:
            rows.append("")
        if len(answers) > 1:
            rows.append(f"run {text_of(answer.run, 120)}")
        rows += _one(answer, brief)
        if paths and answer is answers[0] and answer.verdict != "ok":
            rows += around(paths, answer)
    return rows


def _one(answer: Answer, brief: bool) -> list[str]:
    rows = [_headline(answer)]
    whole = answer.certainty == "in every order"
    if answer.verdict != "ok" and answer.guilty and not (brief and whole):
        rows.append(f"  {answer.certainty}{' that the log allows' if whole else ''}")
    for line in answer.evidence[: 3 if brief else _SHOWN]:
        rows.append(f"  see {text_of(line.file, 200)}:{line.line}")
    if answer.waiting:
        rows.append(f"  waiting: {', '.join(map(str, answer.waiting[:16]))}")
    if not brief:
        rows += [f"  then {text_of(each, 300)}" for each in answer.consequences[:_SHOWN]]
    told = {(line.file, line.line) for line in answer.evidence}
    told |= {_place(each) for each in answer.consequences}
    beside = [each for each in answer.findings if not _is_told(each, told)]
    for finding in beside[: 2 if brief else _SHOWN]:
        rule = f"{finding['rule']}: " if finding["rule"] else ""
        epoch = finding["epoch"]
        when = (
            "" if epoch in (None, answer.epoch) or answer.epoch is None else f"in epoch {epoch}: "
        )
        rows.append(f"  also {rule}{when}{text_of(finding['what'], 300)}")
    if not brief and all(each["least_ms"] <= 0 for each in answer.extra.get("clocks", ())):
        rows += [f"  {row}" for row in skew_lines(answer.extra.get("clocks", ()))]
    rows += [f"  record next time: {text_of(each, 200)}" for each in answer.record_next[:4]]
    return rows


def _place(consequence: str) -> tuple[str, int]:
    """The line that a consequence ends with."""
    file, _, line = consequence.rpartition("(")[2].rstrip(")").rpartition(":")
    return (file, int(line)) if line.isascii() and line.isdigit() else ("", 0)


def _is_told(finding: Mapping[str, Any], told: set[tuple[str, int]]) -> bool:
    """Whether a plain failure is a line that the answer shows already."""
    lines = [(line["file"], line["line"]) for line in finding["evidence"]]
    return finding["rule"] is None and bool(lines) and lines[0] in told


def _named(rank: object) -> str:
    return f"rank {rank}" if isinstance(rank, int) else text_of(rank, 80)


def _headline(answer: Answer) -> str:
    """What happened, to whom, and whose fault it is, in one line."""
    rule = f" {answer.rule}" if answer.rule else ""
    where = answer.fence or answer.phase
    place = f" at {text_of(where, 80)}" if where else ""
    epoch = f" in epoch {answer.epoch}" if answer.epoch is not None else ""
    guilty = f"; guilty: {', '.join(map(_named, answer.guilty[:16]))}" if answer.guilty else ""
    if not answer.guilty and answer.verdict in BAD:
        guilty = f"; {_NOBODY.get(answer.rule or '', 'nobody is known to be guilty')}"
    because = f": {text_of(answer.because, 600)}" if answer.because else ""
    return f"{answer.verdict}{rule}{place}{epoch}{guilty}{because}"
