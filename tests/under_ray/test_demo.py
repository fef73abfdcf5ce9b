"""The demo with ranks as actors: a good epoch, then a death that everybody learns of."""

from pathlib import Path
from typing import Any

import pytest

from tests.demo.demos import played

pytestmark = pytest.mark.timeout(180)


def test_a_rank_that_is_killed_is_named_by_its_peer_and_by_the_audit(
    ray: Any, tmp_path: Path
) -> None:
    demo = played(tmp_path, backend="ray", ranks=2, epochs=2, kill="1@offload")
    assert demo.code == 1
    assert len(demo.of("epoch.end", epoch=1, level="info")) == 2
    (broken,) = demo.of("fence.break", rank=0, epoch=2, fence="memory_released")
    assert (broken["cause_kind"], broken["cause_ranks"]) == ("dead", ["trainer/1"])
    assert any("guilty: trainer/1" in row for row in demo.screen)
    assert any(row.startswith("trainer/0: epoch failed: trainer/1 died") for row in demo.screen)
    assert ray.is_initialized()
