"""Names, signatures and flags: upstream's are read from its text and never imported, this project's are imported."""

import argparse
import ast
import builtins
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path

BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
SAME, EXTENDED, INTENDED, CHANGED, MISSING = "same", "extended", "intended", "changed", "missing"


@dataclass(frozen=True)
class Expression:
    """The last name of something that is no literal, such as LayerNorm."""

    text: str

    def __repr__(self) -> str:
        return self.text


def value(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        if isinstance(node, ast.Name):
            return getattr(builtins, node.id, Expression(node.id))  # such as int
        return Expression(node.attr if isinstance(node, ast.Attribute) else ast.unparse(node))


def equal(a: object, b: object) -> bool:
    """4 and 4.0 mean the same, 1 and True do not."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


# --- Names: a signature, or None for a class ---


def read_names(tree: ast.Module | ast.ClassDef, prefix: str = "") -> dict[str, Signature | None]:
    """Functions, classes, methods as CLASS.METHOD, and aliases of these."""
    names = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            names[prefix + node.name] = signature_of(node.args)
        elif isinstance(node, ast.ClassDef):
            names |= {node.name: None, **read_names(node, f"{node.name}.")}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in names:
            names |= {target.id: names[node.value.id] for target in node.targets if isinstance(target, ast.Name)}
    return names


def signature_of(args: ast.arguments) -> Signature:
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + args.defaults
    kinds = [Parameter.POSITIONAL_ONLY] * len(args.posonlyargs) + [Parameter.POSITIONAL_OR_KEYWORD] * len(args.args)
    found = [*zip(positional, kinds, defaults, strict=True), (args.vararg, Parameter.VAR_POSITIONAL, None)]
    found += [(a, Parameter.KEYWORD_ONLY, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    found.append((args.kwarg, Parameter.VAR_KEYWORD, None))
    return Signature([Parameter(a.arg, kind, default=value(d) if d else Parameter.empty) for a, kind, d in found if a])


def compare_name(owner: object, name: str, theirs: Signature | None) -> tuple[str, str]:
    """The status of upstream's `name` in a module or class of this project, and what differs."""
    head, _, method = name.partition(".")
    ours = vars(owner).get(head)  # not in a class's bases: nn.Module's constructor would take any call
    if ours is None:
        return MISSING, ""
    if method:
        return compare_name(ours, method, theirs)
    if inspect.isclass(ours) or theirs is None:
        same = inspect.isclass(ours) and theirs is None
        return (SAME, "") if same else (CHANGED, "a class in one tree and a function in the other")
    ours = getattr(ours, "__func__", None) or getattr(ours, "fget", None) or ours  # of static methods, properties
    return compare_signatures(theirs, inspect.signature(ours))


def compare_signatures(theirs: Signature, ours: Signature) -> tuple[str, str]:
    """Same, extended (takes every call that upstream takes, with the same meaning, and more) or changed; and how."""
    their, our = without_annotations(theirs), without_annotations(ours)
    if their == our:
        return SAME, ""
    gone, new = [p for p in their if p not in our], [p for p in our if p not in their]
    how = [
        f"{', '.join(map(str, some))} {where}" for some, where in ((gone, "only upstream"), (new, "only here")) if some
    ]
    by_position = [p for p in their if p.kind in BY_POSITION]
    in_order = [p for p in our if p.kind in BY_POSITION][: len(by_position)] == by_position
    optional = all(p.kind in VARIABLE or p.default is not Parameter.empty for p in new)
    # A new parameter would catch what upstream's *args and **kwargs pass on.
    extended = not gone and in_order and optional and not any(p.kind in VARIABLE for p in their)
    return EXTENDED if extended else CHANGED, "; ".join(how) or "another order"


def without_annotations(signature: Signature) -> list[Parameter]:
    """Without annotations. Defaults that are no plain values go by their names, and True is not 1."""
    found = []
    for p in signature.parameters.values():
        plain = p.default is Parameter.empty or not (isinstance(p.default, bool) or hasattr(p.default, "__name__"))
        default = p.default if plain else Expression(getattr(p.default, "__name__", repr(p.default)))
        found.append(Parameter(p.name, p.kind, default=default))
    return found


# --- Flags ---


def read_parser(path: Path) -> argparse.ArgumentParser:
    """What a program's get_args_parser returns, made from the literals in its text."""
    functions = [n for n in ast.walk(ast.parse(path.read_bytes())) if getattr(n, "name", "") == "get_args_parser"]
    if not functions:
        raise ValueError("it has no get_args_parser")
    parser = argparse.ArgumentParser(add_help=False)
    for call in ast.walk(functions[-1]):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") in ("add_argument", "set_defaults"):
            said = {str(keyword.arg): value(keyword.value) for keyword in call.keywords if keyword.arg != "help"}
            getattr(parser, getattr(call.func, "attr", ""))(*map(value, call.args), **said)
    return parser


def type_made_by(convert) -> str:
    """Of what it makes of a number, because a type with bounds is the same type."""
    for text in ("1", "0.5"):
        with suppress(ValueError, argparse.ArgumentTypeError):
            return type(convert(text)).__name__
    return repr(convert)


def flags_of(parser: argparse.ArgumentParser) -> dict[str, dict]:
    """By option string: what can be compared of a flag."""
    switches = (argparse._StoreTrueAction, argparse.BooleanOptionalAction)  # the latter has a --no- form, too
    return {
        name: {
            "dest": action.dest,
            "action": "switch" if isinstance(action, switches) else type(action).__name__,
            "type": type_made_by(action.type or str),
            "nargs": action.nargs,
            "choices": action.choices and tuple(action.choices),
            "required": action.required,
            "default": parser.get_default(action.dest),
        }
        for action in parser._actions
        for name in action.option_strings or [action.dest]
        if action.dest != "help"
    }


def compare_flags(theirs: dict, ours: dict | None, intended: Callable[[object], str | None]) -> tuple[str, str]:
    """The status of a flag, and what differs. `intended` gives the reason for a default or choices, if there is one."""
    if ours is None:
        return MISSING, ""
    differing = [name for name in theirs if not equal(theirs[name], ours[name])]
    reasons = [reason for name in differing if (reason := intended(ours[name]))]
    how = "; ".join(f"{name} {theirs[name]!r} upstream, {ours[name]!r} here" for name in differing)
    allowed = {
        "nargs": theirs["nargs"] is None and ours["nargs"] in ("+", "*"),
        "choices": not ours["choices"] or {*(theirs["choices"] or [None])} <= {*ours["choices"]},
        "required": theirs["required"],
    }
    if not all(allowed.get(name) or intended(ours[name]) for name in differing):
        return CHANGED, how
    return (INTENDED, f"{how}: {'; '.join(reasons)}") if reasons else (EXTENDED if differing else SAME, how)
