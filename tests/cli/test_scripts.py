"""The scripts as a user runs them: killed, interrupted, given bad input, and asked for text."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import device_sample
import device_train
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import run_script
from tests.conftest import QUICK_COMPILATION
from tests.support.small_run import (
    ROWS,
    VALUES,
    assert_same_rows,
    rows_of,
    run_values,
    write_config,
    write_set,
)

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60  # of the run that is stopped again and again
# The virtual devices appear in each of these.
ENVIRONMENTS = {
    "cpu asked for": {"JAX_PLATFORMS": "cpu"},
    "nothing set": {},
    "devices preset": {
        "XLA_FLAGS": f"{QUICK_COMPILATION} --xla_force_host_platform_device_count=8"
    },
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> str:
    """A folder of compiled programs that the processes share."""
    return str(tmp_path_factory.mktemp("compiled"))


def start(
    compiled: str, *command: object, stdin: str | None = None, **changes: str
) -> subprocess.Popen:
    """A Python process with the given environment; the devices are JAX's choice otherwise."""
    left_out = ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    environment = {key: value for key, value in os.environ.items() if key not in left_out}
    environment |= {
        "JAX_COMPILATION_CACHE_DIR": compiled,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": QUICK_COMPILATION,
    }
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=environment | changes,
        text=True,
        stdin=subprocess.DEVNULL if stdin is None else pipe,
        stdout=pipe,
        stderr=pipe,
    )


def finish(process: subprocess.Popen, stdin: str | None = None) -> tuple[int, str, list[str]]:
    """Status, stdout, and what stderr says besides progress bars."""
    out, errors = process.communicate(stdin, timeout=300)
    pieces = [piece.strip() for piece in re.split(r"[\r\n]", errors)]
    said = [piece for piece in pieces if piece and not re.match(r"\d+%\|", piece)]
    return process.returncode, out, said


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file beneath a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def steps_in(folder: Path) -> list[int]:
    # A save that ends between its commit file and its last renaming is no step yet.
    folders = [path.parent for path in folder.glob("step_*/commit_success.txt")]
    return sorted(int(path.name[5:]) for path in folders if path.suffix == "")


