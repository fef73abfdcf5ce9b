"""The judge: what arrivals mean, and what it says of those that do not agree."""

from dataclasses import replace

import pytest

from phasesync.core import wire
from phasesync.core.fence import (
    FRAME_FORMAT,
    Lost,
    Waiting,
    cause_from_json,
    cause_to_json,
    decode_arrivals,
    encode_arrival,
    judge,
    judged_list,
    ticket_hash,
)
from phasesync.core.model import (
    Arrival,
    Broken,
    Digest,
    Epoch,
    FenceCall,
    FenceKey,
    FenceName,
    Opened,
    Rank,
    RoleName,
    RootCause,
    Version,
)

T0, T1, T2, T3 = (Rank(RoleName("trainer"), n) for n in range(4))
CALL = FenceCall(
    key=FenceKey("r", 0, "world", 3),
    fence=FenceName("memory_released"),
    epoch=Epoch(1),
    version=Version(1),
    digest=Digest("d1"),
    members=(T0, T1, T2),
    deadline_s=9.0,
)
DEAD = RootCause(kind="dead", ranks=(T2,), error="killed by signal 9")
FAILED = RootCause(kind="failed", ranks=(T1,), phase="offload", error_type="ValueError", error="x")


def came(rank: Rank, **changed: object) -> Arrival:
    return CALL.arrival(rank, **{"nonce": f"n{rank.number}", "seq": rank.number} | changed)


def broken(*arrivals: Arrival, expired: bool = False, lost: tuple[Lost, ...] = ()) -> Broken:
    ruling = judge(CALL, arrivals, expired=expired, lost=lost)
    assert isinstance(ruling, Broken), ruling
    return ruling


def test_a_fence_waits_for_whoever_is_missing() -> None:
    assert judge(CALL, []) == Waiting(missing=(T0, T1, T2))
    assert judge(CALL, [came(T2)]) == Waiting(missing=(T0, T1))


def test_a_fence_opens_for_all_with_a_ticket_of_what_was_judged() -> None:
    ruling = judge(CALL, [came(T2), came(T0, free_bytes=5), came(T1)])
    assert isinstance(ruling, Opened)
    assert [a.rank for a in ruling.arrivals] == [T0, T1, T2]
    judged = judged_list(ruling.arrivals)
    assert judged == [
        ["trainer/0", 0, "ok", 0, 5],
        ["trainer/1", 0, "ok", 1, None],
        ["trainer/2", 0, "ok", 2, None],
    ]
    assert ruling.ticket.hash == ticket_hash(judged) == wire.sha256(judged)
    assert ruling.ticket.count == 3


def test_the_order_of_arrivals_does_not_change_the_ticket() -> None:
    one = judge(CALL, [came(T0), came(T1), came(T2)])
    other = judge(CALL, [came(T1), came(T2), came(T0)])
    assert isinstance(one, Opened)
    assert isinstance(other, Opened)
    assert one.ticket == other.ticket


def test_an_arrival_sent_again_counts_once() -> None:
    assert judge(CALL, [came(T0), came(T0), came(T1)]) == Waiting(missing=(T2,))


def test_a_failed_arrival_breaks_at_once() -> None:
    ruling = broken(came(T1, cause=FAILED))
    assert ruling.cause == FAILED
    assert ruling.missing == (T0, T2)


def test_a_rank_that_arrived_may_still_fail() -> None:
    assert broken(came(T1), came(T1, cause=FAILED)).cause == FAILED


def test_the_deadline_names_the_missing() -> None:
    ruling = broken(came(T0), expired=True)
    assert ruling.cause.kind == "deadline"
    assert ruling.cause.missing == ruling.cause.ranks == ruling.missing == (T1, T2)


def test_the_deadline_says_what_is_known_of_the_missing() -> None:
    seen = {T0: "alive", T1: "stopped (process 12)"}
    ruling = judge(CALL, [came(T0)], expired=True, seen=seen)
    assert isinstance(ruling, Broken)
    assert ruling.cause.error == "the others waited 9 s; trainer/1 is stopped (process 12)"


def test_at_the_deadline_a_full_fence_opens() -> None:
    assert isinstance(judge(CALL, [came(T0), came(T1), came(T2)], expired=True), Opened)


def test_arriving_twice_is_named() -> None:
    cause = broken(came(T0), came(T0, nonce="other")).cause
    assert (cause.kind, cause.ranks) == ("duplicate", (T0,))


@pytest.mark.parametrize("incarnations", [(1, 2), (2, 1)])
def test_a_restart_is_named_in_either_order(incarnations: tuple[int, int]) -> None:
    cause = broken(*(came(T0, incarnation=n, nonce=str(n)) for n in incarnations)).cause
    assert (cause.kind, cause.ranks) == ("restarted", (T0,))
    assert cause.error == "incarnation 1 arrived, then incarnation 2 took over"


