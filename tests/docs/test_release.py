"""The version, the changelog and scripts/release.py, which docs/release.md describes."""

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import mesh_transformer
from mesh_transformer.util import InputError
from scripts import clean_environments, release
from tests.support.pages import runnable
from tests.support.waiting import SECONDS

ROOT = Path(__file__).resolve().parents[2]
HEADING = r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})$"
TOOLS = ROOT / ".venv-release/bin/python"


def test_changelog_and_citation_name_the_newest_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    releases = re.findall(HEADING, changelog, re.MULTILINE)
    assert releases == sorted(releases, key=lambda r: Version(r[0]), reverse=True)
    assert releases[0] == (str(citation["version"]), str(citation["date-released"]))
    version = Version(mesh_transformer.__version__)
    newest = Version(releases[0][0])
    assert version > newest if version.is_devrelease else version == newest
    assert release.notes(changelog, str(version))


def test_citation_has_the_licence_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert f'license_expression="{citation["license"]}"' in (ROOT / "setup.py").read_text()


CHANGELOG = """# Changelog

## [Unreleased]
{}
## [1.1.0] - 2026-12-31

### Added

- A thing.

## [1.0.0] - 2026-11-23

- Everything.
"""


def test_notes_are_the_section_of_the_version():
    text = CHANGELOG.format("")
    assert release.notes(text, "1.1.0") == "### Added\n\n- A thing.\n"
    assert release.notes(text, "1.0.0") == "- Everything.\n"
    assert release.notes(CHANGELOG.format("\n- New.\n"), "1.2.0.dev0") == "- New.\n"


@pytest.mark.parametrize(
    ("unreleased", "version", "message"),
    [
        ("", "1.2.0", "no changes under [1.2.0]"),
        ("", "1.2.0.dev0", "no changes under [Unreleased]"),
        ("\n- New.\n", "1.1.0", "changes under [Unreleased]; move them to [1.1.0]"),
    ],
)
def test_incomplete_notes_are_refused(unreleased, version, message):
    with pytest.raises(InputError, match=re.escape(message)):
        release.notes(CHANGELOG.format(unreleased), version)


TRACKED = ["mesh_transformer/__init__.py", "mesh_transformer/serving/page.html", "configs/a.json"]
TRACKED += ["tests/test_util.py", "data/tiny.train.index", *release.SOURCES]
WHEEL = [*TRACKED[:2], "mesh_transformer/configs/a.json"]
WHEEL += [f"mesh_transformer-1.1.0.dist-info/{name}" for name in release.ABOUT]


def write_wheel(folder: Path, names: list[str]) -> Path:
    path = folder / "mesh_transformer-1.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


def write_archive(folder: Path, names: list[str], seconds: int = 0) -> Path:
    path = folder / "mesh_transformer-1.1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            entry = tarfile.TarInfo(f"mesh_transformer-1.1.0/{name}")
            entry.size, entry.mtime = len(name), seconds
            archive.addfile(entry, io.BytesIO(name.encode()))
    return path


def test_archives_have_what_the_package_needs_and_nothing_else(tmp_path):
    sources = [*TRACKED[:3], *release.SOURCES, "PKG-INFO"]
    release.check_wheel(write_wheel(tmp_path, WHEEL), TRACKED)
    release.check_source_archive(write_archive(tmp_path, sources), TRACKED)
    for lost in ("mesh_transformer/serving/page.html", "mesh_transformer/configs/a.json"):
        with pytest.raises(InputError, match=f"whl lacks {lost}; see package_data"):
            release.check_wheel(write_wheel(tmp_path, [n for n in WHEEL if n != lost]), TRACKED)
    with pytest.raises(InputError, match=r"whl has tests/test_util\.py, which no user needs"):
        release.check_wheel(write_wheel(tmp_path, [*WHEEL, "tests/test_util.py"]), TRACKED)
    archive = write_archive(tmp_path, [name for name in sources if name != "LICENSE"])
    with pytest.raises(InputError, match=r"gz lacks LICENSE;"):
        release.check_source_archive(archive, TRACKED)
    archive = write_archive(tmp_path, [*sources, "data/tiny.train.index"])
    with pytest.raises(InputError, match=r"gz has data/tiny\.train\.index, which"):
        release.check_source_archive(archive, TRACKED)


def test_a_source_archive_depends_on_its_files_alone(tmp_path):
    results = []
    for names, seconds in ((TRACKED, 1), (TRACKED[::-1], 2)):
        path = write_archive(tmp_path, names, seconds)
        release.normalize(path, 1_790_000_000)
        results.append(path.read_bytes())
        with tarfile.open(path) as archive:
            assert {entry.mtime for entry in archive} == {1_790_000_000}
            assert len(archive.getnames()) == len(TRACKED)
    assert results[0] == results[1]


def test_every_extra_is_checked():
    checked = {name for check in clean_environments.CHECKS for name in check.extras.split(",")}
    checked |= set(clean_environments.RESOLVED)
    assert set(metadata.metadata("mesh-transformer").get_all("Provides-Extra") or ()) == checked


@pytest.mark.slow
def test_a_release_is_built_signed_uploaded_and_installed(tmp_path):
    if not TOOLS.exists():
        pytest.skip("make .venv-release/done has not been run")
    clone, key = tmp_path / "clone", tmp_path / "key"
    git = ("git", "-C", clone, "-c", "user.name=A", "-c", "user.email=a@example.com")
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)

    def run() -> str:
        command = [TOOLS, "scripts/release.py", "--key", key, "--python"]
        environment = os.environ | {"PYTHONPATH": str(clone)}
        result = subprocess.run(
            command, cwd=clone, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
        return result.stdout if result.returncode == 0 else f"{result.returncode} {result.stderr}"

    version = subprocess.check_output(
        [sys.executable, "-c", "import mesh_transformer as m; print(m.__version__)"],
        cwd=clone, env=os.environ | {"PYTHONPATH": str(clone)}, text=True,
    ).strip()  # fmt: skip
    assert "nothing is published" in run()
    folder = clone / "build/release" / version
    contents = {path.name: path.read_bytes() for path in folder.iterdir()}
    name = f"mesh_transformer-{version}"
    expected = {f"{name}.tar.gz", f"{name}-py3-none-any.whl", "NOTES.md", "SHA256SUMS"}
    assert set(contents) == expected | {"SHA256SUMS.sig", "allowed_signers"}
    for block in runnable("docs/release.md"):  # the commands that verify it
        for command in block.commands:
            subprocess.run(command, shell=True, check=True, cwd=folder)
    shutil.copy(folder / "NOTES.md", folder / "SHA256SUMS")
    forged = subprocess.run(runnable("docs/release.md")[0].commands[0], shell=True, cwd=folder)
    assert forged.returncode != 0

    subprocess.run([*git, "tag", f"v{version}"], check=True)
    assert "nothing is published" in run()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == contents
    (clone / "setup.py").write_text("# changed")
    assert run() == "2 error: the checkout has changes (setup.py, ...); commit them first\n"
    subprocess.run([*git, "commit", "--quiet", "--all", "--message", "Change"], check=True)
    assert run().startswith(f"2 error: the tag v{version} is another commit;")
