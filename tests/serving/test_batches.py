"""Files and batches of a server, with OpenAI's client, and what is left after the server ends."""

import json
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from mesh_transformer.serving.batches import Batches, parts_of
from mesh_transformer.serving.errors import ApiError
from mesh_transformer.util import InputError
from tests.serving.test_batch import line, some_lines
from tests.support.live_server import Live
from tests.support.waiting import wait_until

pytest_plugins = ["tests.support.live_fixtures"]
OPTIONS: dict[str, Any] = {"template": "plain", "pooling": "last", "network": {"window": 512}}


@pytest.fixture
def serving(serve: Any, tmp_path: Path) -> Callable[..., Live]:
    """Return a function that starts a server whose batches are in the test's folder."""
    return lambda **more: serve(**OPTIONS, batch_folder=str(tmp_path / "batches"), **more)


def client_of(live: Live, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0)


def content_of(lines: list[Any]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def begin(client: openai.OpenAI, lines: list[Any]) -> Any:
    file = client.files.create(file=("in.jsonl", content_of(lines)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )


def ended(client: openai.OpenAI, name: str) -> Any:
    def get() -> Any:
        batch = client.batches.retrieve(name)
        return batch if batch.status in ("completed", "failed", "cancelled") else None

    return wait_until(get, "the end of the batch")


def test_openai_client_uploads_runs_and_reads(serving: Callable[..., Live]) -> None:
    live = serving()
    lines = [*some_lines(40), line(40, prompt="tree", max_tokens="many")]
    with client_of(live) as client:
        file = client.files.create(file=("in.jsonl", content_of(lines)), purpose="batch")
        assert (file.filename, file.bytes, file.purpose) == (
            "in.jsonl",
            len(content_of(lines)),
            "batch",
        )
        assert client.files.content(file.id).read() == content_of(lines)
        assert [item.id for item in client.files.list()] == [file.id]
        assert client.files.retrieve(file.id) == file
        begun = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/completions",
            completion_window="24h",
            metadata={"a": "b"},
        )
        batch = ended(client, begun.id)
        assert (batch.status, batch.metadata) == ("completed", {"a": "b"})
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (41, 40, 1)
        results, errors = (
            [json.loads(text) for text in client.files.content(name).text.splitlines()]
            for name in (batch.output_file_id, batch.error_file_id)
        )
        assert [row["custom_id"] for row in results] == [row["custom_id"] for row in lines[:40]]
        assert [row["response"]["status_code"] for row in errors] == [400]
        for request, row in list(zip(lines, results, strict=False))[::4]:
            response = live.http.post(request["url"], json=request["body"]).json()
            assert row["response"]["body"]["choices"] == response["choices"]
        assert [item.id for item in client.batches.list()] == [begun.id]
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError, match="no such file"):
            client.files.content(file.id)
        with pytest.raises(openai.ConflictError, match="the batch is completed"):
            client.batches.cancel(begun.id)


def test_batches_are_cancelled_or_continued_by_the_next_server(
    serving: Callable[..., Live], tmp_path: Path
) -> None:
    live = serving()
    lines = [line(n, prompt="tree", max_tokens=40, seed=n) for n in range(60)]
    with client_of(live) as client:
        names = [begin(client, lines).id for _ in range(3)]
        kept = tmp_path / "batches/batches"
        wait_until(lambda: list(kept.glob(f".{names[0]}*.partial")), "the first batch")
        client.batches.cancel(names[2])  # while it waits
        with pytest.raises(InputError, match="in use by process"):
            Batches(live.service, str(tmp_path / "batches"))
    live.close()
    live = serving()
    with client_of(live) as client:
        for name in names[:2]:
            batch = ended(client, name)
            assert batch.status == "completed"
            rows = client.files.content(batch.output_file_id).text.splitlines()
            assert [json.loads(row)["custom_id"] for row in rows] == [f"id {n}" for n in range(60)]
        assert ended(client, names[2]).status == "cancelled"
        live.network.allowed.clear()
        name = begin(client, lines).id
        wait_until(lambda: client.batches.retrieve(name).status == "in_progress", "its begin")
        wait_until(lambda: live.network.waits, "its first call")
        assert client.batches.cancel(name).status == "cancelling"
        live.network.allowed.set()
        batch = ended(client, name)
        assert (batch.status, batch.output_file_id) == ("cancelled", None)
    assert not list(kept.glob(".*"))


