"""Trained policies and critics, loaded from their runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path
from jaxtyping import Array, Bool, Float, PRNGKeyArray
from numpy.typing import NDArray

from offmarl import envs, tracking
from offmarl.envs.base import Environment
from offmarl.errors import InvalidValueError, OptionError, RunError, ShapeError
from offmarl.gate import fit
from offmarl.programs.program import Values
from offmarl.programs.runs.export import export_policy
from offmarl.programs.runs.trained import Step, TrainedRun
from offmarl.types import (
    ArraySpec,
    ArrayTree,
    Continuous,
    EnvSpec,
    Policy,
    Sequence,
    View,
    empty_view,
    flatten_tree,
    unflatten_tree,
)


class _Unfinished(NamedTuple):
    """The carry between an action and its reward, for a policy that takes rewards as input."""

    carry: ArrayTree


@dataclass(frozen=True)
class LoadedPolicy:
    """A trained policy of a run.

    Call it in your own loop, with NumPy or JAX arrays of a single environment:

        carry = None
        while not done.all():
            key, act_key = jax.random.split(key)
            action, carry = policy(observation, legal_actions, carry, act_key)
            observation, legal_actions, reward, done = step(action)
            carry = policy.after_step(carry, reward, done)

    Policies that take rewards as input need ``after_step`` (see `Policy.after_step`): without it
    they raise an error at the next action. Other policies return the carry unchanged.
    """

    policy: Policy = field(repr=False)
    params: ArrayTree = field(repr=False)
    spec: EnvSpec = field(repr=False)
    name: str
    """The program that trained it."""
    stochastic: bool
    """Whether it draws its actions at random, so that each call needs a key."""

    def __call__(
        self,
        observation: ArrayTree,
        legal_actions: Bool[Array | np.ndarray, "N A"] | None = None,
        carry: ArrayTree | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[np.ndarray, ArrayTree]:
        """Choose the agents' actions.

        Parameters
        ----------
        observation
            The agents' observations: an array ``(N, ...)``, or a dictionary of them, as
            ``spec.observation_leaves`` describes it.
        legal_actions
            Mask of legal actions; by default all are legal.
        carry
            The result of `after_step` or of the last call; None at the start of an episode.
        key
            Random key, a new one for each call; only a stochastic policy needs it.

        Returns
        -------
        tuple
            The actions, ``(N,)`` or ``(N, A)`` if continuous, and the carry for `after_step`.

        Raises
        ------
        ShapeError
            The observation has other shapes, names or numbers than those that the policy was
            trained with, or the mask another shape.
        OptionError
            The policy is stochastic, and no key was given; or it takes rewards as input, and
            `after_step` was not called after its last action.
        """
        observation = self._checked(observation)
        if key is None and self.stochastic:
            raise OptionError(
                f"the policy of {self.name} samples its actions and was called without a key: give "
                "each call a new key, policy(observation, legal_actions, carry, key=key), or load "
                "the policy with greedy=True for its best actions."
            )
        if isinstance(carry, _Unfinished):
            raise OptionError(
                f"the policy of {self.name} takes rewards as input, and the reward of its last "
                "action is missing: after each step, pass the carry through "
                "policy.after_step(carry, reward, done)."
            )
        legal = ArraySpec((self.spec.num_agents, self.spec.action_size), "bool")
        if legal_actions is None:
            legal_actions = np.ones(legal.shape, bool)
        action, _, carry = self._act(
            self.params,
            self.policy.initial_carry() if carry is None else carry,
            observation,
            self._fit(legal_actions, legal, "mask of legal actions"),
            _unused_key() if key is None else key,
        )
        remembers = self.policy.after_step is not None
        return np.asarray(action), _Unfinished(carry) if remembers else carry

    def after_step(
        self,
        carry: ArrayTree,
        reward: Float[Array | np.ndarray, "N"],
        done: Bool[Array | np.ndarray, "N"],
    ) -> ArrayTree:
        """Return the carry after the outcome of a step.

        Parameters
        ----------
        carry
            The carry that the policy returned with the actions of the step.
        reward
            Reward of each agent.
        done
            Whether each agent terminated or was truncated.

        Raises
        ------
        ShapeError
            ``reward`` or ``done`` does not have one entry for each agent.
        OptionError
            The policy takes rewards as input, and chose no action since the last reward.
        """
        agents = (self.spec.num_agents,)
        reward = self._fit(reward, ArraySpec(agents), "reward")
        done = self._fit(done, ArraySpec(agents, "bool"), "done")
        if self.policy.after_step is None:
            return carry
        if not isinstance(carry, _Unfinished):
            raise OptionError(
                f"the policy of {self.name} has chosen no action since the last reward: call "
                "after_step once for each step, with the carry that policy(observation, ...) "
                "returned."
            )
        return self._after_step(carry.carry, reward, done)

    def export(self, out: str | Path, onnx: bool = False) -> list[Path]:
        """Write the policy as files that run without offmarl, and return their paths.

        ``policy.stablehlo`` is a function ``(tensors, observation, legal_actions, memory, key) ->
        (action, memory)``, batched over environments, for `jax.export.deserialize`; the page
        "Deploy a policy" describes it. The other files are ``policy.safetensors`` (the tensors),
        ``after_step.stablehlo`` for policies that take rewards as input, and ``policy.onnx``.

        Parameters
        ----------
        out
            A new or empty directory.
        onnx
            Whether to write ONNX, too.

        Raises
        ------
        OptionError
            ``out`` is not empty, or ONNX cannot hold the policy: it draws random numbers, takes
            rewards as input, or its agents choose after one another.
        MissingExtraError
            The extra ``export``, or ``onnx`` for ONNX, is not installed.
        """
        return export_policy(self, out, onnx)

    def _checked(self, observation: ArrayTree) -> ArrayTree:
        """Return an observation in the types of the spec, or raise `ShapeError`."""
        arrays, leaves = flatten_tree(observation), self.spec.observation_leaves
        if [*arrays] != [*leaves]:
            raise ShapeError(
                f"the policy of {self.name} acts on {_names(leaves)}, not on {_names(arrays)}."
            )
        checked = {}
        for path, leaf in leaves.items():
            expected, array = leaf.with_agents(self.spec.num_agents), np.asarray(arrays[path])
            if "float" not in leaf.dtype and array.dtype.kind not in _kinds(leaf):
                raise ShapeError(
                    f"the policy of {self.name} acts on observations{path and f' {path!r}'} of "
                    f"type {leaf.dtype}, not {array.dtype}: give the values as the environment "
                    "returns them, since the policy's network scales them itself."
                )
            checked[path] = self._fit(array, expected, f"observation {path}")
        return unflatten_tree(checked)

    def _fit(self, value: Any, leaf: ArraySpec, what: str) -> NDArray[Any]:
        """Return a value as an array of exactly a shape and type, or raise `ShapeError`."""
        what = f"the {what.strip()} for the policy of {self.name}"
        try:
            array = fit(value, leaf, what)
        except InvalidValueError as error:
            raise ShapeError(str(error)) from None
        if (shape := np.shape(value)) != leaf.shape:
            raise ShapeError(f"{what} has shape {shape}, and must have {leaf.shape}.")
        return array

    @cached_property
    def _after_step(self) -> Callable[..., ArrayTree]:
        assert self.policy.after_step is not None
        return jax.jit(self.policy.after_step)

    @cached_property
    def _act(self) -> Callable[..., tuple[Array, Array, ArrayTree]]:
        return jax.jit(self.policy.act)


def _names(leaves: Mapping[str, Any]) -> str:
    paths = ", ".join(path for path in leaves if path)
    return f"a dictionary of {paths}" if paths else "one array of observations"


def _kinds(leaf: ArraySpec) -> str:
    """Return the kinds of NumPy's types whose values are those of a leaf of whole numbers."""
    return "b" if leaf.dtype == "bool" else "iu"


