"""Every interleaving of simulated ranks, before a GPU is touched. `check` is the way in."""

from phasesync.checker.check import check
from phasesync.checker.report import Case, Report
from phasesync.checker.settings import FAULTS, Settings, faults_of

__all__ = ("FAULTS", "Case", "Report", "Settings", "check", "faults_of")
