"""Journals mangled in every way that a crash, a disk or a careless hand does it, audited.

usage: audit_fuzz.py [RUNS] [FIRST_SEED] [--jobs PROCESSES]

Never an exception; never an `ok` where the mutation took evidence away. Prints what was answered to
each kind of mutation; exits 1 on a miss.
"""

import argparse
import gzip
import multiprocessing
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.bench.journal_maker import make

from phasesync.core.wire import JsonError, decode, encode
from phasesync.errors import PhasesyncError
from phasesync.report.audit import as_json, as_text, audit_paths

HOSTILE = ("</script>", "\x1b[31m", "../../etc", "\0", "a" * 5000, "trainer/0", "\u202e", "", "{}")
VALUES: tuple[Any, ...] = (None, True, -1, 1 << 62, 0.5, [], {}, [[]], {"a": 1}, *HOSTILE)


@cache
def _made(ranks: int, epochs: int) -> tuple[bytes, ...]:
    found = [b""] * ranks
    for rank, data in make(ranks, epochs, 2, 2):
        found[rank] += data
    return tuple(found)


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def drop_lines(chance: random.Random, path: Path) -> bool:
    lines = _lines(path)
    at = chance.randrange(len(lines))
    del lines[at : at + chance.choice([1, 1, 2, 10, 50])]
    path.write_bytes(b"".join(lines))
    return True


def truncate(chance: random.Random, path: Path) -> bool:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data) - 2)])
    return True


def behead(chance: random.Random, path: Path) -> bool:
    data = path.read_bytes()
    path.write_bytes(data[chance.randrange(1, len(data)) :])
    return True


def nul_bytes(chance: random.Random, path: Path) -> bool:
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data) - 200)
    data[at : at + 200] = bytes(200)
    path.write_bytes(data)
    return True


def noise(chance: random.Random, path: Path) -> bool:
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data) - 200)
    data[at : at + 100] = chance.randbytes(100)
    path.write_bytes(data)
    return True


def cut_inside(chance: random.Random, path: Path) -> bool:
    data = path.read_bytes()
    at = chance.randrange(len(data) - 400)
    path.write_bytes(data[:at] + data[at + chance.randrange(5, 300) :])
    return not all(_is_whole(line) for line in _lines(path))


def _is_whole(line: bytes) -> bool:
    try:
        decode(line)
    except JsonError:
        return False
    return True


def lose_file(chance: random.Random, path: Path) -> bool:
    path.unlink()
    return True


def empty_file(chance: random.Random, path: Path) -> bool:
    path.write_bytes(b"")
    return True


def twice(chance: random.Random, path: Path) -> bool:
    shutil.copy(path, path.with_name("copy.jsonl"))
    return False


def swap(chance: random.Random, path: Path) -> bool:
    lines = _lines(path)
    at = chance.randrange(len(lines) - 1)
    lines[at], lines[at + 1] = lines[at + 1], lines[at]
    path.write_bytes(b"".join(lines))
    return False


def two_runs(chance: random.Random, path: Path) -> bool:
    other = path.read_bytes().replace(b'"run":"made"', b'"run":"other"')
    lines = _lines(path)
    at = chance.randrange(len(lines))
    path.write_bytes(b"".join(lines[:at]) + other + b"".join(lines[at:]))
    return False


def strange_lines(chance: random.Random, path: Path) -> bool:
    lines = _lines(path)
    for _ in range(3):
        odd = chance.choice(
            [b"\n", b"[]\n", b"7\n", b"{}\n", b'{"event":"who knows"}\n', b"\xff\xfe\n",
             b'{"event":"epoch.end"}\n', b'{"event":"epoch.begin"}\n',
             b'{"event":"journal.part"}\n', b'{"a":"' + b"x" * (2 << 20) + b'"}\n',
             b"[" * 5000 + b"\n"]
        )  # fmt: skip
        lines.insert(chance.randrange(len(lines)), odd)
    path.write_bytes(b"".join(lines))
    return False


def odd_values(chance: random.Random, path: Path) -> bool:
    lines = _lines(path)
    for _ in range(chance.choice([1, 1, 5])):
        at = chance.randrange(len(lines))
        line = decode(lines[at])
        line[chance.choice(sorted(line))] = chance.choice(VALUES)
        lines[at] = encode(line) + b"\n"
    path.write_bytes(b"".join(lines))
    return False


