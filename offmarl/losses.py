"""Losses as pure functions of one trajectory.

Arguments carry time in their names: ``_tm1`` is the step an action was taken in, ``_t`` the one
after it. Callers vmap over the batch and average with `masked_mean`.
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl import distributions
from offmarl.types import Sequence

Scalar = float | Float[Array, ""]
"""A hyperparameter."""

LEAST_LOG_PROB = -23.0
"""Least log-probability of a model of the data, about log 1e-10, which keeps divergences finite."""

_TINY = 1e-30


def masked_mean(
    x: Float[Array, "*b"],
    mask: Bool[Array, "*b"],
    weight: Float[Array, "B"] | Float[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """Mean of ``x`` over the entries of ``mask``; 0 if there are none.

    Parameters
    ----------
    x, mask
        Values and their mask, of the same shape; masked values may be NaN.
    weight
        Weight of each window or of each step, along the first axes, such as ``batch.weight``: the
        importance weights of prioritised replay. Terms are multiplied by it; the mean still
        divides by the number of entries of the mask. None weighs all terms equally.
    """
    terms = jnp.where(mask, x, 0.0)
    if weight is not None:
        terms = terms * weight.reshape(*weight.shape, *(1,) * (x.ndim - weight.ndim))
    return terms.sum() / jnp.maximum(mask.sum(), 1)


# ---------------------------------------------------------------------- temporal differences


def double_q_values(
    q_target_t: Float[Array, "*b A"],
    q_selector_t: Float[Array, "*b A"],
    legal_actions_t: Bool[Array, "*b A"],
) -> Float[Array, "*b"]:
    """Return the value of the next step by double Q-learning.

    The best legal action by ``q_selector_t`` is evaluated by ``q_target_t`` (van Hasselt et al.
    2015, arXiv 1509.06461).
    """
    best = distributions.mask_illegal(q_selector_t, legal_actions_t).argmax(-1)
    return distributions.select(q_target_t, best)


def td_targets(
    r_t: Float[Array, "*b"], discount_t: Float[Array, "*b"], v_t: Float[Array, "*b"]
) -> Float[Array, "*b"]:
    """Return one-step targets, r + discount * v, through which no gradient flows.

    ``discount_t`` is γ (1 - terminated): 0 after a termination.
    """
    return jax.lax.stop_gradient(r_t + discount_t * v_t)


def bootstrap_discounts(
    gamma: Scalar, terminated: Bool[Array, "*b N"], shared_reward: bool
) -> Float[Array, "*b N"]:
    """Return the discount of what follows each agent's step: γ, and 0 where nothing follows.

    If the team shares its reward, the reward continues after one of its agents is done, and that
    agent contributed to it. The episode then ends for all agents at once.
    """
    return gamma * (1 - reward_ends(terminated, shared_reward))


def reward_ends(terminated: Bool[Array, "*b N"], shared_reward: bool) -> Bool[Array, "*b N"]:
    """Return where no reward follows each agent's step; see `bootstrap_discounts`."""
    if shared_reward:
        return jnp.broadcast_to(terminated.all(-1, keepdims=True), terminated.shape)
    return terminated


def has_value(
    alive_tm1: Bool[Array, "*b N"],
    terminated: Bool[Array, "*b N"],
    truncated: Bool[Array, "*b N"],
    shared_reward: bool,
) -> Bool[Array, "*b N"]:
    """Return the agents' steps whose values are learned: of live agents, and of some dead ones.

    An agent may die and not terminate: in SMAX, what its side does is still rewarded. Targets then
    bootstrap from its values, so these are learned until the episode has ended for all agents. The
    values of agents that terminated when they died are never used. An agent with a reward of its
    own that is truncated alone is absent after that, and its absence has no value.
    """
    ended = terminated | truncated
    is_over = reward_ends(terminated if shared_reward else ended, shared_reward)
    at_limit = truncated & ended.all(-1, keepdims=True)
    return alive_tm1 | ~is_over | at_limit | terminated.all(-1, keepdims=True)


