"""Off-policy evaluation of several policies from one dataset."""

from collections.abc import Mapping
from collections.abc import Sequence as Several
from functools import partial
from itertools import permutations
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from numpy.typing import NDArray

from offmarl.errors import OptionError, ShapeError
from offmarl.ope.fitted import FittedQ, Transitions, fit, make_critic
from offmarl.ope.history import (
    Followed,
    Histories,
    at_ends,
    clone,
    follow,
    had_no_choice,
    joint_behaviour,
    padded,
    was_certain_inside,
    with_last_slot,
)
from offmarl.ope.importance import (
    Ratios,
    bootstrap,
    doubly_robust,
    effective_sample_size,
    weighted_importance_sampling,
    with_interval,
)
from offmarl.ope.options import Options
from offmarl.replay import Windows, load
from offmarl.replay.sampling import are_whole
from offmarl.statistics import MIN_RUNS, Estimate, mean_interval
from offmarl.teams import require_one_team
from offmarl.terminal import Progress, quiet
from offmarl.types import ArrayTree, EnvSpec, Policy, Sequence
from offmarl.vault import Dataset, Mixture

Method = Literal["fqe", "wis", "dr"]
"""fqe: fitted Q evaluation; wis: per-decision weighted importance sampling; dr: the weighted doubly
robust estimator, which corrects the critics of fqe by importance sampling."""

METHODS: tuple[Method, ...] = get_args(Method)

_FEW_EFFECTIVE = 20
"""Effective sample size below which a note warns of importance sampling."""


@runtime_checkable
class Target(Protocol):
    """A policy to evaluate; `offmarl.programs.LoadedPolicy` is one."""

    @property
    def policy(self) -> Policy:
        """Its functions."""

    @property
    def params(self) -> ArrayTree:
        """Its parameters."""

    @property
    def spec(self) -> EnvSpec:
        """What it acts on."""


class Estimates(NamedTuple):
    """The result of `estimate`."""

    values: dict[Method, dict[str, Estimate]]
    """By method and policy. Policies that a method cannot evaluate are left out."""
    resampled: dict[Method, dict[str, Float[np.ndarray, "_"]]]
    """The same of resampled episodes, which are equal for all policies of a method."""
    effective: dict[str, float]
    """Effective sample size of importance sampling, by policy."""
    data: Estimate
    """The mean return of the data's complete episodes: the value of the policies that took them."""
    check: float | None
    """That value by fqe, from critics that learned as those of the policies do. None without fqe or
    complete episodes, and beyond a time limit, where it is not known."""
    episodes: int
    """Number of episodes used."""
    notes: tuple[str, ...]
    """What could not be computed, and what to be careful about."""

    def difference(self, method: Method, one: str, other: str) -> Estimate:
        """Return how much more a policy is worth than another, with a paired interval."""
        values, resampled = self.values[method], self.resampled[method]
        value = values[one].value - values[other].value
        return with_interval(value, resampled[one] - resampled[other])

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
    policies: Mapping[str, Target],
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
        Which estimates to make; by default those that the data and the policies allow.
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
    data = _Data.read(dataset, options)
    data.require_finite_values(options)
    notes = []
    if {"wis", "dr"} & {*(methods or METHODS)}:
        data, cloned = _with_clone(dataset, data, options, progress)
        notes += cloned
    refusals = data.refusals(options)
    for method in methods or ():
        if method in refusals:
            raise OptionError(f"{method} cannot be used: {refusals[method]}")
    wanted = [one for one in METHODS if one in (methods or METHODS) and one not in refusals]
    followed = _follow_all(policies, data, options, progress)
    unlikely = {name for name, one in followed.items() if not (one.log_prob < np.inf).all()}
    if methods and unlikely and {"wis", "dr"} & {*wanted}:
        raise OptionError(f"importance sampling cannot be used: {_no_likelihood(unlikely)}")
    notes += [f"{method}: {why}" for method, why in refusals.items() if methods is None]
    if unlikely and {"wis", "dr"} & {*wanted}:
        notes.append(_no_likelihood(unlikely))
    fitted, check = None, None
    if {"fqe", "dr"} & {*wanted}:
        check = _value_of_data(dataset, data, options, progress)
        fitted = _fit(dataset, data, [*followed.values()], options, "dr" in wanted, progress)
    values: dict[Method, dict[str, Estimate]] = {method: {} for method in wanted}
    resampled: dict[Method, dict[str, NDArray[Any]]] = {method: {} for method in wanted}
    effective: dict[str, float] = {}
    for number, (name, one) in enumerate(followed.items()):
        if fitted is not None and "fqe" in wanted:
            value, each = _fitted_value(fitted, number, one, data)
            values["fqe"][name], resampled["fqe"][name] = with_interval(value, each), each
        if name in unlikely or not {"wis", "dr"} & {*wanted}:
            continue
        effective[name], weighted = _weighted(wanted, fitted, number, one, data, options)
        for method, (value, each) in weighted.items():
            values[method][name], resampled[method][name] = with_interval(value, each), each
    notes += _cautions_of_fqe(values.get("fqe", {}), check, data, options)
    notes += _cautions(effective, followed, data)
    return Estimates(
        values,
        resampled,
        effective,
        data.behaviour(options),
        check,
        len(data.lengths),
        tuple(notes),
    )


