"""The pages that the hub shows of datasets and policies, and the Croissant files of datasets."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offmarl.hub.card import Card, File, Uid, index_of
from offmarl.hub.licences import OTHER, SPDX, UNKNOWN, hub_metadata, page_of
from offmarl.records import POLICY_CARD
from offmarl.terminal import number

_TAGS = ("multi-agent", "offline-rl", "reinforcement-learning", "jax", "flashbax", "offmarl")
_SIZES = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
    (10**8, "10M<n<100M"),
    (10**9, "100M<n<1B"),
)


EPISODES = "episodes"
"""The directory of the Parquet tables of episodes in a repository."""


def readme(card: Card, repository: str, tables: Sequence[str] = ()) -> str:
    """Return a repository's README.md; the hub checks its metadata when it is committed.

    ``tables`` are the paths of Parquet tables, which the hub's viewer shows.
    """
    from huggingface_hub import DatasetCard, DatasetCardData  # reading cards does not need it

    splits = [{"split": re.sub(r"\W", "_", Path(one).stem), "path": one} for one in tables]
    shown: dict[str, Any] = (
        {"configs": [{"config_name": EPISODES, "data_files": splits}]} if splits else {}
    )
    licence: dict[str, Any] = {**hub_metadata(card.licence.data, card.licence.link)}
    steps = sum(one.steps or 0 for one in card.uids.values())
    metadata = DatasetCardData(
        **licence,
        **shown,
        pretty_name=card.name,
        task_categories=["reinforcement-learning"],
        size_categories=[next((name for most, name in _SIZES if steps < most), "n>1T")],
        tags=list(_TAGS),
    )
    return str(DatasetCard(f"---\n{metadata.to_yaml()}\n---\n\n{_text(card, repository)}"))


def _text(card: Card, repository: str) -> str:
    """Return the text of the README below its metadata."""
    action = ", ".join(f"{size} {kind}" for kind, size in (card.action or {}).items())
    rows = "\n".join(
        f"| {uid} | {one.steps:,} | {_episodes(one)} | {_returns(one)} | `{one.digest}` |"
        for uid, one in card.uids.items()
    )
    origins = "\n".join(f"- {uid}: {one.origin}" for uid, one in card.uids.items() if one.origin)
    first = next(iter(card.uids))
    sizes = (
        f"observations\nof size {card.observation_size}, global state of size {card.state_size}."
    )
    if card.leaves:
        leaves = "\n".join(f"| `{name}` | {leaf} |" for name, leaf in card.leaves.items())
        sizes = f"and these\narrays:\n\n| array | type and shape of a step |\n|---|---|\n{leaves}"
    citation = (
        f"\n## Citation\n\n```bibtex\n{card.citation.strip()}\n```\n" if card.citation else ""
    )
    return f"""# {card.name}

{card.summary}

Offline multi-agent reinforcement learning: {card.num_agents} agents, actions {action}, {sizes}

| uid | steps | episodes | return | digest |
|---|---|---|---|---|
{rows}

Returns are undiscounted sums of rewards, averaged over agents (of a team, where there are several)
and over complete episodes, which are those that the environment ended.

## Use

```bash
pip install offmarl
offmarl pull {repository}
```

```python
import offmarl

dataset = offmarl.load_dataset("{repository}/{first}")
replay = dataset.replay(batch=32, length=20)
```

Without a download, batches are streamed from the hub:

```python
dataset = offmarl.open("hf://{repository}/{first}")
stream = dataset.stream(batch=32, length=20)
```

