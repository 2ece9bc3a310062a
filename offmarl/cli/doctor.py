"""``offmarl doctor`` and ``completion``: the installation itself."""

import contextlib
import io
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable
from functools import reduce
from importlib import metadata
from typing import Annotated, Any, Literal, Union

import tyro
from huggingface_hub import constants, get_token
from tyro.conf import Positional, arg, subcommand

from offmarl._version import __version__
from offmarl.cli.output import Report, as_is, grid
from offmarl.cli.parse import JsonFlag, SettingsFile, options
from offmarl.hub import cache, client
from offmarl.programs import registry

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "flashbax",
    "tensorstore",
    "numpy",
    "huggingface_hub",
)

_FILES = {
    '[[ "$completions" ==': '[[ -z "$completions" || "$completions" ==',
    'COMPREPLY=($(compgen -f -- "$cur"))': "COMPREPLY=()",
    "complete -F": "complete -o default -F",
}
"""Parts of tyro's completion script, and what lets the shell complete all other arguments: they are
files or directories, which it completes best."""


def doctor() -> Report:
    """Check the installation and the connection to the hub."""
    import jax

    missing, no_devices = _missing_by_extra(), no_device()
    devices = (
        [no_devices] if no_devices else [f"{x.device_kind} ({x.platform})" for x in jax.devices()]
    )
    facts: dict[str, Any] = {
        "offmarl": __version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        **{name: _version(name) or "missing" for name in _PACKAGES},
        "devices": devices,
        "extras": {
            extra: f"lacks {', '.join(names)}" if names else "installed"
            for extra, names in missing.items()
        },
        "launchers": _launchers(),
        "cache": _cache(),
        "hub": {constants.ENDPOINT: client.problem() or "answers"},
        "token": "found" if get_token() else "none: public datasets only",
    }
    return Report(facts, grid({name: _in_words(fact) for name, fact in facts.items()}))


def _in_words(fact: Any) -> str:
    if isinstance(fact, dict):
        fact = [f"{name}: {value}" for name, value in fact.items()]
    return "\n".join(fact) if isinstance(fact, list) else str(fact)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def no_device() -> str:
    """Return why JAX has no device to use; an empty text if it has one."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition(" (set JAX")[0] or "there is none, or no plugin for it"
        names = os.environ.get("JAX_PLATFORMS", "")
        return f"JAX finds no device for JAX_PLATFORMS={names} ({reason}): unset it, to use others."
    return ""


def _missing_by_extra() -> dict[str, list[str]]:
    """Return the missing packages of each extra."""
    missing: dict[str, list[str]] = {}
    requirements: list[str] = []
    with contextlib.suppress(metadata.PackageNotFoundError):  # run from a checkout, not installed
        requirements = metadata.requires("offmarl") or []
    for requirement in requirements:
        if match := re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", requirement):
            package, extra = match.groups()
            missing.setdefault(extra, []).extend([] if _version(package) else [package])
    return missing


def _launchers() -> dict[str, str]:
    """Return what is missing for each engine of tasks."""
    states = {"local": "ready"}
    for name, package, command in (("slurm", "submitit", "sbatch"), ("ray", "ray", None)):
        lacks = [] if _version(package) else [f"lacks {package} (extra {name})"]
        if command and shutil.which(command) is None:
            lacks.append(f"{command} is not on the PATH")
        states[name] = ", ".join(lacks) or "ready"
    return states


def _cache() -> str:
    datasets, root = cache.entries(), cache.root()
    directory = next(place for place in (root, *root.parents) if place.is_dir())
    if not os.access(directory, os.W_OK):
        return f"{root} cannot be written: set HF_HOME to a directory that can"
    size, free = sum(dataset.size for dataset in datasets), shutil.disk_usage(directory).free
    return f"{root}: {len(datasets)} datasets, {size / 1e9:.2f} GB; {free / 1e9:.1f} GB free"


def completion(shell: Annotated[Literal["bash", "zsh"], Positional]) -> Report:
    """Print a shell completion script.

    Parameters
    ----------
    shell
        For bash: offmarl completion bash > ~/.local/share/bash-completion/completions/offmarl. For
        zsh: put it in a file _offmarl in a directory of $fpath.
    """
    script = _script(shell)
    return Report({"shell": shell, "script": script}, as_is(script))


def _script(shell: str) -> str:
    printed = io.StringIO()
    arguments = ["--tyro-write-completion", shell, "-"]
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        tyro.cli(_commands(), prog="offmarl", args=arguments)
    return reduce(lambda script, part: script.replace(*part), _FILES.items(), printed.getvalue())


def _commands() -> Any:
    """Return the type of all commands with their options, for tyro."""
    from offmarl.cli.verbs import VERBS, function_of

    kinds = {verb: [kind] for kind, verb in registry.VERBS.items()} | {"tune": [*registry.VERBS]}
    return _any(
        Annotated[Any, subcommand(name, constructor=_any_program(kinds[name]))]
        if name in kinds
        else _command(name, function_of(name, verb))
        for name, verb in VERBS.items()
    )


def _any_program(kinds: list[registry.Kind]) -> Callable[..., Any]:
    """Return a function that takes the options of any program of some kinds, after its name."""
    programs = [(name, registry.load(kind, name)) for kind in kinds for name in registry.find(kind)]

    def run(program: Any) -> Any:
        return program

    choice = _any(_command(name, program.Args, SettingsFile) for name, program in programs)
    run.__annotations__["program"] = Annotated[choice, arg(name="")]
    return run


def _command(name: str, *targets: Any) -> Any:
    kind, defaults = options([*targets, JsonFlag])
    return Annotated[kind, subcommand(name, default=defaults)]


def _any(choices: Iterable[Any]) -> Any:
    return Union[tuple(choices)]  # noqa: UP007
