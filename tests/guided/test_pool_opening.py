"""Pools by name, from the entry points of installed packages."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint

import pytest

from guided import pool_opening as pools
from guided.errors import PoolUnavailable
from guided.inline import InlinePool
from guided.pool_opening import find_pool
from guided.vocabulary import Vocabulary

VOCABULARY = Vocabulary((b"</s>", b"a"), (0,), frozenset({0}), 2)


def test_this_package_has_two_pools() -> None:
    from importlib.metadata import entry_points

    found = {entry.name: entry.value for entry in entry_points(group="guided.pools")}
    assert found == {"inline": "guided.inline:InlinePool", "ray": "actors:RayPool"}


def test_a_pool_is_opened_with_its_options() -> None:
    pool = find_pool("inline", {"max_cache_bytes": 5})(VOCABULARY)
    assert isinstance(pool, InlinePool)
    assert pool.vocabulary is VOCABULARY


def test_unknown_options_are_rejected_at_once() -> None:
    with pytest.raises(ValueError, match="num_actors"):
        find_pool("inline", {"num_actors": 2})


def test_an_unknown_name() -> None:
    with pytest.raises(PoolUnavailable, match="there are inline, ray"):
        find_pool("unknown", {})


def test_a_pool_with_missing_dependencies(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(group: str) -> Iterable[EntryPoint]:
        return [EntryPoint("ray", "no_such_package:RayPool", group)]

    monkeypatch.setattr(pools, "entry_points", installed)
    with pytest.raises(PoolUnavailable, match=r"'\.\[ray\]'"):
        find_pool("ray", {})
