"""Windows that training draws: what they are made of, what they cost, and what is learned.

    python benchmarks/windows.py [--only shares|sampling|updates|learning] [--steps 1000000]
        [--out benchmarks/results/sampling.json]

Three ways to draw windows of 20 steps, on episodes of 8 and of 50 steps, as many of each:

packed    as offmarl does: from episodes laid end to end, with resets of the memory
overhang  of one episode each, and may begin before it or stop after it, with a mask
full      of one episode each, and inside it; a shorter episode gives one masked window

"shares" enumerates all windows. "sampling" times batches beside flashbax's trajectory buffer, which
holds the same leaves without next views: one jitted call a batch, and in a loop under jit that
keeps the last batch. Run it on one core with ``taskset -c 0``. "updates" times updates of QMIX+CQL.
"learning" makes equal numbers of updates by each: cloning without memory of actions that differ
between short and long episodes, and values where the reward is at the end of an episode.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import flashbax
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Int, PRNGKeyArray

sys.path.insert(0, str(Path(__file__).parents[1]))

import offmarl
from benchmarks.results import Row, measured, write
from offmarl import vault
from offmarl.networks import PolicyConfig, agent_network, unroll_batch
from offmarl.programs import DatasetStatistics, hyperparameters, registry
from offmarl.programs.program import structure
from offmarl.replay import Replay, Windows
from offmarl.replay.fields import fields_of
from offmarl.replay.packing import layout_of, pack
from offmarl.replay.starts import Uniform
from offmarl.types import Discrete, EnvSpec, FinalObservations, Sequence, Transition, View

SHORT, LONG, WINDOW, GAMMA = 8, 50, 20, 0.95
SMALL = EnvSpec("ends", 2, 4, 4, Discrete(2))
SMAX = EnvSpec("smax", 8, 205, 192, Discrete(14))
BYTES_1360 = EnvSpec("1360 bytes", 8, 35, 20, Discrete(5))


@dataclass(frozen=True)
class Args:
    only: Literal["shares", "sampling", "updates", "learning"] | None = None
    """Which of the parts; all by default."""
    steps: int = 1_000_000
    """Steps that batches are sampled from."""
    draws: int = 50
    """Batches, or updates, of a measurement."""
    rounds: int = 7
    """Measurements of each way, in turn."""
    updates: int = 1000
    """Updates of the learning."""
    seeds: int = 3
    """Seeds of the learning."""
    out: Path | None = None
    """File of results that takes the rows of the sampling."""


# ---------------------------------------------------------------------------------- ways to draw


@partial(jax.tree_util.register_dataclass, data_fields=["replay", "starts", "own"], meta_fields=[])
@dataclass(frozen=True)
class OneEpisode:
    """Windows of one episode each: all else in them is masked out."""

    replay: Replay
    starts: Int[Array, "M"]
    """The slots that windows start at."""
    own: Int[Array, "M"]
    """The episode of each."""

    def sample(self, key: PRNGKeyArray) -> Sequence:
        batch = self.replay.windows.batch_size
        return self.at(jax.random.randint(key, (batch,), 0, len(self.starts)))

    def at(self, number: Int[Array, "B"]) -> Sequence:
        slots = self.replay.at(self.starts[number] % self.replay.num_slots)
        mine = slots.episode[:, :-1] == self.own[number][:, None]
        return slots._replace(mask=slots.mask & mine)


def ways(replay: Replay, lengths: np.ndarray) -> dict[str, Any]:
    """Return what draws from the same rows in each way."""
    offsets = np.cumsum(lengths + 1) - (lengths + 1)
    before = WINDOW - 1

    def windows(first: np.ndarray, count: np.ndarray) -> OneEpisode:
        starts = np.concatenate([a + np.arange(n) for a, n in zip(first, count, strict=True)])
        episodes = np.repeat(np.arange(len(lengths)), count)
        return OneEpisode(replay, jnp.asarray(starts), jnp.asarray(episodes))

    return {
        "packed": replay,
        "overhang": windows(offsets - before, lengths + before),
        "full": windows(offsets, np.maximum(lengths - WINDOW, 0) + 1),
    }


def write_episodes(
    path: Path, pairs: int, action_of: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> Any:
    """Write episodes of both lengths in turn, with a reward for the right joint action at the end.

    Agents see which action is right, and how many steps are left. ``action_of`` returns the actions
    of agents in episodes of some lengths with some right actions.
    """
    rng = np.random.default_rng(0)
    lengths = np.tile([SHORT, LONG], pairs)
    steps = int(lengths.sum())
    length, right = np.repeat(lengths, lengths), np.repeat(rng.integers(0, 2, 2 * pairs), lengths)
    left = np.concatenate([np.arange(n, 0, -1) for n in lengths])
    last = left == 1
    action = action_of(length, rng.random((steps, 2)))
    won = last & (action == right[:, None]).all(-1)

    def view(left: np.ndarray, right: np.ndarray) -> View:
        seen = np.stack([right, 1 - right, left / LONG, left == 1], -1).astype(np.float32)
        agents = np.repeat(seen[:, None], 2, 1)
        count = len(left), 2
        return View(agents, seen, np.ones((*count, 2), bool), np.ones(count, bool))

    both = np.repeat(last[:, None], 2, 1)
    transition = Transition(
        view=view(left, right),
        action=action.astype(np.int32),
        reward=np.repeat(won[:, None], 2, 1).astype(np.float32),
        terminated=both,
        truncated=np.zeros_like(both),
        last=last,
        behaviour_log_prob=np.zeros((steps, 2), np.float32),
        policy_id=np.zeros(steps, np.int32),
    )
    ends = np.flatnonzero(last)
    finals = FinalObservations(0 * ends, ends, view(0 * ends, right[ends]))
    with vault.create(path, SMALL, rows=1) as writer:
        writer.append(jax.tree.map(lambda x: x[None], transition), finals)
    return offmarl.open(path)


# ---------------------------------------------------------------------------------- shares


def report_shares(directory: Path) -> None:
    dataset = write_episodes(directory / "shares.vlt", 50, lambda _length, chance: chance < 0.5)
    lengths = dataset.episodes.length
    print(f"{'windows of ' + str(WINDOW):22} slots used  step error  last steps  short episodes")
    short = np.mean(np.repeat(lengths, lengths) == SHORT)
    print(f"{'the data':22} {'':10} {'':11} {len(lengths) / lengths.sum():11.2%} {short:15.2%}")
    for name, way in ways(dataset.replay(1, WINDOW), lengths).items():
        count = way.num_slots if name == "packed" else len(way.starts)
        windows = jax.device_get(jax.jit(lambda way, n: way.at(n))(way, jnp.arange(count)))
        episode, at = windows.episode[:, :-1][windows.mask], windows.time[:, :-1][windows.mask]
        _, counts = np.unique(episode * LONG + at, return_counts=True)
        error = np.abs(counts / counts.mean() - 1).max()
        last = np.mean(at == lengths[episode] - 1)
        shares = f"{windows.mask.mean():10.1%} {error:11.2%} {last:11.2%}"
        print(f"{name:22} {shares} {np.mean(lengths[episode] == SHORT):15.2%}")


# ---------------------------------------------------------------------------------- time


def scan(body: Callable[[Any, Any], Array], count: int) -> Callable[[Any, Any], Array]:
    """Run a body for many keys in one program, keeping something of each."""

    @jax.jit
    def run(data: Any, key: Any) -> Array:
        def step(total: Array, key: Any) -> tuple[Array, None]:
            return total + body(data, key), None

        return jax.lax.scan(step, 0.0, jax.random.split(key, count))[0]

    return run


def calls(sample: Callable[[Any, Any], Any], count: int) -> Callable[[Any, Any], Any]:
    """Sample a batch in each of some calls."""
    jitted = jax.jit(sample)

    def run(data: Any, key: Any) -> Any:
        for subkey in list(jax.random.split(key, count)):
            batch = jax.block_until_ready(jitted(data, subkey))
        return batch

    return run


def keeping_last(sample: Callable[[Any, Any], Any], count: int) -> Callable[[Any, Any], Any]:
    """Sample batches in a loop whose state is the last one, so that each is made whole."""

    @jax.jit
    def run(data: Any, key: Any) -> Any:
        first, *_ = keys = jax.random.split(key, count)
        body = lambda _, key: (sample(data, key), None)  # noqa: E731
        return jax.lax.scan(body, sample(data, first), keys[1:])[0]

    return run


def total(tree: Any) -> Array:
    return sum(leaf.sum().astype(jnp.float32) for leaf in jax.tree.leaves(tree))


def in_turn(runs: dict[str, Callable[[], Any]], rounds: int, count: int) -> dict[str, float]:
    """Return the median microseconds of each."""
    by_name: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if number:  # the first compiles
                by_name[name].append((time.perf_counter() - start) / count * 1e6)
    return {name: float(np.median(times)) for name, times in by_name.items()}


def random_replay(spec: EnvSpec, steps: int, batch: int) -> tuple[Replay, np.ndarray]:
    """Return noise in episodes that have the lengths in turn."""
    lengths = np.tile([SHORT, LONG], max(steps // (SHORT + LONG), 1))
    windows = Windows(batch, WINDOW)
    layout, rng = layout_of(spec, windows), np.random.default_rng(0)
    slots = int((lengths + 1).sum())
    noise = rng.normal(size=4096).astype(np.float32)
    fields = {
        name: np.resize(noise, (slots + WINDOW, *leaf.shape)).astype(leaf.dtype)
        for name, leaf in fields_of(spec, windows).items()
        if leaf.dtype == "float32"
    }
    fields["time"] = np.resize(np.concatenate([np.arange(n + 1) for n in lengths]), slots + WINDOW)
    fields["episode"] = np.resize(np.repeat(np.arange(len(lengths)), lengths + 1), slots + WINDOW)
    rows = jax.tree.map(lambda x: jnp.array(x, copy=True), pack(fields, layout, slots + WINDOW))
    return Replay(rows, spec, windows, Uniform(slots), None), lengths


def leaves_of(spec: EnvSpec) -> dict[str, Array]:
    """Return a step without next views, as flashbax's buffer holds it."""
    agents, size = spec.num_agents, spec.action_size
    return {
        "observation": jnp.zeros((agents, spec.observation_size)),
        "state": jnp.zeros(spec.state_size),
        "legal_actions": jnp.zeros((agents, size), bool),
        "alive": jnp.zeros(agents, bool),
        "action": jnp.zeros(agents, jnp.int32),
        "reward": jnp.zeros(agents),
        "terminated": jnp.zeros(agents, bool),
        "truncated": jnp.zeros(agents, bool),
        "behaviour_log_prob": jnp.zeros(agents),
        "last": jnp.zeros((), bool),
    }


