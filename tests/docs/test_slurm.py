"""The code of docs/slurm.md: the rehearsal is run with a tiny model, all other commands parsed."""

import re
import shlex
from pathlib import Path

import pytest

from mesh_transformer.cli import train
from tests.long.interruptions import last_step
from tests.support.pages import ROOT, blocks, reader

PAGE = "docs/slurm.md"
# The fastest possible steps with the vocabulary of the records.
TINY = {"layers": 2, "d_model": 32, "pe_rotary_dims": 4, "per_replica_batch": 1, "val_batches": 1}
TINY |= {"total_steps": 12, "ckpt_every": 5, "val_every": 10}


@pytest.mark.slow
def test_the_rehearsal_runs_as_written(tmp_path, monkeypatch):
    with reader(tmp_path, monkeypatch, ("tiny.json",), **TINY) as person:
        person.follow("docs/slurm.md")
    model = Path("runs/tiny")
    assert last_step(model) == TINY["total_steps"]
    assert (model / f"step_{TINY['total_steps']}").is_dir()
    assert Path("loss.png").stat().st_size > 1000


def test_the_commands_for_clusters_can_be_parsed(monkeypatch):
    monkeypatch.chdir(ROOT)
    texts = [block.text.replace("\\\n", " ") for block in blocks(PAGE)]
    texts = [text.replace("\n  --coordinator", " --coordinator") for text in texts]
    lists = (re.sub(r'[\[\],"]', " ", text) for text in texts)
    found = [words for text in lists for words in re.findall(r"mesh-transformer +train(.+)", text)]
    assert len(found) == 5
    for words in found:
        one = re.sub(r"\$\w+", "0", words.partition(" & ")[0])  # without the shell's loop
        monkeypatch.setattr("sys.argv", ["train", *shlex.split(one)])
        assert train.parse_args().every_host


def test_the_table_lists_all_flags(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train", "--help"])
    with pytest.raises(SystemExit):
        train.parse_args()
    group = capsys.readouterr().out.partition("many hosts:")[2]
    table = "\n".join(re.findall(r"^\| (`--.+?) \|", (ROOT / PAGE).read_text(), re.MULTILINE))
    flags = r"--[a-z][a-z-]+"
    assert set(re.findall(flags, table)) == set(re.findall(rf"^ +({flags})", group, re.MULTILINE))
