"""Under which address other machines reach this one. Torch-free.

On many machines `/etc/hosts` gives the machine's own name a loopback address: others that use this name
would connect to themselves, and gloo, which asks for it too, would listen to nobody else.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

from titancli.errors import EnvironmentProblem

INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable with the network interface that gloo uses; it says which one others reach."""
SIOCGIFADDR = 0x8915  # of netdevice(7): the IPv4 address of an interface


def reachable() -> str:
    """Return the name of this machine, or an IPv4 address where its name means a loopback address.

    Raises:
        EnvironmentProblem: the interface that was set does not exist, or there are several to choose from.
    """
    for name in (socket.getfqdn(), socket.gethostname()):
        if _reached_by(name):
            return name
    interface = _interface()
    return "localhost" if interface is None else interface[1]


def variables() -> dict[str, str]:
    """Return what gloo needs in the environment of ranks to be reached by other machines.

    Raises:
        EnvironmentProblem: see `reachable`.
    """
    if os.environ.get(INTERFACE) or _reached_by(socket.gethostname()):
        return {}
    interface = _interface()
    return {} if interface is None else {INTERFACE: interface[0]}


def _reached_by(name: str) -> bool:
    """Return whether a name has an address other than loopback, as far as this machine knows."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(name, None)}
    except (OSError, UnicodeError):  # this machine does not know it, or DNS has no such names
        return False
    return not any(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)


def _interface() -> tuple[str, str] | None:
    """Return the network interface that others reach, and its address; None if there is no interface, so that
    all nodes are on this machine.

    Raises:
        EnvironmentProblem: see `reachable`.
    """
    known = _interfaces()
    if chosen := os.environ.get(INTERFACE):
        first = chosen.partition(",")[0]
        if first in known:
            return first, known[first]
        raise EnvironmentProblem(
            f"{INTERFACE} is {first!r}, which is no network interface of {socket.gethostname()} with an IPv4 "
            f"address",
            hint=f"use one of these: {_listed(known) or 'there are none'}",
        )
    others = {
        name: address for name, address in known.items() if not ipaddress.ip_address(address).is_loopback
    }
    if len(others) <= 1:
        return next(iter(others.items()), None)
    outwards = _default_address()
    for name, address in others.items():
        if address == outwards:
            return name, address
    raise EnvironmentProblem(
        f"the name {socket.gethostname()!r} has a loopback address here, which other machines cannot use, "
        f"and there are several network interfaces: {_listed(others)}",
        hint=f"set {INTERFACE} to the one that the other machines reach, or give the name its address in "
        "/etc/hosts",
    )


def _interfaces() -> dict[str, str]:
    """Return the IPv4 address of each network interface that is up and has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _default_address() -> str | None:
    """Return the address from which packets to other networks leave; send none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outwards:
        try:
            outwards.connect(("192.0.2.1", 9))  # an address of documentation, RFC 5737
        except OSError:  # there is no default route
            return None
        return str(outwards.getsockname()[0])


def _listed(interfaces: dict[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in interfaces.items())