def report_sampling(args: Args) -> list[Row]:
    spec, rows = BYTES_1360, []
    for batch in (32, 256):
        replay, lengths = random_replay(spec, args.steps, batch)
        buffer = flashbax.make_trajectory_buffer(
            add_batch_size=1,
            max_length_time_axis=args.steps,
            min_length_time_axis=WINDOW,
            sample_batch_size=batch,
            sample_sequence_length=WINDOW,
            period=1,
        )
        state = buffer.init(leaves_of(spec))
        state = state.replace(is_full=jnp.array(True))
        sampled = {
            name: (lambda way, key: way.sample(key), way)
            for name, way in ways(replay, lengths).items()
        }
        sampled["flashbax"] = lambda s, k, b=buffer: b.sample(s, k).experience, state
        took = {}
        for measure, make in (("one a call", calls), ("in a loop", keeping_last)):
            runs = {
                name: partial(make(sample, args.draws), data, jax.random.key(1))
                for name, (sample, data) in sampled.items()
            }
            took[measure] = each = in_turn(runs, args.rounds, args.draws)
            times = ", ".join(f"{name} {micro:.0f}" for name, micro in each.items())
            ratio = each["packed"] / each["flashbax"]
            print(f"{batch} windows {measure}, us: {times}; packed / flashbax {ratio:.2f}")
        rows.append(row_of(batch, list(took.values())))
    return rows


