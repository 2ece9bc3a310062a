"""The types that all of offmarl shares.

Axes, in the order they appear in shapes:

====  ==========================================================
E     parallel environments (and so rows of a recording)
B     batch
T     time
N     agents
O     size of one agent's observation, where it is a vector
S     size of the global state, where it is a vector
A     actions (discrete) or dimensions of the action (continuous)
====  ==========================================================

Records are NamedTuples of arrays, so they are pytrees: the same type serves one step, a batch of
steps and a whole recording, on the device and in NumPy. Shapes below are those of a single step;
``*b`` stands for the axes in front. Observations and states are arrays, or dictionaries of arrays
that may be nested; `ArraySpec` describes each array, which is a leaf of such a tree. The helpers
for trees handle NumPy's and JAX's arrays alike, and do not import JAX.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from offmarl import records
from offmarl._html import html_table
from offmarl.errors import ShapeError

if TYPE_CHECKING:  # jaxtyping's Array imports JAX, which listing and reading data do without
    from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "uint8",
    "int8",
    "int16",
    "uint16",
    "int32",
    "bool",
)
"""Names of the data types that a leaf can have."""

_LEAF_NAME = re.compile(r"[\w-]{1,64}")
_MAX_DEPTH = 8


@dataclass(frozen=True)
class ArraySpec:
    """Shape and data type of one array: a leaf of an observation or of a state, or an extra.

    Parameters
    ----------
    shape
        Shape of one step. A leaf of an observation has it without the axis of agents.
    dtype
        One of `DTYPES`.
    agents
        Only for leaves of observations: the agents that have this leaf, in ascending order. Its
        axis of agents then has their number. None if all agents have it, as most programs expect.

    Raises
    ------
    ShapeError
        A size is negative, or the type is not one of `DTYPES`.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    agents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        shape = tuple(map(operator.index, self.shape))
        agents = None if self.agents is None else tuple(map(operator.index, self.agents))
        if self.dtype not in DTYPES:
            types = ", ".join(DTYPES)
            raise ShapeError(f"{self.dtype!r:.40} is no type of a leaf: use one of {types}.")
        if min(*shape, *(agents or ()), 0, 0) < 0:
            raise ShapeError(f"the shape {shape} or the agents {agents} have a negative number.")
        if agents is not None and (not agents or agents != tuple(sorted({*agents}))):
            raise ShapeError(f"agents are {agents}: name each one once, in ascending order.")
        set_fields(self, shape=shape, agents=agents)

    def __str__(self) -> str:
        """Describe the array, as in "uint8 (84, 84, 3)"."""
        only = "" if self.agents is None else f" of agents {', '.join(map(str, self.agents))}"
        return f"{self.dtype} {self.shape}{only}"

    @cached_property
    def size(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The data type in NumPy, little-endian."""
        if self.dtype == "bfloat16":
            import ml_dtypes  # few datasets have this type

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(self.dtype).newbyteorder("<")

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of one array."""
        return self.size * self.numpy_dtype.itemsize

    def with_agents(self, num_agents: int) -> ArraySpec:
        """Return the spec of all agents' leaves: with the axis of agents in front."""
        count = num_agents if self.agents is None else len(self.agents)
        return ArraySpec((count, *self.shape), self.dtype)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `spec_tree` reads back."""
        data = {"shape": list(self.shape), "dtype": self.dtype}
        return data if self.agents is None else {**data, "agents": list(self.agents)}


class SpecDict(Mapping[str, Any]):
    """A mapping of names to specs that is frozen, hashable and ordered by name.

    Names consist of letters, digits, ``_`` and ``-``.
    """

    def __init__(self, specs: Mapping[str, Any], _depth: int = 0):
        wrong = [
            name for name in specs if not (isinstance(name, str) and _LEAF_NAME.fullmatch(name))
        ]
        if wrong:
            raise ShapeError(
                f"{wrong[0]!r:.80} cannot name a leaf: use up to 64 letters, digits, _ and -."
            )
        if _depth > _MAX_DEPTH:
            raise ShapeError(f"specs are nested deeper than {_MAX_DEPTH} levels.")
        self._specs: dict[str, SpecTree] = {}
        for name in sorted(specs):
            try:
                self._specs[name] = spec_tree(specs[name], _depth + 1)
            except ShapeError as error:
                raise ShapeError(f"{name}: {error}") from error

    def __getitem__(self, name: str) -> SpecTree:
        return self._specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __hash__(self) -> int:
        return hash(tuple(self._specs.items()))

    def __repr__(self) -> str:
        return f"SpecDict({self._specs})"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `spec_tree` reads back."""
        return {name: spec.to_json() for name, spec in self.items()}


SpecTree = ArraySpec | SpecDict
"""The leaves of an observation or a state: one array, or a (nested) dictionary of arrays."""


def spec_tree(given: Any, _depth: int = 0) -> SpecTree:
    """Read a tree of specs: an `ArraySpec`, a mapping, or the JSON of either.

    Raises
    ------
    ShapeError
        It is none of these, a name is invalid, or a mapping is empty.
    """
    if isinstance(given, ArraySpec | SpecDict):
        return given
    if isinstance(given, Mapping) and isinstance(given.get("shape"), list | tuple):
        fields: dict[str, Any] = {
            x: tuple(y) if isinstance(y, list) else y for x, y in given.items()
        }
        try:
            return ArraySpec(**fields)
        except (TypeError, ValueError) as error:
            raise ShapeError(
                f"{given!r:.80} does not describe an array: it needs a shape of whole numbers and "
                "a dtype, and may have agents."
            ) from error
    if isinstance(given, Mapping) and given:
        return SpecDict(given, _depth)
    raise ShapeError(
        f"{given!r:.80} does not describe arrays: use an ArraySpec, or a dict of them."
    )


def map_tree(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply a function to the leaves of trees of one structure, as `jax.tree.map` does.

    It does not import JAX. Mappings, NamedTuples and None are nodes; everything else is a leaf. A
    mapping becomes a dict.
    """
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        return {x: map_tree(function, tree[x], *(other[x] for other in rest)) for x in tree}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tree(function, *nodes) for nodes in zip(tree, *rest, strict=True)))
    return function(tree, *rest)


def flatten_tree(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of an array or of nested mappings by their paths, such as "camera.left".

    The path of a bare array is "". ``prefix`` is put in front of every path.
    """
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    dot = f"{prefix}." if prefix else ""
    parts = (flatten_tree(tree[name], f"{dot}{name}") for name in sorted(tree))
    return {path: leaf for part in parts for path, leaf in part.items()}


def unflatten_tree(leaves: Mapping[str, Any]) -> Any:
    """Undo `flatten_tree` of a tree without a prefix."""
    if [*leaves] == [""]:
        return leaves[""]
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *groups, name = path.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = leaf
    return tree


def sum_bytes(leaves: Mapping[str, ArraySpec]) -> int:
    """Return the bytes that one array of each spec takes."""
    return sum(leaf.num_bytes for leaf in leaves.values())


def set_fields(frozen: Any, **fields: Any) -> None:
    """Set fields of a frozen dataclass, in its ``__post_init__``."""
    for name, value in fields.items():
        object.__setattr__(frozen, name, value)


def tree_text(tree: Any, size: int) -> str:
    """Return a tree's leaves as text; without any, ``size``, that of a vector."""
    leaves = flatten_tree(tree or {})
    return ", ".join(f"{path} {leaf}".strip() for path, leaf in leaves.items()) or f"{size:,}"


def leaf_difference(name: str, left: Any, right: Any) -> str:
    """Return the first leaf that differs, such as "extras.cost (float32 (), not absent)"."""
    ours, theirs = (flatten_tree(tree, name) if tree else {} for tree in (left, right))
    for path in [*ours, *theirs]:
        first, second = ours.get(path, "absent"), theirs.get(path, "absent")
        if first != second:
            return f"{path} ({first}, not {second})"
    return ""


ArrayTree = Any
"""A pytree of arrays; only the code that made it knows its structure."""


@dataclass(frozen=True)
class Discrete:
    """Each agent picks one of ``num_actions`` actions, an int32 in ``[0, num_actions)``."""

    num_actions: int


@dataclass(frozen=True)
class Continuous:
    """Each agent's action is a float32 vector of ``size`` entries in [-1, 1]."""

    size: int


def _vector_or_tree(spec: Any, size: int) -> tuple[SpecTree | None, int]:
    """Return None and the size for a float32 vector; a tree and its entries for others."""
    if spec is None:
        return None, size
    tree = spec_tree(spec)
    entries = sum(leaf.size for leaf in flatten_tree(tree).values())
    return (None if tree == ArraySpec((entries,)) else tree), entries


@dataclass(frozen=True)
class EnvSpec:
    """Sizes, name and limits of an environment; static under jit.

    Parameters
    ----------
    name
        Name for ``offmarl.envs.make``; empty if a dataset does not record it.
    num_agents
        N.
    observation_size, state_size
        O and S. Where ``observation`` or ``global_state`` is given, the size is that tree's number
        of entries, whatever was passed.
    action
        The kind and size of the action, the same for all agents.
    time_limit
        Number of steps after which an episode is truncated; None if there is no limit or it is
        unknown.
    reward
        "team": all agents receive the same reward. "individual": each receives its own.
    state
        "native": the environment has a global state. "concatenated": it is all observations.
    agents
        The agents' names in order; None if they have only numbers.
    observation_sizes, action_sizes
        Number of the O entries and A actions that each agent uses: the rest of its observations is
        zero, and the rest of its actions is never legal. None if all agents use all of them.
    teams
        Team of each agent; None if there is one team. See `offmarl.teams`.
    team_names
        Names of the teams, in the order of their numbers; None if they have only numbers.
    package
        The installed package that has the environment's code, and its version, as "jaxmarl 0.2.0";
        empty if unknown, and for the environments of offmarl. `difference` compares it.
    kinds
        Type of each agent; None if all are of one type.
    observation
        The leaves of one agent's observation: an `ArraySpec`, or a dict of them that may be nested.
        None for a float32 vector of ``observation_size`` entries, which is also what an equal
        `ArraySpec` becomes.
    global_state
        The same for the state, and ``state_size``.
    extras
        Further arrays of each step, by name: the shape is that of one step of an environment, with
        or without an axis of agents.

    Raises
    ------
    ShapeError
        A leaf cannot be described, or names an agent that does not exist.
    """

    name: str
    num_agents: int
    observation_size: int
    state_size: int
    action: Discrete | Continuous
    time_limit: int | None = None
    reward: Literal["team", "individual"] = "team"
    state: Literal["native", "concatenated"] = "native"
    agents: tuple[str, ...] | None = None
    observation_sizes: tuple[int, ...] | None = None
    action_sizes: tuple[int, ...] | None = None
    teams: tuple[int, ...] | None = None
    kinds: tuple[str, ...] | None = None
    observation: SpecTree | Mapping[str, Any] | None = None
    global_state: SpecTree | Mapping[str, Any] | None = None
    extras: Mapping[str, ArraySpec] = field(default_factory=dict)
    team_names: tuple[str, ...] | None = None
    package: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        observation, entries = _vector_or_tree(self.observation, self.observation_size)
        state, state_entries = _vector_or_tree(self.global_state, self.state_size)
        if not isinstance(self.extras, Mapping):
            raise ShapeError(f"extras are {self.extras!r:.80}: give a dict of ArraySpec by name.")
        set_fields(
            self,
            observation=observation,
            observation_size=entries,
            global_state=state,
            state_size=state_entries,
            extras=SpecDict(self.extras),
        )
        for name, leaf in flatten_tree(observation or {}).items():
            if leaf.agents and leaf.agents[-1] >= self.num_agents:
                raise ShapeError(
                    f"observation {name} is of agent {leaf.agents[-1]}, and there are "
                    f"{self.num_agents}."
                )
        leaves = [*flatten_tree(state or {}).values(), *self.extras.values()]
        if any(not isinstance(leaf, ArraySpec) or leaf.agents for leaf in leaves):
            raise ShapeError("extras are arrays, not trees; they and states have no `agents`.")

    @cached_property
    def observation_spec(self) -> SpecTree:
        """The leaves of one agent's observation; an `ArraySpec` for vectors, too."""
        return spec_tree(self.observation or ArraySpec((self.observation_size,)))

    @cached_property
    def state_spec(self) -> SpecTree:
        """The leaves of the global state; an `ArraySpec` for vectors, too."""
        return spec_tree(self.global_state or ArraySpec((self.state_size,)))

    @cached_property
    def observation_leaves(self) -> dict[str, ArraySpec]:
        """The leaves of one agent's observation by path: "", "image" or "camera.left"."""
        return flatten_tree(self.observation_spec)

    @cached_property
    def state_leaves(self) -> dict[str, ArraySpec]:
        """The leaves of the global state by path."""
        return flatten_tree(self.state_spec)

    @cached_property
    def view_spec(self) -> View:
        """The specs of all arrays of a `View`, with the axis of agents where there is one."""
        agents = self.num_agents
        specs: Any = (
            map_tree(lambda leaf: leaf.with_agents(agents), self.observation_spec),
            map_tree(lambda leaf: leaf, self.state_spec),
            ArraySpec((agents, self.action_size), "bool"),
            ArraySpec((agents,), "bool"),
        )
        return View(*specs)

    @cached_property
    def view_leaves(self) -> dict[str, ArraySpec]:
        """The leaves of `view_spec` by name; see `flatten_view`."""
        return flatten_view(self.view_spec)

    @property
    def observation_text(self) -> str:
        """The leaves of observations as text: a vector's size, or "image uint8 (84, 84, 3)"."""
        return tree_text(self.observation, self.observation_size)

    @property
    def state_text(self) -> str:
        """The leaves of the state as text; "none" if there is no state."""
        return tree_text(self.global_state, self.state_size) if self.state_size else "none"

    @property
    def is_vector(self) -> bool:
        """Whether observations and the state are float32 vectors."""
        return self.observation is None and self.global_state is None

    @cached_property
    def is_per_agent(self) -> bool:
        """Whether some leaves of observations belong to some agents only."""
        return any(leaf.agents for leaf in self.observation_leaves.values())

    @cached_property
    def action_size(self) -> int:
        """A: the number of discrete actions, or the size of a continuous one."""
        match self.action:
            case Discrete(num_actions):
                return num_actions
            case Continuous(size):
                return size

    @property
    def num_actions(self) -> int:
        """The number of discrete actions; `ShapeError` if actions are continuous."""
        if isinstance(self.action, Discrete):
            return self.action.num_actions
        raise ShapeError(
            f"{self.name or 'this dataset'} has continuous actions of size {self.action.size}, but "
            "the program needs discrete ones: choose a program for continuous actions, "
            "such as mappo or masac (offline: bc, omar or omiga)."
        )

    def shared(self, view: View) -> View:
        """Return a view whose state is a reshape of the observations, if it is all of them."""
        size = self.num_agents * self.observation_size
        if self.state != "concatenated" or not self.is_vector or self.state_size != size:
            return view
        return view._replace(state=view.observation.reshape(*view.observation.shape[:-2], size))

    def difference(self, other: EnvSpec, extras: bool = True) -> str:
        """Return the first difference in what is recorded, or an empty string.

        It is a number, such as "num_agents (3, not 8)", or a leaf, such as "observation.image
        (uint8 (84, 84, 3), not uint8 (64, 64, 3))". Without ``extras``, these may differ: policies
        and environments do not use them. For packages see `release_difference`: the same name may
        stand for another environment in another release.
        """
        pairs = {
            "num_agents": (self.num_agents, other.num_agents),
            "observation": (self.observation_spec, other.observation_spec),
            "global_state": (self.state_spec, other.state_spec),
            "action": (self.action, other.action),
            "extras": (self.extras, other.extras) if extras else ({}, {}),
        }
        differences = (leaf_difference(name, *pair) for name, pair in pairs.items())
        release = release_difference(self.package, other.package)
        return release or next(filter(None, differences), "")

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `from_json` reads back, without trees and names not set."""
        omitted = [*_TREES, *(x for x in ("team_names", "package") if not getattr(self, x))]
        data = {name: value for name, value in asdict(self).items() if name not in omitted}
        data["action"] = {type(self.action).__name__.lower(): self.action_size}
        trees = {name: getattr(self, name) for name in _TREES}
        return data | {name: tree.to_json() for name, tree in trees.items() if tree}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EnvSpec:
        """Read what `to_json` wrote; `ShapeError` for anything else, and for impossible sizes.

        The name cannot make `offmarl.envs.make` import code.
        """
        records.as_type(data, records.Spec, "the spec", ShapeError)
        ((kind, size),) = data["action"].items()
        action = {"discrete": Discrete, "continuous": Continuous}[kind](size)
        fields: dict[str, Any] = {
            name: (tuple(value) or None) if isinstance(value, list) else value
            for name, value in data.items()
        }
        fields["name"] = records.RecordedName(fields["name"])
        fields["package"] = str(fields.get("package", ""))
        fields |= SpecDict({name: fields[name] for name in _TREES if fields.get(name)}, -1)
        spec = cls(**{**fields, "action": action})
        step = spec.view_leaves | flatten_tree(spec.extras, "extras")
        if sum_bytes(step) > records.MOST_STEP_BYTES:  # by a number that may be too long to show
            largest = max(step, key=lambda name: step[name].num_bytes)
            most = f"{records.MOST_STEP_BYTES:,}"
            raise ShapeError(f"a step takes more than {most} bytes, most of them for {largest}.")
        return spec


def release_difference(package: str, other: str) -> str:
    """Return how two releases of a package differ; empty if only the last of three numbers does."""
    (name, version), (other_name, other_version) = (
        (x.partition(" ")[0], x.partition(" ")[2] + ".0") for x in (package, other)
    )
    if name != other_name or version.split(".")[:2] == other_version.split(".")[:2]:
        return ""
    return (
        f"package ({package}, not {other}, which may have changed the environment: stay with one, "
        f"as with pip install '{package.replace(' ', '==')}')"
    )


_TREES = ("observation", "global_state", "extras")


class View(NamedTuple):
    """The agents' view at one instant: before an action, or after an episode's last action."""

    observation: ArrayTree
    """``(*b, N, O)``; or, as `EnvSpec.observation` says, an array ``(*b, N, ...)`` or a (nested)
    dict of such arrays."""
    state: ArrayTree
    """``(*b, S)``; or, as `EnvSpec.global_state` says, an array ``(*b, ...)`` or a dict of them."""
    legal_actions: Bool[Array, "*b N A"]
    """Which actions (or dimensions of a continuous action) each agent may use."""
    alive: Bool[Array, "*b N"]
    """Agents that still act. The actions and losses of the others have no meaning."""


def empty_view(spec: EnvSpec) -> View:
    """Return a view of zeros, of the shapes and types of an environment: NumPy arrays."""
    view: View = map_tree(lambda leaf: np.zeros(leaf.shape, leaf.numpy_dtype), spec.view_spec)
    return view


def flatten_view(view: View) -> dict[str, Any]:
    """Return the leaves of a view by name: "observation", or "observation.image", and so on."""
    trees = flatten_tree(view.observation, "observation") | flatten_tree(view.state, "state")
    return trees | {"legal_actions": view.legal_actions, "alive": view.alive}


class Timestep(NamedTuple):
    """The result of a step or reset of an environment.

    ``view`` is the view for the next action. After the last step of an episode, an autoresetting
    environment returns the first view of the next episode there. ``next_view`` is always the view
    after the step.
    """

    view: View
    next_view: View
    reward: Float[Array, "*b N"]
    terminated: Bool[Array, "*b N"]
    """The agent's episode terminated: nothing follows, so values do not bootstrap."""
    truncated: Bool[Array, "*b N"]
    """The agent's episode was truncated: values bootstrap from ``next_view``."""
    last: Bool[Array, "*b"]
    """The episode ended, for all agents."""
    shaping: Float[Array, "*b N"] | None = None
    """Rewards that only guide learning, such as Overcooked's for a filled pot. They are apart from
    ``reward`` and never recorded; None if the environment offers none."""
    extras: dict[str, Any] | None = None
    """Arrays to record with the step, beside those of the environment's method ``extras``."""
    won: Bool[Array, "*b"] | None = None
    """The agents won in this step, where there is something to win. Evaluations in training log how
    often they do, and it is never recorded; None if the environment does not tell."""


class Transition(NamedTuple):
    """One recorded step of one environment."""

    view: View
    action: Int[Array, "*b N"] | Float[Array, "*b N A"]
    reward: Float[Array, "*b N"]
    terminated: Bool[Array, "*b N"]
    truncated: Bool[Array, "*b N"]
    last: Bool[Array, "*b"]
    behaviour_log_prob: Float[Array, "*b N"]
    """Log-probability (density) of each agent's action under the policy that took it; NaN if
    unknown."""
    policy_id: Int[Array, "*b N"] | Int[Array, "*b"]
    """Index of the policy that chose each agent's action in the dataset's table of policies; -1 if
    unknown. Steps read from a vault have one for each agent; written steps may have one for all."""
    extras: dict[str, Any] | None = None
    """Further arrays ``(*b, ...)`` by name, see `EnvSpec.extras`; None if there are none."""


class FinalObservations(NamedTuple):
    """The final views of M episodes of a recorded chunk.

    Transitions hold only the view before each action. With the final views, the next view of every
    step is known, and no view is stored twice.
    """

    row: Int[Array, "M"]
    """The parallel environment whose episode ended."""
    time: Int[Array, "M"]
    """Index within the chunk of the episode's last transition."""
    view: View
    """``(M, ...)``"""


class Episode(NamedTuple):
    """One recorded episode of T steps."""

    transition: Transition
    """``(T, ...)``"""
    final: View | None
    """The view after the last step; None if unknown."""

    def __repr__(self) -> str:
        return f"<Episode of {len(self.transition.reward):,} steps>"

    def _repr_html_(self) -> str:
        leaves = self.transition._asdict() | self.transition.view._asdict()
        rows = [[name, x.dtype, x.shape] for name, x in leaves.items() if hasattr(x, "shape")]
        returns = ", ".join(f"{x:.4g}" for x in np.sum(self.transition.reward, 0))
        title = f"Episode of {len(self.transition.reward):,} steps, returns {returns}"
        return html_table(["array", "type", "shape"], rows, title)


class Sequence(NamedTuple):
    """A window of T steps, ready to learn from.

    Windows are cut from episodes laid end to end. Each episode of L steps takes L+1 slots: one for
    each step, and one for the view that the episode ended with. A window may therefore hold the
    end of one episode and the beginnings of others.

    ``view`` has T+1 slots. Where ``mask`` is true at t, slot t+1 is the exact next view of step t,
    also at the end of an episode. Recurrent networks must empty their memory at the slots that are
    ``first``; between these no slot depends on another episode.
    """

    view: View
    action: Int[Array, "*b T N"] | Float[Array, "*b T N A"]
    reward: Float[Array, "*b T N"]
    terminated: Bool[Array, "*b T N"]
    truncated: Bool[Array, "*b T N"]
    behaviour_log_prob: Float[Array, "*b T N"]
    mask: Bool[Array, "*b T"]
    """Steps that count in losses: false for the slots that end episodes, and for burn-in."""
    next_known: Bool[Array, "*b T"]
    """Steps whose next view is known, or not needed because all agents terminated. Temporal
    difference terms of the others must be masked out."""
    first: Bool[Array, "*b slots"]
    """Slots that begin an episode. The window's first slot may lie inside an episode."""
    time: Int[Array, "*b slots"] | None = None
    """Steps of the episode before each slot; None where they are not known."""
    episode: Int[Array, "*b slots"] | None = None
    """Number of each slot's episode in ``Dataset.episodes``; None where there is no table."""
    return_to_go: Float[Array, "*b T N"] | None = None
    """Sum of each agent's rewards from the step to the episode's end, discounted as the replay was
    asked to; None where it was not asked for. In an incomplete episode it is the sum of the
    recorded rewards only; ``Dataset.episodes.complete`` says which episodes are complete."""
    weight: Float[Array, "*b"] | Float[Array, "*b T"] | None = None
    """Weight of each window, or of each step, in a loss, as `offmarl.losses.masked_mean` takes it;
    None where all weigh the same."""
    extras: dict[str, Any] | None = None
    """Further arrays of each step ``(*b, T, ...)`` by name; None if the data has none."""

    @property
    def view_tm1(self) -> View:
        """The views that actions were taken in, ``(*b, T, ...)``: all but the last slot."""
        return self._slots(slice(None, -1))

    @property
    def view_t(self) -> View:
        """The views that actions led to, ``(*b, T, ...)``: all but the first slot."""
        return self._slots(slice(1, None))

    @property
    def acts_t(self) -> Bool[Array, "*b T N"]:
        """Agents that act in the next view, or would have: one truncated alone is absent there."""
        return self.view_t.alive | (self.view_tm1.alive & self.truncated)

    @property
    def choices(self) -> Bool[Array, "*b T N"]:
        """Steps at which a live agent has a choice: of discrete actions, several are legal."""
        view, discrete = self.view_tm1, np.issubdtype(self.action.dtype, np.integer)
        several: Array = view.legal_actions.sum(-1) > int(discrete)
        return self.mask[..., None] & view.alive & several

    def _slots(self, slots: slice) -> View:
        index = (*(slice(None),) * (self.mask.ndim - 1), slots)
        view: View = map_tree(operator.itemgetter(index), self.view)
        return view


class Policy(NamedTuple):
    """How agents act: pure functions over parameters that are passed in.

    All functions handle all agents of one environment: observation ``(N, O)`` (or a tree, see
    `View`), legal_actions ``(N, A)``, action ``(N,)`` (``(N, A)`` if continuous), log_prob and
    reward ``(N,)``. So agents may act on their own, in order after one another, or as one. Callers
    vmap over environments.

    The carry is the policy's own, a pytree of any structure: the memory of a recurrent network, the
    last actions and rewards, a return-to-go. It starts each episode at ``initial_carry()``.
    """

    initial_carry: Callable[[], ArrayTree]
    """The carry at the start of an episode; an empty tuple for policies without one."""
    act: Callable[
        [
            ArrayTree,
            ArrayTree,
            ArrayTree,
            Bool[Array, "N A"],
            PRNGKeyArray,
        ],
        tuple[Array, Float[Array, "N"], ArrayTree],
    ]
    """``act(params, carry, observation, legal_actions, key) -> (action, log_prob, carry)``"""
    log_prob: (
        Callable[
            [ArrayTree, ArrayTree, ArrayTree, Bool[Array, "N A"], Array],
            tuple[Float[Array, "N"], ArrayTree],
        ]
        | None
    ) = None
    """``log_prob(params, carry, observation, legal_actions, action) -> (log_prob, carry)``: of a
    given joint action, with the carry after it. None if the policy has no likelihood."""
    after_step: Callable[[ArrayTree, Float[Array, "N"], Bool[Array, "N"]], ArrayTree] | None = None
    """``after_step(carry, reward, done) -> carry``: the carry after the outcome of a step, where
    ``done`` marks agents that terminated or were truncated. None if the carry does not use it."""
    draws: Callable[[ArrayTree], bool] = lambda _params: True
    """Whether the policy with these parameters samples its actions, so that it needs a key."""
    code: str | None = None
    """A checksum of the code that acts, if a recording by other code must not be resumed."""
    number: Callable[[ArrayTree], Int[Array, "N"]] | None = None
    """``number(carry)``: which of several policies acts for each agent, from the carry after
    ``act``; None for a single policy."""
    joint: bool = False
    """Whether agents choose after one another, so that it cannot act for some of them alone."""


def remember(
    policy: Policy, carry: ArrayTree, reward: Float[Array, "N"], done: Bool[Array, "N"]
) -> ArrayTree:
    """Return a policy's carry after the outcome of a step, in one environment."""
    return carry if policy.after_step is None else policy.after_step(carry, reward, done)
