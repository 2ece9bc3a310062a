"""Exported policies act as the loaded ones do, where offmarl is not installed."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from offmarl import load_policy
from offmarl.errors import OptionError
from offmarl.networks import PolicyConfig, init_policy, make_policy
from offmarl.programs import DatasetStatistics, LoadedPolicy, hyperparameters, registry
from offmarl.programs.program import structure
from offmarl.programs.runs.normalisation import normalise_as_asked
from offmarl.types import ArraySpec, ArrayTree, Continuous, Discrete, EnvSpec, flatten_tree
from tests.children import python
from tests.docs.test_snippets import DOCS, snippets_of
from tests.runs import write_policy

DISCRETE = EnvSpec("", 3, observation_size=4, state_size=4, action=Discrete(5))
CONTINUOUS = EnvSpec("", 3, observation_size=4, state_size=4, action=Continuous(2))
IMAGES, TREE = (
    replace(DISCRETE, observation={"far": {"seen": leaf}, "near": ArraySpec((2,))})
    for leaf in (ArraySpec((6, 6, 3), "uint8"), ArraySpec((3,), "int32"))
)
POLICIES = {
    "recurrent": (PolicyConfig("recurrent", hidden=8), DISCRETE),
    "gaussian": (PolicyConfig("feedforward", "soft_gaussian", hidden=8), CONTINUOUS),
    "values": (PolicyConfig("recurrent", "q", hidden=8, agent_id="none"), DISCRETE),
    "deterministic": (PolicyConfig("feedforward", "deterministic", hidden=8), CONTINUOUS),
    "unshared": (PolicyConfig("recurrent", hidden=8, share_parameters=False), DISCRETE),
    "tree": (PolicyConfig("feedforward", hidden=8), TREE),
    "images": (PolicyConfig("feedforward", hidden=8), IMAGES),
}


def policy(name: str, greedy: bool) -> LoadedPolicy:
    """Return a policy of `POLICIES`, or that of a baseline, fresh from a seed."""
    key = jax.random.key(0)
    if name in POLICIES:
        config, spec = POLICIES[name]
        params = init_policy(config, spec, key)
        result = make_policy(config, spec, greedy)
    else:
        baseline, spec = registry.load("baseline", name), DISCRETE
        args = baseline.Args(Path(), hidden=8)
        returns = {"returns": np.ones(6), "return_scale": np.ones(()), "scored": np.ones(6, bool)}
        returns["best_returns"] = np.ones(spec.num_agents, np.float32)
        source: Any = DatasetStatistics(None, returns)
        program = normalise_as_asked(args, baseline.make(spec, structure(args), source), source)
        init = partial(program.init, hyper=hyperparameters(args))
        shapes = jax.eval_shape(lambda key: program.policy_params(init(key)), key)
        rng = np.random.default_rng(0)  # without compiling `init`
        params = jax.tree.map(
            lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype), shapes
        )
        result = program.policy(greedy)
    return LoadedPolicy(result, params, spec, name, result.draws(params))


def draw(spec: EnvSpec, rng: np.random.Generator, num_envs: int) -> tuple[ArrayTree, np.ndarray]:
    """Draw observations and legal actions."""
    views = spec.view_spec
    observation = jax.tree.map(
        lambda leaf: (rng.normal(size=(num_envs, *leaf.shape)) * 9).astype(leaf.numpy_dtype),
        views.observation,
    )
    legal = rng.random((num_envs, *views.legal_actions.shape)) < 0.7
    legal[..., 0] = True
    return observation, legal


def at_start(directory: Path, num_envs: int) -> dict[str, np.ndarray]:
    tensors = load_file(directory / "policy.safetensors")
    starts = {name: leaf for name, leaf in tensors.items() if name.startswith("memory")}
    return {name: np.broadcast_to(leaf, (num_envs, *leaf.shape)) for name, leaf in starts.items()}


def read(path: Path) -> Any:
    return jax.jit(jax.export.deserialize(path.read_bytes()).call)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "greedy"),
    [
        ("recurrent", False),
        ("gaussian", False),
        ("values", True),
        ("deterministic", True),
        ("unshared", False),
        ("images", True),
        ("oryx", True),
        ("madt", False),
        ("mac_flow", False),
    ],
)
def test_an_exported_policy_acts_as_the_loaded_one(name: str, greedy: bool, tmp_path: Path) -> None:
    loaded = policy(name, greedy)
    loaded.export(tmp_path / "out")
    act = read(tmp_path / "out/policy.stablehlo")
    tensors = load_file(tmp_path / "out/policy.safetensors")
    (carry, memory), rng = (None, at_start(tmp_path / "out", 1)), np.random.default_rng(0)
    for step in range(3):
        (observation, legal), key = draw(loaded.spec, rng, 1), jax.random.key(step)
        keys = [jax.random.key_data(key)[None]] if loaded.stochastic else []
        action, memory = act(tensors, observation, legal, memory, *keys)
        first = jax.tree.map(lambda leaf: leaf[0], observation)
        expected, carry = loaded(first, legal[0], carry, key)
        # XLA fuses the noise of continuous actions in either program as it likes.
        tolerance = 1e-6 if name == "gaussian" else 0
        np.testing.assert_allclose(action[0], expected, rtol=tolerance, atol=tolerance)
        reward, done = rng.normal(size=(1, 3)).astype(np.float32), np.zeros((1, 3), bool)
        carry = loaded.after_step(carry, reward[0], done[0])
        if loaded.policy.after_step is not None:
            memory = read(tmp_path / "out/after_step.stablehlo")(memory, reward, done)


def test_a_file_acts_in_any_number_of_environments(tmp_path: Path) -> None:
    loaded = policy("recurrent", greedy=True)
    loaded.export(tmp_path / "out")
    exported = jax.export.deserialize((tmp_path / "out/policy.stablehlo").read_bytes())
    assert exported.platforms == ("cpu", "cuda", "tpu")
    tensors = load_file(tmp_path / "out/policy.safetensors")
    observation, legal = draw(loaded.spec, np.random.default_rng(0), 5)
    action, _ = exported.call(tensors, observation, legal, at_start(tmp_path / "out", 5))
    for env in range(5):
        np.testing.assert_array_equal(action[env], loaded(observation[env], legal[env])[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*[*POLICIES][:-1], "mac_flow", "qmix_bcq"])
def test_onnx_is_within_1e_5(name: str, tmp_path: Path) -> None:
    pytest.importorskip("jax2onnx", reason="needs pip install 'offmarl[onnx]'")
    runtime = pytest.importorskip("onnxruntime")
    loaded = policy(name, greedy=True)
    loaded.export(tmp_path / "out", onnx=True)
    session = runtime.InferenceSession(tmp_path / "out/policy.onnx")
    names = [output.name for output in session.get_outputs()]
    act = read(tmp_path / "out/policy.stablehlo")
    tensors = load_file(tmp_path / "out/policy.safetensors")
    start = at_start(tmp_path / "out", 4)
    (memory, theirs), rng = (start, start), np.random.default_rng(0)
    for _ in range(3):
        observation, legal = draw(loaded.spec, rng, 4)
        action, after = act(tensors, observation, legal, memory)
        leaves = flatten_tree(observation, "observation")
        inputs = leaves | {"legal_actions": legal, **theirs}
        outputs = dict(zip(names, session.run(names, inputs), strict=True))
        np.testing.assert_allclose(outputs["action"], action, atol=1e-5)
        if "log_probs" in outputs:
            carry = memory.get("memory", ())  # one array, or nothing
            expected = log_probs(loaded, observation, legal, carry)
            np.testing.assert_allclose(outputs["log_probs"], expected, atol=1e-5)
        memory, theirs = after, {name: outputs[f"next_{name}"] for name in memory}


def log_probs(
    loaded: LoadedPolicy, observation: ArrayTree, legal: np.ndarray, carry: ArrayTree
) -> np.ndarray:
    """Return the log-probabilities of all actions."""
    log_prob = jax.jit(jax.vmap(loaded.policy.log_prob, (None, 0, 0, 0, 0)))
    columns = [
        log_prob(loaded.params, carry, observation, legal, np.full(legal.shape[:-1], action))[0]
        for action in range(legal.shape[-1])
    ]
    return np.stack(columns, -1)


@pytest.mark.parametrize(
    ("name", "greedy", "reason"),
    [
        ("recurrent", False, "draws random numbers"),
        pytest.param("oryx", True, "agents choose after one another", marks=pytest.mark.slow),
        pytest.param("madt", True, "takes rewards as input", marks=pytest.mark.slow),
    ],
)
def test_onnx_refuses_other_policies(name: str, greedy: bool, reason: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=f"^the policy of {name} cannot be .* since .*{reason}"):
        policy(name, greedy).export(tmp_path / "out", onnx=True)
    assert not (tmp_path / "out").exists()


def test_other_files_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(OptionError, match="is not empty: give another --out"):
        policy("recurrent", greedy=True).export(tmp_path)


@pytest.mark.parametrize("library", ["jax", "onnxruntime"])
@pytest.mark.slow
def test_the_page_runs_without_offmarl(library: str, tmp_path: Path) -> None:
    if library == "onnxruntime":
        pytest.importorskip("jax2onnx", reason="needs pip install 'offmarl[onnx]'")
    write_policy(tmp_path / "run", PolicyConfig("recurrent", hidden=8), DISCRETE, [0])
    load_policy(tmp_path / "run").export(tmp_path / "deployed", library == "onnxruntime")
    shutil.rmtree(tmp_path / "run")
    (code,) = (
        snippet.code
        for snippet in snippets_of((DOCS / "deploy.md").read_text())
        if snippet.language == "python" and f"from {library} import" in snippet.code
    )
    absent = "import sys; sys.modules['offmarl'] = None\n"
    if library == "onnxruntime":
        absent += "sys.modules['jax'] = None\n"
    output = python("-W", "error", "-c", absent + code, cwd=tmp_path)
    assert f"# {output}" in code
