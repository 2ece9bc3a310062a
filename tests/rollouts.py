"""Blank views, steps and windows, of which each test sets the fields that it needs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from offmarl.testing import entries
from offmarl.types import Continuous, Discrete, EnvSpec, Sequence, Transition, View, map_tree

SPEC = EnvSpec("", num_agents=2, observation_size=2, state_size=2, action=Discrete(3))


def view_of(spec: EnvSpec, seen: Any = 0.0, **fields: Any) -> View:
    """Return views with ``seen`` in every entry; all agents live, and all actions are legal."""
    xp = jnp if isinstance(seen, jax.Array) else np  # NumPy compiles nothing
    seen = xp.asarray(seen, np.float32)
    agents = (*seen.shape, spec.num_agents)
    own, shared = (*agents, spec.observation_size), (*seen.shape, spec.state_size)
    blank = {
        "observation": xp.broadcast_to(seen[..., None, None], own),
        "state": xp.broadcast_to(seen[..., None], shared),
        "legal_actions": np.ones((*agents, spec.action_size), bool),
        "alive": np.ones(agents, bool),
    }
    return jax.tree.map(jnp.asarray, View(**blank | fields))


def random_view(spec: EnvSpec, *lead: int, seed: int = 0) -> View:
    """Return random views ``(*lead, ...)``; all agents live, and all actions are legal."""
    rng = np.random.default_rng(seed)
    view = map_tree(lambda leaf: jnp.asarray(entries(leaf, lead, rng)), spec.view_spec)
    yes = jnp.ones_like(view.legal_actions), jnp.ones_like(view.alive)
    return view._replace(legal_actions=yes[0], alive=yes[1])


def steps_of(spec: EnvSpec, last: Any, seen: Any = 0.0, **fields: Any) -> Transition:
    """Return steps ``(T, E, ...)`` or ``(E, T, ...)`` without reward, truncated at the last."""
    last = np.asarray(last, bool)
    agents = (*last.shape, spec.num_agents)
    continuous = isinstance(spec.action, Continuous)
    action = (*agents, spec.action_size) if continuous else agents
    blank = {
        "view": view_of(spec, seen if np.ndim(seen) else np.full(last.shape, seen)),
        "action": np.zeros(action, np.float32 if continuous else np.int32),
        "reward": np.zeros(agents, np.float32),
        "terminated": np.zeros(agents, bool),
        "truncated": np.broadcast_to(last[..., None], agents),
        "last": last,
        "behaviour_log_prob": np.zeros(agents, np.float32),
        "policy_id": np.zeros(last.shape, np.int32),
    }
    return jax.tree.map(jnp.asarray, Transition(**blank | fields))


def sequence(action: Any, spec: EnvSpec = SPEC, seen: Any = 0.0, **fields: Any) -> Sequence:
    """Return windows ``(B, T, ...)`` inside of episodes, without rewards."""
    action = jnp.asarray(action)
    lead, slots = action.shape[:2], (action.shape[0], action.shape[1] + 1)
    of_view = {name: fields.pop(name) for name in View._fields if name in fields}
    agents = (*lead, spec.num_agents)
    blank = {
        "view": view_of(spec, seen if np.ndim(seen) else np.full(slots, seen), **of_view),
        "action": action,
        "reward": np.zeros(agents, np.float32),
        "terminated": np.zeros(agents, bool),
        "truncated": np.zeros(agents, bool),
        "behaviour_log_prob": np.zeros(agents, np.float32),
        "mask": np.ones(lead, bool),
        "next_known": np.ones(lead, bool),
        "first": np.zeros(slots, bool),
    }
    return jax.tree.map(jnp.asarray, Sequence(**blank | fields))


def zeros_like(shapes: Any) -> Any:
    """Return a tree of zeros with the shapes that `jax.eval_shape` returns."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def numbers(*shape: int, seed: int = 0) -> jax.Array:
    """Return normal random numbers of a shape."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def random_params(init: Any, *inputs: Any) -> Any:
    """Return random numbers of the shapes of the parameters that ``init(key, *inputs)`` draws."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(init, jax.random.key(0), *inputs))
    arrays = [numbers(*leaf.shape, seed=seed) for seed, leaf in enumerate(leaves, 1)]
    return jax.tree.unflatten(tree, arrays)


def dense(params: Any, layer: str, x: Any) -> np.ndarray:
    """Apply a linear layer of a network by hand."""
    return np.asarray(x @ params[layer]["kernel"] + params[layer]["bias"])


def differ(first: Any, second: Any) -> bool:
    """Return whether any leaf of two trees differs."""
    same = jax.tree.map(
        lambda x, y: np.array_equal(x, y, equal_nan=x.dtype.kind == "f"), first, second
    )
    return not all(jax.tree.leaves(same))
