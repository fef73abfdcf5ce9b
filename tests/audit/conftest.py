"""What tests of several files look at while an audit runs."""

from typing import Any

import pytest

from phasesync.audit.journals import JournalAudit


@pytest.fixture
def gone_through(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The file of each journal line that was gone through by itself, not taken with its epoch."""
    fed: list[str] = []
    feed = JournalAudit.feed

    def counted(self: JournalAudit, file: str, number: int, line: dict[str, Any]) -> None:
        fed.append(file)
        feed(self, file, number, line)

    monkeypatch.setattr(JournalAudit, "feed", counted)
    return fed
