"""Why QMIX diverges, and what keeps it from it: one program, one change at a time.

Each variant is trained with the same seeds, and evaluated during training by its best actions. A
line shows the return (the sum over the agents for MPE, as its results are stated), Q_tot on the
batches, and the interval that the rewards seen so far allow for it, [min, max] / (1 - γ). Variants
of Q_tot outside of it have diverged::

    python benchmarks/ablation.py --env jaxmarl/mpe/simple_spread_v3 --total-steps 100000
    python benchmarks/ablation.py --variants init=flax "init=flax gamma=0.9" td_lambda=0.5
    python benchmarks/ablation.py --program vdn --variants "learning_rate=5e-4 schedule=linear"

A variant is a list of changes. All arguments of the program can be changed, such as gamma,
learning_rate, schedule, tau, target_every, length, burn_in, reward_scale and max_grad_norm, and:

    init=flax|SCALE      initialisation of the mixer: Flax's own, or orthogonal of some scale
    state=normalised     the mixer sees the state with mean 0 and standard deviation 1 over entries
    truncation=ends      episodes that a time limit ends count as terminated: no final state is
                         bootstrapped from (JaxMARL's scripts do this)
    windows=episodes     windows begin where episodes do, and never inside
    optimiser=radam      rectified Adam, as in JaxMARL's scripts
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from offmarl import envs
from offmarl.evaluation import evaluate
from offmarl.networks import make_mixer
from offmarl.programs import hyperparameters, registry
from offmarl.programs.experience.windows import WindowStart, windows_at
from offmarl.programs.learning import q_learning
from offmarl.programs.runs.loop import Schedule, collect

SPREAD = (
    "",
    "init=flax",
    "init=flax truncation=ends",
    "init=flax state=normalised",
    "init=flax windows=episodes length=26 batch_size=12",
    "init=flax gamma=0.9",
    "init=flax tau=0.01 target_every=1",
    "init=flax max_grad_norm=0.5",
    "init=flax learning_rate=2e-4",
    "init=flax optimiser=radam",
    "init=flax reward_scale=0.1",
)


@dataclass(frozen=True)
class Args:
    env: str = "jaxmarl/mpe/simple_spread_v3"
    """Environment."""
    program: str = "qmix"
    """Recorder: qmix, vdn or iql."""
    total_steps: int = 100_000
    """Environment steps of each run."""
    seeds: int = 1
    """Number of seeds of each variant, from --seed on."""
    seed: int = 0
    """The first seed."""
    evaluations: int = 4
    """Evaluations during training."""
    episodes: int = 128
    """Episodes of an evaluation."""
    scale: float | None = None
    """What returns are multiplied by; by default 3 for simple_spread, and 1 for others."""
    win: float | None = None
    """Show the share of episodes with a return above this: 1.5 for SMAX, where a lost battle gives
    at most 1, for the damage done, and a won one 1 more."""
    variants: tuple[str, ...] = SPREAD
    """Variants, each a text of NAME=VALUE separated by spaces."""


def train(args: Args, changes: dict[str, str], seed: int) -> Iterator[tuple[int, float, Any]]:
    """Yield the steps done, the greedy return and the metrics at each evaluation."""
    module = registry.load("recorder", args.program)
    options = {name: _value(text) for name, text in changes.items() if name not in _PATCHES}
    learner_args = module.Args(env=args.env, total_steps=args.total_steps, seed=seed, **options)
    env = envs.make(args.env)
    with patched(module, changes):
        program, hyper = module.make(env.spec, learner_args, env), hyperparameters(learner_args)
        state = jax.jit(program.init)(jax.random.key(seed), hyper)
        count = args.total_steps // (learner_args.num_envs * learner_args.num_steps)
        play = jax.jit(partial(evaluate, env, program.policy(True)), static_argnums=2)
        schedule = Schedule(count, count, 1, (0,))
        key = jax.random.fold_in(jax.random.key(seed), 1000)
        work = collect(program, [state], [hyper], [key], schedule, 0, [None])
        for done, (state,), (metrics,) in work:
            if done % max(count // args.evaluations, 1) == 0 or done == count:
                returns = play(program.policy_params(state), jax.random.key(7), args.episodes)
                low, high = _allowed(state.capture, learner_args)
                wins = np.nan if args.win is None else float((returns.returns > args.win).mean())
                yield (
                    done * learner_args.num_envs * learner_args.num_steps,
                    float(returns.returns.mean()),
                    {name: float(x) for name, x in metrics.items()}
                    | {"low": low, "high": high, "wins": wins},
                )


def _allowed(capture: Any, own: Any) -> tuple[float, float]:
    """Return the interval that Q_tot can lie in by the rewards in the buffer."""
    reward = capture.buffer.experience.transition.reward[:, : int(capture.filled)].mean(-1)
    low, high = (float(x) / (1 - own.gamma) for x in (reward.min(), reward.max()))
    return min(low, 0.0), max(high, 0.0)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


# ---------------------------------------------------------------------------------- variants


@contextmanager
def patched(module: Any, changes: dict[str, str]) -> Iterator[None]:
    """Change the parts of a program that have no argument."""
    patches = [_PATCHES[name](module, value) for name, value in changes.items() if name in _PATCHES]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()


def _init(module: Any, value: str) -> Any:
    scale = None if value == "flax" else float(value)

    def make(*args: Any) -> Any:
        return replace(make_mixer(*args), init_scale=scale)

    return mock.patch.object(module, "make_mixer", make)


def _state(module: Any, _: str) -> Any:
    weights = module.mixing_weights

    def normalised(mixer: Any, params: Any, view: Any) -> Any:
        state = view.state - view.state.mean(-1, keepdims=True)
        state /= view.state.std(-1, keepdims=True) + 1e-5
        return weights(mixer, params, view._replace(state=state))

    return mock.patch.object(module, "mixing_weights", normalised)


def _truncation(module: Any, _: str) -> Any:
    loss = module.loss

    def ends(*args: Any) -> Any:
        *rest, batch = args
        return loss(*rest, batch._replace(terminated=batch.terminated | batch.truncated))

    return mock.patch.object(module, "loss", ends)


def _windows(_: Any, __: str) -> Any:
    return mock.patch.object(q_learning, "draw_windows", _draw_episodes)


def _draw_episodes(capture: Any, key: Any, batch: int, length: int, _burn_in: int) -> Any:
    """Draw windows that begin at the first step of an episode, or at the oldest step."""
    last = capture.buffer.experience.transition.last
    filled = capture.filled
    index = (capture.buffer.current_index - filled + jnp.arange(last.shape[1])) % last.shape[1]
    begins = jnp.roll(last[:, index], 1, axis=1).at[:, 0].set(True)
    begins &= jnp.arange(last.shape[1]) < filled
    place = jax.random.categorical(key, jnp.where(begins, 0.0, -jnp.inf).ravel(), shape=(batch,))
    row, age = jnp.divmod(place, last.shape[1])
    return windows_at(capture, WindowStart(row, age, jnp.zeros(batch, bool)), length)


def _optimiser(_: Any, __: str) -> Any:
    def radam(learning_rate: Any, max_grad_norm: Any) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(max_grad_norm), optax.radam(learning_rate))

    return mock.patch.object(q_learning, "clipped_adam", radam)


_PATCHES: dict[str, Callable[[Any, str], Any]] = {
    "init": _init,
    "state": _state,
    "truncation": _truncation,
    "windows": _windows,
    "optimiser": _optimiser,
}


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> None:
    scale = args.scale or (3.0 if "simple_spread" in args.env else 1.0)
    for variant in args.variants:
        changes = dict(part.split("=", 1) for part in variant.split())
        finals = []
        for seed in range(args.seed, args.seed + args.seeds):
            begun = time.monotonic()
            for steps, mean, returns in train(args, changes, seed):
                q = returns.get("q_tot", returns.get("q", np.nan))
                print(
                    f"{variant or 'defaults':45} seed {seed} {steps:8,}: return {scale * mean:8.2f}"
                    f"  q {q:8.2f} in [{returns['low']:.1f}, {returns['high']:.1f}]"
                    + (f"  wins {returns['wins']:.2f}" if args.win is not None else "")
                    + f"  td {returns['td_loss']:.3f}  norm {returns['grad_norm']:.2f}"
                    f"  {time.monotonic() - begun:.0f} s",
                    flush=True,
                )
            finals.append(scale * mean)
        if len(finals) > 1:
            print(f"{variant or 'defaults':45} mean of {len(finals)}: {np.mean(finals):.2f}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
