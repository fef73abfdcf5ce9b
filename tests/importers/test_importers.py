"""Lines as the systems' own sources print them, and what the audit says of them."""

import io
import os
import pickle
from pathlib import Path

import pytest

from phasesync.audit import Answer
from phasesync.errors import InputError
from phasesync.importers import as_lines, import_logs
from tests.audit.variants import audit_lines

# verl 0.9.1, verl/utils/profiler/performance.py `log_gpu_memory_usage`, called with these heads in
# verl/workers/engine_workers.py `update_weights`; the prefix and the folding are Ray's.
MEMORY = (
    "memory allocated (GB): {allocated}, memory reserved (GB): {reserved}, "
    "device memory used/total (GB): {used}/80.00"
)
VERL = """\
(WorkerDict pid=4711) Before resume weights, {m1}
(WorkerDict pid=4711) After resume weights, {m2}
(WorkerDict pid=4712, ip=10.0.0.2) Before resume weights, {m1} [repeated 3x across cluster] \
(Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0 to disable log deduplication)
(WorkerDict pid=4711) After update_weights, {m2}
(WorkerDict pid=4711) After offload model to cpu, {m3}
(WorkerDict pid=4711) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 44.00 GiB.
""".format(
    m1=MEMORY.format(allocated="30.10", reserved="31.20", used="40.00"),
    m2=MEMORY.format(allocated="30.10", reserved="31.20", used="58.00"),
    m3=MEMORY.format(allocated="0.10", reserved="0.40", used="28.00"),
)
# vLLM 0.24 and 0.33: v1/worker/gpu_worker.py and v1/executor/abstract.py, `sleep`, `wake_up`.
VLLM = """\
(EngineCore pid=77) INFO 08-11 16:12:02 [gpu_worker.py:104] Sleep mode freed 25.30 GiB memory, \
13.20 GiB memory is still in use.
(EngineCore pid=77) INFO 08-11 16:12:02 [abstract.py:306] It took 2.756636 seconds to fall asleep.
(EngineCore pid=77) INFO 08-11 16:12:09 [abstract.py:331] It took 0.455951 seconds to wake up \
tags ['weights'].
(EngineCore pid=77) INFO 08-11 16:12:11 [abstract.py:331] It took 0.101951 seconds to wake up \
tags ['kv_cache'].
(EngineCore pid=77) INFO 08-11 16:13:02 [gpu_worker.py:104] Sleep mode freed 25.60 GiB memory, \
16.60 GiB memory is still in use.
(EngineCore pid=77) INFO 08-11 16:13:09 [abstract.py:331] It took 0.455951 seconds to wake up \
tags ['weights', 'kv_cache'].
(EngineCore pid=77) INFO 08-11 16:14:02 [gpu_worker.py:104] Sleep mode freed 25.60 GiB memory, \
24.10 GiB memory is still in use.
"""
# SGLang's HTTP server is uvicorn; its access lines name the call, and the scheduler the error.
SGLANG = """\
INFO:     10.0.0.9:40112 - "POST /release_memory_occupation HTTP/1.1" 200 OK
INFO:     10.0.0.9:40112 - "POST /resume_memory_occupation HTTP/1.1" 200 OK
INFO:     10.0.0.9:40112 - "POST /update_weights_from_tensor HTTP/1.1" 200 OK
INFO:     10.0.0.9:40112 - "POST /flush_cache HTTP/1.1" 400 Bad Request
"""
# py-spy 0.4 `dump`.
PYSPY = """\
Process {pid}: python train.py --rank {rank}
Python v3.11.7 (/usr/bin/python3.11)

Thread {pid} (idle): "MainThread"
    {call} (torch/distributed/distributed_c10d.py:4838)
    wrapper (torch/distributed/c10d_logger.py:81)
    update_weights (verl/workers/engine_workers.py:822)
    run (asyncio/runners.py:118)
Thread 0x7F (idle): "Thread-1"
    wait (threading.py:331)
"""


def answer_of(kind: str, *files: Path) -> Answer:
    return audit_lines(as_lines(import_logs(kind, files)))


