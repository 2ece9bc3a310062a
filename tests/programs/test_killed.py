"""kill -9 at any instant of any recorder, and then the same bits."""

import random

import pytest

from benchmarks.robustness import kill_command, recorder_command, recorder_result
from offmarl.programs import registry


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    [*sorted(registry.find("recorder")), "ippo --seeds 4 --pbt learning_rate=1e-4,1e-3"],
)
def test_a_killed_recorder_ends_with_the_same_bits(name, tmp_path):
    outcome = kill_command(
        name, recorder_command(name), tmp_path, recorder_result, 2, random.Random(name)
    )
    assert not outcome.wrong
