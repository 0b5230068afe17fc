"""Decides which head a process of the cluster follows: one at a time, and never a head that was
replaced.

Each head of a cluster has an epoch. A standby that takes over has the epoch of the lost head plus
one. A part that has heard of an epoch refuses every head of an earlier one.
"""

from __future__ import annotations

from moonpool.protocol.frames import HeadAddress, Leadership


class KnownHeads:
    """The addresses to try in turn, and the highest epoch heard of."""

    def __init__(self, is_fixed: bool = False) -> None:
        """`is_fixed`: whether only the first address is tried, as a standby does, which has the
        next address."""
        self._is_fixed = is_fixed
        self.epoch = 0
        self._addresses: list[HeadAddress] = []
        self._at = 0

    @property
    def address(self) -> HeadAddress:
        """The address to connect to now. Call `begin` before this method."""
        return self._addresses[self._at]

    def begin(self, host: str, port: int) -> None:
        """Starts with this address, unless heads are known already."""
        if not self._addresses:
            self._addresses = [HeadAddress(host=host, port=port)]

    def next_address(self) -> None:
        """Goes on to the next address, because no head serves at the present one."""
        self._at = (self._at + 1) % len(self._addresses)

    def accept_leader(self, leadership: Leadership) -> bool:
        """Handles the message in which the head at `address` describes itself. Returns False if it
        was replaced."""
        if leadership.epoch < self.epoch:
            return False
        self.epoch = leadership.epoch
        if self._is_fixed:
            return True
        present = self.address
        others = [known for known in leadership.standbys if known != present]
        self._addresses, self._at = [present, *others], 0
        return True

    def lead_elsewhere(self, leadership: Leadership) -> None:
        """Handles a notice of the present head that a head of a later epoch has replaced it."""
        self.epoch = leadership.epoch
        self._addresses, self._at = list(leadership.standbys), 0
