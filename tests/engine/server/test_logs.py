"""Log records as JSON, with the ids of the request that they are about."""

from __future__ import annotations

import json

import pytest
from hosting import hosted

from engine.model.loader import LoadedModel
from engine.server.logs import JsonFormatter


def test_a_failed_request_is_one_line_with_its_ids(
    tiny_model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with hosted(tiny_model) as server:
        server.pool.fails = lambda sequence_id, position: True
        answer = server.post(regex="[a-z]{5}")
    assert answer.status_code == 500
    (record,) = [record for record in caplog.records if record.name == "guided.server"]
    record.exc_info = (ValueError, ValueError('with "quotes"\nand lines'), None)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    fields = json.loads(line)
    assert fields["x_request_id"] == answer.headers["x-request-id"]
    assert fields["request_id"] in fields["message"]
    assert fields["traceback"] == 'ValueError: with "quotes"\nand lines'
    assert (fields["level"], fields["code"], fields["logger"]) == (
        "warning",
        "backend_error",
        "guided.server",
    )
