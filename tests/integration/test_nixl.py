"""What an engine reads of another one's memory, as vLLM's NIXL connector is put right. The connector and its parts are
fakes here; ``tests/engine/test_nixl.py`` has real ones.
"""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_batch_invariant.integration.engine import nixl
from vllm_batch_invariant.integration.side_table import beside

READ = {"do_remote_prefill": True, "remote_engine_id": "one", "remote_request_id": "theirs"}
READ |= {nixl.KEY: "mine", nixl.LEASE: 30}


class Connector:
    """Of an engine's scheduler."""

    def __init__(self, key: str = "mine", lease: int = 30) -> None:
        self.stopped: list[str] = []
        self.connector_scheduler = SimpleNamespace(
            _kv_lease_duration=lease,
            _reqs_need_send={},
            _stop_heartbeat=self.stopped.append,
            side_channel_host="127.0.0.1",
        )
        beside(self).kv_key = key

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        request.told = dict(request.kv_transfer_params or {})
        return 7 - computed, True

    def finish(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if not request.kv_transfer_params:
            return False, None
        self.connector_scheduler._reqs_need_send[request.request_id] = 77.0
        return True, {"do_remote_prefill": request.kv_transfer_params["do_remote_decode"]}

    get_num_new_matched_tokens = nixl.by_key(matched)
    request_finished = nixl.with_key(finish)
    update_connector_output = nixl.let_go(lambda self, output: None)


def request(**params: Any) -> Any:
    return SimpleNamespace(request_id="a", kv_transfer_params=params or None)


@pytest.mark.parametrize(
    ("changes", "reads", "said"),
    [
        ({}, True, ""),
        ({nixl.KEY: "another"}, False, "may have other bits"),
        ({nixl.KEY: ""}, False, "may have other bits"),
        ({nixl.KEY: None}, False, "may have other bits"),
        ({nixl.LEASE: 60}, False, "have a lease of other seconds"),
        ({"remote_request_id": "another"}, False, "have been read or let go of"),
        ({nixl.ASK: "tcp://127.0.0.1:1"}, False, "or it does not say"),
        ({nixl.ASK: None}, False, "or it does not say"),
    ],
)
def test_what_has_another_key_is_computed(
    changes: dict[str, Any], reads: bool, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    nixl._warn_once.cache_clear()
    giver = nixl.Handed("127.0.0.1")
    for _ in range(3):
        asked, connector = request(**READ | {nixl.ASK: giver.offer("theirs")} | changes), Connector()
        assert connector.get_num_new_matched_tokens(asked, 3) == (4, True)
        assert asked.told["do_remote_prefill"] is reads
        assert connector.stopped == [] if reads else ["a"]
    assert len(caplog.records) == (not reads)
    assert said in caplog.text


def test_what_comes_without_a_key_is_computed(caplog: pytest.LogCaptureFixture) -> None:
    nixl._warn_once.cache_clear()
    asked = request(do_remote_prefill=True, remote_engine_id="plain")
    Connector().get_num_new_matched_tokens(asked, 0)
    assert not asked.told["do_remote_prefill"]
    assert "engine plain come without the mode's key" in caplog.text


def test_requests_of_one_engine_pass_and_without_a_key_of_its_own_none_does() -> None:
    asked = request()
    Connector().get_num_new_matched_tokens(asked, 0)
    assert asked.told == {}
    assert Connector().request_finished(asked, [1]) == (False, None)
    with pytest.raises(RuntimeError, match="has no key"):
        Connector(key="").get_num_new_matched_tokens(asked, 0)


def test_pages_are_handed_over_under_the_key_that_they_began_and_ended_under() -> None:
    connector, asked = Connector(lease=12), request(do_remote_decode=True)
    connector.get_num_new_matched_tokens(asked, 0)
    handed = connector.request_finished(asked, [1])[1]
    assert nixl.take(handed.pop(nixl.ASK), "a")
    assert handed == {"do_remote_prefill": True, nixl.KEY: "mine", nixl.LEASE: 12, "remote_blocks_expiry_time": 77.0}
    connector.get_num_new_matched_tokens(asked, 0)
    beside(connector).kv_key = "of new weights"
    assert connector.request_finished(asked, [1])[1][nixl.KEY] == ""
    assert not beside(connector).kv_begun


def test_pages_are_given_once_and_not_when_they_are_let_go_of() -> None:
    """Of one request with several samples, or one that a router sends to a second engine, others compute."""
    giver, asked = Connector(), request(do_remote_decode=True)
    giver.get_num_new_matched_tokens(asked, 0)
    handed = giver.request_finished(asked, [1])[1] | {"remote_request_id": "a", "remote_engine_id": "one"}
    reader, other = Connector(), Connector()
    samples = [SimpleNamespace(request_id=name, kv_transfer_params=dict(handed)) for name in ("first", "second")]
    elsewhere = SimpleNamespace(request_id="first", kv_transfer_params=dict(handed))
    for _ in range(2):  # a request is looked at until there is room
        for who, one in ((reader, samples[0]), (reader, samples[1]), (other, elsewhere)):
            who.get_num_new_matched_tokens(one, 0)
    assert [one.told["do_remote_prefill"] for one in (*samples, elsewhere)] == [True, False, False]
    assert beside(reader).kv_taken == {"first"}
    reader.request_finished(SimpleNamespace(request_id="first", kv_transfer_params=None), [1])
    assert not beside(reader).kv_taken
    giver.get_num_new_matched_tokens(asked, 0)
    late = giver.request_finished(asked, [1])[1]
    giver.update_connector_output(SimpleNamespace(finished_sending={"a"}))
    assert not nixl.take(late[nixl.ASK], "a")


@pytest.mark.parametrize(
    ("beats", "end"),
    [
        ([], 30),
        ([5], 30),  # what it makes is earlier than what is
        ([20], 40),
        ([5, 10, 15, 20, 25], 45),
        ([29], 30),  # it may have come too late
        ([31, 36], 30),
        ([20, 39, 41], 40),
        ([20, 37, 56], 57),
    ],
)
def test_a_heartbeat_prolongs_what_has_not_ended(beats: list[float], end: float) -> None:
    assert nixl.lease_end(30, beats, 20) == end


class Worker:
    """Of an engine that reads; transfers end when they are asked for."""

    _lease_extension = 20

    def __init__(self, until: float | None, clock: float = 0) -> None:
        now = time.perf_counter()
        expiry = None if until is None else now + clock + until
        remote = SimpleNamespace(request_id="theirs", engine_id="one", blocks_expiry_time=expiry)
        self._engine_clock_offset, self._remote_agents = {"one": clock}, {"one": object()}
        self._recving_metadata = {"a": SimpleNamespace(remote=remote, local_block_ids=([3, 4],))}
        self._recving_transfers, self.others, self.expired = {"a": []}, {"a": []}, 0
        self.xfer_stats = SimpleNamespace(record_kv_expired_req=self._expire)

    def _expire(self) -> None:
        self.expired += 1

    def pop(self, transfers: dict[str, Any]) -> tuple[set[str], set[str]]:
        return set(transfers), set()

    def send(self, metadata: Any) -> None:
        pass

    _pop_done_transfers = nixl.in_time(pop)
    _send_heartbeats = nixl.noted(send)


def waiting(*requests: str, engine: str = "one") -> Any:
    return SimpleNamespace(heartbeat_by_engine={engine: SimpleNamespace(req_ids=set(requests))} if requests else {})


@pytest.mark.parametrize(
    ("until", "clock", "beats", "failed"),
    [
        (30, 0, False, False),
        (30, 1e6, False, False),
        (-5, 0, False, True),
        (-5, -1e6, False, True),
        (1, 0, False, True),
        (2.5, 0, False, False),
        (None, 0, False, True),
        (-5, 0, True, True),
        (2.5, 0, True, False),
    ],
)
def test_a_read_that_ended_after_the_lease_has_failed(
    until: float | None, clock: float, beats: bool, failed: bool
) -> None:
    """On the clock of the engine that had the pages, which has another zero."""
    worker = Worker(until, clock)
    if beats:
        worker._send_heartbeats(waiting("theirs"))
    assert worker._pop_done_transfers(worker._recving_transfers) == ({"a"}, {"a"} if failed else set())
    assert worker.expired == failed
    assert worker._pop_done_transfers(worker.others) == ({"a"}, set()), "of what it sends it looks at nothing"


def test_a_read_of_nothing_has_not_failed() -> None:
    worker = Worker(None)
    worker._recving_metadata["a"].local_block_ids = ()
    assert worker._pop_done_transfers(worker._recving_transfers) == ({"a"}, set())


def test_heartbeats_are_noted_while_their_requests_wait() -> None:
    worker = Worker(30)
    worker._send_heartbeats(waiting("theirs", "another"))
    worker._send_heartbeats(waiting("third", engine="not there yet"))
    noted = beside(worker).kv_beats
    assert noted.keys() == {"theirs"}, "its read is under way"
    worker._send_heartbeats(waiting())
    worker._send_heartbeats(waiting("theirs"))
    assert len(noted["theirs"]) == 2
