"""Off-policy evaluation of several policies from one dataset."""

from collections.abc import Mapping
from collections.abc import Sequence as Several
from functools import partial
from itertools import permutations
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import NDArray

from offmarl.errors import OptionError, ShapeError, unknown_name
from offmarl.ope.fitted import Transitions, fit, make_critic, start_values
from offmarl.ope.history import (
    Followed,
    Histories,
    at_ends,
    clone,
    follow,
    pad_episodes,
    recorded_log_prob,
    was_certain_inside,
    with_last_slot,
)
from offmarl.ope.importance import (
    bootstrap,
    cumulative_ratios,
    effective_sample_size,
    weighted_importance_sampling,
    with_interval,
)
from offmarl.ope.local import advantages, clipped_ratio, local_values
from offmarl.ope.options import Options
from offmarl.ope.tabular import play, read_table
from offmarl.replay import Windows, load
from offmarl.replay.sampling import are_whole
from offmarl.statistics import MIN_RUNS, Estimate, mean_interval
from offmarl.teams import require_one_team
from offmarl.terminal import Progress, quiet
from offmarl.types import ArrayTree, Continuous, EnvSpec, Policy, Sequence
from offmarl.vault import Dataset, Mixture

Method = Literal["tabular", "local", "fqe", "wis"]
"""tabular: play in the recorded steps, where their views recur; local: the local approximation by
advantages; fqe: fitted Q evaluation; wis: per-decision weighted importance sampling."""

METHODS: tuple[Method, ...] = get_args(Method)
_BY_RATIOS: tuple[Method, ...] = "local", "wis"

_CLOSE = 0.9
"""Mean of the clipped ratios below which the data hold too little of what a policy does."""

_SAMPLES = 8
"""Joint actions that a stochastic policy draws in each recorded view."""

_FEW_EFFECTIVE = 20
"""Effective sample size below which a note warns of importance sampling."""


_Resampled = tuple[float, Float[np.ndarray, "_"]]
"""A value, and those of resampled episodes."""


@runtime_checkable
class EvaluatedPolicy(Protocol):
    """A policy to evaluate; `offmarl.programs.LoadedPolicy` is one."""

    @property
    def policy(self) -> Policy:
        """Its functions."""

    @property
    def params(self) -> ArrayTree:
        """Its parameters."""

    @property
    def spec(self) -> EnvSpec:
        """Its observations and actions."""


class Estimates(NamedTuple):
    """The result of `estimate`."""

    values: dict[Method, dict[str, Estimate]]
    """By method and policy. Policies that a method cannot evaluate are left out."""
    resampled: dict[Method, dict[str, Float[np.ndarray, "_"]]]
    """Values on resampled episodes, which are equal for all policies of a method."""
    effective: dict[str, float]
    """Effective sample size of importance sampling, by policy."""
    data: Estimate
    """The mean return of the data's complete episodes: the value of the policies that took them."""
    check: float | None
    """Value of those policies by fqe, whose critics learn as the others do, but from complete
    episodes alone. None without fqe or complete episodes."""
    episodes: int
    """Number of episodes used."""
    drawn: dict[Method, int]
    """How many of them a resample of each method draws."""
    notes: tuple[str, ...]
    """Values that could not be computed, and cautions."""

    def difference(self, method: Method, one: str, other: str) -> Estimate:
        """Return how much more a policy is worth than another, with a paired interval."""
        values, resampled = self.values[method], self.resampled[method]
        value = values[one].value - values[other].value
        return with_interval(value, resampled[one] - resampled[other], self.drawn[method])

    def ranks(self, method: Method) -> dict[str, tuple[int, int]]:
        """Return the best and the worst rank that each policy may have, from 1 on.

        Two policies are ordered if the interval of their difference does not hold 0. Policies whose
        estimates are not finite are left out.
        """
        names = [name for name, value in self.values[method].items() if value.finite]
        better = dict.fromkeys(names, 0)
        worse = dict(better)
        for one, other in permutations(names, 2):
            if (self.difference(method, one, other).low or 0.0) > 0:
                better[other] += 1
                worse[one] += 1
        return {name: (1 + better[name], len(names) - worse[name]) for name in names}


