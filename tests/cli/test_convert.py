"""``convert`` both ways."""

import numpy as np
import pytest


@pytest.fixture
def batch(tmp_path):
    """Two episodes of PyMARL's, of three and two steps."""
    filled = np.zeros((2, 4, 1), np.int64)
    filled[0], filled[1, :3] = 1, 1
    terminated = np.zeros((2, 4, 1), np.uint8)
    terminated[0, 2] = terminated[1, 1] = 1
    path = tmp_path / "data.npz"
    np.savez(
        path,
        obs=np.ones((2, 4, 2, 3), np.float32),
        actions=np.ones((2, 4, 2, 1), np.int64),
        avail_actions=np.ones((2, 4, 2, 5), np.int32),
        reward=np.ones((2, 4, 1), np.float32),
        terminated=terminated,
        filled=filled,
    )
    return path


@pytest.mark.parametrize("layout", ["pymarl", "numpy", "zarr"])
def test_there_and_back(offmarl, tmp_path, batch, layout):
    first = offmarl("convert", str(batch), str(tmp_path / "a.vlt"), "--json").json
    out = tmp_path / ("out.npz" if layout != "zarr" else "out.zarr")
    told = offmarl("convert", str(tmp_path / "a.vlt"), str(out), "--to", layout, "--json").json
    assert (told["format"], told["episodes"], told["steps"]) == (layout, 2, 5)
    command = ["convert", str(out), str(tmp_path / "b.vlt"), "--from", layout, "--json"]
    assert offmarl(*command).json["digest"] == first["digest"]


def test_options_that_do_not_belong(offmarl, tmp_path, batch):
    out = str(tmp_path / "a.vlt")
    for options in (
        ["--to", "numpy", "--from", "pymarl"],
        ["--from", "zarr", "--time-limit", "5"],
    ):
        result = offmarl("convert", str(batch), out, *options)
        assert result.code == 2
        assert "--to" in result.err or "--time-limit" in result.err
    offmarl("convert", str(batch), out)
    result = offmarl("convert", out, str(tmp_path / "out.npz"))
    assert result.code == 2
    assert "is a vault already: say --to" in result.err
