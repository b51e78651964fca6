"""The command of docs/records.md, run as written."""

import random
from pathlib import Path

from mesh_transformer.data.loader import TFRecordNewInputs
from tests.support.pages import reader


def test_the_page_runs(tmp_path, monkeypatch):
    with reader(tmp_path, monkeypatch) as person:
        Path("my_text").mkdir()
        herd = ["a", "herd", "of", "unicorns", "lived", "in", "remote", "valleys"]
        words = random.Random(0).choices(herd, k=999)
        Path("my_text/one.txt").write_text(" ".join(words))
        person.follow("docs/records.md")
        assert Path("records/mine.manifest.json").is_file()
        assert Path("records/mine.offsets").is_file()
        batch = TFRecordNewInputs("records/mine.index", 2, 64).get_samples()
    assert batch["obs"].shape == (2, 64)
