"""`POST /v1/embeddings`, with a network whose vectors are known."""

import base64
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest

from mesh_transformer.cli import serve as command
from mesh_transformer.generation.prompts import POOLINGS
from tests.support.live_server import connected, post, wait_for
from tests.support.waiting import SECONDS

pytest_plugins = ["tests.support.live_fixtures"]

TEXTS = [[0, 1, 1, 9], [3], [2, 2, 0]]
VECTORS = np.array([[1, 2, 0, 0], [0, 0, 0, 1], [1, 0, 2, 0]]) / np.sqrt([[5], [1], [5]])


@pytest.fixture(scope="module")
def live(serve):
    return serve(pooling="last")


def respond(live, **body):
    response = live.http.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    return response


def ask(live, **body):
    return respond(live, **body).json()


def test_each_text_has_a_vector_of_length_1(live):
    answer = ask(live, input=TEXTS, model="fake", user="me")
    assert (answer["object"], answer["model"]) == ("list", "fake")
    assert answer["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
    assert [(item["object"], item["index"]) for item in answer["data"]] == [
        ("embedding", at) for at in range(3)
    ]
    actual = [item["embedding"] for item in answer["data"]]
    np.testing.assert_allclose(actual, VECTORS, rtol=1e-6)  # rounded to f32
    assert live.network.calls[-3:] == [("embed", 16, "last")] * 3  # padded to few widths


@pytest.mark.parametrize("text", ["Hello there", "", [1, 2], ["One", "two"], [[1]]])
def test_an_input_is_a_text_or_tokens_or_a_list_of_them(live, text):
    several = isinstance(text, list) and not isinstance(text[0], int)
    texts = text if several else [text]
    tokens = [live.tokenizer(x)["input_ids"] if isinstance(x, str) else x for x in texts]
    response = respond(live, input=text)
    answer = response.json()
    assert len(answer["data"]) == len(texts)
    assert answer["usage"]["total_tokens"] == sum(len(x or [0]) for x in tokens)
    line = live.logged(response.headers["x-request-id"])
    assert (line["path"], line["status"]) == ("/v1/embeddings", 200)
    assert line["total_tokens"] == answer["usage"]["total_tokens"]


def test_openai_client(live):
    """By default, the client asks for base64 and decodes it."""
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        for options in ({}, {"encoding_format": "float"}, {"dimensions": 4}):
            answer = client.embeddings.create(model="fake", input=TEXTS, **options)
            actual = [item.embedding for item in answer.data]
            np.testing.assert_allclose(actual, VECTORS, rtol=1e-6)
    [item] = ask(live, input=TEXTS[:1], encoding_format="base64")["data"]
    decoded = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
    np.testing.assert_allclose(decoded, VECTORS[0], rtol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"input": 3},
        {"input": []},
        {"input": [[50400]]},
        {"input": "word " * 3000},
        {"input": [1] * 65},
        {"encoding_format": "int8"},
        {"dimensions": 3},
        {"dimensions": "4"},
        {"pooling": "mean"},
        {"prompt": "a"},
        {"model": "other"},
    ],
    ids=lambda wrong: ascii(wrong)[:40],
)
def test_error_names_the_wrong_field(live, wrong):
    status, error = live.refused({"input": "a"} | wrong, "/v1/embeddings")
    assert status == (404 if "model" in wrong else 400)
    assert error["param"] == next(iter(wrong))
    assert error["message"].isprintable()


@pytest.mark.slow
def test_a_request_may_have_2048_texts(serve):
    """More than the server has room for: the engine gets them a few at a time."""
    small = serve(pooling="last", rows=2, queue=3)
    texts = [[at % 4, at // 4 % 4] for at in range(2048)]
    counts = np.array([np.bincount(text, minlength=4) for text in texts])
    answer = ask(small, input=texts)
    actual = [item["embedding"] for item in answer["data"]]
    expected = counts / np.linalg.norm(counts, axis=1, keepdims=True)
    np.testing.assert_allclose(actual, expected, rtol=1e-6)  # rounded to f32
    assert [item["index"] for item in answer["data"]] == list(range(2048))
    assert answer["usage"]["total_tokens"] == 4096
    status, error = small.refused({"input": ["a"] * 2049}, "/v1/embeddings")
    assert (status, error["param"]) == (400, "input")
    assert "a list of 1 to 2048 texts" in error["message"]


def test_many_texts_leave_room_in_the_queue(serve):
    """Other clients get answers meanwhile; texts wait while these fill the queue."""
    small = serve(pooling="mean", rows=1, queue=2)
    small.network.allowed.clear()
    with ThreadPoolExecutor(5) as pool:
        vectors = pool.submit(ask, small, input=["a"] * 20)
        wait_for(lambda: small.network.waits)
        answers, engine = [], small.engine
        for _ in range(engine.queue + engine.rows - engine.active - len(engine._admitted)):
            answers.append(pool.submit(small.ask, prompt="Say: ", max_tokens=9, seed=1))
            wait_for(lambda: small.engine.waiting == len(answers))
        assert small.refused({"prompt": "a"})[0] == 429
        small.network.allowed.set()
        assert len(vectors.result(SECONDS)["data"]) == 20
        assert all(answer.result(SECONDS)["choices"] for answer in answers)


def test_a_server_without_embeddings_says_how_to_have_them(serve):
    plain = serve()
    status, error = plain.refused({"input": "a"}, "/v1/embeddings")
    assert status == 404
    assert "start the server with --embeddings" in error["message"]
    assert "/v1/embeddings" not in plain.http.get("/openapi.json").text


def test_texts_of_a_client_that_left_are_dropped(serve):
    live = serve(pooling="mean")
    live.network.allowed.clear()
    with connected(live) as connection:
        connection.sendall(post({"input": TEXTS}, "/v1/embeddings"))
        # The first text waits in a call of the network, the others in the queue.
        wait_for(lambda: live.network.waits and live.engine.waiting == len(TEXTS) - 1)
    wait_for(lambda: live.engine.waiting == 0)  # they have been dropped
    live.network.allowed.set()
    assert ask(live, input="a")
    assert live.network.calls.count(("embed", 16, "mean")) == 2  # the first text, and "a"


def test_a_failure_of_the_network_is_an_error_of_the_request(serve):
    live = serve(pooling="mean")
    live.network.failures = [RuntimeError("broken")]
    status, error = live.refused({"input": TEXTS}, "/v1/embeddings")
    assert (status, error["type"]) == (500, "server_error")


def test_texts_take_turns_with_running_answers(serve):
    """A text is read between two decode calls, as a prompt is."""
    live = serve(pooling="mean")
    live.network.allowed.clear()
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(live.ask, prompt="Say: ", max_tokens=40, seed=1)
        wait_for(lambda: live.network.waits)
        vectors = pool.submit(ask, live, input=TEXTS)
        wait_for(lambda: live.engine.waiting == 3)
        live.network.allowed.set()
        assert answer.result(SECONDS)["usage"]["completion_tokens"] == 40
        assert len(vectors.result(SECONDS)["data"]) == 3
    kinds = [kind for kind, *_ in live.network.calls if kind in ("embed", "decode")]
    first = kinds.index("embed")
    assert kinds[first : first + 5] == ["embed", "decode"] * 2 + ["embed"]


def test_the_flag_has_every_pooling(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["serve", "--help"])
    with pytest.raises(SystemExit):
        command.parse_args()
    assert f"--embeddings {{{','.join(POOLINGS)}}}" in capsys.readouterr().out
