"""Dashboard and alerts: queries use metrics and labels that exist, and every alert has
its place in the runbook."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from engine.async_llm import AsyncLLM
from engine.model.loader import LoadedModel
from engine.server.metrics import Metrics
from guided.pools.inline import InlinePool

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
ADDED = {"job", "instance", "replica"}
"""Labels that Prometheus and Ray Serve add."""
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
ALERTS = [
    rule
    for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
QUERIES = [
    target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
]
QUERIES += [alert["expr"] for alert in ALERTS]


@pytest.fixture(scope="module")
def metrics(tiny_model: LoadedModel) -> Iterator[dict[str, str]]:
    """Names and types of all families."""
    pool = InlinePool(tiny_model.vocabulary)
    engine = AsyncLLM(tiny_model, pool)
    yield {family.name: family.type for family in Metrics(engine).registry.collect()}
    engine.shutdown()
    pool.shutdown()


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """The labels of each metric, as docs/http-reference.md lists them."""
    (section,) = re.findall(
        r"^## Metrics\n(.*?)^## ",
        (ROOT / "docs" / "http-reference.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    return {
        f"guided_{name}": set(text.split(","))
        for name, text in re.findall(r"`([a-z_0-9]+)\{([a-z_,]+)\}`", section)
    }


def samples(metrics: dict[str, str]) -> dict[str, str]:
    """Return the metric of each name that a query can use."""
    found = {}
    for name, kind in metrics.items():
        for suffix in {
            "counter": ["_total"],
            "histogram": ["_bucket", "_sum", "_count"],
        }.get(kind, [""]):
            found[name + suffix] = name if kind == "histogram" else name + suffix
    return found


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_uses_metrics_and_labels_that_exist(
    query: str, metrics: dict[str, str], labels: dict[str, set[str]]
) -> None:
    names = re.findall(r"guided_\w+", query)
    assert names
    known = samples(metrics)
    assert set(names) <= known.keys()
    allowed = (
        ADDED
        | {"le"}
        | set().union(*(labels.get(known[name], set()) for name in names))
    )
    used = {
        label
        for group in re.findall(r"by \(([^)]*)\)", query)
        for label in re.split(r",\s*", group)
    }
    used |= {
        label
        for text in re.findall(r"\{([^}]*)\}", query)
        for label in re.findall(r"(\w+)\s*[=!]~?\s*\"", text)
    }
    assert used <= allowed
    assert query.count("(") == query.count(")")
    assert ("le" in used) == ("histogram_quantile" in query)
    counters = [
        name
        for name in names
        if not name.endswith("_bucket") and known[name].endswith("_total")
    ]
    assert all(re.search(rf"(rate|increase)\({name}\b", query) for name in counters)


def test_every_alert_leads_to_a_section_of_the_runbook() -> None:
    assert len(ALERTS) >= 8
    for alert in ALERTS:
        page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
        assert anchor in {
            re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
            for heading in headings
        }, alert["alert"]
