"""OpenAI's endpoints `/v1/files` and `/v1/batches`, which keep files and batches in a folder.

Batches run one after the other.  A batch that the end of the server interrupts is continued by the
next server with the same folder.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse

from mesh_transformer.data.tables import all_rows
from mesh_transformer.serving.errors import ApiError, absent, invalid, shown
from mesh_transformer.serving.local import URLS, LocalRequests, check_lines, write_lines
from mesh_transformer.serving.requests import read_body, read_json
from mesh_transformer.serving.service import Service
from mesh_transformer.storage.locks import LocalLock
from mesh_transformer.util import InputError, StoppedError, start_thread

EXIT_SECONDS = 10.0  # maximum time for the running batch to stop
FILE_BYTES = 2**28  # maximum size of a file
MOST_BYTES = 2**33  # of all files together
MOST_LINES = 50_000  # of a batch; as in OpenAI's API
UPLOAD_SECONDS = 600.0  # maximum time for a file to arrive
WINDOW = "24h"  # OpenAI's only value of `completion_window`
ENDED = ("completed", "failed", "cancelled")
TIMES = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at", "cancelling_at"),
    *("cancelled_at", "expired_at", "expires_at"),
)
log = logging.getLogger(__name__)


class Store:
    """Objects of OpenAI's API in a folder, each a file NAME.json beside its content.

    Args:
      kind: the beginning of their names.
      noun: what an object is called in error messages.
    """

    def __init__(self, folder: Path, kind: str, noun: str):
        self._folder, self._kind, self._noun = folder, kind, noun
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Return the path of an object's content."""
        return self._folder / f"{name}.jsonl"

    def new_name(self) -> str:
        return self.name_of(secrets.token_hex(12))

    def name_of(self, text: str) -> str:
        """Return a name that follows from a text."""
        return f"{self._kind}{hashlib.sha256(text.encode()).hexdigest()[:24]}"

    def save(self, value: dict[str, Any]) -> dict[str, Any]:
        """Store an object, and return it."""
        draft = self._folder / f".{value['id']}"
        with open(draft, "w", encoding="utf-8") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self._folder / f"{value['id']}.json")
        return value

    def load(self, name: str) -> dict[str, Any]:
        """Return the object of a name; raise ApiError with status 404 if there is none."""
        with contextlib.suppress(FileNotFoundError):
            if re.fullmatch(rf"{self._kind}[0-9a-f]{{24}}", name):
                return json.loads((self._folder / f"{name}.json").read_text())
        raise ApiError(404, f"no such {self._noun}: {shown(name)}; list them to see their ids")

    def all(self) -> list[dict[str, Any]]:
        """Return all objects, the newest first."""
        values = []
        for path in self._folder.glob("*.json"):
            try:
                values.append(json.loads(path.read_text()))
            except (OSError, ValueError) as error:
                log.error("%s cannot be read (%s); it is left out", path, error)
        return sorted(values, key=lambda value: (value["created_at"], value["id"]), reverse=True)

    def delete(self, name: str) -> None:
        """Delete an object and its content."""
        (self._folder / f"{name}.json").unlink(missing_ok=True)
        self.path(name).unlink(missing_ok=True)

    def clear(self, name: str) -> None:
        """Delete what is left of the incomplete content of an object."""
        for path in self._folder.glob(f".{name}.*"):
            path.unlink(missing_ok=True)


