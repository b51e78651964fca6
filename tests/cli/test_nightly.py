"""The report of tests with JAX's newest version."""

from scripts import nightly

BEFORE = {"jax": "0.12.0", "numpy": "2.4.0"}
AFTER = {"jax": "0.13.0rc1", "jaxlib": "0.13.0rc1", "numpy": "2.4.0"}


def junit(*failures: tuple[str, str, str]) -> str:
    """Return a JUnit file with one test that passed, one that was skipped, and failed ones."""
    failed = "".join(
        f'<testcase classname="tests.model.test_layers" name="{name}">'
        f'<failure message="{message}">{text}</failure></testcase>'
        for name, message, text in failures
    )
    return (
        f'<testsuites><testsuite tests="{2 + len(failures)}" failures="{len(failures)}" errors="0" '
        f'skipped="1"><testcase classname="a" name="b"/><testcase classname="a" name="c">'
        f'<skipped message="no torch"/></testcase>{failed}</testsuite></testsuites>'
    )


def test_failures_are_grouped_by_their_cause():
    """Causes are in order of frequency, each with the last lines of one error."""
    traceback = "\n".join(f"line {number}" for number in range(100))
    failures = [("one", "ValueError: bad", "elsewhere")]
    failures += [
        (f"test[{n}]", f"TypeError: got {n} of 0x{n:x}f&#10;more", traceback) for n in range(8)
    ]
    text = nightly.report(BEFORE, AFTER, 120, junit(*failures), "")
    assert text.startswith(
        "# JAX 0.13.0rc1: 9 failures\n\n1 passed, 9 failed, 1 skipped, 2 minutes."
    )
    assert "| jax | 0.12.0 | 0.13.0rc1 |\n| jaxlib | - | 0.13.0rc1 |" in text
    first, second = text.split("## ")[1:]
    assert first.startswith("8 x TypeError: got N of N\n")
    assert "* `tests.model.test_layers::test[0]`\n" in first
    assert "* and 3 more\n" in first
    assert "line 99\n```" in first
    assert "line 0\n" not in first
    assert second.startswith("1 x ValueError: bad\n")


def test_no_failures():
    text = nightly.report(BEFORE, AFTER, 60, junit(), "")
    assert text.startswith("# JAX 0.13.0rc1: no failures\n")
    assert "##" not in text


def test_an_aborted_run_shows_what_was_printed():
    text = nightly.report(BEFORE, AFTER, 60, None, "Fatal Python error: Aborted")
    assert text.startswith("# JAX 0.13.0rc1: the tests did not run to their end\n")
    assert "```\nFatal Python error: Aborted\n```" in text
