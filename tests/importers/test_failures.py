"""An error in a raw log is never lost: it has a process, or the answer says that it has none.

`tests/data/torchrun` is what torchrun 2.13 printed of three ranks over gloo, of which rank 1
raised, was killed, left, or ran out of memory. The watchdog's lines are `ProcessGroupNCCL.cpp`'s.
"""

from pathlib import Path

import pytest

from phasesync.importers import as_lines, guess, import_logs
from phasesync.importers.errors import error_of
from phasesync.report.audit import as_text
from tests.audit.variants import CASES, audit_lines
from tests.importers.test_importers import answer_of, file_of

TORCHRUN = CASES.parent / "torchrun"
CAUGHT = (
    "[rank{rank}]:[E1218 20:27:21.426415540 ProcessGroupNCCL.cpp:629] [Rank {rank}] Watchdog "
    "caught collective operation timeout: WorkNCCL(SeqNum=42, OpType={op}, NumelIn=131072, "
    "NumelOut=131072, Timeout(ms)=600000) ran for 600081 milliseconds before timing out.\n"
    "[rank{rank}]:[E1218 20:27:21.484903450 ProcessGroupNCCL.cpp:2168] [PG ID 0 PG GUID "
    "0(default_pg) Rank {rank}]  failure detected by watchdog at work sequence id: 42 PG status: "
    "last enqueued work: 43, last completed work: 41\n"
)
DUMPS = (
    "[rank2]:[E1218 20:27:21.577425540 ProcessGroupNCCL.cpp:1987] [PG ID 0 PG GUID 0(default_pg) "
    "Rank 2] Received a dump signal due to a collective timeout from  rank 0 and we will try our "
    "best to dump the debug info. Last enqueued NCCL work: 41, last completed NCCL work: 41.\n"
)
AFTER = (
    "[rank0]: terminate called after throwing an instance of 'c10::DistBackendError'\n"
    "[rank1]: torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.\n"
)
WORKER = (
    "({who}) INFO 11-20 10:00:06 [gpu_worker.py:104] Sleep mode freed 42.11 GiB memory, "
    "3.20 GiB memory is still in use.\n"
)
# Ray 2.5x: the raylet's own words, then the driver's exception.
RAYLET = (
    "(raylet) A worker died or was killed while executing a task by an unexpected system error. "
    "RayTask ID: ffff Worker ID: ab Node ID: cd Worker IP address: 10.0.0.2 Worker port: 10012 "
    "Worker PID: 4002 Worker exit type: SYSTEM_ERROR\n"
)
ACTOR_DIED = """\
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
\tclass_name: WorkerDict
\tpid: 4002
\tip: 10.0.0.2
"""
TASK_ERROR = """\
ray.exceptions.RayTaskError(KeyError): ray::TaskRunner.run() (pid=100, ip=10.0.0.1, actor_id=aa)
  File "main_ppo.py", line 200, in run
ray.exceptions.RayTaskError(KeyError): ray::Worker.sync() (pid=4002, ip=10.0.0.2, actor_id=bb)
  File "worker.py", line 70, in sync
KeyError: 'lm_head.weight'
"""


@pytest.mark.parametrize(
    ("how", "because"),
    [
        ("raise", "ValueError: shape [4096] is invalid"),
        ("kill", "ended by signal 9, the first to end"),
        ("exit", "exit code 3, the first to end"),
        ("oom", "CUDA out of memory"),
    ],
)
def test_who_ended_first_under_torchrun(how: str, because: str) -> None:
    """Its peers print first that they lost it; they are not at fault."""
    log = TORCHRUN / f"{how}.log"
    assert guess([log]) == "torchrun"
    answer = answer_of("torchrun", log)
    assert (answer.verdict, answer.guilty) == ("failure", (1,))
    assert because in answer.because


