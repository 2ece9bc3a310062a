"""Pictures and animations of episodes, for environments that can be drawn.

An environment can be drawn if it has a method ``scene(state)`` that returns a `Scene`. With a
method ``pictures(scenes)`` it draws by itself, as Overcooked and Jumanji's environments do. A scene
with three dimensions is shown from an oblique angle, with a line from each drone to the floor.
Quadrotors show their attitude: two arms with a rotor at each end.

Recorded episodes are played again in their environment to be drawn.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, UInt8
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle
from PIL import Image

from offmarl import envs
from offmarl._compiling import quickly
from offmarl.envs.base import MARKS, Environment, Scene
from offmarl.envs.swarm.dynamics import KINDS as DRONES
from offmarl.envs.swarm.dynamics import OBSTACLE_RADIUS
from offmarl.envs.swarm.quadrotor import to_matrix
from offmarl.errors import OptionError, ShapeError
from offmarl.evaluation import require_ended
from offmarl.networks import PolicyConfig, make_policy
from offmarl.paths import kind_of
from offmarl.programs import LoadedPolicy, replay_episode
from offmarl.teams import by_team, names_by_team, teams_of
from offmarl.tracking import write_output
from offmarl.types import ArrayTree, Policy, remember
from offmarl.vault import Dataset

Picture = Image.Image

KINDS = ("gif", "png")

_FRAMES_PER_SECOND = 10
_PIXELS = 420
_TRAIL = 6
_TITLE = 60
"""Characters of a title that fit; longer ones are smaller."""
_COLOURS = 64
"""Colours of a GIF; few make a small file."""


class Playback(NamedTuple):
    """The scenes of one episode; T includes the initial one."""

    name: str
    """The environment's name."""
    scenes: list[Scene]
    """T scenes, or what the environment draws by itself."""
    score: dict[str, Float[np.ndarray, "T"]]
    """Return up to each scene, by team: "return", or "return_TEAM" for each of several."""
    pictures: Callable[[Sequence[Any]], Sequence[UInt8[np.ndarray, "height width 3"]]] | None = None
    """Draws consecutive scenes, if the environment does this by itself."""


def play(env: Environment, policy: Policy, params: ArrayTree, key: PRNGKeyArray) -> Playback:
    """Play one episode and return its scenes."""
    if not hasattr(env, "scene") or env.spec.time_limit is None:
        raise OptionError(
            f"{env.spec.name} cannot be drawn: choose a task of swarm/, jumanji/, MPE, SMAX or "
            "Overcooked, or give your environment a method scene(state) and a time limit."
        )
    episode = jax.jit(_episode, static_argnums=(0, 1), compiler_options=quickly())
    scenes, reward, last = jax.device_get(episode(env, policy, params, key))
    require_ended(last.any(), env.spec.name, env.spec.time_limit)
    stop = int(last.argmax()) + 1
    return _playback(env, scenes, reward[1:stop])


def _playback(env: Any, scenes: Any, reward: Any) -> Playback:
    """Return an episode; ``scenes`` have an entry more than the rewards ``(T, N)``."""
    teams = teams_of(env.spec)
    totals = np.pad(np.cumsum(reward, 0, dtype=float), ((1, 0), (0, 0)))
    score: dict[str, Any] = dict(
        zip(names_by_team("return", teams), by_team(totals, teams), strict=True)
    )
    steps = [jax.tree.map(lambda leaf, t=t: leaf[t], scenes) for t in range(len(totals))]
    return Playback(env.spec.name, steps, score, getattr(env, "pictures", None))