@cache
def _unused_key() -> PRNGKeyArray:
    """Return a key for policies that do not use it."""
    return jax.random.key(0)


def load_policy(
    run_dir: str | Path,
    seed: int | None = None,
    greedy: bool | None = True,
    program: str | Path | None = None,
    env: str | Environment | None = None,
    step: Step = None,
) -> LoadedPolicy:
    """Load a policy of a run, by default its last, built by the program that trained it.

    Runs of offmarl's own recorders and baselines need only their directory. A run of a program in
    your own file also needs ``program``, because importing a file runs its code, and a downloaded
    run could name any file. The process that trained the run does not need it.

    Parameters
    ----------
    run_dir
        A directory that `offmarl train` or `offmarl record` wrote.
    seed
        Training seed; by default the run's first.
    greedy
        Whether to always take the best action, as ``offmarl evaluate`` and ``offmarl record
        --policy`` do by default, too. With False, a policy that is a distribution samples its
        actions, and needs a key for each call; None acts as the run's own evaluations did
        (``greedy`` in ``run.json``): those of recorders sample.
    program
        The Python file of the program that trained the run; it may have moved. It is imported only
        if its checksum is the recorded one.
    env
        The environment to act in, or its name; by default one of the sizes of the training. It may
        have another number of agents, and another state, if no parameter of the policy depends on
        that number: agents share their parameters, and are distinguished by sinusoidal ids or none
        (``agent_id``).
    step
        The number of a checkpoint in ``checkpoints/``, or "best" for the one with the seed's best
        evaluation, if the run kept it (``--keep``). Choosing it by returns in the environment is
        online tuning: its return is not that of an offline method. A recorder keeps the policies of
        all its evaluations in ``policies/``; there, the number is that of environment steps, as in
        ``metrics.jsonl``, and "best" is the version with the highest return of that evaluation.

    Raises
    ------
    RunError
        The directory is not that of a run, or the run has no such checkpoint or seed; or its
        program is in a file, and ``program`` is missing or has other content.
    OptionError
        ``program`` does not exist or is not a program, or the run does not need it.
    CheckpointError
        The checkpoint is damaged.
    ShapeError
        The policy does not fit ``env``: observations or actions differ, or it is tied to the number
        of agents that it was trained with.
    UnknownNameError
        There is no environment ``env``.
    """
    trained = TrainedRun.open(run_dir, program)
    run, spec = trained.record, trained.spec
    built, like, _ = trained.build(spec)
    if env is not None:
        other = (envs.make(env) if isinstance(env, str) else env).spec
        _require_same_interface(run["program"], spec, other)
        if other != spec:
            (built, other_shapes, _), trained_for, spec = trained.build(other), spec, other
            _require_same_parameters(run["program"], trained_for, other, like, other_shapes)
    params = trained.restore("policy", like, seed, step)
    policy = built.policy(tracking.acting_of(run) == "greedy" if greedy is None else greedy)
    return LoadedPolicy(policy, params, spec, run["program"], policy.draws(params))


