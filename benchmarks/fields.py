"""Write the fields of a constraint (`engine/server/request/fields.py`) into
docs/http-reference.md.

python -m benchmarks.fields
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from textwrap import fill

from engine.server.request.fields import (
    REFUSED,
    WITHOUT_EFFECT,
    Body,
    ConstraintFields,
    ResponseFormat,
    StructuredOutputs,
    rows,
)
from guided.constraint import KINDS, ConstraintKind

PAGE = Path(__file__).parents[1] / "docs" / "http-reference.md"
_BEGIN = "<!-- This section is written by `python -m benchmarks.fields`. -->\n\n"
_END = "\n## JSON schemas\n"
_TEXT = """A request has one constraint. Its field is in the body, or in one of the objects `nvext` (NVIDIA)
and `sampling_params` (SGLang), in `/v1/completions`, `/v1/chat/completions`, `/v1/responses`, `/v1/messages` and
`/v1/check`.

| constraint | body, `nvext`, `sampling_params` | in `structured_outputs` | in `response_format` |
|---|---|---|---|
{table}

- `response_format` is also `text.format` in Responses, `output_config.format` and `output_format` in Messages. Its
  `type` is `json_schema`, `json_object`, TGI's `json`, `structural_tag` or `text`. A `json_object` or `json` without a
  schema is any JSON object.
- Fields with the same meaning count as one, such as a schema and its JSON text. Different constraints are a 400.
- Sampling fields work in `nvext` and `sampling_params`, too, also under the name of another API (`max_new_tokens`).
  Fields of the body have priority.
- `backend` and `guided_decoding_backend` take options of vLLM after a colon: `no-fallback`, `disable-any-whitespace`,
  `no-additional-properties` (`xgrammar:no-fallback,disable-any-whitespace`).

An unknown field has no effect and, unless empty, is named in `guided.ignored`; `--strict-fields` makes it a 400.
These known fields have no effect, and are accepted with `--strict-fields`, too:
{without_effect}.

If ignoring a field would change the answer, the request is a 400 that names the field to use:

- Names that resemble a constraint (`json_shema`, `extra_body`, `response_mime_type`), also within
  `structured_outputs`, `response_format`, `text`, `output_config`, `vllm_xargs` and unknown objects.
- Names of another API (`max_new_tokens`, `num_predict`, `system_prompt`, `inputs`, `stop_sequences`).
- Fields that the endpoint does not support: {refused}.
"""


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(place: type[Body], kind: ConstraintKind) -> str:
    return _names(row.name for row in rows(place) if row.kind == kind) or "none"


def section() -> str:
    """Return the section between its heading and the next one."""
    places = (ConstraintFields, StructuredOutputs, ResponseFormat)
    table = [
        f"| {kind.replace('_', ' ')} | {' | '.join(_cell(place, kind) for place in places)} |"
        for kind in KINDS
    ]
    text = _TEXT.format(
        table="\n".join(table),
        without_effect=_names(WITHOUT_EFFECT),
        refused=_names(REFUSED),
    )
    return "\n".join(map(_wrapped, text.split("\n")))


def _wrapped(line: str) -> str:
    indent = "  " if line.startswith(("- ", "  ")) else ""
    return (
        line
        if line.startswith("|")
        else fill(line, 140, subsequent_indent=indent, break_on_hyphens=False)
    )


def page() -> str:
    """Return the page with the new section."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    return before + _BEGIN + section() + _END + rest.partition(_END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
