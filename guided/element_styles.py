"""How families of models write the arguments of function calls if not as JSON: as elements, one for each argument.

The elements are like those of XML, or a list: `name:value,name:value`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

SCALARS = ("number", "boolean", "null")
TYPES = ("string", *SCALARS, "object", "array")
"""The types of JSON values."""
NAME = "{name}"
FREE_NAME = r'[^<>"\n/][^<>"\n]*'
"""Regex of the names that an element can have."""
LIST_NAME = r"[^\s<>{}()\[\],:='\"]+(?: [^\s<>{}()\[\],:='\"]+)*"
"""Regex of the names that an element of a list can have."""
ITEM = "item"
"""What stands for the name of an array's item."""
KIND = "{kind}"


@dataclass(frozen=True)
class ElementStyle:
    """The text of an element: `begin`, the value, `end`. They contain the property's name as `{name}`."""

    begin: str
    """`{kind}` in it is one of `kinds`. A line break at its end stands at both ends of the value."""
    end: str
    """`{kind}` in it is that of `begin`; for an opening bracket, the closing one."""
    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"": TYPES})
    """An attribute of the element -> the types of its value."""
    item: str = ""
    """`begin` of an array's item. Empty: objects and arrays are JSON."""
    names: str = FREE_NAME
    """Regex of the names that an element can have."""
    separator: str = ""
    """Text between the elements of a list. Empty: the elements are like those of XML."""
    has_json_strings: bool = False
    """Strings are written as in JSON. False: as they are, up to the end of their element."""

    @property
    def new_names(self) -> str:
        """Regex of the names that a model makes up. Parsers decode `&amp;`: names are written in one way only."""
        return self.names.replace('"', '"&')

    @cached_property
    def begin_pattern(self) -> Any:
        """The compiled regex of `begin`, or `item`, with any whitespace before it."""
        import regex  # the process of a mask worker does without it

        return regex.compile(r"\s*(?:" + "|".join(map(_pattern, filter(None, (self.begin, self.item)))) + ")")

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
    pad = r"(?P<pad>\n?)" if begin.endswith("\n") else ""
    return named.replace(re.escape(KIND), r"(?P<kind>\w*)") + pad


_DSML = {"true": ("string",), "false": (*SCALARS, "object", "array")}
STYLES = {
    "qwen_xml": ElementStyle("<parameter={name}>\n", "\n</parameter>\n"),
    "mimo_xml": ElementStyle("<parameter={name}>", "</parameter>"),
    "minimax_xml": ElementStyle('<parameter name="{name}">', "</parameter>\n"),
    "glm_xml": ElementStyle("<arg_key>{name}</arg_key><arg_value>", "</arg_value>"),
    "deepseek_xml": ElementStyle(
        '<\uff5cDSML\uff5cparameter name="{name}" string="{kind}">', "</\uff5cDSML\uff5cparameter>\n", _DSML
    ),
    "deepseek_v4_1_xml": ElementStyle(
        '<\uff5cDSML\uff5c parameter name="{name}" string="{kind}">', "</\uff5cDSML\uff5c parameter>\n", _DSML
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
    "minimax_m3_xml": ElementStyle("]<]minimax[>[<{name}>", "]<]minimax[>[</{name}>", item="]<]minimax[>[<item>"),
    "gemma": ElementStyle(
        "{name}:{kind}",
        "{kind}",
        {'<|"|>': ("string",), "": SCALARS, "{": ("object",), "[": ("array",)},
        item="{kind}",
        names=LIST_NAME,
        separator=",",
    ),
    "python": ElementStyle("{name}=", "", names=LIST_NAME, separator=", ", has_json_strings=True),
}
"""Name -> style: xgrammar's; `mimo_xml`, which is `qwen_xml` without line breaks; Gemma's; and that of calls in Python,
with values in JSON."""
