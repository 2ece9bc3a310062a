import chex
import jax
import pytest

from offmarl import envs
from offmarl.errors import OptionError, UnknownNameError
from offmarl.records import RecordedName


def test_every_name_has_a_line():
    assert list(envs.describe()) == envs.names()
    assert all(about.summary for about in envs.describe().values())
    assert "swarm/coverage-N" in envs.names()


def test_equal_names_give_equal_environments():
    first, second = envs.make("swarm/coverage-8"), envs.make("swarm/coverage-8")
    assert first == second
    assert hash(first) == hash(second)
    assert first.spec == second.spec
    assert envs.autoreset(first) == envs.autoreset(second)
    assert first != envs.make("swarm/coverage-3")


@pytest.mark.parametrize(
    ("name", "options", "full"),
    [
        (
            "swarm/coverage-8",
            {"time_limit": 20, "cells_per_agent": 16},
            "swarm/coverage-8:cells_per_agent=16.0,time_limit=20",
        ),
        (
            "swarm/coverage-8:time_limit=20,cells_per_agent=16",
            {},
            "swarm/coverage-8:cells_per_agent=16.0,time_limit=20",
        ),
        ("swarm/coverage-8", {"time_limit": 50}, "swarm/coverage-8"),  # the default
        (
            'swarm/coverage-8:comm="status",action=continuous',
            {},
            "swarm/coverage-8:action=continuous,comm=status",
        ),
        ("classic/xor:time_limit=20", {"time_limit": 30}, "classic/xor:time_limit=30"),
    ],
)
def test_an_environment_is_rebuilt_from_the_name_in_its_spec(name, options, full):
    env = envs.make(name, **options)
    assert env.spec.name == full
    assert envs.make(full) == env


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("swarm/coverge-8", UnknownNameError, "did you mean swarm/coverage-N"),
        ("coverage-8", UnknownNameError, r"did you mean swarm/coverage-8\? See `offmarl envs`"),
        ("smax/3m", UnknownNameError, r"did you mean jaxmarl/smax/3m\?"),
        ("simple_spread_v3", UnknownNameError, r"did you mean jaxmarl/mpe/simple_spread_v3\?"),
        ("swarm/swarm/coverage-8", UnknownNameError, "did you mean swarm/coverage-N"),
        ("nothing", UnknownNameError, "offmarl envs"),
        (
            "swarm/coverage",
            UnknownNameError,
            "write swarm/coverage-N with a .* such as swarm/coverage-3",
        ),
        ("swarm/coverage-0", OptionError, "num_agents must be at least 1, not 0"),
        ("swarm/coverage-3:time_limits=9", UnknownNameError, "did you mean time_limit"),
        ("swarm/coverage-3:num_agents=9", UnknownNameError, "no option of swarm/coverage-N"),
        ("swarm/coverage-3:time_limit", OptionError, "write option=value"),
        ("swarm/coverage-3:time_limit=true", OptionError, "must be of type int, not True"),
        ("swarm/coverage-3:recovery_time=NaN", OptionError, "recovery_time must be above 0"),
        (
            f"swarm/flock-3:journey={10**400}",
            OptionError,
            "journey must be of type float, not 1000",
        ),
        ("probe/match:action=both", OptionError, "action must be one of discrete, continuous"),
        ("classic/rps:rock=-1", OptionError, "rock must be above 0"),
        ("classic/bridge:time_limit=0", OptionError, "time_limit must be at least 1"),
        ("probe/match:time_limit=3", UnknownNameError, "known: action"),
    ],
)
def test_what_cannot_be_made_is_explained(name, error, message):
    with pytest.raises(error, match=message):
        envs.make(name)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("swarm/coverage-400000000", OptionError, "a number over 1,048,576.*--env"),
        ("swarm/coverage-3:time_limit=1e5", OptionError, "must be of type int"),
        ("swarm/coverage-3:time_limit=1000000000", OptionError, "over 1,048,576"),
        ("swarm/coverage-1000000:num_neighbours=1000000", OptionError, "a product of numbers over"),
        ("swarm/coverage-1000:cells_per_agent=1e15", OptionError, "over 1,048,576"),
        ("swarm/coverage-1000:cells_per_agent=Infinity", OptionError, "over 1,048,576"),
        (f"swarm/coverage-{'9' * 5000}", UnknownNameError, "a whole number in place"),
        (f"swarm/coverage-3:time_limit={'9' * 5000}", OptionError, "must be of type int"),
        (f"swarm/coverage-3:time_limit={'[' * 5000}", OptionError, "must be of type int"),
    ],
)
def test_a_name_in_data_asks_for_no_memory_without_bounds(name, error, message):
    with pytest.raises(error, match=message):
        envs.make(RecordedName(name))
    assert envs.make(RecordedName("swarm/coverage-3:time_limit=100000")).spec.time_limit == 100_000
    assert envs.make("swarm/coverage-3:time_limit=10000000").spec.time_limit == 10_000_000


def test_an_environment_is_a_static_argument_that_does_not_recompile():
    begin = chex.assert_max_traces(lambda env, key: env.reset(key), n=1)
    for _ in range(2):
        jax.jit(begin, static_argnums=0)(envs.make("classic/bridge"), jax.random.key(0))
