"""CHANGELOG.md and CITATION.cff describe the version of the package."""

import re
from pathlib import Path

import yaml

import mesh_transformer

ROOT = Path(__file__).resolve().parents[2]
HEADING = r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})$"


def test_changelog_and_citation_name_the_newest_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    releases = re.findall(HEADING, changelog, re.MULTILINE)
    assert releases == sorted(releases, key=lambda r: [*map(int, r[0].split("."))], reverse=True)
    assert releases[0] == (str(citation["version"]), str(citation["date-released"]))
    assert releases[0][0] == mesh_transformer.__version__


def test_citation_has_the_licence_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert f'license_expression="{citation["license"]}"' in (ROOT / "setup.py").read_text()
