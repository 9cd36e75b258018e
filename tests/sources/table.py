"""Write docs/sources.md from the markers of the tests beside this file: `python tests/sources/table.py`.

A test carries `@source("a sentence of the document")`, and `differs="..."` where something stays different.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "sources.md"
DOCUMENTS = ("rfc_5423", "rfc_25389", "custom_logits_processors", "sampling_notes", "engine_walk")
HEAD = """# Sources

What the documents say that this project follows, and the test that shows it. A problem is answered by its test. Where
something is different here, the test shows the difference. `python tests/sources/table.py` writes this page from the
tests in `tests/sources/`.
"""


def demands(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield the sentence, what differs, and the test of each marker, in order."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for each in node.decorator_list:
                if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "source":
                    values = [ast.literal_eval(one) for one in each.args] + [""]
                    named = {one.arg: ast.literal_eval(one.value) for one in each.keywords}
                    yield values[0], named.get("differs", values[1]), node.name


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for name in DOCUMENTS:
        file = HERE / f"test_{name}.py"
        tree = ast.parse(file.read_text())
        title = (ast.get_docstring(tree) or "").partition(", in ")[0]
        parts.append(f"\n## {title}\n\nIn `{file.relative_to(PAGE.parents[1])}`.\n\n")
        parts.append("| the document says | different here | test |\n|---|---|---|\n")
        rows = (tuple(cell.replace("|", "\\|") for cell in row) for row in demands(tree))
        parts += [f"| {sentence} | {differs} | `{test}` |\n" for sentence, differs, test in rows]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
