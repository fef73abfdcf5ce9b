"""A TCPStore is spoken to without threads where that is known to work, and with them elsewhere."""

import asyncio
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from phasesync.core.fence_keys import (
    Add,
    CompareSet,
    Delete,
    Operation,
    Put,
    Read,
    Steps,
    Tell,
    Wait,
)
from phasesync.core.model import Opened, Rank
from phasesync.fences import lines
from phasesync.fences.direct import DirectLine, rehearsal
from phasesync.fences.lines import Lines, nothing
from phasesync.fences.store import StoreFences
from phasesync.testing import FenceWorld
from tests.core.test_fence_steps import DictStore
from tests.fences.test_conformance import STORES, tcp_store


@pytest.mark.parametrize(
    ("name", "threads"),
    [("tcp_store", 0), ("prefix_store", 0), ("tcp_store_legacy", 4), ("hash_store", 4)],
)
def test_which_stores_need_threads(name: str, threads: int, tmp_path: Path) -> None:
    async def check() -> None:
        store = STORES[name](tmp_path)

        def make(run: str, rank: Rank, incarnation: int) -> StoreFences:
            return StoreFences(store, rank=rank, run=run, incarnation=incarnation)

        world = FenceWorld(make, 2)
        async with world:
            got = await world.all_arrive(world.call(0))
            assert all(isinstance(each, Opened) for each in got)
            seen = [t for t in threading.enumerate() if t.name.startswith("phasesync.")]
        assert len(seen) >= threads if threads else not seen, seen
        if hasattr(store, "list_keys"):
            assert not [key for key in store.list_keys() if "ps/" in key]

    asyncio.run(check())


@pytest.mark.parametrize("prefixes", [("a", "b/c"), ("/a/",), ("",), ("//é", "")])
def test_no_thread_is_needed_whatever_the_prefixes_are(prefixes: tuple[str, ...]) -> None:
    """One that begins with a slash, or is empty, is part of a key all the same."""

    async def check() -> None:
        dist: Any = import_module("torch.distributed")
        base = store = tcp_store()
        for prefix in prefixes:
            store = dist.PrefixStore(prefix, store)

        def make(run: str, rank: Rank, incarnation: int) -> StoreFences:
            return StoreFences(store, rank=rank, run=run, incarnation=incarnation)

        world = FenceWorld(make, 2, run="né/w ~1")
        async with world:
            assert [each._lines.are_direct for each in world.ends.values()] == [True, True]  # type: ignore[attr-defined]
            got = await world.all_arrive(world.call(0))
            assert all(isinstance(each, Opened) for each in got)
        assert not [key for key in base.list_keys() if "ps/" in key]

    asyncio.run(check())


def test_a_prefix_that_cannot_be_found_out_is_gone_by_with_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before torch 2.11 a store does not list its keys."""

    class Older:
        def __init__(self, store: Any) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            if name == "list_keys":
                raise AttributeError(name)
            return getattr(self._store, name)

    base_of = lines._base_of
    monkeypatch.setattr(lines, "_base_of", lambda store: Older(base_of(store)))

    async def check() -> None:
        dist: Any = import_module("torch.distributed")
        store = dist.PrefixStore("default_pg", tcp_store())

        def make(run: str, rank: Rank, incarnation: int) -> StoreFences:
            return StoreFences(store, rank=rank, run=run, incarnation=incarnation)

        world = FenceWorld(make, 2)
        async with world:
            assert [each._lines.are_direct for each in world.ends.values()] == [False, False]  # type: ignore[attr-defined]
            got = await world.all_arrive(world.call(0))
            assert all(isinstance(each, Opened) for each in got)

    asyncio.run(check())


def rehearse(wrong: Callable[[Operation, Any], Any]) -> bool:
    """The rehearsal against a store whose replies `wrong` has changed."""
    store = DictStore()
    store.values["k"] = b"nonce"
    steps = rehearsal("k", b"nonce")
    reply = None
    try:
        while True:
            operation = steps.send(reply)
            reply = wrong(operation, store.perform(operation))
    except StopIteration as over:
        return bool(over.value)


def test_a_store_that_answers_as_it_must_is_spoken_to() -> None:
    assert rehearse(lambda operation, reply: reply)


@pytest.mark.parametrize("kind", [Add, CompareSet])
def test_one_wrong_answer_is_enough_for_threads(kind: type) -> None:
    assert not rehearse(lambda op, reply: b"else" if type(op) is kind else reply)


def test_what_follows_a_verdict_leaves_with_the_next_request_and_alone_after_a_moment() -> None:
    """Whoever was told goes on first. Nothing is kept back once this rank asks for something else,
    on whichever line: others may decide its next fence."""
    store: Any = STORES["tcp_store"](Path())

    def deciding(key: str) -> Steps:
        yield CompareSet(f"{key}/verdict", b"open")
        yield Tell("told")
        yield Put(f"{key}/head", b"1")
        yield Delete(f"{key}/log")

    async def check() -> None:
        lines = Lines(store, "phasesync.tidy")
        await lines.straighten()
        assert lines.are_direct
        for key in ("alone", "same", "other", "rest"):
            await lines.submit(nothing())
            assert await lines.submit(deciding(key)) == "told"
            assert store.check([f"{key}/verdict"])
            assert not store.check([f"{key}/head"]), "it went before who was told"
            if key == "same":
                await lines.submit(asks())
            elif key == "other":
                lines.submit(waits(), waits=True)  # Takes the line that has something left.
                await lines.submit(asks())
            elif key == "rest":
                await lines.rest()
            async with asyncio.timeout(5):
                while not store.check([f"{key}/head"]):
                    assert key == "alone" or not lines_left(lines), key
                    await asyncio.sleep(0.002)
        await lines.close()

    def asks() -> Steps:
        yield Read("nothing there")

    def waits() -> Steps:
        yield Wait("never there")

    def lines_left(lines: Lines) -> list[DirectLine]:
        return [each for each in lines._all if isinstance(each, DirectLine) and each._tidying]

    asyncio.run(check())
