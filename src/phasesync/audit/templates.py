"""Epochs that are written like one that is known: their gist, without a look at each line.

A healthy run writes the same lines again and again, and only times, numbers and tickets differ. A
template is the pattern of such an epoch's bytes. It may take no text that `gist_of` would not give
the very same gist for: whatever is not free here is part of the pattern, and what does not match
is read as lines.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from phasesync.audit.gist import FIXED, SAME, WEIGHED, Gist, Key, Shape
from phasesync.audit.merge import wall_ns
from phasesync.core.wire import decode, encode

__all__ = ("Guess", "Templates")

_SEEN: Final = 8  # times a shape is read as lines before it is worth a template
_KNOWN_MAX: Final = 32
_SHAPES_MAX: Final = 1024
_LINES_MAX: Final = 4096

# JSON as our encoder writes it, of ASCII alone, and numbers that no reader rounds to another one.
_WHOLE: Final = rb"(?:0|[1-9][0-9]{0,17}+)"
_NUMBER: Final = rb"-?+(?:0|[1-9][0-9]{0,17}+)(?:\.[0-9]{1,18}+)?+(?:[eE][-+]?+[0-9]{1,2}+)?+"
_INSIDE: Final = rb"[ !#-\[\]-~]*+"
_TEXT: Final = rb'"' + _INSIDE + rb'"'
_SCALAR: Final = rb"(?:" + _TEXT + rb"|" + _NUMBER + rb"|true|false|null)"
_LIST: Final = rb"\[(?:" + _SCALAR + rb"(?:," + _SCALAR + rb")*+)?+\]"
_PAIR: Final = _TEXT + rb":" + _SCALAR
_OBJECT: Final = rb"\{(?:" + _PAIR + rb"(?:," + _PAIR + rb")*+)?+\}"
_STAMP: Final = rb"[-+0-9:.TZ]++"
_HASH: Final = rb"[0-9a-f]++"
_ROW: Final = (
    rb'\["' + _INSIDE + rb'",' + _WHOLE + rb',"ok",' + _WHOLE + rb",(?:" + _WHOLE + rb"|null)\]"
)
_ROWS: Final = rb"\[" + _ROW + rb"(?:," + _ROW + rb")*+\]"
_TICKET: Final = (
    rb'\{"fence":' + _TEXT + rb',"scope":' + _TEXT + rb',"epoch":' + _WHOLE
    + rb',"generation":' + _WHOLE + rb',"count":'
)  # fmt: skip
_HEAD: Final = ("event", "level", "journal", "timestamp", "mono_ns", "seq")
_PROGRESS_SEQ: Final = re.compile(
    rb'^\{"event":"phase\.progress","level":"info","journal":1,"timestamp":"' + _STAMP
    + rb'","mono_ns":' + _WHOLE + rb',"seq":([0-9]+)', re.MULTILINE
)  # fmt: skip
# What else a line of progress says; no field may take the place of one that was looked at.
_OTHERS: Final = (
    rb',"(?!(?:' + "|".join(sorted({*_HEAD, *SAME, "phase"})).encode() + rb')")[a-z_]++":'
    + rb"(?:" + _SCALAR + rb"|" + _LIST + rb"|" + _OBJECT + rb")"
)  # fmt: skip
# What is the same each time, if it is there: a rule weighs it, or a shape holds it.
_LITERAL: Final = frozenset({*FIXED, *WEIGHED, "phase", "fence", "caller", "status", "verdict"})
_COUNTED: Final = {
    ("fence.arrive", "free_bytes"): rb"(?:" + _WHOLE + rb"|null)",
    ("fence.pass", "joined"): _WHOLE,
}
_TICKETED: Final = ("fence", "scope", "epoch", "generation", "count", "hash")

_Line = Mapping[str, Any]
_Place = tuple[object, object]


class Templates:
    """The templates that one process has made of what it read."""

    def __init__(self) -> None:
        self._known: list[_Template] = []
        self._seen: dict[Shape, int] = {}

    def of_one(self) -> "Guess":
        """For one journal: what fitted its last epoch is tried first."""
        return Guess(self)

    def fit(self, text: bytes) -> "tuple[Gist, _Template] | None":
        """The gist of an epoch's lines, each with its end, by any template that fits."""
        for each in self._known:
            if (gist := each.gist(text)) is not None:
                return gist, each
        return None

    def learn(self, text: bytes, lines: Sequence[_Line], gist: Gist) -> None:
        """Take note of an epoch that was read as lines."""
        count = self._seen.get(gist.shape, 0) + 1
        if len(self._seen) < _SHAPES_MAX or count > 1:
            self._seen[gist.shape] = count
        if count % _SEEN or count > _SEEN * _SEEN or len(lines) > _LINES_MAX:
            return
        template = _template(lines, gist.shape)
        if template is not None and template.gist(text) == gist:
            self._known.insert(0, template)
            del self._known[_KNOWN_MAX:]


