"""The journals of all nodes of a Ray cluster in one pack: one task a node reads its own disk.

Nodes that share a folder send the same files; each is kept once. A node that cannot be asked is
named in the manifest, and the rest is packed all the same.
"""

import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from phasesync.errors import InputError, LogError
from phasesync.logs import collect, unpacked

__all__ = ("collect_over_ray",)

ASK_S = 300.0
KNOCK_S = 5.0


def collect_over_ray(
    run: Path, out: Path, *, address: str | None = None, ask_s: float = ASK_S
) -> dict[str, Any]:
    """Pack the journals that the nodes of the cluster have in the folder `run` into `out`.

    The manifest is that of `logs.collect`, and `nodes` says how many files each node sent, or why
    none. `address` is the cluster's where this process is in none yet.

    Raises:
        LogError: no node has a journal in `run`, or `out` cannot be written.
        InputError: there is no cluster to ask.
    """
    if not ray.is_initialized():
        _connect(address or os.environ.get("RAY_ADDRESS") or "auto")
    task = ray.remote(num_cpus=0, max_retries=0)(_pack)
    asked = {
        f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})": task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(str(run.resolve()))
        for node in ray.nodes()
        if node["Alive"]
    }
    with tempfile.TemporaryDirectory(prefix="phasesync-") as scratch:
        together = Path(scratch) / "run"
        nodes = {
            name: _taken(answer, Path(scratch) / f"{number}.pack.tar.gz", together, ask_s)
            for number, (name, answer) in enumerate(asked.items())
        }
        if not together.is_dir():
            said = "; ".join(f"{name}: {each['why']}" for name, each in nodes.items())
            raise LogError(f"{run}: no node has a journal there ({said})")
        return collect(together, out, nodes=nodes)


def _connect(address: str) -> None:
    """Join the cluster. Ray asks for minutes after a head that is gone: so a knock comes first."""
    host, colon, port = address.rpartition(":")
    try:
        if colon and port.isdigit() and "/" not in host:
            socket.create_connection((host.strip("[]"), int(port)), KNOCK_S).close()
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, OverflowError, RuntimeError, ValueError, RayError) as error:
        where = "on this machine" if address == "auto" else f"at {address}"
        raise InputError(
            f"no Ray cluster can be joined {where} ({error}); --address takes its host:port, and "
            "without --ray the journals of this machine alone are packed"
        ) from error


def _pack(run: str) -> tuple[bytes, str]:
    """On a node: its journals packed, or why there are none."""
    with tempfile.TemporaryDirectory(prefix="phasesync-") as scratch:
        out = Path(scratch) / "node.pack.tar.gz"
        try:
            collect(Path(run), out)
        except LogError as error:
            return b"", str(error)
        return out.read_bytes(), ""


def _taken(answer: Any, pack: Path, together: Path, ask_s: float) -> Mapping[str, Any]:
    """Lay what one node sent beside the rest."""
    try:
        data, why = ray.get(answer, timeout=ask_s)
    except (RayError, TimeoutError) as error:
        return {"files": 0, "why": str(error).splitlines()[0][:300]}
    if not data:
        return {"files": 0, "why": why}
    pack.write_bytes(data)
    count = 0
    with unpacked([pack]) as (inside,):
        for path in sorted(inside.path.rglob("*")):
            if not path.is_file() or path.name == "pack.json":
                continue
            place = together / path.relative_to(inside.path)
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.exists() or place.stat().st_size < path.stat().st_size:
                place.write_bytes(path.read_bytes())
            count += path.suffix != ".yaml"
    return {"files": count, "why": ""}
