"""All operations on a vault in any order, against NumPy arrays in memory."""

import shutil
import tempfile
from itertools import accumulate, groupby
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from offmarl import vault
from offmarl.errors import VaultError

from .experience import SPEC, assert_same, concatenate, episodes_of, make, table_of, whole_episodes
from .experience import steps as cut
from .test_stock import append_with_stock, open_stock

STOCK_STEPS = 5  # always as many, so that JAX compiles once


class VaultMachine(RuleBasedStateMachine):
    """A vault, and the records that must be in it: ``(segment, run, transition, finals)`` each.

    No episode goes on from one segment to the next.
    """

    writing = precondition(lambda self: self.writer is not None)
    closed = precondition(lambda self: self.writer is None)

    @initialize(
        rows=st.integers(1, 2),
        chunk_steps=st.integers(1, 9),
        codec=st.sampled_from(["raw", "zstd"]),
    )
    def create(self, rows, chunk_steps, codec):
        self.directory = Path(tempfile.mkdtemp())
        self.path = self.directory / "v.vlt" / "a"
        self.rows = rows
        self.records = []
        self.durable = self.seed = self.segment = 0
        self.run = ""
        self.writer = vault.create(self.path, SPEC, rows=rows, chunk_steps=chunk_steps, codec=codec)

    def made(self, steps, run, make=make):
        self.seed += 1
        if run is None or run != self.run:
            self.segment += 1
        self.run = run
        transition, finals = make(SPEC, self.rows, steps, self.seed, end_every=4)
        self.records.append((self.segment, run, transition, finals))
        return transition, finals

    @writing
    @rule(steps=st.integers(1, 25), run=st.sampled_from(["", "another"]))
    def append(self, steps, run):
        self.writer.append(*self.made(steps, run), run=run)

    @writing
    @rule()
    def flush(self):
        self.writer.flush()
        self.durable = len(self.records)

    @writing
    @rule()
    def close(self):
        self.writer.close()
        self.writer, self.durable = None, len(self.records)

    @writing
    @rule()
    def die(self):
        """Stop as by a kill: the first records survive, and all that were flushed."""
        self.writer.release()
        self.writer = None
        count = self.count(vault.open_vault(self.path).length)
        del self.records[count:]
        self.durable = count
        self.segment, self.run = self.records[-1][:2] if self.records else (0, "")

    @closed
    @rule()
    def resume(self):
        self.writer = vault.resume(self.path)

    @closed
    @rule(steps=st.integers(1, 12), count=st.integers(1, 3))
    def append_beside_others(self, steps, count):
        with vault.join(self.path, "shared", gather=20) as writer:
            for _ in range(count):
                writer.append(*self.made(steps, "shared", whole_episodes))
        self.durable = len(self.records)

    @closed
    @rule()
    def append_with_stock(self):
        transition, _ = self.made(STOCK_STEPS, None)
        transition = transition._replace(policy_id=np.full_like(transition.policy_id, -1))
        self.records[-1] = (self.segment, None, transition, None)
        append_with_stock(open_stock(self.path), transition)
        with vault.resume(self.path):
            pass  # adopts what stock appended
        self.durable = len(self.records)

    @rule(low=st.integers(0, 100), high=st.integers(0, 100))
    def read(self, low, high):
        dataset = vault.open_vault(self.path)
        start, stop = (dataset.length * place // 100 for place in sorted((low, high)))
        if start < stop:
            assert_same(dataset.transitions(start, stop), cut(self.whole(), start, stop))
        with pytest.raises(VaultError):
            dataset.transitions(start, dataset.length + 1)

    @invariant()
    def holds_whole_records(self):
        dataset = vault.open_vault(self.path)
        count = self.count(dataset.length)
        assert count >= self.durable
        assert table_of(dataset.episodes) == self.episodes(count)

    def teardown(self):
        """The digest is that of the same records in another layout."""
        if self.writer:
            self.close()
        dataset = vault.open_vault(self.path)
        if self.records:
            assert_same(dataset.transitions(), self.whole())
        with vault.create_whole(
            self.directory / "w.vlt", SPEC, rows=self.rows, chunk_steps=4, codec="raw"
        ) as writer:
            for segment, _, transition, finals in self.records:
                writer.append(transition, finals, run=str(segment))
        assert dataset.digest() == vault.open_vault(self.directory / "w.vlt").digest()
        shutil.rmtree(self.directory)

    def whole(self):
        return concatenate([transition for *_, transition, _ in self.records])

    def count(self, length):
        """Return the number of records that have this many steps."""
        ends = accumulate((t.last.shape[1] for *_, t, _ in self.records), initial=0)
        return list(ends).index(length)

    def episodes(self, count):
        table, begin = [], 0
        for _, group in groupby(self.records[:count], lambda record: record[0]):
            segment = concatenate([transition for *_, transition, _ in group])
            table += [(row, start + begin, *rest) for row, start, *rest in episodes_of(segment)]
            begin += segment.last.shape[1]
        return sorted(table)


@pytest.mark.slow
@pytest.mark.parametrize(
    "examples", [8, pytest.param(40, marks=pytest.mark.nightly)], ids=["some", "many"]
)
def test_anything_in_any_order(eager, examples):
    run_state_machine_as_test(
        VaultMachine, settings=settings(max_examples=examples, stateful_step_count=12)
    )
