"""Pools that are found by name, among the installed packages' entry points."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint

import pytest

from guided.errors import PoolUnavailable
from guided.inline import InlinePool
from guided.integrations import pools
from guided.integrations.pools import find_pool
from guided.vocabulary import Vocabulary

VOCABULARY = Vocabulary((b"</s>", b"a"), (0,), frozenset({0}), 2)


def test_this_package_has_two_pools() -> None:
    from importlib.metadata import entry_points

    found = {entry.name: entry.value for entry in entry_points(group="guided.pools")}
    assert found == {"inline": "guided.inline:InlinePool", "ray": "actors:RayPool"}


def test_it_is_opened_with_its_options() -> None:
    pool = find_pool("inline", {"max_cache_bytes": 5})(VOCABULARY)
    assert isinstance(pool, InlinePool)
    assert pool.vocabulary is VOCABULARY


def test_options_that_it_does_not_have_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="num_actors"):
        find_pool("inline", {"num_actors": 2})


def test_there_is_no_such_pool() -> None:
    with pytest.raises(PoolUnavailable, match="there are inline, ray"):
        find_pool("nobody", {})


def test_what_it_needs_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(group: str) -> Iterable[EntryPoint]:
        return [EntryPoint("ray", "no_such_package:RayPool", group)]

    monkeypatch.setattr(pools, "entry_points", installed)
    with pytest.raises(PoolUnavailable, match=r"'\.\[ray\]'"):
        find_pool("ray", {})
