"""Exact values of games, beside OpenSpiel's."""

from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs
from offmarl.envs.games import game_tree, mixture, solve, tabulate
from offmarl.errors import OptionError
from offmarl.networks import PolicyConfig, init_policy, make_policy

pytest.importorskip("pgx", reason="needs pip install 'offmarl[games]'")

SPIEL = {
    "pgx/kuhn_poker": ("kuhn_poker", [1, 0], [*permutations((0, 1, 2), 2)]),
    "pgx/leduc_holdem": (
        "leduc_poker(suit_isomorphism=true)",
        [1, 2, 0],
        sorted({*permutations((0, 0, 1, 1, 2, 2), 3)}),
    ),
    "pgx/tic_tac_toe": ("tic_tac_toe", [*range(9)], [()]),
}
"""The same games in OpenSpiel, its numbers of our actions, and the cards of our first nodes."""

pyspiel = pytest.importorskip("pyspiel", reason="needs pip install open_spiel")


def uniform(tree):
    return tree.legal / tree.legal.sum(1, keepdims=True)


def drawn(tree, seed):
    table = np.random.default_rng(seed).exponential(size=tree.legal.shape) * tree.legal
    return table / table.sum(1, keepdims=True)


def by_name(name, tree):
    """Return OpenSpiel's name of each information set, and its game: both trees are walked."""
    spiel, order, deals = SPIEL[name]
    game = pyspiel.load_game(spiel)
    children = [
        {at: node for node, at in enumerate(zip(level.parent, level.action, strict=True))}
        for level in tree.levels[1:]
    ]
    infosets = {}

    def walk(state, depth, nodes):
        """Walk on from a state, and our nodes of the cards dealt by then, with their cards left."""
        if state.is_terminal():
            (payoff,) = {tuple(tree.levels[depth].payoff[node]) for node, _ in nodes}
            assert payoff == tuple(state.returns())
        elif state.is_chance_node():
            for rank, _ in state.chance_outcomes():
                walk(
                    state.child(rank),
                    depth,
                    [(x, cards[1:]) for x, cards in nodes if cards[0] == rank],
                )
        else:
            level = tree.levels[depth]
            assert {level.seat[node] for node, _ in nodes} == {state.current_player()}
            (infoset,) = {level.infoset[node] for node, _ in nodes}
            assert infosets.setdefault(state.information_state_string(), infoset) == infoset
            ours = np.flatnonzero(tree.legal[infoset])
            assert {order[action] for action in ours} == {*state.legal_actions()}
            for action in ours:
                after = [(children[depth][x, action], cards) for x, cards in nodes]
                walk(state.child(order[action]), depth + 1, after)

    walk(game.new_initial_state(), 0, [*enumerate(deals)])
    assert sorted(infosets.values()) == [*range(len(tree.seats))]
    return game, infosets


def policy_of(name, tree, names, table):
    """Return our table as a policy of OpenSpiel."""
    order = SPIEL[name][1]
    return {
        infoset: [(order[a], float(table[row, a])) for a in np.flatnonzero(tree.legal[row])]
        for infoset, row in names.items()
    }


@pytest.mark.parametrize(
    ("name", "nash_conv"), [("pgx/kuhn_poker", 11 / 12), ("pgx/leduc_holdem", 4.747222)]
)
def test_values_and_best_responses_are_those_of_openspiel(name, nash_conv):
    tree = game_tree(envs.make(name))
    game, names = by_name(name, tree)
    assert solve(tree, uniform(tree)).nash_conv == pytest.approx(nash_conv, abs=1e-6)
    for seed in range(3):
        table = drawn(tree, seed)
        theirs = pyspiel.TabularPolicy(policy_of(name, tree, names, table))
        ours = solve(tree, table)
        root = game.new_initial_state()
        value = pyspiel.expected_returns(root, theirs, -1, True, 0.0)
        np.testing.assert_allclose(ours.value, value, atol=1e-6)
        assert ours.nash_conv == pytest.approx(pyspiel.nash_conv(game, theirs), abs=1e-6)


