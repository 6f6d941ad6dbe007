"""A memory of names that stays small."""


class Generations:
    """A set that forgets: the elder half goes when the younger is full.

    One at a time would cost more: a dict whose first keys were taken away is searched for the next one.
    """

    __slots__ = ("_elder", "_size", "_younger")

    def __init__(self, size: int) -> None:
        self._size = size
        self._younger: set[str] = set()
        self._elder: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._younger or name in self._elder

    def __len__(self) -> int:
        return len(self._younger) + len(self._elder)

    def add(self, name: str) -> bool:
        """Remember `name`; False if it was known."""
        younger = self._younger
        if name in younger or name in self._elder:
            return False
        younger.add(name)
        if len(younger) >= self._size:
            self._elder, self._younger = younger, set()
        return True

    def discard(self, name: str) -> None:
        """Forget `name`."""
        self._younger.discard(name)
        self._elder.discard(name)
