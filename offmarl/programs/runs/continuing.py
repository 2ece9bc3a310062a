"""Training that continues from another run: its networks and optimiser, and recorded data.

The state of a program is matched with that of the run by names. Networks that act are matched as
parts of the policy, wherever the two programs keep them; other networks by their field of
``params``, such as ``mixer``. Target networks and the moments of Adam are matched as the parameters
that they belong to. What the run lacks starts anew.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path
from numpy.typing import NDArray

from offmarl import settings, tracking
from offmarl.checkpoint import Checkpoints
from offmarl.envs import Environment
from offmarl.errors import OptionError, RunError, ShapeError
from offmarl.paths import local
from offmarl.programs.program import UNIT, Args, OnlineArgs, Program, unit_scale
from offmarl.programs.runs import dataset
from offmarl.programs.runs.finite import require_finite
from offmarl.programs.runs.identity import fingerprint
from offmarl.programs.runs.trained import TrainedRun, seeds_to_read, stack_seeds
from offmarl.replay import Replay, Windows, load
from offmarl.types import ArrayTree, EnvSpec
from offmarl.vault import Dataset, open_vault

_POLICY = "policy"

_ONLINE = ("params", "target", "moments", "optimiser", "largest_return")
"""Fields of a recorder's state that are learned. Of a baseline's, all are, except `_COUNT`."""

_APART = ("target", "moments", "largest_return")
"""Fields that are no networks. The last one is in `InitialRun.scale`."""

_COUNT = "updates"

_SHAPING = ("network", "hidden", "layers", "activation", "agent_id", "share_parameters")
"""Arguments that the networks of policies depend on."""


class TrainingStart(NamedTuple):
    """What training starts from: nothing, a run, recorded data beside its own, or both."""

    source: dict[str, Any]
    """What the run's record says of it; empty if it starts from nothing."""
    run: "InitialRun | None" = None
    scale: Mapping[str, Any] = {}
    """Arguments that the run's values depend on, which the new program takes over."""
    statistics: dict[str, NDArray[Any]] | None = None
    """Statistics of its dataset that a baseline normalises by."""
    prior: Callable[[], Replay] | None = None
    """Loads the recorded data that a recorder learns from beside its own."""

    def check(self, program: Program, state: ArrayTree) -> None:
        """Raise what `begin` would, from the shapes of a fresh state."""
        if self.run is not None:
            self.run.check(program, state)
        if self.prior is not None and not state.capture.is_sampled:
            raise OptionError(
                "this program learns from its newest steps alone, and has no replay to add steps "
                "to: leave out --prefill."
            )

    def begin(self, program: Program, state: ArrayTree, seed: int) -> ArrayTree:
        """Return the state of a training seed, from its fresh one."""
        return state if self.run is None else self.run.begin(program, state, seed)


def start_of(args: OnlineArgs, env: Environment) -> TrainingStart:
    """Return what a recorder's arguments ask to start from.

    Raises `RunError` or `VaultError` if it cannot be read, `ShapeError` if it is of another
    environment, and `OptionError` if it cannot be continued from.
    """
    if args.side and args.prefill is not None:
        raise OptionError(
            "--prefill takes no steps of one side: vaults hold the steps of all agents. Leave out "
            "--prefill, or --side."
        )
    run = None if args.init is None else InitialRun.of(args.init, env.spec)
    source: dict[str, Any] = {} if run is None else {"init": run.about}
    scale = {} if run is None or args.init_acts else run.taken_over(args)
    if args.prefill is None:
        return TrainingStart(source, run, scale)
    if _windows(args) < 2:
        raise OptionError(
            "half of a batch of one window cannot be drawn from --prefill: give a larger "
            "--batch-size."
        )
    data = open_vault(args.prefill)
    if difference := data.spec.difference(env.spec, extras=False):
        raise ShapeError(
            f"{data.path} and {env.spec.name} differ in {difference}: give a vault recorded in "
            f"{env.spec.name}."
        )
    source["replay"] = {"vault": f"{data.name}/{data.uid}", "digest": data.known_digest()}
    return TrainingStart(source, run, scale, prior=partial(_prior, args, data))


