"""Any text log, by a small mapping of regular expressions.

The mapping is TOML: `[[line]]` tables with `match` (a regular expression), `event`, and `phase`,
`rank`, `epoch` and `attrs`, each a text in which `{name}` stands for a group of the match. The
first line that matches wins. A mapping is data: nothing in it is executed.
"""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from phasesync.errors import InputError
from phasesync.importers.base import Course, Imported, LogLine, all_lines

__all__ = ("read",)

_EVENTS: Final = ("start", "end", "fail", "timeout", "exit", "progress")
_KEYS: Final = ("match", "event", "phase", "rank", "epoch", "role", "attrs")
_GROUP: Final = re.compile(r"\{(\w+)\}")
_MAPPING_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    match: re.Pattern[str]
    event: str
    phase: str
    rank: str
    epoch: str
    role: str
    attrs: dict[str, str]


def read(paths: Sequence[Path], mapping: Path) -> Imported:
    """The trace of text logs by the rows of `mapping`.

    Raises:
        InputError: the mapping is wrong; the message says where and what would be right.
    """
    rows = _rows(mapping)
    course = Course(mapping.stem)
    for line in all_lines(paths):
        for row in rows:
            if (found := row.match.search(line.text)) is not None:
                _put(course, row, found, line)
                break
        else:
            course.out.skipped += 1
    return course.done()


def _rows(mapping: Path) -> list[_Row]:
    try:
        raw = mapping.read_bytes()
        if len(raw) > _MAPPING_MAX:
            raise InputError(f"{mapping}: larger than 1 MiB; a mapping has a few lines")
        table = tomllib.loads(raw.decode())
    except OSError as error:
        raise InputError(f"{mapping}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{mapping}: not TOML ({error})") from error
    lines = table.get("line")
    if not isinstance(lines, list) or not lines:
        raise InputError(f"{mapping}: has no [[line]] table; each has 'match', 'event' and 'phase'")
    return [_row(mapping, number, each) for number, each in enumerate(lines, 1)]


def _row(mapping: Path, number: int, given: Any) -> _Row:
    where = f"{mapping}: [[line]] {number}"
    if not isinstance(given, dict):
        raise InputError(f"{where}: is not a table")
    for key in given:
        if key not in _KEYS:
            raise InputError(f"{where}: unknown key {key!r}; keys are: {', '.join(_KEYS)}")
    try:
        match = re.compile(str(given["match"]))
    except KeyError:
        raise InputError(f"{where}: has no 'match'") from None
    except re.error as error:
        raise InputError(f"{where}: 'match' is no regular expression ({error})") from error
    event = str(given.get("event", ""))
    if event not in _EVENTS and not _GROUP.search(event):
        raise InputError(f"{where}: 'event' is {event!r}; it must be one of: {', '.join(_EVENTS)}")
    attrs = given.get("attrs", {})
    if not isinstance(attrs, dict):
        raise InputError(f"{where}: 'attrs' is not a table")
    row = _Row(
        match=match,
        event=event,
        phase=str(given.get("phase", "{phase}")),
        rank=str(given.get("rank", "{rank}" if "rank" in match.groupindex else "")),
        epoch=str(given.get("epoch", "{epoch}" if "epoch" in match.groupindex else "")),
        role=str(given.get("role", "")),
        attrs={str(key): str(value) for key, value in attrs.items()},
    )
    for text in (row.event, row.phase, row.rank, row.epoch, row.role, *row.attrs.values()):
        for name in _GROUP.findall(text):
            if name not in match.groupindex:
                raise InputError(f"{where}: 'match' has no group {name!r}")
    return row


def _put(course: Course, row: _Row, found: re.Match[str], line: LogLine) -> None:
    said = _filled(row.rank, found)
    wanted = int(said) if said.isascii() and said.isdigit() and len(said) < 12 else line.rank
    rank = course.rank(said or line.who, wanted, _filled(row.role, found))
    epoch = _filled(row.epoch, found)
    event = _filled(row.event, found)
    if event not in _EVENTS:
        course.out.skipped += 1
        return
    attrs = {name: _value(_filled(text, found)) for name, text in row.attrs.items()}
    course.put(rank, _filled(row.phase, found), event, line, **attrs)
    if epoch.lstrip("-").isdigit() and len(epoch) < 15:
        course.out.events[-1]["epoch"] = int(epoch)


def _filled(text: str, found: re.Match[str]) -> str:
    return _GROUP.sub(lambda name: found[name[1]] or "", text)


def _value(text: str) -> Any:
    """A number where it is one, else the text; `a,b` stays text."""
    try:
        return int(text)
    except ValueError:
        try:
            value = float(text)
        except ValueError:
            return text
        return value if abs(value) < 1e18 else text
