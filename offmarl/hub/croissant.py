"""A dataset's description for programs, in Croissant 1.0 (mlcommons.org/croissant)."""

import json
from typing import Any

from offmarl.hub.catalogue import Card, File
from offmarl.hub.licences import OTHER, SPDX, UNKNOWN, page_of

_CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileObject": "cr:fileObject",
    "fileProperty": "cr:fileProperty",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}


def croissant(card: Card, repository: str, url: str, published: str) -> str:
    """Return a dataset's Croissant file: every file with its size and SHA-256.

    Parameters
    ----------
    card
        The dataset's.
    repository
        Where it is published, and at which address (``url``).
    url
        Of its page.
    published
        The date, as in "2026-01-31".
    """
    data = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": repository.replace("/", "_"),
        "description": f"{card.summary} {card.num_agents} agents; uids {', '.join(card.uids)}.",
        "license": _licence(card),
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


def _licence(card: Card) -> str:
    if card.licence.data in (UNKNOWN, OTHER):
        return card.licence.link or UNKNOWN
    page = page_of(card.licence.data)
    return card.licence.data if page == SPDX else page  # an expression has no page of its own


def _file_object(file: File, uid: str, url: str) -> dict[str, Any]:
    whole = file.path.endswith(".zip")
    return {
        "@type": "cr:FileObject",
        "@id": file.path,
        "name": file.path,
        "description": f"The vault {uid}{'' if whole else ', a shard of its zip archive'}.",
        "contentUrl": f"{url}/resolve/main/{file.path}",
        "contentSize": f"{file.size} B",
        "encodingFormat": "application/zip" if whole else "application/octet-stream",
        "sha256": file.sha256,
    }
