"""How a demo ended, rank by rank."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from phasesync.core.model import Rank, RootCause

__all__ = ("Ending", "How", "Lost", "RankEnd")

How: TypeAlias = Literal["done", "failed", "died", "error"]


class RankEnd(NamedTuple):
    """`failed` is an EpochFailed, with its cause; `error` is anything that is no epoch's."""

    rank: Rank
    how: How
    cause: str = ""


class Lost(NamedTuple):
    """A rank that is gone without a word, as the launcher tells it to the fences."""

    cause: RootCause
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How each rank ended, and how long the survivors of a death took to end."""

    ranks: tuple[RankEnd, ...]
    survived_s: float | None = None

    @property
    def whole(self) -> bool:
        return all(end.how == "done" for end in self.ranks)
