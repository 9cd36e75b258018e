"""The guard: what a grammar library does not enforce of a JSON constraint, checked on the JSON text as it is generated.

The library enforces a superset of the schema (`plan`). Beside its matcher, a state follows the JSON text (`text`), and
the rules of the objects and arrays around it (`rules`) veto the tokens that would close a key or a value in violation.
Nothing here depends on a library: `guided.backends.guarded` puts the guard over any of them.
"""