def test_bad_files_and_requests_are_refused(serving: Callable[..., Live], tmp_path: Path) -> None:
    live = serving(keys=None)
    with client_of(live) as client:
        for lines, problem in (
            (b"no JSON\n", "line 1 is not JSON"),
            (content_of([line(1), line(1)]), "the custom_id 'id 1' is also that of"),
        ):
            file = client.files.create(file=("in.jsonl", lines), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
            )
            batch = ended(client, batch.id)
            assert batch.status == "failed"
            assert problem in batch.errors.data[0].message
            assert "the file: line" in batch.errors.data[0].message
            assert str(tmp_path) not in batch.errors.data[0].message
        with pytest.raises(openai.BadRequestError, match="purpose: found"):
            client.files.create(file=("a", b"a"), purpose="vision")
    bodies = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    for change, status in (
        ({"input_file_id": "file-" + "0" * 24}, 404),
        ({"input_file_id": "../in"}, 404),
        ({"input_file_id": 3}, 400),
        ({"endpoint": "/complete"}, 400),
        ({"completion_window": "1h"}, 400),
    ):
        assert live.refused(bodies | change, "/v1/batches")[0] == status
    assert live.refused("[]", "/v1/batches")[0] == 400
    assert live.http.get("/v1/batches/batch_0").status_code == 404


class Killed(BaseException):
    """Takes the place of the end of the process."""