class Batches:
    """The files and batches of a server.

    Args:
      folder: where they are; no other server may use it.
      identity: JSON values that differ if the service may give other answers.  A batch that another
        service has begun then begins anew.

    Raises:
      InputError: at construction, if the folder cannot be used, or another server uses it.
    """

    def __init__(self, service: Service, folder: str, identity: Any = None):
        self._lock = LocalLock(folder, "batches")
        self._service, self._identity = service, identity
        self._uploading = asyncio.Lock()  # so that one file at a time is in memory
        self.files = Store(Path(folder, "files"), "file-", "file")
        self.batches = Store(Path(folder, "batches"), "batch_", "batch")
        self._queue = queue.SimpleQueue[str]()
        self._changes = threading.Lock()  # guards the stored batches and the next attribute
        self._running: tuple[str, LocalRequests] | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._counts = dict[str, int]()  # lines of the running batch so far

    def start(self) -> None:
        """Continue the batches; call this on the service's event loop."""
        for batch in reversed(self.batches.all()):
            if batch["status"] not in ENDED:
                self._queue.put(batch["id"])
        self._thread = start_thread(self._run, asyncio.get_running_loop(), name="batches")

    def close(self) -> None:
        """Interrupt the running batch."""
        with self._changes:
            self._closed = True
            if self._running is not None:
                self._running[1].stop()
        self._queue.put("")
        if self._thread is not None:
            self._thread.join(EXIT_SECONDS)
        self._lock.release()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._closed:
            with contextlib.suppress(ApiError):  # deleted
                if name := self._queue.get():
                    self._complete(name, LocalRequests.of(self._service, loop))

    def _change(self, name: str, status: str, **values: Any) -> dict[str, Any]:
        """Store a batch's new status, and other values."""
        times = {f"{status}_at": int(time.time())} if f"{status}_at" in TIMES else {}
        return self.batches.save(self.batches.load(name) | {"status": status} | times | values)

    def _complete(self, name: str, requests: LocalRequests) -> None:
        """Run a batch to its end, unless it is cancelled or the server ends."""
        with self._changes:
            batch = self.batches.load(name)
            if batch["status"] == "cancelling":
                self._change(name, "cancelled")
            if batch["status"] in ("cancelling", *ENDED) or self._closed:
                return
            self._change(name, "in_progress")
            self._running, self._counts = (name, requests), {}
        results, source = self.batches.path(name), self.files.path(batch["input_file_id"])
        try:
            _check_count(source)
            rows = all_rows(str(source))
            check_lines(rows)
        except (InputError, OSError) as error:
            self._fail(name, str(error).replace(str(source), "the file"))
            return
        try:
            if not results.exists():
                write_lines(
                    rows,
                    str(results),
                    requests,
                    int(name[-8:], 16),
                    settings=[name, self._identity],
                    in_flight=self._service.engine.rows,
                    note=lambda count: self._counted(name, count, len(rows)),
                    quiet=True,
                )
            with self._changes:
                if self.batches.load(name)["status"] == "cancelling":
                    raise StoppedError("cancelled after its last line")
                self._change(name, "finalizing")
            files = self._published(name, results)
            with self._changes:
                self._running = None
                self._change(name, "completed", **files)
            results.unlink()  # only now, as the batch is published again if the server dies before
            self.batches.clear(name)
        except StoppedError:
            with self._changes:
                self._running = None
                if self.batches.load(name)["status"] == "cancelling":
                    results.unlink(missing_ok=True)
                    self.batches.clear(name)
                    self._change(name, "cancelled")
            return  # else the next server continues it
        except (InputError, OSError) as error:  # such as a full disk; the answers so far are kept
            with self._changes:
                self._running = None
            log.error("batch %s stops until the server is started again: %s", name, error)
        except Exception:
            log.exception("batch %s failed", name)
            self._fail(name, "the server failed; its log has the error")

    def _fail(self, name: str, problem: str) -> None:
        """End a batch with an error, and delete what it has made."""
        self.batches.clear(name)
        with self._changes:
            self._running = None
            self._change(name, "failed", **_problem(problem))

    def _counted(self, name: str, count: int, total: int) -> str:
        self._counts = {"total": total, "completed": count, "failed": 0}
        return ""

    def _published(self, name: str, results: Path) -> dict[str, Any]:
        """Make files of the results and of the errors; return what the batch has about them.

        Their names follow from that of the batch, so that they are the same if this is repeated.
        """
        names, counts = [self.files.name_of(f"{name} {end}") for end in ("output", "error")], [0, 0]
        with (
            open(results, "rb") as lines,
            open(self.files.path(names[0]), "wb") as right,
            open(self.files.path(names[1]), "wb") as wrong,
        ):
            for line in lines:
                failed = json.loads(line)["response"]["status_code"] != 200
                counts[failed] += 1
                (wrong if failed else right).write(line)
        for at, (end, count) in enumerate(zip(("output", "error"), counts, strict=True)):
            if count:
                self._describe(names[at], f"{name}_{end}.jsonl", "batch_output")
            else:
                self.files.delete(names[at])
        ids = [file if count else None for file, count in zip(names, counts, strict=True)]
        numbers = {"total": sum(counts), "completed": counts[0], "failed": counts[1]}
        return {"output_file_id": ids[0], "error_file_id": ids[1], "request_counts": numbers}

    def _describe(self, name: str, filename: str, purpose: str) -> dict[str, Any]:
        """Store the description of the file whose content is in place."""
        size = self.files.path(name).stat().st_size
        value = {"id": name, "object": "file", "bytes": size, "created_at": int(time.time())}
        return self.files.save(
            value | {"filename": filename, "purpose": purpose, "status": "processed"}
        )

    async def upload(self, request: Request) -> Any:
        """Answer `POST /v1/files`: store a file."""
        async with self._uploading:
            return await self._upload(request)

    async def _upload(self, request: Request) -> Any:
        kind = request.headers.get("content-type", "")
        body = await read_body(request, FILE_BYTES, UPLOAD_SECONDS)
        parts = await self._service.run_in_thread(lambda: parts_of(kind, body))
        if "file" not in parts:
            raise absent("file", "a file in a form, multipart/form-data")
        if (purpose := parts.get("purpose", ("", b""))[1].decode(errors="replace")) != "batch":
            raise invalid("purpose", purpose, "batch")
        filename, content = parts["file"]
        name = self.files.new_name()

        def write() -> dict[str, Any]:
            stored = sum(file["bytes"] for file in self.files.all())
            if stored + len(content) > MOST_BYTES:
                most = f"{MOST_BYTES} bytes for all files"
                raise ApiError(
                    413, f"the server has room for {most}, and holds {stored}; delete some"
                )
            self.files.path(name).write_bytes(content)
            return self._describe(name, filename or "file.jsonl", purpose)

        return await self._service.run_in_thread(write)

    async def content(self, request: Request) -> Any:
        """Answer `GET /v1/files/NAME/content`."""
        name = self.files.load(request.path_params["name"])["id"]
        return FileResponse(self.files.path(name), media_type="application/octet-stream")

    async def delete(self, request: Request) -> Any:
        """Answer `DELETE /v1/files/NAME`."""
        name = self.files.load(request.path_params["name"])["id"]
        self.files.delete(name)
        return {"id": name, "object": "file", "deleted": True}

    async def create(self, request: Request) -> Any:
        """Answer `POST /v1/batches`: begin a batch."""
        try:
            body = json.loads(await read_json(request, self._service.context))
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise ApiError(400, "the body: expected a JSON object")
        expected = {
            "input_file_id": ("the id of a file", None),
            "endpoint": (f"one of {', '.join(URLS)}", URLS),
            "completion_window": (WINDOW, (WINDOW,)),
        }
        for key, (text, values) in expected.items():
            if not isinstance(body.get(key), str) or (values and body[key] not in values):
                raise invalid(key, body.get(key), text)
        self.files.load(body["input_file_id"])
        batch = dict.fromkeys((*TIMES, "output_file_id", "error_file_id", "errors"))
        batch |= {key: body[key] for key in expected} | {"metadata": body.get("metadata")}
        batch |= {"object": "batch", "status": "validating", "created_at": int(time.time())}
        batch |= {"request_counts": dict.fromkeys(("total", "completed", "failed"), 0)}
        saved = self.batches.save({"id": self.batches.new_name()} | batch)
        self._queue.put(saved["id"])
        return saved

    async def batch(self, request: Request) -> Any:
        """Answer `GET /v1/batches/NAME`."""
        value = self.batches.load(request.path_params["name"])
        running, counts = self._running, self._counts
        is_running = running is not None and running[0] == value["id"] and counts
        return value | ({"request_counts": counts} if is_running else {})

    async def cancel(self, request: Request) -> Any:
        """Answer `POST /v1/batches/NAME/cancel`."""
        with self._changes:
            batch = self.batches.load(request.path_params["name"])
            if batch["status"] in ("finalizing", *ENDED):
                raise ApiError(409, f"the batch is {batch['status']}, so it cannot be cancelled")
            if self._running is None or self._running[0] != batch["id"]:
                self.batches.clear(batch["id"])
                return self._change(batch["id"], "cancelled")
            self._running[1].stop()
            return self._change(batch["id"], "cancelling")

    async def file(self, request: Request) -> Any:
        """Answer `GET /v1/files/NAME`."""
        return self.files.load(request.path_params["name"])

    async def list_files(self, _: Request) -> Any:
        """Answer `GET /v1/files`."""
        return {"object": "list", "data": self.files.all(), "has_more": False}

    async def list_batches(self, _: Request) -> Any:
        """Answer `GET /v1/batches`."""
        return {"object": "list", "data": self.batches.all(), "has_more": False}

    def endpoints(self) -> list[tuple[str, str, Callable[[Request], Awaitable[Any]]]]:
        """Return the method and path of each endpoint, and what answers its requests."""
        return [
            ("POST", "/v1/files", self.upload),
            ("GET", "/v1/files", self.list_files),
            ("GET", "/v1/files/{name}", self.file),
            ("GET", "/v1/files/{name}/content", self.content),
            ("DELETE", "/v1/files/{name}", self.delete),
            ("POST", "/v1/batches", self.create),
            ("GET", "/v1/batches", self.list_batches),
            ("GET", "/v1/batches/{name}", self.batch),
            ("POST", "/v1/batches/{name}/cancel", self.cancel),
        ]