@pytest.mark.parametrize("before", ["", "[default5]:", "[1,5]<stderr>:"])
def test_ranks_are_told_apart_whoever_puts_them_before_a_line(tmp_path: Path, before: str) -> None:
    """A launcher's own number may be a local one: what the rank says of itself counts."""
    text = f"{before}[rank13]: KeyError: 'a'\n[rank0]: step 1\n"
    answer = answer_of("torchrun", file_of(tmp_path, text, "job.log"))
    assert (answer.verdict, answer.guilty) == ("failure", (13,))


@pytest.mark.parametrize("before", ["[default3]:", "[1,3]<stdout>:"])
def test_a_launchers_number_is_a_rank_where_there_is_no_other(tmp_path: Path, before: str) -> None:
    answer = answer_of("torchrun", file_of(tmp_path, f"{before}KeyError: 'a'\n", "job.log"))
    assert (answer.verdict, answer.guilty) == ("failure", (3,))


def test_the_watchdog_names_who_never_came(tmp_path: Path) -> None:
    text = "".join(CAUGHT.format(rank=rank, op="ALLREDUCE") for rank in (0, 1)) + DUMPS + AFTER
    log = file_of(tmp_path, text, "job.log")
    assert guess([log]) == "torchrun"
    answer = answer_of("torchrun", log)
    assert (answer.verdict, answer.rule, answer.waiting) == ("inconclusive", "R-DUMPSET", (0, 1))
    assert "rank 2 did not come" in answer.because
    assert answer.consequences == (
        f"rank 0 waits in nccl:allreduce ({log}:1)",
        f"rank 1 waits in nccl:allreduce ({log}:3)",
    )


def test_under_ray_every_kind_of_actor_is_a_world_of_its_own(tmp_path: Path) -> None:
    """Ranks are counted in each: the first of one must not be taken for the first of the other."""
    lines = [
        (f"({actor} pid={pid}) ", CAUGHT.format(rank=rank, op="BROADCAST"))
        for actor, pid, rank in (("RefActor", 11, 0), ("RefActor", 12, 1))
    ]
    text = "".join(f"{who}{row}\n" for who, rows in lines for row in rows.splitlines())
    text += "(Policy pid=21) [rank0]: step 1\n(RefActor pid=13) [rank2]: step 1\n"
    log = file_of(tmp_path, text, "driver.log")
    assert guess([log]) == "ray"
    answer = answer_of("ray", log)
    assert answer.waiting == ("pid11", "pid12")
    assert "rank pid13 did not come" in answer.because


def test_who_waits_is_not_known_where_ray_folded_lines(tmp_path: Path) -> None:
    row = CAUGHT.format(rank=0, op="BROADCAST").splitlines()[0]
    text = f"(RefActor pid=11) {row} [repeated 14x across cluster]\n"
    text += "(RefActor pid=13) [rank2]: step 1\n"
    answer = answer_of("ray", file_of(tmp_path, text, "driver.log"))
    assert (answer.verdict, answer.guilty) == ("inconclusive", ())
    assert "pid13" not in answer.because
    assert any("RAY_DEDUP_LOGS=0" in more for more in answer.record_next)


@pytest.mark.parametrize("kind", ["ray", "vllm", "sglang", "torchrun"])
def test_logs_without_a_line_that_means_anything_are_not_ok(tmp_path: Path, kind: str) -> None:
    answer = answer_of(kind, file_of(tmp_path, "hello\n", "job.log"))
    assert (answer.verdict, answer.guilty) == ("inconclusive", ())
    assert "no event" in answer.because


def test_the_watchdog_shows_two_collectives_at_one_number(tmp_path: Path) -> None:
    text = CAUGHT.format(rank=0, op="ALLREDUCE") + CAUGHT.format(rank=1, op="_ALLGATHER_BASE")
    answer = answer_of("torchrun", file_of(tmp_path, text, "job.log"))
    assert (answer.verdict, answer.rule, answer.guilty) == ("hang", "R-SAMEPLAN", ())


