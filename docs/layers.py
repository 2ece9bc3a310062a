"""The layers of imports in CONTRIBUTING.md: ``python -m docs.layers`` copies them there."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
PLACE = re.compile(r"(?<=<!-- layers -->\n)```\n.*?```\n", re.DOTALL)


def page() -> str:
    """Return CONTRIBUTING.md with the layers that ``pyproject.toml`` has now."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    parts = [
        f"{container}\n" + "".join(f"  {layer}\n" for layer in contract["layers"])
        for contract in linter["contracts"]
        if contract["type"] == "layers"
        for container in contract["containers"]
    ]
    return PLACE.sub(lambda _: "```\n" + "\n".join(parts) + "```\n", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