def row_of(batch: int, took: list[dict[str, float]]) -> Row:
    """Return what results hold of batches: one a call, and in a loop."""
    ratios = [each["packed"] / each["flashbax"] for each in took]
    ours, theirs = (
        ", ".join(f"{each[name]:,.0f}" for each in took) for name in ("packed", "flashbax")
    )
    return measured(
        __file__,
        f"{batch} windows of {WINDOW} on the device: one batch a call, in a loop",
        f"{ours} µs",
        peer=f"flashbax {theirs}",
        ratio=f"{', '.join(f'{ratio:.2f}' for ratio in ratios)} of its time",
        aim="0.5",
        met=max(ratios) <= 0.5,
    )


def report_updates(args: Args) -> None:
    program, hyper = make("qmix_cql", SMAX)
    replay, lengths = random_replay(SMAX, 20_000, 32)
    state = jax.jit(program.init)(jax.random.key(0), hyper)

    def body(data: tuple[Any, Any], key: PRNGKeyArray) -> Array:
        sample_key, update_key = jax.random.split(key)
        batch = data[0].sample(sample_key)
        after, _ = program.stages[0].update(data[1], batch, update_key, hyper)
        return total(after.params)

    runs = {
        name: partial(scan(body, 5), (way, state), jax.random.key(1))
        for name, way in ways(replay, lengths).items()
    }
    took = in_turn(runs, args.rounds, 5)
    used = {"packed": 58 / 60, "overhang": 58 / 96, "full": None}
    for name, micro in took.items():
        share = used[name]
        steps = f", {share * 32 * WINDOW / micro * 1e6:.0f} steps/s" if share else ""
        print(f"QMIX+CQL, SMAX 8m, {name:9} {micro / 1e3:6.1f} ms an update{steps}")


# ---------------------------------------------------------------------------------- learning


