"""Helpers for tests: random experience, and conformance tests.

`DriverConformance` tests a driver that is registered with `offmarl.vault.register_driver`; pytest
collects its tests from a subclass::

    class TestMine(DriverConformance):
        @pytest.fixture
        def place(self):
            return "mine://name/data.vlt/main"
"""

import os
from typing import Any, ClassVar

import numpy as np

from offmarl import vault
from offmarl.envs import conformance
from offmarl.errors import OffmarlError, VaultError, VaultExistsError
from offmarl.types import (
    ArraySpec,
    Discrete,
    EnvSpec,
    FinalObservations,
    Transition,
    View,
    map_tree,
)
from offmarl.vault.format import encoding

EnvironmentConformance = conformance.EnvironmentConformance
"""Conformance tests of environments: see `offmarl.envs.conformance`."""


def experience(
    spec: EnvSpec, rows: int, steps: int, seed: int = 0, end_every: float = 5.0
) -> tuple[Transition, FinalObservations]:
    """Make random steps ``(rows, steps, ...)`` and the final views of the episodes in them.

    An episode ends about every ``end_every`` steps; half of the episodes are truncated. The final
    views are in random order. Leaves and extras are those of the spec.
    """
    rng = np.random.default_rng(seed)
    lead = (rows, steps)
    last = rng.random(lead) < 1 / end_every
    by_limit = rng.random(lead) < 0.5
    agents = (*lead, spec.num_agents)
    action: Any
    if isinstance(spec.action, Discrete):
        action = rng.integers(0, spec.num_actions, agents).astype(np.int32)
    else:
        action = rng.uniform(-1, 1, (*agents, spec.action_size)).astype(np.float32)
    steps_made: dict[str, Any] = {
        "view": views(spec, lead, rng),
        "action": action,
        "reward": rng.normal(size=agents).astype(np.float32),
        "terminated": np.broadcast_to((last & ~by_limit)[..., None], agents),
        "truncated": np.broadcast_to((last & by_limit)[..., None], agents),
        "last": last,
        "behaviour_log_prob": -np.abs(rng.normal(size=agents)).astype(np.float32),
        "policy_id": np.repeat(rng.integers(0, 3, (*lead, 1)), spec.num_agents, -1).astype(
            np.int32
        ),
    }
    if isinstance(spec.action, Discrete):
        legal = steps_made["view"].legal_actions
        np.put_along_axis(legal, action[..., None].astype(np.int64), True, -1)
    if spec.extras:
        steps_made["extras"] = {x: entries(leaf, lead, rng) for x, leaf in spec.extras.items()}
    row, time = np.nonzero(last)
    order = rng.permutation(len(row))
    final: Any = (row[order], time[order], views(spec, (len(row),), rng))
    return Transition(**steps_made), FinalObservations(*final)


def views(spec: EnvSpec, lead: tuple[int, ...], rng: np.random.Generator) -> View:
    """Make random views ``(*lead, ...)``."""
    agents, leaves = (*lead, spec.num_agents), spec.view_spec
    arrays: Any = (
        map_tree(lambda leaf: entries(leaf, lead, rng), leaves.observation),
        map_tree(lambda leaf: entries(leaf, lead, rng), leaves.state),
        rng.random((*agents, spec.action_size)) < 0.7,
        rng.random(agents) < 0.9,
    )
    arrays[2][..., 0] |= ~arrays[2].any(-1)  # whoever is alive can do something
    return View(*arrays)


