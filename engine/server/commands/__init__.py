"""The commands of `guided`, one module each. Slow imports are in their functions, so
that `--help` is quick."""
