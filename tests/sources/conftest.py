"""The fixtures of tests/engine: the tiny model, an engine over it, and runs to the end."""

from tests.engine.conftest import _finish as _finish
from tests.engine.conftest import _run as _run
from tests.engine.conftest import make_engine as make_engine
from tests.engine.conftest import tiny_model as tiny_model
