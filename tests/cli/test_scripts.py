"""The scripts as users run them: interrupted, with a full disk, with bad input, and sampling."""

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

import jax
import pytest

import device_sample
import device_train
from mesh_transformer.cli import plot
from mesh_transformer.serving.repl import COMPILING
from mesh_transformer.training.runs import read_rows
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError, run_script
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
STEPS = 60  # steps of the run that is interrupted repeatedly
# The scripts create the virtual devices in each of these environments.
ENVIRONMENTS = {
    "cpu asked for": {"JAX_PLATFORMS": "cpu"},
    "nothing set": {},
    "devices preset": {
        "XLA_FLAGS": f"{QUICK_COMPILATION} --xla_force_host_platform_device_count=8"
    },
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> str:
    """Return the folder of a compilation cache that the processes share."""
    return str(tmp_path_factory.mktemp("compiled"))


def start(
    compiled: str, *command: object, stdin: str | None = None, **changes: str
) -> subprocess.Popen:
    """Start a Python process with environment variables; by default JAX selects the devices."""
    removed = ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    environment = {key: value for key, value in os.environ.items() if key not in removed}
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
    """Return the exit status, stdout, and the lines of stderr without progress bars."""
    out, errors = process.communicate(stdin, timeout=300)
    pieces = [piece.strip() for piece in re.split(r"[\r\n]", errors)]
    messages = [piece for piece in pieces if piece and not re.match(r"\d+%\|", piece)]
    return process.returncode, out, messages


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files in a folder, by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def steps_in(folder: Path) -> list[int]:
    # A save that ended between writing its commit file and the final rename is not a step yet.
    folders = [path.parent for path in folder.glob("step_*/commit_success.txt")]
    return sorted(int(path.name[5:]) for path in folders if path.suffix == "")


# Interrupted runs.


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, compiled) -> tuple[str, dict[int, list[dict[str, Any]]]]:
    """Return a config, and the rows of its uninterrupted run for each version."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    values = run_values(folder, total_steps=STEPS, ckpt_every=5)
    config = write_config(folder / "config.json", values)

    def run(version: int) -> list[dict[str, Any]]:
        model = folder / f"version_{version}"
        status, _, messages = finish(start(compiled, *train_command(config, model, version)))
        assert (status, messages) == (0, [])
        assert steps_in(model) == [50, 55, 60]
        return rows_of(model)

    with ThreadPoolExecutor(2) as pool:
        return config, dict(zip((1, 2), pool.map(run, (1, 2)), strict=True))


def train_command(config: str, model: Path, version: int = 1) -> tuple[object, ...]:
    return ("device_train.py", "--config", config, "--model-dir", model, "--version", version)


def wait_for_row(process: subprocess.Popen, model: Path, started: float, more: int) -> None:
    """Wait until the run is `more` rows past the checkpoint from which it resumed."""
    metrics, target = model / "metrics.jsonl", max(steps_in(model), default=0) + more
    while process.poll() is None:
        # A file last written before the process started has rows that the restart will remove.
        if metrics.exists() and metrics.stat().st_mtime > started and lines_in(metrics) >= target:
            return
        time.sleep(0.002)


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def unfinished(model: Path) -> list[Path]:
    return list(model.glob("*orbax-checkpoint-tmp*"))


def wait_for_save(process: subprocess.Popen, model: Path) -> None:
    """Wait until a checkpoint is being written."""
    while process.poll() is None and not unfinished(model):
        time.sleep(0.0005)


def stop_in_turn(
    compiled: str, config: str, model: Path, version: int, stops: list[str], rng: random.Random
) -> list[str]:
    """Run the config to its end, interrupted by all `stops`; return a report of each stop."""
    reports = []
    for count, stop in enumerate([*stops, "end"]):
        name = list(ENVIRONMENTS)[count % len(ENVIRONMENTS)]
        started = time.time()
        process = start(compiled, *train_command(config, model, version), **ENVIRONMENTS[name])
        if stop == "end":
            assert finish(process)[::2] == (0, [])
            break
        first = max(steps_in(model), default=0)
        wait_for_row(process, model, started, rng.randint(1, 14))
        if stop == "KILL while saving":
            wait_for_save(process, model)
        time.sleep(rng.uniform(0, 0.01))
        number = signal.Signals[f"SIG{stop.split()[0]}"]
        process.send_signal(number)
        status, out, messages = finish(process)
        steps = steps_in(model)
        reports.append(
            f"version {version}, {name}: from step {first}, {stop} at row "
            f"{lines_in(model / 'metrics.jsonl')}, saved {steps}, "
            f"unfinished {[path.name for path in unfinished(model)]}"
        )
        if number == signal.SIGKILL:
            assert status == -signal.SIGKILL
        else:
            assert (status, messages) == (0, [])
            expected = (
                f"{number.name}: stopped and saved at step {steps[-1]}; start again to resume"
            )
            assert out.splitlines()[-1] == expected
    return reports


@pytest.mark.slow
def test_losses_after_interruptions_equal_those_of_the_uninterrupted_run(
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
        for reports in pool.map(run, stops):
            print(*reports, sep="\n")
    for version in stops:
        assert_same_rows(rows_of(tmp_path / f"version_{version}"), expected[version])
        assert len(expected[version]) == STEPS


@pytest.mark.slow
def test_a_run_resumes_after_the_disk_was_full(uninterrupted, compiled, small_disk):
    config, expected = uninterrupted
    disk = small_disk("4m")
    model = disk / "model"
    disk_stats = os.statvfs(disk)
    # Fill the disk so that a checkpoint's arrays and the metrics fit, but not all of its files.
    state = jax.tree.leaves(CausalTransformer(config, init=False).saved_template())
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in state)
    junk = disk_stats.f_bavail * disk_stats.f_frsize - size - (48 << 10)
    (disk / "junk").write_bytes(b"x" * junk)
    status, _, messages = finish(start(compiled, *train_command(config, model)))
    print(*messages)
    assert status == 5
    assert messages[-1].startswith("error: ")
    messages = [line for line in messages if "lower keep_n" not in line]  # the warning at the start
    save_error = rf"{model}(: saving step \d+ failed|/metrics\.jsonl): No space left"
    assert all(re.search(save_error, line) for line in messages)
    assert f"saving step {STEPS} failed" in messages[-1]
    assert sorted(os.listdir(model)) == ["metrics.jsonl", "status.json"]
    assert_same_rows(rows_of(model), expected[1])  # training continued without checkpoints
    (disk / "junk").unlink()
    small_disk("16m")
    status, _, messages = finish(start(compiled, *train_command(config, model)))
    assert (status, messages) == (0, [])
    assert_same_rows(rows_of(model), expected[1])
    assert steps_in(model)[-1] == STEPS


@pytest.mark.slow
def test_a_second_ctrl_c_exits_immediately(compiled, tmp_path):
    """The process exits even while the last checkpoint is being written to a hanging disk."""
    # A run that ended by itself would save before the first Ctrl-C, which would then be ignored.
    values = run_values(tmp_path, ckpt_every=10**6, total_steps=10**6)
    config = write_config(tmp_path / "config.json", values)
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
    started = time.time()
    model = tmp_path / "model"
    process = start(compiled, "-c", code, *train_command(config, model)[1:])
    wait_for_row(process, model, started, 3)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "committing\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == 130  # the disk hangs for longer
    assert finish(process)[2] == []


# Invalid input.


def only_error(messages: list[str]) -> str:
    assert len(messages) == 1, messages
    assert messages[0].startswith("error: ")
    return messages[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frobnicate": 1}, r"config \S+: unknown key 'frobnicate'; remove it"),
        ({"n_head": 4}, r"config \S+: unknown key 'n_head'; did you mean 'n_heads'\?"),
        (None, r"config \S+ cannot be read \(No such file or directory\)"),
    ],
)
def test_an_invalid_config_file_is_reported(compiled, tmp_path, changes, message):
    config = tmp_path / "config.json"
    if changes is not None:
        write_config(config, VALUES | changes)
    status, out, messages = finish(start(compiled, *train_command(str(config), tmp_path / "model")))
    assert (status, out) == (2, "")
    assert re.match(f"error: {message}", only_error(messages))
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_a_corrupt_record_loses_no_completed_steps(compiled, tmp_path):
    config = write_config(tmp_path / "config.json", run_values(tmp_path, ckpt_every=1000))
    path = tmp_path / "train_two.tfrecords"
    content = path.read_bytes()
    frame = len(content) // ROWS["two"]
    path.write_bytes(content[: 5 * frame + 30] + b"\xff" + content[5 * frame + 31 :])
    process = start(compiled, *train_command(config, tmp_path / "model"))
    status, _, messages = finish(process)
    assert status == 2
    assert only_error(messages).startswith(
        f"error: {path}: corrupt record at byte {5 * frame} (wrong"
    )
    # The 37 + 5 intact records are enough for 5 steps of 8 records, and none of these is lost.
    assert steps_in(tmp_path / "model") == [5]
    assert [row["step"] for row in rows_of(tmp_path / "model")] == [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """Return a folder with valid and broken record sets, and with a `model` saved at step 0."""
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
    """Run a script in this process; return its exit status, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["script", *map(str, arguments)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        run_script(main)
    captured = capsys.readouterr()
    status = exit_info.value.code
    assert status is None or isinstance(status, int)
    return status or 0, captured.out, captured.err


BAD_VALUES = [
    ({"layers": "2"}, r"config \S+: layers is str '2', expected int"),
    ({"lr": "fast"}, r"config \S+: lr is str 'fast', expected float"),
    (
        {"pe": "rotery"},
        r"config \S+: pe is str 'rotery', expected one of .*; did you mean 'rotary'",
    ),
    ({"n_heads": 5}, r"config \S+: d_model is 32, not divisible by n_heads 5; "),
    ({"pe_rotary_dims": 6}, r"config \S+: pe_rotary_dims is 6, above the head size 4 "),
    ({"tpu_size": 6}, r"config \S+: tpu_size is 6, not divisible by cores_per_replica 4; "),
    ({"train_set": "{}/no.index"}, r"index {}/no.index: no such file; "),
    ({"train_set": "{}/empty.index"}, r"index {}/empty.index is empty; "),
    ({"train_set": "{}/binary.index"}, r"index {}/binary.index: not text; "),
    (
        {"train_set": "{}/missing.index"},
        r"{}/missing_one.tfrecords: no such file; index {}/missing.index lists this file",
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
        r"{}/model/step_0: its model has d_model 32, but the config has 64; ",
    ),
    ({"layers": 3}, r"checkpoint {}/model/step_0: leaf \S+ has shape \(2, .*expects \(3, "),
    ({"n_vocab": 128}, r"checkpoint {}/model/step_0: leaf \S+ has shape \(.*64.*expects \(.*128"),
    (
        {"block": "geglu"},
        r"{}/model/step_0: its model has block 'gptj', but the config has 'geglu'; ",
    ),
    (
        {"seq": 8},
        r"{}/val_one.tfrecords: record 0 \(the first is 0\) holds 17 tokens, but config "
        r"key seq 8 ",
    ),
]


def fill(value: Any, folder: Path) -> Any:
    """Return `value` with each {} replaced by the folder's path."""
    if isinstance(value, dict):
        return {key: fill(item, folder) for key, item in value.items()}
    return value.replace("{}", str(folder)) if isinstance(value, str) else value


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "message"), BAD_VALUES)
def test_invalid_config_values_are_refused_without_changes(
    trained, tmp_path, monkeypatch, capsys, changes, message
):
    folder, values = trained
    config = write_config(tmp_path / "config.json", values | fill(changes, folder))
    before = snapshot(folder)
    status, out, err = call(
        device_train.main, monkeypatch, capsys, "--config", config, "--model-dir", folder / "model"
    )
    assert (status, out) == (2, "")
    messages = [piece for piece in re.split(r"[\r\n]", err) if piece.strip()]
    messages = [piece for piece in messages if not re.match(r" *\d+%\|", piece)]
    assert re.match(f"error: {fill(message, folder)}", only_error(messages))
    assert snapshot(folder) == before


