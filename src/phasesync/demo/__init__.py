"""A real weight sync on this machine: real processes, real tensors, memory that really refuses."""

from phasesync.demo.run import AuditRun, run_demo
from phasesync.demo.settings import BACKENDS, DemoSettings

__all__ = ("BACKENDS", "AuditRun", "DemoSettings", "run_demo")
