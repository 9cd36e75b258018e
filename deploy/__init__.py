"""The Ray Serve application and its configuration, for operators."""
