"""Pure decisions: which group starts, what a step takes, what a cell runs next, where every token ended.

Nothing here does I/O, reads a clock or imports torch, so that a simulator and the real line run the same
decisions.
"""

from headrace.schedule.admission import Admission
from headrace.schedule.assignments import Assignments
from headrace.schedule.ledger import Bucket, Ledger
from headrace.schedule.matching import DecodeCost, LineCounts, plan, worth_starting
from headrace.schedule.returns import ReturnTimes
from headrace.schedule.threads import ThreadShare
from headrace.schedule.units import UnitKind

__all__ = [
    "Admission",
    "Assignments",
    "Bucket",
    "DecodeCost",
    "Ledger",
    "LineCounts",
    "ReturnTimes",
    "ThreadShare",
    "UnitKind",
    "plan",
    "worth_starting",
]
