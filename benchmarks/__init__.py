"""The benchmark suite: one module per row, run as `make bench ROW=name`."""
