"""What a program is: arguments, and pure functions of one seed over plain state.

A program is a file with ``Args``, ``make`` and ``main``. The loop that all programs share does the
rest: sampling, seeds, evaluation, logging, checkpoints, resuming and loading the policy. This is a
complete baseline::

    '''Majority: each agent does what it did most often in the data.'''

    from dataclasses import dataclass
    from functools import partial
    from pathlib import Path

    import jax.numpy as jnp

    from offmarl import cli, programs
    from offmarl.config import Fraction
    from offmarl.types import EnvSpec, Policy


    @dataclass(frozen=True)
    class Args(programs.Args):
        '''Majority.'''

        decay: Fraction = 0.99
        '''Share of the counts that an update keeps.'''


    def make(spec: EnvSpec, args: Args, dataset: programs.DatasetStatistics) -> programs.Program:
        '''Build the program for one dataset.'''

        def init(key, hyper):
            return jnp.zeros((spec.num_agents, spec.num_actions))

        def update(counts, batch, key, hyper):
            taken = jnp.eye(spec.num_actions)[batch.action] * batch.mask[..., None, None]
            counts = hyper.decay * counts + taken.sum((0, 1))
            return counts, {"steps": batch.mask.sum()}

        def policy(greedy):
            def act(counts, carry, observation, legal_actions, key):
                action = jnp.where(legal_actions, counts, -1).argmax(-1)
                return action, jnp.zeros(spec.num_agents), carry

            return Policy(tuple, act, draws=lambda counts: False)

        return programs.Program(init, (programs.Stage(update),), policy, lambda counts: counts)


    def main(args: Args) -> Path:
        '''Train, evaluate and write the run; return its directory.'''
        return programs.train(make, args)


    if __name__ == "__main__":
        with cli.exit_codes():
            main(cli.parse_script(Args, __doc__))

`offmarl train path/to/majority.py --vault ...` trains it, wherever the file is. A recorder derives
its ``Args`` from `OnlineArgs`, gets an environment as the third argument of ``make``, collects
steps in ``update`` (see `Program.num_steps`), and calls `record_online`.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from offmarl.config import (
    REPEATED,
    BurnIn,
    DeviceArgs,
    Fraction,
    NonNegative,
    Positive,
    PositiveInt,
    Role,
    Seed,
    SeedCount,
    Share,
    Updates,
    Validated,
    Vaults,
    WindowLength,
    float_fields,
    option,
    with_role,
)
from offmarl.paths import hide_all_credentials
from offmarl.programs.registry import origin_of
from offmarl.settings import fill
from offmarl.types import ArrayTree, Policy, View

ArgsT = TypeVar("ArgsT", bound=Validated)

Keep = Literal["last", "best", "all"]
"""Which checkpoints of its evaluations a baseline keeps."""

TD_ERRORS = "td_errors"
"""Name of the temporal-difference errors ``(B, T)`` among the metrics of an update. They are not
logged; prioritised replay draws windows by them."""

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True, kw_only=True)
class _Configurable(DeviceArgs):
    """Base of programs' arguments, which `offmarl.settings` can fill in."""

    track: Annotated[tuple[str, ...], REPEATED] = option(
        (), Role.FREE | Role.LOCAL | Role.UNTUNED | Role.RARE
    )
    """Tracker that gets the metrics, too: tensorboard, mlflow, wandb or trackio, each by default
    offline; NAME=TARGET says where, such as mlflow=sqlite:///runs.db. Give the option once for each
    tracker."""
    checkpoint_seconds: NonNegative = option(30.0, Role.FREE | Role.UNTUNED | Role.RARE)
    """Seconds between checkpoints; Ctrl-C and SIGTERM save one before the program stops."""
    take_over: bool = option(False, Role.CASE | Role.FREE | Role.RARE)
    """Write a run although a process of another machine has not released it. Do so only if that
    process has ended."""

    @classmethod
    def for_env(
        cls: type[ArgsT], env: str, /, settings: str | Path | None = None, **given: Any
    ) -> ArgsT:
        """Return arguments with the values that offmarl's settings files hold for an environment.

        ``Args(...)`` does not read these files.
        """
        if issubclass(cls, OnlineArgs):
            given["env"] = env
        origin = origin_of(cls)
        return fill(cls, origin.name, env, given, settings, origin.file is None)


