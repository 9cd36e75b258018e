"""Compilation of constraints. `grammars.Grammars` compiles them, caches the results and has mask actors load them."""
