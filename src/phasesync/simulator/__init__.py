"""Seeded runs of a protocol in virtual time: what it costs, and what goes wrong when."""

from phasesync.simulator.faults import Fault, parse_fault, parse_faults
from phasesync.simulator.profile import Profile, Span, fit, profile_of
from phasesync.simulator.replay import events_of, replay, stuck
from phasesync.simulator.run import Simulated, compare, simulate

__all__ = (
    "Fault",
    "Profile",
    "Simulated",
    "Span",
    "compare",
    "events_of",
    "fit",
    "parse_fault",
    "parse_faults",
    "profile_of",
    "replay",
    "simulate",
    "stuck",
)
