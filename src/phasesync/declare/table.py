"""The other form of a protocol: phases and fences by name, and a transition table that orders them.

A row `{role, from, on, to, fence}` says: in state `from`, once `fence` is open, `on` leads to `to`.
"""

from collections.abc import Iterator, Mapping

from phasesync.core.model import RoleName
from phasesync.core.protocol import StepDecl
from phasesync.declare.draft import Draft
from phasesync.declare.steps import FENCE_KEYS, read_fence, read_phase, refuse_twins
from phasesync.nodes import Complaints, Node, Text, describe

__all__ = ("ROW_KEYS", "read_table")

ROW_KEYS = ("role", "from", "on", "to", "fence")


def read_table(draft: Draft, own: Mapping[str, Node]) -> list[StepDecl]:
    """Phases and fences by name, and rows that put them in order."""
    say = draft.complaints
    phases = say.named(own.get("phases"), "phases", "write `phases: {NAME: {...}}`")
    fences = say.named(own.get("fences"), "fences", "write `fences: {NAME: {...}}`")
    used: set[str] = set()
    steps: list[StepDecl] = []
    for role, rows in _rows(draft, own["transitions"]).items():
        for row in _chained(rows, say):
            for kind, known in (("fence", fences), ("on", phases)):
                word = row.get(kind)
                if word is None:
                    continue
                name = say.reference(word, "fence" if kind == "fence" else "phase", known)
                if name is None:
                    continue
                used.add(name)
                key, node = known[name]
                if kind == "on":
                    steps.append(read_phase(draft, Text(name, key.place), node, role))
                elif table := say.table(node, f"fence {name!r}", "write {...}"):
                    body = say.fields(table, f"fence {name!r}", FENCE_KEYS)
                    steps.append(read_fence(draft, Text(name, key.place), body, role))
    for name, (key, _) in (*phases.items(), *fences.items()):
        if name not in used:
            say.say(key, f"nobody reaches {name!r}", "add a transition, or drop it")
    return refuse_twins(draft, steps)


def _rows(draft: Draft, node: Node) -> dict[RoleName, list[dict[str, Text]]]:
    say, shape = draft.complaints, "write {role: R, from: A, on: PHASE, to: B}"
    found: dict[RoleName, list[dict[str, Text]]] = {}
    for item in say.items(node, "transitions", f"write a list of {shape[6:]}"):
        table = say.table(item, "a transition", shape)
        if table is None:
            continue
        own = say.fields(table, "a transition", ROW_KEYS, ("role", "from", "to"))
        words = {
            key: value
            for key, value in own.items()
            if isinstance(value, Text) and say.name(value, f"{key!r} of a transition")
        }
        if len(words) < len(own):
            for key, value in own.items():
                if not isinstance(value, Text):
                    say.say(value, f"{key!r} of a transition is {describe(value)}", shape)
            continue
        if "on" not in own and "fence" not in own:
            say.say(item, "a transition without 'on' and 'fence' does nothing", shape)
        if {"role", "from", "to"} <= words.keys():
            role = say.reference(own["role"], "role", dict.fromkeys(draft.active))
            if role is not None:
                found.setdefault(RoleName(role), []).append(words)
    return found


def _chained(rows: list[dict[str, Text]], say: Complaints) -> Iterator[dict[str, Text]]:
    """The rows of one role in the order in which it takes them, from the first row's state on."""
    ways: dict[str, dict[str, Text]] = {}
    for row in rows:
        other = ways.setdefault(row["from"].value, row)
        if other is not row:
            wrong = f"two ways lead on from state {row['from'].value!r}"
            first = f"the other is in line {other['from'].place.line}"
            say.say(row["from"], wrong, f"a role has one way through an epoch; {first}")
    row = rows[0]
    start = state = row["from"].value
    while state in ways:
        row = ways.pop(state)
        yield row
        state = row["to"].value
    if state != start:
        right = f"lead it back to {start!r}, where the next one begins"
        say.say(row["to"], f"the epoch ends in state {state!r}", right)
    for row in ways.values():
        wrong = f"nobody reaches state {row['from'].value!r}"
        say.say(row["from"], wrong, "lead a transition to it, or drop it")
