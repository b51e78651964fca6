"""A stand-in for the Hugging Face hub, with one dataset, for the package datasets."""

import contextlib
import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator

NAME = "owner/stories"
COMMIT = "c0ffee" + "0" * 34
MISSING = {"X-Error-Code": "EntryNotFound"}


class Hub(http.server.ThreadingHTTPServer):
    """An HTTP server with the parts of the hub's API that downloading a dataset needs.

    Args:
      files: the contents of the dataset's files, by path.

    Attributes:
      requests: the paths of all requests.
    """

    def __init__(self, files: dict[str, bytes]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.requests = files, []

    def entries(self, folder: str) -> list[dict[str, object]]:
        """Return the files and folders in a folder of the dataset."""
        prefix = f"{folder}/" if folder else ""
        inside = [path.removeprefix(prefix) for path in self.files if path.startswith(prefix)]
        folders = sorted({path.partition("/")[0] for path in inside if "/" in path})
        listed = [self.entry(prefix + path) for path in inside if "/" not in path]
        return listed + [
            {"type": "directory", "oid": "0" * 40, "size": 0, "path": prefix + name}
            for name in folders
        ]

    def entry(self, path: str) -> dict[str, object]:
        content = self.files[path]
        digest = hashlib.sha1(content).hexdigest()
        return {"type": "file", "oid": digest, "size": len(content), "path": path}


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub  # type: ignore[assignment]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        self.server.requests.append(path)
        information, contents = f"/api/datasets/{NAME}", f"/datasets/{NAME}/resolve/"
        if path.startswith(f"{information}/tree/"):
            if listed := self.server.entries("/".join(path.split("/")[7:])):
                self.send(200, json.dumps(listed).encode())
            else:
                self.send(404, b"{}", **MISSING)
        elif path == information or path.startswith(f"{information}/revision/"):
            names = [{"rfilename": name} for name in self.server.files]
            about = {"id": NAME, "sha": COMMIT, "siblings": names, "tags": []}
            self.send(200, json.dumps(about).encode())
        elif path.startswith(contents):
            content = self.server.files.get("/".join(path.split("/")[6:]))
            etag = hashlib.sha1(content or b"").hexdigest()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}
            if content is None:
                self.send(404, b"", **headers, **MISSING)
            else:
                self.send(200, content, **headers)
        else:
            self.send(404, b"{}", **{"X-Error-Code": "RepoNotFound"})

    do_GET = do_HEAD = do_POST = answer

    def send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextlib.contextmanager
def hub_server(files: dict[str, bytes]) -> Iterator[tuple[Hub, dict[str, str]]]:
    """Run a hub; yield it and the environment variables with which a process uses it."""
    with Hub(files) as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{hub.server_address[1]}"
        yield hub, {"HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        hub.shutdown()
        thread.join()
