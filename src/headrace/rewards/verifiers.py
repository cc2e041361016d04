"""Verifiers of free text: what was answered, and whether it equals the reference.

Invariant: a verifier never raises on a completion, whatever the policy wrote.
"""

from __future__ import annotations

import re

_MAX_DIGITS = 4000
"""Longer digit strings are no answer (and Python refuses to convert them)."""

_NUMBER = re.compile(
    r"""
    (?P<sign>(?<![\w)\]])[+\-\u2212])?              # not an operator: 4-3, x-3 and (1)-3 hold a positive 3
    (?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])    # 1,000,000
              |[0-9]+)
    (?P<fraction>\.[0-9]+)?                         # a decimal is one number, and no integer
    """,
    re.VERBOSE,
)


def last_integer(text: str) -> int | None:
    """The last integer written in `text`, or None if there is none.

    * A sign (`+`, `-` or U+2212) counts when it touches the digits and no letter, digit, `)` or `]` stands
      before it: `-3` is -3 and `= -3` is -3, while `4-3` ends in 3 and so does `4 - 3`.
    * Commas between groups of three digits are thousands separators: `1,000` is 1000, and `1,2` ends in 2.
    * A decimal such as `7.5` is skipped as a whole; a full stop (`It is 7.`) is no decimal point.
    * Digits need no space around them: `x=12cm` holds 12. Numbers of more than 4000 digits are skipped.
    """
    for match in reversed(list(_NUMBER.finditer(text))):
        digits = match["digits"].replace(",", "")
        if match["fraction"] is None and len(digits) <= _MAX_DIGITS:
            return -int(digits) if match["sign"] in ("-", "\u2212") else int(digits)
    return None


def exact_match(completion: str, answer: str, *, ignore_case: bool = False) -> bool:
    """Whether both texts are equal once the white space around them is removed."""
    left, right = completion.strip(), answer.strip()
    return left.casefold() == right.casefold() if ignore_case else left == right