def squared_errors(
    q_tm1: Float[Array, "K *b"],
    target_tm1: Float[Array, "*b"],
    mask: Bool[Array, "*b"],
    weight: Float[Array, "B"] | Float[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """Return the mean of ½ (Q - y)² over the mask, summed over the K critics.

    ``weight`` is that of `masked_mean`.
    """
    return jax.vmap(lambda q: masked_mean(0.5 * (q - target_tm1) ** 2, mask, weight))(q_tm1).sum()


def q_lambda_targets(
    r_t: Float[Array, "T *b"],
    discount_t: Float[Array, "T *b"],
    v_t: Float[Array, "T *b"],
    goes_on: Bool[Array, "T *#b"],
    lambda_: Scalar,
) -> Float[Array, "T *b"]:
    """Return Peng's Q(λ) targets of action values, without correction for the actions taken.

    G_tm1 = r_t + discount_t ((1 - λ) v_t + λ G_t), computed backwards (Peng and Williams 1994;
    Kozuno et al. 2021, arXiv 2103.00107).

    Parameters
    ----------
    r_t, discount_t
        Reward of each step, and the discount of what follows it: 0 after a termination.
    v_t
        Value of the view that each step led to, also at the end of an episode: the greedy action's.
    goes_on
        Steps that the next step of the same episode follows in the window. The targets of the
        others are one-step targets.
    lambda_
        λ; 0 gives one-step targets.

    Returns
    -------
    Targets, through which no gradient flows.
    """

    def step(target_t: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        r, discount, v, follows = x
        target = r + discount * jnp.where(follows, (1 - lambda_) * v + lambda_ * target_t, v)
        return target, target

    _, targets = jax.lax.scan(step, v_t[-1], (r_t, discount_t, v_t, goes_on), reverse=True)
    return jax.lax.stop_gradient(targets)


# ---------------------------------------------------------------------- conservatism and imitation


def sample_legal_actions(
    key: PRNGKeyArray, legal_actions: Bool[Array, "*b A"], num_samples: int
) -> Int[Array, "*b K"]:
    """Draw K actions for every agent and step, uniformly among the legal ones."""
    so_far = jnp.cumsum(legal_actions, axis=-1)
    count = so_far[..., -1:]
    # `jax.random.randint` takes twice the random bits and a remainder, and is several times slower.
    uniform = jax.random.uniform(key, (*count.shape[:-1], num_samples))
    rank = jnp.floor(uniform * count).astype(so_far.dtype)
    # The action of rank r has r legal actions before it.
    return (so_far[..., None, :] <= rank[..., None]).sum(-1)


def conservative_gap(
    q_others: Float[Array, "*b K"], q_data: Float[Array, "*b"]
) -> Float[Array, "*b"]:
    """Return the log-sum-exp over the values of other and of the data's actions, minus the data's.

    It is never negative. Minimising it decreases the values of actions that the data does not
    contain. All actions of ``q_others`` must be legal; otherwise it decreases values that are never
    used.
    """
    everything = jnp.concatenate([q_others, q_data[..., None]], axis=-1)
    return jax.nn.logsumexp(everything, axis=-1) - q_data


def sampled_conservative_gap(
    q_samples: Float[Array, "K S *b"],
    log_density: Float[Array, "S *b"],
    valid: Bool[Array, "S *b"],
    q_data: Float[Array, "K *b"],
) -> Float[Array, "K *b"]:
    """Return the log-sum-exp of Q - log μ over sampled actions, minus the data's value.

    With actions a drawn from densities μ, the mean of exp(Q(a) - log μ(a)) estimates the integral
    of exp Q over all actions (Kumar et al. 2020, arXiv 2006.04779, appendix F). The sum in its
    place adds a constant.

    Parameters
    ----------
    q_samples, log_density
        Values of S sampled actions by each of the K critics, and the log-density of each action
        under the distribution that it was drawn from.
    valid
        Samples that count; at least one in each place.
    q_data
        Values of the data's actions, by the same K critics.
    """
    weighted = jnp.where(valid, q_samples - log_density, -1e9)
    return jax.nn.logsumexp(weighted, axis=1) - q_data


def cross_entropy(
    logits: Float[Array, "T N A"],
    action: Int[Array, "T N"],
    legal_actions: Bool[Array, "T N A"],
) -> Float[Array, "T N"]:
    """Return -log π(a | o) of the data's actions; π is normalised over legal actions."""
    return -distributions.categorical(logits, legal_actions).log_prob(action)


def cloning_loss(
    logits: Float[Array, "B T N A"], batch: Sequence, agents: Bool[Array, "B T N"] | None = None
) -> Float[Array, ""]:
    """Return the mean `cross_entropy` of live agents, or of other given ones."""
    view = batch.view_tm1
    losses = jax.vmap(cross_entropy)(logits, batch.action, view.legal_actions)
    counts = batch.mask[..., None] & (view.alive if agents is None else agents)
    return masked_mean(losses, counts, batch.weight)


def softmax_weights(
    x: Float[Array, "B *rest"],
    mask: Bool[Array, "B *rest"],
    temperature: Scalar,
    weight: Float[Array, "B"] | Float[Array, "B T"] | None = None,
) -> Float[Array, "B *rest"]:
    """Return the softmax of x / temperature over the batch axis, scaled to a mean of 1 on the mask.

    The batch approximates the data's distribution of states and actions, so the normaliser of the
    implicit policy need not be learned (Yang et al. 2021, arXiv 2106.03400, eq. 9). Of few samples
    it is too small: in small batches, and for agents that are seldom alive, the weights differ less
    than at the same temperature in large ones. The mean counts each sample by its ``weight``, as
    `masked_mean` does. No gradient flows through the weights.
    """
    logits = jnp.where(mask, x / temperature, -jnp.inf)
    nonempty = mask.any(axis=0, keepdims=True)
    logits = jnp.where(nonempty, logits, 0.0)
    if weight is None:
        weights = jax.nn.softmax(logits, axis=0) * mask.sum(axis=0, keepdims=True)
    else:
        counts = mask * weight.reshape(weight.shape + (1,) * (mask.ndim - weight.ndim))
        weights = jnp.exp(logits - logits.max(axis=0, keepdims=True))
        total = (counts * weights).sum(axis=0, keepdims=True)
        weights *= counts.sum(axis=0, keepdims=True) / jnp.maximum(total, _TINY)
    return jax.lax.stop_gradient(weights * mask)


# ---------------------------------------------------------------------- stationary distributions


def weighted_mean(x: Float[Array, "*b"], weight: Float[Array, "*b"]) -> Float[Array, ""]:
    """Return the mean of x by weights, which need not add up to one; 0 if all are 0.

    Entries of x with the weight 0 may be NaN.
    """
    terms = jnp.where(weight > 0, x, 0.0) * weight
    return terms.sum() / jnp.maximum(weight.sum(), _TINY)


def soft_maximum(
    x: Float[Array, "*b"], weight: Float[Array, "*b"], temperature: Scalar
) -> Float[Array, ""]:
    """Return α log Σ w exp(x / α), with the temperature α.

    Its gradient is a distribution over the entries. Entries with the weight 0 may be NaN. Without
    any weight it is 0.
    """
    exponents = jnp.where(weight > 0, x / temperature, 0.0)
    top = jax.lax.stop_gradient(exponents.max(where=weight > 0, initial=-1e30))
    total = (weight * jnp.exp(jnp.where(weight > 0, exponents - top, 0.0))).sum()
    maximum = temperature * (jnp.log(jnp.maximum(total, _TINY)) + top)
    return jnp.where((weight > 0).any(), maximum, 0.0)


def divergence(
    log_probs: Float[Array, "*b A"], data_log_probs: Float[Array, "*b A"]
) -> Float[Array, "*b"]:
    """Return KL(π ‖ π^D) of a policy from a model of the data, summed over all actions.

    The model's log-probabilities are at least `LEAST_LOG_PROB`.
    """
    gaps = log_probs - jnp.maximum(data_log_probs, LEAST_LOG_PROB)
    return (jnp.exp(log_probs) * gaps).sum(-1)


def probability_ratios(
    log_prob: Float[Array, "*b N"],
    data_log_prob: Float[Array, "*b N"],
    mask: Bool[Array, "*b N"],
    largest: Scalar,
) -> Float[Array, "*b"]:
    """Return how much likelier the actions of the masked agents are than in the data.

    Parameters
    ----------
    log_prob, data_log_prob
        Log-probabilities of each agent's action under its policy, and under a model of the data,
        which are at least `LEAST_LOG_PROB`.
    mask
        The agents that count.
    largest
        Bound of the ratios.
    """
    ratio = log_prob - jnp.maximum(data_log_prob, LEAST_LOG_PROB)
    return jnp.exp(jnp.minimum(jnp.where(mask, ratio, 0.0).sum(-1), jnp.log(largest)))


def soft_chi_square_ratio(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Return the ratio of distributions that the soft χ² divergence gives to an advantage x.

    It is x + 1 for positive x, and exp(x) for negative x: the inverse of the derivative of the
    divergence's function f (Lee et al. 2021, "OptiDICE", arXiv 2106.10783).
    """
    return jnp.where(x < 0, jnp.exp(jnp.minimum(x, 0.0)), x + 1)


def soft_chi_square_conjugate(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Return the convex conjugate of the soft χ² divergence, whose derivative is the ratio.

    It is ½ x² + x for positive x, and exp(x) - 1 for negative x; see `soft_chi_square_ratio`.
    """
    return jnp.where(x < 0, jnp.exp(jnp.minimum(x, 0.0)) - 1, 0.5 * x**2 + x)


# ---------------------------------------------------------------------- policy gradients


def generalised_advantages(
    r_t: Float[Array, "T"],
    discount_t: Float[Array, "T"],
    last_t: Bool[Array, "T"],
    v_tm1: Float[Array, "T"],
    v_t: Float[Array, "T"],
    lambda_: Scalar,
) -> Float[Array, "T"]:
    """Return generalised advantages over an interval of time that may hold several episodes.

    δ_t = r_t + discount_t v_t − v_tm1, and A_tm1 = δ_t + λ discount_t (1 − last_t) A_t
    (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

    Parameters
    ----------
    r_t
        Rewards.
    discount_t
        γ, and 0 where the agent terminated. A truncated step keeps its discount: it bootstraps.
    last_t
        Whether the episode ended, by either cause: no advantage flows back across it.
    v_tm1, v_t
        Values of the views before and after the steps. At an episode's end, ``v_t`` is the value of
        its final view, not of the next row, which belongs to another episode.
    lambda_
        λ, in [0, 1].
    """
    return _decayed_sums(r_t + discount_t * v_t - v_tm1, lambda_ * discount_t * ~last_t)


def _decayed_sums(x_t: Float[Array, "T"], decay_t: Float[Array, "T"]) -> Float[Array, "T"]:
    """Return y_t = x_t + decay_t y_t+1, computed backwards."""

    def step(total: Array, xs: tuple[Array, Array]) -> tuple[Array, Array]:
        x, decay = xs
        total = x + decay * total
        return total, total

    _, totals = jax.lax.scan(step, jnp.zeros((), x_t.dtype), (x_t, decay_t), reverse=True)
    return totals


def vtrace(
    r_t: Float[Array, "T"],
    discount_t: Float[Array, "T"],
    last_t: Bool[Array, "T"],
    v_tm1: Float[Array, "T"],
    v_t: Float[Array, "T"],
    log_ratio_tm1: Float[Array, "T"],
    lambda_: Scalar,
) -> tuple[Float[Array, "T"], Float[Array, "T"]]:
    """Return V-trace's errors E of values, and its advantages A, of steps of another policy.

    Values should be v_tm1 + E.
    δ_t = ρ_tm1 (r_t + discount_t v_t − v_tm1), E_tm1 = δ_t + λ ρ_tm1 discount_t (1 − last_t) E_t,
    and A_tm1 = ρ_tm1 (r_t + discount_t (v_t + λ (1 − last_t) E_t) − v_tm1)
    (Espeholt et al. 2018, "IMPALA", arXiv 1802.01561, eq. 1 and section 4.2, with the thresholds
    ρ̄ and c̄ of 1). If both policies are the same, both results are `generalised_advantages`.

    Parameters
    ----------
    r_t, discount_t, last_t, v_tm1, v_t, lambda_
        As for `generalised_advantages`.
    log_ratio_tm1
        Logarithm of how much likelier the action taken is under the policy that learns than under
        the one that took it. ρ is this ratio, and at most 1.
    """
    ratio_tm1 = jnp.exp(jnp.minimum(log_ratio_tm1, 0.0))
    delta_t, decay_t = r_t + discount_t * v_t - v_tm1, lambda_ * discount_t * ~last_t
    error_tm1 = _decayed_sums(ratio_tm1 * delta_t, ratio_tm1 * decay_t)
    error_t = jnp.append(error_tm1[1:], 0.0)
    return error_tm1, ratio_tm1 * (delta_t + decay_t * error_t)


def clipped_surrogate(
    log_prob_tm1: Float[Array, "*b"],
    behaviour_log_prob_tm1: Float[Array, "*b"],
    advantage_tm1: Float[Array, "*b"],
    epsilon: Scalar,
) -> Float[Array, "*b"]:
    """Return the loss of each step under the clipped objective of PPO.

    −min(ρ A, clip(ρ, 1 − ε, 1 + ε) A), with ρ the ratio of the probabilities of the action taken
    (Schulman et al. 2017, arXiv 1707.06347, eq. 7).
    """
    ratio = jnp.exp(log_prob_tm1 - behaviour_log_prob_tm1)
    clipped = jnp.clip(ratio, 1 - epsilon, 1 + epsilon)
    return -jnp.minimum(ratio * advantage_tm1, clipped * advantage_tm1)


def value_error(
    v_tm1: Float[Array, "*b"],
    target_tm1: Float[Array, "*b"],
    behaviour_v_tm1: Float[Array, "*b"] | None,
    epsilon: Scalar,
    huber: float | None = None,
) -> Float[Array, "*b"]:
    """Return the loss of each value in proximal policy optimisation.

    Parameters
    ----------
    v_tm1, target_tm1
        Values and what they should be.
    behaviour_v_tm1
        Values before the update. The loss is then the larger of that of the value and that of the
        value clipped to within ε of them, so no gradient moves a value further away than ε. None
        for no clipping.
    epsilon
        ε.
    huber
        Error δ beyond which the loss is linear, δ (abs(error) − δ / 2); None for ½ error².
    """

    def penalty(v: Float[Array, "*b"]) -> Float[Array, "*b"]:
        error = v - target_tm1
        return 0.5 * error**2 if huber is None else optax.losses.huber_loss(error, delta=huber)

    if behaviour_v_tm1 is None:
        return penalty(v_tm1)
    clipped = behaviour_v_tm1 + jnp.clip(v_tm1 - behaviour_v_tm1, -epsilon, epsilon)
    return jnp.maximum(penalty(v_tm1), penalty(clipped))


# ---------------------------------------------------------------------- actors and critics


def smoothed_actions(
    key: PRNGKeyArray, action: Float[Array, "*b A"], std: Scalar, limit: Scalar
) -> Float[Array, "*b A"]:
    """Return target actions with clipped noise, so that a critic's narrow peaks are averaged out.

    clip(a + clip(ε, −limit, limit), −1, 1), ε ~ N(0, std²) (Fujimoto et al. 2018, arXiv 1802.09477,
    eq. 14).
    """
    noise = jnp.clip(std * jax.random.normal(key, action.shape), -limit, limit)
    return jnp.clip(action + noise, -1.0, 1.0)


def soft_values(
    q: Float[Array, "*b A"],
    log_probs: Float[Array, "*b A"],
    temperature: float | Float[Array, "*#b"],
) -> Float[Array, "*b"]:
    """Return Σ_a π(a) (Q(a) − α log π(a)), the value of a policy with its entropy.

    The sum over the actions is exact (Christodoulou 2019, arXiv 1910.07207, eq. 10). Illegal
    actions have the probability 0.
    """
    weight = jnp.asarray(temperature)[..., None]
    return (jnp.exp(log_probs) * (q - weight * log_probs)).sum(-1)


def temperature_loss(
    log_temperature: Float[Array, "*#b"],
    entropy: Float[Array, "*b"],
    target_entropy: Float[Array, "*#b"],
) -> Float[Array, "*b"]:
    """Return α (H − target), whose gradient reaches only α.

    Minimising it increases the temperature while the policy has less entropy than the target
    (Haarnoja et al. 2018, arXiv 1812.05905, eq. 18).
    """
    return jnp.exp(log_temperature) * jax.lax.stop_gradient(entropy - target_entropy)
