"""HTTP servers over the simulated engine, with the routes, bodies, answers and faults of real ones.

Written from the servers' sources. A field that the real request does not have, or a required one
that is missing, is answered 422, so that an adapter which drifts from the shapes is found out.
"""

import hashlib
import hmac
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from phasesync.core import wire
from phasesync.engines.base import GRAPHS, KV_CACHE, WEIGHTS, Tag
from phasesync.engines.simulated import Budget, Quirks, SimulatedEngine

__all__ = ("SglangServer", "TrtllmServer", "VllmServer")

Answer = tuple[int, Any]
Fields = Mapping[str, Any]
REQUIRED = object()


class _Server:
    """Routes by (method, path); a handler gets the body and returns status and answer."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.routes: dict[tuple[str, str], Callable[[Any], Answer]] = {}
        self.fields: dict[str, Fields] = {}
        self.hold_after: str | None = None
        self.moved_to: str | None = None
        self.released = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._serve("GET")

            def do_POST(self) -> None:
                self._serve("POST")

            def _serve(self, method: str) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                raw = self.rfile.read(length)
                status, answer = outer.answer(method, self.path, raw, self.headers)
                content = answer.encode() if isinstance(answer, str) else wire.encode(answer)
                try:
                    self.send_response(status)
                    if outer.moved_to is not None:
                        self.send_header("Location", outer.moved_to)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                except BrokenPipeError:
                    self.close_connection = True  # The client gave up waiting.

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing on standard error."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self.released.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def count(self, path: str) -> int:
        return sum(asked == path for _, asked, _ in self.asked)

    def answer(self, method: str, target: str, raw: bytes, headers: Any) -> Answer:
        path = target.partition("?")[0]
        body = wire.decode(raw) if raw else None
        self.asked.append((method, path, body))
        if self.moved_to is not None:
            return 307, ""
        if (denied := self.denied(path, raw, headers)) is not None:
            return denied
        route = self.routes.get((method, path))
        if route is None:
            return 404, {"detail": "Not Found"}
        if (wrong := _wrong(self.fields.get(path), body)) is not None:
            return 422, {"detail": wrong}
        status, answer = route(body)
        if path == self.hold_after:
            self.released.wait(20)  # The work is done; the answer never comes in time.
        return status, answer

    def denied(self, path: str, raw: bytes, headers: Any) -> Answer | None:
        return None

    def openapi(self) -> Answer:
        return 200, {"paths": {path: {} for _, path in self.routes}}


def _wrong(fields: Fields | None, body: Any) -> str | None:
    if fields is None:
        return None
    if not isinstance(body, dict):
        return "the body must be an object"
    unknown = sorted(set(body) - set(fields))
    missing = sorted(
        name for name, value in fields.items() if value is REQUIRED and name not in body
    )
    return f"unknown {unknown}, missing {missing}" if unknown or missing else None


_UPDATE = {"load_format": None, "abort_all_requests": False, "weight_version": None}
_FLUSHING = {"flush_cache": True, "torch_empty_cache": False}
SGLANG_FIELDS: Mapping[str, Fields] = {
    "/pause_generation": {"mode": "abort"},
    "/continue_generation": {"torch_empty_cache": True},
    "/release_memory_occupation": {"tags": None},
    "/resume_memory_occupation": {"tags": None},
    "/begin_weight_update": {"selector": "all"},
    "/end_weight_update": {},
    "/update_weight_version": {"new_version": REQUIRED, "abort_all_requests": True},
    "/weights_checker": {"action": "checksum", "selector": "all"},
    "/update_weights_from_tensor": {
        "serialized_named_tensors": REQUIRED, "selector": "all", **_UPDATE, **_FLUSHING,
    },
    "/update_weights_from_distributed": {
        "names": REQUIRED, "dtypes": REQUIRED, "shapes": REQUIRED,
        "group_name": "weight_update_group", "selector": "all", **_UPDATE, **_FLUSHING,
    },
    "/update_weights_from_disk": {
        "model_path": REQUIRED, "is_async": False, "keep_pause": False,
        "recapture_cuda_graph": False, "token_step": 0, "manifest": None, **_UPDATE, **_FLUSHING,
    },
}  # fmt: skip


class SglangServer(_Server):
    """`ranks` schedulers. A dead scheduler never answers again, as in the real one."""

    def __init__(
        self,
        *,
        release: str = "0.5.23",
        ranks: int = 1,
        api_key: str | None = None,
        dp_size: int = 1,
    ) -> None:
        super().__init__()
        self.release = release
        self.api_key = api_key
        self.dp_size = dp_size
        self.running = 0
        self.session = False
        self.version = "default"
        self.engine = SimulatedEngine(
            [Budget(32) for _ in range(ranks)],
            quirks=Quirks(
                wrong_tag="key_error",
                resumes_itself=False,
                acknowledges_early=True,
                replies_shift=False,
            ),
            tags=(WEIGHTS, KV_CACHE, GRAPHS),
        )
        self.fields = dict(SGLANG_FIELDS)
        self.routes = {
            ("GET", "/server_info"): lambda _: (200, self.info()),
            ("GET", "/model_info"): lambda _: (200, {"weight_version": self.version}),
            ("GET", "/openapi.json"): lambda _: self.openapi(),
            ("POST", "/pause_generation"): self.pause,
            ("POST", "/continue_generation"): self.go_on,
            ("POST", "/flush_cache"): lambda _: self.flush(),
            ("POST", "/release_memory_occupation"): lambda body: self.scheduler(
                lambda: self.release_memory(body["tags"])
            ),
            ("POST", "/resume_memory_occupation"): lambda body: self.scheduler(
                lambda: self.resume_memory(body["tags"])
            ),
            ("POST", "/update_weight_version"): self.commit,
            ("POST", "/weights_checker"): lambda _: (200, self.checksums()),
            ("POST", "/update_weights_from_tensor"): lambda body: self.update(
                body, body["serialized_named_tensors"][0]
            ),
            ("POST", "/update_weights_from_disk"): lambda body: self.update(
                body, body["model_path"], needs_session=False
            ),
        }
        if release == "0.5.23":
            self.routes[("POST", "/begin_weight_update")] = lambda _: self.begin()
            self.routes[("POST", "/end_weight_update")] = lambda _: self.end()

    def denied(self, path: str, raw: bytes, headers: Any) -> Answer | None:
        if self.api_key is None or headers.get("Authorization") == f"Bearer {self.api_key}":
            return None
        return 401, {"error": "Unauthorized"}

    def info(self) -> dict[str, Any]:
        ranks = len(self.engine.devices)
        return {
            "version": self.release, "tp_size": ranks, "pp_size": 1, "dp_size": self.dp_size,
            "internal_states": [],
        }  # fmt: skip

    def pause(self, body: Any) -> Answer:
        self.engine.pause(body["mode"])
        if body["mode"] == "abort":
            self.running = 0
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def go_on(self, body: Any) -> Answer:
        self.engine.resume()
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def flush(self) -> Answer:
        if self.running:
            return 400, "Flush cache failed.\n"
        return self.scheduler(lambda: (200, f"Cache flushed.\n{self.engine.flush()}"))

    def scheduler(self, work: Callable[[], Answer]) -> Answer:
        """An error in the scheduler's loop ends it; whoever waits for it waits for ever."""
        try:
            return work()
        except (KeyError, AssertionError, RuntimeError) as error:
            self.engine.dead = self.engine.dead or f"{type(error).__name__}: {error}"
            self.released.wait(20)
            return 503, {"error": {"message": self.engine.dead}}

    def release_memory(self, tags: list[str] | None) -> Answer:
        assert not self.running, (
            "release_memory_occupation should be called only when server is idle."
        )
        self.engine.sleep([Tag(tag) for tag in tags or ("kv_cache", "weights", "cuda_graph")])
        return 200, None

    def resume_memory(self, tags: list[str] | None) -> Answer:
        self.engine.settle()
        self.engine.wake([Tag(tag) for tag in tags or ("kv_cache", "weights", "cuda_graph")])
        return 200, None

    def begin(self) -> Answer:
        if self.session:
            return 400, {"success": False, "message": "a weight-update session is already open; "}
        self.session = True
        return 200, {"success": True, "message": "Success"}

    def end(self) -> Answer:
        if not self.session:
            return 400, {"success": False, "message": "no weight-update session is open; "}
        self.session = False
        if self.engine.session:
            self.engine.finish_update()
        return 200, {"success": True, "message": "Success"}

    def update(self, body: Any, content: str, *, needs_session: bool = True) -> Answer:
        if needs_session and self.release == "0.5.23" and not self.session:
            said = "must run between begin_weight_update() and end_weight_update()"
            return 400, {"success": False, "message": said}
        try:
            if not self.engine.session:
                self.engine.start_update()
            self.engine.update(content)
        except Exception as error:
            return 400, {"success": False, "message": f"{error}"}
        if body.get("flush_cache", True):
            self.scheduler(lambda: (200, self.engine.flush()))
        return 200, {"success": True, "message": "Success"}

    def commit(self, body: Any) -> Answer:
        self.version = body["new_version"]
        said = f"Weight version updated to {self.version}"
        return 200, {"success": True, "message": said, "new_version": self.version}

    def checksums(self) -> dict[str, Any]:
        each = hashlib.sha256(str(self.engine.version).encode()).hexdigest()
        ranks = [
            {"checksums": {}, "per_gpu_checksum": each, "parallelism_info": {"rank": rank}}
            for rank in range(len(self.engine.devices))
        ]
        return {"success": True, "message": "Success.", "ranks": ranks}