def test_a_lost_rank_breaks_the_fence_unless_it_had_arrived() -> None:
    lost = (Lost(rank=T2, incarnation=0, cause=DEAD),)
    assert broken(came(T0), lost=lost).cause == DEAD
    assert isinstance(judge(CALL, [came(T0), came(T2)], lost=lost), Waiting)
    elsewhere = (Lost(rank=T3, incarnation=0, cause=DEAD),)
    assert isinstance(judge(CALL, [came(T0)], lost=elsewhere), Waiting)


def test_an_odd_plan_is_named_as_soon_as_a_majority_stands() -> None:
    odd = came(T1, digest="d2")
    assert isinstance(judge(CALL, [came(T0), odd]), Waiting)
    cause = broken(came(T0), odd, came(T2)).cause
    assert (cause.kind, cause.ranks) == ("digest", (T1,))
    assert cause.error == "digest: d2 on trainer/1, d1 on the others"
    early = judge(CALL, [came(T0), came(T2), odd])
    assert isinstance(early, Broken)


def test_what_differs_in_the_plans_is_listed() -> None:
    def plan(rank: Rank, digest: str, offload: str) -> Arrival:
        payload = (("param_offload", offload), ("size", "2"), ("device", f"cpu{rank.number}"))
        return came(rank, digest=digest, payload=payload)

    cause = broken(plan(T0, "d1", "true"), plan(T1, "d1", "true"), plan(T2, "d2", "false")).cause
    assert cause.error == "param_offload: false on trainer/2, true on the others"


def test_without_a_majority_both_groups_are_named_and_nobody_blamed() -> None:
    call = replace(CALL, members=(T0, T1))
    payloads = {T0: (("offload", "true"),), T1: (("offload", "false"),)}
    arrivals = [came(r, digest=f"d{r.number}", payload=payloads[r]) for r in (T0, T1)]
    ruling = judge(call, arrivals)
    assert isinstance(ruling, Broken)
    assert ruling.cause.ranks == ()
    assert ruling.cause.error == "offload: true on trainer/0, false on trainer/1"


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"epoch": 2}, "epoch: 2 on trainer/2, 1 on the others"),
        ({"version": 0}, "version: 0 on trainer/2, 1 on the others"),
        ({"fence": "staged"}, "fence: staged on trainer/2, memory_released on the others"),
    ],
)
def test_another_disagreement_is_named(changed: dict[str, object], text: str) -> None:
    cause = broken(came(T0), came(T1), came(T2, **changed)).cause
    assert (cause.kind, cause.ranks, cause.error) == ("disagreement", (T2,), text)


def test_disagreement_is_said_at_the_deadline_before_who_is_missing() -> None:
    ruling = broken(came(T0), came(T1, digest="d2"), expired=True)
    assert ruling.cause.kind == "digest"
    assert ruling.missing == (T2,)


def test_a_stranger_is_named() -> None:
    cause = broken(came(T0), came(T3)).cause
    assert (cause.kind, cause.ranks) == ("digest", (T3,))


def test_an_error_is_cut_to_what_a_verdict_may_carry() -> None:
    long = replace(FAILED, error="x" * 5000)
    assert len(broken(came(T1, cause=long)).cause.error or "") == 2048


def test_frames_come_back_as_they_were() -> None:
    arrivals = [
        came(T0, free_bytes=7, payload=(("device", "host/cpu0"), ("text", 'a"b\nc'))),
        came(T1, cause=FAILED),
    ]
    assert decode_arrivals(b"".join(map(encode_arrival, arrivals))) == arrivals


def test_a_line_that_is_no_frame_is_no_arrival() -> None:
    log = b'{"a":1}\nnot json\n[]\n[1,"trainer","x"]\n' + encode_arrival(came(T0))
    assert decode_arrivals(log) == [came(T0)]


def test_a_frame_of_another_version_breaks_the_fence_and_says_so() -> None:
    other = decode_arrivals(wire.encode([FRAME_FORMAT + 1, "trainer", 2, "who knows"]) + b"\n")
    cause = broken(came(T0), came(T1), *other).cause
    assert (cause.kind, cause.ranks) == ("digest", (T2,))
    expected = "frames of format 1 were expected: install one version everywhere"
    assert (
        cause.error
        == f"phasesync: frames of format 2 on {T2}, frames of format 1 on the others; {expected}"
    )


def test_no_fence_opens_on_frames_that_its_judge_cannot_read() -> None:
    """All ranks are of one version, and what judges (a coordinator, say) is of another."""
    said = [wire.encode([FRAME_FORMAT - 1, r.role, r.number, 0]) for r in (T0, T1, T2)]
    cause = broken(*decode_arrivals(b"\n".join(said))).cause
    assert (cause.kind, cause.ranks) == ("digest", ())
    assert "frames of format 0 on trainer/0, trainer/1, trainer/2;" in (cause.error or "")


def test_a_cause_comes_back_as_it_was() -> None:
    for cause in (FAILED, DEAD, RootCause(kind="deadline", ranks=(T1,), missing=(T1, T2))):
        assert cause_from_json(wire.decode(wire.encode(cause_to_json(cause)))) == cause