def _check_count(path: Path) -> None:
    """Raise InputError if a file has too many lines for a batch."""
    with open(path, "rb") as file:
        for number, _ in enumerate(file, 1):
            if number > MOST_LINES:
                raise InputError(f"{path} has over {MOST_LINES} lines; divide it among batches")


def _problem(message: str) -> dict[str, Any]:
    """Return what a batch has about the error that has ended it."""
    error = {"code": "invalid_batch", "message": message, "line": None, "param": None}
    return {"errors": {"object": "list", "data": [error]}}


def parts_of(content_type: str, body: bytes) -> dict[str, tuple[str, bytes]]:
    """Return {name: (filename, content)} of the parts of a form, multipart/form-data.

    Raises:
      ApiError: with status 400, if the body is no such form.
    """
    boundary = re.search(r'boundary="?([^";,]+)', content_type)
    if boundary is None or not content_type.startswith("multipart/form-data"):
        raise ApiError(400, "Content-Type: expected multipart/form-data with a boundary")
    parts = dict[str, tuple[str, bytes]]()
    for part in (b"\r\n" + body).split(b"\r\n--" + boundary[1].encode("latin-1"))[1:-1]:
        head, _, content = part.partition(b"\r\n\r\n")
        text = head.decode("utf-8", "replace")
        name, filename = (re.search(rf'[; ]{key}="([^"]*)"', text) for key in ("name", "filename"))
        if name is not None:
            parts[name[1]] = filename[1] if filename else "", content
    return parts
