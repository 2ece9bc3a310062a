"""What goes into the losses of a program: read off the computation that JAX traces.

Nothing is declared by hand. The fields of the batch are marked, the update of a program is traced,
and each value is followed through the traced operations. So a new program has a diagram.
"""

import atexit
import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

import offmarl
from offmarl import envs, programs
from offmarl.errors import ShapeError
from offmarl.networks import PolicyConfig, make_policy
from offmarl.programs.experience.buffer import Capture
from offmarl.programs.program import hyperparameters, structure
from offmarl.rollout import RolloutState
from offmarl.types import Sequence, Timestep, Transition, View

EXAMPLES = ("classic/bridge", "swarm/coverage-3:action=continuous")
"""Environments of the traced batches, which a program is tried with in turn: with discrete actions
and with continuous ones. Any other has the same fields."""

ACTION = "best action"
"""The output of the policy, beside the losses."""

_MARK = "offmarl:"

Tags = frozenset["Source | Weights"]
NOTHING: Tags = frozenset()


class Source(NamedTuple):
    """Data: a field of the batch, or what a network made of others."""

    name: str
    is_network: bool = False


class Weights(NamedTuple):
    """The parameters of a network, before they met any data."""

    network: str


@dataclasses.dataclass(frozen=True)
class Flow:
    """What a program computes, as arrows from a name to a name."""

    fields: tuple[str, ...]
    networks: tuple[str, ...]
    results: tuple[str, ...]
    """Losses, and `ACTION`."""
    arrows: frozenset[tuple[str, str]]

    def targets(self, name: str) -> frozenset[str]:
        """Return where the arrows of a name lead."""
        return frozenset(stop for start, stop in self.arrows if start == name)


def flow_of(module: ModuleType) -> Flow:
    """Trace a program.

    Parameters
    ----------
    module
        The program: ``Args`` and ``make``.
    """
    function, inputs, tags = _computation(module, _example_of(module))
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*inputs)
    trace = Trace()
    tags_by_shape = dict(zip(shapes, trace.run(traced.jaxpr, tags), strict=True))
    losses = {name: t for name, t in tags_by_shape.items() if "loss" in name or name == ACTION}
    arrows = trace.arrows | {(s.name, name) for name, of in losses.items() for s in _data(of)}
    starts = {start for start, _ in arrows}
    networks = {tag.network for leaf in tags for tag in leaf if isinstance(tag, Weights)}
    return Flow(
        tuple(sorted(starts - networks)),
        tuple(sorted(networks & starts)),
        tuple(sorted(losses, key=lambda name: (name == ACTION, name))),
        frozenset(arrow for arrow in arrows if arrow[0] in starts),
    )


# ---------------------------------------------------------------------------------- programs


def _example_of(module: ModuleType) -> str:
    """Return the first example whose actions a program can handle."""
    for name in EXAMPLES[:-1]:
        with contextlib.suppress(ShapeError):
            _make(module, _arguments(module), name)
            return name
    return EXAMPLES[-1]


def _arguments(module: ModuleType) -> Any:
    online = issubclass(module.Args, programs.OnlineArgs)
    return module.Args() if online else module.Args(vault=Path(), updates=100)


def _make(module: ModuleType, args: Any, example: str) -> Any:
    dataset = _recorded(example)
    online = isinstance(args, programs.OnlineArgs)
    source = _Marked(envs.make(example)) if online else programs.DatasetStatistics(dataset)
    return module.make(dataset.spec, structure(args), source)


def _computation(
    module: ModuleType, example: str
) -> tuple[Callable[..., Any], tuple[Any, ...], list[Tags]]:
    """Return a function of a program's losses and action, its inputs, and what those are."""
    args = _arguments(module)
    program, online = _make(module, args, example), isinstance(args, programs.OnlineArgs)
    hyper, key = hyperparameters(args), jax.random.key(0)
    state = jax.eval_shape(program.init, key, hyper)
    batch = None if online else _batch(example, program.return_to_go)
    policy = program.policy(True)

    def compute(state: Any, batch: Any, key: Any, hyper: Any, view: Any) -> dict[str, Any]:
        batch, view = _mark(batch), _mark(view)
        found = {}
        for stage in program.stages:
            metrics = stage.update(state, batch, key, hyper)[1]
            # Of others, such as the norm of gradients, the backward pass would be followed, too.
            found |= {name: value for name, value in metrics.items() if "loss" in name}
        params = program.policy_params(state)
        carry = policy.initial_carry()
        found[ACTION] = policy.act(params, carry, view.observation, view.legal_actions, key)[0]
        return found

    view = View(*(jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for x in _batch(example, None).view))
    rest = (batch, key, hyper, view)
    tags = [*_state_tags(state), *([NOTHING] * len(jax.tree.leaves(rest)))]
    return compute, (state, *rest), tags


