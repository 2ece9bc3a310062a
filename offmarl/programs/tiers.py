"""Quality tiers: which checkpoint of an online run stands for which."""

from collections.abc import Sequence

from offmarl.errors import unknown_name

FRACTIONS = {"poor": 0.25, "medium": 0.5, "good": 0.75}
"""How much of the way from random to expert a tier's checkpoint has come."""

REPLAY_TIERS = ("replay", "medium-replay")
"""Training data: all of it, and that up to the medium checkpoint, which is cut from the former."""

TIERS = ("random", *FRACTIONS, "expert", *REPLAY_TIERS)
"""``random``: an untrained policy, uniform over legal actions. ``expert``: the best checkpoint.
Those of `REPLAY_TIERS`: training data. The others: by `FRACTIONS`."""


def parse_tiers(text: str) -> list[str]:
    """Read names of tiers, separated by commas; `UnknownNameError` for one that is not a tier."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in TIERS:
            raise unknown_name("tier", name, TIERS)
    return list(dict.fromkeys(names))


def first_to_reach(fraction: float, returns: Sequence[float], random: float, expert: float) -> int:
    """Return the index of the first checkpoint that is a fraction of the way to the expert.

    Parameters
    ----------
    fraction
        Of the way from random to expert.
    returns
        Mean return of each checkpoint, in the order of training.
    random, expert
        Mean returns of the random policy and of the best checkpoint, the latter evaluated anew:
        the best of many noisy estimates is too high. It may thus come out above every checkpoint;
        where none reaches the threshold, the best stands in.
    """
    threshold = random + fraction * (expert - random)
    reached = (index for index, value in enumerate(returns) if value >= threshold)
    return next(reached, best(returns))


def best(returns: Sequence[float]) -> int:
    """Return the index of the best checkpoint; the first of equals."""
    return max(range(len(returns)), key=returns.__getitem__)
