"""What a file is that cannot be read, from its first bytes."""

from pathlib import Path

_PICKLE = "a pickle of Python objects, which is never read: save its arrays with np.savez"
_KINDS = {
    b"\x89HDF\r\n\x1a\n": "an HDF5 file",
    b"PK": "a zip archive, as .npz files are",
    b"\x93NUMPY": "one .npy array",
    **{bytes([0x80, protocol]): _PICKLE for protocol in range(2, 6)},
    b"\x1f\x8b": "compressed by gzip: unpack it",
    b"version https://git-lfs": "a pointer of Git LFS: run `git lfs pull` where it is from",
}
"""Words for files by how they begin."""


def reason_of(what: object, error: Exception) -> str:
    """Return why reading failed, and what a file is, without NumPy's advice on pickles."""
    kind = _kind_of(what) if isinstance(what, Path) and what.is_file() else ""
    reason = "Python objects in it are not read" if "pickle" in str(error) else str(error)
    return f"it is {kind} ({reason})" if kind else reason


def _kind_of(path: Path) -> str:
    with path.open("rb") as file:
        begin = file.read(64)
    if known := [words for sign, words in _KINDS.items() if begin.startswith(sign)]:
        return known[0]
    text = begin.decode(errors="replace").partition("\n")[0]
    if not text.isprintable() or "\ufffd" in text:
        return ""
    return f"text that begins with {text!r}" if begin else "empty"