def estimate(
    policies: Mapping[str, EvaluatedPolicy],
    dataset: Dataset | Mixture,
    options: Options | None = None,
    methods: Several[Method] | None = None,
    progress: Progress = quiet,
) -> Estimates:
    """Estimate the values of policies from recorded episodes, without the environment.

    The value is the expected discounted return from the data's initial states, averaged over the
    agents. Where the probabilities of recorded actions are missing, importance sampling uses those
    of a clone of the data's policies.

    Parameters
    ----------
    policies
        The policies by name, such as `offmarl.load_policy` returns. Those with the same functions
        share compiled code.
    dataset
        The episodes.
    options
        How to evaluate.
    methods
        Which estimates to make; by default the first of tabular, local and fqe that the data and
        the policies allow, and wis.
    progress
        Shows the progress.

    Raises
    ------
    OptionError
        A method in ``methods`` cannot be used: the data's policies were deterministic, or a policy
        has no likelihood; or the agents are in several teams.
    ShapeError
        A policy acts on other observations or actions than those of the data, or there is no
        policy or no episode.
    """
    options = options or Options()
    _check(policies, dataset.spec)
    data = RecordedData.read(dataset, options)
    notes = []
    if {*_BY_RATIOS} & {*(methods or METHODS)}:
        data, clone_notes = with_clone(data, progress)
        notes += clone_notes
    followed = _follow_all(policies, data, progress)
    unlikely = {x for x, unrolled in followed.items() if not (unrolled.log_prob < np.inf).all()}
    far = [name for name in followed if name not in unlikely and data.is_far(followed[name])]
    results, reasons = _choose(policies, data, unlikely, far, methods)
    notes += reasons
    check = None
    if "fqe" in results:
        *fitted, of_data = _fitted_values(data, [x.action for x in followed.values()], progress)
        for name, starts in zip(followed, fitted, strict=True):
            # Each member values the starts of its own resample.
            resampled = (starts[1:] * data.resamples).mean(1)
            results["fqe"][name] = float(starts[0].mean()), resampled
        check = float(of_data[0, data.complete].mean()) if data.complete.any() else None
    effective: dict[str, float] = {}
    if {*_BY_RATIOS} & {*results}:
        arrays = data.reward, data.mask, data.folds, data.weighted
        gains = advantages(data.histories, *arrays, options.gamma) if "local" in results else None
        for name in (name for name in policies if name not in unlikely):
            effective[name], weighted = by_ratios("wis" in results, gains, followed[name], data)
            for method, (point, resampled) in weighted.items():
                # Resamples of a few episodes that have all of the weight are alike.
                is_unsure = method == "wis" and effective[name] < _FEW_EFFECTIVE
                bootstrapped = np.full_like(resampled, np.nan) if is_unsure else resampled
                results[method][name] = point, bootstrapped
    by_weight, episodes = int(data.weighted.sum()), len(data.lengths)
    drawn = {method: by_weight if method in _BY_RATIOS else episodes for method in results}
    values = {
        method: {x: with_interval(*by_policy[x], drawn[method]) for x in policies if x in by_policy}
        for method, by_policy in results.items()
    }
    estimates = [x.value for by_policy in values.values() for x in by_policy.values()]
    if estimates and np.isnan(estimates).all() and not data.complete.any():
        raise ShapeError(
            f"{dataset.path} has no complete episode, from which a value could be estimated: give "
            "data with whole episodes."
        )
    notes += cautions_of_fqe(values.get("fqe", {}), check, data)
    notes += cautions_of_ratios([*results], effective, followed, data)
    return Estimates(
        values,
        {method: {x: results[method][x][1] for x in values[method]} for method in results},
        effective,
        data.behaviour,
        check,
        episodes,
        drawn,
        tuple(notes),
    )