def _check(policies: Mapping[str, Target], spec: EnvSpec) -> None:
    require_one_team(spec, "off-policy evaluation", "evaluation")
    if not policies:
        raise ShapeError("there are no policies to evaluate: give one or more.")
    for name, one in policies.items():
        if difference := spec.difference(one.spec, extras=False):
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


class _Data(NamedTuple):
    """What is known of the episodes, on the host; arrays are padded to the longest."""

    histories: Histories
    lengths: NDArray[np.int64]
    reward: Float[np.ndarray, "M T"]
    behaviour_log_prob: Float[np.ndarray, "M T"]
    mask: Bool[np.ndarray, "M T"]
    certain: Bool[np.ndarray, "M T"]
    """Steps whose joint action was taken with probability 1, although there were others."""
    at_ends: Bool[np.ndarray, "M T"]
    certain_inside: Bool[np.ndarray, "M T"]
    """Steps of continuous actions that some policies take with probability 0; see `at_ends` and
    `was_certain_inside`."""
    complete: Bool[np.ndarray, "M"]
    truncated: Bool[np.ndarray, "M"]
    """Complete episodes that the environment truncated."""
    folds: NDArray[np.int64]
    """The half of the episodes that each belongs to, 0 or 1."""
    resamples: Float[np.ndarray, "members M"]
    """How often each episode is in the resample of each of the critics for the interval."""

    @classmethod
    def read(cls, dataset: Dataset | Mixture, options: Options) -> "_Data":
        table = dataset.episodes
        whole = np.flatnonzero(are_whole(dataset))
        if not len(whole) or not table.length.sum():
            raise ShapeError(
                f"{dataset.path} holds no episode to evaluate policies with: each needs finite "
                "steps and legal actions."
            )
        most = min(options.episodes or len(whole), len(whole))
        chosen = whole[np.unique(np.linspace(0, len(whole) - 1, most).round().astype(np.int64))]
        histories = Histories(dataset, chosen)
        blocks = [_recorded(part, episodes) for part, episodes in histories.blocks()]
        joined = map(np.concatenate, zip(*blocks, strict=True))
        reward, log_prob, mask, certain, ends, certain_inside = joined
        draw = np.random.default_rng(options.seed)
        number = len(chosen)
        folds = draw.permutation(number) % 2
        members = options.members if options.members >= MIN_RUNS else 0
        resamples = draw.multinomial(number, np.full(number, 1 / number), members)
        complete = table.complete[chosen]
        return cls(
            histories,
            histories.lengths,
            reward,
            log_prob,
            mask,
            certain,
            ends,
            certain_inside,
            complete,
            complete & table.truncated[chosen],
            folds,
            resamples.astype(np.float32),
        )

    def refusals(self, options: Options) -> dict[Method, str]:
        """Return the methods that the data do not allow, each with the reason."""
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
        if reason:
            return {"wis": reason, "dr": reason}
        if options.horizon == "infinite" and self.truncated.any():
            return {
                "wis": "the value beyond a time limit is not in the data: use --horizon episode, "
                "or dr, whose critic continues there."
            }
        return {}

    @property
    def weighted(self) -> Bool[np.ndarray, "M"]:
        """The episodes that ratios weigh: complete, of actions that the data's policies can take.

        No policy takes an action of probability 0, so that its ratio is that of a fault.
        """
        whole: NDArray[np.bool_] = self.complete & ~np.isinf(self.behaviour_log_prob).any(1)
        return whole

    def require_finite_values(self, options: Options) -> None:
        """Raise `OptionError` for undiscounted values of episodes that never terminate."""
        terminated = self.complete & ~self.truncated
        if options.gamma == 1 and options.horizon == "infinite" and not terminated.any():
            raise OptionError(
                "no episode of the data terminates, so values beyond a time limit are not finite "
                "without a discount: give --gamma below 1, or --horizon episode."
            )

    def reward_bounds(self, options: Options) -> Float[np.ndarray, "2"]:
        """Return the smallest and the largest reward of a step; 0 follows an end.

        A time limit is no such end: where values end at it, `is_limited` tells how many rewards are
        left, provided that it is the same for all episodes.
        """
        rewards, lengths = self.reward[self.mask], self.lengths[self.complete]
        limits = (self.truncated | ~self.complete).all()
        if options.horizon == "episode":
            limits &= len(np.unique(lengths)) <= 1
        after = [] if limits else [0.0]
        return np.array([min([rewards.min(), *after]), max([rewards.max(), *after])])

    def is_limited(self, options: Options) -> bool:
        """Whether values end at a time limit, which the longest episode has reached."""
        longest = self.lengths == self.lengths.max()
        return options.horizon == "episode" and bool(self.truncated[longest].any())

    def behaviour(self, options: Options) -> Estimate:
        """Return the mean discounted return of the complete episodes, with Student's t interval."""
        returns = self.returns(options)
        return mean_interval(returns) if len(returns) else Estimate(float("nan"))

    def returns(self, options: Options) -> Float[np.ndarray, "complete"]:
        """Return the discounted return of each complete episode."""
        discounts = options.gamma ** np.arange(self.reward.shape[1])
        found: NDArray[Any] = (self.reward * discounts).sum(1)[self.complete]
        return found


