"""The formats of JSON Schema as patterns."""

from __future__ import annotations


def _formats() -> dict[str, str]:
    """Return `FORMATS`."""
    day = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    year = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
    leap = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
    date = f"({year}-{day}|{leap}-02-29)"
    time = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
    n = "[0-9]{1,9}"
    clock = f"T({n}H({n}M({n}S)?)?|{n}M({n}S)?|{n}S)"
    calendar = f"({n}Y({n}M({n}D)?)?|{n}M({n}D)?|{n}D)"
    a = "[A-Za-z0-9]"
    c = "[A-Za-z0-9-]"
    (
        label,
        short,
        # no hyphens at the third and fourth place: these are reserved, as in `xn--` (RFC
        # 5890)
    ) = (
        f"{a}({c}?{a}|{c}{{2}}{a}|{c}({a}{c}|-{a}){c}{{0,{most - 5}}}{a})?"
        for most in (63, 24)
    )
    atom = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
    byte = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
    group = "[0-9A-Fa-f]{1,4}"
    ipv6 = "|".join(
        [
            f"({group}:){{7}}{group}",
            *(
                f"({group}:){{{before}}}(:{group}){{1,{7 - before}}}"
                for before in range(1, 7)
            ),
            f":(:{group}){{1,7}}",
            f"({group}:){{1,7}}:",
            "::",
        ]
    )
    beyond_ascii = r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
    mail_host = f"{label}(\\.{short}){{1,5}}"  # at most 188: 253 of 254 for the address
    # Each label has letters of one alphabet, because many mixtures are forbidden, as is
    # one of both directions.
    wide_label = f"({label}|{'|'.join(_ALPHABETS)})"
    # < 242
    wide_host = f"({wide_label}(\\.{wide_label}){{0,2}}(\\.{short}){{0,2}}|{_LEFTWARD}(\\.{_LEFTWARD}){{0,2}})"
    wide_mail_host = f"({mail_host}|{wide_label}\\.{wide_label}(\\.{short})?|{_LEFTWARD}\\.{_LEFTWARD})"
    host = f"{label}(\\.{short}){{0,7}}"  # at most 238 characters of 253
    local = f"({atom}{{1,64}}|{atom}(\\.?{atom}){{0,31}})"  # at most 64
    pointer = "(/([^/~]|~[01])*)*"
    variable = r"([A-Za-z0-9_]|%[0-9A-Fa-f]{2})+(\.([A-Za-z0-9_]|%[0-9A-Fa-f]{2})+)*(:[1-9][0-9]{0,3}|\*)?"
    template = (
        r"([^\x00-\x20\x7f-\x9f\"'<>%\\^`{|}]|%[0-9A-Fa-f]{2}"
        + rf"|\{{[+#./;?&]?{variable}(,{variable})*\}})*"
    )
    return {
        "date": f"^{date}$",
        "time": f"^{time}$",
        "date-time": f"^{date}T{time}$",
        "duration": f"^P({n}W|{calendar}({clock})?|{clock})$",
        "email": f"^{local}@{mail_host}$",
        # 21 characters: 63 bytes
        "idn-email": f"^({local}|({atom}|[{beyond_ascii}]){{1,21}})@{wide_mail_host}$",
        "idn-hostname": f"^{wide_host}$",
        "hostname": f"^{host}$",
        "ipv4": f"^({byte}\\.){{3}}{byte}$",
        "ipv6": f"^({ipv6})$",
        "iri": _uri(beyond_ascii)[0],
        "iri-reference": _uri(beyond_ascii)[1],
        "json-pointer": f"^{pointer}$",
        "regex": f"^{_regex(2)}$",
        "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{pointer})$",
        "uri": _uri("")[0],
        "uri-reference": _uri("")[1],
        "uri-template": f"^{template}$",
        "uuid": "^[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}$",
    }


def _uri(more: str) -> tuple[str, str]:
    """Return URIs and relative references, with the characters `more` where unreserved
    ones may be."""
    free = f"[A-Za-z0-9{more}._~!$&'()*+,;=-]|%[0-9A-Fa-f]{{2}}"
    path = f"({free}|[:@])"
    authority = f"//(({free}|:)*@)?({free})*(:[0-9]*)?(/{path}*)*"
    rest = f"(\\?({path}|[/?])*)?(#({path}|[/?])*)?"
    absolute = f"{authority}|/({path}+(/{path}*)*)?"
    uri = f"[A-Za-z][A-Za-z0-9+.-]*:({absolute}|{path}+(/{path}*)*|)"
    return f"^{uri}{rest}$", f"^({uri}|{absolute}|(({free}|@)+(/{path}*)*)?){rest}$"


def _regex(depth: int) -> str:
    """Return regular expressions in the subset of ECMA-262 and Python, with groups up
    to `depth` levels."""
    escape = r"\\[dDwWsSnrtfv\\^$.|?*+()\[\]{}/]"
    klass = rf"\[\^?([^\x00-\x1f\\\[\]^&~|-]|a-z|A-Z|0-9|{escape})+-?\]"
    count = r"([*+?]|\{([0-9]{1,3},?|[01],[1-9][0-9]{0,2}|[2-9],[1-9][0-9]{1,2})\})\??"
    if depth:
        group = rf"|\((\?:)?{_regex(depth - 1)}\)"
    else:
        group = ""
    term = rf"([^\x00-\x1f\\^$.|?*+()\[\]{{}}]|\.|{escape}|{klass}{group})({count})?"
    return rf"({term}|[\^$|])*"


_ALPHABETS = (
    "[a-z0-9\u00e0-\u00f6\u00f8-\u00ff]{1,15}",
    "[\u03ac-\u03af\u03b1-\u03c1\u03c3-\u03c9\u03cc-\u03ce]{1,15}",
    "[\u0430-\u044f\u0451]{1,15}",
    "[\u3041-\u3096\u30a1-\u30f6\u4e00-\u9fa5]{1,15}",
    "[\uac00-\ud7a3]{1,13}",
    "[\u0e01-\u0e2e\u0e40-\u0e44][\u0e01-\u0e32\u0e34-\u0e39\u0e40-\u0e44\u0e47-\u0e4c]{0,14}",
    "[\u0905-\u0928\u092a-\u0930\u0932\u0933\u0935-\u0939][\u0905-\u0928\u092a-\u0930\u0932\u0933\u0935-\u0939\u093e-\u094d]{0,14}",
)
"""Labels of hosts in Latin, Greek, Cyrillic, Japanese and Chinese, Korean, Thai and
Devanagari letters."""
_LEFTWARD = "([\u05d0-\u05ea]{1,15}|[\u0621-\u063a\u0641-\u064a]{1,15})"
"""Labels in Hebrew and Arabic letters."""
FORMATS = _formats()
"""The formats of the specification as patterns. Other formats are annotations. Each
matches valid values only, but not all of them: no leap seconds, no literals for hosts,
no unusual notations of addresses. The limit of the whole length follows from those of
the parts: of the eight labels of a hostname (253 characters), only the first may have
63 characters, the others 24. (Source: RFC 3339, 5321, 1123, 2673, 4291, 6901, 3986,
3987, 6570, 4122.)"""
