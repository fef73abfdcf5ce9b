"""The page on engines says what is so: its code runs, in its order."""

import re
from pathlib import Path
from typing import Any

import pytest

from phasesync.engines.guard import GuardMiddleware
from phasesync.engines.simulated import Budget, SimulatedEngine
from phasesync.engines.vllm import VllmEngine
from phasesync.errors import EngineRefused

from .surfaces import SyncSurface

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def test_the_page_runs_as_it_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    distributed = pytest.importorskip("torch.distributed")
    monkeypatch.chdir(tmp_path)
    llm = SyncSurface(SimulatedEngine([Budget(16)]))
    names: dict[str, Any] = {
        "llm": llm, "folder": str(tmp_path), "rollout": None, "store": distributed.HashStore(),
    }  # fmt: skip
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, names)
    assert isinstance(names["engine"], VllmEngine)
    assert {"resume_weights", "load", "resume_kv", "serve", "sleep"} <= names["actions"].keys()
    for refused in (
        lambda: llm.wake_up(["kv_cache"]),
        llm.wake_up,
        lambda: llm.generate(["a"]),
        lambda: llm.collective_rpc("wake_up", args=(["kv_cache"],)),
    ):
        with pytest.raises(EngineRefused, match="none was given"):
            refused()
    assert issubclass(names["ReplicaGuard"], GuardMiddleware)
    assert names["ReplicaGuard"].rules.fences["kv_cache"] == ("memory_released", "let_go")
