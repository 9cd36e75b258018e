"""Regular expressions: their tree, parser and automata."""