class Guess:
    """One journal's epochs, by the templates of its process."""

    def __init__(self, templates: Templates) -> None:
        self._templates = templates
        self._last: _Template | None = None
        self.learn = templates.learn

    def gist(self, text: bytes) -> Gist | None:
        """The gist of an epoch's lines, each with its end; None where no template fits."""
        if self._last is not None and (gist := self._last.gist(text)) is not None:
            return gist
        found = self._templates.fit(text)
        if found is None:
            return None
        gist, self._last = found
        return gist


class _Pattern:
    """A pattern as it grows; a group is known by its place among all groups."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._count = 0

    def add(self, pattern: bytes) -> None:
        self._parts.append(pattern)

    def say(self, text: bytes) -> None:
        self._parts.append(re.escape(text))

    def name(self, name: str) -> None:
        self.say(b',"' + name.encode("ascii") + b'":')

    def open(self) -> int:
        """Begin a group, until `add(b")")`."""
        self._parts.append(b"(?P<g%d>" % self._count)
        self._count += 1
        return self._count - 1

    def group(self, pattern: bytes) -> int:
        group = self.open()
        self.add(pattern + b")")
        return group

    def text(self) -> int:
        """A string, its inside as a group."""
        self.add(b'"')
        group = self.group(_INSIDE)
        self.add(b'"')
        return group

    def again(self, group: int) -> None:
        """What that group took, once more."""
        self._parts.append(b"(?P=g%d)" % group)

    def compiled(self) -> re.Pattern[bytes]:
        return re.compile(b"".join(self._parts))


class _Template:
    """The pattern of one epoch, and which of its groups are what."""

    def __init__(self, pattern: _Pattern, shape: Shape) -> None:
        self.pattern = pattern
        self.shape = shape
        self.first: dict[str, int] = {}
        self.seqs: list[int] = []  # in the order of the lines; those of `many` hold several
        self.many: set[int] = set()
        self.keys: list[tuple[int, int]] = []  # scope, generation
        self.arrived: list[tuple[int, int, int]] = []  # key, seq, free bytes or -1
        self.passed: list[tuple[int, int, int]] = []  # key, hash, count
        self.judged: list[tuple[int, int, int]] = []  # scope, generation, rows
        self.joined: list[tuple[int, int]] = []  # key, members
        self.clock: tuple[int, int, int] | None = None  # key, two times
        self._match: Callable[[bytes], re.Match[bytes] | None] | None = None

    def compile(self) -> None:
        self._match = self.pattern.compiled().fullmatch

    def gist(self, text: bytes) -> Gist | None:
        """The gist of an epoch's lines; None where they are written in another way."""
        assert self._match is not None
        match = self._match(text)
        if match is None:
            return None
        found = match.groups(b"")
        first = self.first
        seq = int(found[first["seq"]])
        length = self._length(found, seq)
        if not length:
            return None
        keys: list[Key] = [(_text(found[a]), int(found[b])) for a, b in self.keys]
        judged = []
        for scope, generation, rows in self.judged:
            if said := found[rows]:
                key = (_text(found[scope]), int(found[generation]))
                judged.append((key, decode(said), hashlib.sha256(said).hexdigest()))
        epoch = int(found[first["epoch"]])
        clock = self.clock
        return Gist(
            role=_text(found[first["role"]]),
            rank=int(found[first["rank"]]),
            incarnation=int(found[first["incarnation"]]) if "incarnation" in first else 0,
            attempt=int(found[first["attempt"]]) if "attempt" in first else None,
            digest=_text(found[first["digest"]]) if "digest" in first else None,
            host=_text(found[first["host"]]) if "host" in first else "",
            epoch=epoch,
            version=int(found[first["version"]]) if "version" in first else epoch,
            seq=seq,
            length=length,
            shape=self.shape,
            arrived=tuple([
                (keys[key], int(found[each]), None if free < 0 else _maybe(found[free]))
                for key, each, free in self.arrived
            ]),
            passed=tuple([
                (keys[key], found[proof].decode(), int(found[count]))
                for key, proof, count in self.passed
            ]),
            judged=tuple(judged),
            joined=tuple([(keys[key], int(found[count])) for key, count in self.joined]),
            clock=None
            if clock is None
            else (
                keys[clock[0]], wall_ns(found[clock[1]].decode()), wall_ns(found[clock[2]].decode())
            ),
        )  # fmt: skip

    def _length(self, found: Sequence[bytes], seq: int) -> int:
        """How many lines there are, from `seq` on; 0 where their numbers have a gap."""
        if not any(map(found.__getitem__, self.many)):
            said = [each for group in self.seqs if (each := found[group])]
            return len(said) if b",".join(said) == _numbers(seq, len(said)) else 0
        at = seq
        for group in self.seqs:
            said = _PROGRESS_SEQ.findall(found[group]) if group in self.many else [found[group]]
            for each in said:
                if each and int(each) != at:
                    return 0
                at += bool(each)
        return at - seq


