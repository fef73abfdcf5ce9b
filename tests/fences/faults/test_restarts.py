"""A rank that dies anywhere in two epochs over a store and is restarted: every order of messages.

The suite of every day looks at some moments of its death (`tests/checker/test_messages.py`).
"""

import pytest

from phasesync.checker.messages import explore_messages
from tests.checker.lives import restarted


@pytest.mark.timeout(0)
def test_a_rank_that_is_restarted_in_any_of_two_epochs() -> None:
    found = explore_messages(restarted(2))
    assert (found.wrong, found.path) == (None, ())
    assert (found.states, found.ends) == (1_792_135, 1478)
