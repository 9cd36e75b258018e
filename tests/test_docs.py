"""The docs say what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("guided", "actors", "engine", "deploy", "benchmarks")
MODULES = [
    path.relative_to(ROOT)
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.name != "__init__.py"
]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_structure_has_a_line_for_each_module_and_for_nothing_else() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    listed: set[str] = set()
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        folder = section.split("`")[1]
        listed |= {folder + name for name in re.findall(r"^\| `([\w./]+\.py)` \|", section, flags=re.MULTILINE)}
    assert listed - {"guided/backends/__init__.py"} == {path.as_posix() for path in MODULES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    for name in re.findall(
        r"`((?:guided|actors|engine|deploy|benchmarks|tests|docs|examples)/[\w./-]+\.\w+)`", page.read_text()
    ):
        assert (ROOT / name).exists(), name


def test_every_test_that_the_failure_model_names_is_there_and_every_row_names_one() -> None:
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
