"""How the main thread leaves a run that failed: what it prints, what the other ranks hear, and the exit status."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback

import torch.distributed as dist

from fbt_megatron.errors import FBTError, PeerError
from fbt_megatron.training.watchdog import Watchdog, explain

_LOST = re.compile(
    r"gloo/transport/.*(closed|reset by peer|Broken pipe|timed out|refused|No route)|ncclRemoteError", re.IGNORECASE
)
"""What torch.distributed says when the other end of a connection is gone. It has no exception class for it."""


def leave(error: Exception, watchdog: Watchdog) -> int:
    """Say what went wrong, and tell the other ranks where this one fails alone; returns the exit status.

    Groups are not torn down: a rank that failed on its own would wait for the others there.
    """
    watchdog.stop()
    with contextlib.suppress(OSError):  # a full disk must change neither the exit status nor what the others hear
        sys.stdout.flush()
    launch, roll_call = watchdog.launch, watchdog.roll_call
    if isinstance(error, FBTError):
        launch.report(error)
        # Most are raised on all ranks together. A launcher ends the others as soon as one has ended, so all wait until
        # each has had its say.
        if roll_call is not None and not roll_call.leave_together():
            roll_call.call("failed", f"{type(error).__name__}: {error}")
            roll_call.see_off()
        return error.exit_status
    if roll_call is not None and is_lost_connection(error):
        own = roll_call.call("lost", str(error).splitlines()[0])
        heard = roll_call.heard() or own
        peer_error = PeerError(explain(heard, roll_call))
        launch.report(peer_error)
        if heard.kind == "failed":
            roll_call.see_off()
        return peer_error.exit_status
    trace = "".join(traceback.format_exception(error))
    launch.say(f"{launch.label and f'on {watchdog.host}: '}{trace}")
    if roll_call is not None:
        text = " ".join("".join(traceback.format_exception_only(error)).split())
        roll_call.call("failed", text if text.endswith(".") else f"{text}.")
        roll_call.see_off()
    return 1


def is_lost_connection(error: Exception) -> bool:
    """Whether the failure is that another process is gone."""
    return isinstance(error, dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
    )
