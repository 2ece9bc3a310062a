"""``verify``, ``salvage`` and ``compact``."""

import shutil

from tests.vault import damage
from tests.vault.damage import flip


def test_verify_then_salvage_then_compact(offmarl, tmp_path):
    path = damage.record(tmp_path / "v.vlt" / "a")
    quick, deep = offmarl("verify", "v.vlt"), offmarl("verify", "v.vlt", "--deep").out
    assert "is intact as far as checked: 52 steps of each row, 70 chunks" in quick.out
    assert "Not checked, so damage there is not detected; --deep checks it:" in quick.out
    assert "the content of 70 chunks (" in quick.out
    assert "is intact: 52 steps" in deep
    assert "Not checked" not in deep
    flip(path, "observations./0.3.0.0")

    outcome = offmarl("verify", "v.vlt", "--deep")
    assert outcome.code == 1
    assert "observations, rows 0 to 1, steps 24 to 31: its checksum is wrong (" in outcome.out
    (fault,) = offmarl("verify", "v.vlt", "--deep", "--json").json["faults"]
    assert (fault["leaf"], fault["steps"]) == ("observations", [24, 32])

    assert "Next: offmarl salvage " in outcome.out and outcome.out.endswith(" -o intact.vlt\n")
    salvage = offmarl("salvage", "v.vlt", "-o", "out.vlt")
    assert "Lost:" in salvage.out
    assert "row 0, steps " in salvage.out
    assert offmarl("verify", "out.vlt", "--deep").code == 0
    assert offmarl("verify", "v.vlt", "--deep").code == 1  # and left as it was
    assert offmarl("salvage", "v.vlt", "-o", "all.vlt", "--json").json["lost"]

    done = offmarl("compact", "v.vlt", "--json").json
    assert done["bytes_after"] <= done["bytes_before"]
    assert " became " in offmarl("compact", "v.vlt").out


def test_an_archive_is_verified_and_left_alone(offmarl, tmp_path):
    damage.record(tmp_path / "v.vlt" / "a", "zstd")
    shutil.make_archive("v", "zip", tmp_path, "v.vlt")
    assert "is intact" in offmarl("verify", "v.zip/v.vlt/a", "--deep").out
    refused = offmarl("compact", "v.zip/v.vlt/a")
    assert refused.code == 1
    assert "is not a directory on this machine" in refused.err
