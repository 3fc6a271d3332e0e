"""Hosts that the gateway's owner allows: this machine, networks, and names.

Invariant: names are not resolved. So a name allows only engines whose URL has this name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from libra.config.listeners import is_local

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    networks: tuple[IPv4Network | IPv6Network, ...] = ()
    names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, given: tuple[str, ...]) -> AllowedHosts:
        """Parse addresses, networks such as 10.0.0.0/8, and host names. Raises `ValueError` for anything else."""
        networks, names = [], []
        for each in given:
            try:
                networks.append(ip_network(each, strict=False))
            except ValueError:
                if not _NAME.fullmatch(each) or each.replace(".", "").isdigit():
                    raise ValueError(
                        f"{each!r} is not a host: give an address, a network such as 10.0.0.0/8, or a name"
                    ) from None
                names.append(each.lower())
        return cls(tuple(networks), frozenset(names))

    def __contains__(self, host: str) -> bool:
        """Whether a host, given as address or name, is allowed."""
        try:
            address = ip_address(host)
        except ValueError:
            return is_local(host) or host.lower() in self.names
        mapped = getattr(address, "ipv4_mapped", None)
        found = address if mapped is None else mapped
        return found.is_loopback or any(found in network for network in self.networks)
