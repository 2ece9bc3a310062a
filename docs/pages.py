"""Pages of the documentation that are generated: environments, datasets, programs and the API.

Each function reads a registry and returns pages by path, relative to the root of the site. A new
entry of a registry gets its page, and its line in the navigation, without a change here.
"""

import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import docstring_parser

import offmarl
from docs import scores
from docs.flow import flow_of
from docs.pictures import environment_pictures, flow_chart, returns_chart
from offmarl import envs
from offmarl.cli.parse import parameter_texts
from offmarl.errors import MissingExtraError, OptionError, UnknownNameError
from offmarl.hub import card as catalogue
from offmarl.programs import registry
from offmarl.types import Discrete

Pages = dict[str, str]
"""The Markdown of each page, by its path; the first is the section's index."""

TRAITS = {
    "partial": "Partial observability: agents see less than the state.",
    "adversarial": "Adversarial: some rewards oppose others, or scripted opponents act.",
    "heterogeneous": "Heterogeneous: agents differ in what they observe, can do, or are.",
    "communication": "Communication: agents can send messages.",
    "mask": "Action mask: some actions are illegal at times.",
}


def slug(name: str) -> str:
    """Return a name as the stem of a page."""
    return re.sub(r"[^\w.]+", "-", name).strip("-").lower()


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; a bar in a cell is escaped."""
    lines = [headings, ["---"] * len(headings), *rows]
    cells = ([str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def prose(docstring: str | None) -> str:
    """Return the summary and the description of a docstring, without its sections.

    A line of a docstring that is indented is a formula or a code block, which Markdown indents by
    four spaces, as docstrings do. Lines of an interactive session become a block of Python.
    """
    parsed = docstring_parser.parse(docstring or "")
    text = "\n\n".join(filter(None, (parsed.short_description, parsed.long_description)))
    text = re.sub(r"::$", ":", text.replace("``", "`"), flags=re.MULTILINE)
    return re.sub(r"^>>> .*(\n(>>>|\.\.\.) .*)*", _session, text, flags=re.MULTILINE) + "\n"


def _session(lines: re.Match[str]) -> str:
    code = re.sub(r"^(>>>|\.\.\.) ", "", lines[0], flags=re.MULTILINE)
    return f"```python\n{code}\n```"


# ---------------------------------------------------------------------------------- environments


def example_name(name: str) -> str:
    """Return a name that `offmarl.envs.make` accepts, for a name in `offmarl.envs.names`."""
    choices = envs.describe()[name].choices
    if choices:
        return f"{name.rpartition('/')[0]}/{choices[0]}"
    numbers = iter(("8", "2"))
    return re.sub(r"-[A-Z]\b", lambda _: f"-{next(numbers)}", name)


def examples_of(name: str) -> list[str]:
    """Return the names to draw for a name of the registry: those of datasets, else one example."""
    about, stem = envs.describe()[name], name.rpartition("/")[0]
    of_data = {"jaxmarl/overcooked": about.choices, "jaxmarl/smax": ("3m",)}.get(stem, ())
    return [f"{stem}/{choice}" for choice in of_data] or [example_name(name)]


def environments(with_extras: bool) -> Pages:
    """Return a page for each environment of the registry.

    Parameters
    ----------
    with_extras
        Whether to build the environments of other packages too, to state their sizes. Without it
        their pages hold what the registry knows.
    """
    families = envs.describe()
    rows = [
        (f"[`{name}`]({slug(name)}.md)", about.summary, about.agents, about.action, about.extra)
        for name, about in families.items()
    ]
    index = (
        "# Environments\n\n"
        "`offmarl envs` prints this list, `offmarl envs NAME` describes and measures one "
        "environment. A single capital letter in a name stands for a number of your choice, a word "
        "in capitals for one of the choices on its page. Environments with an extra need "
        "`pip install 'offmarl[EXTRA]'`.\n\n"
        "More: [the drone-swarm suite](../../environments.md), "
        "[environments of other projects](../../adapters.md), "
        "[an environment of your own](../../howto/jax_environment.md).\n\n"
    )
    pages = {"index.md": index + table(["name", "task", "agents", "actions", "extra"], rows)}
    for name, about in families.items():
        build = with_extras or not about.extra
        pages[f"{slug(name)}.md"] = _environment(name, about, build)
    return {f"catalogue/environments/{path}": text for path, text in pages.items()}


def _environment(name: str, about: Any, build: bool) -> str:
    env = _build(example_name(name)) if build else None
    facts = {
        "agents": about.agents,
        "observations": about.observation,
        "actions": about.action,
        "global state": about.state,
        "needs": f"`pip install 'offmarl[{about.extra}]'`" if about.extra else "nothing more",
    }
    parts = [f"# {name}\n\n{about.summary[:1].upper()}{about.summary[1:]}.\n"]
    drawn = environment_pictures()
    for example in examples_of(name):
        if example in drawn:
            path = f"../../images/environments/{drawn[example].name}"
            parts.append(f"![{example}]({path}){{ width=360 }}")
    parts.append("")
    parts.append(_usage(name))
    parts.append(table(["", ""], facts.items()))
    parts.append("\n".join(f"- {TRAITS[trait]}" for trait in about.traits) + "\n")
    if about.choices:
        parts.append("## Choices\n\n" + ", ".join(f"`{choice}`" for choice in about.choices) + "\n")
    if env is not None:
        parts.append(_sizes(env))
    if env is not None and not about.extra and dataclasses.is_dataclass(env):
        parts.append(f"## Rules\n\n{prose(type(env).__doc__)}")
        parts.append(_options(type(env)))
    return "\n".join(parts)


def _usage(name: str) -> str:
    example = example_name(name)
    return (
        f'```python\nimport offmarl\n\nenv = offmarl.envs.make("{example}")\n```\n\n'
        f"```bash\nofmarl envs {example}\n```\n".replace("ofmarl", "offmarl")
    )


def _build(name: str) -> Any:
    """Build an environment for its sizes; None if it cannot be built here."""
    for candidate in (name, re.sub(r"-\d+", "-0", name)):
        try:
            return envs.make(candidate)
        except (MissingExtraError, OptionError, UnknownNameError, ValueError):
            continue
    return None


def _sizes(env: Any) -> str:
    spec = env.spec
    kind = "actions" if isinstance(spec.action, Discrete) else "numbers in [-1, 1]"
    limit = "none" if spec.time_limit is None else f"{spec.time_limit} steps"
    rows = [
        ("agents", spec.num_agents),
        ("observation", _arrays(spec.observation, spec.observation_text)),
        ("action", f"{spec.action_size} {kind}"),
        ("global state", _state(spec)),
        ("reward", "shared by the team" if spec.reward == "team" else "individual"),
        ("time limit", limit),
    ]
    return f"## Sizes\n\nOf `{spec.name}`:\n\n" + table(["", ""], rows)


def _state(spec: Any) -> str:
    if not spec.state_size:
        return "none; programs use the observations of all agents"
    return f"{_arrays(spec.global_state, spec.state_text)} ({spec.state})"


def _arrays(tree: Any, text: str) -> str:
    return f"{text} numbers" if tree is None else text


def _options(kind: type) -> str:
    texts = parameter_texts(kind)
    fields = [
        field
        for field in dataclasses.fields(kind)
        if field.default is not dataclasses.MISSING and field.name not in ("name", "num_agents")
    ]
    return f"## Options\n\n{_definitions(fields, texts)}" if fields else ""


def _definitions(
    fields: "Iterable[dataclasses.Field[Any]]", texts: Mapping[str, str], flags: bool = False
) -> str:
    """Return a list of options with their defaults, which reads well on a narrow screen, too."""
    lines = []
    for field in fields:
        name = f"--{field.name.replace('_', '-')}" if flags else field.name
        text = texts.get(field.name, "").replace("``", "`")
        lines.append(f"`{name}` {_default(field)}\n:   {text or 'See the source.'}\n")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------- datasets


def datasets() -> Pages:
    """Return the catalogue, a page of scores, and a page for each card."""
    cards = list(catalogue.cards())
    index = (
        "# Datasets\n\n"
        "`offmarl ls --remote` prints this list, `offmarl pull NAME` downloads a published "
        "dataset, and a recipe records one again. Returns are means of complete episodes. The last "
        "column has the baseline with the highest return of its best actions; "
        "[all scores](scores.md). See [datasets on the hub](../../datasets.md), and "
        "[cards](../../project/cards.md) for the format of a card.\n\n"
    )
    for source, group in itertools.groupby(cards, lambda card: card.source):
        headings = ["", "dataset", "vaults, with mean returns", "agents", "size", "best baseline"]
        rows = [_listed(card) for card in group]
        columns = [0, *(n for n in range(1, 6) if any(row[n] for row in rows))]
        columns = columns[not any(row[0] for row in rows) :]
        index += f"## {source}\n\n" + table(
            [headings[n] for n in columns], [[row[n] for n in columns] for row in rows]
        )
        index += "\n"
    pages = {"index.md": index, "scores.md": _scores(cards)}
    pages |= {f"{slug(card.name)}.md": _dataset(card) for card in cards}
    return {f"catalogue/datasets/{path}": text for path, text in pages.items()}


def _listed(card: catalogue.Card) -> list[object]:
    """Return a line of the catalogue."""
    picture = _picture_of(card)
    returns = (
        f"{name} {uid.return_mean:,.1f}" if uid.return_mean is not None else name
        for name, uid in card.uids.items()
    )
    best = [
        f"`{found[0].baseline}` {found[0].best.value:.3g} ({name})"
        for name, uid in card.uids.items()
        if (found := scores.on_recording(uid.digest))
    ]
    return [
        f"![]({picture}){{ width=56 loading=lazy }}" if picture else "",
        f"[`{card.name.partition('/')[2]}`]({slug(card.name)}.md)",
        ", ".join(returns),
        card.num_agents,
        _size(card),
        ", ".join(best),
    ]


def _size(card: catalogue.Card) -> str:
    """Return the size of the archive, or the number of steps."""
    if card.hub and card.hub.size:
        return f"{card.hub.size / 1e9:,.2f} GB"
    steps = sum(uid.steps or 0 for uid in card.uids.values())
    return f"{steps:,} steps" if steps else ""


def _picture_of(card: catalogue.Card) -> str | None:
    """Return the picture of a dataset's environment, relative to the pages of datasets."""
    name = card.recipe.env if card.recipe and card.recipe.env else card.name.partition("/")[2]
    name = re.sub(r":.*|-\d+$", "", name)
    drawn = environment_pictures()
    matches = [path for other, path in drawn.items() if re.sub(r"-\d.*", "", other) == name]
    return f"../../images/environments/{matches[0].name}" if matches else None