class Answers:
    """Requests that are answered at once; `problem` is raised for the prompt "bad"."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.asked, self._problem = list[str](), problem

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        self.asked.append(body["prompt"])
        if self._problem is not None and body["prompt"] == "bad":
            raise self._problem
        return 200, {"prompt": body["prompt"]}

    def stop(self) -> None:
        pass


def stored(folder: Path, lines: list[Any], identity: Any = None) -> tuple[Batches, str]:
    """Return the batches in a folder, with a new one if there is none, and its name."""
    service: Any = types.SimpleNamespace(engine=types.SimpleNamespace(rows=2))
    batches = Batches(service, str(folder), identity)
    if not batches.batches.all():
        name, source = batches.batches.new_name(), batches.files.new_name()
        batches.files.path(source).write_bytes(content_of(lines))
        batches.files.save({"id": source, "created_at": 0, "bytes": 1})
        batch = {"id": name, "created_at": 0, "status": "validating", "input_file_id": source}
        batches.batches.save(batch)
    return batches, batches.batches.all()[0]["id"]


@pytest.mark.parametrize("status", ["finalizing", "completed", None])
def test_a_batch_whose_server_dies_at_its_end_is_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str | None
) -> None:
    """The server dies before that status is stored, or before the answers are deleted."""
    lines = [line(n, prompt=f"text {n}") for n in range(6)]
    batches, name = stored(tmp_path, lines)
    change, unlink = batches._change, Path.unlink

    def stop_at(name: str, new: str, **values: Any) -> dict[str, Any]:
        if new == status:
            raise Killed
        return change(name, new, **values)

    def keep(path: Path, **options: Any) -> None:
        if path == batches.batches.path(name):
            raise Killed
        unlink(path, **options)

    first, second = Answers(), Answers()
    with monkeypatch.context() as patch:
        patch.setattr(batches, "_change", stop_at)
        patch.setattr(Path, "unlink", keep)
        with pytest.raises(Killed):
            batches._complete(name, cast(Any, first))
    batches.close()
    batches, _ = stored(tmp_path, lines)
    batches._complete(name, cast(Any, second))
    assert (len(first.asked), second.asked) == (6, [])
    batch = batches.batches.load(name)
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 6)
    assert len(batches.files.all()) == 2  # the lines and the results
    rows = batches.files.path(batch["output_file_id"]).read_text().splitlines()
    assert [json.loads(row)["custom_id"] for row in rows] == [row["custom_id"] for row in lines]
    batches.close()


def test_errors_end_a_batch_but_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line(n, prompt=text) for n, text in enumerate(("first", "second", "third", "bad"))]
    batches, name = stored(tmp_path / "a", lines)
    batches._complete(name, cast(Any, Answers(KeyError("x"))))
    batch = batches.batches.load(name)
    assert batch["status"] == "failed"
    assert "its log has the error" in batch["errors"]["data"][0]["message"]
    batches.close()
    # The answers so far outlive an error of the disk, but not a server with another model.
    batches, name = stored(tmp_path / "b", lines, identity="one model")
    batches._complete(name, cast(Any, Answers(OSError(28, "No space left on device"))))
    assert batches.batches.load(name)["status"] == "in_progress"
    batches.close()
    for identity, asked in (("one model", {1, 2}), ("another", {4})):  # two are in flight
        copied = tmp_path / identity
        shutil.copytree(tmp_path / "b", copied)
        batches, _ = stored(copied, lines, identity)
        again = Answers()
        batches._complete(name, cast(Any, again))
        assert len(again.asked) in asked
        assert batches.batches.load(name)["status"] == "completed"
        assert not list((copied / "batches").glob(".*.partial"))
        batches.close()
    monkeypatch.setattr("mesh_transformer.serving.batches.MOST_LINES", 3)
    batches, name = stored(tmp_path / "c", lines)
    batches._complete(name, cast(Any, Answers()))
    problem = batches.batches.load(name)["errors"]["data"][0]["message"]
    assert problem == "the file has over 3 lines; divide it among batches"
    (tmp_path / "c/batches/batch_0.json").write_text("")
    assert [batch["id"] for batch in batches.batches.all()] == [name]
    batches.close()


def test_other_pages_cannot_upload(serving: Callable[..., Live], tmp_path: Path) -> None:
    live = serving()
    form = {"files": {"file": ("a.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
    for origin, status in (("http://evil.example", 403), (live.url, 200), (None, 200)):
        headers = {} if origin is None else {"Origin": origin}
        assert live.http.post("/v1/files", headers=headers, **form).status_code == status


def test_without_a_folder_the_flag_is_named(serve: Any) -> None:
    live = serve()
    for path in ("/v1/files", "/v1/batches"):
        status, error = live.refused({}, path)
        assert (status, "--batch-folder" in error["message"]) == (404, True)
        assert live.http.get(path).status_code == 404


def test_keys_are_required(serving: Callable[..., Live], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    live = serving(keys=str(tmp_path / "keys"))
    with client_of(live, "wrong") as client, pytest.raises(openai.AuthenticationError):
        client.files.list()
    with client_of(live, "secret") as client:
        batch = ended(client, begin(client, [line(0, prompt="tree")]).id)
        assert batch.request_counts.completed == 1


def test_forms_are_split_into_parts() -> None:
    content = bytes(range(256)) + b"\r\n--a\r\n\r\n--"
    body = (
        b'--bound\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--bound\r\nContent-Disposition: form-data; name="file"; filename="x.jsonl"\r\n'
        b"Content-Type: application/json\r\n\r\n" + content + b"\r\n--bound--\r\n"
    )
    parts = parts_of("multipart/form-data; boundary=bound", body)
    assert parts == {"purpose": ("", b"batch"), "file": ("x.jsonl", content)}
    for kind in ("application/json", "multipart/form-data"):
        with pytest.raises(ApiError, match="expected multipart/form-data with a boundary"):
            parts_of(kind, body)
