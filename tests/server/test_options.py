"""The command line and the Ray Serve application take the same options, with the same
default values."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from deploy.arguments import RESOURCES, Arguments
from engine.server.commands.serve import serve
from engine.server.options import OPTIONS, ServeOptions, ServerSettings, take_api_key


def test_the_command_line_has_every_option_with_its_default() -> None:
    parameters = dict(inspect.signature(serve).parameters)
    parameters.pop("config")
    assert parameters.keys() == {option.name for option in OPTIONS}
    assert len(parameters) == len(OPTIONS) <= 45
    assert (
        ServeOptions.from_flat({name: one.default for name, one in parameters.items()})
        == ServeOptions()
    )


def test_ray_serve_has_every_option_but_those_it_sets_itself() -> None:
    own = {"host", "port", "api_key", "ray_address"}
    assert {option.name for option in OPTIONS if option.process_only} == own
    assert (
        Arguments.model_fields.keys()
        == {option.name for option in OPTIONS} - own | RESOURCES.keys()
    )
    assert (
        ServeOptions.from_flat(
            Arguments.model_validate({}).model_dump(exclude=set(RESOURCES))
        )
        == ServeOptions()
    )
    with pytest.raises(ValidationError, match="api_key"):
        Arguments.model_validate({"api_key": "secret"})


def test_keys_come_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo, three\n")
    monkeypatch.setenv("GUIDED_API_KEY", "four")
    options = take_api_key(ServeOptions(server=ServerSettings(api_key_file=str(file))))
    assert options.server.api_keys == ("one", "two", "three")
    assert "GUIDED_API_KEY" not in os.environ
    monkeypatch.setenv("GUIDED_API_KEY", "four")
    assert take_api_key(ServeOptions()).server.api_keys == ("four",)
    file.write_text("\n")
    with pytest.raises(ValueError, match="no key in the file"):
        take_api_key(ServeOptions(server=ServerSettings(api_key_file=str(file))))
