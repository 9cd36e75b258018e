"""The step path: new tokens to the workers, masks back.

`Dispatcher`, which `RayPool` calls, is the engine's side; `actors.steps.server.StepServer` is the actor's. The columns
and messages between the two are in `actors.steps.protocol`.
"""

from actors.steps.dispatcher import Dispatcher

__all__ = ["Dispatcher"]
