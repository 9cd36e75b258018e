"""JSON Schema: validation (`document`), meaning (`graph`, `normal_form`), and regexes for strings and numbers.

Nothing here depends on a grammar library. The adapters in `guided.backends` know what each library can enforce.
"""
