"""Write a folder of wheels for a machine without internet that has JAX already: `make wheels`.

There, `pip install --no-index --find-links FOLDER mesh-transformer` installs this library and all
that training, sampling and conversion import, except JAX and what it brings along.
"""

import argparse
import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tqdm import tqdm

from mesh_transformer.util import InputError, run_script

REPOSITORY = Path(__file__).parents[1]
# What JAX brings along on a machine with an accelerator, in versions that match its drivers.
PRESENT = {"jax", "jaxlib", "numpy", "scipy", "ml-dtypes", "opt-einsum"}
MOST_MIB = 60
# Newer names of platforms first; pip takes what a package has.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]


def closure(names: list[str], python: str) -> dict[str, str]:
    """Return {name: version} of installed packages and what they require, except `PRESENT`.

    Args:
      python: the version of Python for which they are required, on Linux.
    """
    target = {"python_version": python, "python_full_version": f"{python}.0"}
    target |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    versions: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    left = [Requirement(name) for name in names]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        if name in PRESENT or (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        package = metadata.distribution(name)
        versions[name] = package.version
        environments = [target | {"extra": extra} for extra in ("", *requirement.extras)]
        for line in package.requires or ():
            own = Requirement(line)
            if own.marker is None or any(own.marker.evaluate(e) for e in environments):
                left.append(own)
    return versions


def requirements() -> list[str]:
    """Return the requirements of the library itself, without its extras."""
    lines = metadata.requires("mesh-transformer") or []
    return [line for line in lines if "extra ==" not in line]


def pip(*words: str) -> Any:
    """Run pip, and return its exit status and messages."""
    command = [sys.executable, "-m", "pip", *words, "--quiet", "--disable-pip-version-check"]
    return subprocess.run(command, capture_output=True, text=True)


def _last_line(process: Any) -> str:
    return f"({(process.stderr.strip() or 'no message').splitlines()[-1]})"


def write(folder: Path, python: str) -> None:
    """Write the wheels for a version of Python, such as "3.12"."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; remove it first")
    target = ["--python-version", python, "--implementation", "cp", "--only-binary=:all:"]
    target += [f"--platform={platform}" for platform in PLATFORMS]
    where = ["--no-deps", "--dest", str(folder)]
    for name, version in tqdm(sorted(closure(requirements(), python).items()), unit="wheel"):
        pin = f"{name}=={version}"
        if pip("download", *where, *target, pin).returncode:  # no wheel: most are plain Python
            built = pip("wheel", "--no-deps", "--wheel-dir", str(folder), pin)
            file = next(folder.glob(f"{name.replace('-', '_')}-*"), None)
            if built.returncode or file is None or not file.name.endswith("-none-any.whl"):
                raise InputError(f"{pin} has no wheel for Python {python} {_last_line(built)}")
    own = pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(REPOSITORY))
    if own.returncode:
        raise InputError(f"this library cannot be built {_last_line(own)}")
    size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    print(f"{folder}: {len(list(folder.iterdir()))} wheels, {size:.1f} MiB")
    if size > MOST_MIB:
        raise InputError(f"{folder} has {size:.1f} MiB, expected at most {MOST_MIB}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version there (default 3.12)")
    args = parser.parse_args()
    if importlib.util.find_spec("pip") is None:
        raise InputError("pip is missing here; run this with the Python of `make venv`")
    write(args.folder, args.python)


if __name__ == "__main__":
    run_script(main)
