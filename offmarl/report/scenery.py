"""Drawing one scene: the arena, what lies in it, and the drones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float

from offmarl.envs.base import MARKS, Scene
from offmarl.envs.swarm.dynamics import KINDS, OBSTACLE_RADIUS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEAMS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_LINK, _FLOOR, _STONE, _STALK = "#56B4E9", "#f8fafc", "#6b7280", "#94a3b8"
_CELLS = ("#ffffff", "#cbd5e1")  # from 0 to 1
_ASIDE, _UP = np.array([0.35, 0.3]), 0.8  # where the third axis's view puts depth and height

_SIZES = (1.0, 0.75, 1.4, 0.9)
"""Of the drones of each of `KINDS`, relative to one another."""


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
    """Draw everything in a scene, with the ways that drones came in the scenes before."""
    extent = _extent(scene)
    _draw_floor(axes, scene, extent)
    _draw_obstacles(axes, scene)
    _draw_marks(axes, scene)
    _draw_links(axes, scene)
    _draw_trails(axes, [*before, scene])
    _draw_drones(axes, scene, extent)
    corners = _flat(_corners(extent))
    margin = 0.02 * np.ptp(corners)
    low, high = corners.min(0) - margin, corners.max(0) + margin
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")
    axes.axis("off")


def _extent(scene: Scene) -> Float[np.ndarray, "D"]:
    dims = scene.drones.shape[-1]
    return np.asarray(scene.cells.shape if scene.cells.size else [scene.side] * dims, float)


def _corners(extent: Float[np.ndarray, "D"]) -> Float[np.ndarray, "C D"]:
    axes = np.meshgrid(*([0.0, size] for size in extent), indexing="ij")
    return np.stack([axis.ravel() for axis in axes], -1)


def _flat(points: Any) -> Float[np.ndarray, "*p 2"]:
    """Return where points, ``(*p, D)``, are seen: as they are, or from above and aside."""
    points = np.asarray(points, float)
    if points.shape[-1] == 2:
        return points
    depth, height = points[..., 1:2], points[..., 2:]
    return np.concatenate(
        [points[..., :1] + _ASIDE[0] * depth, _ASIDE[1] * depth + _UP * height], -1
    )


def _on_floor(points: Any) -> Float[np.ndarray, "*p D"]:
    """Return the points ``(*p, D)`` below, or themselves where there is no below."""
    points = np.array(points, float)
    points[..., 2:] = 0.0
    return points


def _draw_floor(axes: Axes, scene: Scene, extent: Float[np.ndarray, "D"]) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LinearSegmentedColormap

    cells = np.asarray(scene.cells, float) if scene.cells.size else np.zeros((1, 1))
    flat = cells.mean(2) if cells.ndim == 3 else cells
    edges = [np.linspace(0, size, n + 1) for size, n in zip(extent[:2], flat.shape, strict=True)]
    x, y = np.meshgrid(*edges, indexing="ij")
    points = np.stack([x, y, *([np.zeros_like(x)] * (len(extent) - 2))], -1)
    seen = _flat(points)
    colours = LinearSegmentedColormap.from_list("cells", _CELLS)
    axes.pcolormesh(seen[..., 0], seen[..., 1], flat, cmap=colours, vmin=0, vmax=1)
    axes.add_collection(LineCollection(list(_edges(extent)), colors="#9ca3af", linewidths=0.8))


def _edges(extent: Float[np.ndarray, "D"]) -> Float[np.ndarray, "E 2 2"]:
    """Return the edges of the arena as they are seen: pairs of corners that differ in one axis."""
    corners = _corners(extent)
    first, second = np.nonzero(np.triu((corners[:, None] != corners).sum(-1) == 1))
    seen = _flat(corners)
    return np.stack([seen[first], seen[second]], 1)


def _draw_obstacles(axes: Axes, scene: Scene) -> None:
    from matplotlib.patches import Circle

    for centre in _flat(scene.obstacles):
        axes.add_patch(Circle(tuple(centre), OBSTACLE_RADIUS, color=_STONE, alpha=0.8))


def _draw_marks(axes: Axes, scene: Scene) -> None:
    places = _flat(scene.marks)
    for number, name in enumerate(MARKS):
        chosen = places[np.asarray(scene.mark) == number]
        look = _LOOKS[name]
        face = look.colour if look.filled else "none"
        axes.scatter(
            chosen[:, 0],
            chosen[:, 1],
            s=look.size,
            marker=look.marker,
            facecolor=face,
            edgecolor=look.colour,
        )


def _draw_links(axes: Axes, scene: Scene) -> None:
    from matplotlib.collections import LineCollection

    hearer, which = np.nonzero(np.asarray(scene.links) >= 0)
    places = _flat(scene.drones)
    ends = np.stack([places[hearer], places[np.asarray(scene.links)[hearer, which]]], 1)
    axes.add_collection(LineCollection(list(ends), colors=_LINK, linewidths=0.7, alpha=0.6))


def _draw_trails(axes: Axes, scenes: Sequence[Scene]) -> None:
    from matplotlib.collections import LineCollection

    ways = np.stack([_flat(scene.drones) for scene in scenes], 1)
    alive = np.asarray(scenes[-1].alive)
    colours = [colour for colour, there in zip(_colours(scenes[-1]), alive, strict=True) if there]
    axes.add_collection(
        LineCollection(list(ways[alive]), colors=colours, linewidths=1.2, alpha=0.35, zorder=2.5)
    )


def _draw_drones(axes: Axes, scene: Scene, extent: Float[np.ndarray, "D"]) -> None:
    from matplotlib.collections import LineCollection, PolyCollection

    alive = np.asarray(scene.alive)
    places = _flat(scene.drones)
    feet = _flat(_on_floor(scene.drones))
    axes.add_collection(
        LineCollection(list(np.stack([feet, places], 1)[alive]), colors=_STALK, linewidths=0.6)
    )
    size = 0.02 * float(np.max(extent)) * (1.0 if len(alive) < 40 else 0.6)
    sizes = size * np.asarray(_SIZES)[np.asarray(scene.kind)]
    darts = places[:, None] + sizes[:, None, None] * _darts(np.asarray(scene.heading))
    style: dict[str, Any] = {"edgecolors": "white", "linewidths": 0.5, "zorder": 3}
    colours = [colour for colour, there in zip(_colours(scene), alive, strict=True) if there]
    axes.add_collection(PolyCollection(list(darts[alive]), facecolors=colours, **style))
    lost = places[~alive]
    axes.scatter(lost[:, 0], lost[:, 1], marker="x", s=18, color="#9ca3af", linewidth=1, zorder=2)


def _colours(scene: Scene) -> list[str]:
    return [_TEAMS[team % len(_TEAMS)] for team in np.asarray(scene.team)]


def _darts(heading: Float[np.ndarray, "P"]) -> Float[np.ndarray, "P 4 2"]:
    """Return the outlines of darts of length two that point along the headings."""
    outline = np.array([[1.3, 0.0], [-0.9, 0.8], [-0.45, 0.0], [-0.9, -0.8]])
    cosine, sine = np.cos(heading), np.sin(heading)
    turn = np.stack([np.stack([cosine, sine], -1), np.stack([-sine, cosine], -1)], 1)
    turned: Float[np.ndarray, "P 4 2"] = outline @ turn
    return turned


def legend(scene: Scene) -> list[Any]:
    """Return an entry for each kind of thing in a scene."""
    from matplotlib.lines import Line2D

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
    alike = len({kind for kind, _ in drones}) < len(drones)
    marks = [MARKS[number] for number in sorted(set(np.asarray(scene.mark).tolist()))]
    return [
        *(
            entry(
                KINDS[kind].name + (f", team {team + 1}" if alike else ""),
                _Look((3, 0, -90), _TEAMS[team % len(_TEAMS)], 7 * _SIZES[kind]),
            )
            for kind, team in drones
        ),
        *(entry(name, _LOOKS[name]._replace(size=7)) for name in marks),
        *([entry("obstacle", _Look("o", _STONE, 7))] if len(scene.obstacles) else []),
        *([Line2D([], [], color=_LINK, label="hears")] if np.any(scene.links >= 0) else []),
    ]
