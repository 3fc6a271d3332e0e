"""The file of `libra route` for engines that are started by command lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from libra.export.serve_line import ServeLine


def gateway_file(
    lines: Sequence[ServeLine], router: str, url: Callable[[ServeLine], str] = lambda it: f"http://{it.host}:{it.port}"
) -> dict[str, object]:
    """The file, with engines, buckets and policy; hosts are placeholders unless `url` gives addresses. Raises
    ValueError for an engine without a longest context, or an engine of a pair without its partner.
    """
    for line in lines:
        if line.up_to is None:
            raise ValueError(f"max_model_len of {line.name} is missing: the router needs it; add it to the file")
    engines = [
        {"name": it.name, "url": f"{url(it)}/v1", "max_model_len": it.up_to, "bucket": it.bucket} for it in lines
    ]
    limits = sorted({it.up_to for it in lines if it.up_to is not None})
    if len({it.bucket for it in lines}) == 1:
        limits = limits[-1:]
    return {"engines": engines, "limits": limits, "route": router}
