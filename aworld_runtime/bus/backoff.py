"""How long to wait before something that failed is tried again."""

from __future__ import annotations

import random

FIRST_S = 0.5
LONGEST_S = 60.0


def backoff_s(failures: int, *, chance: random.Random | None = None) -> float:
    """Seconds after so many failures: anything up to a bound that doubles with each.

    Full jitter: those that failed together don't come back together.
    """
    bound = min(LONGEST_S, FIRST_S * 2 ** min(max(failures - 1, 0), 30))
    return (chance or random).uniform(0, bound)
