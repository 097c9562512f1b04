"""The parameters of functions, read from the source of their modules, which are not imported: those may need torch.

A function that is read has a stand-in, which cannot be called, but has the signature that `inspect` would find. So what
binds functions binds stand-ins by the same rules.
"""

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NoReturn

from rlhf_spmd.pages.user_module import source_of

# decorators that leave the parameters as they are, by their names in the modules that they are from
TRANSPARENT = ("functools.cache", "functools.lru_cache", "torch.no_grad", "torch.inference_mode")
MOST_STEPS = 20  # from a name to the function that it stands for
DYNAMIC = ("globals(", "setattr(", "exec(", "vars(", "locals(")  # what may bind a name that no statement shows
BLOCKS = (ast.If, ast.Try, ast.TryStar, ast.With, ast.For, ast.While)  # whose statements bind names of the module
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Unread(Exception):
    """Why the parameters of a function cannot be read from its source, as a predicate."""


@dataclass(frozen=True, slots=True)
class _Binding:
    """A statement that binds a name. sure: it runs whenever the module is imported."""

    node: ast.stmt | ast.alias
    sure: bool
    of: ast.ImportFrom | None = None  # the statement of an alias


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A module.

    package: that relative imports start from; empty: none.
    folder: where the modules that it imports may be, besides the import path.
    """

    path: Path
    package: str
    folder: Path
    text: str
    names: dict[str, list[_Binding]]
    stars: list[ast.ImportFrom] = field(default_factory=list)
    _made: dict[str, Any] = field(default_factory=dict, repr=False)  # what function() found

    def function(self, name: str, steps: int = 0) -> Any:
        """Returns the stand-in of a function, the class or the constant of this name; None if the module binds no such
        name. Raises Unread."""
        found = self.names.get(name)
        if found is None:
            if self.stars or "__getattr__" in self.names or any(word in self.text for word in DYNAMIC):
                raise Unread(f"{self.path.name} may make {name} when it is imported")
            return None
        if len(found) > 1 and not all(one.sure for one in found):
            raise Unread(f"{self.path.name} binds {name} in several places")
        if steps > MOST_STEPS:
            raise Unread(f"{self.path.name} binds {name} in a circle")
        if name not in self._made:
            self._made[name] = self._value(name, found[-1], steps)
        return self._made[name]

    @property
    def functions(self) -> list[str]:
        """The names of the functions that it defines."""
        return [name for name, many in self.names.items() if isinstance(many[-1].node, Function)]

    def missing_modules(self) -> list[str]:
        """Returns the modules that it imports in any case, and that this machine lacks: without one, no import of it
        works."""
        if "sys.path" in self.text:  # it says itself where some are
            return []
        wanted: list[str] = []
        for binding in (one for many in self.names.values() for one in many if one.sure):
            if isinstance(binding.node, ast.alias):
                wanted.append(binding.node.name if binding.of is None else _absolute(binding.of))
        wanted += map(_absolute, self.stars)
        tops = dict.fromkeys(name.partition(".")[0] for name in wanted if name)
        others = [top for top in tops if top not in sys.stdlib_module_names]
        return [top for top in others if find_module(top, self.folder) is None]

    def _value(self, name: str, binding: _Binding, steps: int) -> Any:
        node = binding.node
        if isinstance(node, Function):
            return self._decorated(node)
        if isinstance(node, ast.ClassDef):
            return type(name, (), {})
        if isinstance(node, ast.alias) and binding.of is not None:
            return self._imported(node, binding.of, steps)
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Lambda):
            return _stand_in(name, value, yields=False)
        if isinstance(value, ast.Name) and value.id != name:
            if value.id in self.names:
                return self.function(value.id, steps + 1)
        elif value is not None:
            try:
                return ast.literal_eval(value)
            except (ValueError, TypeError, MemoryError, RecursionError):
                pass
        what = f"{self.path.name} makes {name}" + (f" by {_short(value)}" if value is not None else " when it runs")
        raise Unread(what)

    def _decorated(self, node: Function) -> Any:
        for decorator in node.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if self._full_name(called) not in TRANSPARENT:
                raise Unread(f"{node.name} has the decorator @{_short(decorator)}")
        return _stand_in(node.name, node, yields="yield" in self.text and _yields(node))

    def _full_name(self, node: ast.expr) -> str:
        """Returns what a name means where its module imported it: `functools.cache` of `cache`."""
        head, dot, rest = ast.unparse(node).partition(".")
        bindings = self.names.get(head, [])
        if len(bindings) != 1 or not isinstance(alias := bindings[0].node, ast.alias):
            return head + dot + rest
        of = bindings[0].of
        module = alias.name if alias.asname or of else head
        return (f"{of.module}." if of else "") + module + dot + rest

    def _imported(self, alias: ast.alias, of: ast.ImportFrom, steps: int) -> Any:
        """Returns what another module has under a name."""
        module = of.module or ""
        if of.level:
            parts = self.package.split(".")
            base = parts[: len(parts) - of.level + 1]
            if not self.package or not base:
                raise Unread(f"{self.path.name} gets {alias.name} by a relative import")
            module = ".".join([*base, *filter(None, [module])])
        try:
            found = read_module(module, self.folder).function(alias.name, steps + 1)
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise Unread(f"{self.path.name} gets {alias.name} from {module}, which cannot be read ({error})") from None
        if found is None:
            raise Unread(f"{self.path.name} gets {alias.name} from {module}, whose source does not bind it")
        return found


def read_source(path: Path, package: str = "", folder: Path | None = None) -> Source:
    """Returns a module from its file. package: the name of its package; empty: it has none. folder: see Source (None:
    that of the file). Raises OSError, SyntaxError and UnicodeDecodeError as importing it does."""
    return _parsed(path, package, folder or path.parent, source_of(path))


def read_module(name: str, folder: Path) -> Source:
    """Returns a module from its name. folder: see Source. Raises Unread if it is not here, and as read_source()."""
    spec = find_module(name, folder)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise Unread(f"there is no source of the module {name} here")
    is_package = spec.submodule_search_locations is not None
    return read_source(Path(spec.origin), name if is_package else name.rpartition(".")[0], folder)


@cache
def _parsed(path: Path, package: str, folder: Path, text: str) -> Source:
    found = Source(path, package, folder, text, {})
    for name, binding in _bindings(ast.parse(text, str(path)).body, sure=True):
        if name == "*":
            assert isinstance(binding.of, ast.ImportFrom)
            found.stars.append(binding.of)
        else:
            found.names.setdefault(name, []).append(binding)
    return found


def _absolute(statement: ast.ImportFrom) -> str:
    """Returns the module of an import; empty if it is relative."""
    return "" if statement.level else statement.module or ""


def _bindings(statements: list[ast.stmt], *, sure: bool) -> Iterator[tuple[str, _Binding]]:
    """Yields the names that statements of a module bind, in order."""
    for node in statements:
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, _Binding(node, sure)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], _Binding(alias, sure)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, _Binding(alias, sure, node)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                        whole = node if isinstance(target, ast.Name) else ast.Pass()
                        yield part.id, _Binding(whole, sure)
        elif isinstance(node, BLOCKS):
            is_with = isinstance(node, ast.With)
            if isinstance(node, ast.For):
                for part in ast.walk(node.target):
                    if isinstance(part, ast.Name):
                        yield part.id, _Binding(ast.Pass(), False)
            for child in ast.iter_child_nodes(node):
                inner = child.body if isinstance(child, ast.ExceptHandler) else [child]
                yield from _bindings([one for one in inner if isinstance(one, ast.stmt)], sure=sure and is_with)


def find_module(module: str, folder: Path) -> ModuleSpec | None:
    """Returns where a module is, without importing it or its packages; None if it is not on this machine. folder:
    searched last."""
    top, *rest = module.split(".")
    try:
        found = importlib.util.find_spec(top) or PathFinder.find_spec(top, [str(folder)])
        for number, _ in enumerate(rest, start=1):
            if found is None or found.submodule_search_locations is None:
                return None
            name = ".".join([top, *rest[:number]])
            found = PathFinder.find_spec(name, list(found.submodule_search_locations))
    except (ImportError, ValueError):
        return None
    return found


# ---- stand-ins -------------------------------------------------------------------------------------------------------


def _stand_in(name: str, node: Function | ast.Lambda, *, yields: bool) -> Callable[..., Any]:
    """Yields something with the name and the signature of a function. yields: whether it is a generator."""

    def function(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError(f"{name} is not loaded")

    def generator(*_: Any, **__: Any) -> Iterator[None]:
        yield

    made: Callable[..., Any] = generator if yields else function
    made.__name__ = made.__qualname__ = name
    made.__signature__ = signature_of(node.args)  # type: ignore[attr-defined]  # inspect reads it
    return made


def _yields(node: Function) -> bool:
    """Returns whether a function is a generator; functions inside it may be others."""
    todo: list[ast.AST] = [*node.body]
    while todo:
        one = todo.pop()
        if isinstance(one, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(one, Function | ast.Lambda | ast.ClassDef):
            todo += ast.iter_child_nodes(one)
    return False


def signature_of(arguments: ast.arguments) -> inspect.Signature:
    """Returns the parameters of a function, with `...` for every default."""
    kinds = inspect.Parameter
    places: list[tuple[ast.arg, Any]] = [(one, kinds.POSITIONAL_ONLY) for one in arguments.posonlyargs]
    places += [(one, kinds.POSITIONAL_OR_KEYWORD) for one in arguments.args]
    needed = len(places) - len(arguments.defaults)
    found = [kinds(one.arg, kind, default=kinds.empty if i < needed else ...) for i, (one, kind) in enumerate(places)]
    if arguments.vararg:
        found.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(kinds(one.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else ...))
    if arguments.kwarg:
        found.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(found)


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
