"""A fake Google Cloud Storage on loopback, with what tensorstore and TensorFlow request.

tensorstore and gcsfs take an endpoint from the environment.  TensorFlow does not, but it obeys
`https_proxy`: the same port is also such a proxy, behind which it speaks TLS with its own
certificate.
"""

import bisect
import contextlib
import dataclasses
import http.server
import itertools
import json
import re
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

HOSTS = ("storage.googleapis.com", "www.googleapis.com")

# Ways in which a connection fails: it is closed before the answer or in the middle of it, the
# answer stops in its middle, or its first byte is late.
FAULTS = ("lost", "cut", "stalled", "slow")
SLOW_SECONDS = 1.0
MOST_SECONDS = 120.0  # longest time for which a stalled connection stays open

Key = tuple[str, str]  # a bucket and the name of an object


@dataclasses.dataclass
class Stored:
    """An object with its generation number and the time of its last write."""

    content: bytes
    generation: int
    written: float

    def resource(self, key: Key) -> dict[str, str]:
        """Return the object's description in the JSON API."""
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.written))
        return {
            "kind": "storage#object",
            "bucket": key[0],
            "name": key[1],
            "size": str(len(self.content)),
            "generation": str(self.generation),
            "metageneration": "1",
            "timeCreated": when,
            "updated": when,
        }


class Answer(Exception):  # noqa: N818  # most are not errors
    """Raised to end a request with a status, a body and headers."""

    def __init__(self, status: int, body: Any = b"", **headers: Any):
        super().__init__(status)
        if status >= 400:
            body = {"error": {"code": status, "message": str(body)}}
        self.status = status
        self.fault: str | None = None  # a fault of the connection that carries the answer
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.headers = {name.replace("_", "-"): str(value) for name, value in headers.items()}


@dataclasses.dataclass
class Upload:
    """A resumable upload.

    Attributes:
      content: the bytes received so far.
      done: the description of the object, once all bytes have been received.
    """

    key: Key
    content: bytearray = dataclasses.field(default_factory=bytearray)
    done: dict[str, str] | None = None

    def receive(self, content_range: str, content: bytes) -> None:
        """Add bytes, or none if the request only asks how many were received ("bytes */10").

        Raises:
          Answer: if bytes are still missing.
        """
        span = re.fullmatch(r"bytes (?:(\d+)-\d*|\*)/(\d+|\*)", content_range)
        assert span is not None, content_range
        if span[1] is not None:
            self.content[int(span[1]) :] = content
        if span[2] == "*" or len(self.content) < int(span[2]):
            received = {"Range": f"bytes=0-{len(self.content) - 1}"} if self.content else {}
            raise Answer(308, **received)


