"""Logs that were mangled on their way: never an exception, never an `ok` for what is missing."""

import copy
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from phasesync.audit import Answer, audit_trace
from phasesync.core.wire import decode, encode
from phasesync.logs import lines
from phasesync.report.audit import as_json, as_text, audit_paths
from tests.audit.variants import CASES, audit_lines, expected, read
from tests.bench.audit_fuzz import MUTATIONS, once
from tests.bench.journal_maker import make

FOLDERS = (CASES, CASES.parent / "traces")
TRACES = sorted(path for folder in FOLDERS for path in folder.glob("*.jsonl"))

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.sampled_from(["0", "1", "all", "\0", "</script>", "\x1b[31m", "trainer/0", "end", "start"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
ATTRS = st.sampled_from(
    [
        "delta_gib",
        "gpus",
        "need_gib",
        "free_gib",
        "freed_gib",
        "held_gib",
        "tags",
        "level",
        "version",
        "base_version",
        "kv_version",
        "group",
        "members",
        "queued_behind",
        "waiting_for",
        "error",
        "expected_bytes",
        "received_bytes",
        "device_complete",
        "plan",
        "caller",
        "timeout_s",
        "t_s",
        "epoch",
        "call",
        "key",
        "ticket",
        "bucket",
        "handles",
        "target",
        "targets",
        "dispatch",
        "checksum",
        "part",
        "content_lost",
        "arrivals",
        "replaces",
        "output",
        "exclusive",
        "device",
        "gpu",
        "terminal",
        "source",
    ]
)


FUZZ: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.reuse, Phase.generate),
}


def sound(answer: Answer) -> None:
    """The answer is one that `--json` promises."""
    said = decode(encode(answer.to_json()))
    assert said["verdict"] in (
        "ok", "violation", "hang", "failure", "false_alarm", "inconclusive",
    )  # fmt: skip
    for name in ("guilty", "waiting", "evidence", "consequences", "record_next", "findings"):
        assert isinstance(said[name], list)
    assert as_text([answer])
    assert as_json([answer])


@settings(max_examples=150, **FUZZ)
@given(data=st.data())
def test_a_mangled_trace_is_answered(data: st.DataObject) -> None:
    trace = copy.deepcopy(read(data.draw(st.sampled_from(TRACES))))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(trace) - 1))
        line = trace[at]
        match data.draw(st.integers(0, 5)):
            case 0:
                del trace[at]
                if not trace:
                    trace = [{}]
            case 1:
                trace.insert(at, copy.deepcopy(line))
            case 2 if line:
                line[data.draw(st.sampled_from(sorted(line)))] = data.draw(VALUES)
            case 3:
                attrs = line.setdefault("attrs", {})
                if isinstance(attrs, dict):
                    attrs[data.draw(ATTRS)] = data.draw(VALUES)
            case 4:
                other = data.draw(st.integers(0, len(trace) - 1))
                trace[at], trace[other] = trace[other], trace[at]
            case _:
                line[data.draw(st.text(max_size=5))] = data.draw(VALUES)
    sound(audit_lines(trace))


@settings(max_examples=75, **FUZZ)
@given(data=st.data())
def test_mangled_bytes_are_answered(data: st.DataObject, tmp_path_factory: Any) -> None:
    raw = bytearray(data.draw(st.sampled_from(TRACES)).read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, max(0, len(raw) - 1)))
        match data.draw(st.integers(0, 3)):
            case 0:
                raw[at : at + data.draw(st.integers(1, 40))] = b""
            case 1:
                raw[at:at] = data.draw(st.binary(max_size=20))
            case 2:
                raw[at:at] = b"\0" * data.draw(st.integers(1, 50))
            case _:
                del raw[at:]
    path = tmp_path_factory.mktemp("fuzz") / "x.trace.jsonl"
    path.write_bytes(bytes(raw))
    sound(audit_trace("x", lines(path)))


@pytest.mark.parametrize("name", [n for n, w in expected(CASES).items() if w["kind"] == "ok"])
def test_an_unreadable_line_is_never_covered_by_an_ok(name: str, tmp_path: Path) -> None:
    text = (CASES / f"{name}.trace.jsonl").read_text().splitlines()
    for at in range(1, len(text)):
        path = tmp_path / f"{at}.trace.jsonl"
        path.write_text("\n".join([*text[:at], "\0\0\0\0", *text[at + 1 :]]) + "\n")
        assert audit_paths([path])[0].verdict != "ok"


# ------------------------------------------------------------------------------ journals


@cache
def lines_of(ranks: int, epochs: int) -> dict[int, bytes]:
    whole: dict[int, bytes] = {}
    for rank, data in make(ranks, epochs, 2, 2):
        whole[rank] = whole.get(rank, b"") + data
    return whole


def made(folder: Path, ranks: int = 4, epochs: int = 2) -> list[Path]:
    folder.mkdir()
    for rank, data in lines_of(ranks, epochs).items():
        (folder / f"trainer-{rank}.0.jsonl").write_bytes(data)
    return sorted(folder.glob("*.jsonl"))


