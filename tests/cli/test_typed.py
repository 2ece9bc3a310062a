"""Commands on vaults of images, trees and extras."""

import dataclasses

import pytest

from offmarl import vault
from offmarl.types import ArraySpec
from tests.specs import image_spec, typed_spec
from tests.vault.experience import recorded

SPECS = {"tree": typed_spec("test/typed"), "image": image_spec("test/image")}


def test_show_lists_leaves_with_types_and_shapes(offmarl):
    recorded("a.vlt", SPECS["tree"])
    text = " ".join(offmarl("show", "a.vlt").out.split())
    assert "camera.left uint8 (2, 3, 1)" in text
    for row in ("observations.camera.depth float16 (2, 2, 3)", "infos.state.wind bfloat16 (2,)"):
        assert row in text
    assert "extras.message int16 (2, 5)" in text
    result = offmarl("show", "a.vlt", "--json").json
    assert result["arrays"]["extras.cost"] == {"dtype": "float32", "shape": []}
    assert result["stock_readable"] is True
    assert result["spec"]["observation"]["gear"] == {"shape": [], "dtype": "int8"}


def test_show_says_what_stock_cannot_read(offmarl):
    lidar = ArraySpec((3,), agents=(1,))
    recorded("a.vlt", dataclasses.replace(SPECS["image"], observation={"lidar": lidar}))
    assert "stock flashbax" in offmarl("show", "a.vlt").out
    assert offmarl("show", "a.vlt", "--json").json["stock_readable"] is False


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_other_commands_take_such_vaults(offmarl, name):
    recorded("a.vlt", SPECS[name])
    for command in (
        ("verify", "a.vlt", "--deep"),
        ("filter", "a.vlt", "length >= p50", "-o", "b.vlt"),
        ("cat", "a.vlt", "b.vlt", "-o", "c.vlt"),
        ("convert", "c.vlt", "c.npz", "--to", "numpy"),
        ("convert", "c.npz", "d.vlt", "--from", "numpy"),
        ("report", "a.vlt", "--html", "a.html"),
        ("compact", "a.vlt"),
        ("ls",),
    ):
        offmarl.succeeds(*command)
    assert vault.open_vault("d.vlt").digest() == vault.open_vault("c.vlt").digest()