@cache
def _recorded(example: str) -> offmarl.vault.Dataset:
    """Return a recording of random play, for programs that compute statistics of their dataset."""
    env = envs.make(example)
    folder = tempfile.mkdtemp(prefix="offmarl-docs-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    place = Path(folder) / "example.vlt/random"
    policy = make_policy(PolicyConfig("random"), env.spec)
    programs.record_policy(env, policy, (), place, steps=256, num_envs=4)
    return offmarl.open(place)


def _batch(example: str, return_to_go: float | None) -> Sequence:
    """Return the shapes of a batch with all fields that the program gets."""
    replay = _recorded(example).replay(batch=2, length=3, return_to_go=return_to_go)
    batch: Sequence = jax.eval_shape(replay.sample, jax.random.key(0))
    return batch


_RECORDS = (View, Sequence, Timestep, Transition)
_COLLECTED = (RolloutState, Capture)


def _mark(tree: Any) -> Any:
    """Mark the arrays of a tree with the names of their fields; others count as no data."""
    flat = [
        x
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        else checkpoint_name(x, f"{_MARK}{name or ''}")
        for name, x in _named(tree)
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), flat)


def _named(tree: Any) -> Iterator[tuple[str | None, Any]]:
    """Yield the arrays of a tree, with the names of those that are fields of a record."""
    if isinstance(tree, _RECORDS):
        for name, value in zip(tree._fields, tree, strict=True):
            if isinstance(value, _RECORDS):
                yield from _named(value)
            elif value is not None:
                yield (None if name == "last" else name), value
    else:
        for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, _RECORDS)):
            yield from _named(node) if isinstance(node, _RECORDS) else [(None, node)]


@dataclasses.dataclass(frozen=True)
class _Marked:
    """An environment whose views, rewards and ends are marked."""

    inner: Any

    @property
    def spec(self) -> Any:
        return self.inner.spec

    def reset(self, key: Any) -> Any:
        return _mark(self.inner.reset(key))

    def step(self, key: Any, state: Any, action: Any) -> Any:
        return _mark(self.inner.step(key, state, action))


def _state_tags(state: Any) -> Iterator[Tags]:
    """Yield what each leaf of a program's state is: a network's weights, data, or neither."""

    def is_whole(node: Any) -> bool:
        return isinstance(node, _COLLECTED) or type(node).__module__.startswith("optax")

    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_whole):
        if is_whole(node):
            for name, _ in _named(node):
                yield frozenset({Source(name)}) if name else NOTHING
        elif node.ndim and jnp.issubdtype(node.dtype, jnp.floating):
            yield frozenset({Weights(_network(path))})
        else:
            yield NOTHING


def _network(path: Any) -> str:
    """Return the name of a network from the path of its parameters in the state."""
    names = []
    for key in path:
        if not isinstance(key, jax.tree_util.GetAttrKey):
            break
        names.append(key.name)
    parts = [name for name in names if name not in ("params", "network", "log_std")]
    return " ".join(parts) or "network"


# ---------------------------------------------------------------------------------- tracing


_APPLIES = {"dot_general", "conv_general_dilated", "gather"}
"""Operations in which a network's weights meet its input; others shift, scale or combine."""


def _data(tags: Tags) -> frozenset[Source]:
    return frozenset(tag for tag in tags if isinstance(tag, Source))


