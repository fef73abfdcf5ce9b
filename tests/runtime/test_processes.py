"""The same trouble with real processes, real sockets and real signals."""

import random
from pathlib import Path

import pytest

from phasesync.errors import EpochFailed
from tests.runtime.test_world import LED, PHASES, audited, broken

pytest.importorskip("torch")

KINDS = ("ok", "failed", "cancelled", "killed")


@pytest.mark.parametrize("seed", range(20))
def test_trouble_in_real_processes(tmp_path: Path, seed: int) -> None:
    from tests.runtime.processes import Trouble, play

    chance = random.Random(seed)
    phase = chance.choice(PHASES)
    number = chance.randrange(4)
    if phase in LED:
        number -= number % 2
    trouble = Trouble(KINDS[seed % 4], number, phase, chance.choice([1, 2]), seed)
    outcome = play(4, f"seed-{seed}", tmp_path, trouble)
    assert broken(tmp_path / f"seed-{seed}") == []
    injected = ("failure", (f"trainer/{number}",), phase, trouble.epoch)
    expected = ("ok", (), None, None) if trouble.kind == "ok" else injected
    assert audited(tmp_path / f"seed-{seed}") == expected
    if trouble.kind == "ok":
        assert outcome.said == [["ok", "ok"]] * 4
        return
    others = [said for at, said in enumerate(outcome.said) if at != number]
    failures = [each for said in others for each in said or () if isinstance(each, EpochFailed)]
    assert len(failures) == 3
    causes = {failed.cause for failed in failures}
    assert len(causes) == 1
    (cause,) = causes
    assert [rank.number for rank in cause.ranks] == [number]
    match trouble.kind:
        case "failed":
            assert (cause.kind, cause.phase) == ("failed", phase)
            assert all(said is not None and len(said) == 2 for said in outcome.said)
        case "cancelled":
            assert cause.kind == "cancelled"
            assert (outcome.said[number] or [""])[-1] == "cancelled"
        case _:
            assert cause.kind == "dead"
            assert outcome.said[number] is None
            assert {failed.replace for failed in failures} == {cause.ranks}
            # The launcher connects when it has seen the death, and a store looks up who connects.
            assert outcome.late_s < 12


def test_a_frozen_rank_is_missed_at_the_deadline(tmp_path: Path) -> None:
    from tests.runtime.processes import Trouble, play

    outcome = play(4, "frozen", tmp_path, Trouble("frozen", 1, "offload", 2, 0))
    for number in (0, 2, 3):
        said = outcome.said[number]
        assert said is not None
        assert said[0] == "ok"
        assert isinstance(said[1], EpochFailed)
        assert said[1].cause.kind == "deadline"
        assert said[1].cause.ranks == said[1].replace == (("trainer", 1),)
    assert broken(tmp_path / "frozen") == []


def test_a_lost_store_fails_every_rank_and_nobody_goes_on(tmp_path: Path) -> None:
    from tests.runtime.processes import Trouble, play

    outcome = play(4, "store", tmp_path, Trouble("store", 2, "offload", 1, 0))
    for said in outcome.said:
        assert said is not None
        assert isinstance(said[0], EpochFailed)
        assert said[0].cause.kind == "store_lost"
        assert (said[0].groups, said[0].can_retry) == ("lost", False)
    assert broken(tmp_path / "store") == []
