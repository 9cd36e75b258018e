"""JSON Schema: validation (`document`), canonical form (`canonical`), and regexes for
strings.

Nothing here depends on a grammar library. The adapters in `guided.backends` know what
each library can enforce.
"""