class Trace:
    """Follows data through traced operations, and collects the arrows into networks."""

    def __init__(self) -> None:
        self.arrows: set[tuple[str, str]] = set()

    def run(self, jaxpr: Jaxpr, inputs: list[Tags], wanted: list[bool] | None = None) -> list[Tags]:
        """Return what the outputs of a computation depend on; unwanted ones are not followed."""
        tags_of: dict[Any, Tags] = dict(zip(jaxpr.invars, inputs, strict=True))
        wanted = wanted or [True] * len(jaxpr.outvars)

        def of(var: Any) -> Tags:
            return NOTHING if isinstance(var, Literal) else tags_of.get(var, NOTHING)

        for eqn, used in _needed(jaxpr, wanted):
            tags = self._step(eqn, [of(var) for var in eqn.invars], used)
            tags_of |= dict(zip(eqn.outvars, tags, strict=True))
        return [of(var) for var in jaxpr.outvars]

    def _step(self, eqn: Any, inputs: list[Tags], used: list[bool]) -> list[Tags]:
        name, params = eqn.primitive.name, eqn.params
        if name == "name" and params["name"].startswith(_MARK):
            field = params["name"].removeprefix(_MARK)
            return [frozenset({Source(field)} if field else ())]
        if name == "scan":
            return self._scan(eqn, inputs, used)
        if name == "while":
            return self._while(params, inputs)
        if name == "cond":
            return self._cond(params["branches"], inputs, used)
        inner = next((p for p in params.values() if isinstance(p, ClosedJaxpr | Jaxpr)), None)
        if inner is not None and len(_open(inner).invars) == len(inputs):
            return self.run(_open(inner), inputs, used)
        return [self._combine(name, inputs)] * len(eqn.outvars)

    def _combine(self, name: str, inputs: list[Tags]) -> Tags:
        every = frozenset().union(*inputs)
        data, weights = _data(every), every - _data(every)
        if not data or not weights:
            return every
        networks = frozenset(Source(tag.network, True) for tag in weights)  # type: ignore[union-attr]
        if name not in _APPLIES:
            return data | networks
        self.arrows |= {(d.name, n.name) for d in data for n in networks if d != n}
        return networks

    def _cond(self, branches: Any, inputs: list[Tags], used: list[bool]) -> list[Tags]:
        results = [self.run(branch.jaxpr, inputs[1:], used) for branch in branches]
        return [frozenset().union(inputs[0], *tags) for tags in zip(*results, strict=True)]

    def _while(self, params: Mapping[str, Any], inputs: list[Tags]) -> list[Tags]:
        skipped, constants = params["cond_nconsts"], params["body_nconsts"]
        fixed, carry = inputs[skipped:][:constants], inputs[skipped + constants :]
        body = params["body_jaxpr"].jaxpr
        return self._loop(lambda now: self.run(body, [*fixed, *now]), carry)

    def _scan(self, eqn: Any, inputs: list[Tags], used: list[bool]) -> list[Tags]:
        params, body = eqn.params, _open(eqn.params["jaxpr"])
        # The body has one axis less of what is scanned over or stacked. (JAX 0.12 no longer keeps
        # the numbers of constants and of carried values among the parameters.)
        width = sum(_same_rank(eqn.outvars, body.outvars))
        fixed = sum(_same_rank(eqn.invars, body.invars)) - width
        constants = inputs[:fixed]
        carry, slices = inputs[fixed:][:width], inputs[fixed + width :]
        # Weights that the loop updates stay weights: their gradients are not followed.
        free = [not tags or bool(_data(tags)) for tags in carry]
        wanted = [use and may for use, may in zip(used, free + [True] * len(used), strict=False)]
        while (more := _carried(body, wanted, fixed, free)) != wanted:
            wanted = more
        outputs: list[Tags] = []

        def turn(now: list[Tags]) -> list[Tags]:
            outputs[:] = self.run(body, [*constants, *now, *slices], wanted)
            return outputs[:width]

        after = self._loop(turn, carry)
        if params["length"]:  # then nothing is left of the values before the first turn
            after = [
                new if may else old for old, new, may in zip(after, outputs, free, strict=False)
            ]
        return [*after, *outputs[width:]]

    def _loop(self, turn: Callable[[list[Tags]], list[Tags]], carry: list[Tags]) -> list[Tags]:
        """Repeat the body of a loop until nothing changes."""
        weights = [bool(tags) and not _data(tags) for tags in carry]
        before = set(self.arrows)
        while True:
            self.arrows = set(before)
            after = [
                old if fixed else old | new
                for fixed, old, new in zip(weights, carry, turn(carry), strict=True)
            ]
            if after == carry:
                return after
            carry = after


def _same_rank(outside: Any, inside: Any) -> Iterator[bool]:
    for out, into in zip(outside, inside, strict=True):
        yield len(out.aval.shape) == len(into.aval.shape)


def _open(jaxpr: Any) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _carried(body: Jaxpr, wanted: list[bool], fixed: int, free: list[bool]) -> list[bool]:
    """Return the outputs of a loop's body that its wanted outputs need from the turn before."""
    live = {id(var) for eqn, _ in _needed(body, wanted) for var in eqn.invars}
    live |= {id(v) for v, want in zip(body.outvars, wanted, strict=True) if want}
    carry = body.invars[fixed:][: len(free)]
    needed = [may and id(var) in live for var, may in zip(carry, free, strict=True)]
    return [a or b for a, b in zip(wanted, needed + [False] * len(wanted), strict=False)]


def _needed(jaxpr: Jaxpr, wanted: list[bool]) -> list[tuple[Any, list[bool]]]:
    """Return the operations that wanted outputs need, in order, and which of their outputs."""
    live = {id(v) for v, want in zip(jaxpr.outvars, wanted, strict=True) if want}
    equations = []
    for eqn in reversed(jaxpr.eqns):
        used = [id(var) in live for var in eqn.outvars]
        if any(used):
            live |= {id(var) for var in eqn.invars}
            equations.append((eqn, used))
    return equations[::-1]
