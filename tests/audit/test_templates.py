"""What is judged by a template, and as a whole, is judged as its lines would be."""

import asyncio
import random
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from phasesync.audit.gist import gist_of
from phasesync.audit.replay import _Rounds
from phasesync.audit.templates import Guess, Templates
from phasesync.core.wire import JsonError, decode
from phasesync.report.audit import audit_paths
from tests.audit.joined import run_joined
from tests.bench.audit_fuzz import MUTATIONS
from tests.bench.journal_maker import make
from tests.runtime.world import World

EPOCHS = 10
SEEDS = range(len(MUTATIONS))
SCRIBBLES = (b"0", b"9", b"-", b'"', b",", b"a", b"\n", b"\\", b"\0", b"\xff", b".", b"null")
FIELD = re.compile(rb'"([a-z_]+)":("[^"]*"|[-0-9.]+)')
VALUES = (
    b"null",
    b"-1",
    b"01",
    b"1.0",
    b"1e2",
    b'"x"',
    b"true",
    b"[]",
    b"7",
    b"99999999999999999999",
)


def epochs_of(data: bytes) -> list[bytes]:
    """The epochs of one journal, each up to the next."""
    begins = (
        rb'(?m)^\{"event":"epoch\.begin".*\n(?:(?!\{"event":"epoch).*\n)*\{"event":"epoch\.end".*\n'
    )
    return re.findall(begins, data)


@cache
def journals() -> tuple[bytes, ...]:
    ranks: dict[int, list[bytes]] = {}
    for rank, data in make(4, EPOCHS):
        ranks.setdefault(rank, []).append(data)
    return tuple(b"".join(parts) for parts in ranks.values())


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, ...]:
    """Journals of ranks that run, with marks of progress."""
    folder = tmp_path_factory.mktemp("real")
    asyncio.run(World(2, folder, epochs=12).go())
    return tuple(path.read_bytes() for path in sorted(folder.rglob("*.jsonl")))


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_joined(tmp_path_factory.mktemp("joined"), 4, 12)


def learned(texts: list[bytes]) -> Guess:
    templates = Templates()
    for text in texts:
        lines = [decode(line) for line in text.splitlines()]
        gist = gist_of(lines)
        assert gist is not None
        templates.learn(text, lines, gist)
    return templates.of_one()


def agrees(guess: Guess, text: bytes) -> bool:
    """Whether a template takes the text; then its gist is that of the lines."""
    found = guess.gist(text)
    if found is None:
        return False
    lines = [decode(line) for line in text.split(b"\n")[:-1]]
    assert found == gist_of(lines)
    return True


def scribble(chance: random.Random, text: bytes) -> bytes:
    at = chance.randrange(len(text))
    return text[:at] + chance.choice(SCRIBBLES) + text[at + chance.randrange(3) :]


def other_value(chance: random.Random, text: bytes) -> bytes:
    found = chance.choice(list(FIELD.finditer(text)))
    return text[: found.start(2)] + chance.choice(VALUES) + text[found.end(2) :]


def field_twice(chance: random.Random, text: bytes) -> bytes:
    found = chance.choice(list(FIELD.finditer(text)))
    again = chance.choice(list(FIELD.finditer(text)))
    return text[: found.end()] + b"," + again.group() + text[found.end() :]


def lines_moved(chance: random.Random, text: bytes) -> bytes:
    lines = text.splitlines(keepends=True)
    line = lines.pop(chance.randrange(len(lines)))
    for _ in range(chance.randrange(3)):
        lines.insert(chance.randrange(len(lines) + 1), line)
    return b"".join(lines)


@pytest.mark.parametrize("how", [scribble, other_value, field_twice, lines_moved])
def test_a_template_takes_nothing_that_its_lines_would_not_say(
    how: Callable[[random.Random, bytes], bytes], real: tuple[bytes, ...], joined: Path
) -> None:
    for of in (journals(), real, [path.read_bytes() for path in joined.iterdir()]):
        texts = [text for data in of for text in epochs_of(data)]
        guess = learned(texts)
        chance = random.Random(5)
        assert sum(agrees(guess, text) for text in texts) > len(texts) * 0.9
        for _ in range(200):
            try:
                agrees(guess, how(chance, chance.choice(texts)))
            except (JsonError, UnicodeDecodeError) as error:
                pytest.fail(f"a template took what is no JSON: {error}")


def audited(folder: Path) -> tuple[object, ...]:
    """The answer; where it is not known what happened, not what is supposed."""
    (answer,) = audit_paths([folder])
    if answer.verdict == "inconclusive":
        return answer.verdict, answer.guilty
    return answer.verdict, answer.rule, answer.guilty, answer.epoch, answer.because, answer.evidence


def test_what_the_caller_does_after_an_epoch_is_taken_as_a_whole_with_it(
    joined: Path, gone_through: list[str]
) -> None:
    (answer,) = audit_paths([joined])
    lines = sum(path.read_bytes().count(b"\n") for path in joined.iterdir())
    assert (answer.verdict, answer.events >= 0.9 * lines) == ("ok", True)
    assert len(gone_through) < 0.25 * lines


@pytest.mark.parametrize("epoch", [1, 6, 11])
def test_a_caller_who_did_not_join_all_is_found_in_any_epoch(
    joined: Path, tmp_path: Path, epoch: int
) -> None:
    run = Path(shutil.copytree(joined, tmp_path / "run"))
    path = run / "trainer-1.0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    own = b'"epoch":%d,' % epoch
    gone = [b'"rollout_over"' in line and own in line for line in lines]
    assert sum(gone) == 2
    path.write_bytes(b"".join(line for line, left in zip(lines, gone, strict=True) if not left))
    (answer,) = audit_paths([run])
    assert answer.verdict != "ok"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mangled_run_is_answered_as_line_by_line(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for rank, data in enumerate(journals()):
        (run / f"trainer-{rank}.0.jsonl").write_bytes(data)
    chance = random.Random(seed)
    MUTATIONS[seed % len(MUTATIONS)](chance, run / f"trainer-{chance.randrange(4)}.0.jsonl")
    fast = audited(run)
    monkeypatch.setattr(_Rounds, "_is_healthy", lambda _self, _chains: False)
    monkeypatch.setattr(Templates, "fit", lambda _self, _text: None)
    assert fast == audited(run)
