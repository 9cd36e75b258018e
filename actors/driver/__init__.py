"""Ray's driver as a process of its own. `client.Driver` is the engine's side of it, `process` the process itself."""