@pytest.mark.slow
def test_a_token_outside_the_vocabulary_is_reported(trained, tmp_path, monkeypatch, capsys):
    folder, values = trained
    config = write_config(tmp_path / "config.json", values | {"n_vocab": 32})
    model = tmp_path / "model"
    status, _, err = call(
        device_train.main, monkeypatch, capsys, "--config", config, "--model-dir", model
    )
    assert status == 2
    assert re.match(
        rf"error: {folder}/\S+_one.tfrecords: record \d+ .* holds token id \d+, outside the "
        r"vocabulary \(config key n_vocab is 32\); ",
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
def test_invalid_arguments_are_refused_without_changes(
    trained, tmp_path, monkeypatch, capsys, arguments, message
):
    folder, values = trained
    config = write_config(tmp_path / "config.json", values)
    before = snapshot(folder)
    filled_arguments = [fill(argument, folder) for argument in arguments]
    defaults = ("--config", config, "--model-dir", folder / "model")
    status, out, err = call(device_train.main, monkeypatch, capsys, *defaults, *filled_arguments)
    assert (status, out) == (2, "")
    assert re.match(f"error: {fill(message, folder)}", only_error(err.splitlines()))
    assert snapshot(folder) == before


# Sampling, and plots of losses.


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """Return a folder with an untrained `model` that has GPT-J's vocabulary, and its config."""
    folder = tmp_path_factory.mktemp("speaker")
    values = {key: VALUES[key] for key in ("layers", "d_model", "n_heads", "pe_rotary_dims")}
    values |= {"n_vocab": 50400, "seq": 32, "dtype": "float32"}
    values |= {"tpu_size": 8, "cores_per_replica": 4}
    network = CausalTransformer(values)
    network.save(str(folder / "model"))
    network.close()
    return folder, values


@pytest.mark.slow
def test_sampling_gives_the_same_text_from_stdin_and_from_a_flag(untrained, compiled, tmp_path):
    folder, values = untrained
    eight_devices = write_config(tmp_path / "eight.json", values)
    one_device = write_config(
        tmp_path / "one.json", values | {"tpu_size": 1, "cores_per_replica": 1}
    )
    options = ("--model-path", folder / "model", "--length", 5, "--seed", 3)
    lines = "In the beginning\nWhat is a man?\nIn the beginning\n"
    repl = start(compiled, "device_sample.py", "--config", eight_devices, *options, stdin=lines)
    flag = start(
        compiled,
        "device_sample.py",
        "--config",
        one_device,
        *options,
        "--prompt",
        "In the beginning",
    )
    status, out, messages = finish(repl, lines)
    assert status == 0
    assert messages[0].startswith("Type a prompt; ")
    assert messages[1] == COMPILING
    assert all(re.fullmatch(r"\[5 tokens, [\d.]+ tokens/s\]", line) for line in messages[2:])
    answers = out.split(">>> ")
    assert len(answers) == 5
    assert answers[1] == answers[3] != answers[2]
    status, out, messages = finish(flag)
    assert (status, messages) == (0, [COMPILING])
    assert out == "In the beginning" + answers[1]


@pytest.mark.slow
def test_sampling_without_a_model_is_refused(untrained, tmp_path, monkeypatch, capsys):
    _, values = untrained
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


def test_invalid_sampling_options_are_refused(untrained, tmp_path, monkeypatch, capsys):
    folder, values = untrained
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


@pytest.mark.parametrize("line", ["5", "null", "[]", '{"train/loss": 1.0}', "{", "\xff"])
def test_files_that_are_no_metrics_are_refused(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{line}\n", encoding="latin-1")
    with pytest.raises(InputError, match=r"metrics\.jsonl: not a metrics.jsonl \(line 1: .*give a"):
        read_rows(str(tmp_path))


@pytest.mark.slow
def test_plot_draws_losses_by_position_beside_the_others(tmp_path, monkeypatch):
    rows = [{"step": step, "train/loss": 1 / step} for step in range(1, 6)]
    for at, loss in ((1, 3.0), (2, 9.0), (4, 2.0)):
        for place, less in (("0-127", 0.0), ("128-255", 0.5), ("256-511", 0.75)):
            rows[at][f"val_position/held/out/{place}"] = loss - less
    drawn = []
    monkeypatch.setattr(plot.pictures, "save", lambda figure, _: drawn.append(figure))
    plot.draw(rows, "unused.png")
    _, beside = drawn[0].axes
    curves = {line.get_label(): line.get_xydata().tolist() for line in beside.lines}
    assert curves == {
        "held/out, step 2": [[128, 3.0], [256, 2.5], [512, 2.25]],
        "held/out, step 5": [[128, 2.0], [256, 1.5], [512, 1.25]],
    }


def test_plot_loss_draws_the_losses(tmp_path):
    rows = [{"step": step, "train/loss": 1 / step} for step in range(1, 6)]
    rows[-1]["val/loss_held_out"] = 0.3
    del rows[2]["train/loss"]  # its update was skipped
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("scripts/plot_loss.py", tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    wrote = f"wrote {tmp_path / 'loss.png'}\n"
    assert finish(start("", *command)) == (0, wrote, [])
    picture = (tmp_path / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "trai')  # a killed run did not complete this line
    assert finish(start("", command[0], tmp_path, tmp_path / "loss.png")) == (0, wrote, [])
    assert (tmp_path / "loss.png").read_bytes() == picture
    status, out, messages = finish(
        start("", command[0], tmp_path / "no.jsonl", tmp_path / "no.png")
    )
    assert (status, out) == (2, "")
    assert only_error(messages) == (
        f"error: {tmp_path}/no.jsonl cannot be read (No such file or directory); "
        "give a model folder, or its metrics.jsonl"
    )
    assert not (tmp_path / "no.png").exists()
