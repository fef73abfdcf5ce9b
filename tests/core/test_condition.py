"""Conditions: the grammar is closed, and what it accepts means what Python would mean by it."""

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasesync.core.condition import (
    And,
    Compare,
    Condition,
    ConditionError,
    Literal,
    Member,
    Name,
    Not,
    Or,
    evaluate,
    names,
    parse,
    write,
)
from phasesync.core.model import OptionName, OptionValue
from phasesync.core.options import doubt
from phasesync.core.protocol import OptionDecl

OPTIONS = {
    "a": OptionDecl(name=OptionName("a"), type="bool", default=True),
    "b": OptionDecl(name=OptionName("b"), type="bool", default=False),
    "n": OptionDecl(name=OptionName("n"), type="int", default=2),
    "scope": OptionDecl(
        name=OptionName("scope"), type="enum", default="replica", choices=("replica", "world")
    ),
}
KNOWN = frozenset(OPTIONS)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a", Name("a")),
        ("not a", Not(Name("a"))),
        ("not not a", Not(Not(Name("a")))),
        ("a and b or a", Or((And((Name("a"), Name("b"))), Name("a")))),
        ("a and (b or a)", And((Name("a"), Or((Name("b"), Name("a")))))),
        ("not a == b", Not(Compare("==", Name("a"), Name("b")))),
        ("n >= 2", Compare(">=", Name("n"), Literal(2))),
        ("-3<n", Compare("<", Literal(-3), Name("n"))),
        ("scope == world", Compare("==", Name("scope"), Literal("world"))),
        ("scope != 'world'", Compare("!=", Name("scope"), Literal("world"))),
        ('scope == "and"', Compare("==", Name("scope"), Literal("and"))),
        ("n in [1, 2]", Member(Name("n"), (Literal(1), Literal(2)))),
        ("n not in [1]", Not(Member(Name("n"), (Literal(1),)))),
        ("true", Literal(True)),
        ("  a  ", Name("a")),
    ],
)
def test_what_is_written_is_what_is_read(text: str, tree: Condition) -> None:
    assert parse(text, KNOWN) == tree


@pytest.mark.parametrize(
    ("text", "column", "says"),
    [
        ("", 0, "ends too early"),
        ("not", 3, "ends too early"),
        ("a and", 5, "ends too early"),
        ("(a", 2, "expected ')'"),
        ("a b", 2, "unexpected 'b'"),
        ("a == b == a", 7, "unexpected '=='"),
        ("a.b", 1, "unexpected character '.'"),
        ("a  & b", 3, "unexpected character '&'"),
        ("f(1)", 1, "unexpected '('"),
        ("n in 3", 5, "expected '['"),
        ("n in []", 6, "unexpected ']'"),
        ("n in [1", 7, "expected ']'"),
        ("'open", 0, 'unexpected character "\'"'),
        ("n < 1234567890123456789012", 4, "unexpected character '1'"),
        ("and", 0, "unexpected 'and'"),
        ("(" * 40 + "a" + ")" * 40, 32, "nested deeper than 32"),
        ("not " * 40 + "a", 128, "nested deeper than 32"),
    ],
)
def test_what_is_not_in_the_grammar(text: str, column: int, says: str) -> None:
    with pytest.raises(ConditionError) as caught:
        parse(text, KNOWN)
    assert str(caught.value) == says
    assert caught.value.column == column


@pytest.mark.parametrize(
    ("text", "wrong", "right", "word"),
    [
        ("c", "no option is called 'c'", "options are: a, b, n, scope", "c"),
        ("n", "option 'n' is neither true nor false", "compare it with a number", ""),
        ("3", "3 is neither true nor false", "compare it with a number", ""),
        ("a and scop", "no option is called 'scop'", "did you mean 'scope'?", "scop"),
        ("scope == rplica", "option 'scope' can never be 'rplica'", "did you mean 'replica'?",
         "rplica"),
        ("scope in [world, moon]", "option 'scope' can never be 'moon'",
         "choices of 'scope' are: replica, world", "moon"),
        ("scope < world", "option 'scope' has no order", "use == or !=", ""),
        ("a < b", "option 'a' has no order", "use == or !=", ""),
        ("a == 1", "option 'a' (bool) is compared with 1 (int)", "compare values of one type", ""),
        ("x == y", "'y' is compared with 'x', no option", "options are: a, b, n, scope", "x"),
        ("(n == 1) == n", "a condition (bool) is compared with option 'n' (int)",
         "compare values of one type", ""),
        ("not n", "option 'n' is neither true nor false", "compare it with a number", ""),
    ],
)  # fmt: skip
def test_what_parses_and_makes_no_sense(text: str, wrong: str, right: str, word: str) -> None:
    assert doubt(parse(text, KNOWN), OPTIONS) == (wrong, right, word)


VALUES: list[dict[str, OptionValue]] = [
    {"a": a, "b": b, "n": n, "scope": scope}
    for a, b, n, scope in product([True, False], [True, False], [1, 2, 3], ["replica", "world"])
]
TESTS = st.sampled_from(
    ["a", "b", "true", "false", "n==2", "n<3", "n>=1", "n in [1, 3]", "a==b", "(n>1)==a"]
) | st.sampled_from(["scope=='world'", "scope!='replica'", "scope not in ['world']"])
TEXTS = st.recursive(
    TESTS,
    lambda part: st.one_of(
        st.tuples(part, part).map(" and ".join),
        st.tuples(part, part).map(" or ".join),
        part.map("({})".format),
        part.map("not ({})".format),
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(TEXTS)
def test_a_condition_means_what_python_means(text: str) -> None:
    condition = parse(text, KNOWN)
    assert doubt(condition, OPTIONS) is None
    python = text.replace("true", "True").replace("false", "False")
    for options in VALUES:
        expected: Any = eval(python, {}, dict(options))
        assert evaluate(condition, options) == expected
    assert names(condition) == {word for word in KNOWN if word in _words(text)}


def _words(text: str) -> set[str]:
    return set("".join(each if each.isalnum() else " " for each in text).split())


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet="ab n()[]<>=!,'\"-0123 andorti_.", max_size=40) | st.text(max_size=40))
def test_any_text_is_read_or_refused_with_its_column(text: str) -> None:
    condition = column = None
    try:
        condition = parse(text, KNOWN)
    except ConditionError as error:
        column = error.column
    if condition is None:
        assert column is not None
        assert 0 <= column <= len(text)
    elif doubt(condition, OPTIONS) is None:
        assert {bool(evaluate(condition, options)) for options in VALUES} <= {True, False}


@settings(deadline=None, max_examples=300)
@given(TEXTS)
def test_what_is_written_out_reads_back(text: str) -> None:
    condition = parse(text, KNOWN)
    again = write(condition)
    assert parse(again, KNOWN) == condition
    assert len(again.replace(" ", "")) <= len(text.replace(" ", ""))