class FakeGcs:
    """Buckets of any name but those that are missing; their objects are kept in memory.

    Attributes:
      objects: all objects, by bucket and name.
      missing: names of buckets that do not exist.
      fault: called before each request.  If it returns a status, that status is the answer, and
        the request has no effect.  If it returns one of `FAULTS`, the request takes effect, and the
        connection fails when it is answered.
    """

    def __init__(self) -> None:
        self.objects: dict[Key, Stored] = {}
        self._listed: list[Key] = []  # the names at the last listing, and those sorted
        self._sorted: list[Key] = []
        self._listing_lock = threading.Lock()
        self.missing: set[str] = set()
        self.fault: Callable[[], int | str | None] = lambda: None
        self.lock = threading.RLock()
        self.requests = 0
        self._generation = 0
        self._uploads: dict[str, Upload] = {}

    def answer(self, method: str, url: str, headers: Any, content: bytes) -> Answer:
        with self.lock:
            self.requests += 1
            if isinstance(fault := self.fault(), int):
                return Answer(fault, "made to fail")
            answer = self._routed(method, url, headers, content)
            answer.fault = fault
            return answer

    def _routed(self, method: str, url: str, headers: Any, content: bytes) -> Answer:
        parts = urlsplit(url)
        query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        try:
            self._route(method, parts.path, query, headers, content)
        except Answer as answer:
            return answer
        return Answer(404, f"{method} {parts.path} is unknown here")

    def _route(self, method: str, path: str, query: dict, headers: Any, content: bytes) -> None:
        """Raise the answer, if there is one."""
        match = re.match(r"/(?:upload/)?storage/v1/b/([^/]+)", path)
        if match and match[1] in self.missing:
            raise Answer(404, "The specified bucket does not exist.")
        if match := re.fullmatch(r"/storage/v1/b/([^/]+)", path):
            raise Answer(
                200,
                {
                    "kind": "storage#bucket",
                    "name": match[1],
                    "location": "US",
                    "metageneration": "1",
                },
            )
        if match := re.fullmatch(r"/upload/storage/v1/b/([^/]+)/o", path):
            self._upload(method, match[1], query, headers, content)
        if match := re.fullmatch(r"/storage/v1/b/([^/]+)/o", path):
            raise Answer(200, self._listing(match[1], query))
        if match := re.fullmatch(r"/storage/v1/b/([^/]+)/o/([^/]+)/compose", path):
            key = (match[1], unquote(match[2]))
            self._check(key, query)
            parts = [(match[1], part["name"]) for part in json.loads(content)["sourceObjects"]]
            raise Answer(200, self._put(key, b"".join(self._stored(p).content for p in parts)))
        if match := re.fullmatch(
            r"/storage/v1/b/([^/]+)/o/([^/]+)/(?:rewriteTo|copyTo)/b/([^/]+)/o/([^/]+)", path
        ):
            source = self._stored((match[1], unquote(match[2])))
            copy = self._put((match[3], unquote(match[4])), source.content)
            raise Answer(200, {"done": True, "resource": copy, "objectSize": copy["size"]})
        # The XML API uses the same names for reading, but does not escape the slashes in them.
        match = re.fullmatch(r"(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)", path)
        media = match is None or query.get("alt") == "media"
        if match := match or re.fullmatch(r"/(?!storage/|upload/)([^/]+)/(.+)", path):
            self._object(method, (match[1], unquote(match[2])), media, query, headers)

    def _stored(self, key: Key) -> Stored:
        if key not in self.objects:
            raise Answer(404, f"{key[0]}/{key[1]}: no such object")
        return self.objects[key]

    def _put(self, key: Key, content: bytes) -> dict[str, str]:
        self._generation += 1
        self.objects[key] = Stored(bytes(content), self._generation, time.time())
        return self.objects[key].resource(key)

    def _check(self, key: Key, query: dict) -> None:
        """Check the preconditions on the generation, which is 0 if there is no object."""
        stored = self.objects.get(key)
        generation = str(stored.generation if stored else 0)
        if query.get("ifGenerationMatch", generation) != generation:
            raise Answer(412, "ifGenerationMatch")
        if query.get("ifGenerationNotMatch") == generation:
            raise Answer(304)

    def _upload(self, method: str, bucket: str, query: dict, headers: Any, content: bytes) -> None:
        if "upload_id" in query:
            upload = self._uploads[query["upload_id"]]
            if upload.done is None:
                upload.receive(headers.get("Content-Range", f"bytes 0-/{len(content)}"), content)
                upload.done = self._put(upload.key, upload.content)
            raise Answer(200, upload.done)
        if query.get("uploadType") == "multipart":
            _, described, content = content.split(b"\r\n\r\n", 2)
            name = json.loads(described.partition(b"\r\n--")[0])["name"]
            content = content.rpartition(b"\r\n--")[0]
        else:
            name = query.get("name") or json.loads(content)["name"]
        key = (bucket, unquote(name))
        if query.get("uploadType") == "resumable":
            number = str(len(self._uploads))
            self._uploads[number] = Upload(key)
            host = headers["Host"]
            scheme = "https" if host.partition(":")[0] in HOSTS else "http"
            path = f"/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={number}"
            raise Answer(200, Location=f"{scheme}://{host}{path}")
        if method == "POST":
            self._check(key, query)
            raise Answer(200, self._put(key, content))

    def _listing(self, bucket: str, query: dict) -> dict[str, Any]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        after, limit = query.get("pageToken", ""), int(query.get("maxResults", 1000))
        with self._listing_lock:
            if (keys := list(self.objects)) != self._listed:  # sorting again is slow
                self._listed, self._sorted = keys, sorted(keys)
            in_order = self._sorted
        start = max(prefix, after, query.get("startOffset", ""))
        first = bisect.bisect_left(in_order, (bucket, start))
        end = query.get("endOffset", "\U0010ffff")
        entries: dict[str, Key | None] = {}  # None: a prefix; in the order of names
        for key in itertools.islice(in_order, first, None):
            name = key[1]
            within = key[0] == bucket and name.startswith(prefix) and name < end
            if not within or len(entries) > limit:
                break
            head, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            entry = prefix + head + cut if cut else name
            if entry > after:
                entries[entry] = None if cut else key
        names = list(entries)
        listing: dict[str, Any] = {"kind": "storage#objects"}
        page = {name: entries[name] for name in names[:limit]}
        if keys := [key for key in page.values() if key is not None]:
            listing["items"] = [self.objects[key].resource(key) for key in keys]
        if prefixes := [name for name, key in page.items() if key is None]:
            listing["prefixes"] = prefixes
        if len(names) > limit:
            listing["nextPageToken"] = names[limit - 1]
        return listing

    def _object(self, method: str, key: Key, media: bool, query: dict, headers: Any) -> None:
        stored = self._stored(key)
        self._check(key, query)
        if method == "DELETE":
            del self.objects[key]
            raise Answer(204)
        if not media:
            raise Answer(200, stored.resource(key))
        content, sent_headers = stored.content, {"x_goog_generation": stored.generation}
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("Range", ""))
        if not span:
            raise Answer(200, content, **sent_headers)
        first = int(span[1]) if span[1] else max(len(content) - int(span[2]), 0)
        last = min(int(span[2]) if span[1] and span[2] else len(content) - 1, len(content) - 1)
        if first > last:
            raise Answer(416, "Range", Content_Range=f"bytes */{len(content)}")
        sent_headers["Content_Range"] = f"bytes {first}-{last}/{len(content)}"
        raise Answer(206, content[first : last + 1], **sent_headers)


