"""Views, steps and windows that tests make up: blank ones, of which each test says the rest."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from offmarl.testing import entries
from offmarl.types import Continuous, Discrete, EnvSpec, Sequence, Transition, View, map_tree

SPEC = EnvSpec("", num_agents=2, observation_size=2, state_size=2, action=Discrete(3))


def view_of(spec: EnvSpec, seen: Any = 0.0, **fields: Any) -> View:
    """Views whose every number is that of ``seen``, where everyone lives and may do anything."""
    seen = jnp.asarray(seen, jnp.float32)
    agents = (*seen.shape, spec.num_agents)
    own, shared = (*agents, spec.observation_size), (*seen.shape, spec.state_size)
    blank = {
        "observation": jnp.broadcast_to(seen[..., None, None], own),
        "state": jnp.broadcast_to(seen[..., None], shared),
        "legal_actions": jnp.ones((*agents, spec.action_size), bool),
        "alive": jnp.ones(agents, bool),
    }
    return View(**blank | fields)


def random_view(spec: EnvSpec, *lead: int, seed: int = 0) -> View:
    """Random views ``(*lead, ...)`` of any leaves, where everyone lives and may do anything."""
    rng = np.random.default_rng(seed)
    view = map_tree(lambda leaf: jnp.asarray(entries(leaf, lead, rng)), spec.view_spec)
    yes = jnp.ones_like(view.legal_actions), jnp.ones_like(view.alive)
    return view._replace(legal_actions=yes[0], alive=yes[1])


def steps_of(spec: EnvSpec, last: Any, seen: Any = 0.0, **fields: Any) -> Transition:
    """Steps ``(T, E, ...)`` or ``(E, T, ...)`` that earn nothing and are truncated at the last."""
    last = jnp.asarray(last, bool)
    agents = (*last.shape, spec.num_agents)
    continuous = isinstance(spec.action, Continuous)
    action = (*agents, spec.action_size) if continuous else agents
    blank = {
        "view": view_of(spec, jnp.broadcast_to(jnp.asarray(seen), last.shape)),
        "action": jnp.zeros(action, jnp.float32 if continuous else jnp.int32),
        "reward": jnp.zeros(agents),
        "terminated": jnp.zeros(agents, bool),
        "truncated": jnp.broadcast_to(last[..., None], agents),
        "last": last,
        "behaviour_log_prob": jnp.zeros(agents),
        "policy_id": jnp.zeros(last.shape, jnp.int32),
    }
    return Transition(**blank | fields)


def sequence(action: Any, spec: EnvSpec = SPEC, seen: Any = 0.0, **fields: Any) -> Sequence:
    """Windows ``(B, T, ...)`` inside of episodes, in which nothing is earned."""
    action = jnp.asarray(action)
    lead, slots = action.shape[:2], (action.shape[0], action.shape[1] + 1)
    of_view = {name: fields.pop(name) for name in View._fields if name in fields}
    agents = (*lead, spec.num_agents)
    blank = {
        "view": view_of(spec, jnp.broadcast_to(jnp.asarray(seen), slots), **of_view),
        "action": action,
        "reward": jnp.zeros(agents),
        "terminated": jnp.zeros(agents, bool),
        "truncated": jnp.zeros(agents, bool),
        "behaviour_log_prob": jnp.zeros(agents),
        "mask": jnp.ones(lead, bool),
        "next_known": jnp.ones(lead, bool),
        "first": jnp.zeros(slots, bool),
    }
    return Sequence(**blank | fields)


def zeros_like(shapes: Any) -> Any:
    """A tree of zeros of these shapes, such as `jax.eval_shape` finds without compiling."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