def test_who_failed_while_others_waited_in_nccl(tmp_path: Path) -> None:
    text = "".join(CAUGHT.format(rank=rank, op="ALLREDUCE") for rank in (0, 1))
    text += "[rank2]: KeyError: 'lm_head.weight'\n"
    answer = answer_of("torchrun", file_of(tmp_path, text, "job.log"))
    assert (answer.verdict, answer.rule, answer.guilty) == ("hang", "R-ALLOK", (2,))


@pytest.mark.parametrize("told", [RAYLET, ACTOR_DIED, RAYLET + ACTOR_DIED])
def test_a_worker_of_which_ray_says_that_it_died(tmp_path: Path, told: str) -> None:
    text = WORKER.format(who="W pid=4001") + WORKER.format(who="W pid=4002, ip=10.0.0.2") + told
    log = file_of(tmp_path, text, "driver.log")
    assert guess([log]) == "ray"
    answer = answer_of("ray", log)
    assert (answer.verdict, answer.guilty) == ("failure", ("10.0.0.2:4002",))


def test_of_nested_tasks_the_innermost_failed(tmp_path: Path) -> None:
    text = WORKER.format(who="W pid=4001") + WORKER.format(who="W pid=4002, ip=10.0.0.2")
    answer = answer_of("ray", file_of(tmp_path, text + TASK_ERROR, "driver.log"))
    assert (answer.verdict, answer.guilty) == ("failure", ("10.0.0.2:4002",))
    assert "KeyError: 'lm_head.weight'" in answer.because


def test_an_error_of_nobody_is_not_ok(tmp_path: Path) -> None:
    """The driver reports an error, and no line says whose it is."""
    text = WORKER.format(who="W pid=4001") + "RuntimeError: the sync went wrong\n"
    log = file_of(tmp_path, text, "driver.log")
    answer = answer_of("ray", log)
    assert (answer.verdict, answer.guilty) == ("inconclusive", ())
    assert any(f"see {log}:2" in row for row in as_text([answer]))


def test_what_fails_in_ray_itself_is_not_the_job(tmp_path: Path) -> None:
    file_of(tmp_path, WORKER.format(who="W pid=4001"), "driver.log")
    file_of(
        tmp_path, "Traceback (most recent call last):\nOSError: no such file\n", "dashboard.log"
    )
    assert audit_lines(as_lines(import_logs("ray", [tmp_path]))).verdict == "ok"


def test_an_error_that_its_process_outlived_is_no_failure(tmp_path: Path) -> None:
    error = "(W pid=4001) RuntimeError: no such adapter, trying again\n"
    text = WORKER.format(who="W pid=4001") + error + WORKER.format(who="W pid=4001")
    log = file_of(tmp_path, text, "driver.log")
    assert audit_lines(as_lines(import_logs("ray", [log]))).verdict == "ok"


def test_an_engines_own_traceback(tmp_path: Path) -> None:
    text = (
        WORKER.format(who="EngineCore pid=77")
        + "(EngineCore pid=77) ERROR 08-11 16:12:20 [core.py:700] Traceback (most recent call last)"
        ":\n(EngineCore pid=77) ERROR 08-11 16:12:20 [core.py:700] ValueError: There is no module "
        "or parameter named 'foo'\n(APIServer pid=70) ERROR 08-11 16:12:20 [async_llm.py:480] "
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
    )
    answer = answer_of("vllm", file_of(tmp_path, text, "server.log"))
    assert (answer.verdict, answer.guilty) == ("failure", ("engine/0",))
    assert "ValueError: There is no module" in answer.because


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("KeyError: 'kv_cache'", "KeyError: 'kv_cache'"),
        ("AssertionError", "AssertionError"),
        ("CUDA Error: out of memory at a.cpp:62", "CUDA Error: out of memory at a.cpp:62"),
        ("ERROR 08-11 16:12:20 [core.py:7] ValueError: bad", "ValueError: bad"),
        ("WARNING 08-11 16:12:20 [a.py:7] RuntimeError: bad, retrying", None),
        ("    raise ValueError('bad')", None),
        ("step 3: no errors", None),
    ],
)
def test_which_lines_are_errors(text: str, error: str | None) -> None:
    assert error_of(text) == error
