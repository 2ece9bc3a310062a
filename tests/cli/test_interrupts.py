"""Ctrl-C at an instant at which Python discards exceptions."""

import subprocess
import sys

from tests.children import python

PROGRAM = """
import gc, os, signal, sys, time
from offmarl.errors import repeat_lost_interrupts

signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored, as by nohup
repeat_lost_interrupts()

def busy(phase, info):
    if phase == "start":
        gc.callbacks.remove(busy)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

gc.callbacks.append(busy)
try:
    gc.collect()
    for _ in range(600):
        time.sleep(0.1)
except KeyboardInterrupt:
    print("stopped")
"""


def test_ctrl_c_in_a_callback_of_the_garbage_collector_stops_the_program():
    assert python("-c", PROGRAM, timeout=50) == "stopped\n"


def test_other_discarded_errors_are_shown_as_before():
    program = PROGRAM.replace("os.kill(os.getpid(), signal.SIGINT)", "raise ValueError('shown')")
    program = program.replace("range(600)", "range(1)")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True
    )
    assert "ValueError: shown" in done.stderr
