"""Ranks for real: the protocol run around a user's own code."""

from phasesync.runtime.actions import Turn, at_once
from phasesync.runtime.agreeing import tell_unready
from phasesync.runtime.device import DevicePort, HostDevice
from phasesync.runtime.driver import BlockingDriver, Driver, DriverReport
from phasesync.runtime.runner import EpochReport, RankRunner

__all__ = (
    "BlockingDriver",
    "DevicePort",
    "Driver",
    "DriverReport",
    "EpochReport",
    "HostDevice",
    "RankRunner",
    "Turn",
    "at_once",
    "tell_unready",
)
