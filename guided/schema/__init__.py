"""JSON Schema: is it one (`document`), what does it mean (`graph`, `normal_form`), and what is that as a regex.

Nothing here knows a grammar library; what each of those can enforce is said in its adapter, in `guided.backends`.
"""
