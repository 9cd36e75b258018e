"""The fixture of tests/engine: an engine over the tiny model."""

from tests.engine.conftest import make_engine as make_engine