def _scores(cards: Sequence[catalogue.Card]) -> str:
    """Return the page of all scores, by recording."""
    recorded = {
        uid.digest: f"[`{card.name}/{name}`]({slug(card.name)}.md)"
        for card in cards
        for name, uid in card.uids.items()
        if uid.digest
    }
    parts = [
        "# Leaderboard\n\n"
        "Returns of baselines that were trained on recordings of the catalogue: the interquartile "
        "mean over seeds, with a 95% interval, of policies that take their best actions and of "
        "those that sample. The runs, with their settings and versions, are the files named below "
        "each table. Methods were chosen on some of these seeds; [paired differences on seeds "
        "that chose nothing](../../comparison.md) say which ones hold.\n"
    ]
    parts += ["## The plan `six`\n", _plan_table(scores.scores("six"))]
    for dataset, group in itertools.groupby(scores.scores(), lambda score: score.dataset):
        scores_of = list(group)
        digest = scores_of[0].digest
        where = recorded.get(digest, "Another recording than the catalogue's")
        about = f"{where}, `{scores_of[0].env}`, digest `{digest[:12]}…`."
        if reference := scores_of[0].reference:
            about += f" Random play {reference.random:,.4g}, expert {reference.expert:,.4g}."
        parts.append(f"## {dataset}\n\n{about}\n\n{_score_table(scores_of)}")
    return "\n".join(parts)


