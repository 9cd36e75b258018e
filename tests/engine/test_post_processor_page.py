"""The post-processor of docs/embedding.md runs as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from engine.model_loader import LoadedModel

PAGE = Path(__file__).parents[2] / "docs" / "embedding.md"


def test_the_post_processor_of_the_page(tiny_model: LoadedModel) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    [snippet] = [block for block in blocks if "class NoDigits" in block]
    names: dict[str, Any] = {"model": tiny_model}
    exec(compile(snippet, str(PAGE), "exec"), names)
    output = names["output"].outputs[0]
    assert output.token_ids
    assert not re.search("[0-9]", output.text)
    assert "." not in output.text[:-1] or output.finish_reason == "stop"
