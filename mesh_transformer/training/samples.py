"""`Samples`: texts that a network writes during training, for its user to read."""

import textwrap

import numpy as np

from mesh_transformer.data.special_tokens import before_end, end_tokens, prompt_tokens
from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.generation.prompts import longest_text
from mesh_transformer.generation.sampling_settings import REPL_DEFAULTS
from mesh_transformer.network import TrainableNetwork
from mesh_transformer.util import InputError, NonFiniteError

LENGTH = 64  # tokens per text


class Samples:
    """Texts that begin with the prompts in the config's `sample_prompts`.

    They are sampled with the config's `sampling` and always with the same seeds.

    Raises:
      InputError: if the tokenizer cannot be loaded, or has more tokens than the model.
    """

    def __init__(self, network: TrainableNetwork):
        config = network.config
        self._network, self._prompts = network, config.sample_prompts
        try:
            self._tokenizer = Tokenizer.of(None, config, must_fit=True).loaded
        except InputError as error:
            raise InputError(
                f"sample_prompts: {error}; or train without samples: set sample_prompts to []"
            ) from None
        self._ends = end_tokens(self._tokenizer, config)
        self._tokens = [prompt_tokens(self._tokenizer, prompt) for prompt in self._prompts]
        longest = max(len(tokens) for tokens in self._tokens)
        most = longest_text(config)
        self._length = LENGTH if most is None else min(LENGTH, most - longest)
        if self._length < 1:
            raise InputError(
                f"sample_prompts: a prompt has {longest} tokens, but texts of a model with pe "
                f"'fixed' have at most {most} (seq + 1); shorten it"
            )

    def report(self) -> str:
        """Return the texts that the network writes at its current step, as lines to print."""
        try:
            texts = self._texts()
        except NonFiniteError as error:  # the loss of the next step is not finite, either
            texts = [str(error)]
        # Control characters, which tokens of bytes may be, would change what a terminal shows.
        texts = [
            "".join(x if x.isprintable() or x in "\n\t" else "\ufffd" for x in t) for t in texts
        ]
        parts = [textwrap.indent(text, "    ", lambda line: True) for text in texts]
        return "\n".join(f"step {self._network.step}, sample:\n{part}" for part in parts)

    def _texts(self) -> list[str]:
        """Return each prompt with its continuation by the network's current parameters."""
        config, tokenizer = self._network.config, self._tokenizer
        prompts = self._tokens
        width = max(map(len, prompts))
        padded = np.array([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        options = {"temp": REPL_DEFAULTS.temp} | config.sampling | {"seed": 0}
        answers = self._network.generate(padded, [*map(len, prompts)], self._length, options)
        own = [before_end(answer.tolist(), self._ends) for answer in answers]
        texts = [tokenizer.decode(part, clean_up_tokenization_spaces=False) for part in own]
        return [prompt + text for prompt, text in zip(self._prompts, texts, strict=True)]
