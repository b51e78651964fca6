"""Sends the same requests to `FakeGcs` and to another server with the API of Google Cloud Storage.

`python -m tests.long.same_answers http://127.0.0.1:9000` compares the answers with those of
Google's storage-testbench, which `python testbench_run.py localhost 9000 10` starts in a virtual
environment of its own.  The requests are those that tensorstore, gcsfs and TensorFlow send.
"""

import argparse
import json
import random
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from tests.support.fake_gcs import gcs_server

# What an object's description must have in common; the rest differs by server and by time.
FIELDS = ("kind", "name", "bucket", "size", "metageneration")
CONTENT = bytes(range(256)) * 40


class Server:
    """A server that gets requests; it remembers generations and uploads by names of the script."""

    def __init__(self, url: str, bucket: str):
        self.http = httpx.Client(base_url=url, timeout=30, trust_env=False)
        self.bucket = bucket
        self.generations: dict[str, str] = {}

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self.http.request(method, path.replace("BUCKET", self.bucket), **options)

    def upload(self, name: str, content: bytes, kind: str = "media", **query: str) -> Any:
        query = {"uploadType": kind, "name": name} | query
        return self.call("POST", "/upload/storage/v1/b/BUCKET/o", params=query, content=content)


def seen(answer: httpx.Response, bucket: str) -> Any:
    """Return what a client sees of an answer, without what is bound to differ."""
    result: dict[str, Any] = {"status": answer.status_code}
    if "range" in answer.headers:
        result["range"] = answer.headers["range"]
    if answer.status_code == 206:
        result["content-range"] = answer.headers["content-range"]
    if not answer.content and answer.request.method == "DELETE":
        return "deleted"  # 204 from Google, 200 from its testbench
    if answer.status_code >= 300:
        return result
    try:
        body = answer.json()
    except ValueError:
        return result | {"content": answer.content}
    is_list = body.get("kind") == "storage#objects"
    resources = body.get("items", []) if is_list else [body.get("resource", body)]
    result["objects"] = [
        {name: str(item.get(name, 0)).replace(bucket, "BUCKET") for name in FIELDS}
        for item in resources
    ]
    return result | {
        "prefixes": body.get("prefixes", []),
        "more": bool(body.get("nextPageToken")),
        "done": body.get("done"),
    }


