"""Write docs/sources.md from the markers of the tests beside this file: `python
tests/sources/table.py`.

A test carries `@source("a sentence of the document")`, and `differs="..."` where
something stays different.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "sources.md"
DOCUMENTS = (
    "rfc_5423",
    "rfc_25389",
    "custom_logits_processors",
    "sampling_notes",
    "engine_walk",
)
HEAD = """# Sources

The documents that this project follows, and what is different here. Each sentence of a document that demands something
has a test in `tests/sources/`, with the sentence as its marker. Sentences without an entry here are met as they stand.
`python tests/sources/table.py` writes this page from the markers.
"""


def demands(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield the sentence, what differs, and the test of each marker, in order."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for each in node.decorator_list:
                if (
                    isinstance(each, ast.Call)
                    and isinstance(each.func, ast.Name)
                    and each.func.id == "source"
                ):
                    values = [ast.literal_eval(one) for one in each.args] + [""]
                    named = {
                        one.arg: ast.literal_eval(one.value) for one in each.keywords
                    }
                    yield values[0], named.get("differs", values[1]), node.name


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for name in DOCUMENTS:
        file = HERE / f"test_{name}.py"
        tree = ast.parse(file.read_text())
        title = (ast.get_docstring(tree) or "").partition(", in ")[0]
        rows = list(demands(tree))
        different = [(sentence, differs) for sentence, differs, _ in rows if differs]
        parts.append(
            f"\n## {title}\n\n`{file.relative_to(PAGE.parents[1])}`: {len(rows)} sentences, "
        )
        parts.append(f"{len(different)} met in another way:\n\n")
        escaped = [
            (sentence.rstrip(".").replace("__", "\\_\\_"), differs)
            for sentence, differs in different
        ]
        parts += [f'- "{sentence}": {differs}\n' for sentence, differs in escaped]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