def _choose(
    policies: Mapping[str, EvaluatedPolicy],
    data: "RecordedData",
    unlikely: set[str],
    far: Several[str],
    methods: Several[Method] | None,
) -> tuple[dict[Method, dict[str, _Resampled]], list[str]]:
    """Return the methods to use, with the values by tabular, and notes on the others."""
    refusals, notes = data.refusals(), []
    for method in methods or ():
        if method not in METHODS:
            raise unknown_name("method", method, METHODS)
        if method in refusals:
            raise OptionError(f"{method} cannot be used: {refusals[method]}")
    results: dict[Method, dict[str, _Resampled]] = {
        method: {}
        for method in METHODS
        if method in (methods or METHODS) and method not in refusals
    }
    if methods and unlikely and {*_BY_RATIOS} & {*results}:
        raise OptionError(f"importance sampling cannot be used: {_no_likelihood(unlikely)}")
    if not methods:
        notes += [f"{method}: {refusals[method]}" for method in _BY_RATIOS if method in refusals]
    if unlikely and {*_BY_RATIOS} & {*results}:
        notes.append(_no_likelihood(unlikely))
    if "tabular" in results:
        results["tabular"] = _played(policies, data)
        if (rest := len(policies) - len(results["tabular"])) and methods:
            notes.append(f"tabular has no value of {rest} policies: they do what was not recorded.")
    if far and "local" in results:
        notes.append(
            f"the data hold too little of what {', '.join(far)} do: do not rely on local, which is "
            "not made unless it is asked for."
        )
    if not methods:  # the first that values all policies
        values_all = {
            "tabular": len(results.get("tabular", ())) == len(policies),
            "local": not unlikely and not far,
        }
        best = next((x for x in results if x != "wis" and values_all.get(x, True)), "wis")
        results = {method: results[method] for method in results if method in (best, "wis")}
    return results, notes


def _check(policies: Mapping[str, EvaluatedPolicy], spec: EnvSpec) -> None:
    require_one_team(spec, "off-policy evaluation", "evaluation")
    if not policies:
        raise ShapeError("there are no policies to evaluate: give one or more.")
    for name, target in policies.items():
        if difference := spec.difference(target.spec, extras=False):
            raise ShapeError(
                f"the data and the policy {name} differ in {difference}: give the data of the "
                "environment that it was trained for."
            )


def _no_likelihood(names: set[str]) -> str:
    return (
        f"{', '.join(sorted(names))} give no finite probabilities of actions, as greedy policies "
        "of continuous actions and explorers by noise do: sample their actions, or use fqe."
    )


# ---------------------------------------------------------------------------------- the data


