"""Whether the hub answers, found out before its client waits for it.

The client repeats failed connections for 36 s, and some of its requests have no time limit at all. That suits failures
of a network that exists, and not a machine without one.
"""

from __future__ import annotations

import time
from threading import Thread

#: Attempts to connect, and the seconds between them, so that one lost packet or answer of a name server isn't the end.
_TRIES, _PAUSE = 3, 1.0
#: The seconds after which a connection that is neither made nor refused counts as none.
_LIMIT = 8.0


def hub_unreachable() -> str | None:
    """Return why this machine has no connection to the hub; None if it has one, whatever the hub answers."""
    from huggingface_hub import constants  # its import takes a tenth of a second

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    reasons: list[str | None] = [f"no connection to {constants.ENDPOINT} within {_LIMIT:g} s"]
    # A name server or a firewall may be silent for minutes, which no limit of the client's ends.
    asking = Thread(target=lambda: reasons.append(_refused(constants.ENDPOINT)), daemon=True)
    asking.start()
    asking.join(_LIMIT)
    return reasons[-1]


def _refused(address: str) -> str | None:
    """Why no attempt to connect succeeds; None if one does."""
    reason = None
    for attempt in range(_TRIES):
        time.sleep(_PAUSE if attempt else 0)
        reason = _connect(address)
        if reason is None:
            return None
    return f"no connection to {address}: {reason}"


def _connect(address: str) -> str | None:
    import httpx
    from huggingface_hub import get_session

    try:  # half of the limit, so that the thread is awaited for longer than a server that is silent
        get_session().head(address, timeout=_LIMIT / 2, follow_redirects=False)
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.UnsupportedProtocol) as error:
        return str(error)
    except (ImportError, ValueError) as error:  # of a proxy whose protocol the client lacks
        return str(error)
    except httpx.HTTPError:  # of an answer, or of its absence from a server that was reached
        return None
    return None
