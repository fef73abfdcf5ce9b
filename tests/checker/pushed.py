"""One small protocol to plant bugs in: a leader writes the weights of an engine over two ranks."""

__all__ = ("replica",)

HEAD = """
phasesync: 1
protocol: pushed
groups:
  replica: {of: trainer, size: 2}
roles:
  trainer: {place: one per device}
  engine:  {place: one per replica, driven_by: leader}
resources:
  weights: {owner: engine, content: version, start: {mapped: true}}
"""


def replica(rest: str) -> str:
    """The protocol's text, with what `rest` says after its first resource."""
    return HEAD + rest
