"""The production line: the only room that knows all the others."""

from headrace.line.line import Line
from headrace.line.observer import Evaluation, LineResult, LineStatus, Observer

__all__ = ["Evaluation", "Line", "LineResult", "LineStatus", "Observer"]
