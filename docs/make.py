"""Build the documentation site: ``python -m docs.make``, in the root of the checkout.

The pages of ``docs/`` and a few files of the checkout are copied to ``build/docs``, the how-to
pages are made from ``examples/``, the rest from registries (`docs.pages`), and Zensical renders
them all, with warnings as errors. Links between the files of the checkout are rewritten, so that
they lead to the same thing on the site. At the end every link of the HTML is checked.
"""

import argparse
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from docs import examples, pages
from docs.links import broken_links
from docs.pictures import draw_environments, draw_film_strip, scores_chart
from docs.scores import scores
from offmarl import envs

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ASSETS = ("images", "assets")

COPIED = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/RESULTS.md": "project/results.md",
    "datasets/README.md": "project/cards.md",
}
"""Files outside docs/ that are pages, too."""

FOLDERS = {
    "recorders": "catalogue/algorithms/index.md",
    "baselines": "catalogue/algorithms/index.md",
    "datasets": "catalogue/datasets/index.md",
    "benchmarks/separation": "catalogue/datasets/scores.md",
    "benchmarks/six": "catalogue/datasets/scores.md",
    "offmarl/envs": "catalogue/environments/index.md",
    "examples": "howto/index.md",
}
"""Where a link to a folder leads on the site, or to a file in it that has no page of its own."""

CHART = "<!-- chart of scores -->"
"""Stands in a page where the figure of results goes."""


class SiteError(Exception):
    """The site cannot be built as it is."""


def stage(out: Path, with_extras: bool = True) -> Path:
    """Write all pages and the configuration; return the configuration's path.

    Parameters
    ----------
    out
        Directory to write to.
    with_extras
        Whether to build the environments of other packages, to state their sizes.
    """
    target = out / "docs"
    shutil.rmtree(target, ignore_errors=True)  # of an earlier build
    for folder in ASSETS:
        shutil.copytree(DOCS / folder, target / folder, dirs_exist_ok=True)
    sections: dict[str, Callable[[], pages.Pages]] = {
        "howto": lambda: examples.howto(ROOT / "examples", repository()),
        "catalogue/environments": lambda: pages.environments(with_extras),
        "catalogue/datasets": pages.datasets,
        "catalogue/algorithms": pages.algorithms,
        "api": pages.api,
    }
    generated = {name: make() for name, make in sections.items()}
    written = {path: text for section in generated.values() for path, text in section.items()}
    written |= dict(_copies(set(written)))
    for path, text in written.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text)
    for name, text in examples.downloads(ROOT / "examples").items():
        (target / "howto" / name).write_text(text)
    return _configure(out, generated)


