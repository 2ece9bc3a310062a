"""The licences that a published dataset can have."""

import re

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from offmarl.errors import OptionError, unknown_name

UNKNOWN = "unknown"
"""The source states no licence."""
OTHER = "other"
"""A licence given by a link to its text."""

SPDX = "https://spdx.org/licenses/"
"""SPDX's list of licences, which has a page for each."""

_SAME = """
    Apache-2.0 MIT AFL-3.0 Artistic-2.0 BSL-1.0 BSD-2-Clause BSD-3-Clause BSD-3-Clause-Clear CC0-1.0
    CC-BY-2.0 CC-BY-2.5 CC-BY-3.0 CC-BY-4.0 CC-BY-SA-3.0 CC-BY-SA-4.0
    CC-BY-NC-2.0 CC-BY-NC-3.0 CC-BY-NC-4.0 CC-BY-ND-4.0 CC-BY-NC-ND-3.0 CC-BY-NC-ND-4.0
    CC-BY-NC-SA-2.0 CC-BY-NC-SA-3.0 CC-BY-NC-SA-4.0
    CDLA-Sharing-1.0 CDLA-Permissive-1.0 CDLA-Permissive-2.0 WTFPL ECL-2.0 EPL-1.0 EPL-2.0
    etalab-2.0 EUPL-1.1 AGPL-3.0 GPL-2.0 GPL-3.0 LGPL-2.1 LGPL-3.0 ISC LPPL-1.3c MS-PL MPL-2.0
    OSL-3.0 PostgreSQL OFL-1.1 NCSA Unlicense Zlib
"""
"""SPDX identifiers that Hugging Face knows by the same name in small letters."""
_RENAMED = {
    "C-UDA-1.0": "c-uda",
    "ODC-By-1.0": "odc-by",
    "ODbL-1.0": "odbl",
    "PDDL-1.0": "pddl",
    "LGPLLR": "lgpl-lr",
    **{
        f"{name}-{kind}": name.lower()
        for name in ("AGPL-3.0", "GPL-2.0", "GPL-3.0", "LGPL-2.1", "LGPL-3.0")
        for kind in ("only", "or-later")
    },
}

HUGGING_FACE = {
    **{name: name.lower() for name in _SAME.split()},
    **_RENAMED,
    UNKNOWN: UNKNOWN,
    OTHER: OTHER,
}
"""From SPDX identifier to that of Hugging Face, in which a licence family has one name.

After huggingface.co/docs/hub/repositories-licenses; names there that are not SPDX's are left out.
"""


def licence_named(name: str) -> str:
    """Return a licence in its canonical spelling.

    Parameters
    ----------
    name
        An SPDX identifier or an expression of them, such as "MIT OR Apache-2.0"; "unknown" or
        "other". Case is ignored.

    Raises
    ------
    UnknownNameError
        It is none of these. A ``LicenseRef-`` is not: only its author knows what it refers to.
    """
    if name.lower() in (UNKNOWN, OTHER):
        return name.lower()
    try:
        proper = canonicalize_license_expression(name)
    except InvalidLicenseExpression:
        proper = None
    if not proper or "LicenseRef-" in proper:
        raise unknown_name("licence", name, HUGGING_FACE, see=SPDX)
    return proper


def page_of(licence: str) -> str:
    """Return the address of an SPDX identifier's page; for an expression, of SPDX's list."""
    if re.fullmatch(r"[\w.+-]+", licence):
        return f"{SPDX}{licence.removesuffix('+')}.html"
    return SPDX


def hub_metadata(licence: str, link: str | None) -> dict[str, str]:
    """Return a licence as a dataset's page states it to the hub.

    Parameters
    ----------
    licence
        In its canonical spelling.
    link
        The text of one that is "other".

    Returns
    -------
    dict
        ``license``; where Hugging Face has no identifier, also ``license_name`` and
        ``license_link``.
    """
    if licence != OTHER and licence in HUGGING_FACE:
        return {"license": HUGGING_FACE[licence]}
    name = re.sub(r"[^a-z0-9.]+", "-", licence.lower()).strip("-")
    return {"license": OTHER, "license_name": name, "license_link": link or page_of(licence)}


def check_link(licence: str, link: str | None) -> None:
    """Raise `OptionError` unless there is a web address of a licence that is told by one."""
    if licence != OTHER and link:
        raise OptionError(f"{licence} needs no link: leave --licence-link out, or say 'other'.")
    if licence == OTHER and not (link or "").startswith(("https://", "http://")):
        raise OptionError(
            "'other' needs the address of the licence's text: give --licence-link URL."
        )
