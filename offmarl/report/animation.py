"""Watching a policy: episodes of environments that can be drawn, as pictures and animations.

An environment can be drawn if it has a method ``scene(state)`` that returns a `Scene`. A scene of
three dimensions is seen from above and aside, each drone on a stalk that stands on the floor.
"""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float

from offmarl.errors import OptionError
from offmarl.report.scenery import draw_scene, legend

if TYPE_CHECKING:
    from jaxtyping import Array, PRNGKeyArray
    from PIL.Image import Image as Picture

    from offmarl.envs.base import Environment, Scene
    from offmarl.types import ArrayTree, Policy

KINDS = ("gif", "mp4", "png")

_FRAMES_PER_SECOND = 10
_PIXELS = 420
_TRAIL = 6
_COLOURS = 64
"""Of a GIF; few make a small file."""


class Playback(NamedTuple):
    """One episode, to be watched; T counts its first instant too."""

    name: str
    scenes: list[Scene]
    """T of them."""
    score: Float[np.ndarray, "T"]
    """The return so far, the mean over agents."""


def play(env: Environment, policy: Policy, params: ArrayTree, key: PRNGKeyArray) -> Playback:
    """Play one episode and keep what there is to see.

    Raises
    ------
    OptionError
        The environment cannot be drawn.
    """
    import jax

    if not hasattr(env, "scene") or env.spec.time_limit is None:
        raise OptionError(
            f"{env.spec.name} cannot be drawn: choose a swarm/ task or classic/bridge, or give an "
            "environment of your own a method scene(state) and a time limit."
        )
    scenes, reward, last = jax.device_get(jax.jit(partial(_episode, env, policy))(params, key))
    stop = len(last) if not last.any() else int(last.argmax()) + 1
    leaves, shape = jax.tree.flatten(scenes)
    steps = [jax.tree.unflatten(shape, [leaf[t] for leaf in leaves]) for t in range(stop)]
    return Playback(env.spec.name, steps, np.cumsum(reward[:stop], dtype=float))


def _episode(
    env: Any, policy: Policy, params: ArrayTree, key: PRNGKeyArray
) -> tuple[Scene, Float[Array, "T"], Any]:
    import jax
    import jax.numpy as jnp

    def step(carry: ArrayTree, keys: Any) -> tuple[ArrayTree, ArrayTree]:
        state, view, memory = carry
        action, _, memory = policy.act(
            params, memory, view.observation, view.legal_actions, keys[0]
        )
        state, timestep = env.step(keys[1], state, action)
        seen = env.scene(state), timestep.reward.mean(), timestep.last
        return (state, timestep.view, memory), seen

    reset_key, step_key = jax.random.split(key)
    state, timestep = env.reset(reset_key)
    first = env.scene(state), jnp.zeros(()), jnp.zeros((), bool)
    keys = jax.random.split(step_key, (env.spec.time_limit, 2))
    _, rest = jax.lax.scan(step, (state, timestep.view, policy.initial_carry()), keys)
    whole: tuple[Scene, Float[Array, "T"], Any] = jax.tree.map(
        lambda one, more: jnp.concatenate([jnp.asarray(one)[None], more]), first, rest
    )
    return whole


def save(playback: Playback, path: Path) -> None:
    """Write an episode as an animation (``.gif``, ``.mp4``), or its middle as a picture (``.png``).

    Raises
    ------
    OptionError
        The suffix is another, or films cannot be made on this machine.
    """
    kind = path.suffix.removeprefix(".").lower()
    if kind not in KINDS:
        raise OptionError(
            f"an episode cannot be written to {path}: end it in .{' or .'.join(KINDS)}."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "mp4":
        _save_film(playback, path)
    elif kind == "gif":
        path.write_bytes(to_gif(playback))
    else:
        middle = len(playback.scenes) // 2
        frame(playback, middle).save(path)


def to_gif(playback: Playback, every: int = 1) -> bytes:
    """Return an episode as a GIF that plays for ever; ``every`` leaves frames of a long one out."""
    from PIL import Image

    images = list(frames(playback, every))
    palette = _palette(playback, images)
    first, *rest = [one.quantize(palette=palette, dither=Image.Dither.NONE) for one in images]
    file = io.BytesIO()
    pause = [1000 // _FRAMES_PER_SECOND] * len(rest) + [1500]
    first.save(file, "gif", save_all=True, append_images=rest, duration=pause, loop=0)
    return file.getvalue()


def _palette(playback: Playback, images: Sequence[Picture]) -> Picture:
    """Return one palette for all frames, so that a frame differs in little from the one before.

    It has the exact colours of whatever the legend names, in any frame; the rest come from three
    frames.
    """
    from matplotlib.colors import to_rgb
    from PIL import Image

    entries = [entry for scene in playback.scenes for entry in legend(scene)]
    named = sorted({to_rgb(entry.get_color()) for entry in entries})
    kept = [round(255 * part) for colour in named for part in colour]
    some = np.concatenate([np.asarray(images[at]) for at in (0, len(images) // 2, -1)])
    rest = Image.fromarray(some).quantize(_COLOURS - len(named), method=Image.Quantize.MAXCOVERAGE)
    palette = Image.new("P", (1, 1))
    palette.putpalette(kept + (rest.getpalette() or []))
    return palette


def frames(playback: Playback, every: int = 1) -> Iterator[Picture]:
    """Draw the scenes one after the other, the last one always."""
    last = len(playback.scenes) - 1
    return (frame(playback, time) for time in (*range(0, last, every), last))


def frame(playback: Playback, time: int) -> Picture:
    """Draw the scene after so many steps."""
    from matplotlib.figure import Figure
    from PIL import Image

    scene = playback.scenes[time]
    figure = Figure(figsize=(_PIXELS / 100, _PIXELS / 100 + 0.6), dpi=100)
    draw_scene(
        figure.add_axes((0.02, 0.07, 0.96, 0.85)),
        scene,
        playback.scenes[max(0, time - _TRAIL) : time],
    )
    title = f"{playback.name}   step {time}   return {round(playback.score[time], 1) + 0.0}"
    figure.text(0.03, 0.955, title, fontsize=9, color="#374151")
    entries = legend(scene)
    figure.legend(
        handles=entries,
        loc="lower center",
        ncols=max(len(entries), 1),
        fontsize=7.5,
        frameon=False,
        handletextpad=0.2,
        columnspacing=1.0,
    )
    figure.savefig(file := io.BytesIO(), format="png")
    return Image.open(file).convert("RGB")


def _save_film(playback: Playback, path: Path) -> None:
    try:
        import imageio_ffmpeg
    except ImportError:
        raise OptionError(
            f"{path} needs an encoder for films: pip install 'offmarl[video]', or write a .gif."
        ) from None
    images = list(frames(playback))
    width, height = images[0].size
    raw = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {_FRAMES_PER_SECOND} -i -"
    film = "-pix_fmt yuv420p -movflags +faststart"  # what browsers and slides can play
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-loglevel", "error", *raw.split()]
    subprocess.run(
        [*command, *film.split(), str(path)],
        input=b"".join(image.tobytes() for image in images),
        check=True,
    )