# A run that is stopped again and again.


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, compiled) -> tuple[str, dict[int, list[dict[str, Any]]]]:
    """A config, and the rows of its whole run in each version."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    values = run_values(folder, total_steps=STEPS, ckpt_every=5)
    config = write_config(folder / "config.json", values)

    def run(version: int) -> list[dict[str, Any]]:
        model = folder / f"version_{version}"
        status, _, said = finish(start(compiled, *train_command(config, model, version)))
        assert (status, said) == (0, [])
        assert steps_in(model) == [50, 55, 60]
        return rows_of(model)

    with ThreadPoolExecutor(2) as pool:
        return config, dict(zip((1, 2), pool.map(run, (1, 2)), strict=True))


def train_command(config: str, model: Path, version: int = 1) -> tuple[object, ...]:
    return ("device_train.py", "--config", config, "--model-dir", model, "--version", version)


def wait_for_row(process: subprocess.Popen, model: Path, began: float, more: int) -> None:
    """Until the run is `more` rows beyond the checkpoint that it went on from."""
    metrics, wanted = model / "metrics.jsonl", max(steps_in(model), default=0) + more
    while process.poll() is None:
        # A file from before it `began` has rows that the restart is going to cut.
        if metrics.exists() and metrics.stat().st_mtime > began and lines_in(metrics) >= wanted:
            return
        time.sleep(0.002)


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def unfinished(model: Path) -> list[Path]:
    return list(model.glob("*orbax-checkpoint-tmp*"))


def wait_for_save(process: subprocess.Popen, model: Path) -> None:
    """Until a checkpoint is being written."""
    while process.poll() is None and not unfinished(model):
        time.sleep(0.0005)


def stop_in_turn(
    compiled: str, config: str, model: Path, version: int, stops: list[str], rng: random.Random
) -> list[str]:
    """Runs the config to its end through all `stops`; returns what happened."""
    happened = []
    for count, stop in enumerate([*stops, "end"]):
        name = list(ENVIRONMENTS)[count % len(ENVIRONMENTS)]
        began = time.time()
        process = start(compiled, *train_command(config, model, version), **ENVIRONMENTS[name])
        if stop == "end":
            assert finish(process)[::2] == (0, [])
            break
        first = max(steps_in(model), default=0)
        wait_for_row(process, model, began, rng.randint(1, 14))
        if stop == "KILL while saving":
            wait_for_save(process, model)
        time.sleep(rng.uniform(0, 0.01))
        number = signal.Signals[f"SIG{stop.split()[0]}"]
        process.send_signal(number)
        status, out, said = finish(process)
        steps = steps_in(model)
        happened.append(
            f"version {version}, {name}: from step {first}, {stop} at row "
            f"{lines_in(model / 'metrics.jsonl')}, saved {steps}, "
            f"unfinished {[path.name for path in unfinished(model)]}"
        )
        if number == signal.SIGKILL:
            assert status == -signal.SIGKILL
        else:
            assert (status, said) == (0, [])
            stopped = f"{number.name}: stopped and saved at step {steps[-1]}; start again to resume"
            assert out.splitlines()[-1] == stopped
    return happened


@pytest.mark.slow
def test_stopped_at_any_moment_the_losses_are_the_uninterrupted_runs(
    uninterrupted, compiled, tmp_path
):
    config, expected = uninterrupted
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    stops = {
        1: ["KILL", "KILL while saving", "TERM"],
        2: ["KILL while saving", "INT"],
    }

    def run(version: int) -> list[str]:
        model, rng = tmp_path / f"version_{version}", random.Random(seed + version)
        return stop_in_turn(compiled, config, model, version, stops[version], rng)

    with ThreadPoolExecutor(2) as pool:
        for happened in pool.map(run, stops):
            print(*happened, sep="\n")
    for version in stops:
        assert_same_rows(rows_of(tmp_path / f"version_{version}"), expected[version])
        assert len(expected[version]) == STEPS


@pytest.mark.slow
def test_a_full_disk_leaves_a_run_that_resumes(uninterrupted, compiled, small_disk):
    config, expected = uninterrupted
    disk = small_disk("4m")
    model = disk / "model"
    room = os.statvfs(disk)
    # Whatever else is on it: no checkpoint fits into what is left, a run's metrics do.
    junk = room.f_bavail * room.f_frsize - (64 << 10)
    (disk / "junk").write_bytes(b"x" * junk)
    status, _, said = finish(start(compiled, *train_command(config, model)))
    print(*said)
    assert status == 2
    assert said[-1].startswith("error: ")
    failed = rf"{model}(: saving step \d+ failed|/metrics\.jsonl): No space left"
    assert all(re.search(failed, line) for line in said)
    assert f"saving step {STEPS} failed" in said[-1]
    assert os.listdir(model) == ["metrics.jsonl"]
    assert_same_rows(rows_of(model), expected[1])  # It went on.
    (disk / "junk").unlink()
    small_disk("16m")
    status, _, said = finish(start(compiled, *train_command(config, model)))
    assert (status, said) == (0, [])
    assert_same_rows(rows_of(model), expected[1])
    assert steps_in(model)[-1] == STEPS


def test_a_second_ctrl_c_ends_at_once(compiled, tmp_path):
    """Also while the last checkpoint is written to a disk that does not answer."""
    config = write_config(tmp_path / "config.json", run_values(tmp_path, ckpt_every=1000))
    code = (
        "import time\n"
        "import device_train\n"
        "from mesh_transformer.checkpoint.native import Checkpoints\n"
        "from mesh_transformer.util import run_script\n"
        "def commit(self, step):\n"
        "    print('committing', flush=True)\n"
        "    time.sleep(600)\n"
        "Checkpoints._commit = commit\n"
        "run_script(device_train.main)\n"
    )
    began = time.time()
    model = tmp_path / "model"
    process = start(compiled, "-c", code, *train_command(config, model)[1:])
    wait_for_row(process, model, began, 3)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "committing\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    assert finish(process)[2] == []


# Bad input.


def only_error(said: list[str]) -> str:
    assert len(said) == 1, said
    assert said[0].startswith("error: ")
    return said[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frobnicate": 1}, r"config \S+: unknown key 'frobnicate'; remove it"),
        ({"n_head": 4}, r"config \S+: unknown key 'n_head'; did you mean 'n_heads'\?"),
        (None, r"config \S+: cannot be read \(No such file or directory\)"),
    ],
)
def test_a_bad_config_from_the_command_line(compiled, tmp_path, changes, message):
    config = tmp_path / "config.json"
    if changes is not None:
        write_config(config, VALUES | changes)
    status, out, said = finish(start(compiled, *train_command(str(config), tmp_path / "model")))
    assert (status, out) == (2, "")
    assert re.match(f"error: {message}", only_error(said))
    assert not (tmp_path / "model").exists()


def test_a_corrupt_record_in_the_middle_of_training(compiled, tmp_path):
    config = write_config(tmp_path / "config.json", run_values(tmp_path, ckpt_every=1000))
    path = tmp_path / "train_two.tfrecords"
    content = path.read_bytes()
    frame = len(content) // ROWS["two"]
    path.write_bytes(content[: 5 * frame + 30] + b"\xff" + content[5 * frame + 31 :])
    process = start(compiled, *train_command(config, tmp_path / "model"))
    status, _, said = finish(process)
    assert status == 2
    assert only_error(said).startswith(f"error: {path}: corrupt record at byte {5 * frame} (wrong")
    # 37 + 5 good records are 5 steps of 8: none of them is lost.
    assert steps_in(tmp_path / "model") == [5]
    assert [row["step"] for row in rows_of(tmp_path / "model")] == [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A folder with record sets, broken ones among them, and a `model` saved at step 0."""
    folder = tmp_path_factory.mktemp("trained")
    values = run_values(folder)
    network = CausalTransformer(values)
    network.save(str(folder / "model"))
    network.close()
    (folder / "model" / "metrics.jsonl").write_text("")

    for name, rows in {"short": 5, "truncated": 20, "corrupt": 20, "missing": 20}.items():
        write_set(folder, name, {"one": rows})
    (folder / "missing_one.tfrecords").unlink()
    content = (folder / "truncated_one.tfrecords").read_bytes()
    frame = len(content) // 20
    (folder / "truncated_one.tfrecords").write_bytes(content[: 3 * frame + 25])
    (folder / "corrupt_one.tfrecords").write_bytes(
        content[: 2 * frame + 40] + b"\xff" + content[2 * frame + 41 :]
    )
    (folder / "empty.index").write_text("\n")
    (folder / "binary.index").write_bytes(b"\xff\xfe\x00")
    (folder / "no_text.json").write_text('{"layers": 2,')
    (folder / "no_mapping.json").write_text("[1, 2]")
    return folder, values


