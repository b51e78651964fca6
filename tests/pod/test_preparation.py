"""What a driver checks and deletes before it creates machines."""

from pathlib import Path

import pytest

from mesh_transformer.config import Config
from mesh_transformer.pod import preparation
from mesh_transformer.storage.locks import lock_folder
from mesh_transformer.util import InputError
from tests.support.small_run import run_values


def make_run(folder: Path) -> None:
    for name in ("step_1", "step_20", "step_30.orbax-checkpoint-tmp"):
        (folder / name / "state").mkdir(parents=True)
        (folder / name / "commit_success.txt").write_text("")
    (folder / "step_5" / "shard_0").mkdir(parents=True, exist_ok=True)  # as the original names it
    for name in ("metrics.jsonl", "notes.txt", "step_4.txt"):
        (folder / name).write_text("")


def test_begin_anew_deletes_only_what_a_run_wrote(tmp_path, monkeypatch):
    make_run(tmp_path)
    with pytest.raises(InputError, match=r"would delete metrics\.jsonl, step_1, step_20"):
        preparation.delete_run(str(tmp_path), yes=False)  # no terminal here
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    with pytest.raises(InputError, match="nothing was deleted in"):
        preparation.delete_run(str(tmp_path), yes=False)
    assert len(list(tmp_path.iterdir())) == 7
    monkeypatch.setattr("builtins.input", lambda question: "Yes ")
    preparation.delete_run(str(tmp_path), yes=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step_4.txt", "step_5"]
    preparation.delete_run(str(tmp_path), yes=False)  # nothing to ask about
    make_run(tmp_path)
    preparation.delete_run(str(tmp_path), yes=True)
    assert len(list(tmp_path.iterdir())) == 3
    preparation.delete_run(str(tmp_path / "missing"), yes=False)


def test_begin_anew_refuses_a_folder_in_use_and_does_not_follow_links(tmp_path, monkeypatch):
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    make_run(theirs)
    mine.mkdir()
    (mine / "step_20").symlink_to(theirs / "step_20")
    before = sorted(theirs.rglob("*"))
    with lock_folder(str(mine)), pytest.raises(InputError, match=r"mine is in use by process \d+"):
        preparation.delete_run(str(mine), yes=True)
    assert (mine / "step_20").is_symlink()
    monkeypatch.setenv("HOME", str(tmp_path))
    preparation.delete_run("~/mine", yes=True)
    assert list(mine.iterdir()) == []
    assert sorted(theirs.rglob("*")) == before


def test_driver_reads_the_records_before_it_creates_a_tpu(tmp_path):
    config = Config(**run_values(tmp_path))
    preparation.check_records(config)
    for changes, message in [
        ({"train_set": str(tmp_path / "gone.index")}, "gone.index"),
        ({"val_set": {"v": str(tmp_path / "away.index")}}, "away.index"),
        ({"seq": 32}, "train_one.*config key seq 32 needs 33"),
        ({"seq": 32, "hosts_read": True}, "val_one.*config key seq 32 needs 33"),
    ]:
        with pytest.raises(InputError, match=message):
            preparation.check_records(config.replace(**changes))
    # The driver needs no access to data that only the hosts read.
    preparation.check_records(config.replace(train_set="gs://far/away.index", hosts_read=True))
