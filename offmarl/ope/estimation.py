"""Off-policy evaluation of several policies from one dataset."""

from collections.abc import Mapping
from collections.abc import Sequence as Several
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from numpy.typing import NDArray

from offmarl.errors import OptionError, ShapeError
from offmarl.ope.fitted import FittedQ, Options, Transitions, fit, make_critic
from offmarl.ope.history import (
    Histories,
    at_ends,
    follow,
    had_no_choice,
    joint_behaviour,
    was_certain_inside,
)
from offmarl.ope.importance import (
    Ratios,
    bootstrap,
    doubly_robust,
    effective_sample_size,
    weighted_importance_sampling,
)
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
    effective: dict[str, float]
    """Effective sample size of importance sampling, by policy."""
    data: Estimate
    """The mean return of the data's complete episodes: the value of the policies that took them."""
    episodes: int
    """Number of episodes used."""
    notes: tuple[str, ...]
    """What could not be computed, and what to be careful about."""


def estimate(
    policies: Mapping[str, Target],
    dataset: Dataset | Mixture,
    options: Options | None = None,
    methods: Several[Method] | None = None,
    progress: Progress = quiet,
) -> Estimates:
    """Estimate the values of policies from recorded episodes, without the environment.

    The value is the expected discounted return from the data's initial states, averaged over the
    agents.

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
        A method in ``methods`` cannot be used: probabilities of actions were not recorded, the
        data's policies were deterministic, or a policy has no likelihood; or the agents are in
        several teams.
    ShapeError
        A policy acts on other observations or actions than those of the data, or there is no
        policy or no episode.
    """
    options = options or Options()
    _check(policies, dataset.spec)
    data = _Data.read(dataset, options)
    data.require_finite_values(options)
    refusals = data.refusals(options)
    for method in methods or ():
        if method in refusals:
            raise OptionError(f"{method} cannot be used: {refusals[method]}")
    wanted = [one for one in METHODS if one in (methods or METHODS) and one not in refusals]
    followed = _follow_all(policies, data, options, progress)
    unlikely = {name for name, one in followed.items() if not (one.log_prob < np.inf).all()}
    if methods and unlikely and {"wis", "dr"} & {*wanted}:
        raise OptionError(f"importance sampling cannot be used: {_no_likelihood(unlikely)}")
    notes = [f"{method}: {why}" for method, why in refusals.items() if methods is None]
    if unlikely and {"wis", "dr"} & {*wanted}:
        notes.append(_no_likelihood(unlikely))
    fitted = None
    if {"fqe", "dr"} & {*wanted}:
        fitted = _fit(dataset, data, [*followed.values()], options, "dr" in wanted, progress)
    values: dict[Method, dict[str, Estimate]] = {method: {} for method in wanted}
    effective: dict[str, float] = {}
    for number, (name, one) in enumerate(followed.items()):
        if fitted is not None and "fqe" in wanted:
            values["fqe"][name] = _fitted_value(fitted, number, one, data)
        if name in unlikely or not {"wis", "dr"} & {*wanted}:
            continue
        effective[name], weighted = _weighted(wanted, fitted, number, one, data, options)
        for method, value in weighted.items():
            values[method][name] = value
    notes += _cautions_of_fqe(values.get("fqe", {}), data, options)
    notes += _cautions(effective, followed, data)
    return Estimates(values, effective, data.behaviour(options), len(data.lengths), tuple(notes))


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
        steps, unknown = int(self.mask.sum()), int(np.isnan(self.behaviour_log_prob).sum())
        weighted = "record with offmarl, which stores them, or use fqe."
        reason = ""
        if unknown:
            reason = (
                f"the probabilities of the recorded actions are missing (NaN) at {unknown:,} of "
                f"{steps:,} steps: {weighted}"
            )
        elif not self.weighted.any() and self.complete.any():
            reason = (
                "each complete episode has an action of which the recorded probability is 0 or "
                f"infinite: {weighted}"
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


# ---------------------------------------------------------------------------------- policies


class _Followed(NamedTuple):
    """What a policy would do, on the host."""

    log_prob: Float[np.ndarray, "M T"]
    action: NDArray[Any]
    """``(M, T + 1, K, ...)``"""

    @property
    def reaches_ends(self) -> bool:
        """Whether it draws continuous actions at an end of the interval: it clips its actions."""
        return bool((np.abs(self.action) >= 1).any())

    def without_impossible(self, data: _Data) -> "_Followed":
        """Return it with minus infinity for recorded actions that it takes with probability 0.

        Ratios compare probabilities with probabilities, and densities with densities.
        """
        impossible = data.certain_inside
        if not self.reaches_ends:
            impossible = impossible | data.at_ends
        known = impossible & ~np.isnan(self.log_prob)
        return self._replace(log_prob=np.where(known, -np.inf, self.log_prob))


def _follow_all(
    policies: Mapping[str, Target], data: _Data, options: Options, progress: Progress
) -> dict[str, _Followed]:
    """Unroll all policies over the episodes; each block of these is read once."""
    found: dict[str, list[_Followed]] = {name: [] for name in policies}
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
                if count < samples:
                    action = np.repeat(action, samples, axis=2)
                found[name].append(_Followed(np.asarray(done.log_prob)[:size], action))
                advance(size)
    joined = {
        name: _Followed(*(np.concatenate(parts) for parts in zip(*blocks, strict=True)))
        for name, blocks in found.items()
    }
    return {name: one.without_impossible(data) for name, one in joined.items()}


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
    followed: Several[_Followed],
    options: Options,
    robust: bool,
    progress: Progress,
) -> FittedQ:
    """Learn critics: of all episodes; without each half, for dr; and of resamples."""
    numbers = data.histories.episodes
    slots = np.arange(data.mask.shape[1] + 1) <= data.lengths[:, None]
    actions = np.stack([one.action[slots] for one in followed])
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


