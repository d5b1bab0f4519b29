"""What a tree of Python files offers, read from its text: files, names with signatures, flags. Nothing is imported."""

import ast
import subprocess
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from inspect import Parameter, Signature
from pathlib import Path

SKIPPED = {".git", "__pycache__", ".venv", "venv", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints"}
OUTPUT = {"output_dir", "runs", "eval", "compare"}  # as .gitignore
BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
WRAPPERS = ("property", "staticmethod", "classmethod")
SAME, EXTENDED, CHANGED, MISSING = "same", "extended", "changed", "missing"


# --- Files ---


def tree_files(root: Path) -> set[str]:
    """Paths below `root`: what git tracks or would track, in a checkout; otherwise everything but caches and output."""
    names = git_files(root) if (root / ".git").exists() else None
    if names is None:
        names = [path.relative_to(root).as_posix() for path in walk(root)]
    return {name for name in names if (root / name).is_file() and not SKIPPED.intersection(Path(name).parts)}


def git_files(root: Path) -> list[str] | None:
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return listed.stdout.split("\0") if listed.returncode == 0 else None


def walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            yield path
        elif path.name not in SKIPPED | OUTPUT and not (path / ".git").exists():  # nor another checkout inside
            yield from walk(path)


# --- Names and signatures ---


@dataclass(frozen=True)
class Expression:
    """Source text that is no literal, such as nn.LayerNorm."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Symbol:
    kind: str  # class, function, property, staticmethod, classmethod, alias or import
    signature: Signature | None = None
    target: str = ""  # what an alias or an import stands for


def value(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError):
        return Expression(ast.unparse(node))


def equal(a: object, b: object) -> bool:
    """4 and 4.0 mean the same, 1 and True do not."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


@cache
def read_symbols(path: Path) -> dict[str, Symbol]:
    """Functions, classes, methods as CLASS.METHOD, aliases and imports of a file. Raises SyntaxError or ValueError."""
    symbols: dict[str, Symbol] = {}
    for node in statements(ast.parse(path.read_bytes()).body):
        symbols |= symbols_of(node)
    aliased = {name: symbols.get(symbol.target) for name, symbol in symbols.items() if symbol.kind == "alias"}
    return symbols | {name: replace(symbols[name], signature=to.signature) for name, to in aliased.items() if to}


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module or class, also below if and try, where alternatives are defined."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            handlers = [statement for handler in getattr(node, "handlers", []) for statement in handler.body]
            yield from statements([*node.body, *handlers, *node.orelse, *getattr(node, "finalbody", [])])


def symbols_of(node: ast.stmt) -> dict[str, Symbol]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        wrappers = [name for name in map(ast.unparse, node.decorator_list) if name in WRAPPERS]
        return {node.name: Symbol((wrappers or ["function"])[0], signature_of(node.args))}
    if isinstance(node, ast.ClassDef):
        members = (member for statement in statements(node.body) for member in symbols_of(statement).items())
        methods = {f"{node.name}.{name}": symbol for name, symbol in members if symbol.kind not in ("alias", "import")}
        return {node.name: Symbol("class"), **methods}
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        return {name: Symbol("alias", target=node.value.id) for name in names}
    if isinstance(node, ast.Import | ast.ImportFrom):
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module else ""
        return {name.asname or name.name: Symbol("import", target=module + name.name) for name in node.names}
    return {}


def signature_of(args: ast.arguments) -> Signature:
    positional = [*args.posonlyargs, *args.args]
    required = [Parameter.empty] * (len(positional) - len(args.defaults))
    defaults = [*required, *map(value, args.defaults)]
    kinds = [BY_POSITION[0]] * len(args.posonlyargs) + [BY_POSITION[1]] * len(args.args)
    parameters = [
        Parameter(arg.arg, kind, default=default)
        for arg, kind, default in zip(positional, kinds, defaults, strict=True)
    ]
    if args.vararg:
        parameters.append(Parameter(args.vararg.arg, Parameter.VAR_POSITIONAL))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        given = Parameter.empty if default is None else value(default)
        parameters.append(Parameter(arg.arg, Parameter.KEYWORD_ONLY, default=given))
    if args.kwarg:
        parameters.append(Parameter(args.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters)


def lookup(root: Path, file: str, name: str) -> Symbol | None:
    """`name` in a file below `root`. An imported name is looked up where it comes from, if that is below `root` too."""
    symbols = read_symbols(root / file)
    if name in symbols and symbols[name].kind != "import":
        return symbols[name]
    head, dot, rest = name.partition(".")
    imported = symbols.get(head)
    if imported is None or imported.kind != "import":
        return None
    module, _, original = imported.target.rpartition(".")
    source = module.replace(".", "/") + ".py"
    return lookup(root, source, original + dot + rest) if (root / source).is_file() else imported


def compare_symbols(theirs: Symbol, ours: Symbol | None) -> tuple[str, str]:
    """The status of a name, and what differs."""
    if ours is None:
        return MISSING, ""
    if ours.kind == "import":
        return SAME, f"is {ours.target}, whose signature was not read"
    if "class" in (theirs.kind, ours.kind) or WRAPPERS.count(theirs.kind) or WRAPPERS.count(ours.kind):
        if theirs.kind != ours.kind:
            return CHANGED, f"a {theirs.kind} upstream, a {ours.kind} here"
    elif theirs.kind == ours.kind == "alias" and theirs.target != ours.target:
        return CHANGED, f"{theirs.target} upstream, {ours.target} here"
    if theirs.signature is None or ours.signature is None:
        return SAME, ""
    return compare_signatures(theirs.signature, ours.signature)


def compare_signatures(theirs: Signature, ours: Signature) -> tuple[str, str]:
    """Same, extended (every call that is valid upstream is valid here and means the same) or changed; and how."""
    broken, wider = [], []
    left = dict(ours.parameters)
    our_order = [name for name, parameter in ours.parameters.items() if parameter.kind in BY_POSITION]
    variable = {parameter.kind for parameter in theirs.parameters.values()} - {*BY_POSITION, Parameter.KEYWORD_ONLY}
    for at, (name, their) in enumerate(theirs.parameters.items()):
        if their.kind in variable:
            matches = [other for other in left.values() if other.kind == their.kind]
            if not matches:
                broken.append(f"{their} is not taken")
            for match in matches:
                del left[match.name]
            continue
        found = name
        if their.kind in BY_POSITION:
            found = our_order[at] if at < len(our_order) else None
            if found != name and (found is None or their.kind != Parameter.POSITIONAL_ONLY):
                broken.append(f"parameter {at} is {found}, not {name}" if found else f"{name} is not parameter {at}")
                left.pop(name, None)  # it is here, but elsewhere
                continue
        our = left.pop(found, None)
        if our is None or (our.kind not in BY_POSITION and our.kind != Parameter.KEYWORD_ONLY):
            broken.append(f"{name} is not taken")
        elif our.kind == Parameter.POSITIONAL_ONLY != their.kind:
            broken.append(f"{name} is taken by position only")
        elif their.kind == Parameter.KEYWORD_ONLY != our.kind and Parameter.VAR_POSITIONAL in variable:
            broken.append(f"{name} takes a place of *args")
        elif their.default is Parameter.empty:
            wider += [] if our.default is Parameter.empty else [f"{our} has a default"]
        elif our.default is Parameter.empty or not equal(their.default, our.default):
            broken.append(f"{their} upstream, {our} here")
    for our in left.values():
        if our.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            wider.append(f"{our} added")
        elif our.default is Parameter.empty:
            broken.append(f"{our} is required here")
        else:
            by_position = our.kind in BY_POSITION and Parameter.VAR_POSITIONAL in variable
            by_name = our.kind != Parameter.POSITIONAL_ONLY and Parameter.VAR_KEYWORD in variable
            # It would take what upstream's *args and **kwargs hand on.
            (broken if by_position or by_name else wider).append(f"{our} added")
    return CHANGED if broken else EXTENDED if wider else SAME, "; ".join(broken + wider)


# --- Flags ---


@dataclass(frozen=True)
class Flag:
    name: str
    dest: str
    action: str
    type: str | None
    default: object
    nargs: object = None
    choices: tuple | None = None
    required: bool = False


def read_flags(path: Path, function: str = "get_args_parser") -> dict[str, Flag] | None:
    """The flags that a program's `function` adds, by option string; None if it has no such function."""
    nodes = statements(ast.parse(path.read_bytes()).body)
    found = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == function]
    if not found:
        return None
    calls = [
        node for node in ast.walk(found[-1]) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    flags = [flag for call in calls if call.func.attr == "add_argument" for flag in flags_of(call)]
    defaults = {
        keyword.arg: value(keyword.value)
        for call in calls
        if call.func.attr == "set_defaults"
        for keyword in call.keywords
    }
    return {flag.name: replace(flag, default=defaults.get(flag.dest, flag.default)) for flag in flags}


def flags_of(call: ast.Call) -> list[Flag]:
    """One per option string of an add_argument call, with argparse's own rules for what is not said."""
    names = [str(value(arg)) for arg in call.args]
    said = {keyword.arg: value(keyword.value) for keyword in call.keywords}
    action = str(said.get("action", "store"))
    long_names = [name for name in names if name.startswith("--")] or names
    implied = {"store_true": False, "store_false": True}.get(action)
    choices = said.get("choices")
    return [
        Flag(
            name=name,
            dest=str(said.get("dest", long_names[0].lstrip("-").replace("-", "_"))),
            action=action,
            type=type_name(action, said.get("type")),
            default=said.get("default", implied),
            nargs=said.get("nargs"),
            choices=tuple(choices) if isinstance(choices, list | tuple) else None,
            required=bool(said.get("required", False)),
        )
        for name in names
    ]


def parser_flags(parser: ArgumentParser) -> dict[str, Flag]:
    """The same of a parser at hand, whose flags may come from functions that several programs share."""
    kinds = {action: name for name, action in parser._registries["action"].items() if name}
    return {
        name: Flag(
            name=name,
            dest=action.dest,
            action=kinds[type(action)],
            type=type_name(kinds[type(action)], action.type),
            default=parser.get_default(action.dest),
            nargs=action.nargs if kinds[type(action)] == "store" else None,  # a switch has 0, which nobody wrote
            choices=None if action.choices is None else tuple(action.choices),
            required=action.required,
        )
        for action in parser._actions
        for name in action.option_strings or [action.dest]
        if kinds[type(action)] != "help"
    }


def type_name(action: str, given: object) -> str | None:
    """argparse takes strings where no type is given."""
    if action != "store":
        return None
    return "str" if given is None else getattr(given, "__name__", repr(given))


def compare_flags(theirs: Flag, ours: Flag | None) -> tuple[str, str]:
    """The status of a flag but for its default, and what differs."""
    if ours is None:
        return MISSING, ""
    broken = [
        f"{name} {getattr(theirs, name)} upstream, {getattr(ours, name)} here"
        for name in ("dest", "action", "type")
        if getattr(theirs, name) != getattr(ours, name)
    ]
    wider = []
    if ours.required and not theirs.required:
        broken.append("is required here")
    if theirs.nargs != ours.nargs:
        several = theirs.nargs is None and ours.nargs in ("+", "*")
        (wider if several else broken).append(f"nargs {theirs.nargs} upstream, {ours.nargs} here")
    if theirs.choices != ours.choices:
        more = ours.choices is None or (theirs.choices is not None and set(theirs.choices) <= set(ours.choices))
        (wider if more else broken).append(f"choices {theirs.choices} upstream, {ours.choices} here")
    return CHANGED if broken else EXTENDED if wider else SAME, "; ".join(broken + wider)
