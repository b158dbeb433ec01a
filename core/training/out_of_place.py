"""Make a model's Python code free of in-place updates of local names, while training.

Blocks of several ComfyUI models write ``img += gate * attention(img)`` or ``x.addcmul_(y, gate)``. With
block checkpointing the recomputation then starts from a changed input, and saved-tensor hooks
(checkpointing, offloading) switch autograd's own in-place check off, so gradients are wrong without an
error. Here the methods' source is rewritten: ``name op= value`` and the statement ``name.op_(value)``
become ``name = update(op, name, value)``, which for tensors computes a new one of the same dtype. The
result is bound to the instance and can be taken off again.

What it does not do: other forms such as ``x[:, :n] += y`` stay. Block checkpointing notices if they
change a block's input, and ``self_check.check_same_output`` compares the outputs, so an update through a
view that something else was meant to see is found.
"""

from __future__ import annotations

import ast
import functools
import inspect
import operator
import textwrap
import types
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..module_hooks import Forward, HookedForward, ModuleHook, install_hook, remove_hook

_HOOK = "out_of_place"
_UPDATE = "__ferry_update__"
_OPERATORS = {
    "Add": (operator.add, operator.iadd),
    "Sub": (operator.sub, operator.isub),
    "Mult": (operator.mul, operator.imul),
    "MatMult": (operator.matmul, operator.imatmul),
    "Div": (operator.truediv, operator.itruediv),
    "FloorDiv": (operator.floordiv, operator.ifloordiv),
    "Mod": (operator.mod, operator.imod),
    "Pow": (operator.pow, operator.ipow),
    "LShift": (operator.lshift, operator.ilshift),
    "RShift": (operator.rshift, operator.irshift),
    "BitAnd": (operator.and_, operator.iand),
    "BitOr": (operator.or_, operator.ior),
    "BitXor": (operator.xor, operator.ixor),
}
# Methods with an out-of-place counterpart of the same name, without the underscore.
_METHODS = frozenset(
    "abs_ add_ addcdiv_ addcmul_ clamp_ cos_ div_ exp_ index_add_ lerp_ masked_fill_ mul_ neg_ pow_ relu_ "
    "scatter_add_ scatter_reduce_ sigmoid_ sin_ sqrt_ square_ sub_ tanh_".split()
)


class OutOfPlace:
    """The rewritten methods of one model; nothing changes until ``install``."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._hooked: list[nn.Module] = []
        self._bound: list[tuple[nn.Module, str]] = []

    def __len__(self) -> int:
        return len(self._hooked) + len(self._bound)

    def install(self) -> None:
        """Bind every rewritten method to its instance.

        To be installed after other hooks: it takes the place of a module's own forward, so it has to be
        the innermost. A module whose ``forward`` other code replaced is left alone.
        """
        for module in self.root.modules():
            for name, method in _rewritten_methods(type(module)):
                if name == "forward":
                    if _own_forward_runs(module):
                        install_hook(module, _HOOK, _RewrittenForward(method))
                        self._hooked.append(module)
                elif name not in module.__dict__:
                    module.__dict__[name] = types.MethodType(method, module)
                    self._bound.append((module, name))

    def remove(self) -> None:
        """Give the instances their classes' methods back."""
        for module in self._hooked:
            remove_hook(module, _HOOK)
        for module, name in self._bound:
            module.__dict__.pop(name, None)
        self._hooked.clear()
        self._bound.clear()