class RecordedData(NamedTuple):
    """The episodes on the host; arrays are padded to the longest."""

    dataset: Dataset | Mixture
    options: Options
    histories: Histories
    lengths: NDArray[np.int64]
    reward: Float[np.ndarray, "M T"]
    behaviour_log_prob: Float[np.ndarray, "M T N"]
    mask: Bool[np.ndarray, "M T"]
    certain: Bool[np.ndarray, "M T"]
    """Steps whose joint action was taken with probability 1, although there were others."""
    at_ends: Bool[np.ndarray, "M T N"]
    certain_inside: Bool[np.ndarray, "M T N"]
    """Continuous actions that some policies take with probability 0; see `at_ends` and
    `was_certain_inside`."""
    action: NDArray[Any]
    """Actions in each slot, in the layout of `Followed`; in the last slot they are not known."""
    complete: Bool[np.ndarray, "M"]
    truncated: Bool[np.ndarray, "M"]
    """Complete episodes that the environment truncated."""
    folds: NDArray[np.int64]
    """The half of the episodes that each belongs to, 0 or 1."""
    resamples: Float[np.ndarray, "members M"]
    """How often each episode is in the resample of each of the critics for the interval."""

    @classmethod
    def read(cls, dataset: Dataset | Mixture, options: Options) -> "RecordedData":
        """Read the episodes that policies can be evaluated with; `ShapeError` if there are none."""
        table = dataset.episodes
        usable = np.flatnonzero(are_whole(dataset))
        if not len(usable) or not table.length.sum():
            raise ShapeError(
                f"{dataset.path} holds no episode to evaluate policies with: each needs finite "
                "steps and legal actions."
            )
        most = min(options.episodes or len(usable), len(usable))
        indices = usable[np.unique(np.linspace(0, len(usable) - 1, most).round().astype(np.int64))]
        histories = Histories(dataset, indices)
        blocks = [_recorded(part, episodes) for part, episodes in histories.blocks()]
        columns = map(np.concatenate, zip(*blocks, strict=True))
        draw = np.random.default_rng(options.seed)
        number = len(indices)
        folds = draw.permutation(number) % 2
        members = options.members if options.members >= MIN_RUNS else 0
        resamples = draw.multinomial(number, np.full(number, 1 / number), members)
        complete = table.complete[indices]
        of_table = complete, complete & table.truncated[indices]
        samples = folds, resamples.astype(np.float32)
        return cls._make(
            (dataset, options, histories, histories.lengths, *columns, *of_table, *samples)
        )

    def refusals(self) -> dict[Method, str]:
        """Return the methods that the data do not allow, each with the reason."""
        reasons: dict[Method, str] = {}
        if isinstance(self.histories.spec.action, Continuous):
            reasons["tabular"] = "actions are continuous, so that no step recurs."
        reason = ""
        if not self.weighted.any() and self.complete.any():
            reason = (
                "each complete episode has an action of which the recorded probability is 0 or "
                "infinite: record with offmarl, which stores them, or use fqe."
            )
        elif self.certain.any() and (self.behaviour_log_prob[self.weighted] == 0).all():
            reason = (
                "the policies that took the recorded actions were deterministic, so the data say "
                "nothing about other actions: record with exploration or sampled actions, or use "
                "fqe."
            )
        elif not self.complete.any():
            reason = "no episode of the data is complete: use fqe."
        return reasons | (dict.fromkeys(_BY_RATIOS, reason) if reason else {})

    @property
    def weighted(self) -> Bool[np.ndarray, "M"]:
        """The episodes that ratios weigh: complete, of actions that the data's policies can take.

        No policy takes an action of probability 0, so that its ratio is that of a fault.
        """
        return np.asarray(self.complete & ~np.isinf(self.behaviour_log_prob).any((1, 2)))

    def value_bounds(self) -> Float[np.ndarray, "2 slots"]:
        """Return the smallest and the largest value that the rewards allow from each time on.

        Each step earns one of the data's rewards, and 0 after an end, unless all end at one limit.
        """
        rewards, lengths = self.reward[self.mask], self.lengths[self.complete]
        one_limit = (self.truncated | ~self.complete).all() and len(np.unique(lengths)) <= 1
        after = [] if one_limit else [0.0]
        bounds = np.array([[min([rewards.min(), *after])], [max([rewards.max(), *after])]])
        remaining = self.histories.longest - np.arange(self.reward.shape[1] + 1.0)
        remaining = remaining if self.is_limited else np.full_like(remaining, np.inf)
        gamma = self.options.gamma
        steps = remaining if gamma == 1 else (1 - gamma**remaining) / (1 - gamma)
        return np.multiply(bounds, steps, where=bounds != 0, out=np.zeros((2, len(steps))))

    @property
    def is_limited(self) -> bool:
        """Whether the longest episode ended at a time limit."""
        return bool(self.truncated[self.lengths == self.lengths.max()].any())

    @property
    def behaviour(self) -> Estimate:
        """The mean discounted return of the complete episodes, with Student's t interval."""
        returns = self.discounted[self.complete]
        return mean_interval(returns) if len(returns) else Estimate(float("nan"))

    def is_far(self, followed: Followed) -> bool:
        """Whether the data hold too little of what a policy does to value its deviations."""
        kept = self.mask & self.weighted[:, None]
        log_prob, behaviour = np.asarray(followed.log_prob)[kept], self.behaviour_log_prob[kept]
        # Both are certain where an agent is dead or has one legal action, which says nothing.
        counts = (log_prob != 0) | (behaviour != 0)
        return bool(
            counts.any() and clipped_ratio(log_prob[counts], behaviour[counts]).mean() < _CLOSE
        )

    @property
    def discounted(self) -> Float[np.ndarray, "M"]:
        """The discounted sum of each episode's rewards."""
        discounts = self.options.gamma ** np.arange(self.reward.shape[1])
        return np.asarray(self.reward @ discounts)


