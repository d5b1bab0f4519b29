"""Lines are appended whole, and whatever a file holds, its good lines are read."""

import fcntl
import json

import pytest

from util.jsonl import append_record, read_records


def test_a_line_that_was_cut_short_costs_only_itself(tmp_path, clmae_log):
    path = tmp_path / "results.jsonl"
    append_record(path, {"n": 1})
    with open(path, "a") as file:
        file.write('{"n": 2, "cut')
    append_record(path, {"n": 3})
    append_record(path, {"n": 4})
    assert [record["n"] for record in read_records(path, dict)] == [1, 3, 4]
    assert f"{path}: skipped damaged lines: 2" in clmae_log.text


def test_the_end_is_looked_at_under_the_lock(tmp_path, monkeypatch):
    """What another program appends, or leaves half done, before this one has the lock is not glued to its line."""
    path = tmp_path / "results.jsonl"
    append_record(path, {"n": 1})

    def lock_after_another(file, operation):
        assert operation == fcntl.LOCK_EX
        with open(path, "a") as other:
            other.write('{"n": 2}\n{"cut')

    monkeypatch.setattr(fcntl, "flock", lock_after_another)
    append_record(path, {"n": 3})
    assert [record["n"] for record in read_records(path, dict)] == [1, 2, 3]


def test_a_changed_value_is_noticed_but_lines_of_earlier_versions_have_no_checksum(tmp_path, clmae_log):
    path = tmp_path / "results.jsonl"
    path.write_text('{"acc1": 70.5}\n')
    append_record(path, {"acc1": 81.5, "data": "caf\u00e9", "std": None})
    append_record(path, {"acc1": 90.5})
    assert json.loads(path.read_text().splitlines()[2]).keys() == {"acc1", "crc32"}
    assert [record["acc1"] for record in read_records(path, dict)] == [70.5, 81.5, 90.5]
    path.write_text(path.read_text().replace("81.5", "91.5"))
    assert [record["acc1"] for record in read_records(path, dict)] == [70.5, 90.5]
    assert f"{path}: skipped damaged lines: 2" in clmae_log.text


def test_a_file_system_without_locks_will_do(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(95, "not supported")))
    append_record(tmp_path / "results.jsonl", {"n": 1})
    assert read_records(tmp_path / "results.jsonl", dict) == [{"n": 1}]


@pytest.mark.parametrize(
    "odd",
    [
        *(b"\xff\xfe", b"null", b"[1]", b'"a"', b"{}", b'{"n": "1"}', b'{"n": 1', b"NaN", b"\0", b"1" * 5000),
        *(b"[" * 100_000, b'{"n": ' + b"[" * 100_000, '{"n": 1}'.encode("utf-16-be") + b"\xff"),
    ],
    ids=lambda line: repr(line[:12]),
)
def test_odd_lines_are_skipped(tmp_path, clmae_log, odd):
    (tmp_path / "log.txt").write_bytes(b'{"n": 1}\n' + odd + b'\n\n{"n": 2}')
    assert read_records(tmp_path / "log.txt", lambda record: record["n"] + 0) == [1, 2]
    assert "log.txt: skipped damaged lines: 2" in clmae_log.text
