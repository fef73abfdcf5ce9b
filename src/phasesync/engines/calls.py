"""How a blocking call is made without blocking the event loop, and how JSON goes over HTTP.

One daemon thread an engine, never the default executor, whose threads may all be waiting.
Calls keep their order. A call that runs out of time goes on in its thread: who called must treat
its outcome as unknown, and nothing else is started behind it.
"""

import asyncio
import contextlib
import http.client
import queue
import threading
import urllib.parse
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from phasesync.core import wire
from phasesync.errors import EngineError, EngineLost, EngineRefused

__all__ = ("CallThread", "Http", "Reply")

T = TypeVar("T")


class CallThread:
    """Runs blocking functions one after another in one daemon thread that is never joined.

    The thread ends with whoever has this, closed or not.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._jobs.put, None).atexit = False

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. Cancelling the wait does not stop `work`."""
        if self._thread is None:
            args = (self._jobs,)
            self._thread = threading.Thread(target=_serve, args=args, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            try:
                value = work()
            except BaseException as error:
                _settle(loop, outcome, error=error)
            else:
                _settle(loop, outcome, value=value)

        self._jobs.put(job)
        return await outcome

    def close(self) -> None:
        """Let the thread end once it has done what it was given."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None


def _serve(jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        # The next `get` may wait for hours, and the last job holds its result until then.
        del job


def _settle(
    loop: asyncio.AbstractEventLoop,
    outcome: "asyncio.Future[T]",
    *,
    value: Any = None,
    error: BaseException | None = None,
) -> None:
    def tell() -> None:
        if outcome.done():
            return
        if error is None:
            outcome.set_result(value)
        elif isinstance(error, StopIteration):
            outcome.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            outcome.set_exception(error)

    with contextlib.suppress(RuntimeError):  # The loop has gone, and nobody is left to tell.
        loop.call_soon_threadsafe(tell)


class Reply(NamedTuple):
    """An HTTP answer: its status, and its body as JSON where it is JSON."""

    status: int
    body: Any
    text: str

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def why(self) -> str:
        """The server's own words for a failure, as short as they come."""
        said = self.body
        while isinstance(said, dict):
            inner = next(
                (said[key] for key in ("error", "message", "detail") if said.get(key)), None
            )
            if inner is None:
                break
            said = inner
        return f"HTTP {self.status}: {str(said or self.text)[:400]}"

    def check_admitted(self) -> None:
        """That no guard stood before the engine and turned the call away.

        Raises:
            EngineRefused: one did; the engine never heard of the call.
        """
        said = self.body.get("error") if isinstance(self.body, dict) else None
        if self.status == 409 and isinstance(said, dict) and said.get("type") == "EngineRefused":
            raise EngineRefused(str(said.get("message")))


class Http:
    """A JSON client of one server, in a thread of its own; one connection a call.

    A lost connection or a time-out raises `EngineLost`: whether the work was done is unknown.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        headers: Mapping[str, str] = {},
        sign: Callable[[bytes], Mapping[str, str]] | None = None,
    ) -> None:
        parts = _parts(url)
        self.url = url.rstrip("/")
        self._parts = parts
        self._timeout_s = timeout_s
        self._headers = dict(headers)
        self._sign = sign
        self._thread = CallThread(f"phasesync-http-{parts.netloc}")
        self._aside = CallThread(f"phasesync-http-{parts.netloc}-aside")

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Iterable[tuple[str, str]] = (),
        body: object = None,
        headers: Mapping[str, str] = {},
        timeout_s: float | None = None,
        aside: bool = False,
    ) -> Reply:
        """The answer to one request, whatever its status; `aside`, it waits for no other call.

        Raises:
            EngineLost: no answer came.
        """
        content = None if body is None else wire.encode(body)
        asked = path + ("?" + urllib.parse.urlencode(list(query)) if query else "")
        sent = {**self._headers, **headers}
        if content is not None:
            sent["Content-Type"] = "application/json"
            sent |= self._sign(content) if self._sign is not None else {}
        within = self._timeout_s if timeout_s is None else timeout_s
        try:
            thread = self._aside if aside else self._thread
            return await thread.run(lambda: self._ask(method, asked, content, sent, within))
        except (OSError, http.client.HTTPException) as error:
            raise EngineLost(
                f"{method} {self.url}{asked} got no answer ({type(error).__name__}: {error}); "
                "whether the engine did it is unknown"
            ) from error

    def _ask(
        self,
        method: str,
        path: str,
        content: bytes | None,
        headers: Mapping[str, str],
        within: float,
    ) -> Reply:
        kind = (
            http.client.HTTPSConnection
            if self._parts.scheme == "https"
            else http.client.HTTPConnection
        )
        link = kind(str(self._parts.hostname), self._parts.port, timeout=within)
        try:
            link.request(method, self._parts.path.rstrip("/") + path, content, dict(headers))
            answer = link.getresponse()
            text = answer.read().decode("utf-8", "replace")
            if (elsewhere := answer.getheader("Location")) and 300 <= answer.status < 400:
                # Not followed: a call that changes an engine goes to the server that was named.
                text = f"the server redirects to {elsewhere}; give the URL that answers itself"
            return Reply(answer.status, _json(text), text)
        finally:
            link.close()

    def close(self) -> None:
        self._thread.close()
        self._aside.close()


def _parts(url: str) -> urllib.parse.SplitResult:
    """The parts of a server's address; what else a URL may hold would be lost without a word."""
    parts = urllib.parse.urlsplit(url)
    shown = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    try:
        port_is_one = parts.port is None or parts.port > 0
    except ValueError:
        port_is_one = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_one:
        raise EngineError(f"{shown!r} is no server; write http://HOST:PORT")
    if "@" in parts.netloc:
        raise EngineError(f"{shown!r} came with a user or password; give those as a header or key")
    if parts.query or parts.fragment:
        raise EngineError(f"{shown!r} asks for something; give the server's address alone")
    return parts


def _json(text: str) -> Any:
    try:
        return wire.decode(text)
    except wire.JsonError:
        return None
