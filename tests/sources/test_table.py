"""docs/sources.md is made from the markers of the tests."""

from __future__ import annotations

from tests.sources.table import DOCUMENTS, HERE, PAGE, page


def test_the_page_is_made_from_the_markers() -> None:
    assert PAGE.read_text() == page(), "run: python tests/sources/table.py"


def test_every_document_is_on_the_page() -> None:
    assert {f"test_{name}.py" for name in DOCUMENTS} == {
        file.name for file in HERE.glob("test_*.py")
    } - {"test_table.py"}
