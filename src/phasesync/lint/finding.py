"""What lint says: one finding is one mistake, with its place and what would be right."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from phasesync.core.protocol import Place
from phasesync.errors import ProtocolError

__all__ = ("Finding", "Findings", "Severity")


class Severity(StrEnum):
    """An error makes the protocol unfit to run; a warning does not."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`under` names the options, where not the defaults, under which it is so; `phases` are the
    two that nothing keeps apart, where it is about such."""

    rule: str
    wrong: str
    right: str
    place: Place
    severity: Severity = Severity.ERROR
    under: str = ""
    phases: tuple[str, ...] = ()
    file: str = "<protocol>"

    def error(self) -> ProtocolError:
        """The finding as an exception."""
        under = f" (with {self.under})" if self.under else ""
        line, column = self.place
        return ProtocolError(
            self.wrong + under, self.right, file=self.file, line=line, column=column
        )

    def __str__(self) -> str:
        return f"{self.error()} [{self.rule}]"


Findings: TypeAlias = Iterator[Finding]