Each directory `{card.place_of(first)}` is a vault, which stock
[flashbax](https://github.com/instadeepai/flashbax) opens once it is downloaded:

```python
from flashbax.vault import Vault
from huggingface_hub import snapshot_download

data = snapshot_download("{repository}", repo_type="dataset")
vault = Vault(rel_dir=data, vault_name="{card.scenario}.vlt", vault_uid="{first}")
```

`index/` says where each value is in the files of a vault, for streams. `offmarl.toml` lists the
SHA-256 of every file and the digest of every vault's content; `offmarl pull` checks both.

## Origin

{origins}

## Licence

{_licence(card)}
{citation}"""


def _episodes(one: Uid) -> str:
    """Format the number of episodes, and of those that the mean return excludes."""
    return f"{one.episodes:,}" + (f" ({one.incomplete:,} incomplete)" if one.incomplete else "")


def _licence(card: Card) -> str:
    if card.licence.data == UNKNOWN:
        return "Unknown: the source states no licence for this data."
    if card.licence.data == OTHER:
        return f"See {card.licence.link}."
    return f"{card.licence.data} (SPDX)."


def _returns(one: Uid) -> str:
    """Format the mean return, or that of each team."""
    if not one.teams:
        return _mean(one.return_mean, one.return_std)
    found = one.teams.items()
    return ", ".join(f"{name} {_mean(team.return_mean, team.return_std)}" for name, team in found)


def _mean(mean: float | None, std: float | None) -> str:
    return "" if mean is None or std is None else f"{mean:.4g} ± {std:.4g}"


_TERMS = """
    citeAs column extract field fileObject fileProperty fileSet format includes isLiveDataset
    jsonPath key md5 parentField path recordSet references regex repeated replace separator source
    subField transform
"""
"""Terms of Croissant's own vocabulary."""

_CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "dct": "http://purl.org/dc/terms/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "sc": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{term: f"cr:{term}" for term in _TERMS.split()},
}
"""The context of Croissant 1.0."""


def croissant(card: Card, repository: str, url: str, published: str) -> str:
    """Return a dataset's Croissant file: every file with its size and SHA-256."""
    data = {
        "@context": _CONTEXT,
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
            _file_object(file, uid, url) for uid, one in card.uids.items() for file in one.files
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

    returns = card["returns"]
    results = returns and [
        EvalResult(
            task_type="reinforcement-learning",
            dataset_type=card["environment"] or "unknown",
            dataset_name=card["environment"] or "unknown",
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
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{_policy_text(card)}"))


_CHOICES = {
    None: "Its returns are those of the last update, and were not used to choose a checkpoint.",
    "agreement": "Its agreement with held-out actions chose the update at which training stopped.",
    "return": "Returns in the environment chose the update at which training stopped.",
}
"""How the published checkpoint was chosen, by ``--stop-on``."""


def _policy_text(card: Mapping[str, Any]) -> str:
    returns, name = card["returns"], card["name"]
    rows = "".join(f"| `{key}` | {value} |\n" for key, value in card["arguments"].items())
    score = "It was not evaluated in an environment."
    if returns:
        low = (
            f" (95% interval {returns['low']:.4g} to {returns['high']:.4g})"
            if "low" in returns
            else ""
        )
        score = (
            f"Mean return of the last policies, actions {card['acting']}, over "
            f"{len(returns['seeds'])} seeds of {returns['episodes']} episodes each: "
            f"{returns['mean']:.4g}{low}."
        )
    code = (
        "\nThe program is in a file of its author's own, which is not part of this repository:\n"
        "give it with `program=`.\n"
        if card["own_file"]
        else ""
    )
    where = card["environment"] or "unknown"
    trained, choice = f"online in `{where}`", ""
    if card["offline"]:
        trained = f"on `{card['dataset']}` (digest `{card['dataset_digest'][:12]}`)"
        choice = " The policy was trained offline. " + _CHOICES[card["arguments"].get("stop_on")]
    return f"""# {name}

{card["summary"]}

{card["agents"]} agents in `{where}`, trained {trained} by offmarl
{card["offmarl"]}. {score}

## Use

```bash
pip install offmarl
offmarl pull {name} --policy
```

```python
import offmarl

policy = offmarl.load_policy(offmarl.hub.pull_policy("{name}").path)
action, carry = policy(observation, legal_actions)
```
{code}
The files are those of a run; `{POLICY_CARD}` lists their SHA-256, which a pull checks.

## Intended use and limits

Returns in other environments, or after changes of the environment, are unknown.{choice}

## Arguments

| argument | value |
|---|---|
{rows}"""
