"""Supervision of mask actors. `supervisor.Supervisor` keeps one of a pool's actors alive; `mask_actor` is the actor."""
