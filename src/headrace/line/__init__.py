"""The production line: the only room that knows all the others.

Invariant: importing this package imports nothing, so that a command loads only what it uses.
"""