def _prior(args: OnlineArgs, data: Dataset) -> Replay:
    """Load the data from which half of each batch of windows is drawn."""
    length: int = getattr(args, "window", 0) or getattr(args, "length", 1)
    burn_in = getattr(args, "burn_in", 0)
    return load(data, Windows(_windows(args) // 2, length, burn_in, extras=()))


def _windows(args: OnlineArgs) -> int:
    """Return how many windows a batch of a recorder has; 2 where it has no replay."""
    windows: int = getattr(args, "windows", 0) or getattr(args, "batch_size", 2)
    return windows


def start_of_baseline(args: Args, spec: EnvSpec) -> TrainingStart:
    """Return what a baseline's arguments ask to start from; raises what `start_of` raises.

    The statistics by which its networks scale observations, states, rewards and returns stay those
    of the run.
    """
    if args.init is None:
        return TrainingStart({})
    run = InitialRun.of(args.init, spec, args.normalise)
    arrays = dataset.read(local(args.init) / dataset.STATISTICS_FILE)
    statistics = {name: arrays[name] for name in arrays if dataset.is_scale(name)}
    if "reward_scale" in run.scale and getattr(args, "scale_rewards", False):
        statistics["return_scale"] = np.asarray(UNIT / run.scale["reward_scale"])
    return TrainingStart({"init": run.about}, run, run.taken_over(args), statistics)


def begin_states(
    start: TrainingStart, program: Program, states: ArrayTree, seeds: Iterable[int]
) -> ArrayTree:
    """Return the states of training seeds, ``(seeds, ...)``, after `TrainingStart.begin`."""
    fresh = (
        (seed, jax.tree.map(lambda leaf, i=i: leaf[i], states)) for i, seed in enumerate(seeds)
    )
    return stack_seeds([start.begin(program, state, seed) for seed, state in fresh])


# ---------------------------------------------------------------------------------- the run


class InitialRun(NamedTuple):
    """A run to continue from."""

    name: str
    program: Program
    states: list[ArrayTree]
    """Shapes, or arrays, of each seed's state."""
    about: dict[str, Any]
    sizes: str
    """What the network of its policy depends on, for messages."""
    scale: dict[str, float]
    """Discount and factor of the rewards of its values; empty if it has none."""

    @classmethod
    def of(cls, path: Path, spec: EnvSpec, normalise: Iterable[str] = ()) -> "InitialRun":
        """Load a run, whose networks must know observations normalised in the same way."""
        directory, record, _ = trained = TrainedRun.open(path)
        if difference := trained.spec.difference(spec, extras=False):
            raise ShapeError(
                f"{directory} and {spec.name or 'the data'} differ in {difference}: give another "
                "run."
            )
        theirs, ours = (set(x or ()) for x in (record["args"].get("normalise"), normalise))
        if theirs != ours:
            old, new = (" and ".join(sorted(inputs)) or "nothing" for inputs in (theirs, ours))
            raise OptionError(
                f"{directory} learned from data with normalised {old}, and this program learns "
                f"from data with normalised {new}: give a run that was trained with the same "
                "--normalise (a recorder normalises nothing)."
            )
        program, states = _load(trained)
        about = {
            "program": record["program"],
            "run": directory.name,
            "seeds": record["seeds"],
            "state": fingerprint([learned_fields(state) or state for state in states]),
        }
        shaping = {name: x for name, x in record["args"].items() if name in _SHAPING}
        sizes = ", ".join(f"{name}={x}" for name, x in shaping.items())
        return cls(str(directory), program, states, about, sizes, _scale(record, directory, states))

    def taken_over(self, args: Args | OnlineArgs) -> dict[str, Any]:
        """Return the arguments of its values in which a new program differs by default.

        `OptionError` if the user gave the new program others.
        """
        if not hasattr(args, "reward_scale") and not hasattr(args, "scale_rewards"):
            return {}
        values: dict[str, Any] = {}
        for name, value in self.scale.items():
            now, option = getattr(args, name, None), f"--{name.replace('_', '-')}"
            if name == "reward_scale" and getattr(args, "scale_rewards", None) is False:
                now, option = 1.0, "--no-scale-rewards"
            # Discounts of 0.999 and 1 are as far apart as 1000 steps are from all.
            if now is None or np.isclose(now, value, rtol=1e-9 if name == "gamma" else 1e-3):
                continue
            other = f", and not {now:.5g}" if now else ""  # 0 is no factor, but the fitting one
            conflict = f"{self.name} has values with {name} {value:.5g}{other}"
            if option == "--no-scale-rewards" or _was_given(args, name):
                raise OptionError(f"{conflict}: leave out {option}, or --init.")
            tracking.notice(f"{conflict}: this run has {name} {value:.5g}, too.")
            values[name] = value
        return values

    def check(self, program: Program, state: ArrayTree) -> None:
        """Raise `ShapeError` if a program, with the shapes of its state, cannot continue it."""
        if not _have_equal_shapes(self.states[0], state):
            theirs, ours = _by_name(self.program, self.states[0]), _by_name(program, state)
            _common_parts(theirs, ours, self.name, self.sizes)

    def begin(self, program: Program, state: ArrayTree, seed: int) -> ArrayTree:
        """Return the state of a seed with what one of the run's seeds has learned.

        It is the one of the same number, and others take turns, so that a seed trained alone starts
        as it does beside others. A recorder whose learner is guided starts anew, and the run's
        policy is its guide.
        """
        trained = self.states[(seed - self.about["seeds"][0]) % len(self.states)]
        if program.guided is None:
            return carry_over(self.program, trained, program, state, self.name, self.sizes)
        theirs = _by_name(self.program, trained)
        params = jax.tree_util.tree_map_with_path(
            lambda path, leaf: theirs.get(f"{_POLICY}/{_name(path)}", leaf),
            program.policy_params(state),
        )
        return program.guided(state, params)


def _scale(
    record: Mapping[str, Any], directory: Path, states: Sequence[ArrayTree]
) -> dict[str, float]:
    args = record["args"]
    if "gamma" not in args:
        return {}
    factor = float(args.get("reward_scale", 1.0))
    if factor == 0:  # one for all seeds, which differ a little
        largest = max(state.largest_return for state in states)
        if largest == 0:  # no rewards, so that the new run finds its own factor
            return {"gamma": float(args["gamma"])}
        factor = float(unit_scale(largest))
    if args.get("scale_rewards"):
        factor = UNIT / float(dataset.read(directory / dataset.STATISTICS_FILE)["return_scale"])
    return {"gamma": float(args["gamma"]), "reward_scale": factor}


def _was_given(args: Args | OnlineArgs, name: str) -> bool:
    """Whether an argument is neither its default nor from a packaged file."""
    default = next(field.default for field in fields(args) if field.name == name)
    used, setting = settings.origins_of(args), settings.origins_of(args).settings.get(name)
    is_default = getattr(args, name) == default if setting is None else setting.packaged
    return name in used.given or not is_default


def _load(trained: TrainedRun) -> tuple[Program, list[ArrayTree]]:
    """Return the program of a run, and the last state of each of its seeds."""
    directory, record, build = trained
    online, built = record["kind"] == "recorder", build(trained.spec)
    seeds, like = len(record["seeds"]), built.state
    if online and not learned_fields(like):
        raise RunError(
            f"{directory} keeps policies alone, from which no training can continue: give the run "
            "of a program that learns, such as ippo."
        )
    checkpoints = Checkpoints(directory / tracking.CHECKPOINTS)
    if online:
        # The rest depends on the environment and its opponents, which may not exist here.
        unused = dict.fromkeys(set(like._fields) - learned_fields(like).keys())
        parts = {
            "state": [like._replace(**unused)] * seeds,
            _POLICY: seeds_to_read(built.policy, seeds),
        }
        tree, _ = checkpoints.restore(parts, partly=True)
        states = [like._replace(**learned_fields(state)) for state in tree["state"]]
        if built.program.guided is not None and "init" in record:
            acting = [jax.tree.map(lambda leaf, i=i: leaf[i], tree[_POLICY]) for i in range(seeds)]
            states = [_guided(built.program, *pair) for pair in zip(states, acting, strict=True)]
    else:
        tree, _ = checkpoints.restore({"state": seeds_to_read(like, seeds)})
        states = [jax.tree.map(lambda leaf, i=i: leaf[i], tree["state"]) for i in range(seeds)]
    fields = [learned_fields(state) or state for state in states]
    require_finite(fields, f"what the run in {directory} has learned")
    return built.program, states


def _guided(program: Program, state: ArrayTree, policy: ArrayTree) -> ArrayTree:
    """Return a state with the parameters of its policy, which a better guide may have replaced."""
    params = {f"{_POLICY}/{_name(path)}": leaf for path, leaf in tree_flatten_with_path(policy)[0]}
    leaves, tree = jax.tree.flatten(state)
    for name, index in _places(program, state).items():
        leaves[index] = params.get(name.removeprefix("target "), leaves[index])
    return jax.tree.unflatten(tree, leaves)


# ---------------------------------------------------------------------------------- matching


def learned_fields(state: ArrayTree, given: Sequence[str] = ()) -> dict[str, ArrayTree]:
    """Return what was learned of a state: the fields that another run can continue from.

    ``given`` are `Program.given`.
    """
    fields, unlearned = getattr(state, "_fields", ()), {_COUNT, *given}
    names = _ONLINE if "capture" in fields else [name for name in fields if name not in unlearned]
    return {name: getattr(state, name) for name in names if name in fields}


def carry_over(
    source: Program,
    trained: ArrayTree,
    program: Program,
    state: ArrayTree,
    run: str,
    sizes: str = "",
) -> ArrayTree:
    """Return a fresh state of a program with what a seed of another run, of ``source``, learned.

    What acts must have the same sizes in both: `ShapeError` names the parameter, and ``sizes``, the
    arguments that the policy's network depends on. Other networks start anew where sizes differ.
    """
    if _have_equal_shapes(trained, state):
        has_fields = hasattr(state, "_fields")
        result = state._replace(**learned_fields(trained, program.given)) if has_fields else trained
        tracking.notice(f"continues from {run}: everything")
        return jax.tree.map(jax.numpy.asarray, result)
    theirs, ours = _by_name(source, trained), _by_name(program, state)
    common, mismatches = _common_parts(theirs, ours, run, sizes)
    leaf_of = {name: theirs[name] for name in ours if name in theirs and _part(name) in common}
    # A target network that the run lacks is the copy of its network.
    leaf_of |= {
        name: leaf_of[name.removeprefix("target ")]
        for name in ours
        if name.startswith("target ")
        and name not in theirs
        and name.removeprefix("target ") in leaf_of
    }
    adam = [name for name in ours if name.startswith(("mu ", "nu ", "count"))]
    if not all(
        name in leaf_of and np.shape(leaf_of[name]) == np.shape(ours[name]) for name in adam
    ):
        leaf_of = {name: leaf for name, leaf in leaf_of.items() if name not in adam}
    parts = sorted({_part(name) for name in leaf_of if not name.startswith("count")})
    new = sorted({_part(name) for name in ours if not name.startswith("count")} - set(parts))
    new = [f"{part} (of other sizes there)" if part in mismatches else part for part in new]
    tracking.notice(f"continues from {run}: {', '.join(parts)}; new: {', '.join(new) or 'nothing'}")
    leaves, tree = jax.tree.flatten(state)
    for name, index in _places(program, state).items():
        if name in leaf_of:
            leaves[index] = jax.numpy.asarray(leaf_of[name], leaves[index].dtype)
    return jax.tree.unflatten(tree, leaves)


def _have_equal_shapes(trained: ArrayTree, state: ArrayTree) -> bool:
    """Whether two states of baselines have the same fields, of the same shapes."""

    def shapes(tree: ArrayTree) -> list[tuple[str, tuple[int, ...]]]:
        return [(keystr(path), np.shape(leaf)) for path, leaf in tree_flatten_with_path(tree)[0]]

    online = "capture" in getattr(state, "_fields", ())
    return not online and shapes(trained) == shapes(state)


def _common_parts(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], run: str, sizes: str
) -> tuple[set[str], set[str]]:
    """Return the parts that both states have in the same sizes, and those in different sizes.

    `ShapeError` if the policy is among the latter. A policy of theirs may hold more than ours, such
    as the behaviour by which ``qmix_bcq`` chooses among actions.
    """
    common = {_part(name) for name in theirs} & {_part(name) for name in ours} | {_POLICY}
    mismatches: set[str] = set()
    for name in [*ours, *theirs]:
        part = _part(name)
        more = name not in ours and part in (_POLICY, f"target {_POLICY}")
        if part not in common or more or name.startswith(("mu ", "nu ", "count")):
            continue
        shapes = [np.shape(side[name]) if name in side else None for side in (theirs, ours)]
        if shapes[0] == shapes[1]:
            continue
        if part == _POLICY:
            old, new = ("absent" if shape is None else shape for shape in shapes)
            raise ShapeError(
                f"the policy of {run} has another network than that of the new program: {name} is "
                f"{old} there, and {new} here. Give the new program the arguments of that run "
                f"({sizes or '--hidden, --network, --agent-id ...'}), if it has them, or leave out "
                "--init."
            )
        mismatches.add(part)
    return common - mismatches, mismatches


def _part(name: str) -> str:
    """Return the part of a program that a leaf belongs to, such as "mixer" or "target mixer"."""
    for prefix in ("target ", "mu ", "nu "):
        if name.startswith(prefix):
            return ("target " if prefix == "target " else "optimiser of ") + _part(
                name.removeprefix(prefix)
            )
    return name.split("/", maxsplit=1)[0]


def _by_name(program: Program, state: ArrayTree) -> dict[str, Any]:
    leaves = jax.tree.leaves(state)
    return {name: leaves[index] for name, index in _places(program, state).items()}


def _places(program: Program, state: ArrayTree) -> dict[str, int]:
    """Return the index of each learned leaf among the leaves of a state, by a unique name."""
    paths = [path for path, _ in tree_flatten_with_path(state)[0]]
    fields = {_name(path[:1]) for path in paths}
    learned = set(learned_fields(state, program.given)) or fields
    names: dict[str, int] = {}
    params: dict[str, str] = {}
    acting, unclear = _policy_leaves(program, state), False
    for index, path in enumerate(paths):
        field, tail = _name(path[:1]), _name(path[1:])
        # Others follow the parameters in other fields.
        if field in learned - {*_APART} and "optimiser" not in field:
            name = tail if field == "params" else f"{field}/{tail}"
            unclear |= tail in params
            params.setdefault(tail, acting.get(index, name))
            names[acting.get(index, name)] = index
    for index, path in enumerate(paths):
        field, tail = _name(path[:1]), _name(path[1:])
        if field == "target" and tail in params:
            names[f"target {params[tail]}"] = index
        elif field == "moments":
            names[f"moments/{tail}"] = index
        elif "optimiser" in field and not unclear:
            entry = _adam_name(path, index, params)
            if "count" in entry and "count" in names:  # of a second optimiser
                entry = {f"count {len(names)}": index}
            names |= entry
    return names


def _adam_name(path: tuple[Any, ...], index: int, params: Mapping[str, str]) -> dict[str, int]:
    """Return the name of a leaf of an optimiser's state; empty if it is no moment of Adam."""
    for place, key in enumerate(path):
        moment, tail = getattr(key, "name", ""), _name(path[place + 1 :])
        if moment in ("mu", "nu") and tail in params:
            return {f"{moment} {params[tail]}": index}
    return {"count": index} if _name(path).endswith("count") else {}


def _name(path: tuple[Any, ...]) -> str:
    return keystr(path, simple=True, separator="/")


def _policy_leaves(program: Program, state: ArrayTree) -> dict[int, str]:
    """Return the names of a state's leaves that are parameters of the policy, by index."""
    shapes = jax.eval_shape(lambda tree: tree, state)
    jaxpr = jax.make_jaxpr(program.policy_params)(shapes).jaxpr
    places = {id(variable): index for index, variable in enumerate(jaxpr.invars)}
    acting = jax.eval_shape(program.policy_params, shapes)
    return {
        places[id(variable)]: f"{_POLICY}/{_name(path)}"
        for variable, (path, _) in zip(
            jaxpr.outvars, tree_flatten_with_path(acting)[0], strict=True
        )
        if id(variable) in places
    }
