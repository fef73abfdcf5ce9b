"""Every interleaving of simulated ranks, before a GPU is touched. `check` is the way in."""

from phasesync.checker.check import FAULTS, Settings, check, faults_of
from phasesync.checker.report import Case, Report

__all__ = ("FAULTS", "Case", "Report", "Settings", "check", "faults_of")
