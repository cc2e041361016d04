"""What a run is on paper: its events, the state they fold to, its folder, and what readers make of them.

Invariant: importing this package imports nothing, so that what only reads runs needs no torch.
"""
