"""The step path: new tokens to the workers, masks back.

`Dispatcher` is the engine's entry point, `actors.steps.server.StepServer` the actor's. The columns and messages between
the two are in `actors.steps.protocol`.
"""

from actors.steps.dispatcher import Dispatcher

__all__ = ["Dispatcher"]
