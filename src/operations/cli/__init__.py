"""The commands of the command line: one file per command. `app` has the table of them.

    command -> Session: config -> hub of sources -> registry -> screen

A command parses, calls one library function, and renders.
"""
