"""Arguments of proximal policy optimisation."""

from dataclasses import dataclass
from typing import Literal

from offmarl.config import Fraction, Layers, NonNegative, NonNegativeInt, Positive, PositiveInt
from offmarl.errors import OptionError
from offmarl.networks import Activation, PolicyConfig, stochastic_head
from offmarl.programs.learning import learner
from offmarl.programs.learning.optimisers import ScheduleKind
from offmarl.types import Continuous, EnvSpec


@dataclass(frozen=True)
class PPOArgs(learner.NetworkArgs):
    """Arguments of proximal policy optimisation."""

    num_steps: PositiveInt = 64
    """Time steps in each environment between updates."""
    epochs: PositiveInt = 4
    """Passes over the steps of an update."""
    minibatches: PositiveInt = 4
    """Minibatches in a pass."""
    network: Literal["feedforward", "recurrent"] = "feedforward"
    """Kind of the actor and of the critic; recurrent networks have a GRU."""
    length: PositiveInt | None = None
    """Steps in a window that recurrent networks learn from; must divide num_steps, which is the
    default."""
    learning_rate: Positive = 7e-4
    """Adam's step size, of actor and critic."""
    gamma: Fraction = 0.99
    """Discount."""
    gae_lambda: Fraction = 0.95
    """λ of generalised advantage estimation: trades bias for variance."""
    clip: Positive = 0.2
    """ε, the largest relative change of an action's probability in an update."""
    clip_value: bool = False
    """Also limit the change of a value in an update to ε."""
    huber: Positive | None = None
    """Error beyond which the value loss grows linearly (Huber loss); by default it is the square.
    """
    value_weight: NonNegative = 1.0
    """Weight of the value loss."""
    normalise_values: bool = True
    """Learn values relative to the running mean and deviation of the returns."""
    normalise_advantages: bool = True
    """Shift and scale the advantages of each minibatch to mean 0 and deviation 1."""
    entropy: NonNegative = 0.01
    """Weight of the entropy bonus."""
    entropy_schedule: ScheduleKind = "constant"
    """How that weight changes over the training."""
    max_grad_norm: Positive = 0.5
    """Global norm that gradients are clipped to."""
    clip_separately: bool = False
    """Clip the gradients of actor and critic each by their own norm, and not by the norm of both.
    """
    shaped_rewards: Fraction | None = None
    """Also learn from the environment's shaped rewards, such as Overcooked's. Their weight falls
    from 1 to 0 over this fraction of the training. They are not recorded."""
    tanh: bool = False
    """Use a tanh-squashed Gaussian for continuous actions instead of a clipped one."""
    layers: Layers | None = None
    """Hidden layers of each network: by default 2, or 1 beside a GRU."""
    activation: Activation = "relu"
    """Function after each hidden layer."""


@dataclass(frozen=True)
class OffPolicyPPOArgs(PPOArgs):
    """Arguments of actor-critics that learn from the steps of their earlier policies."""

    lag: NonNegativeInt = 1
    """Updates by which the policy that acts is behind the one that learns."""
    correct: bool = True
    """Correct for that by V-trace. Otherwise the steps count as if the policy that learns had taken
    them, as in a plain actor-critic."""
    num_steps: PositiveInt = 16
    """Time steps in each environment between updates."""
    epochs: PositiveInt = 1
    """Passes over the steps of an update."""
    minibatches: PositiveInt = 1
    """Minibatches in a pass."""
    gae_lambda: Fraction = 1.0
    """λ of V-trace: trades bias for variance."""
    normalise_advantages: bool = False
    """Shift and scale the advantages of each minibatch to mean 0 and deviation 1."""


def policy_config(spec: EnvSpec, args: PPOArgs) -> PolicyConfig:
    """Return the description of the actor; the critic has its kind and sizes."""
    if args.tanh and not isinstance(spec.action, Continuous):
        raise OptionError(
            f"--tanh is for continuous actions, and {spec.name} has discrete ones: leave it out."
        )
    head = stochastic_head(spec, "tanh_gaussian" if args.tanh else "gaussian")
    return learner.policy_config(args, head)


def window_length(args: PPOArgs) -> int:
    """Return the length of the windows to learn from; `OptionError` if arguments do not fit."""
    length = (args.length or args.num_steps) if args.network == "recurrent" else 1
    if args.length is not None and args.network == "feedforward":
        raise OptionError(
            f"--length {args.length} is for recurrent networks: feed-forward ones learn from "
            "single steps. Leave it out, or give --network recurrent."
        )
    if args.num_steps % length:
        raise OptionError(
            f"--num-steps {args.num_steps} is not divisible into windows of --length {length}: "
            "give a length that divides it."
        )
    windows = args.num_envs * args.num_steps // length
    if args.minibatches > windows:
        raise OptionError(
            f"{args.num_envs} environments of {args.num_steps} steps are {windows} windows to "
            f"learn from, which cannot be divided into {args.minibatches} minibatches: give fewer "
            "minibatches, or more environments or steps."
        )
    return length
