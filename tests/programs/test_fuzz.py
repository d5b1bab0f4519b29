"""The command line: no flag value leads to a traceback, a hang, or a stray file."""

import sys

import pytest
from processes import ROOT, run_to_end


@pytest.mark.slow
def test_bad_flags_end_in_a_sentence():
    done = run_to_end([sys.executable, "-m", "tests.fuzz", "--cases", "300"], cwd=ROOT)
    assert done.returncode == 0, done.stderr