def _episode(
    env: Any, policy: Policy, params: ArrayTree, key: PRNGKeyArray
) -> tuple[Scene, Float[Array, "T N"], Any]:
    def step(carry: ArrayTree, keys: Any) -> tuple[ArrayTree, ArrayTree]:
        state, view, memory = carry
        action, _, memory = policy.act(
            params, memory, view.observation, view.legal_actions, keys[0]
        )
        state, timestep = env.step(keys[1], state, action)
        done = timestep.terminated | timestep.truncated
        memory = remember(policy, memory, timestep.reward, done)
        outputs = env.scene(state), timestep.reward, timestep.last
        return (state, timestep.view, memory), outputs

    reset_key, step_key = jax.random.split(key)
    state, timestep = env.reset(reset_key)
    first = env.scene(state), jnp.zeros(env.spec.num_agents), jnp.zeros((), bool)
    keys = jax.random.split(step_key, (env.spec.time_limit, 2))
    _, steps = jax.lax.scan(step, (state, timestep.view, policy.initial_carry()), keys)
    episode: tuple[Scene, Float[Array, "T N"], Any] = jax.tree.map(
        lambda start, later: jnp.concatenate([jnp.asarray(start)[None], later]), first, steps
    )
    return episode


def play_run(loaded: LoadedPolicy, env: Environment | None = None, seed: int = 0) -> Playback:
    """Play an episode of a policy, by default in its run's environment.

    `ShapeError` if the sizes of that one have changed.
    """
    if env is None:
        env = envs.make(loaded.spec.name)
        if difference := loaded.spec.difference(env.spec, extras=False):
            raise ShapeError(
                f"the policy of {loaded.name} and {loaded.spec.name} differ in {difference}: give "
                "the environment that it was trained in, or one of the same sizes."
            )
    return play(env, loaded.policy, loaded.params, jax.random.key(seed))


def draw(env: Any, path: Path) -> None:
    """Write an episode, as `save` does: of the scripted controller if there is one, or random."""
    scripted = hasattr(env, "scripted")
    policy = env.scripted() if scripted else make_policy(PolicyConfig("random"), env.spec)
    save(play(env, policy, (), jax.random.key(0)), path)


def save(playback: Playback, path: Path) -> None:
    """Write an episode as an animation (``.gif``), or its middle scene as a ``.png``.

    `OptionError` if the suffix is unknown.
    """
    kind = kind_of(path, KINDS, "an episode")
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "gif":
        write_output(path, to_gif(playback))
    else:
        middle = len(playback.scenes) // 2
        frame(playback, middle).save(path)


