"""Unusual input that works or is refused: names, numbers, arrays, handles."""

import os
import pickle
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import vault
from offmarl.errors import OptionError, ShapeError, VaultError, VaultLockedError
from offmarl.vault.storage.store import store_of

from .experience import SPEC, assert_same, concatenate, make, written

TRANSITION, FINALS = make()


def record(path, spec=SPEC, **options):
    return written(path, make(spec), spec=spec, **options).path


# ------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "name",
    ["a b %41 c.vlt/m %2F", "völt-数据.vlt/ü", "q#?&;*.vlt/'", "s3:x.vlt/m:n", "d.zip/v.vlt/a"],
)
def test_names(tmp_path, name):
    path = record(tmp_path / name)
    vault.compact(path)
    assert_same(vault.open_vault(path)[:], TRANSITION)
    assert [place for place, _ in vault.list_vaults(tmp_path)] == [path]


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("a\\b.vlt", VaultError, "backslash"),
        (os.fsdecode(b"b\xff.vlt"), OptionError, "not UTF-8"),
        ("x" * 300 + ".vlt", VaultError, "name too long"),
    ],
)
def test_names_that_cannot_be(tmp_path, name, kind, message):
    for function in (vault.open_vault, vault.resume, record, vault.verify):
        with pytest.raises(kind, match=message):
            function(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_cannot_be_keeps_no_others_from_being_listed(tmp_path):
    path = record(tmp_path / "good.vlt")
    (tmp_path / "good.vlt").rename(tmp_path / "ba\\d.vlt")
    record(tmp_path / "good.vlt")
    summaries = dict(vault.list_vaults(tmp_path))
    assert summaries[path].error is None
    assert len(summaries) == 2
    assert "backslash" in summaries[tmp_path / "ba\\d.vlt" / "main"].error


def test_links_and_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = vault.create("a.vlt", SPEC, rows=2)
    writer.append(*make())
    writer.flush()
    dataset = vault.open_vault("a.vlt")
    monkeypatch.chdir("/")
    (tmp_path / "b.vlt").symlink_to(tmp_path / "a.vlt")
    with pytest.raises(VaultLockedError):
        vault.resume(tmp_path / "b.vlt")
    writer.append(*make(seed=1))
    writer.close()
    assert_same(dataset[:], TRANSITION)
    vault.compact(tmp_path / "b.vlt")
    both = concatenate([TRANSITION, make(seed=1)[0]])
    assert_same(vault.open_vault(tmp_path / "b.vlt")[:], both)
    assert (tmp_path / "b.vlt").is_symlink()


# ----------------------------------------------------------------------------------- numbers


@pytest.mark.untyped
def test_the_numbers_of_a_spec_may_be_numpys(tmp_path):
    spec = replace(SPEC)
    for name, number in (("num_agents", np.int64(2)), ("state_size", np.prod([5]))):
        object.__setattr__(spec, name, number)  # the tests would not let us otherwise
    assert vault.open_vault(record(tmp_path / "a.vlt", spec)).spec == SPEC


# ------------------------------------------------------------------------------------ arrays


def unwritable(array):
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "odd",
    [
        unwritable,
        np.asfortranarray,
        lambda x: np.repeat(x, 2, -1)[..., ::2],
        lambda x: x[:, ::-1][:, ::-1],
        lambda x: x.astype(">f4"),
        lambda x: x.astype(np.float16),
        lambda x: jnp.asarray(x, jnp.bfloat16),
        lambda x: (8 * x).astype(np.int8),
        lambda x: x.astype(np.float64) / 3,
        lambda x: (8 * x).astype(np.int64),
    ],
)
def test_arrays_of_any_kind_of_number(tmp_path, odd):
    reward = odd(TRANSITION.reward)
    written(tmp_path / "a.vlt", (TRANSITION._replace(reward=reward), FINALS))
    rewards = vault.open_vault(tmp_path / "a.vlt").read(leaves=["rewards"])["rewards"]
    np.testing.assert_array_equal(rewards, np.asarray(reward, np.float32))
    assert vault.verify(tmp_path / "a.vlt", deep=True).sound


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chunk": -1}, VaultError, "counted from 0"),
        ({"chunk": 3, "run": "replay"}, VaultError, "chunk 3 of run 'replay' does not follow"),
        ({"cut": np.zeros((3, 3), bool)}, ShapeError, r"`cut` has shape \(3, 3\)"),
        ({"cut": np.zeros(3, bool)}, ShapeError, r"one for each of 2 rows"),
    ],
)
def test_what_an_append_does_not_take(tmp_path, options, error, message):
    with vault.create(tmp_path / "a.vlt", SPEC, rows=2) as writer:
        with pytest.raises(error, match=message):
            writer.append(TRANSITION, FINALS, **options)
        writer.append(TRANSITION, FINALS)
    assert_same(vault.open_vault(tmp_path / "a.vlt")[:], TRANSITION)


# ----------------------------------------------------------------------------------- handles


def test_a_vault_is_sent_to_another_process_without_its_data(tmp_path):
    path = tmp_path / "a.vlt"
    with vault.create(path, SPEC, rows=2) as writer:
        writer.append(*make(steps=5000))
        with pytest.raises(VaultError, match="cannot be pickled"):
            pickle.dumps(writer)
    dataset = vault.open_vault(path, checked=True)
    expected = dataset[:]
    sent = pickle.dumps(dataset)
    assert len(sent) < 1000
    assert_same(pickle.loads(sent)[:], expected)


def test_files_that_a_compaction_takes_away_are_looked_for_again(tmp_path):
    store = store_of(record(tmp_path / "a.vlt"))
    answers = iter([ValueError("NOT_FOUND: Error reading x"), 5, *[ValueError("NOT_FOUND: y")] * 2])

    def read():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert store.attempt(read) == 5
    with pytest.raises(VaultError, match="NOT_FOUND: y"):
        store.attempt(read)


def test_a_vault_is_not_made_inside_another(tmp_path):
    outer = record(tmp_path / "a.vlt", SPEC)
    inside = tmp_path / "a.vlt" / "main" / "b.vlt"
    with pytest.raises(
        VaultError, match=r"b\.vlt is inside the vault .*main: choose another place"
    ):
        vault.create(inside, SPEC, rows=2)
    assert not inside.exists() and vault.open_vault(outer).num_steps
