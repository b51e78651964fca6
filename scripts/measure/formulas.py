"""The formulas of GPT-J and Llama in NumPy and float64, independent of the library's code.

`verify.py` compares the results of devices with them.  Array names end in their shape: B batch, T
query, S key, D model, H heads, K head size, R rotated pairs, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mesh_transformer.config import Config

# (place, layer, x) -> x after dropout.  The places are those of `model.dropout`; the embedding
# counts as place 0 of the layer after the last one.
Drop = Callable[[int, int, np.ndarray], np.ndarray]
PROBS, ATTENTION, FEED_FORWARD = range(3)


def attention_probs(q_BTHK: np.ndarray, k_BSHK: np.ndarray, window: float) -> np.ndarray:
    """Return the softmax of the scores of the last `window` keys, [B, H, T, S]."""
    scores_BHTS = np.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK) / q_BTHK.shape[-1] ** 0.5
    distance_TS = np.subtract.outer(*map(np.arange, scores_BHTS.shape[2:]))
    seen_TS = (distance_TS >= 0) & (distance_TS < window)
    scores_BHTS = np.where(seen_TS, scores_BHTS, -np.inf)
    exp_BHTS = np.exp(scores_BHTS - scores_BHTS.max(-1, keepdims=True))
    return exp_BHTS / exp_BHTS.sum(-1, keepdims=True)


def weighted_sum(probs_BHTS: np.ndarray, v_BSHK: np.ndarray) -> np.ndarray:
    """Return the sums of values, multiplied by probabilities, [B, T, H, K]."""
    return np.einsum("BHTS,BSHK->BTHK", probs_BHTS, v_BSHK)


def attention_gradients(
    q_BTHK: np.ndarray,
    k_BSHK: np.ndarray,
    v_BSHK: np.ndarray,
    g_BTHK: np.ndarray,
    window: float,
) -> list[np.ndarray]:
    """Return the gradients of q, k and v, where g is that of attention."""
    probs_BHTS = attention_probs(q_BTHK, k_BSHK, window)
    dprobs_BHTS = np.einsum("BTHK,BSHK->BHTS", g_BTHK, v_BSHK)
    mean_BHT1 = (probs_BHTS * dprobs_BHTS).sum(-1, keepdims=True)
    dscores_BHTS = probs_BHTS * (dprobs_BHTS - mean_BHT1) / q_BTHK.shape[-1] ** 0.5
    dk, dv = (
        np.einsum("BHTS,BTHK->BSHK", x, y)
        for x, y in ((dscores_BHTS, q_BTHK), (probs_BHTS, g_BTHK))
    )
    return [weighted_sum(dscores_BHTS, k_BSHK), dk, dv]


def rotated(c: Config, x_BTHK: np.ndarray) -> np.ndarray:
    """Return queries or keys with rotary positions: pairs as complex numbers times e^(i angle)."""
    dims = c.d_rotary
    one, other = slice(0, dims, 2), slice(1, dims, 2)
    if c.block == "llama":
        one, other = slice(dims // 2), slice(dims // 2, dims)
    angle_TR = np.outer(np.arange(x_BTHK.shape[1]), 10000.0 ** (-np.arange(0, dims, 2) / dims))
    pairs_BTHR = (x_BTHK[..., one] + 1j * x_BTHK[..., other]) * np.exp(1j * angle_TR)[:, None]
    x_BTHK = x_BTHK.copy()
    x_BTHK[..., one], x_BTHK[..., other] = pairs_BTHR.real, pairs_BTHR.imag
    return x_BTHK


def normed(c: Config, x_BTD: np.ndarray, norm: dict[str, np.ndarray]) -> np.ndarray:
    """Return the layer norm of GPT-J, or the root-mean-square norm of Llama."""
    if c.block != "llama":
        x_BTD = x_BTD - x_BTD.mean(-1, keepdims=True)
    x_BTD = x_BTD / np.sqrt(np.square(x_BTD).mean(-1, keepdims=True) + 1e-5)
    return x_BTD * norm["scale"] + norm.get("offset", 0)


def logits(c: Config, params: Any, tokens_BT: np.ndarray, drop: Drop | None = None) -> np.ndarray:
    """Return the logits of a GPT-J or, in block `llama`, of a Llama, [B, T, V]."""
    drop = drop or (lambda place, layer, x: x)
    embedding, proj, stacked = params["embed"]["embedding"], params["proj"], params["layers"]
    rows_BTD = embedding["w"].astype(np.float64)[tokens_BT]
    x_BTD = drop(0, c.layers, rows_BTD + embedding.get("b", 0))
    shape = (*tokens_BT.shape, -1, c.d_head)
    for layer in range(c.layers):
        p = {name: {key: x[layer] for key, x in module.items()} for name, module in stacked.items()}
        own, fc = p["layer"], p["layer/fc"]
        in_BTD = normed(c, x_BTD, p["layer/norm"])
        q, k, v = ((in_BTD @ p[f"layer/{name}"]["w"]).reshape(shape) for name in "qkv")
        k, v = (np.repeat(x, c.group, axis=2) for x in (rotated(c, k), v))
        probs_BHTS = drop(PROBS, layer, attention_probs(rotated(c, q), k, math.inf))
        attended_BTN = weighted_sum(probs_BHTS, v).reshape(*tokens_BT.shape, -1)
        y_BTD = x_BTD + drop(ATTENTION, layer, attended_BTN @ own["o"])
        if c.block == "llama":
            in_BTD = normed(c, y_BTD, p["layer/ff_norm"])
            gate_BTF = in_BTD @ p["layer/gate"]["w"]
            hidden_BTF = gate_BTF / (1 + np.exp(-gate_BTF)) * (in_BTD @ fc["w"])
        else:
            u = in_BTD @ fc["w"] + fc["b"]
            hidden_BTF = u / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (u + 0.044715 * u**3)))
        x_BTD = y_BTD + drop(FEED_FORWARD, layer, hidden_BTF @ own["out"] + own.get("b", 0))
    head = proj["projection/head"]
    return normed(c, x_BTD, proj["projection/norm"]) @ head["w"] + head.get("b", 0)


def loss(
    c: Config,
    params: Any,
    batch: dict[str, np.ndarray],
    most_BT1: np.ndarray,
    drop: Drop | None = None,
) -> float:
    """Return the loss that training minimises.

    Args:
      most_BT1: the largest logits, which the z-loss treats as constants, as the original's does.
    """
    logits_BTV = logits(c, params, batch["obs"], drop)
    log_sum_BT1 = np.log(np.exp(logits_BTV - most_BT1).sum(-1, keepdims=True))
    target_BT1 = np.take_along_axis(logits_BTV, batch["target"][..., None].astype(int), -1)
    loss_BT1 = log_sum_BT1 + most_BT1 - target_BT1
    return float(loss_BT1.mean() + c.z_loss * np.square(log_sum_BT1).mean())


def logprobs(logits_BTV: np.ndarray) -> np.ndarray:
    """Return log p of each token, [B, T, V]."""
    logits_BTV = logits_BTV - logits_BTV.max(-1, keepdims=True)
    return logits_BTV - np.log(np.exp(logits_BTV).sum(-1, keepdims=True))


def in_8_bits(x: np.ndarray, axis: int) -> np.ndarray:
    """Return an array rounded to 255 values, from minus to plus the largest magnitude of `axis`."""
    scale = np.abs(x).max(axis, keepdims=True).astype(np.float64) / 127
    return np.round(x / scale) * scale


def quantizable(x: np.ndarray, axis: int) -> np.ndarray:
    """Return an array like x, none of whose entries is near the middle of two 8-bit values.

    Otherwise two divisions that round differently could give different integers.
    """
    scale = np.abs(x).max(axis, keepdims=True) / 127
    integers = np.round(x / scale)
    rest = np.clip(x / scale - integers, -0.3, 0.3) * (np.abs(integers) < 127)
    return ((integers + rest) * scale).astype(np.float32)
