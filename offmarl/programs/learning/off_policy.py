"""Arguments of recorders that learn from the buffer that they record."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import PRNGKeyArray

from offmarl.config import Fraction, NonNegativeInt, Positive, PositiveInt
from offmarl.programs.experience.buffer import Capture
from offmarl.programs.experience.windows import draw_windows
from offmarl.programs.learning.learner import NetworkArgs
from offmarl.types import Sequence


@dataclass(frozen=True)
class OffPolicyArgs(NetworkArgs):
    """Arguments of recorders that learn from a replay of their steps."""

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


def draw_steps(args: OffPolicyArgs, capture: Capture, key: PRNGKeyArray) -> Sequence:
    """Draw a batch of windows."""
    return draw_windows(capture, key, args.windows, args.window, args.burn_in)