TRTLLM_TAGS = frozenset(
    [
        "sampler",
        "drafter",
        "guided_decoder",
        "spec_resource_manager",
        "_no_capture_init_kv_cache",
        "_no_capture_init_extra_resources",
        "model_extra",
        "executor_extra",
        "kv_cache",
        "model",
        "draft_model",
        "model_weights",
        "draft_model_weights",
    ]
)


class TrtllmServer(_Server):
    """`trtllm-serve` with an engine that can be told to sleep; `control_key` as newer ones have."""

    def __init__(self, *, control_key: str | None = None, supported: bool = True) -> None:
        super().__init__()
        self.control_key = control_key
        self.mapped = set(TRTLLM_TAGS)
        self.engine = SimulatedEngine(
            [Budget(16)], quirks=Quirks(resumes_itself=False, replies_shift=False)
        )
        self.loaded: list[Any] = []
        self.fields = {
            "/release_memory": {"tags": REQUIRED},
            "/resume_memory": {"tags": REQUIRED},
            "/update_weights": {"weights": None},
        }
        self.routes = {
            ("GET", "/version"): lambda _: (200, {"version": "1.3.0"}),
            ("GET", "/openapi.json"): lambda _: self.openapi(),
            ("POST", "/release_memory"): lambda body: self.memory(body["tags"], release=True),
            ("POST", "/resume_memory"): lambda body: self.memory(body["tags"], release=False),
            ("POST", "/update_weights"): self.update,
        }
        if not supported:
            for path in self.fields:
                self.routes[("POST", path)] = lambda _: (
                    501,
                    {"error": {"type": "unsupported_capability", "message": "not over a socket"}},
                )

    def denied(self, path: str, raw: bytes, headers: Any) -> Answer | None:
        if self.control_key is None or path not in self.fields:
            return None
        digest = hmac.new(self.control_key.encode(), raw, hashlib.sha256).hexdigest()
        if headers.get("x-trtllm-rl-control-auth") == f"sha256={digest}":
            return None
        return 401, {"error": {"message": "Invalid RL control request authentication"}}

    def memory(self, tags: list[str], *, release: bool) -> Answer:
        unknown = sorted(set(tags) - TRTLLM_TAGS)
        if unknown:
            return 500, {"error": {"message": f"Unknown memory tag '{unknown[0]}'."}}
        wanted = KV_CACHE if tags == ["kv_cache"] else WEIGHTS
        each = (wanted,) if "kv_cache" not in tags or len(tags) == 1 else (WEIGHTS, KV_CACHE)
        if release:
            self.mapped -= set(tags)
            self.engine.sleep(each)
        else:
            if self.mapped & set(tags):
                return 500, {"error": {"message": "memory is materialized already"}}
            try:
                self.engine.wake(each)
            except RuntimeError as error:
                return 500, {"error": {"message": str(error)}}
            self.mapped |= set(tags)
        return 200, {"status": "success"}

    def update(self, body: Any) -> Answer:
        if body["weights"] is None:
            self.engine.finish_update()
            return 200, {"status": "success"}
        try:
            if not self.engine.session:
                self.engine.start_update()
            self.engine.update(str(body["weights"]["version"]))
        except (KeyError, RuntimeError) as error:
            return 500, {"error": {"message": str(error)}}
        return 200, {"status": "success"}


