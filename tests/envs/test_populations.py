"""Policies drawn for each episode, whose parameters are data of a rollout."""

import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.envs import autoreset, make
from offmarl.envs.sides import TeamPolicy, compose, play_side, population, without_others
from offmarl.errors import OptionError, UnknownNameError
from offmarl.programs.runs.evaluate import play_policy
from offmarl.rollout import init_rollout, meet_others, rollout
from offmarl.types import FinalObservations, Policy

XOR = make("classic/xor:time_limit=4")
BOTH = (0, 1)


def still(params, carry, *_):
    """Do the actions that the parameters are."""
    return params, jnp.zeros(len(params)), carry


CONVENTION = Policy(tuple, still, draws=lambda _params: False)
ALTERNATING = Policy(
    lambda: jnp.zeros((), jnp.int32),
    lambda _params, time, *_: (jnp.full(2, time % 2), jnp.zeros(2), time + 1),
)


def conventions(*partners, weights=None):
    """The population of these actions of agent 1; agent 0 would do the other one."""
    members = [TeamPolicy(CONVENTION, np.array([1 - a, a], np.int32), BOTH) for a in partners]
    return population(XOR.spec, members, weights)


def response(partners):
    return play_side(XOR, "agent_0", {"agent_1": partners})


def test_a_response_meets_one_member_in_each_episode():
    """To two conventions at even odds, the memoryless optimum is half of the return to one."""
    mine, key = Policy(tuple, still), jax.random.key(0)
    for action, returns in ((0, {0.0, 4.0}), (1, {4.0, -8.0})):
        plays = play_policy(response(conventions(0, 1)), mine, 512, np.array([action]), key)
        assert set(plays[:, 0].tolist()) == returns
        assert abs(plays.mean() - sum(returns) / 2) < 0.5
    never = response(conventions(0, 1, weights=[0, 2]))
    plays = play_policy(never, mine, 512, np.array([1]), key)
    assert set(plays[:, 0].tolist()) == {-8.0}


def test_another_population_compiles_nothing():
    """Of ten populations of 20, and what is recorded has the id of each drawn member."""
    rng, policy = np.random.default_rng(0), Policy(tuple, CONVENTION.act)
    sides = [response(conventions(*rng.integers(0, 2, 20))) for _ in range(10)]
    env = autoreset(without_others(sides[0]))

    @jax.jit
    @chex.assert_max_traces(n=1)
    def play(state, key):
        return rollout(env, policy, jnp.zeros(1, jnp.int32), state, key, 8, policy_id=3)

    blank = init_rollout(env, policy, jax.random.key(0), 64)
    for number, side in enumerate(sides):
        assert without_others(side) is env.env
        state, steps, views, _ = play(meet_others(side, blank), jax.random.key(number))
        chex.assert_trees_all_equal(state.others, side.others)
        steps, views = jax.tree.map(lambda x: np.asarray(x).swapaxes(0, 1), (steps, views))
        ends = np.nonzero(steps.last)
        finals = FinalObservations(*ends, jax.tree.map(operator.itemgetter(ends), views))
        joint, _ = side.join_agents(steps, finals, 100)
        member = joint.policy_id[..., 1] - 100
        assert (joint.policy_id[..., 0] == 3).all()
        assert (member[:, :4] == member[:, :1]).all() and len(np.unique(member)) == 20
        actions = np.asarray(side.others[0].members[0])[:, 1]
        np.testing.assert_array_equal(joint.action[..., 1], actions[member])


def test_members_of_several_kinds_have_a_memory_of_their_own():
    members = [
        TeamPolicy(CONVENTION, np.array([0, 1], np.int32), BOTH),
        TeamPolicy(ALTERNATING, (), BOTH),
    ]
    joint = compose(XOR.spec, [population(XOR.spec, members).seat((1,))])
    params = (population(XOR.spec, members).params,)
    env = autoreset(XOR)
    state = init_rollout(env, joint, jax.random.key(0), 16)
    _, steps, *_ = jax.jit(lambda state: rollout(env, joint, params, state, jax.random.key(1), 8))(
        state
    )
    actions = steps.action[..., 1].T.reshape(32, 4).tolist()
    member = steps.policy_id[..., 1].T.reshape(32, 4)[:, 0] + 1
    assert actions == [[[1, 1, 1, 1], [0, 1, 0, 1]][index] for index in member.tolist()]
    assert set(member.tolist()) == {0, 1}


@pytest.mark.parametrize("weights", [[1, -1], [0, 0], [1], [float("nan"), 1], [float("inf"), 1]])
def test_weights_must_be_shares(weights):
    with pytest.raises(OptionError, match="2 policies cannot have the weights"):
        conventions(0, 1, weights=weights)


def test_agents_that_choose_after_one_another_have_no_seat_alone():
    joint = TeamPolicy(CONVENTION._replace(joint=True), (), BOTH)
    with pytest.raises(OptionError, match=r"after one another, so it cannot act for \[1\] alone"):
        play_side(XOR, "agent_0", {"agent_1": joint})
    with pytest.raises(UnknownNameError, match=r"agent of .* named 'agent_2'"):
        play_side(XOR, "agent_2", {"agent_1": joint})
