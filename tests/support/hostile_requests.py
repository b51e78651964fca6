"""Requests that a server must survive: wrong values, invalid bodies and clients that leave."""

import json
import math
import random
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import httpx

from mesh_transformer.serving import requests
from tests.support.live_server import SECONDS, check_error, connected, post

WRONG = [
    {"prompt": 3},
    {"prompt": []},
    {"prompt": [None]},
    {"prompt": [[None]]},
    {"prompt": [[]]},
    {"prompt": [[1], "a"]},
    {"prompt": [1, "a"]},
    {"prompt": [1, True]},
    {"prompt": [1.0]},
    {"prompt": [-1]},
    {"prompt": [50400]},
    {"prompt": [10**30]},
    {"prompt": [[[1]]]},
    {"prompt": ["a"] * 129},
    {"prompt": {"a": 1}},
    {"prompt": [1] * 3000},
    {"prompt": "word " * 3000},
    {"max_tokens": -1},
    {"max_tokens": 501},
    {"max_tokens": 0},
    {"max_tokens": 1.5},
    {"max_tokens": "5"},
    {"max_tokens": True},
    {"max_tokens": 10**30},
    {"temperature": -0.1},
    {"temperature": "hot"},
    {"temperature": 1e400},
    {"top_p": 1.1},
    {"top_p": -0.1},
    {"top_k": -1},
    {"top_k": 2**31},
    {"repetition_penalty": 0},
    {"repetition_penalty": 1e-50},  # 0 in float32
    {"repetition_penalty": 1e-30},  # a logit divided by it is infinite
    {"repetition_penalty": 101},
    {"temperature": 1e39},  # infinite in float32
    {"n": 0},
    {"n": 129},
    {"n": 2, "best_of": 3},
    {"n": 100, "prompt": ["a", "b", "c"]},
    {"stop": ""},
    {"stop": ["a"] * 17},
    {"stop": [1]},
    {"stop": "a" * 257},
    {"stop": {"a\n": None}},
    {"stop": ["a", None]},
    {"logprobs": 6},
    {"logprobs": True},
    {"logprobs": -1},
    {"seed": 2**64},
    {"seed": 0.5},
    {"seed": -(10**4000)},
    {"seed": [[[]]]},
    {"stream": "yes"},
    {"stream_options": {"other": 1}},
    {"stream_options": []},
    {"echo": "true"},
    {"ignore_eos": 1},
    {"user": {"\u2028": "\n"}},
    {"top_k": "\u0000\u2028\n" * 100},
    {"suffix": "end"},
    {"presence_penalty": 2.1},
    {"frequency_penalty": "1"},
    {"min_p": 1.1},
    {"typical_p": -0.1},
    {"logit_bias": {"50256": -101}},
    {"logit_bias": {"50400": 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"\uff11": 1}},
    {"logit_bias": {"the": 1}},
    {"logit_bias": {"5": None}},
    {"logit_bias": {str(token): 1 for token in range(301)}},
    {"logit_bias": [5]},
    {"beams": 2},
    {"model": 5},
]

# The same for /complete.
WRONG_CONTEXT = [
    {},
    {"context": None},
    {"context": 5},
    {"context": ["a"]},
    {"context": "a", "top_p": 1.1},
    {"context": "a", "top_p": "half"},
    {"context": "a", "top_p": "nan"},
    {"context": "a", "temp": True},
    {"context": "a", "temp": [1, None]},
    {"context": "a", "temp": -1},
    {"context": "a", "top_k": 1.5},
    {"context": "a", "length": 0},
    {"context": "a", "length": 501},
    {"context": "a", "seed": -1},
    {"context": "a", "seed": 2**32},
    {"context": "a", "prompt": "a"},
]

BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'"prompt"',
    b'{"prompt": "a"} more',
    b'{"prompt": NaN}',
    b'{"temperature": NaN}',
    b"[NaN]",
    b'{"prompt": "a", "prompt": "b", "stop": -Infinity}',
    b'{"\\n\\u2028": 1}',
    b'{"": 1}',
    b"5",
    b"false",
    b'{"temperature": Infinity}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "a\x00b"}',
    b"[" * 100000,
    b'{"a":' * 50000,
    b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
    b'{"seed": ' + b"9" * 10000 + b"}",
    b"\x1f\x8b\x08gzip",
    json.dumps({"prompt": "a"}).encode("utf-16"),
]


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Bodies with one part repeated up to any size, each of which is wrong: path, beginning, part with
# its number, end.
MESSAGES = '{"messages":[{"role":"u","content":"a"'
REPEATED = {
    "parts": (CHAT, '{"messages":[{"role":"user","content":[', '{"a":%d},', "{}]}]}"),
    "numbers": (CHAT, '{"messages":[{"role":"user","content":[', "%d,", "1]}]}"),
    "contents": (CHAT, '{"messages":[', '{"role":"u","content":[%d,0,0,0]},', '{"role":"u"}]}'),
    "messages": (CHAT, '{"messages":[', "%d,", "0]}"),
    "keys of messages": (CHAT, MESSAGES, ',"k%d":1', "}]}"),
    "modalities": (CHAT, MESSAGES + '}],"modalities":[', "%d,", "1]}"),
    "tools": (CHAT, MESSAGES + '}],"tools":[', "%d,", "1]}"),
    "metadata": (
        CHAT,
        '{"messages":[{"role":"u","content":"a"}],"metadata":{',
        '"%d":1,',
        '"":1}}',
    ),
    "keys": (COMPLETIONS, '{"prompt":"a"', ',"k%d":1', "}"),
    "biases": (COMPLETIONS, '{"logit_bias":{', '"%d":1,', '"":1}}'),
    "wrong biases": (COMPLETIONS, '{"logit_bias":{', '"x%d":"a",', '"":1}}'),
    "stops": (COMPLETIONS, '{"stop":[', "%d,", "1]}"),
    "lists": (COMPLETIONS, '{"prompt":[', "[],", "[]]}"),
    "nested lists": (COMPLETIONS, '{"prompt":[', "[[[[[[%d]]]]]],", "[]]}"),
    "objects": (COMPLETIONS, '{"prompt":[', "{},", "{}]}"),
    "ids": (COMPLETIONS, '{"prompt":[', "%d,", "-1]}"),
    "texts": (COMPLETIONS, '{"prompt":[', '"%d",', "1]}"),
    "format": (COMPLETIONS, '{"response_format":{"type":"json_object"', ',"k%d":1', "}}"),
    "stream": (COMPLETIONS, '{"stream_options":{"include_usage":true', ',"k%d":1', "}}"),
    "digits": (COMPLETIONS, '{"seed":1', "000", "}"),
    "digits in lists": (COMPLETIONS, '{"prompt":[1', "0" * 999 + "," + "1", "]}"),
}


def repeated(name: str, size: int) -> tuple[str, bytes]:
    """Return the path and the body of a request of `REPEATED` of at most `size` bytes."""
    path, beginning, part, end = REPEATED[name]
    body, number = [beginning], 0
    left = size - len(beginning) - len(end)
    while True:
        item = part % number if "%d" in part else part
        if left < len(item):
            return path, "".join([*body, end]).encode()
        body.append(item)
        left, number = left - len(item), number + 1


def object_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with the key `a`."""
    return {
        "type": "object",
        "properties": {"a": schema},
        "required": ["a"],
        "additionalProperties": False,
    }


def nested_choices(depth: int) -> dict[str, Any]:
    """Return a schema whose length doubles with each level."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [object_of(schema), {"type": "array", "items": schema}]}
    return schema


# Schemas that would take minutes or gigabytes to compile, another one for each number.
LARGE_SCHEMAS = {
    "multiple": lambda number: object_of({"type": "integer", "multipleOf": 3000017 + number}),
    "repeated": lambda number: object_of(
        {"type": "string", "pattern": f"^(a{{1000}}){{{900 + number % 100}}}$"}
    ),
    "choices": lambda number: nested_choices(13) | {"title": str(number)},
}
# A schema whose answers add states to its parser until it meets a limit.
COSTLY_SCHEMA = object_of(
    {"type": "string", "pattern": f"^({'|'.join(f'.*{letter}.{{25}}' for letter in 'abcdefgh')})$"}
)


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


def _edges() -> Iterator[float]:
    """Yield the limits of integer and float formats, and the numbers next to them."""
    for bits in (7, 8, 15, 16, 31, 32, 53, 63, 64, 128):
        yield from (2**bits - 1, 2**bits, 2**bits + 1, -(2**bits), -(2**bits) - 1)
    for kind, largest in (("e", 65504.0), ("f", 3.4028234663852886e38), ("d", sys.float_info.max)):
        width = struct.calcsize(kind)
        (least,) = struct.unpack(f"<{kind}", (1).to_bytes(width, "little"))
        for value in (largest, least):
            yield from (value, math.nextafter(value, math.inf), math.nextafter(value, 0))
            yield -value
    for value in (0.0, 1.0, 2.0, 100.0):
        yield from (value, -value, math.nextafter(value, -math.inf), math.nextafter(value, 1e9))
    yield from (1e-50, 1e-38, 1e-8, 10**30, 10**400, math.inf, -math.inf)


EDGES = [*_edges()]
NUMBERS = [
    "temperature",
    "top_p",
    "top_k",
    "repetition_penalty",
    "min_p",
    "typical_p",
    "max_tokens",
    "n",
    "best_of",
    "seed",
    "logprobs",
    "presence_penalty",
    "frequency_penalty",
]

