"""A protocol as a picture: Mermaid, Graphviz, plain text or SVG. Pure: a protocol in, text out."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple
from xml.sax.saxutils import escape

from phasesync.core.protocol import WORLD, FenceDecl, Protocol, StepDecl
from phasesync.report import phrases

__all__ = ("FORMATS", "draw")

_WIDTH = 100


class _Node(NamedTuple):
    """A step as it is drawn; a fence of the world is one node for all roles."""

    key: str
    role: str
    name: str
    fence: bool
    by: str
    outside: bool
    says: str


def draw(protocol: Protocol, form: str) -> str:
    """The picture in one of `FORMATS`."""
    return FORMATS[form](protocol)


def _nodes(protocol: Protocol, role: str) -> list[_Node]:
    return [_node(protocol, step) for step in protocol.steps if step.role == role]


def _node(protocol: Protocol, step: StepDecl) -> _Node:
    says = phrases.step(protocol, step)
    if isinstance(step, FenceDecl):
        shared = step.scope == WORLD
        key = step.name if shared else f"{step.role}_{step.name}"
        return _Node(f"fence_{key}", step.role, step.name, True, "", step.joined, says)
    by = step.by or ""
    return _Node(f"{step.role}_{step.name}", step.role, step.name, False, by, step.outside, says)


# ---------------------------------------------------------------------------------- mermaid


def _mermaid(protocol: Protocol) -> str:
    lines = ["flowchart TD"]
    seen: set[str] = set()
    for role in protocol.active_roles:
        nodes = _nodes(protocol, role)
        lines.append(f'  subgraph {role}_lane["{role}"]')
        for node in nodes:
            if node.key not in seen:
                seen.add(node.key)
                lines.append(f"    {node.key}{_mermaid_shape(node)}")
        lines.append("  end")
        lines += [f"  {one.key} --> {two.key}" for one, two in _turns(nodes)]
        if len(nodes) > 1:
            lines.append(f"  {nodes[-1].key} -. next epoch .-> {nodes[0].key}")
    lines += _mermaid_classes(protocol)
    return "\n".join(lines) + "\n"


def _mermaid_shape(node: _Node) -> str:
    text = f"<b>{node.name}</b>"
    if node.says:
        text += "<br/>" + "<br/>".join(_mermaid_text(part) for part in node.says.split("; "))
    return f'{{{{"{text}"}}}}' if node.fence else f'["{text}"]'


def _mermaid_text(text: str) -> str:
    """Text within a quoted label; Mermaid writes entities with `#`."""
    for raw, entity in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;")):
        text = text.replace(raw, entity)
    return text


def _mermaid_classes(protocol: Protocol) -> Iterator[str]:
    nodes = [node for role in protocol.active_roles for node in _nodes(protocol, role)]
    for name, style, chosen in (
        ("fence", "fill:#fde68a,stroke:#92400e", [n.key for n in nodes if n.fence]),
        ("leader", "fill:#bfdbfe,stroke:#1e40af", [n.key for n in nodes if n.by]),
        ("outside", "stroke-dasharray:4 3", [n.key for n in nodes if n.outside]),
    ):
        if chosen:
            yield f"  classDef {name} {style}"
            yield f"  class {','.join(dict.fromkeys(chosen))} {name}"


def _turns(nodes: list[_Node]) -> Iterator[tuple[_Node, _Node]]:
    yield from pairwise(nodes)


# -------------------------------------------------------------------------------------- dot


def _dot(protocol: Protocol) -> str:
    lines = [f'digraph "{protocol.name}" {{', "  rankdir=TB;", '  node [fontname="sans-serif"];']
    seen: set[str] = set()
    for role in protocol.active_roles:
        nodes = _nodes(protocol, role)
        for node in nodes:
            if node.key not in seen:
                seen.add(node.key)
                lines.append(f"  {node.key} [{_dot_attributes(node)}];")
        lines += [f"  {one.key} -> {two.key};" for one, two in _turns(nodes)]
        if len(nodes) > 1:
            again = 'style=dashed, label="next epoch", constraint=false'
            lines.append(f"  {nodes[-1].key} -> {nodes[0].key} [{again}];")
    lines.append("}")
    return "\n".join(lines) + "\n"


def _dot_attributes(node: _Node) -> str:
    parts = [node.name, *(part for part in node.says.split("; ") if part)]
    label = "\\n".join(part.replace("\\", "\\\\").replace('"', '\\"') for part in parts)
    shape = "hexagon" if node.fence else "box"
    style = "filled,dashed" if node.outside else "filled"
    return f'label="{label}", shape={shape}, style="{style}", fillcolor="{_fill(node)}"'


def _fill(node: _Node) -> str:
    if node.fence:
        return "#fde68a"
    return "#bfdbfe" if node.by else "#ffffff"


# ------------------------------------------------------------------------------------- text


def _text(protocol: Protocol) -> str:
    lines = [protocol.name]
    if protocol.summary:
        lines += [protocol.summary]
    for role in protocol.active_roles:
        nodes = _nodes(protocol, role)
        width = max((len(node.name) for node in nodes), default=0)
        lines += ["", f"{role}: one epoch, again and again"]
        for node in nodes:
            lines += _text_rows(node, width)
    if protocol.recover:
        lines += ["", "after a failed epoch"]
        nodes = [_node(protocol, step) for step in protocol.recover]
        width = max(len(node.name) for node in nodes)
        for node in nodes:
            lines += _text_rows(node, width)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _text_rows(node: _Node, width: int) -> Iterator[str]:
    """One step: `=` is a fence, `*` the leader's, `.` outside; long words go on below."""
    mark = "=" if node.fence else "*" if node.by else "|"
    mark += "." if node.outside else " "
    head, rest = f"  {mark} {node.name:<{width}}  ", node.says.split("; ")
    line = head
    for number, part in enumerate(rest):
        more = part + ("; " if number < len(rest) - 1 else "")
        if len(line) + len(more) > _WIDTH and line != head:
            yield line
            line = " " * len(head)
        line += more
    yield line


