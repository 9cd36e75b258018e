"""Compilation of constraints: `Grammars` compiles them, caches the results and installs them on mask actors."""