class _RewrittenForward(ModuleHook):
    def __init__(self, method: types.FunctionType) -> None:
        self.method = method

    def run(self, forward: Forward, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        return self.method(module, *args, **kwargs)


def _own_forward_runs(module: nn.Module) -> bool:
    current = module.__dict__.get("forward")
    return current is None or (isinstance(current, HookedForward) and current.inner is None)


def update(name: str, current: Any, *values: Any, **options: Any) -> Any:
    """Return what ``current`` is after an in-place operation, without writing to a tensor.

    Args:
        name: A key of ``_OPERATORS`` (``current op= value``) or of ``_METHODS`` (``current.op_(...)``).
        current: The object; anything but a tensor is updated in place, as written.
        values: The operation's arguments.
        options: Its keyword arguments.
    """
    if name in _METHODS:
        if not isinstance(current, Tensor):
            getattr(current, name)(*values, **options)
            return current
        result = getattr(current, name.removesuffix("_"))(*values, **options)
    else:
        plain, in_place = _OPERATORS[name]
        if not isinstance(current, Tensor):
            return in_place(current, *values)
        result = plain(current, *values)
    # In place keeps the dtype of the left side; a plain operation promotes.
    return result if result.dtype == current.dtype else result.to(current.dtype)


# By function, not by class: other packs replace methods of ComfyUI's classes at run time.
_CACHE: weakref.WeakKeyDictionary[types.FunctionType, types.FunctionType | None] = weakref.WeakKeyDictionary()


def _rewritten_methods(module_type: type[nn.Module]) -> Iterator[tuple[str, types.FunctionType]]:
    seen: set[str] = set()
    for owner in module_type.__mro__:
        if owner.__module__.split(".")[0] in ("torch", "builtins"):
            continue
        for name, member in owner.__dict__.items():
            if name in seen or name.startswith("__") or not isinstance(member, types.FunctionType):
                seen.add(name)
                continue
            seen.add(name)
            if member not in _CACHE:
                _CACHE[member] = rewrite(member)
            rewritten = _CACHE[member]
            if rewritten is not None:
                yield name, rewritten


class _Rewriter(ast.NodeTransformer):
    def __init__(self) -> None:
        self.count = 0

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        return self._update(node, node.target.id, type(node.op).__name__, [node.value], [])

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        call = node.value
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            return node
        owner = call.func.value
        if not isinstance(owner, ast.Name) or call.func.attr not in _METHODS:
            return node
        return self._update(node, owner.id, call.func.attr, call.args, call.keywords)

    def _update(
        self, node: ast.AST, name: str, operation: str, values: list[ast.expr], options: list[ast.keyword]
    ) -> ast.AST:
        self.count += 1
        arguments = [ast.Constant(operation), ast.Name(name, ast.Load()), *values]
        call = ast.Call(ast.Name(_UPDATE, ast.Load()), arguments, options)
        return ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], call), node)


def rewrite(function: types.FunctionType) -> types.FunctionType | None:
    """Return ``function`` without in-place updates of names, or None if there is nothing to rewrite.

    Defaults, globals and closure cells are the original's own. A function whose source is not at hand,
    that is decorated, or that uses class-private names (``self.__x``) is not rewritten.
    """
    definition = _parse(function)
    if definition is None:
        return None
    rewriter = _Rewriter()
    rewriter.visit(definition)
    if rewriter.count == 0:
        return None
    ast.fix_missing_locations(definition)
    ast.increment_lineno(definition, function.__code__.co_firstlineno - definition.lineno)
    code = _compile(definition, function)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells[_UPDATE] = types.CellType(update)
    closure = tuple(cells[name] for name in code.co_freevars)
    result = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    result.__kwdefaults__ = function.__kwdefaults__
    return result


def _parse(function: types.FunctionType) -> ast.FunctionDef | None:
    try:
        # Of the code object: `functools.wraps` would lead to the source of another function.
        source = textwrap.dedent(inspect.getsource(function.__code__))
    except (OSError, TypeError):
        return None
    body = ast.parse(source).body
    definition = body[0] if len(body) == 1 else None
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return None
    names = [node.attr for node in ast.walk(definition) if isinstance(node, ast.Attribute)]
    names += [node.id for node in ast.walk(definition) if isinstance(node, ast.Name)]
    if any(name.startswith("__") and not name.endswith("__") for name in names):
        return None
    return definition


def _compile(definition: ast.FunctionDef, function: types.FunctionType) -> types.CodeType:
    # The outer function makes the free variables (also the `__class__` of super()) free again.
    names = [_UPDATE, *function.__code__.co_freevars]
    parameters = ast.arguments(
        posonlyargs=[], args=[ast.arg(name) for name in names], kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    definition.returns = None
    definition.args.defaults = [ast.Constant(None) for _ in definition.args.defaults]
    definition.args.kw_defaults = [default and ast.Constant(None) for default in definition.args.kw_defaults]
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    outer = ast.FunctionDef("outer", parameters, [definition], [])
    module = ast.fix_missing_locations(ast.Module([outer], type_ignores=[]))
    flags = function.__code__.co_flags & _future_flags()
    compiled = compile(module, function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    outer_code = _code_named(compiled, "outer")
    return _code_named(outer_code, function.__code__.co_name)


def _code_named(code: types.CodeType, name: str) -> types.CodeType:
    return next(
        constant
        for constant in code.co_consts
        if isinstance(constant, types.CodeType) and constant.co_name == name
    )


@functools.cache
def _future_flags() -> int:
    import __future__

    return functools.reduce(
        operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
    )
