"""What the API pages show that static analysis does not see.

Constructors of Equinox modules and named tuples are made from their fields.
"""

import importlib
import inspect
from typing import Any

import griffe


KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: griffe.ParameterKind.positional_only,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
    inspect.Parameter.KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
}
# Short names in the code, which pages write out.
ALIASES = {"Size": "int | MemoryBudget | None"}


class Constructors(griffe.Extension):
    """Gives public classes and transforms the signatures that they are called with."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        package = importlib.import_module(pkg.name)
        both = (package, pkg), (package.results, pkg["results"])
        public = {
            name: (member.final_target, getattr(module, name))
            for module, source in both
            for name, member in source.members.items()
            if member.is_alias and inspect.isclass(getattr(module, name, None))
        }
        # All that have none of their own, before the first is added: it is inherited.
        without = [
            (class_, inspect.signature(found))
            for class_, found in public.values()
            if "__init__" not in class_.all_members and not inspect.isabstract(found)
        ]
        for class_, signature in without:
            add_constructor(class_, signature)
        for name, member in pkg.members.items():
            found = getattr(package, name, None)
            is_made = inspect.isclass(getattr(found, "__wrapped__", None))
            if member.is_alias and is_made:
                add_function(pkg, member.target_path, found)


def add_function(pkg: griffe.Module, path: str, public: Any) -> None:
    """Adds a function that is made from a class, whose fields are its parameters."""
    cls = public.__wrapped__
    class_ = pkg[f"{cls.__module__}.{cls.__name__}".removeprefix(f"{pkg.name}.")]
    fields = fields_of(class_)
    parameters = [
        griffe.Parameter(
            name,
            annotation=ALIASES.get(str(fields[name].annotation))
            or fields[name].annotation,
            kind=KINDS[parameter.kind],
            default=default_of(fields[name], parameter) or repr(parameter.default),
        )
        for name, parameter in inspect.signature(public).parameters.items()
    ]
    function = griffe.Function(
        public.__name__,
        parameters=griffe.Parameters(*parameters),
        docstring=class_.docstring,
    )
    pkg.set_member(path.removeprefix(f"{pkg.name}."), function)


def fields_of(class_: griffe.Class) -> dict[str, griffe.Attribute]:
    """The fields of a class and of its bases."""
    return {
        name: field
        for owner in (*reversed(class_.mro()), class_)
        for name, field in owner.members.items()
        if field.is_attribute
    }


def add_constructor(class_: griffe.Class, signature: inspect.Signature) -> None:
    """Adds `__init__`, with annotations and defaults as they are written."""
    names = signature.parameters
    if any(name.startswith("_") for name in names):
        # Made by a function, and not by users.
        return
    fields = fields_of(class_)
    parameters = [
        griffe.Parameter(
            name,
            annotation=fields[name].annotation,
            kind=KINDS[parameter.kind],
            default=default_of(fields[name], parameter),
        )
        for name, parameter in names.items()
    ]
    own = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    init = griffe.Function("__init__", parameters=griffe.Parameters(own, *parameters))
    class_.set_member("__init__", init)


def default_of(
    field: griffe.Attribute, parameter: inspect.Parameter
) -> griffe.Expr | str | None:
    """The default of a field, also where it is given to `eqx.field`."""
    if parameter.default is inspect.Parameter.empty:
        return None
    value = field.value
    if isinstance(value, griffe.ExprCall) and str(value.function).endswith("field"):
        settings = [x for x in value.arguments if isinstance(x, griffe.ExprKeyword)]
        given = {setting.name: setting.value for setting in settings}
        if given.get("default_factory") is not None:
            return f"{given['default_factory']}()"
        return given.get("default", repr(parameter.default))
    return value