def test_the_equilibrium_of_kuhn_poker_has_its_known_value():
    name = "pgx/kuhn_poker"
    tree = game_tree(envs.make(name))
    _, names = by_name(name, tree)
    theirs = pyspiel.kuhn_poker.get_optimal_policy(0.2)
    table = np.zeros(tree.legal.shape)
    for infoset, row in names.items():
        for action, probability in theirs.action_probabilities(infoset).items():
            table[row, SPIEL[name][1].index(action)] = probability
    solution = solve(tree, table)
    np.testing.assert_allclose(solution.value, [-1 / 18, 1 / 18], atol=1e-9)
    assert solution.nash_conv == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    "name", ["pgx/kuhn_poker", pytest.param("pgx/leduc_holdem", marks=pytest.mark.slow)]
)
def test_a_mixture_is_that_of_openspiel_and_no_mean_of_probabilities(name):
    from open_spiel.python import policy as policies
    from open_spiel.python.algorithms import policy_aggregator

    tree = game_tree(envs.make(name))
    game, names = by_name(name, tree)
    tables, weights = np.stack([drawn(tree, seed) for seed in range(3)]), np.array([0.5, 0.2, 0.3])

    class Ours(policies.Policy):
        def __init__(self, table):
            super().__init__(game, [0, 1])
            self.rows = policy_of(name, tree, names, table)

        def action_probabilities(self, state, player_id=None):
            return dict(self.rows[state.information_state_string()])

    members = [Ours(table) for table in tables]
    aggregate = policy_aggregator.PolicyAggregator(game).aggregate(
        [0, 1], [members] * 2, [[*weights]] * 2
    )
    rows = aggregate.policy[0] | aggregate.policy[1]
    theirs = pyspiel.TabularPolicy({infoset: [*row.items()] for infoset, row in rows.items()})
    ours = solve(tree, mixture(tree, tables, weights))
    assert ours.nash_conv == pytest.approx(pyspiel.nash_conv(game, theirs), abs=1e-6)
    mean = np.einsum("k,kia->ia", weights, tables)
    assert abs(solve(tree, mean).nash_conv - ours.nash_conv) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        PolicyConfig("feedforward", share_parameters=False),
        PolicyConfig("recurrent"),
        PolicyConfig("feedforward", head="q"),
        PolicyConfig("random"),
    ],
    ids=str,
)
def test_a_table_holds_the_probabilities_with_which_a_policy_plays(config):
    env = envs.make("pgx/kuhn_poker")
    policy, tree = make_policy(config, env.spec), game_tree(env)
    params = init_policy(config, env.spec, jax.random.key(1))
    params = jax.tree.map(lambda x: 3 * x + 0.1, params)  # epsilon is 0.1, and logits differ
    table, act = tabulate(tree, policy, params), jax.jit(policy.act)
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    for key in jax.random.split(jax.random.key(2), 8):
        state, timestep = reset(key)
        cards = timestep.view.observation[:, :3].argmax(1).tolist()
        node, carry = SPIEL[env.name][2].index(tuple(cards)), policy.initial_carry()
        for level, after in zip(tree.levels, tree.levels[1:], strict=False):
            action, log_prob, carry = act(params, carry, *timestep.view[::2], key)
            seat, row = level.seat[node], level.infoset[node]
            assert table[row, action[seat]] == pytest.approx(np.exp(log_prob[seat]), rel=1e-4)
            state, timestep = step(key, state, action)
            if timestep.last:
                break
            node = np.flatnonzero((after.parent == node) & (after.action == action[seat])).item()
    greedy = tabulate(tree, make_policy(config, env.spec, greedy=True), params)
    if config.kind != "random":
        np.testing.assert_array_equal(greedy, table == table.max(1, keepdims=True))


@pytest.mark.parametrize("told", [jnp.nan, 0.0])
def test_a_policy_that_does_not_tell_its_probabilities_has_no_table(told):
    env = envs.make("pgx/kuhn_poker")
    policy = make_policy(PolicyConfig("random"), env.spec)

    def act(*inputs):
        action, log_prob, carry = policy.act(*inputs)
        return action, jnp.full_like(log_prob, told), carry

    with pytest.raises(OptionError, match="probabilities"):
        tabulate(game_tree(env), policy._replace(act=act, log_prob=None), {})


@pytest.mark.slow
def test_boards_have_exact_values_too():
    tree = game_tree(envs.make("pgx/tic_tac_toe"))
    solution = solve(tree, uniform(tree))
    wins, losses = 737 / 1260, 121 / 420  # of the first of two who move at random
    np.testing.assert_allclose(solution.value, [wins - losses, losses - wins], atol=1e-12)


@pytest.mark.parametrize("name", ["pgx/connect_four", "classic/xor"])
def test_games_without_a_small_tree_are_refused(name):
    with pytest.raises(OptionError, match=f"{name} has no exact exploitability"):
        game_tree(envs.make(name))
