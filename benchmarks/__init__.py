"""The benchmark suite: headrace against its peers and against what the machine allows. See `suite.py`."""
