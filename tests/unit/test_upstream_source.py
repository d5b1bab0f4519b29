"""Names, signatures and flags are read from text as Python and argparse would read them."""

import ast
import itertools
import subprocess
from inspect import Signature

import pytest
from upstream_tree import parser_stub

from tools.upstream_source import (
    compare_flags,
    compare_signatures,
    compare_symbols,
    lookup,
    parser_flags,
    read_flags,
    read_symbols,
    signature_of,
    tree_files,
)


def test_files_of_a_folder_and_of_a_checkout(tmp_path):
    for name in ("a.py", "util/b.py", "output_dir/log.txt", "__pycache__/a.pyc", ".venv/c.py", "ignored.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert tree_files(tmp_path) == {"a.py", "util/b.py", "ignored.txt"}
    (tmp_path / ".gitignore").write_text("ignored.txt\noutput_dir/\n")
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    assert tree_files(tmp_path) == {".gitignore", "a.py", "util/b.py"}


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
def test_a_signature_is_kept_if_and_only_if_every_call_is(theirs):
    for ours in SIGNATURES:
        status, how = compare_signatures(signature(theirs), signature(ours))
        assert (status != "changed") == accepts_the_same_calls(signature(theirs), signature(ours)), (theirs, ours, how)
        assert (status == "same") == (not how)
        assert status == "same" or theirs != ours


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        ("x: int, y: float = 1", "x, y=1.0", ("same", "")),
        ("norm=nn.LayerNorm", "norm=nn.LayerNorm", ("same", "")),
        (
            "norm=nn.LayerNorm",
            "norm=nn.BatchNorm1d",
            ("changed", "norm=nn.LayerNorm upstream, norm=nn.BatchNorm1d here"),
        ),
        ("self, x", "self, x, noise=None", ("extended", "noise=None added")),
        ("self, x", "self, x, noise", ("changed", "noise is required here")),
        ("a, b", "b, a", ("changed", "parameter 0 is b, not a; parameter 1 is a, not b")),
    ],
)
def test_what_differs_is_said(theirs, ours, expected):
    assert compare_signatures(signature(theirs), signature(ours)) == expected


def test_names_are_found_wherever_they_come_from(tmp_path):
    (tmp_path / "util").mkdir()
    (tmp_path / "util" / "parts.py").write_text("class Box:\n    def open(self, key=1): ...\ndef pack(x, y=0): ...\n")
    (tmp_path / "here.py").write_text(
        "from util.parts import Box, pack as wrap\nfrom math import sqrt\n"
        "try:\n    import fast\nexcept ImportError:\n    def slow(x): ...\n"
        "both = wrapped = slow\nLIMIT = 3\n"
        "class Tool:\n    @property\n    def size(self): ...\n    @torch.no_grad()\n    def use(self): ...\n"
    )
    kinds = {name: symbol.kind for name, symbol in read_symbols(tmp_path / "here.py").items()}
    assert kinds == {
        **dict.fromkeys(("Box", "wrap", "sqrt", "fast"), "import"),
        "slow": "function",
        "both": "alias",
        "wrapped": "alias",
        "Tool": "class",
        "Tool.size": "property",
        "Tool.use": "function",
    }

    def status(name: str, text: str) -> str:
        (tmp_path / f"there_{name}.py").write_text(text)
        theirs = read_symbols(tmp_path / f"there_{name}.py")
        return compare_symbols(theirs[name], lookup(tmp_path, "here.py", name))[0]

    assert status("wrap", "def wrap(x): ...") == "extended"
    assert status("sqrt", "def sqrt(x): ...") == "same"
    assert status("both", "def both(x): ...") == "same"
    assert status("wrapped", "def f(x): ...\nwrapped = f") == "changed"
    assert status("LIMIT", "def LIMIT(): ...") == "missing"
    assert status("Box.open", "class Box:\n    def open(self, key=2): ...") == "changed"
    assert status("Box.shut", "class Box:\n    def shut(self): ...") == "missing"
    assert status("Tool.size", "class Tool:\n    def size(self): ...") == "changed"


@pytest.mark.parametrize("program", ["main_pretrain", "main_linprobe", "main_finetune"])
def test_flags_are_read_from_text_as_argparse_would(tmp_path, upstream_flags, program):
    (tmp_path / "main.py").write_text(parser_stub(upstream_flags[program]))
    scope = {}
    exec((tmp_path / "main.py").read_text(), scope)
    read = read_flags(tmp_path / "main.py")
    assert read == parser_flags(scope["get_args_parser"]())
    expected = {flag: facts["default"] for flag, facts in upstream_flags[program].items() if flag != "set_defaults"}
    assert {name: flag.default for name, flag in read.items()} == expected


FLAGS = {
    "same": ("'--x', default=1, type=int", "'--x', type=int, default=1, help='h'", "same"),
    "string": ("'--x', default='a'", "'--x', default='a', type=str", "same"),
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
    theirs, ours = ({} for _ in range(2))
    for flags, text in ((theirs, FLAGS[case][0]), (ours, FLAGS[case][1])):
        (tmp_path / "main.py").write_text(f"def get_args_parser():\n    parser.add_argument({text})\n")
        flags |= read_flags(tmp_path / "main.py")
    assert compare_flags(theirs["--x"], ours.get("--x"))[0] == FLAGS[case][2]
