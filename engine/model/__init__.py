"""The model: loaded, probed and run with paged attention."""
