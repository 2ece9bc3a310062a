import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from orbax.checkpoint import args

from offmarl import checkpoint
from offmarl.checkpoint import Checkpoints
from offmarl.errors import CheckpointError, RunError
from tests.vault.damage import small_files


class State(NamedTuple):
    params: dict
    optimiser: tuple
    keys: jax.Array
    count: jax.Array
    nothing: tuple
    empty: jax.Array


OPTIMISER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def make_state(value: float) -> State:
    params = {"w": jnp.full((3, 2), value), "b": jnp.zeros(2)}
    keys = jax.random.split(jax.random.key(int(value)), 4)
    return State(params, OPTIMISER.init(params), keys, jnp.array(7), (), jnp.zeros((2, 0)))


def data(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def assert_equal(one, other):
    chex.assert_trees_all_equal(*(jax.tree.map(data, tree) for tree in (one, other)), strict=True)


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path)


@pytest.mark.parametrize("directory", ["c", "../{}/c", "missing/../c"])
def test_what_is_saved_comes_back_with_its_structure(tmp_path, monkeypatch, directory):
    monkeypatch.chdir(tmp_path)
    state = make_state(2.0)
    checkpoints = Checkpoints(directory.format(tmp_path.name))
    checkpoints.save(3, {"policy": state.params, "state": state}, {"note": "é", "x": [1.5]})
    like = {"policy": state.params, "state": jax.eval_shape(lambda: make_state(0.0))}
    tree, info = Checkpoints(tmp_path / "c").restore(like)
    assert_equal(tree["state"], state)
    assert_equal(tree["policy"], state.params)
    assert info == {"note": "é", "x": [1.5]}


@pytest.mark.parametrize(
    "leaf",
    [np.array([1 + 1e-12]), np.array([2**40]), np.zeros((0, 2)), jax.random.key(1, impl="rbg")],
)
def test_64_bits_and_other_keys_come_back(checkpoints, leaf):
    checkpoints.save(0, {"policy": leaf}, {})
    like = leaf if isinstance(leaf, np.ndarray) else jax.eval_shape(lambda: leaf)
    assert_equal(checkpoints.restore({"policy": like})[0]["policy"], leaf)


def test_states_of_several_seeds_and_empty_trees(checkpoints):
    states = jax.vmap(lambda value: make_state(2.0)._replace(count=value))(jnp.arange(5))
    checkpoints.save(0, {"policy": (), "state": states}, {})
    tree, _ = checkpoints.restore({"policy": (), "state": jax.eval_shape(lambda: states)})
    assert_equal(tree["state"], states)
    assert tree["policy"] == ()


def test_only_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    for step in (1, 5, 9, 10):
        checkpoints.save(step, {"policy": jnp.full(2, step)}, {"step": step})
    assert checkpoints.steps() == [9, 10]
    assert checkpoints.latest() == 10
    tree, info = checkpoints.restore({"policy": jnp.zeros(2, int)}, step=9)
    assert info == {"step": 9}
    assert tree["policy"].tolist() == [9, 9]


def test_a_directory_without_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path / "none")
    assert checkpoints.steps() == []
    with pytest.raises(RunError, match="has no checkpoint"):
        checkpoints.restore({"policy": jnp.zeros(2)})
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("like", "says"),
    [
        ({"policy": {"w": jnp.zeros((2, 2))}}, r"policy\['w'\] is float32\[3, 2\]"),
        ({"policy": {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}}, r"policy\['b'\] is absent"),
        ({"policy": {"w": jnp.zeros((3, 2), int)}}, "float32"),
        ({"other": jnp.zeros(2)}, "other is absent"),
    ],
)
def test_a_checkpoint_of_another_program_is_refused(checkpoints, like, says):
    checkpoints.save(0, {"policy": {"w": jnp.zeros((3, 2))}}, {})
    with pytest.raises(RunError, match=says):
        checkpoints.restore(like)


# ---------------------------------------------------------------------------------- other files