def _recorded(part: slice, episodes: Sequence) -> tuple[NDArray[Any], ...]:
    """Return the arrays of `_Data` that a block of episodes has."""
    mask, log_prob = episodes.mask, joint_behaviour(episodes)
    certain = mask & (log_prob == 0) & ~had_no_choice(episodes)
    reward = jnp.where(mask, episodes.reward.mean(-1), 0.0)
    size = part.stop - part.start
    steps = certain, at_ends(episodes), was_certain_inside(episodes)
    return tuple(np.asarray(x)[:size] for x in (reward, log_prob, mask, *steps))


def _with_clone(
    dataset: Dataset | Mixture, data: _Data, options: Options, progress: Progress
) -> tuple[_Data, list[str]]:
    """Return the data with a clone's probabilities where they are missing, and a note on it."""
    missing = np.isnan(data.behaviour_log_prob)
    if not missing.any():
        return data, []
    policy, params = clone(dataset, data.histories.episodes, options.seed, progress)
    key, log_prob = jax.random.key(options.seed), data.behaviour_log_prob.copy()
    for part, episodes in data.histories.blocks():
        found = np.asarray(follow(policy, True, 1, params, episodes, key).log_prob)
        log_prob[part] = np.where(missing[part], found[: part.stop - part.start], log_prob[part])
    likely = np.exp(log_prob[missing].mean())
    return data._replace(behaviour_log_prob=log_prob), [
        f"the probabilities of the recorded actions are missing (NaN) at {missing.sum():,} of "
        f"{data.mask.sum():,} steps: wis and dr use those of a clone of the data's policies "
        f"(geometric mean {likely:.2g}), and are only as right as the clone is."
    ]