JSON = {"Content-Type": "application/json", "Authorization": "Bearer right"}
# Kinds for a server without keys; some of these requests are expensive to answer.
COSTLY = [
    "edge",
    "lone_surrogates",
    "lone_bytes",
    "many",
    "slow",
    "refused_early",
    "wrong_host",
]


class Target(Protocol):
    """A server under test: an HTTP client for it, and its address."""

    http: httpx.Client
    address: tuple[str, int]


class Hostile:
    """Hostile requests of every kind, each with the statuses that are allowed in answer to it.

    Args:
      more: names of further kinds, in addition to those that every server refuses.
    """

    def __init__(self, live: Target, seed: int, more: Sequence[str] = ()):
        self.live = live
        self.rng = random.Random(seed)
        self.kinds = [getattr(self, name) for name in more]
        self.kinds += [
            self.wrong_value,
            self.wrong_body,
            self.cut_json,
            self.changed_bytes,
            self.unknown_field,
            self.deep,
            self.huge_body,
            self.huge_prompt,
            self.repeated_part,
            self.large_schema,
            self.costly_schema,
            self.leaves_before_the_schema,
            self.huge_head,
            self.wrong_media,
            self.wrong_place,
            self.no_http,
            self.leaves_mid_body,
            self.leaves_mid_stream,
            self.leaves_before_the_answer,
        ]

    def run(self, number: int) -> str | None:
        """Send one request; returns what is wrong with its answer, or None."""
        kind = self.kinds[number % len(self.kinds)]
        try:
            statuses, answer = kind()
            if answer is None:
                return None
            if answer.status_code in statuses:
                if answer.status_code >= 400:
                    check_error(answer)
                return None
            return f"{kind.__name__}: {answer.status_code} {answer.text[:200]}"
        except Exception as error:  # any error counts against the server
            return f"{kind.__name__}: {type(error).__name__} {error}"[:300]

    def post(self, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        path = self.rng.choice(["/v1/completions", "/complete"])
        return self.live.http.post(path, content=content, headers=JSON | headers)

    def completion(self, body: dict[str, Any]) -> httpx.Response:
        return self.live.http.post("/v1/completions", json=body)

    def good(self) -> dict[str, Any]:
        return {"prompt": "Hello", "max_tokens": 20, "stream": self.rng.random() < 0.5}

    def wrong_value(self):
        body = json.dumps(self.good() | self.rng.choice(WRONG)).replace("Infinity", "1e400")
        return {400}, self.post(body.encode())

    def wrong_body(self):
        return {400}, self.post(self.rng.choice(BODIES))

    def cut_json(self):
        content = json.dumps(self.good()).encode()
        return {400}, self.post(content[: self.rng.randrange(len(content))])

    def changed_bytes(self):
        content = bytearray(b'{"prompt": "\xc3\xa9", "beams": 1}')
        for _ in range(3):
            content[self.rng.randrange(len(content))] = self.rng.randrange(256)
        return {400}, self.post(bytes(content) + b"}")

    def unknown_field(self):
        name = "".join(self.rng.choices("abcdef\u00e9\u4e16_$.", k=self.rng.randint(1, 300)))
        return {400}, self.post(self.good() | {name: 1})

    def deep(self):
        opening, closing = self.rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
        depth = self.rng.choice([10, 1000, 100000])
        return {400}, self.post(b'{"prompt": ' + opening * depth + b"1" + closing * depth + b"}")

    def huge_body(self):
        size = self.rng.choice([requests.BODY_BYTES + 1, 8 * 2**20])
        return {413}, self.post(b'{"prompt": "' + b"a" * size + b'"}')

    def huge_prompt(self):
        unit = self.rng.choice(["a", "word ", "\n", "\u4e16"])
        prompt: Any = unit * (2**20 // len(unit.encode()))
        if self.rng.random() < 0.3:
            prompt = [1] * 200000
        return {400, 413}, self.post({"prompt": prompt})  # with escapes, some exceed the limit

    def repeated_part(self):
        """A body of up to the maximum size whose many parts are all wrong."""
        path, body = repeated(self.rng.choice([*REPEATED]), self.rng.choice([2**14, 2**21]))
        # 404: a server without chat.
        return {400, 404}, self.live.http.post(path, content=body, headers=JSON)

    def schema(self) -> dict[str, Any]:
        large = LARGE_SCHEMAS[self.rng.choice([*LARGE_SCHEMAS])](self.rng.randrange(1000))
        return self.good() | {"response_format": response_format(large)}

    def large_schema(self):
        return {400, 429}, self.completion(self.schema())

    def costly_schema(self):
        body = {"prompt": "a", "max_tokens": 30, "response_format": response_format(COSTLY_SCHEMA)}
        return {200, 400, 429}, self.completion(body)

    def leaves_before_the_schema(self):
        return self._leave(self.schema(), None, 0)

    def huge_head(self):
        name = b"a" * self.rng.choice([2**17 * 3, 2**20])
        with connected(self.live) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + name)
            answer = connection.recv(1000)
        assert answer.startswith(b"HTTP/1.1 431 "), answer
        return {431}, None

    def edge(self):
        """A number at the limit of an integer or float format."""
        name = self.rng.choice(NUMBERS)
        value = self.rng.choice(EDGES)
        body = json.dumps({"prompt": "Hello", "max_tokens": 4} | {name: value})
        return {200, 400, 429}, self.post(body.replace("Infinity", "1e400").encode())

    def lone_surrogates(self):
        where = self.rng.choice(["prompt", "stop", "model", "user"])
        text = self.rng.choice(["\\ud800", "a\\udfffb", "\\udc00\\ud800"])
        body = b'{"max_tokens": 4, "prompt": "a", "%s": "%s"}' % (where.encode(), text.encode())
        return {200, 400, 404, 429}, self.post(body)

    def lone_bytes(self):
        """Tokens of incomplete characters, whose text is known only once all are there."""
        prompt = [self.rng.choice([222, 94, 247])] * self.rng.choice([1, 17, 60])
        body = {"prompt": prompt, "max_tokens": 4, "echo": True, "n": self.rng.choice([1, 4])}
        return {200, 429}, self.completion(body | {"logprobs": self.rng.choice([None, 0, 5])})

    def many(self):
        """The maximum number of answers, with echo and logprobs."""
        body = {"prompt": [self.rng.randrange(50257) for _ in range(50)], "max_tokens": 2}
        body |= {"n": self.rng.choice([16, 128]), "echo": True, "logprobs": 5}
        return {200, 429}, self.completion(body)

    def slow(self):
        """Part of a head or body, whose last bytes come slowly, and then nothing."""
        request = post(self.good())
        cut = self.rng.randrange(1, len(request))
        with connected(self.live) as connection:
            connection.sendall(request[: max(cut - 5, 0)])
            for byte in request[max(cut - 5, 0) : cut]:
                time.sleep(0.1)
                connection.sendall(bytes([byte]))
            self.settle(connection)
        return set(), None

    def refused_early(self):
        """A body that is never completed, for a path that takes no body."""
        head = b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{"
        with connected(self.live) as connection:
            connection.sendall(head)
            self.settle(connection)
        return set(), None

    def settle(self, connection: socket.socket) -> None:
        """Wait up to 3 s until the server closes the connection."""
        connection.settimeout(self.rng.uniform(0, 3))
        try:
            while connection.recv(2**16):
                pass
        except TimeoutError:
            pass

    def wrong_host(self):
        host = self.rng.choice(["evil.example", "evil.example:80", "localhost.evil.example", "[x"])
        return {421}, self.post(self.good(), Host=host)

    def wrong_key(self):
        key = self.rng.choice(["", "Bearer", "Bearer wrong", "Bearer r\u00efght", "Basic cmlnaHQ6"])
        return {401}, self.post(self.good(), Authorization=key.encode("latin-1"))

    def wrong_media(self):
        kind = self.rng.choice(["text/plain", "", "application/xml", "application/jsonp"])
        return {415}, self.post(self.good(), **{"Content-Type": kind})

    def wrong_place(self):
        method = self.rng.choice(["GET", "PUT", "DELETE", "PATCH", "POST"])
        path = self.rng.choice(["/v1/images", "/..%2f..%2fetc/passwd", "/v1/%00"])
        path = "/v1/completions" if self.rng.random() < 0.5 and method != "POST" else path
        return {404, 405}, self.live.http.request(method, path)

    def no_http(self):
        with connected(self.live) as connection:
            connection.sendall(
                self.rng.choice([b"\x16\x03\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"{}\n\n"])
            )
            connection.settimeout(SECONDS)
            answer = connection.recv(1000)
        assert answer.startswith(b"HTTP/1.1 400 "), answer
        return {400}, None

    def _leave(self, body: dict[str, Any], cut: int | None, heard: int) -> tuple[set[int], None]:
        request = post(body).replace(b"\r\n", b"\r\nAuthorization: Bearer right\r\n", 1)
        with connected(self.live) as connection:
            connection.sendall(request[:cut])
            if heard:
                connection.recv(heard)
        return set(), None

    def leaves_mid_body(self):
        return self._leave(self.good(), -self.rng.randint(1, 10), 0)

    def leaves_mid_stream(self):
        return self._leave(self.good() | {"stream": True, "max_tokens": 400}, None, 100)

    def leaves_before_the_answer(self):
        return self._leave(self.good() | {"max_tokens": 400}, None, 0)
