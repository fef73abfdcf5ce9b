"""The benchmark measures what it says it does, on two processes."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from phasesync.bench.barriers import gpus
from phasesync.bench.clients import bench_clients, clients_table
from phasesync.bench.fence import Row, bench_fence, table
from phasesync.bench.steps import step_costs
from phasesync.cli import cli
from phasesync.errors import InputError


def test_variants_are_measured_in_one_run_and_nobody_is_released_early() -> None:
    variants = ("store", "tcp", "to_thread(dist.barrier)")
    rows = bench_fence((2,), variants=variants, rounds=2, fences=5)
    assert [row.variant for row in rows] == list(variants)
    for row in rows:
        assert row.fences == 10
        assert row.early == 0
        assert 0 < row.least_ms <= row.p50_ms <= row.most_ms
    shown = table(rows)
    assert all(name in shown for name in variants)
    assert "N=2" in shown


def test_replicas_meet_by_themselves() -> None:
    (row,) = bench_fence((4,), variants=("store",), replica_size=2, rounds=1, fences=3)
    assert (row.scope, row.fences, row.early) == ("replica of 2", 6, 0)


def test_what_a_machine_lacks_is_said_before_anything_is_measured() -> None:
    if gpus() < 2:
        with pytest.raises(InputError, match=r"'nccl barrier' cannot .* a GPU and NCCL for each"):
            bench_fence((2,), variants=("nccl barrier",))


def test_kept_figures_are_shown_again(tmp_path: Path) -> None:
    row = {"variant": "store", "size": 2, "scope": "world", "fences": 1, "early": 0, "foreign": 0}
    costs = {"p50_ms": 0.5, "p99_ms": 1.0, "least_ms": 0.5, "most_ms": 1.0}
    kept = tmp_path / "rows.json"
    kept.write_text(json.dumps({"bench": "fence", "rows": [row | costs]}))
    shown = CliRunner().invoke(cli, ["bench", "fence", "--from", str(kept)])
    assert "store" in shown.output, shown.output
    assert "0.50 / 1.00" in shown.output


def test_an_unknown_variant_is_named() -> None:
    with pytest.raises(InputError, match=r"no fence 'nope' to measure; there are: store, tcp"):
        bench_fence((2,), variants=("nope",))


def test_a_table_shows_what_was_not_measured_as_a_dash() -> None:
    row = Row(
        variant="store",
        size=2,
        fences=1,
        p50_ms=0.5,
        p99_ms=1.0,
        least_ms=0.5,
        most_ms=1.0,
        early=0,
        foreign=0.25,
    )
    other = Row(
        variant="tcp",
        size=4,
        fences=1,
        p50_ms=0.25,
        p99_ms=2.0,
        least_ms=0.1,
        most_ms=2.0,
        early=0,
        foreign=0.0,
    )
    lines = table([row, other]).splitlines()
    assert lines[1].split() == ["store", "0.50", "/", "1.00", "-"]
    assert lines[2].split() == ["tcp", "-", "0.25", "/", "2.00"]
    assert lines[-1].endswith("others used up to 25%")


@pytest.mark.parametrize(("wide", "blocks"), [(None, 1), (120, 1), (80, 1), (40, 3)])
def test_a_table_is_as_wide_as_the_terminal(wide: int | None, blocks: int) -> None:
    names, sizes = ("store", "to_thread(dist.barrier)"), (2, 4, 8, 16, 32)
    rows = [
        Row(
            variant=name,
            size=size,
            fences=9,
            p50_ms=size / len(name),
            p99_ms=1234.56,
            least_ms=0.1,
            most_ms=2000.0,
            early=0,
            foreign=0.5,
            cpu_us=987.0,
        )
        for name in names
        for size in sizes
    ]
    lines = table(rows, wide).splitlines()
    assert max(map(len, lines)) <= (wide or 110)
    assert [line.split() for line in lines if "N=" in line] == [
        [f"N={size}" for size in part]
        for part in ([sizes] if blocks == 1 else [sizes[:2], sizes[2:4], sizes[4:]])
    ]
    assert all(f"{size / len(name):.2f}" in "\n".join(lines) for name in names for size in sizes)
    assert sum(line.startswith("store : ") for line in lines) == blocks


def test_each_step_of_a_fence_has_a_cost() -> None:
    assert all(cost > 0 for cost in step_costs(repeats=5).values())


def test_clients_of_a_few_processes_are_told_together() -> None:
    rows = bench_clients((12,), fences=2, jobs=2)
    assert [(row.transport, row.clients, row.processes, row.fences) for row in rows] == [
        ("store", 12, 2, 2),
        ("tcp", 12, 2, 2),
    ]
    for row in rows:
        assert row.early == 0
        assert 0 < row.p50_ms <= row.most_ms
        assert row.connect_s > 0
    *lines, last = clients_table(rows).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["12", "store"], ["12", "tcp"]]
    assert max(map(len, (*lines, last))) <= 80


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--clients", "none"], "--clients takes numbers from 1 on, such as 2,4,8, not 'none'"),
        (["--clients", "8", "--only", "ray"], "no clients over 'ray' to measure"),
    ],
)
def test_clients_that_cannot_be_had_are_refused(asked: list[str], said: str) -> None:
    done = CliRunner().invoke(cli, ["bench", "fence", *asked])
    assert done.exit_code != 0
    assert said in done.output + str(done.exception)
