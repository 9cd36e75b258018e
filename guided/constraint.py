"""Constraint: a constraint on the output of a request, checked before any grammar
library gets it.

The checks here are cheap: sizes, nesting, NUL bytes, counts, and for JSON Schema the
meta-schema. The syntax of a regex or a grammar is checked by its compilation, in a
process that may be killed.

The modules that read schemas and regexes are imported at their first use, because mask
workers, which get compiled grammars, do not need them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, get_args

from guided.errors import ConstraintTooLarge, InvalidConstraint, bounded
from guided.json_text import JsonObject
from guided.limits import LIMITS
from guided.schema.keywords import replaced
from guided.tags.structural_tag import Content, Node, contents, located, parse, read

if TYPE_CHECKING:
    from guided.regex import tree as regexes

ConstraintKind = Literal[
    "json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"
]
MAX_INDENT = 32
"""Maximum number of blanks after a line break in JSON text: eight levels of four."""
LINE_BREAK = rf"\n {{0,{MAX_INDENT}}}"
"""A regex for a line break between JSON tokens.

The default whitespace is that of `json.dumps` and JavaScript's `JSON.stringify`,
compact or indented: at most one blank after a colon or a comma; at most one line break
after a comma, after an opening bracket, and before a closing bracket; none elsewhere.
With unbounded whitespace, a model may generate blanks until its token limit.
"""
KINDS: tuple[ConstraintKind, ...] = get_args(ConstraintKind)
_OPTIONS: Mapping[str, Collection[str]] = {
    "json_schema": ("whitespace", "open_objects", "strict_schema"),
    "json_object": ("whitespace",),
    "structural_tag": ("whitespace", "open_objects", "strict_schema"),
}
"""Kind -> the options of the class method with this name, besides `param`."""


@dataclass(frozen=True)
class Constraint:
    """A validated constraint in canonical form. Frozen and hashable. Create it with the
    class methods.

    Args:
        kind: one of `KINDS`.
        source: the canonical text: JSON text for `json_schema` (in the order of
            generation) and `structural_tag`, a JSON array for `choice`, the pattern for
            `regex`, the grammar's text for `grammar`, empty for `json_object`.
        whitespace: the whitespace between JSON tokens, for JSON kinds and structural
            tags: None is the default (see `LINE_BREAK`), "" is none, any other value is
            a regex.
    """

    kind: ConstraintKind
    source: str
    whitespace: str | None = None
    strict: bool = False
    """Whether keywords that the mask does not enforce are refused, instead of checked
    when the output ends."""
    open_objects: bool | None = None
    """Whether objects with named properties may have further properties where the
    schema does not say. None: as the schema is written. True and False exclude keys
    that are nearly a declared name (`string_pattern.other_names`)."""
    leave_out: tuple[str, ...] = field(default=(), compare=False)
    """Keywords that are left out everywhere in the schema, for a library that otherwise
    refuses it."""
    not_enforced: tuple[str, ...] = field(default=(), compare=False)
    """JSON pointers to parts of a schema that are not enforced: unknown formats
    (annotations in JSON Schema) and keywords that are probably misspelt, with a remark
    in parentheses."""
    closed: tuple[str, ...] = field(default=(), compare=False)
    """JSON pointers to the objects that have only their named properties because of
    `open_objects=False`."""
    param: str = field(default="", compare=False)
    """The field of a request that describes the constraint."""
    pointer: str = field(default="", compare=False)
    """JSON pointer to the constraint within this field."""
    parts: Mapping[str, tuple[str, str]] = field(default_factory=dict, compare=False)
    """JSON pointers to the parts of a structural tag that were given as constraints ->
    their `param` and `pointer`."""

    @cached_property
    def key(self) -> str:
        """Canonical key of 32 hex digits, equal for equal constraints in every
        process."""
        text = repr(
            (self.kind, self.source, self.whitespace, self.strict, self.open_objects)
        )
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def place(self, pointer: str | None) -> tuple[str, str | None]:
        """Return the field that a place in the constraint comes from, and the pointer
        within this field."""
        for part, (name, inner) in self.parts.items():
            if pointer is not None and f"{pointer}/".startswith(f"{part}/"):
                return name, inner + pointer[len(part) :]
        return self.param, pointer

    @classmethod
    def of_kind(
        cls, kind: ConstraintKind, value: Any, *, param: str, **options: Any
    ) -> Constraint:
        """Create a constraint with the class method of its kind. Options that this
        method does not have are ignored."""
        taken = {
            name: option
            for name, option in options.items()
            if name in _OPTIONS.get(kind, ())
        }
        if kind == "json_object":
            return cls.json_object(param=param, **taken)
        create: Callable[..., Constraint] = getattr(cls, kind)
        return create(value, param=param, **taken)

    @classmethod
    def json_schema(
        cls,
        schema: JsonObject | bool | str,
        *,
        whitespace: str | None = None,
        open_objects: bool | None = None,
        strict_schema: bool = False,
        faults: Iterable[str] | None = None,
        param: str = "json_schema",
    ) -> Constraint:
        """The output is JSON text that validates against `schema` (an object, a
        boolean, or either as JSON text).

        Args:
            open_objects: whether objects with named properties may have further
                properties where the schema does not say. False: they may not, as in
                OpenAI's strict mode, and `closed` lists these objects. True: they may,
                except for keys that are nearly a declared name. None: as the schema is
                written.
            strict_schema: refuse keywords that are only checked when the output ends,
                and formats that are not in the specification, which are otherwise
                listed in `not_enforced`.
            faults: JSON pointers into a schema that need not be enforced. The smallest
                parts around them, and around what is not valid, may have any value, and
                are listed in `not_enforced`. None: all of it is enforced.

        Raises:
            InvalidConstraint: `schema` is not JSON, is not a schema (with a JSON
                pointer), or has a remote `$ref`.
            UnsupportedConstraint: `schema` has an unknown format, with `strict_schema`.
            ConstraintTooLarge: `schema` exceeds a limit.
        """
        from guided.schema import document as schema_checks

        notes: list[str] = []
        if faults is not None and isinstance(schema, Mapping):
            document = schema_checks.relaxed(schema, faults, notes)
        else:
            document = schema_checks.parse(schema, param, notes, strict=strict_schema)
        source = _json(document)
        _check_text(source, "JSON schema", param)
        spaces = _whitespace(whitespace, param)
        closed: tuple[str, ...] = ()
        if open_objects is False:
            closed = schema_checks.closed_objects(document)
        return cls(
            *("json_schema", source, spaces, strict_schema, open_objects),
            not_enforced=tuple(notes),
            closed=closed,
            param=param,
        )

    @classmethod
    def json_object(
        cls, *, whitespace: str | None = None, param: str = "json_object"
    ) -> Constraint:
        """The output is any JSON object."""
        return cls("json_object", "", _whitespace(whitespace, param), param=param)

    @classmethod
    def regex(cls, pattern: str, *, param: str = "regex") -> Constraint:
        """The whole output matches `pattern`, as in `re.fullmatch`."""
        _check_text(pattern, "regex", param)
        if not pattern:
            raise InvalidConstraint(
                "the regex is empty: only the empty output would match", param=param
            )
        LIMITS.check_regex(pattern, param)
        return cls("regex", pattern, param=param)

    @classmethod
    def choice(cls, choices: Sequence[str], *, param: str = "choice") -> Constraint:
        """The output is exactly one of `choices`."""
        if isinstance(choices, str) or not isinstance(choices, Sequence):
            raise InvalidConstraint("choice takes a list of strings", param=param)
        if not choices:
            raise InvalidConstraint(
                "choice is empty: give at least one string", param=param
            )
        if len(choices) > LIMITS.max_choices:
            raise ConstraintTooLarge(
                f"choice has {len(choices)} entries; the limit is {LIMITS.max_choices}",
                param=param,
            )
        for index, option in enumerate(choices):
            if not isinstance(option, str) or not option:
                raise InvalidConstraint(
                    "every choice is a non-empty string",
                    param=param,
                    pointer=f"/{index}",
                )
        source = _json(list(dict.fromkeys(choices)))
        for index, option in enumerate(choices):
            _check_text(option, "choice", param, pointer=f"/{index}")
        _check_text(source, "choice", param)
        return cls("choice", source, param=param)

    @classmethod
    def grammar(cls, text: str, *, param: str = "grammar") -> Constraint:
        """The whole output is a sentence of the grammar, in Lark or in GBNF/EBNF with a
        `root` rule."""
        _check_text(text, "grammar", param)
        if not text.strip():
            raise InvalidConstraint(
                "the grammar is empty: give at least one rule", param=param
            )
        LIMITS.check_grammar(text, param)
        return cls("grammar", text, param=param)

    @classmethod
    def structural_tag(
        cls,
        tag: JsonObject | str,
        *,
        whitespace: str | None = None,
        open_objects: bool | None = None,
        strict_schema: bool = False,
        param: str = "structural_tag",
    ) -> Constraint:
        """The output is free text with constrained parts: see
        `guided/tags/structural_tag.py`.

        A schema, regex, choice or grammar in the tag may be a `Constraint` that has the
        same options.
        """
        from guided.schema.document import MAX_NOTES

        if isinstance(tag, str):
            _check_text(tag, "structural tag", param)
        document = read(tag, param)
        notes: list[str] = []
        closed = []
        parts = {}
        options = {"open_objects": open_objects, "strict_schema": strict_schema}
        for content in contents(parse(document, param)):
            if isinstance(content.value, Constraint):
                inner = content.value
                parts[content.pointer] = (inner.param, inner.pointer)
            else:
                with located(content, param):
                    inner = cls.of_kind(
                        content.kind, content.value, param=param, **options
                    )
            notes += [content.pointer + pointer for pointer in inner.not_enforced]
            closed += [content.pointer + pointer for pointer in inner.closed]
            if content.value is not None:
                document = replaced(document, content.pointer, inner)
        del notes[MAX_NOTES:], closed[MAX_NOTES:]
        source = _json(document)
        _check_text(source, "structural tag", param)
        spaces = _whitespace(whitespace, param)
        return cls(
            *("structural_tag", source, spaces, strict_schema, open_objects),
            not_enforced=tuple(notes),
            closed=tuple(closed),
            param=param,
            parts=parts,
        )

    def inner(self, content: Content) -> Constraint:
        """Return the constraint of a content of this structural tag, which was checked
        with it."""
        source = ""
        if isinstance(content.value, str):
            source = content.value
        elif content.value is not None:
            source = _json(content.value)
        return Constraint(
            *(
                content.kind,
                source,
                self.whitespace,
                self.strict,
                self.open_objects,
                self.leave_out,
            ),
            not_enforced=_below(self.not_enforced, content.pointer),
            closed=_below(self.closed, content.pointer),
            param=self.param,
            pointer=content.pointer,
        )

    @property
    def tag(self) -> Node:
        """The nodes of a `structural_tag` constraint."""
        return _nodes(self.source, self.open_objects)

    @property
    def outline(self) -> Node:
        """The nodes of a `structural_tag` constraint. Arguments in any style stay
        contents, which is quick."""
        return _outline(self.source)

    @property
    def contents(self) -> Mapping[str, Constraint]:
        """JSON pointers into a structural tag -> the constraints there. Other
        constraints have themselves at ""."""
        if self.kind != "structural_tag":
            return {"": self}
        return {
            content.pointer: self.inner(content) for content in contents(self.outline)
        }

    @property
    def value(self) -> Any:
        """What describes the constraint: a text, or else JSON, which is shared: callers
        do not change it."""
        if self.kind in ("regex", "grammar"):
            return self.source
        return _loaded(self.schema_text)

    @property
    def schema_text(self) -> str:
        """The schema of a `json_schema` or `json_object` constraint as JSON text."""
        return self.source or '{"type": "object"}'

    @property
    def texts(self) -> regexes.Node | None:
        """The texts that satisfy a `regex` or `choice` constraint; None for other
        kinds. Raises as `parse` does."""
        return _texts(self.kind, self.source)


# a compilation asks several times for each of the following
_loaded = lru_cache(maxsize=8)(json.loads)


@lru_cache(maxsize=2)
def _outline(source: str) -> Node:
    return parse(_loaded(source), "structural_tag")


@lru_cache(maxsize=2)
def _nodes(source: str, open_objects: bool | None) -> Node:
    from guided.tags.arguments import expand

    return parse(
        _loaded(source), "structural_tag", partial(expand, open_objects=open_objects)
    )


@lru_cache(maxsize=64)
def _texts(kind: ConstraintKind, source: str) -> regexes.Node | None:
    from guided.regex import parser as regex_parser
    from guided.regex import tree as regexes

    if kind == "choice":
        return regexes.choice(map(regexes.literal, json.loads(source)))
    if kind == "regex":
        return regex_parser.parse(source)
    return None


def _below(notes: tuple[str, ...], pointer: str) -> tuple[str, ...]:
    """Return the notes on what is below `pointer`, as JSON pointers from there."""
    rests = [note[len(pointer) :] for note in notes if note.startswith(pointer)]
    # a remark follows a blank
    return tuple(rest for rest in rests if not rest or rest[0] in "/ ")


def _json(value: Any) -> str:
    """Write compact JSON. Constraints in it are written as their values."""
    return json.dumps(
        value, ensure_ascii=False, separators=(",", ":"), default=attrgetter("value")
    )


def _check_text(
    text: object, what: str, param: str, pointer: str | None = None
) -> None:
    if not isinstance(text, str):
        raise InvalidConstraint(
            f"the {what} must be a string, not {type(text).__name__}",
            param=param,
            pointer=pointer,
        )
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        message = f"the {what} is not valid Unicode: {bounded(error)}"
        raise InvalidConstraint(message, param=param, pointer=pointer) from None
    if "\x00" in text:
        message = f"the {what} contains a NUL character, which no backend can take"
        raise InvalidConstraint(message, param=param, pointer=pointer)
    if size > LIMITS.max_constraint_bytes:
        message = f"the {what} is {size} bytes long; the limit is {LIMITS.max_constraint_bytes}"
        raise ConstraintTooLarge(message, param=param, pointer=pointer)


def _whitespace(pattern: str | None, param: str) -> str | None:
    if pattern is not None:
        _check_text(pattern, "whitespace pattern", param)
        LIMITS.check_regex(pattern, param)
    return pattern