def _require_same_interface(program: str, spec: EnvSpec, other: EnvSpec) -> None:
    """Raise `ShapeError` if agents observe or do other things than those of the training."""
    theirs = {} if other.is_per_agent else {"num_agents": spec.num_agents} | _NOT_ACTED_ON
    alike = replace(other, state_size=spec.state_size, global_state=spec.global_state, **theirs)
    if difference := spec.difference(alike, extras=False):
        raise ShapeError(
            f"the policy of {program} and {other.name} differ in {difference}: give the "
            "environment that it was trained in, or one of the same sizes."
        )


_NOT_ACTED_ON: dict[str, Any] = dict.fromkeys(
    ("agents", "teams", "kinds", "observation_sizes", "action_sizes")
)
"""Fields of specs that have one entry for each agent, and no part in what policies compute."""


def _require_same_parameters(
    program: str, spec: EnvSpec, other: EnvSpec, trained: ArrayTree, other_shapes: ArrayTree
) -> None:
    """Raise `ShapeError` if the policy of other sizes has other parameters."""
    have, want = (
        {keystr(path): leaf.shape for path, leaf in tree_leaves_with_path(tree)}
        for tree in (trained, other_shapes)
    )
    for name in [*have, *want]:
        if have.get(name) != want.get(name):
            raise ShapeError(
                f"the policy of {program} is tied to the {spec.num_agents} agents of "
                f"{spec.name}: its parameter {name} is {have.get(name, 'absent')}, and "
                f"{other.num_agents} agents need {want.get(name, 'none')}. Train it with "
                "--agent-id sinusoidal or none, and with parameters that all agents share."
            )