def script(server: Server) -> Iterator[tuple[str, httpx.Response]]:
    """Send the requests; yields a description and the answer of each."""
    item = "/storage/v1/b/BUCKET/o/{}".format
    xml = "/BUCKET/{}".format

    def generation(name: str) -> str:
        return server.call("GET", item(quote(name, safe=""))).json()["generation"]

    yield "a missing object", server.call("GET", item("missing"))
    yield "a missing object's content", server.call("GET", item("missing"), params={"alt": "media"})
    yield "deleting a missing object", server.call("DELETE", item("missing"))
    yield "an object", server.upload("a/b c", CONTENT)
    escaped = quote("a/b c", safe="")
    yield "its description", server.call("GET", item(escaped))
    yield "its content", server.call("GET", item(escaped), params={"alt": "media"})
    for span in ("0-9", "100-", "10200-99999", "-7", "10240-", "5-5"):
        headers = {"Range": f"bytes={span}"}
        answer = server.call("GET", item(escaped), params={"alt": "media"}, headers=headers)
        yield f"bytes {span}", answer
        yield f"bytes {span} in XML", server.call("GET", xml("a/b%20c"), headers=headers)
    yield "XML of a missing object", server.call("GET", xml("missing"))
    yield "an empty object", server.upload("empty", b"")
    yield "its content", server.call("GET", item("empty"), params={"alt": "media"})

    first = generation("a/b c")
    yield "created only if missing", server.upload("a/b c", b"no", ifGenerationMatch="0")
    yield "created, as it is missing", server.upload("new", b"yes", ifGenerationMatch="0")
    yield "replaced if unchanged", server.upload("a/b c", b"two", ifGenerationMatch=first)
    yield "replaced if unchanged, but it is", server.upload("a/b c", b"3", ifGenerationMatch=first)
    second = generation("a/b c")
    for name, query in {
        "read if changed": {"ifGenerationNotMatch": first},
        "read if changed, but it is not": {"ifGenerationNotMatch": second},
        "read if unchanged": {"ifGenerationMatch": second},
        "read if unchanged, but it is": {"ifGenerationMatch": first},
    }.items():
        yield name, server.call("GET", item(escaped), params={"alt": "media"} | query)
        yield f"{name}: description", server.call("GET", item(escaped), params=query)
    gone = {"ifGenerationMatch": first}
    yield "deleted if unchanged, but it is", server.call("DELETE", item(escaped), params=gone)

    for name in ("x/1", "x/2", "x/y/3", "x/y/4", "x/z/5", "xa"):
        yield f"object {name}", server.upload(name, name.encode())
    for query in (
        {},
        {"prefix": "x/"},
        {"prefix": "x/", "delimiter": "/"},
        {"prefix": "x"},
        {"prefix": "nothing/"},
        {"startOffset": "x/2", "endOffset": "x/z"},
    ):
        yield f"list {query}", server.call("GET", "/storage/v1/b/BUCKET/o", params=query)

    copy = "/storage/v1/b/BUCKET/o/x%2F1/{}/b/BUCKET/o/copy".format
    yield "a copy", server.call("POST", copy("rewriteTo"))
    yield "its content", server.call("GET", item("copy"), params={"alt": "media"})
    missing = "/storage/v1/b/BUCKET/o/missing/rewriteTo/b/BUCKET/o/copy"
    yield "a copy of a missing object", server.call("POST", missing)
    parts = {"sourceObjects": [{"name": "x/1"}, {"name": "x/2"}]}
    yield "composed", server.call("POST", f"{item('whole')}/compose", json=parts)
    yield "its content", server.call("GET", item("whole"), params={"alt": "media"})

    begun = server.upload("large", b"", "resumable")
    yield "a resumable upload", begun
    place = begun.headers["location"]
    path = f"{urlsplit(place).path}?{urlsplit(place).query}"

    def put(span: str, content: bytes = b"") -> httpx.Response:
        return server.call("PUT", path, content=content, headers={"Content-Range": span})

    large = random.Random(0).randbytes(3 * 2**18)
    yield "nothing received", put("bytes */*")
    yield "its first part", put(f"bytes 0-{2**18 - 1}/*", large[: 2**18])
    yield "received so far", put("bytes */*")
    yield "not there yet", server.call("GET", item("large"))
    yield "the rest", put(f"bytes {2**18}-{len(large) - 1}/{len(large)}", large[2**18 :])
    yield "received after the end", put(f"bytes */{len(large)}")
    yield "its content", server.call("GET", item("large"), params={"alt": "media"})
    refused = server.upload("large", b"", "resumable", ifGenerationMatch="0")
    yield "a resumable upload of what exists", refused

    boundary = "part"
    body = (
        f"--{boundary}\r\nContent-Type: application/json\r\n\r\n"
        f"{json.dumps({'name': 'both'})}\r\n--{boundary}\r\n"
        f"Content-Type: application/octet-stream\r\n\r\n"
    ).encode() + b"content\r\n--part--\r\n"
    yield (
        "a multipart upload",
        server.call(
            "POST",
            "/upload/storage/v1/b/BUCKET/o",
            params={"uploadType": "multipart"},
            content=body,
            headers={"Content-Type": f"multipart/related; boundary={boundary}"},
        ),
    )
    yield "its content", server.call("GET", item("both"), params={"alt": "media"})
    for name in ("x/1", "x/1"):
        yield f"deleting {name}", server.call("DELETE", item(quote(name, safe="")))
    yield "the bucket", server.call("GET", "/storage/v1/b/BUCKET")
    for method, path in [
        ("GET", "/storage/v1/b/no-such-bucket"),
        ("GET", "/storage/v1/b/no-such-bucket/o"),
        ("GET", "/storage/v1/b/no-such-bucket/o/a"),
    ]:
        yield f"{path} of a missing bucket", server.call(method, path)


def compare(one: Server, other: Server, say: Callable[[str], None]) -> tuple[int, int]:
    """Compare all answers; returns their number, and the number of those that differ."""
    count = different = 0
    for (what, ours), (_, theirs) in zip(script(one), script(other), strict=True):
        count += 1
        actual, expected = seen(ours, one.bucket), seen(theirs, other.bucket)
        if actual != expected:
            different += 1
            say(f"{what}:\n  {str(actual)[:300]}\n  {str(expected)[:300]}")
    return count, different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="address of the other server")
    args = parser.parse_args()
    bucket = f"bucket-{secrets.token_hex(4)}"
    other = Server(args.url, bucket)
    other.call("POST", "/storage/v1/b", params={"project": "p"}, json={"name": bucket})
    with tempfile.TemporaryDirectory() as name, gcs_server(Path(name)) as (gcs, environment):
        gcs.missing.add("no-such-bucket")
        ours = Server(environment["STORAGE_EMULATOR_HOST"], bucket)
        count, different = compare(ours, other, print)
    print(f"{different} of {count} answers differ")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
