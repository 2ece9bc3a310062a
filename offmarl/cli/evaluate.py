"""``offmarl evaluate``."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from offmarl.cli.output import Report
from offmarl.cli.returns import returns_report
from offmarl.errors import OptionError
from offmarl.tracking import acting_of, labelled, read_run


def evaluate(
    run: Annotated[Path, Positional, arg(metavar="RUN")],
    env: str | None = None,
    episodes: int = 320,
    seed: int = 0,
    act: Literal["as-trained", "greedy", "sample"] = "as-trained",
    render: Path | None = None,
    program: Path | None = None,
) -> Report:
    """Play episodes with a trained policy, for each of its training seeds.

    Parameters
    ----------
    run
        Directory of a run.
    env
        Environment to play in; by default the one that the run's data was recorded in.
    episodes
        Number of episodes for each training seed.
    seed
        Random seed of the episodes.
    act
        greedy takes the best action, sample draws it from the policy, and as-trained does what the
        run's own evaluations did.
    render
        File for an episode of the first training seed: GIF or MP4, or PNG for its middle step.
    program
        Python file of the program that trained the run, if the program is not one of offmarl's. The
        file's code is run.
    """
    if episodes < 1:
        raise OptionError(f"--episodes must be at least 1: got {episodes}.")
    record = read_run(run)
    seeds = record["seeds"]
    from offmarl.cli import policies  # brings in JAX, which --help does without
    from offmarl.programs import load_policy
    from offmarl.report.render import save

    greedy = None if act == "as-trained" else act == "greedy"
    loaded = {trained: load_policy(run, trained, greedy, program) for trained in seeds}
    first = loaded[seeds[0]]
    environment = policies.make_environment(env, first)
    if render:
        save(policies.watch(environment, first, seed), render)
    returns = policies.play(environment, loaded, episodes, seed)
    acting = acting_of(record if greedy is None else {"greedy": greedy})
    title = f"{labelled(first.name, acting)} of {run} in {environment.spec.name}: returns"
    about = {"run": run, "env": environment.spec.name, "acting": acting}
    return returns_report(title, about, returns)
