import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from offmarl import vault
from offmarl.errors import VaultError
from offmarl.vault.write import writer

from . import damage
from .killed import Victims

_GUARD = 'cat; umount --lazy "$0"; rmdir "$0"'


@pytest.fixture
def small_disk():
    """A file system of one megabyte.

    Another process takes it away when this one is done or dead, and it is not where pytest clears:
    a disk that is left behind would fail the next runs.
    """
    place = Path(tempfile.mkdtemp(prefix="offmarl-small-"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        place.rmdir()
        pytest.skip("needs the right to mount a small tmpfs")
    guard = subprocess.Popen(
        ["sh", "-c", _GUARD, str(place)], stdin=subprocess.PIPE, start_new_session=True
    )
    yield place
    guard.communicate()
    assert not place.exists()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The vault that `damage.record` writes; copy it before changing it."""
    return damage.record(tmp_path_factory.mktemp("recorded") / "v.vlt" / "a")


@pytest.fixture
def path(recorded, tmp_path):
    """A copy of the recorded vault, to damage."""
    return shutil.copytree(recorded, tmp_path / "v.vlt" / "a")


@pytest.fixture(scope="module")
def victims():
    with Victims() as process:
        yield process


@pytest.fixture
def eager(monkeypatch):
    """Commit every full chunk by itself."""
    monkeypatch.setattr(writer, "_COMMIT_BYTES", 1)
    monkeypatch.setattr(writer, "_MOST_COMMIT_BYTES", 1)


@pytest.fixture
def refused(tmp_path):
    """Check that an import is refused for a reason, and leaves nothing behind."""
    out = tmp_path / "refused" / "a.vlt"

    def check(message, source, layout="pymarl", error=VaultError, **options):
        with pytest.raises(error, match=message):
            vault.import_dataset(source, out, layout, **options)
        assert not out.parent.exists()

    return check
