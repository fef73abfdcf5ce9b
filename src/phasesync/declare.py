"""From the nodes of a protocol file to the declaration that they make.

A key that is accepted does something; what nothing implements is refused by name. All complaints
of a file are collected: a section that cannot be read still lends its names to the others, so that
one mistake is one complaint.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import chain

from phasesync.core.condition import Condition, ConditionError, names, parse
from phasesync.core.model import FenceName, GroupName, OptionName, Phase, ResourceName, RoleName
from phasesync.core.options import doubt, suggest
from phasesync.core.protocol import (
    DEVICE,
    EVERYWHERE,
    WORLD,
    Effect,
    Evidence,
    FenceDecl,
    GroupDecl,
    Invariant,
    InvariantKind,
    OptionDecl,
    PhaseDecl,
    Place,
    Protocol,
    ResourceDecl,
    Retry,
    RoleDecl,
    StepDecl,
    Verb,
)
from phasesync.errors import ProtocolError
from phasesync.nodes import Complaints, Items, Node, Table, Text, describe

__all__ = ("ESTABLISHED", "FORMAT", "MEASURED", "declare")

FORMAT = "1"
ESTABLISHED = ("device_synchronised", "ipc_collected")
MEASURED = ("free_bytes",)

CONDITION_MAX = 500
_SECTIONS = (
    "phasesync", "protocol", "summary", "options", "groups", "roles", "resources", "never",
    "phases", "fences", "transitions", "recover",
)  # fmt: skip
_RESERVED = {
    "option": ("and", "or", "not", "in", "true", "false", WORLD, DEVICE, EVERYWHERE),
    "group": (WORLD, DEVICE, EVERYWHERE, "start"),
    "role": (WORLD, DEVICE, EVERYWHERE),
    "resource": (),
    "phase": ("fence",),
    "fence": ("plan", "stopped"),
}
_VERBS = tuple(verb.value for verb in Verb)
_PHASE_KEYS = ("by", *_VERBS, "when", "outside", "enqueued", "retry", "deadline_s")
_FENCE_KEYS = ("scope", "deadline_s", "requires", "joined", "when")
_ROW_KEYS = ("role", "from", "on", "to", "fence")
_PLACED = re.compile(r"one per ([A-Za-z][A-Za-z0-9_]*)")
_EVIDENCE = re.compile(r"([a-z_]+)\s*(>=)\s*([0-9]{1,15})\s*(|KiB|MiB|GiB)")
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def declare(root: Node, file: str) -> tuple[Protocol | None, tuple[ProtocolError, ...]]:
    """The protocol that a file declares, or everything that is wrong with its words."""
    complaints = Complaints(file)
    protocol = _Author(complaints).protocol(root)
    found = complaints.in_order()
    return (None if found else protocol), found


class _Author:
    """Reads one file; the fields are the names that later sections refer to."""

    def __init__(self, complaints: Complaints) -> None:
        self.complaints = complaints
        self.options: dict[str, OptionDecl] = {}
        self.broken: set[str] = set()  # options whose own declaration is wrong
        self.groups: dict[str, tuple[Text, Node]] = {}
        self.roles: dict[str, RoleDecl] = {}
        self.resources: dict[str, tuple[Text, Node]] = {}

    def protocol(self, root: Node) -> Protocol | None:
        say = self.complaints
        table = say.table(root, "the file", "begin with `phasesync: 1`")
        if table is None:
            return None
        own = say.fields(table, "the file", _SECTIONS, ("phasesync", "protocol", "roles", "phases"))
        if (version := own.get("phasesync")) is not None:
            say.choice(version, "the version of the language", (FORMAT,), FORMAT)
        sections = {
            name: say.named(own.get(name), name, f"write `{name}: {{NAME: ...}}`")
            for name in ("options", "groups", "roles", "resources")
        }
        self.groups, self.resources = sections["groups"], sections["resources"]
        self._refuse_reserved(sections)
        options = tuple(self._options(sections["options"]))
        self.roles = {name: RoleDecl(name=RoleName(name)) for name in sections["roles"]}
        groups = tuple(self._groups())
        self.roles = {role.name: role for role in self._roles(sections["roles"])}
        resources = tuple(self._resources())
        invariants = tuple(self._never(own.get("never")))
        steps = tuple(self._steps(own))
        recover = tuple(self._recover(own.get("recover"), steps))
        name = say.name(own["protocol"], "the protocol's name") if "protocol" in own else None
        return Protocol(
            name=name or "",
            summary=say.line(own.get("summary"), "summary"),
            options=options,
            groups=groups,
            roles=tuple(self.roles.values()),
            resources=resources,
            invariants=invariants,
            steps=steps,
            recover=recover,
            file=say.file,
        )

    def _refuse_reserved(self, sections: Mapping[str, Mapping[str, tuple[Text, Node]]]) -> None:
        for section, declared in sections.items():
            kind = section.removesuffix("s")
            for key, _ in declared.values():
                self._reserved(key, kind)

    def _reserved(self, key: Text, kind: str) -> None:
        if key.value in _RESERVED[kind]:
            self.complaints.say(
                key, f"{key.value!r} means something else here", f"give the {kind} another name"
            )

    # ------------------------------------------------------------------ options

    def _options(self, declared: Mapping[str, tuple[Text, Node]]) -> Iterator[OptionDecl]:
        for name, (key, node) in declared.items():
            before = len(self.complaints.found)
            option = self._option(OptionName(name), key, node)
            if len(self.complaints.found) > before:
                self.broken.add(name)
            self.options[name] = option
            yield option

    def _option(self, name: OptionName, key: Text, node: Node) -> OptionDecl:
        say, what = self.complaints, f"option {name!r}"
        table = say.table(node, what, "write {type: bool, default: true}")
        blank = OptionDecl(name=name, type="bool", default=False, place=key.place)
        if table is None:
            return blank
        own = say.fields(table, what, ("type", "default", "min", "max", "of"), ("type", "default"))
        kind = say.choice(own.get("type"), f"type of {what}", ("bool", "int", "enum"), "bool")
        for extra, fits in (("min", "int"), ("max", "int"), ("of", "enum")):
            if extra in own and kind != fits:
                say.say(own[extra], f"{extra!r} is for type {fits}", f"{what} is of type {kind}")
        match kind:
            case "int":
                return self._int_option(name, key, own)
            case "enum":
                return self._enum_option(name, key, table, own)
            case _:
                default = say.truth(own.get("default"), f"default of {what}")
                return OptionDecl(name=name, type="bool", default=default, place=key.place)

    def _int_option(self, name: OptionName, key: Text, own: Mapping[str, Node]) -> OptionDecl:
        say, what = self.complaints, f"option {name!r}"
        default = say.integer(own.get("default"), f"default of {what}") or 0
        least = say.integer(own.get("min"), f"min of {what}")
        most = say.integer(own.get("max"), f"max of {what}")
        if least is not None and most is not None and most < least:
            say.say(own["max"], f"max {most} is less than min {least}", "swap them")
        elif least is not None and default < least:
            say.say(own.get("default", key), f"default {default} is less than min {least}", "")
        elif most is not None and default > most:
            say.say(own.get("default", key), f"default {default} is more than max {most}", "")
        return OptionDecl(
            name=name, type="int", default=default, least=least, most=most, place=key.place
        )

    def _enum_option(
        self, name: OptionName, key: Text, table: Table, own: Mapping[str, Node]
    ) -> OptionDecl:
        say, what = self.complaints, f"option {name!r}"
        if "of" not in own:
            say.say(table, f"{what} has no 'of'", "add `of: [WORD, WORD]`")
        nodes = say.items(own["of"], f"'of' of {what}", "write [WORD, WORD]") if own else ()
        choices: list[str] = []
        for node in nodes:
            word = say.name(node, f"a choice of {what}")
            if word in choices:
                say.say(node, f"{word!r} is given twice", "keep one of them")
            elif word in ("true", "false", "and", "or", "not", "in"):
                say.say(node, f"{word!r} means something else in conditions", "choose another word")
            elif word is not None:
                choices.append(word)
        if not choices:
            say.say(table, f"{what} has no choices", "write `of: [WORD, WORD]`")
        first = choices[0] if choices else ""
        default = say.choice(own.get("default"), f"default of {what}", choices or (first,), first)
        return OptionDecl(
            name=name, type="enum", default=default, choices=tuple(choices), place=key.place
        )

    def condition(
        self, node: Node | None, what: str, *, constant: bool = False
    ) -> Condition | None:
        """A condition over options; `constant` where one that names none makes sense."""
        if node is None:
            return None
        say = self.complaints
        text = say.text(node, what, "write a condition over options")
        if text is None:
            return None
        if len(text.value) > CONDITION_MAX:
            say.say(text, f"{what} is longer than {CONDITION_MAX} characters", "shorten it")
            return None
        try:
            found = parse(text.value, frozenset(self.options))
        except ConditionError as error:
            right = "conditions are made of options, and, or, not, ==, !=, <, <=, >, >=, in [..]"
            say.say(_inside(text, error.column), f"{what} does not parse: {error}", right)
            return None
        if names(found) & self.broken:
            return found
        mistake = doubt(found, self.options)
        if mistake is not None:
            wrong, right, word = mistake
            if word in self.resources and word not in self.options:
                right = "conditions speak of options; for memory, use needs: or never:"
            at = re.search(rf"\b{re.escape(word)}\b", text.value) if word else None
            say.say(_inside(text, at.start() if at else 0), f"{what}: {wrong}", right)
            return None
        if not constant and not names(found):
            say.say(text, f"{what} names no option", "drop it, or name one")
        return found

    # ---------------------------------------------------------- groups and roles

    def _groups(self) -> Iterator[GroupDecl]:
        say = self.complaints
        for name, (key, node) in self.groups.items():
            what = f"group {name!r}"
            table = say.table(node, what, "write {of: ROLE, size: 2, leader: first}")
            if table is None:
                continue
            own = say.fields(table, what, ("of", "size", "leader"), ("of", "size"))
            of = say.reference(own["of"], "role", self.roles) if "of" in own else None
            size = self._size(own["size"], what) if "size" in own else None
            leader = say.choice(own.get("leader"), f"leader of {what}", ("first",), "first")
            yield GroupDecl(
                name=GroupName(name),
                of=RoleName(of or ""),
                size=size or 1,
                leader=leader,
                place=key.place,
            )

    def _size(self, node: Node, what: str) -> int | OptionName | None:
        say = self.complaints
        if isinstance(node, Text) and node.value in self.options:
            option = self.options[node.value]
            if node.value in self.broken:
                return option.name
            if option.type != "int":
                say.say(node, f"size of {what} is of type {option.type}", "give it type int")
            elif option.least is None or option.least < 1:
                say.say(node, f"size of {what} may be less than 1", f"give {node.value} min: 1")
            return option.name
        if isinstance(node, Text) and node.plain and re.fullmatch(r"[1-9][0-9]{0,5}", node.value):
            return int(node.value)
        right = "write a number, at least 1, or an int option"
        say.say(node, f"size of {what} is {describe(node)}", right)
        return None

    def _roles(self, declared: Mapping[str, tuple[Text, Node]]) -> Iterator[RoleDecl]:
        for name, (key, node) in declared.items():
            yield self._role(RoleName(name), key, node)
        if not declared:
            return

    def _role(self, name: RoleName, key: Text, node: Node) -> RoleDecl:
        say, what = self.complaints, f"role {name!r}"
        blank = RoleDecl(name=name, place=key.place)
        table = say.table(node, what, "write {place: one per device}")
        if table is None:
            return blank
        own = say.fields(table, what, ("place", "driven_by"), ("place",))
        by = own.get("driven_by")
        driven = say.choice(by, f"driven_by of {what}", ("leader",), "leader") if by else None
        per = self._per(own.get("place"), what)
        if driven is None and per != DEVICE:
            say.say(own["place"], f"{what} acts, and has one rank per {per}", _ACTIVE)
        if driven is not None and per == DEVICE and "place" in own:
            say.say(own["place"], f"{what} is driven by a leader, of no group", _PASSIVE)
        return RoleDecl(name=name, per=per, driven_by=driven, place=key.place)

    def _per(self, node: Node | None, what: str) -> str:
        if node is None:
            return DEVICE
        known = (DEVICE, *self.groups)
        match = _PLACED.fullmatch(node.value) if isinstance(node, Text) else None
        if match is None or match[1] not in known:
            right = suggest(match[1], known, "places") if match else "write `one per device`"
            self.complaints.say(node, f"place of {what} is {describe(node)}", right)
            return DEVICE
        return match[1]

    # ------------------------------------------------------ resources and never

    def _resources(self) -> Iterator[ResourceDecl]:
        say = self.complaints
        for name, (key, node) in self.resources.items():
            what = f"resource {name!r}"
            table = say.table(node, what, "write {owner: ROLE}")
            if table is None:
                continue
            own = say.fields(table, what, ("owner", "content", "start"), ("owner",))
            owner = say.reference(own["owner"], "role", self.roles) if "owner" in own else None
            content = own.get("content")
            if content is not None:
                say.choice(content, f"content of {what}", ("version",), "version")
            yield ResourceDecl(
                name=ResourceName(name),
                owner=RoleName(owner or ""),
                content=content is not None,
                start=self._start(own.get("start"), what),
                place=key.place,
            )

    def _start(self, node: Node | None, what: str) -> Condition | None:
        if node is None:
            return None
        say = self.complaints
        table = say.table(node, f"start of {what}", "write {mapped: true}")
        if table is None:
            return None
        own = say.fields(table, f"start of {what}", ("mapped",), ("mapped",))
        return self.condition(own.get("mapped"), f"mapped of {what}", constant=True)

    def _never(self, node: Node | None) -> Iterator[Invariant]:
        if node is None:
            return
        say, shape = self.complaints, "write {together: [A, B], on: device}"
        for item in say.items(node, "never", f"write a list of {shape[6:]}"):
            table = say.table(item, "an item of never", shape)
            if table is None:
                continue
            own = say.fields(table, "an item of never", ("together", "on", "when"), ("together",))
            say.choice(own.get("on"), "'on' of never", (DEVICE,), DEVICE)
            found = self._together(own["together"]) if "together" in own else ()
            yield Invariant(
                kind=InvariantKind.NEVER,
                resources=found,
                when=self.condition(own.get("when"), "when"),
                place=item.place,
            )

    def _together(self, node: Node) -> tuple[ResourceName, ...]:
        say = self.complaints
        found: dict[str, None] = {}
        for item in say.items(node, "together", "write [A, B]"):
            name = say.reference(item, "resource", self.resources)
            if name in found:
                say.say(item, f"{name!r} is given twice", "name different resources")
            elif name is not None:
                found[name] = None
        if isinstance(node, Items) and len(node.items) < 2:
            say.say(node, "never speaks of fewer than two resources", "name two or more")
        return tuple(map(ResourceName, found))

    # ---------------------------------------------------------- phases and fences

    def _active(self) -> list[RoleName]:
        return [role.name for role in self.roles.values() if not role.passive]

    def _steps(self, own: Mapping[str, Node]) -> list[StepDecl]:
        say = self.complaints
        node = own.get("phases")
        if "transitions" in own:
            return self._table_form(own)
        if "fences" in own:
            right = "put each fence where it stands, as `- fence: NAME`, in phases"
            say.say(own["fences"], "'fences' goes with 'transitions' alone", right)
        if node is None:
            return []
        return self._unique(self._by_role(node, "phases"))

    def _by_role(self, node: Node, what: str) -> list[StepDecl]:
        """A list of steps for the one active role, or a list for each role by name."""
        say, active = self.complaints, self._active()
        if isinstance(node, Table):
            found: list[StepDecl] = []
            for name, (key, steps) in say.named(node, what, "").items():
                if name not in self.roles:
                    say.unknown(key, "role", active)
                elif name not in active:
                    right = f"roles that act are: {', '.join(active)}"
                    say.say(key, f"role {name!r} is driven and has no {what}", right)
                else:
                    found += self._list(steps, RoleName(name), what)
            return found
        if len(active) != 1 and self.roles:
            right = f"write `{what}: {{ROLE: [...]}}` for: {', '.join(active)}"
            right = right if active else "drop driven_by from one role"
            say.say(node, f"{len(active)} roles act, so {what} must say whose they are", right)
        return list(self._list(node, active[0] if active else RoleName(""), what))

    def _list(self, node: Node, role: RoleName, what: str) -> Iterator[StepDecl]:
        items = self.complaints.items(node, what, "write a list of `- NAME: {...}`")
        if not items and isinstance(node, Items):
            self.complaints.say(node, f"{what} is empty", "write a list of `- NAME: {...}`")
        for item in items:
            step = self._step(item, role)
            if step is not None:
                yield step

    def _step(self, node: Node, role: RoleName) -> StepDecl | None:
        say, shape = self.complaints, "write `- NAME: {...}` or `- fence: NAME`"
        if isinstance(node, Text) and node.value:
            shape = f"write `{node.value}: {{}}`"
        table = say.table(node, "a step", shape)
        if table is None:
            return None
        if any(key.value == "fence" for key, _ in table.entries):
            own = say.fields(table, "a fence", ("fence", *_FENCE_KEYS))
            if say.name(own["fence"], "the fence's name") is None:
                return None
            name = own.pop("fence")
            assert isinstance(name, Text)
            return self._fence(name, own, role)
        if len(table.entries) != 1:
            beside = table.entries[1].key if table.entries else table
            wrong = "a step has a key beside its name" if table.entries else "a step has no name"
            say.say(beside, wrong, f"{shape}, everything else inside the braces")
            return None
        key, body = table.entries[0]
        return self._phase(key, body, role) if say.name(key, "the phase's name") else None

    def _phase(self, key: Text, node: Node, role: RoleName) -> PhaseDecl:
        say, what = self.complaints, f"phase {key.value!r}"
        self._reserved(key, "phase")
        own: dict[str, Node] = {}
        if node != Text("", node.place) and (table := say.table(node, what, "write {...}")):
            own = say.fields(table, what, _PHASE_KEYS)
        by = own.get("by")
        retry = say.choice(own.get("retry"), f"retry of {what}", map(str, Retry), Retry.NEVER)
        return PhaseDecl(
            name=Phase(key.value),
            role=role,
            by=say.choice(by, f"by of {what}", ("leader",), "leader") if by else None,
            effects=tuple(
                chain.from_iterable(
                    self._effects(Verb(verb), node) for verb, node in own.items() if verb in _VERBS
                )
            ),
            when=self.condition(own.get("when"), "when"),
            outside=say.truth(own.get("outside"), f"outside of {what}"),
            enqueued=say.truth(own.get("enqueued"), f"enqueued of {what}"),
            retry=Retry(retry),
            deadline_s=say.seconds(own.get("deadline_s"), f"deadline_s of {what}"),
            place=key.place,
        )

    def _effects(self, verb: Verb, node: Node) -> Iterator[Effect]:
        """`verb: NAME`, `verb: [NAME, NAME]` or `verb: {NAME: REACH}`."""
        say = self.complaints
        seen: set[str] = set()
        for name_node, reach_node in _pairs(node):
            name = say.reference(name_node, "resource", self.resources)
            if name in seen:
                say.say(name_node, f"{verb} names {name!r} twice", "keep one of them")
            if name is None:
                continue
            seen.add(name)
            yield Effect(verb, ResourceName(name), self._reach(verb, name_node, reach_node))
        if isinstance(node, Items | Table) and not seen:
            say.say(node, f"{verb} names no resource", "name one, or drop it")

    def _reach(self, verb: Verb, name: Node, node: Node | None) -> str:
        say = self.complaints
        if verb is Verb.ENSURES:
            if node is None:
                say.say(name, "ensures does not say what", "write {NAME: start}")
            else:
                say.choice(node, "what ensures names", ("start",), "start")
            return DEVICE
        known = {DEVICE, EVERYWHERE, *self.groups}
        if node is None:
            return DEVICE
        if isinstance(node, Text) and node.value in known:
            return node.value
        word = node.value if isinstance(node, Text) else ""
        right = suggest(word, [DEVICE, *self.groups, EVERYWHERE], "places")
        say.say(node, f"{verb} cannot reach {describe(node)}", right)
        return DEVICE

    def _fence(self, name: Text, own: Mapping[str, Node], role: RoleName) -> FenceDecl:
        say, what = self.complaints, f"fence {name.value!r}"
        self._reserved(name, "fence")
        if "deadline_s" not in own:
            say.say(name, f"{what} has no deadline_s", "add `deadline_s: 300`")
        joined = own.get("joined")
        if joined is not None:
            say.choice(joined, f"joined of {what}", ("outside",), "outside")
        established, evidence = self._requires(own.get("requires"), what)
        if joined is not None and "requires" in own:
            right = "drop requires: nobody can act before a join that the caller makes"
            say.say(own["requires"], f"{what} is joined outside", right)
        return FenceDecl(
            name=FenceName(name.value),
            role=role,
            scope=self._scope(own.get("scope"), what),
            deadline_s=say.seconds(own.get("deadline_s"), f"deadline_s of {what}") or 1.0,
            established=established,
            evidence=evidence,
            joined=joined is not None,
            when=self.condition(own.get("when"), "when"),
            place=name.place,
        )

    def _scope(self, node: Node | None, what: str) -> str:
        if node is None:
            return WORLD
        say, scopes = self.complaints, (WORLD, *self.groups)
        word = node.value if isinstance(node, Text) else ""
        if word in scopes or word in self.broken:
            return word
        option = self.options.get(word)
        if option is None:
            right = suggest(word, [*scopes, *self.options], "scopes")
            say.say(node, f"scope of {what} cannot be {describe(node)}", right)
        elif option.type != "enum" or not set(option.choices) <= set(scopes):
            right = f"an option that is a scope is an enum of: {', '.join(scopes)}"
            say.say(node, f"scope of {what} is option {word!r}, which holds no scope", right)
        return word or WORLD

    def _requires(
        self, node: Node | None, what: str
    ) -> tuple[tuple[str, ...], tuple[Evidence, ...]]:
        """What is established first, then what is measured, whatever the order in the file."""
        say = self.complaints
        established: list[str] = []
        evidence: list[Evidence] = []
        items = (
            say.items(node, f"requires of {what}", "write [device_synchronised]") if node else ()
        )
        for item in items:
            text = item.value if isinstance(item, Text) else ""
            match = _EVIDENCE.fullmatch(text)
            if text in established or (match and match[1] in [each.name for each in evidence]):
                say.say(item, f"{what} requires {text.split()[0]!r} twice", "keep one of them")
            elif text in ESTABLISHED:
                established.append(text)
            elif match and match[1] in MEASURED:
                evidence.append(Evidence(match[1], match[2], int(match[3]) * _UNITS[match[4]]))
            else:
                known = [*ESTABLISHED, "free_bytes >= 1GiB"]
                right = suggest(text, known, "preconditions")
                say.say(item, f"{what} cannot require {describe(item)}", right)
        return tuple(established), tuple(evidence)

    def _unique(self, steps: list[StepDecl], before: tuple[StepDecl, ...] = ()) -> list[StepDecl]:
        """A role has a name once; a fence of several roles is the same for all of them."""
        say = self.complaints
        seen = {(step.role, step.name): step for step in before}
        fences = {step.name: step for step in before if isinstance(step, FenceDecl)}
        for step in steps:
            other = seen.setdefault((step.role, step.name), step)
            if other is not step:
                first = f"the first is in line {other.place.line}"
                say.say(step.place, f"{step.name!r} is declared twice", f"rename one; {first}")
            elif isinstance(step, FenceDecl):
                same = fences.setdefault(step.name, step)
                if _terms(same) != _terms(step):
                    right = f"make it equal to line {same.place.line}"
                    wrong = f"fence {step.name!r} differs between {same.role} and {step.role}"
                    say.say(step.place, wrong, right)
        return steps

    def _recover(self, node: Node | None, steps: tuple[StepDecl, ...]) -> list[StepDecl]:
        return self._unique(self._by_role(node, "recover"), steps) if node is not None else []

    # ---------------------------------------------------------- transition tables

    def _table_form(self, own: Mapping[str, Node]) -> list[StepDecl]:
        """Phases and fences by name, and rows that put them in order."""
        say = self.complaints
        phases = say.named(own.get("phases"), "phases", "write `phases: {NAME: {...}}`")
        fences = say.named(own.get("fences"), "fences", "write `fences: {NAME: {...}}`")
        used: set[str] = set()
        steps: list[StepDecl] = []
        for role, rows in self._rows(own["transitions"]).items():
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
                        steps.append(self._phase(Text(name, key.place), node, role))
                    elif table := say.table(node, f"fence {name!r}", "write {...}"):
                        body = say.fields(table, f"fence {name!r}", _FENCE_KEYS)
                        steps.append(self._fence(Text(name, key.place), body, role))
        for name, (key, _) in (*phases.items(), *fences.items()):
            if name not in used:
                say.say(key, f"nobody reaches {name!r}", "add a transition, or drop it")
        return self._unique(steps)

    def _rows(self, node: Node) -> dict[RoleName, list[dict[str, Text]]]:
        say, shape = self.complaints, "write {role: R, from: A, on: PHASE, to: B}"
        found: dict[RoleName, list[dict[str, Text]]] = {}
        for item in say.items(node, "transitions", f"write a list of {shape[6:]}"):
            table = say.table(item, "a transition", shape)
            if table is None:
                continue
            own = say.fields(table, "a transition", _ROW_KEYS, ("role", "from", "to"))
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
            role = say.reference(own["role"], "role", dict.fromkeys(self._active()))
            if role is not None and {"from", "to"} <= words.keys():
                found.setdefault(RoleName(role), []).append(words)
        return found


_ACTIVE = "write `one per device`; only a driven role spans a group"
_PASSIVE = "write `one per GROUP`, whose leader drives it"


def _inside(text: Text, column: int) -> Place:
    """A place within a scalar; only one line has columns that can be trusted."""
    if text.lines > 1:
        return text.place
    return Place(text.place.line, text.place.column + column + (not text.plain))


def _pairs(node: Node) -> Iterator[tuple[Node, Node | None]]:
    match node:
        case Text():
            yield node, None
        case Items(items):
            for item in items:
                yield item, None
        case Table(entries):
            yield from entries


def _terms(fence: FenceDecl) -> tuple[object, ...]:
    return (
        fence.scope, fence.deadline_s, fence.established, fence.evidence, fence.joined, fence.when
    )  # fmt: skip


def _chained(rows: list[dict[str, Text]], say: Complaints) -> Iterator[dict[str, Text]]:
    """The rows of one role in the order in which it takes them, from the first row's state on."""
    ways: dict[str, dict[str, Text]] = {}
    for row in rows:
        other = ways.setdefault(row["from"].value, row)
        if other is not row:
            wrong = f"two ways lead on from state {row['from'].value!r}"
            first = f"the other is in line {other['from'].place.line}"
            say.say(row["from"], wrong, f"a role has one way through an epoch; {first}")
    state = rows[0]["from"].value
    while state in ways:
        row = ways.pop(state)
        yield row
        state = row["to"].value
    if state != rows[0]["from"].value:
        say.say(
            rows[-1]["to"], f"the epoch ends in state {state!r}",
            f"lead it back to {rows[0]['from'].value!r}, where the next one begins",
        )  # fmt: skip
    for row in ways.values():
        if row is not None:
            wrong = f"nobody reaches state {row['from'].value!r}"
            say.say(row["from"], wrong, "lead a transition to it, or drop it")