def _fitted_value(fitted: FittedQ, number: int, followed: _Followed, data: _Data) -> Estimate:
    """Return the value of a policy at the data's initial states.

    The interval is Student's t with the spread of the resampled critics, each of which is applied
    to the initial states of its own resample.
    """
    parts = [
        fitted.start_values(number, episodes, _padded(followed.action[part], len(episodes.mask)))[
            :, : part.stop - part.start
        ]
        for part, episodes in data.histories.blocks()
    ]
    starts = np.concatenate(parts, axis=1)
    value = float(starts[_MAIN].mean())
    members = len(data.resamples)
    if not members:
        return Estimate(value)
    each = (starts[-members:] * data.resamples).mean(1)
    centre, low, high = mean_interval(each)
    assert low is not None and high is not None
    # The interval of one member, and not of their mean.
    half = (high - centre) * float(np.sqrt(members))
    return Estimate(value, value - half, value + half)


def _padded(leaf: NDArray[Any], size: int) -> Array:
    missing = size - len(leaf)
    return jnp.asarray(np.pad(leaf, [(0, missing), *[(0, 0)] * (leaf.ndim - 1)]))


# ---------------------------------------------------------------------------------- ratios


def _weighted(
    wanted: Several[Method],
    fitted: FittedQ | None,
    number: int,
    followed: _Followed,
    data: _Data,
    options: Options,
) -> tuple[float, dict[Method, Estimate]]:
    """Return the effective sample size and the estimates by ratios."""
    kept = data.weighted
    arrays = (followed.log_prob, data.behaviour_log_prob, data.mask)
    ratios = Ratios.of(*(jnp.asarray(x[kept]) for x in arrays))
    size, found = float(effective_sample_size(ratios)), dict[Method, Estimate]()
    if size == 0:
        return size, found
    reward = jnp.asarray(data.reward[kept])
    key = np.random.default_rng(options.seed)
    if "wis" in wanted:
        sampling = partial(weighted_importance_sampling, ratios, reward, options.gamma)
        found["wis"] = bootstrap(sampling, int(kept.sum()), key, options.resamples)
    if "dr" in wanted and fitted is not None:
        q, v = (x[kept] for x in _critic_values(fitted, number, followed, data, options))
        robust = partial(doubly_robust, ratios, reward, jnp.asarray(q), jnp.asarray(v))
        estimator = partial(robust, options.gamma)
        found["dr"] = bootstrap(estimator, int(kept.sum()), key, options.resamples)
    return size, found


def _critic_values(
    fitted: FittedQ, number: int, followed: _Followed, data: _Data, options: Options
) -> tuple[Float[np.ndarray, "M T"], Float[np.ndarray, "M slots"]]:
    """Return Q of the recorded actions and V of the policy, by the other half's critics."""
    q, v = (
        np.zeros(data.mask.shape, np.float32),
        np.zeros((len(data.mask), data.mask.shape[1] + 1), np.float32),
    )
    for part, episodes in data.histories.blocks():
        size = part.stop - part.start
        action = _padded(followed.action[part], len(episodes.mask))
        for fold, member in enumerate(_FOLDS):
            own = np.flatnonzero(data.folds[part] == fold)
            q_fold, v_fold = fitted.step_values(number, member, episodes, action)
            q[part.start + own], v[part.start + own] = q_fold[:size][own], v_fold[:size][own]
    slots = np.arange(v.shape[1])
    goes_on = data.truncated & (options.horizon == "infinite")
    exists = (slots < data.lengths[:, None]) | (goes_on[:, None] & (slots == data.lengths[:, None]))
    return np.where(data.mask, q, 0), np.where(exists, v, 0)


def _cautions_of_fqe(values: Mapping[str, Estimate], data: _Data, options: Options) -> list[str]:
    """Return notes on estimates by critics: impossible ones, and those without an interval."""
    notes, returns = [], data.returns(options)
    if values and not len(data.resamples):
        notes.append(f"fqe has no intervals with fewer than {MIN_RUNS} members.")
    if options.horizon == "infinite" or not len(returns):
        return notes
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
    effective: Mapping[str, float], followed: Mapping[str, _Followed], data: _Data
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
