"""Write the table of `engine/server/request/fields.py`, the fields of a constraint, into docs/http-reference.md.

python -m benchmarks.fields
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from textwrap import fill

from engine.server.request.fields import (
    MARKS,
    MISNAMED,
    REFUSED,
    SAME_MEANING,
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
_TEXT = """A request has one constraint. Its field may stand in the body, or in one of the objects `nvext` (NVIDIA)
and `sampling_params` (SGLang), in `/v1/completions`, `/v1/chat/completions`, `/v1/responses`, `/v1/messages` and
`/v1/check`.

| constraint | body, `nvext`, `sampling_params` | in `structured_outputs` | in `response_format` |
|---|---|---|---|
{table}

- `response_format` is also `text.format` in Responses, `output_config.format` and `output_format` in Messages. Its
  `type` is `json_schema`, `json_object`, TGI's `json`, `structural_tag` or `text`. A `json_object` or `json` without a
  schema is any JSON object.
- Several fields count as one if they mean the same, such as a schema and its JSON text. Different ones are a 400.
- Sampling fields in `nvext` and `sampling_params` are read as if they stood in the body, also under the name of
  another API (`max_new_tokens`). Those of the body have priority.
- `backend` and `guided_decoding_backend` take options of vLLM after a colon: `no-fallback`, `disable-any-whitespace`,
  `no-additional-properties` (`xgrammar:no-fallback,disable-any-whitespace`).

An unknown field has no effect and, unless empty, is named in `guided.ignored`; `--strict-fields` makes it a 400.
Known fields that change nothing are accepted with `--strict-fields`, too:
{without_effect}.

A 400 says what is meant where ignoring a field would change the answer:

- A name that looks like one of the table (`json_shema`), or contains
  {marks}.
- {misnamed}.
- Such names within `structured_outputs`, `response_format`, `text`, `output_config`, `extra_body`, `vllm_xargs` and
  unknown objects.
- A name of another API: {same}.
- What the server does not do: {refused}.
"""


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(place: type[Body], kind: ConstraintKind) -> str:
    return _names(row.name for row in rows(place) if row.kind == kind) or "none"


def section() -> str:
    """Return the section between its heading and the next one."""
    places = (ConstraintFields, StructuredOutputs, ResponseFormat)
    table = [f"| {kind.replace('_', ' ')} | {' | '.join(_cell(place, kind) for place in places)} |" for kind in KINDS]
    text = _TEXT.format(
        table="\n".join(table),
        without_effect=_names(WITHOUT_EFFECT),
        marks=_names(MARKS),
        misnamed=_names(MISNAMED),
        same="; ".join(_names(group) for group in SAME_MEANING),
        refused=_names(REFUSED),
    )
    return "\n".join(map(_wrapped, text.split("\n")))


def _wrapped(line: str) -> str:
    indent = "  " if line.startswith(("- ", "  ")) else ""
    return line if line.startswith("|") else fill(line, 140, subsequent_indent=indent, break_on_hyphens=False)


def page() -> str:
    """Return the page with this section written anew."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    return before + _BEGIN + section() + _END + rest.partition(_END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
