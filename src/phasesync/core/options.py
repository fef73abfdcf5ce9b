"""Options of a plan: which values they can have, and whether a condition makes sense of them.

A condition that no assignment of the options can change, or that compares what cannot be equal,
is a mistake; it is found here, before anything is evaluated.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import islice, product
from math import prod
from typing import NamedTuple, TypeAlias

from phasesync.core.condition import And, Compare, Condition, Literal, Member, Name, Not, Or, names
from phasesync.core.model import OptionValue
from phasesync.core.protocol import OptionDecl, Protocol

__all__ = ("Doubt", "Options", "assignments", "conditions", "count", "doubt", "suggest", "values")

ASSIGNMENTS_MAX = 1024
_ORDERED = ("<", "<=", ">", ">=")

Options: TypeAlias = Mapping[str, OptionDecl]


class Doubt(NamedTuple):
    """What is wrong, what would be right, and the word in the text that shows it."""

    wrong: str
    right: str
    word: str = ""


class _Type(NamedTuple):
    """`bool`, `int`, `enum` or `word`; `choices` are the words that an enum can have."""

    kind: str
    says: str
    option: OptionDecl | None = None


def suggest(word: str, known: tuple[str, ...] | list[str], kind: str) -> str:
    """What `word` may have meant, or what there is."""
    close = get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"{kind} are: {', '.join(known)}" if known else f"there are no {kind}"


def doubt(condition: Condition, options: Options) -> Doubt | None:
    """What is wrong with a condition that must be true or false, or None."""
    found = _typed(condition, options)
    if isinstance(found, Doubt):
        return found
    if found.kind == "bool":
        return None
    if found.kind == "word":
        assert isinstance(condition, Literal)
        word = str(condition.value)
        return Doubt(f"no option is called {word!r}", suggest(word, [*options], "options"), word)
    return Doubt(f"{found.says} is neither true nor false", _compare_it(found))


def _compare_it(found: _Type) -> str:
    if found.option is None or not found.option.choices:
        return "compare it with a number"
    return f"compare it, as in `{found.option.name} == {found.option.choices[0]}`"


def _typed(condition: Condition, options: Options) -> _Type | Doubt:
    match condition:
        case Name(name):
            decl = options[name]
            return _Type(decl.type, f"option {name!r}", decl)
        case Literal(bool() as value):
            return _Type("bool", str(value).lower())
        case Literal(int() as value):
            return _Type("int", str(value))
        case Literal(value):
            return _Type("word", repr(value))
        case Not(term):
            return doubt(term, options) or _BOOL
        case And(terms) | Or(terms):
            found = (doubt(term, options) for term in terms)
            return next((each for each in found if each is not None), _BOOL)
        case Compare(op, left, right):
            return _compared(op, left, right, options)
        case Member(value, choices):
            pairs = (_compared("==", value, choice, options) for choice in choices)
            return next((each for each in pairs if isinstance(each, Doubt)), _BOOL)


_BOOL = _Type("bool", "a condition")


def _compared(op: str, left: Condition, right: Condition, options: Options) -> _Type | Doubt:
    one, two = _typed(left, options), _typed(right, options)
    if isinstance(one, Doubt):
        return one
    if isinstance(two, Doubt):
        return two
    for mine, other, text in ((one, two, right), (two, one, left)):
        if mine.kind == "enum" and other.kind == "word" and isinstance(text, Literal):
            return _chosen(mine, str(text.value), op)
    for mine, other, text in ((one, two, left), (two, one, right)):
        if mine.kind == "word" and isinstance(text, Literal):
            word = str(text.value)
            right_word = suggest(word, [*options], "options")
            return Doubt(f"{other.says} is compared with {word!r}, no option", right_word, word)
    if one.kind != two.kind:
        return Doubt(f"{one.says} ({one.kind}) is compared with {two.says} ({two.kind})", _same)
    if op in _ORDERED and one.kind != "int":
        return Doubt(f"{one.says} has no order", "use == or !=")
    return _BOOL


_same = "compare values of one type"


def _chosen(enum: _Type, word: str, op: str) -> _Type | Doubt:
    assert enum.option is not None
    if op in _ORDERED:
        return Doubt(f"{enum.says} has no order", "use == or !=")
    if word not in enum.option.choices:
        right = suggest(word, enum.option.choices, f"choices of {enum.option.name!r}")
        return Doubt(f"{enum.says} can never be {word!r}", right, word)
    return _BOOL


def values(protocol: Protocol, option: OptionDecl) -> tuple[OptionValue, ...]:
    """The values of an option that can make a difference, its default first."""
    match option.type:
        case "bool":
            found: set[OptionValue] = {True, False}
        case "enum":
            found = set(option.choices)
        case _:
            found = {
                number
                for number in _landmarks(protocol, option)
                if (option.least is None or number >= option.least)
                and (option.most is None or number <= option.most)
            }
    found.discard(option.default)
    return (option.default, *sorted(found, key=str))


def _landmarks(protocol: Protocol, option: OptionDecl) -> set[int]:
    """The numbers at which a condition may turn, and the small sizes a group may have."""
    near = {option.least, option.most} - {None}
    if any(group.size == option.name for group in protocol.groups):
        near |= {1, 2}
    defaults = {each.name: each.default for each in protocol.options if each.type == "int"}
    for condition in conditions(protocol):
        if option.name in names(condition):
            others = {n for name, n in defaults.items() if name in names(condition)}
            near |= {int(n) + d for n in _numbers(condition) | others for d in (-1, 0, 1)}
    return {number for number in near if number is not None}


def _numbers(condition: Condition) -> frozenset[int]:
    match condition:
        case Literal(bool()) | Name():
            return frozenset()
        case Literal(value):
            return frozenset((value,)) if isinstance(value, int) else frozenset()
        case Not(term):
            return _numbers(term)
        case And(terms) | Or(terms):
            return frozenset().union(*map(_numbers, terms))
        case Compare(left=left, right=right):
            return _numbers(left) | _numbers(right)
        case Member(value, choices):
            return _numbers(value).union(*map(_numbers, choices))


def conditions(protocol: Protocol) -> Iterator[Condition]:
    """Every condition that the protocol has."""
    for step in (*protocol.steps, *protocol.recover):
        if step.when is not None:
            yield step.when
    for resource in protocol.resources:
        if resource.start is not None:
            yield resource.start
    for invariant in protocol.invariants:
        if invariant.when is not None:
            yield invariant.when


def count(protocol: Protocol) -> int:
    """How many assignments of the options can make a difference."""
    return prod(len(values(protocol, option)) for option in protocol.options)


def assignments(protocol: Protocol) -> tuple[dict[str, OptionValue], ...]:
    """Every assignment of the options that can make a difference, the defaults first.

    The first ASSIGNMENTS_MAX of them; `count` says how many there are.
    """
    names_: list[str] = [option.name for option in protocol.options]
    spans = [values(protocol, option) for option in protocol.options]
    return tuple(
        dict(zip(names_, chosen, strict=True))
        for chosen in islice(product(*spans), ASSIGNMENTS_MAX)
    )
