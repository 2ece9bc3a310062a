"""Building JaxMARL's environments from what a name can say."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from offmarl.envs import extras
from offmarl.envs.families import Option
from offmarl.errors import OptionError

_CLASSES = {
    "MPE_simple_v3": "SimpleMPE",
    "MPE_simple_spread_v3": "SimpleSpreadMPE",
    "MPE_simple_tag_v3": "SimpleTagMPE",
    "MPE_simple_adversary_v3": "SimpleAdversaryMPE",
    "MPE_simple_push_v3": "SimplePushMPE",
    "MPE_simple_crypto_v3": "SimpleCryptoMPE",
    "MPE_simple_speaker_listener_v4": "SimpleSpeakerListenerMPE",
    "MPE_simple_reference_v3": "SimpleReferenceMPE",
    "MPE_simple_world_comm_v3": "SimpleWorldCommMPE",
    "MPE_simple_facmac_v1": "SimpleFacmacMPE",
    "MPE_simple_facmac_3a_v1": "SimpleFacmacMPE3a",
    "MPE_simple_facmac_6a_v1": "SimpleFacmacMPE6a",
    "MPE_simple_facmac_9a_v1": "SimpleFacmacMPE9a",
    "HeuristicEnemySMAX": "HeuristicEnemySMAX",
    "SMAX": "SMAX",
    "overcooked": "Overcooked",
    "overcooked_v2": "OvercookedV2",
    "jaxnav": "JaxNav",
    "hanabi": "Hanabi",
    "switch_riddle": "SwitchRiddle",
    "coin_game": "CoinGame",
    "storm": "InTheGrid",
    "storm_2p": "InTheGrid_2p",
    "storm_np": "InTheMatrix",
    "ant_4x2": "Ant",
    "halfcheetah_6x1": "HalfCheetah",
    "hopper_3x1": "Hopper",
    "humanoid_9|8": "Humanoid",
    "walker2d_2x3": "Walker2d",
}

_SHORTENED = {"coin_game", "storm", "storm_2p", "storm_np"}
"""Those whose ``step_env`` resets in an episode's last step, which must not come."""

_MABRAX = {"ant_4x2", "halfcheetah_6x1", "hopper_3x1", "humanoid_9|8", "walker2d_2x3"}

_NOT_OPTIONS = {
    "auto_reset",  # resets are ours
    "num_outer_steps",  # episodes of episodes, whose boundaries nothing would record
    "scenario",  # the name says
    "layout",
    "num_allies",
    "num_enemies",
}

_NO_ARGUMENTS_OF_MPE = {"num_agents", "num_landmarks", "action_type", "dim_c", "dim_p"}
"""Arguments of MPE's base class that its subclasses give it themselves."""


def options_of(env_id: str) -> dict[str, Option]:
    """Return the arguments of an environment's class that can stand in a name, with defaults.

    An ``agent_view_size`` of 0 stands for None: the cooks see all of the kitchen.
    """
    cls = _class_of(env_id)
    own, passed_on = _arguments_of(cls)
    if env_id == "HeuristicEnemySMAX":
        own |= _arguments_of(_class_of("SMAX"))[0]
    elif env_id in _MABRAX:
        own |= _arguments_of(cls.__mro__[1])[0]
    elif passed_on:
        base = _arguments_of(_class_of("MPE_simple_v3"))[0]
        own = {k: v for k, v in base.items() if k not in _NO_ARGUMENTS_OF_MPE} | own
    if env_id == "overcooked_v2":
        own["agent_view_size"] = 0
    kinds = (bool, int, float, str)
    return {k: v for k, v in own.items() if type(v) in kinds and k not in _NOT_OPTIONS}


def build(env_id: str, arguments: Mapping[str, Option]) -> Any:
    """Build an environment of JaxMARL.

    Raises
    ------
    OptionError
        JaxMARL does not take the arguments.
    """
    try:
        with _no_log() if env_id in _MABRAX else nullcontext():
            return _class_of(env_id)(**_objects(env_id, arguments))
    except (TypeError, ValueError, AssertionError, LookupError, NotImplementedError) as error:
        listed = ", ".join(f"{name}={value}" for name, value in arguments.items())
        raise OptionError(f"JaxMARL's {env_id} cannot be made with {listed}: {error}") from error


@contextmanager
def _no_log() -> Iterator[None]:
    """Keep MuJoCo from writing warnings to a file in the user's working directory.

    They are of what JaxMARL's bodies are described with, which no user can change.
    """
    mujoco = extras.load("mujoco", "mabrax")
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda message: None)  # noqa: ARG005 - how MuJoCo calls it
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)


def _objects(env_id: str, arguments: Mapping[str, Option]) -> dict[str, Any]:
    """Return what the class is called with, which is more than a name can hold."""
    given: dict[str, Any] = dict(arguments)
    if "SMAX" in env_id:
        smax = extras.load("jaxmarl.environments.smax", "envs")
        given["scenario"] = smax.map_name_to_scenario(given["scenario"])
    if env_id == "overcooked":
        layouts = extras.load("jaxmarl.environments", "envs").overcooked_layouts
        given["layout"] = layouts[given["layout"]]
    if given.get("agent_view_size") == 0:
        given["agent_view_size"] = None
    if env_id in _SHORTENED:
        given["num_inner_steps"] = 1 + given.get(
            "num_inner_steps", options_of(env_id)["num_inner_steps"]
        )
    if env_id in _MABRAX:
        given["auto_reset"] = False
    return given


def _class_of(env_id: str) -> Any:
    if env_id in _MABRAX:
        extras.load("brax", "mabrax")
    return getattr(extras.load("jaxmarl.registration", "envs"), _CLASSES[env_id])


def _arguments_of(cls: Any) -> tuple[dict[str, Any], bool]:
    """Return a class's arguments with defaults, and whether it passes others on to its base."""
    parameters = inspect.signature(cls).parameters.values()
    passed_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return {parameter.name: parameter.default for parameter in parameters}, passed_on
