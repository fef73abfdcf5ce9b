"""Call by call: under phasesync, engine and rollout get what verl's own body gives them.

The stock calls are kept in `tests/data/verl`, for tests that have no verl; REWRITE=1 records them.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

import verl
from tests.verl.rank import Job
from tests.verl.run import run

CASES = {
    "plain": Job(),
    "no offload": Job(param_offload=False),
    "engine keeps its memory": Job(rollout={"free_cache_engine": False}),
    "lora merged": Job(lora="merge"),
    "lora adapter": Job(lora="adapter"),
    "lora adapter on sglang": Job(lora="adapter", rollout={"name": "sglang"}, sleep_level=1),
    "sglang": Job(rollout={"name": "sglang"}),
    "tensorrt-llm": Job(rollout={"name": "trtllm"}),
    "prefill and decode apart": Job(
        replica=1,
        rollout={
            "tensor_model_parallel_size": 1,
            "disaggregation": {"enabled": True, "prefill_replicas": 1, "decode_replicas": 1},
        },
    ),
}
#: verl 0.9.0 resumes weights that an SGLang adapter has never released.
MENDED_IN_091 = ("lora adapter on sglang",)
KEPT = Path(__file__).parent.parent / "data" / "verl" / f"calls-{verl.__version__}.json"


@pytest.mark.parametrize("case", CASES)
def test_engine_and_rollout_get_the_calls_of_stock(tmp_path: Path, case: str) -> None:
    job = replace(CASES[case], ranks=2, replica=min(CASES[case].replica, 2), epochs=2)
    stock = run(job, tmp_path / "stock", within_s=20)
    fenced = run(replace(job, mode="enforce"), tmp_path / "fenced", within_s=20)
    if case in MENDED_IN_091 and verl.__version__ < "0.9.1":
        assert (stock.outcomes()[0], fenced.line) == ("RuntimeError", "passes")
        return
    assert stock.line == fenced.line == "passes"
    wanted = [_calls(said.calls) for said in stock.said]
    assert [_calls(said.calls) for said in fenced.said] == wanted
    assert all(said.calls[0] == "expandable_segments False" for said in fenced.said)
    assert all(said.calls[-1] == "expandable_segments True" for said in fenced.said)
    _keep(case, wanted)


def _calls(calls: tuple[str, ...]) -> list[str]:
    return [call for call in calls if call.startswith(("engine.", "rollout."))]


def _keep(case: str, calls: list[list[str]]) -> None:
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if os.environ.get("REWRITE"):
        kept[case] = calls
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    assert kept.get(case) == calls, f"{KEPT} differs; record it with REWRITE=1"


def test_segments_are_expandable_again_after_a_failure(tmp_path: Path) -> None:
    job = Job(ranks=2, replica=2, fail=(1, "rollout.update_weights"), mode="enforce")
    outcome = run(job, tmp_path, within_s=30)
    assert outcome.outcomes() == ["EpochFailed"] * 2
    assert all(said.calls[-1] == "expandable_segments True" for said in outcome.said)