def _recorded(part: slice, episodes: Sequence) -> tuple[NDArray[Any], ...]:
    """Return the arrays of `RecordedData` that a block of episodes has."""
    mask, log_prob = episodes.mask, recorded_log_prob(episodes)
    certain = (log_prob == 0).all(-1) & episodes.choices.any(-1)
    reward = jnp.where(mask, episodes.reward.mean(-1), 0.0)
    size = part.stop - part.start
    steps = certain, at_ends(episodes), was_certain_inside(episodes)
    action = _small(np.asarray(jax.vmap(with_last_slot)(episodes.action))[:size, :, None])
    return *(np.asarray(x)[:size] for x in (reward, log_prob, mask, *steps)), action


def with_clone(data: RecordedData, progress: Progress) -> tuple[RecordedData, list[str]]:
    """Return the data with a clone's probabilities where they are missing, and a note on it."""
    missing = np.isnan(data.behaviour_log_prob)
    if not missing.any():
        return data, []
    seed = data.options.seed
    policy, params = clone(data.dataset, data.histories.episodes, seed, progress)
    key, log_prob = jax.random.key(seed), data.behaviour_log_prob.copy()
    for part, episodes in data.histories.blocks():
        cloned = np.asarray(follow(policy, True, 1, params, episodes, key).log_prob)
        log_prob[part] = np.where(missing[part], cloned[: part.stop - part.start], log_prob[part])
    steps = missing.any(-1)
    likely = np.exp(log_prob[steps].sum(-1).mean())
    return data._replace(behaviour_log_prob=log_prob), [
        f"the probabilities of the recorded actions are missing (NaN) at {steps.sum():,} of "
        f"{data.mask.sum():,} steps: local and wis use those of a clone of the data's policies "
        f"(geometric mean {likely:.2g}), and are only as right as the clone is."
    ]


# ---------------------------------------------------------------------------------- policies


def without_impossible(followed: Followed, data: RecordedData) -> Followed:
    """Return log-probabilities of minus infinity for recorded actions of probability 0.

    Ratios compare probabilities with probabilities, and densities with densities.
    """
    impossible = data.certain_inside
    if not followed.reaches_ends:
        impossible = impossible | data.at_ends
    known = impossible & ~np.isnan(followed.log_prob)
    return followed._replace(log_prob=np.where(known, -np.inf, followed.log_prob))


