"""JSON values with their properties in every order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any


def reordered(document: Any) -> Iterator[Any]:
    """Yield `document` with the properties of each of its objects in every order."""
    if isinstance(document, dict):
        for names in itertools.permutations(document):
            for values in itertools.product(
                *(list(reordered(document[name])) for name in names)
            ):
                yield dict(zip(names, values, strict=True))
    elif isinstance(document, list):
        for items in itertools.product(*(list(reordered(item)) for item in document)):
            yield list(items)
    else:
        yield document
