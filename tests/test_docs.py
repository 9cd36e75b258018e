"""The documentation names files, folders and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import coverage

ROOT = Path(__file__).parents[1]
PACKAGES = ("guided", "actors", "engine", "deploy", "benchmarks", "examples")
FOLDERS = {
    f"{path.parent.relative_to(ROOT).as_posix()}/" for package in PACKAGES for path in (ROOT / package).rglob("*.py")
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_structure_names_each_folder_once_and_nothing_else() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    listed = re.findall(r"^\| `([\w/]+/)` \|", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted(FOLDERS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_have_targets(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    for name in re.findall(
        r"`((?:guided|actors|engine|deploy|benchmarks|tests|docs|examples)/[\w./-]+\.\w+)`", page.read_text()
    ):
        assert (ROOT / name).exists(), name


def test_failure_model_names_existing_tests_in_every_row() -> None:
    text = (ROOT / "docs" / "failure-model.md").read_text()
    named = re.findall(r"`([\w/]+\.py)((?:::\w+)+)`", text)
    assert len(named) > 40
    for file, path in named:
        source = (ROOT / file if "/" in file else ROOT / "tests" / "faults" / file).read_text()
        *classes, function = path.removeprefix("::").split("::")
        for name in classes:
            _, _, source = source.partition(f"\nclass {name}:\n")
            source = re.split(r"\n(?=[^\s#)])", source)[0]
        indent = "    " * len(classes)
        assert re.search(rf"^{indent}(?:async )?def {function}\(", source, re.MULTILINE), f"{file}{path}"
    tables, _, _ = text.partition("## `max_replays`")
    rows = [line for line in tables.splitlines() if line.startswith("| ") and not line.startswith("| what goes wrong")]
    assert len(rows) > 30
    for row in rows:
        assert len(re.split(r" \| ", row)) == 8, row
        assert "::test_" in row or row.rstrip(" |").endswith("as above"), row


def test_coverage_is_what_the_code_says() -> None:
    assert coverage.PAGE.read_text() == coverage.page(), "run python -m benchmarks.coverage"