def make(name: str, spec: EnvSpec, **options: Any) -> tuple[Any, Any]:
    baseline = registry.load("baseline", name)
    args = baseline.Args(vault=Path(), updates=1, **options)
    made = baseline.make(spec, structure(args), DatasetStatistics(None))
    return made, hyperparameters(args)


def without_memory(batch: Sequence) -> Sequence:
    """Let each step be the first of its episode, and hide the time."""
    seen = batch.view.observation * jnp.array([1.0, 1.0, 0.0, 0.0])
    view = batch.view._replace(observation=seen)
    return batch._replace(view=view, first=jnp.ones_like(batch.first))


def learn(program: Any, hyper: Any, way: Any, updates: int, seed: int, clone: bool) -> Any:
    update = program.stages[0].update

    @jax.jit
    def run(way: Any, key: PRNGKeyArray) -> Any:
        def step(state: Any, key: PRNGKeyArray) -> tuple[Any, None]:
            sample_key, update_key = jax.random.split(key)
            batch = way.sample(sample_key)
            batch = without_memory(batch) if clone else batch
            return update(state, batch, update_key, hyper)[0], None

        init_key, key = jax.random.split(key)
        state = program.init(init_key, hyper)
        return jax.lax.scan(step, state, jax.random.split(key, updates))[0]

    return run(way, jax.random.key(seed))


def report_learning(args: Args, directory: Path) -> None:
    cloned = write_episodes(directory / "cloned.vlt", 100, differs)
    valued = write_episodes(directory / "valued.vlt", 100, lambda _length, chance: chance < 0.5)
    options = {"hidden": 32, "learning_rate": 3e-3}
    clone = make("bc", SMALL, schedule="constant", **options)
    options |= {"cql_weight": 0.0, "bootstrap": "greedy"}
    values = make("iql_cql", SMALL, gamma=GAMMA, target_every=20, **options)
    names = "bc: P(action 1) less the data's", "iql: error of values, short", "long", "right ends"
    print(f"{args.updates} updates, {args.seeds} seeds    " + "   ".join(names))
    for name in ("packed", "overhang", "full"):
        rows = []
        for seed in range(args.seeds):
            scores = []
            for dataset, (program, hyper), judge in (
                (cloned, clone, frequency),
                (valued, values, value_errors),
            ):
                way = ways(dataset.replay(32, WINDOW), dataset.episodes.length)[name]
                state = learn(program, hyper, way, args.updates, seed, judge is frequency)
                scores += judge(program.policy_params(state), dataset)
            rows.append(scores)
        mean, std = np.mean(rows, 0), np.std(rows, 0)
        cells = (f"{m:+.4f} ± {s:.4f}" for m, s in zip(mean, std, strict=True))
        print(f"{name:10} " + "   ".join(cells))


def differs(length: np.ndarray, chance: np.ndarray) -> np.ndarray:
    """Take action 1 mostly in short episodes, and rarely in long ones."""
    return chance < np.where(length == SHORT, 0.9, 0.1)[:, None]


def outputs_of(kind: str, params: Any, episodes: Sequence) -> Array:
    """Return the outputs of a network that has seen whole episodes so far."""
    network = agent_network(replace(PolicyConfig("recurrent", hidden=32), head=kind), SMALL)
    seen = episodes.view_tm1.observation
    return unroll_batch(network, params, seen, episodes.first[:, :-1])


def frequency(params: Any, dataset: Any) -> list[float]:
    episodes = without_memory(dataset.whole_episodes(np.arange(200)))
    logits = outputs_of("softmax", params, episodes)
    likely = jax.nn.softmax(logits)[..., 1][episodes.mask].mean()
    return [float(likely - episodes.action[episodes.mask].mean())]


def value_errors(params: Any, dataset: Any) -> list[float]:
    """Errors against ½ γ^k, k steps before the end: the other agent is right half the time."""
    episodes = dataset.whole_episodes(np.arange(200))
    q = outputs_of("q", params.network, episodes)
    left = np.rint(np.asarray(episodes.view_tm1.observation)[..., 2] * LONG)
    error = np.abs(np.asarray(q).max(-1) - 0.5 * GAMMA ** (left - 1))
    mask = np.asarray(episodes.mask)
    short = mask.sum(-1) == SHORT
    right = 1 - np.asarray(episodes.view_tm1.observation)[..., 1]
    correct = (np.asarray(q).argmax(-1) == right)[mask & (left[..., 0] == 1)]
    return [error[short][mask[short]].mean(), error[~short][mask[~short]].mean(), correct.mean()]


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory() as name:
        if args.only in (None, "shares"):
            report_shares(Path(name))
        if args.only in (None, "sampling"):
            rows = report_sampling(args)
            if args.out:
                write(args.out, rows)
        if args.only in (None, "updates"):
            report_updates(args)
        if args.only in (None, "learning"):
            report_learning(args, Path(name))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
