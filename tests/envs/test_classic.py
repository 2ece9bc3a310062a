import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs

STAY, UP, DOWN, RIGHT, LEFT = range(5)
KEY = jax.random.key(0)


reset = jax.jit(lambda env: env.reset(KEY), static_argnums=0)
take_step = jax.jit(lambda env, *args: env.step(KEY, *args), static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def play(env, actions):
    """Return the timesteps of ``(T, N)`` actions from the start, the first in front."""

    def step(state, action):
        return env.step(KEY, state, action)

    state, first = env.reset(KEY)
    _, steps = jax.lax.scan(step, state, jnp.asarray(actions))
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, steps)


def bridge_after(positions, actions):
    env = envs.make("classic/bridge")
    state, _ = reset(env)
    state = state._replace(position=jnp.asarray(positions, jnp.int32))
    state, timestep = take_step(env, state, jnp.asarray(actions, jnp.int32))
    return state.position.tolist(), timestep


def test_xor_pays_for_being_different():
    steps = play(envs.make("classic/xor"), np.array([(0, 0), (0, 1), (1, 0), (1, 1)]))
    assert steps.reward.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1], [-2, -2]]
    assert steps.view.observation[2].tolist() == [[0, 1, 0, 1], [0, 1, 0, 1]]


@pytest.mark.parametrize(
    ("positions", "actions", "expected"),
    [
        ([(1, 2), (1, 3)], (RIGHT, LEFT), [[1, 2], [1, 3]]),
        ([(1, 2), (1, 3)], (UP, DOWN), [[1, 2], [1, 3]]),
        ([(0, 0), (2, 4)], (UP, DOWN), [[0, 0], [2, 4]]),
        ([(1, 2), (1, 3)], (LEFT, LEFT), [[1, 1], [1, 2]]),
        ([(1, 2), (1, 3)], (RIGHT, RIGHT), [[1, 3], [1, 4]]),
        ([(1, 2), (1, 3)], (RIGHT, STAY), [[1, 2], [1, 3]]),
        ([(1, 2), (1, 3)], (STAY, LEFT), [[1, 2], [1, 3]]),
        ([(1, 1), (1, 3)], (RIGHT, LEFT), [[1, 2], [1, 3]]),
        ([(1, 4), (2, 5)], (RIGHT, STAY), [[1, 5], [2, 5]]),
        ([(1, 5), (2, 5)], (DOWN, STAY), [[2, 5], [2, 5]]),
        ([(2, 5), (1, 5)], (UP, DOWN), [[2, 5], [2, 5]]),
        ([(2, 4), (0, 0)], (STAY, RIGHT), [[2, 4], [0, 0]]),
        ([(0, 1), (0, 0)], (LEFT, STAY), [[0, 0], [0, 0]]),
    ],
    ids=[
        "no swapping",
        "no walking into blocks",
        "no walking off the grid",
        "following on the left",
        "following on the right",
        "blocked by one that stays",
        "blocked the other way round",
        "the first gets a contested cell",
        "a free cell",
        "one's own goal is open",
        "done stays, and does not block",
        "done ignores its action",
        "another's goal is open once it is done",
    ],
)
def test_bridge_rules(positions, actions, expected):
    assert bridge_after(positions, actions)[0] == expected


@pytest.mark.parametrize(
    ("positions", "actions", "terminated", "reward"),
    [
        ([(2, 4), (0, 1)], (RIGHT, LEFT), True, 0.0),
        ([(2, 4), (0, 3)], (RIGHT, STAY), False, -0.15),
    ],
)
def test_bridge_terminates_when_both_are_done(positions, actions, terminated, reward):
    _, timestep = bridge_after(positions, actions)
    assert timestep.terminated.tolist() == [terminated] * 2 and bool(timestep.last) == terminated
    assert not timestep.truncated.any()
    assert timestep.reward.tolist() == pytest.approx([reward] * 2)


