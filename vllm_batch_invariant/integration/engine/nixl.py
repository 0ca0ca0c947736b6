"""Keys and values that an engine reads from the memory of another one, by vLLM's NIXL connector: prefill on one engine,
decode on the other.

The engine of a prompt hands over the places of its pages, and under which key they were computed
(:func:`.kv_connectors.key_of`). The engine of the answer reads what has its own key, and computes every other prompt
itself: of plain vLLM, of another release, of other weights, or handed over by a router that drops the key.

Pages are let go of when they have been read once. A second reader of one request (``n`` above 1, or a router that asks
again elsewhere) would find what others have written since: a reader asks whether it is the first, and else computes.
They stay where they are for the time of a lease, which the reader prolongs while its request waits. vLLM's reader does
not look whether a lease had run out while it read, and pages may be another request's by then: here it does, and the
load has failed, which ends the request or has its prompt computed, as vLLM is told (``kv_load_failure_policy``).
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import cache, wraps
from threading import Thread
from typing import Any

import zmq

from ..reviews import patch_points
from ..side_table import beside

logger = logging.getLogger("vllm.batch_invariant")

KEY, LEASE, ASK = "batch_invariant_key", "batch_invariant_lease", "batch_invariant_ask"
"""What a request's ``kv_transfer_params`` have beside vLLM's: the key, the seconds of a lease, and whom to ask."""
_PATIENCE_MS = 3000
_UNTIL = "remote_blocks_expiry_time"
"""vLLM's own, which it fills in for the other direction alone: on the clock of the engine that has the pages."""
_MARGIN = 2.0
"""Seconds that clocks may be apart, and a message be on its way."""


@cache
def complete() -> None:
    """Complete vLLM's classes in this process. Idempotent."""
    connector, worker = patch_points.NIXL_CONNECTOR.get(), patch_points.NIXL_WORKER.get()
    connector.get_num_new_matched_tokens = by_key(connector.get_num_new_matched_tokens)
    for name in ("request_finished", "request_finished_all_groups"):
        setattr(connector, name, with_key(getattr(connector, name)))
    connector.update_connector_output = let_go(connector.update_connector_output)
    worker._send_heartbeats = noted(worker._send_heartbeats)
    worker._pop_done_transfers = in_time(worker._pop_done_transfers)


