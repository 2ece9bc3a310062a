"""The page of a dataset on the hub: metadata that the hub reads, and text for people."""

from typing import Any

from huggingface_hub import DatasetCard, DatasetCardData

from offmarl.hub.catalogue import Card, Uid
from offmarl.hub.licences import OTHER, UNKNOWN, hub_metadata

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


def readme(card: Card, repository: str) -> str:
    """Return a repository's README.md; the hub checks its metadata when it is committed."""
    licence: dict[str, Any] = {**hub_metadata(card.licence.data, card.licence.link)}
    metadata = DatasetCardData(
        **licence,
        pretty_name=card.name,
        task_categories=["reinforcement-learning"],
        size_categories=[_size_category(card)],
        tags=list(_TAGS),
    )
    return str(DatasetCard(f"---\n{metadata.to_yaml()}\n---\n\n{_text(card, repository)}"))


def _size_category(card: Card) -> str:
    steps = sum(one.steps or 0 for one in card.uids.values())
    return next((name for most, name in _SIZES if steps < most), "n>1T")


def _text(card: Card, repository: str) -> str:
    """Write what people read."""
    action = ", ".join(f"{size} {kind}" for kind, size in (card.action or {}).items())
    rows = "\n".join(
        f"| {uid} | {one.steps:,} | {_episodes(one)} | {_mean(one.return_mean, one.return_std)} "
        f"| `{one.digest}` |"
        for uid, one in card.uids.items()
    )
    origins = "\n".join(f"- {uid}: {one.origin}" for uid, one in card.uids.items() if one.origin)
    first = next(iter(card.uids))
    citation = (
        f"\n## Citation\n\n```bibtex\n{card.citation.strip()}\n```\n" if card.citation else ""
    )
    return f"""# {card.name}

{card.summary}

Offline multi-agent reinforcement learning: {card.num_agents} agents, actions {action}, observations
of size {card.observation_size}, global state of size {card.state_size}.

| uid | steps | episodes | return | digest |
|---|---|---|---|---|
{rows}

Returns are undiscounted sums, the mean over agents, of complete episodes: those that the
environment ended.

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

Each uid is one zip archive in `data/`; join the shards of a larger one first
(`cat data/NAME.zip.* > NAME.zip`). Unpacked it is a vault that stock
[flashbax](https://github.com/instadeepai/flashbax) opens. `offmarl.toml` holds the SHA-256 of every
file and the digest of every vault's content; `pull` checks both.

## Origin

{origins}

## Licence

{_licence(card)}
{citation}"""


def _episodes(one: Uid) -> str:
    """Count episodes, and those whose returns are not among the mean."""
    return f"{one.episodes:,}" + (f" ({one.incomplete:,} incomplete)" if one.incomplete else "")


def _licence(card: Card) -> str:
    if card.licence.data == UNKNOWN:
        return "Unknown: no licence is stated for this data."
    if card.licence.data == OTHER:
        return f"See {card.licence.link}."
    return f"{card.licence.data} (SPDX)."


def _mean(mean: float | None, std: float | None) -> str:
    return "" if mean is None or std is None else f"{mean:.4g} ± {std:.4g}"