def entries(leaf: ArraySpec, lead: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Make random entries ``(*lead, *leaf.shape)`` of any type of leaf."""
    shape, dtype = (*lead, *leaf.shape), leaf.numpy_dtype
    if leaf.dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        return rng.integers(bounds.min, bounds.max, shape, dtype, endpoint=True)
    return rng.normal(size=shape).astype(dtype)


def steps_of(transition: Transition, start: int, stop: int) -> Transition:
    """Return an interval of time of ``(rows, T, ...)`` steps."""
    interval: Transition = map_tree(lambda x: x[:, start:stop], transition)
    return interval


def concatenate(parts: list[Transition]) -> Transition:
    """Put ``(rows, T, ...)`` steps one after the other."""
    steps: Transition = map_tree(lambda *arrays: np.concatenate(arrays, axis=1), *parts)
    return steps


def assert_same(actual: Transition, expected: Transition) -> None:
    """Raise `AssertionError` unless all arrays have the same entries, shapes and types."""
    arrays, expected_arrays = encoding.to_disk(actual), encoding.to_disk(expected)
    assert arrays.keys() == expected_arrays.keys()
    for name, array in expected_arrays.items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name)
        assert arrays[name].dtype == array.dtype, name
    np.testing.assert_array_equal(actual.last, expected.last)


Place = str | os.PathLike[str]
"""A path or URL of a vault, as `offmarl.vault.open_vault` takes it."""


class DriverConformance:
    """Conformance tests of the places that vaults are kept in.

    Subclasses have a pytest fixture ``place``: the path or URL ``<directory>/<name>.vlt/<uid>`` of
    a vault that does not exist, in a directory that holds no other vault.

    Attributes
    ----------
    options
        Keyword arguments of `offmarl.vault.create`.
    """

    options: ClassVar[dict[str, Any]] = {"chunk_steps": 8}
    spec = EnvSpec("", num_agents=2, observation_size=3, state_size=5, action=Discrete(4))
    rows = 2

    def create(self, place: Place) -> vault.Writer:
        """Create the vault."""
        return vault.create(place, self.spec, rows=self.rows, **self.options)

    def written(
        self, place: Place, *lengths: int
    ) -> tuple[vault.Dataset, list[tuple[Transition, FinalObservations]]]:
        """Write a vault of records of so many steps, and return it and the records."""
        parts = self.parts(*lengths)
        with self.create(place) as writer:
            for part in parts:
                writer.append(*part)
        return vault.open_vault(place), parts

    def parts(self, *lengths: int) -> list[tuple[Transition, FinalObservations]]:
        """Make records of so many steps."""
        return [experience(self.spec, self.rows, n, seed) for seed, n in enumerate(lengths)]

    def check(self, place: Place, parts: list[tuple[Transition, FinalObservations]]) -> None:
        """Check that the vault holds exactly these records."""
        dataset = vault.open_vault(place)
        steps = concatenate([transition for transition, _ in parts])
        assert dataset.length == steps.last.shape[1]
        assert_same(dataset.transitions(), steps)
        episodes = dataset.episodes
        ends = zip(episodes.row, episodes.start + episodes.length, strict=True)
        number = dict(zip(ends, episodes.final, strict=True))
        begin = 0
        for transition, finals in parts:
            for index, (row, time) in enumerate(zip(finals.row, finals.time, strict=True)):
                final = number[int(row), begin + int(time) + 1]
                actual = map_tree(lambda leaf, at=final: leaf[at], dataset.finals)
                expected = map_tree(lambda leaf, at=index: leaf[at], finals.view)
                map_tree(np.testing.assert_array_equal, actual, expected)
            begin += transition.last.shape[1]

    def test_an_empty_vault(self, place: Place) -> None:
        """It can be read, and has the sizes and spec of its creation."""
        self.create(place).close()
        dataset = vault.open_vault(place)
        assert (dataset.rows, dataset.length, dataset.spec) == (self.rows, 0, self.spec)
        assert len(dataset.episodes.row) == 0

    def test_flushed_steps_can_be_read(self, place: Place) -> None:
        """A reader sees all flushed steps while the writer continues."""
        parts = self.parts(1, 30, 4)
        with self.create(place) as writer:
            for count, part in enumerate(parts, 1):
                writer.append(*part)
                writer.flush()
                self.check(place, parts[:count])
        self.check(place, parts)

    def test_writing_is_resumed(self, place: Place) -> None:
        """Another writer continues, also with episodes that were running."""
        parts = self.parts(7, 9, 20)
        self.create(place).close()
        for part in parts:
            with vault.resume(place) as writer:
                writer.append(*part)
        self.check(place, parts)

    def test_only_whole_unflushed_records_are_lost(self, place: Place) -> None:
        """A record that was not flushed is either complete or absent."""
        parts = self.parts(7, 9, 20)
        writer = self.create(place)
        for part in parts[:2]:
            writer.append(*part)
        writer.flush()
        writer.append(*parts[2])
        writer.release()
        self.check(place, parts[: 2 + (vault.open_vault(place).length > 16)])

    def test_records_of_a_run_are_written_once(self, place: Place) -> None:
        """A repeated program skips existing records, and cannot leave one out."""
        parts = self.parts(3, 5, 4)
        for count in (2, 3):
            with self.create(place) if count == 2 else vault.resume(place) as writer:
                for chunk, part in enumerate(parts[:count]):
                    writer.append(*part, run="me", chunk=chunk)
                with np.testing.assert_raises(VaultError):
                    writer.append(*parts[0], run="me", chunk=count + 1)
                writer.flush()
                assert writer.chunks("me") == count
        self.check(place, parts)

    def test_slices(self, place: Place) -> None:
        """Any interval of existing time steps can be read, and no other one."""
        parts = self.parts(11, 13)
        with self.create(place) as writer:
            for part in parts:
                writer.append(*part)
        dataset = vault.open_vault(place)
        steps = concatenate([transition for transition, _ in parts])
        for start, stop in ((0, 1), (5, 17), (10, 12), (23, 24)):
            assert_same(dataset.transitions(start, stop), steps_of(steps, start, stop))
        with np.testing.assert_raises(VaultError):
            dataset.transitions(20, 25)

    def test_provenance(self, place: Place) -> None:
        """It is merged, and written with the next flush."""
        with self.create(place) as writer:
            writer.annotate({"tier": "expert", "seed": 1})
            writer.flush()
            writer.annotate({"seed": 2})
        assert vault.open_vault(place).provenance.items() >= {"tier": "expert", "seed": 2}.items()

    def test_a_vault_is_not_created_twice(self, place: Place) -> None:
        """The existing vault is not changed."""
        parts = self.parts(6)
        with self.create(place) as writer:
            writer.append(*parts[0])
        with np.testing.assert_raises(VaultExistsError):
            self.create(place)
        self.check(place, parts)

    def test_a_missing_vault_cannot_be_opened(self, place: Place) -> None:
        """Opening it raises an error of offmarl."""
        for function in (vault.open_vault, vault.resume):
            with np.testing.assert_raises(OffmarlError):
                function(place)

    def test_two_writers_are_never_mixed(self, place: Place) -> None:
        """The second writer fails at its lock, or at its commit."""
        parts = self.parts(6, 6)
        first = self.create(place)
        with np.testing.assert_raises(VaultError):
            second = vault.resume(place)
            try:
                first.append(*parts[0])
                first.flush()
                second.append(*parts[1])
                second.flush()
            finally:
                second.release()
        if first.length == 0:
            first.append(*parts[0])
        first.close()
        self.check(place, parts[:1])

    def test_it_is_listed(self, place: Place) -> None:
        """Listing the directory above it returns its path and length."""
        dataset, _ = self.written(place, 9)
        ((path, summary),) = vault.list_vaults(dataset.path.parent)
        assert (str(path), summary.steps) == (str(dataset.path), 18)

    def test_replay(self, place: Place) -> None:
        """Replay on the device and streamed replay give the same batches."""
        import jax  # tests of files do not need it

        dataset, _ = self.written(place, 30)
        batch = dataset.replay(batch=4, length=3).sample(jax.random.fold_in(jax.random.key(0), 0))
        with dataset.stream(batch=4, length=3) as stream:
            streamed = next(stream)
        jax.tree.map(np.testing.assert_array_equal, batch, streamed)

    def test_it_is_verified(self, place: Place) -> None:
        """Verification passes, also with all steps read."""
        self.written(place, 21, 8)
        for deep in (False, True):
            report = vault.verify(place, deep=deep)
            assert report.sound, report.faults
            assert report.length == 29

    def test_it_is_copied(self, place: Place) -> None:
        """The verbs read from the place and write to it."""
        dataset, _ = self.written(place, 12)
        doubled = vault.cat([dataset, place], dataset.path.parent / "doubled")
        assert doubled.num_steps == 2 * dataset.num_steps
        longest = vault.filter(doubled, "length >= p50", dataset.path.parent / "longest")
        assert 0 < longest.num_steps < doubled.num_steps