@dataclass(frozen=True)
class Args(_Configurable):
    """Arguments that all offline programs share."""

    vault: Vaults = field(metadata={"roles": Role.CASE | Role.TRACED | Role.LOCAL})
    """Dataset to learn from: a vault such as vaults/swarm/coverage-3.vlt/mappo-0-medium, or the
    name of a pulled dataset. Several are mixed: PATH=SHARE ..., for example
    coverage-3.vlt/mappo-0-expert=0.7 coverage-3.vlt/mappo-0-random=0.3, or without shares by their
    sizes."""
    weight: str | None = option(None, Role.LEARNS | Role.RARE)
    """Draw steps by weight: "return", "length" or "policy" of their episodes, "reward", the name of
    an extra, or a function as path/to/file.py:FUNCTION, which returns a number for each episode or
    step. By default all weigh the same."""
    weight_temperature: Positive | None = option(None, Role.LEARNS | Role.RARE)
    """Weigh by exp(x / temperature), with x scaled to [0, 1]; by default 0.1 for returns, while
    other numbers are the weights."""
    prioritise: Fraction | None = option(None, Role.LEARNS | Role.RARE)
    """Draw windows by their temporal-difference errors to this power: 0.6 is usual; by default they
    are drawn without regard to errors. For programs that compute such errors."""
    time_limit: PositiveInt | None = option(None, Role.TRACED | Role.RARE)
    """For a vault of another program that flags the time limit as a termination: the limit in
    steps, by default the one that `offmarl pull` stored."""
    env: str | None = option(None, Role.CASE)
    """Environment to evaluate in; by default the one the dataset was recorded in, if offmarl has
    it. "none": do not evaluate in an environment. Code of your own is given as
    path/to/file.py:FACTORY or package.module:FACTORY."""
    validation: Path | None = option(None, Role.CASE | Role.TRACED)
    """Vault of held-out episodes, such as `offmarl split` writes. The policy's agreement with their
    actions is evaluated, too; this needs no environment."""
    held_out: Fraction | None = None
    """Fraction of the vault's episodes to hold out instead; always the same episodes. By default
    0.1 if there is neither an environment nor --validation, and 0 otherwise."""
    out: Path | None = option(None, Role.CASE | Role.FREE | Role.LOCAL)
    """Directory of the run; by default runs/ENVIRONMENT/VAULT/PROGRAM."""
    seeds: SeedCount = option(1, Role.CASE | Role.UNTUNED)
    """Number of independent training seeds; one process trains them all, into one directory."""
    seed: Seed = option(0, Role.CASE)
    """The first of the seeds."""
    batching: Literal["auto", "map", "vmap"] = option("auto", Role.FREE | Role.RARE)
    """How several seeds share a device. "map": one after the other in one compiled loop; "vmap":
    side by side; "auto": map on CPUs, where it is faster, and vmap elsewhere. With map, the seeds
    are spread over the CPU's cores. A resumed run keeps the value that it was started with."""
    updates: Updates | None = option(None, Role.SHAPES)
    """Number of gradient updates; by default 100,000, or 3,000 on classic/* and probe/* data."""
    batch_size: PositiveInt = option(32, Role.SHAPES | Role.SEARCHED)
    """Windows in a batch."""
    length: WindowLength = option(20, Role.SHAPES)
    """Steps in a window."""
    burn_in: BurnIn = option(0, Role.SHAPES | Role.RARE)
    """Steps added before each window's that only fill the memory of recurrent networks: they do not
    count in losses."""
    replay: Literal["auto", "device", "stream", "blocks"] = option("auto", Role.FREE)
    """Where batches come from. "device": the whole dataset is loaded onto the device; "stream":
    batches are read from disk; the batches are the same. "blocks": blocks of the data are read in
    a random order, and batches drawn from a few of them at a time, which are others. "auto": blocks
    if the data is one vault on another machine; else device if it fits into half of its free
    memory."""
    memory: Positive = option(1.0, Role.FREE | Role.LOCAL | Role.RARE)
    """Largest memory for streamed batches, in GB."""
    normalise: tuple[Literal["observation", "state"], ...] = option((), Role.SHAPES)
    """What to normalise by the statistics of the dataset, which are stored with the policy: to mean
    0 and standard deviation 1, entry by entry; whole numbers, such as those of images, stay as they
    are."""
    top: Share | None = option(None, Role.LEARNS | Role.RARE)
    """Learn only from this fraction of the complete episodes, those of the highest returns."""
    blind: bool = option(False, Role.SHAPES | Role.RARE)
    """Replace observations by zeros, in training and in acting: what a method earns that knows only
    the legal actions, the agent and, with a memory, the time."""
    eval_every: PositiveInt | None = None
    """Updates between evaluations; by default a twentieth of --updates, or a fifth in a PettingZoo
    environment."""
    eval_episodes: PositiveInt | None = None
    """Episodes in an evaluation; by default 32, or 8 in a PettingZoo environment."""
    final_episodes: PositiveInt | None = None
    """Episodes of the last evaluation, whose returns are the run's result; by default 320, or 32 in
    a PettingZoo environment."""
    init: Path | None = option(None, Role.TRACED)
    """Run to start from, of any baseline or recorder: the networks and the optimisers that the
    programs share start as they ended there."""
    keep: Keep = option("last", Role.FREE | Role.RARE)
    """Checkpoints to keep. last: only that of the last update; best: also the one with the best
    evaluation of each seed; all: one of each evaluation. `offmarl.load_policy(step=...)` loads
    any."""


