"""`pattern` of JSON Schema as the text that a grammar library must generate between the quotes of a JSON string.

A pattern describes the string, a grammar its JSON text, where `"`, `\\` and control characters are escaped. So the
pattern is parsed (`regex.parse_search`: it may match anywhere) and its characters are written as in JSON.
"""

from __future__ import annotations

import re
from functools import lru_cache

from guided import regex
from guided.errors import InvalidConstraint, UnsupportedConstraint
from guided.regex import Chars, Choice, Node, Repeat, Sequence
from guided.schema import automaton

_ESCAPED = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}
_BLANKS = regex.ranges_of([(0x09, 0x0A), (0x0D, 0x0D), (0x20, 0x20)])
PLAIN = regex.complement(regex.ranges_of([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F)]))
"""Characters that are not escaped in JSON strings (without DEL, which some libraries escape)."""

_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = f"({_YEAR}-{_DAY}|{_LEAP}-02-29)"
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_N = "[0-9]{1,9}"
_CLOCK = f"T({_N}H({_N}M({_N}S)?)?|{_N}M({_N}S)?|{_N}S)"
_CALENDAR = f"({_N}Y({_N}M({_N}D)?)?|{_N}M({_N}D)?|{_N}D)"
_A, _C = "[A-Za-z0-9]", "[A-Za-z0-9-]"
_LABEL, _SHORT = (  # no hyphens at the third and fourth place: these are reserved, as in `xn--` (RFC 5890)
    f"{_A}({_C}?{_A}|{_C}{{2}}{_A}|{_C}({_A}{_C}|-{_A}){_C}{{0,{most - 5}}}{_A})?" for most in (63, 24)
)
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_GROUP = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [
        f"({_GROUP}:){{7}}{_GROUP}",
        *(f"({_GROUP}:){{{before}}}(:{_GROUP}){{1,{7 - before}}}" for before in range(1, 7)),
        f":(:{_GROUP}){{1,7}}",
        f"({_GROUP}:){{1,7}}:",
        "::",
    ]
)
_BEYOND_ASCII = r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
_WIDE_LABEL = f"({_LABEL}|[a-z0-9\u00e0-\u00f6\u00f8-\u00ff\u0430-\u044f\u3041-\u3096\u4e00-\u9fa5]{{1,15}})"
_WIDE_HOST = f"{_WIDE_LABEL}(\\.{_WIDE_LABEL}){{0,2}}(\\.{_SHORT}){{0,2}}"  # at most 241 characters with IDNA
_HOST = f"{_LABEL}(\\.{_SHORT}){{0,7}}"  # at most 238 characters of 253
_LOCAL = f"({_ATOM}{{1,64}}|{_ATOM}(\\.?{_ATOM}){{0,31}})"  # at most 64
_MAIL_HOST = f"{_LABEL}(\\.{_SHORT}){{1,5}}"  # at most 188: 253 of 254 for the address
_POINTER = "(/([^/~]|~[01])*)*"
_VARIABLE = r"([A-Za-z0-9_]|%[0-9A-Fa-f]{2})+(\.([A-Za-z0-9_]|%[0-9A-Fa-f]{2})+)*(:[1-9][0-9]{0,3}|\*)?"
_TEMPLATE = r"([^\x00-\x20\x7f-\x9f\"'<>%\\^`{|}]|%[0-9A-Fa-f]{2}" + rf"|\{{[+#./;?&]?{_VARIABLE}(,{_VARIABLE})*\}})*"
_ESCAPE = r"\\[dDwWsSnrtfv\\^$.|?*+()\[\]{}/]"
_CLASS = rf"\[\^?([^\x00-\x1f\\\[\]^&~|-]|a-z|A-Z|0-9|{_ESCAPE})+-?\]"
_COUNT = r"([*+?]|\{([0-9]{1,3},?|[01],[1-9][0-9]{0,2}|[2-9],[1-9][0-9]{1,2})\})\??"


def _uri(more: str) -> tuple[str, str]:
    """Return URIs and relative references, with the characters `more` where unreserved ones may be."""
    free = f"[A-Za-z0-9{more}._~!$&'()*+,;=-]|%[0-9A-Fa-f]{{2}}"
    path = f"({free}|[:@])"
    authority = f"//(({free}|:)*@)?({free})*(:[0-9]*)?(/{path}*)*"
    rest = f"(\\?({path}|[/?])*)?(#({path}|[/?])*)?"
    absolute = f"{authority}|/({path}+(/{path}*)*)?"
    uri = f"[A-Za-z][A-Za-z0-9+.-]*:({absolute}|{path}+(/{path}*)*|)"
    return f"^{uri}{rest}$", f"^({uri}|{absolute}|(({free}|@)+(/{path}*)*)?){rest}$"


def _regex(depth: int) -> str:
    """Return regular expressions in the subset of ECMA-262 and Python, with groups up to `depth` levels."""
    group = rf"|\((\?:)?{_regex(depth - 1)}\)" if depth else ""
    term = rf"([^\x00-\x1f\\^$.|?*+()\[\]{{}}]|\.|{_ESCAPE}|{_CLASS}{group})({_COUNT})?"
    return rf"({term}|[\^$|])*"


FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": f"^P({_N}W|{_CALENDAR}({_CLOCK})?|{_CLOCK})$",
    "email": f"^{_LOCAL}@{_MAIL_HOST}$",
    "idn-email": f"^({_LOCAL}|({_ATOM}|[{_BEYOND_ASCII}]){{1,21}})@{_MAIL_HOST}$",  # 21 characters: 63 bytes
    "idn-hostname": f"^{_WIDE_HOST}$",
    "hostname": f"^{_HOST}$",
    "ipv4": f"^({_BYTE}\\.){{3}}{_BYTE}$",
    "ipv6": f"^({_IPV6})$",
    "iri": _uri(_BEYOND_ASCII)[0],
    "iri-reference": _uri(_BEYOND_ASCII)[1],
    "json-pointer": f"^{_POINTER}$",
    "regex": f"^{_regex(2)}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{_POINTER})$",
    "uri": _uri("")[0],
    "uri-reference": _uri("")[1],
    "uri-template": f"^{_TEMPLATE}$",
    "uuid": "^[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}$",
}
"""The formats of the specification as patterns. Other formats are annotations. Each matches valid values only, but not
all of them: no leap seconds, no literals for hosts, no unusual notations of addresses. The limit of the whole length
follows from those of the parts: of the eight labels of a hostname (253 characters), only the first may have 63
characters, the others 24. (Source: RFC 3339, 5321, 1123, 2673, 4291, 6901, 3986, 3987, 6570, 4122.)"""
NECESSARY = {
    "date": r"^\d{4}-\d\d-\d\d$",
    "date-time": r"^\d{4}-\d\d-\d\d[Tt ]\d",
    "time": r"^\d+:\d",
    "duration": "^P",
    "email": "@",
    "ipv4": r"^\d+\.\d+\.\d+\.\d+$",
    "ipv6": "^[^@/]*:",
    "uri": "^[A-Za-z][A-Za-z0-9+.-]*:",
    "uuid": "^[0-9A-Fa-f-]+$",
}
"""Format -> a pattern that each of its values matches, for any validator. `not` excludes all strings that match."""


@lru_cache(maxsize=256)
def read(pattern: str) -> Node:
    """Return all strings that contain a match of `pattern`. Raises as `regex.parse` does."""
    return regex.parse_search(pattern, automaton.restricted, param="json_schema")


def whole(pattern: str) -> Node:
    """Return the texts that match the regex `pattern` as a whole. Raises as `regex.parse` does."""
    return regex.parse(pattern, automaton.restricted)


@lru_cache(maxsize=16)
def whitespace(pattern: str) -> str:
    """Return a regex for the whitespace between JSON tokens, without what JSON does not allow there. Empty for none.

    Raises:
        InvalidConstraint: nothing is left of a part of the pattern, or as `regex.parse` does.
    """

    def blank(chars: Chars) -> Chars:
        ranges = regex.intersection(chars.ranges, _BLANKS)
        if not ranges:
            message = "the whitespace pattern needs a character other than space, tab, line feed and carriage return"
            raise InvalidConstraint(message, param="whitespace_pattern")
        return Chars(ranges)

    return regex.render(regex.map_chars(regex.parse(pattern, param="whitespace_pattern"), blank))


def matches(pattern: str, text: str) -> bool:
    """Return whether `text` contains a match of `pattern`. Raises as `read` does."""
    return _compiled(pattern).fullmatch(text) is not None


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(regex.render(read(pattern)))


def in_json(node: Node, *, escapes: bool) -> Node:
    """Return `node` as JSON text between quotes.

    Args:
        escapes: write characters that need it with their short escapes. Without it they are excluded, so the result
            matches less.

    Raises:
        UnsupportedConstraint: nothing is left without the excluded characters.
    """

    def spelled(chars: Chars) -> Node:
        plain = regex.intersection(chars.ranges, PLAIN)
        options: list[Node] = [Chars(plain)] if plain else []
        for character, escape in _ESCAPED.items() if escapes else ():
            if regex.intersection(chars.ranges, ((ord(character), ord(character)),)):
                options.append(regex.literal(escape))
        if not options:
            raise UnsupportedConstraint("the pattern needs a character that is escaped in JSON strings")
        return regex.choice(options)

    return regex.map_chars(node, spelled)


def width(node: Node) -> tuple[int, int | None]:
    """Return the minimum and maximum number of characters of a match (None: unbounded)."""
    match node:
        case Chars():
            return 1, 1
        case Sequence(items):
            widths = [width(item) for item in items]
            known = [high for _, high in widths if high is not None]
            return sum(low for low, _ in widths), sum(known) if len(known) == len(widths) else None
        case Choice(options):
            widths = [width(option) for option in options]
            highs = [high for _, high in widths]
            return min(low for low, _ in widths), None if None in highs else max(high or 0 for high in highs)
        case Repeat(item, low, high):
            least, most = width(item)
            return least * low, None if most is None or high is None else most * high
    raise TypeError(f"{type(node).__name__} in a pattern")


def fit(node: Node, least: int, most: int | None) -> Node:
    """Restrict `node` to `least` to `most` characters.

    This is possible if the lengths have no effect, or if only one repeated character varies the length.

    Raises:
        UnsupportedConstraint: not possible, or no match has such a length.
    """
    low, high = width(node)
    if low >= least and (most is None or (high is not None and high <= most)):
        return node
    if (most is not None and low > most) or (high is not None and high < least):
        raise UnsupportedConstraint("no match of the pattern has a length between minLength and maxLength")
    items: list[Node] = list(node.items) if isinstance(node, Sequence) else [node]
    loose = [index for index, item in enumerate(items) if len(set(width(item))) == 2]
    if len(loose) == 1:
        item = items[loose[0]]
        if isinstance(item, Repeat) and isinstance(item.item, Chars):
            fixed = low - item.low
            longest = item.high if most is None else min(x for x in (item.high, most - fixed) if x is not None)
            items[loose[0]] = regex.repeat(item.item, max(item.low, least - fixed), longest)
            return regex.sequence(items)
    raise UnsupportedConstraint("a pattern together with minLength or maxLength that it doesn't imply")
