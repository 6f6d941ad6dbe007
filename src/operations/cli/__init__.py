"""The commands of the command line: `app` has the table of them.

    command -> Session: config -> hub of sources -> registry -> screen

A command parses, calls one library function, and renders.
"""
