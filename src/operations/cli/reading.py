"""JSON that others wrote, read without trusting its shape."""

from operations._json import list_of, object_of
from operations.types import JSONObject


def faults_of(details: object) -> list[JSONObject]:
    """The failures that the details of a `VALIDATION_ERROR` name."""
    return [object_of(fault) for fault in list_of(object_of(details).get("errors"))]
