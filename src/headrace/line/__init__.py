"""The production line: the only room that knows all the others.

Invariant: importing this package imports nothing, so that what only reads runs needs no torch.
"""
