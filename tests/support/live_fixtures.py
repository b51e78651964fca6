"""A pytest plugin with fixtures for `live_server`."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mesh_transformer.data.tokenizer import load_tokenizer
from tests.support.fake_network import FakeNetwork
from tests.support.live_server import Live

# Words, and characters of two to four bytes, each of which takes several tokens.
SCRIPT = (
    "Once 世界 upon a 🎉🎊 time, Grüße naïve ⵣ end.\n\n"
    "Next — “day” 日本語 one ∑∞ two 🧑\u200d🚀 three "
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def serve(tokenizer) -> Iterator[Callable[..., Live]]:
    with contextlib.ExitStack() as stack:

        def start(keys: str | None = None, network: Any = None, **options: Any) -> Live:
            fake = FakeNetwork(tokenizer(SCRIPT)["input_ids"], **network or {})
            live = Live(fake, tokenizer, keys, **options)
            stack.callback(live.close)
            return live

        yield start


@pytest.fixture(scope="module")
def live(serve) -> Live:
    return serve()
