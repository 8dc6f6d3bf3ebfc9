# SPDX-License-Identifier: Apache-2.0
"""Texts for users: lists of problems, suggestions, warnings, packages to install, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from shardax._core import checks, errors, text
from shardax.partition import errors as partition_errors


def raise_if_any(
    error: type[Exception] | Callable[[str], Exception],
    problems: Sequence[str],
    head: str,
    tail: str = "",
    *,
    separator: str = ", ",
    most: int = 8,
) -> None:
    """Raises one error that lists problems, if there are any.

    Args:
        error: The class of the error, or a function from the text to the error.
        problems: The problems, such as paths, in the order in which they are listed.
        head: The text before the list.
        tail: The text after the list.
        separator: The text between two problems.
        most: How many problems are listed; the text says how many more there are.

    Raises:
        Exception: ``error``, if there are problems.

    Example:
        >>> from shardax import extend
        >>> extend.raise_if_any(ValueError, [], "Missing are: ")
        >>> extend.raise_if_any(ValueError, [".up.kernel", ".bias"], "Missing are: ", ".")
        Traceback (most recent call last):
        ValueError: Missing are: .up.kernel, .bias.
    """
    checks.raise_if_any(error, problems, head, tail, separator=separator, most=most)


def join_first(names: Sequence[str], separator: str = ", ", most: int = 8) -> str:
    """Returns the first names as one text, with the number of the others.

    Args:
        names: The names.
        separator: The text between two names.
        most: How many names the text has.

    Returns:
        The text, such as ``"a, b and 3 more"``.

    Example:
        >>> from shardax import extend
        >>> extend.join_first(["a", "b", "c"], most=2)
        'a, b and 1 more'
    """
    return errors.first_of(names, separator, most)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns a sentence that suggests the most similar known name.

    Args:
        name: The name that is not known.
        names: The known names.

    Returns:
        The sentence, with a space before it, to append to the text of an error; ``""`` if no known
        name is similar.

    Example:
        >>> from shardax import extend
        >>> print("There is no rule for 'embd'." + extend.did_you_mean("embd", ["embed", "mlp"]))
        There is no rule for 'embd'. Did you mean 'embed'?
    """
    return partition_errors.did_you_mean(name, names)


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the user's program that called the library.

    Python shows a warning once for each line of source; of a line inside of the library all users
    would share one.

    Args:
        message: The text.
        category: The class of the warning.

    Example:
        >>> import warnings
        >>> from shardax import extend
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     extend.warn_user("The router drops tokens.")
        >>> str(caught[0].message)
        'The router drops tokens.'
    """
    errors.warn(message, category)


def needs_package(subject: str, package: str) -> AbstractContextManager[None]:
    """Returns a context manager whose ``ImportError`` names the package to install.

    Args:
        subject: What needs the package, as the text begins.
        package: What ``pip install`` is given.

    Returns:
        The context manager, for a ``with`` block around an import.

    Raises:
        ImportError: In the block, if the import fails.

    Example:
        >>> from shardax import extend
        >>> with extend.needs_package("This tokenizer", "no_such_package"):
        ...     import no_such_package
        Traceback (most recent call last):
        ImportError: This tokenizer needs no_such_package: pip install 'no_such_package'.
    """
    return errors.naming_package(subject, package)


def align_columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Returns the lines of a table whose columns are aligned by spaces.

    Args:
        rows: The cells of each row; all rows have the same number.
        right: Positions of the columns that are aligned on the right.

    Returns:
        One line for each row, without trailing spaces.

    Example:
        >>> from shardax import extend
        >>> for line in extend.align_columns([["path", "size"], [".kernel", "16"]], right=[1]):
        ...     print(line)
        path     size
        .kernel    16
    """
    return text.columns(rows, right)
