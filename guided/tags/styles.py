"""The styles in which families of models write the arguments of function calls as
elements instead of JSON.

Each argument is an element, which looks like an XML element or like an entry of the
list `name:value,name:value`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

SCALARS = ("number", "boolean", "null")
TYPES = ("string", *SCALARS, "object", "array")
"""The types of JSON values."""
NAME = "{name}"
FREE_NAME = r'[^<>"\n/][^<>"\n]*'
"""Regex of the name of an element."""
LIST_NAME = r"[^\s<>{}()\[\],:='\"]+(?: [^\s<>{}()\[\],:='\"]+)*"
"""Regex of the name of an element in a list."""
ITEM = "item"
"""The name of an element that is an item of an array."""
KIND = "{kind}"


@dataclass(frozen=True)
class ElementStyle:
    """The text of an element: `begin`, the value, `end`. In both texts, `{name}` stands
    for the property's name."""

    begin: str
    """Text before the value. `{kind}` stands for one of `kinds`. If `begin` ends with a
    line break, the value is also followed by one."""
    end: str
    """Text after the value. `{kind}` stands for the kind in `begin`, or for the bracket
    that closes it."""
    kinds: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"": TYPES})
    """Text of `{kind}` -> the types of the value."""
    item: str = ""
    """The text before an item of an array. Empty: objects and arrays are written as
    JSON."""
    names: str = FREE_NAME
    """Regex of the name of an element."""
    separator: str = ""
    """Text between the elements of a list. Empty: the elements look like XML."""
    has_json_strings: bool = False
    """Whether strings are written as in JSON, or as plain text up to the end of the
    element."""

    @property
    def new_names(self) -> str:
        """Regex of names that the schema does not list. They contain no `&`, because
        parsers would decode `&amp;`."""
        return self.names.replace('"', '"&')

    @cached_property
    def begin_pattern(self) -> Any:
        """The compiled regex of `begin`, or `item`, with any whitespace before it."""
        import regex  # the process of a mask worker does not need it

        return regex.compile(
            r"\s*(?:"
            + "|".join(map(_pattern, filter(None, (self.begin, self.item))))
            + ")"
        )

    @cached_property
    def end_pattern(self) -> Any:
        """The compiled regex of `end`, with any name."""
        return re.compile(_pattern(self.end))

    def mark(self, text: str, name: str, kind: str = "") -> str:
        """Return `text` with a property's name and a kind."""
        return text.replace(NAME, name).replace(KIND, kind)


def _pattern(begin: str) -> str:
    written = re.escape(begin.rstrip("\n")).replace("><", r">\s*<")
    named = written.replace(re.escape(NAME), rf"(?P<name>{FREE_NAME})")
    pattern = named.replace(re.escape(KIND), r"(?P<kind>\w*)")
    if begin.endswith("\n"):
        pattern += r"(?P<pad>\n?)"
    return pattern


_DSML = {"true": ("string",), "false": (*SCALARS, "object", "array")}
STYLES = {
    "qwen_xml": ElementStyle("<parameter={name}>\n", "\n</parameter>\n"),
    "mimo_xml": ElementStyle("<parameter={name}>", "</parameter>"),
    "minimax_xml": ElementStyle('<parameter name="{name}">', "</parameter>\n"),
    "glm_xml": ElementStyle("<arg_key>{name}</arg_key><arg_value>", "</arg_value>"),
    "deepseek_xml": ElementStyle(
        '<\uff5cDSML\uff5cparameter name="{name}" string="{kind}">',
        "</\uff5cDSML\uff5cparameter>\n",
        _DSML,
    ),
    "deepseek_v4_1_xml": ElementStyle(
        '<\uff5cDSML\uff5c parameter name="{name}" string="{kind}">',
        "</\uff5cDSML\uff5c parameter>\n",
        _DSML,
    ),
    "kimi_k3_xml": ElementStyle(
        '<|open|>argument key="{name}" type="{kind}"<|sep|>',
        "<|close|>argument<|sep|>",
        {kind: (kind,) for kind in TYPES},
    ),
    "cohere_xml": ElementStyle(
        '<cofl:value name="{name}" type="{kind}">',
        "</cofl:value>",
        {"raw": ("string",), "json": SCALARS, "dict": ("object",), "list": ("array",)},
        item='<cofl:value type="{kind}">',
    ),
    "minimax_m3_xml": ElementStyle(
        "]<]minimax[>[<{name}>", "]<]minimax[>[</{name}>", item="]<]minimax[>[<item>"
    ),
    "gemma": ElementStyle(
        "{name}:{kind}",
        "{kind}",
        {'<|"|>': ("string",), "": SCALARS, "{": ("object",), "[": ("array",)},
        item="{kind}",
        names=LIST_NAME,
        separator=",",
    ),
    "python": ElementStyle(
        "{name}=", "", names=LIST_NAME, separator=", ", has_json_strings=True
    ),
}
"""Name -> style. The styles are those of xgrammar, `mimo_xml` (`qwen_xml` without line
breaks), `gemma`, and `python` (calls in Python's syntax with values in JSON)."""
