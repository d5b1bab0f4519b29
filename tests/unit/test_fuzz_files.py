"""A few hundred of the cases of tests/fuzz_files.py; see there."""

from fuzz_files import KINDS, fuzz


def test_no_changed_value_is_accepted(clmae_log):
    problems = []
    counts = fuzz(0, 800, problems.append)
    assert not problems
    for kind in KINDS:
        assert counts[kind]["refused"] > 5
