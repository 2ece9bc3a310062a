"""Rules of search, delivery and flock, and scripted controllers, with numbers computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs
from offmarl.envs.base import MARKS
from offmarl.errors import OptionError

from .acting import DOWN, KEY, RIGHT, STAY, advance, place, quickly, reset, sense, status, take_step

steer = quickly(lambda env, see: env._steer(see))
summary = quickly(lambda env, state: env._summary(state))


def nothing_seen(env):
    """Observations of agents that see nothing, and are in the middle of the arena."""
    parts = env.read(jnp.zeros((env.num_agents, env.spec.observation_size)))
    return {name: np.array(part) for name, part in parts.items()}


def thing(offset, *rest):
    """Return the features of a visible thing at an offset in units of the sight."""
    return [*offset, *rest, 1.0]


def to_jax(see):
    return {name: jnp.asarray(part) for name, part in see.items()}


# ------------------------------------------------------------------ search


@pytest.fixture(scope="module")
def search():
    """Two targets at rest; a scout, a lifter and another scout see 6, 4 and 6 cells far."""
    env = envs.make("swarm/search-3", time_limit=20, comm="status")
    state, _ = reset(env)
    task = state.task._replace(
        position=jnp.asarray([[4.0, 4.0], [10.0, 10.0]]),
        velocity=jnp.asarray([[0.1, 0.2], [0.0, 0.0]]),
        found=jnp.asarray([True, False]),
        strength=jnp.asarray([1.0, 3.0]),
    )
    return env, state._replace(task=task)


def test_targets_turn_back_at_walls(search):
    """The speed into a wall is turned round, the speed along it is not."""
    env, state = search
    task = state.task._replace(
        position=jnp.asarray([[env.side - 0.05, 5.0], [5.0, 0.05]]),
        velocity=jnp.asarray([[0.4, 0.0], [0.0, -0.4]]),
    )
    after, _ = take_step(env, place(state, [[1, 1]] * 3)._replace(task=task), jnp.zeros(3, int))
    (right, bottom), (v_right, v_bottom) = after.task.position, after.task.velocity
    assert right[0] == env.side
    assert bottom[1] == 0
    assert v_right[0] < -0.1
    assert v_bottom[1] > 0.1
    np.testing.assert_allclose(right[1], 5 + v_right[1], rtol=1e-6)
    np.testing.assert_allclose(bottom[0], 5 + v_bottom[0], rtol=1e-6)
    np.testing.assert_allclose(jnp.linalg.norm(after.task.velocity, axis=-1), 0.4, rtol=1e-5)


def test_targets_turn_a_little_in_a_step(search):
    """By a normal error of 0.3 of their speed to either side."""
    env, state = search
    task = state.task._replace(
        position=jnp.full((2, 2), 6.0), velocity=jnp.asarray([[0.4, 0.0], [0.4, 0.0]])
    )
    state = place(state, [[1, 1]] * 3)._replace(task=task)
    many = quickly(
        lambda env, state, keys: jax.vmap(lambda key: env._advance(key, state, state)[0])(keys)
    )
    after = many(env, state, jax.random.split(KEY, 500)).task
    turned = np.arctan2(after.velocity[..., 1], after.velocity[..., 0])
    assert abs(turned.mean()) < 0.04
    assert turned.std() == pytest.approx(0.32, abs=0.04)
    np.testing.assert_allclose(after.position, 6 + after.velocity, rtol=1e-5)


def test_what_a_searcher_sees_of_a_target(search):
    env, state = search
    state = place(state, [[4, 3], [9, 0], [10, 5]], jnp.asarray([0.5, -0.25]))
    targets = sense(env, state)["targets"]
    np.testing.assert_allclose(targets[0, 0], [0, 1 / 6, -0.4, 0.45, 0.5, 1], atol=1e-6)
    np.testing.assert_allclose(targets[2, 0], [0, 5 / 6, -0.5, 0.25, 1.5, 1], atol=1e-6)
    assert not targets[1].any()  # the lifter sees none
    assert not targets[:, 1:].all(-1).any()


def test_what_a_searcher_tells(search):
    """Where the nearest target is in tens of cells, and whether it needs more strength."""
    env, state = search
    messages = status(env, place(state, [[4, 3], [9, 0], [10, 6]]))
    np.testing.assert_allclose(messages[0], [0, 0.1, 1, 1], atol=1e-6)
    assert not messages[1].any()
    np.testing.assert_allclose(messages[2], [0, 0.4, 0, 1], atol=1e-6)


def test_the_state_and_the_marks_of_search(search):
    env, state = search
    side = env.side
    expected = [8 / side - 1, 8 / side - 1, 0.1, 0.2, 1, 0.5]
    expected += [20 / side - 1, 20 / side - 1, 0, 0, 0, 1.5]
    np.testing.assert_allclose(summary(env, state), expected, rtol=1e-6)
    points, marks = env._marks(state)
    np.testing.assert_array_equal(points, state.task.position)
    assert marks.tolist() == [MARKS.index("target"), MARKS.index("held target")]


@pytest.mark.parametrize(
    ("positions", "held"),
    [
        ([[4, 3], [0, 0], [0, 0]], 0.0),  # a scout alone
        ([[4, 3], [0, 0], [3, 4]], 0.5),  # two scouts
        ([[0, 0], [4, 3], [0, 0]], 0.5),  # a lifter
        ([[0, 0], [6.5, 4], [0, 0]], 0.0),  # too far
    ],
)
def test_a_target_is_held_by_a_lifter_or_two_scouts(search, positions, held):
    env, state = search
    after, step = take_step(env, place(state, positions), jnp.zeros(3, int))
    assert env.metrics(after)["held"] == held
    assert step.reward.tolist() == pytest.approx([20 / 20 * held] * 3)


def test_finding_a_target_is_paid_once(search):
    env, state = search
    state = place(state, [[10, 6], [0, 0], [0, 0]])
    rewards = []
    for _ in range(2):
        state, step = take_step(env, state, jnp.zeros(3, int))
        rewards.append(float(step.reward[0]))
    assert rewards == [2.5, 0.0]
    assert env.metrics(state)["found"] == 1.0


@pytest.mark.parametrize(("agents", "targets"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_a_target_for_every_two(agents, targets):
    env = envs.make(f"swarm/search-{agents}")
    assert env.num_targets == targets
    assert env.side == round((64 * agents) ** 0.5)


def test_searchers_go_to_the_nearest_target_that_needs_them(search):
    env, _ = search
    see = nothing_seen(env)
    # A scout, of half the strength: the nearer one is held without it, this one is not.
    see["targets"][0, :2] = [thing((0.5 / 6, 0), 0, 0, 1.5), thing((1 / 6, 0), 0, 0, 0.5)]
    # A lifter: both need more, and the first is nearer.
    see["targets"][1, :2] = [thing((0, 0.5), 0, 0, 0.5), thing((0, -0.75), 0, 0, 0.0)]
    # Another scout: what there is is held by others, so it circles on.
    see["targets"][2, :1] = [thing((0.5, 0), 0, 0, 1.0)]
    see["own"][2, :2] = 0.3, 0.4
    wish = steer(env, to_jax(see))
    np.testing.assert_allclose(wish[0], [1, 0], atol=1e-6)
    np.testing.assert_allclose(wish[1], [0, 2], atol=1e-6)
    np.testing.assert_allclose(wish[2], [-0.8 + 0.15 * 0.6, 0.6 + 0.15 * 0.8], atol=1e-6)


# ------------------------------------------------------------------ delivery


@pytest.fixture(scope="module")
def delivery():
    """Three loads, of which the second is heavy; sights are 7.2, 4.8 and 7.2 cells."""
    env = envs.make("swarm/delivery-3")
    state, _ = reset(env)
    task = state.task._replace(
        sites=jnp.asarray([[1.0, 1.0], [9.0, 1.0], [9.0, 9.0]]),
        position=jnp.asarray([[2.0, 1.0], [2.0, 8.0], [9.0, 5.0]]),
        goal=jnp.asarray([1, 0, 2]),
        heavy=jnp.asarray([False, True, False]),
    )
    return env, state._replace(task=task)


def put(env, state, positions):
    state = place(state, positions)
    return state._replace(task=quickly(lambda env, s: env._grip(s, s.task))(env, state))


def test_a_heavy_load_moves_as_its_drones_on_average_and_pays_twice(delivery):
    env, state = delivery
    state = put(env, state, [[2, 9], [2, 7], [5, 5]])
    assert state.task.carrying.tolist() == [1, 1, -1]
    assert state.task.carried.tolist() == [False, True, False]
    after, step = take_step(env, state, jnp.asarray([DOWN, DOWN, 0]))
    distance = (0.5 / 0.8 * 1.2 + 0.5 / 1.25 * 0.8) / 2
    np.testing.assert_allclose(after.task.position[1], [2, 8 - distance], rtol=1e-6)
    gained = np.hypot(1, 7) - np.hypot(1, 7 - distance)
    assert step.reward.tolist() == pytest.approx([2 * 0.5 * gained / 3] * 3, rel=1e-4)
    assert env.metrics(after)["carried"] == pytest.approx(1 / 3)


def test_a_light_load_goes_with_one_drone(delivery):
    env, state = delivery
    state = put(env, state, [[2, 2], [5, 5], [5, 5]])
    after, step = take_step(env, state, jnp.asarray([RIGHT, STAY, STAY]))
    distance = 0.5 / 0.8 * 1.2  # the lag of a scout, its mass and its speed
    np.testing.assert_allclose(after.task.position[0], [2 + distance, 1], rtol=1e-6)
    assert step.reward.tolist() == pytest.approx([0.5 * distance / 3] * 3)


@pytest.mark.parametrize(("helper", "moves"), [([5.0, 5.0], False), ([2.0, 9.0], True)])
def test_a_heavy_load_goes_with_two(delivery, helper, moves):
    env, state = delivery
    state = put(env, state, [helper, [2, 8], [5, 5]])
    after, _ = take_step(env, state, jnp.asarray([DOWN, DOWN, STAY]))
    assert (after.task.position[1, 1] < 8) == moves


def test_who_waits_at_a_heavy_load_calls(delivery):
    env, state = delivery
    after, step = take_step(env, put(env, state, [[2, 4], [2, 8], [5, 5]]), jnp.zeros(3, int))
    assert after.message.tolist() == [[0, 0], [1, 1], [0, 0]]
    heard = env.read(step.view.observation)["neighbours"]
    assert heard[0, 1, -3:].tolist() == [1, 1, 1]


def test_who_gets_a_new_goal_and_who_keeps_his(delivery):
    env, state = delivery
    near = state.task.position.at[0].set(jnp.asarray([8.0, 1.0]))
    state = put(env, state._replace(task=state.task._replace(position=near)), [[7, 1]] * 3)
    after, step = take_step(env, state, jnp.asarray([RIGHT, RIGHT, RIGHT]))
    assert int(after.task.delivered) == 1
    assert step.reward[0] > 2 / 3
    assert after.task.goal[1:].tolist() == [0, 2]
    assert after.task.heavy[1:].tolist() == [True, False]
    np.testing.assert_array_equal(after.task.position[1:], state.task.position[1:])
    new = after.task.position[0]
    source = jnp.linalg.norm(after.task.sites - new, axis=-1).argmin()
    assert after.task.goal[0] != source


def test_new_loads_go_from_any_site_to_any_other(delivery):
    env, _ = delivery
    sites = jnp.asarray([[0.0, 0.0], [9.0, 1.0], [float(env.side)] * 2])
    draw = quickly(lambda env, keys: jax.vmap(lambda key: env._new_loads(key, sites))(keys))
    position, goal, heavy = draw(env, jax.random.split(KEY, 300))
    offset = position[..., None, :] - sites
    source = np.asarray(jnp.linalg.norm(offset, axis=-1).argmin(-1))
    pairs = {*zip(source.ravel().tolist(), goal.ravel().tolist(), strict=True)}
    assert pairs == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert np.bincount(source.ravel()).tolist() == pytest.approx([300] * 3, abs=60)
    assert np.bincount(goal.ravel()).tolist() == pytest.approx([300] * 3, abs=60)
    assert heavy.mean() == pytest.approx(0.5, abs=0.06)
    assert ((position >= 0) & (position <= env.side)).all()
    apart = np.asarray(position)[source == 1] - np.asarray(sites[1])
    assert (abs(apart) <= 1).all()
    assert apart.std(0).tolist() == pytest.approx([3**-0.5] * 2, abs=0.06)


@pytest.mark.parametrize(("agents", "sites"), [(1, 3), (7, 3), (8, 4), (12, 6)])
def test_a_site_for_every_two(agents, sites):
    assert envs.make(f"swarm/delivery-{agents}").num_sites == sites


def test_what_a_carrier_sees_of_a_load(delivery):
    env, state = delivery
    state = put(env, state, [[2, 2], [2, 6], [5, 5]])
    loads = sense(env, state)["loads"]
    np.testing.assert_allclose(loads[0, 0], [0, -1 / 7.2, 0.7, 0, 0, 1, 1], atol=1e-6)
    np.testing.assert_allclose(loads[1, 0], [0, 2 / 4.8, -0.1, -0.7, 1, 0, 1], atol=1e-6)
    np.testing.assert_allclose(loads[2, 0], [4 / 7.2, 0, 0, 0.4, 0, 0, 1], atol=1e-6)


def test_the_state_the_calls_and_the_marks_of_delivery(delivery):
    env, state = delivery
    state = put(env, state, [[2, 2], [2, 7], [5, 5]])
    assert status(env, state).tolist() == [[1, 0], [1, 1], [0, 0]]
    side = env.side
    numbers = np.asarray(summary(env, state)).reshape(3, 6)
    position, sites = np.asarray(state.task.position), np.asarray(state.task.sites)
    np.testing.assert_allclose(numbers[:, :2], 2 * position / side - 1, rtol=1e-5)
    np.testing.assert_allclose(numbers[:, 2:4], 2 * sites[[1, 0, 2]] / side - 1, rtol=1e-5)
    assert numbers[:, 4:].tolist() == [[0, 1], [1, 0], [0, 0]]
    points, marks = env._marks(state)
    np.testing.assert_array_equal(points, np.concatenate([position, sites]))
    names = ["load", "heavy load", "load", "site", "site", "site"]
    assert [MARKS[mark] for mark in marks] == names


def test_carriers_carry_and_help_and_fetch(delivery):
    env, _ = delivery
    see = nothing_seen(env)
    # It grips a load on the move: on to the goal, and nearer to the load.
    see["loads"][0, :1] = [thing((1 / 7.2, 0), 0.2, 0.3, 0, 1)]
    # A heavy load with somebody who grips it comes before a nearer light one.
    see["loads"][1, :2] = [thing((0, 4 / 4.8), 0, 0, 1, 0), thing((3.5 / 4.8, 0), 0, 0, 0, 0)]
    see["neighbours"][1, 0, :2] = 0, 3.5 / 4.8
    see["neighbours"][1, 0, -3:] = 1, 0, 1
    # A light load that somebody grips needs no other.
    see["loads"][2, :2] = [thing((2 / 7.2, 0), 0, 0, 0, 0), thing((0, -5 / 7.2), 0, 0, 0, 0)]
    see["neighbours"][2, 0, :2] = 2 / 7.2, 1 / 7.2
    see["neighbours"][2, 0, -3:] = 1, 0, 1
    np.testing.assert_allclose(steer(env, to_jax(see)), [[2.5, 3], [0, 4], [0, -5]], atol=1e-5)


def test_carriers_wait_at_heavy_loads_and_go_home_where_nothing_is_to_do(delivery):
    env, _ = delivery
    see = nothing_seen(env)
    see["own"][:, :2] = 0.5, -0.25
    see["loads"][0, :1] = [thing((1 / 7.2, 0.5 / 7.2), 0, 0, 1, 0)]  # to stay is to wait
    see["loads"][1, :1] = [thing((3 / 4.8, 0), 0.1, 0.1, 0, 1)]  # carried by others
    # Not held: drones near the load do not grip it, and the one that grips is too far away.
    see["loads"][2, :1] = [thing((2 / 7.2, 0), 0, 0, 0, 0)]
    see["neighbours"][2, 0, :2] = 2 / 7.2, 0
    see["neighbours"][2, 0, -3:] = 0, 0, 1
    see["neighbours"][2, 1, :2] = 2 / 7.2, 1.6 / 7.2
    see["neighbours"][2, 1, -3:] = 1, 0, 1
    home = [-env.side / 4, env.side / 8]
    np.testing.assert_allclose(steer(env, to_jax(see)), [[1, 0.5], home, [2, 0]], atol=1e-5)


# ------------------------------------------------------------------ flock


@pytest.mark.parametrize(
    ("before", "after", "behind", "paid"),
    [
        (10.0, 10.75, 0.6, 0.75),
        (10.0, 13.0, 0.6, 1.0),  # no more than 1
        (13.0, 10.0, 0.6, -1.0),  # and no less than -1
        (34.0, 34.6, 0.6, 0.6),
        (39.0, 38.0, 0.6, 1.0),  # within the distance that counts as there
        (10.0, 10.75, 9.0, 0.75 / 3),  # one is lost: two halves, and nothing
    ],
)
def test_a_flock_is_paid_for_its_progress_together(flock, before, after, behind, paid):
    env, state = flock
    before, after = ([[x - behind, 10], [x, 10], [x + 0.6, 10]] for x in (before, after))
    _, reward, done = advance(env, place(state, before), place(state, after))
    assert reward.tolist() == pytest.approx([25 / 50 * paid] * 3, rel=1e-4)
    assert not done


@pytest.mark.parametrize(
    ("positions", "together", "collided"),
    [
        ([[10, 10], [11, 10], [12, 10]], 1, 0),
        ([[10, 10], [13, 10], [13.6, 10]], (0.5 + 1 + 0.5) / 3, 0),
        ([[10, 10], [20, 10], [30, 10]], 0, 0),
        ([[10, 10], [10.49, 10], [12, 10]], 1, 2 / 3),
        ([[10, 10], [10.51, 10], [12, 10]], 1, 0),
    ],
)
def test_togetherness_and_collisions(flock, positions, together, collided):
    env, state = flock
    state = place(state, positions)
    after, reward, _ = advance(env, state, state)
    assert after.task.together == pytest.approx(together)
    assert after.task.collided == pytest.approx(collided)
    np.testing.assert_allclose(reward, -12.5 / 50 * collided, atol=1e-6)
    metrics = env.metrics(after)
    assert (metrics["together"], metrics["collided"]) == (after.task.together, after.task.collided)
    mean = np.hypot(*(np.array([40, 10]) - np.array(positions)).T).mean() / 40
    assert metrics["distance"] == pytest.approx(mean, rel=1e-5)


def test_a_lone_drone_is_a_flock():
    env = envs.make("swarm/flock-1", obstacles=0.0)
    assert env.metrics(take_step(env, reset(env)[0], jnp.zeros(1, int))[0])["together"] == 1


def test_the_bunch_and_the_beacon_are_on_opposite_sides(flock):
    env, state = flock
    radius = 0.75 * 3**0.5
    assert env.side == round(40 + 4 * radius) == 45
    assert env._arrival == pytest.approx(2 + radius)
    spawn = quickly(lambda env, keys: jax.vmap(env._spawn)(keys).position)
    bunches = np.asarray(spawn(env, jax.random.split(KEY, 200)))
    middle = env.side / 2
    away = bunches.mean(1) - middle
    assert np.hypot(*away.T).mean() == pytest.approx(20, abs=0.3)
    assert abs(away.mean(0)).max() < 3  # in any direction
    spread = bunches - bunches.mean(1, keepdims=True)
    assert 1.1 * radius < abs(spread).max() < 4 / 3 * radius
    task = env._begin(KEY, place(state, [[1, 2], [2, 3], [3, 7]]))
    np.testing.assert_allclose(task.beacon, [45 - 2, 45 - 4])
    assert (task.together, task.collided) == (pytest.approx(1 / 3), 0)


def test_what_a_flock_sees_of_its_beacon(flock):
    env, state = flock
    state = place(state, [[37, 6], [39.5, 10], [40, 25]])
    beacon = env._sense(state)["beacon"]
    np.testing.assert_allclose(
        beacon, [[0.6, 0.8, 5 / 45], [0.5, 0, 0.5 / 45], [0, -1, 15 / 45]], atol=1e-6
    )
    np.testing.assert_allclose(summary(env, state), [80 / 45 - 1, 20 / 45 - 1], rtol=1e-6)
    points, marks = env._marks(state)
    np.testing.assert_array_equal(points, [[40, 10]])
    assert marks.tolist() == [MARKS.index("beacon")]


def test_a_flock_keeps_its_distances(flock):
    env, _ = flock
    see = nothing_seen(env)
    see["beacon"][:, :2] = [[1, 0], [0, 1], [0.6, 0.8]]
    near, far = np.array([0.5, 0]), np.array([0, 3])
    see["neighbours"][0, :2, :2] = near / 4, far / 4
    see["neighbours"][0, :2, -1] = 1
    see["neighbours"][2, 0, :2] = 3 / 4, 0
    see["neighbours"][2, 0, -1] = 1
    wish = steer(env, to_jax(see))
    mean = (near + far) / 2
    apart, together = [-2, 0], (np.hypot(*mean) - 1.5) * mean
    expected = [1, 0] + 0.6 * np.array(apart) + 0.6 * together
    np.testing.assert_allclose(wish[0], 2 * expected, rtol=1e-4)
    np.testing.assert_allclose(wish[1], [0, 2], atol=1e-6)
    np.testing.assert_allclose(wish[2], [2 * (0.6 + 0.6 * 1.5 * 3), 1.6], rtol=1e-5)


@pytest.fixture(scope="module")
def obstructed():
    env = envs.make("swarm/flock-3", randomise="none")
    return env, reset(env)[0]


def test_a_flock_flies_around_obstacles(obstructed):
    env, _ = obstructed
    see = nothing_seen(env)
    see["beacon"][:, 0] = 1
    # Ahead, half a cell away; behind, as far; ahead, but two cells away.
    for agent, offset in enumerate((1.5, -1.5, 3.0)):
        see["obstacles"][agent, 0] = offset / 4, 0, 1
    wish = steer(env, to_jax(see))
    turned = [1 - (1 + 0.1 / 0.5), 1 + 0.1 / 0.5, 1]
    np.testing.assert_allclose(wish, [[2 * x, 0] for x in turned], atol=1e-5)


def test_a_flock_tells_who_touches_an_obstacle_and_pays_for_it(obstructed):
    env, state = obstructed
    state = place(state, [[11.005, 10], [12, 10], [10, 9]])
    state = state._replace(
        obstacles=jnp.full_like(state.obstacles, 30.0).at[0].set(jnp.asarray([10.0, 10.0]))
    )
    assert status(env, state).tolist() == [[1], [0], [1]]
    after, _, _ = advance(env, state, state)
    assert after.task.collided == pytest.approx(2 / 3)


# ------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("swarm/pursuit-3-2:evaders=wild", "evaders must be one of scripted, learned, not wild"),
        ("swarm/pursuit-3-1:pursuers=scripted", "both sides of pursuit are scripted"),
        ("swarm/pursuit-3-0", "num_evaders must be at least 1"),
        ("swarm/flock-3:journey=0", "journey must be above 0"),
        ("swarm/search-3:dims=4", "dims must be 2 or 3, not 4"),
        *(
            (f"swarm/search-3:{option}=odd", f"{option} must be one of .*, not odd")
            for option in ("dynamics", "action", "control", "comm", "collisions")
        ),
        ("swarm/search-3:randomise=wind+rain", "randomise must be of .*, not rain"),
        ("swarm/search-3:comm_dropout=1.5", "comm_dropout must be from 0 to 1"),
        ("swarm/search-3:obstacles=0.26", "obstacles must be from 0 to 0.25"),
        ("swarm/search-3:obstacles=-0.1", "obstacles must be from 0 to 0.25"),
        ("swarm/search-3:dynamics=quadrotor", "give dims=3 and action=continuous too"),
        ("swarm/search-3:dynamics=quadrotor,dims=3", "give dims=3 and action=continuous too"),
        ("swarm/search-3:control=motors", "control=motors is for quadrotors"),
        ("swarm/search-3:opaque=true", "no obstacles to block sight"),
        ("swarm/search-3:randomise=drag", "velocity dynamics have no drag to randomise"),
        ("swarm/delivery-3:comm=odd", "comm must be one of none, status, learned, not odd"),
    ],
)
def test_options_that_cannot_be_are_explained(name, message):
    with pytest.raises(OptionError, match=message):
        envs.make(name)
