"""Arguments of recorders that learn from the buffer that they record."""

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from offmarl.config import Fraction, NonNegative, NonNegativeInt, Positive, PositiveInt
from offmarl.programs.experience.buffer import Capture
from offmarl.programs.experience.windows import draw_windows
from offmarl.programs.learning.learner import NetworkArgs
from offmarl.programs.program import VALUES, Hyperparameters, unit_scale
from offmarl.teams import largest_return, teams_of
from offmarl.types import EnvSpec, Sequence, Transition

StateT = TypeVar("StateT", bound=Any)


@dataclass(frozen=True)
class OffPolicyArgs(NetworkArgs):
    """Arguments of recorders that learn from a replay of their steps.

    A recorder gives each rollout to `fit_unit`, which returns the factor of rewards in use.
    """

    network: Literal["feedforward", "recurrent"] = "feedforward"
    """Networks of the policies: without a memory, or with one (a GRU). Critics have none."""
    num_steps: PositiveInt = 25
    """Time steps in each environment between rounds of updates."""
    updates: PositiveInt = 16
    """Gradient updates in a round."""
    capacity: PositiveInt = 8192
    """Time steps that the replay holds of each environment. A large replay holds fewer where
    episodes have fewer than eight steps on average."""
    batch_size: PositiveInt = 512
    """Steps in a batch."""
    length: PositiveInt | None = None
    """Steps in a window, which a batch consists of: by default 1, or 20 for recurrent networks."""
    burn_in: NonNegativeInt = 0
    """Steps added before each window's that only fill the memory of recurrent networks: they do not
    count in losses."""
    learning_rate: Positive = 1e-3
    """Adam's step size, of all networks."""
    gamma: Fraction = 0.95
    """Discount."""
    reward_scale: NonNegative = 0.0
    """Factor of the rewards that are learned from; recorded rewards are not scaled. 0: such that
    the largest absolute discounted sum of rewards in an episode so far is 20, the unit of
    baselines."""
    tau: Fraction = 0.01
    """Fraction by which the target networks move to the learned ones in each of their updates."""
    max_grad_norm: Positive = 10.0
    """Global norm that gradients are clipped to."""

    @property
    def window(self) -> int:
        """Steps in a window that count."""
        return self.length or (20 if self.network == "recurrent" else 1)

    @property
    def windows(self) -> int:
        """Windows in a batch, which hold ``batch_size`` steps together."""
        return -(-self.batch_size // self.window)

    @property
    def replay_steps(self) -> int:
        """Time steps of the replay: at least those between rounds of updates."""
        return max(self.capacity, self.num_steps)


def no_rewards(spec: EnvSpec, num_envs: int) -> dict[str, Any]:
    """Return the ``totals``, of each agent, and the ``largest_return`` of a fresh state."""
    return {
        "totals": jnp.zeros((num_envs, spec.num_agents)),
        "largest_return": jnp.zeros(()),
    }


def draw_steps(args: OffPolicyArgs, capture: Capture, key: PRNGKeyArray) -> Sequence:
    """Draw a batch of windows."""
    return draw_windows(capture, key, args.windows, args.window, args.burn_in)


def fit_unit(
    spec: EnvSpec, state: StateT, steps: Transition, hyper: Hyperparameters
) -> tuple[StateT, Hyperparameters]:
    """Add a rollout to a state's ``totals`` and ``largest_return``.

    Returns the state, and the hyperparameters with the factor of rewards in use. Sums are
    discounted as values are: the return of a thousand steps is far larger than any value.
    """
    totals, sums = running_sums(state.totals, steps, hyper.gamma)
    largest = largest_return(sums, teams_of(spec), state.largest_return)
    scale = jnp.where(hyper.reward_scale > 0, hyper.reward_scale, unit_scale(largest))
    hyper = Hyperparameters(**vars(hyper) | {"reward_scale": scale})
    return state._replace(totals=totals, largest_return=largest), hyper


def running_sums(
    totals: Float[Array, "E N"], steps: Transition, discount: Array | float = 1.0
) -> tuple[Float[Array, "E N"], Float[Array, "T E N"]]:
    """Return the sums of the episodes' rewards after some steps, and up to each of them.

    ``totals`` are those before them.
    """

    def after_step(totals: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        reward, last = step
        sums = discount * totals + reward
        return jnp.where(last[:, None], 0.0, sums), sums

    after: tuple[Array, Array] = jax.lax.scan(after_step, totals, (steps.reward, steps.last))
    return after


def mean_metrics(metrics: dict[str, Array], hyper: Hyperparameters) -> dict[str, Array]:
    """Return the means of the metrics of a round, with values in the environment's unit."""
    means, scale = jax.tree.map(jnp.mean, metrics), hyper.reward_scale
    values = {name: means[name] / scale for name in VALUES if name in means}
    return {**means, **values, "reward_scale": scale}
