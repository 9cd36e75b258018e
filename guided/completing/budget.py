"""Budget: the number of output tokens within which a sequence must complete its constraint."""

from __future__ import annotations

from typing import NamedTuple


class Budget(NamedTuple):
    """A limit for one sequence, and estimates of its constraint.

    A *jump* is the number of tokens by which one more token can lengthen the shortest completion: `{` may begin an
    object with twenty required properties.
    """

    tokens: int
    """Maximum number of output tokens, with the stop token."""
    first_jump: int
    """Maximum jump of the first token."""
    jump: int
    """Maximum jump of a later token."""
    text_jump: int
    """Maximum jump of a token that is plain text within a JSON string."""
    hint: str = ""
    """A text that is probably a short output, if one is known. The matcher checks whether it is one."""