# ---------------------------------------------------------------------------------- policies


def _without_impossible(followed: Followed, data: _Data) -> Followed:
    """Return it with minus infinity for recorded actions that it takes with probability 0.

    Ratios compare probabilities with probabilities, and densities with densities.
    """
    impossible = data.certain_inside
    if not followed.reaches_ends:
        impossible = impossible | data.at_ends
    known = impossible & ~np.isnan(followed.log_prob)
    return followed._replace(log_prob=np.where(known, -np.inf, followed.log_prob))


def _follow_all(
    policies: Mapping[str, Target], data: _Data, options: Options, progress: Progress
) -> dict[str, Followed]:
    """Unroll all policies over the episodes; each block of these is read once."""
    found: dict[str, list[Followed]] = {name: [] for name in policies}
    draws = {name: one.policy.draws(one.params) for name, one in policies.items()}
    samples = options.samples if any(draws.values()) else 1
    with progress("unroll policies", len(data.lengths) * len(policies)) as advance:
        for part, episodes in data.histories.blocks():
            size = part.stop - part.start
            key = jax.random.fold_in(jax.random.key(options.seed), part.start)
            for name, one in policies.items():
                count = samples if draws[name] else 1
                done = follow(one.policy, draws[name], count, one.params, episodes, key)
                action = _small(np.asarray(done.action)[:size])
                found[name].append(Followed(np.asarray(done.log_prob)[:size], action))
                advance(size)
    joined = {
        name: Followed(*(np.concatenate(parts) for parts in zip(*blocks, strict=True)))
        for name, blocks in found.items()
    }
    return {name: _without_impossible(one, data) for name, one in joined.items()}


def _small(action: NDArray[Any]) -> NDArray[Any]:
    """Store discrete actions in one byte where they fit."""
    if action.dtype.kind in "iu" and action.max(initial=0) < 256:
        return action.astype(np.uint8)
    return action


# ---------------------------------------------------------------------------------- critics

_MAIN, _FOLDS = 0, (1, 2)
"""Members of the critics: one of all episodes, and one without each half of them."""


def _fit(
    dataset: Dataset | Mixture,
    data: _Data,
    followed: Several[Followed],
    options: Options,
    robust: bool,
    progress: Progress,
) -> FittedQ:
    """Learn critics: of all episodes; without each half, for dr; and of resamples."""
    numbers = data.histories.episodes
    slots = np.arange(data.mask.shape[1] + 1) <= data.lengths[:, None]
    actions = np.stack(np.broadcast_arrays(*(one.action[slots] for one in followed)))
    index = np.zeros(len(dataset.episodes.length), np.int32)
    index[numbers] = np.arange(len(numbers))
    weights = [np.ones(len(numbers), np.float32)]
    weights += [2.0 * (data.folds != fold) for fold in (0, 1)] if robust else []
    returns = data.reward.sum(1)[data.complete]
    scale = float(np.sqrt(np.mean(returns**2))) if len(returns) else 0.0
    windows = Windows(options.batch_size, 1, return_to_go=options.gamma, extras=())
    transitions = Transitions(
        load(dataset, windows, numbers),
        jnp.asarray(index),
        jnp.asarray(np.cumsum(data.lengths + 1) - data.lengths - 1, jnp.int32),
        jnp.asarray(actions),
        jnp.asarray(data.complete & (options.horizon == "episode")),
        jnp.asarray(data.complete),
        jnp.asarray(np.concatenate([np.stack(weights), data.resamples]), jnp.float32),
        jnp.float32(scale if scale > 0 else 1.0),
        jnp.float32(data.histories.longest),
        jnp.asarray(data.reward_bounds(options) / (scale if scale > 0 else 1.0), jnp.float32),
        jnp.asarray(data.is_limited(options)),
    )
    critic = make_critic(dataset.spec, options.hidden, options.mixer)
    return fit(critic, transitions, options, progress)


