"""Sizes of environments with leaves of many types, for tests."""

from dataclasses import replace

from offmarl.types import ArraySpec, Discrete, EnvSpec


def typed_spec(name: str = "") -> EnvSpec:
    """Return a spec with images, a tree of observations and states, all types and extras."""
    camera = {"left": ArraySpec((2, 3, 1), "uint8"), "depth": ArraySpec((2, 3), "float16")}
    return replace(
        image_spec(name),
        state="native",
        observation={"camera": camera, "speed": ArraySpec((3,)), "gear": ArraySpec((), "int8")},
        global_state={"map": ArraySpec((3, 4), "bool"), "wind": ArraySpec((2,), "bfloat16")},
        extras={
            "cost": ArraySpec(()),
            "message": ArraySpec((2, 5), "int16"),
            "light": ArraySpec((3,), "uint16"),
            "seed": ArraySpec((), "int32"),
        },
    )


def image_spec(name: str = "", shape: tuple[int, ...] = (8, 8, 3)) -> EnvSpec:
    """Return a spec of uint8 images as observations, without a state."""
    return EnvSpec(
        name,
        num_agents=2,
        observation_size=0,
        state_size=0,
        action=Discrete(4),
        state="concatenated",
        observation=ArraySpec(shape, "uint8"),
    )
