"""What is drawn for each episode, and the ranges.

Parts are named in the option ``randomise``. All draws are in the environment's state, so a recorded
state has them, too.
"""

from collections.abc import Collection

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from offmarl.envs.swarm.dynamics import Disturbance, DroneParams

DISTURBANCES = ("wind", "noise", "speed")
"""The parts of ``randomise="all"``."""
PARTS = (*DISTURBANCES, "mass", "drag", "thrust", "delay", "dropout")

WIND = 0.25
"""Largest speed of the wind, in cells per step."""
SPREAD = 0.25
"""Top speed, mass and thrust are within this fraction of those of the drone's kind."""
MOST_DELAY = 2
"""Largest delay of commands, in steps."""

_NOISE = 0.1
_DRAG = 2.0
_DROPOUT = 0.3
_FIRST_KEY = 1000  # `jax.random.fold_in` with a small number gives the keys of `split`


def draw_disturbance(
    wind_key: PRNGKeyArray, noise_key: PRNGKeyArray, parts: Collection[str], dims: int
) -> Disturbance:
    """Draw the wind, in any direction, and the size of the sensor noise."""
    wind, noise = jnp.zeros(dims), jnp.zeros(())
    if "wind" in parts:
        direction_key, strength_key = jax.random.split(wind_key)
        direction = jax.random.normal(direction_key, (dims,))
        strength = jax.random.uniform(strength_key, maxval=WIND)
        wind = strength * direction / jnp.maximum(jnp.linalg.norm(direction), 1e-6)
    if "noise" in parts:
        noise = jax.random.uniform(noise_key, maxval=_NOISE)
    return Disturbance(wind, noise)


def draw_params(
    key: PRNGKeyArray, speed_key: PRNGKeyArray, parts: Collection[str], params: DroneParams
) -> DroneParams:
    """Draw factors of the parameters of each drone, and the parameters that vary only by draws."""
    keys = {name: jax.random.fold_in(key, _FIRST_KEY + i) for i, name in enumerate(PARTS)}
    shape = params.mass.shape
    standard = jnp.ones(shape)

    def within_spread(key: PRNGKeyArray) -> Float[Array, "N"]:
        return jax.random.uniform(key, shape, minval=1 - SPREAD, maxval=1 + SPREAD)

    if "speed" in parts:
        params = params._replace(top_speed=within_spread(speed_key) * params.top_speed)
    if "mass" in parts:
        params = params._replace(mass=within_spread(keys["mass"]) * params.mass)
    if "thrust" in parts:
        thrust = standard if params.thrust is None else params.thrust
        params = params._replace(thrust=within_spread(keys["thrust"]) * thrust)
    if "drag" in parts:
        drag = standard if params.drag is None else params.drag
        power = jax.random.uniform(keys["drag"], shape, minval=-1.0)
        params = params._replace(drag=_DRAG**power * drag)
    if "delay" in parts:
        delay = jax.random.randint(keys["delay"], shape, 0, MOST_DELAY + 1, jnp.int32)
        params = params._replace(delay=delay)
    if "dropout" in parts:
        dropout = jax.random.uniform(keys["dropout"], shape, maxval=_DROPOUT)
        params = params._replace(dropout=dropout)
    return params
