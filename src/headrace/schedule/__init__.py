"""Pure decisions: which group starts, what a step takes, what a cell runs next, where every token ended.

Nothing here does I/O, reads a clock or imports torch, so that a simulator and the real line run the same
decisions.
"""

from headrace.schedule.admission import Admission
from headrace.schedule.ledger import Bucket, Ledger
from headrace.schedule.matching import DecodeCost, LineState, Unit, next_unit, worth_starting
from headrace.schedule.returns import ReturnTimes
from headrace.schedule.threads import ThreadShare

__all__ = [
    "Admission",
    "Bucket",
    "DecodeCost",
    "Ledger",
    "LineState",
    "ReturnTimes",
    "ThreadShare",
    "Unit",
    "next_unit",
    "worth_starting",
]