def by_key(matched: Callable[..., tuple[int | None, bool]]) -> Callable[..., tuple[int | None, bool]]:
    """vLLM's method that counts what a request that is first scheduled reads: nothing of another key."""

    @wraps(matched)
    def get_num_new_matched_tokens(self: Any, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        params, kept = request.kv_transfer_params or {}, beside(self)
        if not kept.kv_key:
            raise RuntimeError("a KV connector has no key: nothing is handed over or read without one")
        if params.get("do_remote_decode"):
            kept.kv_begun.setdefault(request.request_id, kept.kv_key)
        if params.get("do_remote_prefill") and (why := _why_not(self, request.request_id, params)):
            _warn_once(str(params.get("remote_engine_id")), why)
            params["do_remote_prefill"] = False
            self.connector_scheduler._stop_heartbeat(request.request_id)
        return matched(self, request, num_computed_tokens)

    return get_num_new_matched_tokens


def _why_not(connector: Any, request_id: str, params: dict[str, Any]) -> str:
    """Why the pages of a prompt are not read; empty: they are."""
    kept = beside(connector)
    if KEY not in params:
        return "come without the mode's key"
    if params[KEY] != kept.kv_key:
        return "may have other bits"
    if params.get(LEASE) != _lease(connector):
        return "have a lease of other seconds (kv_lease_duration)"
    if request_id not in kept.kv_taken and not take(str(params.get(ASK)), str(params.get("remote_request_id"))):
        return "have been read or let go of, or it does not say"
    kept.kv_taken.add(request_id)
    return ""


def _lease(connector: Any) -> int:
    return int(connector.connector_scheduler._kv_lease_duration)


@cache
def _warn_once(engine: str, why: str) -> None:
    logger.warning("Keys and values of engine %s %s: its prompts are computed here.", engine, why)


def with_key(finish: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's method that says of a request that has ended where its pages are."""

    @wraps(finish)
    def request_finished(self: Any, request: Any, block_ids: Any) -> Any:
        kept = beside(self)
        begun = kept.kv_begun.pop(request.request_id, None)
        kept.kv_taken.discard(request.request_id)
        delays, params = finish(self, request, block_ids)
        if params and params.get("do_remote_prefill"):
            params[KEY] = begun if begun == kept.kv_key else ""  # weights were replaced meanwhile
            params[LEASE] = _lease(self)
            params[_UNTIL] = self.connector_scheduler._reqs_need_send.get(request.request_id)
            kept.kv_handed = kept.kv_handed or Handed(self.connector_scheduler.side_channel_host)
            params[ASK] = kept.kv_handed.offer(request.request_id)
        return delays, params

    return request_finished


class Handed:
    """What an engine has handed over and nobody has taken. A thread gives each away once.

    Args:
        host: by which others reach this engine.
    """

    def __init__(self, host: str) -> None:
        self._offered: set[bytes] = set()
        self._socket: Any = zmq.Context.instance().socket(zmq.REP)
        place = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        self._socket.setsockopt(zmq.IPV6, ":" in host)
        self._address = f"{place}:{self._socket.bind_to_random_port(place)}"
        Thread(target=self._give, name="batch_invariant_handed", daemon=True).start()

    def offer(self, request_id: str) -> str:
        """Where to ask for a request's pages."""
        self._offered.add(request_id.encode())
        return self._address

    def withdraw(self, request_id: str) -> None:
        """Its pages are let go of."""
        self._offered.discard(request_id.encode())

    def _give(self) -> None:
        while True:
            name = self._socket.recv()
            is_first = name in self._offered
            self._offered.discard(name)
            self._socket.send(b"yes" if is_first else b"no")


def take(address: str, request_id: str) -> bool:
    """Ask the engine at an address of :class:`Handed` for a request's pages: whether nobody has had them."""
    asking: Any = zmq.Context.instance().socket(zmq.REQ)
    with asking:
        for option, number in ((zmq.LINGER, 0), (zmq.SNDTIMEO, _PATIENCE_MS), (zmq.RCVTIMEO, _PATIENCE_MS)):
            asking.setsockopt(option, number)
        asking.setsockopt(zmq.IPV6, "[" in address)
        try:
            asking.connect(address)
            asking.send(request_id.encode())
            return asking.recv() == b"yes"
        except zmq.ZMQError:
            return False


def let_go(update: Callable[..., None]) -> Callable[..., None]:
    """vLLM's method that is told what has been sent, or whose lease has run out."""

    @wraps(update)
    def update_connector_output(self: Any, connector_output: Any) -> None:
        if handed := beside(self).kv_handed:
            for request_id in connector_output.finished_sending or ():
                handed.withdraw(request_id)
        update(self, connector_output)

    return update_connector_output


def noted(send: Callable[..., None]) -> Callable[..., None]:
    """vLLM's method that prolongs leases, noting when."""

    @wraps(send)
    def _send_heartbeats(self: Any, metadata: Any) -> None:
        engines, beats, now = metadata.heartbeat_by_engine, beside(self).kv_beats, time.perf_counter()
        if engines:
            waiting = {name for engine in engines.values() for name in engine.req_ids}
            waiting |= {meta.remote.request_id for meta in self._recving_metadata.values() if meta.remote}
            for name in beats.keys() - waiting:
                del beats[name]
        for name, engine in engines.items():
            if name in self._remote_agents:  # to others vLLM cannot send yet
                for request in engine.req_ids:
                    beats.setdefault(request, []).append(now)
        send(self, metadata)

    return _send_heartbeats


def in_time(pop: Callable[..., tuple[set[str], set[str]]]) -> Callable[..., tuple[set[str], set[str]]]:
    """vLLM's method that finds the transfers that have ended, of which those that were too late have failed."""

    @wraps(pop)
    def _pop_done_transfers(self: Any, transfers: Any) -> tuple[set[str], set[str]]:
        done, failed = pop(self, transfers)
        if transfers is self._recving_transfers:
            for name in done - failed:
                if (meta := self._recving_metadata.get(name)) is None or _was_in_time(self, meta):
                    continue
                logger.warning("Keys and values of request %s were read when their lease may have run out.", name)
                self.xfer_stats.record_kv_expired_req()
                failed.add(name)
        return done, failed

    return _pop_done_transfers


def _was_in_time(worker: Any, meta: Any) -> bool:
    remote = meta.remote
    if not any(meta.local_block_ids):
        return True  # nothing was read
    beats = beside(worker).kv_beats.pop(remote.request_id, ())
    if remote.blocks_expiry_time is None:
        return False
    until = remote.blocks_expiry_time - worker._engine_clock_offset[remote.engine_id]
    return time.perf_counter() < lease_end(until, beats, worker._lease_extension) - _MARGIN


def lease_end(until: float, beats: Sequence[float], prolongs: float) -> float:
    """When a lease ends that ends at ``until`` without heartbeats, each of which makes it last so many seconds from
    then on if it came before the end, in seconds of one clock.
    """
    for beat in beats:
        if beat < until - _MARGIN:
            until = max(until, beat + prolongs)
    return until