def to_gif(playback: Playback, every: int = 1) -> bytes:
    """Return an episode as a GIF that loops."""
    images = list(frames(playback, every))
    palette = _palette(playback, images)
    first, *rest = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    file = io.BytesIO()
    pause = [1000 // _FRAMES_PER_SECOND] * len(rest) + [1500]
    first.save(file, "gif", save_all=True, append_images=rest, duration=pause, loop=0)
    return file.getvalue()


def _palette(playback: Playback, images: Sequence[Picture]) -> Picture:
    """Return one palette for all frames, so that consecutive frames differ little.

    It has the exact colours of the legends of all frames; the remaining colours come from three
    frames.
    """
    scenes = [] if playback.pictures else playback.scenes
    entries = [entry for scene in scenes for entry in legend(scene)]
    legend_colours = sorted({to_rgb(entry.get_color()) for entry in entries})
    values = [round(255 * part) for colour in legend_colours for part in colour]
    pixels = np.concatenate([np.asarray(images[at]) for at in (0, len(images) // 2, -1)])
    sample = Image.fromarray(pixels).quantize(
        _COLOURS - len(legend_colours), method=Image.Quantize.MAXCOVERAGE
    )
    palette = Image.new("P", (1, 1))
    palette.putpalette(values + (sample.getpalette() or []))
    return palette


def frames(playback: Playback, every: int = 1) -> Iterator[Picture]:
    """Draw every n-th scene, and the last one."""
    last = len(playback.scenes) - 1
    images = playback.pictures(playback.scenes) if playback.pictures else None
    figure = _blank()
    times = (*range(0, last, every), last)
    return (_frame(figure, playback, t, images and images[t]) for t in times)


def frame(playback: Playback, time: int) -> Picture:
    """Draw the scene after ``time`` steps."""
    if playback.pictures is None:
        return _frame(_blank(), playback, time, None)
    start = max(time - 1, 0)  # what moves may be drawn between two scenes
    image = playback.pictures(playback.scenes[start:][:2])[time - start]
    return _frame(_blank(), playback, time, image)


def _blank() -> Figure:
    """Return an empty figure for all frames: making its axes takes half of a frame's time."""
    figure = Figure(figsize=(_PIXELS / 100, _PIXELS / 100 + 0.6), dpi=100)
    figure.add_axes((0.02, 0.07, 0.96, 0.85))
    return figure


def _frame(figure: Figure, playback: Playback, time: int, image: Any) -> Picture:
    """Draw a scene, or the environment's own picture of it, in place of the previous one."""
    scene, axes = playback.scenes[time], figure.axes[0]
    artists = axes.collections, axes.patches, axes.images, figure.texts, figure.legends
    for artist in [x for kind in artists for x in kind]:
        artist.remove()
    if image is None:
        draw_scene(axes, scene, playback.scenes[max(0, time - _TRAIL) : time])
        entries = legend(scene)
    else:
        axes.imshow(image)
        axes.axis("off")
        entries = []
    scores = (f"{name} {round(x[time], 1) + 0.0}" for name, x in playback.score.items())
    title = "   ".join([playback.name, f"step {time}", *scores])
    size = 9 * min(1.0, _TITLE / len(title))
    figure.text(0.03, 0.955, title, fontsize=size, color="#374151")
    figure.legend(
        handles=entries,
        loc="lower center",
        ncols=max(len(entries), 1),
        fontsize=7.5,
        frameon=False,
        handletextpad=0.2,
        columnspacing=1.0,
    )
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


# ---------------------------------------------------------------------------------------- one scene


_TEAMS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_LINK, _FLOOR, _STONE, _STALK = "#56B4E9", "#f8fafc", "#6b7280", "#94a3b8"
_CELLS = ("#ffffff", "#cbd5e1")  # from 0 to 1
_ASIDE, _UP = np.array([0.35, 0.3]), 0.8  # of the oblique projection: depth and height

_SIZES = (1.0, 0.75, 1.4, 0.9)
"""Relative sizes of the kinds of drones."""


_THIN = 0.45
"""Relative size of drones from which on they have no outlines, and thin trails."""


class _Look(NamedTuple):
    marker: Any
    colour: str
    size: float
    filled: bool = True


_LOOKS = {
    "target": _Look("*", "#D55E00", 90),
    "held target": _Look("*", "#009E73", 90),
    "load": _Look("s", "#E69F00", 40),
    "heavy load": _Look("s", "#8a5a00", 90),
    "site": _Look("o", "#009E73", 260, filled=False),
    "beacon": _Look("P", "#CC79A7", 130),
}


def draw_scene(axes: Axes, scene: Scene, before: Sequence[Scene] = ()) -> None:
    """Draw a scene, with trails of the drones through the scenes before it."""
    size = scene.cells.shape if scene.cells.size else [scene.side] * scene.drones.shape[-1]
    extent = np.asarray(size, float)
    _draw_floor(axes, scene, extent)
    for centre in _flat(scene.obstacles):
        axes.add_patch(Circle(tuple(centre), OBSTACLE_RADIUS, color=_STONE, alpha=0.8))
    _draw_marks(axes, scene)
    _draw_links(axes, scene)
    _draw_trails(axes, [*before, scene])
    _draw_drones(axes, scene, extent)
    corners = _flat(_corners(extent))
    margin = 0.02 * np.ptp(corners)
    low, high = corners.min(0) - margin, corners.max(0) + margin
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")
    axes.axis("off")


def _corners(extent: Float[np.ndarray, "D"]) -> Float[np.ndarray, "C D"]:
    axes = np.meshgrid(*([0.0, size] for size in extent), indexing="ij")
    return np.stack([axis.ravel() for axis in axes], -1)


def _flat(points: Any) -> Float[np.ndarray, "*p 2"]:
    """Project points ``(*p, D)`` onto the picture; two dimensions are returned unchanged."""
    points = np.asarray(points, float)
    if points.shape[-1] == 2:
        return points
    depth, height = points[..., 1:2], points[..., 2:]
    return np.concatenate(
        [points[..., :1] + _ASIDE[0] * depth, _ASIDE[1] * depth + _UP * height], -1
    )


def _draw_floor(axes: Axes, scene: Scene, extent: Float[np.ndarray, "D"]) -> None:
    cells = np.asarray(scene.cells, float) if scene.cells.size else np.zeros((1, 1))
    flat = cells.mean(2) if cells.ndim == 3 else cells
    edges = [np.linspace(0, size, n + 1) for size, n in zip(extent[:2], flat.shape, strict=True)]
    x, y = np.meshgrid(*edges, indexing="ij")
    points = np.stack([x, y, *([np.zeros_like(x)] * (len(extent) - 2))], -1)
    grid = _flat(points)
    colours = LinearSegmentedColormap.from_list("cells", _CELLS)
    corners = _corners(extent)  # the arena's edges are pairs of corners that differ in one axis
    pairs = np.nonzero(np.triu((corners[:, None] != corners).sum(-1) == 1))
    sides = np.stack([_flat(corners)[index] for index in pairs], 1)
    axes.pcolormesh(grid[..., 0], grid[..., 1], flat, cmap=colours, vmin=0, vmax=1)
    _draw_lines(axes, sides, colors="#9ca3af", linewidths=0.8)


def _draw_marks(axes: Axes, scene: Scene) -> None:
    places = _flat(scene.marks)
    for number, name in enumerate(MARKS):
        if not len(points := places[np.asarray(scene.mark) == number]):
            continue
        look = _LOOKS[name]
        face = look.colour if look.filled else "none"
        axes.scatter(
            points[:, 0],
            points[:, 1],
            s=look.size,
            marker=look.marker,
            facecolor=face,
            edgecolor=look.colour,
        )


def _draw_lines(axes: Axes, lines: Float[np.ndarray, "n points 2"], **style: Any) -> None:
    if len(lines):
        axes.add_collection(LineCollection(list(lines), **style))


def _draw_links(axes: Axes, scene: Scene) -> None:
    hearer, which = np.nonzero(np.asarray(scene.links) >= 0)
    places = _flat(scene.drones)
    ends = np.stack([places[hearer], places[np.asarray(scene.links)[hearer, which]]], 1)
    _draw_lines(axes, ends, colors=_LINK, linewidths=0.7, alpha=0.6)


def _draw_trails(axes: Axes, scenes: Sequence[Scene]) -> None:
    trails = np.stack([_flat(scene.drones) for scene in scenes], 1)
    alive = np.asarray(scenes[-1].alive)
    colours = list(compress(_colours(scenes[-1]), alive))
    width = 1.2 if _scale(len(alive)) > _THIN else 0.5
    _draw_lines(axes, trails[alive], colors=colours, linewidths=width, alpha=0.35, zorder=2.5)


def _draw_drones(axes: Axes, scene: Scene, extent: Float[np.ndarray, "D"]) -> None:
    alive = np.asarray(scene.alive)
    places = _flat(scene.drones)
    below = np.array(scene.drones, float)
    below[..., 2:] = 0.0
    feet = _flat(below)
    _draw_lines(axes, np.stack([feet, places], 1)[alive], colors=_STALK, linewidths=0.6)
    scale = _scale(len(alive))
    size = 0.02 * float(np.max(extent)) * scale
    sizes = size * np.asarray(_SIZES)[np.asarray(scene.kind)]
    colours = list(compress(_colours(scene), alive))
    if scene.attitude is None:
        darts = places[:, None] + sizes[:, None, None] * _darts(np.asarray(scene.heading))
        edge = 0.5 if scale > _THIN else 0.0
        style: dict[str, Any] = {"edgecolors": "white", "linewidths": edge, "zorder": 3}
        axes.add_collection(PolyCollection(list(darts[alive]), facecolors=colours, **style))
    else:
        rotors = rotor_places(scene.attitude, scene.drones, 1.4 * sizes)
        _draw_rotors(axes, _flat(rotors)[alive], colours)
    if not len(lost := places[~alive]):
        return
    axes.scatter(lost[:, 0], lost[:, 1], marker="x", s=18, color="#9ca3af", linewidth=1, zorder=2)


def rotor_places(attitude: Any, position: Any, sizes: Float[np.ndarray, "P"]) -> Any:
    """Return the places ``(P, 4, 3)`` of rotors: front left and right, rear right and left."""
    corners = np.array([[1.0, 1.0, 0.0], [1.0, -1.0, 0.0], [-1.0, -1.0, 0.0], [-1.0, 1.0, 0.0]])
    arms = np.einsum("pij,rj->pri", to_matrix(jnp.asarray(attitude)), corners)
    return np.asarray(position)[:, None] + sizes[:, None, None] * arms


def _draw_rotors(axes: Axes, rotors: Float[np.ndarray, "P 4 2"], colours: Sequence[str]) -> None:
    """Draw two arms from rotor to rotor, and the rotors; those in front are filled."""
    arms = np.concatenate([rotors[:, [0, 2]], rotors[:, [1, 3]]])
    _draw_lines(axes, arms, colors=[*colours, *colours], linewidths=2.0, zorder=3)
    for number in range(4):
        x, y = rotors[:, number].T
        face = colours if number < 2 else "white"
        axes.scatter(x, y, s=22, facecolor=face, edgecolor=colours, linewidth=1, zorder=3.1)


def _scale(drones: int) -> float:
    """Return the relative size of drones: a thousand have less than a third of the size of ten."""
    return 1.0 if drones < 40 else 0.6 * min(1.0, (100 / drones) ** (1 / 3))


def _colours(scene: Scene) -> list[str]:
    return [_TEAMS[team % len(_TEAMS)] for team in np.asarray(scene.team)]


def _darts(heading: Float[np.ndarray, "P"]) -> Float[np.ndarray, "P 4 2"]:
    """Return outlines of darts of length two that point along the headings."""
    outline = np.array([[1.3, 0.0], [-0.9, 0.8], [-0.45, 0.0], [-0.9, -0.8]])
    cosine, sine = np.cos(heading), np.sin(heading)
    turn = np.stack([np.stack([cosine, sine], -1), np.stack([-sine, cosine], -1)], 1)
    return np.asarray(outline @ turn)


def legend(scene: Scene) -> list[Any]:
    """Return a legend entry for each kind of object in a scene."""

    def entry(label: str, look: _Look) -> Line2D:
        face = look.colour if look.filled else "none"
        style: dict[str, Any] = {
            "color": look.colour,
            "markerfacecolor": face,
            "markersize": look.size,
        }
        return Line2D([], [], label=label, marker=look.marker, linestyle="", **style)

    kinds, teams = np.asarray(scene.kind).tolist(), np.asarray(scene.team).tolist()
    drones = sorted(set(zip(kinds, teams, strict=True)))
    several = len(set(kinds)) > 1
    alike = len({kind for kind, _ in drones}) < len(drones)
    marks = [MARKS[number] for number in sorted(set(np.asarray(scene.mark).tolist()))]
    return [
        *(
            entry(
                (DRONES[kind].name if several else "agent")
                + (f", team {team + 1}" if alike else ""),
                _Look((3, 0, -90), _TEAMS[team % len(_TEAMS)], 7 * _SIZES[kind]),
            )
            for kind, team in drones
        ),
        *(entry(name, _LOOKS[name]._replace(size=7)) for name in marks),
        *([entry("obstacle", _Look("o", _STONE, 7))] if len(scene.obstacles) else []),
        *([Line2D([], [], color=_LINK, label="hears")] if np.any(scene.links >= 0) else []),
    ]


# ---------------------------------------------------------------------------- recorded episodes


def replay(env: Environment, vault: Dataset, number: int) -> Playback:
    """Play a recorded episode again and return its scenes; errors are those of `replay_episode`."""
    if not hasattr(env, "scene"):
        raise OptionError(f"episodes of {env.spec.name} cannot be drawn.")
    episode = replay_episode(vault, number, env)
    scenes = jax.device_get(jax.jit(jax.vmap(env.scene))(episode.states))
    return _playback(env, scenes, vault.episode(number).transition.reward)
