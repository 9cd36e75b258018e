"""Log records as JSON, with the ids of the request that they are about."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from hosting import Hosted, hosted

from engine.model_loader import LoadedModel
from engine.server.logs import formatter


@pytest.fixture
def server(tiny_model: LoadedModel) -> Iterator[Hosted]:
    with hosted(tiny_model) as running:
        yield running


def test_a_failed_request_is_one_line_with_its_ids(server: Hosted, caplog: pytest.LogCaptureFixture) -> None:
    server.pool.fails = lambda sequence_id, position: True
    answer = server.post(regex="[a-z]{5}")
    assert answer.status_code == 500
    (record,) = [record for record in caplog.records if record.name == "guided.server"]
    line = formatter("json").format(record)
    assert "\n" not in line
    fields = json.loads(line)
    assert fields["x_request_id"] == answer.headers["x-request-id"]
    assert fields["request_id"] in fields["message"]
    assert (fields["level"], fields["code"], fields["logger"]) == ("warning", "backend_error", "guided.server")


def test_a_traceback_stays_within_the_line(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError('with "quotes"\nand lines')
    except ValueError:
        logging.getLogger("guided.server").exception("request %s failed", "r-1")
    (record,) = caplog.records
    line = formatter("json").format(record)
    assert "\n" not in line
    assert 'ValueError: with "quotes"\nand lines' in json.loads(line)["traceback"]
    assert "request r-1 failed" in formatter("text").format(record)
