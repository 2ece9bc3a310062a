"""Tests of equal bits, with the compiler's settings that users have."""

import os
from pathlib import Path

import pytest

from tests.children import python

TESTS = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("OFFMARL_FUSION") != "fast", reason="the tests marked bits run by themselves"
)
def test_bits_are_equal_as_xla_fuses_for_users():
    flags = os.environ["XLA_FLAGS"].replace("emitters=false", "emitters=true")
    files = [path for path in TESTS.rglob("test_*.py") if "mark.bits" in path.read_text()]
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "bits and not nightly"]
    output = python(
        *("-m", "pytest", *options, *files),
        env=os.environ | {"OFFMARL_FUSION": "stock", "XLA_FLAGS": flags},
        cwd=TESTS.parent,
    )
    assert " passed" in output