VLLM_ROUTES: Mapping[str, tuple[str, ...]] = {
    "/pause": ("mode", "clear_cache"),
    "/resume": (),
    "/sleep": ("level", "mode"),
    "/wake_up": (),
    "/start_weight_update": (),
    "/update_weights": (),
    "/finish_weight_update": (),
    "/reset_prefix_cache": ("reset_running_requests", "reset_external"),
    "/collective_rpc": (),
}


class VllmServer(_Server):
    """vLLM's server with its routes for reinforcement learning, in the shapes of two releases.

    0.24 answers a sleep and a wake with nothing, and keeps no version; 0.32 says what it did.
    """

    def __init__(self, release: str, *, dev_mode: bool = True) -> None:
        super().__init__()
        self.release = release
        self.old = release.startswith("0.24.")
        self.label: str | None = None
        self.engine = SimulatedEngine([Budget(16)])
        self.routes = {("GET", "/version"): lambda _: (200, {"version": release})}
        self.routes[("GET", "/openapi.json")] = lambda _: self.openapi()
        if not dev_mode:
            return
        self.routes |= {
            ("GET", "/is_sleeping"): lambda _: (
                200,
                {"is_sleeping": bool(self.engine.asleep) or self.engine.paused},
            ),
            ("GET", "/get_world_size"): lambda _: (200, {"world_size": 1}),
            ("POST", "/pause"): lambda _: self.does(self.engine.pause, {"status": "paused"}),
            ("POST", "/resume"): lambda _: self.does(self.engine.resume, {"status": "resumed"}),
            ("POST", "/sleep"): lambda _: self.does(
                lambda: self.engine.sleep((WEIGHTS, KV_CACHE)), {"status": "sleeping", "level": 2}
            ),
            ("POST", "/wake_up"): lambda _: self.wake(),
            ("POST", "/reset_prefix_cache"): lambda _: self.does(
                self.engine.flush, {"success": True}
            ),
            ("POST", "/start_weight_update"): lambda _: self.does(
                self.engine.start_update, {"message": "Weight update started"}
            ),
            ("POST", "/update_weights"): lambda body: self.does(
                lambda: self.engine.update(body["update_info"]["version"]),
                {"message": "Weights updated"},
            ),
            ("POST", "/finish_weight_update"): self.finish,
        }
        self.fields = {"/update_weights": {"update_info": REQUIRED}}
        if not self.old:
            self.fields["/finish_weight_update"] = {"weight_version": None}
            self.routes[("GET", "/weight_info")] = lambda _: (200, {"weight_version": self.label})

    def answer(self, method: str, target: str, raw: bytes, headers: Any) -> Answer:
        self.query = parse_qs(target.partition("?")[2])
        return super().answer(method, target, raw, headers)

    def does(self, work: Callable[[], object], said: Any) -> Answer:
        try:
            work()
        except Exception as error:
            return 500, {"error": {"message": str(error), "type": "InternalServerError"}}
        return 200, "" if self.old and "level" in said else said

    def wake(self) -> Answer:
        tags = [Tag(tag) for tag in self.query["tags"]]
        try:
            awake = self.engine.wake(tags)
        except RuntimeError as error:
            return 500, {"error": {"message": str(error), "type": "InternalServerError"}}
        return 200, "" if self.old else {"status": "awake" if awake else "sleeping", "tags": tags}

    def finish(self, body: Any) -> Answer:
        self.label = None if self.old else body["weight_version"]
        return self.does(self.engine.finish_update, {"message": "Weight update finished"})

    def openapi(self) -> Answer:
        described = {
            path: {
                method.lower(): {
                    "parameters": []
                    if self.old and path != "/pause"
                    else [{"name": name} for name in VLLM_ROUTES.get(path, ())]
                }
            }
            for method, path in self.routes
        }
        return 200, {"paths": described}
