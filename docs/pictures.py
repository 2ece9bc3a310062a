"""Pictures of the documentation: drawn when the site is built, and not kept in the repository."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offmarl import envs
from offmarl.hub.card import Uid

_WIDTH, _LEFT, _ROW = 560, 130, 34


def draw_environments(names: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Draw an instant of each environment that can be drawn; a picture that exists is kept.

    Parameters
    ----------
    names
        The name to build, by the name in the registry.
    folder
        Where the pictures are written.

    Returns
    -------
    The file names of the pictures, by the name in the registry.
    """
    drawn = {}
    for name, example in names.items():
        path = folder / f"{example.replace('/', '-')}.png"
        if path.exists() or _draw(envs.make(example), path):
            drawn[name] = path.name
    return drawn


def _draw(env: Any, path: Path) -> bool:
    if not hasattr(env, "scene"):
        return False
    import jax

    from offmarl.networks import PolicyConfig, make_policy
    from offmarl.report import render

    scripted = hasattr(env, "scripted")
    policy = env.scripted() if scripted else make_policy(PolicyConfig("random"), env.spec)
    render.save(render.play(env, policy, (), jax.random.key(0)), path)
    return True


def returns_chart(uids: Mapping[str, Uid]) -> str:
    """Return an SVG of the returns of a dataset's vaults: range, mean and deviation of each.

    It takes its colours from the page, so that it suits light and dark.
    """
    known = {
        name: (uid.return_mean, uid.return_std or 0.0, uid.return_min, uid.return_max)
        for name, uid in uids.items()
        if uid.return_mean is not None
    }
    ends = [end for mean, std, *ends in known.values() for end in (*ends, mean - std, mean + std)]
    low, high = min(e for e in ends if e is not None), max(e for e in ends if e is not None)
    scale = (_WIDTH - _LEFT - 20) / ((high - low) or 1.0)

    def x(value: float) -> float:
        return round(_LEFT + (value - low) * scale, 1)

    rows = []
    for number, (name, (mean, std, least, most)) in enumerate(known.items()):
        y = _ROW * number + _ROW // 2
        rows.append(f'<text x="{_LEFT - 12}" y="{y + 5}" text-anchor="end">{name}</text>')
        if least is not None and most is not None:
            rows.append(f'<line x1="{x(least)}" x2="{x(most)}" y1="{y}" y2="{y}"/>')
        box, wide = x(max(mean - std, low)), x(min(mean + std, high))
        rows.append(f'<rect x="{box}" y="{y - 7}" width="{wide - box:.1f}" height="14"/>')
        rows.append(f'<circle cx="{x(mean)}" cy="{y}" r="5"/>')
    bottom = _ROW * len(known)
    for value, anchor in ((low, "start"), (high, "end")):
        label = f'x="{x(value)}" y="{bottom + 14}" text-anchor="{anchor}"'
        rows.append(f"<text {label}>{value:,.1f}</text>")
    about = "Returns: line, the range; bar, mean and deviation"
    return (
        f'<svg class="returns" viewBox="0 0 {_WIDTH} {bottom + 20}" role="img" '
        f'aria-label="{about}">{"".join(rows)}</svg>\n\n<small>{about}.</small>\n'
    )
