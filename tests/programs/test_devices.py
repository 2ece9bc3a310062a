"""Environments, seeds and batches on several devices."""

import json
import os
from pathlib import Path
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from offmarl import tracking, vault
from offmarl.config import DeviceArgs
from offmarl.errors import OptionError, RunError
from offmarl.programs import cluster
from offmarl.programs.cluster import join
from offmarl.programs.recording.record import groups_of
from offmarl.programs.runs.sharding import (
    SeedLayout,
    check_divisible,
    check_shards,
    layout_of,
    recorder_layout,
    shards_record,
)
from recorders import random_
from tests.children import python
from tests.programs.several_devices import parameters
from tests.programs.several_processes import finished, start
from tests.runs import least_record


def run(work: str, *arguments: object, devices: int = 8, optimised: bool = False) -> object:
    """Run a function of `several_devices` in a process with some devices; return its result."""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
    if optimised:  # as users compile
        for name in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS"):
            environment.pop(name, None)
    output = python("-m", "tests.programs.several_devices", work, *arguments, env=environment)
    return json.loads(output.splitlines()[-1])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("names", "policy"),
    [
        ("swarm/pursuit-3-1,classic/xor", "random"),
        ("swarm/flock-4", "random"),
        ("jaxmarl/smax/3m", "random"),
        ("jumanji/lbf", "random"),
        ("swarm/coverage-3,swarm/flock-4", "scripted"),
        ("swarm/pursuit-3-1", "scripted"),
    ],
)
def test_fixed_policies_have_the_same_bits_on_any_number_of_devices(names, policy, tmp_path):
    by_name = run("record", tmp_path, names, "1,2,4,8", policy, optimised=True)
    for name, digests in by_name.items():
        assert len(set(digests)) == 1, name


