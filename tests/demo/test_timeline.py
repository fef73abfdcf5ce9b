"""Journal lines as pictures: exact, from hand-made lines."""

from typing import Any

from phasesync.report import timeline
from phasesync.report.timeline import LABEL


class Story:
    """Journal lines written at given tenths of a second."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def __call__(self, at: float, rank: int, event: str, **fields: Any) -> None:
        seq = sum(line["rank"] == rank for line in self.lines)
        self.lines.append(
            {
                "event": event,
                "mono_ns": int(at * 1e9),
                "seq": seq,
                "role": "trainer",
                "rank": rank,
                "host": "vm",
                "device": f"vm/cpu{rank}",
                "epoch": 1,
                **fields,
            }
        )

    def phase(self, rank: int, name: str, since: float, until: float, **fields: Any) -> None:
        self(since, rank, "phase.start", phase=name)
        self(until, rank, "phase.end", phase=name, **fields)

    def fence(self, rank: int, name: str, since: float, until: float, generation: int = 1) -> None:
        key = {"fence": name, "scope": "world", "generation": generation}
        self(since, rank, "fence.arrive", status="ok", **key)
        self(until, rank, "fence.pass", **key)


def healthy() -> Story:
    """Rank 1 offloads for 4 s while rank 0 waits; then rank 0 resumes KV."""
    told = Story()
    for rank, until in ((0, 2.0), (1, 6.0)):
        told(0.0, rank, "epoch.begin")
        told.phase(rank, "offload", 0.0, until, free_bytes=100, capacity_bytes=100)
        told.fence(rank, "memory_released", until, 6.0)
    told.phase(0, "resume_kv", 6.0, 8.0, free_by_device={"vm/cpu0": 50, "vm/cpu1": 50})
    for rank, since in ((0, 8.0), (1, 6.0)):
        told.fence(rank, "ready_to_serve", since, 8.0, generation=2)
        told(10.0, rank, "rank.exit")
    return told


def lane(row: object) -> str:
    return str(row)[LABEL:]


def test_lanes_show_phases_and_waits_over_time() -> None:
    run = timeline.read(healthy().lines)
    rows = timeline.lanes_of(run, width=LABEL + 10)
    assert [lane(row) for row in rows] == ["|epoch 1  ", "oo····rr· ", "oooooo··  "]
    assert [str(row) for row in timeline.legend(run)] == ["o offload  r resume_kv  · waits"]


def test_bars_show_the_fullest_that_a_slice_saw() -> None:
    run = timeline.read(healthy().lines)
    assert [lane(row) for row in timeline.memory_of(run, width=LABEL + 10)] == [
        "        ▄▄",
        "        ▄▄",
    ]


def test_the_rank_that_came_last_was_waited_for() -> None:
    first, second = timeline.waited_for(timeline.read(healthy().lines))
    assert first == ("trainer/1", 4.0, "memory_released", 4.0)
    assert second == ("trainer/0", 2.0, "ready_to_serve", 2.0)


def test_who_waits_elsewhere_is_not_waited_for() -> None:
    told = Story()
    for rank in (0, 1, 2):
        told(0.0, rank, "epoch.begin")
    told.fence(2, "world_over", 0.0, 5.0, generation=9)
    told.fence(0, "memory_released", 1.0, 5.0)
    told.phase(1, "offload", 0.0, 5.0)
    told.fence(1, "memory_released", 5.0, 5.0)
    for rank in (0, 1):
        told.fence(rank, "world_over", 5.0, 5.0, generation=9)
    blamed = {each.rank: each.total_s for each in timeline.waited_for(timeline.read(told.lines))}
    assert blamed["trainer/1"] == 5.0
    assert blamed.get("trainer/0", 0.0) <= 1.0


def test_failing_dying_and_refusing_are_marked() -> None:
    told = Story()
    for rank in (0, 1, 2):
        told(0.0, rank, "epoch.begin")
    told(0.0, 0, "phase.start", phase="resume_kv")
    told(4.0, 0, "phase.progress", phase="resume_kv", refused={"device": "vm/cpu1"})
    told(5.0, 0, "phase.fail", phase="resume_kv", error_type="DeviceOutOfMemory")
    told(0.0, 1, "phase.start", phase="offload")
    told(5.0, 1, "phase.fail", phase="offload", error_type="Cancelled")
    told(6.0, 2, "phase.start", phase="offload")
    told(1.0, 1, "fence.arrive", fence="f", scope="s", generation=0, status="failed", free_bytes=7)
    for rank in (0, 1):
        told(9.99, rank, "rank.exit")
    run = timeline.read(told.lines)
    rows = [lane(row) for row in timeline.lanes_of(run, width=LABEL + 10)]
    assert rows[1:] == ["rrrrr✗    ", "ooooo!    ", "      †   "]
    assert str(timeline.legend(run)[0]).endswith("✗ fails  ! cut off  † dies")
    assert "✗" in str(timeline.memory_of(run, width=LABEL + 10)[0])


def test_phases_with_one_initial_get_letters_of_their_own() -> None:
    names = ["stage", "serve", "sleep", "sync", "resume_kv", "resume_weights", "x" * 30]
    letters = timeline.symbols(names)
    assert len(set(letters.values())) == len(names)
    assert letters["stage"] == "s"
    assert letters["resume_weights"] == "w"


def test_no_lines_at_all_are_an_empty_picture() -> None:
    run = timeline.read([])
    assert timeline.lanes_of(run)[1:] == []
    assert timeline.memory_of(run) == []
    assert timeline.waited_for(run) == []
