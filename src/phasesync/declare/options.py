"""The `options:` of a protocol file."""

from collections.abc import Iterator, Mapping

from phasesync.core.model import OptionName
from phasesync.core.protocol import OptionDecl
from phasesync.declare.draft import Draft
from phasesync.nodes import Node, Table, Text

__all__ = ("read_options",)


def read_options(draft: Draft, declared: Mapping[str, tuple[Text, Node]]) -> Iterator[OptionDecl]:
    """The options; one that is wrong is kept by name, so that its readers are not blamed too."""
    for name, (key, node) in declared.items():
        before = len(draft.complaints.found)
        option = _option(draft, OptionName(name), key, node)
        if len(draft.complaints.found) > before:
            draft.broken.add(name)
        draft.options[name] = option
        yield option


def _option(draft: Draft, name: OptionName, key: Text, node: Node) -> OptionDecl:
    say, what = draft.complaints, f"option {name!r}"
    table = say.table(node, what, "write {type: bool, default: true}")
    blank = OptionDecl(name=name, type="bool", default=False, place=key.place)
    if table is None:
        return blank
    own = say.fields(table, what, ("type", "default", "min", "max", "of"), ("type", "default"))
    kind = say.choice(own.get("type"), f"type of {what}", ("bool", "int", "enum"), "")
    if not kind:
        return blank
    for extra, fits in (("min", "int"), ("max", "int"), ("of", "enum")):
        if extra in own and kind != fits:
            say.say(own[extra], f"{extra!r} is for type {fits}", f"{what} is of type {kind}")
    match kind:
        case "int":
            return _int_option(draft, name, key, own)
        case "enum":
            return _enum_option(draft, name, key, table, own)
        case _:
            default = say.truth(own.get("default"), f"default of {what}")
            return OptionDecl(name=name, type="bool", default=default, place=key.place)


def _int_option(draft: Draft, name: OptionName, key: Text, own: Mapping[str, Node]) -> OptionDecl:
    say, what = draft.complaints, f"option {name!r}"
    default = say.integer(own.get("default"), f"default of {what}")
    least = say.integer(own.get("min"), f"min of {what}")
    most = say.integer(own.get("max"), f"max of {what}")
    if least is not None and most is not None and most < least:
        say.say(own["max"], f"max {most} is less than min {least}", "swap them")
    elif default is not None and least is not None and default < least:
        right = f"default to {least}, or lower min"
        say.say(own["default"], f"default {default} is less than min {least}", right)
    elif default is not None and most is not None and default > most:
        right = f"default to {most}, or raise max"
        say.say(own["default"], f"default {default} is more than max {most}", right)
    return OptionDecl(
        name=name, type="int", default=default or 0, least=least, most=most, place=key.place
    )


def _enum_option(
    draft: Draft, name: OptionName, key: Text, table: Table, own: Mapping[str, Node]
) -> OptionDecl:
    say, what = draft.complaints, f"option {name!r}"
    shape = "write [WORD, WORD]"
    nodes = say.items(own["of"], f"'of' of {what}", shape) if "of" in own else ()
    choices: list[str] = []
    for node in nodes:
        word = say.name(node, f"a choice of {what}")
        if word in choices:
            say.say(node, f"{word!r} is given twice", "keep one of them")
        elif word in ("true", "false", "and", "or", "not", "in"):
            say.say(node, f"{word!r} means something else in conditions", "choose another word")
        elif word is not None:
            choices.append(word)
    if "of" not in own:
        say.say(table, f"{what} has no choices", "write `of: [WORD, WORD]`")
    first = choices[0] if choices else ""
    given = own.get("default") if choices else None
    default = say.choice(given, f"default of {what}", choices, first)
    return OptionDecl(
        name=name, type="enum", default=default, choices=tuple(choices), place=key.place
    )