@dataclass(frozen=True)
class OnlineArgs(_Configurable):
    """Arguments that all recorders share."""

    env: str = option("swarm/coverage-3", Role.CASE)
    """Environment to learn in: a name that `offmarl envs` lists, or code of your own as
    path/to/file.py:FACTORY or package.module:FACTORY."""
    tiers: str = option("random,medium,expert,replay", Role.TRACED | Role.UNTUNED)
    """Tiers to record, joined by commas: random, poor, medium, good, expert, replay (all training
    data), medium-replay (the training data up to the medium policy; replay is recorded too). A
    mixture of tiers is NAME=TIER:SHARE+TIER:SHARE, such as mixed=medium:0.5+expert:0.5, of which
    each episode draws one. Without a name nothing is recorded."""
    side: str = option("", Role.RARE)
    """The side that learns, a team such as pursuers, or agents of one, such as agent_0 or
    agent_0,agent_1, while the others act by --opponents. The data hold all agents. By default all
    agents learn."""
    opponents: tuple[str, ...] = option(("scripted",), Role.RARE)
    """With --side: how the others act, as one policy for all of them or SIDE=POLICY for each. A
    policy is the name of a scripted one of the environment, random, path/to/file.py:FUNCTION, or
    RUN, RUN@SEED, RUN@SEED/STEP or RUN@* (all seeds) with the directory of a run, whose last policy
    acts by default; RUN@*/sampled samples actions. Each episode draws one of several:
    RUN@*+scripted:2, with a weight."""
    out: Path = option(Path("vaults"), Role.CASE | Role.FREE | Role.LOCAL)
    """Directory for the vaults, ENV.vlt/PROGRAM-SEED-TIER, and the run, ENV.run/PROGRAM-SEED."""
    steps: PositiveInt = option(100_000, Role.TRACED | Role.UNTUNED)
    """Environment steps to record in each tier; replay holds all steps of the training."""
    total_steps: PositiveInt = option(300_000, Role.SHAPES)
    """Environment steps to train for."""
    num_envs: PositiveInt = option(32, Role.SHAPES)
    """Number of environments that run side by side."""
    env_states: bool = option(False, Role.UNTUNED | Role.RARE)
    """Also record the environments' states, as extras, so that `offmarl.replay_episode` can play
    any episode again."""
    evaluations: PositiveInt = option(40, Role.RARE)
    """Policy versions to evaluate and keep during training, at most, beside the first; tiers are
    chosen from them."""
    eval_episodes: PositiveInt = 64
    """Episodes in an evaluation; the policies of tiers are evaluated on four times as many."""
    seeds: SeedCount = option(1, Role.CASE | Role.FREE | Role.UNTUNED)
    """Number of independent training seeds. One process trains them side by side, with one compiled
    program; each has vaults of its own, with the same data as if it were trained alone."""
    seed: Seed = option(0, Role.CASE)
    """The first of the seeds."""
    pbt: tuple[str, ...] = option((), Role.UNTUNED | Role.RARE)
    """Train the --seeds as a population (population based training): at each evaluation the worst
    fifth goes on with the networks of the best fifth, and with its hyperparameters times 0.8 or
    1.2. NAME=VALUE,VALUE for each hyperparameter that changes, such as learning_rate=1e-4,1e-3: the
    first seed starts with the first value, and so on, and again from the first."""
    init: Path | None = option(None, Role.TRACED)
    """Run to continue from, such as one of an offline baseline. In qmix, vdn and iql its policy
    plays half of the episodes until a learner that starts anew is better. In others the networks
    and the optimiser that the programs share start as they ended there, and the discount and the
    factor of rewards of its values stay. Give --prefill, too."""
    prefill: Path | None = option(None, Role.TRACED | Role.RARE)
    """Vault from which half of each batch is drawn, for programs that learn from a replay; the rest
    are the run's own steps."""
    init_acts: ClassVar[bool] = False
    """Whether the policy of --init acts beside a learner that starts anew."""
    initial: ClassVar[tuple[str, ...]] = ()
    """Hyperparameters that only fresh states depend on, which --pbt therefore cannot change."""


