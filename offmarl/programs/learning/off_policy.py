"""Arguments of recorders that learn from the buffer that they record."""

from dataclasses import dataclass
from typing import ClassVar

from offmarl.config import Fraction, Positive, PositiveInt
from offmarl.networks import AgentId
from offmarl.programs.learning.optimisers import ScheduleKind
from offmarl.programs.program import OnlineArgs


@dataclass(frozen=True)
class OffPolicyArgs(OnlineArgs):
    """Arguments of recorders that learn from a replay of their steps."""

    default_capacity: ClassVar[int] = 8192
    """The capacity that is chosen where there is memory for it."""

    num_steps: PositiveInt = 25
    """Time steps in each environment between rounds of updates."""
    updates: PositiveInt = 16
    """Gradient updates in a round."""
    capacity: PositiveInt | None = None
    """Time steps that the replay holds of each environment: by default 8192, or as many as fit into
    half of the device's memory. A large replay holds fewer where episodes have fewer than eight
    steps on average."""
    batch_size: PositiveInt = 512
    """Steps in a batch."""
    learning_rate: Positive = 1e-3
    """Adam's step size, of all networks."""
    schedule: ScheduleKind = "constant"
    """How the step size changes over the training: not at all, or down to zero at its end, along a
    line or half a cosine."""
    gamma: Fraction = 0.95
    """Discount."""
    reward_scale: Positive = 1.0
    """Factor of the rewards that are learned from; the recorded ones keep their scale."""
    tau: Fraction = 0.01
    """Fraction by which the target networks move to the learned ones in each of their updates."""
    max_grad_norm: Positive = 10.0
    """Global norm that gradients are clipped to."""
    hidden: PositiveInt = 64
    """Width of the networks' layers."""
    share_parameters: bool = True
    """Share the networks among the agents, instead of networks for each."""
    agent_id: AgentId = "onehot"
    """With --share-parameters, how the networks distinguish the agents. onehot: by their index,
    which ties them to their number; sinusoidal: by 16 sines and cosines of their place in the team;
    none: not at all."""

    @property
    def replay_steps(self) -> int:
        """Time steps of the replay: at least those between rounds of updates."""
        return max(self.capacity or self.default_capacity, self.num_steps)
