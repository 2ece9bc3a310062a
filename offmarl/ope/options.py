"""Options of off-policy evaluation, apart from what computes: the command line imports them."""

from dataclasses import dataclass

from offmarl.config import Fraction, Positive, PositiveInt, Role, Seed, Validated, option


@dataclass(frozen=True)
class Options(Validated):
    """How policies are evaluated from data."""

    gamma: Fraction = 1.0
    """Discount of rewards; 1 as in returns."""
    episodes: PositiveInt | None = None
    """Largest number of episodes to use, evenly spread over the data; by default all."""
    hidden: PositiveInt = 128
    """Width of the critic's layers. Narrow critics take policies that differ from the data's for
    better than they are."""
    updates: PositiveInt = 2_000
    """Gradient updates of the critics. With fewer, policies that differ from the data's seem better
    than they are."""
    batch_size: PositiveInt = option(128, Role.RARE)
    """Steps in a batch."""
    learning_rate: Positive = option(1e-3, Role.RARE)
    """Adam's step size at first; it decreases linearly to 0."""
    tau: Positive = option(0.05, Role.RARE)
    """How far each update brings the target critics to the critics."""
    members: PositiveInt = 5
    """Critics that learn from resampled episodes, for the interval; fewer than 3 for none."""
    seed: Seed = 0
    """Random seed."""
