"""Error messages for invalid lines of JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def line_problem(problem: ErrorDetails) -> str:
    """Describe an error of pydantic: the faulty field, if known, and the fault. The message leaves out pydantic's line
    number, which counts within one line of the file.
    """
    field = ".".join(str(part) for part in problem["loc"])
    match problem["type"]:
        case "json_invalid":
            reason = str(problem["ctx"]["error"]).partition(" at line ")[0]
            return f"not JSON ({reason}); give one object on each line"
        case "missing":
            return f"{field}: this field is required; add it"
        case "value_error" if not field:
            return problem["msg"].removeprefix("Value error, ")
        case _:
            return f"{field or 'line'}: {problem['msg'].removeprefix('Value error, ')}"
