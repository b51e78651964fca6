"""Build a release, check it in clean environments and rehearse its upload: `make release`.

All files are made from the commit that is checked out.  Nothing is published: the owner does that,
as docs/release.md describes.
"""

import argparse
import contextlib
import gzip
import hashlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mesh_transformer
from mesh_transformer.util import InputError, run_script
from scripts import clean_environments

ROOT = Path(__file__).resolve().parents[1]
# What the source archive has beside the package and its configs.
SOURCES = {"setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"}
ABOUT = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
SIGNER = "mesh-transformer"  # the name of the key in allowed_signers


def run(*words: object, **options: Any) -> str:
    """Run a program and return what it prints.

    Raises:
      InputError: if it is not installed or fails, with the last line of its messages.
    """
    texts = [str(word) for word in words]
    try:
        result = subprocess.run(texts, capture_output=True, text=True, **options)
    except FileNotFoundError:
        raise InputError(f"{texts[0]} is not installed here") from None
    if result.returncode:
        command = shlex.join(texts)
        last = (result.stderr.strip() or result.stdout.strip() or "no message").splitlines()[-1]
        raise InputError(f"exit status {result.returncode} of {command}: {last}")
    return result.stdout


def git(*words: str) -> str:
    return run("git", "-C", ROOT, *words).strip()


def check_source(version: str) -> None:
    """Check that the checkout has no changes, and that the version's tag, if any, is its commit."""
    if changed := git("status", "--porcelain"):
        raise InputError(f"the checkout has changes ({changed.split()[1]}, ...); commit them first")
    tag = f"v{version}"
    if git("tag", "--list", tag) and tag not in git("tag", "--points-at", "HEAD").splitlines():
        raise InputError(f"the tag {tag} is another commit; check that out, or raise the version")


def notes(changelog: str, version: str) -> str:
    """Return the notes of a version: its section of CHANGELOG.md.

    A development version, such as 1.1.0.dev0, has the section of unreleased changes.
    """
    parts = re.split(r"^## \[(.+?)\].*\n", changelog, flags=re.MULTILINE)
    sections = {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}
    name = "Unreleased" if ".dev" in version else version
    if not sections.get(name):
        raise InputError(f"CHANGELOG.md has no changes under [{name}]")
    if name == version and sections.get("Unreleased"):
        raise InputError(f"CHANGELOG.md has changes under [Unreleased]; move them to [{version}]")
    return sections[name] + "\n"


def normalize(path: Path, seconds: int) -> None:
    """Rewrite a .tar.gz in sorted order, with this time, one owner and the same modes."""
    with tarfile.open(path) as archive:
        entries = [(entry, archive.extractfile(entry)) for entry in archive if entry.isfile()]
        contents = {entry.name: file.read() for entry, file in entries if file is not None}
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=seconds) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, content in sorted(contents.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(content), 0o644, seconds
            archive.addfile(entry, io.BytesIO(content))
    path.write_bytes(packed.getvalue())


def build(out: Path) -> tuple[Path, Path]:
    """Build the source archive of the commit, and the wheel from it.

    Returns:
      The paths of both in the folder `out`.
    """
    seconds = int(git("log", "-1", "--format=%ct"))
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(seconds)}
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", out)
    with tempfile.TemporaryDirectory() as folder:
        run("git", "-C", ROOT, "archive", "--output", f"{folder}/tree.tar", "HEAD")
        with tarfile.open(f"{folder}/tree.tar") as archive:
            archive.extractall(f"{folder}/tree", filter="data")
        run(*command, "--sdist", f"{folder}/tree", env=environment)
        (source,) = out.glob("*.tar.gz")
        normalize(source, seconds)
        run(*command, "--wheel", source, env=environment)
    (wheel,) = out.glob("*.whl")
    return source, wheel


def check_source_archive(path: Path, tracked: list[str]) -> None:
    """Check that the source archive has what a build needs, and nothing else.

    Args:
      tracked: the files of the commit.  All in mesh_transformer/ and configs/ are needed, also
        those that are no modules, such as page.html.
    """
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    made = {name for name in names if name.startswith("mesh_transformer.egg-info/")}
    wanted = {name for name in tracked if name.startswith(("mesh_transformer/", "configs/"))}
    _compare(path, names - made - {"PKG-INFO", "setup.cfg"}, wanted | SOURCES)


def check_wheel(path: Path, tracked: list[str]) -> None:
    """Check that the wheel has the package with its configs, and nothing else."""
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
    about = "-".join(path.name.split("-")[:2]) + ".dist-info"
    package = {name for name in tracked if name.startswith("mesh_transformer/")}
    configs = {f"mesh_transformer/{name}" for name in tracked if name.startswith("configs/")}
    _compare(path, names, package | configs | {f"{about}/{name}" for name in ABOUT})


def _compare(path: Path, names: set[str], wanted: set[str]) -> None:
    if missing := sorted(wanted - names):
        raise InputError(f"{path.name} lacks {', '.join(missing)}; see package_data in setup.py")
    if extra := sorted(names - wanted):
        raise InputError(
            f"{path.name} has {', '.join(extra)}, which no user needs; see MANIFEST.in"
        )