def _plan_table(plan_scores: Sequence[scores.Score]) -> str:
    """Return a table of all baselines on all datasets of a plan, by best actions."""
    datasets = sorted({score.dataset for score in plan_scores})
    cells = {(score.baseline, score.dataset): scores.text(score.best) for score in plan_scores}
    names = sorted({score.baseline for score in plan_scores})
    rows = [[name, *(cells.get((name, dataset), "") for dataset in datasets)] for name in names]
    about = (
        f"Best actions after {plan_scores[0].updates:,} updates, {plan_scores[0].seeds} seeds. "
        "Source: `benchmarks/six`; `offmarl benchmark six` repeats it."
    )
    return f"{table(['baseline', *datasets], rows)}\n<small>{about}</small>\n"


def _score_table(rows: Sequence[scores.Score]) -> str:
    """Return a table of scores on one recording, and where they come from."""
    updates = sorted({score.updates for score in rows})
    files = sorted({f"`{source}`" for score in rows for source in score.sources})
    source = (
        f"After {', '.join(f'{count:,}' for count in updates)} updates. "
        f"Source, in `benchmarks/separation`: {', '.join(files)}."
    )
    return f"{table(scores.HEADINGS, map(scores.row, rows))}\n<small>{source}</small>\n"


def _dataset(card: catalogue.Card) -> str:
    facts = {
        "agents": card.num_agents,
        "observation": _count(card.observation_size, "numbers"),
        "action": ", ".join(f"{kind}, {n}" for kind, n in (card.action or {}).items()) or "unknown",
        "global state": _count(card.state_size, "numbers"),
        "time limit": _count(card.time_limit, "steps"),
        "licence of the data": card.licence.data,
    }
    if card.hub:
        facts["repository"] = f"[{card.hub.repository}]({_hub_page(card.hub.repository)})"
        facts["size"] = _count(card.hub.size, "bytes")
    parts = [f"# {card.name}\n\n{card.summary}\n"]
    if picture := _picture_of(card):
        parts.append(f"![An episode of this environment]({picture}){{ width=360 }}\n")
    parts += [_get(card), table(["", ""], facts.items())]
    with_returns = {name: uid for name, uid in card.uids.items() if uid.return_mean is not None}
    if with_returns:
        parts += ["## Returns\n", returns_chart(with_returns), _uids(with_returns)]
    for name, uid in with_returns.items():
        if measured := scores.on_recording(uid.digest):
            about = "Interquartile means over seeds, with 95% intervals; [all scores](scores.md)."
            parts.append(f"## Baselines on {name}\n\n{about}\n\n{_score_table(measured)}")
    if card.quirks:
        parts.append("## Quirks\n\n" + "\n".join(f"- {quirk}" for quirk in card.quirks) + "\n")
    parts.append(f"## Citation\n\n```bibtex\n{card.citation.strip()}\n```\n")
    return "\n".join(parts)


