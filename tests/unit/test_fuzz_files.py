"""Some hundred of the cases of tests/fuzz_files.py, which has more to say."""

from fuzz_files import KINDS, fuzz


def test_no_changed_value_is_accepted(clmae_log):
    problems = []
    counts = fuzz(0, 800, problems.append)
    assert not problems
    for kind in KINDS:
        assert counts[kind]["refused"] > 5