def test_bridge_reward_is_the_distance_left():
    steps = play(envs.make("classic/bridge"), np.array([(LEFT, LEFT)]))
    expected = -0.05 * (np.sqrt(17) + np.sqrt(5))
    assert steps.reward[1].tolist() == pytest.approx([expected, expected])


@pytest.mark.parametrize("name", ["xor", "bridge"])
def test_the_limit_cuts_off(name):
    steps = play(envs.make(f"classic/{name}", time_limit=3), np.full((3, 2), STAY))
    assert steps.last.tolist() == [False, False, False, True]
    assert steps.truncated[-1].all() and not steps.terminated.any()


def best_return(env, horizon):
    """Search all joint paths of the two agents, keeping the best way to each place."""
    state, _ = env.reset(KEY)
    actions = jnp.stack(jnp.meshgrid(jnp.arange(5), jnp.arange(5)), -1).reshape(-1, 2)
    try_all = jax.jit(jax.vmap(env.step, in_axes=(None, None, 0)))
    frontier, best = {tuple(state.position.ravel().tolist()): 0.0}, -np.inf
    for _ in range(horizon):
        reached = {}
        for position, total in frontier.items():
            start = state._replace(position=jnp.asarray(position).reshape(2, 2))
            after, step = jax.device_get(try_all(KEY, start, actions))
            totals = total + step.reward[:, 0]
            best = max(best, totals[step.last].max(initial=-np.inf))
            for positions, value in zip(after.position.reshape(-1, 4), totals, strict=True):
                place = tuple(positions.tolist())
                reached[place] = max(value, reached.get(place, -np.inf))
        frontier = reached
    return best


@pytest.mark.slow
def test_bridge_is_best_solved_in_eight_steps():
    env = envs.make("classic/bridge")
    assert best_return(env, 7) == -np.inf
    assert best_return(env, 8) == pytest.approx(env.optimal_return)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("bridge_optimal", "classic/bridge"),
        ("xor_02", "classic/xor"),
        ("xor_00_02_20", "classic/xor"),
        ("xor_random", "classic/xor"),
    ],
)
def test_every_published_transition_is_reproduced(published_data, file, name):
    data = dict(np.load(published_data / "alberdice" / f"{file}.npz"))
    filled = data["filled"][..., 0].astype(bool)
    longest = filled.sum(1).max() - 1
    env = envs.make(name)
    actions = data["actions"][:, :longest, :, 0]
    steps = jax.device_get(jax.vmap(lambda a: play(env, a))(actions))

    slot = filled[:, : longest + 1]
    step = slot[:, 1:]
    executed = (data["filled"].sum(1)[:, 0] - 1)[:, None] == np.arange(1, longest + 1)
    view = steps.next_view
    np.testing.assert_array_equal(view.observation[slot], data["obs"][filled])
    np.testing.assert_array_equal(view.state[slot], data["state"][filled])
    np.testing.assert_array_equal(view.legal_actions[slot], data["avail_actions"][filled])
    np.testing.assert_allclose(
        steps.reward[:, 1:, 0][step], data["reward"][:, :longest, 0][step], rtol=1e-6, atol=1e-7
    )
    np.testing.assert_array_equal(steps.last[:, 1:][step], executed[step])
    np.testing.assert_array_equal(executed[step], data["terminated"][:, :longest, 0][step])
    by_limit = steps.truncated[:, 1:].all(-1)
    np.testing.assert_array_equal(by_limit[executed], name == "classic/xor")


def test_rock_paper_scissors_has_opponents_and_a_stake():
    env = envs.make("classic/rps", rock=2.0)
    key = jax.random.key(0)
    rewards = [[env.step(key, (), jnp.array([a, b]))[1].reward for b in range(3)] for a in range(3)]
    first = np.array([[0, -1, 2], [1, 0, -1], [-2, 1, 0]])
    np.testing.assert_array_equal(np.moveaxis(rewards, -1, 0), [first, -first])
