"""Code mode: an agent writes a script, and every call in it obeys the same rules as a single call.

    registry.register_all(Code(registry))

`names` has the Python names of operations, `stubs` their types, `sandbox` the interpreter, `script` one script, and
`service` the operations `code.search` and `code.run`. Only the limits can be imported without the extra `code`.
"""

from typing import TYPE_CHECKING

from operations.base.lazy import lazily
from operations.code.config import CodeLimits, SavedScript

if TYPE_CHECKING:
    from operations.code.service import Code

__getattr__ = lazily(__name__, {"operations.code.service": "Code"})

__all__ = ["Code", "CodeLimits", "SavedScript"]