def _fitted_value(
    fitted: FittedQ, number: int, followed: Followed, data: _Data
) -> tuple[float, Float[np.ndarray, "_"]]:
    """Return the value of a policy at the data's initial states, and those of resampled critics.

    Each of these is applied to the initial states of its own resample.
    """
    parts = [
        fitted.start_values(number, episodes, padded(followed.action[part], len(episodes.mask)))[
            :, : part.stop - part.start
        ]
        for part, episodes in data.histories.blocks()
    ]
    starts, members = np.concatenate(parts, axis=1), len(data.resamples)
    resampled = (starts[len(starts) - members :] * data.resamples).mean(1)
    return float(starts[_MAIN].mean()), resampled


def _value_of_data(
    dataset: Dataset | Mixture, data: _Data, options: Options, progress: Progress
) -> float | None:
    """Return the value by a critic of the data's own policies, whose mean return is known."""
    if options.horizon == "infinite" or not data.complete.any():
        return None
    actions = [
        np.asarray(jax.vmap(with_last_slot)(episodes.action))[: part.stop - part.start, :, None]
        for part, episodes in data.histories.blocks()
    ]
    recorded = Followed(np.zeros(data.mask.shape), _small(np.concatenate(actions)))
    alone = data._replace(resamples=data.resamples[:0])
    fitted = _fit(dataset, alone, [recorded], options, False, progress)
    return _fitted_value(fitted, 0, recorded, alone)[0]


# ---------------------------------------------------------------------------------- ratios