def call(main: Callable[[], None], monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    """A script's status, stdout and stderr, in this process."""
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        run_script(main)
    said = capsys.readouterr()
    status = exit_info.value.code
    assert status is None or isinstance(status, int)
    return status or 0, said.out, said.err


BAD_VALUES = [
    ({"layers": "2"}, r"config \S+: layers is str '2', expected int"),
    ({"lr": "fast"}, r"config \S+: lr is str 'fast', expected float"),
    (
        {"pe": "rotery"},
        r"config \S+: pe is str 'rotery', expected one of .*; did you mean 'rotary'",
    ),
    ({"n_heads": 2}, r"config \S+: n_heads is 2, not divisible by cores_per_replica 4; "),
    ({"n_heads": 5}, r"config \S+: d_model is 32, not divisible by n_heads 5; "),
    ({"n_vocab": 66}, r"config \S+: n_vocab is 66, not divisible by cores_per_replica 4; "),
    ({"pe_rotary_dims": 6}, r"config \S+: pe_rotary_dims is 6, above the head size 4 "),
    ({"tpu_size": 6}, r"config \S+: tpu_size is 6, not divisible by cores_per_replica 4; "),
    ({"train_set": "{}/no.index"}, r"index {}/no.index: no such file; "),
    ({"train_set": "{}/empty.index"}, r"index {}/empty.index: empty; "),
    ({"train_set": "{}/binary.index"}, r"index {}/binary.index: not text; "),
    (
        {"train_set": "{}/missing.index"},
        r"{}/missing_one.tfrecords: no such file; index {}/missing.index lists it",
    ),
    (
        {"train_set": "{}/truncated.index"},
        r"{}/truncated_one.tfrecords: truncated in the record at byte \d+; ",
    ),
    (
        {"train_set": "{}/corrupt.index"},
        r"{}/corrupt_one.tfrecords: corrupt record at byte \d+ \(wrong checksum\); ",
    ),
    (
        {"train_set": "{}/short.index"},
        r"index {}/short.index: found 5 records in total, but one batch needs 8; ",
    ),
    ({"val_set": {"x": "{}/no.index"}}, r"index {}/no.index: no such file; "),
    (
        {"d_model": 64, "pe_rotary_dims": 8},
        r"{}/model/step_0: its model has head_size 4, the config 8; ",
    ),
    ({"layers": 3}, r"checkpoint {}/model/step_0: leaf \S+ has shape \(2, .*expects \(3, "),
    ({"n_vocab": 128}, r"checkpoint {}/model/step_0: leaf \S+ has shape \(.*64.*expects \(.*128"),
    ({"block": "geglu"}, r"{}/model/step_0: its model has block 'gptj', the config 'geglu'; "),
    (
        {"seq": 8},
        r"{}/train_one.tfrecords: record 0 \(the first is 0\) holds 17 tokens, but config "
        r"key seq 8 ",
    ),
]


def filled(value: Any, folder: Path) -> Any:
    """`value` with the folder's path for each {}."""
    if isinstance(value, dict):
        return {key: filled(each, folder) for key, each in value.items()}
    return value.replace("{}", str(folder)) if isinstance(value, str) else value


@pytest.mark.parametrize(("changes", "message"), BAD_VALUES)
def test_bad_values_change_nothing(trained, tmp_path, monkeypatch, capsys, changes, message):
    folder, values = trained
    config = write_config(tmp_path / "config.json", values | filled(changes, folder))
    before = snapshot(folder)
    status, out, err = call(
        device_train.main, monkeypatch, capsys, "--config", config, "--model-dir", folder / "model"
    )
    assert (status, out) == (2, "")
    said = [piece for piece in re.split(r"[\r\n]", err) if piece.strip()]
    said = [piece for piece in said if not re.match(r" *\d+%\|", piece)]
    assert re.match(f"error: {filled(message, folder)}", only_error(said))
    assert snapshot(folder) == before


def test_a_token_outside_the_vocabulary(trained, tmp_path, monkeypatch, capsys):
    folder, values = trained
    config = write_config(tmp_path / "config.json", values | {"n_vocab": 32})
    model = tmp_path / "model"
    status, _, err = call(
        device_train.main, monkeypatch, capsys, "--config", config, "--model-dir", model
    )
    assert status == 2
    assert re.match(
        rf"error: {folder}/\S+_one.tfrecords: record \d+ .* holds token id \d+, outside the "
        "vocabulary of config key n_vocab 32; ",
        err.splitlines()[-1],
    )
    assert steps_in(model) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fresh-opt"], "--fresh-opt requires --tune-model-path; "),
        (["--max-steps", "0"], "--max-steps is 0, expected at least 1"),
        (["--model-dir", "{}/train.index"], "model folder {}/train.index cannot be written: "),
        (["--config", "{}/no_text.json"], r"config {}/no_text.json: not JSON at line 1, column 14"),
        (
            ["--config", "{}/no_mapping.json"],
            r"config {}/no_mapping.json: found list \[1, 2\], exp",
        ),
        (
            ["--model-dir", "{}/new", "--tune-model-path", "{}/nowhere"],
            r"checkpoint folder {}/nowhere does not exist; ",
        ),
        (
            ["--model-dir", "{}/new", "--tune-model-path", "{}"],
            r"checkpoint folder {} holds no finished checkpoint; ",
        ),
    ],
)
def test_bad_arguments_change_nothing(trained, tmp_path, monkeypatch, capsys, arguments, message):
    folder, values = trained
    config = write_config(tmp_path / "config.json", values)
    before = snapshot(folder)
    given = [filled(argument, folder) for argument in arguments]
    defaults = ("--config", config, "--model-dir", folder / "model")
    status, out, err = call(device_train.main, monkeypatch, capsys, *defaults, *given)
    assert (status, out) == (2, "")
    assert re.match(f"error: {filled(message, folder)}", only_error(err.splitlines()))
    assert snapshot(folder) == before