def _configure(out: Path, generated: Mapping[str, pages.Pages]) -> Path:
    config = tomllib.loads((DOCS / "zensical.toml").read_text())
    project = config["project"]
    project["nav"] = [_filled(entry, generated) for entry in project["nav"]]
    project["site_dir"] = "site"
    if address := repository():
        project["repo_url"] = address
    project["plugins"]["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT)]
    path = out / "zensical.toml"
    path.write_text(tomli_w.dumps(config))
    return path


def repository() -> str | None:
    """Return the address of the repository: of pyproject.toml, or of GitHub's workflow."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    if name := os.environ.get("GITHUB_REPOSITORY"):
        server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
        return urls.get("Repository", f"{server}/{name}")
    return urls.get("Repository")


def _filled(entry: dict[str, Any], generated: Mapping[str, pages.Pages]) -> dict[str, Any]:
    """Return an entry of the navigation with the pages of generated sections in it.

    Pages whose titles begin alike, up to a slash, are a group.
    """
    ((title, value),) = entry.items()
    if isinstance(value, list):
        return {
            title: [item if isinstance(item, str) else _filled(item, generated) for item in value]
        }
    if not value.startswith("generated:"):
        return entry
    index, *rest = generated[value.removeprefix("generated:")].items()
    groups: dict[str, list[Any]] = {}
    for path, text in rest:
        group, slash, name = _title(text).partition("/")
        groups.setdefault(group if slash else "", []).append({name or group: path})
    return {title: [index[0], *groups.pop("", []), *({k: v} for k, v in groups.items())]}


def _title(text: str) -> str:
    heading = re.search(r"^# (.+)", text, re.MULTILINE)
    if heading is None:
        raise SiteError(f"a page has no heading: {text[:80]!r}")
    return heading[1]


# ---------------------------------------------------------------------------------- copies


def _copies(generated: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the pages that are files of the checkout, with their links rewritten."""
    sources = {path: path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    sources |= {ROOT / path: target for path, target in COPIED.items()}
    places = {path.resolve(): target for path, target in sources.items()} | _places(generated)
    for path, target in sources.items():
        yield target, _relinked(path, target, places).replace(CHART, scores_chart(scores()))


def _places(generated: set[str]) -> dict[Path, str]:
    """Return the page of each program, card and example, by its file."""
    places = {}
    for folder, section in (
        ("recorders", "catalogue/algorithms"),
        ("baselines", "catalogue/algorithms"),
        ("datasets", "catalogue/datasets"),
        ("examples", "howto"),
    ):
        for path in (ROOT / folder).rglob("*.*"):
            name = path.relative_to(ROOT / folder).with_suffix("").as_posix()
            page = f"{section}/{name if section == 'howto' else pages.slug(name)}.md"
            if page in generated:
                places[path.resolve()] = page
    return places


def _relinked(path: Path, target: str, places: Mapping[Path, str]) -> str:
    """Return a file's text with its links to files of the checkout leading to their pages."""

    def replace(match: re.Match[str]) -> str:
        link, mark, place = match[1].partition("#")
        file = (path.parent / link).resolve()
        page = places.get(file) or _of_folder(file) or _asset(file)
        if page is None:
            raise SiteError(f"{path.relative_to(ROOT)} links to {link}, which is not on the site.")
        return f"]({posixpath.relpath(page, posixpath.dirname(target))}{mark}{place})"

    return re.sub(r"\]\((?!https?:|mailto:|#)([^)\s]+)\)", replace, path.read_text())


def _of_folder(file: Path) -> str | None:
    for folder, page in FOLDERS.items():
        if file.exists() and file.is_relative_to(ROOT / folder):
            return page
    return None


def _asset(file: Path) -> str | None:
    inside = any(file.is_relative_to(DOCS / folder) for folder in ASSETS)
    return file.relative_to(DOCS).as_posix() if inside and file.exists() else None


# ---------------------------------------------------------------------------------- building


def build(out: Path, with_extras: bool = True) -> Path:
    """Build the site; return its directory.

    Raises
    ------
    SiteError
        Zensical or mkdocstrings has a warning, or a link leads nowhere.
    """
    config = stage(out, with_extras)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    result = subprocess.run(
        [*command, "--config-file", str(config)],
        cwd=out,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NO_COLOR": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)},
    )
    said = _plain(result.stdout + result.stderr)
    # Zensical counts its own warnings only; those of mkdocstrings and of griffe are logged.
    logged = re.search(
        r"^(griffe|mkdocstrings|mkdocs_autorefs|WARNING|ERROR)\b", said, re.MULTILINE
    )
    if result.returncode or logged:
        raise SiteError(f"the site has warnings:\n{said}")
    broken = broken_links(out / "site")
    if broken:
        raise SiteError("broken links:\n" + "\n".join(broken))
    return out / "site"


def _plain(text: str) -> str:
    """Return what Zensical printed without colours and without the lines that point at a place."""
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    return "\n".join(line for line in lines if not re.match(r" *\d* *[│╰]", line))


def main() -> None:
    """Build the site and say where it is."""
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("--out", type=Path, default=ROOT / "build/docs", help="where to build it")
    parser.add_argument(
        "--no-extras",
        action="store_true",
        help="do not build the environments of other packages to state their sizes",
    )
    parser.add_argument(
        "--draw",
        action="store_true",
        help="draw the environments that have no picture in docs/images, and build nothing",
    )
    arguments = parser.parse_args()
    os.environ.setdefault("OFFMARL_QUIET", "1")
    if arguments.draw:
        draw_environments(
            example for name in envs.describe() for example in pages.examples_of(name)
        )
        draw_film_strip()
        return
    try:
        site = build(arguments.out.resolve(), not arguments.no_extras)
    except SiteError as error:
        sys.exit(str(error))
    print(f"{site}: {len(list(site.rglob('*.html')))} pages")


if __name__ == "__main__":
    main()