def _weighted(
    wanted: Several[Method],
    fitted: FittedQ | None,
    number: int,
    followed: Followed,
    data: _Data,
    options: Options,
) -> tuple[float, dict[Method, tuple[float, Float[np.ndarray, "_"]]]]:
    """Return the effective sample size, and the estimates by ratios with those of resamples."""
    kept = data.weighted
    arrays = (followed.log_prob, data.behaviour_log_prob, data.mask)
    ratios = Ratios.of(*(jnp.asarray(x[kept]) for x in arrays))
    size, found = float(effective_sample_size(ratios)), dict[Method, tuple[float, Any]]()
    if size == 0:
        return size, found
    reward, every = jnp.asarray(data.reward[kept]), jnp.ones(int(kept.sum()))
    draw = np.random.default_rng(options.seed)  # the same for all policies
    if "wis" in wanted:
        sampling = partial(weighted_importance_sampling, ratios, reward, options.gamma)
        resampled = bootstrap(sampling, len(every), draw, options.resamples)
        found["wis"] = float(sampling(every)), resampled
    if "dr" in wanted and fitted is not None:
        q, v = (x[:, kept] for x in _critic_values(fitted, number, followed, data, options))

        def robust(q: Any, v: Any, counts: Array) -> Array:
            return doubly_robust(ratios, reward, q, v, options.gamma, counts)

        # Resamples take turns in the critics, whose spread is that of critics that are refitted.
        spread = [_around_mean(x[1:]) if len(x) > 1 else np.zeros_like(x) for x in (q, v)]
        part = -(-options.resamples // len(spread[0]))
        parts = [
            bootstrap(partial(robust, q[0] + dq, v[0] + dv), len(every), draw, part)
            for dq, dv in zip(*spread, strict=True)
        ]
        found["dr"] = float(robust(q[0], v[0], every)), np.concatenate(parts)
    return size, found


def _around_mean(values: Float[np.ndarray, "K *b"]) -> Float[np.ndarray, "K *b"]:
    """Return differences from the mean, with the variance of the critics they were drawn from.

    The mean is that of the same few critics, around which they vary less.
    """
    number = len(values)
    return (values - values.mean(0)) * np.float32(number / (number - 1)) ** 0.5


def _critic_values(
    fitted: FittedQ, number: int, followed: Followed, data: _Data, options: Options
) -> tuple[Float[np.ndarray, "K M T"], Float[np.ndarray, "K M slots"]]:
    """Return Q of the recorded actions and V of the policy.

    First those of the critic that learned from the other half of the episodes, then those of each
    critic of resampled ones.
    """
    critics = len(_FOLDS) + len(data.resamples)
    q = np.zeros((critics, *data.mask.shape), np.float32)
    v = np.zeros((critics, len(data.mask), data.mask.shape[1] + 1), np.float32)
    for part, episodes in data.histories.blocks():
        action = padded(followed.action[part], len(episodes.mask))
        for critic in range(critics):
            found = fitted.step_values(number, _MAIN + 1 + critic, episodes, action)
            q[critic, part], v[critic, part] = (x[: part.stop - part.start] for x in found)
    slots = np.arange(v.shape[2])
    goes_on = data.truncated & (options.horizon == "infinite")
    exists = (slots < data.lengths[:, None]) | (goes_on[:, None] & (slots == data.lengths[:, None]))
    q, v = np.where(data.mask, q, 0), np.where(exists, v, 0)
    half = data.folds, np.arange(len(data.folds))
    q, v = (np.concatenate([x[half][None], x[len(_FOLDS) :]]) for x in (q, v))
    return q, v


def _cautions_of_fqe(
    values: Mapping[str, Estimate], check: float | None, data: _Data, options: Options
) -> list[str]:
    """Return notes on estimates by critics: impossible ones, and those without an interval."""
    notes, returns = [], data.returns(options)
    if values and not len(data.resamples):
        notes.append(f"fqe has no intervals with fewer than {MIN_RUNS} members.")
    if options.horizon == "infinite" or not len(returns):
        return notes
    mean, _, high = data.behaviour(options)
    allowed = max((high or mean) - mean, returns.std() / 10, abs(mean) / 100)
    if check is not None and abs(check - mean) > allowed:
        notes.append(
            f"fqe values the data's own policies at {check:.4g}, and their mean return is "
            f"{mean:.4g}: its critics have not converged. Do not rely on fqe and dr: more updates "
            "may help."
        )
    low, high = float(returns.min()), float(returns.max())
    beyond = [name for name, one in values.items() if not low <= one.value <= high]
    if beyond:
        notes.append(
            f"fqe of {', '.join(beyond)} is outside the returns of all episodes ({low:.4g} to "
            f"{high:.4g}): its critics have not converged, or judge actions that the data lack. Do "
            "not rely on it: other numbers of updates, another width or a mixer may help."
        )
    return notes


def _cautions(
    effective: Mapping[str, float], followed: Mapping[str, Followed], data: _Data
) -> list[str]:
    """Return notes on estimates by ratios, for the policies with an effective sample size."""
    notes = []
    few = [name for name, size in effective.items() if size < _FEW_EFFECTIVE]
    if few:
        notes.append(
            f"the data weigh as much as fewer than {_FEW_EFFECTIVE} episodes of {', '.join(few)}: "
            "do not rely on wis and dr there."
        )
    inside = [name for name in effective if not followed[name].reaches_ends]
    if inside and data.at_ends.any():
        share = data.at_ends.sum() / data.mask.sum()
        notes.append(
            f"{', '.join(inside)} never draw an action at -1 or 1, as {share:.1%} of the recorded "
            "joint actions have: wis and dr give no weight to what follows these."
        )
    if effective and data.certain.any():
        share = data.certain.sum() / data.mask.sum()
        notes.append(
            f"{share:.1%} of the recorded joint actions were taken with probability 1: what other "
            "actions would earn there is unknown to wis and dr."
        )
    if effective and (left := int((data.complete & ~data.weighted).sum())):
        notes.append(
            f"{left:,} episodes are left out of wis and dr: the recorded probability of an action "
            "in them is 0 or infinite, which no policy has of what it does."
        )
    if (~data.complete).any():
        notes.append(
            f"{int((~data.complete).sum()):,} episodes that the environment did not end count only "
            "in fqe."
        )
    return notes
