"""Three ways to say what a handoff kept, from the scores of the conditions.

With `handoff`, `target`, `source` and `floor` the scores of the handoff, the target alone, the source alone and no
context:

    retention                   handoff / target
    floor-normalised retention  (handoff - floor) / (target - floor)
    share of the gap recovered  (handoff - source) / (target - source)

The last one is the headline. A router moves to the larger model to get what it knows beyond the smaller one; a handoff
can keep 86 % of the target's score where the source alone already had 83 % of it, which recovers a fifth of the gap.
"""

from __future__ import annotations

import math


def retention(handoff: float, target: float) -> float | None:
    """Score after the handoff as a share of the target's own; None where the target scores nothing."""
    return handoff / target if _finite(handoff, target) and target > 0 else None


def floor_normalised_retention(handoff: float, target: float, floor: float) -> float | None:
    """Share of the target's advantage over no context that the handoff keeps; None where it has no advantage."""
    return (handoff - floor) / (target - floor) if _finite(handoff, target, floor) and target > floor else None


def gap_recovered(handoff: float, target: float, source: float, *, higher_is_better: bool = True) -> float | None:
    """Share of the gap between the source alone and the target alone that the handoff recovers.

    Negative where the handoff is worse than the source, above 1 where it is better than the target.

    Args:
        handoff, target, source: the scores of the three.
        higher_is_better: False for losses such as the continuation NLL.

    Returns:
        The share, or None where the target is not better than the source, so that there is no gap to recover.
    """
    sign = 1.0 if higher_is_better else -1.0
    gap = sign * (target - source)
    return sign * (handoff - source) / gap if _finite(handoff, target, source) and gap > 0 else None


def _finite(*values: float) -> bool:
    return all(value is not None and math.isfinite(value) for value in values)