def _get(card: catalogue.Card) -> str:
    if card.recipe:
        return f"```bash\n{card.recipe.command}\n```\n"
    uid = next(iter(card.uids), "")
    name = f"{card.name}/{uid}".rstrip("/")
    return (
        f"```bash\noffmarl pull {name}\n```\n\n"
        f'```python\nimport offmarl\n\ndataset = offmarl.load_dataset("{name}")\n```\n'
    )


def _hub_page(repository: str) -> str:
    return f"https://huggingface.co/datasets/{repository}"


def _count(value: int | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:,} {unit}"


def _uids(uids: Mapping[str, catalogue.Uid]) -> str:
    rows = [
        (
            name,
            f"{uid.steps or 0:,}",
            f"{uid.episodes or 0:,}",
            *(_number(value) for value in (uid.return_mean, uid.return_std)),
            f"{_number(uid.return_min)} to {_number(uid.return_max)}",
            _number(uid.joint_saco),
        )
        for name, uid in uids.items()
    ]
    headings = ["vault", "steps", "episodes", "mean return", "deviation", "range", "SACo"]
    shown = len(headings) - (not any(row[-1] for row in rows))
    return table(headings[:shown], [row[:shown] for row in rows])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"


# ---------------------------------------------------------------------------------- programs


def algorithms() -> Pages:
    """Return a page for each recorder and each baseline."""
    kinds: tuple[registry.Kind, ...] = ("recorder", "baseline")
    programs_by_name = {
        name: (kind, path) for kind in kinds for name, path in sorted(registry.find(kind).items())
    }
    rows = [
        (f"[`{name}`]({slug(name)}.md)", kind, registry.summary(path))
        for name, (kind, path) in programs_by_name.items()
    ]
    index = (
        "# Algorithms\n\n"
        "A recorder trains online and records datasets, a baseline trains on a dataset. Each is "
        "one file that can be read from top to bottom. "
        "[A baseline of your own](../../howto/own_baseline.md) is trained by its path.\n\n"
    )
    pages = {"index.md": index + table(["name", "kind", ""], rows)}
    pages |= {
        f"{slug(name)}.md": _program(kind, name, p) for name, (kind, p) in programs_by_name.items()
    }
    return {f"catalogue/algorithms/{path}": text for path, text in pages.items()}


