"""Made-up experience, and a slow, obvious account of its episodes to compare with."""

import numpy as np

from offmarl.types import Continuous, Discrete, EnvSpec, Finals, Transition, View

SPEC = EnvSpec("test/made-up", 2, 3, 5, Discrete(4), time_limit=9)
CONTINUOUS = EnvSpec("", 3, 2, 4, Continuous(2), reward="individual")


def make(
    spec: EnvSpec = SPEC, rows: int = 2, steps: int = 10, seed: int = 0, end_every: float = 5.0
) -> tuple[Transition, Finals]:
    """Random steps; an episode ends about every ``end_every``, half of them truncated."""
    rng = np.random.default_rng(seed)
    lead = (rows, steps)
    last = rng.random(lead) < 1 / end_every
    by_limit = rng.random(lead) < 0.5
    agents = (*lead, spec.num_agents)
    if isinstance(spec.action, Discrete):
        action = rng.integers(0, spec.num_actions, agents).astype(np.int32)
    else:
        action = rng.uniform(-1, 1, (*agents, spec.action_size)).astype(np.float32)
    transition = Transition(
        view=view(spec, lead, rng),
        action=action,
        reward=rng.normal(size=agents).astype(np.float32),
        terminated=np.broadcast_to((last & ~by_limit)[..., None], agents),
        truncated=np.broadcast_to((last & by_limit)[..., None], agents),
        last=last,
        behaviour_log_prob=rng.normal(size=agents).astype(np.float32),
        policy_id=rng.integers(0, 3, lead).astype(np.int32),
    )
    row, time = np.nonzero(last)
    order = rng.permutation(len(row))
    return transition, Finals(row[order], time[order], view(spec, (len(row),), rng))


def whole_episodes(
    spec: EnvSpec = SPEC, rows: int = 2, steps: int = 10, seed: int = 0, end_every: float = 5.0
) -> tuple[Transition, Finals]:
    """The same, and every row's last step ends an episode."""
    transition, finals = make(spec, rows, steps, seed, end_every)
    transition.last[:, -1] = True
    ends = transition.terminated | transition.truncated
    terminated = transition.terminated.copy()
    terminated[:, -1] |= ~ends[:, -1]
    rng = np.random.default_rng(seed)
    row, time = np.nonzero(transition.last)
    finals = Finals(row, time, view(spec, (len(row),), rng))
    return transition._replace(terminated=terminated), finals


def view(spec: EnvSpec, lead: tuple[int, ...], rng: np.random.Generator) -> View:
    agents = (*lead, spec.num_agents)
    return View(
        rng.normal(size=(*agents, spec.observation_size)).astype(np.float32),
        rng.normal(size=(*lead, spec.state_size)).astype(np.float32),
        rng.random((*agents, spec.action_size)) < 0.7,
        rng.random(agents) < 0.9,
    )


def steps(transition: Transition, start: int, stop: int) -> Transition:
    view, *rest = transition
    cut = [x[:, start:stop] for x in rest]
    return Transition(View(*(x[:, start:stop] for x in view)), *cut)


def concatenate(parts: list[Transition]) -> Transition:
    view = View(*(np.concatenate(x, axis=1) for x in zip(*(p.view for p in parts), strict=True)))
    rest = zip(*(part[1:] for part in parts), strict=True)
    return Transition(view, *(np.concatenate(x, axis=1) for x in rest))


def assert_same(actual: Transition, expected: Transition) -> None:
    for name in View._fields:
        np.testing.assert_array_equal(getattr(actual.view, name), getattr(expected.view, name))
    for name in Transition._fields[1:]:
        found, wanted = getattr(actual, name), getattr(expected, name)
        np.testing.assert_array_equal(found, wanted, err_msg=name)
        assert found.dtype == wanted.dtype, name


def episodes_of(transition: Transition) -> list[tuple[int, int, int, str, int, list[float]]]:
    """Row, start, length, cause, policy and returns of every episode, found step by step."""
    found = []
    rows, length = transition.last.shape
    for row in range(rows):
        start = 0
        while start < length:
            end = start
            while end < length - 1 and not transition.last[row, end]:
                end += 1
            cause = "open"
            if transition.last[row, end]:
                cause = "truncated" if transition.truncated[row, end].any() else "terminated"
            returns = np.zeros(transition.reward.shape[-1])
            for step in range(start, end + 1):
                returns = returns + transition.reward[row, step].astype(np.float64)
            policy = int(transition.policy_id[row, start])
            found.append((row, start, end + 1 - start, cause, policy, returns.tolist()))
            start = end + 1
    return found


def table_of(episodes) -> list[tuple[int, int, int, str, int, list[float]]]:
    columns = (
        episodes.row,
        episodes.start,
        episodes.length,
        episodes.cause,
        episodes.policy_id,
        episodes.returns,
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))
