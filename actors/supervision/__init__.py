"""Supervision of mask actors: a `Supervisor` keeps one actor of the pool alive."""
