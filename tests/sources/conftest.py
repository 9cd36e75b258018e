"""The fixtures of tests/engine: the tiny model, and an engine over it."""

from tests.engine.conftest import make_engine as make_engine
from tests.engine.conftest import tiny_model as tiny_model
