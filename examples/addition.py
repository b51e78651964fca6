"""Learn to add two numbers of two digits, as in minGPT's demo; about a minute on two cores.

Run `python examples/addition.py`; it writes addition.png.
"""

import matplotlib.pyplot as plt
import numpy as np

import mesh_transformer

CONFIG = {
    "block": "gpt2",
    "layers": 2,
    "d_model": 96,
    "n_heads": 4,
    "n_vocab": 10,
    "seq": 6,
    "dtype": "float32",
    "per_replica_batch": 256,
    "lr": 2e-3,
    "end_lr": 1e-5,
    "warmup_steps": 50,
    "total_steps": 800,
    "z_loss": 0.0,
}


def problems(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return all sums of two numbers below 100, [10000, 7], split into training and exam.

    A row has the digits of both numbers and of their sum, which begins with its last digit.
    """
    a, b = np.divmod(np.random.default_rng(seed).permutation(10_000), 100)
    digits = [a // 10, a % 10, b // 10, b % 10, (a + b) % 10, (a + b) // 10 % 10, (a + b) // 100]
    rows = np.stack(digits, axis=1).astype(np.int64)
    return rows[500:], rows[:500]


def examples(rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (obs, target) pairs in which only the digits of the sum count."""
    target = np.where(np.arange(6) < 3, -1, rows[:, 1:])
    return list(zip(rows[:, :-1], target, strict=True))


def score(network: mesh_transformer.CausalTransformer, rows: np.ndarray) -> float:
    """Return the share of sums that the network gets right in all three digits."""
    answers = network.generate(rows[:, :4], [4] * len(rows), 3, {"temp": 0.0})
    return float((answers == rows[:, 4:]).all(axis=1).mean())


def main() -> float:
    training, exam = problems()
    network = mesh_transformer.CausalTransformer(CONFIG)
    rows = mesh_transformer.fit(network, examples(training))
    result = score(network, exam)
    print(f"{result:.1%} of {len(exam)} sums that were not in the training set are right")
    plt.semilogy([row["train/loss"] for row in rows])
    plt.xlabel("step")
    plt.ylabel("loss of the digits of the sum")
    plt.title(f"two-digit addition: {result:.1%} of the exam")
    plt.savefig("addition.png")
    return result


if __name__ == "__main__":
    main()
