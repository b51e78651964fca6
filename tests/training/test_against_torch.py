"""Training of every block compared with torch's: the same model, data and optimizer."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import mesh_transformer
from mesh_transformer.checkpoint.hf_config import read_config
from tests.support.torch_models import FAMILIES, SEQ, torch_model

VOCAB = 50
RATE, DECAY, EPS, CLIP = 3e-3, 0.1, 1e-6, 0.5
STEPS, ACCUMULATION, BATCH = 4, 2, 4


def torch_losses(network, batches) -> list[float]:
    """Train `network` as this library does, and return the loss before each update.

    GPT-J's embedding has a bias here, which Hugging Face's lacks; it is added to the torch model.
    """
    if "GPTJ" in type(network).__name__ or "CodeGen" in type(network).__name__:
        bias = torch.nn.Parameter(torch.zeros(network.config.n_embd))
        network.register_parameter("embedding_bias", bias)
        embedding = network.get_input_embeddings()
        embedding.register_forward_hook(lambda module, inputs, output: output + bias)
    parameters = list(network.parameters())
    decayed = [p for p in parameters if p.ndim == 2]
    rest = [p for p in parameters if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}],
        lr=RATE,
        eps=EPS,
        betas=(0.9, 0.95),
    )
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        for obs, target in zip(batch["obs"], batch["target"], strict=True):
            logits = network(torch.tensor(obs.astype(np.int64))).logits
            targets = torch.tensor(target.astype(np.int64)).reshape(-1)
            loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), targets)
            (loss / ACCUMULATION).backward()
            total += loss.item() / ACCUMULATION
        norm = torch.sqrt(sum((p.grad**2).sum() for p in parameters))
        assert norm > CLIP  # so that clipping is compared, too
        for p in parameters:
            p.grad *= CLIP / norm
        optimizer.step()
        losses.append(total)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_match_torchs_over_some_steps(tmp_path, family):
    network = torch_model(family, vocab=VOCAB)
    network.save_pretrained(tmp_path / "theirs")
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (STEPS, ACCUMULATION, BATCH, SEQ + 1)).astype(np.uint32)
    batches = [{"obs": part[..., :-1], "target": part[..., 1:]} for part in tokens]
    config = read_config(str(tmp_path / "theirs")).replace(
        dtype="float32", lr=RATE, end_lr=RATE, weight_decay=DECAY, adam_eps=EPS, adam_b2=0.95,
        clip_norm=CLIP, z_loss=0.0, gradient_accumulation_steps=ACCUMULATION,
    )  # fmt: skip
    ours = mesh_transformer.load(str(tmp_path / "theirs"), config)
    actual = [float(ours.train(batch)["loss"]) for batch in batches]
    expected = torch_losses(network, batches)
    assert abs(expected[-1] - expected[0]) > 0.05  # the updates matter
    # f32 sums in another order, over a few Adam steps.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