def _follow_all(
    policies: Mapping[str, EvaluatedPolicy], data: RecordedData, progress: Progress
) -> dict[str, Followed]:
    """Unroll all policies over the episodes; each block of these is read once."""
    blocks: dict[str, list[Followed]] = {name: [] for name in policies}
    draws = {name: target.policy.draws(target.params) for name, target in policies.items()}
    with progress("unroll policies", len(data.lengths) * len(policies)) as advance:
        for part, episodes in data.histories.blocks():
            size = part.stop - part.start
            key = jax.random.fold_in(jax.random.key(data.options.seed), part.start)
            for name, target in policies.items():
                count = _SAMPLES if draws[name] else 1
                unrolled = follow(target.policy, draws[name], count, target.params, episodes, key)
                action = _small(np.asarray(unrolled.action)[:size])
                blocks[name].append(Followed(np.asarray(unrolled.log_prob)[:size], action))
                advance(size)
    followed = {
        name: Followed(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        for name, parts in blocks.items()
    }
    return {name: without_impossible(unrolled, data) for name, unrolled in followed.items()}


def _small(action: NDArray[Any]) -> NDArray[Any]:
    """Store discrete actions in one byte where they fit."""
    if action.dtype.kind in "iu" and action.max(initial=0) < 256:
        return action.astype(np.uint8)
    return action


# ---------------------------------------------------------------------------------- play


def _played(policies: Mapping[str, EvaluatedPolicy], data: RecordedData) -> dict[str, _Resampled]:
    """Return the values of the policies that can play in the recorded steps."""
    seed, gamma = data.options.seed, data.options.gamma
    table = read_table(data.histories, len(data.resamples), seed)
    results: dict[str, _Resampled] = {}
    if table is None:
        return results
    for name, target in policies.items():
        key = jax.random.key(seed)  # the same for all policies
        arguments = target.policy, data.histories.longest, target.params, table, gamma, key
        returns, missing, goes_on = map(np.asarray, play(*arguments))
        if not missing.any() and (data.is_limited or not goes_on.any()):
            results[name] = float(returns[0].mean()), returns[1:].mean(1)
    return results


# ---------------------------------------------------------------------------------- critics


def transitions_for(data: RecordedData, actions: Several[Any]) -> Transitions:
    """Return the transitions for critics of policies that take ``actions``, the recorded ones last.

    The recorded ones are compared with complete episodes' returns: they are valued by these alone.
    """
    options, numbers = data.options, data.histories.episodes
    slots = np.arange(data.mask.shape[1] + 1) <= data.lengths[:, None]
    index = np.zeros(len(data.dataset.episodes.length), np.int32)
    index[numbers] = np.arange(len(numbers))
    returns = data.reward.sum(1)[data.complete]
    scale = float(np.sqrt(np.mean(returns**2))) if len(returns) else 0.0
    scale = scale if scale > 0 else 1.0
    weights = np.pad(data.resamples, ((1, 0), (0, 0)), constant_values=1)
    of_each = [*[weights] * (len(actions) - 1), weights * (data.complete | ~data.complete.any())]
    windows = Windows(options.batch_size, 1, return_to_go=options.gamma, extras=())
    return Transitions(
        load(data.dataset, windows, numbers),
        jnp.asarray(index),
        jnp.asarray(np.cumsum(data.lengths + 1) - data.lengths - 1, jnp.int32),
        jnp.asarray(np.stack(np.broadcast_arrays(*(action[slots] for action in actions)))),
        jnp.asarray(data.complete),
        jnp.asarray(np.stack(of_each)),
        jnp.float32(scale),
        jnp.float32(data.histories.longest),
        jnp.asarray(data.value_bounds() / scale, jnp.float32),
    )


def _fitted_values(
    data: RecordedData, actions: Several[Any], progress: Progress
) -> list[Float[np.ndarray, "C M"]]:
    """Return the values by each member of each policy, by its actions, at the initial states.

    Members learn from all episodes, and from resamples. The last values are those of the data's own
    policies, whose mean return is known.
    """
    actions = [*actions, data.action]
    transitions = transitions_for(data, actions)
    critic = make_critic(data.dataset.spec, data.options.hidden)
    params = fit(critic, transitions, data.options, progress)
    values: list[list[NDArray[Any]]] = [[] for _ in actions]
    for part, episodes in data.histories.blocks():
        for number, action in enumerate(actions):
            member_params = jax.tree.map(lambda leaf, number=number: leaf[number], params)
            samples = pad_episodes(action[part], len(episodes.mask))
            starts = transitions.scale * start_values(critic, member_params, episodes, samples)
            values[number].append(np.asarray(starts)[:, : part.stop - part.start])
    return [np.concatenate(parts, axis=1) for parts in values]


# ---------------------------------------------------------------------------------- ratios


def by_ratios(
    sampled: bool,
    gains: Float[np.ndarray, "M T"] | None,
    followed: Followed,
    data: RecordedData,
) -> tuple[float, dict[Method, _Resampled]]:
    """Return the effective sample size, and the estimates by ratios with those of resamples."""
    kept, options = data.weighted, data.options
    log_prob, behaviour = np.asarray(followed.log_prob)[kept], data.behaviour_log_prob[kept]
    joint = jnp.asarray(log_prob.sum(-1)), jnp.asarray(behaviour.sum(-1))
    ratios = cumulative_ratios(*joint, jnp.asarray(data.mask[kept]))
    size, ones = float(effective_sample_size(ratios)), jnp.ones(int(kept.sum()))
    estimators: dict[Method, Any] = {}
    if gains is not None:
        returns = data.discounted[kept]
        parts = jnp.asarray(local_values(log_prob, behaviour, gains[kept], returns, options.gamma))
        estimators["local"] = lambda counts: counts @ parts / len(parts)
    if sampled and size > 0:
        reward = jnp.asarray(data.reward[kept])
        estimators["wis"] = partial(weighted_importance_sampling, ratios, reward, options.gamma)
    results: dict[Method, _Resampled] = {}
    for method, estimator in estimators.items():
        draw = np.random.default_rng(options.seed)  # the same for all policies
        resampled = bootstrap(estimator, len(ones), draw)
        results[method] = float(estimator(ones)), resampled
    return size, results


def cautions_of_fqe(
    values: Mapping[str, Estimate], check: float | None, data: RecordedData
) -> list[str]:
    """Return notes on estimates by critics: impossible ones, and those without an interval."""
    notes, returns = [], data.discounted[data.complete]
    if values and not len(data.resamples):
        notes.append(f"fqe has no intervals with fewer than {MIN_RUNS} members.")
    if not len(returns):
        return notes
    mean, _, high = data.behaviour
    allowed = max(0.0 if high is None else high - mean, returns.std() / 10, abs(mean) / 100)
    if check is not None and abs(check - mean) > allowed:
        notes.append(
            f"fqe values the data's own policies at {check:.4g}, and their mean return is "
            f"{mean:.4g}: its critics have not converged. Do not rely on fqe: more updates "
            "may help."
        )
    low, high = float(returns.min()), float(returns.max())
    beyond = [name for name, value in values.items() if not low <= value.value <= high]
    if beyond:
        notes.append(
            f"fqe of {', '.join(beyond)} is outside the returns of all episodes ({low:.4g} to "
            f"{high:.4g}): its critics have not converged, or judge actions that the data lack. Do "
            "not rely on it: other numbers of updates or another width may help."
        )
    return notes


def cautions_of_ratios(
    methods: Several[Method],
    effective: Mapping[str, float],
    followed: Mapping[str, Followed],
    data: RecordedData,
) -> list[str]:
    """Return notes on estimates by ratios, for the policies with an effective sample size."""
    notes = []
    few = [name for name, size in effective.items() if size < _FEW_EFFECTIVE]
    if few and "wis" in methods:
        notes.append(
            f"the data weigh as much as fewer than {_FEW_EFFECTIVE} episodes of {', '.join(few)}: "
            "do not rely on wis there. It has no interval."
        )
    inside = [name for name in effective if not followed[name].reaches_ends]
    if inside and data.at_ends.any():
        share = data.at_ends.any(-1).sum() / data.mask.sum()
        notes.append(
            f"{', '.join(inside)} never draw an action at -1 or 1, as {share:.1%} of the recorded "
            "joint actions have: local and wis give these no weight."
        )
    if effective and data.certain.any():
        share = data.certain.sum() / data.mask.sum()
        notes.append(
            f"{share:.1%} of the recorded joint actions were taken with probability 1: what other "
            "actions would earn there is unknown to local and wis."
        )
    if effective and (count := int((data.complete & ~data.weighted).sum())):
        notes.append(
            f"{count:,} episodes are left out of local and wis: the recorded probability of an "
            "action in them is 0 or infinite, which no policy has of what it does."
        )
    if (~data.complete).any():
        notes.append(
            f"{int((~data.complete).sum()):,} episodes that the environment did not end do not "
            "count in local and wis."
        )
    return notes
