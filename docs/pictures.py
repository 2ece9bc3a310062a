"""Pictures of the documentation.

Charts and diagrams are SVG in the page's colours, made when the site is built. Pictures of
environments are kept in ``docs/images/environments``: ``python -m docs.make --draw`` adds those
that are not there, and draws the film strip of the home page.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
from PIL import Image

from docs.flow import Flow
from docs.scores import Score
from offmarl import envs
from offmarl.hub.card import Uid
from offmarl.report import render
from offmarl.statistics import Estimate

ENVIRONMENTS = Path(__file__).parent / "images/environments"
STRIP = Path(__file__).parent / "images/strip.png"
_PICTURE, _COLOURS = 360, 24
"""Width and colours of an environment's picture."""
_FRAMES, _SIDE, _GAP = 6, 240, 12
"""Number of frames of the film strip, their size, and the space between them."""

_WIDTH, _LEFT, _ROW = 440, 116, 34


def environment_pictures() -> dict[str, Path]:
    """Return the picture of each environment that has one, by the environment's name."""
    return {path.stem.replace("--", "/"): path for path in sorted(ENVIRONMENTS.glob("*.png"))}


def draw_environments(names: Iterable[str]) -> None:
    """Draw an instant of each environment that can be drawn and has no picture yet."""
    for name in names:
        path = ENVIRONMENTS / f"{name.replace('/', '--')}.png"
        if path.exists() or not hasattr(env := envs.make(name), "scene"):
            continue
        render.draw(env, path)
        with Image.open(path) as picture:  # with few colours it has a few kilobytes
            few = picture.resize((_PICTURE, picture.height * _PICTURE // picture.width))
        few.quantize(_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def draw_film_strip() -> None:
    """Draw instants of one episode of a swarm side by side, for the home page."""
    env = envs.make("swarm/coverage-8")
    playback = render.play(env, env.scripted(), (), jax.random.key(0))
    last = len(playback.scenes) - 1
    strip = Image.new("RGB", (_FRAMES * (_SIDE + _GAP) - _GAP, _SIDE), "white")
    for number in range(_FRAMES):
        picture = render.frame(playback, round(last * number / (_FRAMES - 1)))
        width, height = picture.size
        inside = (0.02 * width, 0.08 * height, 0.98 * width, 0.93 * height)
        scene = picture.crop(tuple(map(round, inside))).resize((_SIDE, _SIDE))
        strip.paste(scene, (number * (_SIDE + _GAP), 0))
    few = strip.quantize(_COLOURS, dither=Image.Dither.NONE)
    few.save(STRIP, optimize=True)


def returns_chart(uids: Mapping[str, Uid]) -> str:
    """Return an SVG of the returns of a dataset's vaults: range, mean and deviation of each.

    It takes its colours from the page, so that it suits light and dark.
    """
    spans = {}
    for name, uid in uids.items():
        if (mean := uid.return_mean) is not None:
            std = uid.return_std or 0.0
            least = mean - std if uid.return_min is None else uid.return_min
            most = mean + std if uid.return_max is None else uid.return_max
            spans[name] = least, max(least, mean - std), mean, min(most, mean + std), most
    low, high = min(span[0] for span in spans.values()), max(span[-1] for span in spans.values())
    scale = (_WIDTH - _LEFT - 20) / ((high - low) or 1.0)

    def x(value: float) -> float:
        return round(_LEFT + (value - low) * scale, 1)

    rows = []
    for number, (name, (least, start, mean, stop, most)) in enumerate(spans.items()):
        y = _ROW * number + _ROW // 2
        rows.append(f'<text x="{_LEFT - 12}" y="{y + 5}" text-anchor="end">{name}</text>')
        rows.append(f'<line x1="{x(least)}" x2="{x(most)}" y1="{y}" y2="{y}"/>')
        wide = f'width="{x(stop) - x(start):.1f}" height="14"'
        rows.append(f'<rect x="{x(start)}" y="{y - 7}" {wide}/>')
        rows.append(f'<circle cx="{x(mean)}" cy="{y}" r="5"/>')
    bottom = _ROW * len(spans)
    for value, anchor in ((low, "start"), (high, "end")):
        label = f'x="{x(value)}" y="{bottom + 14}" text-anchor="{anchor}"'
        rows.append(f"<text {label}>{value:,.1f}</text>")
    about = "Returns. Dot: mean; bar: one standard deviation to each side; line: range"
    return (
        f'<svg class="returns" viewBox="0 0 {_WIDTH} {bottom + 20}" role="img" '
        f'aria-label="{about}">{"".join(rows)}</svg>\n\n<small>{about}.</small>\n'
    )


_ROWS, _NAMES, _BEST, _AXIS = 30, 176, 74, 640
_FLOOR = -0.25
"""Left end of the axis of scores; an arrow stands for a lower one."""


def scores_chart(scores: Iterable[Score]) -> str:
    """Return an SVG of normalised scores with intervals, a row for each dataset.

    Clones have hollow marks; the name of the best other baseline is at the end of the row.
    """
    rows: dict[str, list[tuple[Score, Estimate]]] = {}
    for score in scores:
        if (normalised := score.normalised) is not None:
            rows.setdefault(score.dataset, []).append((score, normalised))
    scale = (_AXIS - _NAMES - _BEST) / (1.05 - _FLOOR)

    def x(value: float) -> float:
        return round(_NAMES + (max(value, _FLOOR) - _FLOOR) * scale, 1)

    bottom = _ROWS * len(rows)
    parts = []
    for value, name in ((0, "random play"), (1, "expert")):
        parts.append(f'<line class="axis" x1="{x(value)}" x2="{x(value)}" y1="0" y2="{bottom}"/>')
        parts.append(f'<text class="middle" x="{x(value)}" y="{bottom + 15}">{name}</text>')
    for number, (dataset, scores_of) in enumerate(rows.items()):
        y = _ROWS * number + _ROWS // 2
        parts.append(f'<text class="end" x="{_NAMES - 14}" y="{y + 4}">{dataset}</text>')
        other_scores = [score for score, _ in scores_of if not score.baseline.startswith("bc")]
        if other_scores:
            name = max(other_scores, key=lambda score: score.best.value).baseline
            parts.append(f'<text x="{_AXIS - _BEST + 12}" y="{y + 4}">{name}</text>')
        parts += [_mark(score, where, x, y) for score, where in scores_of]
    return (
        f'<svg class="scores" viewBox="0 0 {_AXIS} {bottom + 20}" role="img" '
        f'aria-label="Scores of baselines, by dataset">{"".join(parts)}</svg>\n'
    )


def _mark(score: Score, where: Estimate, x: Callable[[float], float], y: int) -> str:
    """Return a dot with its interval; a text beside it says what it is."""
    value, low, high = where
    kind = {"bc": "clone", "bc, best tenth": "tenth"}.get(score.baseline, "other")
    about = f"<title>{score.baseline}: {value:.2f}</title>"
    if value < _FLOOR:
        left = x(_FLOOR)
        shape = f'<path d="M{left + 9} {y - 5}l-8 5l8 5z"/>'
        return f'<g class="{kind}">{about}{shape}</g>'
    line = ""
    if low is not None and high is not None:
        line = f'<line x1="{x(low)}" x2="{x(high)}" y1="{y}" y2="{y}"/>'
    if kind == "tenth":
        shape = f'<path d="M{x(value)} {y - 6}l6 6l-6 6l-6 -6z"/>'
    else:
        shape = f'<circle cx="{x(value)}" cy="{y}" r="5"/>'
    return f'<g class="{kind}">{about}{line}{shape}</g>'


# ---------------------------------------------------------------------------------- programs


_LINE, _PAD, _BETWEEN, _BOX, _ARROW = 17, 7, 12, 118, 56


class _Box(NamedTuple):
    """A box of a diagram, with a name on each line."""

    names: tuple[str, ...]
    style: str
    column: int
    y: float

    @property
    def height(self) -> float:
        return _LINE * len(self.names) + 2 * _PAD

    @property
    def x(self) -> float:
        return 2 + self.column * (_BOX + _ARROW)

    def draw(self) -> str:
        middle, first = self.x + _BOX / 2, self.y + _PAD + 0.75 * _LINE
        texts = "".join(
            f'<text x="{middle:g}" y="{first + _LINE * number:g}">{name}</text>'
            for number, name in enumerate(self.names)
        )
        size = f'width="{_BOX}" height="{self.height:g}" rx="6"'
        return f'<g class="{self.style}"><rect x="{self.x:g}" y="{self.y:g}" {size}/>{texts}</g>'


def flow_chart(flow: Flow, data: str) -> str:
    """Return an SVG of what goes into a program's losses, in the colours of the page.

    Parameters
    ----------
    flow
        What the program computes.
    data
        What the fields are of, such as "a batch".
    """
    boxes = _arranged(flow)
    place = {name: box for box in boxes for name in box.names}
    arrows = {(place[start].names, place[stop].names) for start, stop in flow.arrows}
    ends = sorted((place[a[0]], place[b[0]]) for a, b in arrows)
    paths = "".join(_arrow(start, stop) for start, stop in ends)
    width = max(box.x for box in boxes) + _BOX + 2
    height = max(box.y + box.height for box in boxes) + 2
    about = (
        f"Left, the fields of {data}; middle, the networks that they go into (dashed: target "
        "networks); right, the losses and the action that depend on them"
    )
    return (
        f'<svg class="flow" viewBox="0 0 {width:g} {height:g}" style="max-width: {width:g}px" '
        f'role="img" aria-label="{about}">{paths}{"".join(box.draw() for box in boxes)}</svg>\n\n'
        f"<small>{about}. Generated from the computation that JAX traces.</small>\n"
    )


def _arranged(flow: Flow) -> list[_Box]:
    """Place the boxes: fields with the same arrows share one, and networks follow their inputs."""
    networks = set(flow.networks)
    groups: dict[frozenset[str], list[str]] = {}
    for name in flow.fields:
        groups.setdefault(flow.targets(name), []).append(name)
    ordered = sorted(groups.items(), key=lambda item: (not item[0] & networks, item[1]))
    above = [tuple(names) for targets, names in ordered if targets & networks]
    below = [tuple(names) for targets, names in ordered if not targets & networks]
    columns = _columns(flow)
    placed = _stack(above, "data", 0, 2)
    for column in sorted(set(columns.values())):
        names = [(name,) for name in flow.networks if columns[name] == column]
        placed += [
            box._replace(style="target" if "target" in box.names[0] else "network")
            for box in _stack(names, "network", column, 2)
        ]
    # Arrows from these to the results pass below the networks.
    placed += _stack(below, "data", 0, max((box.y + box.height for box in placed), default=0) + 12)
    results = _stack(
        [(name,) for name in flow.results], "result", max(columns.values(), default=0) + 1, 0
    )
    middle = (max(b.y + b.height for b in placed) - results[-1].y - results[-1].height) / 2
    return placed + [box._replace(y=box.y + max(middle, 2)) for box in results]


def _stack(boxes: list[tuple[str, ...]], style: str, column: int, y: float) -> list[_Box]:
    placed = []
    for names in boxes:
        placed.append(_Box(names, style, column, y))
        y += placed[-1].height + _BETWEEN
    return placed


def _columns(flow: Flow) -> dict[str, int]:
    """Return the column of each network: right of the networks that it takes as input."""
    columns = dict.fromkeys(flow.networks, 1)
    for _ in flow.networks:  # enough turns for the longest chain; a cycle ends here too
        for start, stop in flow.arrows:
            if start in columns and stop in columns:
                columns[stop] = max(columns[stop], min(columns[start] + 1, len(columns)))
    return columns


def _arrow(start: _Box, stop: _Box) -> str:
    x, y = start.x + _BOX, start.y + start.height / 2
    end, target = stop.x - 2, stop.y + stop.height / 2
    turn, bend = stop.x - _ARROW, _ARROW * 0.6  # straight to the gap before its target
    line = (
        f"M{x:g} {y:g}H{turn:g}C{turn + bend:g} {y:g} {end - bend:g} {target:g} {end:g} {target:g}"
    )
    return f'<path d="{line}"/><path class="head" d="M{end - 6:g} {target - 4:g}l6 4l-6 4z"/>'
