import pytest

from engine.request import Request
from engine.scheduler.request_queue import RequestQueue
from tests.engine.scheduler.device import make_request


def waiting(*orders: int) -> tuple[RequestQueue, dict[int, Request]]:
    queue = RequestQueue()
    requests = {}
    for order in orders:
        requests[order] = make_request(f"r{order}", range(order + 1))
        requests[order].order = (0, 0.0, order)
        queue.push(requests[order])
    return queue, requests


def test_requests_come_out_by_their_order():
    queue, requests = waiting(2, 0, 1)
    assert queue.peek() is requests[0]
    assert [queue.pop() for _ in range(3)] == [requests[0], requests[1], requests[2]]
    assert not queue
    with pytest.raises(IndexError):
        queue.pop()


def test_a_removed_request_never_comes_out():
    queue, requests = waiting(0, 1, 2)
    queue.remove(requests[0])
    queue.remove(requests[1])
    assert len(queue) == 1
    assert list(queue) == [requests[2]]
    assert queue.peek() is requests[2]
    with pytest.raises(KeyError):
        queue.remove(requests[1])


def test_a_request_that_was_taken_can_be_put_back():
    queue, requests = waiting(0, 1)
    queue.push(queue.pop())
    assert [queue.pop(), queue.pop()] == [requests[0], requests[1]]


def test_a_request_that_was_removed_can_come_back():
    queue, requests = waiting(0, 1, 2)
    for _ in range(2):
        queue.remove(requests[1])
        queue.push(requests[1])
    assert (len(queue), sorted(queue, key=lambda request: request.order)) == (3, list(requests.values()))
    assert [queue.pop() for _ in range(3)] == [requests[0], requests[1], requests[2]]
    assert not queue


def test_tokens_of_those_that_wait_are_counted():
    queue, requests = waiting(0, 1, 2)
    assert queue.num_tokens == 1 + 2 + 3
    queue.remove(requests[1])
    queue.pop()
    assert queue.num_tokens == 3
    requests[2].token_ids.append(9)
    queue.grow(1)
    queue.pop()
    assert queue.num_tokens == 0


def test_removed_requests_do_not_pile_up():
    queue, requests = waiting(*range(1000))
    for order in range(1, 1000):
        queue.remove(requests[order])
    assert len(queue._heap) < 200
    assert queue.pop() is requests[0]
