"""Clean a corpus with planted faults as docs/clean.md does, and compare what is left out.

`python -m tests.long.cleaning` takes some minutes: it makes an environment of its own in a
temporary folder (about 1 GB), and installs `requirements-clean.txt` there.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Frequent words, as the rules about quality expect some of them.
FREQUENT = """
the of and to that with have be in a is was for on are as his they at this from or had by word but
not what all were when we there can said use each which she do how their if will up other about out
many then them these so some her would make like him into time has look two more write go see number
way could people than first water been call who its now find long down day did get come made may
over new sound take only little work know place year live me back give most very after thing our
just name good sentence man think part
"""
WORDS = FREQUENT.split()


def text(rng: random.Random, count: int) -> str:
    """Return a text of lines with sentences of random words."""
    lines, left = [], count
    while left > 0:
        line = []
        for _ in range(3):
            size = rng.randint(6, 14)
            line.append(" ".join(rng.choice(WORDS) for _ in range(size)).capitalize() + ".")
            left -= size
        lines.append(" ".join(line))
    return "\n".join(lines)


def changed(rng: random.Random, document: str) -> str:
    """Return a document with one other word."""
    words = document.split(" ")
    words[rng.randrange(len(words))] = "otherwise"
    return " ".join(words)


def put(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps({'text': each})}\n" for each in texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", help="an environment with requirements-clean.txt")
    parser.add_argument("--documents", type=int, default=300)
    parser.add_argument("--ray", action="store_true")
    args = parser.parse_args()
    rng = random.Random(0)
    documents = [text(rng, 250) for _ in range(args.documents)]
    questions = [text(rng, 30) for _ in range(20)]
    near = [changed(rng, document) for document in documents[:30]]
    asked = [
        f"{document} {question}"
        for document, question in zip(documents[40:60], questions, strict=True)
    ]
    noise = ["%% ## 12 == " * 90] * 10
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = args.python
        if python is None:
            venv.create(folder / "env", with_pip=True)
            python = str(folder / "env" / "bin" / "python")
            command = [python, "-m", "pip", "install", "-q", "--no-deps", "-r"]
            subprocess.run([*command, ROOT / "requirements-clean.txt"], check=True)
        every = documents[:40] + asked + documents[60:] + near + noise
        rng.shuffle(every)
        for part in range(4):
            put(folder / "texts" / f"{part}.jsonl", every[part::4])
        put(folder / "questions.jsonl", questions)
        command = [python, ROOT / "scripts/clean_corpus.py", folder / "texts", folder / "clean"]
        command += ["--evaluation", folder / "questions.jsonl", "--tasks", "3"]
        command += ["--ray"] if args.ray else []
        done = subprocess.run(
            list(map(os.fspath, command)), check=True, capture_output=True, text=True
        )
        print(
            "\n".join(line for line in done.stdout.splitlines() if "kept" in line or "left" in line)
        )
        kept = [
            json.loads(line)["text"]
            for path in (folder / "clean").glob("*.jsonl")
            for line in path.read_text().splitlines()
        ]
    assert not set(kept) & {*asked, *noise}, "contaminated or noisy documents were kept"
    pairs = list(zip(documents[:30], near, strict=True))
    both = sum(one in kept and other in kept for one, other in pairs)
    neither = sum(one not in kept and other not in kept for one, other in pairs)
    good = set(documents[30:40] + documents[60:])
    lost = len(good - set(kept))
    print(f"near duplicates: both kept {both}, both lost {neither} of {len(pairs)}")
    print(f"good documents lost: {lost} of {len(good)}")
    sys.exit(bool(both or neither or lost))


if __name__ == "__main__":
    main()
