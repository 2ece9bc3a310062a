"""The pages that the hub shows of datasets and policies, and the Croissant files of datasets."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offmarl._html import templates
from offmarl.hub.card import Card, File, Uid, index_of
from offmarl.hub.licences import OTHER, SPDX, UNKNOWN, hub_metadata, page_of
from offmarl.terminal import number

_TAGS = ("multi-agent", "offline-rl", "reinforcement-learning", "jax", "flashbax", "offmarl")
_SIZES = (
    *("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B"),
    *("1B<n<10B", "10B<n<100B", "100B<n<1T", "n>1T"),
)
"""The hub's categories of sizes: the first is of numbers of at most three digits."""

EPISODES = "episodes"
"""The directory of the Parquet tables of episodes in a repository."""
README = "README.md"


def readme(card: Card, repository: str, tables: Sequence[str] = ()) -> str:
    """Return a repository's README.md; the hub checks its metadata when it is committed.

    ``tables`` are the paths of Parquet tables, which the hub's viewer shows.
    """
    from huggingface_hub import DatasetCard, DatasetCardData  # reading cards does not need it

    splits = [{"split": re.sub(r"\W", "_", Path(table).stem), "path": table} for table in tables]
    viewer: dict[str, Any] = (
        {"configs": [{"config_name": EPISODES, "data_files": splits}]} if splits else {}
    )
    licence: dict[str, Any] = {**hub_metadata(card.licence.data, card.licence.link)}
    digits = len(str(sum(vault.steps or 0 for vault in card.uids.values())))
    metadata = DatasetCardData(
        **licence,
        **viewer,
        pretty_name=card.name,
        task_categories=["reinforcement-learning"],
        size_categories=[_SIZES[min(max(digits, 3) - 3, len(_SIZES) - 1)]],
        tags=list(_TAGS),
    )
    text = _text(
        "dataset.md",
        card=card,
        repository=repository,
        first=next(iter(card.uids)),
        action=", ".join(f"{size} {kind}" for kind, size in (card.action or {}).items()),
        number=number,
        returns=_returns,
    )
    return str(DatasetCard(f"---\n{metadata.to_yaml()}\n---\n\n{text}"))


def _text(template: str, **context: Any) -> str:
    page = templates("offmarl.hub", keep_trailing_newline=True).get_template(template)
    return str(page.render(**context))


def _returns(vault: Uid) -> str:
    """Format the mean return, or that of each team."""
    if not vault.teams:
        return _mean(vault.return_mean, vault.return_std)
    teams = vault.teams.items()
    return ", ".join(f"{name} {_mean(team.return_mean, team.return_std)}" for name, team in teams)


def _mean(mean: float | None, std: float | None) -> str:
    return "" if mean is None or std is None else f"{mean:.4g} ± {std:.4g}"


def croissant(card: Card, repository: str, url: str, published: str) -> str:
    """Return a dataset's Croissant file: every file with its size and SHA-256."""
    context = Path(__file__).parent / "templates" / "croissant.json"  # that of Croissant 1.0
    data = {
        "@context": json.loads(context.read_text("utf-8")),
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": repository.replace("/", "_"),
        "description": f"{card.summary} {card.num_agents} agents; uids {', '.join(card.uids)}.",
        "license": _licence_url(card),
        "url": url,
        "version": "1.0.0",
        "datePublished": published,
        "creator": {"@type": "sc:Organization", "name": repository.partition("/")[0], "url": url},
        "citeAs": card.citation or f"{card.name}, {url}",
        "keywords": ["multi-agent reinforcement learning", "offline reinforcement learning"],
        "distribution": [
            _file_object(file, uid, url) for uid, vault in card.uids.items() for file in vault.files
        ],
    }
    return json.dumps(data, indent=2) + "\n"


def _licence_url(card: Card) -> str:
    if card.licence.data in (UNKNOWN, OTHER):
        return card.licence.link or UNKNOWN
    page = page_of(card.licence.data)
    return card.licence.data if page == SPDX else page  # SPDX has no page for an expression


def _file_object(file: File, uid: str, url: str) -> dict[str, Any]:
    is_index = file.path == index_of(uid)
    return {
        "@type": "cr:FileObject",
        "@id": file.path,
        "name": file.path,
        "description": f"{'The index' if is_index else 'A file'} of the vault {uid}.",
        "contentUrl": f"{url}/resolve/main/{file.path}",
        "contentSize": f"{file.size} B",
        "encodingFormat": "application/gzip" if is_index else "application/octet-stream",
        "sha256": file.sha256,
    }


# ---------------------------------------------------------------------------------- policies


def model_readme(card: Mapping[str, Any], licence_link: str | None) -> str:
    """Return the README.md of a policy's repository, which is its model card."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData  # pulling does not need them

    returns, environment = card["returns"], card["environment"] or "unknown"
    results = returns and [
        EvalResult(
            task_type="reinforcement-learning",
            dataset_type=environment,
            dataset_name=environment,
            metric_type="mean_reward",
            metric_value=number(returns["mean"]),
        )
    ]
    terms: dict[str, Any] = {**hub_metadata(card["licence"], licence_link)}
    metadata = ModelCardData(
        **terms,
        library_name="offmarl",
        pipeline_tag="reinforcement-learning",
        tags=["multi-agent", "offline-rl", "reinforcement-learning", "jax", "offmarl"],
        model_name=card["name"].rpartition("/")[2],
        eval_results=results or None,
    )
    text = _text("policy.md", card=card, environment=environment)
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{text}"))
