"""Messages for lines of JSON that are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def line_problem(problem: ErrorDetails) -> str:
    """Describe an error of pydantic: the field at fault, if any, and the fault. Pydantic counts lines within its input,
    here always 1 or 2, so the line number is left out."""
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