class _Handler(http.server.BaseHTTPRequestHandler):
    """HTTP for one connection; after CONNECT, it continues inside TLS."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body follows its headers without a wait for the client's ACK
    gcs: FakeGcs
    tls: ssl.SSLContext

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_CONNECT(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.connection = self.tls.wrap_socket(self.connection, server_side=True)
        self.rfile = self.connection.makefile("rb")
        self.wfile = self.connection.makefile("wb", 0)
        self.close_connection = False
        self.handle()

    def finish(self) -> None:
        super().finish()
        self.connection.close()  # the server does not know the socket of TLS

    def _any(self) -> None:
        answer = self.gcs.answer(self.command, self.path, self.headers, self._content())
        if answer.fault == "lost":
            self.close_connection = True
            return
        if answer.fault == "slow":
            time.sleep(SLOW_SECONDS)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        body = b"" if self.command == "HEAD" else answer.body
        if answer.fault in ("cut", "stalled"):
            self.wfile.write(body[: len(body) // 2])
            if answer.fault == "stalled":
                self._wait_for_the_client()
            self.close_connection = True
        else:
            self.wfile.write(body)

    def _wait_for_the_client(self) -> None:
        """Wait until the client closes the connection, or sends something else."""
        with contextlib.suppress(OSError):
            self.connection.settimeout(MOST_SECONDS)
            self.connection.recv(1)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _any

    def _content(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors, because clients may disconnect at any time."""


@contextlib.contextmanager
def gcs_server(
    folder: Path, gcs: FakeGcs | None = None
) -> Iterator[tuple[FakeGcs, dict[str, str]]]:
    """Run a server; yields it and the environment variables with which clients use it.

    Args:
      folder: where its key and its certificate are written.
      gcs: what it serves; by default, new buckets.
    """
    key, certificate = folder / "tls.key", folder / "tls.pem"
    names = ",".join(f"DNS:{name}" for name in HOSTS)
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", f"/CN={HOSTS[0]}", "-addext", f"subjectAltName={names}"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    gcs = gcs or FakeGcs()
    handler = type("Handler", (_Handler,), {"gcs": gcs, "tls": tls})
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield (
                gcs,
                {
                    "https_proxy": url,
                    "no_proxy": "127.0.0.1,localhost",
                    "CURL_CA_BUNDLE": str(certificate),
                    "TENSORSTORE_GCS_HTTP_URL": url,
                    "STORAGE_EMULATOR_HOST": url,
                    "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
                    "GCS_STAT_CACHE_MAX_AGE": "0",
                    "NO_GCE_CHECK": "true",
                },
            )
        finally:
            server.shutdown()
            thread.join()
