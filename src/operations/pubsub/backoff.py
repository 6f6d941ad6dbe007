"""How long to wait before connecting again."""

from secrets import SystemRandom

_random = SystemRandom()

_FIRST = 0.05
_SOON = 0.6
_LATE = 5.0
_PATIENT_ATTEMPTS = 32


def reconnect_delay(attempt: int) -> float:
    """Seconds to wait before attempt number `attempt`, counted from 0: random, so that clients spread out.

    Short at first, so that a broker that restarts is found within a second; after about ten seconds
    of trying the delays grow, so that hundreds of clients do not come back in one moment.
    """
    ceiling = _SOON if attempt < _PATIENT_ATTEMPTS else _LATE
    # The exponent is bounded because a float is not.
    return _random.uniform(0, min(ceiling, _FIRST * 2 ** min(attempt, 10)))
