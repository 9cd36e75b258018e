"""The commands of `guided`, one module each. They import what is slow in their functions, so that help is quick."""
