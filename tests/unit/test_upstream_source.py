"""Names, signatures and flags are read from text as Python and argparse would read them."""

import ast
import itertools
from inspect import Signature
from types import ModuleType

import pytest
from upstream_tree import parser_stub

from tools.upstream_source import (
    compare_flags,
    compare_name,
    compare_signatures,
    flags_of,
    read_names,
    read_parser,
    signature_of,
)


def signature(text: str) -> Signature:
    return signature_of(ast.parse(f"def f({text}): ...").body[0].args)


def accepts_the_same_calls(theirs: Signature, ours: Signature) -> bool:
    """By trying: every call that `theirs` takes gives each of its parameters the same value in `ours`."""
    keywords = [dict.fromkeys(names) for size in range(4) for names in itertools.combinations("xyz", size)]
    for count, names in itertools.product(range(4), keywords):
        args, kwargs = [f"at {at}" for at in range(count)], {name: f"as {name}" for name in names}
        try:
            expected = theirs.bind(*args, **kwargs)
        except TypeError:
            continue
        expected.apply_defaults()
        try:
            actual = ours.bind(*args, **kwargs)
        except TypeError:
            return False
        actual.apply_defaults()
        if any(repr(actual.arguments.get(name)) != repr(value) for name, value in expected.arguments.items()):
            return False
    return True


SIGNATURES = (
    *("", "x", "x, y", "y, x", "x, y=1", "x, y=2", "x=1, y=1", "x, y=None", "x, *, y", "x, *, y=1", "*, y=1, x"),
    *("x, /", "x, /, y=1", "x, y, z=3", "x, *args", "x, **kwargs", "**kwargs", "x, y=1, **kwargs", "*args, **kwargs"),
    *("x, *args, y=1", "x, y=1, *args", "*, x", "*, x=1", "x, y=True", "x, *, y=1, z=1"),
)


@pytest.mark.parametrize("theirs", SIGNATURES)
def test_no_signature_passes_that_refuses_or_changes_a_call(theirs):
    for ours in SIGNATURES:
        status, how = compare_signatures(signature(theirs), signature(ours))
        assert status == "changed" or accepts_the_same_calls(signature(theirs), signature(ours)), (theirs, ours, how)
        assert (status == "same") == (not how) == (theirs == ours)


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        ("x: int, y: float = 1", "x, y=1.0", ("same", "")),
        ("norm=nn.LayerNorm", "norm=LayerNorm", ("same", "")),
        ("norm=nn.LayerNorm", "norm=Linear", ("changed", "norm=LayerNorm only upstream; norm=Linear only here")),
        ("self, x", "self, x, noise=None", ("extended", "noise=None only here")),
        ("self, x", "self, x, **kwargs", ("extended", "**kwargs only here")),
        ("self, x", "self, x, noise", ("changed", "noise only here")),
        ("a, b", "b, a", ("changed", "another order")),
    ],
)
def test_what_differs_is_said(theirs, ours, expected):
    assert compare_signatures(signature(theirs), signature(ours)) == expected


OURS = """
from os.path import join as imported
def slow(x: int, y=0): ...
alias = slow
LIMIT = 3
class Box:
    def open(self, key=1): ...
    @property
    def size(self): ...
    @staticmethod
    def make(x): ...
class Crate(Box): ...
"""
NAMES = {
    "def slow(x, y=0): ...": "same",
    "def slow(x): ...": "extended",
    "def slow(x, y=1): ...": "changed",
    "def f(x, y=0): ...\nalias = f": "same",
    "def imported(a, *p): ...": "same",
    "def gone(): ...": "missing",
    "class Box: ...": "same",
    "class slow: ...": "changed",
    "class Box:\n    def open(self, key=2): ...": "changed",
    "class Box:\n    def shut(self): ...": "missing",
    "class Box:\n    @property\n    def size(self): ...": "same",
    "class Box:\n    @staticmethod\n    def make(x): ...": "same",
    "class Crate:\n    def open(self, key=1): ...": "missing",  # not in the bases
}


@pytest.mark.parametrize("text", NAMES)
def test_names_are_compared_with_what_a_module_offers(text):
    module = ModuleType("ours")
    exec(OURS, vars(module))
    name, theirs = list(read_names(ast.parse(text)).items())[-1]
    assert compare_name(module, name, theirs)[0] == NAMES[text]


@pytest.mark.parametrize("program", ["main_pretrain", "main_linprobe", "main_finetune"])
def test_flags_are_read_from_text_as_argparse_would(tmp_path, upstream_flags, program):
    (tmp_path / "main.py").write_text(parser_stub(upstream_flags[program]))
    scope = {}
    exec((tmp_path / "main.py").read_text(), scope)
    read = flags_of(read_parser(tmp_path / "main.py"))
    assert read == flags_of(scope["get_args_parser"]())
    expected = {flag: facts["default"] for flag, facts in upstream_flags[program].items() if flag != "set_defaults"}
    assert {name: flag["default"] for name, flag in read.items()} == expected


FLAGS = {
    "same": ("'--x', default=1, type=int", "'--x', type=int, default=1, help='h'", "same"),
    "string": ("'--x', default='a'", "'--x', default='a', type=str", "same"),
    "default": ("'--x', default=1", "'--x', default=2", "changed"),
    "several": ("'--x', default=1, type=int", "'--x', default=1, type=int, nargs='+'", "extended"),
    "fewer": ("'--x', type=int, nargs='+'", "'--x', type=int", "changed"),
    "type": ("'--x', type=int", "'--x', type=float", "changed"),
    "choices": ("'--x'", "'--x', choices=['a']", "changed"),
    "more choices": ("'--x', choices=['a']", "'--x', choices=['a', 'b']", "extended"),
    "required": ("'--x'", "'--x', required=True", "changed"),
    "switch": ("'--x', action='store_true'", "'--x', action='store_false'", "changed"),
    "dest": ("'--x'", "'--x', dest='y'", "changed"),
    "gone": ("'--x'", "'--y'", "missing"),
}


@pytest.mark.parametrize("case", FLAGS)
def test_a_flag_is_same_extended_or_changed(tmp_path, case):
    both = []
    for text in FLAGS[case][:2]:
        (tmp_path / "main.py").write_text(f"def get_args_parser():\n    parser.add_argument({text})\n")
        both.append(flags_of(read_parser(tmp_path / "main.py")))
    assert compare_flags(both[0]["--x"], both[1].get("--x"), lambda value: None)[0] == FLAGS[case][2]