# ---------------------------------------------------------------------------------- critics


@dataclass(frozen=True)
class LoadedCritic:
    """A trained critic of a run: a function of views and actions.

    Call it with the windows of a dataset, or with the steps of an episode:

        batch = vault.replay(batch=256, length=20).sample(key)
        values = critic(batch.view_tm1, batch.action, batch.first[:, :-1])
        values = critic.of(batch)  # the same
    """

    values: Values = field(repr=False)
    params: ArrayTree = field(repr=False)
    spec: EnvSpec = field(repr=False)
    name: str
    """The program that trained it."""

    def __call__(
        self,
        view: View,
        action: Array | np.ndarray,
        first: Bool[Array | np.ndarray, "*b T"] | None = None,
    ) -> Float[np.ndarray, "*b T V"]:
        """Return the values of actions.

        Parameters
        ----------
        view
            The views that the actions are taken in: a window ``(T, ...)``, or several
            ``(B, T, ...)``, in order of time, because a recurrent critic remembers.
        action
            The agents' actions, ``(*b, T, N)``, or ``(*b, T, N, A)`` if continuous.
        first
            Slots that begin an episode; by default those at the start of each window.

        Returns
        -------
        V values of each step, in the unit of the recorded returns: N, one for each agent, or 1 for
        a value of the team.

        Raises
        ------
        ShapeError
            The arrays are not windows of the environment that the critic was trained for.
        """
        lead = self._lead(view, np.shape(action))
        if first is None:
            first = jnp.zeros(lead, bool).at[..., 0].set(True)
        batched = (view, jnp.asarray(first, bool), action)
        if len(lead) == 1:
            batched = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], batched)
        values: np.ndarray = np.asarray(self._apply(self.params, *batched))
        return values if len(lead) == 2 else values[0]

    def of(self, batch: Sequence) -> Float[np.ndarray, "*b T V"]:
        """Return the values of the actions of windows."""
        return self(batch.view_tm1, batch.action, batch.first[..., :-1])

    def _lead(self, view: View, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the axes ``(T,)`` or ``(B, T)`` of a window, or raise `ShapeError`."""
        spec = self.spec
        size = (spec.action_size,) if isinstance(spec.action, Continuous) else ()
        per_step = (spec.num_agents, *size)
        lead = shape[: len(shape) - len(per_step)]
        expected = [(*lead, *leaf.shape) for leaf in jax.tree.leaves(empty_view(spec))]
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(view)]
        if len(lead) not in (1, 2) or shape[len(lead) :] != per_step or shapes != expected:
            raise ShapeError(
                f"the critic of {self.name} takes views and actions of windows (T, ...) or "
                f"(B, T, ...) of {spec.name or 'its data'}, whose actions are {per_step} each: "
                f"got actions {shape} and views {shapes}."
            )
        return lead

    @cached_property
    def _apply(self) -> Callable[..., Any]:
        return jax.jit(self.values.apply)


def load_critic(
    run_dir: str | Path,
    seed: int | None = None,
    program: str | Path | None = None,
    step: Step = None,
) -> LoadedCritic:
    """Load the critic of a run, by default its last, built by the program that trained it.

    Parameters
    ----------
    run_dir
        A directory that `offmarl train` wrote.
    seed, program, step
        As for `load_policy`.

    Raises
    ------
    RunError
        The program has no critic; or as for `load_policy`.
    OptionError, CheckpointError
        As for `load_policy`.
    """
    trained = TrainedRun.open(run_dir, program)
    built, _, state = trained.build(trained.spec)
    name = trained.record["program"]
    if built.values is None:
        raise RunError(f"{run_dir}: {name} has no critic. Give the run of a program that has one.")
    params = built.values.params(trained.restore("state", state, seed, step))
    return LoadedCritic(built.values, params, trained.spec, name)