def no_field(chance: random.Random, path: Path) -> bool:
    lines = _lines(path)
    at = chance.randrange(len(lines))
    line = decode(lines[at])
    del line[chance.choice(sorted(line))]
    lines[at] = encode(line) + b"\n"
    path.write_bytes(b"".join(lines))
    return False


def other_ticket(chance: random.Random, path: Path) -> bool:
    lines = _lines(path)
    at = chance.choice([n for n, line in enumerate(lines) if b'"fence.pass"' in line])
    line = decode(lines[at])
    line["ticket"]["hash"] = chance.randbytes(32).hex()
    lines[at] = encode(line) + b"\n"
    path.write_bytes(b"".join(lines))
    return True


def restarted(chance: random.Random, path: Path) -> bool:
    lines = _lines(path)
    at = chance.randrange(1, len(lines))
    again = path.with_name(path.name.replace(".0.", ".1."))
    again.write_bytes(b"".join(lines[at:]).replace(b'"incarnation":0', b'"incarnation":1'))
    path.write_bytes(b"".join(lines[:at]))
    return True


def torn_gz(chance: random.Random, path: Path) -> bool:
    data = gzip.compress(path.read_bytes(), 1)
    path.with_name(path.name + ".gz").write_bytes(data[: chance.randrange(len(data) - 50)])
    path.unlink()
    return True


MUTATIONS: tuple[Callable[[random.Random, Path], bool], ...] = (
    drop_lines, truncate, behead, nul_bytes, noise, cut_inside, lose_file, empty_file, twice, swap,
    two_runs, strange_lines, odd_values, no_field, other_ticket, restarted, torn_gz,
)  # fmt: skip


def once(seed: int, folder: Path) -> tuple[str, str, str | None]:
    """The mutation of one seed: its name, the verdict, and what is wrong with that."""
    chance = random.Random(seed)
    ranks, epochs = chance.choice([(2, 2), (4, 3), (4, 6)])
    run = folder / "run"
    run.mkdir()
    paths = []
    for rank, data in enumerate(_made(ranks, epochs)):
        paths.append(run / f"trainer-{rank}.0.jsonl")
        paths[-1].write_bytes(data)
    mutation = MUTATIONS[seed % len(MUTATIONS)]
    removes = mutation(chance, chance.choice(paths))
    try:
        answers = audit_paths([run], jobs=2 if seed % 50 == 0 else 1)
        encode(as_json(answers))
        as_text(answers, paths=[run])
    except PhasesyncError as error:
        return mutation.__name__, "refused", None if "\n" not in str(error) else str(error)
    except Exception:
        return mutation.__name__, "exception", traceback.format_exc()
    verdict = answers[0].verdict
    missed = "evidence is gone, and it is ok" if removes and verdict == "ok" else None
    return mutation.__name__, verdict, missed


def tried(seed: int) -> tuple[int, str, str, str | None]:
    with tempfile.TemporaryDirectory() as folder:
        return (seed, *once(seed, Path(folder)))


def main(runs: int = 2000, first: int = 0, jobs: int = 1) -> int:
    table: Counter[tuple[str, str]] = Counter()
    missed = 0
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for seed, name, verdict, wrong in pool.imap_unordered(
            tried, range(first, first + runs), chunksize=16
        ):
            table[(name, verdict)] += 1
            if wrong is not None:
                missed += 1
                print(f"seed {seed}: {name}: {verdict}: {wrong}", flush=True)
            if (done := table.total()) % 1000 == 0:
                print(f"{done - missed} of {done}", file=sys.stderr, flush=True)
    for (name, verdict), count in sorted(table.items()):
        print(f"{name:14} -> {verdict:14} {count}")
    print(f"{runs - missed} of {runs} answered as they must be")
    return 1 if missed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=int, nargs="?", default=2000)
    parser.add_argument("first", type=int, nargs="?", default=0)
    parser.add_argument("--jobs", type=int, default=1)
    sys.exit(main(**vars(parser.parse_args())))