@lru_cache(maxsize=256)
def _numbers(first: int, count: int) -> bytes:
    """`count` numbers from `first` on, as lines would have them."""
    return b",".join([b"%d" % number for number in range(first, first + count)])


@lru_cache(maxsize=4096)
def _text(raw: bytes) -> str:
    return raw.decode("ascii")


def _maybe(raw: bytes) -> int | None:
    return None if raw == b"null" else int(raw)


# ------------------------------------------------------------------------------ how one is made


def _template(lines: Sequence[_Line], shape: Shape) -> _Template | None:
    """The template of an epoch that was read as lines; None where it holds what none can have."""
    try:
        return _Making(lines, shape).made()
    except (KeyError, TypeError, ValueError):
        return None


class _Making:
    """One epoch's lines into a template."""

    def __init__(self, lines: Sequence[_Line], shape: Shape) -> None:
        self.lines = lines
        self.pattern = _Pattern()
        self.template = _Template(self.pattern, shape)
        self.common = _common(lines)
        self.common_at: int | None = None
        self.tickets: dict[bytes, int] = {}
        self.fences: dict[_Place, int] = {}
        self.came = next((line for line in reversed(lines) if _is_arrival(line)), None)
        self.went = next((line for line in reversed(lines) if _has_ticket(line)), None)
        self.times: dict[str, int] = {}

    def made(self) -> _Template:
        for line in self.lines:
            event = line["event"]
            if event in ("fence.decide", "phase.progress"):
                continue  # There is room for it where it usually stands.
            if _has_ticket(line):
                self._room_to_decide(_place(line))
            self._line(line)
            if event == "phase.start":
                self._room_for_progress()
        if self.went is not None:
            if self.came is None or _place(self.came) != _place(self.went):
                raise ValueError("it came to one fence last, and left another")
            times = (self.times["fence.arrive"], self.times["fence.pass"])
            self.template.clock = (self.fences[_place(self.went)], *times)
        self.template.compile()
        return self.template

    # -------------------------------------------------------------- lines

    def _line(self, line: _Line) -> None:
        names = tuple(line)
        rest = len(_HEAD) + len(self.common)
        if names[:rest] != (*_HEAD, *self.common):
            raise ValueError("its fields stand in another order")
        event = line["event"]
        seq = self._head(event, is_timed=line is self.came or line is self.went)
        self.template.seqs.append(seq)
        place = _place(line) if event in ("fence.arrive", "fence.pass") else None
        groups: dict[str, int] = {}
        for name in names[rest:]:
            self.pattern.name(name)
            if place is not None and name in ("scope", "generation"):
                self._key(place, name, groups)
            elif name == "ticket" and type(line[name]) is dict:
                self._ticket(line[name], groups, is_made=event == "fence.pass")
            elif (event, name) in _COUNTED:
                groups[name] = self.pattern.group(_COUNTED[event, name])
            else:
                self.pattern.add(_value(name, line[name]))
        self.pattern.say(b"}\n")
        if place is None:
            return
        if place not in self.fences:
            self.fences[place] = len(self.template.keys)
            self.template.keys.append((groups["scope"], groups["generation"]))
        key = self.fences[place]
        if _is_arrival(line):
            self.template.arrived.append((key, seq, groups.get("free_bytes", -1)))
        elif _has_ticket(line):
            self.template.passed.append((key, groups["hash"], groups["count"]))
        elif event == "fence.pass":
            self.template.joined.append((key, groups["joined"]))

    def _head(self, event: str, *, is_timed: bool = False) -> int:
        """The fields that all lines have; which group the line's number is."""
        pattern = self.pattern
        pattern.say(b'{"event":%b,"level":"info","journal":1,"timestamp":"' % encode(event))
        if is_timed:
            self.times[event] = pattern.group(_STAMP)
        else:
            pattern.add(_STAMP)
        pattern.add(rb'","mono_ns":' + _WHOLE + rb',"seq":')
        seq = pattern.group(_WHOLE)
        if self.common_at is None:
            self.template.first["seq"] = seq
            self.common_at = self._common()
        else:
            pattern.again(self.common_at)
        return seq

    def _common(self) -> int:
        """What is the same on all lines, as the first one has it."""
        pattern, first = self.pattern, self.lines[0]
        group = pattern.open()
        for name in self.common:
            pattern.name(name)
            value = first[name]
            if name in SAME and type(value) is str:
                self.template.first[name] = pattern.text()
            elif name in SAME and type(value) is int:
                self.template.first[name] = pattern.group(_WHOLE)
            else:
                pattern.add(_value(name, value))
        pattern.add(b")")
        return group

    def _key(self, place: _Place, name: str, groups: dict[str, int]) -> None:
        """The scope or generation of a fence: as on the lines before that are of it."""
        known = self.fences.get(place)
        if known is not None:
            scope, generation = self.template.keys[known]
            if name == "scope":
                self.pattern.add(b'"(?P=g%d)"' % scope)
            else:
                self.pattern.again(generation)
        else:
            groups[name] = self.pattern.text() if name == "scope" else self.pattern.group(_WHOLE)

    def _ticket(self, value: _Line, groups: dict[str, int], *, is_made: bool) -> None:
        """A ticket: made at a fence and the same ever after, or one from before the epoch."""
        text = encode(value)
        known = self.tickets.get(text)
        if known is not None and not is_made:
            self.pattern.again(known)
            return
        if tuple(value) != _TICKETED:
            raise ValueError("a ticket that is written in another way")
        pattern = self.pattern
        self.tickets[text] = pattern.open()
        pattern.add(_TICKET)
        groups["count"] = pattern.group(_WHOLE)
        pattern.add(b',"hash":"')
        groups["hash"] = pattern.group(_HASH)
        pattern.add(b'"\\})')

    # -------------------------------------------------------------- lines that need not be there

    def _room_to_decide(self, place: _Place) -> None:
        """Who comes last to a fence writes down what was judged, before it passes."""
        pattern = self.pattern
        pattern.add(b"(?:")
        seq = self._head("fence.decide")
        self.template.seqs.append(seq)
        pattern.say(b',"fence":')
        pattern.add(_TEXT)
        pattern.say(b',"scope":')
        scope = pattern.text()
        pattern.say(b',"generation":')
        generation = pattern.group(_WHOLE)
        pattern.say(b',"verdict":"open","judged":')
        rows = pattern.group(_ROWS)
        pattern.add(rb"\}\n)?+")
        self.template.judged.append((scope, generation, rows))

    def _room_for_progress(self) -> None:
        pattern = self.pattern
        group = pattern.open()
        self.template.seqs.append(group)
        self.template.many.add(group)
        pattern.add(b"(?:")
        pattern.say(b'{"event":"phase.progress","level":"info","journal":1,"timestamp":"')
        pattern.add(_STAMP + rb'","mono_ns":' + _WHOLE + rb',"seq":' + _WHOLE)
        assert self.common_at is not None
        pattern.again(self.common_at)
        pattern.add(rb',"phase":' + _TEXT + rb"(?:" + _OTHERS + rb")*+" + rb"\}\n)*+)")


def _common(lines: Sequence[_Line]) -> tuple[str, ...]:
    """The fields that follow the head of every line, with the same values.

    Raises:
        ValueError: one that must be the same is not among them.
    """
    first = lines[0]
    names = tuple(first)[len(_HEAD) :]
    for line in lines[1:]:
        own = tuple(line)[len(_HEAD) :]
        same = 0
        for name, other in zip(names, own, strict=False):
            if name != other or line[name] != first[name]:
                break
            same += 1
        names = names[:same]
    if any(name in first and name not in names for name in SAME if name != "level"):
        raise ValueError("what all lines should share does not stand where they begin")
    return names


def _is_arrival(line: _Line) -> bool:
    return line["event"] == "fence.arrive" and line.get("caller") != "outside"


def _has_ticket(line: _Line) -> bool:
    return line["event"] == "fence.pass" and line.get("ticket") is not None


def _place(line: _Line) -> _Place:
    return (line["scope"], line["generation"])


def _value(name: str, value: object) -> bytes:
    """A pattern for the value of a field: whatever nobody weighs may differ."""
    if name not in _LITERAL:
        if type(value) is str:
            return _TEXT
        if type(value) is int or type(value) is float:
            return _NUMBER
    return re.escape(encode(value))
