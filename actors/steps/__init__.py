"""The step path: new tokens to the workers, masks back.

`dispatcher.Dispatcher`, which `RayPool` calls, is the engine's side; `server.StepServer` is the actor's. What travels
between the two is in `protocol`.
"""
