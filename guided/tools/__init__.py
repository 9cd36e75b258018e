"""Tool calls and thinking phases: how each family of models writes them, and the parser
of such outputs."""
