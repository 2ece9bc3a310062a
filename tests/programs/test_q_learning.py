"""What qmix, vdn and iql learn: probes with known values, and bounds of Q_tot by the rewards."""

import jax
import jax.numpy as jnp
import pytest

from offmarl import envs
from offmarl.envs.base import restart, transition
from offmarl.networks import agent_network, make_mixer, mix, mixing_weights
from offmarl.programs import policy_config
from offmarl.types import Discrete, EnvSpec, View
from recorders import iql, qmix, vdn

from .learning import begun, learn, returns_of, train

SMALL = {"num_envs": 16, "num_steps": 16, "length": 3, "capacity": 128, "hidden": 32}
TINY = {"num_envs": 2, "length": 2, "hidden": 4, "batch_size": 4}
NIGHTLY = pytest.mark.nightly


def value_at_start(recorder, args, env, params) -> float:
    """Return the value of the best actions in the first view; for iql, the first agent's."""
    config = policy_config(args, "q")
    network = agent_network(config, env.spec)
    view = env.reset(jax.random.key(0))[1].view
    carry = network.initial_carry(env.spec.num_agents)
    q = network.apply(params.agent, carry, view.observation)[0].max(-1)
    if recorder is qmix:
        mixer = make_mixer(env.spec, args.mixer_embed, args.mixer_hidden, args.mixer)
        return float(mix(mixing_weights(mixer, params.mixer, view), q))
    return float(q.sum() if recorder is vdn else q[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recorder", "network", "probe"),
    [
        (qmix, "feedforward", "two-step"),
        (vdn, "recurrent", "two-step"),
        *(
            pytest.param(recorder, network, probe, marks=NIGHTLY)
            for recorder in (qmix, vdn, iql)
            for network in ("recurrent", "feedforward")
            for probe in ("one-step", "two-step", "observation", "match", "memory")
            if network == "recurrent" or probe != "memory"
        ),
    ],
)
def test_probes(recorder, network, probe) -> None:
    """The policy is optimal, and its value is the discounted optimal return."""
    args = recorder.Args(
        env=f"probe/{probe}",
        network=network,
        total_steps=20_480,
        updates=16,
        learning_rate=3e-3,
        target_every=50,
        reward_scale=1.0,
        **SMALL,
    )
    env, program, state = train(recorder, args)
    greedy, sampled = returns_of(env, program, state)
    assert greedy == pytest.approx(env.optimal_return)
    assert sampled > 0.8 * env.optimal_return
    if recorder is iql and probe == "match":
        return  # the other agent explores: its values are lower, by no simple amount
    value = value_at_start(recorder, args, env, state.params)
    assert value == pytest.approx(args.gamma ** (env.length - 1), abs=0.06)


# ---------------------------------------------------------------------------------- bounds


class Drift:
    """Two agents drift in a box; each reward is in [-1, 0], and a time limit ends episodes."""

    spec = EnvSpec("drift", 2, 6, 12, Discrete(3), time_limit=8)

    def reset(self, key):
        place = jax.random.uniform(key, (2, 6), minval=-3.0, maxval=3.0)
        return (place, jnp.zeros((), int)), restart(self._view(place))

    def step(self, key, state, action):
        change = 0.3 * jax.random.normal(key, (2, 6)) + 0.2 * (action[:, None] - 1.0)
        place, time = jnp.clip(state[0] + change, -3, 3), state[1] + 1
        return (place, time), transition(
            self._view(place),
            reward=-jnp.abs(place).mean(-1) / 3,
            terminated=jnp.zeros(2, bool),
            truncated=jnp.full(2, time >= self.spec.time_limit),
        )

    @staticmethod
    def _view(place) -> View:
        return View(place, place.ravel(), jnp.ones((2, 3), bool), jnp.ones(2, bool))


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["state", pytest.param("pooled", marks=NIGHTLY)])
def test_q_tot_stays_within_what_the_rewards_allow(mixer: str) -> None:
    """In five rounds of 32 updates: rewards in [-1, 0] allow [-1, 0] / (1 - γ); γ is 0.95."""
    args = qmix.Args(
        num_envs=8,
        num_steps=16,
        length=5,
        total_steps=8 * 16 * 5,
        hidden=16,
        mixer=mixer,
        target_every=20,
        learning_rate=3e-3,
    )
    program, state, hyper = begun(qmix, args, Drift())

    def one(state, key):
        state, metrics = program.stages[0].update(state, None, key, hyper)
        return state, metrics["q_tot"]

    keys = jax.random.split(jax.random.key(1), 5)
    _, q_tot = jax.jit(lambda state: jax.lax.scan(one, state, keys))(state)
    assert (q_tot > -20).all()
    assert (q_tot < 0.05).all()  # at first it is about 0
    assert q_tot[-1] < -2


# ---------------------------------------------------------------------------------- programs


@pytest.mark.slow
@pytest.mark.parametrize("network", ["recurrent", "feedforward"])
def test_agents_may_have_networks_of_their_own(network: str) -> None:
    args = vdn.Args(network=network, share_parameters=False, num_steps=6, updates=1, **TINY)
    program, state, hyper = begun(vdn, args, envs.make("probe/memory"))
    assert all(leaf.shape[0] == 2 for leaf in jax.tree.leaves(state.params.agent))
    after, _ = jax.jit(program.stages[0].update)(state, None, jax.random.key(1), hyper)
    for old, new in zip(*map(jax.tree.leaves, (state.params, after.params)), strict=True):
        assert new.ndim < 3 or (old != new).reshape(2, -1).any(-1).all()


@NIGHTLY
def test_qmix_learns_to_cover() -> None:
    """Seeds 0 and 2 came to 15.1 and 16.9 from a random 9.3."""
    args = qmix.Args(total_steps=100_000, seed=2)
    assert learn(qmix, args)[1] > 12.5