def test_a_whole_run_is_ok(tmp_path: Path) -> None:
    made(tmp_path / "run")
    answer = audit_paths([tmp_path / "run"])[0]
    assert answer.verdict == "ok"
    assert not answer.findings


@pytest.mark.parametrize("lost", range(4))
def test_a_missing_journal_is_named(tmp_path: Path, lost: int) -> None:
    made(tmp_path / "run")[lost].unlink()
    answer = audit_paths([tmp_path / "run"])[0]
    assert (answer.verdict, answer.rule) == ("inconclusive", "R-DUMPSET")
    assert f"trainer/{lost}" in answer.because


@settings(max_examples=30, **FUZZ)
@given(seed=st.integers(0, 10**9))
def test_a_mangled_run_is_answered(tmp_path_factory: Any, seed: int) -> None:
    chance = random.Random(seed)
    files = made(tmp_path_factory.mktemp("run") / "run")
    for _ in range(chance.randint(1, 4)):
        path = chance.choice(files)
        raw = bytearray(path.read_bytes())
        at = chance.randrange(len(raw) + 1)
        match chance.randrange(5):
            case 0:
                del raw[at:]
            case 1:
                raw[at : at + chance.randint(1, 2000)] = b""
            case 2:
                raw[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 60)))
            case 3:
                raw[at:at] = b"\0" * 100
            case _:
                raw += raw[: at or 1]
        path.write_bytes(bytes(raw))
    for answer in audit_paths([files[0].parent]):
        sound(answer)


@settings(max_examples=30, **FUZZ)
@given(data=st.data())
def test_lines_with_odd_fields_are_answered(tmp_path_factory: Any, data: st.DataObject) -> None:
    files = made(tmp_path_factory.mktemp("run") / "run", ranks=2, epochs=1)
    path = data.draw(st.sampled_from(files))
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for _ in range(data.draw(st.integers(1, 4))):
        line = data.draw(st.sampled_from(found))
        line[data.draw(st.sampled_from(sorted(line)))] = data.draw(VALUES)
    path.write_text("".join(json.dumps(line) + "\n" for line in found))
    for answer in audit_paths([path.parent]):
        sound(answer)


@pytest.mark.parametrize("name", ["members", "devices", "place", "groups", "options", "ranks"])
def test_a_plan_line_with_an_odd_field_is_answered(tmp_path: Path, name: str) -> None:
    path = made(tmp_path / "run", ranks=2, epochs=1)[0]
    found = [json.loads(line) for line in path.read_text().splitlines()]
    plan = next(line for line in found if line["event"] == "plan")
    odd: tuple[Any, ...] = (None, [], {}, "", -1, [None], [[]], "x/y", {"a": 1}, 10**30)
    for value in odd:
        plan[name] = value
        path.write_text("".join(json.dumps(line) + "\n" for line in found))
        for answer in audit_paths([path.parent]):
            sound(answer)


def test_lost_lines_are_never_covered_by_an_ok(tmp_path: Path) -> None:
    files = made(tmp_path / "run", ranks=2, epochs=1)
    whole = {path: path.read_bytes().splitlines(keepends=True) for path in files}
    for path in files:
        for at in range(len(whole[path])):
            kept = whole[path][:at] + whole[path][at + 1 :]
            path.write_bytes(b"".join(kept))
            assert audit_paths([tmp_path / "run"])[0].verdict != "ok", (path.name, at)
        path.write_bytes(b"".join(whole[path]))


def test_two_runs_in_a_folder_are_two_answers(tmp_path: Path) -> None:
    files = made(tmp_path / "one", ranks=2, epochs=1)
    for path in files:
        other = path.read_text().replace('"run":"made"', '"run":"other"')
        (tmp_path / "one" / f"b-{path.name}").write_text(other)
    answers = audit_paths([tmp_path / "one"])
    assert [(answer.run, answer.verdict) for answer in answers] == [("made", "ok"), ("other", "ok")]
    assert len(as_json(answers)["runs"]) == 2


def test_the_same_journal_twice_is_told(tmp_path: Path) -> None:
    files = made(tmp_path / "run", ranks=2, epochs=1)
    (tmp_path / "run" / "copy.jsonl").write_bytes(files[0].read_bytes())
    answer = audit_paths([tmp_path / "run"])[0]
    assert answer.verdict == "inconclusive"
    assert "twice" in answer.because


def test_a_line_of_100_mb_does_not_fill_the_memory(tmp_path: Path) -> None:
    files = made(tmp_path / "run", ranks=2, epochs=1)
    with files[0].open("ab") as file:
        file.write(b'{"event":"' + b"x" * 100_000_000 + b'"}\n')
    answer = audit_paths([tmp_path / "run"])[0]
    assert any("longer than" in found["what"] for found in answer.findings) or (
        "longer than" in answer.because
    )


@pytest.mark.parametrize("seed", range(len(MUTATIONS)), ids=[each.__name__ for each in MUTATIONS])
def test_a_mangled_journal_is_answered_and_gaps_are_no_ok(tmp_path: Path, seed: int) -> None:
    """One of each kind; `python -m tests.bench.audit_fuzz` runs thousands."""
    assert once(seed, tmp_path)[2] is None