# Text from a model, and a picture of its losses.


@pytest.fixture(scope="module")
def speaker(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """An untrained model with the real vocabulary."""
    folder = tmp_path_factory.mktemp("speaker")
    values = {key: VALUES[key] for key in ("layers", "d_model", "n_heads", "pe_rotary_dims")}
    values |= {"n_vocab": 50400, "seq": 32, "dtype": "float32"}
    values |= {"tpu_size": 8, "cores_per_replica": 4}
    network = CausalTransformer(values)
    network.save(str(folder / "model"))
    network.close()
    return folder, values


def test_sampling_from_a_pipe_and_from_a_flag(speaker, compiled, tmp_path):
    folder, values = speaker
    eight = write_config(tmp_path / "eight.json", values)
    one = write_config(tmp_path / "one.json", values | {"tpu_size": 1, "cores_per_replica": 1})
    options = ("--model-path", folder / "model", "--length", 5, "--seed", 3)
    lines = "In the beginning\nWhat is a man?\nIn the beginning\n"
    repl = start(compiled, "device_sample.py", "--config", eight, *options, stdin=lines)
    flag = start(
        compiled, "device_sample.py", "--config", one, *options, "--prompt", "In the beginning"
    )
    status, out, said = finish(repl, lines)
    assert status == 0
    assert said[0].startswith("Type a prompt; ")
    assert all(re.fullmatch(r"\[5 tokens, [\d.]+ tokens/s\]", line) for line in said[1:])
    answers = out.split(">>> ")
    assert len(answers) == 5
    assert answers[1] == answers[3] != answers[2]
    status, out, said = finish(flag)
    assert (status, said) == (0, [])
    assert out == "In the beginning" + answers[1]


def test_sampling_without_a_model(speaker, tmp_path, monkeypatch, capsys):
    _, values = speaker
    config = write_config(tmp_path / "config.json", values)
    cases = [
        (("--model-path", tmp_path / "no"), f"checkpoint folder {tmp_path}/no does not exist; "),
        ((), "config: no model folder; set bucket and model_dir, or "),
    ]
    for arguments, message in cases:
        command = ("--config", config, "--prompt", "x", *arguments)
        status, out, err = call(device_sample.main, monkeypatch, capsys, *command)
        assert (status, out) == (2, "")
        assert only_error(err.splitlines()).startswith(f"error: {message}")


def test_sampling_with_bad_options(speaker, tmp_path, monkeypatch, capsys):
    folder, values = speaker
    config = write_config(tmp_path / "config.json", values)
    command = ("--config", config, "--model-path", folder / "model", "--prompt", "x")
    cases = {
        "--seed=-1": "seed is -1, expected a whole number from 0 to 4294967295",
        f"--seed={2**32}": "seed is 4294967296, expected a whole number from 0 to 4294967295",
        "--top-k=-2": "top_k is -2, expected a whole number from 0 to 2147483647",
        "--top-p=-0.5": "top_p is -0.5, expected a number of at least 0",
        "--temperature=nan": "temp is nan, expected a number of at least 0",
        "--length=0": "gen_length is 0, expected at least 1",
    }
    for option, message in cases.items():
        status, out, err = call(device_sample.main, monkeypatch, capsys, *command, option)
        assert (status, out) == (2, "")
        assert only_error(err.splitlines()) == f"error: generate: {message}"


def test_a_picture_of_the_losses(tmp_path):
    rows = [{"step": step, "train/loss": 1 / step} for step in range(1, 6)]
    rows[-1]["val/loss_held_out"] = 0.3
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("scripts/plot_loss.py", tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert finish(start("", *command)) == (0, "", [])
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    status, out, said = finish(start("", command[0], tmp_path / "no.jsonl", tmp_path / "no.png"))
    assert (status, out) == (2, "")
    assert only_error(said) == (
        f"error: {tmp_path}/no.jsonl: cannot be read (No such file or directory)"
    )
    assert not (tmp_path / "no.png").exists()