def file_of(tmp_path: Path, text: str, name: str = "worker.log") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_verl_says_where_it_died(tmp_path: Path) -> None:
    trace = import_logs("verl", [file_of(tmp_path, VERL)])
    assert trace.header["ranks"] == ["pid4711", "10.0.0.2:4712"]  # What the log calls them.
    assert trace.header["memory"]["capacity_gib"] == 80
    first = [(e["phase"], e["event"]) for e in trace.events if e["rank"] == "pid4711"]
    assert first == [
        ("resume_weights", "start"),
        ("resume_weights", "end"),
        ("update_weights", "start"),
        ("update_weights", "end"),
        ("offload", "start"),
        ("offload", "end"),
        ("resume_kv", "start"),
        ("resume_kv", "fail"),
    ]
    assert trace.events[2]["attrs"].get("repeated") is None
    other = [e for e in trace.events if e["rank"] == "10.0.0.2:4712"]
    assert [e["attrs"].get("repeated") for e in other] == [3]
    answer = audit_lines(as_lines(trace))
    assert (answer.verdict, answer.rule, answer.phase) == ("inconclusive", "R-FREED", "resume_kv")
    assert answer.record_next


def test_vllm_leaks_are_seen(tmp_path: Path) -> None:
    answer = answer_of("vllm", file_of(tmp_path, VLLM))
    assert (answer.verdict, answer.rule) == ("violation", "R-DRIFT")


# vLLM 0.32 with two workers: each says what its own sleep freed, the core speaks for both.
VLLM_TP2 = """\
(Worker_TP0 pid=78) INFO 08-11 16:1{n}:02 [gpu_worker.py:327] \
Sleep mode freed 25.3 GiB memory, 1.9 GiB memory is still in use.
(Worker_TP1 pid=79) INFO 08-11 16:1{n}:02 [gpu_worker.py:327] \
Sleep mode freed 25.3 GiB memory, {held} GiB memory is still in use.
(EngineCore pid=77) INFO 08-11 16:1{n}:02 [abstract.py:391] \
It took 2.756636 seconds to fall asleep.
(EngineCore pid=77) INFO 08-11 16:1{n}:09 [abstract.py:409] \
It took 0.455951 seconds to wake up tags ['weights', 'kv_cache'].
"""


@pytest.mark.parametrize(("grows", "verdict"), [(0.0, "ok"), (3.1, "violation")])
def test_vllm_workers_are_told_apart(tmp_path: Path, grows: float, verdict: str) -> None:
    steps = [VLLM_TP2.format(n=n, held=round(2 + n * grows, 2)) for n in range(4)]
    answer = answer_of("vllm", file_of(tmp_path, "".join(steps)))
    assert answer.verdict == verdict, answer.because
    assert answer.guilty == (("engine/1",) if grows else ())


def test_sglang_says_that_requests_are_in_the_way(tmp_path: Path) -> None:
    # SGLang, scheduler.py `flush_cache`.
    text = (
        "[2026-08-11 16:12:09 TP0] Cache not flushed because there are pending requests. "
        "#queue-req: 12, #running-req: 0\n"
    )
    answer = answer_of("sglang", file_of(tmp_path, text))
    assert (answer.verdict, answer.rule, answer.guilty) == ("violation", "R-QUIET", ("engine/0",))


def test_vllm_warns_that_it_woke_nothing(tmp_path: Path) -> None:
    # vLLM 0.24, v1/executor/abstract.py `wake_up`.
    text = (
        "WARNING 08-11 16:12:09 [abstract.py:320] Tag weights is not in sleeping tags {'kv_cache'}"
    )
    trace = import_logs("vllm", [file_of(tmp_path, text)])
    assert [(e["phase"], e["event"]) for e in trace.events] == [
        ("wake_up", "start"),
        ("wake_up", "fail"),
    ]
    assert trace.events[0]["attrs"]["tags"] == ["weights"]


def test_sglang_access_lines(tmp_path: Path) -> None:
    trace = import_logs("sglang", [file_of(tmp_path, SGLANG)])
    assert [(e["phase"], e["event"]) for e in trace.events][-1] == ("flush_cache", "fail")
    assert trace.events[-1]["attrs"]["http"] == 400


def test_py_spy_dumps_of_a_split_world(tmp_path: Path) -> None:
    files = [
        file_of(tmp_path, PYSPY.format(pid=100 + rank, rank=rank, call=call), f"dump-{rank}.txt")
        for rank, call in enumerate(["barrier", "barrier", "barrier", "broadcast"])
    ]
    answer = answer_of("py-spy", *files)
    assert (answer.verdict, answer.rule, answer.guilty) == ("hang", "R-SAMEPLAN", (3,))


def dump(
    rank: int, entries: list[dict[str, object]], world: str = "[0, 1, 2]"
) -> dict[str, object]:
    return {
        "version": "2.10",
        "rank": rank,
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": world}},
        "pg_status": {},
        "entries": entries,
    }


