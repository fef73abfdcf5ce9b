"""Conditions over options: a closed grammar, parsed here and never evaluated as code.

    or    := and ("or" and)*
    and   := not ("and" not)*
    not   := "not" not | test
    test  := value (("==" | "!=" | "<" | "<=" | ">" | ">=") value | ["not"] "in" list)?
    value := NAME | INTEGER | "true" | "false" | 'TEXT' | "(" or ")"
    list  := "[" value ("," value)* "]"

A bare word that names no option is a word (`fence_scope == world`), so that enums need no quotes;
the linter refuses words that no option could have.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt, ne
from typing import NamedTuple, TypeAlias

from phasesync.core.model import OptionValue

__all__ = (
    "And",
    "Compare",
    "Condition",
    "ConditionError",
    "Literal",
    "Member",
    "Name",
    "Not",
    "Or",
    "evaluate",
    "names",
    "parse",
    "write",
)

DEPTH_MAX = 32


class ConditionError(ValueError):
    """A condition that is not in the grammar; `column` counts from 0 in its text."""

    def __init__(self, message: str, column: int) -> None:
        super().__init__(message)
        self.column = column


@dataclass(frozen=True, slots=True)
class Name:
    """An option's value."""

    name: str


@dataclass(frozen=True, slots=True)
class Literal:
    """A value as written."""

    value: OptionValue


@dataclass(frozen=True, slots=True)
class Not:
    """True where `term` is not."""

    term: "Condition"


@dataclass(frozen=True, slots=True)
class And:
    """True where all terms are."""

    terms: tuple["Condition", ...]


@dataclass(frozen=True, slots=True)
class Or:
    """True where a term is."""

    terms: tuple["Condition", ...]


@dataclass(frozen=True, slots=True)
class Compare:
    """`left op right`."""

    op: str
    left: "Condition"
    right: "Condition"


@dataclass(frozen=True, slots=True)
class Member:
    """`value in [..]`."""

    value: "Condition"
    choices: tuple["Condition", ...]


Condition: TypeAlias = Name | Literal | Not | And | Or | Compare | Member

_COMPARE: dict[str, Callable[[OptionValue, OptionValue], bool]] = {
    "==": eq,
    "!=": ne,
    "<": lt,
    "<=": le,
    ">": gt,
    ">=": ge,
}
_TOKEN = re.compile(
    r"\s*(?:(?P<op>==|!=|<=|>=|<|>|[()\[\],])|(?P<int>-?[0-9]{1,18}(?![0-9]))|(?P<word>[A-Za-z_]\w*)"
    r"|'(?P<single>[^']*)'|\"(?P<double>[^\"]*)\")"
)

_BARE = re.compile(r"[A-Za-z_]\w*")
_WORDS = frozenset(("and", "or", "not", "in", "true", "false"))


class _Token(NamedTuple):
    kind: str
    text: str
    column: int


def parse(text: str, options: frozenset[str] = frozenset()) -> Condition:
    """The condition that `text` writes; a bare word in `options` is an option, else a word.

    Raises:
        ConditionError: `text` is not in the grammar.
    """
    tokens = tuple(_tokens(text))
    condition, rest = _any(tokens, 0, options, DEPTH_MAX)
    if rest < len(tokens):
        raise ConditionError(f"unexpected {tokens[rest].text!r}", tokens[rest].column)
    return condition


def evaluate(condition: Condition, options: Mapping[str, OptionValue]) -> OptionValue:
    """The value of `condition` under `options`, which must have every name in it."""
    match condition:
        case Name(name):
            return options[name]
        case Literal(value):
            return value
        case Not(term):
            return not evaluate(term, options)
        case And(terms):
            return all(evaluate(term, options) for term in terms)
        case Or(terms):
            return any(evaluate(term, options) for term in terms)
        case Compare(op, left, right):
            return _COMPARE[op](evaluate(left, options), evaluate(right, options))
        case Member(value, choices):
            found = evaluate(value, options)
            return any(found == evaluate(choice, options) for choice in choices)


def names(condition: Condition) -> frozenset[str]:
    """The options that `condition` reads."""
    match condition:
        case Name(name):
            return frozenset((name,))
        case Literal():
            return frozenset()
        case Not(term):
            return names(term)
        case And(terms) | Or(terms):
            return frozenset().union(*map(names, terms))
        case Compare(left=left, right=right):
            return names(left) | names(right)
        case Member(value, choices):
            return names(value).union(*map(names, choices))


def write(condition: Condition) -> str:
    """The text that parses to `condition`, with no brackets that it does not need."""
    return _written(condition, 0)