def test_a_disk_that_takes_no_more_is_an_error_of_the_system(tmp_path, capfd):
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(1, {"policy": np.zeros(4), "state": np.zeros(4)}, {})
    large = np.random.default_rng(0).normal(size=100_000)
    with small_files(20_000), pytest.raises(OSError, match="File too large") as error:
        checkpoints.save(2, {"policy": large, "state": large}, {})
    assert error.value.filename == str(tmp_path / "run" / "2")
    assert "Traceback" not in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["1"]
    checkpoints.save(2, {"policy": large, "state": large}, {})
    assert checkpoints.steps() == [1, 2]


_FULL = """
import resource, sys, time
import numpy as np
from offmarl.checkpoint import Checkpoints
from offmarl.cli import exit_codes

tree = {str(i): np.random.default_rng(i).normal(size=10_000) for i in range(50)}
with exit_codes():
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    checkpoints = Checkpoints(sys.argv[1])
    try:
        checkpoints.save(1, {"policy": tree, "state": tree}, {})
    finally:
        time.sleep(0.5)
"""


def test_what_other_threads_of_a_save_say_of_the_same_error_is_not_shown(tmp_path):
    command = [sys.executable, "-c", _FULL, tmp_path / "run"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: [Errno 27]")


def test_files_of_the_user_are_left_alone(tmp_path):
    """Only whole checkpoints count, and saving removes only what a killed save left."""
    directory, elsewhere = tmp_path / "c", tmp_path / "elsewhere"
    for name in (
        "007/about",
        "²/about",
        "my.backup",
        "7.backup",
        "12",
        "3.orbax-checkpoint-tmp-old",
    ):
        (directory / name).mkdir(parents=True)
        (directory / name / "note").write_text("mine")
    for name in (".DS_Store", "notes.txt", "13", "5.deleted", "p.orbax-checkpoint-tmp"):
        (directory / name).write_text("mine")
    elsewhere.mkdir()
    (elsewhere / "note").write_text("mine")
    (directory / "6.deleted").symlink_to(elsewhere)
    (directory / "99").symlink_to(elsewhere)
    users = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    for name in ("1.deleted", "2.orbax-checkpoint-tmp", "2.orbax-checkpoint-tmp-1700000000"):
        (directory / name / "policy").mkdir(parents=True)
    checkpoints = Checkpoints(directory, keep=1)
    assert checkpoints.latest() is None
    for step in (1, 2):
        checkpoints.save(step, {"policy": jnp.full(2, step)}, {})
    assert checkpoints.steps() == [2]
    after = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    assert {path: text for path, text in after.items() if directory / "2" not in path.parents} == {
        **users,
        directory / "2": False,
    }
    with pytest.raises(RunError, match="12 has the name of a new checkpoint"):
        checkpoints.save(12, {"policy": jnp.ones(2)}, {})


# ---------------------------------------------------------------------------------- damage


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(content)


@pytest.fixture(scope="module")
def random_state():
    """Return arrays that do not compress, so that a file holds their bytes unchanged."""
    generator = np.random.default_rng(0)
    params = {"w": np.frombuffer(generator.bytes(4800), np.float32).reshape(40, 30)}
    return make_state(1.0)._replace(params=params, count=jnp.ones(3, jnp.bfloat16))


def test_a_flip_in_any_file_is_found_or_changes_nothing(tmp_path, random_state, checkpoints):
    expected = {"policy": random_state.params, "state": random_state}
    info, outcomes = {"note": "x", "sums": [0.1, float("nan")]}, {True: 0, False: 0}
    checkpoints.save(1, expected, info)
    generator = np.random.default_rng(0)
    for path in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        for bit in generator.integers(path.stat().st_size * 8, size=2):
            flip(path, int(bit))
            try:
                tree, about = checkpoints.restore(expected)
                assert_equal(tree["state"], random_state)
                assert_equal(tree["policy"], random_state.params)
                assert str(about) == str(info)
                outcomes[False] += 1
            except CheckpointError:
                outcomes[True] += 1
            flip(path, int(bit))
    assert_equal(checkpoints.restore(expected)[0]["state"], random_state)
    assert min(outcomes.values()) > 10


def test_flips_in_the_bytes_of_an_array_name_it(tmp_path, random_state, checkpoints):
    """The storage below checks its own tables and not the arrays: all of these were silent."""
    checkpoints.save(1, {"policy": random_state.params}, {})
    content = random_state.params["w"].tobytes()[1000:1008]
    (path,) = (p for p in tmp_path.rglob("*") if p.is_file() and content in p.read_bytes())
    start = path.read_bytes().index(content) * 8
    for bit in range(start, start + 64, 5):
        flip(path, bit)
        with pytest.raises(
            CheckpointError,
            match=r"1 is damaged \(the checksum of policy\['w'\] is wrong\): delete it and repeat",
        ):
            checkpoints.restore({"policy": random_state.params})
        flip(path, bit)


def test_a_run_goes_on_from_the_newest_intact_checkpoint(tmp_path, checkpoints):
    like = {"policy": jnp.zeros(2)}
    assert checkpoints.resume(like) is None
    for step in (1, 2, 3):
        checkpoints.save(step, {"policy": jnp.full(2, float(step))}, {"step": step})
    for step in (2, 3):
        (tmp_path / str(step) / "about" / "metadata").write_text("{}")
    with (
        pytest.warns(UserWarning, match="renamed to 3.damaged, and the run resumes from .* 2"),
        pytest.warns(UserWarning, match="renamed to 2.damaged, and the run resumes from .* 1"),
    ):
        step, tree, info = checkpoints.resume(like)
    assert (step, tree["policy"].tolist(), info) == (1, [1.0, 1.0], {"step": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2.damaged", "3.damaged"]
    (tmp_path / "1" / "policy" / "manifest.ocdbt").unlink()
    with pytest.warns(UserWarning, match="starts from the beginning"):
        assert checkpoints.resume(like) is None
    with pytest.raises(RunError, match="float32"):  # whole, and of another program
        checkpoints.save(4, {"policy": jnp.zeros(3)}, {})
        checkpoints.resume(like)
    assert checkpoints.latest() == 4


def store_again(part, name, **metadata):
    """Declare an array of a part, or another one, with other metadata."""
    base = {"driver": "file", "path": f"{part}/"}
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
    how = {"create": True, "delete_existing": True}
    tensorstore.open({**spec, "metadata": metadata}, **how).result()


@pytest.mark.parametrize(
    ("shape", "chunks", "dtype"),
    [(2**24, 2**20, "<f4"), (3, 2, "<f4"), (2, 2**20, "<f4"), (2, 2, "<f8")],
)
def test_an_array_is_read_only_as_expected(tmp_path, shape, chunks, dtype):
    """No memory is allocated for arrays that only the files of a policy declare."""
    checkpoints, like = Checkpoints(tmp_path), {"policy": {"w": jnp.ones(2)}}
    checkpoints.save(1, like, {})
    declared = {"shape": [shape], "chunks": [chunks], "dtype": dtype}
    store_again(tmp_path / "1" / "policy", "tree.unknown", **declared)
    assert_equal(checkpoints.restore(like)[0], like)
    assert_equal(checkpoints.restore(like, partly=True)[0], like)
    store_again(tmp_path / "1" / "policy", "tree.w", **declared)
    for partly in (False, True):
        with pytest.raises(CheckpointError, match=r"tree\.w is stored with another") as error:
            checkpoints.restore(like, partly=partly)
        assert "\n" not in str(error.value)


def test_a_checkpoint_without_checksums_is_damaged(tmp_path, checkpoints):
    from orbax.checkpoint import Checkpointer, CompositeCheckpointHandler

    about = {"info": {"a": 1}, "leaves": {"policy": {"": "float32[2]"}}}
    parts = {"policy": args.StandardSave({"tree": jnp.ones(2)}), "about": args.JsonSave(about)}
    with Checkpointer(CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "1", args.Composite(**parts))
    with pytest.raises(CheckpointError, match="the checksum of its JSON part is wrong"):
        checkpoints.restore({"policy": jnp.zeros(2)})


@pytest.mark.parametrize("part", ["info", "leaves", "checksums"])
@pytest.mark.parametrize("value", [..., [], 5, {"policy": 5}, {"policy": {"": 5}}])
def test_a_json_part_that_is_forged_with_its_checksum_is_damaged(tmp_path, part, value):
    """A stranger who publishes a policy computes the checksum as well."""
    checkpoints, like = Checkpoints(tmp_path), {"policy": jnp.ones(2)}
    checkpoints.save(1, like, {})
    file = tmp_path / "1" / "about" / "metadata"
    about = {**json.loads(file.read_text()), part: value}
    about = {name: entry for name, entry in about.items() if entry is not ...}
    file.write_text(json.dumps(checkpoint._sealed(about)))
    is_forged = part != "info" or not isinstance(value, dict)
    with pytest.raises(CheckpointError, match="is damaged") if is_forged else nullcontext():
        checkpoints.restore(like)
    file.write_text(json.dumps(checkpoint._sealed({**about, "checksums": {}})))
    with pytest.raises(RunError):
        checkpoints.restore({"policy": jnp.zeros(3)})


@pytest.mark.parametrize("depth", range(980, 996))
def test_a_json_part_that_is_nested_too_deeply_is_damaged(tmp_path, depth):
    checkpoints, like = Checkpoints(tmp_path), {"policy": jnp.ones(2)}
    checkpoints.save(1, like, {})
    (tmp_path / "1" / "about" / "metadata").write_text('{"a":' + "[" * depth + "]" * depth + "}")
    with pytest.raises(CheckpointError):
        checkpoints.restore(like)


# ---------------------------------------------------------------------------- no damage

PART, ABOUT = "policy", "about"


def fail(monkeypatch, error, calls=None, where=PART):
    """Make reads of the arrays, or of the JSON part, fail in these calls, by default in all."""
    owner, name = (checkpoint, "_read") if where == PART else (Path, "read_bytes")
    original, count = getattr(owner, name), []

    def failing(path, *part):
        if where in (path.name, path.parent.name):
            count.append(path)
            if calls is None or len(count) in calls:
                raise error
        return original(path, *part)

    monkeypatch.setattr(owner, name, failing)


@pytest.fixture
def two_saved(checkpoints):
    """Two intact checkpoints, and the expected content."""
    for step in (1, 2):
        checkpoints.save(step, {PART: jnp.full(2, float(step))}, {})
    return checkpoints, {PART: jnp.zeros(2)}


NUMBERS = "EMFILE ENFILE EIO ESTALE ENOMEM ENOSPC EACCES EPERM EDQUOT EROFS ETIMEDOUT ENAMETOOLONG"


@pytest.mark.parametrize("name", NUMBERS.split())
def test_errors_of_the_system_rename_nothing(two_saved, monkeypatch, name):
    checkpoints, like = two_saved
    number = getattr(errno, name)
    for where in (PART, ABOUT):
        with monkeypatch.context() as patch, pytest.raises(OSError, match=rf"Errno {number}\b"):
            fail(patch, OSError(number, os.strerror(number)), where=where)
            checkpoints.resume(like)
    assert checkpoints.resume(like).step == 2


OF_TENSORSTORE = (
    "RESOURCE_EXHAUSTED: Error opening file [OS error 24: EMFILE Too many open files]",
    "RESOURCE_EXHAUSTED: Failed to open: Too many open files [os_error_code='24']",
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ImportError("libtensorstore is missing"), ImportError),
        (MemoryError(), MemoryError),
        *((ValueError(text), RunError) for text in OF_TENSORSTORE),
        (KeyError("version"), RunError),
        (Exception("unknown"), RunError),
    ],
)
def test_errors_of_libraries_rename_nothing(two_saved, monkeypatch, error, expected):
    """Neither errors caused by the system, nor those that occur with every checkpoint."""
    checkpoints, like = two_saved
    with monkeypatch.context() as patch, pytest.raises(expected) as raised:
        fail(patch, error)
        checkpoints.resume(like)
    assert raised.type is expected
    if expected is RunError:
        assert "may be intact and was not changed" in str(raised.value)
    assert checkpoints.resume(like).step == 2


def test_a_lack_of_file_descriptors_renames_nothing(two_saved):
    """The errors are those that the libraries raise themselves."""
    checkpoints, like = two_saved
    assert checkpoints.resume(like).step == 2  # what is loaded the first time is loaded
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises((OSError, RunError)) as raised:
            checkpoints.resume(like)
        with pytest.raises((OSError, RunError)) as inner:
            checkpoints._restore(2, {PART: np.zeros(2, np.float32)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert CheckpointError not in (raised.type, inner.type)
    assert checkpoints.resume(like).step == 2


def test_damage_that_a_second_read_does_not_find_renames_nothing(two_saved, monkeypatch):
    checkpoints, like = two_saved
    with monkeypatch.context() as patch:
        fail(patch, FileNotFoundError("stale"), calls=[1])
        assert checkpoints.resume(like).step == 2
    with monkeypatch.context() as patch, pytest.raises(RunError, match="and then") as raised:
        patch.setattr(checkpoint, "_checksums", lambda _: {"": "other"})
        fail(patch, FileNotFoundError("stale"), calls=[2])
        checkpoints.resume(like)
    assert raised.type is RunError
    assert checkpoints.resume(like).step == 2


def test_what_is_left_of_a_checkpoint_is_moved_aside(two_saved, tmp_path):
    """Files of the user under the new name stay."""
    checkpoints, like = two_saved
    shutil.rmtree(tmp_path / "2" / "policy")
    (tmp_path / "2.damaged").mkdir()
    (tmp_path / "2.damaged" / "note").write_text("mine")
    with pytest.warns(UserWarning, match=r"renamed to 2\.damaged\.2, and"):
        assert checkpoints.resume(like).step == 1
    checkpoints.save(2, {PART: jnp.ones(2)}, {})
    assert checkpoints.resume(like).step == 2
    assert (tmp_path / "2.damaged" / "note").read_text() == "mine"


SAVE_FOREVER = """
import sys
import numpy as np
from offmarl.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=2)
for step in range(checkpoints.latest() or 0, 10**6):
    state = {"x": np.full((200, 200), step + 1.0)}
    checkpoints.save(step + 1, {"state": state}, {"step": step + 1})
    print(step + 1, flush=True)
"""


@pytest.mark.slow
def test_killed_while_saving_the_last_saved_one_is_there(tmp_path, checkpoints):
    command = [sys.executable, "-c", SAVE_FOREVER, str(tmp_path)]
    for instant in (0.003, 0.035):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            saved = [int(process.stdout.readline()) for _ in range(3)]
            time.sleep(instant)
            process.send_signal(signal.SIGKILL)
            saved = max([*saved, *map(int, process.stdout.read().split())])
            assert checkpoints.latest() in (saved, saved + 1)
        like = {"state": {"x": np.zeros((200, 200), np.float64)}}
        tree, info = checkpoints.restore(like)
        assert info["step"] == checkpoints.latest()
        np.testing.assert_array_equal(tree["state"]["x"], np.full((200, 200), info["step"]))


def test_some_arrays_are_read_without_the_structure_of_the_others(tmp_path):
    tree = [(np.arange(3), {"a": np.ones(2), "none": np.zeros((0, 4))}), jax.random.key(0)]
    Checkpoints(tmp_path).save(1, {"state": tree}, {})
    like = [(None, {"a": np.zeros(2), "none": np.zeros((0, 4))}), None]
    arrays, _ = Checkpoints(tmp_path).restore({"state": like}, partly=True)
    chex.assert_trees_all_equal(arrays["state"], [(None, tree[0][1]), None])
    with pytest.raises(RunError, match=r"\['a'\] is float64\[2\], not float64\[3\]"):
        expected = {"state": [(None, {"a": np.zeros(3)}), None]}
        Checkpoints(tmp_path).restore(expected, partly=True)
