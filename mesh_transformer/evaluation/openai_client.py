"""A client of servers with OpenAI's API."""

import contextlib
import http.client
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from mesh_transformer.util import InputError, brief

ATTEMPTS = 6  # of a request that the server cannot answer now
PAUSE_SECONDS = 1.0  # after the first attempt; it doubles after each
KEY_VARIABLE = "OPENAI_API_KEY"


class RefusedError(InputError):
    """A request that cannot be answered.

    Attributes:
      error: what is wrong, as in an error response of OpenAI's API.
    """

    def __init__(self, where: str, error: dict[str, Any]):
        super().__init__(f"{where}: {error.get('message')}")
        self.error = error


class Client:
    """Sends requests to a server with OpenAI's API; threads may share it.

    Requests to a server that is busy, or cannot be reached, are sent again.

    The API key, if the environment variable `OPENAI_API_KEY` has one, is sent along.

    Args:
      url: the server's address, such as http://localhost:8000, with or without /v1.
      model: the model's name (default: the server's first).
      seconds: the longest time of a request.

    Attributes:
      identity: JSON values that differ if the model may give other answers.
    """

    def __init__(self, url: str, model: str | None = None, seconds: float = 600.0):
        self.url, self._seconds = url.rstrip("/").removesuffix("/v1"), seconds
        if not self.url.startswith(("http://", "https://")):
            raise InputError(f"--url {url}: expected an address such as http://localhost:8000")
        self._stopped = threading.Event()
        self.model: str = model or self._first_model()
        self.identity: Any = self.model

    def _first_model(self) -> str:
        models = self.send("models")
        try:
            return models["data"][0]["id"]
        except (KeyError, IndexError, TypeError):
            raise InputError(f"--url {self.url}: the server names no model; give --name") from None

    def stop(self) -> None:
        """Stop sending failed requests again."""
        self._stopped.set()

    def answer(
        self, where: str, options: dict[str, Any], **prompt: Any
    ) -> tuple[str, dict[str, Any]]:
        """Return the text of the answer to a `prompt` or to `messages`, and its choice.

        Args:
          where: what the prompt is, for error messages.
          options: further keys of the request, such as temperature.

        Raises:
          InputError: see `send`.
        """
        path = "chat/completions" if "messages" in prompt else "completions"
        response = self.send(path, {"model": self.model} | options | prompt, where)
        try:
            choice = response["choices"][0]
            text = choice["text"] if "prompt" in prompt else choice["message"]["content"]
            return text or "", choice  # null if the model refuses
        except (KeyError, IndexError, TypeError):
            raise InputError(f"{where}: received {brief(repr(response))}") from None

    def send(self, path: str, body: dict[str, Any] | None = None, where: str = "--url") -> Any:
        """Return the response to `body`, sent to the path /v1/`path`.

        Raises:
          InputError: if the request is refused, or cannot be answered.
        """
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/v1/{path}", data, headers)
        problem = ""
        for attempt in range(ATTEMPTS if data else 1):
            if attempt and self._stopped.wait(PAUSE_SECONDS * 2 ** (attempt - 1)):
                break
            try:
                with urllib.request.urlopen(request, timeout=self._seconds) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                problem = f"status {error.code}: {_message(error)}"
                if error.code not in (408, 409, 429) and error.code < 500:
                    break
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = str(error) or type(error).__name__
        raise InputError(f"{where}: {request.full_url}: {brief(problem, 300)}")


class LocalClient(Client):
    """Sends requests to a service in this process; refused ones raise `RefusedError`.

    Args:
      post: returns the status and the body of the response to a request, from path and body.
      model, identity, stop: those of `Client`.
    """

    def __init__(
        self,
        post: Callable[[str, Any], tuple[int, Any]],
        model: str,
        identity: Any,
        stop: Callable[[], object],
    ):
        self.model, self.identity, self._post, self._stop = model, identity, post, stop

    def send(self, path: str, body: Any = None, where: str = "") -> Any:
        status, value = self._post(f"/v1/{path}", body)
        if status != 200:
            raise RefusedError(where, value["error"])
        return value

    def stop(self) -> None:
        self._stop()


def _message(error: urllib.error.HTTPError) -> str:
    """Return the message in the body of an error of OpenAI's form, or else its status line."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return json.load(error)["error"]["message"]
    return error.reason
