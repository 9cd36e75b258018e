"""Whether constraints compile, and what is enforced of them, without an engine."""