def entry(number: int, name: str, state: str, at: int) -> dict[str, object]:
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": at,
        "state": state,
        "timeout_ms": 600000,
        "is_p2p": False,
        "retired": state == "completed",
    }


def test_flight_recorder_lacks_the_rank_that_matters(tmp_path: Path) -> None:
    files = []
    for rank in (0, 1):
        path = tmp_path / f"comm_lib_trace_rank_{rank}"
        entries = [
            entry(1, "all_reduce", "completed", 10 + rank),
            entry(2, "all_reduce", "started", 20),
        ]
        path.write_bytes(pickle.dumps(dump(rank, entries)))
        files.append(path)
    answer = answer_of("flight-recorder", *files)
    assert (answer.verdict, answer.rule) == ("inconclusive", "R-DUMPSET")
    assert "2" in answer.because


class _Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, ("echo pwned > /tmp/phasesync-pwned",))


@pytest.mark.parametrize("bad", [_Bomb(), {"entries": [_Bomb()]}, [1, 2], {"entries": 3}])
def test_flight_recorder_reads_plain_values_only(tmp_path: Path, bad: object) -> None:
    path = tmp_path / "trace_rank_0"
    path.write_bytes(pickle.dumps(bad))
    with pytest.raises(InputError, match="not a Flight Recorder dump"):
        import_logs("flight-recorder", [path])
    assert not Path("/tmp/phasesync-pwned").exists()


@pytest.mark.parametrize("raw", [b"", b"\x80\x04", b"not a pickle", b"\x80\x05P" + b"id\n."])
def test_flight_recorder_refuses_torn_files(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "trace_rank_0"
    path.write_bytes(raw)
    with pytest.raises(InputError):
        import_logs("flight-recorder", [path])


def test_flight_recorder_of_this_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    dump_trace = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    if dump_trace is None:
        pytest.skip("this torch has no Flight Recorder")
    raw = dump_trace()
    found = pickle.load(io.BytesIO(raw))
    if "entries" not in found:
        pytest.skip("nothing was recorded in this process")
    path = tmp_path / "trace_rank_0"
    path.write_bytes(raw)
    import_logs("flight-recorder", [path])


MAPPING = r"""
[[line]]
match = 'rank=(?P<rank>\d+) epoch=(?P<epoch>\d+) begin (?P<phase>\w+)'
event = "start"
[[line]]
match = 'rank=(?P<rank>\d+) epoch=(?P<epoch>\d+) done (?P<phase>\w+)(?: freed=(?P<freed>[\d.]+))?'
event = "end"
attrs = {freed_gib = "{freed}"}
[[line]]
match = 'rank=(?P<rank>\d+) epoch=(?P<epoch>\d+) (?P<error>.*out of memory.*) in (?P<phase>\w+)'
event = "fail"
attrs = {error = "{error}"}
"""
TEXT = """\
12:00:01 rank=0 epoch=3 begin sleep
12:00:01 rank=1 epoch=3 begin sleep
12:00:02 rank=0 epoch=3 done sleep freed=60.5
12:00:02 rank=1 epoch=3 done sleep freed=2.5
12:00:03 rank=1 epoch=3 begin train
12:00:04 rank=1 epoch=3 CUDA out of memory in train
something else
"""


def test_text_by_a_mapping(tmp_path: Path) -> None:
    mapping = file_of(tmp_path, MAPPING, "map.toml")
    trace = import_logs("text", [file_of(tmp_path, TEXT)], mapping=mapping)
    assert trace.skipped == 1
    answer = audit_lines(as_lines(trace))
    assert (answer.verdict, answer.rule, answer.guilty) == ("violation", "R-FREED", (1,))


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ("[[line]]\nmatch = '('\nevent = 'start'", "no regular expression"),
        ("[[line]]\nmatch = 'x'\nevent = 'begin'", "must be one of"),
        ("[[line]]\nmatch = 'x'\nevent = 'start'\nfase = 'y'", "unknown key 'fase'"),
        ("[[line]]\nmatch = 'x'\nevent = 'start'\nphase = '{p}'", "no group 'p'"),
        ("[line", "not TOML"),
        ("a = 1", r"no \[\[line\]\]"),
    ],
)
def test_a_wrong_mapping_is_told(tmp_path: Path, mapping: str, says: str) -> None:
    path = file_of(tmp_path, mapping, "map.toml")
    with pytest.raises(InputError, match=says):
        import_logs("text", [file_of(tmp_path, TEXT)], mapping=path)


def test_an_unknown_importer_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="importers are"):
        import_logs("mlflow", [file_of(tmp_path, "x")])