@pytest.mark.nightly
def test_seeds_of_a_recorder_on_several_devices_match_one_device(tmp_path):
    params = run("train_online", tmp_path, "1,2,8")
    # Two devices train a seed each. Of eight, four share the environments of a seed: after 64 steps
    # of Adam, sums in another order have changed parameters by less than one step of 7e-4.
    np.testing.assert_allclose(params["2"], params["1"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(params["8"], params["1"], rtol=1e-3, atol=5e-4)


@pytest.mark.slow
def test_two_processes_record_one_dataset(tmp_path):
    command = ["record", "random", "--env", "classic/xor", "--steps", 640, "--num-envs", 16]
    first, second = finished(start(*command, "--out", tmp_path / "two"))
    assert "640" in first
    assert not second
    path = Path("classic/xor.vlt/random-0")
    assert vault.verify(tmp_path / "two" / path).sound
    args = random_.Args(env="classic/xor", steps=640, num_envs=16, out=tmp_path / "one")
    random_.main(args)
    two, one = (vault.open_vault(tmp_path / name / path) for name in ("two", "one"))
    assert two.digest() == one.digest()


@pytest.mark.nightly
@pytest.mark.parametrize("replay", ["device", "stream"])
def test_training_with_divided_batches_matches_one_device(replay, random_data, tmp_path):
    params = run(
        "train", random_data("swarm/coverage-2"), tmp_path, "1,2,8", f"replay={replay}", "seeds=2"
    )
    # Two devices train a seed each, with whole batches.
    np.testing.assert_allclose(params["2"], params["1"], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(params["8"], params["1"], rtol=1e-3, atol=1e-5)
    assert tracking.read_run(tmp_path / "8")["shards"] == 4


@pytest.mark.slow
def test_seeds_with_priorities_on_two_devices_match_one_device(random_data, tmp_path):
    flags = "1,2", "prioritise=0.6", "seeds=2", "updates=4", "length=2", "hidden=8", "mixer_embed=4"
    params = run("train", random_data("probe/observation"), tmp_path, *flags, devices=2)
    np.testing.assert_allclose(params["2"], params["1"], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_three_seeds_that_share_four_devices_match_one_device(random_data, tmp_path):
    # In the second round a row of devices has a seed, and the other one a copy, which waits for it.
    flags = "1,4", "seeds=3", "updates=4", "batch_size=4", "length=2", "hidden=8"
    params = run("train", random_data("probe/observation"), tmp_path, *flags, devices=4)
    np.testing.assert_allclose(params["4"], params["1"], rtol=1e-3, atol=1e-5)


@pytest.mark.nightly
def test_two_processes_train_as_one_does(random_data, tmp_path):
    data = random_data("swarm/coverage-2")
    command = ["train", "bc", "--vault", data, "--updates", 20, "--batch-size", 16, "--length", 5]
    command += ["--env", "none", "--held-out", 0, "--seeds", 2, "--out", tmp_path / "two"]
    finished(start(*command))
    params = run("train", data, tmp_path, "1", "seeds=2")
    np.testing.assert_allclose(parameters(tmp_path / "two"), params["1"], rtol=1e-3, atol=1e-5)


@pytest.mark.nightly
def test_two_processes_train_and_record_online(tmp_path):
    command = ["record", "ippo", "--env", "classic/xor", "--total-steps", 2048, "--num-envs", 16]
    command += ["--tiers", "random,replay", "--steps", 320, "--evaluations", 2]
    finished(start(*command, "--out", tmp_path))
    for tier in ("random", "replay"):
        assert vault.verify(tmp_path / f"classic/xor.vlt/ippo-0-{tier}").sound
    assert tracking.read_run(tmp_path / "classic/xor.run/ippo-0")["complete"]


# ---------------------------------------------------------------------------------- choices


@pytest.mark.parametrize(
    ("seeds", "batching", "at_once", "devices", "wanted"),
    [
        (10, "auto", None, 1, SeedLayout(1, 1)),
        (10, "vmap", None, 1, SeedLayout(10, 1)),
        (10, "auto", 5, 1, SeedLayout(5, 1)),
        (10, "vmap", None, 4, SeedLayout(5, 2)),
        (7, "vmap", None, 4, SeedLayout(7, 1)),
        (10, "map", None, 4, SeedLayout(1, 4)),  # 3, 3, 3 and 1
        (5, "map", None, 4, SeedLayout(1, 3)),  # 2, 2 and 1: a fourth device would save no time
        (1, "map", None, 4, SeedLayout(1, 1)),
    ],
)
def test_layouts_of_seeds(seeds, batching, at_once, devices, wanted, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: ["device"] * devices)
    assert layout_of(seeds, batching, at_once) == wanted


@pytest.mark.parametrize(
    ("seeds", "devices", "wanted"),
    [
        (1, 8, SeedLayout(1, 1, 8)),
        (4, 8, SeedLayout(1, 4, 2)),
        (10, 8, SeedLayout(1, 8, 1)),  # two rounds of seeds, the second with copies
        (3, 8, SeedLayout(1, 2, 4)),
        (3, 6, SeedLayout(1, 3, 2)),
    ],
)
def test_seeds_take_devices_first_and_batches_take_the_rest(seeds, devices, wanted, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: ["device"] * 8)
    assert layout_of(seeds, "map", devices=devices) == wanted


def test_without_devices_a_recorder_uses_one(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: ["device"] * 8)
    assert recorder_layout(4, 8, None) == SeedLayout(1)
    assert recorder_layout(4, 8, 8) == SeedLayout(1, 4, 2)


@pytest.mark.parametrize(
    ("num_envs", "groups"), [(64, [8, 8, 8, 8, 16]), (16, [8, 8, 8, 8, 16]), (6, [2, 2, 2])]
)
def test_groups_do_not_depend_on_devices_that_divide_them(num_envs, groups):
    counts = [count for count in (1, 2, 4, 8, 16) if num_envs % count == 0]
    assert [groups_of(num_envs, count) for count in counts] == groups[: len(counts)]


def test_more_devices_than_there_are():
    with pytest.raises(
        OptionError, match=r"--devices 9: JAX has \d \(kind: CPU\).*NUM_CPU_DEVICES=9"
    ):
        layout_of(1, "map", devices=9)


@pytest.mark.parametrize("option", ["--num-envs", "--batch-size"])
def test_sizes_that_devices_do_not_divide(option):
    words = rf"{option} 10 cannot be divided over 8 devices.*multiple of 8.*--devices 5"
    with pytest.raises(OptionError, match=words):
        check_divisible(option, 10, SeedLayout(1, 1, 8))


def test_a_run_goes_on_with_as_many_shards(tmp_path):
    record = least_record(**shards_record(SeedLayout(1, 2, 4)))
    tracking.write_json(tmp_path / tracking.RUN_FILE, record)
    check_shards(tmp_path, "batches", SeedLayout(1, 4, 4))
    with pytest.raises(RunError, match=r"divided over 4 devices, not 1.*--devices 4"):
        check_shards(tmp_path, "batches", SeedLayout(1))


# ---------------------------------------------------------------------------------- joining


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"process": 1}, "--process needs --coordinator"),
        ({"coordinator": "here"}, "--coordinator here is not HOST:PORT"),
        *(({"coordinator": x}, f"{x} is not HOST:PORT") for x in ("here:65536", "here:0", ":1")),
        ({"coordinator": "h:1", "processes": 2, "process": 2}, "--process 2 does not exist"),
        (
            {"coordinator": "127.0.0.1:1", "processes": 2, "process": 1},
            "127.0.0.1:1 did not answer",
        ),
    ],
)
def test_what_cannot_join(given, words, monkeypatch):
    monkeypatch.setattr(cluster, "JOIN_SECONDS", 0.1)
    with pytest.raises(OptionError, match=words):
        join(DeviceArgs(**given))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (
            {"coordinator": "auto"},
            ValueError("of none"),
            r"missing \(of none\): .* or give --coordinator HOST:PORT, --processes N and",
        ),
        ({"coordinator": "h:1"}, ValueError("of none"), r"or give --processes N and --process I\."),
        (
            {"coordinator": "h:1"},
            jax.errors.JaxRuntimeError("DEADLINE\nmore"),
            r"h:1: the processes did not join within \d+ s: .* \(DEADLINE\)$",
        ),
    ],
)
def test_why_processes_did_not_join(given, error, words, monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", Mock(side_effect=error))
    with pytest.raises(OptionError, match=words):
        join(DeviceArgs(**given))


@pytest.mark.parametrize("text", ["soon", "0", "-5", "1.5"])
def test_times_of_the_environment_are_checked(text, monkeypatch):
    monkeypatch.setenv("OFFMARL_JOIN_SECONDS", text)
    with pytest.raises(OptionError, match=f"OFFMARL_JOIN_SECONDS is .* not '{text}'"):
        cluster.seconds_of("OFFMARL_JOIN_SECONDS", 120)
    monkeypatch.setenv("OFFMARL_JOIN_SECONDS", "")
    assert cluster.seconds_of("OFFMARL_JOIN_SECONDS", 120) == 120