def _written(condition: Condition, rank: int) -> str:
    """`condition` within something that binds as tightly as `rank`."""
    match condition:
        case Name(name):
            return name
        case Literal(bool() as value):
            return str(value).lower()
        case Literal(str() as value):
            return value if _BARE.fullmatch(value) and value not in _WORDS else _quoted(value)
        case Literal(value):
            return str(value)
        case Not(Member(value, choices)):
            text = f"{_written(value, 4)} not in [{', '.join(_written(c, 4) for c in choices)}]"
            mine = 3
        case Not(term):
            text, mine = f"not {_written(term, 2)}", 2
        case And(terms):
            text, mine = " and ".join(_written(term, 2) for term in terms), 1
        case Or(terms):
            text, mine = " or ".join(_written(term, 1) for term in terms), 0
        case Compare(op, left, right):
            text, mine = f"{_written(left, 4)} {op} {_written(right, 4)}", 3
        case Member(value, choices):
            text = f"{_written(value, 4)} in [{', '.join(_written(c, 4) for c in choices)}]"
            mine = 3
    return text if mine >= rank else f"({text})"


def _quoted(text: str) -> str:
    return f'"{text}"' if "'" in text else f"'{text}'"


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    end = len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            rest = text[at:].lstrip()
            raise ConditionError(f"unexpected character {rest[0]!r}", len(text) - len(rest))
        kind = match.lastgroup or "op"
        column = match.start(kind)
        yield _Token("text" if kind in ("single", "double") else kind, match[kind], column)
        at = match.end()


_Parsed: TypeAlias = tuple[Condition, int]


def _any(tokens: tuple[_Token, ...], at: int, options: frozenset[str], depth: int) -> _Parsed:
    terms, at = _chain(tokens, at, options, depth, "or", _all)
    return (terms[0] if len(terms) == 1 else Or(terms)), at


def _all(tokens: tuple[_Token, ...], at: int, options: frozenset[str], depth: int) -> _Parsed:
    terms, at = _chain(tokens, at, options, depth, "and", _not)
    return (terms[0] if len(terms) == 1 else And(terms)), at


def _chain(
    tokens: tuple[_Token, ...],
    at: int,
    options: frozenset[str],
    depth: int,
    word: str,
    part: Callable[[tuple[_Token, ...], int, frozenset[str], int], _Parsed],
) -> tuple[tuple[Condition, ...], int]:
    term, at = part(tokens, at, options, depth)
    terms = [term]
    while _is(tokens, at, word):
        term, at = part(tokens, at + 1, options, depth)
        terms.append(term)
    return tuple(terms), at


def _not(tokens: tuple[_Token, ...], at: int, options: frozenset[str], depth: int) -> _Parsed:
    if not depth:
        raise ConditionError(f"nested deeper than {DEPTH_MAX}", _column(tokens, at))
    if _is(tokens, at, "not"):
        term, at = _not(tokens, at + 1, options, depth - 1)
        return Not(term), at
    return _test(tokens, at, options, depth)


def _test(tokens: tuple[_Token, ...], at: int, options: frozenset[str], depth: int) -> _Parsed:
    left, at = _value(tokens, at, options, depth)
    if at < len(tokens) and tokens[at].text in _COMPARE and tokens[at].kind == "op":
        right, after = _value(tokens, at + 1, options, depth)
        return Compare(tokens[at].text, left, right), after
    if _is(tokens, at, "in"):
        choices, at = _list(tokens, at + 1, options, depth)
        return Member(left, choices), at
    if _is(tokens, at, "not") and _is(tokens, at + 1, "in"):
        choices, at = _list(tokens, at + 2, options, depth)
        return Not(Member(left, choices)), at
    return left, at


def _list(
    tokens: tuple[_Token, ...], at: int, options: frozenset[str], depth: int
) -> tuple[tuple[Condition, ...], int]:
    _expect(tokens, at, "[")
    item, at = _value(tokens, at + 1, options, depth)
    items = [item]
    while _is(tokens, at, ","):
        item, at = _value(tokens, at + 1, options, depth)
        items.append(item)
    _expect(tokens, at, "]")
    return tuple(items), at + 1


def _value(tokens: tuple[_Token, ...], at: int, options: frozenset[str], depth: int) -> _Parsed:
    if at >= len(tokens):
        raise ConditionError("ends too early", _column(tokens, at))
    kind, text, column = tokens[at]
    if text == "(" and kind == "op":
        inner, at = _any(tokens, at + 1, options, depth - 1)
        _expect(tokens, at, ")")
        return inner, at + 1
    match kind:
        case "int":
            return Literal(int(text)), at + 1
        case "text":
            return Literal(text), at + 1
        case "word" if text in ("true", "false"):
            return Literal(text == "true"), at + 1
        case "word" if text not in ("and", "or", "not", "in"):
            return (Name(text) if text in options else Literal(text)), at + 1
        case _:
            raise ConditionError(f"unexpected {text!r}", column)


def _is(tokens: tuple[_Token, ...], at: int, text: str) -> bool:
    return at < len(tokens) and tokens[at].text == text and tokens[at].kind != "text"


def _expect(tokens: tuple[_Token, ...], at: int, text: str) -> None:
    if not _is(tokens, at, text):
        raise ConditionError(f"expected {text!r}", _column(tokens, at))


def _column(tokens: tuple[_Token, ...], at: int) -> int:
    if at < len(tokens):
        return tokens[at].column
    return tokens[-1].column + len(tokens[-1].text) if tokens else 0
