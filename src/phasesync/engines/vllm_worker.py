"""What runs inside each vLLM worker so that all ranks can be asked which version they hold.

Name it as `worker_extension_cls="phasesync.engines.vllm_worker.WorkerExtension"`, or make it a base
of your own extension. It carries versions, never weights, and imports nothing.
"""

__all__ = ("WorkerExtension",)


class WorkerExtension:
    """Mixed into vLLM's worker class; the names are long so that they meet no other."""

    def phasesync_commit(self, version: str) -> None:
        """Note that this worker now holds `version` in full."""
        self._phasesync_version = version

    def phasesync_version(self) -> str | None:
        """The version last committed here."""
        return getattr(self, "_phasesync_version", None)