def check_reproducible(source: Path, wheel: Path) -> None:
    """Check that a second build gives the same bytes."""
    with tempfile.TemporaryDirectory() as folder:
        for first, second in zip((source, wheel), build(Path(folder)), strict=True):
            if first.read_bytes() != second.read_bytes():
                raise InputError(f"two builds of {first.name} differ")


def sign(folder: Path, key: Path) -> None:
    """Sign SHA256SUMS in `folder` with an SSH key, and check the signature."""
    sums = folder / "SHA256SUMS"
    run("ssh-keygen", "-Y", "sign", "-f", key, "-n", "file", sums)
    signers = folder / "allowed_signers"
    public = run("ssh-keygen", "-y", "-f", key).strip()
    signers.write_text(f'{SIGNER} namespaces="file" {public}\n')
    verify = ("ssh-keygen", "-Y", "verify", "-f", signers, "-I", SIGNER, "-n", "file")
    run(*verify, "-s", f"{sums}.sig", input=sums.read_text())


@contextlib.contextmanager
def local_index(folder: Path) -> Iterator[str]:
    """Serve a folder as a package index on this machine; yields its URL, which takes uploads."""
    from wsgiref.simple_server import WSGIRequestHandler, make_server

    import pypiserver  # pyright: ignore[reportMissingImports]

    class Quiet(WSGIRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    app = pypiserver.app(
        roots=[folder], authenticate=[], password_file=".", disable_fallback=True, verbosity=0
    )
    with make_server("127.0.0.1", 0, app, handler_class=Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def rehearse_upload(source: Path, wheel: Path, version: str) -> None:
    """Upload both files to an index on this machine, and install them from there with pip."""
    with tempfile.TemporaryDirectory() as place, local_index(Path(place)) as url:
        login = ("--non-interactive", "--username", "a", "--password", "a")
        upload = ("twine", "upload", "--disable-progress-bar", *login, "--repository-url", url)
        run(sys.executable, "-m", *upload, source, wheel)
        # pip knows no other index than this one.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
        environment["PIP_CONFIG_FILE"] = os.devnull
        pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
        options = ("--no-deps", "--no-cache-dir", "--no-build-isolation")
        options += ("--index-url", f"{url}/simple/")
        for form in ("--only-binary=:all:", "--no-binary=:all:"):
            with tempfile.TemporaryDirectory() as target:
                requirement = f"mesh-transformer=={version}"
                install = (*pip, "install", *options, form, "--target", target)
                run(*install, requirement, env=environment)
                command = (sys.executable, "-m", "mesh_transformer", "--version")
                printed = run(*command, cwd=target, env=environment)
                if printed != f"mesh-transformer {version}\n":
                    raise InputError(f"the index gave {printed.strip()}, expected {version}")


def release(out: Path, key: Path | None, pythons: list[str], extras: list[str]) -> Path:
    """Make a release in the folder `out`, with nothing there if a step fails.

    Args:
      key: the private SSH key that signs, or None for no signature.
      pythons, extras: the clean environments in which it is checked.

    Returns:
      The folder of the version in `out`, which replaces one that was there.
    """
    version, started = mesh_transformer.__version__, time.monotonic()

    def report(step: str) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {step}", flush=True)

    check_source(version)
    text = notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as temporary:
        folder = Path(temporary) / version
        folder.mkdir()
        source, wheel = build(folder)
        tracked = git("ls-files").splitlines()
        check_source_archive(source, tracked)
        check_wheel(wheel, tracked)
        run(sys.executable, "-m", "twine", "check", "--strict", source, wheel)
        for path in (source, wheel):
            report(
                f"built {path.name}: {path.stat().st_size / 1000:,.0f} kB, as its files should be"
            )
        check_reproducible(source, wheel)
        report("built both again: the same bytes")
        rehearse_upload(source, wheel, version)
        report("uploaded both to an index on this machine, and installed them from there")
        (folder / "NOTES.md").write_text(text, encoding="utf-8")
        digests = [(hashlib.sha256(path.read_bytes()), path.name) for path in (source, wheel)]
        sums = "".join(f"{digest.hexdigest()}  {name}\n" for digest, name in digests)
        (folder / "SHA256SUMS").write_text(sums)
        if key is not None:
            sign(folder, key)
            report(f"signed SHA256SUMS with {key}")
        if pythons:
            table = clean_environments.report(wheel, source, pythons, extras)
            (folder / "environments.md").write_text(table)
            report(f"installed and run on Python {', '.join(pythons)}")
        shutil.rmtree(out / version, ignore_errors=True)
        folder.rename(out / version)
    return out / version


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build/release", help="folder to write to"
    )
    parser.add_argument("--key", type=Path, help="private SSH key to sign with (default: unsigned)")
    clean_environments.add_arguments(parser)
    args = parser.parse_args()
    os.umask(0o022)  # the modes in the wheel
    folder = release(args.out.absolute(), args.key, args.python, args.extras)
    print(f"{folder}: nothing is published; see docs/release.md")


if __name__ == "__main__":
    run_script(main)
