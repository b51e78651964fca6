"""Test with the newest JAX, pre-releases included, and write a report: `.ci/nightly`.

The report names the versions, and each cause of failures once, with the tests that it breaks.  pip
finds JAX's nightly builds if `PIP_EXTRA_INDEX_URL` names the index of them that JAX's installation
page gives, and otherwise only what is released.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

from mesh_transformer.storage import files
from mesh_transformer.util import run_script

REPOSITORY = Path(__file__).parents[1]
VERSIONS = ("jax", "jaxlib", "libtpu", "dm-haiku", "optax", "numpy")
MOST_TESTS = 5  # names of tests per cause
LONGEST = 30  # lines of an error


def versions(python: Path) -> dict[str, str]:
    """Return the versions of `VERSIONS` in an environment, those that it has."""
    command = [python, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    installed = {package["name"]: package["version"] for package in json.loads(output)}
    return {name: installed[name] for name in VERSIONS if name in installed}


def causes(xml: str) -> dict[str, list[tuple[str, str]]]:
    """Return {cause: [(test, error), ...]} of a JUnit file, the most frequent first.

    A cause is the message of an exception, with numbers and addresses left out.
    """
    failures: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for case in ElementTree.fromstring(xml).iter("testcase"):
        for result in case:
            if result.tag in ("failure", "error"):
                message = next(iter((result.get("message") or "").splitlines()), "no message")
                cause = re.sub(r"0x[0-9a-f]+|\d+", "N", message)[:200]
                test = f"{case.get('classname')}::{case.get('name')}"
                failures[cause].append((test, result.text or ""))
    return dict(sorted(failures.items(), key=lambda item: -len(item[1])))


def counts(xml: str) -> dict[str, int]:
    """Return the numbers of tests of a JUnit file, by result."""
    (suite,) = ElementTree.fromstring(xml).iter("testsuite")
    total, failures, errors, skipped = (
        int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}


def report(
    before: dict[str, str], after: dict[str, str], seconds: float, xml: str | None, output: str
) -> str:
    """Return the report in Markdown.

    Args:
      before, after: versions of packages in the lock, and those that were tested.
      xml: the text of pytest's JUnit file, None if pytest ended without one.
      output: what pytest printed.
    """
    if xml is None:
        title, parts = "the tests did not run to their end", []
    else:
        number = counts(xml)
        title = f"{number['failed'] or 'no'} failures"
        numbers = ", ".join(f"{value} {key}" for key, value in number.items())
        parts = [f"{numbers}, {seconds / 60:.0f} minutes.", ""]
    lines = [f"# JAX {after['jax']}: {title}", "", *parts]
    lines += ["| package | lock | tested |", "|---|---|---|"]
    lines += [f"| {name} | {before.get(name, '-')} | {after[name]} |" for name in after]
    lines.append("")
    if xml is None:
        return "\n".join(lines + _code(output))
    for cause, failures in causes(xml).items():
        tests = [test for test, _ in failures]
        lines += [f"## {len(tests)} x {cause}", ""]
        lines += [f"* `{test}`" for test in tests[:MOST_TESTS]]
        if len(tests) > MOST_TESTS:
            lines.append(f"* and {len(tests) - MOST_TESTS} more")
        lines += ["", *_code(failures[0][1])]
    return "\n".join(lines)


def _code(text: str) -> list[str]:
    return ["```", *text.splitlines()[-LONGEST:], "```", ""]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="the Python to test with")
    parser.add_argument("--venv", default=".venv-nightly", help="the environment to create")
    parser.add_argument("--report", type=Path, default=Path("build/nightly.md"))
    parser.add_argument(
        "--always", action="store_true", help="test also if JAX is not newer than the lock's"
    )
    args = parser.parse_args()
    shutil.rmtree(REPOSITORY / args.venv, ignore_errors=True)  # of an earlier night
    make = ["make", f"PYTHON={args.python}", f"VENV={args.venv}", "TORCH="]
    subprocess.run([*make, f"{args.venv}/test", "libtpu"], cwd=REPOSITORY, check=True)
    python = REPOSITORY / args.venv / "bin/python"
    before = versions(python)
    update = [python, "-m", "pip", "install", "--quiet", "--pre", "--upgrade", "jax", "jaxlib"]
    subprocess.run(update, check=True)
    after = versions(python)
    if before["jax"] == after["jax"] and not args.always:
        text, failed = f"# JAX {after['jax']}: no newer JAX was found\n", False
    else:
        results = REPOSITORY / "build/nightly.xml"
        results.unlink(missing_ok=True)
        started = time.monotonic()
        tests = subprocess.run(
            [*make, "test-jax", f"PYTEST_ADDOPTS=--junitxml={results}"],
            cwd=REPOSITORY,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        xml = results.read_text(encoding="utf-8") if results.exists() else None
        text = report(before, after, time.monotonic() - started, xml, tests.stdout)
        failed = tests.returncode != 0
    files.write_text(str(args.report), text)
    print(text)
    return int(failed)


if __name__ == "__main__":
    run_script(main)