UNIT = 20.0
"""What the largest return becomes in the unit that values are learned in: that of SMAC, for whose
data most settings were published."""


def unit_scale(largest_return: Float[Array, ""]) -> Float[Array, ""]:
    """Return the factor of rewards by which the largest return is `UNIT`; 1 if it is 0."""
    return jnp.where(largest_return > 0, UNIT / largest_return, 1.0)


VALUES = ("q", "q_tot")
"""Metrics that are values, which are logged in the unit of the environment's rewards."""


@jax.tree_util.register_pytree_with_keys_class
class Hyperparameters(SimpleNamespace):
    """The numeric hyperparameters of a program, as arrays: ``hyper.learning_rate``.

    They are the fields of its own ``Args`` that hold a float (`Fraction`, `Positive` and so on). As
    arrays, they can change without a new compilation, and several values can be computed side by
    side, with `jax.vmap` over a tree with a leading axis.
    """

    def __getattr__(self, name: str) -> Array:
        names = ", ".join(vars(self)) or "it has none"
        raise AttributeError(
            f"no hyperparameter {name!r}: they are the float fields of the program's own Args "
            f"({names})."
        )

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        """Return the values with their names, as JAX asks for."""
        keyed = [(jax.tree_util.GetAttrKey(name), x) for name, x in vars(self).items()]
        return keyed, tuple(vars(self))

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Any) -> "Hyperparameters":
        """Make hyperparameters of names and values, as JAX asks for."""
        return cls(**dict(zip(names, values, strict=True)))


def hyperparameters(args: Validated, changed: Mapping[str, Any] | None = None) -> Hyperparameters:
    """Return the numeric hyperparameters among a program's arguments, as float32 arrays.

    ``changed`` holds values that replace those of the arguments.
    """
    values = {name: getattr(args, name) for name in hyperparameter_names(args)}
    values.update(changed or {})
    return Hyperparameters(**{name: jnp.float32(value) for name, value in values.items()})


def state_shapes(program: "Program", args: Validated) -> ArrayTree:
    """Return the shapes of the state of one seed."""
    return jax.eval_shape(program.init, jax.random.key(0), hyperparameters(args))


def structure(args: ArgsT) -> ArgsT:
    """Return arguments in which those that must not shape a program are unusable.

    Programs that differ only in these are compiled once. If ``make`` computes with such an
    argument, compares it or formats it, it raises `TypeError`; the compiled program would otherwise
    keep a value that later runs do not have.
    """
    shaping = copy.copy(args)
    for name, why in _reasons(args).items():
        object.__setattr__(shaping, name, _Unusable(name, why))
    return shaping


def shaping_values(args: Validated) -> tuple[tuple[str, Any], ...]:
    """Return the names and values of the arguments that may shape a program."""
    excluded = _reasons(args)
    names = (field.name for field in fields(args) if field.name not in excluded)
    return tuple((name, getattr(args, name)) for name in names)


def _reasons(args: Validated) -> dict[str, str]:
    """Return the arguments that must not shape a program, each with the reason."""
    shared = shared_names(args) - with_role(type(args), Role.SHAPES)
    return dict.fromkeys(shared, "for the loop only") | {
        name: f"a hyperparameter: write `hyper.{name}` in init or update"
        for name in hyperparameter_names(args)
    }


def hyperparameter_names(args: Validated) -> list[str]:
    """Return the names of a program's numeric hyperparameters."""
    shared = shared_names(args)
    return [name for name in float_fields(type(args)) if name not in shared]


def shared_names(args: Validated) -> set[str]:
    """Return the names of the arguments that all programs of a kind share."""
    kinds: tuple[type[_Configurable], ...] = (Args, OnlineArgs)
    return {field.name for kind in kinds if isinstance(args, kind) for field in fields(kind)}


