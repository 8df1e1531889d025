"""Kills programs that save what they do, at failpoints or at random moments, and shows that they resume.

The program tells a :class:`Journal` what it does; :class:`Trials` runs it, ends its lives, and compares.
"""

from raydist.testing.resuming.digests import state_digest
from raydist.testing.resuming.journal import Account, Journal
from raydist.testing.resuming.lives import ForkedLives, FreshLives, Lives, TrialProgram
from raydist.testing.resuming.trials import (
    AfterBegin,
    AfterSeconds,
    AtFailpoint,
    TrialReport,
    Trials,
    random_deaths,
)

__all__ = [
    "Account",
    "AfterBegin",
    "AfterSeconds",
    "AtFailpoint",
    "ForkedLives",
    "FreshLives",
    "Journal",
    "Lives",
    "TrialProgram",
    "TrialReport",
    "Trials",
    "random_deaths",
    "state_digest",
]