# -------------------------------------------------------------------------------------- svg

_LANE = 460
_ROW = 46
_TOP = 64


def _svg(protocol: Protocol) -> str:
    lanes = [_nodes(protocol, role) for role in protocol.active_roles]
    rows = _rows(lanes)
    high = _TOP + _ROW * (max(rows.values(), default=0) + 1) + 16
    wide = _LANE * len(lanes) + 24
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" '
        f'height="{high}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(protocol.name)}</title>",
        f'<rect width="{wide}" height="{high}" fill="#ffffff"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(protocol.name)}</text>',
    ]
    for number, (role, nodes) in enumerate(zip(protocol.active_roles, lanes, strict=True)):
        x = 12 + _LANE * number
        lines.append(f'<text x="{x}" y="46" fill="#555555">{escape(role)}</text>')
        bottom = _TOP + _ROW * max((rows[node.key] for node in nodes), default=0)
        lines.append(
            f'<line x1="{x + 8}" y1="{_TOP}" x2="{x + 8}" y2="{bottom + 28}" stroke="#999999"/>'
        )
        for node in nodes:
            lines += _svg_node(node, x, _TOP + _ROW * rows[node.key])
    return "\n".join((*lines, "</svg>")) + "\n"


def _rows(lanes: list[list[_Node]]) -> dict[str, int]:
    """Which row each step is drawn in; a fence of several lanes is level in all of them."""
    rows: dict[str, int] = {}
    for _ in lanes:
        for lane in lanes:
            row = 0
            for node in lane:
                row = rows[node.key] = max(row, rows.get(node.key, 0))
                row += 1
    return rows


def _svg_node(node: _Node, x: int, y: int) -> Iterator[str]:
    dash = ' stroke-dasharray="4 3"' if node.outside else ""
    edge = "#92400e" if node.fence else "#1e40af" if node.by else "#555555"
    yield (
        f'<rect x="{x}" y="{y}" width="{_LANE - 16}" height="36" rx="{2 if node.fence else 8}" '
        f'fill="{_fill(node)}" stroke="{edge}"{dash}/>'
    )
    yield f'<text x="{x + 10}" y="{y + 15}" font-weight="bold">{escape(node.name)}</text>'
    yield (
        f'<text x="{x + 10}" y="{y + 30}" font-size="10" fill="#333333">'
        f"{escape(_cut(node.says, 82))}</text>"
    )


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


FORMATS: dict[str, Callable[[Protocol], str]] = {
    "mermaid": _mermaid,
    "dot": _dot,
    "text": _text,
    "svg": _svg,
}