def recorded_args(args: Validated) -> dict[str, Any]:
    """Return the arguments that records hold, by name: those that may change the result.

    Passwords of URLs are no part of them.
    """
    free = with_role(type(args), Role.FREE)
    recorded = asdict(args)
    return {
        name: hide_all_credentials(value) if ":/" in str(value) else value
        for name, value in recorded.items()
        if name not in free
    }


class _Unusable:
    """Placeholder for an argument that ``make`` must not use."""

    def __init__(self, name: str, why: str):
        self._name, self._why = name, why

    def _refuse(self, *_: Any, operation: str) -> NoReturn:
        raise TypeError(f"make uses args.{self._name} ({operation}), which is {self._why}.")

    def __repr__(self) -> str:
        return f"<{self._name}: {self._why}>"


_OPERATORS = (
    "add radd sub rsub mul rmul matmul rmatmul truediv rtruediv floordiv rfloordiv mod rmod divmod "
    "rdivmod pow rpow neg pos abs float int complex bool round trunc floor ceil index jax_array "
    "array eq ne lt le gt ge hash str format iter len contains getitem fspath"
)
for _name in _OPERATORS.split():
    setattr(_Unusable, f"__{_name}__", partialmethod(_Unusable._refuse, operation=_name))


# ---------------------------------------------------------------------------------- program


class Stage(NamedTuple):
    """A part of a program's training, such as pretraining."""

    update: Callable[
        [ArrayTree, Any, PRNGKeyArray, Hyperparameters], tuple[ArrayTree, dict[str, Array]]
    ]
    """``update(state, batch, key, hyper) -> (state, metrics)``, pure: ``batch`` is a
    `offmarl.types.Sequence` ``(B, T, ...)``, None for a program that collects its own steps;
    metrics are scalars by name, and may hold `TD_ERRORS`. Losses take ``batch.weight`` into account
    where they can."""
    updates: int | None = None
    """Number of updates; None for the updates that the other stages leave."""


class Values(NamedTuple):
    """A program's critic: the values of actions, as a pure function of one seed."""

    params: Callable[[ArrayTree], ArrayTree]
    """``params(state)``: the parameters that the critic needs, such as those of agents and mixer;
    not those of target networks."""
    apply: Callable[[ArrayTree, View, Bool[Array, "B T"], Array], Float[Array, "B T V"]]
    """``apply(params, view, first, action)``: the values of the actions taken in the views of
    windows ``(B, T, ...)``, with actions ``(B, T, N)``, or ``(B, T, N, A)`` if continuous. V is N
    for a value of each agent, and 1 for a value of the team. ``first`` marks the slots that begin
    an episode, as in `offmarl.types.Sequence`. Of several critics it gives the value that the
    program learns from, such as the smallest."""


class Program(NamedTuple):
    """An algorithm, as pure functions of one seed."""

    init: Callable[[PRNGKeyArray, Hyperparameters], ArrayTree]
    """``init(key, hyper) -> state``, a pytree of arrays."""
    stages: tuple[Stage, ...]
    """The stages in order. Each is compiled separately and keeps the structure of the state."""
    policy: Callable[[bool], Policy]
    """``policy(greedy)``: the policy, which takes the best action or samples one."""
    policy_params: Callable[[ArrayTree], ArrayTree]
    """``policy_params(state)``: the parameters of its policy. A run stores them, and `load_policy`
    reads them."""
    greedy: bool = True
    """Whether the policy's own way to act is to take its best actions, and not to sample them. A
    baseline that can do both is evaluated in both ways."""
    return_to_go: float | None = None
    """Discount of the returns-to-go that its batches carry, 1 for plain sums; None for none."""
    td_errors: bool = False
    """Whether the metrics of its updates hold `TD_ERRORS`, so that replay can be prioritised."""
    num_steps: int = 0
    """Number of time steps that an update takes in each environment and adds to ``state.capture``,
    a `Capture`, which is recorded; 0 for a program that learns from a dataset."""
    values: Values | None = None
    """Its critic, which `load_critic` loads; None if it has none."""
    guided: Callable[[ArrayTree, ArrayTree], ArrayTree] | None = None
    """``guided(state, params)``: a fresh state of a recorder in which another policy with these
    parameters acts until the learner is better; None if it starts from what the other learned."""
    given: tuple[str, ...] = ()
    """Fields of its state that are not learned, but come from the arguments or the data. A run that
    continues from another has its own."""
