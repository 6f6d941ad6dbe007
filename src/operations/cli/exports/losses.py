"""What an export could not say."""

from dataclasses import dataclass

from operations.types import JSONObject


@dataclass(frozen=True, slots=True)
class Loss:
    """One thing that the other side has no words for."""

    operation_id: str

    place: str
    """Where: a JSON pointer into the input schema, or `name`, `description`, `type`."""

    what: str
    """What became of it."""

    def to_json(self) -> JSONObject:
        """For scripts."""
        return {"operationId": self.operation_id, "place": self.place, "what": self.what}