def _program(kind: registry.Kind, name: str, path: Path) -> str:
    module = registry.load(kind, name)
    texts, verb = parameter_texts(module.Args), registry.VERBS[kind]
    where = "--env swarm/coverage-3" if kind == "recorder" else "--vault DATA"
    annotations = vars(module.Args).get("__annotations__", {})
    fields = sorted(dataclasses.fields(module.Args), key=lambda one: one.name not in annotations)
    data = "the collected steps" if kind == "recorder" else "a batch"
    learns = hasattr(module, "make") and not hasattr(module, "work")  # else others learn for it
    return "\n".join(
        [
            f"# {name}\n\n{prose(module.__doc__)}",
            f"```bash\noffmarl {verb} {name} {where}\n```\n",
            *([f"## Data flow\n\n{flow_chart(flow_of(module), data)}"] if learns else []),
            "## Arguments\n",
            _definitions(fields, texts, flags=True),
            f"## Source\n\n`{path.parent.name}/{path.name}`\n",
            f'```python linenums="1"\n{path.read_text().rstrip()}\n```\n',
        ]
    )


def _default(one: "dataclasses.Field[Any]") -> str:
    if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
        return "(required)"
    value = one.default if one.default is not dataclasses.MISSING else one.default_factory()  # type: ignore[misc]
    return "" if value in (None, "") else f"(default `{value}`)"


# ---------------------------------------------------------------------------------- the API


def public_modules() -> Iterator[tuple[str, ModuleType]]:
    """Yield the public modules: those that ``offmarl.__all__`` names."""
    for name in sorted(offmarl.__all__):
        value = getattr(offmarl, name)
        if inspect.ismodule(value):
            yield value.__name__, value


def api() -> Pages:
    """Return a page for the package and one for each of its public modules."""
    modules = dict(public_modules())
    public = [name for name in offmarl.__all__ if not name.startswith("_")]
    names = [name for name in public if f"offmarl.{name}" not in modules]
    rows = [
        (f"[`{name}`]({slug(name)}.md)", _first_line(module)) for name, module in modules.items()
    ]
    index = "# API reference\n\n" + "\n".join(
        [
            "Names that begin with an underscore, and modules that are not listed here, can change "
            "without notice; see [what is stable](../stability.md).\n",
            table(["module", ""], [("[`offmarl`](offmarl.md)", _first_line(offmarl)), *rows]),
        ]
    )
    pages = {"index.md": index, "offmarl.md": _module("offmarl", offmarl, names)}
    for name, module in modules.items():
        pages[f"{slug(name)}.md"] = _module(name, module, public_names(module))
    return {f"api/{path}": text for path, text in pages.items()}


def public_names(module: ModuleType) -> list[str]:
    """Return the names of a module's ``__all__``, or else the public ones that it defines."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return [name for name in listed if not _is_module(module, name)]
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def _is_module(module: ModuleType, name: str) -> bool:
    """Whether a name is a module; one that needs a package that is not installed is none.

    mkdocstrings reads the sources, so the pages do not need that package either.
    """
    try:
        return inspect.ismodule(getattr(module, name))
    except MissingExtraError:
        return False


def _module(title: str, module: ModuleType, names: Sequence[str]) -> str:
    blocks = [f"::: {title}.{name}\n" for name in names if not name.startswith("_")]
    return f"# {title}\n\n{prose(module.__doc__)}\n" + "\n".join(blocks)


def _first_line(module: ModuleType) -> str:
    return (module.__doc__ or "").strip().partition("\n")[0].replace("``", "`")
